"""Data from the user's own code: `package.module:function`, which returns an iterable of (inputs, labels) batches."""

import importlib
import sys
import traceback
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager, redirect_stdout, suppress
from dataclasses import dataclass
from typing import Any

import numpy as np

from onnx_gconv.data.batch import Batch, rebatch
from onnx_gconv.data.inputs import Input, cast_labels, require_label_type
from onnx_gconv.errors import DataError
from onnx_gconv.runtime import Feeds

CONTRACT = (
    "without arguments it must return an iterable of (inputs, labels) batches: inputs a dict by name, or one array for a model "
    "with one input; labels class numbers or None"
)
END = object()


@dataclass(frozen=True)
class FunctionData:
    """What the user's function yields; it is called anew for each pass, since an iterator can be used up only once."""

    name: str
    has_labels: bool
    function: Callable[[], Iterable[object]]
    inputs: tuple[Input, ...]

    @property
    def samples(self) -> None:
        return None

    def batches(self, size: int, *, limit: int | None = None) -> Iterator[Batch]:
        return rebatch(self._given(), size, limit=limit)

    def _given(self) -> Iterator[Batch]:
        first = 0
        for item in _items(self.name, self.function):
            batch = batch_of(item, self.inputs, source=self.name, first=first)
            if (batch.labels is not None) != self.has_labels:
                raise DataError(f"{self.name} gives labels with some batches only.", hint="give them with all or with none")
            first += len(batch)
            yield batch


def open_named_function(name: str, inputs: tuple[Input, ...]) -> FunctionData:
    """Return what the function called `package.module:function` yields."""
    return open_function(name, inputs, _import(name))


def open_function(name: str, inputs: tuple[Input, ...], function: Callable[[], Iterable[object]]) -> FunctionData:
    """Return what the function yields. It is called once here, for its first batch, to see whether there are labels."""
    items = _items(name, function)
    first = next(items, None)
    items.close()
    if first is None:
        raise DataError(f"{name} gives no batches.", hint=CONTRACT)
    return FunctionData(name, batch_of(first, inputs, source=name, first=0).labels is not None, function, inputs)


def _import(name: str) -> Callable[[], Iterable[object]]:
    module_name, _, attribute = name.partition(":")
    try:
        with _their_code(name, "cannot be imported"):
            module = importlib.import_module(module_name)
    except DataError as error:
        if isinstance(error.__cause__, ModuleNotFoundError) and f"{module_name}.".startswith(f"{error.__cause__.name}."):
            raise DataError(
                f"there is no module {error.__cause__.name!r} for {name}.",
                hint="install it, or run where its file is: the current directory is searched",
            ) from error
        raise
    function: Callable[[], Iterable[object]] | None = getattr(module, attribute, None)
    if not callable(function):
        problem = "has no" if function is None else "has no function"
        raise DataError(f"the module {module_name!r} {problem} {attribute!r}.", hint="write package.module:function")
    return function


def _items(name: str, function: Callable[[], Iterable[object]]) -> Generator[object, None, None]:
    with _their_code(name, "failed"):
        given: Any = function()
    try:
        iterator = iter(given)
    except TypeError as error:
        raise DataError(f"{name} returned {type(given).__name__}, not batches.", hint=CONTRACT) from error
    while True:
        with _their_code(name, "failed"):
            item = next(iterator, END)
        if item is END:
            return
        yield item


def batch_of(item: object, inputs: tuple[Input, ...], *, source: str, first: int) -> Batch:
    """Return the batch that the user's code gave, checked against the model's inputs."""
    if not isinstance(item, tuple | list) or len(item) != 2:
        raise DataError(f"{source} gave {_kind(item)}, not (inputs, labels).", hint=CONTRACT)
    given, labels = item
    if not isinstance(given, dict):
        if len(inputs) > 1:
            raise DataError(
                f"{source} gave inputs as {_kind(given)}, but the model has {len(inputs)} inputs.",
                hint=f"give a dict with {', '.join(map(str, inputs))}",
            )
        given = {inputs[0].name: given}
    names = {value.name for value in inputs}
    if given.keys() != names:
        raise DataError(
            f"{source} gave the inputs {', '.join(map(repr, given))}.", hint=f"the model takes {', '.join(map(str, inputs))}"
        )
    feeds: Feeds = {}
    for value in inputs:
        with _their_code(source, f"gave an input {value.name!r} that is no array"):
            array = np.asarray(given[value.name])
        value.require(array.shape, array.dtype, source=source)
        feeds[value.name] = value.cast(array, source=source, first=first)
    classes = None
    if labels is not None:
        with _their_code(source, "gave labels that are no array"):
            array = np.asarray(labels)
        require_label_type(array.shape, array.dtype, source=source)
        classes = cast_labels(array, source=source, first=first)
    counts = {name: len(array) for name, array in feeds.items()} | ({} if classes is None else {"labels": len(classes)})
    if len(set(counts.values())) > 1:
        listed = ", ".join(f"{name} {count}" for name, count in counts.items())
        raise DataError(f"{source}: the numbers of samples in a batch differ: {listed}.", hint="the first axis counts samples")
    return Batch(feeds, classes)


def _kind(item: object) -> str:
    length = f" of {len(item)}" if isinstance(item, tuple | list) else ""
    return f"{type(item).__name__}{length}"


@contextmanager
def _their_code(name: str, problem: str) -> Iterator[None]:
    """Run the user's code: what it prints goes to stderr, since stdout carries our result; what it raises becomes a sentence.

    Meanwhile, and only then, modules are looked for in the current folder first, as with `python -m`: a `json.py` that lies there
    may be meant for his code, never for ours.
    """
    sys.path.insert(0, "")
    try:
        with redirect_stdout(sys.stderr):
            yield
    except Exception as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        raise DataError(
            f"{name} {problem}: {type(error).__name__}: {error} ({frame.filename}, line {frame.lineno}).",
            hint=f"{name} is your code: call it by itself to find out",
        ) from error
    finally:
        with suppress(ValueError):  # his code has taken it out
            sys.path.remove("")
