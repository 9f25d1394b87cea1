"""Calibration samples, as the model takes them."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import onnx

from onnx_gconv.data.batch import Batch, Data, fixed_batch, good_batch
from onnx_gconv.data.function import FunctionData
from onnx_gconv.errors import DataError
from onnx_gconv.runtime import Feeds

SAMPLES = 1000


@dataclass(frozen=True)
class Calibration:
    """The first `samples` of some data, in batches that suit the model."""

    data: Data
    samples: int
    batch: int
    is_fixed: bool  # whether the model takes no other number at once

    @property
    def is_shareable(self) -> bool:
        """Whether several may read the data at once. A user's function may keep a state, such as a seeded generator."""
        return not isinstance(self.data.data if isinstance(self.data, Unlabelled) else self.data, FunctionData)

    @property
    def count(self) -> int:
        """How many samples there will be, as far as that is known."""
        return self.samples if self.data.samples is None else min(self.data.samples, self.samples)

    def feeds(self, limit: int | None = None) -> Iterator[Feeds]:
        """Yield the inputs of each batch. A model with a fixed batch misses the samples that fill none."""
        most = self.samples if limit is None else min(limit, self.samples)
        count = 0
        for found in self.data.batches(self.batch, limit=most):
            if len(found) == self.batch or not self.is_fixed:
                count += len(found)
                yield found.inputs
        if count == 0:
            raise DataError(
                f"'{self.data.name}' has no {'whole batch of ' + str(self.batch) + ' ' if self.is_fixed else ''}samples.",
                hint="calibrate on a few hundred samples; labels are not needed",
            )


@dataclass(frozen=True)
class Unlabelled:
    """Some data without its labels: whatever they are, calibration has no use for them."""

    data: Data
    has_labels: bool = False

    @property
    def name(self) -> str:
        return self.data.name

    @property
    def samples(self) -> int | None:
        return self.data.samples

    def batches(self, size: int, *, limit: int | None = None) -> Iterator[Batch]:
        return (replace(batch, labels=None) for batch in self.data.batches(size, limit=limit))


def calibration(data: Data, model: onnx.ModelProto, samples: int) -> Calibration:
    """Return the data in batches of the size that the model takes, or else of one that keeps memory small."""
    return Calibration(Unlabelled(data), samples, good_batch(model), fixed_batch(model) is not None)
