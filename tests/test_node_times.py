"""What nodes other than Convs take: by a profile of the whole model, and in proportion to the channels that are left."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from test_latency_budget import ToyDevice, network_of, swept, timing_of
from tiny import conv_net, from_text

from onnx_gconv.deploy.node_times import NodeTimes, named, node_times
from onnx_gconv.deploy.sweep import times_of
from onnx_gconv.deploy.time_table import read_table, write_table
from onnx_gconv.deploy.timing_file import LayerTime, Timing
from onnx_gconv.model.constants import Constants
from onnx_gconv.model.spaces import find_spaces
from onnx_gconv.model.widths import find_widths
from onnx_gconv.pipeline.menus import Offer, Watch, menu_of
from onnx_gconv.search.latency import LayerTimes

TEXT = """<ir_version: 8, opset_import: ["": 17]>
g (float[1, 8, 6, 6] x) => (float[1, 8, 12, 12] y)
<float[8, 8, 1, 1] w1, float[8, 8, 1, 1] w2, float[8, 8, 2, 2] w3> {
  a = Conv (x, w1)
  b = Relu (a)
  c = Erf (b)
  d = Mul (b, c)
  e = Conv (d, w2)
  y = ConvTranspose <strides = [2, 2]> (e, w3)
}"""


def profile(times_ms: Mapping[str, float]) -> Timing:
    """Return the timing of a model whose nodes take so long; of Convs they say that they are."""
    layers = [LayerTime(name, "conv" if "Conv" in name else "other", ms, None) for name, ms in times_ms.items()]
    return replace(
        timing_of(1.0), layers=tuple(replace(layer, name=layer.name.removeprefix("Conv:").removesuffix("!")) for layer in layers)
    )


def model_of(text: str) -> onnx.ModelProto:
    return onnx.parser.parse_model(text)


def test_nodes_are_called_after_what_they_make_and_the_model_stays() -> None:
    model = model_of(TEXT)
    before = model.SerializeToString()
    assert [node.name for node in named(model).graph.node] == ["a", "b", "c", "d", "e", "y"]
    assert model.SerializeToString() == before


def test_a_profile_is_read_in_the_names_that_the_runtime_gives() -> None:
    # a and its Relu are one Conv that is called after the Relu; the Erf and the Mul are one Gelu, called after nothing.
    found = node_times(model_of(TEXT), profile({"Conv:b_nchwc": 2, "Gelu": 3, "Conv:e_nchwc": 1, "Conv:y": 4}), 20.0)
    assert found == NodeTimes(6.0, {2: 6.0, 5: 8.0})  # a ConvTranspose is no Conv


def test_in_int8_names_have_numbers_as_well() -> None:
    found = node_times(model_of(TEXT), profile({"Conv:a_0_token_1": 2, "b_1": 3, "d_3_token_12": 1, "x_QuantizeLinear": 0}), 6.0)
    assert found == NodeTimes(2.0, {1: 3.0, 3: 1.0})


def test_what_the_runtime_adds_belongs_to_the_nodes_around_it_and_no_more_than_doubles_them() -> None:
    times = {"Conv:a_nchwc": 4.0, "b": 1.0, "d": 3.0}
    assert node_times(model_of(TEXT), profile({**times, "ReorderInput": 2.0}), 10.0) == NodeTimes(4.0, {1: 1.5, 3: 4.5})
    assert node_times(model_of(TEXT), profile({**times, "ReorderInput": 12.0}), 20.0) == NodeTimes(4.0, {1: 2.0, 3: 6.0})


def test_without_a_profile_nothing_is_known_of_nodes() -> None:
    assert node_times(model_of(TEXT), timing_of(1.0), 1.0) is None


def test_a_table_keeps_the_times_of_nodes_and_convs_are_as_fast_as_beside_each_other(tmp_path: Path) -> None:
    model, path = conv_net(), tmp_path / "t.json"
    network = network_of(model)
    table = replace(swept(model, path, ToyDevice()), frames={(1, 8, 8, 8): 0.0})
    alone = times_of(table, model, network, path=path)
    alone_ms = sum(alone.layer_ns(name, 3 if name == "c1" else 8, 8, 1) for name in ("c1", "c2", "c3")) / 1e6
    (structure,) = table.models
    relu = next(place for place, node in enumerate(model.graph.node) if node.op_type == "Relu")
    write_table(table.with_nodes(structure, NodeTimes(1.2 * alone_ms, {relu: 0.25})), path)
    assert read_table(path) == table.with_nodes(structure, NodeTimes(1.2 * alone_ms, {relu: 0.25}))
    times = times_of(read_table(path), model, network, path=path)
    assert times.layer_ns("c2", 8, 8, 1) == pytest.approx(1.2 * alone.layer_ns("c2", 8, 8, 1), abs=2)
    assert times.others_ns == {model.graph.node[relu].output[0]: 250_000}


def test_other_nodes_take_a_share_as_large_as_that_of_the_channels_that_are_left() -> None:
    model = model_of(TEXT)
    model.graph.initializer.extend(
        onnx.numpy_helper.from_array(np.ones(shape, np.float32), name)
        for name, shape in {"w1": (8, 8, 1, 1), "w2": (8, 8, 1, 1), "w3": (8, 8, 2, 2)}.items()
    )
    del model.graph.input[1:]
    network, constants = network_of(model), Constants(model)
    spaces = find_spaces(model, constants, network.shapes)
    space = next(space for space in find_widths(model, constants, spaces, network.shapes).spaces if "a" in space.writers)
    offer = Offer((space,), {space.name: (8, 4, 0)}, (), {})
    watch = Watch(LayerTimes("ort-cpu", None, 10.0, {}, {"b": 1e6, "d": 3e6, "y": 5e6}), 1)
    menu = menu_of(model, network, spaces, offer, watch)
    groups = [0] * len(menu.products)
    assert [menu.totals([width], groups)[2] for width in range(3)] == [10_000_000, 8_000_000, 6_000_000]  # y is not narrowed


def test_a_node_without_channels_takes_what_it_takes() -> None:
    """A real segmenter multiplies a tensor of no channels."""
    model = from_text(
        """net (float[1,4,6,6] x) => (float[1,4,6,6] y) {
            size = Shape (x)
            none = Sub (size, size)
            filled = ConstantOfShape (none)
            empty = Mul (filled, filled)
            a = Conv (x, w)
            b = Relu (a)
            y = Conv (b, v)
        }""",
        w=np.ones((4, 4, 1, 1)),
        v=np.ones((4, 4, 1, 1)),
    )
    network, constants = network_of(model), Constants(model)
    shapes = {**network.shapes, "filled": (0, 0, 0, 0), "empty": (0, 0, 0, 0)}  # as a run tells, not inference
    spaces = find_spaces(model, constants, shapes)
    widths = find_widths(model, constants, spaces, shapes)
    offer = Offer(widths.spaces, {space.name: (space.channels,) for space in widths.spaces}, widths.branches, {})
    watch = Watch(LayerTimes("ort-cpu", None, 10.0, {}, {"empty": 1e6, "b": 1e6}), 1)
    assert "empty" in spaces.axes
    menu = menu_of(model, network, spaces, offer, watch)
    assert menu.dense[2] == 10_000_000
