"""A sweep: time every Conv of a model at some widths and numbers of groups, on a device; what is known is not timed again."""

import hashlib
import json
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path

import onnx

from onnx_gconv.deploy.block import block_of
from onnx_gconv.deploy.convs import Point, SweptConv, distinct, find_swept
from onnx_gconv.deploy.node_times import node_times
from onnx_gconv.deploy.one_layer import LayerShape, gather_models, is_framed, layer_shape
from onnx_gconv.deploy.stand import PLAIN, Stand
from onnx_gconv.deploy.time_table import Bench, GatherTime, TimeTable, read_table, write_table
from onnx_gconv.deploy.timing_file import Timing
from onnx_gconv.errors import DeployError
from onnx_gconv.listener import OnProgress
from onnx_gconv.model.network import Layer, Network
from onnx_gconv.model.shapes import Shape
from onnx_gconv.search.latency import ConvTime, LayerTimes
from onnx_gconv.search.target import CHANNEL_BLOCK, TargetName, width_step
from onnx_gconv.search.width_times import DenseTime, DepthwiseTime, GroupedTime, InModel

MODELS_AT_ONCE = 24
MOST_OFF = 1.5  # by what all Convs together take longer or shorter in a model than alone; more would be a profile gone wrong
SAMPLES = 8  # of Convs at other widths, on which the interpolation is checked

Measure = Callable[[Sequence[onnx.ModelProto]], list[Timing]]  # models that take turns, all inputs of fixed shape


@dataclass(frozen=True)
class Gauge:
    """Where to measure: how, its address (None for this machine), and the multiple of channels that makes a group fast.

    Where that is not known (None), it is measured first.
    """

    measure: Measure
    host: str | None
    block: int | None
    at_once: int = MODELS_AT_ONCE  # models, at most, of which all are lost when it is interrupted
    stand: Stand = PLAIN


def sweep(
    model: onnx.ModelProto,
    network: Network,
    path: Path,
    *,
    device: Gauge,
    progress: OnProgress,
    with_groups: bool = True,
    with_ranks: bool = False,
) -> TimeTable:
    """Return the table with every entry that this model needs; each one is in the file as soon as it is measured.

    Without groups, neither they nor the Gathers that they need are measured; with ranks, the two Convs of a low rank are.
    """
    table = probed(path, device)
    assert table.block is not None, "it has just been probed"
    todo = _todo(model, network, table, device.stand, with_groups=with_groups, with_ranks=with_ranks)
    batches = list(_batches(todo, device.at_once))
    for done, batch in enumerate(batches):
        progress(done, len(batches), batch[0].label)
        timings = device.measure([device.stand.yardstick, *(each for task in batch for each in task.models)])
        bench, (yardstick_ms, *times_ms) = Bench.of(timings[0], device.host), [_typical_ms(timing) for timing in timings]
        _require_same(table, bench, path)
        # A busy machine or a hot GPU slows everything down for a while: count in times of the yardstick, measured in turns.
        scaled = iter([ms * table.yardstick_ms / yardstick_ms for ms in times_ms])
        for task in batch:
            table = task.enter(table, list(islice(scaled, len(task.models))))
            if task.is_whole:
                table = _profiled(table, model, network, timings[-1])
        write_table(table, path)
    progress(len(batches), len(batches), "")
    return table


def _profiled(table: TimeTable, model: onnx.ModelProto, network: Network, timing: Timing) -> TimeTable:
    structure = structure_of(model, network)
    times = node_times(model, timing, table.models[structure])
    return table if times is None else table.with_nodes(structure, times)


def probed(path: Path, device: Gauge) -> TimeTable:
    """Return the table in the file, or a new one, with the block of the device in it."""
    table = read_table(path) if path.exists() else None
    if table is not None and table.block is not None:
        return table
    probes = device.stand.probes() if device.block is None else {}
    timings = device.measure([device.stand.yardstick, *probes.values()])
    bench, (yardstick_ms, *times_ms) = Bench.of(timings[0], device.host), [_typical_ms(timing) for timing in timings]
    if table is not None:
        _require_same(table, bench, path)
    block = block_of(dict(zip(probes, times_ms, strict=True))) if device.block is None else device.block
    table = (table or TimeTable(bench, yardstick_ms, {}, {}, {})).with_block(block)
    write_table(table, path)
    return table


def _require_same(table: TimeTable, bench: Bench, path: Path) -> None:
    if table.bench != bench:
        raise DeployError(
            f"'{path}' holds times of {_name(table.bench)}, and this is {_name(bench)}.", hint="write to another file"
        )


