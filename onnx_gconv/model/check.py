"""Whether a model that was rewritten is still valid ONNX."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import onnx

from onnx_gconv.errors import ModelError
from onnx_gconv.model.file import LARGEST_MESSAGE_BYTES, data_bytes


def check(result: onnx.ModelProto, source: onnx.ModelProto) -> str | None:
    """Return None if the result passes ONNX's full check, or a remark if the source did not pass it either."""
    if data_bytes(result) > LARGEST_MESSAGE_BYTES:
        return "too large for ONNX's checker"
    problem = _problem(result)
    if problem is None:
        return None
    if _problem(source) is None:
        raise ModelError(f"the rewritten model is not valid ONNX: {problem}", hint="this is a bug of onnx-gconv: please report it")
    return f"ONNX's checker objects to the source model already: {problem}"


def _problem(model: onnx.ModelProto) -> str | None:
    try:
        with _stdout_kept_clean():
            onnx.checker.check_model(model, full_check=True)
    except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError, ValueError, RuntimeError) as error:
        return " ".join(str(error).split())[:300]
    return None


@contextmanager
def _stdout_kept_clean() -> Iterator[None]:
    """Send what native code prints to stdout to nowhere: the checker writes remarks on experimental ops there."""
    sys.stdout.flush()
    kept = os.dup(1)
    with open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), 1)
        try:
            yield
        finally:
            os.dup2(kept, 1)
            os.close(kept)
