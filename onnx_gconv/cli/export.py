"""`export`: a model as a target reads it."""

import argparse
import json
from pathlib import Path

import onnx_gconv
from onnx_gconv.cli import options
from onnx_gconv.cli.story import Story
from onnx_gconv.files import data_file

TEACH = """\
Write the model as a target reads it: opset 13, IR version 7 and int32 indices for the Jetson TX2, int32 indices for TensorRT.
The result is compared with the model before it is written. Anything that cannot be converted is named.

  onnx-gconv export model.gconv.onnx --target tx2 --batch 1 -o model.tx2.onnx
  onnx-gconv export model.gconv.onnx --target ort-cpu --precision int8 --calib images.npz -o model.int8.onnx

--precision int8 quantises the model, with scales from the samples of --calib: uint8 activations for ort-cpu, symmetric int8 ones
and float biases for tensorrt. It is no longer the same function: how close it is on the samples is printed.
"""


def add_flags(parser: argparse.ArgumentParser) -> None:
    options.add_model(parser)
    parser.add_argument(
        "--target", choices=("tx2", "tensorrt", "ort-cpu"), default="ort-cpu", help="who is to read it (default ort-cpu)"
    )
    parser.add_argument("--precision", choices=("fp32", "fp16", "int8"), help="arithmetic to write (default fp32: as it is)")
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="OUT", help="the model to write")
    parser.add_argument("--batch", type=options.positive, metavar="N", help="fix the batch; --input-shape fixes all axes")
    options.add_calibration(parser)
    options.add_data_flags(parser)
    options.add_verifying(parser)
    options.add_seed(parser)
    options.add_json(parser)


def run(args: argparse.Namespace) -> int:
    options.check_outputs(args, args.output, data_file(args.output))
    wishes = options.wishes(args)
    del wishes["target"]
    with Story(args) as story:
        exported = onnx_gconv.export(args.model, args.target, batch=args.batch, listener=story.listener, **wishes)
        files = exported.save(args.output)
        if args.json:
            print(json.dumps({"format": 1, "output": str(args.output), "target": args.target, **exported.as_dict()}, indent=1))
        elif exported.evaluation is not None:
            from onnx_gconv.report.tables import print_evaluation

            print_evaluation(exported.evaluation)
        story.wrote(files, "; ".join(exported.changes) or "nothing had to change")
    return 0
