"""`mask` and `apply`: a plan carried out on a model, which may have been tuned elsewhere in between."""

import os
from dataclasses import replace
from typing import Protocol, Unpack

from onnx_gconv.cores import one_blas_thread
from onnx_gconv.errors import PlanError, UsageError
from onnx_gconv.listener import SILENT, Listener
from onnx_gconv.model.shapes import ShapeLike
from onnx_gconv.pipeline.job import Job
from onnx_gconv.pipeline.original import ModelLike, open_original
from onnx_gconv.pipeline.recovering import open_samples, recovered
from onnx_gconv.pipeline.rewriting import Rewritten, rewrite
from onnx_gconv.pipeline.settings import ApplyWishes, PathLike, Settings, settings_of
from onnx_gconv.plans import Plan, read_plan
from onnx_gconv.rewrite import mask as masking
from onnx_gconv.rewrite.mask import dropped_share
from onnx_gconv.rewrite.match import match


class HasPlan(Protocol):
    """A result of ours: what `plan` and `compress` return."""

    @property
    def plan(self) -> Plan: ...


PlanLike = Plan | PathLike | HasPlan


def plan_of(given: PlanLike) -> Plan:
    """Return a plan, the one of a result, or the one in a file."""
    if isinstance(given, str | os.PathLike):
        return read_plan(given)
    found = given if isinstance(given, Plan) else getattr(given, "plan", None)
    if not isinstance(found, Plan):
        raise UsageError(f"a plan is a path, a Plan or a result of ours, not {type(given).__name__}")
    return found


def mask(
    model: ModelLike,
    plan: PlanLike,
    *,
    verify: bool = True,
    seed: int = 0,
    input_shape: ShapeLike = (),
    listener: Listener = SILENT,
) -> Rewritten:
    """Return the dense model with the weights that the plan drops at zero and every name kept: for training anywhere.

    The compressed model is made and compared with it as well, so that the plan can be carried out on what was trained.
    """
    decided, original = plan_of(plan), open_original(model, input_shape)
    matched = match(original.model, decided, shapes=original.network.shapes)
    dropped = dropped_share(original.model, matched)
    job = Job(original, Settings(verify=verify, seed=seed), listener=listener)
    checked = rewrite(job, original.model, matched, dropped=dropped)
    if original.sha256 != decided.source_sha256:
        listener.warn(f"{original.name} is not the model that was planned; its layers have the same names and shapes")
    return replace(checked, model=masking.mask(original.model, matched))


@one_blas_thread
def apply(
    model: ModelLike,
    plan: PlanLike,
    *,
    allow_drop: bool = False,
    listener: Listener = SILENT,
    **wishes: Unpack[ApplyWishes],
) -> Rewritten:
    """Return the model with the plan carried out; `model` is the original, the masked one, or one that was tuned masked.

    `dropped` says how much weight that took away: exactly 0 for a masked model. A model that is not the original and would
    lose weight all the same was tuned without its masks held; it is refused unless `allow_drop`. With `calib` the weights that
    are left are fitted to what `model` does on these samples, so it must be the original.
    """
    settings = settings_of("apply", wishes, ApplyWishes)
    decided, original = plan_of(plan), open_original(model, settings.input_shape)
    matched = match(original.model, decided, shapes=original.network.shapes)
    dropped = dropped_share(original.model, matched)
    if dropped > 0 and not allow_drop and original.sha256 != decided.source_sha256:
        raise PlanError(
            f"{original.name} is not the model that was planned, and has {100 * dropped:.6g}% of the planned layers' weight "
            "(sum of absolute values) where the plan drops it.",
            hint="if it was tuned, tune it again with the zeros of the masked model held; --allow-drop drops that weight",
        )
    job, samples = Job(original, settings, listener=listener), open_samples(original, settings)
    if samples is None:
        return rewrite(job, original.model, matched, dropped=dropped)
    fitted, recovery = recovered(job, matched, samples)
    return rewrite(job, fitted.model, matched, dropped=dropped, recovery=recovery)
