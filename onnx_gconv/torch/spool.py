"""Training data in memory-mapped files: read once from wherever it comes, then taken in any order."""

import json
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from onnx_gconv.data.batch import Data
from onnx_gconv.errors import DataError, OutputError
from onnx_gconv.staging import scratch
from onnx_gconv.torch.team import Team

BATCH = 256  # samples read at a time
INDEX = "index.json"


@dataclass(frozen=True, eq=False)
class Samples:
    """Some samples on their way into a module."""

    inputs: dict[str, Tensor]
    labels: Tensor | None

    def __len__(self) -> int:
        return len(next(iter(self.inputs.values())))

    def to(self, device: torch.device) -> "Samples":
        labels = None if self.labels is None else self.labels.to(device)
        return Samples({name: value.to(device) for name, value in self.inputs.items()}, labels)


@dataclass(frozen=True, eq=False)
class Spool:
    """All samples of a data set, by their number."""

    inputs: Mapping[str, NDArray[np.generic]]
    labels: NDArray[np.int64] | None

    def __len__(self) -> int:
        return len(next(iter(self.inputs.values())))

    def take(self, numbers: Tensor) -> Samples:
        rows = numbers.numpy()
        inputs = {name: torch.from_numpy(np.asarray(values[rows])) for name, values in self.inputs.items()}
        return Samples(inputs, None if self.labels is None else torch.from_numpy(self.labels[rows]))


@contextmanager
def spooled(data: Data, team: Team) -> Iterator[Spool]:
    """Yield the data set, spooled once for each machine; the files are gone afterwards."""
    with scratch() if team.is_first_here else nullcontext() as folder:
        if folder is not None:
            _write(data, folder)
        shared = team.from_first_here(folder)
        yield _read(shared)
        team.wait()  # another process may still read


def _write(data: Data, folder: Path) -> None:
    types: dict[str, tuple[str, list[int]]] = {}
    files: dict[str, str] = {}
    try:
        with ExitStack() as stack:
            streams = {}
            for batch in data.batches(BATCH):
                arrays = dict(batch.inputs) | ({"": batch.labels} if batch.labels is not None else {})
                for name, values in arrays.items():
                    wide = values.astype(np.float32) if values.dtype.name in ("float16", "bfloat16") else values
                    if name not in streams:
                        files[name] = f"{len(files)}.bin"
                        streams[name] = stack.enter_context((folder / files[name]).open("wb"))
                        types[name] = wide.dtype.str, list(wide.shape[1:])
                    if types[name] != (wide.dtype.str, list(wide.shape[1:])):
                        raise DataError(
                            f"the samples of '{data.name}' differ in shape or type, so they cannot be shuffled into batches.",
                            hint="bring all samples to one shape; for images --resize and --crop",
                        )
                    wide.tofile(streams[name])
    except OSError as error:
        raise OutputError(
            f"the data cannot be spooled into '{folder}': {error.strerror or error}.",
            hint="free some space there, or set TMPDIR to another folder",
        ) from error
    if not files:
        raise DataError(f"'{data.name}' gave no samples.", hint="check the data")
    index = {name: {"file": files[name], "dtype": types[name][0], "shape": types[name][1]} for name in files}
    (folder / INDEX).write_text(json.dumps(index), encoding="utf-8")


def _read(folder: Path) -> Spool:
    arrays = {
        name: np.memmap(folder / entry["file"], entry["dtype"], "r").reshape(-1, *entry["shape"])
        for name, entry in json.loads((folder / INDEX).read_text(encoding="utf-8")).items()
    }
    labels = arrays.pop("", None)  # no model input has an empty name
    return Spool(arrays, labels)
