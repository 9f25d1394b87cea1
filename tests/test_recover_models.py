"""FittedModel on models of every kind: precision, where weights are kept, rank, batch, number of inputs."""

import numpy as np
import onnx
import pytest
from fitting import RESIDUAL_FEEDS, RESIDUAL_PLAN, Normal, batches, distance, grouped, outputs, plan_of, recover
from tiny import conv_net, from_text, get_tensor, residual_net

from onnx_gconv.recover.fitting import FitOptions
from onnx_gconv.rewrite.mask import mask
from onnx_gconv.rewrite.match import match

# Products of moments are float32, so that weights come out with some five digits; masking alone moves outputs by half.
ROUNDING = 1e-4


def improvement(
    dense: onnx.ModelProto, layers: list[tuple[str, int, int]], feeds: list[dict[str, np.ndarray]]
) -> tuple[float, float]:
    """Return the distance of the first output to the dense model's, masked and recovered."""
    plan = plan_of(*(grouped(*layer) for layer in layers))
    found = recover(dense, plan, feeds).model
    onnx.checker.check_model(found)
    results = [np.concatenate([outputs(m, batch)[0] for batch in feeds]) for m in (dense, mask(dense, match(dense, plan)), found)]
    return distance(results[0], results[1]), distance(results[0], results[2])


def test_the_whole_net_with_its_gemm_comes_closer() -> None:
    masked, fitted = improvement(conv_net(), [("c2", 8, 8), ("c3", 8, 8)], batches(40, 3, 8, 8))
    assert fitted < 0.5 * masked


def test_half_precision_weights_stay_half_precision(normal: Normal) -> None:
    dense = from_text(
        "m (float16[N,4,6,6] image) => (float16[N,8,6,6] y) { a = Conv (image, w1, b1) r = Relu (a) y = Conv (r, w2, b2) }",
        w1=normal(8, 4, 1, 1).astype(np.float16),
        b1=normal(8).astype(np.float16),
        w2=normal(8, 8, 1, 1).astype(np.float16),
        b2=normal(8).astype(np.float16),
    )
    feeds = [{"image": batch["image"].astype(np.float16)} for batch in RESIDUAL_FEEDS]
    masked, fitted = improvement(dense, [("y", 8, 8)], feeds)
    assert fitted < 0.8 * masked
    found = recover(dense, plan_of(grouped("y", 8, 8)), feeds).model
    assert {get_tensor(found, name).dtype for name in ("w1", "b1", "w2", "b2")} == {np.dtype(np.float16)}


def test_weights_in_constant_nodes_are_fitted_too() -> None:
    dense = residual_net()
    plan = plan_of(grouped("first", 8, 8))
    expected = recover(dense, plan, RESIDUAL_FEEDS).model
    moved = onnx.ModelProto.FromString(dense.SerializeToString())
    constants = [onnx.helper.make_node("Constant", [], [tensor.name], value=tensor) for tensor in moved.graph.initializer]
    nodes = [*constants, *moved.graph.node]
    del moved.graph.initializer[:], moved.graph.node[:]
    moved.graph.node.extend(nodes)
    found = recover(moved, plan, RESIDUAL_FEEDS).model
    assert distance(outputs(expected, RESIDUAL_FEEDS[0])[0], outputs(found, RESIDUAL_FEEDS[0])[0]) < 1e-6


def test_a_fixed_batch_gives_what_a_dynamic_one_gives() -> None:
    fixed = residual_net()
    fixed.graph.input[0].type.tensor_type.shape.dim[0].dim_value = 40
    models = [recover(dense, RESIDUAL_PLAN, RESIDUAL_FEEDS).model for dense in (fixed, residual_net())]
    for number in range(3):
        np.testing.assert_array_equal(*(get_tensor(model, f"w{number}") for model in models))


@pytest.mark.parametrize("rank", [1, 3])
def test_convs_of_other_ranks_are_fitted(rank: int, normal: Normal) -> None:
    axes, pads = ",".join("5" * rank), ",".join("1" * 2 * rank)
    dense = from_text(
        f"m (float[N,4,{axes}] image) => (float[N,8,{axes}] y) {{ a = Conv <pads = [{pads}]> (image, w1, b1) r = Relu (a)"
        f" y = Conv <pads = [{pads}]> (r, w2, b2) }}",
        w1=normal(8, 4, *[3] * rank),
        b1=normal(8),
        w2=normal(8, 8, *[3] * rank),
        b2=normal(8),
    )
    masked, fitted = improvement(dense, [("a", 8, 4), ("y", 8, 8)], batches(40, 4, *[5] * rank))
    assert fitted < 0.9 * masked


def test_two_inputs_are_both_carried_along(normal: Normal) -> None:
    """The second input is a multiple of the first, so that groups which see one of them only can do without the other."""
    dense = from_text(
        "m (float[N,4,6,6] image, float[N,4,6,6] other) => (float[N,8,6,6] y)"
        " { both = Concat <axis = 1> (other, image) y = Conv (both, w, b) }",
        w=normal(8, 8, 1, 1),
        b=normal(8),
    )
    feeds = [batch | {"other": 3 * batch["image"]} for batch in RESIDUAL_FEEDS]
    plan = plan_of(grouped("y", 8, 8))
    found = recover(dense, plan, feeds, options=FitOptions(damping=1e-8, is_validated=False)).model
    (expected,), (recovered,) = (outputs(model, feeds[0]) for model in (dense, found))
    assert distance(expected, recovered) < ROUNDING
