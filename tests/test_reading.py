"""What is done to a model on reading: nodes sorted, fused Convs taken apart; and what is refused, with its place named."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper
from tiny import conv_net, from_text, gconv, get_tensor, residual_net, save

import onnx_gconv
from onnx_gconv.errors import ModelError
from onnx_gconv.model.constants import Constants
from onnx_gconv.model.file import load
from onnx_gconv.model.network import Network
from onnx_gconv.model.shapes import input_shapes


def outputs(model: onnx.ModelProto, **feeds: np.ndarray) -> list[np.ndarray]:
    """Return what ONNX Runtime makes of these inputs."""
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return session.run(None, {name: value.astype(np.float32) for name, value in feeds.items()})


# --- order ----------------------------------------------------------------------------------------------------------------


def shuffled(model: onnx.ModelProto, seed: int) -> onnx.ModelProto:
    nodes = [model.graph.node[index] for index in np.random.default_rng(seed).permutation(len(model.graph.node))]
    copy = onnx.GraphProto(node=nodes)
    del model.graph.node[:]
    model.graph.node.extend(copy.node)
    return model


@pytest.mark.parametrize("make", [conv_net, residual_net])
@pytest.mark.parametrize("seed", range(3))
def test_nodes_out_of_order_give_the_plan_and_the_model_of_sorted_ones(
    make: Callable[[], onnx.ModelProto], seed: int, tmp_path: Path
) -> None:
    expected = onnx_gconv.compress(make(), groups=2)
    for given in (shuffled(make(), seed), save(shuffled(make(), seed), tmp_path / "m.onnx")):
        found = onnx_gconv.compress(given, groups=2)
        assert found.plan.layers == expected.plan.layers
        image = np.random.default_rng(0).standard_normal((1, 3 if make is conv_net else 4, 8 if make is conv_net else 6, 8))
        image = image if make is conv_net else image[..., :6]
        np.testing.assert_allclose(
            outputs(found.model, image=image)[0], outputs(expected.model, image=image)[0], rtol=1e-5, atol=1e-6
        )


def test_a_model_in_memory_is_not_sorted_itself() -> None:
    model = shuffled(conv_net(), 1)
    before = model.SerializeToString(deterministic=True)
    onnx_gconv.inspect(model)
    assert model.SerializeToString(deterministic=True) == before


def test_nodes_of_inner_graphs_are_sorted_too(tmp_path: Path) -> None:
    model = from_text("""
    steered (bool flag, float[1,4] x) => (float[1,4] y) {
        y = If <then_branch = a () => (float[1,4] t) { t = Relu (tt)  tt = Neg (twice) },
                else_branch = b () => (float[1,4] e) { e = Identity (twice) }> (flag)
        twice = Add (x, x)
    }""")
    read = load(save(model, tmp_path / "m.onnx"))
    assert [node.op_type for node in read.graph.node] == ["Add", "If"]
    (then,) = (attribute.g for attribute in read.graph.node[1].attribute if attribute.name == "then_branch")
    assert [node.op_type for node in then.node] == ["Neg", "Relu"]


@pytest.mark.parametrize("cycle", ["a = Identity (b)  b = Identity (a)", "a = Identity (a)", "a = Add (x, b)  b = Relu (a)"])
def test_a_cycle_is_refused(cycle: str, tmp_path: Path) -> None:
    model = from_text(f"round (float[2] x) => (float[2] y) {{ {cycle}  y = Relu (a) }}")
    with pytest.raises(ModelError, match=r"'.*m\.onnx': the nodes go in a circle: the tensor '[ab]' depends on itself"):
        load(save(model, tmp_path / "m.onnx"))


# --- structure ------------------------------------------------------------------------------------------------------------


def tensor_of(model: onnx.ModelProto, name: str) -> onnx.TensorProto:
    return next(tensor for tensor in model.graph.initializer if tensor.name == name)


def conv_of(model: onnx.ModelProto) -> onnx.NodeProto:
    return model.graph.node[2]


def _raw_too_long(model: onnx.ModelProto) -> None:
    tensor_of(model, "w2").raw_data += b"1234"


def _raw_absent(model: onnx.ModelProto) -> None:
    tensor_of(model, "w2").ClearField("raw_data")


def _wrong_count(model: onnx.ModelProto) -> None:
    tensor = tensor_of(model, "w2")
    tensor.ClearField("raw_data")
    tensor.float_data.extend([1.0] * 7)


def _wrong_store(model: onnx.ModelProto) -> None:
    tensor = tensor_of(model, "b2")
    tensor.ClearField("raw_data")
    tensor.int64_data.extend([1] * 8)


def _negative_dim(model: onnx.ModelProto) -> None:
    tensor_of(model, "w2").dims[0] = -8


def _unknown_element(model: onnx.ModelProto) -> None:
    model.graph.input[0].type.tensor_type.elem_type = 77


def _no_output(model: onnx.ModelProto) -> None:
    del conv_of(model).output[:]


def _identity_without_input(model: onnx.ModelProto) -> None:
    model.graph.node.insert(0, onnx.NodeProto(op_type="Identity", output=["nothing"]))


def _empty_input(model: onnx.ModelProto) -> None:
    conv_of(model).input[1] = ""


def _mistyped_attribute(model: onnx.ModelProto) -> None:
    conv_of(model).attribute.append(helper.make_attribute("group", 1.0))


def _untyped_attribute(model: onnx.ModelProto) -> None:
    conv_of(model).attribute.append(onnx.AttributeProto(name="group", i=1))


def _attribute_twice(model: onnx.ModelProto) -> None:
    conv_of(model).attribute.extend([helper.make_attribute("group", 1)] * 2)


def _attribute_of_another_type(model: onnx.ModelProto) -> None:
    conv_of(model).attribute.append(onnx.AttributeProto(name="group", f=1.0, type=onnx.AttributeProto.INT))


def _binary_attribute(model: onnx.ModelProto) -> None:
    conv_of(model).attribute.append(helper.make_attribute("auto_pad", b"\xff\xfe"))


def _missing_attribute(model: onnx.ModelProto) -> None:
    model.graph.node.append(onnx.NodeProto(op_type="Concat", input=["c2", "c2"], output=["more"]))


def _no_opset(model: onnx.ModelProto) -> None:
    model.opset_import[0].domain = "elsewhere"


def _no_op(model: onnx.ModelProto) -> None:
    conv_of(model).op_type = ""


def _nowhere(model: onnx.ModelProto) -> None:
    conv_of(model).input[0] = "nowhere"


def _no_such_output(model: onnx.ModelProto) -> None:
    model.graph.output[0].name = "nowhere"


def _initializer_twice(model: onnx.ModelProto) -> None:
    model.graph.initializer.append(tensor_of(model, "w2"))


def _unequal_slice(model: onnx.ModelProto) -> None:
    for name, values in (("starts", [0, 0]), ("ends", [1])):
        model.graph.initializer.append(numpy_helper.from_array(np.array(values), name))
    model.graph.node.append(onnx.NodeProto(op_type="Slice", input=["c2", "starts", "ends"], output=["part"]))


def _no_step(model: onnx.ModelProto) -> None:
    for name, values in (("starts", [0]), ("ends", [1]), ("axes", [2]), ("steps", [0])):
        model.graph.initializer.append(numpy_helper.from_array(np.array(values), name))
    model.graph.node.append(onnx.NodeProto(op_type="Slice", input=["c2", "starts", "ends", "axes", "steps"], output=["part"]))


def _no_stride(model: onnx.ModelProto) -> None:
    conv_of(model).attribute.append(helper.make_attribute("strides", [1, 0]))


def _endless_pad(model: onnx.ModelProto) -> None:
    amounts = np.array([0, 0, 0, 0, 0, 2**63 - 1, 0, 0])
    model.graph.initializer.append(numpy_helper.from_array(amounts, "amounts"))
    model.graph.node.append(onnx.NodeProto(op_type="Pad", input=["c2", "amounts"], output=["wide"]))


def _other_bias(model: onnx.ModelProto) -> None:
    conv_of(model).input[2] = "b4"


def _other_scale(model: onnx.ModelProto) -> None:
    inputs = ["c2", "b4", "b4", "b4", "b4"]
    model.graph.node.append(onnx.NodeProto(op_type="BatchNormalization", input=inputs, output=["normal"]))


def _too_many_columns(model: onnx.ModelProto) -> None:
    conv_of(model).input[1] = "w1"  # of 3 channels, where c1 gives 8


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (_raw_too_long, ["'w2'", "needs 2,304 bytes and holds 2,308"]),
        (_raw_absent, ["'w2'", "needs 576 numbers in float_data and holds none"]),
        (_wrong_count, ["'w2'", "needs 576 numbers", "7 in float_data"]),
        (_wrong_store, ["'b2'", "8 in int64_data"]),
        (_negative_dim, ["'w2'", "-8x8x3x3"]),
        (_unknown_element, ["'image'", "unknown type 77"]),
        (_no_output, ["the Conv node ''", "no outputs"]),
        (_identity_without_input, ["the Identity node 'nothing'", "0 inputs", "takes 1"]),
        (_empty_input, ["the Conv node 'c2'", "nothing as 'W'"]),
        (_mistyped_attribute, ["the Conv node 'c2'", "'group'", "FLOAT", "INT"]),
        (_untyped_attribute, ["the Conv node 'c2'", "'group'", "no known type"]),
        (_attribute_twice, ["the Conv node 'c2'", "two attributes 'group'"]),
        (_attribute_of_another_type, ["the Conv node 'c2'", "'group'", "INT", "holds f"]),
        (_binary_attribute, ["the Conv node 'c2'", "'auto_pad'", "UTF-8"]),
        (_missing_attribute, ["the Concat node 'more'", "'axis'"]),
        (_no_opset, ["opset 'ai.onnx'"]),
        (_no_op, ["the node 'c2'", "no op type"]),
        (_nowhere, ["the Conv node 'c2' reads 'nowhere'"]),
        (_no_such_output, ["nothing makes the output 'nowhere'"]),
        (_initializer_twice, ["two initializers", "'w2'"]),
        (_unequal_slice, ["the Slice node 'part'", "2 starts and 1 ends"]),
        (_no_step, ["the Slice node 'part'", "steps [0]"]),
        (_no_stride, ["the Conv node 'c2'", "'strides' is [1, 0]"]),
        (_endless_pad, ["the Pad node 'wide'", "9223372036854775807"]),
        (_other_bias, ["the Conv node 'c2'", "'b4'"]),
        (_other_scale, ["BatchNormalization", "'normal'", "'b4' of 4"]),
        (_too_many_columns, ["Conv", "'c2'", "'w1'", "3", "8"]),
    ],
    ids=lambda value: value.__name__ if callable(value) else "",
)
def test_a_malformed_model_is_refused_with_file_node_and_field(
    spoil: Callable[[onnx.ModelProto], None], words: list[str], tmp_path: Path
) -> None:
    model = conv_net()
    spoil(model)
    for command in (["inspect"], ["compress", "--groups", "2", "--no-verify", "-o", tmp_path / "out.onnx"]):
        done = gconv(command[0], save(model, tmp_path / "bad.onnx"), *command[1:])
        assert done.code == 1, done
        assert "unexpectedly" not in done.err
        for word in words:
            assert word in done.err, done.err


@pytest.mark.parametrize("field", [b"c2", b"w2", b"image"])
def test_a_name_that_is_not_utf8_is_refused(field: bytes, tmp_path: Path) -> None:
    content = conv_net().SerializeToString()
    (tmp_path / "bad.onnx").write_bytes(content.replace(field, b"\xff" * len(field)))
    done = gconv("inspect", tmp_path / "bad.onnx")
    assert done.code == 1
    assert "is not UTF-8 text" in done.err
    assert str(tmp_path / "bad.onnx") in done.err


def test_external_data_without_a_length_is_as_long_as_its_shape_says(tmp_path: Path) -> None:
    model = conv_net()
    with (tmp_path / "weights.bin").open("wb") as file:
        for tensor in model.graph.initializer:
            tensor.external_data.add(key="location", value="weights.bin")
            tensor.external_data.add(key="offset", value=str(file.tell()))
            file.write(tensor.raw_data)
            tensor.ClearField("raw_data")
            tensor.data_location = TensorProto.EXTERNAL
    np.testing.assert_array_equal(get_tensor(load(save(model, tmp_path / "m.onnx")), "w2"), get_tensor(conv_net(), "w2"))


@pytest.mark.parametrize(
    ("entries", "word"),
    [({}, "location"), ({"location": "w", "offset": "x"}, "offset 'x'"), ({"location": "w", "length": "-4"}, "length '-4'")],
)
def test_external_data_that_does_not_say_where_is_refused(entries: dict[str, str], word: str, tmp_path: Path) -> None:
    model = conv_net()
    tensor = tensor_of(model, "w2")
    tensor.ClearField("raw_data")
    tensor.data_location = TensorProto.EXTERNAL
    for key, value in entries.items():
        tensor.external_data.add(key=key, value=value)
    with pytest.raises(ModelError, match=word):
        load(save(model, tmp_path / "m.onnx"))


def test_four_bits_a_number_and_empty_tensors_are_sound(tmp_path: Path) -> None:
    model = from_text("m (float[2] x) => (float[2] y) { y = Relu (x) }", empty=np.zeros((0, 3), np.float32))
    model.graph.initializer.append(helper.make_tensor("packed", TensorProto.INT4, [3], [1, 2, 3]))
    model.graph.initializer.append(TensorProto(name="nothing", data_type=TensorProto.FLOAT, dims=[0]))
    load(save(model, tmp_path / "m.onnx"))


# --- constants that claim much --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "claim",
    [
        "big = ConstantOfShape (shape)",
        "seed = Constant <value_float = 1.0> ()  big = Expand (seed, shape)",
        "less = Sub (shape, two)  whole = Add (less, two)  seed = Constant <value_float = 1.0> ()  big = Expand (seed, whole)",
    ],
)
def test_a_small_file_that_claims_gigabytes_is_refused_before_they_are_taken(claim: str, tmp_path: Path) -> None:
    model = from_text(
        f"m (float[1,20000,4,4] x) => (y) {{ {claim}  y = Conv (x, big) }}", shape=np.array([16384, 20000, 1, 1]), two=np.array(2)
    )
    with pytest.raises(ModelError, match=r"'big'.*would have 327,680,000 numbers"):
        Constants(load(save(model, tmp_path / "m.onnx"))).value("big")
    done = gconv("compress", tmp_path / "m.onnx", "--groups", "2", "-o", tmp_path / "out.onnx")
    assert done.code == 1
    assert "327,680,000 numbers" in done.err


def test_the_largest_computed_weights_of_real_models_are_folded() -> None:
    """75 million numbers out of a ConstantOfShape; the file has some 5 kB."""
    path = Path(onnx.__file__).parent / "backend" / "test" / "data" / "light" / "light_zfnet512.onnx"
    if not path.exists():
        pytest.skip("this onnx package has no light models")
    assert Constants(load(path)).value("gpu_0/fc6_w_0").shape == (4096, 18432)


def test_an_input_that_no_machine_has_room_for_is_refused(tmp_path: Path) -> None:
    done = gconv("inspect", save(conv_net(size=100000), tmp_path / "m.onnx"))
    assert done.code == 1
    assert "'image' would have the shape 1x3x100000x100000" in done.err


# --- Convs under other names ----------------------------------------------------------------------------------------------


def fused_net(activation: str, *parameters: float, add: bool = False) -> tuple[onnx.ModelProto, onnx.ModelProto]:
    """Return a net with its second Conv fused, and the same net apart."""
    apart = conv_net()
    fused = conv_net()
    relu = fused.graph.node.pop(3)
    conv = conv_of(fused)
    conv.op_type, conv.domain, conv.output[0] = "FusedConv", "com.microsoft", relu.output[0]
    if activation:
        conv.attribute.append(helper.make_attribute("activation", activation))
        if parameters:
            conv.attribute.append(helper.make_attribute("activation_params", list(parameters)))
    fused.opset_import.append(helper.make_opsetid("com.microsoft", 1))
    if add:
        conv.input.append("r1")
        apart.graph.node.insert(3, helper.make_node("Add", ["c2", "r1"], ["sum"]))
        apart.graph.node[4].input[0] = "sum"
    plain = apart.graph.node[3 + add]
    names = {"LeakyRelu": ["alpha"], "HardSigmoid": ["alpha", "beta"]}
    if activation == "Clip":
        for name, value in zip(("low", "high"), parameters, strict=True):
            apart.graph.initializer.append(numpy_helper.from_array(np.float32(value), name))
        plain.input.extend(["low", "high"])
    plain.op_type = activation or "Identity"
    plain.attribute.extend(helper.make_attribute(*each) for each in zip(names.get(activation, []), parameters, strict=False))
    return fused, apart


@pytest.mark.parametrize(
    ("activation", "parameters"),
    [("Relu", ()), ("", ()), ("LeakyRelu", (0.2,)), ("Clip", (0.0, 0.5)), ("HardSigmoid", (0.3, 0.4)), ("Sigmoid", ())],
)
@pytest.mark.parametrize("add", [False, True])
def test_a_fused_conv_is_a_conv_and_what_follows_it(
    activation: str, parameters: tuple[float, ...], add: bool, tmp_path: Path
) -> None:
    fused, apart = fused_net(activation, *parameters, add=add)
    image = np.random.default_rng(0).standard_normal((2, 3, 8, 8))
    read = load(save(fused, tmp_path / "m.onnx"))
    assert "FusedConv" not in {node.op_type for node in read.graph.node}
    np.testing.assert_allclose(outputs(read, image=image)[0], outputs(fused, image=image)[0], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(outputs(read, image=image)[0], outputs(apart, image=image)[0], rtol=1e-5, atol=1e-6)


def test_a_fused_conv_is_grouped_and_counted_like_a_conv() -> None:
    fused, apart = fused_net("Relu")
    found, expected = onnx_gconv.inspect(fused), onnx_gconv.inspect(apart)
    assert (found.count.params, found.count.macs) == (expected.count.params, expected.count.macs)
    assert [layer.weight for layer in found.layers] == ["w2", "w3"]
    assert len(onnx_gconv.compress(fused, groups=2).plan.layers) == 2


def test_a_conv_fused_with_something_unknown_is_counted_and_listed() -> None:
    fused, apart = fused_net("Swirl")
    apart.graph.node[3].op_type = "Relu"
    found = onnx_gconv.inspect(fused)
    assert found.count.params == onnx_gconv.inspect(apart).count.params
    assert ("r2", "what it is fused with is not known (FusedConv)") in {(conv.name, conv.reason) for conv in found.skipped}


def quantised_net(op_type: str) -> onnx.ModelProto:
    """Return one quantised Conv of 8 to 16 channels, 3x3 on 6x6 pixels."""
    weight = np.ones((16, 8, 3, 3), np.int8)
    if op_type == "ConvInteger":
        text = "q (uint8[1,8,6,6] x) => (int32[1,16,4,4] y) { y = ConvInteger (x, w) }"
        return from_text(text, w=weight)
    scale, zero = np.float32(0.1), np.uint8(128)
    return from_text(
        "q (uint8[1,8,6,6] x) => (uint8[1,16,4,4] y) { y = QLinearConv (x, s, z, w, s, zw, s, z, b) }",
        w=weight, s=scale, z=zero, zw=np.int8(0), b=np.zeros(16, np.int32),
    )  # fmt: skip


@pytest.mark.parametrize(("op_type", "biases"), [("ConvInteger", 0), ("QLinearConv", 16)])
def test_quantised_convs_are_counted_and_listed(op_type: str, biases: int, tmp_path: Path) -> None:
    found: Network = onnx_gconv.inspect(quantised_net(op_type))
    assert (found.count.params, found.count.macs) == (16 * 8 * 9 + biases, 16 * 8 * 9 * 16)
    assert [(conv.name, conv.reason) for conv in found.skipped] == [("y", f"it is quantised ({op_type})")]
    path = save(quantised_net(op_type), tmp_path / "q.onnx")
    for command in ("compress", "plan"):
        done = gconv(command, path, "--max-params", "50%", "-o", tmp_path / "out.onnx")
        assert done.code == 1
        assert "all 1 Convs of the model are quantised" in done.err
        assert "start from the float model" in done.err


def test_a_conv_of_constants_is_no_layer() -> None:
    model = from_text(
        """m (float[1,4,2,2] x) => (y) { a = Conv (data, w)  b = Conv (a, v)  c = Conv (x, v)  y = Add (b, c) }""",
        data=np.ones((1, 4, 2, 2), np.float32), w=np.eye(4, dtype=np.float32).reshape(4, 4, 1, 1),
        v=np.arange(16, dtype=np.float32).reshape(4, 4, 1, 1),
    )  # fmt: skip
    reasons = {conv.name: conv.reason for conv in onnx_gconv.inspect(model).skipped}
    assert {name for name, reason in reasons.items() if "what it gives is constant" in reason} == {"a", "b"}


# --- found by the fuzz driver, and not on reading --------------------------------------------------------------------------


def masked_and_written(model: onnx.ModelProto, **feeds: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return what the masked and the grouped model give, both without our verification."""
    result = onnx_gconv.compress(model, groups=2, verify=False)
    assert result.plan.layers
    masked = onnx_gconv.mask(model, result.plan, verify=False).model
    return outputs(masked, **feeds)[0], outputs(result.model, **feeds)[0]


