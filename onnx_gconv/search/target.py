"""What a target is good at: how many channels a group must have to be fast there."""

from typing import Literal

TargetName = Literal["generic", "ort-cpu", "tensorrt"]

# ONNX Runtime's blocked layout on CPUs wants multiples of 16 channels per group, TensorRT's tensor cores multiples of 8.
CHANNEL_BLOCK: dict[TargetName, int] = {"generic": 1, "ort-cpu": 16, "tensorrt": 8}


def is_aligned(groups: int, block: int, *, in_channels: int, out_channels: int) -> bool:
    """Return whether every group has a multiple of `block` input and output channels."""
    return in_channels // groups % block == 0 and out_channels // groups % block == 0
