"""timing.json: what a runner measured of one model, and its file."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, get_args

from onnx_gconv.errors import DeployError
from onnx_gconv.fields import Complaint, Fields, read_json

FORMAT = 1
MALFORMED = Complaint(DeployError, "measure again with `onnx-gconv bench`", absent="make one with `onnx-gconv bench`")
DEVICE_KEYS = ("name", "compute_capability", "power_mode", "clocks_locked", "threads")
NEWER_DEVICE_KEY = "instructions"  # of a CPU: avx512, avx2, neon; files of before do not have it
RUN_KEYS = ("warmup", "iterations", "cuda_graph", "spin_wait", "data_transfers")

Kind = Literal["conv", "gather", "reformat", "other"]
Precision = Literal["fp32", "fp16", "int8"]
RunnerName = Literal["ort-cpu", "ort-cuda", "ort-tensorrt", "trtexec", "tensorrt", "tensorrt-rtx"]


@dataclass(frozen=True)
class Spread:
    """Milliseconds of many runs; a percentile is None where the tool does not give it."""

    min: float
    mean: float
    median: float
    p90: float | None
    p95: float | None
    p99: float | None
    max: float


@dataclass(frozen=True)
class MeasuredModel:
    """The file that was measured."""

    path: str
    sha256: str
    opset: int | None
    ir_version: int | None


@dataclass(frozen=True)
class LayerTime:
    """One layer of the model as the runtime has it; times are None where nothing was run."""

    name: str
    kind: Kind
    median_ms: float | None
    share: float | None


@dataclass(frozen=True)
class Timing:
    """One timing.json. `latency_ms` is None for a runner that builds and does not run."""

    runner: RunnerName
    versions: Mapping[str, str]
    device: Mapping[str, object]
    model: MeasuredModel
    precision: Precision
    shapes: Mapping[str, tuple[int, ...]]
    run: Mapping[str, object]
    latency_ms: Spread | None
    gpu_compute_ms: Spread | None
    throughput_qps: float | None
    layers: tuple[LayerTime, ...]
    summary: Mapping[str, float | None]
    warnings: tuple[str, ...]
    command: tuple[str, ...]

    @property
    def compared_ms(self) -> Spread | None:
        """What models are compared on: the GPU's own time, which the host does not disturb, where there is one."""
        return self.gpu_compute_ms or self.latency_ms

    def layer_counts(self) -> dict[str, int]:
        """Return how many layers there are of each kind."""
        return {kind: sum(layer.kind == kind for layer in self.layers) for kind in get_args(Kind)}

    def as_dict(self) -> dict[str, object]:
        """Return it as timing.json has it."""
        return {"format": FORMAT, **asdict(self)}

    def to_json(self) -> str:
        """Return the text of timing.json."""
        return json.dumps(self.as_dict(), indent=1, ensure_ascii=False) + "\n"


def read_timing(path: Path) -> Timing:
    """Return the timing in the file; every malformed field is named with its file."""
    return from_json(read_json(path, MALFORMED), str(path))


def from_json(data: object, path: str) -> Timing:
    """Return the timing that parsed JSON stands for; `path` is for the messages."""
    top = Fields(data, path, MALFORMED)
    if top.integer("format") != FORMAT:
        raise top.wrong(f"format {top.integer('format')} is not known", f"this version reads format {FORMAT}")
    model, shapes, versions = (top.inner(name) for name in ("model", "shapes", "versions"))
    summary = top.inner("summary")
    return Timing(
        runner=_one_of(top, "runner", get_args(RunnerName)),  # type: ignore[arg-type]
        versions={name: versions.string(name) for name in versions.names()},
        device=_device(top.inner("device")),
        model=MeasuredModel(
            model.string("path"), model.string("sha256"), *(_maybe_integer(model, name) for name in ("opset", "ir_version"))
        ),
        precision=_one_of(top, "precision", get_args(Precision)),  # type: ignore[arg-type]
        shapes={name: shapes.integers(name) for name in shapes.names()},
        run=_exactly(top.inner("run"), RUN_KEYS),
        latency_ms=_spread(top, "latency_ms"),
        gpu_compute_ms=_spread(top, "gpu_compute_ms"),
        throughput_qps=top.maybe_number("throughput_qps"),
        layers=tuple(_layer(row) for row in top.rows("layers")),
        summary={f"{kind}_ms": summary.maybe_number(f"{kind}_ms") for kind in get_args(Kind)},
        warnings=top.strings("warnings"),
        command=top.strings("command"),
    )


def _layer(row: Fields) -> LayerTime:
    kind: Kind = _one_of(row, "kind", get_args(Kind))  # type: ignore[assignment]
    return LayerTime(row.string("name"), kind, row.maybe_number("median_ms"), row.maybe_number("share"))


def _spread(top: Fields, field: str) -> Spread | None:
    if top.any(field) is None:
        return None
    values = top.inner(field)
    low, mean, median, high = (values.number(name) for name in ("min", "mean", "median", "max"))
    p90, p95, p99 = (values.maybe_number(name) for name in ("p90", "p95", "p99"))
    if not 0 <= low <= median <= high:
        raise values.wrong("min, median and max are out of order", MALFORMED.remedy)
    return Spread(low, mean, median, p90, p95, p99, high)


def _one_of(fields: Fields, field: str, allowed: tuple[str, ...]) -> str:
    value = fields.string(field)
    if value not in allowed:
        raise fields.wrong(f"{field!r} is {value!r}, not one of {', '.join(allowed)}", MALFORMED.remedy)
    return value


def _device(fields: Fields) -> dict[str, object]:
    newer = fields.any(NEWER_DEVICE_KEY) if NEWER_DEVICE_KEY in fields.names() else None
    return _exactly(fields, DEVICE_KEYS) | ({} if newer is None else {NEWER_DEVICE_KEY: newer})


def _exactly(fields: Fields, names: tuple[str, ...]) -> dict[str, object]:
    return {name: fields.any(name) for name in names}


def _maybe_integer(fields: Fields, field: str) -> int | None:
    return None if fields.any(field) is None else fields.integer(field)