def test_a_gather_does_not_move_through_tensors_of_unknown_shape() -> None:
    rng = np.random.default_rng(0)
    # ONNX Runtime has no Relu of int64, so that no run settles shapes; once the weight is stored, it is gone.
    model = from_text(
        """m (float[1,4,6,6] image) => (out) {
        same = Relu (shape)
        zeros = ConstantOfShape (same)
        whole = Add (zeros, w)
        a = Conv (image, whole)
        b = Conv (image, whole)
        both = Add (a, b)
        out = Abs (both)
    }""",
        shape=np.array([8, 4, 1, 1]), w=rng.standard_normal((8, 4, 1, 1)),
    )  # fmt: skip
    one, other = masked_and_written(model, image=rng.standard_normal((1, 4, 6, 6)))
    np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


def test_channels_that_a_broadcast_makes_pixels_keep_their_order() -> None:
    rng = np.random.default_rng(0)
    model = from_text(
        """m (float[1,4,2,2] image) => (out) {
        a = Conv (image, w)
        flat = Flatten (a)
        pooled = GlobalAveragePool (a)
        b = Conv (pooled, v)
        mixed = Mul (flat, b)
        out = Abs (mixed)
    }""",
        w=rng.standard_normal((8, 4, 1, 1)), v=rng.standard_normal((8, 8, 1, 1)),
    )  # fmt: skip
    one, other = masked_and_written(model, image=rng.standard_normal((1, 4, 2, 2)))
    np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


