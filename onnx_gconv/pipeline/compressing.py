"""`compress`: the whole main job. `plan`: its first half."""

from typing import Unpack

from onnx_gconv.cores import one_blas_thread
from onnx_gconv.data.open import open_data
from onnx_gconv.evaluation import evaluate
from onnx_gconv.listener import SILENT, Listener
from onnx_gconv.pipeline.changes import changed_nodes
from onnx_gconv.pipeline.extras import require_torch
from onnx_gconv.pipeline.facts import measure
from onnx_gconv.pipeline.forecasting import tell_time
from onnx_gconv.pipeline.in_time import Chooser
from onnx_gconv.pipeline.job import Job
from onnx_gconv.pipeline.original import ModelLike, Original, open_original, require_float, tell_counts
from onnx_gconv.pipeline.planned import Planned
from onnx_gconv.pipeline.planning import feasible_plans
from onnx_gconv.pipeline.quantised import quantised_of
from onnx_gconv.pipeline.recovering import guide_of, open_samples, recovered
from onnx_gconv.pipeline.result import Result, footprints
from onnx_gconv.pipeline.rewriting import rewrite
from onnx_gconv.pipeline.settings import CompressWishes, PlanWishes, Settings, settings_of
from onnx_gconv.pipeline.stopwatch import Stopwatch
from onnx_gconv.recover.calibration import Calibration
from onnx_gconv.rewrite.match import match

NOT_FITTED = (
    "without --calib no weight is fitted, so most of the accuracy is probably lost: give --calib DATA, a few hundred samples "
    "without labels, or train the result with `finetune`; --eval DATA measures it"
)

IN_INT8 = "--precision int8 may keep this time with less taken away, or nothing: int8 alone halves the time of many models"


@one_blas_thread
def compress(model: ModelLike, *, listener: Listener = SILENT, **wishes: Unpack[CompressWishes]) -> Result:
    """Return the model compressed to a budget: planned, recovered if there is `calib`, written and verified.

        result = onnx_gconv.compress("model.onnx", max_flops=0.5, calib="images.npz", eval="test.npz")
        print(result.evaluation.reference_top1, result.evaluation.top1)
        result.save("small.onnx")

    `model` is a path or an `onnx.ModelProto`, which is left as it is. A budget is a share (0.5 or "50%") of the model before or an
    amount (300e6 or "300M"). Data is an .npz file, a folder of images, "package.module:function", a dict of arrays by input
    name, one array, or an iterable of batches. Without `calib` no weight is fitted, and accuracy is most likely lost.
    """
    settings = settings_of("compress", wishes, CompressWishes)
    settings.require_goal()
    watch = Stopwatch()
    with watch("read"):
        original, samples = _opened(model, settings, listener)
        judging = None if settings.eval is None else open_data(settings.eval, original.model, preprocessing=settings.preprocessing)
    job = _job(original, settings, samples, listener, watch)
    if samples is not None:
        tell_time(job, samples, is_fitted=True)
    clocked = Chooser(job).first_in_time(guide_of(job, samples))
    matched = match(original.model, clocked.plan, shapes=original.network.shapes)
    weights, recovery = original.model, None
    if samples is not None:
        with watch("recover"):
            fitted, recovery = recovered(job, matched, samples, is_choosing=True)
        weights, matched = fitted.model, fitted.matched
        clocked = clocked.keeping(matched)
    with watch("rewrite_and_verify"):
        rewritten = rewrite(job, weights, matched, recovery=recovery)
        before, after = footprints(original, rewritten, clocked.plan)
    evaluation = None
    if judging is not None:
        with watch("evaluate"):
            progress = listener.phase("evaluating")
            evaluation = evaluate(rewritten.model, judging, reference=original.model, on_progress=progress)
    quantised = None if samples is None else quantised_of(job, rewritten.model, samples, judging, clocked)
    if not matched:
        where = " in int8" if clocked.precision == "int8" else ""
        listener.warn(f"the model is within the budget as it is{where}, so nothing was changed")
    elif samples is None:
        listener.warn(NOT_FITTED)
    elif settings.precision == "fp32" and settings.max_latency is not None and clocked.latency is not None:
        listener.note(IN_INT8)
    changes = changed_nodes(original.model, original.network, matched)
    return Result(original, clocked, rewritten, changes, evaluation, before, after, watch.seconds, quantised)


@one_blas_thread
def plan(model: ModelLike, *, listener: Listener = SILENT, **wishes: Unpack[PlanWishes]) -> Planned:
    """Return the decision alone: which channels stay, which branches go, which Convs get how many groups, and how good that is.

        planned = onnx_gconv.plan("model.onnx", max_flops=0.5)
        planned.save("plan.json")
        onnx_gconv.apply("model.onnx", planned.plan).save("small.onnx")

    The same wishes as for `compress`, but for those that say how a model is written and judged. With `refine_steps` the model
    is fine-tuned on `refine_data` on the way down to the budget, and `planned.refined` has the weights that the plan was chosen by.
    """
    settings = settings_of("plan", wishes, PlanWishes)
    settings.require_goal()
    if settings.refine_steps is not None:
        require_torch("--refine-steps")
    original, samples = _opened(model, settings, listener)
    job = _job(original, settings, samples, listener, Stopwatch())
    if samples is not None:
        tell_time(job, samples, is_fitted=False)
    if settings.refine_steps is not None:
        from onnx_gconv.pipeline.refining import refine  # which imports PyTorch

        return refine(job)
    return next(feasible_plans(job, guide=guide_of(job, samples)))


def _opened(model: ModelLike, settings: Settings, listener: Listener) -> tuple[Original, Calibration | None]:
    if settings.criterion == "taylor":
        require_torch("--criterion taylor")
    original = open_original(model, settings.input_shape)
    tell_counts(original, listener)
    require_float(original.network)
    return original, open_samples(original, settings)


def _job(original: Original, settings: Settings, samples: Calibration | None, listener: Listener, watch: Stopwatch) -> Job:
    with watch("measure"):
        facts = measure(original, settings, samples, listener)
    return Job(original, settings, facts, listener, watch)
