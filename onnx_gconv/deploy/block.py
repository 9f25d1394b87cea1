"""The block of channels of a runtime, probed: which multiple of channels a group must have to be fast."""

from collections.abc import Mapping

import onnx

from onnx_gconv.deploy.one_layer import LayerShape, layer_model

CHANNELS = 128
SIZES = (64, 32, 16, 8, 4)  # channels of a group, each half of the one before
# Half the channels per group are half the work, and where all is well .6 to .8 of the time. Groups that do not fit the blocked
# layout take more time for less work: with AVX-512, 1.9 times as long for 8 channels as for 16.
CLIFF = 1.25


def probe_models() -> dict[int, onnx.ModelProto]:
    """Return a Conv with groups of each size."""
    pixels = (14, 14)
    shape = LayerShape((1, CHANNELS, *pixels), CHANNELS, (3, 3), (1, 1), (1, 1, 1, 1), (1, 1), "NOTSET", bias=True, dtype="float32")
    return {size: layer_model(shape, CHANNELS // size) for size in SIZES}


def block_of(times_ms: Mapping[int, float]) -> int:
    """Return the smallest size of a group before its time jumps; 1 where it never does.

    Only a clear jump counts, so that noise does not change what is planned.
    """
    return next((size for size in SIZES[:-1] if times_ms[size // 2] > CLIFF * times_ms[size]), 1)
