"""A model as two temporary files, structure and weights apart, for libraries that map the weights or need none of them."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import onnx

from onnx_gconv.errors import ModelError
from onnx_gconv.model.file import data_bytes
from onnx_gconv.model.shell import is_large, shell
from onnx_gconv.staging import scratch

LARGEST_IN_MEMORY_BYTES = 2**25
PAGE_BYTES = 4096


def is_large_model(model: onnx.ModelProto) -> bool:
    """Return whether copies of the model in memory are worth avoiding; a small one needs no files."""
    return data_bytes(model) > LARGEST_IN_MEMORY_BYTES


@contextmanager
def written_apart(model: onnx.ModelProto) -> Iterator[Path]:
    """Yield the path of a file that runs as the model does, for as long as the context lasts.

    What only people read is not in it. onnx.save_model would take the weights out of the model that the caller still holds:
    to put them back needs the memory of all of them once more, and leaves a mark in each tensor.
    """
    with ExitStack() as stack:
        try:
            path = _write(model, stack.enter_context(scratch()))
        except OSError as error:
            raise ModelError(
                f"a temporary copy of the model cannot be written: {error.strerror or error}.",
                hint="free some space in the temporary folder, or set TMPDIR to another one",
            ) from error
        del model  # the caller may have let go of it
        yield path


def _write(model: onnx.ModelProto, folder: Path) -> Path:
    path = folder / "model.onnx"
    data = path.with_suffix(".data")
    structure = shell(model)
    structure.graph.value_info.extend(model.graph.value_info)
    for node, original in zip(structure.graph.node, model.graph.node, strict=True):
        if node.op_type == "Constant":  # its value lies in the node: not every library looks for it elsewhere
            node.CopyFrom(original)
    with data.open("wb") as file:
        for tensor, stored in zip(structure.graph.initializer, model.graph.initializer, strict=True):
            if is_large(tensor) and stored.raw_data:
                file.seek(-(-file.tell() // PAGE_BYTES) * PAGE_BYTES)
                _refer(tensor, location=data.name, offset=file.tell(), length=file.write(stored.raw_data))
            else:
                tensor.CopyFrom(stored)
    path.write_bytes(structure.SerializeToString())
    return path


def _refer(tensor: onnx.TensorProto, **where: str | int) -> None:
    tensor.data_location = onnx.TensorProto.EXTERNAL
    for key, value in where.items():
        tensor.external_data.add(key=key, value=str(value))
