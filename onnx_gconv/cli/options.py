"""Flags that several commands share, and the wishes they stand for."""

import argparse
import math
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from onnx_gconv.errors import UsageError
from onnx_gconv.files import replaced, require_writable

Size = int | tuple[int, int]
# The flags that are wishes of the Python functions, under the same names. What is not given is left to the default there.
WISHES = (
    *("max_flops", "max_macs", "max_params", "max_latency", "timing", "threads", "groups"),
    *("max_group_channels", "group_config"),
    *("include", "exclude", "min_group_channels", "target", "criterion", "solver", "effort", "sort_rounds", "search", "cost"),
    *("gathers", "forms", "width_step", "calib", "calib_samples", "eval"),
    *("resize", "crop", "scale", "mean", "std", "channel_order"),
    *("refine_steps", "refine_data", "refine_epochs", "refine_lr", "refine_batch_size"),
    *("precision", "lowering", "verify", "force", "input_shape", "seed", "jobs"),
)


def wishes(args: argparse.Namespace) -> dict[str, Any]:
    """Return what the flags ask for, as the Python functions take it."""
    return {name: value for name in WISHES if (value := getattr(args, name, None)) is not None}


# Arguments that name what a command reads, and what that is.
READ = {
    "model": "model",
    "models": "model",
    "plan": "plan",
    "results": "report",
    "teacher": "teacher",
    "reference": "reference",
    "group_config": "configuration",
    "timing": "table of times",
    "calib": "data",
    "data": "data",
    "eval": "data",
    "finetune": "data",
    "refine_data": "data",
}
IMAGES = frozenset({".jpg", ".jpeg", ".png", ".bmp", ".webp"})  # that are read from a folder of data
DATA_HELP = (
    "an .npz file with an array for each model input, by its name, samples first, preprocessed, and optionally 'labels'; or a "
    "folder of images, with a sub-folder for each class where labels are needed; or package.module:function, which returns "
    "(inputs, labels) batches"
)


