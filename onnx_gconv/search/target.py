"""What a target is good at: how many channels a group must have to be fast there, and by what widths should step."""

from typing import Literal

TargetName = Literal["generic", "ort-cpu", "tensorrt"]

# Where nothing was measured: ONNX Runtime's blocked layout wants multiples of 16 channels per group with AVX-512 (8 with AVX2, none
# on ARM, which a probe tells apart), TensorRT's tensor cores multiples of 8, in int8 of 32.
CHANNEL_BLOCK: dict[TargetName, int] = {"generic": 1, "ort-cpu": 16, "tensorrt": 8}
INT8_BLOCK_OF_TENSORRT = 32
LEAST_STEPS = 4  # of a space, where nothing is known of the target
GENERIC_STEP = 8


def is_aligned(groups: int, block: int, *, in_channels: int, out_channels: int) -> bool:
    """Return whether every group has a multiple of `block` input and output channels."""
    return in_channels // groups % block == 0 and out_channels // groups % block == 0


def width_step(target: TargetName, channels: int, *, block: int | None = None) -> int:
    """Return what the widths of a space should be multiples of: kernels that are not full take as long as full ones.

    `block` is the target's, where it was measured.
    """
    found = CHANNEL_BLOCK[target] if block is None else block
    return found if found > 1 else max(1, min(GENERIC_STEP, channels // LEAST_STEPS))
