"""What this machine is: which target a model that will run here is for."""

import shutil
from pathlib import Path

from onnx_gconv.search.target import TargetName

# What only a machine with an NVIDIA GPU has: the driver of a desktop or server card, the GPU of a Jetson.
SIGNS_OF_A_GPU = ("/proc/driver/nvidia/version", "/dev/nvhost-gpu", "/dev/nvgpu")
TRTEXEC = "/usr/src/tensorrt/bin/trtexec"  # where NVIDIA's packages put it, off the PATH


def target_here() -> TargetName:
    """Return the target that this machine is: TensorRT's where trtexec or a GPU is found, else ONNX Runtime's on the CPU."""
    has_gpu = shutil.which("trtexec") or any(Path(sign).exists() for sign in (TRTEXEC, *SIGNS_OF_A_GPU))
    return "tensorrt" if has_gpu else "ort-cpu"
