"""Carrying out a plan with its check: the masked and the grouped model, verified to be one function."""

import argparse
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

from onnx_gconv.cli.source import Source
from onnx_gconv.cli.story import Story
from onnx_gconv.errors import ModelError, VerifyError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import onnx

    from onnx_gconv.model.shapes import Shape
    from onnx_gconv.plan import Plan
    from onnx_gconv.verify import Order, Verification


@dataclass(frozen=True)
class Rewritten:
    """A plan carried out on a model; `verification` is None only where --no-verify was asked for."""

    grouped: "onnx.ModelProto"
    verification: "Verification | None"
    convs: int  # how many were grouped
    gathers: tuple[int, int]  # two for each of them, and how many were written
    reasons: tuple[dict[str, str], ...]  # why each written Gather remains


def rewrite(source: Source, plan: "Plan", args: argparse.Namespace, story: Story, shapes: "Mapping[str, Shape]") -> Rewritten:
    """Return the grouped model, after a run of it and of the masked one, and ONNX's checker, have found it right."""
    from onnx_gconv.model.check import check
    from onnx_gconv.model.constants import Constants
    from onnx_gconv.rewrite.fit import fit
    from onnx_gconv.rewrite.group import carry_out, placement_of

    placement = placement_of(source.model, plan, shapes=shapes)

    @cache
    def make_grouped() -> "onnx.ModelProto":
        return carry_out(source.model, plan, placement, lowering=getattr(args, "lowering", "group"))

    verification = None
    if args.no_verify:
        story.warn("not verified: --no-verify was given")
    else:
        inner = {layer.name: placement.read.get(layer.name) for layer in plan.layers}
        try:
            verification = _verify(source, plan, make_grouped, args.seed, inner)
        except (ModelError, VerifyError) as error:
            raise type(error)(str(error), hint=f"{error.hint}; --no-verify writes without the check") from error
    grouped = make_grouped()
    convs = len(fit(source.model, plan, Constants(source.model)))
    gathers = 2 * convs, _count(grouped, "Gather") - _count(source.model, "Gather")
    reasons = tuple({"layer": gather.layer, "reason": gather.reason} for gather in placement.gathers)
    for gather in placement.gathers:
        story.detail(f"Gather for {gather.layer!r}, which {gather.reason}")
    remark = check(grouped, source.model)
    if remark:
        story.detail(f"note: {remark}")
    return Rewritten(grouped, verification, convs, gathers, reasons)


def _count(model: "onnx.ModelProto", kind: str) -> int:
    return sum(node.op_type == kind for node in model.graph.node)


def _verify(
    source: Source, plan: "Plan", grouped: "Callable[[], onnx.ModelProto]", seed: int, inner: "dict[str, Order | None]"
) -> "Verification":
    """Return the outcome. The grouped model is made when the masked one has run and is gone: memory is dear."""
    from onnx_gconv.rewrite.mask import mask
    from onnx_gconv.verify import default_tolerance, verify

    verification = verify(
        lambda: mask(source.model, plan),
        grouped,
        tolerance=default_tolerance(source.model),
        seed=seed,
        shapes=source.given_shapes,
        inner=inner,
    )
    if not verification.passed:
        raise VerifyError(
            f"the grouped model differs from the masked one by {verification.max_rel_error:.1e} of the largest value, over "
            f"the limit of {verification.tolerance:.0e}; nothing was written.",
            hint="a model that amplifies rounding, or a bug of onnx-gconv: please report it",
        )
    return verification
