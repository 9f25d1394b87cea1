"""From what the user named or holds to the data it is."""

import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np
import onnx
from numpy.typing import NDArray

from onnx_gconv.data.batch import Data
from onnx_gconv.data.folder import open_folder
from onnx_gconv.data.function import open_named_function
from onnx_gconv.data.inputs import Input, model_inputs
from onnx_gconv.data.memory import open_arrays, open_batches
from onnx_gconv.data.npz import open_npz
from onnx_gconv.data.preprocessing import Preprocessing
from onnx_gconv.errors import DataError

WHERE_LABELS_ARE = (
    "labels are the array 'labels' of an .npz file, sub-folders of images, or the second item of a function's batches"
)
FUNCTION = re.compile(r"\w+(\.\w+)*:\w+")


# The name of an .npz file, a folder of images or a function; an array, (inputs, labels), or arrays by input name; batches; or a
# Data of one's own.
DataLike = str | os.PathLike[str] | Mapping[str, NDArray[np.generic]] | NDArray[np.generic] | Iterable[object] | Data


def open_data(given: DataLike, model: onnx.ModelProto, *, preprocessing: Preprocessing) -> Data:
    """Return the data for this model."""
    inputs = model_inputs(model)
    if isinstance(given, str | os.PathLike):
        return _open_named(os.fspath(given), inputs, preprocessing)
    if preprocessing != Preprocessing():
        raise DataError(
            "only a folder of images is resized, cropped, scaled and normalised here.",
            hint="prepare arrays and batches as the model takes them, and leave these settings out",
        )
    if isinstance(given, Data):
        return given
    if isinstance(given, Mapping | np.ndarray):
        return open_arrays(given, None, inputs)
    if isinstance(given, tuple) and len(given) == 2:
        return open_arrays(given[0], given[1], inputs)
    if not isinstance(given, Iterable):
        raise DataError(
            f"data cannot be {type(given).__name__}.",
            hint="give a path, an array, (inputs, labels), a dict of arrays by input name, or an iterable of batches",
        )
    return open_batches(given, inputs)


def _open_named(text: str, inputs: tuple[Input, ...], preprocessing: Preprocessing) -> Data:
    path = Path(text)
    if path.is_dir():
        return open_folder(text, inputs, preprocessing)
    is_npz = path.suffix.lower() == ".npz"
    if not is_npz and (path.exists() or not FUNCTION.fullmatch(text)):
        problem = "is not an .npz file" if path.exists() else "is not there"
        raise DataError(
            f"the data '{text}' {problem}.",
            hint="data is an .npz file, a folder of images, or package.module:function",
        )
    if preprocessing != Preprocessing():
        raise DataError(
            f"'{text}' is not a folder of images, so there is nothing to resize, crop, scale or normalise.",
            hint="leave out --resize, --crop, --scale, --mean, --std and --channel-order: other data comes preprocessed",
        )
    return open_npz(text, inputs) if is_npz else open_named_function(text, inputs)