@dataclass(frozen=True)
class Task:
    """Models to measure in turns, and where their times go in the table."""

    label: str
    models: Sequence[onnx.ModelProto]
    enter: Callable[[TimeTable, list[float]], TimeTable]
    is_whole: bool = False  # whether it is the whole model, which is measured longer, and by itself


def _batches(tasks: Sequence[Task], at_once: int) -> Iterator[list[Task]]:
    """Yield the tasks, as many together as a runner can take turns with: starting one takes longer than timing a layer."""
    batch: list[Task] = []
    for task in tasks:
        if batch and (batch[0].is_whole or sum(len(each.models) for each in batch) + len(task.models) > at_once):
            yield batch
            batch = []
        batch.append(task)
    if batch:
        yield batch


def _todo(
    model: onnx.ModelProto, network: Network, table: TimeTable, stand: Stand, *, with_groups: bool, with_ranks: bool
) -> list[Task]:
    """Return what is to be measured and not in the table."""
    tasks: list[Task] = []
    structure = structure_of(model, network)
    if structure not in table.models:
        tasks.append(Task("the whole model", [model], lambda table, ms: table.with_model(structure, ms[0]), is_whole=True))
    convs = find_swept(model, network)
    wanted = find_swept(model, network, with_ranks=True) if with_ranks else convs
    points = distinct([point for conv in wanted for point in conv.points(*_steps(conv, table), with_groups=with_groups)])
    points = distinct([*points, *(point for _, point in _sample(convs, table))])
    framed = {point.shape.input: point.shape.dtype for point in points if is_framed(point.shape.input)}
    tasks += [_frame_task(stand, tensor, dtype) for tensor, dtype in framed.items() if tensor not in table.frames]
    tasks += [_layer_task(stand, point) for point in points if table.milliseconds(point.shape, point.groups) is None]
    gathered = _gathered(model, network) if with_groups else []
    tasks += [_gather_task(tensor, dtype) for tensor, dtype in gathered if tensor not in table.gathers]
    return tasks


def _steps(conv: SweptConv, table: TimeTable) -> tuple[int, int]:
    """Return the block of the table's device, and by what the widths of a Conv step there."""
    target: TargetName = "ort-cpu" if table.bench.runner == "ort-cpu" else "tensorrt"
    block = CHANNEL_BLOCK[target] if table.block is None else table.block
    return block, width_step(target, max(conv.ins, conv.outs), block=block)


def _sample(convs: Sequence[SweptConv], table: TimeTable) -> list[tuple[SweptConv, Point]]:
    """Return some Convs, each with one at other widths, to see how well times are interpolated."""
    rng = random.Random(0)
    wide = list({conv.shape: conv for conv in convs if conv.groups == 1 and conv.is_open_in and conv.is_open_out}.values())
    sample = []
    for conv in rng.sample(wide, min(SAMPLES, len(wide))):
        _, step = _steps(conv, table)
        ins, outs = (rng.randrange(step, side + 1, step) if side >= step else side for side in (conv.ins, conv.outs))
        sample.append((conv, conv.at(ins, outs, 1)))
    return sample


def _layer_task(stand: Stand, point: Point) -> Task:
    shape, groups = point.shape, point.groups
    label = f"{shape.input[1]} to {shape.out_channels} channels, {'x'.join(map(str, shape.kernel))}"
    return Task(label, [stand.layer(shape, groups)], lambda table, ms: table.with_layer(shape, {groups: ms[0]}))


def _frame_task(stand: Stand, tensor: Shape, dtype: str) -> Task:
    label = f"what is around a layer of {tensor[1]} channels"
    return Task(label, [stand.frame(tensor, dtype)], lambda table, ms: table.with_frame(tensor, ms[0]))


def _gather_task(tensor: Shape, dtype: str) -> Task:
    models = [*gather_models(tensor, dtype, before_add=False), *gather_models(tensor, dtype, before_add=True)]

    def enter(table: TimeTable, ms: list[float]) -> TimeTable:
        return table.with_gather(tensor, GatherTime(max(0.0, ms[1] - ms[0]), max(0.0, ms[3] - ms[2])))

    return Task(f"Gather of {'x'.join(map(str, tensor))}", models, enter)


