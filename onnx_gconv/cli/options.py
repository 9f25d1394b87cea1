"""Flags that several commands share, and the values they stand for."""

import argparse
import math
import os
import re
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from onnx_gconv.cli.training import require_torch

if TYPE_CHECKING:
    from onnx_gconv.data.preprocessing import Preprocessing, Size
    from onnx_gconv.pipeline.settings import Request

# Arguments that name what a command reads, and what that is.
READ = {
    "model": "model",
    "models": "model",
    "plan": "plan",
    "results": "report",
    "teacher": "teacher",
    "group_config": "configuration",
    "timing": "table of times",
    "calib": "data",
    "data": "data",
    "eval": "data",
    "finetune": "data",
    "refine_data": "data",
}
DATA_HELP = (
    "an .npz file with an array for each model input, by its name, samples first, preprocessed, and optionally 'labels'; or a "
    "folder of images, with a sub-folder for each class where labels are needed; or package.module:function, which returns "
    "(inputs, labels) batches"
)


def command(
    subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]", name: str, summary: str, teach: str
) -> argparse.ArgumentParser:
    """Return the parser of one command with what every command has."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        name, help=summary, description=teach, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    volume = parser.add_mutually_exclusive_group()
    volume.add_argument("-v", "--verbose", action="store_true", help="tell more on stderr")
    volume.add_argument("-q", "--quiet", action="store_true", help="only errors on stderr")
    return parser


def add_model(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", type=Path, metavar="MODEL", help="an ONNX file")
    add_input_shape(parser)


def add_input_shape(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--input-shape",
        action="append",
        default=[],
        metavar="[NAME=]1x3x224x224",
        help="the input shape to count MACs, verify and measure at; needed where axes are dynamic (else: batch 1, 224 pixels)",
    )


def add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print the result as JSON on stdout")


def add_verifying(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--no-verify", action="store_true", help="write without running the model first; for models ONNX Runtime cannot run"
    )


def add_lowering(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--lowering",
        choices=("group", "split", "matmul"),
        default="group",
        help="how a group convolution is written: one Conv with groups (default), Split and a Conv for each group, or a batched "
        "MatMul for 1x1 Convs",
    )


def add_seed(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seed", type=natural, default=0, metavar="N", help="seed of everything random (default 0)")


def add_jobs(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--jobs", type=positive, default=os.cpu_count() or 1, metavar="N", help="processes or threads (default: all cores)"
    )


def add_data_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags that say how the images of a folder become the model's input."""
    images = parser.add_argument_group("images", "for a folder of images: each channel becomes (pixel * scale - mean) / std")
    images.add_argument(
        "--resize",
        type=_size,
        metavar="SIZE",
        help="224: scale the shorter side to that; 320x240: width, height (default: as it is)",
    )
    images.add_argument(
        "--crop",
        type=_size,
        metavar="SIZE",
        help="then cut 224 by 224, or 320x240, out of the centre (default: the size the model takes)",
    )
    images.add_argument("--scale", type=_number, metavar="S", help="a number or a fraction (default 1/255; 1 for uint8 inputs)")
    images.add_argument("--mean", type=_numbers, metavar="M,M,M", help="for each channel, or one for all (default 0)")
    images.add_argument("--std", type=_positive_numbers, metavar="S,S,S", help="for each channel, or one for all (default 1)")
    images.add_argument("--channel-order", choices=("rgb", "bgr"), default="rgb", help="of colour images (default rgb)")


def preprocessing(args: argparse.Namespace) -> "Preprocessing":
    """Return what the flags of `add_data_flags` ask for."""
    from onnx_gconv.data.preprocessing import Preprocessing

    return Preprocessing(args.resize, args.crop, args.scale, args.mean or (), args.std or (), args.channel_order)


def add_calibration(parser: argparse.ArgumentParser) -> None:
    """Add the flags that name calibration data; `add_data_flags` says how images are read."""
    recovery = parser.add_argument_group("recovery", "on unlabelled samples, with linear algebra; no training")
    recovery.add_argument(
        "--calib", metavar="DATA", help="samples like those the model was made for, some hundred or more; " + DATA_HELP
    )
    recovery.add_argument(
        "--calib-samples", type=positive, default=1000, metavar="N", help="use at most the first N of them (default 1000)"
    )


