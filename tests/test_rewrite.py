"""For one plan, the masked and the grouped model are the same function."""

import math

import ml_dtypes
import numpy as np
import onnx
import onnxruntime as ort
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper
from tiny import conv_net, get_tensor

from onnx_gconv.errors import PlanError
from onnx_gconv.plans import Plan, PlannedLayer, Totals
from onnx_gconv.rewrite.group import group
from onnx_gconv.rewrite.mask import dropped_share, mask
from onnx_gconv.rewrite.match import match
from onnx_gconv.rewrite.taken import take_blocks
from onnx_gconv.verification import compare

DTYPES = {"float32": (TensorProto.FLOAT, np.float32, 2e-6), "float16": (TensorProto.FLOAT16, np.float16, 5e-3)}


def plan_of(*layers: PlannedLayer) -> Plan:
    return Plan("", "l2", "paper", "local", 0, {}, "free", Totals(0, 0), Totals(0, 0), layers, ())


def planned(name: str, groups: int, in_order: list[int], out_order: list[int]) -> PlannedLayer:
    return PlannedLayer(name, name, len(out_order), len(in_order), groups, 0.5, tuple(in_order), tuple(out_order))


def single_conv(
    rng: np.random.Generator,
    outs: int,
    ins: int,
    kernel: tuple[int, ...],
    existing: int,
    bias: bool,
    element: int,
    dtype: type,
    **attributes: object,
) -> onnx.ModelProto:
    tensors = [numpy_helper.from_array(rng.standard_normal((outs, ins // existing, *kernel)).astype(dtype), "w")]
    if bias:
        tensors.append(numpy_helper.from_array(rng.standard_normal(outs).astype(dtype), "b"))
    node = helper.make_node("Conv", ["x", "w", *(["b"] if bias else [])], ["y"], group=existing, **attributes)
    size = [7] * len(kernel)
    graph = helper.make_graph(
        [node],
        "one",
        [helper.make_tensor_value_info("x", element, [1, ins, *size])],
        [helper.make_tensor_value_info("y", element, [1, outs, *[None] * len(kernel)])],
        tensors,
    )
    # Conv takes bfloat16 from opset 22 on.
    opset, ir_version = (22, 10) if element == TensorProto.BFLOAT16 else (17, 8)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=ir_version)


def run(model: onnx.ModelProto, **feeds: np.ndarray) -> list[np.ndarray]:
    onnx.checker.check_model(model, full_check=True)
    return ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"]).run(None, feeds)


@st.composite
def conv_cases(draw: st.DrawFn) -> dict[str, object]:
    existing = draw(st.integers(1, 3))
    more = draw(st.integers(2, 4))
    outs = existing * more * draw(st.integers(1, 3))
    ins = existing * more * draw(st.integers(1, 3))
    rank = draw(st.integers(1, 3))
    kernel = tuple(draw(st.lists(st.integers(1, 3), min_size=rank, max_size=rank)))
    seed = draw(st.integers(0, 2**32 - 1))
    rng = np.random.default_rng(seed)

    def order(channels: int) -> list[int]:  # arbitrary inside each group that the Conv has already
        part = channels // existing
        return [int(c) for e in range(existing) for c in rng.permutation(part) + e * part]

    return {
        "rng": rng,
        "outs": outs,
        "ins": ins,
        "kernel": kernel,
        "existing": existing,
        "groups": existing * more,
        "bias": draw(st.booleans()),
        "dtype": draw(st.sampled_from(sorted(DTYPES))),
        "strides": [draw(st.integers(1, 2))] * rank,
        "dilations": [draw(st.integers(1, 2))] * rank,
        "in_order": order(ins),
        "out_order": order(outs),
    }


@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True)
@given(conv_cases())
def test_masked_and_grouped_are_the_same_function(case: dict) -> None:
    element, dtype, tolerance = DTYPES[case["dtype"]]
    rng = case["rng"]
    model = single_conv(
        rng, case["outs"], case["ins"], case["kernel"], case["existing"], case["bias"], element, dtype,
        strides=case["strides"], dilations=case["dilations"], pads=[1] * 2 * len(case["kernel"]),
    )  # fmt: skip
    before = model.SerializeToString(deterministic=True)
    plan = plan_of(planned("y", case["groups"], case["in_order"], case["out_order"]))
    x = rng.standard_normal((1, case["ins"], *[7] * len(case["kernel"]))).astype(dtype)
    masked, grouped = mask(model, match(model, plan)), group(model, match(model, plan))
    difference = compare(run(masked, x=x), run(grouped, x=x))
    assert not difference.inconclusive
    assert difference.max_rel < tolerance
    assert model.SerializeToString(deterministic=True) == before
    expected = case["outs"] * case["ins"] * math.prod(case["kernel"]) // case["groups"]
    conv = next(node for node in grouped.graph.node if node.op_type == "Conv")
    assert get_tensor(grouped, conv.input[1]).size == expected


@settings(max_examples=25, deadline=None, derandomize=True)
@given(conv_cases())
def test_a_forgotten_inverse_is_seen(case: dict) -> None:
    """The comparator has to reject the classic mistake: the output gathered by out_order, not by its inverse."""
    out_order = np.array(case["out_order"])
    assume(not np.array_equal(np.argsort(out_order), out_order))
    model = single_conv(
        case["rng"], case["outs"], case["ins"], case["kernel"], case["existing"], True, TensorProto.FLOAT, np.float32
    )
    plan = plan_of(planned("y", case["groups"], case["in_order"], case["out_order"]))
    wrong = group(model, match(model, plan))
    gathers = [node for node in wrong.graph.node if node.op_type == "Gather" and node.output[0] == "y"]
    assume(gathers)  # none is needed where every group has one output
    gathers[0].input[1] = "not_inverted"
    wrong.graph.initializer.append(numpy_helper.from_array(out_order.astype(np.int32), "not_inverted"))
    x = case["rng"].standard_normal((1, case["ins"], *[7] * len(case["kernel"]))).astype(np.float32)
    assert compare(run(mask(model, match(model, plan)), x=x), run(wrong, x=x)).max_rel > 1e-2


@pytest.mark.parametrize("dtype", [np.float64, ml_dtypes.bfloat16])
def test_types_that_onnx_runtime_has_no_conv_for_are_rewritten_exactly(dtype: type) -> None:
    element = {np.float64: TensorProto.DOUBLE, ml_dtypes.bfloat16: TensorProto.BFLOAT16}[dtype]
    rng = np.random.default_rng(0)
    model = single_conv(rng, 6, 4, (3, 3), 1, True, element, dtype)
    in_order, out_order = [3, 0, 2, 1], [5, 1, 0, 4, 2, 3]
    plan = plan_of(planned("y", 2, in_order, out_order))
    masked, grouped = mask(model, match(model, plan)), group(model, match(model, plan))
    onnx.checker.check_model(grouped, full_check=True)
    dense = np.zeros((6, 4, 3, 3), dtype)
    blocks = get_tensor(grouped, "w_g2")
    assert blocks.dtype == dtype
    for row, o in enumerate(out_order):
        for column in range(2):
            dense[o, in_order[row // 3 * 2 + column]] = blocks[row, column]
    assert np.array_equal(dense.astype(np.float64), get_tensor(masked, "w").astype(np.float64))
    assert np.array_equal(get_tensor(grouped, "b_ordered"), get_tensor(model, "b")[out_order])


def test_identity_gathers_are_not_written() -> None:
    def gathers(in_order: list[int], out_order: list[int]) -> int:
        model = single_conv(np.random.default_rng(0), 4, 4, (1,), 1, False, TensorProto.FLOAT, np.float32)
        grouped = group(model, match(model, plan_of(planned("y", 2, in_order, out_order))))
        return sum(node.op_type == "Gather" for node in grouped.graph.node)

    assert gathers([0, 1, 2, 3], [0, 1, 2, 3]) == 0
    assert gathers([1, 0, 2, 3], [0, 1, 3, 2]) == 0  # the same groups
    assert gathers([0, 2, 1, 3], [0, 1, 2, 3]) == 1
    assert gathers([0, 2, 1, 3], [0, 2, 1, 3]) == 2


def test_indices_are_int32_and_names_are_unique() -> None:
    model = single_conv(np.random.default_rng(0), 4, 4, (1,), 1, True, TensorProto.FLOAT, np.float32)
    grouped = group(model, match(model, plan_of(planned("y", 2, [0, 2, 1, 3], [3, 0, 1, 2]))))
    indices = [get_tensor(grouped, node.input[1]) for node in grouped.graph.node if node.op_type == "Gather"]
    assert [index.dtype for index in indices] == [np.int32] * 2
    names = [t.name for t in grouped.graph.initializer] + [o for node in grouped.graph.node for o in node.output]
    assert len(names) == len(set(names))
    assert [o.name for o in grouped.graph.output] == ["y"]


def two_convs_one_weight(second: str = "w2") -> onnx.ModelProto:
    model = conv_net()
    model.graph.node[4].input[1] = second
    model.graph.node[4].attribute.extend([helper.make_attribute("pads", [1, 1, 1, 1])])
    del model.graph.initializer[4]  # w3
    assert "w3" not in [t.name for t in model.graph.initializer]
    return model


def test_a_shared_weight_stays_shared_when_both_convs_are_grouped_alike() -> None:
    model = two_convs_one_weight()
    swap = [7, *range(1, 7), 0]
    plan = plan_of(planned("c2", 2, swap, swap), planned("c3", 2, swap, swap))
    masked, grouped = mask(model, match(model, plan)), group(model, match(model, plan))
    assert [node.input[1] for node in masked.graph.node if node.op_type == "Conv"] == ["w1", "w2", "w2"]
    assert [node.input[1] for node in grouped.graph.node if node.op_type == "Conv"] == ["w1", "w2_g2", "w2_g2"]
    assert "w2" not in [t.name for t in grouped.graph.initializer]


def test_a_shared_weight_is_copied_when_only_one_conv_is_grouped() -> None:
    model = two_convs_one_weight()
    swap = [7, *range(1, 7), 0]
    plan = plan_of(planned("c3", 2, swap, swap))
    masked, grouped = mask(model, match(model, plan)), group(model, match(model, plan))
    assert np.array_equal(get_tensor(masked, "w2"), get_tensor(model, "w2"))
    x = np.random.default_rng(0).standard_normal((2, 3, 8, 8)).astype(np.float32)
    assert compare(run(masked, image=x), run(grouped, image=x)).max_rel < 2e-6
    assert compare(run(masked, image=x), run(model, image=x)).max_rel > 1e-2


def test_applying_to_a_masked_model_drops_nothing() -> None:
    model = conv_net()
    plan = plan_of(planned("c2", 2, [7, *range(1, 7), 0], list(range(8))))
    assert dropped_share(model, match(model, plan)) > 0.1
    assert dropped_share(mask(model, match(model, plan)), match(model, plan)) == 0.0
    assert group(mask(model, match(model, plan)), match(model, plan)) == group(model, match(model, plan))


def test_a_plan_that_mixes_existing_groups_is_refused() -> None:
    model = single_conv(np.random.default_rng(0), 4, 4, (1,), 2, False, TensorProto.FLOAT, np.float32)
    with pytest.raises(PlanError, match="mixes channels of the 2 groups"):
        group(model, match(model, plan_of(planned("y", 4, [0, 2, 1, 3], [0, 1, 2, 3]))))


def test_the_blocks_are_the_diagonal_of_the_permuted_weight() -> None:
    weight = np.random.default_rng(0).standard_normal((4, 4, 1, 1))
    in_order, out_order = np.array([2, 0, 1, 3]), np.array([1, 3, 0, 2])
    permuted = weight[out_order][:, in_order]
    blocks = take_blocks("w", weight.shape, 1, 2, (in_order, out_order)).of(weight)
    assert np.array_equal(blocks, np.concatenate([permuted[:2, :2], permuted[2:, 2:]]))
