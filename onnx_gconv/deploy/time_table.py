"""The table of a sweep: what each layer shape takes with each number of groups on one device, and its file.

Entries are found by shape, not by model: two models on the same device share what they have in common.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from onnx_gconv.deploy.node_times import NodeTimes
from onnx_gconv.deploy.one_layer import LayerShape
from onnx_gconv.deploy.timing_file import MALFORMED, Timing
from onnx_gconv.errors import DeployError
from onnx_gconv.fields import Fields, read_json
from onnx_gconv.files import write_text
from onnx_gconv.model.shapes import Shape

FORMAT = 1
RUNTIMES = ("tensorrt", "tensorrt_rtx", "onnxruntime")  # among the versions of a timing: whose kernels were measured
NEWER = ("runtime", "instructions")  # keys of a bench that tables of before do not have


LEAST_SHARE = 0.01  # of what is measured that a layer takes, though all around it took as long without it: no time is 0


@dataclass(frozen=True)
class Bench:
    """What measured: times of another bench do not compare."""

    runner: str
    host: str | None  # as --host names it; None for this machine
    precision: str
    device: str
    threads: int | None
    power_mode: str | None
    runtime: str | None = None  # its name and version: kernels change between releases; None in tables of before
    instructions: str | None = None  # of a CPU: avx512, avx2, neon

    @classmethod
    def of(cls, timing: Timing, host: str | None) -> "Bench":
        device = timing.device
        threads, mode, instructions = device["threads"], device["power_mode"], device.get("instructions")
        return cls(
            timing.runner,
            host,
            timing.precision,
            str(device["name"]),
            threads if isinstance(threads, int) else None,
            mode if isinstance(mode, str) else None,
            next((f"{name} {timing.versions[name]}" for name in RUNTIMES if name in timing.versions), None),
            instructions if isinstance(instructions, str) else None,
        )


@dataclass(frozen=True)
class GatherTime:
    """What a Gather adds: anywhere, and between a Conv and the Add of a residual connection."""

    ms: float
    before_add_ms: float


@dataclass(frozen=True)
class TimeTable:
    """Milliseconds by layer shape and groups, by shape of a gathered tensor, and of whole models by their structure.

    A layer is timed with something around it; `frames` has what that takes alone, by the layer's input. All of them are as if the
    yardstick had taken `yardstick_ms` along with them.
    """

    bench: Bench
    yardstick_ms: float
    models: Mapping[str, float]
    layers: Mapping[LayerShape, Mapping[int, float]]
    gathers: Mapping[Shape, GatherTime]
    block: int | None = None  # the multiple of channels that makes a group fast there; None in tables of before
    frames: Mapping[Shape, float] = field(default_factory=dict)
    nodes: Mapping[str, NodeTimes] = field(default_factory=dict)  # by structure, where a model was profiled

    def with_block(self, block: int) -> "TimeTable":
        """Return a table that may be added to; layers of before were timed with other things around them, so they go."""
        return replace(self, block=block, layers={})

    def with_model(self, structure: str, milliseconds: float) -> "TimeTable":
        return replace(self, models={**self.models, structure: milliseconds})

    def with_nodes(self, structure: str, times: NodeTimes) -> "TimeTable":
        return replace(self, nodes={**self.nodes, structure: times})

    def with_layer(self, shape: LayerShape, by_groups: Mapping[int, float]) -> "TimeTable":
        return replace(self, layers={**self.layers, shape: {**self.layers.get(shape, {}), **by_groups}})

    def with_frame(self, tensor: Shape, milliseconds: float) -> "TimeTable":
        return replace(self, frames={**self.frames, tensor: milliseconds})

    def milliseconds(self, shape: LayerShape, groups: int) -> float | None:
        """Return what a Conv takes, None where that is not known."""
        framed = self.layers.get(shape, {}).get(groups)
        return None if framed is None else max(LEAST_SHARE * framed, framed - self.frames.get(shape.input, 0.0))

    def with_gather(self, tensor: Shape, time: GatherTime) -> "TimeTable":
        return replace(self, gathers={**self.gathers, tensor: time})


def write_table(table: TimeTable, path: Path) -> None:
    """Write the table, one entry a line."""
    layers = [{**asdict(shape), "ms": {str(groups): ms for groups, ms in times.items()}} for shape, times in table.layers.items()]
    gathers = [{"tensor": list(tensor), **asdict(time)} for tensor, time in table.gathers.items()]
    models = [{"structure": structure, "ms": ms, **_told(table.nodes.get(structure))} for structure, ms in table.models.items()]
    parts = [f'"format": {FORMAT}', f'"bench": {json.dumps(asdict(table.bench), ensure_ascii=False)}']
    parts.append(f'"yardstick_ms": {table.yardstick_ms}')
    parts += [f'"block": {table.block}'] if table.block is not None else []
    frames = [{"tensor": list(tensor), "ms": ms} for tensor, ms in table.frames.items()]
    for name, rows in (("models", models), ("layers", layers), ("frames", frames), ("gathers", gathers)):
        lines = ",\n  ".join(json.dumps(row) for row in rows)
        parts.append(f'"{name}": [\n  {lines}]' if rows else f'"{name}": []')
    write_text(path, "{" + ",\n ".join(parts) + "}\n")


def _told(times: NodeTimes | None) -> dict[str, object]:
    if times is None:
        return {}
    return {"convs_ms": times.convs_ms, "others_ms": {str(place): ms for place, ms in times.others_ms.items()}}


def read_table(path: Path) -> TimeTable:
    """Return the table in the file; every malformed field is named."""
    top = Fields(read_json(path, MALFORMED), str(path), MALFORMED)
    if "latency_ms" in top.names():
        raise DeployError(
            f"'{path}' is the timing of one model, not a table of layer times.",
            hint="make one with `onnx-gconv bench MODEL --sweep`",
        )
    if top.integer("format") != FORMAT:
        raise top.wrong(f"format {top.integer('format')} is not known", f"this version reads format {FORMAT}")
    bench = top.inner("bench")
    layers: dict[LayerShape, dict[int, float]] = {}
    for row in top.rows("layers"):
        times = row.inner("ms")
        layers[_shape(row)] = {_count(times, name, "number of groups", least=1): times.number(name) for name in times.names()}
    host, threads, mode = (bench.any(name) for name in ("host", "threads", "power_mode"))
    runtime, instructions = (
        bench.string(name) if name in bench.names() and bench.any(name) is not None else None for name in NEWER
    )
    return TimeTable(
        Bench(
            bench.string("runner"),
            None if host is None else bench.string("host"),
            bench.string("precision"),
            bench.string("device"),
            None if threads is None else bench.integer("threads"),
            None if mode is None else bench.string("power_mode"),
            runtime,
            instructions,
        ),
        top.number("yardstick_ms"),
        {row.string("structure"): row.number("ms") for row in top.rows("models")},
        layers,
        {row.integers("tensor"): GatherTime(row.number("ms"), row.number("before_add_ms")) for row in top.rows("gathers")},
        top.integer("block") if "block" in top.names() else None,
        {row.integers("tensor"): row.number("ms") for row in top.rows("frames")} if "frames" in top.names() else {},
        {row.string("structure"): _nodes(row) for row in top.rows("models") if "convs_ms" in row.names()},
    )


def _nodes(row: Fields) -> NodeTimes:
    others = row.inner("others_ms")
    return NodeTimes(
        row.number("convs_ms"), {_count(others, name, "place of a node"): others.number(name) for name in others.names()}
    )


def _shape(row: Fields) -> LayerShape:
    bias = row.any("bias")
    if not isinstance(bias, bool):
        raise row.wrong("'bias' must be true or false", MALFORMED.remedy)
    return LayerShape(
        input=row.integers("input"),
        out_channels=row.integer("out_channels"),
        kernel=row.integers("kernel"),
        strides=row.integers("strides"),
        pads=row.integers("pads"),
        dilations=row.integers("dilations"),
        auto_pad=row.string("auto_pad"),
        bias=bias,
        dtype=row.string("dtype"),
    )


def _count(fields: Fields, name: str, what: str, *, least: int = 0) -> int:
    if not name.isdecimal() or int(name) < least:
        raise fields.wrong(f"{name!r} is not a {what}", MALFORMED.remedy)
    return int(name)
