"""Borrowed group configurations."""

import json
from pathlib import Path

import pytest
from tiny import conv_net

import onnx_gconv
from onnx_gconv.errors import PlanError
from onnx_gconv.model.network import Layer, read
from onnx_gconv.pipeline.group_config import module_names, read_group_config


def layer(weight: str, label: str) -> Layer:
    return Layer("out", label, 64, 64, (3, 3), 1, weight, "", False, "float32", 1)


def write(folder: Path, data: object) -> Path:
    path = folder / "config.json"
    path.write_text(data if isinstance(data, str) else json.dumps(data))
    return path


def test_modules_go_by_weight_and_by_the_exporters_node_name() -> None:
    assert module_names(layer("layer1.0.conv1.weight", "Conv_7")) == ["layer1.0.conv1"]
    assert module_names(layer("onnx::Conv_193", "/layer1/layer1.0/conv1/Conv"))[1] == "layer1.0.conv1"
    assert module_names(layer("onnx::Conv_193", "/features/features.2/conv/conv.1/conv.1.0/Conv"))[1] == "features.2.conv.1.0"


def test_the_authors_configuration_is_matched_by_weight_name(tmp_path: Path) -> None:
    layers = [layer("layer1.0.conv1.weight", "Conv_7")]
    path = write(tmp_path, {"module.layer1.0.conv1": {"G": 8, "F": 64, "C": 64}, "module.conv1": {"G": 1, "F": 16, "C": 3}})
    assert read_group_config(path, layers) == {"out": 8}


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"module.layer9": {"G": 2}}, "no layer 'layer9'"),
        ({"module.layer1.0.conv1": {"G": 2, "F": 32, "C": 64}}, "F=32"),
        ({"module.layer1.0.conv1": {"G": 7}}, "asks for 7 groups"),
        ({"module.layer1.0.conv1": 2}, "neither a plan nor a group configuration"),
        ([1, 2], "neither a plan nor a group configuration"),
        ("{", "is not JSON"),
    ],
)
def test_a_configuration_that_does_not_fit_is_refused(tmp_path: Path, data: object, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        read_group_config(write(tmp_path, data), [layer("layer1.0.conv1.weight", "Conv_7")])


def test_a_plan_lends_its_numbers(tmp_path: Path) -> None:
    model = conv_net()
    network = read(model, {"image": (1, 3, 8, 8)})
    plan = onnx_gconv.plan(model, groups=4).plan
    path = write(tmp_path, plan.to_json())
    assert read_group_config(path, network.layers) == {"c2": 4, "c3": 4}
    again = onnx_gconv.plan(model, group_config=path).plan
    assert [(found.name, found.groups, found.in_order) for found in again.layers] == [
        (found.name, found.groups, found.in_order) for found in plan.layers
    ]
