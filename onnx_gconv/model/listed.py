"""Initialisers that are listed as graph inputs as well: a caller might feed others, so ONNX Runtime folds none of them.

That makes a model up to five times slower, and to end it is no merit of compression: models are read, timed and written without.
"""

import onnx

FREE_INITIALIZERS_IR = 4  # below this IR version an initialiser has to be listed


def listed_initializers(model: onnx.ModelProto) -> list[str]:
    """Return the initialisers that are graph inputs as well."""
    stored = {tensor.name for tensor in model.graph.initializer}
    return [value.name for value in model.graph.input if value.name in stored]


def delisted(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return the model with initialisers that are no inputs, its IR version raised if need be; itself where they are none."""
    listed = set(listed_initializers(model))
    if not listed:
        return model
    result = onnx.ModelProto()
    result.CopyFrom(model)
    inputs = [value for value in result.graph.input if value.name not in listed]
    del result.graph.input[:]
    result.graph.input.extend(inputs)
    result.ir_version = max(result.ir_version, FREE_INITIALIZERS_IR)
    return result
