"""What a Conv sees: the patches of its input, and its output, at some positions."""

import math
from dataclasses import dataclass, replace

import numpy as np
import onnx
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

Floats = NDArray[np.float32]
Positions = tuple[NDArray[np.intp], ...]  # sample, and place on each spatial axis


@dataclass(frozen=True)
class Window:
    """How a Conv moves over its input; one entry for each spatial axis."""

    kernel: tuple[int, ...]
    strides: tuple[int, ...]
    dilations: tuple[int, ...]
    begins: tuple[int, ...]  # padding
    ends: tuple[int, ...]

    @property
    def extents(self) -> tuple[int, ...]:
        """How many inputs lie between the first and the last that a place sees, both counted."""
        return tuple((k - 1) * d + 1 for k, d in zip(self.kernel, self.dilations, strict=True))

    def places(self, size: tuple[int, ...]) -> tuple[int, ...]:
        """Return how many places it has on each axis of an input of this size."""
        return tuple(left // stride + 1 for left, stride in zip(self._left(size), self.strides, strict=True))

    def unseen(self, size: tuple[int, ...]) -> tuple[int, ...]:
        """Return how much at the end of each axis no place reaches, of the input and its padding."""
        return tuple(left % stride for left, stride in zip(self._left(size), self.strides, strict=True))

    def unpadded(self) -> "Window":
        """Return the same without padding."""
        none = (0,) * len(self.kernel)
        return replace(self, begins=none, ends=none)

    def _left(self, size: tuple[int, ...]) -> list[int]:
        """Return what is left of each axis behind the first place."""
        each = zip(size, self.begins, self.ends, self.extents, strict=True)
        return [length + begin + end - extent for length, begin, end, extent in each]


def window_of(conv: onnx.NodeProto, kernel: tuple[int, ...], size: tuple[int, ...]) -> Window:
    """Return the window of a Conv on an input of this spatial size."""
    lists = {attribute.name: tuple(attribute.ints) for attribute in conv.attribute}
    rank = len(kernel)
    strides, dilations = lists.get("strides", (1,) * rank), lists.get("dilations", (1,) * rank)
    pads = lists.get("pads", (0,) * 2 * rank)
    begins, ends = pads[:rank], pads[rank:]
    auto = next((attribute.s.decode() for attribute in conv.attribute if attribute.name == "auto_pad"), "NOTSET")
    if auto.startswith("SAME"):
        needed = [
            max(0, (math.ceil(length / stride) - 1) * stride + (extent - 1) * dilation + 1 - length)
            for length, stride, extent, dilation in zip(size, strides, kernel, dilations, strict=True)
        ]
        less, more = tuple(pad // 2 for pad in needed), tuple(pad - pad // 2 for pad in needed)
        begins, ends = (less, more) if auto == "SAME_UPPER" else (more, less)
    elif auto == "VALID":
        begins = ends = (0,) * rank
    return Window(kernel, strides, dilations, begins, ends)


def spread_window(conv: onnx.NodeProto, kernel: tuple[int, ...]) -> Window | None:
    """Return how a ConvTranspose moves over its spread input, with its kernels turned round; None if it says its size by itself.

    It is a Conv then: over the input with zeros between its numbers, as many as its strides leave out.
    """
    lists = {attribute.name: tuple(attribute.ints) for attribute in conv.attribute}
    auto = next((attribute.s.decode() for attribute in conv.attribute if attribute.name == "auto_pad"), "NOTSET")
    ones, zeros = (1,) * len(kernel), (0,) * len(kernel)
    dilations, pads, more = lists.get("dilations", ones), lists.get("pads", 2 * zeros), lists.get("output_padding", zeros)
    reach = [(extent - 1) * dilation for extent, dilation in zip(kernel, dilations, strict=True)]
    begins = tuple(full - pad for full, pad in zip(reach, pads, strict=False))
    ends = tuple(full - pad + extra for full, pad, extra in zip(reach, pads[len(kernel) :], more, strict=True))
    is_plain = auto == "NOTSET" and "output_shape" not in lists and min(*begins, *ends) >= 0
    return Window(kernel, ones, dilations, begins, ends) if is_plain else None


def spread(images: NDArray[np.generic], conv: onnx.NodeProto) -> NDArray[np.generic]:
    """Return the input of a ConvTranspose with zeros between its numbers."""
    steps = next((tuple(attribute.ints) for attribute in conv.attribute if attribute.name == "strides"), (1,) * (images.ndim - 2))
    sizes = [(size - 1) * step + 1 for size, step in zip(images.shape[2:], steps, strict=True)]
    result = np.zeros((*images.shape[:2], *sizes), images.dtype)
    every = slice(None)
    result[(every, every, *(slice(None, None, step) for step in steps))] = images
    return result


def patches(images: NDArray[np.generic], window: Window) -> NDArray[np.generic]:
    """Return a view (sample, place..., channel, kernel...) of all patches."""
    rank = len(window.kernel)
    padding = [(0, 0), (0, 0), *zip(window.begins, window.ends, strict=True)]
    padded = np.pad(images, padding) if any(map(any, padding)) else images
    view = sliding_window_view(padded, window.extents, axis=tuple(range(2, 2 + rank)))
    every = slice(None)
    strided = view[
        (every, every, *(slice(None, None, s) for s in window.strides), *(slice(None, None, d) for d in window.dilations))
    ]
    return np.moveaxis(strided, 1, 1 + rank)


def choose(counts: tuple[int, ...], most: int, rng: np.random.Generator) -> Positions | None:
    """Return at most so many positions out of samples x places, drawn without replacement; None for all of them."""
    total = math.prod(counts)
    if total <= most:
        return None
    chosen = np.sort(rng.choice(total, most, replace=False))
    return tuple(np.unravel_index(chosen, counts))
