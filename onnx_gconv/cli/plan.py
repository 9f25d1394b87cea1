"""`plan`: decide, and write the decision to a file that people can read and edit."""

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import onnx_gconv
from onnx_gconv.cli import options
from onnx_gconv.cli.story import Story
from onnx_gconv.errors import UsageError
from onnx_gconv.files import data_file
from onnx_gconv.report.wording import counted, each_with

if TYPE_CHECKING:
    from onnx_gconv import Planned

TEACH = """\
Decide what becomes of each Conv and channel space, and write that as a plan, one a line: which channels stay and which residual
branches go (with --calib), or the number of groups of each Conv and which channels go together. Carry it out with `mask` and
`apply`. You may edit a plan by hand: it is checked when it is read.

  onnx-gconv plan model.onnx --max-flops 50% -o plan.json
  onnx-gconv plan model.onnx --max-flops 50% --calib images.npz -o plan.json
  onnx-gconv plan model.onnx --groups 4 --exclude 'head' -o plan.json
  onnx-gconv plan model.onnx --max-macs 30% --refine-steps 2 --refine-data train.npz -o plan.json --refined start.onnx
"""

REFINING = ("refine_data", "refined", "refine_epochs", "refine_lr", "refine_batch_size")  # of no use without --refine-steps


def add_flags(parser: argparse.ArgumentParser) -> None:
    options.add_model(parser)
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="PLAN", help="the plan file to write; - for stdout")
    options.add_choosing(parser)
    options.add_calibration(parser)
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
    options.add_data_flags(parser)
    options.add_json(parser)


def run(args: argparse.Namespace) -> int:
    if args.refine_steps is None:
        for name in REFINING:
            if getattr(args, name) is not None:
                raise UsageError(f"--{name.replace('_', '-')} needs --refine-steps N")
    is_file = str(args.output) != "-"
    refined = [args.refined, data_file(args.refined)] if args.refined else []
    options.check_outputs(args, *([args.output] if is_file else []), *refined)
    with Story(args) as story:
        planned = onnx_gconv.plan(args.model, listener=story.listener, **options.wishes(args))
        if args.refined is not None and planned.refined is not None:
            story.wrote(planned.refined.save(args.refined), "the refined weights, masked by the plan")
    if is_file:
        planned.save(args.output)
    if args.json or not is_file:
        sys.stdout.write(planned.plan.to_json())
        return 0
    from onnx_gconv.report.tables import print_plan, print_skipped, print_totals

    plan = planned.plan
    print_plan(plan, planned.bounds(args.model) if args.verbose else {}, planned.labels)
    if args.verbose:
        print_skipped([(conv.name, conv.reason) for conv in plan.skipped])
    print_totals(dict(vars(plan.before)), dict(vars(plan.after)))
    tell_search(planned, story)
    verbs = ("to narrow", "to drop", "to factor", "to group")
    numbers = {"spaces": len(plan.spaces), "branches": len(plan.dropped), "layers": len(plan.layers), "ranks": len(plan.low_rank)}
    todo = each_with(verbs, **numbers, layer="layer")
    story.tell(f"wrote {args.output}: {todo}" + (f", {counted(len(plan.skipped), 'Conv')} skipped" if plan.skipped else ""))
    return 0


def tell_search(planned: "Planned", story: Story) -> None:
    """Tell how good the search's choice is, and how long the model should take, where that is known."""
    found, prediction = planned.search, planned.prediction
    if found is not None:
        cost, gap = f"search: cost {found.cost:.4f}", found.as_dict()["gap"]
        if gap is None:
            story.tell(f"{cost}, by the local search, which proves nothing")
        elif gap == 0:
            story.tell(f"{cost}, proven to be the least within the budget")
        else:
            story.tell(f"{cost}; time ran out, the least is proven to be at least {found.bound:.4f}")
    if prediction is not None:
        story.tell(
            f"predicted on {prediction.runner}: {prediction.after_ms:.4g} ms, {prediction.ratio:.1%} of "
            f"{prediction.before_ms:.4g} ms (Gathers {prediction.gathers_ms:.3g} ms)"
        )
