"""How well a model does on the user's data: how often it is right, and how close it is to a reference."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import sqrt

import numpy as np
import onnx
from numpy.typing import NDArray

from onnx_gconv.data.batch import Batch, Data, fixed_batch, good_batch
from onnx_gconv.data.inputs import model_inputs
from onnx_gconv.data.open import WHERE_LABELS_ARE
from onnx_gconv.errors import DataError, ModelError
from onnx_gconv.listener import OnProgress, ignore
from onnx_gconv.runtime import Output, run, session
from onnx_gconv.verification import finite, require_same_interface

FEWEST_CLASSES = 6  # of five classes, every one is among the first five


@dataclass(frozen=True)
class Distance:
    """How far an output is from the reference's, over all samples; infinite where they cannot be compared."""

    max_abs: float
    relative_l2: float  # ‖reference − output‖ / ‖reference‖

    def as_dict(self) -> dict[str, float | None]:
        return {"max_abs": finite(self.max_abs), "relative_l2": finite(self.relative_l2)}


@dataclass(frozen=True)
class Evaluation:
    """Shares of the samples, from 0 to 1; None where there are no labels, no reference or no classes."""

    samples: int
    top1: float | None
    top5: float | None  # None with fewer than six classes, too
    reference_top1: float | None
    reference_top5: float | None
    agreement: float | None  # both models name the same class
    outputs: Mapping[str, Distance]  # empty without a reference

    def as_dict(self) -> dict[str, object]:
        """Return the figures for JSON, which knows no infinity: null stands for it."""
        return vars(self) | {"outputs": {name: distance.as_dict() for name, distance in self.outputs.items()}}


def evaluate(
    model: onnx.ModelProto,
    data: Data,
    *,
    reference: onnx.ModelProto | None = None,
    limit: int | None = None,
    on_progress: OnProgress = ignore,
) -> Evaluation:
    """Return the accuracy of the model where there are labels, and its distance to the reference where there is one."""
    return evaluate_each([model], data, reference=reference, limit=limit, on_progress=on_progress)[0]


def evaluate_each(
    models: Sequence[onnx.ModelProto],
    data: Data,
    *,
    reference: onnx.ModelProto | None = None,
    limit: int | None = None,
    on_progress: OnProgress = ignore,
) -> list[Evaluation]:
    """Return the evaluations of several models with the same inputs and outputs; the reference runs once for all."""
    if reference is None and not data.has_labels:
        raise DataError(
            f"'{data.name}' has no labels, and there is no reference to compare with.",
            hint=f"give --reference DENSE.onnx, or labels: {WHERE_LABELS_ARE}",
        )
    if reference is not None:
        for model in models:
            require_same_interface(model, reference)
    size = _batch_size(models[0], reference)
    runners = [Runner(model, size) for model in models]
    other = None if reference is None else Runner(reference, size)
    total = data.samples if limit is None or data.samples is None else min(limit, data.samples)
    tallies = [Tally() for _ in models]
    for batch in data.batches(size or good_batch(models[0]), limit=limit):
        expected = None if other is None else other.results(batch)
        for runner, tally in zip(runners, tallies, strict=True):
            tally.add(batch, runner.results(batch), expected)
        on_progress(tallies[0].samples, total if total is not None else limit, "samples")
    if not tallies[0].samples:
        raise DataError(f"'{data.name}' gave no samples.", hint="check the data and --limit")
    if tallies[0].logits is None and not tallies[0].gaps:
        raise ModelError(
            "the two models have no output of floating-point numbers in common, so there is nothing to compare.",
            hint="only tensors can be compared: cut off a last step that makes strings, sequences or maps",
        )
    return [tally.evaluation() for tally in tallies]


def _batch_size(model: onnx.ModelProto, reference: onnx.ModelProto | None) -> int | None:
    """Return the number of samples that the models take at once, None if any."""
    sizes = {fixed_batch(model), None if reference is None else fixed_batch(reference)} - {None}
    if len(sizes) > 1:
        listed = " and ".join(str(size) for size in sorted(size or 0 for size in sizes))
        raise ModelError(f"the two models take {listed} samples at once.", hint="export both with the same batch size")
    return next(iter(sizes), None)


