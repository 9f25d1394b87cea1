"""FittedSites: what it must leave alone, what it must find, and that another least squares finds the same."""

import hashlib
import os
import subprocess
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import onnx
import pytest
from fitting import RESIDUAL_FEEDS, RESIDUAL_PLAN, Behind, Normal, distance, fit_conv, grouped, outputs, plan_of, recover
from numpy.typing import ArrayLike
from tiny import from_text, get_tensor, residual_net, set_tensor

from onnx_gconv.recover.fitting import FitOptions, fit_sites, masked_sites
from onnx_gconv.recover.site import Site
from onnx_gconv.rewrite.mask import mask
from onnx_gconv.rewrite.match import Matched, match

# Products of moments are float32, so that weights come out with some five digits; masking alone moves outputs by half.
ROUNDING = 1e-4
UNDAMPED = FitOptions(damping=1e-8, is_validated=False)


def image_of(feeds: list[dict[str, np.ndarray]], name: str = "image") -> dict[str, np.ndarray]:
    return {name: np.concatenate([batch[name] for batch in feeds])}


# --- what stays -----------------------------------------------------------------------------------------------------------


def test_where_nothing_is_masked_weights_and_outputs_stay() -> None:
    dense, feeds = residual_net(), RESIDUAL_FEEDS
    found = recover(dense, plan_of(), feeds)
    assert [layer.name for layer in found.layers] == ["stem", "first", "last"]
    for name in ("w0", "b0", "w1", "b1", "w2", "b2"):
        assert distance(get_tensor(dense, name), get_tensor(found.model, name)) < ROUNDING
    assert distance(outputs(dense, feeds[0])[0], outputs(found.model, feeds[0])[0]) < ROUNDING
    assert max(max(layer.before, layer.after) for layer in found.layers) < ROUNDING


def test_dropped_weights_stay_exactly_zero() -> None:
    found = recover(residual_net(), RESIDUAL_PLAN, RESIDUAL_FEEDS)
    for number, layer in enumerate(RESIDUAL_PLAN.layers):
        weight = get_tensor(found.model, f"w{number}")
        ins, outs = (np.reshape(order, (2, -1)) for order in (layer.in_order, layer.out_order))
        for inputs, chosen in zip(ins[::-1], outs, strict=True):
            assert not weight[np.ix_(chosen, inputs)].any()
        for inputs, chosen in zip(ins, outs, strict=True):
            assert weight[np.ix_(chosen, inputs)].all()


def test_everything_but_the_fitted_numbers_is_as_it_was(normal: Normal) -> None:
    dense = residual_net()
    set_tensor(dense, "unused", normal(3))
    dense.producer_name, dense.doc_string = "somebody", "kept"
    dense.metadata_props.add(key="a", value="b")
    dense.graph.node[0].doc_string = "stem"
    masked = mask(dense, match(dense, RESIDUAL_PLAN))
    found = recover(dense, RESIDUAL_PLAN, RESIDUAL_FEEDS).model
    fitted = {f"{kind}{number}" for kind in "wb" for number in range(3)}
    for name in fitted:
        before, after = get_tensor(masked, name), get_tensor(found, name)
        assert (before.shape, before.dtype) == (after.shape, after.dtype)
        assert np.any(before != after)
        set_tensor(found, name, before)
    # With the old numbers put back, the models are the same to the last byte but for the order of the initializers.
    for model in (masked, found):
        tensors = sorted(model.graph.initializer, key=lambda tensor: tensor.name)
        copies = [onnx.TensorProto.FromString(tensor.SerializeToString()) for tensor in tensors]
        del model.graph.initializer[:]
        model.graph.initializer.extend(copies)
    assert found.SerializeToString(deterministic=True) == masked.SerializeToString(deterministic=True)


def test_neither_model_given_is_changed() -> None:
    dense = residual_net()
    masked = mask(dense, match(dense, RESIDUAL_PLAN))
    before = dense.SerializeToString(deterministic=True), masked.SerializeToString(deterministic=True)
    recover(dense, RESIDUAL_PLAN, RESIDUAL_FEEDS, sites=masked_sites(masked, match(masked, RESIDUAL_PLAN)))
    assert before == (dense.SerializeToString(deterministic=True), masked.SerializeToString(deterministic=True))


SCRIPT = """
import hashlib
from fitting import RESIDUAL_FEEDS, RESIDUAL_PLAN, recover
from tiny import residual_net
from onnx_gconv.recover.fitting import FitOptions
options = FitOptions(least_positions=900, positions_a_weight=1, jobs=2)
model = recover(residual_net(), RESIDUAL_PLAN, RESIDUAL_FEEDS, options=options).model
print(hashlib.sha256(model.SerializeToString(deterministic=True)).hexdigest())
"""


