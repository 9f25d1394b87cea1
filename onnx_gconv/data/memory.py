"""Data that a program has at hand: arrays by input name, one array, or batches of its own making."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from onnx_gconv.data.batch import Batch, Data
from onnx_gconv.data.function import FunctionData, batch_of, open_function
from onnx_gconv.data.inputs import Input
from onnx_gconv.data.npz import LABELS
from onnx_gconv.errors import DataError

ARRAYS = "the arrays"
BATCHES = "the iterable of batches"


@dataclass(frozen=True, eq=False)
class ArraysData:
    """Samples in memory."""

    whole: Batch
    name: str = ARRAYS

    @property
    def samples(self) -> int:
        return len(self.whole)

    @property
    def has_labels(self) -> bool:
        return self.whole.labels is not None

    def batches(self, size: int, *, limit: int | None = None) -> Iterator[Batch]:
        stop = self.samples if limit is None else min(limit, self.samples)
        return (self.whole.part(start, min(start + size, stop)) for start in range(0, stop, size))


def open_arrays(given: object, labels: object, inputs: tuple[Input, ...]) -> ArraysData:
    """Return arrays as data: one for each input, by name, and optionally `labels`; or the array of the only input."""
    named = dict(given) if isinstance(given, Mapping) else given
    if isinstance(named, dict) and labels is None and LABELS not in {value.name for value in inputs}:
        labels = named.pop(LABELS, None)
    whole = batch_of((named, labels), inputs, source=ARRAYS, first=0)
    if not len(whole):
        raise DataError("the arrays hold no samples.", hint="the first axis of every array counts samples")
    return ArraysData(whole)


def open_batches(given: Iterable[object], inputs: tuple[Input, ...]) -> Data:
    """Return batches as data: (inputs, labels) pairs, or inputs alone. A generator, which gives them once, is kept in memory."""
    kept = list(given) if isinstance(given, Iterator) else given

    def pairs() -> Iterator[object]:
        for item in kept:
            yield item if isinstance(item, tuple | list) and len(item) == 2 else (item, None)

    data: FunctionData = open_function(BATCHES, inputs, pairs)
    return data
