"""`verify`: whether two models are the same function."""

import argparse
import json
from pathlib import Path

import onnx_gconv
from onnx_gconv.cli import options
from onnx_gconv.errors import VerifyError

TEACH = """\
Run two models on the same seeded inputs and print the largest difference in each output. Exits with 1 beyond the tolerance.
Differences are relative to the largest value of the output.

  onnx-gconv verify masked.onnx grouped.onnx
"""


def add_flags(parser: argparse.ArgumentParser) -> None:
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


def run(args: argparse.Namespace) -> int:
    found = onnx_gconv.verify(args.model, args.other, tolerance=args.tolerance, samples=args.samples, **options.wishes(args))
    if args.json:
        outputs = {name: difference.as_dict() for name, difference in found.outputs.items()}
        print(json.dumps({"format": 1, **found.as_dict(), "outputs": outputs}, indent=1))
    else:
        from onnx_gconv.report.tables import print_verification

        print_verification(found)
    if not found.passed:
        raise VerifyError(
            f"'{args.model}' and '{args.other}' differ by {found.max_rel_error:.1e} of the largest value (limit "
            f"{found.tolerance:.0e}).",
            hint="--tolerance sets another limit",
        )
    return 0
