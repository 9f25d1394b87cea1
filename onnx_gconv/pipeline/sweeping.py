"""Measured layer times for a budget in milliseconds: a sweep on a device, or the table that one has left."""

import statistics
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import onnx

from onnx_gconv.deploy.exporting import convert
from onnx_gconv.deploy.host import Host, ThisMachine
from onnx_gconv.deploy.machine import bench_here
from onnx_gconv.deploy.precision import typed
from onnx_gconv.deploy.program import RunnerCall
from onnx_gconv.deploy.sweep import Gauge, gather_time, interpolation_errors, probed, sweep, times_of
from onnx_gconv.deploy.time_cache import cache_file
from onnx_gconv.deploy.time_table import TimeTable, read_table
from onnx_gconv.deploy.timing_file import Precision, Timing
from onnx_gconv.listener import Listener
from onnx_gconv.model.file import save
from onnx_gconv.model.shapes import input_shapes
from onnx_gconv.pipeline.original import Original
from onnx_gconv.plans import Plan
from onnx_gconv.rewrite.group import placement_of
from onnx_gconv.rewrite.match import match
from onnx_gconv.search.latency import LayerTimes
from onnx_gconv.search.target import CHANNEL_BLOCK, INT8_BLOCK_OF_TENSORRT, TargetName

LAYER_SECONDS = 0.1  # of what --seconds says: there are many layers, and each is short
LAYER_SECONDS_ON_CPU = 0.01  # there they take no more than a few milliseconds, and no time to build
WHOLE_SECONDS = 2  # of it: all predictions start from this time
TIMEOUT_SECONDS = 3600.0


@dataclass(frozen=True)
class Timed:
    """What the Convs of a model take, what the Gathers of a plan for it would, and the block of channels there."""

    latencies: LayerTimes
    gathers_ms: Callable[[Plan], float]
    block: int | None  # None where the table does not say


def target_of(runner: str) -> TargetName:
    """Return the target whose fast group sizes a runner's device has."""
    return "ort-cpu" if runner == "ort-cpu" else "tensorrt"


def run_sweep(
    original: Original, call: RunnerCall, host: Host, path: Path, listener: Listener, *, has_ranks: bool = False
) -> TimeTable:
    """Return the table of the model's Convs on the host, each entry written to the file as soon as it is measured."""
    whole, network = original.model, original.network
    device = _gauge(call, host, original)
    table = sweep(whole, network, path, device=device, progress=listener.phase("timing layers"), has_ranks=has_ranks)
    errors = interpolation_errors(table, whole, network)
    if errors:
        listener.detail(
            f"interpolated between measured widths: {statistics.median(errors):.1%} of a layer's time off in the median, "
            f"{max(errors):.1%} at worst, on {len(errors)} others"
        )
    return table


def _gauge(call: RunnerCall, host: Host, original: Original | None) -> Gauge:
    """Return how models are measured by this call; its block is probed on a CPU."""
    layer_seconds = LAYER_SECONDS_ON_CPU if call.runner == "ort-cpu" else LAYER_SECONDS

    def measure(models: Sequence[onnx.ModelProto]) -> list[Timing]:
        whole = None if original is None else original.model
        is_whole = any(model is whole for model in models)
        seconds = call.seconds * (WHOLE_SECONDS if is_whole else layer_seconds)
        with tempfile.TemporaryDirectory() as folder:
            paths = []
            for number, model in enumerate(models):
                fixed = model
                if original is not None and model is whole:
                    # Every input of fixed shape: trtexec takes --shapes for all models of a call or for none.
                    fixed = convert(model, "ort-cpu", shapes=original.network.input_shapes).model
                paths.append(Path(folder) / f"{number}.onnx")
                save(typed(fixed, call.precision, input_shapes(fixed, {})) if call.typed else fixed, paths[-1])
            return host.measure(replace(call, models=tuple(paths), seconds=seconds, shapes=(), profile=False))

    if call.runner == "ort-cpu":
        return Gauge(measure, host.address, None)
    block = INT8_BLOCK_OF_TENSORRT if call.precision == "int8" else CHANNEL_BLOCK[target_of(call.runner)]
    return Gauge(measure, host.address, block)


def read_times(original: Original, path: Path) -> Timed:
    """Return the times of the model's Convs that a sweep has left in a file."""
    return _timed(original, read_table(path), path)


def sweep_here(
    original: Original, listener: Listener, *, threads: int = 1, precision: Precision = "fp32", has_ranks: bool = False
) -> Timed:
    """Return the times of the model's Convs on this CPU: those of an earlier run, and the others measured now."""
    with _kept_times(precision, threads) as path:
        call = RunnerCall("ort-cpu", (), precision=precision, typed=precision != "fp32", threads=threads)
        table = run_sweep(original, call, ThisMachine(TIMEOUT_SECONDS), path, listener, has_ranks=has_ranks)
        return _timed(original, table, path)


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

    def gathers_ms(plan: Plan) -> float:
        placement = placement_of(original.model, match(original.model, plan, shapes=network.shapes), shapes=network.shapes)
        # Readers of one tensor that want the same order share one Gather.
        distinct = {(gather.tensor, gather.conv == "", gather.indices.tobytes()) for gather in placement.gathers}
        total = 0.0
        for tensor, is_behind_producer, _ in distinct:
            time = gather_time(table, tuple(network.shapes[tensor]), path=path)
            total += time.before_add_ms if is_behind_producer and tensor in added else time.ms
        return total

    return Timed(times_of(table, original.model, network, path=path), gathers_ms, table.block)
