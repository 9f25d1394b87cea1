"""How images become the model's input."""

from dataclasses import dataclass
from typing import Literal

Size = int | tuple[int, int]  # one number, or width and height


@dataclass(frozen=True)
class Preprocessing:
    """Resize, crop the centre, then (pixel * scale - mean) / std for each channel.

    None and () are the defaults: no resizing; the model's own size, if fixed; 1/255 for inputs of floating-point numbers, and
    the pixels as they are for uint8; mean 0; std 1.
    """

    resize: Size | None = None  # one number: the shorter side
    crop: Size | None = None  # one number: a square
    scale: float | None = None
    mean: tuple[float, ...] = ()  # one number for each channel, or one for all
    std: tuple[float, ...] = ()
    channel_order: Literal["rgb", "bgr"] = "rgb"
