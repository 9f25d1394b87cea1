"""What of a graph can be narrowed or dropped, what cannot and why; and plans that do not fit."""

import numpy as np
import onnx
import pytest
from onnx import TensorProto
from onnx.reference import ReferenceEvaluator
from tiny import get_tensor, residual_net
from widths import Done, done, graph, plan_of, subject

from onnx_gconv.model.widths import Branch, Space
from onnx_gconv.plans import PlannedLayer, PlannedSpace
from onnx_gconv.rewrite.group import group
from onnx_gconv.rewrite.mask import mask
from onnx_gconv.rewrite.match import match

EDGES = "a graph input or output has these channels, or an op that is not channel-wise"


def spaces_of(model: onnx.ModelProto) -> dict[str, Space]:
    return {space.name: space for space in subject(model).widths.spaces}


def branches_of(model: onnx.ModelProto) -> dict[str, Branch]:
    return {branch.name: branch for branch in subject(model).widths.branches}


def reason(model: onnx.ModelProto, tensor: str) -> str:
    it = subject(model)
    (atom,) = it.spaces.axes[tensor].atoms
    return it.widths.refused[atom]


def halved(model: onnx.ModelProto) -> Done:
    """Return the model with every other channel of every space gone, verified."""
    it = subject(model)
    spaces = tuple(PlannedSpace(space.name, space.channels, tuple(range(1, space.channels, 2))) for space in it.widths.spaces)
    made = done(it, plan_of(spaces=spaces))
    onnx.checker.check_model(made.written, full_check=True)
    found = made.verified(tolerance=2e-6)
    assert found.passed, found
    return made


def shape(model: onnx.ModelProto, node: str, slot: int) -> tuple[int, ...]:
    return get_tensor(model, next(each for each in model.graph.node if each.output[0] == node).input[slot]).shape


# ---- spaces

CHAIN = "a = Conv (x, w_8_4_3_3, b_8) r = Relu (a) y = Conv (r, w_6_8_1_1)"


def test_a_chain_has_one_space_with_its_writer_and_reader() -> None:
    model = graph(CHAIN)
    (space,) = spaces_of(model).values()
    assert (space.name, space.channels, space.writers, space.readers) == ("a", 8, ("a",), ("y",))
    written = halved(model).written
    assert (shape(written, "a", 1), shape(written, "a", 2), shape(written, "y", 1)) == ((4, 4, 3, 3), (4,), (6, 4, 1, 1))


def test_a_space_that_keeps_all_its_channels_changes_nothing() -> None:
    model = graph(CHAIN)
    matched = match(model, plan_of(spaces=(PlannedSpace("a", 8, tuple(range(8))),)))
    assert not matched
    assert group(model, matched) == model


def test_only_the_columns_of_the_readers_are_masked() -> None:
    model = graph(CHAIN)
    masked = mask(model, match(model, plan_of(spaces=(PlannedSpace("a", 8, (1, 6)),))))
    assert np.array_equal(get_tensor(masked, "w_8_4_3_3"), get_tensor(model, "w_8_4_3_3"))
    kept = np.flatnonzero(np.any(get_tensor(masked, "w_6_8_1_1"), axis=(0, 2, 3)))
    assert kept.tolist() == [1, 6]
    assert np.array_equal(get_tensor(masked, "w_6_8_1_1")[:, kept], get_tensor(model, "w_6_8_1_1")[:, kept])


