"""`apply`: a plan carried out, the Convs really narrowed and grouped."""

import argparse
from pathlib import Path

import onnx_gconv
from onnx_gconv.cli import options
from onnx_gconv.cli.story import Story
from onnx_gconv.files import data_file
from onnx_gconv.report.wording import counted, each_with

TEACH = """\
Carry the plan out: channels and branches that go are taken out of the graph, Convs are grouped. MODEL is the original model, the
masked one, or a masked one that you fine-tuned. It says how much weight it drops: exactly 0 for a masked model. A model other
than the original that would lose weight was tuned without its zeros held, and is refused.

  onnx-gconv apply model.onnx plan.json -o grouped.onnx
  onnx-gconv apply tuned.onnx plan.json -o grouped.onnx
  onnx-gconv apply model.onnx plan.json --calib images.npz -o grouped.onnx

With --calib the weights that are left are fitted to what MODEL does on these samples, so MODEL must be the original.
"""


def add_flags(parser: argparse.ArgumentParser) -> None:
    options.add_model(parser)
    parser.add_argument("plan", type=Path, metavar="PLAN", help="a plan file")
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="OUT", help="the model to write")
    parser.add_argument(
        "--allow-drop",
        action="store_true",
        help="drop weights that the plan does not keep, though MODEL is not the model that was planned",
    )
    options.add_calibration(parser)
    options.add_data_flags(parser)
    options.add_lowering(parser)
    options.add_verifying(parser)
    options.add_seed(parser)
    options.add_jobs(parser)


def run(args: argparse.Namespace) -> int:
    options.check_outputs(args, args.output, data_file(args.output))
    with Story(args) as story:
        grouped = onnx_gconv.apply(
            args.model, args.plan, allow_drop=args.allow_drop, listener=story.listener, **options.wishes(args)
        )
        if grouped.recovery is not None:
            found = grouped.recovery
            story.tell(
                f"recovered on {found.samples} samples: output error {found.output_error_before:.3f} masked, "
                f"{found.output_error_after:.3f} fitted"
            )
        verbs = ("narrowed", "dropped", "factored", "grouped")
        done = each_with(verbs, spaces=grouped.spaces, branches=grouped.branches, layers=grouped.convs, ranks=grouped.ranks)
        gathers = f", {counted(grouped.gathers[1], 'Gather')}" if grouped.convs else ""
        weight = f"dropped {100 * (grouped.dropped or 0.0):.6g}% of their weight (sum of absolute values)"
        story.wrote(grouped.save(args.output), f"{done}{gathers}, {weight}")
        if grouped.verification is not None:
            story.tell(f"verified: differs from the masked model by {grouped.verification.max_rel_error:.1e} of the largest value")
    return 0