class Runner:
    """A model in ONNX Runtime, fed with batches."""

    def __init__(self, model: onnx.ModelProto, size: int | None) -> None:
        self._session = session(model)
        self._types = {value.name: value.dtype for value in model_inputs(model)}
        self._size = size

    def results(self, batch: Batch) -> dict[str, Output]:
        """Return the outputs for these samples. A model with a fixed batch gets them repeated to fill it."""
        count = len(batch)
        rows = np.arange(self._size or count) % count
        # The data has the types of the model that it was opened for; a reference may have others (float32 for float16).
        feeds = {name: values[rows].astype(self._types[name], copy=False) for name, values in batch.inputs.items()}
        try:
            results = run(self._session, feeds)
        except ModelError as error:
            raise ModelError(str(error), hint="give data in a shape that the model accepts") from error
        return {
            name: value[:count] if isinstance(value, np.ndarray) and value.shape[:1] == rows.shape else value
            for name, value in results.items()
        }


@dataclass
class Hits:
    """How often the right class came first, and among the first five."""

    top1: int = 0
    top5: int = 0

    def add(self, logits: NDArray[np.floating], labels: NDArray[np.int64]) -> None:
        places = rank(logits, labels)
        self.top1 += int((places < 1).sum())
        self.top5 += int((places < 5).sum())


@dataclass
class Gap:
    """The sums behind a Distance."""

    max_abs: float = 0.0
    squared_gap: float = 0.0
    squared_reference: float = 0.0

    def add(self, expected: NDArray[np.floating], found: NDArray[np.floating]) -> None:
        if expected.shape != found.shape:  # a detector that finds another number of boxes
            self.max_abs = self.squared_gap = float("inf")
            return
        a, b = expected.astype(np.float64), found.astype(np.float64)
        with np.errstate(invalid="ignore"):  # infinity less infinity
            gap = np.abs(a - b)
        # NaN in either is no number to compare: infinitely far.
        self.max_abs = max(self.max_abs, float(np.nan_to_num(gap, nan=np.inf, posinf=np.inf).max(initial=0.0)))
        self.squared_gap += float((gap * gap).sum())
        self.squared_reference += float((a * a).sum())

    def distance(self) -> Distance:
        if not self.squared_reference > 0:
            return Distance(self.max_abs, 0.0 if self.max_abs == 0 else float("inf"))
        return Distance(self.max_abs, sqrt(self.squared_gap / self.squared_reference))


