"""`inspect`: every Conv of a model, and what the model costs."""

import argparse

from onnx_gconv.cli import options
from onnx_gconv.cli.source import open_source, read_network
from onnx_gconv.cli.story import Story

TEACH = """\
List every Conv of the model: its shape, the numbers of groups it can have, what it costs; and every Conv that cannot
be grouped, with the reason.

  onnx-gconv inspect model.onnx
  onnx-gconv inspect detector.onnx --input-shape 1x3x640x640 --json
"""


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = options.command(subparsers, "inspect", "list the Convs of a model and what they cost", TEACH)
    options.add_model(parser)
    options.add_json(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    source = open_source(args)
    network = read_network(source, Story(args))
    if not args.json:
        from onnx_gconv.report.tables import print_network

        print_network(network)
        return 0
    import json

    layers = [
        {
            "name": layer.name,
            "label": layer.label,
            "out_channels": layer.out_channels,
            "in_channels": layer.in_channels,
            "kernel": layer.kernel,
            "groups": layer.groups,
            "legal_groups": layer.legal_groups,
            "dtype": layer.dtype,
            "params": layer.weights,
            "macs": layer.macs,
        }
        for layer in network.layers
    ]
    count = network.count
    data = {
        "format": 1,
        "model": str(source.path),
        "input_shapes": network.input_shapes,
        "totals": {"params": count.params, "macs": count.macs, "flops": count.flops},
        "layers": layers,
        "skipped": [vars(conv) for conv in network.skipped],
    }
    print(json.dumps(data, indent=1, ensure_ascii=False))
    return 0
