"""CIFAR-10 images of ../shared as data for any model that takes images: resized, and scaled as it wants them."""

import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from onnx_gconv.data.batch import Batch

SHARED = Path(__file__).resolve().parent.parent.parent / "shared"
SIDE = 32


def cifar10() -> Any:
    """Return the module beside the images."""
    sys.path.insert(0, str(SHARED / "data"))
    return import_module("cifar10")


@dataclass(frozen=True, eq=False)
class Images:
    """Pixels with or without labels, made into inputs batch by batch: resized, they would fill the memory."""

    name: str
    pixels: NDArray[np.uint8]  # samples, rows, columns, colours
    labels: NDArray[np.int64] | None
    input_name: str
    side: int = SIDE
    is_normalised: bool = True  # as ImageNet's (and the CIFAR ResNets') mean and deviation say; else from 0 to 1

    @property
    def samples(self) -> int:
        return len(self.pixels)

    @property
    def has_labels(self) -> bool:
        return self.labels is not None

    def batches(self, size: int, *, limit: int | None = None) -> Iterator[Batch]:
        stop = self.samples if limit is None else min(limit, self.samples)
        for first in range(0, stop, size):
            part = slice(first, min(first + size, stop))
            yield Batch({self.input_name: self._prepared(part)}, None if self.labels is None else self.labels[part])

    def unlabelled(self) -> "Images":
        """Return the images alone."""
        return replace(self, labels=None)

    def _prepared(self, part: slice) -> NDArray[np.float32]:
        pixels = self.pixels[part]
        if self.side != SIDE:
            from PIL import Image

            size = (self.side, self.side)
            pixels = np.stack([np.asarray(Image.fromarray(image).resize(size, Image.Resampling.BILINEAR)) for image in pixels])
        if self.is_normalised:
            return np.asarray(cifar10().normalise(pixels))
        return np.ascontiguousarray(pixels.transpose(0, 3, 1, 2), dtype=np.float32) / np.float32(255)


def cifar_images(split: str, limit: int, input_name: str, *, side: int = SIDE, is_normalised: bool = True) -> Images:
    """Return the first images of "train" or "test", with their labels."""
    pixels, labels = cifar10().load(split, limit)
    return Images(f"CIFAR-10 {split}", pixels, labels, input_name, side, is_normalised)
