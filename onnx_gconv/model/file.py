"""Model files: load with every failure as one sentence, save with external data where it is needed."""

import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import onnx
from google.protobuf.message import DecodeError, EncodeError
from onnx.external_data_helper import load_external_data_for_model, uses_external_data

from onnx_gconv.errors import ModelError
from onnx_gconv.files import data_file, require_output
from onnx_gconv.model.constants import inner_graphs
from onnx_gconv.model.fused import unfused
from onnx_gconv.model.order import in_order
from onnx_gconv.model.sound import require_located, require_sound, require_texts
from onnx_gconv.model.stream import serialised
from onnx_gconv.staging import settle, staged

# Protobuf refuses messages of 2 GiB; leave room for what is not tensor data.
LARGEST_MESSAGE_BYTES = 2**31 - 2**24
LEAST_BYTES_APART = 1024  # of a tensor whose data goes into a file of its own, as with onnx


def load(path: Path) -> onnx.ModelProto:
    """Return the model in the file, external data included."""
    return load_with_data_files(path)[0]


def load_with_data_files(path: Path) -> tuple[onnx.ModelProto, tuple[Path, ...]]:
    """Return the model in the file, external data included, and the files that held this data."""
    settle(path.parent)
    if path.is_dir():
        raise ModelError(f"'{path}' is a folder, not an ONNX file.", hint="name the .onnx file inside it")
    try:
        data = path.read_bytes()
    except FileNotFoundError as error:
        raise ModelError(f"there is no file '{path}'.", hint="check the path; models/digits.onnx ships with the source") from error
    except OSError as error:
        raise ModelError(f"cannot read '{path}': {error.strerror}.", hint="check the file's permissions") from error
    if not data:
        raise ModelError(f"'{path}' is empty.", hint="export the model again")
    model = onnx.ModelProto()
    try:
        model.ParseFromString(data)
    except DecodeError as error:
        raise ModelError(
            f"'{path}' is not an ONNX model, or it is cut short ({len(data):,} bytes).",
            hint="export or download it again; a Git LFS pointer is a text file of some 130 bytes",
        ) from error
    # Protobuf reads many a stray file as an empty message.
    if not model.graph.node or not model.opset_import:
        raise ModelError(f"'{path}' holds no ONNX graph with nodes.", hint="export or download it again")
    require_texts(model, f"'{path}'")
    require_located(_tensors(model.graph), f"'{path}'")
    external = _external_files(model)
    try:
        load_external_data_for_model(model, str(path.parent))
    except Exception as error:  # onnx raises its checker's error, OSError or ValueError, by version
        raise ModelError(
            f"'{path}' keeps its weights in {', '.join(repr(name) for name in external)} beside it, which cannot be read: "
            f"{str(error).splitlines()[0]}",
            hint="put the data file beside the model, under the name it had when it was exported",
        ) from error
    require_sound(model, f"'{path}'")
    return unfused(in_order(model, f"'{path}'")), tuple(path.parent / name for name in external)


def data_files(path: Path) -> tuple[Path, ...]:
    """Return the files with weights that a model refers to; none where it cannot be read, which others tell."""
    model = onnx.ModelProto()
    try:
        model.ParseFromString(path.read_bytes())
        require_texts(model, f"'{path}'")
        require_located(_tensors(model.graph), f"'{path}'")
    except (OSError, DecodeError, ModelError):
        return ()
    return tuple(path.parent / name for name in _external_files(model))


def complete(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return a model in memory as it would be read from a file, itself where that is the same.

    One that has no graph, is malformed, or whose weights are still in a file is refused.
    """
    require_texts(model, "the model")
    if not model.graph.node or not model.opset_import:
        raise ModelError("the model holds no ONNX graph with nodes.", hint="load it with onnx.load")
    external = _external_files(model)
    if external:
        raise ModelError(
            f"the model's weights are still in the file {external[0]!r}.", hint="load it with its external data, or give its path"
        )
    require_sound(model, "the model")
    return unfused(in_order(model, "the model"))


def _external_files(model: onnx.ModelProto) -> tuple[str, ...]:
    """Return the names of the data files that a just parsed model refers to."""
    return tuple(
        sorted(
            {
                entry.value
                for tensor in _tensors(model.graph)
                if uses_external_data(tensor)
                for entry in tensor.external_data
                if entry.key == "location"
            }
        )
    )


def _tensors(graph: onnx.GraphProto) -> Iterator[onnx.TensorProto]:
    yield from graph.initializer
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.HasField("t"):
                yield attribute.t
            yield from attribute.tensors
        for inner in inner_graphs(node):
            yield from _tensors(inner)


def sha256(path: Path) -> str:
    """Return the hash of the model file, in hexadecimal (external data not included)."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def digest_of(model: onnx.ModelProto) -> str:
    """Return the hash of the file that this model would be, in hexadecimal."""
    digest = hashlib.sha256()
    for piece in serialised(model):
        digest.update(piece)
    return digest.hexdigest()


def save(model: onnx.ModelProto, path: Path, *, external_data: bool = False) -> int:
    """Write the model, and `<name>.data` beside it when asked to or when one file cannot hold it; return the bytes written.

    Not atomic by itself: write into a `staged` folder.
    """
    apart, tensors = 0, None
    if external_data or data_bytes(model) > LARGEST_MESSAGE_BYTES:
        apart, tensors = _save_data(model, data_file(path))
    try:
        with path.open("wb") as file:
            return apart + sum(file.write(piece) for piece in serialised(model, tensors))
    except EncodeError as error:
        raise ModelError(f"'{path.name}' cannot be serialised: {error}.", hint="report this model") from error


def _save_data(model: onnx.ModelProto, path: Path) -> tuple[int, list[onnx.TensorProto]]:
    """Write the large initialisers into a file of their own; return its size, and all of them as the model refers to them.

    onnx.save_model would take the weights out of the model, which its caller still needs, and writes a file that only its owner
    may read. If no initialiser is large there is no such file.
    """
    tensors, size = list(model.graph.initializer), 0
    large = [index for index, tensor in enumerate(tensors) if len(tensor.raw_data) >= LEAST_BYTES_APART]
    if large:
        with path.open("wb") as file:
            for index in large:
                tensors[index] = _reference(tensors[index], path.name, size, file.write(tensors[index].raw_data))
                size = file.tell()
    return size, tensors


def _reference(tensor: onnx.TensorProto, location: str, offset: int, length: int) -> onnx.TensorProto:
    """Return the tensor without its data, which is in a file."""
    reference = onnx.TensorProto(
        name=tensor.name,
        dims=tensor.dims,
        data_type=tensor.data_type,
        doc_string=tensor.doc_string,
        data_location=onnx.TensorProto.EXTERNAL,
    )
    for key, value in (("location", location), ("offset", offset), ("length", length)):
        reference.external_data.add(key=key, value=str(value))
    return reference


def save_model(model: onnx.ModelProto, path: Path, made_from: Sequence[Path]) -> list[Path]:
    """Write a model so that it is there whole or not at all, and return its files: those who move it have to move them all.

    `made_from` are the files of the model that it comes from, which it never replaces. Where they are several, that one keeps
    its weights apart, and so does this one.
    """
    require_output(path, data_file(path), made_from=made_from)
    with staged(path.parent) as staging:
        save(model, staging / path.name, external_data=len(made_from) > 1)
        return sorted(path.parent / part.name for part in staging.iterdir())


def data_bytes(model: onnx.ModelProto) -> int:
    """Return the size of the raw tensor data, which is nearly all of a model's size."""
    return sum(len(tensor.raw_data) for tensor in _tensors(model.graph))
