"""Reading models: every Conv becomes a layer or is skipped with a reason, and everything is counted."""

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper, parser
from tiny import conv_net, set_tensor

import onnx_gconv
from onnx_gconv.errors import ModelError
from onnx_gconv.model.constants import Constants
from onnx_gconv.model.network import Network, layer_weight, read
from onnx_gconv.model.shapes import declared_shape, input_shapes, parse_input_shapes
from onnx_gconv.rewrite.group import group, placement_of
from onnx_gconv.rewrite.mask import mask
from onnx_gconv.rewrite.match import match
from onnx_gconv.runtime import observe_shapes
from onnx_gconv.verification import verify

HEAD = '<ir_version: 8, opset_import: ["" : 17, "local" : 1]>'


def parse(text: str, **tensors: np.ndarray) -> onnx.ModelProto:
    model = parser.parse_model(f"{HEAD} {text}")
    model.graph.initializer.extend(numpy_helper.from_array(value, name) for name, value in tensors.items())
    return model


def normal(*shape: int) -> np.ndarray:
    return np.random.default_rng(sum(shape)).standard_normal(shape).astype(np.float32)


def network_of(model: onnx.ModelProto) -> Network:
    return read(model, input_shapes(model, {}), observe=observe_shapes)


def check_groups_of_two(model: onnx.ModelProto) -> None:
    plan = onnx_gconv.plan(model, groups=2).plan
    grouped = group(model, match(model, plan))
    onnx.checker.check_model(grouped, full_check=True)
    read = placement_of(model, match(model, plan)).read
    inner = {layer.name: read.get(layer.name) for layer in plan.layers}
    checked = verify(mask(model, match(model, plan)), grouped, tolerance=2e-6, seed=0, inner=inner)
    assert checked.passed, checked
    counted = network_of(grouped).count
    assert (counted.params, counted.macs) == (plan.after.params, plan.after.macs)


