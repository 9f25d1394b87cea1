"""`finetune`: a pruned model trained in PyTorch, its masks held."""

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from onnx_gconv.cli import options
from onnx_gconv.cli.recovering import open_calibration, recovered
from onnx_gconv.cli.source import Source, open_source
from onnx_gconv.cli.story import Story
from onnx_gconv.cli.training import require_torch
from onnx_gconv.errors import DataError, TrainingError

if TYPE_CHECKING:
    import onnx

    from onnx_gconv.data.batch import Data
    from onnx_gconv.plans import Plan
    from onnx_gconv.torch.team import Team
    from onnx_gconv.torch.training import Record, TrainingSettings

TEACH = """\
Train a pruned model in PyTorch while the weights that the plan drops stay zero, and write it back into the same graph,
ready for `apply`. MODEL is the original model (then its weights are masked first) or a masked one. With labels it learns
from them; without, from the outputs of the dense model. Ctrl-C ends it early and keeps the best so far.

  onnx-gconv finetune model.onnx plan.json --data train.npz -o tuned.onnx
  onnx-gconv finetune model.onnx plan.json --calib images.npz --data images.npz -o tuned.onnx
  onnx-gconv finetune masked.onnx plan.json --teacher model.onnx --data unlabelled.npz -o tuned.onnx
  torchrun --nproc-per-node 4 -m onnx_gconv finetune model.onnx plan.json --data train.npz -o tuned.onnx
"""
AUGMENTATIONS = ("crop", "flip")


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = options.command(subparsers, "finetune", "train a pruned model in PyTorch, masks held", TEACH)
    options.add_model(parser)
    parser.add_argument("plan", type=Path, metavar="PLAN", help="a plan file")
    parser.add_argument("--data", required=True, metavar="DATA", help=options.DATA_HELP)
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="OUT", help="the tuned model to write")
    learning = add_learning(parser)
    learning.add_argument(
        "--teacher", type=Path, metavar="DENSE", help="the dense model to learn from (default: MODEL, if it is not masked yet)"
    )
    add_device(parser).add_argument("--resume", action="store_true", help="go on after the last finished epoch of the same command")
    options.add_seed(parser)
    options.add_jobs(parser)
    options.add_calibration(parser)
    options.add_data_flags(parser)
    parser.set_defaults(run=partial(run, parser))


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
    running.add_argument("--amp", action="store_true", help="compute in half precision where that is safe: faster on GPUs")
    return running


def run(parser: argparse.ArgumentParser, args: argparse.Namespace) -> int:
    options.check_outputs(args, parser, args.output)
    require_torch("finetune")
    from onnx_gconv.torch.team import assembled

    with assembled(args.device) as team:
        args.quiet = args.quiet or not team.is_first  # one process talks for all
        return _tune(args, Story(args), team)


def _tune(args: argparse.Namespace, story: Story, team: "Team") -> int:
    from onnx_gconv.data.open import open_data
    from onnx_gconv.model.file import save_atomically
    from onnx_gconv.plans import read_plan
    from onnx_gconv.torch.finetuning import Listener, Task, finetune, metrics_beside

    plan = read_plan(args.plan)
    source = open_source(args)
    data = open_data(args.data, source.model, preprocessing=options.preprocessing(args))
    settings = learning_settings(args, data)
    teacher = _teacher(args, source, plan) if settings.distill > 0 else None
    start = start_model(source, plan, args, story)
    task = Task(start, plan, teacher, data, source.given_shapes)
    with story.progress("tuning") as progress:
        listener = Listener(progress, lambda record: _tell(record, settings, story, has_labels=data.has_labels))
        tuned = finetune(task, settings, team, output=args.output, resume=args.resume, listener=listener)
    if team.is_first:
        files = save_atomically(tuned.model, args.output, external_data=source.has_external_data)
        if tuned.interrupted:
            story.tell("interrupted; --resume goes on.")
        story.wrote(files, f"the weights of epoch {tuned.best.epoch}, and {metrics_beside(args.output)}")
    return 130 if tuned.interrupted else 0


def start_model(source: Source, plan: "Plan", args: argparse.Namespace, story: Story) -> "onnx.ModelProto":
    """Return the masked model that the training starts from, its weights recovered first if there is --calib."""
    from onnx_gconv.rewrite.mask import mask

    calibration = open_calibration(source, args)
    if calibration is None:
        return mask(source.model, plan)
    if _is_masked(source, plan):
        raise TrainingError(
            f"'{source.path}' is masked already, so --calib cannot fit it to what the dense model does.",
            hint="give the dense model as MODEL, or leave out --calib",
        )
    fitted, recovery = recovered(source, plan, calibration, args, story)
    if args.calib == args.data and args.val_split > 0:
        story.warn("the start was fitted to the samples held back, too, so its validation figures flatter it")
    story.tell(f"recovered on {recovery.samples} samples: output error {recovery.output_error_after:.3f}")
    return fitted.model


def learning_settings(args: argparse.Namespace, data: "Data") -> "TrainingSettings":
    """Return what the flags of `add_learning` ask for, with this data."""
    from onnx_gconv.torch.training import TrainingSettings

    distill = args.distill if args.distill is not None else 0.0 if data.has_labels else 1.0
    if distill < 1 and not data.has_labels:
        raise DataError(
            f"'{data.name}' has no labels, so --distill {distill:g} has nothing to take the rest of the loss from.",
            hint="--distill 1, or data with labels",
        )
    return TrainingSettings(
        epochs=args.epochs,
        lr=args.lr,
        batch_size=args.batch_size,
        schedule=args.schedule,
        distill=distill,
        crop="crop" in args.augment,
        flip="flip" in args.augment,
        amp=args.amp,
        seed=args.seed,
        freeze_bn=args.freeze_bn,
        val_split=args.val_split,
    )


def _teacher(args: argparse.Namespace, source: Source, plan: "Plan") -> "onnx.ModelProto":
    """Return the dense model to learn from."""
    from onnx_gconv.model.file import load
    from onnx_gconv.verification import require_same_interface

    if args.teacher is not None:
        teacher = load(args.teacher)
        require_same_interface(source.model, teacher)
        return teacher
    if _is_masked(source, plan):
        raise TrainingError(
            f"'{source.path}' is masked already, so it cannot teach what the dense model knew.",
            hint="name the dense model with --teacher, or learn from labels alone with --distill 0",
        )
    return source.model


def _is_masked(source: Source, plan: "Plan") -> bool:
    from onnx_gconv.rewrite.mask import dropped_share

    return bool(plan.layers) and dropped_share(source.model, plan) == 0


def _tell(record: "Record", settings: "TrainingSettings", story: Story, *, has_labels: bool) -> None:
    parts = []
    if record.train_loss is not None:
        parts.append(f"loss {record.train_loss:.4f}")
    if record.validation_loss is not None:
        parts.append(f"validation loss {record.validation_loss:.4f}")
    if record.validation_accuracy is not None:
        parts.append(f"{'accuracy' if has_labels else 'agreement with the dense model'} {record.validation_accuracy:.2%}")
    if parts:  # nothing is known of the start where nothing is held back
        head = f"epoch {record.epoch}/{settings.epochs}" if record.epoch else "start"
        story.tell(f"{head}: {', '.join(parts)} ({record.seconds:.0f} s)")


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
