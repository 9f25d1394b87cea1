"""`--refine-steps`: prune and fine-tune inside the search, the optional step of the paper's Algorithm 1."""

from collections.abc import Iterator, Mapping
from dataclasses import replace

import onnx

from onnx_gconv.data.batch import Data
from onnx_gconv.data.open import open_data
from onnx_gconv.model.constants import Constants
from onnx_gconv.pipeline.importances import layer_importance
from onnx_gconv.pipeline.job import Job
from onnx_gconv.pipeline.planned import Planned
from onnx_gconv.pipeline.planning import feasible_plans, resolve_budget
from onnx_gconv.pipeline.rewriting import Rewritten
from onnx_gconv.pipeline.settings import Settings
from onnx_gconv.plans import Plan, PlannedLayer
from onnx_gconv.rewrite.mask import local_mask, mask
from onnx_gconv.rewrite.match import match
from onnx_gconv.torch.refining import tuner
from onnx_gconv.torch.training import TrainingSettings


def refine(job: Job) -> Planned:
    """Return the plan that is chosen by weights which have adapted to most of the pruning already, and these weights.

    The paper starts at one group everywhere, gives one layer after the other more groups, and may "prune and fine-tune the
    model by the current G at the end of each iteration" to estimate costs better. One layer an iteration would be a training
    for each; here an iteration is a budget, and budgets fall by equal factors from the dense model to what is asked. As in the
    paper groups only ever grow. Weights that an earlier step has dropped are zero, so a later step splits the groups there are.
    """
    original, settings, listener = job.original, job.settings, job.listener
    assert settings.refine_data is not None  # or the settings were refused
    data = open_data(settings.refine_data, original.model, preprocessing=settings.preprocessing)

    def plan(model: onnx.ModelProto, asked: Settings, least: Mapping[str, int]) -> Planned:
        step = replace(job, original=replace(original, model=model), settings=asked)
        return next(feasible_plans(step, guide=None, least_groups=least))

    unrefined = plan(original.model, settings, {}).plan  # a budget that cannot be met fails here, and not after the training
    model, least = original.model, dict[str, int]()
    steps = list(_steps(job))
    with tuner(original.model, data, _training(settings, data), original.given_shapes) as tuning:
        for number, step in enumerate(steps, start=1):
            now = plan(model, step, least).plan
            model, record = tuning.tune(model, now, listener.phase("tuning"))
            least = {layer.name: layer.groups for layer in now.layers}
            listener.note(
                f"step {number}/{len(steps)}: {_left(now)} left, {len(now.layers)} layers grouped; "
                f"tuned to a loss of {record.train_loss:.4f} ({record.seconds:.0f} s in the last epoch)"
            )
    final = plan(model, settings, least)
    layers = _kept_of(job, final.plan)
    decided = replace(final.plan, layers=layers, source_sha256=original.sha256)
    other = _differing(unrefined, decided)
    listener.note(f"refined: fine-tuning changed the number of groups of {other} layers")
    matched = match(model, decided, shapes=original.network.shapes)
    convs = len(matched.layers)
    start = Rewritten(mask(model, matched), convs, (2 * convs, 0), (), None, original.files)
    return replace(final, plan=decided, refined=start)


def _steps(job: Job) -> Iterator[Settings]:
    """Yield the settings with budgets that fall by equal factors, down to before the one that is asked for."""
    count, steps, asked = job.original.network.count, job.settings.refine_steps or 0, resolve_budget(job)
    wholes = {"max_params": count.params, "max_macs": count.macs or 0, "max_flops": count.flops or 0}
    for step in range(1, steps + 1):

        def amount(name: str, step: int = step) -> int | None:
            target = asked.as_dict().get(name)
            return None if target is None else int(wholes[name] * min(target / wholes[name], 1.0) ** (step / (steps + 1)))

        yield replace(job.settings, max_params=amount("max_params"), max_macs=amount("max_macs"), max_flops=amount("max_flops"))


def _training(settings: Settings, data: Data) -> TrainingSettings:
    return TrainingSettings(
        epochs=settings.refine_epochs,
        lr=settings.refine_lr,
        batch_size=settings.refine_batch_size,
        schedule="cosine",
        distill=0.0 if data.has_labels else 1.0,
        crop=False,
        flip=False,
        amp=False,
        seed=settings.seed,
        freeze_bn=False,
        val_split=0.0,
    )


def _kept_of(job: Job, plan: Plan) -> tuple[PlannedLayer, ...]:
    """Return the plan's layers with the share that they keep of the given model, and not of the tuned one."""
    model, constants = job.original.model, Constants(job.original.model)
    layers = {layer.name: layer for layer in job.original.network.layers}
    shares = {}
    for matched in match(model, plan, shapes=job.original.network.shapes).layers:
        name = matched.layer.name
        importance = layer_importance(constants, layers[name], job.settings.criterion, job.facts)
        total = float(importance.sum())
        shares[name] = float(importance[local_mask(matched)].sum()) / total if total > 0 else 1.0
    return tuple(replace(layer, kept=round(shares[layer.name], 6)) for layer in plan.layers)


def _left(plan: Plan) -> str:
    if plan.after.macs is None or not plan.before.macs:
        return f"{plan.after.params / plan.before.params:.1%} of the parameters"
    return f"{plan.after.macs / plan.before.macs:.1%} of the MACs"


def _differing(first: Plan, second: Plan) -> int:
    one, other = ({layer.name: layer.groups for layer in plan.layers} for plan in (first, second))
    return sum(one.get(name) != other.get(name) for name in one.keys() | other.keys())