def test_the_result_is_the_same_to_the_last_bit_whatever_the_jobs_and_the_process() -> None:
    hashes = set()
    for jobs in (1, 2):
        options = FitOptions(least_positions=900, positions_a_weight=1, jobs=jobs)  # few enough that positions are drawn
        model = recover(residual_net(), RESIDUAL_PLAN, RESIDUAL_FEEDS, options=options).model
        hashes.add(hashlib.sha256(model.SerializeToString(deterministic=True)).hexdigest())
    for seed in ("1", "2"):
        path = os.pathsep.join([str(Path(__file__).parent), str(Path(__file__).parents[1])])
        environment = os.environ | {"PYTHONHASHSEED": seed, "PYTHONPATH": path}
        done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True, env=environment)
        hashes.add(done.stdout.strip())
    assert len(hashes) == 1


def test_another_seed_draws_other_positions() -> None:
    few = [FitOptions(least_positions=900, positions_a_weight=1, seed=seed) for seed in (0, 1)]
    one, two = (recover(residual_net(), RESIDUAL_PLAN, RESIDUAL_FEEDS, options=options).model for options in few)
    assert distance(get_tensor(one, "w1"), get_tensor(two, "w1")) > 1e-3


# --- what is found --------------------------------------------------------------------------------------------------------


def test_where_grouped_weights_can_do_the_same_they_are_found(normal: Normal) -> None:
    """Both halves of the input are equal, so either half is enough, and grouping into halves can be without any error."""
    dense = from_text(
        "m (float[N,8,6,6] image) => (float[N,6,6,6] y) { y = Conv <pads = [1, 1, 1, 1]> (image, w, b) }",
        w=normal(6, 8, 3, 3),
        b=normal(6),
    )
    feeds = [{"image": np.tile(batch["image"], (1, 2, 1, 1))} for batch in RESIDUAL_FEEDS]
    plan = plan_of(grouped("y", 6, 8))
    found = recover(dense, plan, feeds, options=UNDAMPED)
    (expected,), (masked,), (recovered,) = (
        outputs(model, feeds[0]) for model in (dense, mask(dense, match(dense, plan)), found.model)
    )
    assert distance(expected, masked) > 0.5
    assert distance(expected, recovered) < ROUNDING
    weight = get_tensor(dense, "w")
    folded = np.concatenate([(weight[:3, :4] + weight[:3, 4:]), (weight[3:, :4] + weight[3:, 4:])])
    kept = np.concatenate([get_tensor(found.model, "w")[:3, :4], get_tensor(found.model, "w")[3:, 4:]])
    assert distance(folded, kept) < ROUNDING
    (layer,) = found.layers
    assert layer.after < 1e-6 < 0.1 < layer.before


def by_hand(dense: onnx.ModelProto, image: np.ndarray, *, is_corrected: bool, options: FitOptions) -> dict[str, np.ndarray]:
    """Return the weights of the residual net, fitted one after the other: each on what those before it give now."""
    fitted = mask(dense, match(dense, RESIDUAL_PLAN))
    stem, first, total, last = outputs(dense, {"image": image}, "stem", "first", "total", "last")
    nodes = {node.output[0]: node for node in dense.graph.node}
    tensors: dict[str, np.ndarray] = {}
    for number, layer in enumerate(RESIDUAL_PLAN.layers):
        source, stream = outputs(fitted, {"image": image}, {0: "image", 1: "stream", 2: "inner"}[number], "stream")
        target, behind = (stem, first, last)[number], Behind(0.0, rounds=options.relaxations)  # a Relu follows
        if number == 2:
            behind = Behind(0.0, added=stream, rounds=options.relaxations) if is_corrected else Behind(-np.inf)
            target = total if is_corrected else last
        prior = get_tensor(fitted, f"w{number}")
        weight, bias = fit_conv(source, target, nodes[layer.name], prior, layer, damping=options.damping, behind=behind)
        tensors |= {f"w{number}": weight, f"b{number}": bias}
        set_tensor(set_tensor(fitted, f"w{number}", weight), f"b{number}", bias)
    return tensors


def uncorrected(sites: list[Site]) -> list[Site]:
    """Return the sites with the last Conv of the block aimed at its own output, as if no sum followed."""
    return [replace(site, target=site.name, shortcut="", clamp=None) if site.shortcut else site for site in sites]