def add_model(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", type=Path, metavar="MODEL", help="an ONNX file")
    add_input_shape(parser)


def add_input_shape(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--input-shape",
        action="append",
        metavar="[NAME=]1x3x224x224",
        help="the input shape to count MACs, verify and measure at; needed where axes are dynamic (else: batch 1, 224 pixels)",
    )


def add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print the result as JSON on stdout")


def add_verifying(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--no-verify",
        dest="verify",
        action="store_false",
        default=None,
        help="write without running the model first; for models ONNX Runtime cannot run",
    )


def add_lowering(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--lowering",
        choices=("group", "split", "matmul"),
        help="how a group convolution is written: one Conv with groups (default), Split and a Conv for each group, or a batched "
        "MatMul for 1x1 Convs",
    )


def add_seed(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seed", type=natural, metavar="N", help="seed of everything random (default 0)")


def add_jobs(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--jobs", type=positive, metavar="N", help="processes or threads (default: all cores)")


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
    images.add_argument("--std", type=_numbers, metavar="S,S,S", help="for each channel, or one for all (default 1)")
    images.add_argument("--channel-order", choices=("rgb", "bgr"), help="of colour images (default rgb)")


def add_calibration(parser: argparse.ArgumentParser) -> None:
    """Add the flags that name calibration data; `add_data_flags` says how images are read."""
    recovery = parser.add_argument_group("recovery", "on unlabelled samples, with linear algebra; no training")
    recovery.add_argument(
        "--calib", metavar="DATA", help="samples like those the model was made for, a few hundred or more; " + DATA_HELP
    )
    recovery.add_argument("--calib-samples", type=positive, metavar="N", help="use at most the first N of them (default 1000)")


def add_choosing(parser: argparse.ArgumentParser) -> None:
    """Add the flags that say how much to compress, and how."""
    budget = parser.add_argument_group(
        "budget", "50% of the whole model before, or a number: 1.9G, 300M, 5k. Several hold at once; none is ever exceeded."
    )
    budget.add_argument("--max-flops", metavar="LIMIT", help="floating-point operations, 2 x MACs")
    budget.add_argument("--max-macs", metavar="LIMIT", help="multiply-accumulates")
    budget.add_argument("--max-params", metavar="LIMIT", help="parameters")
    budget.add_argument(
        "--max-latency",
        metavar="LIMIT",
        help="time on a device, 60%% of what the model takes or 3.5ms. Without --timing, the layers are timed now on this CPU "
        "(--target ort-cpu)",
    )
    budget.add_argument("--timing", type=Path, metavar="FILE", help="the table that `bench --sweep` has written")
    budget.add_argument(
        "--threads", type=positive, metavar="N", help="of ort-cpu, when layers and results are timed here (default 1)"
    )
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
    add_method(parser)


def add_method(parser: argparse.ArgumentParser) -> None:
    """Add the flags that say what may change, and how to solve and search."""
    _add_forms(parser)
    _add_layers(parser)
    _add_solving(parser)
    add_jobs(parser)
    add_seed(parser)


def _add_forms(parser: argparse.ArgumentParser) -> None:
    forms = parser.add_argument_group("forms", "what may become of the model; one search chooses among all that are named")
    forms.add_argument(
        "--forms",
        metavar="FORMS",
        help="with commas: group, a Conv that is split into groups (the paper's method); width, a channel space that keeps only "
        "some of its channels, so that every Conv that writes or reads it shrinks; drop, a residual branch that becomes its mean; "
        "lowrank, a Conv that becomes two with few channels between them; or all. All but group need --calib "
        "(default: width,drop with --calib, which measures best; group without, and where a flag asks for what only groups have)",
    )
    forms.add_argument(
        "--width-step",
        type=positive,
        metavar="N",
        help="keep a multiple of N channels, between the two Convs of a low rank too, so that kernels stay full (default: what "
        "--target computes at once, 16 for ort-cpu, or 8 on CPUs without AVX-512, and 8 for tensorrt; generic: 8, or a quarter of "
        "the space if that is less)",
    )


def _add_layers(parser: argparse.ArgumentParser) -> None:
    layers = parser.add_argument_group("layers")
    layers.add_argument("--include", metavar="REGEX", help="change only layers whose layer or node name matches")
    layers.add_argument("--exclude", metavar="REGEX", help="leave layers as they are whose layer or node name matches")
    layers.add_argument(
        "--min-group-channels",
        type=positive,
        metavar="N",
        help="at least N input and output channels per group (default 1)",
    )
    layers.add_argument(
        "--target",
        choices=("auto", "generic", "ort-cpu", "tensorrt"),
        help="offer only groups and widths of a multiple of 16 (ort-cpu) or 8 (tensorrt) channels, the fast ones there; auto: "
        "tensorrt where trtexec or a GPU is found, else ort-cpu (default generic: groups of any size; with --timing the device "
        "that was measured; for a budget of time without a table ort-cpu)",
    )


def _add_solving(parser: argparse.ArgumentParser) -> None:
    how = parser.add_argument_group("method")
    how.add_argument(
        "--criterion",
        choices=("l2", "l1", "taylor", "activation"),
        help="importance of a kernel: its L2 norm (default, as in the paper), its L1 norm; with --calib also "
        "taylor, how far the outputs move without it, to first order (needs PyTorch), or activation, its L2 norm times the "
        "strength of its input",
    )
    how.add_argument(
        "--solver",
        choices=("best", "paper", "plain"),
        help="which channels go together: alternating exact assignment (default), the paper's sort, or no permutation",
    )
    how.add_argument(
        "--effort",
        type=int,
        choices=range(4),
        help="how hard to search (default 1). On a ResNet-20 with --calib, 2 took 1.3 times as long as 1 and 3 up to 1.7 times; "
        "with groups that brought half a point, with widths nothing. 0 is the quickest",
    )
    how.add_argument(
        "--sort-rounds",
        type=natural,
        metavar="N",
        help="N_S of --solver paper, rounds of sorting a block (default 10)",
    )
    how.add_argument(
        "--search",
        choices=("exact", "local"),
        help="how the budget is spent: the provably best choice (default), or the paper's local search",
    )
    how.add_argument(
        "--cost",
        choices=("log", "share", "sensitivity", "trial"),
        help="what a search for groups adds up over the layers: -log of the kept share (default), or the paper's 1 - kept; with "
        "--calib also sensitivity, how far the outputs move when one layer alone is grouped and fitted, or trial, several of "
        "these, the one whose plan recovers best (default with --calib)",
    )
    how.add_argument(
        "--gathers",
        choices=("free", "shared", "none"),
        help="free: the best permutation of each layer, Gathers where no weight absorbs it; shared: one partition for each "
        "residual stream, Gathers only inside blocks; none: no Gather (default: free for target generic, else the first of none, "
        "shared, free that meets the budget)",
    )


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
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least {least}")
    return int(text)


def _size(text: str) -> Size:
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


def check_outputs(args: argparse.Namespace, *outputs: Path) -> None:
    """Refuse, before any work, results that cannot be written, and those that would replace what they are made from."""
    twice = next((output for output in outputs if outputs.count(output) > 1), None)
    if twice is not None:
        raise UsageError(f"{twice} would be written twice")
    for source, what in _read_by(args, outputs):
        for output in outputs:
            if replaced(output, [source]) is not None:
                raise UsageError(f"{output} would overwrite {what}")
    for output in outputs:
        require_writable(output)


def _read_by(args: argparse.Namespace, outputs: tuple[Path, ...]) -> Iterator[tuple[Path, str]]:
    """Yield the files that a command reads, and what each is to its result."""
    models = []
    for name, what in READ.items():
        values = getattr(args, name, None)
        for value in values if isinstance(values, list) else [values]:
            if value is None:
                continue
            path, is_model = Path(value), name in ("model", "models", "teacher", "reference")
            yield path, "the model itself" if name in ("model", "models") else f"the {what} that it is made from"
            if is_model:
                models.append(path)
            if what == "data":
                # An image of a folder; or package.module:function, which is code.
                yield from ((output, "an image of the data") for output in outputs if _is_image_of(path, output))
                if re.fullmatch(r"\w+(\.\w+)*:\w+", str(value)):
                    yield Path(str(value).partition(":")[0].replace(".", "/") + ".py"), "the code that gives the data"
    if any(output.exists() for output in outputs):  # else there is nothing to lose, and no need to read the models twice
        from onnx_gconv.model.file import data_files

        for model in models:
            yield from ((file, f"the weights of {model}") for file in data_files(model))


def _is_image_of(folder: Path, output: Path) -> bool:
    inside = Path(os.path.realpath(output)).is_relative_to(os.path.realpath(folder))
    return inside and folder.is_dir() and output.suffix.lower() in IMAGES
