"""Measured layer times for a budget in milliseconds: a sweep on a device, or the table that one has left."""

import statistics
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import onnx

from onnx_gconv.deploy.exporting import convert
from onnx_gconv.deploy.host import Host, ThisMachine
from onnx_gconv.deploy.machine import bench_here
from onnx_gconv.deploy.node_times import named
from onnx_gconv.deploy.one_layer_int8 import is_int8_layer
from onnx_gconv.deploy.precision import typed
from onnx_gconv.deploy.program import RunnerCall
from onnx_gconv.deploy.stand import INT8_ON_CPU, PLAIN
from onnx_gconv.deploy.sweep import Gauge, gather_time, interpolation_errors, probed, sweep, times_of
from onnx_gconv.deploy.time_cache import cache_file
from onnx_gconv.deploy.time_table import TimeTable, read_table
from onnx_gconv.deploy.timing_file import Precision, Timing
from onnx_gconv.listener import Listener
from onnx_gconv.model.file import save
from onnx_gconv.model.shapes import dynamic_inputs, input_shapes
from onnx_gconv.pipeline.gathers import GatherTimes
from onnx_gconv.pipeline.original import Original
from onnx_gconv.runtime import random_feeds
from onnx_gconv.search.latency import LayerTimes
from onnx_gconv.search.target import CHANNEL_BLOCK, INT8_BLOCK_OF_TENSORRT, TargetName
from onnx_gconv.timing import compare_latency

LAYER_SECONDS = 0.1  # of what --seconds says: there are many layers, and each is short
LAYER_SECONDS_ON_CPU = 0.01  # there they take no more than a few milliseconds, and no time to build
WHOLE_SECONDS = 2  # of it: all predictions start from this time
WHOLE_SECONDS_ON_CPU = 0.7  # there the fastest run counts, which comes soon
ENGINES_AT_ONCE = 8  # a small device builds one in half a minute or so
TIMEOUT_SECONDS = 3600.0


@dataclass(frozen=True)
class Timed:
    """What the Convs of a model take, what Gathers of its tensors would, and the block of channels there."""

    latencies: LayerTimes
    gathers: GatherTimes
    block: int | None  # None where the table does not say


def target_of(runner: str) -> TargetName:
    """Return the target whose fast group sizes a runner's device has."""
    return "ort-cpu" if runner == "ort-cpu" else "tensorrt"


def run_sweep(
    original: Original,
    call: RunnerCall,
    host: Host,
    path: Path,
    listener: Listener,
    *,
    with_groups: bool = True,
    with_ranks: bool = False,
) -> TimeTable:
    """Return the table of the model's Convs on the host, each entry written to the file as soon as it is measured."""
    whole, network = original.model, original.network
    device = _gauge(call, host, original)
    table = sweep(
        whole,
        network,
        path,
        device=device,
        progress=listener.phase("timing layers"),
        with_groups=with_groups,
        with_ranks=with_ranks,
    )
    errors = interpolation_errors(table, whole, network)
    if errors:
        listener.detail(
            f"interpolated between measured widths: {statistics.median(errors):.1%} of a layer's time off in the median, "
            f"{max(errors):.1%} at worst, on {len(errors)} others"
        )
    return table


def _gauge(call: RunnerCall, host: Host, original: Original | None) -> Gauge:
    """Return how models are measured by this call; its block is probed on a CPU."""
    is_cpu = call.runner == "ort-cpu"
    layer_seconds = LAYER_SECONDS_ON_CPU if is_cpu else LAYER_SECONDS
    whole_seconds = WHOLE_SECONDS_ON_CPU if is_cpu else WHOLE_SECONDS

    def measure(models: Sequence[onnx.ModelProto]) -> list[Timing]:
        whole = None if original is None else original.model
        is_whole = any(model is whole for model in models)
        seconds = call.seconds * (whole_seconds if is_whole else layer_seconds)
        shapes = () if original is None or not (is_whole and _takes_shapes(call)) else given_shapes(original)
        with tempfile.TemporaryDirectory() as folder:
            paths = []
            for number, model in enumerate(models):
                fixed = model
                if original is not None and model is whole and not shapes:
                    fixed = convert(model, "ort-cpu", shapes=original.network.input_shapes).model
                if model is whole and is_cpu:
                    fixed = named(fixed)
                paths.append(Path(folder) / f"{number}.onnx")
                is_typed = not call.typed or is_int8_layer(fixed)
                save(fixed if is_typed else typed(fixed, call.precision, input_shapes(fixed, {})), paths[-1])
            return host.measure(replace(call, models=tuple(paths), seconds=seconds, shapes=shapes, profile=is_whole and is_cpu))

    if is_cpu:
        return Gauge(measure, host.address, None, stand=INT8_ON_CPU if call.precision == "int8" else PLAIN)
    block = INT8_BLOCK_OF_TENSORRT if call.precision == "int8" else CHANNEL_BLOCK[target_of(call.runner)]
    return Gauge(measure, host.address, block, ENGINES_AT_ONCE)


