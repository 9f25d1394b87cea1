"""Sensitivity: the error of the outputs when one layer alone is grouped and fitted, against doing just that."""

import math
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import onnx
import pytest
from fitting import Behind, Normal, batches, fit_conv, grouped, outputs, plan_of
from numpy.typing import ArrayLike
from tiny import conv_net, from_text, get_tensor, residual_net, set_tensor

from onnx_gconv.plans import PlannedLayer
from onnx_gconv.recover.fitting import FitOptions
from onnx_gconv.recover.sensitivity import sensitivities
from onnx_gconv.rewrite.mask import mask
from onnx_gconv.rewrite.match import match
from onnx_gconv.solve.grouping import Grouping

FEEDS = batches(25, 3, 8, 8)
ALL = {"image": np.concatenate([batch["image"] for batch in FEEDS])}


def grouping(layer: PlannedLayer) -> Grouping:
    return Grouping(layer.groups, np.array(layer.in_order), np.array(layer.out_order), layer.kept)


def measure(
    model: onnx.ModelProto,
    layers: list[PlannedLayer],
    feeds: list[dict[str, np.ndarray]],
    *,
    probes: int = 100,
    jobs: int = 1,
) -> Mapping[tuple[str, int], float]:
    groupings = {(layer.name, layer.groups): grouping(layer) for layer in layers}
    found, _ = sensitivities(
        model, model, groupings, feeds, probes=probes, options=FitOptions(jobs=jobs, is_validated=False), progress=lambda *_: None
    )
    return found


def error(reference: np.ndarray, found: np.ndarray) -> float:
    a, b = (x.astype(np.float64) - x.astype(np.float64).mean(axis=1, keepdims=True) for x in (reference, found))
    return float(((a - b) ** 2).sum() / (a**2).sum())


def slowly(model: onnx.ModelProto, layer: PlannedLayer, weight: str, bias: str, *, probes: int) -> float:
    """Return the error of the scores of the model with one layer fitted by NumPy, run as a whole."""
    node = next(node for node in model.graph.node if node.output[0] == layer.name)
    source, target = outputs(model, ALL, node.input[0], layer.name)
    damping = FitOptions().damping
    new = fit_conv(source, target, node, get_tensor(model, weight), layer, damping=damping)
    copy = onnx.ModelProto.FromString(model.SerializeToString())
    set_tensor(set_tensor(copy, weight, new[0]), bias, new[1])
    each = [error(outputs(model, batch)[0], outputs(copy, batch)[0]) for batch in FEEDS[:probes]]
    return float(np.mean(each))


@pytest.mark.parametrize("probes", [1, 3])
def test_it_is_what_fitting_one_layer_and_running_the_whole_model_gives(probes: int) -> None:
    model = conv_net(channels=8)
    layers = [grouped(name, 8, 8, groups=groups, seed=groups) for name in ("c2", "c3") for groups in (2, 4, 8)]
    found = measure(model, layers, FEEDS, probes=probes)
    assert list(found) == [(layer.name, layer.groups) for layer in layers]
    for layer in layers:
        number = layer.name[1]
        expected = slowly(model, layer, f"w{number}", f"b{number}", probes=probes)
        if layer.groups != 4:  # every other number is measured
            assert found[layer.name, layer.groups] == pytest.approx(expected, rel=1e-3)
    for name in ("c2", "c3"):  # and what is between is taken to lie between
        assert min(found[name, 2], found[name, 8]) <= found[name, 4] <= max(found[name, 2], found[name, 8])


def test_it_does_not_depend_on_the_number_of_jobs() -> None:
    layers = [grouped(name, 8, 8, groups=groups) for name in ("c2", "c3") for groups in (2, 4)]
    assert measure(conv_net(), layers, FEEDS) == measure(conv_net(), layers, FEEDS, jobs=2)


def test_a_conv_that_has_groups_is_split_within_them() -> None:
    """Group 4 of a Conv in 2 groups: its halves are split; every output of it is fitted to the inputs that it keeps."""
    model = conv_net(channels=8)
    weight = get_tensor(model, "w2")
    within = np.zeros_like(weight)
    within[:4, :4], within[4:, 4:] = weight[:4, :4], weight[4:, 4:]
    as_groups = onnx.ModelProto.FromString(model.SerializeToString())
    set_tensor(as_groups, "w2", np.concatenate([weight[:4, :4], weight[4:, 4:]]))
    node = next(node for node in as_groups.graph.node if node.output[0] == "c2")
    node.attribute.append(onnx.helper.make_attribute("group", 2))
    layer = replace(grouped("c2", 8, 8, groups=4), in_order=(0, 2, 1, 3, 4, 7, 5, 6), out_order=(3, 1, 0, 2, 4, 5, 7, 6))
    found = measure(as_groups, [layer], FEEDS)["c2", 4]
    assert found == pytest.approx(slowly(set_tensor(model, "w2", within), layer, "w2", "b2", probes=3), rel=1e-3)