def add_choosing(parser: argparse.ArgumentParser) -> None:
    """Add the flags that choose the number of groups of each layer."""
    budget = parser.add_argument_group(
        "budget", "50% of the whole model before, or a number: 1.9G, 300M, 5k. Several hold at once; none is ever exceeded."
    )
    budget.add_argument("--max-flops", metavar="LIMIT", help="floating-point operations, 2 x MACs")
    budget.add_argument("--max-macs", metavar="LIMIT", help="multiply-accumulates")
    budget.add_argument("--max-params", metavar="LIMIT", help="parameters")
    budget.add_argument(
        "--max-latency",
        metavar="LIMIT",
        help="time on a device, 60%% of what the model takes or 3.5ms; needs --timing, or --target ort-cpu to time the layers now",
    )
    budget.add_argument("--timing", type=Path, metavar="FILE", help="the table that `bench --sweep` has written")
    rule = parser.add_argument_group("rule", "instead of a search under a budget").add_mutually_exclusive_group()
    rule.add_argument("--groups", type=positive, metavar="G", help="G groups wherever that is legal")
    rule.add_argument(
        "--max-group-channels",
        type=positive,
        metavar="N",
        help="as many groups as bring each layer to N channels per group (the paper's G_M)",
    )
    rule.add_argument(
        "--group-config", type=Path, metavar="FILE", help="the numbers of groups of a plan, or of the paper's authors' JSON"
    )
    add_method(parser, measured=True)


def add_method(parser: argparse.ArgumentParser, *, measured: bool) -> None:
    """Add the flags that say which layers to group and how to solve and search; `measured` where there may be --calib."""
    _add_layers(parser)
    _add_solving(parser, measured=measured)
    add_jobs(parser)
    add_seed(parser)


def _add_layers(parser: argparse.ArgumentParser) -> None:
    layers = parser.add_argument_group("layers")
    layers.add_argument("--include", type=_regex, metavar="REGEX", help="group only layers whose layer or node name matches")
    layers.add_argument("--exclude", type=_regex, metavar="REGEX", help="leave layers whose layer or node name matches")
    layers.add_argument(
        "--min-group-channels",
        type=positive,
        default=1,
        metavar="N",
        help="at least N input and output channels per group (default 1)",
    )
    layers.add_argument(
        "--target",
        choices=("generic", "ort-cpu", "tensorrt"),
        help="offer only groups of a multiple of 16 (ort-cpu) or 8 (tensorrt) channels, the fast ones there (default generic: any; "
        "with --timing the device that was measured)",
    )


def _add_solving(parser: argparse.ArgumentParser, *, measured: bool) -> None:
    how = parser.add_argument_group("method")
    how.add_argument(
        "--criterion",
        choices=("l2", "l1", *(("taylor", "activation") if measured else ())),
        default="l2",
        help="importance of a kernel: its L2 norm (default, as in the paper), its L1 norm"
        + (
            "; with --calib also taylor, how far the outputs move without it, to first order (needs PyTorch), or activation, its "
            "L2 norm times the strength of its input"
            if measured
            else ""
        ),
    )
    how.add_argument(
        "--solver",
        choices=("best", "paper", "plain"),
        default="best",
        help="which channels go together: alternating exact assignment (default), the paper's sort, or no permutation",
    )
    how.add_argument(
        "--effort", type=int, choices=range(4), default=1, help="how hard --solver best and --cost trial try (default 1)"
    )
    how.add_argument(
        "--sort-rounds",
        type=natural,
        default=10,
        metavar="N",
        help="N_S of --solver paper, rounds of sorting a block (default 10)",
    )
    how.add_argument(
        "--search",
        choices=("exact", "local"),
        default="exact",
        help="how the budget is spent: the provably best choice (default), or the paper's local search",
    )
    how.add_argument(
        "--cost",
        choices=("log", "share", *(("sensitivity", "trial") if measured else ())),
        help="what a search adds up over the layers: -log of the kept share (default), or the paper's 1 - kept"
        + (
            "; with --calib also sensitivity, how far the outputs move when one layer alone is grouped and fitted, or trial, "
            "several of these, the one whose plan recovers best (default with --calib)"
            if measured
            else ""
        ),
    )
    how.add_argument(
        "--gathers",
        choices=("free", "shared", "none"),
        help="free: the best permutation of each layer, Gathers where no weight absorbs it; shared: one partition for each "
        "residual stream, Gathers only inside blocks; none: no Gather (default: free for target generic, else the first of none, "
        "shared, free that meets the budget)",
    )