def given_shapes(original: Original) -> tuple[str, ...]:
    """Return the shapes that a runner has to be told, as it reads them: of inputs with dynamic axes."""
    shapes = original.network.input_shapes
    return tuple(f"{name}:{'x'.join(map(str, shapes[name]))}" for name in dynamic_inputs(original.model))


def _takes_shapes(call: RunnerCall) -> bool:
    """Return whether a model with dynamic axes is timed as it is: ONNX Runtime takes longer for one, before and after.

    trtexec takes --shapes for all models of a call or for none, and a precision that models carry in their types needs shapes.
    """
    return call.runner.startswith("ort-") and not call.typed


def read_times(original: Original, path: Path) -> Timed:
    """Return the times of the model's Convs that a sweep has left in a file."""
    return _timed(original, read_table(path), path)


def sweep_here(
    original: Original,
    listener: Listener,
    *,
    threads: int = 1,
    precision: Precision = "fp32",
    with_groups: bool = True,
    with_ranks: bool = False,
) -> Timed:
    """Return the times of the model's Convs on this CPU: those of an earlier run, and the others measured now.

    In int8 they say as well what the model takes in float, which a budget is a share of.
    """
    with _kept_times(precision, threads) as path:
        call = RunnerCall("ort-cpu", (), precision=precision, typed=precision != "fp32", threads=threads)
        table = run_sweep(
            original, call, ThisMachine(TIMEOUT_SECONDS), path, listener, with_groups=with_groups, with_ranks=with_ranks
        )
        timed = _timed(original, table, path)
    if precision == "fp32":
        return timed
    # Interleaved, and at the end: the one figure that compares two precisions must not suffer from what happens between.
    lower = typed(original.model, precision, original.network.input_shapes)
    feeds = random_feeds(original.model, original.network.input_shapes, np.random.default_rng(0))
    ratio = compare_latency(original.model, lower, feeds, threads=threads).ratio
    return replace(timed, latencies=replace(timed.latencies, float_ms=timed.latencies.dense_ms / ratio))


def block_here(*, threads: int = 1) -> int:
    """Return the multiple of channels that makes a group fast on this CPU: what an earlier run found, or measured now."""
    with _kept_times("fp32", threads) as path:
        call = RunnerCall("ort-cpu", (), threads=threads)
        table = probed(path, _gauge(call, ThisMachine(TIMEOUT_SECONDS), None))
    return CHANNEL_BLOCK["ort-cpu"] if table.block is None else table.block


@contextmanager
def _kept_times(precision: Precision, threads: int) -> Iterator[Path]:
    """Yield the file of times that earlier runs on this CPU have left, or one that goes again."""
    kept = cache_file(bench_here(precision, threads))
    if kept is not None:
        yield kept
        return
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder) / "table.json"


def _timed(original: Original, table: TimeTable, path: Path) -> Timed:
    network = original.network
    added = {name for node in original.model.graph.node if node.op_type == "Add" for name in node.input}

    def nanoseconds(tensor: str, is_behind_producer: bool) -> int:
        time = gather_time(table, tuple(network.shapes[tensor]), path=path)
        return round(1e6 * (time.before_add_ms if is_behind_producer and tensor in added else time.ms))

    gathers = GatherTimes(original.model, network.shapes, nanoseconds)
    return Timed(times_of(table, original.model, network, path=path), gathers, table.block)
