"""From what the user typed to the data it names."""

import onnx

from onnx_gconv.data.batch import Data
from onnx_gconv.data.inputs import model_inputs
from onnx_gconv.data.npz import open_npz
from onnx_gconv.data.preprocessing import Preprocessing
from onnx_gconv.errors import DataError


def open_data(text: str, model: onnx.ModelProto, *, preprocessing: Preprocessing, labels: bool = False) -> Data:
    """Return the data for this model; with `labels`, they must be there."""
    data = _open(text, model, preprocessing)
    if labels and not data.has_labels:
        raise DataError(f"'{text}' has no labels, and they are needed here.", hint="")
    return data


def _open(text: str, model: onnx.ModelProto, preprocessing: Preprocessing) -> Data:
    return open_npz(text, model_inputs(model))
