"""An edit changes what it says and loses nothing else."""

import os
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper
from tiny import conv_net

from onnx_gconv.model.surgery import Surgery

ZOO = Path(__file__).parent.parent.parent / "shared" / "zoo"
LIGHT = Path(onnx.__file__).parent / "backend" / "test" / "data" / "light"


def decorated() -> onnx.ModelProto:
    """A model with everything that an onnx-graphsurgeon round trip drops."""
    model = conv_net()
    helper.set_model_props(model, {"author": "nobody", "stride": "32"})
    model.doc_string, model.graph.doc_string, model.domain, model.model_version = "about", "graph", "example", 7
    model.producer_name, model.producer_version = "maker", "1.2"
    model.graph.value_info.append(helper.make_tensor_value_info("c2", 1, ["N", 8, 8, 8]))
    model.graph.input.append(helper.make_tensor_value_info("w1", 1, [8, 3, 3, 3]))
    model.graph.node[2].doc_string = "the second Conv"
    model.graph.node[2].metadata_props.add(key="source", value="line 7")
    model.graph.node[0].doc_string = "the first"
    model.graph.quantization_annotation.add(tensor_name="c2")
    model.functions.append(
        helper.make_function("local", "f", ["a"], ["b"], [helper.make_node("Relu", ["a"], ["b"])], [helper.make_opsetid("", 17)])
    )
    model.opset_import.append(helper.make_opsetid("local", 1))
    return model


def test_an_empty_edit_gives_the_very_same_model() -> None:
    model = decorated()
    assert Surgery(model).finish() == model


@pytest.mark.parametrize("folder", [ZOO, LIGHT], ids=["zoo", "light"])
def test_an_empty_edit_of_a_real_model_gives_the_very_same_model(folder: Path) -> None:
    paths = sorted(folder.glob("*.onnx"))
    if not paths:
        pytest.skip(f"no models in {folder}")
    for path in paths:
        if os.path.getsize(path) < 20_000_000:
            model = onnx.load(path)
            assert Surgery(model).finish() == model, path.name


def test_an_edited_node_keeps_its_remarks_and_everything_else_is_untouched() -> None:
    model = decorated()
    surgery = Surgery(model)
    node = surgery.node_of("c2")
    node.inputs[1] = surgery.constant("fresh", np.zeros((8, 8, 3, 3), np.float32))
    result = surgery.finish()
    assert result.graph.node[2].doc_string == "the second Conv"
    assert result.graph.node[2].metadata_props[0].value == "line 7"
    assert list(result.graph.node[2].input) == ["r1", "fresh", "b2"]
    assert "w2" not in [tensor.name for tensor in result.graph.initializer]
    restored = onnx.ModelProto()
    restored.CopyFrom(result)
    restored.graph.node[2].input[1] = "w2"
    tensors = {tensor.name: tensor for tensor in model.graph.initializer}
    del restored.graph.initializer[:]
    restored.graph.initializer.extend(tensors.values())
    assert restored == model


def test_new_names_do_not_collide_with_any_in_the_model() -> None:
    surgery = Surgery(conv_net())
    assert surgery.unique("fresh") == "fresh"
    assert surgery.unique("fresh") == "fresh_2"
    assert surgery.unique("c2") == "c2_2"
    assert surgery.unique("w1") == "w1_2"


def test_a_constant_that_an_inner_graph_reads_is_kept() -> None:
    model = conv_net()
    branches = {
        f"{kind}_branch": helper.make_graph(
            [helper.make_node("Identity", ["w2"], [kind])], kind, [], [helper.make_tensor_value_info(kind, 1, None)]
        )
        for kind in ("then", "else")
    }
    model.graph.input.append(helper.make_tensor_value_info("c", onnx.TensorProto.BOOL, []))
    model.graph.node.append(helper.make_node("If", ["c"], ["chosen"], **branches))
    surgery = Surgery(model)
    surgery.node_of("c2").inputs[1] = surgery.constant("fresh", np.zeros((8, 8, 3, 3), np.float32))
    assert "w2" in [tensor.name for tensor in surgery.finish().graph.initializer]
