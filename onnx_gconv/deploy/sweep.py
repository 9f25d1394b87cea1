"""A sweep: time every layer of a model with every number of groups, once, on a device; what is known already is not timed again."""

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import onnx

from onnx_gconv.deploy.one_layer import LayerShape, gather_models, layer_model, layer_shape, yardstick_model
from onnx_gconv.deploy.time_table import Bench, GatherTime, TimeTable, read_table, write_table
from onnx_gconv.deploy.timing_file import Timing
from onnx_gconv.errors import DeployError
from onnx_gconv.listener import OnProgress
from onnx_gconv.model.network import Layer, Network
from onnx_gconv.model.shapes import Shape
from onnx_gconv.search.latency import LayerLatencies
from onnx_gconv.search.target import is_aligned

Measure = Callable[[Sequence[onnx.ModelProto]], list[Timing]]  # models that take turns, all inputs of fixed shape


@dataclass(frozen=True)
class Gauge:
    """Where to measure: how, its address (None for this machine), and the multiple of channels that makes a group fast."""

    measure: Measure
    host: str | None
    block: int


def sweep(model: onnx.ModelProto, network: Network, path: Path, *, device: Gauge, progress: OnProgress) -> TimeTable:
    """Return the table with every entry that this model needs; each one is in the file as soon as it is measured."""
    table = read_table(path) if path.exists() else None
    todo = _todo(model, network, device.block, table)
    for done, (label, models, enter) in enumerate(todo):
        progress(done, len(todo), label)
        timings = device.measure([yardstick_model(), *models])
        bench, (yardstick_ms, *times_ms) = Bench.of(timings[0], device.host), [_median_ms(timing) for timing in timings]
        if table is None:
            table = TimeTable(bench, yardstick_ms, {}, {}, {})
        elif table.bench != bench:
            raise DeployError(
                f"'{path}' holds times of {_name(table.bench)}, and this is {_name(bench)}.", hint="write to another file"
            )
        # A busy machine or a hot GPU slows everything down for a while: count in times of the yardstick, measured in turns.
        table = enter(table, [ms * table.yardstick_ms / yardstick_ms for ms in times_ms])
        write_table(table, path)
    progress(len(todo), len(todo), "")
    assert table is not None, "a model is never without anything to measure"
    return table


Enter = Callable[[TimeTable, list[float]], TimeTable]
Task = tuple[str, Sequence[onnx.ModelProto], Enter]


def _todo(model: onnx.ModelProto, network: Network, block: int, table: TimeTable | None) -> list[Task]:
    """Return what is to be measured: a label, models that take turns, and where their times go in the table."""
    tasks: list[Task] = []
    structure = structure_of(model, network)
    if table is None or structure not in table.models:
        tasks.append(("the whole model", [model], lambda table, ms: table.with_model(structure, ms[0])))
    numbers: dict[LayerShape, list[int]] = {}
    for layer, shape in _shapes(model, network):
        wanted = [layer.groups, *(g for g in layer.legal_groups[1:] if _is_aligned(layer, g, block))]
        numbers[shape] = sorted({*numbers.get(shape, []), *wanted})
    for shape, wanted in numbers.items():
        if len(wanted) > 1 and not (table is not None and set(wanted) <= table.layers.get(shape, {}).keys()):
            tasks.append(_layer_task(shape, wanted))
    for tensor, dtype in _gathered(model, network):
        if table is None or tensor not in table.gathers:
            tasks.append(_gather_task(tensor, dtype))
    return tasks


def _layer_task(shape: LayerShape, wanted: list[int]) -> Task:
    models = [layer_model(shape, groups) for groups in wanted]
    label = f"{shape.input[1]} to {shape.out_channels} channels, {'x'.join(map(str, shape.kernel))}"
    return label, models, lambda table, ms: table.with_layer(shape, dict(zip(wanted, ms, strict=True)))


def _gather_task(tensor: Shape, dtype: str) -> Task:
    models = [*gather_models(tensor, dtype, before_add=False), *gather_models(tensor, dtype, before_add=True)]

    def enter(table: TimeTable, ms: list[float]) -> TimeTable:
        return table.with_gather(tensor, GatherTime(max(0.0, ms[1] - ms[0]), max(0.0, ms[3] - ms[2])))

    return f"Gather of {'x'.join(map(str, tensor))}", models, enter


def latencies_of(table: TimeTable, model: onnx.ModelProto, network: Network, *, path: Path) -> LayerLatencies:
    """Return the times of this model's layers; refuse a table that was not measured for it."""
    structure = structure_of(model, network)
    layer_ms = {layer.name: table.layers[shape] for layer, shape in _shapes(model, network) if shape in table.layers}
    if structure not in table.models or not layer_ms:
        raise DeployError(
            f"'{path}' has no time for this model at this input shape.",
            hint=f"add it: onnx-gconv bench MODEL --runner {table.bench.runner} --sweep --timing-out {path}",
        )
    return LayerLatencies(table.bench.runner, table.bench.host, table.models[structure], layer_ms)


def gather_time(table: TimeTable, tensor: Shape, *, path: Path) -> GatherTime:
    """Return what a Gather of the channels of such a tensor takes."""
    if tensor not in table.gathers:
        raise DeployError(
            f"'{path}' has no time for a Gather of {'x'.join(map(str, tensor))}.",
            hint="make the table again, or use --gathers none",
        )
    return table.gathers[tensor]


def structure_of(model: onnx.ModelProto, network: Network) -> str:
    """Return a hash of all that a model's time depends on: operators and shapes, not weights, which fine-tuning changes."""
    shapes = [asdict(shape) for _, shape in _shapes(model, network)]
    parts = [[node.op_type for node in model.graph.node], shapes, dict(network.input_shapes)]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def _shapes(model: onnx.ModelProto, network: Network) -> list[tuple[Layer, LayerShape]]:
    nodes = {node.output[0]: node for node in model.graph.node if node.op_type == "Conv"}
    found = [(layer, layer_shape(layer, nodes[layer.name], network.shapes)) for layer in network.layers]
    return [(layer, shape) for layer, shape in found if shape is not None]


def _gathered(model: onnx.ModelProto, network: Network) -> list[tuple[Shape, str]]:
    """Return the tensors that a Gather may have to permute: those with as many axes and channels as a layer reads or writes."""
    kinds: dict[tuple[int, int], str] = {}
    for layer, shape in _shapes(model, network):
        for channels in (layer.in_channels, layer.out_channels):
            kinds[len(shape.input), channels] = layer.dtype
    names = [name for node in model.graph.node for name in node.output if name in network.shapes]
    tensors = {tuple(network.shapes[name]) for name in names} | {shape.input for _, shape in _shapes(model, network)}
    return [(tensor, kinds[len(tensor), tensor[1]]) for tensor in sorted(tensors) if (len(tensor), *tensor[1:2]) in kinds]


def _is_aligned(layer: Layer, groups: int, block: int) -> bool:
    return is_aligned(groups, block, in_channels=layer.in_channels, out_channels=layer.out_channels)


def _median_ms(timing: Timing) -> float:
    if timing.compared_ms is None:
        raise DeployError(f"the runner {timing.runner} measures no time.", hint="sweep with another --runner")
    return timing.compared_ms.median


def _name(bench: Bench) -> str:
    more = [part for part in (bench.power_mode, f"{bench.threads} threads" if bench.threads else None) if part]
    return " ".join([bench.runner, bench.precision, "on", bench.host or "this machine", bench.device, *more])
