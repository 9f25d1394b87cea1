"""`evaluate`: how well a model does on data."""

import argparse
import json
from pathlib import Path

import onnx_gconv
from onnx_gconv.cli import options
from onnx_gconv.cli.story import Story

TEACH = """\
Run a model on data. Prints how often it is right (top-1 and top-5, where there are labels) and how close it is to a
reference: how often both name the same class, and the distance of each output. A model that does not classify needs a
reference.

  onnx-gconv evaluate small.onnx --data test.npz
  onnx-gconv evaluate small.onnx --data test.npz --reference model.onnx
  onnx-gconv evaluate small.onnx --data val/ --resize 256 --mean 0.485,0.456,0.406 --std 0.229,0.224,0.225
"""


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", type=Path, metavar="MODEL", help="an ONNX file")
    parser.add_argument("--data", required=True, metavar="DATA", help=options.DATA_HELP)
    parser.add_argument("--reference", type=Path, metavar="DENSE", help="the ONNX file to compare with, for example the original")
    parser.add_argument("--limit", type=options.positive, metavar="N", help="only the first N samples")
    options.add_data_flags(parser)
    options.add_json(parser)


def run(args: argparse.Namespace) -> int:
    with Story(args) as story:
        found = onnx_gconv.evaluate(
            args.model,
            args.data,
            reference=args.reference,
            limit=args.limit,
            listener=story.listener,
            **options.wishes(args),
        )
    if args.json:
        names = {"model": str(args.model), "data": args.data, "reference": args.reference and str(args.reference)}
        print(json.dumps({"format": 1, **names, **found.as_dict()}, indent=1, ensure_ascii=False))
    else:
        from onnx_gconv.report.tables import print_evaluation

        print_evaluation(found)
    return 0