def check_choosing(args: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    """Leave with a usage error when nothing says how much to compress."""
    budgets = (args.max_flops, args.max_macs, args.max_params, args.max_latency)
    if not any((*budgets, args.groups, args.max_group_channels, args.group_config)):
        parser.error("say how much: for example --max-flops 50%, --max-params 1.2M, or --groups 2")
    if args.max_latency and args.timing is None and args.target != "ort-cpu":
        parser.error("--max-latency needs times: --timing FILE from `bench --sweep`, or --target ort-cpu to time the layers now")
    check_measured(args, parser)


def check_measured(args: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    """Leave when something is to be measured and there is no data, or not what it takes."""
    if getattr(args, "calib", None) is None:
        for flag, needs in (("cost", ("sensitivity", "trial")), ("criterion", ("taylor", "activation"))):
            if getattr(args, flag) in needs:
                parser.error(f"--{flag} {getattr(args, flag)} is measured on data: give --calib DATA")
    if args.criterion == "taylor":
        require_torch("--criterion taylor")


def request(args: argparse.Namespace) -> "Request":
    """Return what the flags of `add_choosing` or `add_method` ask for."""
    from onnx_gconv.pipeline.settings import Request
    from onnx_gconv.search.budget import parse_latency, parse_limit
    from onnx_gconv.solve.layer import Solver

    limits = {
        name: parse_limit(getattr(args, name)) for name in ("max_params", "max_macs", "max_flops") if getattr(args, name, None)
    }
    if getattr(args, "max_latency", None):
        limits["max_latency_ms"] = parse_latency(args.max_latency)
    return Request(
        limits=limits,
        groups=getattr(args, "groups", None),  # `explore` has no budget and no rule
        max_group_channels=getattr(args, "max_group_channels", None),
        group_config=getattr(args, "group_config", None),
        include=args.include,
        exclude=args.exclude,
        min_group_channels=args.min_group_channels,
        target=args.target or "generic",
        criterion=args.criterion,
        solver=Solver(args.solver, args.sort_rounds, args.effort, args.seed),
        search=args.search,
        cost=args.cost or ("trial" if getattr(args, "calib", None) else "log"),
        gathers=args.gathers or "free",
        seed=args.seed,
        jobs=args.jobs,
    )


def requests(args: argparse.Namespace) -> "list[Request]":
    """Return what the flags ask for, one request for each way of Gathers that may be tried, the fastest first."""
    first = request(args)
    if args.target is None and args.timing is not None:
        from onnx_gconv.cli.sweeping import target_of
        from onnx_gconv.deploy.time_table import read_table

        first = replace(first, target=target_of(read_table(args.timing).bench.runner))
    if args.gathers is not None or first.target == "generic":
        return [first]
    return [replace(first, gathers=way) for way in ("none", "shared", "free")]


def positive(text: str) -> int:
    """Return a whole number from 1 on."""
    return _whole(text, least=1)


def positive_number(text: str) -> float:
    """Return a number above 0."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return value


def natural(text: str) -> int:
    """Return a whole number from 0 on."""
    return _whole(text, least=0)


def _whole(text: str, *, least: int) -> int:
    if not text.strip().isdecimal() or int(text) < least:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from {least} on")
    return int(text)


def _size(text: str) -> "Size":
    numbers = [positive(part) for part in text.lower().split("x")]
    if len(numbers) > 2:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size like 224 or 320x240")
    return numbers[0] if len(numbers) == 1 else (numbers[0], numbers[1])


def _number(text: str) -> float:
    over, slash, under = text.partition("/")
    try:
        number = float(over) / float(under) if slash else float(over)
    except (ValueError, ZeroDivisionError) as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number like 0.5 or 1/255") from error
    if not math.isfinite(number):
        raise argparse.ArgumentTypeError(f"{text!r} is not a finite number")
    return number


def _numbers(text: str) -> tuple[float, ...]:
    return tuple(_number(part) for part in text.split(","))


def _positive_numbers(text: str) -> tuple[float, ...]:
    numbers = _numbers(text)
    if min(numbers) <= 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not above 0: samples are divided by it")
    return numbers


def check_outputs(args: argparse.Namespace, parser: argparse.ArgumentParser, *outputs: Path) -> None:
    """Refuse, before any work, results that cannot be written, and those that would replace what they are made from."""
    from onnx_gconv.files import require_writable

    given = vars(args)
    for output in outputs:
        for name in READ:
            values = given.get(name)
            for path in values if isinstance(values, list) else [values]:
                if path is not None and output.resolve() == Path(path).resolve():
                    what = "the model itself" if name in ("model", "models") else f"the {READ[name]} that it is made from"
                    parser.error(f"{output} would overwrite {what}")
        require_writable(output)


def _regex(text: str) -> str:
    try:
        re.compile(text)
    except re.error as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not a regular expression: {error}") from error
    return text
