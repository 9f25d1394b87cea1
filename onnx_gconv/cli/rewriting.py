"""Carrying out a plan with its check, as the flags of a command ask."""

import argparse
from typing import TYPE_CHECKING

from onnx_gconv.cli.source import Source
from onnx_gconv.cli.story import Story

if TYPE_CHECKING:
    from collections.abc import Mapping

    from onnx_gconv.model.shapes import Shape
    from onnx_gconv.pipeline.rewriting import Rewritten
    from onnx_gconv.plans import Plan


def rewrite(source: Source, plan: "Plan", args: argparse.Namespace, story: Story, shapes: "Mapping[str, Shape]") -> "Rewritten":
    """Return the grouped model, verified unless --no-verify was given."""
    from onnx_gconv.pipeline.rewriting import rewrite_verified

    if args.no_verify:
        story.warn("not verified: --no-verify was given")
    rewritten = rewrite_verified(
        source.model,
        plan,
        shapes=shapes,
        given_shapes=source.given_shapes,
        seed=args.seed,
        lowering=getattr(args, "lowering", "group"),
        is_verified=not args.no_verify,
        way_out="; --no-verify writes without the check",
    )
    for gather in rewritten.reasons:
        story.detail(f"Gather for {gather['layer']!r}, which {gather['reason']}")
    if rewritten.remark:
        story.detail(f"note: {rewritten.remark}")
    return rewritten
