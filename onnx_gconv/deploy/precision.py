"""Models in half precision or int8, written by ONNX Runtime's own tools, for runtimes that take the precision from the graph."""

import logging
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager

import numpy as np
import onnx

from onnx_gconv.deploy.quantising import QuantisedFor, quantise
from onnx_gconv.deploy.timing_file import Precision, RunnerName
from onnx_gconv.errors import GconvError, ModelError
from onnx_gconv.listener import OnProgress, ignore
from onnx_gconv.model.shapes import Shape
from onnx_gconv.runtime import Feeds, random_feeds

CALIBRATION_INPUTS = 4  # random ones: they set scales, which latency does not depend on


def typed(
    model: onnx.ModelProto, precision: Precision, shapes: Mapping[str, Shape], *, runner: RunnerName = "ort-cpu"
) -> onnx.ModelProto:
    """Return the model in this precision: fp16 with float inputs and outputs, or int8 with QuantizeLinear/DequantizeLinear.

    For timing only: int8 scales come from random inputs, so accuracy means nothing.
    """
    if precision == "fp32":
        return model

    def feeds() -> list[Feeds]:
        rng = np.random.default_rng(0)
        return [random_feeds(model, shapes, rng) for _ in range(CALIBRATION_INPUTS)]

    if precision == "fp16":
        return half(model)
    return quantised(model, feeds, "ort-cpu" if runner in ("ort-cpu", "ort-cuda") else "tensorrt", is_fitted=False)


def half(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return the model in half precision, its inputs and outputs as they were."""
    from onnxruntime.transformers.float16 import convert_float_to_float16

    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    with _written_by_the_tools("fp16"):
        result: onnx.ModelProto = convert_float_to_float16(copy, keep_io_types=True)
    return result


def quantised(
    model: onnx.ModelProto,
    feeds: Callable[[], Iterable[Feeds]],
    made_for: QuantisedFor,
    *,
    is_fitted: bool = True,
    on_progress: OnProgress = ignore,
) -> onnx.ModelProto:
    """Return the model in int8, scales from these inputs, and unless told otherwise channels and weights fitted to them."""
    with _written_by_the_tools("int8"):
        return quantise(model, feeds, made_for, is_fitted=is_fitted, on_progress=on_progress)


@contextmanager
def _written_by_the_tools(precision: Precision) -> Iterator[None]:
    try:
        with _quiet():
            yield
    except GconvError:
        raise
    except Exception as error:  # the tools raise whatever they meet
        raise ModelError(
            f"ONNX Runtime's tools cannot write this model in {precision}: {' '.join(str(error).split())[:300]}",
            hint="convert it yourself and measure it with --precision fp32",
        ) from error


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