@dataclass
class Tally:
    """What has been counted so far."""

    samples: int = 0
    logits: str | None = None  # the output that holds the classes, found with the first batch
    classes: int = 0
    hits: Hits | None = None
    reference_hits: Hits | None = None
    agreeing: int | None = None
    gaps: dict[str, Gap] = field(default_factory=dict)

    def add(self, batch: Batch, found: Mapping[str, Output], expected: Mapping[str, Output] | None) -> None:
        if not self.samples:
            self._look(batch, found, has_reference=expected is not None)
        if self.logits is not None:
            self._judge(batch, self._rows(found, len(batch)), None if expected is None else self._rows(expected, len(batch)))
        for name, value in (expected or {}).items():
            one, two = _numbers(value), _numbers(found[name])
            if one is not None and two is not None:
                self.gaps.setdefault(name, Gap()).add(one, two)
        self.samples += len(batch)

    def evaluation(self) -> Evaluation:
        def share(count: int | None) -> float | None:
            return None if count is None else count / self.samples

        has_top5 = self.classes >= FEWEST_CLASSES
        hits, reference_hits = self.hits, self.reference_hits
        return Evaluation(
            samples=self.samples,
            top1=share(hits.top1) if hits else None,
            top5=share(hits.top5) if hits and has_top5 else None,
            reference_top1=share(reference_hits.top1) if reference_hits else None,
            reference_top5=share(reference_hits.top5) if reference_hits and has_top5 else None,
            agreement=share(self.agreeing),
            outputs={name: gap.distance() for name, gap in self.gaps.items()},
        )

    def _look(self, batch: Batch, found: Mapping[str, Output], *, has_reference: bool) -> None:
        """Find the output with one number for each class; without it there is no right or wrong."""
        self.logits = next((name for name, value in found.items() if _is_class_like(value, len(batch))), None)
        if self.logits is None:
            if has_reference:
                return
            raise ModelError(
                f"the model does not classify: none of {', '.join(map(repr, found))} has one number for each class and sample.",
                hint="give --reference DENSE.onnx for the distance of the outputs",
            )
        self.agreeing = 0 if has_reference else None
        if batch.labels is not None:
            self.hits, self.reference_hits = Hits(), Hits() if has_reference else None

    def _judge(self, batch: Batch, logits: NDArray[np.floating], expected: NDArray[np.floating] | None) -> None:
        if expected is not None and self.agreeing is not None:
            self.agreeing += int((logits.argmax(axis=1) == expected.argmax(axis=1)).sum())
        if batch.labels is None or self.hits is None:
            return
        if batch.labels.max() >= self.classes:
            sample = self.samples + int(batch.labels.argmax())
            raise DataError(
                f"the label of sample {sample} (from 0) is {batch.labels.max()}, but the model has {self.classes} classes.",
                hint="labels are class numbers that start at 0, in the order of the model's output",
            )
        self.hits.add(logits, batch.labels)
        if expected is not None and self.reference_hits is not None:
            self.reference_hits.add(expected, batch.labels)

    def _rows(self, results: Mapping[str, Output], samples: int) -> NDArray[np.floating]:
        """Return the numbers of the classes, a row for each sample."""
        assert self.logits is not None
        value = _floats(results[self.logits])
        if value is None or not _is_class_like(value, samples) or self.classes not in (0, value.shape[1]):
            raise ModelError(
                f"output {self.logits!r} does not always have one number for each of the same classes.",
                hint="the model does not classify, or the reference is a model for something else",
            )
        self.classes = value.shape[1]
        rows = value.reshape(samples, -1)
        if np.isnan(rows).any():
            sample = self.samples + int(np.flatnonzero(np.isnan(rows).any(axis=1))[0])
            raise ModelError(
                f"output {self.logits!r} is NaN on sample {sample} (from 0).", hint="the model is damaged, or this sample is"
            )
        return rows


def rank(logits: NDArray[np.floating], labels: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return at which place, from 0, each row has its label; of equal numbers the first class counts as larger, as in argmax."""
    own = np.take_along_axis(logits, labels[:, np.newaxis], axis=1)
    earlier = np.arange(logits.shape[1]) < labels[:, np.newaxis]
    places: NDArray[np.int64] = ((logits > own) | ((logits == own) & earlier)).sum(axis=1)
    return places


def _floats(value: Output) -> NDArray[np.floating] | None:
    return value if isinstance(value, np.ndarray) and np.issubdtype(value.dtype, np.floating) else None


def _numbers(value: Output) -> NDArray[np.floating] | None:
    """Return the floating-point numbers of an output; of maps, one for each sample as ZipMap makes them, by their keys."""
    if not isinstance(value, list) or not value or not all(isinstance(item, dict) for item in value):
        return _floats(value)
    if any(item.keys() != value[0].keys() for item in value):
        return None
    return _floats(np.array([[item[key] for key in sorted(item)] for item in value]))


def _is_class_like(value: Output, samples: int) -> bool:
    """Return whether an output is (samples, classes) or (samples, classes, 1, 1)."""
    floats = _floats(value)
    if floats is None or floats.ndim not in (2, 4):
        return False
    return floats.shape[0] == samples and floats.shape[1] > 1 and set(floats.shape[2:]) <= {1}
