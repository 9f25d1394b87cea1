"""`inspect`: every Conv of a model, and what the model costs."""

import argparse
import json

import onnx_gconv
from onnx_gconv.cli import options
from onnx_gconv.cli.story import Story

TEACH = """\
List every Conv of the model with its shape, the numbers of groups it can have and what it costs, and every skipped Conv with
the reason.

  onnx-gconv inspect model.onnx
  onnx-gconv inspect detector.onnx --input-shape 1x3x640x640 --json
"""


def add_flags(parser: argparse.ArgumentParser) -> None:
    options.add_model(parser)
    options.add_json(parser)


def run(args: argparse.Namespace) -> int:
    with Story(args) as story:
        network = onnx_gconv.inspect(args.model, listener=story.listener, **options.wishes(args))
    if args.json:
        print(json.dumps({"format": 1, "model": str(args.model), **network.as_dict()}, indent=1, ensure_ascii=False))
    else:
        from onnx_gconv.report.tables import print_network

        print_network(network)
    return 0
