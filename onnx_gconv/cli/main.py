"""`onnx-gconv COMMAND MODEL …`. Imports nothing heavy: each command imports its module only when it runs."""

import argparse
import os
import sys
import traceback
from collections.abc import Sequence
from contextlib import nullcontext

from onnx_gconv import __version__
from onnx_gconv.cli import apply, bench, compress, evaluate, explore, export, finetune, inspect, mask, plan, report, verify
from onnx_gconv.cli.stopping import STOPS, Terminated, terminated_in_order
from onnx_gconv.errors import GconvError

DESCRIPTION = """\
Make a trained CNN smaller: turn its convolutions into group convolutions, straight on the ONNX file.

  onnx-gconv inspect  model.onnx                     what can be grouped, and what it costs now
  onnx-gconv compress model.onnx --max-flops 50%     the whole job: plan, group, verify, write, report
  onnx-gconv compress model.onnx --max-flops 50% --calib images.npz     and fit the weights that are left: no labels, no training

or step by step, with files to look at and edit in between:

  onnx-gconv plan     model.onnx --max-flops 50% -o plan.json
  onnx-gconv mask     model.onnx plan.json -o masked.onnx      for fine-tuning in any framework
  onnx-gconv apply    masked.onnx plan.json -o grouped.onnx    the same function, really grouped
  onnx-gconv verify   masked.onnx grouped.onnx

training back what pruning cost, with labels or without (needs PyTorch):

  onnx-gconv finetune model.onnx plan.json --data train.npz -o tuned.onnx

what it costs in accuracy:

  onnx-gconv evaluate grouped.onnx --data test.npz --reference model.onnx

or look at many budgets first:

  onnx-gconv explore  model.onnx -o sweep --points 12

and measure, here or on a device:

  onnx-gconv bench    model.onnx model.gconv.onnx --runner trtexec --host ssh://nvidia@jetson

and see it all on one page:

  onnx-gconv report   model.gconv.report.json -o page.html
"""
# NumPy's BLAS reads this when it is first imported, which is after this. Our matrices are small, and its threads, waiting for
# a core that somebody else uses, made a solve fifteen times slower. One thread also adds up in one order, always.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

COMMANDS = (inspect, compress, plan, mask, finetune, apply, verify, evaluate, explore, export, bench, report)


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of all commands."""
    parser = argparse.ArgumentParser(
        prog="onnx-gconv",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="Exit codes: 0 done, 1 a failure you can act on, 2 wrong usage, 130 interrupted, 143 terminated.",
    )
    parser.add_argument("--version", action="version", version=f"onnx-gconv {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for command in COMMANDS:
        command.add_parser(commands)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    args = build_parser().parse_args(argv)
    try:
        # With arguments it is a function of another program, whose signals are its own.
        with terminated_in_order() if argv is None else nullcontext():
            code: int = args.run(args)
            sys.stdout.flush()
        return code
    except GconvError as error:
        _complain(str(error), error.hint)
    except STOPS as stop:
        how, code = ("terminated", 143) if isinstance(stop, Terminated) else ("interrupted", 130)
        _complain(f"{how}; {str(stop) or 'no result was written.'}", "")  # a command that keeps something says what
        return code
    except BrokenPipeError:
        # The reader of our output (head, less) has left: do not complain when Python flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except MemoryError:
        _complain("there is not enough memory for this model.", "close other programs or use a larger machine")
    except Exception as error:
        if args.verbose:
            traceback.print_exc()
        _complain(f"onnx-gconv failed unexpectedly: {type(error).__name__}: {error}", "run again with -v and report what it prints")
    return 1


def _complain(message: str, hint: str) -> None:
    print(f"error: {message}", file=sys.stderr)
    if hint:
        print(f"hint: {hint}", file=sys.stderr)
