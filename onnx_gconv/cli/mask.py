"""`mask`: the dense model with the weights that a plan drops set to zero."""

import argparse
from functools import partial
from pathlib import Path

from onnx_gconv.cli import options
from onnx_gconv.cli.rewriting import rewrite
from onnx_gconv.cli.source import open_source, tensor_shapes
from onnx_gconv.cli.story import Story

TEACH = """\
Write the model with the weights that the plan drops set to zero, and nothing else changed: all names are kept, any
framework can import and fine-tune it. Then `apply` the same plan to the tuned model.

  onnx-gconv mask model.onnx plan.json -o masked.onnx
"""


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = options.command(subparsers, "mask", "zero the weights that a plan drops, for fine-tuning anywhere", TEACH)
    options.add_model(parser)
    parser.add_argument("plan", type=Path, metavar="PLAN", help="a plan file")
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="OUT", help="the masked model to write")
    options.add_verifying(parser)
    options.add_seed(parser)
    parser.set_defaults(run=partial(run, parser))


def run(parser: argparse.ArgumentParser, args: argparse.Namespace) -> int:
    options.check_outputs(args, parser, args.output)
    from onnx_gconv.model.file import save_atomically, sha256
    from onnx_gconv.plans import read_plan
    from onnx_gconv.rewrite.mask import dropped_share, mask

    story = Story(args)
    plan = read_plan(args.plan)
    source = open_source(args)
    rewritten = rewrite(source, plan, args, story, tensor_shapes(source))
    if sha256(source.path) != plan.source_sha256:
        story.warn(f"'{source.path}' is not the model that was planned; its layers have the same names and shapes")
    files = save_atomically(mask(source.model, plan), args.output, external_data=source.has_external_data)
    story.wrote(
        files,
        f"{rewritten.convs} Convs masked, {dropped_share(source.model, plan):.1%} of their weight (sum of absolute values) zeroed",
    )
    return 0