NARROWED: dict[str, tuple[str, dict[str, tuple[tuple[str, ...], tuple[str, ...]]]]] = {
    "normalization and activation between": (
        "a = Conv (x, w_8_4_3_3) n = BatchNormalization (a, s_8, t_8, m_8, v_8) r = PRelu (n, p_8_1_1) y = Conv (r, w_6_8_1_1)",
        {"a": (("a",), ("y",))},
    ),
    "depthwise Conv between": (
        "a = Conv (x, w_8_4_1_1) d = Conv <group = 8, pads = [1, 1, 1, 1]> (a, w_8_1_3_3, b_8) y = Conv (d, w_6_8_1_1)",
        {"a": (("a",), ("y",))},
    ),
    "pooling between": (
        "a = Conv (x, w_8_4_1_1) p = MaxPool <kernel_shape = [2, 2]> (a) q = AveragePool <kernel_shape = [2, 2]> (p) "
        "y = Conv (q, w_6_8_1_1)",
        {"a": (("a",), ("y",))},
    ),
    "squeeze and excite": (
        "a = Conv (x, w_8_4_1_1) p = GlobalAveragePool (a) s = Conv (p, w_4_8_1_1) r = Relu (s) e = Conv (r, w_8_4_1_1_b) "
        "g = Sigmoid (e) m = Mul (a, g) y = Conv (m, w_6_8_1_1)",
        {"a": (("a", "e"), ("s", "y")), "s": (("s",), ("e",))},
    ),
    "concat": (
        "a = Conv (x, w_8_4_1_1) b = Conv (x, w_6_4_1_1) c = Concat <axis = 1> (a, b, a) y = Conv (c, w_6_22_1_1)",
        {"a": (("a",), ("y",)), "b": (("b",), ("y",))},
    ),
    "residual stream": (
        "a = Conv (x, w_8_4_1_1) i = Conv (a, w_6_8_1_1) r = Relu (i) e = Conv (r, w_8_6_1_1) t = Add (a, e) "
        "y = Conv (t, w_5_8_1_1)",
        {"a": (("a", "e"), ("i", "y")), "i": (("i",), ("e",))},
    ),
    "projection shortcut": (
        "a = Conv (x, w_8_4_1_1) p = Conv (x, w_8_4_1_1_b) t = Add (p, a) y = Conv (t, w_5_8_1_1)",
        {"a": (("a", "p"), ("y",))},
    ),
    "split by an input": (
        "a = Conv (x, w_8_4_1_1) f, g = Split <axis = 1> (a, sizes) r = Relu (g) c = Concat <axis = 1> (f, r) "
        "y = Conv (c, w_5_8_1_1)",
        {"f": (("a",), ("y",)), "g": (("a",), ("y",))},
    ),
    "a constant for each channel and pixel": (
        "a = Conv (x, w_8_4_1_1) m = Add (k_8_6_6, a) y = Conv (m, w_5_8_1_1)",
        {"a": (("a",), ("y",))},
    ),
    "transposed Conv": (
        "a = ConvTranspose (x, w_4_8_2_2, b_8) y = ConvTranspose (a, w_8_5_2_2)",
        {"a": (("a",), ("y",))},
    ),
    "size that is taken of the pixels": (
        "a = Conv (x, w_8_4_1_1) s = Shape (a) i = Gather (s, two) f = Cast <to = 1> (i) d = Div (a, f) y = Conv (d, w_5_8_1_1)",
        {"a": (("a",), ("y",))},
    ),
}


@pytest.mark.parametrize("case", NARROWED)
def test_what_lies_between_is_narrowed_too(case: str) -> None:
    body, expected = NARROWED[case]
    model = graph(body, sizes=np.array([3, 5]), two=np.array([2]))
    assert {name: (space.writers, space.readers) for name, space in spaces_of(model).items()} == expected
    halved(model)


FLAT = {
    "Flatten": "f = Flatten (a)",
    "Reshape to a number": "f = Reshape (a, whole)",
    "Reshape to the rest": "f = Reshape (a, rest)",
    "Reshape to the batch and the rest": ("s = Shape (a) n = Gather (s, zero) k = Concat <axis = 0> (n, minus) f = Reshape (a, k)"),
}


@pytest.mark.parametrize("case", FLAT)
def test_a_gemm_behind_flattened_pixels_loses_all_pixels_of_a_channel(case: str) -> None:
    numbers = {"whole": np.array([1, 8 * 36]), "rest": np.array([1, -1]), "zero": np.array([0]), "minus": np.array([-1])}
    body = f"a = Conv (x, w_8_4_1_1) {FLAT[case]} h = Gemm (f, w_288_6, b_6) r = Relu (h) y = Gemm <transB = 1> (r, w_3_6)"
    model = graph(body, result="float[1,3] y", **numbers)
    assert {name: (space.writers, space.readers) for name, space in spaces_of(model).items()} == {
        "a": (("a",), ("h",)),
        "h": (("h",), ("y",)),
    }
    written = halved(model).written
    assert (shape(written, "h", 1), shape(written, "h", 2), shape(written, "y", 1)) == ((4 * 36, 3), (3,), (3, 3))


