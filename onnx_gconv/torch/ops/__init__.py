"""What each ONNX operator does, in PyTorch. Importing this package fills the table in `onnx_gconv.torch.node`."""

from onnx_gconv.torch.ops import (
    convolution,
    elementwise,
    indexing,
    legacy,
    normalisation,
    pooling,
    recurrent,
    reduction,
    resizing,
    shaping,
)

__all__ = [
    "convolution",
    "elementwise",
    "indexing",
    "legacy",
    "normalisation",
    "pooling",
    "recurrent",
    "reduction",
    "resizing",
    "shaping",
]
