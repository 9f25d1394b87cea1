"""Trained weights written back into the ONNX model that they came from."""

from collections.abc import Mapping

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import numpy_helper

from onnx_gconv.errors import ModelError
from onnx_gconv.torch.importing import FLOATS, stored_tensors
from onnx_gconv.torch.module import OnnxModule


def save_back(module: OnnxModule, model: onnx.ModelProto) -> onnx.ModelProto:
    """Return the model with the module's weights and statistics, and everything else as it is.

    A tensor is looked up by name, in the initializers and in the Constant nodes, and keeps its type. One that has not
    changed keeps its bytes.
    """
    return write_back({name: value.detach().cpu().numpy() for name, value in module.trained().items()}, model)


def write_back(values: Mapping[str, NDArray[np.generic]], model: onnx.ModelProto) -> onnx.ModelProto:
    """Return the model with these values of stored tensors, by name."""
    result = onnx.ModelProto()
    result.CopyFrom(model)
    stored = stored_tensors(result)
    for name, value in values.items():
        target = stored.get(name)
        if target is None or target.data_type not in FLOATS or tuple(target.dims) != tuple(value.shape):
            raise ModelError(
                f"the model has no tensor {name!r} of shape {'x'.join(map(str, value.shape))} to write the trained one into.",
                hint="write back into the model that was loaded, or one with the same names and shapes",
            )
        old = numpy_helper.to_array(target)
        new = value.astype(old.dtype)
        if not np.array_equal(old, new):
            target.CopyFrom(numpy_helper.from_array(new, target.name))
    return result