# Long lines below are ONNX text.
# ruff: noqa: E501
PLAIN = "g (float[1,4,6,6] x) => (float[1,6,4,4] y) { y = Conv (x, w) }"
READABLE = {
    "weight in an initializer": parse(PLAIN, w=normal(6, 4, 3, 3)),
    "weight behind two Identities": parse(
        "g (float[1,4,6,6] x) => (float[1,6,4,4] y) { v = Identity (w) u = Identity (v) y = Conv (x, u) }", w=normal(6, 4, 3, 3)
    ),
    "weight that folds": parse(
        "g (float[1,4,6,6] x) => (float[1,6,4,4] y) { v = Mul (w, s) y = Conv (x, v) }", w=normal(6, 4, 3, 3), s=normal(6, 1, 1, 1)
    ),
    "weight of ones from ConstantOfShape": parse(
        "g (float[1,4,6,6] x) => (float[1,6,4,4] y) { v = ConstantOfShape <value = float[1] {0.5}> (s) y = Conv (x, v) }",
        s=np.array([6, 4, 3, 3]),
    ),
    "1-D with bias, stride and dilation": parse(
        "g (float[2,4,12] x) => (float[2,6,n] y) { y = Conv <strides = [2], dilations = [2]> (x, w, b) }", w=normal(6, 4, 3), b=normal(6)
    ),
    "3-D with asymmetric kernel": parse("g (float[1,4,5,5,5] x) => (float[1,6,a,b,c] y) { y = Conv (x, w) }", w=normal(6, 4, 1, 2, 3)),
    "groups already": parse("g (float[1,8,4,4] x) => (float[1,12,4,4] y) { y = Conv <group = 2> (x, w) }", w=normal(12, 4, 1, 1)),
    "dynamic batch and pixels": parse("g (float[N,4,H,W] x) => (float[N,6,h,w2] y) { y = Conv (x, w) }", w=normal(6, 4, 3, 3)),
    "auto_pad": parse('g (float[1,4,6,6] x) => (float[1,6,6,6] y) { y = Conv <auto_pad = "SAME_UPPER"> (x, w) }', w=normal(6, 4, 3, 3)),
    "the same bias for two Convs": parse(
        "g (float[1,4,6,6] x) => (float[1,4,2,2] y) { v = Conv (x, w1, b) y = Conv (v, w2, b) }",
        w1=normal(4, 4, 3, 3), w2=normal(4, 4, 3, 3) * 2, b=normal(4),
    ),
    "the same weight for two Convs": parse(
        "g (float[1,4,6,6] x) => (float[1,4,2,2] y) { v = Conv (x, w) y = Conv (v, w) }", w=normal(4, 4, 3, 3)
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", READABLE)
def test_a_conv_is_read_and_grouped_with_its(what: str) -> None:
    model = READABLE[what]
    network = network_of(model)
    assert network.layers
    assert not network.skipped
    if what == "groups already":
        assert network.layers[0].legal_groups == (2, 4)
        with pytest.raises(ModelError, match="it has 2 groups already"):
            check_groups_of_two(model)
    else:
        check_groups_of_two(model)


def test_weights_in_constant_nodes_are_read_and_masked_under_their_name() -> None:
    model = parse(PLAIN)
    tensor = numpy_helper.from_array(normal(6, 4, 3, 3), "inner_name")
    model.graph.node.insert(0, helper.make_node("Constant", [], ["w"], value=tensor))
    check_groups_of_two(model)
    plan = onnx_gconv.plan(model, groups=2).plan
    assert [t.name for t in mask(model, match(model, plan)).graph.initializer] == ["w"]


def test_initializers_that_are_inputs_too_are_weights_and_leave_the_inputs_when_replaced() -> None:
    model = parse("g (float[1,4,6,6] x, float[6,4,3,3] w) => (float[1,6,4,4] y) { y = Conv (x, w) }", w=normal(6, 4, 3, 3))
    model.ir_version = 3
    check_groups_of_two(model)
    plan = onnx_gconv.plan(model, groups=2).plan
    grouped = group(model, match(model, plan))
    # IR 3 wants every initializer among the inputs; the only one a user feeds is still x.
    assert {value.name for value in grouped.graph.input} == {"x"} | {tensor.name for tensor in grouped.graph.initializer}


SKIPPED = {
    "3 input and 8 output channels have no common divisor": parse(
        "g (float[1,3,4,4] x) => (float[1,8,4,4] y) { y = Conv (x, w) }", w=normal(8, 3, 1, 1)
    ),
    "depthwise": parse("g (float[1,4,4,4] x) => (float[1,4,4,4] y) { y = Conv <group = 4> (x, w) }", w=normal(4, 1, 1, 1)),
    "one input channel": parse("g (float[1,1,4,4] x) => (float[1,8,4,4] y) { y = Conv (x, w) }", w=normal(8, 1, 1, 1)),
    "weight is computed at run time": parse("g (float[1,4,4,4] x, float[6,4,1,1] w) => (float[1,6,4,4] y) { y = Conv (x, w) }"),
    "bias is computed at run time": parse(
        "g (float[1,4,4,4] x, float[6] b) => (float[1,6,4,4] y) { y = Conv (x, w, b) }", w=normal(6, 4, 1, 1)
    ),
    "quantised": parse(
        "g (float[1,4,4,4] x) => (float[1,6,4,4] y) { w = DequantizeLinear (q, s) y = Conv (x, w) }",
        q=np.ones((6, 4, 1, 1), np.int8), s=np.array(0.1, np.float32),
    ),
    "also read by something that is not a Conv": parse(
        "g (float[1,4,4,4] x) => (float[1,6,4,4] y, float[1] z) { y = Conv (x, w) z = ReduceMax <keepdims = 0, axes = [1, 2, 3, 0]> (w) }",
        w=normal(6, 4, 1, 1),
    ),
}  # fmt: skip


@pytest.mark.parametrize("reason", SKIPPED)
def test_a_conv_that_cannot_be_grouped_is_skipped_because_it_is(reason: str) -> None:
    network = network_of(SKIPPED[reason])
    assert not network.layers
    assert [conv.name for conv in network.skipped] == ["y"]
    assert reason in network.skipped[0].reason


def test_convs_inside_if_and_functions_are_named_and_skipped() -> None:
    branch = [
        helper.make_graph(
            [helper.make_node("Conv", ["x", "w"], [f"inner{i}"])], "b", [], [helper.make_tensor_value_info(f"inner{i}", 1, None)]
        )
        for i in "01"
    ]
    model = parse("g (float[1,4,6,6] x, bool c) => (float[1,6,4,4] y) { y = local.twice (x) }", w=normal(6, 4, 3, 3))
    model.graph.node.insert(0, helper.make_node("If", ["c"], ["z"], name="fork", then_branch=branch[0], else_branch=branch[1]))
    body = [helper.make_node("Conv", ["a", "a"], ["b"])]
    model.functions.append(helper.make_function("local", "twice", ["a"], ["b"], body, [helper.make_opsetid("", 17)]))
    reasons = {conv.name: conv.reason for conv in network_of(model).skipped}
    assert reasons == {
        "inner0": "it is inside the If node 'fork', and its weight or bias is read outside it as well",
        "inner1": "it is inside the If node 'fork', and its weight or bias is read outside it as well",
        "twice:b": "it is inside the function 'twice'",
    }


def test_layers_go_by_output_names_where_node_names_are_empty_or_repeat() -> None:
    model = conv_net()
    assert [layer.name for layer in network_of(model).layers] == ["c2", "c3"]
    for node in model.graph.node:
        node.name = "same"
    network = network_of(model)
    assert [(layer.name, layer.label) for layer in network.layers] == [("c2", "same"), ("c3", "same")]
    plan = onnx_gconv.plan(model, groups=2).plan
    grouped = group(model, match(model, plan))  # ONNX Runtime refuses repeated node names, ONNX does not
    onnx.checker.check_model(grouped, full_check=True)
    assert len({node.output[0] for node in grouped.graph.node}) == len(grouped.graph.node)


def test_parameters_and_macs_are_those_counted_by_hand() -> None:
    count = network_of(conv_net()).count
    convs = 8 * 3 * 9 + 8 + 8 * 8 * 9 + 8 + 8 * 8 + 8
    assert count.params == convs + 4 * 8 + 4
    assert count.macs == 64 * (8 * 3 * 9 + 8 * 8 * 9 + 8 * 8) + 4 * 8
    assert count.flops == 2 * count.macs


def test_transposed_convs_matmuls_and_norms_are_counted() -> None:
    model = parse(
        """g (float[1,4,3,3] x) => (float[1,6,7,2] y) {
            a = ConvTranspose <strides = [2, 2]> (x, w)
            b = BatchNormalization (a, scale, bias, mean, var)
            y = MatMul (b, m)
        }""",
        w=normal(4, 6, 3, 3), scale=normal(6), bias=normal(6), mean=normal(6), var=np.ones(6, np.float32), m=normal(7, 2),
    )  # fmt: skip
    count = network_of(model).count
    assert count.params == 4 * 6 * 9 + 6 + 6 + 7 * 2  # running statistics are not learned
    assert count.macs == 4 * 9 * 6 * 9 + 6 * 7 * 2 * 7


def test_a_weight_that_two_convs_share_counts_once() -> None:
    network = network_of(READABLE["the same weight for two Convs"])
    assert network.count.params == 4 * 4 * 9
    assert network.count.macs == 4 * 4 * 9 * (16 + 4)


def test_nan_and_infinity_are_refused_with_the_weights_name() -> None:
    for poison in (np.nan, np.inf):
        weight = normal(8, 8, 3, 3)
        weight[3, 4, 1, 1] = poison
        model = set_tensor(conv_net(), "w2", weight)
        with pytest.raises(ModelError, match="'w2' of Conv 'c2' holds NaN or infinity"):
            layer_weight(Constants(model), network_of(model).layers[0])


def test_shapes_that_inference_cannot_settle_are_observed_in_a_run() -> None:
    model = parse(
        """g (float[1,4,6,6] x) => (float[a,b,c,d] y) {
            z = NonZero (x) s = Shape (z) n = ReduceProd <keepdims = 0> (s) zero = Sub (n, n)
            one = Unsqueeze (zero, zero_axis) pad = Concat <axis = 0> (one, one, one, one, one, one, one, one)
            p = Pad (x, pad) y = Conv (p, w)
        }""",
        w=normal(6, 4, 3, 3), zero_axis=np.array([0]),
    )  # fmt: skip
    assert read(model, input_shapes(model, {})).count.macs is None
    assert network_of(model).count.macs == 6 * 16 * 4 * 9


def test_input_shapes_are_given_by_name_or_alone() -> None:
    model = conv_net(size="S")
    assert [declared_shape(value) for value in model.graph.input] == [[None, 3, None, None]]
    assert input_shapes(model, {}) == {"image": (1, 3, 224, 224)}
    assert parse_input_shapes(["2x3x16x16"], model) == {"image": (2, 3, 16, 16)}
    assert parse_input_shapes(["image=2,3,16,16"], model) == {"image": (2, 3, 16, 16)}
    assert read(model, {"image": (2, 3, 16, 16)}).layers[0].macs == 2 * 256 * 8 * 8 * 9
