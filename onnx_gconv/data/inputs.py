"""What the model's inputs take, and whether given arrays are that."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray

from onnx_gconv.errors import DataError
from onnx_gconv.model.shapes import NAMELESS, declared_shape, free_inputs

FLOATS = {onnx.TensorProto.FLOAT, onnx.TensorProto.DOUBLE, onnx.TensorProto.FLOAT16, onnx.TensorProto.BFLOAT16}
INTEGERS = {getattr(onnx.TensorProto, name) for name in ("INT8", "INT16", "INT32", "INT64", "UINT8", "UINT16", "UINT32", "UINT64")}
RAW_PIXELS = "these look like raw pixels: scale and normalise them as in training, for example (x / 255 - mean) / std"


@dataclass(frozen=True)
class Input:
    """One input of the model: its name, its type, and the axes of one sample, None where they are dynamic."""

    name: str
    dtype: np.dtype[Any]
    sample_shape: tuple[int | None, ...] | None  # None: nothing is declared

    @property
    def kind(self) -> str:
        return _kind(self.dtype)

    def __str__(self) -> str:
        axes = "?" if self.sample_shape is None else "x".join("?" if dim is None else str(dim) for dim in self.sample_shape)
        return f"{self.name} (samples{'x' if axes else ''}{axes}, {self.dtype})"

    def require(self, shape: tuple[int, ...], dtype: np.dtype[Any], *, source: str) -> None:
        """Refuse an array, samples first, whose shape or kind of number is not this input's."""
        if dtype.hasobject:
            raise DataError(
                f"{source}: {self.name!r} holds Python objects, which are never unpickled.",
                hint=f"save it as an array of {self.dtype}",
            )
        if _kind(dtype) != self.kind:
            raise DataError(
                f"{source}: {self.name!r} is {dtype}, but the model's input takes {self.dtype}.",
                hint=RAW_PIXELS if self.kind == "float" and dtype == np.uint8 else f"give it as {self.dtype}",
            )
        wanted = self.sample_shape
        if wanted is not None and len(shape) != len(wanted) + 1:
            raise DataError(
                f"{source}: {self.name!r} has {len(shape)} axes, but the model's input has {len(wanted) + 1}.",
                hint=f"the first axis counts samples: the model takes {self}",
            )
        for axis, (size, want) in enumerate(zip(shape[1:], wanted or (), strict=False), start=1):
            if want is not None and size != want:
                raise DataError(
                    f"{source}: axis {axis} of {self.name!r} is {size}, but the model's input wants {want} there.",
                    hint=f"the model takes {self}",
                )
        if 0 in shape[1:]:
            raise DataError(f"{source}: {self.name!r} has an axis of size 0.", hint=f"the model takes {self}")

    def cast(self, values: NDArray[np.generic], *, source: str, first: int) -> NDArray[np.generic]:
        """Return the values in this input's type; `first` is the number of their first sample, for errors.

        Floats may lose digits, as the model's own arithmetic does. Whole numbers may not change.
        """
        with np.errstate(over="ignore"):  # found below, with the sample's number
            result = np.ascontiguousarray(values, dtype=self.dtype)
        wrong = ~np.isfinite(result) if self.kind == "float" else np.not_equal(result, values)
        if wrong.any():
            sample = first + int(np.flatnonzero(wrong.reshape(len(wrong), -1).any(axis=1))[0])
            problem = "NaN or infinity" if self.kind == "float" else "a number that does not fit"
            raise DataError(
                f"{source}: sample {sample} (from 0) of {self.name!r} holds {problem} as {self.dtype}.",
                hint="remove or repair that sample",
            )
        return result


def model_inputs(model: onnx.ModelProto) -> tuple[Input, ...]:
    """Return the inputs of the model, or say which one no data can be given for."""
    inputs = []
    for value in free_inputs(model):
        element = value.type.tensor_type.elem_type
        if element not in FLOATS | INTEGERS | {onnx.TensorProto.BOOL}:
            kind = onnx.TensorProto.DataType.Name(element).lower() if element else "no tensor"
            raise DataError(
                f"input {value.name!r} of the model is {kind}: no data can be given for that.",
                hint="inputs must be tensors of floating-point or whole numbers",
            )
        shape = declared_shape(value)
        if shape == []:
            raise DataError(
                f"input {value.name!r} of the model is a single number, without an axis for samples.",
                hint="make it a constant of the model",
            )
        inputs.append(Input(value.name, onnx.helper.tensor_dtype_to_np_dtype(element), None if shape is None else tuple(shape[1:])))
    _require_samples_first(model)
    if not inputs:
        raise DataError("the model has no inputs, so it takes no data.", hint="export the model with its inputs")
    return tuple(inputs)


def _require_samples_first(model: onnx.ModelProto) -> None:
    """Refuse a model that has the samples of one input on a later axis of another: the state of an LSTM, say."""
    axes = {value.name: [dim.dim_param for dim in value.type.tensor_type.shape.dim] for value in free_inputs(model)}
    sizes = {value.name: (declared_shape(value) or [None])[0] for value in free_inputs(model)}
    for name, symbols in axes.items():
        others = {first[0] for other, first in axes.items() if other != name and first}.difference(NAMELESS)
        for axis, symbol in enumerate(symbols):
            # A first axis of 1 is one sample all the same.
            if axis and symbol in others and (sizes[name] or 1) > 1:
                raise DataError(
                    f"input {name!r} of the model has the samples ({symbol!r}) on axis {axis}, not on its first.",
                    hint="only models whose inputs all have the samples on their first axis can be fed with data",
                )


def require_label_type(shape: tuple[int, ...], dtype: np.dtype[Any], *, source: str) -> None:
    """Refuse labels that are not one class number for each sample."""
    if len(shape) != 1 or dtype.kind not in "iu":
        raise DataError(
            f"{source}: the labels are {dtype} with {len(shape)} axes, not one whole number for each sample.",
            hint="give class numbers that start at 0 in one axis; labels.argmax(axis=1) of one-hot labels",
        )


def cast_labels(values: NDArray[np.generic], *, source: str, first: int) -> NDArray[np.int64]:
    """Return class numbers, all from 0 on."""
    labels = np.ascontiguousarray(values, dtype=np.int64)
    if labels.size and labels.min() < 0:
        sample = first + int(np.flatnonzero(labels < 0)[0])
        raise DataError(
            f"{source}: the label of sample {sample} (from 0) is {labels.min()}.", hint="give class numbers that start at 0"
        )
    return labels


def _kind(dtype: np.dtype[Any]) -> str:
    # NumPy knows bfloat16 only by name: its kind is that of raw bytes.
    if dtype.kind == "f" or dtype.name == "bfloat16":
        return "float"
    return {"i": "integer", "u": "integer", "b": "bool"}.get(dtype.kind, str(dtype))
