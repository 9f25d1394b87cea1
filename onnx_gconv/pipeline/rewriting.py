"""A plan carried out with its check: the masked and the grouped model, verified to be one function."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache

import onnx

from onnx_gconv.errors import ModelError, VerifyError
from onnx_gconv.model.check import check
from onnx_gconv.model.constants import Constants
from onnx_gconv.model.shapes import Shape
from onnx_gconv.plans import Plan
from onnx_gconv.rewrite.group import carry_out, placement_of
from onnx_gconv.rewrite.lowering import LoweringName
from onnx_gconv.rewrite.mask import mask
from onnx_gconv.rewrite.match import fit
from onnx_gconv.verification import Order, Verification, default_tolerance, verify


@dataclass(frozen=True)
class Rewritten:
    """A plan carried out on a model; `verification` is None only where none was asked for."""

    grouped: onnx.ModelProto
    verification: Verification | None
    convs: int  # how many were grouped
    gathers: tuple[int, int]  # two for each of them, and how many were written
    reasons: tuple[dict[str, str], ...]  # why each written Gather remains
    remark: str  # what ONNX's checker says, of the original model, too


def rewrite_verified(
    model: onnx.ModelProto,
    plan: Plan,
    *,
    shapes: Mapping[str, Shape],
    given_shapes: Mapping[str, Shape],
    seed: int,
    lowering: LoweringName = "group",
    is_verified: bool = True,
    way_out: str = "",
) -> Rewritten:
    """Return the grouped model, after a run of it and of the masked one, and ONNX's checker, have found it right.

    `shapes` are those of all tensors, which decide where Gathers can be saved; `given_shapes` those of the inputs to run at.
    `way_out` is what the hint of a failed check adds.
    """
    placement = placement_of(model, plan, shapes=shapes)

    @cache
    def make_grouped() -> onnx.ModelProto:
        return carry_out(model, plan, placement, lowering=lowering)

    verification = None
    if is_verified:
        inner = {layer.name: placement.read.get(layer.name) for layer in plan.layers}
        try:
            verification = _verify(model, plan, make_grouped, seed, given_shapes, inner)
        except (ModelError, VerifyError) as error:
            raise type(error)(str(error), hint=error.hint + way_out) from error
    grouped = make_grouped()
    convs = len(fit(model, plan, Constants(model)))
    gathers = 2 * convs, _count(grouped, "Gather") - _count(model, "Gather")
    reasons = tuple({"layer": gather.layer, "reason": gather.reason} for gather in placement.gathers)
    return Rewritten(grouped, verification, convs, gathers, reasons, check(grouped, model) or "")


def _count(model: onnx.ModelProto, kind: str) -> int:
    return sum(node.op_type == kind for node in model.graph.node)


def _verify(
    model: onnx.ModelProto,
    plan: Plan,
    grouped: Callable[[], onnx.ModelProto],
    seed: int,
    shapes: Mapping[str, Shape],
    inner: dict[str, Order | None],
) -> Verification:
    """Return the outcome. The grouped model is made when the masked one has run and is gone: memory is dear."""
    verification = verify(
        lambda: mask(model, plan), grouped, tolerance=default_tolerance(model), seed=seed, shapes=shapes, inner=inner
    )
    if not verification.passed:
        raise VerifyError(
            f"the grouped model differs from the masked one by {verification.max_rel_error:.1e} of the largest value, over "
            f"the limit of {verification.tolerance:.0e}; nothing was written.",
            hint="a model that amplifies rounding, or a bug of onnx-gconv: please report it",
        )
    return verification
