"""The comparator can reject, and says when it cannot tell."""

import numpy as np
import onnx
import pytest
from tiny import conv_net, get_tensor, set_tensor

from onnx_gconv.errors import ModelError, VerifyError
from onnx_gconv.verification import DIFFERENT, compare, default_tolerance, verify


def test_equal_arrays_agree_and_a_small_change_is_measured_against_the_largest_value() -> None:
    one = np.array([1.0, -200.0, 3.0], np.float32)
    assert compare(one, one.copy()).max_rel == 0
    other = one + np.array([0, 0, 0.5], np.float32)
    assert compare(one, other).max_abs == 0.5
    assert compare(one, other).max_rel == 0.5 / 200


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (np.zeros(2), np.zeros(3)),
        (np.array(["cat"], object), np.array(["dog"], object)),
        (np.array([1, 2]), np.array([1, 3])),
        (np.array([1.0, 1.0]), np.array([np.nan, 1.0])),
        ([{"cat": 0.5}], [{"dog": 0.5}]),
        ([np.ones(2)], [np.ones(2), np.ones(2)]),
        (np.ones(2, np.float32), np.ones(2, np.float64)),
    ],
    ids=["shape", "label", "index", "NaN", "map keys", "sequence length", "type"],
)
def test_what_differs_in_kind_is_different(one: object, other: object) -> None:
    assert compare(one, other) == DIFFERENT


@pytest.mark.parametrize(
    ("result", "why"),
    [
        (np.zeros(3), "is all zero"),
        (np.array([np.nan]), "holds NaN or infinity"),
        (np.zeros(0), "is empty"),
        (np.array([1, 2]), "holds no floating-point numbers"),
        (np.array(["cat"], object), "holds no floating-point numbers"),
    ],
)
def test_what_cannot_tell_is_inconclusive(result: np.ndarray, why: str) -> None:
    assert compare(result, result.copy()).inconclusive == why


def test_a_map_is_compared_as_one_output() -> None:
    one, other = [{"cat": 0.9, "dog": 1e-7}], [{"cat": 0.9, "dog": 2e-7}]
    assert compare(one, other).max_rel == pytest.approx(1e-7 / 0.9)


def test_one_weight_off_by_a_thousandth_fails() -> None:
    model = conv_net()
    weight = get_tensor(model, "w3")
    weight[0, 0] += 1e-3 * np.abs(weight).max()
    other = set_tensor(conv_net(), "w3", weight)
    assert verify(model, conv_net(), tolerance=1e-6, seed=0).passed
    assert not verify(model, other, tolerance=1e-6, seed=0).passed


def test_models_with_other_outputs_are_not_compared() -> None:
    other = conv_net()
    other.graph.output[0].name = other.graph.node[-1].output[0] = "logits"
    with pytest.raises(VerifyError, match="different outputs: scores and logits"):
        verify(conv_net(), other, tolerance=1e-6, seed=0)


def test_an_output_that_is_all_zero_is_refused_and_inner_tensors_decide() -> None:
    def silenced() -> onnx.ModelProto:
        return set_tensor(set_tensor(conv_net(), "w4", np.zeros((4, 8))), "b4", np.zeros(4))

    with pytest.raises(VerifyError, match="'scores' is all zero"):
        verify(silenced(), silenced(), tolerance=1e-6, seed=0)
    assert verify(silenced(), silenced(), tolerance=1e-6, seed=0, inner={"c2": None}).passed
    spoiled = silenced()
    set_tensor(spoiled, "w2", get_tensor(spoiled, "w2")[::-1])
    assert not verify(silenced(), spoiled, tolerance=1e-6, seed=0, inner={"c2": None, "c3": None}).passed


def test_an_output_that_agrees_to_the_last_bit_does_not_hide_a_difference_inside() -> None:
    spoiled = conv_net()
    set_tensor(spoiled, "w2", get_tensor(spoiled, "w2")[::-1])
    pair = [set_tensor(set_tensor(m, "w4", np.zeros((4, 8))), "b4", np.ones(4)) for m in (conv_net(), spoiled)]
    assert verify(*pair, tolerance=1e-6, seed=0).passed
    assert not verify(*pair, tolerance=1e-6, seed=0, inner={"c2": None}).passed


def scores(*, least: float, weight: np.ndarray) -> onnx.ModelProto:
    """Return a map of scores that are all below 1e-6, as a detector's are on noise, though what goes into them goes up to 1000."""
    model = onnx.parser.parse_model("""<ir_version: 8, opset_import: ["" : 13]>
    detector (float[1,8,6,6] image) => (float[1,6,6,4] scores) {
        mapped = Conv(image, weight)
        positive = Relu(mapped)
        far = Mul(positive, slope)
        logits = Sub(far, least)
        map = Sigmoid(logits)
        scores = Transpose<perm=[0, 2, 3, 1]>(map)
    }""")
    values = {"weight": weight, "slope": np.array(-500.0), "least": np.array(least)}
    tensors = (onnx.numpy_helper.from_array(np.asarray(value, np.float32), name) for name, value in values.items())
    model.graph.initializer.extend(tensors)
    return model


def test_scores_that_collapse_are_compared_before_they_do() -> None:
    weight = np.random.default_rng(0).standard_normal((4, 8, 1, 1))
    # 1e-2 off at most 1,000 or so is rounding; of a Sigmoid of -14 it is a hundredth.
    model, rounded = scores(least=14.0, weight=weight), scores(least=13.99, weight=weight)
    found = verify(model, rounded, tolerance=1e-4, seed=0, inner={})
    assert found.passed
    assert 0 < found.max_rel_error < 1e-4
    assert not verify(model, rounded, tolerance=1e-4, seed=0).passed  # asked of the outputs themselves, they differ
    for wrong in (weight[:, ::-1], weight[[1, 0, 2, 3]], weight * 1.001):
        assert not verify(model, scores(least=14.0, weight=wrong), tolerance=1e-4, seed=0, inner={}).passed


def test_scores_of_other_nodes_behind_the_same_numbers_are_other_scores() -> None:
    weight = np.random.default_rng(0).standard_normal((4, 8, 1, 1))
    other = scores(least=14.0, weight=weight)
    other.graph.node[-1].attribute[0].ints[:] = [0, 3, 2, 1]
    assert not verify(scores(least=14.0, weight=weight), other, tolerance=1e-4, seed=0, inner={}).passed


def test_dynamic_axes_get_a_size_that_the_model_runs_on() -> None:
    model = conv_net(size="S")
    assert verify(model, conv_net(size="S"), tolerance=1e-6, seed=0).passed


def test_a_model_that_onnx_runtime_cannot_load_is_refused_with_the_reason() -> None:
    model = conv_net()
    model.graph.node[1].op_type = "Reluu"
    with pytest.raises(ModelError, match=r"cannot load the model: .*Reluu"):
        verify(model, model, tolerance=1e-6, seed=0)


def test_the_tolerance_follows_the_least_precise_type() -> None:
    assert default_tolerance(conv_net()) == 1e-4
    half = conv_net()
    half.graph.output[0].type.tensor_type.elem_type = onnx.TensorProto.FLOAT16
    assert default_tolerance(half) == 2e-2
