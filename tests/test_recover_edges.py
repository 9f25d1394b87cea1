"""Recovery on models and data that are unusual but legal: it fits what it can, leaves the rest, and says what is wrong."""

import numpy as np
import onnx
import pytest
from fitting import Normal, distance, grouped, outputs, plan_of, recover
from numpy.typing import ArrayLike
from tiny import conv_net, from_text, get_tensor

import onnx_gconv
from onnx_gconv.errors import DataError
from onnx_gconv.recover.fitting import FitOptions, masked_sites
from onnx_gconv.recover.normal import Sums, add_up
from onnx_gconv.recover.sensitivity import sensitivities
from onnx_gconv.rewrite.match import Matched
from onnx_gconv.solve.grouping import Grouping

IMAGES = np.random.default_rng(0).standard_normal((40, 4, 6, 6)).astype(np.float32)
ROWS = np.ascontiguousarray(IMAGES[:, :, 0, 0])
ROUNDING = 1e-4


def refitted(dense: onnx.ModelProto, **feeds: np.ndarray) -> onnx.ModelProto:
    """Return the model with nothing masked and all fitted anew: the same function, whatever is fitted to what."""
    model = recover(dense, plan_of(), [feeds]).model
    for expected, found in zip(outputs(dense, feeds), outputs(model, feeds), strict=True):
        assert distance(expected, found) < ROUNDING
    return model


@pytest.mark.parametrize("shape", [(), (1,), (3,), (1, 3), (1, 1), (40, 3), (40, 1)], ids=str)
@pytest.mark.parametrize("transposed", [0, 1])
def test_the_bias_of_a_gemm_may_have_any_shape_that_broadcasts(shape: tuple[int, ...], transposed: int, normal: Normal) -> None:
    weight = normal(3, 4) if transposed else normal(4, 3)
    dense = from_text(
        f"m (float[40,4] x) => (float[40,3] y) {{ y = Gemm <transB = {transposed}> (x, w, c) }}", w=weight, c=normal(*shape)
    )
    found = refitted(dense, x=ROWS)
    assert get_tensor(found, "c").shape == shape
    assert distance(get_tensor(dense, "w"), get_tensor(found, "w")) < ROUNDING


def test_a_bias_that_is_computed_from_the_input_is_left_to_be_computed(normal: Normal) -> None:
    gemm = "m (float[N,4] x) => (float[N,4] y) { c = Relu (x) y = Gemm (x, w, c) }"
    refitted(from_text(gemm, w=normal(4, 4)), x=ROWS)
    conv = "m (float[N,4,6,6] x) => (float[N,4,6,6] y) { c = ReduceMean <axes = [0, 2, 3], keepdims = 0> (x) y = Conv (x, w, c) }"
    refitted(from_text(conv, w=normal(4, 4, 1, 1)), x=IMAGES)


@pytest.mark.parametrize("operands", ["c, x", "x, c"])
@pytest.mark.parametrize("activation", ["Identity", "Relu"])
def test_a_pooled_branch_may_be_added_to_every_place(operands: str, activation: str, normal: Normal) -> None:
    text = f"""m (float[N,4,6,6] x) => (float[N,4,6,6] y)
        {{ p = GlobalAveragePool (x) c = Conv (p, w, b) s = Add ({operands}) y = {activation} (s) }}"""
    refitted(from_text(text, w=normal(4, 4, 1, 1), b=normal(4)), x=IMAGES)


@pytest.mark.parametrize("operands", ["c, p", "p, c"])
@pytest.mark.parametrize("activation", ["Identity", "Relu"])
def test_a_shortcut_may_be_smaller_than_what_it_is_added_to(operands: str, activation: str, normal: Normal) -> None:
    text = f"""m (float[N,4,6,6] x) => (float[N,4,6,6] y)
        {{ p = ReduceMean <axes = [0, 2, 3], keepdims = 1> (x) c = Conv (x, w, b) s = Add ({operands}) y = {activation} (s) }}"""
    refitted(from_text(text, w=normal(4, 4, 1, 1), b=normal(4)), x=IMAGES)


