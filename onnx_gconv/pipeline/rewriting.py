"""A plan carried out with its check: the masked and the written model, verified to be one function."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import onnx

from onnx_gconv.errors import ModelError, VerifyError
from onnx_gconv.model.bodies import bodies
from onnx_gconv.model.check import check
from onnx_gconv.model.file import save_model
from onnx_gconv.pipeline.job import Job
from onnx_gconv.pipeline.original import Original
from onnx_gconv.pipeline.reaching import SEED
from onnx_gconv.pipeline.settings import PathLike, as_path
from onnx_gconv.recover.recovery import Recovery
from onnx_gconv.rewrite.group import carry_out, placement_of
from onnx_gconv.rewrite.mask import mask
from onnx_gconv.rewrite.match import Matched
from onnx_gconv.verification import Order, Verification, default_tolerance, verify

WAY_OUT = "; --no-verify writes without the check"


@dataclass(frozen=True, eq=False)
class Rewritten:
    """A plan carried out on a model: the model as it is now, and what is known of it."""

    model: onnx.ModelProto
    convs: int  # how many were grouped, or masked to be
    gathers: tuple[int, int]  # two for each of them, and how many a grouped model has
    reasons: tuple[dict[str, str], ...]  # why each of those remains
    verification: Verification | None  # None only where none was asked for
    made_from: tuple[Path, ...]  # the files of the original; with several, the weights get a file of their own here, too
    dropped: float | None = None  # the share of the layers' weight that the plan drops; None where nobody asked
    recovery: Recovery | None = None  # None without calibration data
    spaces: int = 0  # how many were narrowed, or masked to be
    branches: int = 0  # how many were dropped, or masked to be
    ranks: int = 0  # how many Convs became two, or the product of two

    def save(self, path: PathLike) -> list[Path]:
        """Write the model, whole or not at all, and return its files."""
        return save_model(self.model, as_path(path), self.made_from)


def rewrite(
    job: Job,
    model: onnx.ModelProto,
    matched: Matched,
    *,
    dropped: float | None = None,
    recovery: Recovery | None = None,
) -> Rewritten:
    """Return the compressed model, after a run of it and of the masked one, and ONNX's checker, have found it right.

    `model` is the original, or has its graph and other weights.
    """
    original, settings, listener = job.original, job.settings, job.listener
    if settings.verify:
        _require_reached(original, matched)
    placement = placement_of(model, matched, shapes=original.network.shapes)

    @cache
    def make_grouped() -> onnx.ModelProto:
        return carry_out(model, matched, placement, lowering=settings.lowering)

    verification = None
    if settings.verify:
        seed = SEED if matched.inside else settings.seed  # on inputs that are known to run the bodies
        inner = {name: placement.read.get(name) for name in matched.changed_in(make_grouped())}
        verification = _verified(original, lambda: mask(model, matched), make_grouped, inner, placement.read, seed=seed)
    else:
        listener.warn("not verified: --no-verify was given")
    grouped = make_grouped()
    for gather in placement.all_gathers:
        listener.detail(f"Gather for {gather.layer!r}, which {gather.reason}")
    convs = len(matched.layers) + len(matched.inside)
    remark = check(grouped, model)
    if remark:
        listener.detail(f"note: {remark}")
    return Rewritten(
        model=grouped,
        convs=convs,
        gathers=(2 * convs, _count(grouped, "Gather") - _count(model, "Gather")),
        reasons=tuple({"layer": gather.layer, "reason": gather.reason} for gather in placement.all_gathers),
        verification=verification,
        made_from=original.files,
        dropped=dropped,
        recovery=recovery,
        spaces=len(matched.spaces),
        branches=len(matched.dropped),
        ranks=len(matched.ranks),
    )


def _count(model: onnx.ModelProto, kind: str) -> int:
    graphs = model.graph, *(body.graph for body in bodies(model))
    return sum(node.op_type == kind for graph in graphs for node in graph.node)


def _require_reached(original: Original, matched: Matched) -> None:
    """Refuse to change a Conv in a body that no verification would reach."""
    reached = {layer.name for layer in original.network.inside}
    for each in matched.inside:
        if each.layer.name not in reached:
            reason = next((conv.reason for conv in original.network.skipped if conv.name == each.layer.name), "it is not reached")
            raise VerifyError(
                f"the layer {each.layer.name!r} cannot be grouped: {reason}.",
                hint=f"give an --input-shape with which it runs, or remove it from the plan{WAY_OUT}",
            )


def _verified(
    original: Original,
    masked: Callable[[], onnx.ModelProto],
    grouped: Callable[[], onnx.ModelProto],
    inner: dict[str, Order | None],
    orders: Mapping[str, Order],
    *,
    seed: int,
) -> Verification:
    """Return the outcome. The compressed model is made when the masked one has run and is gone: memory is dear."""
    tolerance = default_tolerance(original.model)
    try:
        shapes = original.given_shapes
        found = verify(masked, grouped, tolerance=tolerance, seed=seed, shapes=shapes, inner=inner, orders=orders)
    except (ModelError, VerifyError) as error:  # it could not be found out; a difference that was found has no way out
        raise type(error)(str(error), hint=error.hint + WAY_OUT) from error
    if not found.passed:
        raise VerifyError(
            f"the compressed model differs from the masked one by {found.max_rel_error:.1e} of the largest value, over "
            f"the limit of {found.tolerance:.0e}; nothing was written.",
            hint="a model that amplifies rounding, or a bug of onnx-gconv: please report it",
        )
    return found
