"""Activations of all calibration batches: in memory while they fit, in a temporary folder beyond."""

import threading
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType

import numpy as np
from numpy.typing import NDArray

from onnx_gconv.errors import DataError
from onnx_gconv.staging import scratch

MEMORY_BYTES = 2**27  # what a store keeps in memory before it writes to the disk


class ActivationStore:
    """Arrays by tensor name and number of the batch."""

    def __init__(self, memory_bytes: int = MEMORY_BYTES) -> None:
        self._memory_bytes = memory_bytes
        self._held: dict[tuple[str, int], NDArray[np.generic] | Path] = {}
        self._used = 0
        self._written = 0
        self._folder: Path | None = None
        self._stack = ExitStack()
        self._lock = threading.Lock()

    def __enter__(self) -> "ActivationStore":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._held.clear()
        self._stack.close()

    def has(self, name: str, batch: int) -> bool:
        return (name, batch) in self._held

    def names(self) -> set[str]:
        """Return the tensors that are here."""
        return {name for name, _ in self._held}

    def put(self, name: str, batch: int, value: NDArray[np.generic]) -> None:
        """Keep an array."""
        with self._lock:
            fits = self._used + value.nbytes <= self._memory_bytes
            if fits:
                self._used += value.nbytes
                self._held[name, batch] = value
                return
        try:
            with self._lock:
                path = self._new_path()
            np.save(path, value, allow_pickle=False)
        except OSError as error:
            raise DataError(
                f"activations cannot be kept in the temporary folder: {error.strerror or error}.",
                hint="free some space, set TMPDIR to another folder, or calibrate on fewer samples",
            ) from error
        self._held[name, batch] = path

    def replace(self, name: str, batch: int, value: NDArray[np.generic]) -> None:
        """Keep another array of the same size in the place of one."""
        with self._lock:
            held = self._held[name, batch]
            if not isinstance(held, Path):
                self._held[name, batch] = value
                return
        np.save(held, value, allow_pickle=False)

    def get(self, name: str, batch: int) -> NDArray[np.generic]:
        """Return an array."""
        held = self._held[name, batch]
        return np.load(held, allow_pickle=False) if isinstance(held, Path) else held

    def drop(self, name: str) -> None:
        """Forget a tensor, in all batches."""
        with self._lock:
            for key in [key for key in self._held if key[0] == name]:
                held = self._held.pop(key)
                if isinstance(held, Path):
                    held.unlink()
                else:
                    self._used -= held.nbytes

    def _new_path(self) -> Path:
        if self._folder is None:
            self._folder = self._stack.enter_context(scratch())
        self._written += 1
        return self._folder / f"{self._written}.npy"
