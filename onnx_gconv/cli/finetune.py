"""`finetune`: a pruned model trained in PyTorch, its masks held."""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx_gconv
from onnx_gconv.cli import options
from onnx_gconv.cli.story import Story
from onnx_gconv.files import data_file, training_files

TEACH = """\
Train a pruned model in PyTorch while the weights that the plan drops stay zero, and write it back into the same graph, ready
for `apply`. MODEL is the original model (its weights are masked first) or a masked one. It learns from labels if there are
any, else from the outputs of the dense model. Ctrl-C ends it early and keeps the best epoch so far.

  onnx-gconv finetune model.onnx plan.json --data train.npz -o tuned.onnx
  onnx-gconv finetune model.onnx plan.json --calib images.npz --data images.npz -o tuned.onnx
  onnx-gconv finetune masked.onnx plan.json --teacher model.onnx --data unlabelled.npz -o tuned.onnx
  torchrun --nproc-per-node 4 -m onnx_gconv finetune model.onnx plan.json --data train.npz -o tuned.onnx
"""
AUGMENTATIONS = ("crop", "flip")
LEARNING = ("distill", "epochs", "lr", "batch_size", "schedule", "augment", "freeze_bn", "val_split", "amp", "train_graph")


def add_flags(parser: argparse.ArgumentParser) -> None:
    options.add_model(parser)
    parser.add_argument("plan", type=Path, metavar="PLAN", help="a plan file")
    parser.add_argument("--data", required=True, metavar="DATA", help=options.DATA_HELP)
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="OUT", help="the tuned model to write")
    add_learning(parser).add_argument(
        "--teacher", type=Path, metavar="DENSE", help="the dense model to learn from (default: MODEL, if it is not masked yet)"
    )
    add_device(parser).add_argument("--resume", action="store_true", help="go on after the last finished epoch of the same command")
    options.add_seed(parser)
    options.add_jobs(parser)
    options.add_calibration(parser)
    options.add_data_flags(parser)


def add_learning(parser: argparse.ArgumentParser, remark: str | None = None) -> "argparse._ArgumentGroup":
    """Add the flags that say how to train."""
    learning = parser.add_argument_group("learning", remark)
    learning.add_argument(
        "--distill",
        type=_share,
        metavar="SHARE",
        help="how much of the loss is the distance to the dense model, 0 to 1; the rest is the cross-entropy with the labels "
        "(default: 0 with labels, 1 without; with labels, 0.5 often ends higher)",
    )
    learning.add_argument("--epochs", type=options.positive, default=10, metavar="N", help="rounds over the data (default 10)")
    learning.add_argument("--lr", type=_rate, default=0.05, metavar="RATE", help="learning rate at the start (default 0.05)")
    learning.add_argument(
        "--batch-size", type=options.positive, default=128, metavar="N", help="samples in a step, of all processes (default 128)"
    )
    learning.add_argument(
        "--schedule",
        choices=("cosine", "multistep"),
        default="cosine",
        help="how the learning rate falls: smoothly to zero (default), or by ten after each third of the epochs (the paper)",
    )
    learning.add_argument(
        "--augment", type=_augmentations, default=(), metavar="crop,flip", help="vary the images: shifted, mirrored left to right"
    )
    learning.add_argument("--freeze-bn", action="store_true", help="keep the statistics of BatchNormalization as they are")
    learning.add_argument(
        "--val-split", type=_part, default=0.1, metavar="SHARE", help="share of the data that chooses the best epoch (default 0.1)"
    )
    return learning


def add_device(parser: argparse.ArgumentParser) -> "argparse._ArgumentGroup":
    """Add the flags that say what to train on."""
    running = parser.add_argument_group("running")
    running.add_argument(
        "--device", default="auto", metavar="DEVICE", help="auto (default: a GPU if there is one), cpu, cuda, cuda:1"
    )
    running.add_argument(
        "--train-graph",
        choices=("auto", "compact", "masked"),
        default="auto",
        help="the graph to train: what the plan leaves (compact), the whole model with its zeros held (masked), or the one "
        "in which a few steps are faster (default); the result is the masked model, the same but for rounding",
    )
    running.add_argument("--amp", action="store_true", help="compute in half precision where that is safe: faster on GPUs")
    return running


def learning(args: argparse.Namespace) -> Any:
    """Return what the flags say of the training."""
    return {name: getattr(args, name) for name in LEARNING}


def run(args: argparse.Namespace) -> int:
    options.check_outputs(args, args.output, data_file(args.output), *training_files(args.output))
    with Story(args) as story:
        found = onnx_gconv.finetune(
            args.model,
            args.plan,
            args.data,
            args.output,
            learning=learning(args),
            teacher=args.teacher,
            device=args.device,
            resume=args.resume,
            listener=story.listener,
            **options.wishes(args),
        )
    if found.files:
        if found.tuned.interrupted:
            story.tell("interrupted; --resume continues.")
        *files, metrics = found.files
        story.wrote(files, f"the weights of epoch {found.tuned.best.epoch}, and {metrics}")
    return 130 if found.tuned.interrupted else 0


def _share(text: str) -> float:
    return _number(text, "a share from 0 to 1", lambda value: 0 <= value <= 1)


def _part(text: str) -> float:
    return _number(text, "a share from 0 to below 1", lambda value: 0 <= value < 1)


def _rate(text: str) -> float:
    return _number(text, "a number above 0", lambda value: 0 < value < float("inf"))


def _number(text: str, what: str, fits: Callable[[float], bool]) -> float:
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if not fits(value):
        raise argparse.ArgumentTypeError(f"{text!r} is not {what}")
    return value


def _augmentations(text: str) -> tuple[str, ...]:
    names = tuple(text.split(","))
    if not set(names) <= set(AUGMENTATIONS):
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of {' and '.join(AUGMENTATIONS)}")
    return names
