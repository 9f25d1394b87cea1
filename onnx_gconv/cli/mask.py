"""`mask`: the dense model with the weights that a plan drops set to zero."""

import argparse
from pathlib import Path

import onnx_gconv
from onnx_gconv.cli import options
from onnx_gconv.cli.story import Story
from onnx_gconv.files import data_file
from onnx_gconv.report.wording import each_with

TEACH = """\
Write the model with the weights that the plan drops set to zero. Nothing else changes and every name is kept, so any
framework can import it and fine-tune it. Then `apply` the same plan to the tuned model.

  onnx-gconv mask model.onnx plan.json -o masked.onnx
"""


def add_flags(parser: argparse.ArgumentParser) -> None:
    options.add_model(parser)
    parser.add_argument("plan", type=Path, metavar="PLAN", help="a plan file")
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="OUT", help="the masked model to write")
    options.add_verifying(parser)
    options.add_seed(parser)


def run(args: argparse.Namespace) -> int:
    options.check_outputs(args, args.output, data_file(args.output))
    with Story(args) as story:
        masked = onnx_gconv.mask(args.model, args.plan, listener=story.listener, **options.wishes(args))
        files = masked.save(args.output)
        verbs = ("masked", "masked", "masked", "masked")
        done = each_with(verbs, spaces=masked.spaces, branches=masked.branches, layers=masked.convs, ranks=masked.ranks)
        story.wrote(files, f"{done}, {masked.dropped:.1%} of their weight (sum of absolute values) zeroed")
    return 0
