"""The training itself: epochs of steps over spooled data, validated after each."""

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from onnx_gconv.errors import DataError, TrainingError
from onnx_gconv.listener import OnProgress
from onnx_gconv.torch.augment import augmented, draw
from onnx_gconv.torch.landmarks import Sight, WithLandmarks, block_ends, landmarks
from onnx_gconv.torch.loss import Landmark, Loss
from onnx_gconv.torch.module import OnnxModule
from onnx_gconv.torch.schedule import Schedule, factor
from onnx_gconv.torch.spool import Samples, Spool
from onnx_gconv.torch.team import Team

GraphName = Literal["compact", "masked"]

MOMENTUM = 0.9
WEIGHT_DECAY = 1e-4
# A masked model starts far from where it was trained to be. Without a limit its first gradients throw it further off,
# and models with folded BatchNormalization then diverge at learning rates that they learn well with.
LARGEST_GRADIENT = 1.0  # norm over all weights
VALIDATION_BATCH = 250
# What all landmarks together count, as a multiple of the distance of the outputs: enough to tell early layers where to go. A model
# so small that it cannot follow its teacher inside is still to come close to its outputs.
LANDMARKS = 40.0
LANDMARK_SAMPLES = 32  # that they are weighed by, at most: all of them are in memory at once
SMALLEST_ERROR = 1e-6  # where all is as it should be, nothing is to be weighed by


@dataclass(frozen=True)
class TrainingSettings:
    """How to train."""

    epochs: int
    lr: float
    batch_size: int  # of all processes together
    schedule: Schedule
    distill: float
    crop: bool
    flip: bool
    amp: bool
    seed: int
    freeze_bn: bool
    val_split: float
    train_graph: Literal["auto"] | GraphName = "auto"


@dataclass(frozen=True)
class Record:
    """What an epoch came to; epoch 0 is the start. None for what was not measured."""

    epoch: int
    learning_rate: float | None  # at its end
    train_loss: float | None
    validation_loss: float | None
    validation_accuracy: float | None  # share of samples with the right class; without labels, with the teacher's class
    seconds: float

    @property
    def quality(self) -> tuple[float, float]:
        """What the best epoch has most of; of equal accuracies the lower loss. Without validation the last one is best."""
        if self.validation_loss is None:
            return float(self.epoch), 0.0
        return self.validation_accuracy or 0.0, -self.validation_loss


@dataclass(frozen=True, eq=False)
class Split:
    """The numbers of the samples to train on, and of those to validate on."""

    train: Tensor
    validation: Tensor


def split(samples: int, share: float, seed: int) -> Split:
    """Return a random part of the samples for validation, the rest for training."""
    held = min(math.ceil(samples * share), samples - 1)
    if samples < 2 and share > 0:
        raise DataError("one sample cannot be split into training and validation.", hint="give more data, or --val-split 0")
    order = torch.randperm(samples, generator=_generator(seed, 0))
    return Split(order[held:].sort().values, order[:held].sort().values)


