"""`evaluate`: how well a model does on data."""

import argparse
import json
from pathlib import Path

from onnx_gconv.cli import options
from onnx_gconv.cli.story import Story

TEACH = """\
Run a model on data and print how often it is right (top-1 and top-5, where there are labels) and how close it is to a
reference: how often both name the same class, and the distance of each output. Models that do not classify need a
reference.

  onnx-gconv evaluate small.onnx --data test.npz
  onnx-gconv evaluate small.onnx --data test.npz --reference model.onnx
  onnx-gconv evaluate small.onnx --data val/ --resize 256 --mean 0.485,0.456,0.406 --std 0.229,0.224,0.225
"""


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = options.command(subparsers, "evaluate", "accuracy on data, and distance to a reference", TEACH)
    parser.add_argument("model", type=Path, metavar="MODEL", help="an ONNX file")
    parser.add_argument("--data", required=True, metavar="DATA", help=options.DATA_HELP)
    parser.add_argument("--reference", type=Path, metavar="DENSE", help="the ONNX file to compare with, for example the original")
    parser.add_argument("--limit", type=options.positive, metavar="N", help="only the first N samples")
    options.add_data_flags(parser)
    options.add_json(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from onnx_gconv.data.open import open_data
    from onnx_gconv.evaluation import evaluate
    from onnx_gconv.model.file import load

    model = load(args.model)
    reference = None if args.reference is None else load(args.reference)
    data = open_data(args.data, model, preprocessing=options.preprocessing(args))
    with Story(args).progress("evaluating") as progress:
        result = evaluate(model, data, reference=reference, limit=args.limit, on_progress=progress)
    if args.json:
        names = {"model": str(args.model), "data": args.data, "reference": args.reference and str(args.reference)}
        print(json.dumps({"format": 1, **names, **result.as_dict()}, indent=1, ensure_ascii=False))
    else:
        from onnx_gconv.report.tables import print_evaluation

        print_evaluation(result)
    return 0
