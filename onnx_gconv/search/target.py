"""What a target is good at: how many channels a group must have to be fast there."""

from pathlib import Path
from typing import Literal

TargetName = Literal["generic", "ort-cpu", "tensorrt"]

# ONNX Runtime's blocked layout on CPUs wants multiples of 16 channels per group, TensorRT's tensor cores multiples of 8.
CHANNEL_BLOCK: dict[TargetName, int] = {"generic": 1, "ort-cpu": 16, "tensorrt": 8}


def is_aligned(groups: int, block: int, *, in_channels: int, out_channels: int) -> bool:
    """Return whether every group has a multiple of `block` input and output channels."""
    return in_channels // groups % block == 0 and out_channels // groups % block == 0


LEAST_STEPS = 4  # of a space, where nothing is known of the target
GENERIC_STEP = 8
BLOCK_OF_AVX2 = 8


def width_step(target: TargetName, channels: int) -> int:
    """Return what the widths of a space should be multiples of: kernels that are not full take as long as full ones."""
    if target == "generic":
        return max(1, min(GENERIC_STEP, channels // LEAST_STEPS))
    return _cpu_block() if target == "ort-cpu" else CHANNEL_BLOCK[target]


def _cpu_block() -> int:
    """Return ONNX Runtime's block of channels on this CPU: 8 where it has AVX2 and no AVX-512."""
    try:
        flags = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return CHANNEL_BLOCK["ort-cpu"]
    return BLOCK_OF_AVX2 if "avx2" in flags and "avx512f" not in flags else CHANNEL_BLOCK["ort-cpu"]
