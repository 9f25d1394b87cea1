"""What training lowers: the error on labels, the distance to a teacher, or both."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from onnx_gconv.errors import DataError

TEMPERATURE = 4.0  # at which the teacher's classes are compared: Hinton et al. 2015 softens them so
FLOOR = 1e-12  # of a probability, before its logarithm


@dataclass(frozen=True, eq=False)
class Landmark:
    """A tensor inside of the model, what the teacher has there, and what their mean squared difference counts."""

    found: Tensor
    wanted: Tensor
    weight: float


@dataclass(frozen=True)
class Loss:
    """`distill` of it is the distance to the teacher, the rest the cross-entropy with the labels."""

    distill: float
    makers: tuple[str, ...]  # the operator that makes each output: some give probabilities

    def __call__(
        self,
        outputs: Sequence[Tensor],
        teacher: Sequence[Tensor] | None,
        labels: Tensor | None,
        landmarks: Sequence[Landmark] = (),
    ) -> Tensor:
        """Return the loss, also of tensors inside of the model."""
        total = outputs[0].new_zeros(())
        if self.distill > 0:
            assert teacher is not None
            total = total + self.distill * sum((_off(mark) for mark in landmarks), start=self.distance(outputs, teacher))
        if self.distill < 1:
            assert labels is not None
            place = self.scores(outputs)
            if place is None:
                raise DataError(
                    "the model does not classify: no output has one number for each class and sample, so labels cannot train it.",
                    hint="--distill 1 trains it on the outputs of the dense model instead",
                )
            classes = outputs[place].shape[1]
            if int(labels.max()) >= classes:
                raise DataError(
                    f"a label is {int(labels.max())}, but the model has {classes} classes.",
                    hint="labels are class numbers that start at 0, in the order of the model's output",
                )
            total = total + (1 - self.distill) * F.cross_entropy(self._logits(outputs, place), labels)
        return total

    def scores(self, outputs: Sequence[Tensor]) -> int | None:
        """Return which output has one number for each class and sample: (N, C), or (N, C, 1, 1)."""
        for place, value in enumerate(outputs):
            if value.is_floating_point() and value.ndim in (2, 4) and value.shape[1] > 1 and value[0, 0].numel() == 1:
                return place
        return None

    def right(self, outputs: Sequence[Tensor], truth: Sequence[Tensor] | Tensor) -> int | None:
        """Return for how many samples the largest class is the label, or the teacher's; None if there are no classes."""
        place = self.scores(outputs)
        if place is None:
            return None
        named = truth if isinstance(truth, Tensor) else truth[place].flatten(1).argmax(1)
        return int((outputs[place].flatten(1).argmax(1) == named).sum())

    def distance(self, outputs: Sequence[Tensor], teacher: Sequence[Tensor]) -> Tensor:
        """Return the divergence of the classes, and of every other output the squared error as a share of its variance."""
        place = self.scores(outputs)
        parts = []
        for index, (found, wanted) in enumerate(zip(outputs, teacher, strict=True)):
            if index == place:
                student = F.log_softmax(self._logits(outputs, index) / TEMPERATURE, dim=1)
                target = F.log_softmax(self._logits(teacher, index) / TEMPERATURE, dim=1)
                # The gradient of softened classes shrinks with the square of the temperature.
                parts.append(TEMPERATURE**2 * F.kl_div(student, target, reduction="batchmean", log_target=True))
            elif found.is_floating_point() and found.numel():
                parts.append(F.mse_loss(found, wanted) / wanted.float().var(correction=0).clamp_min(FLOOR))
        return torch.stack(parts).sum()

    def _logits(self, outputs: Sequence[Tensor], place: int) -> Tensor:
        """Return numbers whose softmax the classes are: an output that holds probabilities already is undone."""
        value = outputs[place].flatten(1).float()
        if self.makers[place] == "Softmax":
            return value.clamp_min(FLOOR).log()
        if self.makers[place] == "Sigmoid":
            return torch.logit(value, eps=1e-6)
        return value


def _off(mark: Landmark) -> Tensor:
    return mark.weight * F.mse_loss(mark.found, mark.wanted)