# --- dynamic axes ---------------------------------------------------------------------------------------------------------


def shapes_of(*declared: str) -> list[tuple[int, ...]]:
    inputs = ", ".join(f"float[{dims}] x{number}" for number, dims in enumerate(declared))
    model = from_text(f"m ({inputs}) => (y) {{ y = Identity (x0) }}")
    return list(input_shapes(model, {}).values())


@pytest.mark.parametrize(
    ("declared", "wanted"),
    [
        (["batch,3,H,W", "2,batch"], [(1, 3, 224, 224), (2, 1)]),
        (["2,batch", "batch,3,H,W"], [(2, 1), (1, 3, 224, 224)]),
        (["N,S,S,3"], [(1, 224, 224, 3)]),
        (["N,H,W,1"], [(1, 224, 224, 1)]),
        (["N,C,H,W"], [(1, 3, 224, 224)]),
        (["N,3,H,W"], [(1, 3, 224, 224)]),
        (["N,T", "T"], [(1, 224), (224,)]),
        (["?,3,?,?"], [(1, 3, 224, 224)]),
    ],
)
def test_one_symbol_is_one_size_and_channels_may_come_last(declared: list[str], wanted: list[tuple[int, ...]]) -> None:
    assert shapes_of(*declared) == wanted


def test_a_size_that_is_given_for_one_input_holds_for_the_same_name_in_others() -> None:
    model = from_text("m (float[batch,3] x, float[batch,4] z) => (y) { y = Identity (x) }")
    assert input_shapes(model, {"z": (5, 4)}) == {"x": (5, 3), "z": (5, 4)}


