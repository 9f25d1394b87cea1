"""Random crops and flips of images that are tensors already."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

PADDED_SHARE = 8  # a crop may be off by an eighth of the size: 4 of 32 pixels


@dataclass(frozen=True, eq=False)
class Draw:
    """What happens to each sample: how far its window lies from the corner (0..1), and whether it is flipped."""

    down: Tensor
    right: Tensor
    flipped: Tensor

    def part(self, numbers: Tensor) -> "Draw":
        return Draw(self.down[numbers], self.right[numbers], self.flipped[numbers])


def draw(samples: int, generator: torch.Generator) -> Draw:
    """Return random values for a whole batch: the same for all processes that share one."""
    down, right, flipped = torch.rand(3, samples, generator=generator)
    return Draw(down, right, flipped < 0.5)


def augmented(images: Tensor, drawn: Draw, *, crop: bool, flip: bool) -> Tensor:
    """Return images (N, C, H, W) cut out of themselves, mirrored at their borders, and flipped left to right."""
    if images.ndim != 4 or not images.is_floating_point():
        return images
    if crop:
        images = _cropped(images, drawn)
    if flip:
        flipped = drawn.flipped.to(images.device).reshape(-1, 1, 1, 1)
        images = torch.where(flipped, images.flip(3), images)
    return images


def _cropped(images: Tensor, drawn: Draw) -> Tensor:
    count, channels, height, width = images.shape
    tall, wide = height // PADDED_SHARE, width // PADDED_SHARE
    bordered = F.pad(images, (wide, wide, tall, tall))
    top = (drawn.down * (2 * tall + 1)).long()[:, None] + torch.arange(height)
    left = (drawn.right * (2 * wide + 1)).long()[:, None] + torch.arange(width)
    device = images.device
    return bordered[
        torch.arange(count, device=device)[:, None, None, None],
        torch.arange(channels, device=device)[None, :, None, None],
        top.to(device)[:, None, :, None],
        left.to(device)[:, None, None, :],
    ]
