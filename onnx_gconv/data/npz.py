"""Data in an .npz file: one array for each model input, by its name, and optionally `labels`.

Read batch by batch from the (possibly compressed) members of the zip file: data sets may be larger than memory.
"""

import math
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from onnx_gconv.data.batch import Batch
from onnx_gconv.data.inputs import Input, cast_labels, require_label_type
from onnx_gconv.errors import DataError
from onnx_gconv.runtime import Feeds

LABELS = "labels"
SUFFIX = ".npy"


@dataclass(frozen=True)
class Header:
    """What a stored array says of itself."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]


@dataclass(frozen=True)
class NpzData:
    """The samples in an .npz file."""

    name: str
    samples: int
    has_labels: bool
    inputs: tuple[Input, ...]

    def batches(self, size: int, *, limit: int | None = None) -> Iterator[Batch]:
        stop = self.samples if limit is None else min(limit, self.samples)
        with _reading(self.name), zipfile.ZipFile(self.name) as archive, ExitStack() as streams:
            names = [value.name for value in self.inputs] + [LABELS] * self.has_labels
            rows = {name: Rows(self.name, name, streams.enter_context(_member(archive, name))) for name in names}
            for first in range(0, stop, size):
                count = min(size, stop - first)
                feeds: Feeds = {
                    value.name: value.cast(rows[value.name].read(count), source=f"'{self.name}'", first=first)
                    for value in self.inputs
                }
                labels = None
                if self.has_labels:
                    labels = cast_labels(rows[LABELS].read(count), source=f"'{self.name}'", first=first)
                yield Batch(feeds, labels)


class Rows:
    """The rows of one stored array, one after the other."""

    def __init__(self, path: str, name: str, stream: IO[bytes]) -> None:
        self._path, self._name, self._stream = path, name, stream
        self._header = _read_header(path, name, stream)

    def read(self, count: int) -> NDArray[np.generic]:
        """Return the next rows."""
        shape, dtype = (count, *self._header.shape[1:]), self._header.dtype
        content = bytearray(self._stream.read(math.prod(shape) * dtype.itemsize))  # a bytearray, so that it may be written to
        if len(content) != math.prod(shape) * dtype.itemsize:
            raise _damaged(self._path, f"{self._name!r} ends too early")
        return np.frombuffer(content, dtype).reshape(shape)


def open_npz(path: str, inputs: Sequence[Input]) -> NpzData:
    """Return the data in the file, after a look at names, shapes and types; its values are looked at when they are read."""
    with _reading(path), zipfile.ZipFile(path) as archive:
        stored = {info.filename.removesuffix(SUFFIX) for info in archive.infolist() if info.filename.endswith(SUFFIX)}
        _require_names(path, stored, inputs)
        headers = {name: _header(path, archive, name) for name in sorted(stored)}
    source = f"'{path}'"
    for value in inputs:
        value.require(headers[value.name].shape, headers[value.name].dtype, source=source)
    has_labels = LABELS in stored - {value.name for value in inputs}
    if has_labels:
        require_label_type(headers[LABELS].shape, headers[LABELS].dtype, source=source)
    samples = {name: header.shape[0] for name, header in headers.items()}
    if len(set(samples.values())) > 1:
        listed = ", ".join(f"{name} {count}" for name, count in samples.items())
        raise DataError(f"{source}: the numbers of samples differ: {listed}.", hint="the first axis of every array counts samples")
    count = samples[inputs[0].name]
    if count == 0:
        raise DataError(f"{source} holds no samples.", hint="the first axis of every array counts samples")
    return NpzData(path, count, has_labels, tuple(inputs))


def _require_names(path: str, stored: set[str], inputs: Sequence[Input]) -> None:
    names = {value.name for value in inputs}
    missing, unknown = sorted(names - stored), sorted(stored - names - {LABELS})
    hint = f"the model takes {', '.join(map(str, inputs))}; beside that only '{LABELS}' may be there"
    if missing:
        there = ", ".join(map(repr, sorted(stored))) or "no array"
        raise DataError(f"'{path}' has no array for the input {missing[0]!r}: it holds {there}.", hint=hint)
    if unknown:
        raise DataError(f"'{path}' holds {unknown[0]!r}, which is not an input of the model.", hint=hint)


def _header(path: str, archive: zipfile.ZipFile, name: str) -> Header:
    """Return what the header of a member says, if it can be read row by row and the member is as long as it says."""
    with _member(archive, name) as stream:
        header = _read_header(path, name, stream)
        size = stream.tell() + math.prod(header.shape) * header.dtype.itemsize
    if header.dtype.hasobject:
        raise DataError(f"'{path}': {name!r} holds Python objects, which are never unpickled.", hint="save arrays of numbers only")
    if not header.shape:
        raise DataError(f"'{path}': {name!r} is a single number.", hint="the first axis of every array counts samples")
    if archive.getinfo(name + SUFFIX).file_size != size:
        raise _damaged(path, f"{name!r} does not have the size that its header says")
    return header


def _read_header(path: str, name: str, stream: IO[bytes]) -> Header:
    try:
        version = np.lib.format.read_magic(stream)
        read = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}[version]
        shape, is_fortran, dtype = read(stream)
    except Exception as error:  # NumPy reads headers with Python's tokenizer and parser, which have many ways to fail
        raise _damaged(path, f"{name!r} is not a NumPy array: {error}") from error
    if is_fortran and len(shape) > 1:
        raise DataError(
            f"'{path}': {name!r} is stored in Fortran order, so its samples cannot be read one after the other.",
            hint="save numpy.ascontiguousarray of it",
        )
    return Header(shape, dtype)


def _member(archive: zipfile.ZipFile, name: str) -> IO[bytes]:
    return archive.open(name + SUFFIX)


@contextmanager
def _reading(path: str) -> Iterator[None]:
    """Turn what goes wrong with the file into one sentence."""
    try:
        yield
    except FileNotFoundError as error:
        raise DataError(f"there is no file '{path}'.", hint="check the path") from error
    except OSError as error:
        raise DataError(f"cannot read '{path}': {error.strerror or error}.", hint="check the file and its permissions") from error
    # RuntimeError: encrypted, or compressed by an unknown method. KeyError: replaced by another file since it was opened.
    except (zipfile.BadZipFile, zlib.error, EOFError, RuntimeError, KeyError) as error:
        raise _damaged(path, str(error)) from error


def _damaged(path: str, problem: str) -> DataError:
    return DataError(f"'{path}' is not an .npz file, or it is damaged: {problem}.", hint="write it with numpy.savez")
