"""Measured layer times for a budget in milliseconds: a sweep on a device, or the table that one has left."""

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import onnx

from onnx_gconv.deploy.exporting import convert
from onnx_gconv.deploy.host import Host, ThisMachine
from onnx_gconv.deploy.precision import typed
from onnx_gconv.deploy.program import RunnerCall
from onnx_gconv.deploy.sweep import Gauge, gather_time, latencies_of, sweep
from onnx_gconv.deploy.time_table import TimeTable, read_table
from onnx_gconv.deploy.timing_file import Timing
from onnx_gconv.listener import Listener
from onnx_gconv.model.file import save
from onnx_gconv.model.shapes import input_shapes
from onnx_gconv.pipeline.original import Original
from onnx_gconv.plans import Plan
from onnx_gconv.rewrite.group import placement_of
from onnx_gconv.rewrite.match import match
from onnx_gconv.search.latency import LayerLatencies
from onnx_gconv.search.target import CHANNEL_BLOCK, TargetName

LAYER_SECONDS = 0.1  # of what --seconds says: there are many layers, and each is short
WHOLE_SECONDS = 2  # of it: all predictions start from this time
TIMEOUT_SECONDS = 3600.0


@dataclass(frozen=True)
class Timed:
    """What the layers of a model take, and what the Gathers of a plan for it would."""

    latencies: LayerLatencies
    gathers_ms: Callable[[Plan], float]


def target_of(runner: str) -> TargetName:
    """Return the target whose fast group sizes a runner's device has."""
    return "ort-cpu" if runner == "ort-cpu" else "tensorrt"


def run_sweep(original: Original, call: RunnerCall, host: Host, path: Path, listener: Listener) -> TimeTable:
    """Return the table of the model's layers on the host, each entry written to the file as soon as it is measured."""
    whole, network = original.model, original.network

    def measure(models: Sequence[onnx.ModelProto]) -> list[Timing]:
        is_whole = any(model is whole for model in models)
        seconds = call.seconds * (WHOLE_SECONDS if is_whole else LAYER_SECONDS)
        with tempfile.TemporaryDirectory() as folder:
            paths = []
            for number, model in enumerate(models):
                # Every input of fixed shape: trtexec takes --shapes for all models of a call or for none.
                fixed = convert(model, "ort-cpu", shapes=network.input_shapes).model if model is whole else model
                paths.append(Path(folder) / f"{number}.onnx")
                save(typed(fixed, call.precision, input_shapes(fixed, {})) if call.typed else fixed, paths[-1])
            return host.measure(replace(call, models=tuple(paths), seconds=seconds, shapes=(), profile=False))

    device = Gauge(measure, host.address, CHANNEL_BLOCK[target_of(call.runner)])
    return sweep(whole, network, path, device=device, progress=listener.phase("timing layers"))


def read_times(original: Original, path: Path) -> Timed:
    """Return the times of the model's layers that a sweep has left in a file."""
    return _timed(original, read_table(path), path)


def sweep_here(original: Original, listener: Listener) -> Timed:
    """Return the times of the model's layers on this CPU, measured now."""
    listener.note("timing every layer on this CPU; `bench --sweep` keeps the times for the next run")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "table.json"
        return _timed(original, run_sweep(original, RunnerCall("ort-cpu", ()), ThisMachine(TIMEOUT_SECONDS), path, listener), path)


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

    return Timed(latencies_of(table, original.model, network, path=path), gathers_ms)
