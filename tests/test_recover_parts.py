"""The parts of recovery that know no graph: patches, normal equations, the store, the divergence of outputs."""

import math
import os
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import scipy.special
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from onnx_gconv.errors import DataError
from onnx_gconv.model.patches import choose, patches, window_of
from onnx_gconv.recover.divergence import divergence, score_error
from onnx_gconv.recover.normal import Coefficients, Rows, Sums, add_up, damping_between, join, residual, solve, sums, variance
from onnx_gconv.recover.store import ActivationStore
from onnx_gconv.search.table import Option, Row, Table

TINY_DAMPING = 1e-11  # next to none: what the data decide, they decide alone


# --- patches --------------------------------------------------------------------------------------------------------------


def convolve(node: onnx.NodeProto, images: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """Return what ONNX Runtime's Conv gives."""
    dims = onnx.helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, images.shape)
    out = onnx.helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, None)
    graph = onnx.helper.make_graph([node], "one", [dims], [out], [onnx.numpy_helper.from_array(weight, "w")])
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 17)], ir_version=8)
    options = ort.SessionOptions()
    options.log_severity_level, options.intra_op_num_threads = 4, 1
    return ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"]).run(None, {"x": images})[0]


@st.composite
def conv_attributes(draw: st.DrawFn) -> tuple[tuple[int, ...], dict[str, Any], tuple[int, ...]]:
    """Draw a kernel, the attributes of a Conv, and a spatial size that the kernel fits into."""
    rank = draw(st.integers(1, 3))

    def each(low: int, high: int) -> tuple[int, ...]:
        return tuple(draw(st.lists(st.integers(low, high), min_size=rank, max_size=rank)))

    kernel, dilations, size = each(1, 3), each(1, 2), each(5, 7)
    attributes: dict[str, Any] = {"dilations": dilations, "strides": each(1, 3)}
    attributes = {name: value for name, value in attributes.items() if draw(st.booleans()) or set(value) != {1}}
    mode = draw(st.sampled_from([None, "NOTSET", "VALID", "SAME_UPPER", "SAME_LOWER"]))
    if mode is not None:
        attributes["auto_pad"] = mode
    if mode in (None, "NOTSET") and draw(st.booleans()):
        attributes["pads"] = (*each(0, 2), *each(0, 2))
    return kernel, attributes, size


@settings(deadline=None, max_examples=150, derandomize=True)
@given(conv_attributes())
def test_patches_times_weight_is_what_a_conv_gives(drawn: tuple[tuple[int, ...], dict[str, Any], tuple[int, ...]]) -> None:
    kernel, attributes, size = drawn
    rng = np.random.default_rng(0)
    # Whole numbers: every sum is exact in float32, so that equal means equal.
    images = rng.integers(-4, 5, (2, 3, *size)).astype(np.float32)
    weight = rng.integers(-4, 5, (4, 3, *kernel)).astype(np.float32)
    node = onnx.helper.make_node("Conv", ["x", "w"], ["y"], kernel_shape=kernel, **attributes)
    try:
        expected = convolve(node, images, weight)
    except Exception as error:
        assume("Dilation not supported for AutoPadType" not in str(error))
        raise
    seen = patches(images, window_of(node, kernel, size))
    found = np.tensordot(seen, weight, axes=(range(-1 - len(kernel), 0), range(1, 2 + len(kernel))))
    np.testing.assert_array_equal(np.moveaxis(found, -1, 1), expected)


@pytest.mark.parametrize(
    ("mode", "length", "kernel", "stride", "begin", "end"),
    [
        ("SAME_UPPER", 6, 3, 2, 0, 1),  # 3 outputs see 2 * 2 + 3 = 7 inputs, one more than there are
        ("SAME_LOWER", 6, 3, 2, 1, 0),
        ("SAME_UPPER", 5, 4, 1, 1, 2),
        ("SAME_LOWER", 5, 4, 1, 2, 1),
        ("SAME_UPPER", 5, 1, 3, 0, 0),
        ("VALID", 5, 3, 1, 0, 0),
    ],
)
def test_automatic_padding_is_as_the_standard_says(mode: str, length: int, kernel: int, stride: int, begin: int, end: int) -> None:
    node = onnx.helper.make_node("Conv", ["x", "w"], ["y"], auto_pad=mode, strides=[stride])
    window = window_of(node, (kernel,), (length,))
    assert (window.begins, window.ends) == ((begin,), (end,))


