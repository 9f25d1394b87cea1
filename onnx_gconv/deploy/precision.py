"""Models in half precision or int8, written by ONNX Runtime's own tools, for runtimes that take the precision from the graph."""

import logging
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import onnx

from onnx_gconv.deploy.timing_file import Precision
from onnx_gconv.errors import ModelError
from onnx_gconv.model.file import load, save
from onnx_gconv.model.shapes import Shape
from onnx_gconv.runtime import Feeds, random_feeds

CALIBRATION_INPUTS = 4  # random ones: they set scales, which latency does not depend on
QDQ_OPSET = 13  # from which on quantisation can be per channel


def typed(model: onnx.ModelProto, precision: Precision, shapes: Mapping[str, Shape]) -> onnx.ModelProto:
    """Return the model in this precision: fp16 with float inputs and outputs, or int8 with QuantizeLinear/DequantizeLinear.

    For timing only: int8 scales come from random inputs, so accuracy means nothing.
    """
    if precision == "fp32":
        return model
    try:
        with _quiet():
            return _half(model) if precision == "fp16" else _quantised(model, shapes)
    except ModelError:
        raise
    except Exception as error:  # the tools raise whatever they meet
        raise ModelError(
            f"ONNX Runtime's tools cannot write this model in {precision}: {' '.join(str(error).split())[:300]}",
            hint="convert it yourself and measure it with --precision fp32",
        ) from error


def _half(model: onnx.ModelProto) -> onnx.ModelProto:
    from onnxruntime.transformers.float16 import convert_float_to_float16

    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    result: onnx.ModelProto = convert_float_to_float16(copy, keep_io_types=True)
    return result


def _quantised(model: onnx.ModelProto, shapes: Mapping[str, Shape]) -> onnx.ModelProto:
    from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType, quantize_static

    class RandomInputs(CalibrationDataReader):  # type: ignore[misc]
        def __init__(self) -> None:
            rng = np.random.default_rng(0)
            self._batches: Iterator[Feeds] = iter([random_feeds(model, shapes, rng) for _ in range(CALIBRATION_INPUTS)])

        def get_next(self) -> Feeds | None:
            return next(self._batches, None)

    opset = next(entry.version for entry in model.opset_import if entry.domain in ("", "ai.onnx"))
    source = onnx.version_converter.convert_version(model, QDQ_OPSET) if opset < QDQ_OPSET else model
    with tempfile.TemporaryDirectory() as folder:
        before, after = Path(folder) / "float.onnx", Path(folder) / "int8.onnx"
        save(source, before)
        quantize_static(
            str(before),
            str(after),
            RandomInputs(),
            quant_format=QuantFormat.QDQ,
            per_channel=True,
            activation_type=QuantType.QInt8,
            weight_type=QuantType.QInt8,
            op_types_to_quantize=["Conv"],
            # TensorRT wants symmetric scales.
            extra_options={"ActivationSymmetric": True, "WeightSymmetric": True},
        )
        return load(after)


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep the tools' advice and warnings off our streams."""
    level = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(level)
