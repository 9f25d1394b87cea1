"""`apply`: a plan carried out, the Convs really grouped."""

import argparse
from functools import partial
from pathlib import Path

from onnx_gconv.cli import options
from onnx_gconv.cli.recovering import open_calibration, recovered
from onnx_gconv.cli.rewriting import rewrite
from onnx_gconv.cli.source import open_source, tensor_shapes
from onnx_gconv.cli.story import Story
from onnx_gconv.errors import PlanError

TEACH = """\
Group the Convs as the plan says. MODEL is the original model, the masked one, or a fine-tuned masked one. How much
weight is dropped is told: it is exactly 0 for a masked model. A model that is not the original and would lose weight
all the same was tuned without its masks held; it is refused.

  onnx-gconv apply model.onnx plan.json -o grouped.onnx
  onnx-gconv apply tuned.onnx plan.json -o grouped.onnx
  onnx-gconv apply model.onnx plan.json --calib images.npz -o grouped.onnx

With --calib the weights that are left are fitted to what MODEL does on these samples, so MODEL must be the original.
"""


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = options.command(subparsers, "apply", "group the Convs of a model as a plan says", TEACH)
    options.add_model(parser)
    parser.add_argument("plan", type=Path, metavar="PLAN", help="a plan file")
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="OUT", help="the grouped model to write")
    parser.add_argument(
        "--allow-drop",
        action="store_true",
        help="drop weights outside the plan's groups, though MODEL is not the model that was planned",
    )
    options.add_calibration(parser)
    options.add_data_flags(parser)
    options.add_lowering(parser)
    options.add_verifying(parser)
    options.add_seed(parser)
    options.add_jobs(parser)
    parser.set_defaults(run=partial(run, parser))


def run(parser: argparse.ArgumentParser, args: argparse.Namespace) -> int:
    options.check_outputs(args, parser, args.output)
    from onnx_gconv.model.file import save_atomically, sha256
    from onnx_gconv.plans import read_plan
    from onnx_gconv.rewrite.mask import dropped_share

    story = Story(args)
    plan = read_plan(args.plan)
    source = open_source(args)
    dropped = dropped_share(source.model, plan)
    if dropped > 0 and not args.allow_drop and sha256(source.path) != plan.source_sha256:
        raise PlanError(
            f"'{source.path}' is not the model that was planned, and has {100 * dropped:.6g}% of the planned layers' weight "
            "(sum of absolute values) where the plan drops it.",
            hint="if it was tuned, tune it again with the zeros of the masked model held; --allow-drop drops that weight",
        )
    calibration = open_calibration(source, args)
    shapes = tensor_shapes(source)
    if calibration is not None:
        source, recovery = recovered(source, plan, calibration, args, story)
        story.tell(
            f"recovered on {recovery.samples} samples: output error {recovery.output_error_before:.3f} masked, "
            f"{recovery.output_error_after:.3f} fitted"
        )
    rewritten = rewrite(source, plan, args, story, shapes)
    files = save_atomically(rewritten.grouped, args.output, external_data=source.has_external_data)
    story.wrote(
        files,
        f"{rewritten.convs} Convs grouped, {rewritten.gathers[1]} Gathers, "
        f"dropped {100 * dropped:.6g}% of their weight (sum of absolute values)",
    )
    if rewritten.verification is not None:
        story.tell(f"verified: differs from the masked model by {rewritten.verification.max_rel_error:.1e} of the largest value")
    return 0