def times_of(table: TimeTable, model: onnx.ModelProto, network: Network, *, path: Path) -> LayerTimes:
    """Return the times of this model's Convs; refuse a table that was not measured for it."""
    structure = structure_of(model, network)
    found = {conv.name: time for conv in find_swept(model, network) if (time := _conv_time(conv, table)) is not None}
    for conv in find_swept(model, network, with_ranks=True):
        points = conv.points(*_steps(conv, table))
        time = _conv_time(conv, table)
        if time is not None and all(table.milliseconds(point.shape, point.groups) is not None for point in points):
            found[conv.name] = time
    if structure not in table.models or not found:
        raise DeployError(
            f"'{path}' has no time for this model at this input shape.",
            hint=f"add it: onnx-gconv bench MODEL --runner {table.bench.runner} --sweep --timing-out {path}",
        )
    bench, nodes, whole_ms = table.bench, table.nodes.get(structure), table.models[structure]
    if nodes is None:
        return LayerTimes(bench.runner, bench.host, whole_ms, found)
    # A profile has nodes only: to start a run takes time as well, about as much as the least that is around a layer.
    unit = 1e6 * max(0.0, 1 - min(table.frames.values(), default=0.0) / whole_ms)
    others = {node.output[0]: unit * ms for place, node in enumerate(model.graph.node) if (ms := nodes.others_ms.get(place))}
    convs = [node.output[0] for node in model.graph.node if node.op_type == "Conv"]
    if all(name in found for name in convs):
        alone_ns = sum(_as_it_is(conv, table) for conv in find_swept(model, network))
        share = unit * nodes.convs_ms / alone_ns if alone_ns else 1.0
        found = {name: InModel(time, min(max(share, 1 / MOST_OFF), MOST_OFF)) for name, time in found.items()}
    return LayerTimes(bench.runner, bench.host, whole_ms, found, others)


def _as_it_is(conv: SweptConv, table: TimeTable) -> float:
    """Return the nanoseconds of a Conv alone, as it is."""
    return 1e6 * (table.milliseconds(conv.as_it_is.shape, conv.as_it_is.groups) or 0.0)


def _conv_time(conv: SweptConv, table: TimeTable) -> ConvTime | None:
    """Return what a Conv takes by the table; None if it is not there even as it is."""

    def nanoseconds(point: Point) -> float | None:
        ms = table.milliseconds(point.shape, point.groups)
        return None if ms is None else ms * 1e6

    as_it_is = nanoseconds(conv.as_it_is)
    if as_it_is is None:
        return None
    block, step = _steps(conv, table)
    if conv.is_depthwise:
        line = {ins: nanoseconds(conv.depthwise_at(ins)) for ins in conv.depthwise_widths(step)}
        return DepthwiseTime({ins: time for ins, time in line.items() if time is not None}, step)
    across, along = conv.widths(step)
    grid = {(ins, outs): nanoseconds(conv.at(ins, outs, conv.groups)) for ins in across for outs in along}
    measured = {corner: time for corner, time in grid.items() if time is not None}
    # A table of before knows no widths.
    dense = DenseTime(measured if len(measured) == len(grid) else {(conv.ins, conv.outs): as_it_is}, step)
    grouped: dict[int, dict[tuple[int, int], float]] = {}
    wider = [(conv.ins, conv.outs, groups) for groups in conv.legal_groups if groups > conv.groups]
    for ins, outs, groups in dict.fromkeys([*wider, *conv.grouped(block, step)]):
        time = nanoseconds(conv.at(ins, outs, groups))
        if time is not None:
            grouped.setdefault(groups, {})[ins, outs] = time
    return GroupedTime(dense, conv.groups, grouped)


def interpolation_errors(table: TimeTable, model: onnx.ModelProto, network: Network) -> list[float]:
    """Return by which share of the dense Conv's time the interpolation is off, for each Conv of the sample."""
    errors = []
    for conv, point in _sample(find_swept(model, network), table):
        ms, time = table.milliseconds(point.shape, point.groups), _conv_time(conv, table)
        if ms is not None and time is not None:
            off = time.nanoseconds(point.shape.input[1], point.shape.out_channels, 1) - ms * 1e6
            errors.append(abs(off) / time.nanoseconds(conv.ins, conv.outs, 1))
    return errors


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
    found = [(layer, layer_shape(layer, nodes[layer.name], network.shapes)) for layer in network.layers if layer.name in nodes]
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


def _typical_ms(timing: Timing) -> float:
    """Return what a run takes when nothing disturbs it.

    On a CPU that is the fastest run: whoever works on the same core meanwhile slows some layers down more than others, and a layer
    is timed too briefly for its median to tell.
    """
    if timing.compared_ms is None:
        raise DeployError(f"the runner {timing.runner} measures no time.", hint="sweep with another --runner")
    return timing.compared_ms.min if timing.runner == "ort-cpu" else timing.compared_ms.median


def _name(bench: Bench) -> str:
    threads = f"{bench.threads} threads" if bench.threads else None
    more = [part for part in (bench.power_mode, threads, bench.runtime, bench.instructions) if part]
    return " ".join([bench.runner, bench.precision, "on", bench.host or "this machine", bench.device, *more])