def test_a_pooled_branch_that_is_added_everywhere_mends_the_mean_of_what_it_is_added_to(normal: Normal) -> None:
    """c = Conv(pool) is added to d, which loses half of its weights: what c can mend of that is its mean over the places."""
    dense = from_text(
        "m (float[N,4,6,6] x) => (float[N,4,6,6] y)"
        " { d = Conv (x, w1, b1) p = GlobalAveragePool (x) c = Conv (p, w2, b2) y = Add (c, d) }",
        w1=normal(4, 4, 1, 1),
        b1=normal(4),
        w2=normal(4, 4, 1, 1),
        b2=normal(4),
    )
    found = recover(dense, plan_of(grouped("d", 4, 4)), [{"x": IMAGES}], options=FitOptions(damping=1e-8, is_validated=False)).model
    gap = np.subtract(*(outputs(model, {"x": IMAGES})[0].astype(np.float64) for model in (dense, found)))
    pooled = IMAGES.mean(axis=(2, 3), dtype=np.float64)
    # Least squares leaves an error that has nothing to do with what it could use: the pooled input, and a constant.
    np.testing.assert_allclose(gap.mean(axis=(2, 3)).T @ np.column_stack([pooled, np.ones(40)]), 0, atol=1e-3)
    assert np.abs(gap).max() > 0.1


@pytest.mark.parametrize(
    "body",
    [
        # The second Conv of a pair has one place, what it is added to many.
        "p = GlobalAveragePool (x) a = Conv (p, w1, b1) r = Relu (a) c = Conv (r, w2, b2) s = Add (c, x) y = Relu (s)",
        # What it is added to has one sample only, or one place.
        "p = ReduceMean <axes = [0], keepdims = 1> (x) a = Conv (x, w1, b1) c = Conv (a, w2, b2) s = Add (c, p) y = Relu (s)",
        "p = GlobalMaxPool (x) a = Conv (x, w1, b1) r = Relu (a) c = Conv (r, w2, b2) s = Add (p, c) y = Relu (s)",
        # What it is added to has more axes.
        "z = Unsqueeze (x, zero) a = Conv (x, w1, b1) r = Relu (a) c = Conv (r, w2, b2) s = Add (z, c) y = Relu (s)",
    ],
)
def test_two_convs_are_fitted_together_whatever_the_second_is_added_to(body: str) -> None:
    rng = np.random.default_rng(0)

    def normal(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape)

    tensors = {"w1": normal(4, 4, 1, 1), "b1": normal(4), "w2": normal(4, 4, 1, 1), "b2": normal(4)}
    used = tensors | ({"zero": np.array([0])} if "zero" in body else {})
    dense = from_text(f"m (float[N,4,6,6] x) => (float[N,C,H,W] y) {{ {body} }}", **used)
    dense.graph.output[0].type.tensor_type.ClearField("shape")
    refitted(dense, x=IMAGES)
    plan = plan_of(grouped("a", 4, 4))
    feeds = [{"x": part} for part in np.split(IMAGES, 4)]
    errors = []
    for has_chains in (False, True):
        found = recover(dense, plan, feeds, options=FitOptions(has_chains=has_chains)).model
        errors.append(np.mean([distance(outputs(dense, batch)[0], outputs(found, batch)[0]) for batch in feeds]))
    assert errors[1] < errors[0]


def test_a_gemm_may_be_added_to_something_of_a_higher_rank(normal: Normal) -> None:
    text = "m (float[N,4] x, float[M,N,4] z) => (float[M,N,4] y) { c = Gemm (x, w, b) y = Add (c, z) }"
    refitted(from_text(text, w=normal(4, 4), b=normal(4)), x=ROWS, z=normal(2, 40, 4).astype(np.float32))


@pytest.mark.parametrize("value", [0.3, 100.1, 1e4])
def test_a_layer_whose_input_never_varies_keeps_its_function(value: float, normal: Normal) -> None:
    text = "m (float[N,4,6,6] x) => (float[N,4,6,6] y) { z = Sub (x, x) c = Add (z, k) y = Conv (c, w, b) }"
    refitted(from_text(text, w=normal(4, 4, 1, 1), b=normal(4), k=np.full((1, 4, 1, 1), value)), x=IMAGES)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_samples_that_make_an_activation_infinite_are_refused_by_the_layers_name(value: float, normal: Normal) -> None:
    images = IMAGES.copy()
    images[3, 2, 1, 0] = value
    text = "m (float[N,4,6,6] x) => (float[N,4,6,6] y) { y = Conv (x, w, b) }"
    dense = from_text(text, w=normal(4, 4, 1, 1), b=normal(4))
    with pytest.raises(DataError, match="'y'"):
        recover(dense, plan_of(), [{"x": images}])
    halves = {("y", 2): Grouping(2, np.arange(4), np.arange(4), 0.5)}
    with pytest.raises(DataError, match="'y'"):
        sensitivities(dense, dense, halves, [{"x": images}], probes=1, options=FitOptions(), progress=lambda *_: None)


