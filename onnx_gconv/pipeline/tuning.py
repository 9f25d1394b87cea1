"""What `finetune` does where PyTorch is installed."""

from dataclasses import dataclass
from pathlib import Path
from typing import get_args

import onnx

from onnx_gconv.cores import one_blas_thread
from onnx_gconv.data.batch import Data
from onnx_gconv.data.open import DataLike, open_data
from onnx_gconv.errors import DataError, TrainingError, UsageError
from onnx_gconv.listener import SILENT, Listener
from onnx_gconv.model.file import save_model
from onnx_gconv.pipeline.applying import PlanLike, plan_of
from onnx_gconv.pipeline.job import Job
from onnx_gconv.pipeline.original import ModelLike, Original, open_original
from onnx_gconv.pipeline.recovering import open_samples, recovered
from onnx_gconv.pipeline.settings import Learning, Settings, TrainGraph
from onnx_gconv.rewrite.mask import dropped_share, mask
from onnx_gconv.rewrite.match import Matched, match
from onnx_gconv.torch.finetuning import Task, Tuned, metrics_beside
from onnx_gconv.torch.finetuning import finetune as train
from onnx_gconv.torch.team import assembled
from onnx_gconv.torch.training import Record, TrainingSettings
from onnx_gconv.verification import require_same_interface


@dataclass(frozen=True, eq=False)
class Lesson:
    """What to train, on what, and how."""

    model: ModelLike
    plan: PlanLike
    data: DataLike
    output: Path
    learning: Learning
    teacher: ModelLike | None
    device: str
    resume: bool


def tune(lesson: Lesson, settings: Settings, listener: Listener) -> tuple[Tuned, tuple[Path, ...]]:
    """Return the tuned model and its files; none in a process that is not the first of its team."""
    with assembled(lesson.device) as team:
        story = listener if team.is_first else SILENT  # one process talks for all
        original, plan = open_original(lesson.model, settings.input_shape), plan_of(lesson.plan)
        matched = match(original.model, plan, shapes=original.network.shapes)
        data = open_data(lesson.data, original.model, preprocessing=settings.preprocessing)
        how = training_settings(lesson.learning, data, seed=settings.seed)
        dense = _teacher(original, matched, lesson.teacher) if how.distill > 0 else None
        is_fitted_to_all = how.val_split > 0 and _is_same(settings.calib, lesson.data)
        start = _start(Job(original, settings, listener=story), matched, is_fitted_to_all=is_fitted_to_all)
        tuned = train(
            Task(start, plan, dense, data, original.given_shapes),
            how,
            team,
            output=lesson.output,
            resume=lesson.resume,
            listener=story,
            on_epoch=lambda record: _tell(record, how, story, has_labels=data.has_labels),
        )
        if not team.is_first:
            return tuned, ()
        files = save_model(tuned.model, lesson.output, original.files)
        return tuned, (*files, metrics_beside(lesson.output))


def training_settings(learning: Learning, data: Data, *, seed: int) -> TrainingSettings:
    """Return how to train on this data, what is not said by default."""
    distill = learning.get("distill")
    if distill is None:
        distill = 0.0 if data.has_labels else 1.0
    if distill < 1 and not data.has_labels:
        raise DataError(
            f"'{data.name}' has no labels, so --distill {distill:g} has nothing to take the rest of the loss from.",
            hint="--distill 1, or data with labels",
        )
    graph = learning.get("train_graph", "auto")
    if graph not in get_args(TrainGraph):
        raise UsageError(f"--train-graph {graph!r} is not known: choose from {', '.join(get_args(TrainGraph))}")
    augment = learning.get("augment", ())
    return TrainingSettings(
        epochs=learning.get("epochs", 10),
        lr=learning.get("lr", 0.05),
        batch_size=learning.get("batch_size", 128),
        schedule=learning.get("schedule", "cosine"),
        distill=distill,
        crop="crop" in augment,
        flip="flip" in augment,
        amp=learning.get("amp", False),
        seed=seed,
        freeze_bn=learning.get("freeze_bn", False),
        val_split=learning.get("val_split", 0.1),
        train_graph=graph,
    )


def _is_same(one: DataLike | None, other: DataLike) -> bool:
    """Return whether both name, or are, the same data."""
    return one is other or (isinstance(one, str) and isinstance(other, str) and one == other)


@one_blas_thread
def _start(job: Job, matched: Matched, *, is_fitted_to_all: bool) -> onnx.ModelProto:
    """Return the masked model that the training starts from, its weights recovered first if there is --calib."""
    original, samples = job.original, open_samples(job.original, job.settings)
    if samples is None:
        return mask(original.model, matched)
    if _is_masked(original, matched):
        raise TrainingError(
            f"{original.name} is masked already, so --calib cannot fit it to what the dense model does.",
            hint="give the dense model as MODEL, or leave out --calib",
        )
    fitted, recovery = recovered(job, matched, samples)
    if is_fitted_to_all:
        job.listener.warn("the starting weights were fitted to the held-back samples, too: their validation figures look too good")
    job.listener.note(f"recovered on {recovery.samples} samples: output error {recovery.output_error_after:.3f}")
    return fitted.model


def _teacher(original: Original, matched: Matched, given: ModelLike | None) -> onnx.ModelProto:
    """Return the dense model to learn from."""
    if given is not None:
        teacher = open_original(given).model
        require_same_interface(original.model, teacher)
        return teacher
    if _is_masked(original, matched):
        raise TrainingError(
            f"{original.name} is masked already, so it cannot teach what the dense model knew.",
            hint="name the dense model with --teacher, or learn from labels alone with --distill 0",
        )
    return original.model


def _is_masked(original: Original, matched: Matched) -> bool:
    return bool(matched) and dropped_share(original.model, matched) == 0


def _tell(record: Record, how: TrainingSettings, listener: Listener, *, has_labels: bool) -> None:
    parts = []
    if record.train_loss is not None:
        parts.append(f"loss {record.train_loss:.4f}")
    if record.validation_loss is not None:
        parts.append(f"validation loss {record.validation_loss:.4f}")
    if record.validation_accuracy is not None:
        parts.append(f"{'accuracy' if has_labels else 'agreement with the dense model'} {record.validation_accuracy:.2%}")
    if parts:  # nothing is known of the start where nothing is held back
        head = f"epoch {record.epoch}/{how.epochs}" if record.epoch else "start"
        listener.note(f"{head}: {', '.join(parts)} ({record.seconds:.0f} s)")
