"""Fine-tuning from start to end: a masked model and data in, tuned weights out, with a checkpoint after every epoch."""

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import onnx
from torch import Tensor

from onnx_gconv.data.batch import Data
from onnx_gconv.errors import TrainingError
from onnx_gconv.files import training_files, write_text
from onnx_gconv.listener import Listener
from onnx_gconv.model.shapes import Shape
from onnx_gconv.plans import Plan
from onnx_gconv.torch import checkpoint, load
from onnx_gconv.torch.checkpoint import Checkpoint
from onnx_gconv.torch.graphs import Graphs, Student
from onnx_gconv.torch.module import OnnxModule
from onnx_gconv.torch.rehearsing import rehearsed
from onnx_gconv.torch.spool import spooled
from onnx_gconv.torch.team import Team
from onnx_gconv.torch.training import Record, Training, TrainingSettings

OnEpoch = Callable[[Record], None]
GRAPH = "--train-graph"  # in a checkpoint's purpose


@dataclass(frozen=True, eq=False)
class Task:
    """What to tune: the masked model to start from, its plan, the dense model to learn from, and the data."""

    start: onnx.ModelProto
    plan: Plan
    teacher: onnx.ModelProto | None
    data: Data
    shapes: Mapping[str, Shape]  # of the inputs to compare with ONNX Runtime at


@dataclass(frozen=True, eq=False)
class Tuned:
    """The best model of a training, and its history."""

    model: onnx.ModelProto
    history: tuple[Record, ...]
    best: Record
    interrupted: bool


def finetune(
    task: Task, settings: TrainingSettings, team: Team, *, output: Path, resume: bool, listener: Listener, on_epoch: OnEpoch
) -> Tuned:
    """Return the best model by the validation split; Ctrl-C ends the training early and returns the best until then.

    Trained is the masked or the compact graph; what is returned is masked. Writes `<stem>.checkpoint.pt` and
    `<stem>.metrics.jsonl` beside `output` after every epoch.
    """
    before = checkpoint.read(checkpoint.path_beside(output)) if resume else None
    graphs = Graphs(task.start, task.plan, task.shapes, seed=settings.seed)
    teacher = load(task.teacher, shapes=task.shapes, seed=settings.seed) if task.teacher is not None else None
    with spooled(task.data, team) as spool:

        def begin(student: Student) -> Training:
            return Training(student.module, teacher, spool, settings, team, student.sight)

        student = _student(graphs, settings, before, begin, listener)
        training = begin(student)
        run = _Run(training, _purpose(task, settings, len(spool), student.graph), output, on_epoch)
        if before is not None:
            run.resume(before)
        else:
            run.record(training.validate(0))
        interrupted = False
        try:
            for epoch in range(len(run.history), settings.epochs + 1):
                run.record(training.train_epoch(epoch, listener.phase("tuning")))
        except KeyboardInterrupt:
            if len(run.history) < 2:
                raise  # nothing has been learned yet
            interrupted = True
    student.module.load_state_dict(dict(run.best_weights))
    _require_masks(student.module)
    student.module.cpu()
    return Tuned(graphs.returned(student), tuple(run.history), run.best, interrupted)


def _student(
    graphs: Graphs,
    settings: TrainingSettings,
    before: Checkpoint | None,
    begin: Callable[[Student], Training],
    listener: Listener,
) -> Student:
    """Return what is trained: the graph that is asked for, that was begun with, or that is faster."""
    asked = settings.train_graph
    if asked == "auto" and before is not None:
        asked = "compact" if before.purpose.get(GRAPH) == "compact" else "masked"
    if asked == "masked" or (asked == "auto" and not graphs.differ):
        return graphs.masked()
    obstacle = graphs.obstacle()
    if obstacle and asked == "compact":
        raise TrainingError(f"the compact model cannot be trained: {obstacle}.", hint="--train-graph masked")
    if obstacle:
        listener.note(f"training the masked model, for the compact one cannot be trained: {obstacle}")
        return graphs.masked()
    if asked == "compact":
        return graphs.compact()
    students = [graphs.compact(), graphs.masked()]
    times = rehearsed([begin(student) for student in students])
    (best, first), (other, second) = sorted(zip(students, times, strict=True), key=lambda pair: pair[1])
    listener.note(f"training the {best.graph} model: {first:.2g} s a step, {other.graph} {second:.2g} s")
    return best


class _Run:
    """A training on its way: the best weights so far, the history, and the files that keep them."""

    def __init__(self, training: Training, purpose: Mapping[str, str], output: Path, on_epoch: OnEpoch) -> None:
        self._training, self._purpose, self._output, self._on_epoch = training, purpose, output, on_epoch
        self._file = checkpoint.path_beside(output)
        self.history: list[Record] = []
        self.best_weights: Mapping[str, Tensor] = {}

    @property
    def best(self) -> Record:
        return max(self.history, key=lambda record: record.quality)

    def resume(self, found: Checkpoint) -> None:
        """Go on from a checkpoint of the same training."""
        checkpoint.require_same(found, self._purpose, self._file)
        self._training.module.load_state_dict(dict(found.weights))
        self._training.optimizer.load_state_dict(dict(found.optimizer))
        self.history = [Record(**record) for record in found.history]
        self.best_weights = found.best

    def record(self, record: Record) -> None:
        """Take note of an epoch and write it down, together with all that is needed to go on from here."""
        self.history.append(record)
        weights = self._training.state()
        if self.best is record:
            self.best_weights = weights
        if self._training.team.is_first:
            self._on_epoch(record)
            history = [vars(entry) for entry in self.history]
            state = Checkpoint(self._purpose, weights, self._training.optimizer.state_dict(), self.best_weights, history)
            checkpoint.write(state, self._file)
            write_text(metrics_beside(self._output), "".join(json.dumps(entry) + "\n" for entry in history))


def metrics_beside(output: Path) -> Path:
    """Return where the history of a training with this result lies."""
    return training_files(output)[1]


def _purpose(task: Task, settings: TrainingSettings, samples: int, graph: str) -> dict[str, str]:
    """Return what must be the same for a training to go on; `graph` is the one that is trained."""

    def digest(data: bytes) -> str:
        return hashlib.sha256(data).hexdigest()[:16]

    purpose = {f"--{name.replace('_', '-')}": str(value) for name, value in vars(settings).items()}
    purpose[GRAPH] = graph
    purpose |= {"model": digest(task.start.SerializeToString(deterministic=True)), "plan": digest(task.plan.to_json().encode())}
    teacher = "none" if task.teacher is None else digest(task.teacher.SerializeToString(deterministic=True))
    return purpose | {"teacher": teacher, "data": f"{task.data.name}, {samples} samples"}


def _require_masks(module: OnnxModule) -> None:
    weights = dict(module.named_parameters())
    for name, keep in module.masks().items():
        weight = weights[name]
        if bool(weight.detach()[~keep.to(weight.device)].any()):
            raise TrainingError(
                f"weights of {name!r} that the plan drops are no longer zero; nothing was written.",
                hint="this is a bug of onnx-gconv: please report it",
            )
