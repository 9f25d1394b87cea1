"""`bench` and `sweep`: how long models, or all their layers, take on a device."""

import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import get_args

import onnx

from onnx_gconv.deploy.host import Host, ThisMachine, parse_host
from onnx_gconv.deploy.precision import typed
from onnx_gconv.deploy.program import ASKS_FOR_PRECISION, FIRST_TYPED_TENSORRT, RunnerCall
from onnx_gconv.deploy.time_table import TimeTable
from onnx_gconv.deploy.timing_file import Precision, RunnerName, Timing
from onnx_gconv.errors import UsageError
from onnx_gconv.listener import SILENT, Listener
from onnx_gconv.model.file import save
from onnx_gconv.model.shapes import Shape, ShapeLike, dynamic_inputs, has_dynamic_axes, input_shapes
from onnx_gconv.pipeline.original import Original, open_original, shapes_text, tell_counts
from onnx_gconv.pipeline.settings import PathLike, as_path
from onnx_gconv.pipeline.sweeping import TIMEOUT_SECONDS, run_sweep


@dataclass(frozen=True, kw_only=True)
class Device:
    """Where and how to measure: this machine, or one over ssh; which runner, in which precision, how long."""

    runner: RunnerName
    precision: Precision = "fp32"
    seconds: float = 3.0  # for each model
    threads: int | None = None  # of ort-cpu; None is 1, which is timed most exactly
    host: str | None = None  # ssh://user@jetson; None for this machine
    python: str = "python3"  # the host's
    trtexec: str | None = None  # where it is, if not on the PATH nor in its usual places
    timeout: float = TIMEOUT_SECONDS

    def __post_init__(self) -> None:
        for name, value, known in (("runner", self.runner, RunnerName), ("precision", self.precision, Precision)):
            if value not in get_args(known):
                raise UsageError(f"--{name} {value!r} is not known: choose from {', '.join(get_args(known))}")

    @property
    def machine(self) -> Host:
        if self.host is None:
            return ThisMachine(self.timeout)
        return parse_host(self.host, python=self.python, timeout_seconds=self.timeout)


def bench(
    models: PathLike | Sequence[PathLike],
    device: Device | RunnerName,
    *,
    input_shape: ShapeLike = (),
    listener: Listener = SILENT,
) -> list[Timing]:
    """Return what each model takes on a device; all take turns, so that what disturbs one disturbs all.

        dense, small = onnx_gconv.bench(["model.onnx", "small.onnx"], "ort-cpu")
        print(small.latency_ms.median / dense.latency_ms.median)

    The first model is the baseline. Programs and models are copied to the host of the device, and nothing is left there.
    """
    device, paths = _device(device), _paths(models)
    opened = [open_original(paths[0], input_shape), *(open_original(path) for path in paths[1:])]
    first = opened[0]
    shapes = input_shapes(first.model, first.given_shapes)
    if has_dynamic_axes(first.model, first.given_shapes):
        listener.note(f"note: measured at {shapes_text(shapes)}; --input-shape sets another size")
    with tempfile.TemporaryDirectory() as scratch, device.machine.session() as machine:
        call = _call(device, machine, paths, [each.model for each in opened], shapes)
        if call.typed:
            call = replace(call, models=_typed_copies(call, opened, shapes, Path(scratch)))
        elif any(each.listed for each in opened):
            listener.note("note: initialisers that are also listed as inputs slow ONNX Runtime down: all models are timed without")
            call = replace(call, models=_fair_copies(call, opened, Path(scratch)))
        listener.progress("measuring", 0, None, "")
        timings = machine.measure(call)
    for text in dict.fromkeys(warning for timing in timings for warning in timing.warnings):
        listener.warn(text)
    return [replace(timing, model=replace(timing.model, path=str(path))) for timing, path in zip(timings, paths, strict=True)]


def sweep(
    models: PathLike | Sequence[PathLike],
    device: Device | RunnerName,
    table: PathLike,
    *,
    input_shape: ShapeLike = (),
    listener: Listener = SILENT,
) -> TimeTable:
    """Return what every layer of the models takes with every number of groups that suits the device; `table` is filled with it.

    It adds to a table that is there already, so it may be interrupted. `compress(..., timing=table, max_latency=0.6)` uses it.
    """
    device = _device(device)
    with device.machine.session() as machine:
        for path in _paths(models):
            original = open_original(path, input_shape)
            tell_counts(original, listener)
            call = _call(device, machine, [path], [original.model], original.network.input_shapes)
            found = run_sweep(original, call, machine, as_path(table), listener)
    return found


def _device(given: Device | RunnerName) -> Device:
    return given if isinstance(given, Device) else Device(runner=given)


def _paths(models: PathLike | Sequence[PathLike]) -> list[Path]:
    return [as_path(model) for model in ([models] if isinstance(models, str | os.PathLike) else models)]


def _call(
    device: Device, machine: Host, paths: Sequence[Path], models: Sequence[onnx.ModelProto], shapes: Mapping[str, Shape]
) -> RunnerCall:
    extra = ("--trtexec", device.trtexec) if device.trtexec is not None else ()
    is_typed = device.precision != "fp32"
    if is_typed and device.runner in ASKS_FOR_PRECISION:
        version = machine.versions(device.runner, extra)["tensorrt"]
        is_typed = int(version.split(".")[0]) >= FIRST_TYPED_TENSORRT
    dynamic = {name for model in models for name in dynamic_inputs(model)}
    return RunnerCall(
        runner=device.runner,
        models=tuple(paths),
        shapes=tuple(f"{name}:{'x'.join(map(str, shape))}" for name, shape in shapes.items() if name in dynamic),
        precision=device.precision,
        typed=is_typed,
        seconds=device.seconds,
        threads=device.threads,
        extra=extra,
    )


def _fair_copies(call: RunnerCall, opened: Sequence[Original], scratch: Path) -> tuple[Path, ...]:
    """Return the models, those anew that had initialisers listed as inputs."""
    copies = []
    for number, (path, original) in enumerate(zip(call.models, opened, strict=True)):
        copies.append(scratch / f"{number}-{path.name}" if original.listed else path)
        if original.listed:
            save(original.model, copies[-1])
    return tuple(copies)


def _typed_copies(call: RunnerCall, opened: Sequence[Original], shapes: Mapping[str, Shape], scratch: Path) -> tuple[Path, ...]:
    copies = []
    for number, (path, original) in enumerate(zip(call.models, opened, strict=True)):
        copies.append(scratch / f"{number}-{path.name}")
        save(typed(original.model, call.precision, shapes, runner=call.runner), copies[-1])
    return tuple(copies)
