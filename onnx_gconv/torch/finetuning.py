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
from onnx_gconv.files import write_text
from onnx_gconv.listener import OnProgress
from onnx_gconv.model.shapes import Shape
from onnx_gconv.plans import Plan
from onnx_gconv.torch import checkpoint, load, save_back
from onnx_gconv.torch.checkpoint import Checkpoint
from onnx_gconv.torch.comparing import require_equal
from onnx_gconv.torch.module import OnnxModule
from onnx_gconv.torch.spool import spooled
from onnx_gconv.torch.team import Team
from onnx_gconv.torch.training import Record, Training, TrainingSettings

OnEpoch = Callable[[Record], None]


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
    task: Task, settings: TrainingSettings, team: Team, *, output: Path, resume: bool, on_step: OnProgress, on_epoch: OnEpoch
) -> Tuned:
    """Return the best model by the validation split; Ctrl-C ends the training early and returns the best until then.

    Writes `<stem>.checkpoint.pt` and `<stem>.metrics.jsonl` beside `output` after every epoch.
    """
    module = load(task.start, task.plan, shapes=task.shapes, seed=settings.seed)
    if not any(True for _ in module.parameters()):
        raise TrainingError("the model has no weights that can be trained.", hint="only weights in its main graph can")
    teacher = load(task.teacher, shapes=task.shapes, seed=settings.seed) if task.teacher is not None else None
    with spooled(task.data, team) as spool:
        training = Training(module, teacher, spool, settings, team)
        run = _Run(training, _purpose(task, settings, len(spool)), output, on_epoch)
        if resume:
            run.resume()
        else:
            run.record(training.validate(0))
        interrupted = False
        try:
            for epoch in range(len(run.history), settings.epochs + 1):
                run.record(training.train_epoch(epoch, on_step))
        except KeyboardInterrupt:
            if len(run.history) < 2:
                raise  # nothing has been learned yet
            interrupted = True
    module.load_state_dict(dict(run.best_weights))
    _require_masks(module)
    module.cpu()
    model = save_back(module, task.start)
    require_equal(module, model, shapes=task.shapes, seed=settings.seed)
    return Tuned(model, tuple(run.history), run.best, interrupted)


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

    def resume(self) -> None:
        found = checkpoint.read(self._file, self._purpose)
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
    return output.with_name(f"{output.stem}.metrics.jsonl")


def _purpose(task: Task, settings: TrainingSettings, samples: int) -> dict[str, str]:
    """Return what must be the same for a training to go on."""

    def digest(data: bytes) -> str:
        return hashlib.sha256(data).hexdigest()[:16]

    purpose = {f"--{name.replace('_', '-')}": str(value) for name, value in vars(settings).items()}
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
