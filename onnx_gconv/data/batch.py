"""Batches of samples, and the data sets that yield them."""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
import onnx
from numpy.typing import NDArray

from onnx_gconv.errors import DataError
from onnx_gconv.model.shapes import declared_shape, free_inputs
from onnx_gconv.runtime import Feeds

MOST_A_BATCH = 50
NUMBERS_A_BATCH = 2**20  # in the inputs; a batch of large images is small, because what follows is some ten times as large
USUAL_AXIS = 224  # what one is taken for that the model leaves open


@dataclass(frozen=True)
class Batch:
    """Some samples: an array for each model input, in its type, first axis = samples; and their classes, where known."""

    inputs: Feeds
    labels: NDArray[np.int64] | None

    def __len__(self) -> int:
        return len(next(iter(self.inputs.values())))

    def part(self, start: int, stop: int) -> "Batch":
        """Return the samples from `start` up to `stop`."""
        labels = None if self.labels is None else self.labels[start:stop]
        return Batch({name: values[start:stop] for name, values in self.inputs.items()}, labels)


@runtime_checkable
class Data(Protocol):
    """A data set that can be read as often as needed.

    `batches` starts from the beginning at every call, in the same order. It yields `size` samples at a time, fewer in the
    last batch, and stops after `limit`. A model whose batch axis is fixed (`fixed_batch`) wants exactly that size: the caller
    asks for it, and pads or drops a smaller last batch.
    """

    @property
    def name(self) -> str:
        """What the user typed."""

    @property
    def samples(self) -> int | None:
        """How many there are; None where only reading them all would tell."""

    @property
    def has_labels(self) -> bool: ...

    def batches(self, size: int, *, limit: int | None = None) -> Iterator[Batch]: ...


def fixed_batch(model: onnx.ModelProto) -> int | None:
    """Return the number of samples that the model takes at once, None if any."""
    first_axes = {value.name: (declared_shape(value) or [None])[0] for value in free_inputs(model)}
    fixed = {name: size for name, size in first_axes.items() if size is not None}
    if len(set(fixed.values())) > 1:
        listed = ", ".join(f"{name} {size}" for name, size in fixed.items())
        raise DataError(
            f"the inputs of the model have different first axes ({listed}), so these are not samples.",
            hint="only models whose inputs all have the samples on their first axis can be fed with data",
        )
    return next(iter(fixed.values()), None)


def good_batch(model: onnx.ModelProto) -> int:
    """Return how many samples to run at once: what the model takes, or else so many that memory stays small."""
    sizes = [declared_shape(value) or [] for value in free_inputs(model)]
    numbers = sum(math.prod(axis or USUAL_AXIS for axis in size[1:]) for size in sizes) or 1
    return fixed_batch(model) or max(1, min(MOST_A_BATCH, NUMBERS_A_BATCH // numbers))


def rebatch(given: Iterable[Batch], size: int, *, limit: int | None) -> Iterator[Batch]:
    """Yield the same samples, `size` at a time, and ask for no more of them than `limit` needs."""
    assert size > 0
    left = limit
    held: list[Batch] = []
    wanted = size if left is None else min(size, left)
    if wanted == 0:
        return
    for batch in given:
        start = 0
        while start < len(batch):
            piece = batch.part(start, start + wanted)
            held.append(piece)
            start += len(piece)
            wanted -= len(piece)
            if wanted > 0:
                continue
            whole = _join(held)
            yield whole
            left = None if left is None else left - len(whole)
            held, wanted = [], size if left is None else min(size, left)
            if wanted == 0:
                return
    if held:
        yield _join(held)


def _join(pieces: Sequence[Batch]) -> Batch:
    if len(pieces) == 1:
        return pieces[0]
    inputs: Feeds = {}
    for name in pieces[0].inputs:
        shapes = {piece.inputs[name].shape[1:] for piece in pieces}
        if len(shapes) > 1:
            listed = " and ".join("x".join(map(str, shape)) for shape in sorted(shapes))
            raise DataError(
                f"samples of input {name!r} have different shapes, {listed}, and cannot go into one batch.",
                hint="bring all samples to one shape",
            )
        inputs[name] = np.concatenate([piece.inputs[name] for piece in pieces])
    labels = [piece.labels for piece in pieces if piece.labels is not None]
    return Batch(inputs, np.concatenate(labels) if labels else None)
