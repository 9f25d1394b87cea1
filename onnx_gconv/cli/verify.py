"""`verify`: whether two models are the same function."""

import argparse
import json
from pathlib import Path

from onnx_gconv.cli import options

TEACH = """\
Run two models on the same seeded inputs and print the worst difference of each output; exit 1 beyond the tolerance.
The difference is relative to the largest value of the output.

  onnx-gconv verify masked.onnx grouped.onnx
"""


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = options.command(subparsers, "verify", "compare two models on seeded inputs", TEACH)
    options.add_model(parser)
    parser.add_argument("other", type=Path, metavar="OTHER", help="the ONNX file to compare it with")
    parser.add_argument(
        "--tolerance",
        type=float,
        metavar="T",
        help="largest relative difference (default by type: 1e-4 for float32, 2e-2 for float16)",
    )
    parser.add_argument("--samples", type=int, default=4, metavar="N", help="how many inputs (default 4)")
    options.add_seed(parser)
    options.add_json(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from onnx_gconv.cli.source import open_source
    from onnx_gconv.errors import VerifyError
    from onnx_gconv.model.file import load
    from onnx_gconv.verification import default_tolerance, finite, verify

    if args.samples < 1:
        raise VerifyError(f"--samples {args.samples} compares nothing.", hint="ask for at least 1")
    if args.tolerance is not None and not args.tolerance >= 0:
        raise VerifyError(
            f"--tolerance {args.tolerance} is not a number from 0 on.", hint="leave it out for the default of the model's type"
        )
    source = open_source(args)
    tolerance = args.tolerance if args.tolerance is not None else default_tolerance(source.model)
    result = verify(
        source.model, load(args.other), tolerance=tolerance, seed=args.seed, samples=args.samples, shapes=source.given_shapes
    )
    if args.json:
        outputs = {
            name: {"max_abs": finite(d.max_abs), "max_rel": finite(d.max_rel), "inconclusive": d.inconclusive}
            for name, d in result.outputs.items()
        }
        print(json.dumps({"format": 1, **result.as_dict(), "outputs": outputs}, indent=1))
    else:
        from onnx_gconv.report.tables import print_verification

        print_verification(result)
    if not result.passed:
        raise VerifyError(
            f"'{args.model}' and '{args.other}' differ by {result.max_rel_error:.1e} of the largest value (limit {tolerance:.0e}).",
            hint="--tolerance sets another limit",
        )
    return 0