def test_positions_are_drawn_without_replacement_and_all_are_taken_where_they_are_few() -> None:
    assert choose((3, 4), 12, np.random.default_rng(0)) is None
    samples, places = choose((3, 4), 11, np.random.default_rng(0)) or ((), ())
    drawn = set(zip(samples.tolist(), places.tolist(), strict=True))
    assert len(drawn) == 11
    assert drawn < {(sample, place) for sample in range(3) for place in range(4)}


# --- normal equations -----------------------------------------------------------------------------------------------------


def rows(
    *, blocks: int = 3, positions: int = 400, inputs: int = 6, outputs: int = 4, seed: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    """Return inputs off centre, and targets that are an affine function of them but for noise."""
    rng = np.random.default_rng(seed)
    u = rng.standard_normal((blocks, positions, inputs)) + rng.standard_normal((blocks, 1, inputs))
    t = u @ rng.standard_normal((blocks, inputs, outputs)) + rng.standard_normal((blocks, 1, outputs))
    t += rng.standard_normal(t.shape) / 2
    return u.astype(np.float32), t.astype(np.float32)


def moments(u: np.ndarray, t: np.ndarray) -> Sums:
    return sums(Rows(u, t, None))


def no_prior(u: np.ndarray, t: np.ndarray) -> Coefficients:
    return Coefficients(np.zeros((len(u), u.shape[2], t.shape[2])), np.zeros((len(u), t.shape[2])))


def lstsq(u: np.ndarray, t: np.ndarray, *, has_intercept: bool) -> tuple[np.ndarray, np.ndarray]:
    """Return weights and intercepts by NumPy's least squares, block by block, in float64."""
    found = []
    for inputs, targets in zip(u.astype(np.float64), t.astype(np.float64), strict=True):
        columns = np.column_stack([inputs, np.ones(len(inputs))]) if has_intercept else inputs
        found.append(np.linalg.lstsq(columns, targets)[0])
    size = u.shape[2]
    return np.stack([w[:size] for w in found]), np.stack([w[size:].sum(axis=0) for w in found])


@pytest.mark.parametrize("has_intercept", [True, False])
@pytest.mark.parametrize("blocks", [1, 3])
def test_the_solution_is_that_of_least_squares(*, has_intercept: bool, blocks: int) -> None:
    u, t = rows(blocks=blocks)
    weight, intercept = lstsq(u, t, has_intercept=has_intercept)
    found = solve(moments(u, t), no_prior(u, t), damping=TINY_DAMPING, has_intercept=has_intercept)
    # Moments are summed in float32 products of 400 positions: 400 * 6e-8.
    np.testing.assert_allclose(found.weight, weight, atol=3e-5)
    np.testing.assert_allclose(found.intercept, intercept, atol=3e-5)


@pytest.mark.parametrize("has_intercept", [True, False])
def test_damping_pulls_towards_the_prior_as_rows_added_to_least_squares_would(*, has_intercept: bool) -> None:
    u, t = rows(blocks=1)
    prior = np.random.default_rng(1).standard_normal((1, 6, 4))
    inputs, targets = u[0].astype(np.float64), t[0].astype(np.float64)
    means = (inputs.mean(axis=0), targets.mean(axis=0)) if has_intercept else (np.zeros(6), np.zeros(4))
    root = math.sqrt(0.1 * np.square(inputs - means[0]).sum() / 6)
    pulled = np.vstack([inputs - means[0], root * np.eye(6)]), np.vstack([targets - means[1], root * prior[0]])
    weight = np.linalg.lstsq(*pulled)[0]
    found = solve(moments(u, t), Coefficients(prior, np.zeros((1, 4))), damping=0.1, has_intercept=has_intercept)
    np.testing.assert_allclose(found.weight[0], weight, atol=3e-5)
    np.testing.assert_allclose(found.intercept[0], means[1] - means[0] @ weight, atol=3e-5)


@pytest.mark.parametrize("has_intercept", [True, False])
def test_inputs_that_are_always_zero_keep_their_weights(*, has_intercept: bool) -> None:
    u, t = rows()
    u[:, :, 2] = 0
    prior = Coefficients(np.random.default_rng(1).standard_normal((3, 6, 4)), np.zeros((3, 4)))
    found = solve(moments(u, t), prior, damping=1e-3, has_intercept=has_intercept)
    np.testing.assert_allclose(found.weight[:, 2], prior.weight[:, 2], atol=1e-12)
    assert np.abs(found.weight[:, 3] - prior.weight[:, 3]).min() > 1e-3


def test_where_nothing_ever_comes_in_all_weights_stay_and_the_intercept_is_the_mean() -> None:
    u, t = rows()
    prior = Coefficients(np.random.default_rng(1).standard_normal((3, 6, 4)), np.zeros((3, 4)))
    found = solve(moments(np.zeros_like(u), t), prior, damping=1e-3, has_intercept=True)
    np.testing.assert_array_equal(found.weight, prior.weight)
    np.testing.assert_allclose(found.intercept, t.mean(axis=1, dtype=np.float64), atol=1e-12)


@pytest.mark.parametrize("constant", [0.3, 100.1, 1e4])
def test_inputs_that_never_vary_keep_their_weights_and_the_intercept_takes_the_rest(constant: float) -> None:
    u, t = rows()
    u[:] = constant
    prior = Coefficients(np.random.default_rng(1).standard_normal((3, 6, 4)), np.zeros((3, 4)))
    found = solve(moments(u, t), prior, damping=1e-3, has_intercept=True)
    given = u[:, 0].astype(np.float64)
    np.testing.assert_allclose(found.weight, prior.weight, atol=1e-4)
    predicted = np.einsum("bi,bio->bo", given, found.weight) + found.intercept
    np.testing.assert_allclose(predicted, t.mean(axis=1, dtype=np.float64), atol=1e-9)


@pytest.mark.parametrize("offset", [100, 1000])
def test_inputs_far_off_centre_are_fitted_as_well_as_centred_ones(offset: float) -> None:
    u, t = rows()
    weight, _ = lstsq(u, t, has_intercept=True)
    found = solve(moments(u + np.float32(offset), t), no_prior(u, t), damping=TINY_DAMPING, has_intercept=True)
    # The inputs themselves are rounded to 6e-8 of the offset: 6e-5 at 1000, against a spread of 1.
    np.testing.assert_allclose(found.weight, weight, atol=1e-3)


def test_the_residual_and_the_variance_are_what_the_rows_give() -> None:
    u, t = rows()
    rng = np.random.default_rng(1)
    at = Coefficients(rng.standard_normal((3, 6, 4)), rng.standard_normal((3, 4)))
    errors = t.astype(np.float64) - u.astype(np.float64) @ at.weight - at.intercept[:, None]
    np.testing.assert_allclose(residual(moments(u, t), at), np.square(errors).sum(axis=1), rtol=1e-4)
    np.testing.assert_allclose(variance(moments(u, t)) / 400, t.astype(np.float64).var(axis=1), rtol=1e-4)


def test_moments_added_up_in_parts_are_those_of_all_rows_at_once() -> None:
    u, t = rows(positions=401)
    parts = [Rows(u[:, start : start + 100], t[:, start : start + 100], None) for start in range(0, 401, 100)]
    whole, together = moments(u, t), sums(join(parts))
    apart = add_up(map(sums, parts))
    assert (whole.count, together.count, apart.count) == (401, 401, 401)
    for name in ("u", "t", "uu", "ut", "tt"):
        np.testing.assert_array_equal(getattr(together, name), getattr(whole, name))
        np.testing.assert_allclose(getattr(apart, name), getattr(whole, name), rtol=1e-5, atol=1e-4)


# --- the store ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the only folder for temporary files."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path


def files_in(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


def test_a_store_writes_what_does_not_fit_into_its_memory_and_gives_all_back(temporary: Path) -> None:
    rng = np.random.default_rng(0)
    arrays = {("a", 0): rng.standard_normal(10), ("a", 1): rng.standard_normal((2, 5)).astype(np.float16)}
    arrays |= {("b", 0): rng.integers(0, 9, 50), ("b", 1): rng.integers(0, 2, 7).astype(bool)}
    with ActivationStore(memory_bytes=100) as store:
        for (name, batch), value in arrays.items():
            store.put(name, batch, value)
        # 80 bytes, then 20, then nothing more fits: 400 and 7 are over the limit.
        assert len(files_in(temporary)) == 2
        assert store.names() == {"a", "b"}
        for (name, batch), value in arrays.items():
            np.testing.assert_array_equal(store.get(name, batch), value)
            assert store.get(name, batch).dtype == value.dtype
    assert list(temporary.iterdir()) == []


def test_what_is_dropped_frees_memory_and_disk(temporary: Path) -> None:
    with ActivationStore(memory_bytes=100) as store:
        store.put("a", 0, np.zeros(10))
        store.put("b", 0, np.zeros(10))
        assert len(files_in(temporary)) == 1
        store.drop("a")
        store.drop("b")
        assert files_in(temporary) == []
        assert (store.has("a", 0), store.has("b", 0), store.names()) == (False, False, set())
        store.put("c", 0, np.ones(12))  # 96 bytes: there is room only if the 80 of a came back
        assert files_in(temporary) == []
        assert store.has("c", 0)


def test_the_files_of_a_store_are_gone_after_a_failure(temporary: Path) -> None:
    def interrupted() -> None:
        with ActivationStore(memory_bytes=0) as store:
            store.put("a", 0, np.zeros(10))
            assert len(files_in(temporary)) == 1
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert list(temporary.iterdir()) == []


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="the system has no /dev/full")
def test_a_full_disk_is_an_error_with_a_way_out(temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save = np.save

    def save_to_a_full_disk(path: Path, value: np.ndarray, **flags: Any) -> None:
        with open("/dev/full", "wb", buffering=0) as file:
            save(file, value, **flags)

    monkeypatch.setattr(np, "save", save_to_a_full_disk)
    with ActivationStore(memory_bytes=0) as store, pytest.raises(DataError, match="No space left on device") as failure:
        store.put("a", 0, np.zeros(10))
    assert "TMPDIR" in failure.value.hint


# --- divergence -----------------------------------------------------------------------------------------------------------

P, Q = np.array([[0.5, 0.5], [0.9, 0.1]]), np.array([[0.25, 0.75], [0.9, 0.1]])
KL = (0.5 * math.log(2) + 0.5 * math.log(2 / 3)) / 2  # of the first row; the second is equal


def test_of_probabilities_it_is_the_mean_kullback_leibler_divergence() -> None:
    assert divergence({"p": P}, {"p": Q}) == pytest.approx(KL, rel=1e-9)
    assert divergence({"p": P}, {"p": P}) == 0.0


def test_of_logits_it_is_that_of_their_softmax_whatever_is_added_to_a_row() -> None:
    shifts = np.array([[3.0], [-50.0]])
    assert divergence({"y": np.log(P) + shifts}, {"y": np.log(Q) - shifts}) == pytest.approx(KL, rel=1e-9)
    maps = {"y": np.log(P)[:, :, None, None]}
    assert divergence(maps, {"y": np.log(Q)[:, :, None, None]}) == pytest.approx(KL, rel=1e-9)


def test_a_temperature_divides_the_scores_and_leaves_other_outputs_alone() -> None:
    hot, cold = {"y": np.log(P)}, {"y": np.log(Q)}
    assert divergence(hot, cold, temperature=4.0) == pytest.approx(divergence({"y": np.log(P) / 4}, {"y": np.log(Q) / 4}), rel=1e-9)
    assert divergence({"y": P}, {"y": Q}, temperature=4.0) == pytest.approx(divergence(hot, cold, temperature=4.0), rel=1e-9)
    boxes = np.array([[[3.0, 4.0]]])
    assert divergence({"y": boxes}, {"y": boxes + np.array([0.0, 1.0])}, temperature=4.0) == pytest.approx(1 / 25)


def test_the_error_of_scores_is_relative_and_leaves_out_what_is_the_same_for_all_classes() -> None:
    scores, others = np.array([[3.0, -3.0], [1.0, -1.0]]), np.array([[2.0, -2.0], [1.0, -1.0]])
    shifts = np.array([[7.0], [-1.0]])
    assert score_error({"y": scores + shifts}, {"y": others - shifts}) == pytest.approx(2 / 20)
    probabilities = [scipy.special.softmax(each, axis=1) for each in (scores, others)]
    assert score_error({"y": probabilities[0]}, {"y": probabilities[1]}) == pytest.approx(2 / 20)
    boxes = np.array([[[3.0, 4.0]]])
    assert score_error({"y": boxes}, {"y": boxes + np.array([0.0, 1.0])}) == pytest.approx(1 / 25)


def test_of_other_outputs_it_is_the_relative_squared_error() -> None:
    boxes = np.array([[[3.0, 4.0]]])
    assert divergence({"y": boxes}, {"y": boxes + np.array([0.0, 1.0])}) == pytest.approx(1 / 25)
    single = np.array([[3.0], [4.0]])  # one number a sample is no choice of classes
    assert divergence({"y": single}, {"y": single + 1}) == pytest.approx(2 / 25)


def test_of_several_outputs_it_is_the_mean_of_those_that_tell_something() -> None:
    boxes, count = np.array([[[3.0, 4.0]]]), np.array([7])
    reference = {"p": P, "boxes": boxes, "count": count, "kept": boxes, "list": [boxes], "zero": boxes * 0}
    found = {"p": Q, "boxes": boxes * 0, "count": count + 1, "kept": boxes[:, :0], "list": [boxes], "zero": boxes}
    assert divergence(reference, found) == pytest.approx((KL + 1) / 2)
    assert math.isnan(divergence({"count": count}, {"count": count}))


@pytest.mark.parametrize("broken", [np.nan, np.inf])
def test_an_output_that_is_not_finite_is_infinitely_far(broken: float) -> None:
    assert divergence({"y": P}, {"y": np.where(P == 0.1, broken, P)}) == math.inf


def test_halves_are_compared_in_double_precision() -> None:
    logits = np.array([[60000.0, -60000.0]], np.float16)
    assert divergence({"y": logits}, {"y": -logits}) == pytest.approx(2 * float(logits[0, 0]))


# --- prices ---------------------------------------------------------------------------------------------------------------


def table(*costs: tuple[float, ...]) -> Table:
    """Return rows a, b, ... with these costs for 2, 4, ... groups."""
    options = [tuple(Option(2**i, cost, 0, 0) for i, cost in enumerate((0.0, *row))) for row in costs]
    return Table(tuple(Row((name,), row) for name, row in zip("abc", options, strict=False)), 0, 0)


def prices(found: Table) -> list[list[float]]:
    return [[option.cost for option in row.options] for row in found.rows]


def test_measured_costs_replace_the_others_and_what_is_not_measured_is_brought_to_their_scale() -> None:
    measured = {("a", 2): 10.0, ("a", 4): 60.0, ("c", 2): 5.0}
    # Ratios 10, 30 and 5: the median is 10.
    assert prices(table((1.0, 2.0), (3.0,), (1.0,)).priced(measured)) == [[0.0, 10.0, 60.0], [0.0, 30.0], [0.0, 5.0]]


def test_a_cost_that_is_not_finite_counts_as_not_measured() -> None:
    measured = {("a", 2): 10.0, ("a", 4): math.inf, ("b", 2): math.nan}
    assert prices(table((1.0, 2.0), (3.0,)).priced(measured)) == [[0.0, 10.0, 20.0], [0.0, 30.0]]


def test_without_measurements_the_table_is_as_it_was() -> None:
    unknown = table((1.0, 2.0), (3.0,))
    assert unknown.priced({}) == unknown


def test_convs_that_share_a_weight_cost_what_all_of_them_cost() -> None:
    shared = Table((Row(("a", "b"), (Option(1, 0.0, 0, 0), Option(2, 1.0, 0, 0))),), 0, 0)
    assert prices(shared.priced({("a", 2): 2.0, ("b", 2): 3.0})) == [[0.0, 5.0]]
    assert prices(shared.priced({("a", 2): 2.0})) == [[0.0, 1.0]]


def test_the_damping_that_halves_like_is_small_with_much_data_and_large_with_little() -> None:
    rng = np.random.default_rng(0)
    truth = rng.standard_normal((1, 20, 3))
    prior = Coefficients(np.zeros((1, 20, 3)), np.zeros((1, 3)))

    def half(positions: int) -> Sums:
        u = rng.standard_normal((1, positions, 20))
        t = u @ truth + 3 * rng.standard_normal((1, positions, 3))
        return sums(Rows(u.astype(np.float32), t.astype(np.float32), None))

    much = damping_between((half(5000), half(5000)), prior, least=1e-3, has_intercept=True)
    little = damping_between((half(15), half(15)), prior, least=1e-3, has_intercept=True)
    assert much <= 1e-2 < little
