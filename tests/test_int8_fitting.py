"""int8: channels are evened out without changing the function, and weights are rounded so that their errors cancel."""

import itertools

import numpy as np
import onnx
import pytest
from onnx import numpy_helper
from tiny import conv_net, from_text, residual_net

from onnx_gconv.deploy import rounding
from onnx_gconv.deploy.equalising import equalised, find_streams
from onnx_gconv.deploy.quantising import QuantisedFor, quantise
from onnx_gconv.deploy.rounding import round_in_turn
from onnx_gconv.runtime import Feeds, run, session

Tensors = dict[str, np.ndarray]


def tensors(model: onnx.ModelProto) -> Tensors:
    return {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}


def images(channels: int, *, seed: int, count: int = 32) -> list[Feeds]:
    rng = np.random.default_rng(seed)
    mixed = rng.standard_normal((channels, channels))  # channels that have much in common
    return [
        {"image": np.einsum("oc,nchw->nohw", mixed, rng.standard_normal((8, channels, 6, 6))).astype(np.float32)}
        for _ in range(count // 8)
    ]


def first_output(model: onnx.ModelProto, feeds: list[Feeds]) -> np.ndarray:
    active, name = session(model), model.graph.output[0].name
    return np.concatenate([np.asarray(run(active, batch)[name]) for batch in feeds])


def error(q: np.ndarray, weight: np.ndarray, gram: np.ndarray) -> np.ndarray:
    return np.einsum("bio,bij,bjo->bo", weight - q, gram, weight - q)


def problem(seed: int, blocks: int, inputs: int, outputs: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    rows = rng.standard_normal((blocks, 3 * inputs, inputs)) @ rng.standard_normal((blocks, inputs, inputs))
    return 3 * rng.standard_normal((blocks, inputs, outputs)), rows.transpose(0, 2, 1) @ rows / (3 * inputs)


def test_rounding_in_turn_is_never_worse_than_the_nearest_and_much_better_on_the_whole() -> None:
    found, nearest = [], []
    for seed in range(20):
        weight, gram = problem(seed, 2, 80, 5)  # more inputs than are taken at once
        q = round_in_turn(weight, gram, 127)
        assert (q == np.rint(q)).all()
        found.append(error(q, weight, gram))
        nearest.append(error(np.rint(weight), weight, gram))
    assert (np.array(found) <= np.array(nearest) * (1 + 1e-9)).all()
    assert np.sum(found) < 0.5 * np.sum(nearest)


def test_rounding_in_turn_is_near_the_best_that_there_is() -> None:
    found = best = nearest = 0.0
    for seed in range(30):
        weight, gram = problem(seed, 1, 4, 1)
        around = [np.array(each) for each in itertools.product(range(-4, 5), repeat=4)]
        base = np.rint(weight)
        least = min(float(error(base + step[None, :, None], weight, gram).sum()) for step in around)
        at = float(error(round_in_turn(weight, gram, 127), weight, gram).sum())
        assert at >= least * (1 - 1e-9)
        found, best, nearest = found + at, best + least, nearest + float(error(base, weight, gram).sum())
    assert best <= found < 0.5 * (best + nearest)


def test_blocks_of_columns_give_what_one_column_at_a_time_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, gram = problem(0, 3, 17, 4)
    whole = round_in_turn(weight, gram, 127)
    monkeypatch.setattr(rounding, "COLUMNS_AT_ONCE", 5)
    np.testing.assert_array_equal(round_in_turn(weight, gram, 127), whole)


def test_inputs_that_have_nothing_in_common_are_rounded_to_the_nearest_and_no_number_goes_beyond_the_limit() -> None:
    weight = np.array([0.4, -2.6, 9.0, -9.0])[None, :, None]
    np.testing.assert_array_equal(round_in_turn(weight, np.eye(4)[None], 7)[0, :, 0], [0, -3, 7, -7])


def test_evened_out_channels_leave_the_function_as_it_is_to_the_bit_and_are_closer_in_size() -> None:
    model = residual_net()
    stored = {tensor.name: tensor for tensor in model.graph.initializer}
    skew = np.array([1, 30, 1, 1, 0.02, 1, 1, 5], np.float32)
    for name in ("w1", "b1"):  # the channels between the two Convs of the block: a Relu lies there
        value = numpy_helper.to_array(stored[name])
        stored[name].CopyFrom(numpy_helper.from_array(value * skew.reshape(-1, *[1] * (value.ndim - 1)), name))
    feeds = images(4, seed=1)
    result = equalised(model, feeds)
    np.testing.assert_array_equal(first_output(result, feeds), first_output(model, feeds))

    def sizes(of: onnx.ModelProto) -> np.ndarray:
        shown = onnx.ModelProto()
        shown.CopyFrom(of)
        shown.graph.output[0].name = "inner"
        return np.sqrt(np.square(first_output(shown, feeds)).mean(axis=(0, 2, 3)))

    before, after = sizes(model), sizes(result)
    assert after.max() / after.min() < 0.1 * before.max() / before.min()


def test_only_what_convs_alone_write_and_read_is_evened_out() -> None:
    def streams(text: str) -> list[tuple[str, ...]]:
        weights = {name: np.ones((2, 2, 1, 1)) for name in ("u", "v", "w")} | {"d": np.ones((2, 1, 1, 1))}
        graph = f"g (float[N,2,4,4] x) => (float[N,2,4,4] y) {{ {text} }}"
        return [stream.tensors for stream in find_streams(from_text(graph, **weights))]

    assert streams("a = Conv (x, u) b = Relu (a) y = Conv (b, v)") == [("a", "b")]
    assert streams("a = Conv (x, u) b = Conv (a, v) c = Add (a, b) y = Conv (c, w)") == [("a", "b", "c")]
    assert streams("a = Conv (x, u) b = Sigmoid (a) y = Conv (b, v)") == []  # not the same for other sizes
    assert streams("a = Conv (x, u) b = Add (a, x) y = Conv (b, v)") == []  # the input is given
    assert streams("a = Conv (x, u) y = Conv <group = 2> (a, d)") == []
    assert streams("a = Conv (x, u) y = Conv (a, u)") == []  # a weight for both


@pytest.mark.parametrize("made_for", ["ort-cpu", "tensorrt"])
def test_fitted_models_have_the_same_graph_and_less_error_on_samples_they_have_not_seen(made_for: QuantisedFor) -> None:
    model = conv_net(channels=32)
    rng = np.random.default_rng(5)
    mixed = rng.standard_normal((3, 3))

    def batches(count: int) -> list[Feeds]:
        return [
            {"image": np.einsum("oc,nchw->nohw", mixed, rng.standard_normal((16, 3, 8, 8))).astype(np.float32)}
            for _ in range(count)
        ]

    seen, others = batches(8), batches(8)
    plain = quantise(model, lambda: seen, made_for, is_fitted=False)
    fitted = quantise(model, lambda: seen, made_for)
    assert [(node.op_type, list(node.input)) for node in fitted.graph.node] == [
        (node.op_type, list(node.input)) for node in plain.graph.node
    ]
    shapes = [{name: (value.shape, value.dtype) for name, value in tensors(each).items()} for each in (plain, fitted)]
    assert shapes[0] == shapes[1]
    wanted = first_output(model, others)
    errors = [float(np.linalg.norm(first_output(each, others) - wanted)) for each in (plain, fitted)]
    assert errors[1] < 0.9 * errors[0]


@pytest.mark.parametrize("made_for", ["ort-cpu", "tensorrt"])
def test_the_bias_takes_what_rounding_shifts_the_mean_by(made_for: QuantisedFor) -> None:
    # One number is far off: its scale rounds all other weights, and inputs far from zero make that a shift.
    weight = np.full((1, 16, 1, 1), 0.3)
    weight[0, 0] = 127
    model = from_text("g (float[N,16,6,6] image) => (float[N,1,6,6] y) { y = Conv (image, w, b) }", w=weight, b=np.zeros(1))
    rng = np.random.default_rng(0)
    feeds: list[Feeds] = [{"image": rng.uniform(0.9, 1.0, (32, 16, 6, 6)).astype(np.float32)}]
    wanted = first_output(model, feeds).mean()
    shifts = [
        abs(first_output(quantise(model, lambda: feeds, made_for, is_fitted=is_fitted), feeds).mean() - wanted)
        for is_fitted in (False, True)
    ]
    assert shifts[0] > 2  # 15 inputs, 0.3 of each lost
    assert shifts[1] < 0.5


def test_layers_that_do_not_fit_at_once_take_another_pass_and_come_out_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    feeds = [{"image": np.random.default_rng(0).standard_normal((4, 3, 8, 8)).astype(np.float32)} for _ in range(4)]
    monkeypatch.setattr(rounding, "POSITIONS_A_SAMPLE", 64)  # all of them: nothing is drawn
    whole = quantise(conv_net(), lambda: feeds, "ort-cpu")
    monkeypatch.setattr(rounding, "GRAM_BYTES", 1)
    assert quantise(conv_net(), lambda: feeds, "ort-cpu").SerializeToString() == whole.SerializeToString()


def test_a_gemm_is_rounded_the_same_whichever_way_its_weight_lies() -> None:
    rng = np.random.default_rng(0)
    weights = {"w": rng.standard_normal((3, 2, 1, 1)), "b": np.zeros(3)}
    dense = rng.standard_normal((5, 3 * 16))
    text = "g (float[N,2,4,4] image) => (float[N,5] y) {{ a = Conv (image, w) c = Flatten (a) y = Gemm <transB = {}> (c, v, d) }}"
    feeds: list[Feeds] = [{"image": rng.standard_normal((64, 2, 4, 4)).astype(np.float32)}]
    found = []
    for is_transposed, value in ((1, dense), (0, dense.T)):
        model = from_text(text.format(is_transposed), w=weights["w"], v=value, d=np.zeros(5))
        made = quantise(model, lambda: feeds, "tensorrt")
        plain = quantise(model, lambda: feeds, "tensorrt", is_fitted=False)
        ints = tensors(made)["v_quantized"]
        assert (ints != tensors(plain)["v_quantized"]).any()
        found.append(ints if is_transposed else ints.T)
    np.testing.assert_array_equal(found[0], found[1])
