"""The model that a job starts from: as the user gave it, with what can be read off it."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Protocol

import onnx

from onnx_gconv.errors import ModelError, UsageError
from onnx_gconv.listener import Listener
from onnx_gconv.model.bodies import with_own_weights
from onnx_gconv.model.file import complete, digest_of, load_with_data_files, sha256
from onnx_gconv.model.listed import delisted, listed_initializers
from onnx_gconv.model.network import Network, is_quantised_throughout, read
from onnx_gconv.model.shapes import Shape, ShapeLike, given_shapes, has_dynamic_axes, input_shapes
from onnx_gconv.observing import observe
from onnx_gconv.pipeline.reaching import with_reached
from onnx_gconv.runtime import installation_conflict


class HasModel(Protocol):
    """A result of ours: what `compress`, `mask`, `apply`, `finetune` and `export` return."""

    @property
    def model(self) -> onnx.ModelProto: ...


ModelLike = str | os.PathLike[str] | onnx.ModelProto | HasModel


@dataclass(frozen=True, eq=False)
class Original:
    """A model, the file it came from, the files beside that with its weights, and the input shapes that the user fixes."""

    model: onnx.ModelProto
    path: Path | None  # None for a model that came in memory
    data_files: tuple[Path, ...]
    given_shapes: dict[str, Shape]
    listed: int = 0  # initialisers that were listed as inputs; they are so no more

    @property
    def name(self) -> str:
        return "the model" if self.path is None else f"'{self.path}'"

    @cached_property
    def sha256(self) -> str:
        """The hash of the file, of its data files nothing; of a model in memory that of its bytes."""
        return digest_of(self.model) if self.path is None else sha256(self.path)

    @cached_property
    def network(self) -> Network:
        """Its layers, shapes and counts."""
        network = read(self.model, input_shapes(self.model, self.given_shapes), observe=observe)
        return with_reached(network, self.model, self.given_shapes)

    @property
    def files(self) -> tuple[Path, ...]:
        """What it was read from; nothing for a model that came in memory."""
        return () if self.path is None else (self.path, *self.data_files)

    @property
    def bytes_on_disk(self) -> int:
        return sum(path.stat().st_size for path in self.files) or self.model.ByteSize()


def open_original(model: ModelLike, input_shape: ShapeLike = ()) -> Original:
    """Return the model of a file, or one in memory, which nobody will change."""
    if not isinstance(model, str | os.PathLike):
        proto = model if isinstance(model, onnx.ModelProto) else getattr(model, "model", None)
        if not isinstance(proto, onnx.ModelProto):
            raise UsageError(f"a model is a path, an onnx.ModelProto or a result of ours, not {type(model).__name__}")
        return _original(complete(proto), None, (), input_shape)
    path = Path(model)
    loaded, data_files = load_with_data_files(path)
    return _original(loaded, path, data_files, input_shape)


def _original(model: onnx.ModelProto, path: Path | None, data_files: tuple[Path, ...], input_shape: ShapeLike) -> Original:
    settled = with_own_weights(delisted(model))
    return Original(settled, path, data_files, given_shapes(input_shape, model), len(listed_initializers(model)))


def tell_counts(original: Original, listener: Listener) -> None:
    """Tell what the counts rest on, and what may spoil a measurement."""
    conflict = installation_conflict()
    if conflict:
        listener.warn(conflict)
    if original.listed:
        listener.note(
            f"note: {original.listed} initialisers are also listed as inputs, which slows ONNX Runtime down: it is timed and "
            "written without"
        )
    if has_dynamic_axes(original.model, original.given_shapes):
        listener.note(f"note: MACs are counted at {shapes_text(original.network.input_shapes)}; --input-shape sets another size")
    if original.network.count.macs is None:
        listener.warn(f"the MACs of some nodes are not known: {why_unknown(original.network)}")


def why_unknown(network: Network) -> str:
    """Return why there are shapes that are not known."""
    if network.failed_run:
        return f"shape inference does not settle their shapes, and a trial run failed: {network.failed_run}"
    return "neither shape inference nor a run settles their shapes"


def require_float(network: Network) -> None:
    """Refuse a model that is quantised throughout."""
    if not network.all_layers and is_quantised_throughout(network.skipped):
        raise ModelError(
            f"all {len(network.skipped)} Convs of the model are quantised already.",
            hint="start from the float model; --precision int8 quantises the result",
        )


def shapes_text(shapes: Mapping[str, Shape]) -> str:
    """Return shapes by input name as the user would write them."""
    return ", ".join(f"{name}={'x'.join(map(str, shape))}" for name, shape in shapes.items())
