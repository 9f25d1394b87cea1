"""Whether a model that was rewritten is still valid ONNX."""

from contextlib import nullcontext

import onnx

from onnx_gconv.errors import ModelError
from onnx_gconv.model.apart import is_large_model, written_apart
from onnx_gconv.native_output import native_stdout_silenced


def check(result: onnx.ModelProto, source: onnx.ModelProto) -> str | None:
    """Return None if the result passes ONNX's full check, or a remark if the source did not pass it either."""
    problem = _problem(result)
    if problem is None:
        return None
    if _problem(source) is None:
        raise ModelError(f"the rewritten model is not valid ONNX: {problem}", hint="this is a bug of onnx-gconv: please report it")
    return f"ONNX's checker objects to the source model already: {problem}"


def _without_negative_axes(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return the model with axes of size -1 as axes of unknown size; the check takes them for sizes, and may abort the process."""

    def negative(graph: onnx.GraphProto) -> list[onnx.TensorShapeProto.Dimension]:
        values = (*graph.input, *graph.output, *graph.value_info)
        return [dim for value in values for dim in value.type.tensor_type.shape.dim if dim.dim_value < 0]

    if not negative(model.graph):
        return model
    result = onnx.ModelProto()
    result.CopyFrom(model)
    for dim in negative(result.graph):
        dim.Clear()
    return result


def _problem(model: onnx.ModelProto) -> str | None:
    model = _without_negative_axes(model)
    # In memory the checker copies every weight twice, and takes no more than 2 GiB.
    source = written_apart(model) if is_large_model(model) else nullcontext(model)
    try:
        with source as model_or_path, native_stdout_silenced():  # it remarks on experimental ops there
            onnx.checker.check_model(model_or_path, full_check=True)
    except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError, ValueError, RuntimeError) as error:
        return " ".join(str(error).split())[:300]
    return None
