"""Measured layer times for a budget in milliseconds: a sweep on a device, or the table that one has left."""

import argparse
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from onnx_gconv.cli.source import Source
from onnx_gconv.cli.story import Story

if TYPE_CHECKING:
    import onnx

    from onnx_gconv.deploy.host import Host
    from onnx_gconv.deploy.program import RunnerCall
    from onnx_gconv.deploy.time_table import TimeTable
    from onnx_gconv.deploy.timing_file import Timing
    from onnx_gconv.model.network import Network
    from onnx_gconv.pipeline.planner import GathersMs
    from onnx_gconv.pipeline.settings import Request
    from onnx_gconv.plans import Plan
    from onnx_gconv.search.target import TargetName

LAYER_SECONDS = 0.1  # of what --seconds says: there are many layers, and each is short
WHOLE_SECONDS = 2  # of it: all predictions start from this time


def target_of(runner: str) -> "TargetName":
    """Return the target whose fast group sizes a runner's device has."""
    return "ort-cpu" if runner == "ort-cpu" else "tensorrt"


def run_sweep(source: Source, network: "Network", job: "RunnerCall", host: "Host", path: Path, story: Story) -> "TimeTable":
    """Return the table of the model's layers on the host, each entry written to the file as soon as it is measured."""
    from onnx_gconv.deploy.exporting import export
    from onnx_gconv.deploy.precision import typed
    from onnx_gconv.deploy.sweep import Device, sweep
    from onnx_gconv.model.file import save
    from onnx_gconv.model.shapes import input_shapes
    from onnx_gconv.search.target import CHANNEL_BLOCK

    def measure(models: "Sequence[onnx.ModelProto]") -> "list[Timing]":
        is_whole = any(model is source.model for model in models)
        seconds = job.seconds * (WHOLE_SECONDS if is_whole else LAYER_SECONDS)
        with tempfile.TemporaryDirectory() as folder:
            paths = []
            for number, model in enumerate(models):
                # Every input of fixed shape: trtexec takes --shapes for all models of a job or for none.
                fixed = export(model, "ort-cpu", shapes=network.input_shapes).model if model is source.model else model
                paths.append(Path(folder) / f"{number}.onnx")
                save(typed(fixed, job.precision, input_shapes(fixed, {})) if job.typed else fixed, paths[-1])
            return host.measure(replace(job, models=tuple(paths), seconds=seconds, shapes=(), profile=False))

    device = Device(measure, host.address, CHANNEL_BLOCK[target_of(job.runner)])
    with story.progress("timing layers") as progress:
        return sweep(source.model, network, path, device=device, progress=progress)


def with_latencies(
    requests: "list[Request]", source: Source, network: "Network", args: argparse.Namespace, story: Story
) -> "tuple[list[Request], GathersMs | None]":
    """Return the requests with the layer times they need, and what the Gathers of a plan take; unchanged where none are given.

    Times come from --timing, or for --target ort-cpu from a sweep here and now.
    """
    if args.timing is None and args.max_latency is None:
        return requests, None
    from onnx_gconv.deploy.sweep import latencies_of
    from onnx_gconv.deploy.time_table import read_table

    if args.timing is not None:
        path, table = args.timing, read_table(args.timing)
    else:
        from onnx_gconv.deploy.host import ThisMachine
        from onnx_gconv.deploy.program import RunnerCall

        story.tell("timing every layer on this CPU; `bench --sweep` keeps the times for the next run")
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "table.json"
            table = run_sweep(source, network, RunnerCall("ort-cpu", ()), ThisMachine(3600.0), path, story)
    latencies = latencies_of(table, source.model, network, path=path)
    return [replace(request, latencies=latencies) for request in requests], _gathers_ms(source, network, table, path)


def _gathers_ms(source: Source, network: "Network", table: "TimeTable", path: Path) -> "GathersMs":
    """Return the function that says what the Gathers of a plan take."""
    from onnx_gconv.deploy.sweep import gather_time
    from onnx_gconv.rewrite.group import placement_of

    added = {name for node in source.model.graph.node if node.op_type == "Add" for name in node.input}

    def of(plan: "Plan") -> float:
        placement = placement_of(source.model, plan, shapes=network.shapes)
        # Readers of one tensor that want the same order share one Gather.
        distinct = {(gather.tensor, gather.conv == "", gather.indices.tobytes()) for gather in placement.gathers}
        total = 0.0
        for tensor, is_behind_producer, _ in distinct:
            time = gather_time(table, tuple(network.shapes[tensor]), path=path)
            total += time.before_add_ms if is_behind_producer and tensor in added else time.ms
        return total

    return of