def test_the_sizes_of_a_resize_follow_constants_and_all() -> None:
    begin = "s = Shape (a) b = Slice (s, zero, two) k = Concat <axis = 0> (b, pixels)"
    for sizes in (f"{begin} u = Resize (a, , , k)", "u = Resize (a, , , whole)", "u = Resize (a, , scales)"):
        model = graph(
            f"a = Conv (x, w_8_4_1_1) {sizes} y = Conv (u, w_5_8_1_1)",
            zero=np.array([0]),
            two=np.array([2]),
            pixels=np.array([12, 12]),
            whole=np.array([1, 8, 12, 12]),
            scales=np.array([1.0, 1.0, 2.0, 2.0]),
        )
        assert list(spaces_of(model)) == ["a"]
        halved(model)


def test_shapes_in_the_file_are_those_of_what_is_left() -> None:
    model = graph(f"{CHAIN[:-1]})", result="float[1,6,4,4] y")
    model = onnx.shape_inference.infer_shapes(model)
    written = halved(model).written
    dims = {value.name: [dim.dim_value for dim in value.type.tensor_type.shape.dim] for value in written.graph.value_info}
    assert dims == {"a": [1, 4, 4, 4], "r": [1, 4, 4, 4]}


REFUSED = {
    "graph output": ("y = Conv (x, w_8_4_1_1) z = Conv (y, w_3_8_1_1)", "y", EDGES),
    "unknown op": ("a = Conv (x, w_8_4_1_1) s = Softmax <axis = 1> (a) y = Conv (s, w_3_8_1_1)", "a", EDGES),
    "groups of its own": (
        "a = Conv (x, w_8_4_1_1) g = Conv <group = 2> (a, w_6_4_1_1) y = Conv (g, w_3_6_1_1)",
        "a",
        "a Conv with groups of its own reads or writes them",
    ),
    "groups of its own, behind": (
        "a = Conv (x, w_8_4_1_1) g = Conv <group = 2> (a, w_6_4_1_1) y = Conv (g, w_3_6_1_1)",
        "g",
        "a Conv with groups of its own reads or writes them",
    ),
    "Pad shortcut": (
        "a = Conv (x, w_8_4_1_1) p = Pad (a, wider) e = Conv (a, w_12_8_1_1) t = Add (p, e) y = Conv (t, w_3_12_1_1)",
        "a",
        "a Pad makes more channels of them",
    ),
    "Pad shortcut, the wider stream": (
        "a = Conv (x, w_8_4_1_1) p = Pad (a, wider) e = Conv (a, w_12_8_1_1) t = Add (p, e) y = Conv (t, w_3_12_1_1)",
        "t",
        "a Pad makes more channels of them",
    ),
    "Slice of channels": (
        "a = Conv (x, w_8_4_1_1) s = Slice (a, zero, two, one) y = Conv (s, w_3_2_1_1)",
        "s",
        "a Slice counts them",
    ),
    "equal Split": (
        "a = Conv (x, w_8_4_1_1) f, g = Split <axis = 1> (a) m = Mul (f, g) y = Conv (m, w_3_4_1_1)",
        "f",
        "a Split takes equal parts of them",
    ),
    "number of channels told": (
        "a = Conv (x, w_8_4_1_1) s = Shape (a) i = Gather (s, one) f = Cast <to = 1> (i) d = Div (a, f) y = Conv (d, w_3_8_1_1)",
        "a",
        "something is computed from how many there are",
    ),
    "number of elements told": (
        "a = Conv (x, w_8_4_1_1) s = Size (a) f = Cast <to = 1> (s) d = Div (a, f) y = Conv (d, w_3_8_1_1)",
        "a",
        "something is computed from how many there are",
    ),
    "half of a Resize's sizes constant": (
        "a = Conv (x, w_8_4_1_1) s = Shape (a) p = Slice (s, two, four) k = Concat <axis = 0> (begin, p) u = Resize (a, , , k) "
        "y = Conv (u, w_3_8_1_1)",
        "a",
        "a Resize counts them",
    ),
    "another tensor's channels in a Resize": (
        "a = Conv (x, w_8_4_1_1) b = Conv (x, w_8_4_1_1_b) s = Shape (b) p = Slice (s, zero, two) "
        "k = Concat <axis = 0> (p, four, four) u = Resize (a, , , k) v = Conv (b, w_3_8_1_1) y = Conv (u, w_3_8_1_1_b)",
        "a",
        "a Resize counts them",
    ),
    "a Reshape that counts": (
        "a = Conv (x, w_8_4_1_1) s = Shape (x) n = Gather (s, zero) k = Concat <axis = 0> (n, many) f = Reshape (a, k) "
        "y = Gemm (f, w_288_3)",
        "a",
        "a Reshape counts them",
    ),
    "one Conv from a stream into itself": (
        "a = Conv (x, w_8_4_1_1) e = Conv (a, w_8_8_1_1) t = Add (a, e) y = Conv (t, w_3_8_1_1)",
        "a",
        "a Conv leads from these channels into themselves",
    ),
    "weight at run time": ("a = Conv (x, w_8_4_1_1) y = Conv (a, x2)", "a", EDGES),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_narrowed_has_a_reason(case: str) -> None:
    body, tensor, expected = REFUSED[case]
    numbers = {"zero": [0], "one": [1], "two": [2], "four": [4], "begin": [1, 8], "many": [288], "wider": [0, 2, 0, 0, 0, 2, 0, 0]}
    model = graph(
        body,
        more=", float[3,8,1,1] x2" if "x2" in body else "",
        result="float[1,3] y" if "Gemm" in body else "float[1,C,h,w] y",
        **{name: np.array(value) for name, value in numbers.items()},
    )
    assert reason(model, tensor) == expected


# ---- branches

STEM = "a = Conv (x, w_8_4_1_1, b_8) s = Relu (a) "
END = " y = Conv (t, w_3_8_1_1)"
BRANCHES = {
    "basic": "i = Conv (s, w_6_8_1_1) r = Relu (i) e = Conv (r, w_8_6_1_1, c_8) t = Add (s, e)",
    "shortcut first or last": "i = Conv (s, w_6_8_1_1) r = Relu (i) e = Conv (r, w_8_6_1_1, c_8) t = Add (e, s)",
    "no bias": "i = Conv (s, w_6_8_1_1) r = Relu (i) e = Conv (r, w_8_6_1_1) t = Add (s, e)",
    "normalization behind": (
        "i = Conv (s, w_6_8_1_1) r = Relu (i) e = Conv (r, w_8_6_1_1, c_8) "
        "n = BatchNormalization <epsilon = 0.01> (e, s_8, t_8, m_8, v_8) t = Add (s, n)"
    ),
    "bottleneck": (
        "i = Conv (s, w_6_8_1_1) r = Relu (i) j = Conv <pads = [1, 1, 1, 1]> (r, w_5_6_3_3) q = Relu (j) "
        "e = Conv (q, w_8_5_1_1, c_8) t = Add (s, e)"
    ),
    "as in MobileNet": (
        "i = Conv (s, w_6_8_1_1) r = Relu (i) d = Conv <group = 6, pads = [1, 1, 1, 1]> (r, w_6_1_3_3) "
        "e = Conv (d, w_8_6_1_1, c_8) t = Add (s, e)"
    ),
    "squeeze and excite inside": (
        "i = Conv (s, w_6_8_1_1) p = GlobalAveragePool (i) z = Conv (p, w_2_6_1_1) o = Conv (z, w_6_2_1_1) g = Sigmoid (o) "
        "m = Mul (i, g) e = Conv (m, w_8_6_1_1, c_8) t = Add (s, e)"
    ),
    "projection shortcut": (
        "i = Conv (s, w_6_8_1_1) r = Relu (i) e = Conv (r, w_8_6_1_1, c_8) p = Conv (s, w_8_8_1_1, d_8) t = Add (p, e)"
    ),
    "two Convs side by side inside": (
        "i = Conv (s, w_6_8_1_1) j = Conv (s, w_5_8_1_1) c = Concat <axis = 1> (i, j) e = Conv (c, w_8_11_1_1, c_8) t = Add (s, e)"
    ),
}


@pytest.mark.parametrize("case", BRANCHES)
def test_a_dropped_branch_is_its_constant(case: str) -> None:
    model = graph(STEM + BRANCHES[case] + END)
    (branch,) = branches_of(model).values()
    assert (branch.name, branch.add) == ("e", "t")
    it = subject(model)
    inside = {node.output[0] for node in model.graph.node} - {"a", "s", "p", "t", "y"}
    inside |= {"p"} if case.startswith("squeeze") else set()
    assert branch.nodes == inside
    made = done(it, plan_of(dropped=("e",)))
    gone = inside | ({"t"} if case == "no bias" else set())  # there is nothing to add
    assert [node.output[0] for node in made.written.graph.node if node.op_type != "Constant"] == [
        node.output[0] for node in model.graph.node if node.output[0] not in gone
    ]
    assert made.verified(tolerance=2e-6).passed
    assert not np.any(get_tensor(made.masked, next(node for node in model.graph.node if node.output[0] == "e").input[1]))


def test_a_dropped_branch_follows_its_stream_narrowed_and_grouped() -> None:
    body = BRANCHES["normalization behind"] + " u = Conv (t, w_6_8_1_1_b, b_6) y = Conv (u, w_3_6_1_1)"
    it = subject(graph(STEM + body))
    layer = PlannedLayer("u", "u", 6, 8, 2, 0.5, (6, 1, 5, 3), (5, 1, 0, 4, 2, 3))
    made = done(it, plan_of((layer,), (PlannedSpace("a", 8, (1, 3, 5, 6)),), ("e",)))
    assert made.verified(tolerance=2e-6).passed
    assert shape(made.written, "t", 1) == (1, 4, 1, 1)
    assert not made.placement.gathers


def test_the_constant_of_a_branch_has_the_type_of_the_model() -> None:
    model = residual_net()
    for tensor in model.graph.initializer:
        tensor.CopyFrom(onnx.numpy_helper.from_array(onnx.numpy_helper.to_array(tensor).astype(np.float16), tensor.name))
    for value in (*model.graph.input, *model.graph.output):
        value.type.tensor_type.elem_type = TensorProto.FLOAT16
    made = done(subject(model), plan_of(dropped=("last",)))
    onnx.checker.check_model(made.written, full_check=True)
    x = np.random.default_rng(0).standard_normal((1, 4, 6, 6)).astype(np.float16)
    one, two = (ReferenceEvaluator(each).run(None, {"image": x})[0] for each in (made.masked, made.written))
    assert np.array_equal(one, two)


NO_BRANCHES = {
    "one Conv": "e = Conv (s, w_8_8_1_1) t = Add (s, e)",
    "read elsewhere": "i = Conv (s, w_6_8_1_1) e = Conv (i, w_8_6_1_1) f = Relu (e) u = Add (s, e) t = Mul (u, f)",
    "read halfway": "i = Conv (s, w_6_8_1_1) e = Conv (i, w_8_6_1_1) k = Conv (i, w_8_6_1_1_b) u = Add (s, e) t = Mul (u, k)",
    "an activation at its end": "i = Conv (s, w_6_8_1_1) e = Conv (i, w_8_6_1_1) r = Relu (e) t = Add (s, r)",
    "a sum of constants": "i = Conv (s, w_6_8_1_1) e = Conv (i, w_8_6_1_1) t = Add (e, k_1_8_1_1)",
    "a shortcut that is spread": ("p = GlobalAveragePool (s) i = Conv (s, w_6_8_1_1) e = Conv (i, w_8_6_1_1) t = Add (p, e)"),
    "statistics of the batch": (
        "i = Conv (s, w_6_8_1_1) e = Conv (i, w_8_6_1_1) "
        "n, m, v = BatchNormalization <training_mode = 1> (e, s_8, t_8, m_8, v_8) t = Add (s, n)"
    ),
    "a Conv with groups inside": "i = Conv <group = 2> (s, w_6_4_1_1) e = Conv (i, w_8_6_1_1) t = Add (s, e)",
    "twice the same": "i = Conv (s, w_6_8_1_1) e = Conv (i, w_8_6_1_1) t = Add (e, e)",
}


@pytest.mark.parametrize("case", NO_BRANCHES)
def test_what_is_no_branch(case: str) -> None:
    assert not branches_of(graph(STEM + NO_BRANCHES[case] + END))


def test_a_branch_that_an_inner_graph_reads_stays() -> None:
    """Its last Conv would be zero in one model, and itself in the other."""
    model = graph(STEM + BRANCHES["basic"] + " z = Identity (t)" + END)
    assert branches_of(model)
    inner = onnx.helper.make_graph(
        [onnx.helper.make_node("Identity", ["e"], ["inner"])], "body", [], [onnx.helper.make_empty_tensor_value_info("inner")]
    )
    condition = onnx.numpy_helper.from_array(np.array(True), "yes")
    model.graph.initializer.append(condition)
    end = model.graph.node.pop()
    model.graph.node.append(onnx.helper.make_node("If", ["yes"], ["q"], then_branch=inner, else_branch=inner))
    model.graph.node.append(end)
    assert not branches_of(model)
