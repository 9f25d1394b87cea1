"""Data in a folder of images: a sub-folder for each class, or plain files without labels."""

from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import numpy as np

from onnx_gconv.data.batch import Batch
from onnx_gconv.data.image import ImageInput, image_input
from onnx_gconv.data.inputs import Input
from onnx_gconv.data.preprocessing import Preprocessing
from onnx_gconv.errors import DataError

SUFFIXES = frozenset({".jpg", ".jpeg", ".png", ".bmp", ".webp"})
KINDS = ", ".join(sorted(SUFFIXES))


@dataclass(frozen=True)
class FolderData:
    """The images of a folder, decoded when their batch is due."""

    name: str
    files: tuple[Path, ...]
    classes: tuple[int, ...]  # of each file; empty without labels
    reader: ImageInput

    @property
    def samples(self) -> int:
        return len(self.files)

    @property
    def has_labels(self) -> bool:
        return bool(self.classes)

    def batches(self, size: int, *, limit: int | None = None) -> Iterator[Batch]:
        stop = self.samples if limit is None else min(limit, self.samples)
        for start in range(0, stop, size):
            chosen = slice(start, min(start + size, stop))
            labels = np.array(self.classes[chosen], np.int64) if self.has_labels else None
            yield Batch({self.reader.input.name: self._stack(self.files[chosen])}, labels)

    def _stack(self, files: tuple[Path, ...]) -> np.ndarray[tuple[int, ...], np.dtype[np.generic]]:
        samples = [self.reader.read(path) for path in files]
        for path, sample in zip(files, samples, strict=True):
            if sample.shape != samples[0].shape:
                sizes = ["x".join(map(str, shape)) for shape in (samples[0].shape[1:], sample.shape[1:])]
                raise DataError(
                    f"the images '{files[0]}' and '{path}' have different sizes, {sizes[0]} and {sizes[1]}.",
                    hint="bring them to one size with --resize and --crop",
                )
        return np.concatenate(samples)


def open_folder(name: str, inputs: tuple[Input, ...], preprocessing: Preprocessing) -> FolderData:
    """Return the images under the folder; hidden files and other kinds of files are passed over.

    Classes count from 0 in the alphabetical order of the sub-folders' names, as in torchvision. The first image of each class
    comes first, then the second of each, so that any `limit` sees all classes.
    """
    if find_spec("PIL") is None:
        raise DataError("reading images needs Pillow, which is not installed.", hint="pip install 'onnx-gconv[images]'")
    reader = image_input(inputs, preprocessing)
    try:
        entries = sorted(path for path in Path(name).iterdir() if not path.name.startswith("."))
        plain = [path for path in entries if path.suffix.lower() in SUFFIXES and path.is_file()]
        classes = {path: _images(path) for path in entries if path.is_dir()}
    except OSError as error:
        raise DataError(f"cannot read the folder '{name}': {error.strerror}.", hint="check its permissions") from error
    if plain and classes:
        raise DataError(
            f"the folder '{name}' holds images and sub-folders, so it is not clear which are samples.",
            hint="keep either one sub-folder for each class, or only images",
        )
    for path, images in classes.items():
        if not images:
            raise DataError(
                f"the sub-folder '{path}' holds no images ({KINDS}).",
                hint="each sub-folder of the data is a class with its images right inside",
            )
    if not plain and not classes:
        raise DataError(f"the folder '{name}' holds no images ({KINDS}).", hint="check the path")
    ranked = sorted((rank, label, path) for label, files in enumerate(classes.values()) for rank, path in enumerate(files))
    files = tuple(path for _, _, path in ranked) or tuple(plain)
    return FolderData(name, files, tuple(label for _, label, _ in ranked), reader)


def _images(folder: Path) -> list[Path]:
    return sorted(
        path for path in folder.iterdir() if path.suffix.lower() in SUFFIXES and path.is_file() and not path.name.startswith(".")
    )
