"""`onnx-gconv COMMAND MODEL …`. Imports nothing heavy, and of the commands only the one that runs.

Until `main` has the signals in order, Ctrl-C would print a traceback: what takes a moment to import is imported after that.
"""

import os
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import TYPE_CHECKING

from onnx_gconv import __version__, stopping
from onnx_gconv.errors import GconvError, UsageError
from onnx_gconv.stopping import STOPS

if TYPE_CHECKING:
    import argparse

DESCRIPTION = """\
Make a trained CNN smaller, straight on the ONNX file: with fewer channels, without branches that add little, in group
convolutions.

  onnx-gconv inspect  model.onnx                     its Convs, and what they cost now
  onnx-gconv compress model.onnx --max-flops 50% --calib images.npz --eval test.npz
                                                     the whole job: plan, recover, write, verify, report

The weights that are left are fitted to what the dense model does on the samples of --calib: no labels, no training. Without
--calib nothing is fitted, and most of the accuracy is lost until you train. Step by step, with files to look at and edit:

  onnx-gconv plan     model.onnx --max-flops 50% -o plan.json
  onnx-gconv mask     model.onnx plan.json -o masked.onnx      for fine-tuning in any framework
  onnx-gconv finetune model.onnx plan.json --data train.npz -o tuned.onnx     or here (needs PyTorch)
  onnx-gconv apply    tuned.onnx plan.json -o small.onnx       the same function, really smaller
  onnx-gconv verify   tuned.onnx small.onnx

How good and how fast it is, here or on a device, and which budget to choose:

  onnx-gconv evaluate small.onnx --data test.npz --reference model.onnx
  onnx-gconv bench    model.onnx small.onnx --runner trtexec --host ssh://nvidia@jetson
  onnx-gconv explore  model.onnx -o sweep --points 12 --calib images.npz --eval test.npz
  onnx-gconv report   sweep -o page.html

In Python, `onnx_gconv.compress(...)` and so on take the same words.
"""
COMMANDS = {
    "inspect": "list the Convs of a model and what they cost",
    "compress": "the whole job: plan, recover, write, verify, report",
    "plan": "decide what becomes of each Conv and channel space, and write a plan file",
    "mask": "zero the weights that a plan drops, for fine-tuning anywhere",
    "finetune": "train a pruned model in PyTorch, masks held",
    "apply": "carry a plan out on a model",
    "verify": "compare two models on seeded inputs",
    "evaluate": "accuracy on data, and distance to a reference",
    "explore": "the best plan or model for each of several budgets",
    "export": "write a model as a target reads it",
    "bench": "measure latency, here or on a device over ssh",
    "report": "the results as one HTML page with charts",
}
FILES = (".onnx", ".json", ".npz", ".html")  # ends of words that are no flags
# NumPy's BLAS reads this when it is first imported, which is after this: it need not even start its threads (cores.py says why).
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")


def build_parser(only: str | None = None) -> "argparse.ArgumentParser":
    """Return the parser of all commands, or, if one is to run, that of this one beside the names of the others."""
    import argparse

    parser = argparse.ArgumentParser(
        prog="onnx-gconv",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="Exit codes: 0 done, 1 a failure you can act on, 2 wrong usage, 130 interrupted, 143 terminated.",
    )
    parser.add_argument("--version", action="version", version=f"onnx-gconv {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, summary in COMMANDS.items():
        if only not in (None, name):
            commands.add_parser(name, help=summary)
            continue
        module = import_module(f"onnx_gconv.cli.{name}")
        command = commands.add_parser(
            name,
            help=summary,
            description=module.TEACH,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,  # a typo is no flag, here as in Python
        )
        volume = command.add_mutually_exclusive_group()
        volume.add_argument("-v", "--verbose", action="store_true", help="tell more on stderr")
        volume.add_argument("-q", "--quiet", action="store_true", help="only errors on stderr")
        module.add_flags(command)
        command.usage = _usage(command)
        command.set_defaults(run=module.run, parser=command)
    return parser


def _usage(command: "argparse.ArgumentParser") -> str:
    """Return what a command needs, in one line: its thirty other flags would bury the error that stands below."""
    needed = [
        f"{action.option_strings[0]} {action.metavar or action.dest.upper()}"
        for action in command._actions
        if action.required and action.option_strings
    ]
    named = [str(action.metavar) + " …" * (action.nargs == "+") for action in command._actions if not action.option_strings]
    return " ".join([command.prog, *named, *needed, "[flags]", "  (--help lists them)"])


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    given = list(sys.argv[1:] if argv is None else argv)
    stopping.WRITTEN.clear()
    if argv is None:  # with arguments it is a function of another program, whose signals are its own
        stopping.in_order()
    try:
        code = _run(given)
    except SystemExit as left:  # argparse leaves this way
        if argv is None:
            stopping.settled(int(left.code or 0))
        raise
    except STOPS as stop:
        code = _stopped(type(stop), str(stop))
    except BrokenPipeError:
        # The reader of our output (head, less) has left: do not complain when Python flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 1
    except MemoryError:
        _complain("there is not enough memory for this model.", "close other programs or use a larger machine")
        code = 1
    except Exception as error:
        # Some libraries make an error of their own out of a stop: NumPy does while it is imported.
        stop_asked = stopping.asked() if argv is None else None
        is_verbose = not {"-v", "--verbose"}.isdisjoint(given)
        code = _stopped(stop_asked) if stop_asked is not None else _unexpected(error, is_verbose=is_verbose)
    if argv is None:
        stopping.settled(code)
    return code


def _run(given: list[str]) -> int:
    try:
        # Help needs the names of the commands only; a typo is refused with all of them.
        args = build_parser(only=given[0] if given else "").parse_args(given)
    except SystemExit as left:
        dashed = next((word for word in given if word.startswith("-") and (os.path.exists(word) or word.endswith(FILES))), None)
        if left.code and dashed is not None:
            print(f"hint: a file whose name begins with a dash is named ./{dashed}", file=sys.stderr)
        raise
    try:
        code: int = args.run(args)
        sys.stdout.flush()
    except UsageError as error:
        args.parser.error(str(error))
    except GconvError as error:
        _complain(str(error), error.hint)
        return 1
    return code


def _stopped(stop: type[BaseException], said: str = "") -> int:
    """Say what is left of a command that was told to stop, and return its exit code; some say it themselves."""
    how, code = stopping.NAMES[stop]
    stopping.settled(code)
    # What is in a hidden folder, the cache of times, is no result.
    results = [path for path in dict.fromkeys(stopping.WRITTEN) if not any(part.startswith(".") for part in path.absolute().parts)]
    files = ", ".join(f"'{path}'" for path in results if path.exists())
    _complain(f"{how}; {said or (f'written: {files}.' if files else 'no result was written.')}", "")
    return code


def _unexpected(error: Exception, *, is_verbose: bool) -> int:
    if is_verbose:
        import traceback

        traceback.print_exc()
    _complain(f"onnx-gconv failed unexpectedly: {type(error).__name__}: {error}", "run again with -v and report what it prints")
    return 1


def _complain(message: str, hint: str) -> None:
    print(f"error: {message}", file=sys.stderr)
    if hint:
        print(f"hint: {hint}", file=sys.stderr)
