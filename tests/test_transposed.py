"""ConvTranspose, grouped like Conv: its weight lies the other way round."""

import json
from pathlib import Path

import numpy as np
import onnx
import pytest
from tiny import gconv, save, set_tensor

import onnx_gconv
from onnx_gconv.model.constants import Constants
from onnx_gconv.model.network import find_convs, layer_weight, read
from onnx_gconv.model.shapes import input_shapes
from onnx_gconv.model.transposed import as_filters, as_stored
from onnx_gconv.pipeline.settings import GathersName
from onnx_gconv.recover.fit import Fit
from onnx_gconv.recover.flow import Flow
from onnx_gconv.recover.normal import predict
from onnx_gconv.recover.site import find_sites
from onnx_gconv.rewrite.lowering import LoweringName
from onnx_gconv.rewrite.mask import mask, masks
from onnx_gconv.rewrite.match import Matched, match
from onnx_gconv.runtime import Feeds, run, session, with_outputs
from onnx_gconv.verification import verify

UP_NET = """
<ir_version: 8, opset_import: ["" : 17]>
up (float[N,3,6,6] image) => (float[N,8,S,S] out) {{
    c1 = Conv <pads = [1, 1, 1, 1]> (image, w1, b1)
    r1 = Relu (c1)
    t1 = ConvTranspose <strides = [2, 2], pads = [1, 1, 1, 1], output_padding = [1, 1], group = {groups}> (r1, w2, b2)
    r2 = Relu (t1)
    c3 = Conv (r2, w3)
    r3 = Relu (c3)
    out = ConvTranspose <strides = [2, 2]> (r3, w4, b4)
}}
"""


