"""From what the user typed to the data it names."""

import re
from pathlib import Path

import onnx

from onnx_gconv.data.batch import Data
from onnx_gconv.data.folder import open_folder
from onnx_gconv.data.function import open_function
from onnx_gconv.data.inputs import model_inputs
from onnx_gconv.data.npz import open_npz
from onnx_gconv.data.preprocessing import Preprocessing
from onnx_gconv.errors import DataError

WHERE_LABELS_ARE = (
    "labels are the array 'labels' of an .npz file, sub-folders of images, or the second item of a function's batches"
)
FUNCTION = re.compile(r"\w+(\.\w+)*:\w+")


def open_data(text: str, model: onnx.ModelProto, *, preprocessing: Preprocessing, labels: bool = False) -> Data:
    """Return the data for this model; with `labels`, they must be there."""
    data = _open(text, model, preprocessing)
    if labels and not data.has_labels:
        raise DataError(f"'{text}' has no labels, and they are needed here.", hint=WHERE_LABELS_ARE)
    return data


def _open(text: str, model: onnx.ModelProto, preprocessing: Preprocessing) -> Data:
    inputs = model_inputs(model)
    path = Path(text)
    if path.is_dir():
        return open_folder(text, inputs, preprocessing)
    is_npz = path.suffix.lower() == ".npz"
    if not is_npz and (path.exists() or not FUNCTION.fullmatch(text)):
        problem = "is no .npz file" if path.exists() else "is not there"
        raise DataError(
            f"the data '{text}' {problem}.",
            hint="data is an .npz file, a folder of images, or package.module:function",
        )
    if preprocessing != Preprocessing():
        raise DataError(
            f"'{text}' is no folder of images, so there is nothing to resize, crop, scale or normalise.",
            hint="leave out --resize, --crop, --scale, --mean, --std and --channel-order: other data comes preprocessed",
        )
    return open_npz(text, inputs) if is_npz else open_function(text, inputs)