def test_the_mean_of_a_normalization_takes_the_constant_as_a_bias_would(normal: Normal) -> None:
    body = "p = GlobalAveragePool (r) scores = Flatten (p) }"
    tensors: dict[str, ArrayLike] = {"w": normal(8, 3, 3, 3), "v": normal(8, 8, 1, 1)}
    gamma, beta, mean, var = normal(8), normal(8), normal(8), 1 + np.square(normal(8))
    scale = gamma / np.sqrt(var + 1e-5)
    head = "m (float[N,3,8,8] image) => (float[N,8] scores) { a = Conv (image, w) s = Relu (a)"
    inside = from_text(
        f"{head} c = Conv (s, v) n = BatchNormalization (c, gamma, beta, mean, var) r = Relu (n) {body}",
        **tensors,
        gamma=gamma,
        beta=beta,
        mean=mean,
        var=var,
    )
    folded = {"w": tensors["w"], "v": np.asarray(tensors["v"]) * scale[:, None, None, None], "b": beta - mean * scale}
    outside = from_text(f"{head} c = Conv (s, v, b) r = Relu (c) {body}", **folded)
    layer = grouped("c", 8, 8, groups=4)
    found = [measure(model, [layer], FEEDS)["c", 4] for model in (inside, outside)]
    assert found[0] == pytest.approx(found[1], rel=1e-3)
    assert found[0] > 1e-3


def test_a_layer_that_cannot_be_fitted_has_no_entry(normal: Normal) -> None:
    text = "m (float[N,4,6,6] x) => (float[N,4,6,6] y) { a = Conv (x, w) b = Conv (a, w) y = Conv (b, v) }"
    model = from_text(text, w=normal(4, 4, 1, 1), v=normal(4, 4, 1, 1))
    layers = [grouped(name, 4, 4) for name in "aby"]
    found = measure(model, layers, [{"x": normal(5, 4, 6, 6).astype(np.float32)}])
    assert list(found) == [("y", 2)]


def test_layers_that_lose_nothing_cost_nothing_and_the_others_something(normal: Normal) -> None:
    model = residual_net()
    weight = get_tensor(model, "w1")
    weight[:4, 4:] = weight[4:, :4] = 0
    set_tensor(model, "w1", weight)
    feeds = [{"image": normal(40, 4, 6, 6).astype(np.float32)}]
    found = measure(model, [grouped("first", 8, 8), grouped("last", 8, 8)], feeds)
    assert found["first", 2] < 1e-6 < 1e-2 < found["last", 2]


TWO_OUTPUTS = """
m (float[N,4,6,6] x) => (float[N,4,6,6] early, float[N,4,6,6] y) {
    a = Conv (x, w1, b1)
    early = Relu (a)
    s = Sigmoid (early)
    b = Conv (s, w2, b2)
    r = Relu (b)
    y = Conv (r, w3, b3)
}
"""


def test_an_output_that_comes_out_before_a_layer_counts_as_unchanged(normal: Normal) -> None:
    tensors: dict[str, ArrayLike] = {}
    for number in "123":
        tensors |= {f"w{number}": normal(4, 4, 1, 1), f"b{number}": normal(4)}
    layers = [grouped(name, 4, 4) for name in ("a", "b", "y")]
    feeds = [{"x": normal(30, 4, 6, 6).astype(np.float32)}]
    both = from_text(TWO_OUTPUTS, **tensors)
    late = onnx.ModelProto.FromString(both.SerializeToString())
    del late.graph.output[0]
    found, alone = measure(both, layers, feeds), measure(late, layers, feeds)
    for name in "by":  # the mean of 0 and what the other output says
        assert found[name, 2] == pytest.approx(alone[name, 2] / 2, rel=1e-4)
    assert all(math.isfinite(cost) and cost > 0 for cost in found.values())


def test_a_layer_that_reaches_no_output_costs_nothing(normal: Normal) -> None:
    text = "m (float[N,4,6,6] x) => (float[N,4,6,6] y) { y = Conv (x, w1) dead = Conv (y, w2) }"
    model = from_text(text, w1=normal(4, 4, 1, 1), w2=normal(4, 4, 1, 1))
    found = measure(model, [grouped("y", 4, 4), grouped("dead", 4, 4)], [{"x": normal(30, 4, 6, 6).astype(np.float32)}])
    assert found["dead", 2] == 0 < found["y", 2]


def test_in_a_compressed_model_a_layer_is_tried_in_the_company_of_the_others(normal: Normal) -> None:
    """`last` gets four groups in place of two, and is fitted to the dense sum on what the masked layers before it give."""
    dense = residual_net()
    feeds = [{"image": normal(40, 4, 6, 6).astype(np.float32)} for _ in range(2)]
    whole = {"image": np.concatenate([batch["image"] for batch in feeds])}
    masked = mask(dense, match(dense, plan_of(grouped("stem", 8, 4, seed=1), grouped("last", 8, 8))))
    layer = grouped("last", 8, 8, groups=4)
    (total,), (source, stream) = outputs(dense, whole, "total"), outputs(masked, whole, "inner", "stream")
    node = next(node for node in dense.graph.node if node.output[0] == "last")
    weight, bias = fit_conv(
        source, total, node, get_tensor(masked, "w2"), layer, damping=FitOptions().damping, behind=Behind(-np.inf, added=stream)
    )
    by_hand = set_tensor(set_tensor(onnx.ModelProto.FromString(masked.SerializeToString()), "w2", weight), "b2", bias)
    gaps = [(outputs(dense, batch)[0].astype(np.float64), outputs(by_hand, batch)[0].astype(np.float64)) for batch in feeds]
    expected = np.mean([np.square(one - two).sum() / np.square(one).sum() for one, two in gaps])
    groupings = {("last", 4): grouping(layer)}
    found, _ = sensitivities(
        dense, masked, groupings, feeds, probes=2, options=FitOptions(is_validated=False), progress=lambda *_: None
    )
    assert found["last", 4] == pytest.approx(expected, rel=1e-3)
