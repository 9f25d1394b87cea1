"""Calibration data of a command: what it tells the planner, and weights recovered with it."""

import argparse
from dataclasses import replace
from typing import TYPE_CHECKING

from onnx_gconv.cli import options
from onnx_gconv.cli.source import Source
from onnx_gconv.cli.story import Story

if TYPE_CHECKING:
    from onnx_gconv.model.network import Network
    from onnx_gconv.pipeline.settings import Request
    from onnx_gconv.pipeline.solving import Progress
    from onnx_gconv.plans import Plan
    from onnx_gconv.recover.calibration import Calibration
    from onnx_gconv.recover.guide import CalibratedGuide
    from onnx_gconv.recover.recovery import Recovery

FEW_SAMPLES = 100


def open_calibration(source: Source, args: argparse.Namespace) -> "Calibration | None":
    """Return the samples that --calib names."""
    if args.calib is None:
        return None
    from onnx_gconv.data.open import open_data
    from onnx_gconv.recover.calibration import calibration

    data = open_data(args.calib, source.model, preprocessing=options.preprocessing(args))
    return calibration(data, source.model, args.calib_samples)


def guide(
    source: Source, calibration: "Calibration | None", args: argparse.Namespace, progress: "Progress"
) -> "CalibratedGuide | None":
    """Return what measures costs on the calibration samples."""
    if calibration is None:
        return None
    from onnx_gconv.recover.guide import CalibratedGuide

    return CalibratedGuide(source.model, calibration, seed=args.seed, jobs=args.jobs, progress=progress)


def with_measured(
    requests: "list[Request]", source: Source, network: "Network", calibration: "Calibration | None", story: Story
) -> "list[Request]":
    """Return the requests with what --criterion activation or taylor has to know of the layers."""
    first = requests[0]
    if first.criterion not in ("activation", "taylor") or not network.layers:
        return requests
    assert calibration is not None  # or the flags were refused
    if first.criterion == "activation":
        from onnx_gconv.recover.activation import input_strengths

        found = input_strengths(source.model, network.layers, calibration.feeds(), jobs=first.jobs)
    else:
        from onnx_gconv.torch.taylor import kernel_moves

        with story.progress("gradients") as progress:
            found = kernel_moves(
                source.model,
                network.layers,
                calibration.feeds(),
                shapes=source.given_shapes,
                seed=first.seed,
                on_batch=progress,
            )
    return [replace(request, measured=found) for request in requests]


def recovered(
    source: Source, plan: "Plan", calibration: "Calibration", args: argparse.Namespace, story: Story
) -> "tuple[Source, Recovery]":
    """Return the source with its masked weights fitted, and what that brought."""
    from onnx_gconv.recover.fitting import FitOptions
    from onnx_gconv.recover.recovery import recover

    effort = FitOptions(seed=args.seed, jobs=args.jobs)
    with story.progress("recovering") as progress:
        model, recovery = recover(source.model, plan, calibration, effort=effort, progress=progress)
    if _is_one_sample(calibration):
        story.warn("the first samples are all the same: weights fitted to such data are of no use for any other")
    if recovery.samples < FEW_SAMPLES:
        story.warn(
            f"fitted to {recovery.samples} samples, so few that the weights may suit these and no others: the output error cannot "
            "tell, `evaluate` on other samples can"
        )
    return replace(source, model=model), recovery


def _is_one_sample(calibration: "Calibration") -> bool:
    """Return whether the first batch holds the same sample again and again: a sign of data that went wrong."""
    if not calibration.is_shareable:
        return False  # reading it once more may change what a function gives next
    first = next(iter(calibration.feeds()))
    return all(len(values) > 1 and bool((values == values[:1]).all()) for values in first.values())
