"""`--refine-steps`: prune and fine-tune inside the search, the optional step of the paper's Algorithm 1."""

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from onnx_gconv.cli import options
from onnx_gconv.cli.source import Source
from onnx_gconv.cli.story import Story

if TYPE_CHECKING:
    import onnx

    from onnx_gconv.data.batch import Data
    from onnx_gconv.model.network import Network
    from onnx_gconv.pipeline.planner import Planned
    from onnx_gconv.pipeline.settings import Request
    from onnx_gconv.plans import Plan, PlannedLayer
    from onnx_gconv.torch.training import TrainingSettings

FLAGS = ("refine_data", "refined", "refine_epochs", "refine_lr", "refine_batch_size")  # of no use without --refine-steps
Planner = Callable[["onnx.ModelProto", "list[Request]"], "Planned"]


@dataclass(frozen=True)
class Refined:
    """A plan within the budget, and the model whose weights it was chosen by, masked: a start for `finetune`."""

    planned: "Planned"
    start: "onnx.ModelProto"


def add_refining(parser: argparse.ArgumentParser) -> None:
    refining = parser.add_argument_group(
        "refining", "the budget is reached in steps, with a short fine-tuning in PyTorch after each but the last"
    )
    refining.add_argument(
        "--refine-steps", type=options.positive, metavar="N", help="prune and fine-tune N times on the way (default: never)"
    )
    refining.add_argument("--refine-data", metavar="DATA", help="what to fine-tune on, with or without labels; as --calib")
    refining.add_argument("--refine-epochs", type=options.positive, metavar="N", help="rounds over it at each step (default 1)")
    refining.add_argument("--refine-lr", type=options.positive_number, metavar="RATE", help="learning rate (default 0.01)")
    refining.add_argument("--refine-batch-size", type=options.positive, metavar="N", help="samples in a step (default 128)")
    refining.add_argument(
        "--refined", type=Path, metavar="OUT", help="also write the refined weights, masked by the plan: a start for `finetune`"
    )


def check_refining(args: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    """Leave with a usage error where the flags make no sense together."""
    if args.refine_steps is None:
        for flag in FLAGS:
            if getattr(args, flag) is not None:
                parser.error(f"--{flag.replace('_', '-')} needs --refine-steps N")
        return
    if args.refine_data is None:
        parser.error("--refine-steps fine-tunes: give --refine-data DATA")
    if args.groups or args.max_group_channels or args.group_config or args.max_latency:
        parser.error("--refine-steps is for a search under --max-macs, --max-flops or --max-params")
    if args.calib is not None:
        parser.error("--refine-steps takes its costs from the tuned weights: leave out --calib (`finetune` has it for the start)")
    if args.refined is not None:
        options.check_outputs(args, parser, args.refined)


def refine(
    source: Source, network: "Network", requests: "list[Request]", args: argparse.Namespace, story: Story, *, plan: Planner
) -> Refined:
    """Return the plan that is chosen by weights which have adapted to most of the pruning already.

    The paper starts at one group everywhere, gives one layer after the other more groups, and may "prune and fine-tune the
    model by the current G at the end of each iteration" to estimate costs better. One layer an iteration would be a training
    for each; here an iteration is a budget, and budgets fall by equal factors from the dense model to what is asked. As in the
    paper groups only ever grow. Weights that an earlier step has dropped are zero, so a later step splits the groups there are.
    """
    from onnx_gconv.data.open import open_data
    from onnx_gconv.rewrite.mask import mask
    from onnx_gconv.torch.refining import tuner

    data = open_data(args.refine_data, source.model, preprocessing=options.preprocessing(args))
    unrefined = plan(source.model, requests).plan  # a budget that cannot be met fails here, and not after the training
    model, least = source.model, dict[str, int]()
    budgets = list(_budgets(requests, network, args.refine_steps))
    with tuner(source.model, data, _settings(args, data), source.given_shapes) as tuning, story.progress("tuning") as progress:
        for number, step in enumerate(budgets[:-1], start=1):
            now = plan(model, [replace(request, least_groups=least) for request in step]).plan
            model, record = tuning.tune(model, now, progress)
            least = {layer.name: layer.groups for layer in now.layers}
            story.tell(
                f"step {number}/{args.refine_steps}: {_left(now)} left, {len(now.layers)} layers grouped; "
                f"tuned to a loss of {record.train_loss:.4f} ({record.seconds:.0f} s in the last epoch)"
            )
    final = plan(model, [replace(request, least_groups=least) for request in budgets[-1]])
    decided = replace(final.plan, layers=_kept_of(source.model, network, final.plan, requests[0]))
    other = _differing(unrefined, decided)
    story.tell(f"refined: {other} layers have another number of groups than without the fine-tuning")
    return Refined(replace(final, plan=decided), mask(model, decided))


def _budgets(requests: "list[Request]", network: "Network", steps: int) -> "Iterator[list[Request]]":
    """Yield the requests with budgets that fall by equal factors; the last ones are what is asked."""
    from onnx_gconv.pipeline.planner import resolve_budget
    from onnx_gconv.search.budget import Limit

    asked = resolve_budget(requests[0], network).as_dict()
    wholes = {"max_params": network.count.params, "max_macs": network.count.macs, "max_flops": network.count.flops}
    for step in range(1, steps + 1):
        limits = {}
        for name, target in asked.items():
            whole = wholes[name]
            assert whole is not None, "resolve_budget has refused limits on what is not known"
            value = int(whole * min(target / whole, 1.0) ** (step / (steps + 1)))
            limits[name] = Limit(str(value), value, is_share=False)
        yield [replace(request, limits=limits) for request in requests]
    yield requests


def _settings(args: argparse.Namespace, data: "Data") -> "TrainingSettings":
    from onnx_gconv.torch.training import TrainingSettings

    return TrainingSettings(
        epochs=args.refine_epochs or 1,
        lr=args.refine_lr or 0.01,
        batch_size=args.refine_batch_size or 128,
        schedule="cosine",
        distill=0.0 if data.has_labels else 1.0,
        crop=False,
        flip=False,
        amp=False,
        seed=args.seed,
        freeze_bn=False,
        val_split=0.0,
    )


def _kept_of(model: "onnx.ModelProto", network: "Network", plan: "Plan", request: "Request") -> "tuple[PlannedLayer, ...]":
    """Return the plan's layers with the share that they keep of the given model, and not of the tuned one."""
    from onnx_gconv.model.constants import Constants
    from onnx_gconv.pipeline.importances import layer_importance
    from onnx_gconv.rewrite.mask import local_mask
    from onnx_gconv.rewrite.match import fit

    constants = Constants(model)
    layers = {layer.name: layer for layer in network.layers}
    shares = {}
    for fitted in fit(model, plan, constants):
        importance = layer_importance(constants, layers[fitted.layer.name], request)
        total = float(importance.sum())
        shares[fitted.layer.name] = float(importance[local_mask(fitted)].sum()) / total if total > 0 else 1.0
    return tuple(replace(layer, kept=round(shares[layer.name], 6)) for layer in plan.layers)


def _left(plan: "Plan") -> str:
    if plan.after.macs is None or not plan.before.macs:
        return f"{plan.after.params / plan.before.params:.1%} of the parameters"
    return f"{plan.after.macs / plan.before.macs:.1%} of the MACs"


def _differing(first: "Plan", second: "Plan") -> int:
    one, other = ({layer.name: layer.groups for layer in plan.layers} for plan in (first, second))
    return sum(one.get(name) != other.get(name) for name in one.keys() | other.keys())
