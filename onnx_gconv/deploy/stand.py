"""The stand that a layer is timed on: the model of it alone, what is in that model beside it, and what is timed along with all."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import onnx

from onnx_gconv.deploy.block import probe_models
from onnx_gconv.deploy.one_layer import LayerShape, frame_model, layer_model
from onnx_gconv.deploy.one_layer_int8 import int8_frame_model, int8_layer_model, int8_probe_models
from onnx_gconv.model.shapes import Shape

YARDSTICK = LayerShape((1, 64, 56, 56), 64, (3, 3), (1, 1), (1, 1, 1, 1), (1, 1), "NOTSET", bias=True, dtype="float32")


@dataclass(frozen=True)
class Stand:
    """How one-layer models are built."""

    layer: Callable[[LayerShape, int], onnx.ModelProto]  # of a shape and groups
    frame: Callable[[Shape, str], onnx.ModelProto]  # what is around a layer with this input
    probes: Callable[[], Mapping[int, onnx.ModelProto]]  # by which the block of channels is found

    @property
    def yardstick(self) -> onnx.ModelProto:
        """A Conv that is measured along with everything: what slows the device down for a while slows it down, too."""
        return self.layer(YARDSTICK, 1)


PLAIN = Stand(layer_model, frame_model, probe_models)
INT8_ON_CPU = Stand(int8_layer_model, int8_frame_model, int8_probe_models)