@pytest.mark.parametrize("relaxations", [0, 1, 3])
@pytest.mark.parametrize("damping", [1e-8, 1e-3, 0.3])
@pytest.mark.parametrize("is_corrected", [True, False])
def test_a_residual_block_is_fitted_as_least_squares_by_hand_does_it(
    *, is_corrected: bool, damping: float, relaxations: int
) -> None:
    dense = residual_net()
    options = FitOptions(damping=damping, relaxations=relaxations, is_validated=False, has_chains=False)
    sites = masked_sites(mask(dense, match(dense, RESIDUAL_PLAN)), match(dense, RESIDUAL_PLAN))
    found = recover(
        dense, RESIDUAL_PLAN, RESIDUAL_FEEDS, sites=sites if is_corrected else uncorrected(sites), options=options
    ).model
    expected = by_hand(dense, image_of(RESIDUAL_FEEDS)["image"], is_corrected=is_corrected, options=options)
    for name, value in expected.items():
        assert distance(value, get_tensor(found, name)) < ROUNDING, name


@pytest.mark.parametrize("relaxations", [0, 3])
def test_correcting_the_stream_brings_the_blocks_output_closer(relaxations: int) -> None:
    dense, feeds = residual_net(), image_of(RESIDUAL_FEEDS)
    masked = mask(dense, match(dense, RESIDUAL_PLAN))
    sites, options = masked_sites(masked, match(masked, RESIDUAL_PLAN)), FitOptions(relaxations=relaxations)
    models = [
        recover(dense, RESIDUAL_PLAN, RESIDUAL_FEEDS, sites=each, options=options).model for each in (sites, uncorrected(sites))
    ]
    (wanted,), *others = (outputs(model, feeds) for model in (dense, *models, masked))
    errors = [distance(wanted, found) for (found,) in others]
    assert errors[0] < 0.95 * errors[1]
    assert errors[1] < 0.95 * errors[2]


@pytest.mark.parametrize(
    ("activation", "below", "above"),
    [("Relu (n)", 0.0, np.inf), ("Clip (n, low, high)", -0.2, 0.7), ("Clip (n, , high)", -np.inf, 0.7)],
)
def test_relaxing_makes_the_loss_that_bounds_the_error_behind_the_activation_smaller_with_every_round(
    activation: str, below: float, above: float, normal: Normal
) -> None:
    dense = from_text(
        "m (float[N,4,6,6] image) => (float[N,8,6,6] y) { c = Conv <pads = [1, 1, 1, 1]> (image, w)"
        f" n = BatchNormalization (c, gamma, beta, mean, var) y = {activation} }}",
        w=normal(8, 4, 3, 3) / 4,
        gamma=normal(8),
        beta=normal(8),
        mean=normal(8),
        var=0.5 + np.square(normal(8)),
        low=np.float32(-0.2),
        high=np.float32(0.7),
    )
    plan = plan_of(grouped("c", 8, 4, seed=1))
    losses, errors = [], []
    for relaxations in range(4):
        found = recover(dense, plan, RESIDUAL_FEEDS, options=replace(UNDAMPED, relaxations=relaxations)).model
        (wanted, behind), (given, passed) = (outputs(model, image_of(RESIDUAL_FEEDS), "n", "y") for model in (dense, found))
        gap = given.astype(np.float64) - wanted
        # Beyond the limits only what gets past them counts. That bounds the error behind the activation.
        gap = np.where(wanted <= below, np.maximum(given - below, 0), np.where(wanted >= above, np.minimum(given - above, 0), gap))
        losses.append(np.square(gap).sum(axis=(0, 2, 3)))
        errors.append(distance(behind, passed))
    for earlier, later in pairwise(losses):
        assert (later <= earlier * (1 + ROUNDING)).all()
    assert losses[-1].sum() < 0.98 * losses[0].sum()
    assert errors[-1] < errors[0]


def test_errors_of_layers_are_those_of_their_own_least_squares() -> None:
    """`before` is the share of the target's variance that masked weights leave, `after` what the fitted ones do."""
    dense, feeds, options = residual_net(), image_of(RESIDUAL_FEEDS), FitOptions(relaxations=0, has_chains=False)
    found = recover(dense, RESIDUAL_PLAN, RESIDUAL_FEEDS, options=options)
    wanted, stem = (values.astype(np.float64) for values in outputs(dense, feeds, "total", "stem"))

    def share(target: np.ndarray, value: np.ndarray) -> float:
        spread = target - target.mean(axis=(0, 2, 3), keepdims=True)
        return float(np.square(target - value).sum() / np.square(spread).sum())

    after_total, after_stem = outputs(found.model, feeds, "total", "stem")
    (before_stem,) = outputs(mask(dense, match(dense, RESIDUAL_PLAN)), feeds, "stem")
    assert found.layers[0].before == pytest.approx(share(stem, before_stem), rel=1e-3)
    assert found.layers[0].after == pytest.approx(share(stem, after_stem), rel=1e-3)
    stream = outputs(found.model, feeds, "stream")[0].astype(np.float64)
    assert found.layers[2].after == pytest.approx(share(wanted - stream, after_total - stream), rel=1e-3)


