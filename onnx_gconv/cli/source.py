"""The model that a command works on: loaded, counted, with remarks told."""

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from onnx_gconv.cli.story import Story

if TYPE_CHECKING:
    import onnx

    from onnx_gconv.model.network import Network
    from onnx_gconv.model.shapes import Shape


@dataclass(frozen=True)
class Source:
    """A model file, its content, the shapes the user gave for its inputs, and the files beside it that hold weights."""

    path: Path
    model: "onnx.ModelProto"
    given_shapes: "dict[str, Shape]"
    data_files: tuple[Path, ...]

    @property
    def has_external_data(self) -> bool:
        return bool(self.data_files)

    @property
    def bytes_on_disk(self) -> int:
        return sum(path.stat().st_size for path in (self.path, *self.data_files))


def open_source(args: argparse.Namespace) -> Source:
    """Return the model that MODEL and --input-shape name."""
    from onnx_gconv.model.file import load_with_data_files
    from onnx_gconv.model.shapes import parse_input_shapes

    model, data_files = load_with_data_files(args.model)
    return Source(args.model, model, parse_input_shapes(args.input_shape, model), data_files)


def tensor_shapes(source: Source) -> "dict[str, Shape]":
    """Return the shapes of the model's tensors, which decide where Gathers can be saved."""
    from onnx_gconv.model.network import settle_shapes
    from onnx_gconv.model.shapes import input_shapes
    from onnx_gconv.runtime import observe_shapes

    return settle_shapes(source.model, input_shapes(source.model, source.given_shapes), observe=observe_shapes)


def read_network(source: Source, story: Story) -> "Network":
    """Return the layers and counts of the model, and tell what the counts rest on."""
    from onnx_gconv.model.network import read
    from onnx_gconv.model.shapes import has_dynamic_axes, input_shapes
    from onnx_gconv.runtime import installation_conflict, observe_shapes

    conflict = installation_conflict()
    if conflict:
        story.warn(conflict)
    shapes = input_shapes(source.model, source.given_shapes)
    network = read(source.model, shapes, observe=observe_shapes)
    if has_dynamic_axes(source.model, source.given_shapes):
        text = ", ".join(f"{name}={'x'.join(map(str, shape))}" for name, shape in shapes.items())
        story.tell(f"note: MACs are counted at {text}; --input-shape sets another size")
    if network.count.macs is None:
        story.warn("the MACs of some nodes are not known: neither shape inference nor a run settles their shapes")
    return network


def default_output(model: Path) -> Path:
    """Return `<stem>.gconv.onnx` beside the model."""
    return model.with_name(f"{model.stem}.gconv.onnx")