def up_net(*, groups: int = 1, seed: int = 0) -> onnx.ModelProto:
    """Return Conv 3->8, ConvTranspose 8->12 3x3, Conv 12->16 1x1, ConvTranspose 16->8 2x2."""
    model = onnx.parser.parse_model(UP_NET.format(groups=groups))
    rng = np.random.default_rng(seed)
    for name, shape in {"w1": (8, 3, 3, 3), "w2": (8, 12 // groups, 3, 3), "w3": (16, 12, 1, 1), "w4": (16, 8, 2, 2)}.items():
        set_tensor(model, name, rng.standard_normal(shape) / 3)
    for name, size in {"b1": 8, "b2": 12, "b4": 8}.items():
        set_tensor(model, name, rng.standard_normal(size))
    return model


def weight_of(model: onnx.ModelProto, output: str) -> tuple[int, tuple[int, ...]]:
    """Return the groups and the weight's shape of the node that writes a tensor."""
    (node,) = (node for node in model.graph.node if node.output[0] == output)
    groups = next((attribute.i for attribute in node.attribute if attribute.name == "group"), 1)
    return groups, tuple(Constants(model).value(node.input[1]).shape)


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_filters_are_what_each_output_takes_from_each_input_of_its_group(groups: int) -> None:
    weight = np.random.default_rng(0).standard_normal((8, 12 // groups, 3, 3))
    filters = as_filters(weight, groups)
    assert filters.shape == (12, 8 // groups, 3, 3)
    for o in range(12):
        block, within = divmod(o, 12 // groups)
        for i in range(8 // groups):
            assert np.array_equal(filters[o, i], weight[block * (8 // groups) + i, within])
    assert np.array_equal(as_stored(filters, groups), weight)


def test_it_is_a_layer_with_its_channels_macs_and_filters() -> None:
    model = up_net()
    network = read(model, input_shapes(model, {}))
    layers = {layer.name: layer for layer in network.layers}
    up = layers["t1"]
    assert (up.in_channels, up.out_channels, up.legal_groups, up.weights) == (8, 12, (1, 2, 4), 8 * 12 * 9)
    assert up.macs == 6 * 6 * 8 * 12 * 9  # each input pixel goes to 9 places of 12 outputs
    assert layer_weight(Constants(model), up).shape == (12, 8, 3, 3)


@pytest.mark.parametrize("existing", [1, 2])
@pytest.mark.parametrize("gathers", ["free", "shared", "none"])
def test_masked_and_grouped_are_one_function(gathers: GathersName, existing: int) -> None:
    model = up_net(groups=existing)
    result = onnx_gconv.compress(model, groups=4, gathers=gathers)
    named = {layer.name: layer.groups for layer in result.plan.layers}
    assert named["out"] == 4
    assert weight_of(result.model, _producer(result.model, "out")) == (4, (16, 2, 2, 2))
    if existing == 1 or gathers == "free":
        assert named["t1"] == 4
    assert result.rewritten.verification is not None
    assert result.rewritten.verification.passed
    # A check of its own: only what is inside a group is left of the filters, and the order of the outputs matters.
    matched = match(model, result.plan)
    assert verify(mask(model, matched), result.model, tolerance=1e-5, seed=1).passed
    assert not verify(model, result.model, tolerance=1e-2, seed=1).passed


def _producer(model: onnx.ModelProto, output: str) -> str:
    """Return the first output of the ConvTranspose behind a tensor, past a Gather."""
    (node,) = (node for node in model.graph.node if node.output[0] == output)
    return str(node.input[0]) if node.op_type == "Gather" else output


def test_the_mask_keeps_what_the_plan_keeps() -> None:
    model = up_net()
    planned = onnx_gconv.plan(model, groups=2)
    (each,) = (each for each in masks(model, match(model, planned.plan)) if each.node == "t1")
    (layer,) = (layer for layer in planned.plan.layers if layer.name == "t1")
    assert each.keep.shape == (8, 12, 1, 1)
    for ins, outs in zip(np.split(np.array(layer.in_order), 2), np.split(np.array(layer.out_order), 2), strict=True):
        others = np.setdiff1d(np.arange(12), outs)
        assert each.keep[np.ix_(ins, outs)].all()
        assert not each.keep[np.ix_(ins, others)].any()


@pytest.mark.parametrize("lowering", ["split", "matmul"])
def test_it_can_be_lowered_or_stays(lowering: LoweringName) -> None:
    result = onnx_gconv.compress(up_net(), groups=2, lowering=lowering)
    kinds = [node.op_type for node in result.model.graph.node]
    assert kinds.count("ConvTranspose") == (4 if lowering == "split" else 2)
    assert result.rewritten.verification is not None
    assert result.rewritten.verification.passed


@pytest.mark.parametrize("groups", [1, 8])
def test_widths_pass_a_conv_transpose_depthwise_ones_too(groups: int) -> None:
    text = f"""<ir_version: 8, opset_import: ["" : 17]> m (float[N,3,6,6] image) => (float[N,4,S,S] out) {{
        c1 = Conv (image, w1)  r1 = Relu (c1)
        t1 = ConvTranspose <strides = [2, 2], group = {groups}> (r1, w2, b2)  r2 = Relu (t1)  out = Conv (r2, w3) }}"""
    model = onnx.parser.parse_model(text)
    rng = np.random.default_rng(0)
    for name, shape in {"w1": (8, 3, 3, 3), "w2": (8, 8 // groups, 2, 2), "w3": (4, 8, 1, 1), "b2": (8,)}.items():
        set_tensor(model, name, rng.standard_normal(shape))
    images = rng.standard_normal((64, 3, 6, 6)).astype(np.float32)
    result = onnx_gconv.compress(model, max_macs=0.6, calib=images, forms="width")
    assert result.rewritten.verification is not None
    assert result.rewritten.verification.passed
    narrow = result.plan.spaces[0].keep
    if groups == 8:
        assert weight_of(result.model, "t1") == (len(narrow), (len(narrow), 1, 2, 2))


def test_groups_and_widths_together_with_samples() -> None:
    images = np.random.default_rng(0).standard_normal((96, 3, 6, 6)).astype(np.float32)
    for criterion in ("l2", "activation"):
        result = onnx_gconv.compress(up_net(), max_macs=0.5, calib=images, forms="all", criterion=criterion)
        assert result.report["budget_met"]
        assert result.rewritten.verification is not None
        assert result.rewritten.verification.passed


def test_a_conv_and_a_conv_transpose_with_one_weight_stay() -> None:
    text = """<ir_version: 8, opset_import: ["" : 17]> tied (float[N,8,6,6] x) => (float[N,8,6,6] y) {
        a = Conv (x, w)  b = Relu (a)  y = ConvTranspose (b, w) }"""
    model = set_tensor(onnx.parser.parse_model(text), "w", np.random.default_rng(0).standard_normal((8, 8, 3, 3)))
    layers, skipped = find_convs(model, Constants(model), {})
    assert not layers
    assert [conv.reason for conv in skipped] == [
        "its weight is also read by something that is not a Conv",
        "its weight is also read by something that is not a ConvTranspose",
    ]


def test_on_the_command_line(tmp_path: Path) -> None:
    path = save(up_net(), tmp_path / "up.onnx")
    done = gconv("inspect", path, "--json")
    assert [layer["name"] for layer in json.loads(done.out)["layers"]] == ["t1", "c3", "out"]


@pytest.mark.parametrize("groups", [1, 2])
def test_a_fit_sees_what_a_conv_transpose_sees(groups: int) -> None:
    model = up_net(groups=groups)
    flow, constants = Flow(model), Constants(model)
    (site,) = (site for site in find_sites(flow, constants, Matched()) if site.name == "t1")
    feeds: Feeds = {"image": np.random.default_rng(1).standard_normal((2, 3, 6, 6)).astype(np.float32)}
    seen = run(session(with_outputs(model, ["r1", "t1"])), feeds)
    images, expected = (np.asarray(seen[name]) for name in ("r1", "t1"))
    fit = Fit.of(site, constants, constants)
    rows = fit.rows(images, expected, None, most=10**6, rng=np.random.default_rng(0))
    assert np.allclose(predict(rows, fit.before), rows.t, atol=1e-5)
    assert np.array_equal(fit.tensors(fit.before)["w2"], constants.value("w2"))


def test_samples_make_a_grouped_conv_transpose_better() -> None:
    model = up_net()
    images = np.random.default_rng(0).standard_normal((96, 3, 6, 6)).astype(np.float32)
    found = onnx_gconv.compress(model, groups=2, calib=images, forms="group", include="^t1$")
    assert found.recovery is not None
    assert found.recovery.output_error_after < 0.8 * found.recovery.output_error_before


@pytest.mark.parametrize("attribute", ["output_shape = [12, 12]", 'auto_pad = "SAME_UPPER"'])
def test_one_that_says_its_size_itself_is_grouped_but_not_fitted(attribute: str) -> None:
    text = UP_NET.format(groups=1).replace("pads = [1, 1, 1, 1], output_padding = [1, 1]", attribute)
    model = onnx.parser.parse_model(text)
    model.graph.initializer.extend(up_net().graph.initializer)
    assert "t1" not in [site.name for site in find_sites(Flow(model), Constants(model), Matched())]
    images = np.random.default_rng(0).standard_normal((32, 3, 6, 6)).astype(np.float32)
    result = onnx_gconv.compress(model, groups=2, calib=images, forms="group")
    assert "t1" in [layer.name for layer in result.plan.layers]