def test_an_input_that_is_transposed_first_has_its_channels_last() -> None:
    model = from_text("m (float[N,H,W,C] x) => (y) { y = Transpose <perm = [0, 3, 1, 2]> (x) }")
    assert input_shapes(model, {}) == {"x": (1, 224, 224, 3)}


def test_a_failing_trial_run_shows_its_reason_and_names_the_input(tmp_path: Path) -> None:
    # The Reshape takes 5x5 pixels only, and how many numbers are not zero no inference can tell.
    model = from_text(
        """m (float[N,4,S,S] image) => (y) {
        flat = Reshape (image, wanted)
        places = NonZero (flat)
        numbers = Cast <to = 1> (places)
        one = Unsqueeze (numbers, axis)
        y = Conv (one, w)
    }""",
        wanted=np.array([1, 100]), axis=np.array([0]), w=np.ones((4, 2, 1), np.float32),
    )  # fmt: skip
    path = save(model, tmp_path / "m.onnx")
    done = gconv("inspect", path)
    assert "trial run failed" in done.err
    assert "Reshape" in done.err
    done = gconv("compress", path, "--groups", "2", "-o", tmp_path / "out.onnx")
    assert done.code == 1
    assert "--input-shape image=?x4x?x?" in done.err
    assert gconv("inspect", path, "--input-shape", "1x4x5x5").err == ""