class Training:
    """A module that learns from spooled data, and from a teacher if there is one. One of several processes, perhaps."""

    def __init__(
        self,
        module: OnnxModule,
        teacher: OnnxModule | None,
        spool: Spool,
        settings: TrainingSettings,
        team: Team,
        sight: Sight | None = None,
    ) -> None:
        torch.manual_seed(settings.seed)
        self.module = module.to(team.device)
        self.module.freeze_bn = settings.freeze_bn
        self.teacher = teacher.to(team.device).eval() if teacher is not None else None
        self.spool, self.settings, self.team = spool, settings, team
        self.split = split(len(spool), settings.val_split, settings.seed)
        self.batch = _batch_size(settings.batch_size, len(self.split.train), team)
        self.loss = Loss(settings.distill, tuple(module.program.output_ops[name] for name in module.output_names))
        self.sight = Sight(block_ends(module.program)) if sight is None else sight
        self.landmarks = self._landmarks()
        self.optimizer = _optimizer(module, settings.lr)
        # float16 on CUDA needs its losses scaled; bfloat16, on the CPU, does not.
        self.scaler = torch.amp.GradScaler("cuda", enabled=settings.amp and team.device.type == "cuda")

    @cached_property
    def net(self) -> nn.Module:
        """What is trained; gradients are those of all processes."""
        if self.team.world == 1:
            return self._student()
        return DistributedDataParallel(self._student(), find_unused_parameters=len(self.module.output_names) > 1)

    @property
    def steps(self) -> int:
        """Steps of an epoch: the rest that fills no batch is left out, another one each time."""
        return len(self.split.train) // self.batch

    def train_epoch(self, epoch: int, on_step: OnProgress) -> Record:
        """Train for one epoch, counted from 1, and return what it came to."""
        started = time.perf_counter()
        total, right, seen, lr = 0.0, 0, 0, 0.0
        self._weigh_landmarks(epoch)
        self.module.train()
        for step, samples in enumerate(self._batches(epoch)):
            done = (epoch - 1) * self.steps + step
            lr = self.settings.lr * factor(self.settings.schedule, done / (self.settings.epochs * self.steps))
            value, hits = self._step(samples, lr)
            if not math.isfinite(value):
                raise TrainingError(
                    f"the loss is {value} in epoch {epoch}, step {step + 1}: the training has diverged.",
                    hint=f"a lower --lr than {self.settings.lr:g}",
                )
            total, right, seen = total + value, right + (hits or 0), seen + len(samples)
            share = "" if hits is None else f"  {right / seen:.1%} right"
            text = f"epoch {epoch}/{self.settings.epochs}  loss {total / (step + 1):.3f}{share}"
            on_step(done + 1, self.settings.epochs * self.steps, text)
        loss = float(self.team.total(torch.tensor([total / self.steps / self.team.world], dtype=torch.float64))[0])
        return self.validate(epoch, learning_rate=lr, train_loss=loss, started=started)

    def rehearse(self) -> float:
        """Return the seconds that a step takes here. It learns nothing, but statistics and the optimiser are other ones then."""
        samples, student = next(self._batches(1)), self._student()
        self.module.train()
        for group in self.optimizer.param_groups:
            group["lr"] = 0.0
        self._finish_work()
        started = time.perf_counter()
        self._learn(student, samples)
        self._finish_work()
        return time.perf_counter() - started

    def _finish_work(self) -> None:
        if self.team.device.type == "cuda":
            torch.cuda.synchronize(self.team.device)

    def validate(
        self, epoch: int, *, learning_rate: float | None = None, train_loss: float | None = None, started: float | None = None
    ) -> Record:
        """Return the record of an epoch with the loss and the accuracy on the part held back."""
        started = time.perf_counter() if started is None else started
        sums = torch.zeros(4, dtype=torch.float64)  # loss, right, judged, samples
        self.module.eval()
        with torch.no_grad():
            for numbers in self.team.share(self.split.validation).split(VALIDATION_BATCH):
                if len(numbers):
                    sums += self._validated(_laid_out(self.spool.take(numbers).to(self.team.device)))
        loss, right, judged, samples = self.team.total(sums).tolist()
        return Record(
            epoch=epoch,
            learning_rate=learning_rate,
            train_loss=train_loss,
            validation_loss=loss / samples if samples else None,
            validation_accuracy=right / judged if judged else None,
            seconds=time.perf_counter() - started,
        )

    def state(self) -> dict[str, Tensor]:
        """Return a copy of all weights and statistics."""
        return {name: value.detach().cpu().clone() for name, value in self.module.state_dict().items()}

    def _validated(self, samples: Samples) -> Tensor:
        outputs = _tuple(self.module(**samples.inputs))
        teacher, _ = self._teach(samples, ())  # the outputs are what counts, and landmarks of so many samples are large
        loss = float(self.loss(outputs, teacher, samples.labels)) * len(samples)
        right = self._right(outputs, teacher, samples.labels)
        judged = 0 if right is None else len(samples)
        return torch.tensor([loss, right or 0, judged, len(samples)], dtype=torch.float64)

    def _batches(self, epoch: int) -> Iterator[Samples]:
        """Yield this process's part of each batch, shuffled and augmented as the seed and the epoch say."""
        generator = _generator(self.settings.seed, epoch)
        order = self.split.train[torch.randperm(len(self.split.train), generator=generator)]
        for step in range(self.steps):
            drawn = draw(self.batch, generator)
            mine = self.team.share(torch.arange(self.batch))
            samples = self.spool.take(order[step * self.batch :][mine]).to(self.team.device)
            crop, flip, part = self.settings.crop, self.settings.flip, drawn.part(mine)
            inputs = {name: augmented(value, part, crop=crop, flip=flip) for name, value in samples.inputs.items()}
            yield _laid_out(Samples(inputs, samples.labels))

    def _step(self, samples: Samples, lr: float) -> tuple[float, int | None]:
        """Return the loss before the step, and for how many samples the class was right."""
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        return self._learn(self.net, samples)

    def _learn(self, net: nn.Module, samples: Samples) -> tuple[float, int | None]:
        with self._precision():
            outputs, inside = net(**samples.inputs)
            teacher, wanted = self._teach(samples, tuple(self.landmarks))
            marks = [Landmark(*each) for each in zip(inside, wanted, self.landmarks.values(), strict=True)]
            loss = self.loss(outputs, teacher, samples.labels, marks)
        self.optimizer.zero_grad(set_to_none=True)
        self.scaler.scale(loss).backward()
        self.scaler.unscale_(self.optimizer)
        nn.utils.clip_grad_norm_(self.module.parameters(), LARGEST_GRADIENT)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return float(loss.detach()), self._right(outputs, teacher, samples.labels)

    def _right(self, outputs: Sequence[Tensor], teacher: Sequence[Tensor] | None, labels: Tensor | None) -> int | None:
        truth = labels if labels is not None else teacher
        return None if truth is None else self.loss.right(outputs, truth)

    def _teach(self, samples: Samples, names: Sequence[str]) -> tuple[tuple[Tensor, ...] | None, tuple[Tensor, ...]]:
        """Return what the teacher gives, and what it has at these landmarks."""
        if self.teacher is None:
            return None, ()
        with torch.no_grad():
            asked = WithLandmarks(self.teacher, names, self.sight.teacher)
            found: tuple[tuple[Tensor, ...], tuple[Tensor, ...]] = asked(**samples.inputs)
        return found

    def _student(self) -> WithLandmarks:
        return WithLandmarks(self.module, tuple(self.landmarks), self.sight.student)

    def _weigh_landmarks(self, epoch: int) -> None:
        """Set what each landmark counts: the same for all, relative to how much it varies, and in proportion to the outputs.

        They show the way, and count less as the learning rate falls: where it ends, the outputs and the labels decide.

        All processes ask the same samples, so that they agree, and a training that is resumed asks them again.
        """
        if self.teacher is None or not self.landmarks:
            return
        samples = self._first_samples()
        self.module.eval()
        with torch.no_grad():
            outputs, inside = self._student()(**samples.inputs)
        teacher, wanted = self._teach(samples, tuple(self.landmarks))
        assert teacher is not None
        spreads = [float(value.float().var(correction=0)) for value in wanted]
        errors = [float(nn.functional.mse_loss(*pair)) / spread for *pair, spread in zip(inside, wanted, spreads, strict=True)]
        left = factor(self.settings.schedule, (epoch - 1) / self.settings.epochs)
        whole = left * LANDMARKS * float(self.loss.distance(outputs, teacher)) / max(sum(errors), SMALLEST_ERROR)
        self.landmarks = {name: whole / spread for name, spread in zip(self.landmarks, spreads, strict=True)}

    def _landmarks(self) -> dict[str, float]:
        """Return at which tensors the module follows its teacher; what they count is not known yet."""
        if self.teacher is None:
            return {}
        names, samples = landmarks(self.sight.ends, self.module.program, self.teacher.program), self._first_samples()
        self.module.eval()
        with torch.no_grad():
            _, ours = WithLandmarks(self.module, names, self.sight.student)(**samples.inputs)
        _, theirs = self._teach(samples, names)
        return {name: 0.0 for name, *pair in zip(names, ours, theirs, strict=True) if _is_to_follow(*pair)}

    def _first_samples(self) -> Samples:
        numbers = self.split.train[: min(LANDMARK_SAMPLES, self.batch)]
        return _laid_out(self.spool.take(numbers).to(self.team.device))

    def _precision(self) -> AbstractContextManager[Any]:
        if not self.settings.amp:
            return nullcontext()
        kind = self.team.device.type
        return torch.autocast(kind, dtype=torch.float16 if kind == "cuda" else torch.bfloat16)


