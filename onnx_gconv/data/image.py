"""From image files to the model's input. The only user of Pillow, which is an extra."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from onnx_gconv.data.inputs import Input
from onnx_gconv.data.preprocessing import Preprocessing, Size
from onnx_gconv.errors import DataError

if TYPE_CHECKING:
    from PIL import Image

MODES = {1: "L", 3: "RGB"}  # Pillow's names, by number of channels
INSTEAD = "give the data as an .npz file or a function"


@dataclass(frozen=True)
class ImageInput:
    """A model input that takes images: where its channels are, and how a file becomes one sample."""

    input: Input
    channels: int
    channels_first: bool
    preprocessing: Preprocessing
    crop: tuple[int, int] | None  # width and height

    def read(self, path: Path) -> NDArray[np.generic]:
        """Return one sample, in the input's type, with a first axis of 1."""
        pixels = self._pixels(path)
        how = self.preprocessing
        if self.channels == 3 and how.channel_order == "bgr":
            pixels = pixels[:, :, ::-1]
        sample: NDArray[np.generic] = pixels.transpose(2, 0, 1) if self.channels_first else pixels
        if self.input.kind == "float":
            scale = 1 / 255 if how.scale is None else how.scale
            mean, std = self._by_channel(how.mean or (0.0,)), self._by_channel(how.std or (1.0,))
            sample = (sample.astype(np.float64) * scale - mean) / std
        self.input.require((1, *sample.shape), self.input.dtype, source=f"'{path}'")
        return self.input.cast(sample[np.newaxis], source=f"'{path}'", first=0)

    def _by_channel(self, numbers: tuple[float, ...]) -> NDArray[np.float64]:
        return np.array(numbers).reshape(-1, 1, 1) if self.channels_first else np.array(numbers)

    def _pixels(self, path: Path) -> NDArray[np.uint8]:
        """Return height x width x channels of bytes."""
        from PIL import Image

        try:
            with Image.open(path) as opened:
                if opened.mode[0] in "IF":  # Pillow would cut these to 255, not scale them
                    raise DataError(f"'{path}' has more than 8 bits a channel.", hint=f"convert it to 8 bits, or {INSTEAD}")
                image = opened.convert(MODES[self.channels])
        except DataError:
            raise
        except Exception as error:  # each of Pillow's formats fails in its own way on a damaged file
            raise DataError(f"the image '{path}' cannot be read: {error}.", hint="remove or replace it") from error
        if self.preprocessing.resize is not None:
            image = image.resize(_resized(image, self.preprocessing.resize), Image.Resampling.BILINEAR)
        if self.crop is not None:
            image = _cropped(image, self.crop, path)
        return np.asarray(image, np.uint8).reshape(image.height, image.width, self.channels)


def image_input(inputs: tuple[Input, ...], preprocessing: Preprocessing) -> ImageInput:
    """Return how the model's one input takes images, or say why it does not."""
    if len(inputs) != 1:
        raise DataError(
            f"the model has {len(inputs)} inputs ({', '.join(value.name for value in inputs)}), and an image is only one.",
            hint=INSTEAD,
        )
    (only,) = inputs
    shape = only.sample_shape
    if only.kind != "float" and only.dtype != np.uint8:
        raise DataError(f"the model's input {only} takes no pixels: they are floating-point numbers or uint8.", hint=INSTEAD)
    if shape is None or len(shape) != 3 or not {shape[0], shape[2]} & MODES.keys():
        raise DataError(
            f"the model's input {only} does not say where the channels of an image are: 1 or 3 on axis 1 or on the last.",
            hint=INSTEAD,
        )
    channels_first = shape[0] in MODES
    channels, height, width = shape if channels_first else (shape[2], shape[0], shape[1])
    assert channels is not None
    _require_fitting(preprocessing, channels, only)
    wanted = None if height is None or width is None else (width, height)
    crop = _pair(preprocessing.crop) or wanted
    if wanted is not None and crop is not None and crop != wanted:
        raise DataError(
            f"the model's input {only} takes images of {width}x{height}, not the crop of {crop[0]}x{crop[1]}.",
            hint="leave out --crop: it is the model's own size then",
        )
    return ImageInput(only, channels, channels_first, preprocessing, crop)


def _require_fitting(preprocessing: Preprocessing, channels: int, only: Input) -> None:
    """Refuse numbers that do not fit the channels, or an input of raw pixels."""
    for flag, numbers in (("--mean", preprocessing.mean), ("--std", preprocessing.std)):
        if len(numbers) not in (0, 1, channels):
            raise DataError(
                f"{flag} has {len(numbers)} numbers, but the model's input {only} has {channels} channels.",
                hint="give one number for each channel, or one for all",
            )
    if only.kind != "float" and (preprocessing.scale is not None or preprocessing.mean or preprocessing.std):
        raise DataError(
            f"the model's input {only} takes pixels as they are.", hint="leave out --scale, --mean and --std: the model does it"
        )


def _pair(size: Size | None) -> tuple[int, int] | None:
    return (size, size) if isinstance(size, int) else size


def _resized(image: "Image.Image", size: Size) -> tuple[int, int]:
    """Return the new width and height; one number is the shorter side, and the longer one is cut to whole pixels.

    So does torchvision, which most models were trained with.
    """
    if not isinstance(size, int):
        return size
    shorter = min(image.size)
    return image.width * size // shorter, image.height * size // shorter


def _cropped(image: "Image.Image", size: tuple[int, int], path: Path) -> "Image.Image":
    """Return the centre of the image."""
    width, height = size
    if image.width < width or image.height < height:
        raise DataError(
            f"'{path}' is {image.width}x{image.height} pixels, smaller than the {width}x{height} to cut out of it.",
            hint=f"enlarge images with --resize {max(size)} or more",
        )
    left, top = round((image.width - width) / 2), round((image.height - height) / 2)
    return image.crop((left, top, left + width, top + height))