@pytest.mark.parametrize(
    ("op", "w", "b", "culprit"),
    [
        ("Conv", (4, 3, 1, 1), (4,), "'w' of 4x3x1x1"),
        ("Conv", (4, 2, 1, 1), (2,), "'b' has the shape 2"),
        ("ConvTranspose", (3, 4, 1, 1), (4,), "'w' of 3x4x1x1"),
        ("ConvTranspose", (2, 4, 1, 1), (2,), "'b' has the shape 2"),
    ],
)
def test_constants_for_other_channels_are_named(
    op: str, w: tuple[int, ...], b: tuple[int, ...], culprit: str, tmp_path: Path
) -> None:
    text = f"m (float[1,2,5,5] x) => (float[1,c,h,v] y) {{ y = {op} (x, w, b) }}"
    path = save(from_text(text, w=np.ones(w, np.float32), b=np.ones(b, np.float32)), tmp_path / "m.onnx")
    done = gconv("inspect", path)
    assert done.code == 1
    assert culprit in done.err


def test_axes_of_negative_size_do_not_reach_onnxs_own_check(tmp_path: Path) -> None:
    """It takes them for sizes, and aborts the process where a Slice goes over one. Some exporters write -1 for an unknown size."""
    model = from_text(
        """m (float[1,4,6,6] x) => (float[1,3,6,6] y) { a = Conv (x, w) y = Slice (a, begin, end, axis) }""",
        w=np.ones((4, 4, 1, 1), np.float32), begin=np.array([1]), end=np.array([4]), axis=np.array([1]),
    )  # fmt: skip
    model.graph.value_info.append(onnx.helper.make_tensor_value_info("a", 1, [1, -1, 6, 6]))
    compressed = onnx_gconv.compress(model, groups=2)
    assert compressed.plan.layers
    model.graph.value_info[-1].type.tensor_type.shape.dim[1].dim_value = -(2**63)
    done = gconv("inspect", save(model, tmp_path / "m.onnx"))
    assert done.code == 1
    assert "an axis of the tensor 'a' has the size -9223372036854775808" in done.err