def _laid_out(samples: Samples) -> Samples:
    """Return the samples with the channels of images innermost on the CPU, where Convs and BatchNormalization are faster so.

    What a node makes is laid out as what it reads, so it is enough to lay out the inputs. Results differ by rounding only.
    """

    def laid_out(value: Tensor) -> Tensor:
        is_image_here = value.ndim == 4 and value.device.type == "cpu"
        return value.contiguous(memory_format=torch.channels_last) if is_image_here else value

    return Samples({name: laid_out(value) for name, value in samples.inputs.items()}, samples.labels)


def _is_to_follow(found: Tensor, wanted: Tensor) -> bool:
    """Return whether a tensor has numbers for each sample, channel and place, as the teacher's has: not a shape, not a score."""
    is_map = wanted.is_floating_point() and wanted.ndim > 2
    return is_map and found.shape == wanted.shape and float(wanted.float().var()) > 0


def _generator(seed: int, epoch: int) -> torch.Generator:
    # Every epoch by itself, so that a resumed training sees what the uninterrupted one would have seen.
    return torch.Generator().manual_seed(seed * 1_000_003 + epoch)


def _batch_size(asked: int, samples: int, team: Team) -> int:
    """Return the size of a batch of all processes together, a multiple of their number."""
    size = min(asked, samples) // team.world * team.world
    if size == 0:
        raise DataError(
            f"{samples} samples in batches of {asked} are too few for {team.world} processes.",
            hint="more data, a larger --batch-size, or fewer processes",
        )
    return size


def _optimizer(module: OnnxModule, lr: float) -> torch.optim.SGD:
    """Return SGD with decay on weights only: it would pull biases and scales towards zero for nothing."""
    added = {name for node in module.program.nodes if node.op == "Add" for name in node.inputs}  # biases, whatever their shape
    weights: list[nn.Parameter] = []
    others: list[nn.Parameter] = []
    for name, parameter in module.named_parameters():
        (weights if parameter.ndim > 1 and name not in added else others).append(parameter)
    groups = [{"params": weights, "weight_decay": WEIGHT_DECAY}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.SGD([group for group in groups if group["params"]], lr=lr, momentum=MOMENTUM, nesterov=True)


def _tuple(outputs: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return (outputs,) if isinstance(outputs, Tensor) else outputs