# --- batch normalization --------------------------------------------------------------------------------------------------

NORMALIZED = """
m (float[N,4,6,6] image) => (float[N,8,6,6] y) {
    a = Conv <pads = [1, 1, 1, 1]> (image, w1)
    an = BatchNormalization (a, gamma1, beta1, mean1, var1)
    r = Relu (an)
    b = Conv <pads = [1, 1, 1, 1]> (r, w2)
    bn = BatchNormalization <epsilon = 0.01> (b, gamma2, beta2, mean2, var2)
    y = Add (bn, r)
}
"""
FOLDED = """
m (float[N,4,6,6] image) => (float[N,8,6,6] y) {
    a = Conv <pads = [1, 1, 1, 1]> (image, w1, b1)
    r = Relu (a)
    b = Conv <pads = [1, 1, 1, 1]> (r, w2, b2)
    y = Add (b, r)
}
"""


def test_batch_normalization_in_the_graph_or_folded_gives_the_same_function(normal: Normal) -> None:
    tensors: dict[str, ArrayLike] = {}
    folded: dict[str, ArrayLike] = {}
    for number, inputs, epsilon in ((1, 4, 1e-5), (2, 8, 0.01)):
        weight, gamma, beta, mean = normal(8, inputs, 3, 3) / 6, normal(8), normal(8), normal(8)  # gamma of either sign
        var = 0.5 + np.square(normal(8))
        tensors |= {
            f"w{number}": weight,
            f"gamma{number}": gamma,
            f"beta{number}": beta,
            f"mean{number}": mean,
            f"var{number}": var,
        }
        scale = gamma / np.sqrt(var + epsilon)
        folded |= {f"w{number}": weight * scale[:, None, None, None], f"b{number}": beta - mean * scale}
    plan = plan_of(grouped("a", 8, 4, seed=1), grouped("b", 8, 8, seed=2))
    found = []
    for dense in (from_text(NORMALIZED, **tensors), from_text(FOLDED, **folded)):
        model = recover(dense, plan, RESIDUAL_FEEDS).model
        found.append(outputs(model, RESIDUAL_FEEDS[0])[0])
        assert distance(*found[:1], *outputs(mask(dense, match(dense, plan)), RESIDUAL_FEEDS[0])) > 0.1
    assert distance(*found) < ROUNDING


def test_the_constant_goes_into_the_mean_and_nothing_else_of_the_normalization_changes(normal: Normal) -> None:
    tensors: dict[str, ArrayLike] = {"w1": normal(8, 4, 3, 3), "w2": normal(8, 8, 3, 3) / 8}
    for number in "12":
        tensors |= {f"{name}{number}": 1 + np.square(normal(8)) for name in ("gamma", "beta", "mean", "var")}
    dense = from_text(NORMALIZED, **tensors)
    plan = plan_of(grouped("a", 8, 4), grouped("b", 8, 8))
    found = recover(dense, plan, RESIDUAL_FEEDS, options=FitOptions(relaxations=0)).model
    changed = {
        tensor.name
        for tensor in dense.graph.initializer
        if np.any(get_tensor(dense, tensor.name) != get_tensor(found, tensor.name))
    }
    assert changed == {"w1", "w2", "mean1", "mean2"}
    # Fitted outputs have the mean of their targets: here, behind the first normalization.
    (wanted,), (given,) = (outputs(model, image_of(RESIDUAL_FEEDS), "an") for model in (dense, found))
    np.testing.assert_allclose(given.mean(axis=(0, 2, 3)), wanted.mean(axis=(0, 2, 3)), atol=1e-4)


@pytest.mark.parametrize("relaxations", [0, 2])
def test_means_that_an_earlier_fit_has_moved_are_not_moved_again(relaxations: int, normal: Normal) -> None:
    tensors: dict[str, ArrayLike] = {"w1": normal(8, 4, 3, 3), "w2": normal(8, 8, 3, 3) / 8}
    for number in "12":
        tensors |= {f"{name}{number}": 1 + np.square(normal(8)) for name in ("gamma", "beta", "mean", "var")}
    dense, moved = from_text(NORMALIZED, **tensors), from_text(NORMALIZED, **tensors)
    for name in ("mean1", "mean2"):
        set_tensor(moved, name, get_tensor(dense, name) + normal(8).astype(np.float32))
    before, wanted = (outputs(model, RESIDUAL_FEEDS[0])[0] for model in (moved, dense))
    assert distance(wanted, before) > 0.1
    sites, options = masked_sites(moved, Matched()), FitOptions(relaxations=relaxations)
    found = fit_sites(dense, moved, sites, RESIDUAL_FEEDS, options=options, progress=lambda *_: None).model
    assert distance(wanted, outputs(found, RESIDUAL_FEEDS[0])[0]) < ROUNDING
