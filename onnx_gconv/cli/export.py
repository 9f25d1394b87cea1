"""`export`: a model as a target reads it."""

import argparse
import json
from functools import partial
from pathlib import Path

from onnx_gconv.cli import options
from onnx_gconv.cli.story import Story

TEACH = """\
Write the model as a target reads it: for the Jetson TX2 opset 13, IR version 7 and int32 indices, for TensorRT int32 indices.
The result is run against the model before it is written; what cannot be converted is named.

  onnx-gconv export model.gconv.onnx --target tx2 --batch 1 -o model.tx2.onnx
"""


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = options.command(subparsers, "export", "write a model as a target reads it", TEACH)
    options.add_model(parser)
    parser.add_argument("--target", choices=("tx2", "tensorrt", "ort-cpu"), required=True, help="who is to read it")
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="OUT", help="the model to write")
    parser.add_argument("--batch", type=options.positive, metavar="N", help="fix the batch; --input-shape fixes all axes")
    options.add_verifying(parser)
    options.add_seed(parser)
    options.add_json(parser)
    parser.set_defaults(run=partial(run, parser))


def run(parser: argparse.ArgumentParser, args: argparse.Namespace) -> int:
    if args.batch is not None and args.input_shape:
        parser.error("--input-shape gives the batch, too: leave out --batch")
    options.check_outputs(args, parser, args.output)
    from onnx_gconv.cli.source import open_source
    from onnx_gconv.deploy.exporting import batch_shapes, export
    from onnx_gconv.deploy.opset import standard_opset
    from onnx_gconv.errors import VerifyError
    from onnx_gconv.model.file import save_atomically
    from onnx_gconv.verification import default_tolerance, verify

    story = Story(args)
    source = open_source(args)
    shapes = source.given_shapes if args.batch is None else batch_shapes(source.model, args.batch)
    exported = export(source.model, args.target, shapes=shapes)
    if args.no_verify:
        story.warn("not verified: --no-verify was given")
        checked = None
    else:
        checked = verify(source.model, exported.model, tolerance=default_tolerance(source.model), seed=args.seed, shapes=shapes)
        if not checked.passed:
            raise VerifyError(
                f"the converted model differs by {checked.max_rel_error:.1e} of the largest value; nothing was written.",
                hint="export the model from its framework with the opset that the target reads",
            )
    files = save_atomically(exported.model, args.output, external_data=source.has_external_data)
    if args.json:
        facts = {"opset": standard_opset(exported.model), "ir_version": exported.model.ir_version}
        verification = None if checked is None else checked.as_dict()
        data = {"format": 1, "output": str(args.output), "target": args.target, **facts, "changes": list(exported.remarks)}
        print(json.dumps({**data, "verify": verification}, indent=1))
    story.wrote(files, "; ".join(exported.remarks) or "nothing had to change")
    return 0