def test_sums_of_both_infinities_are_nan_without_a_warning() -> None:
    """Numbers too large to square are refused in one sentence, with no warning of NumPy's before it."""
    one, other = (Sums(1, *(np.full((1,) * rank, sign * np.inf) for rank in (2, 2, 3, 3, 2))) for sign in (1, -1))
    assert np.isnan(add_up([one, other]).uu).all()


def test_samples_too_large_to_square_are_refused(normal: Normal) -> None:
    dense = from_text("m (float[N,4,6,6] x) => (float[N,4,6,6] y) { y = Conv (x, w, b) }", w=normal(4, 4, 1, 1), b=normal(4))
    with pytest.raises(DataError, match="too large to square"):
        recover(dense, plan_of(), [{"x": 1e30 * IMAGES}])


def test_a_shared_weight_that_is_masked_in_two_ways_is_fitted_in_two_ways(normal: Normal) -> None:
    text = "m (float[N,4,6,6] x) => (float[N,4,6,6] y) { a = Conv (x, w, b) r = Relu (a) y = Conv (r, w, c) }"
    dense = from_text(text, w=normal(4, 4, 1, 1), b=normal(4), c=normal(4))
    plan = plan_of(grouped("y", 4, 4))
    found = recover(dense, plan, [{"x": IMAGES}])
    assert [layer.name for layer in found.layers] == ["a", "y"]
    assert found.layers[0].after < ROUNDING < found.layers[1].after < found.layers[1].before


def test_weights_that_are_shared_and_stay_so_are_left(normal: Normal) -> None:
    text = "m (float[N,4,6,6] x) => (float[N,4,6,6] y) { a = Conv (x, w, b) r = Relu (a) y = Conv (r, w, b) }"
    dense = from_text(text, w=normal(4, 4, 1, 1), b=normal(4))
    assert masked_sites(dense, Matched()) == []
    found = recover(dense, plan_of(), [{"x": IMAGES}])
    assert found.layers == ()
    assert found.model.SerializeToString() == dense.SerializeToString()


def test_models_before_ir_4_list_their_weights_as_inputs_and_keep_them_there(rng: np.random.Generator) -> None:
    dense = conv_net()
    dense.ir_version = 3
    for tensor in dense.graph.initializer:
        dense.graph.input.append(onnx.helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims))
    found = refitted(dense, image=rng.standard_normal((40, 3, 8, 8)).astype(np.float32))
    assert [value.name for value in found.graph.input] == [value.name for value in dense.graph.input]


def test_functions_of_the_model_itself_are_carried_along(normal: Normal) -> None:
    model: onnx.ModelProto = onnx.parser.parse_model(
        """<ir_version: 8, opset_import: ["" : 17, "own" : 1]>
        m (float[N,4,6,6] x) => (float[N,4,6,6] y) { a = Conv (x, w1, b1) r = own.Swish (a) y = Conv (r, w2, b2) }
        <domain: "own", opset_import: ["" : 17]> Swish (z) => (o) { s = Sigmoid (z) o = Mul (s, z) }"""
    )
    tensors: dict[str, ArrayLike] = {"w1": normal(4, 4, 1, 1), "b1": normal(4), "w2": normal(4, 4, 1, 1), "b2": normal(4)}
    for name, value in tensors.items():
        model.graph.initializer.append(onnx.numpy_helper.from_array(np.asarray(value, np.float32), name))
    refitted(model, x=IMAGES)


@pytest.mark.parametrize("size", [1e-9, 1e-21, 1e-23])
@pytest.mark.parametrize("channels", [4, 12])  # systems that are solved at once, and those that are factored in tiles
def test_a_signal_that_dies_away_is_no_failure(size: float, channels: int, normal: Normal) -> None:
    """Its squares underflow in float32, so that rounding decides whether second moments are definite."""
    text = """m (float[N,C,6,6] x) => (float[N,C,6,6] y)
        { a = Conv <pads = [1, 1, 1, 1]> (x, w, b) r = Relu (a) c = Conv <pads = [1, 1, 1, 1]> (r, v, b) s = Relu (c)
          y = Conv <pads = [1, 1, 1, 1]> (s, u, b) }"""
    weights = {name: normal(channels, channels, 3, 3) for name in "wvu"} | {"b": np.zeros(channels, np.float32)}
    dense = from_text(text.replace("C,6", f"{channels},6"), **weights)
    images = size * np.random.default_rng(1).standard_normal((30, channels, 6, 6)).astype(np.float32)
    found = onnx_gconv.compress(dense, max_macs=0.7, calib={"x": images}, width_step=1)
    assert all(np.isfinite(values).all() for values in outputs(found.model, {"x": images}))
