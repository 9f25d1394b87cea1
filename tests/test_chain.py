"""Convs in a row fitted together: the derivative and its transpose, what is found, what is left alone, how much is looked at."""

import hashlib
import math
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from fitting import RESIDUAL_FEEDS, Normal, batches, distance, grouped, outputs, plan_of, recover
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tiny import from_text, get_tensor, residual_net, set_tensor
from widths import plan_of as narrowing
from widths import subject

from onnx_gconv.model.constants import Constants
from onnx_gconv.model.patches import Window, patches
from onnx_gconv.plans import PlannedLayer, PlannedSpace
from onnx_gconv.recover import chain as chain_module
from onnx_gconv.recover import newton
from onnx_gconv.recover.chain import PARTS, POSITIONS, UNFOLDED_BYTES, Scene, find_chains, in_parts, linked, shared_out
from onnx_gconv.recover.fit import Fit
from onnx_gconv.recover.fitting import FitOptions, fit_layers, masked_sites
from onnx_gconv.recover.flow import Flow
from onnx_gconv.recover.newton import Chain, Link, Seen, Step
from onnx_gconv.recover.normal import sums
from onnx_gconv.recover.site import find_sites
from onnx_gconv.rewrite.mask import mask
from onnx_gconv.rewrite.match import Matched, match

ZOO = Path(__file__).parents[2] / "shared" / "zoo"
ROUNDING = 2e-5  # relative, of sums of some hundred float32 products


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(2) as made:
        yield made


@dataclass(frozen=True, eq=False)
class Net:
    """A net of Convs a, b and perhaps c in a row; what is to be fitted is the dense one with other weights, and masked."""

    dense: onnx.ModelProto
    masked: onnx.ModelProto
    image: np.ndarray
    links: list[Link]
    windows: tuple[Window, ...]
    seen: list[Seen]

    def chain(self, pool: ThreadPoolExecutor) -> Chain:
        return Chain(self.links, self.windows, self.seen, pool)


def net(body: str, normal: Normal, *layers: PlannedLayer, size: tuple[int, ...] = (7, 6)) -> Net:
    """Return a net on images x of 4 channels. A tensor called w_8_4_3_3 has that shape; v_8 is positive."""
    axes = ",".join(map(str, size))
    dense = from_text(f"m (float[N,4,{axes}] x) => (float[N,C] y) {{ {body} y = Identity (end) }}")
    del dense.graph.output[0].type.tensor_type.shape.dim[:]
    dense.graph.output[0].type.tensor_type.ClearField("shape")
    made = {"x", *(name for node in dense.graph.node for name in node.output)}
    for name in dict.fromkeys(name for node in dense.graph.node for name in node.input if name not in made):
        kind, *shape = name.split("_")
        value = normal(*(int(each) for each in shape if each.isdigit()))
        value = {"low": np.float32(0), "high": np.float32(2), "w": value / 2, "v": np.abs(value) + 0.5}.get(kind, value)
        set_tensor(dense, name, value)
    other = onnx.ModelProto.FromString(dense.SerializeToString())
    for tensor in dense.graph.initializer:
        if tensor.name.startswith("w"):
            set_tensor(other, tensor.name, get_tensor(dense, tensor.name) + 0.3 * normal(*tensor.dims))
    matched = match(other, plan_of(*layers))
    return chained(dense, mask(other, matched), matched, normal(6, 4, *size).astype(np.float32))


def chained(dense: onnx.ModelProto, masked: onnx.ModelProto, matched: Matched, image: np.ndarray) -> Net:
    sites = masked_sites(masked, matched)
    chains = find_chains(Flow(masked), sites)
    assert [site.name for site in (*chains[sites[-1].name], sites[-1])] == [*"abc"][: len(sites)]
    found, rng = [], np.random.default_rng(0)
    for site in sites:
        fit = Fit.of(site, Constants(masked), Constants(dense))
        source, shortcut = (
            image if name == "x" else outputs(masked, {"x": image}, name)[0] if name else None
            for name in (site.source, site.shortcut)
        )
        (target,) = outputs(dense, {"x": image}, site.target)
        assert source is not None
        found.append(Link(fit, fit.before, sums(fit.rows(source, target, shortcut, most=10**9, rng=rng))))
    links = linked(found)
    scene = Scene.of([link.fit for link in links], image.shape[2:])
    assert scene is not None
    parts = [slice(0, 3), slice(3, 6)]
    seen = [
        scene.seen(links[-1].fit, image[part], target[part], None if shortcut is None else shortcut[part], samples=9, rng=rng)
        for part in parts
    ]
    return Net(dense, masked, image, links, scene.windows, seen)


BN = "BatchNormalization"
CASES: dict[str, tuple[Any, ...]] = {
    "dense": ("a = Conv (x, w_8_4_3_3, b_8) r = Relu (a) b = Conv (r, w_5_8_3_3, b_5) end = Identity (b)",),
    "no activation": ("a = Conv (x, w_8_4_1_1, b_8) b = Conv (a, w_5_8_1_1, b_5) end = Identity (b)",),
    "strides and pads": (
        """a = Conv <strides = [2, 1], pads = [0, 1, 2, 1]> (x, w_8_4_3_3, b_8) r = Relu (a)
        b = Conv <strides = [1, 2], pads = [1, 0, 1, 1]> (r, w_5_8_3_2, b_5) end = Sigmoid (b)""",
    ),
    "dilations": (
        """a = Conv (x, w_8_4_2_2, b_8) r = Relu (a)
        b = Conv <dilations = [2, 1], pads = [1, 1, 1, 1]> (r, w_5_8_3_3, b_5) end = Relu (b)""",
    ),
    "automatic padding": (
        """a = Conv <auto_pad = "SAME_UPPER", strides = [2, 2]> (x, w_8_4_3_3, b_8) r = Relu (a)
        b = Conv <auto_pad = "SAME_LOWER", strides = [2, 2]> (r, w_5_8_2_3, b_5) end = Identity (b)""",
    ),
    "normalizations": (
        f"""a = Conv (x, w_8_4_3_3) n = {BN} (a, g_8, b_8, m_8, v_8) r = Relu (n)
        b = Conv (r, w_5_8_1_1) c = {BN} (b, g_5, b_5, m_5, v_5) end = Relu (c)""",
    ),
    "clip": (
        f"""a = Conv (x, w_8_4_3_3) n = {BN} (a, g_8, b_8, m_8, v_8) r = Clip (n, low, high)
        b = Conv (r, w_5_8_1_1, b_5) end = Clip (b, low, high)""",
    ),
    "depthwise first": (
        """a = Conv <group = 4, strides = [2, 2], pads = [1, 1, 1, 1]> (x, w_4_1_3_3, b_4) r = Clip (a, low, high)
        b = Conv (r, w_5_4_1_1, b_5) end = Identity (b)""",
    ),
    "depthwise second": (
        """a = Conv (x, w_8_4_1_1, b_8) r = Clip (a, low, high)
        b = Conv <group = 8, strides = [2, 2], pads = [1, 1, 1, 1]> (r, w_8_1_3_3, b_8_second) end = Relu (b)""",
    ),
    "two for each channel": (
        """a = Conv <group = 4> (x, w_8_1_3_3, b_8) r = Relu (a) b = Conv <group = 8> (r, w_16_1_1_1, b_16) end = Relu (b)""",
    ),
    "groups": (
        """a = Conv <group = 2> (x, w_8_2_3_3, b_8) r = Relu (a) b = Conv <group = 4> (r, w_4_2_3_3, b_4) end = Identity (b)""",
    ),
    "planned groups": (
        """a = Conv (x, w_8_4_3_3, b_8) r = Relu (a) b = Conv (r, w_6_8_3_3, b_6) end = Relu (b)""",
        (grouped("a", 8, 4, seed=1), grouped("b", 6, 8, seed=2)),
    ),
    "a sum behind": ("""a = Conv (x, w_8_4_1_1, b_8) r = Relu (a) b = Conv (r, w_4_8_1_1, b_4) s = Add (b, x) end = Relu (s)""",),
    "a sum behind a normalization": (
        f"""a = Conv (x, w_8_4_1_1, b_8) r = Relu (a) b = Conv (r, w_4_8_1_1) c = {BN} (b, g_4, b_4, m_4, v_4)
        s = Add (x, c) end = Clip (s, low, high)""",
    ),
    "one axis": ("a = Conv (x, w_8_4_3, b_8) r = Relu (a) b = Conv <strides = [2]> (r, w_5_8_2, b_5) end = Relu (b)", (), (9,)),
    "three in a row": (
        f"""a = Conv (x, w_8_4_1_1) n = {BN} (a, g_8, b_8, m_8, v_8) r = Clip (n, low, high)
        b = Conv <strides = [1, 2], pads = [1, 1, 1, 1]> (r, w_6_8_3_3, b_6) q = Relu (b)
        c = Conv (q, w_5_6_2_2) d = {BN} (c, g_5, b_5, m_5, v_5) end = Relu (d)""",
    ),
    "depthwise between two": (
        """a = Conv (x, w_8_4_1_1, b_8) r = Clip (a, low, high)
        b = Conv <group = 8, strides = [2, 2], pads = [1, 1, 1, 1]> (r, w_8_1_3_3, b_8_second) q = Clip (b, low, high)
        c = Conv (q, w_5_8_1_1, b_5) end = Identity (c)""",
    ),
    "three with a sum behind": (
        """a = Conv (x, w_8_4_1_1, b_8) r = Relu (a)
        b = Conv <group = 2, pads = [1, 1, 1, 1]> (r, w_8_4_3_3, b_8_second) q = Relu (b)
        c = Conv (q, w_4_8_1_1, b_4) s = Add (c, x) end = Relu (s)""",
    ),
    "three axes": (
        """a = Conv <pads = [1, 1, 1, 1, 1, 1]> (x, w_6_4_3_3_3, b_6) r = Relu (a)
        b = Conv <strides = [2, 1, 2]> (r, w_5_6_2_2_2, b_5) end = Relu (b)""",
        (),
        (5, 4, 5),
    ),
}


@pytest.fixture(params=CASES)
def example(request: pytest.FixtureRequest, normal: Normal) -> Net:
    body, layers, size = (
        (*CASES[request.param], (), (7, 6))[:3] if len(CASES[request.param]) != 2 else (*CASES[request.param], (7, 6))
    )
    return net(body, normal, *layers, size=size)


# --- the derivative -------------------------------------------------------------------------------------------------------


def random_step(chain: Chain, normal: Normal) -> Step:
    return Step(tuple(normal(*weight.shape) for weight in chain.weights))


def test_the_transpose_is_adjoint(example: Net, pool: ThreadPoolExecutor, normal: Normal) -> None:
    """<J v, r> = <v, J' r> for any step v and outputs r."""
    chain = example.chain(pool)
    for part in chain.parts:
        _, off = chain.look(part)
        step, outer = random_step(chain, normal), normal(*off.shape).astype(np.float32)
        moved, pulled = chain.push(part, step).astype(np.float64), chain.pull(part, outer)
        scale = np.linalg.norm(moved) * np.linalg.norm(outer)
        assert scale > 0
        assert abs((moved * outer).sum() - step.dot(pulled)) < ROUNDING * scale


def written(example: Net, chain: Chain) -> onnx.ModelProto:
    """Return the model with the weights that the chain has now."""
    model = onnx.ModelProto.FromString(example.masked.SerializeToString())
    for link, at in zip(example.links, chain.coefficients(), strict=True):
        for name, value in link.fit.tensors(at).items():
            set_tensor(model, name, value)
    return model


def gives(example: Net, chain: Chain) -> np.ndarray:
    """Return what comes out behind the last one's normalization, in ONNX Runtime: (samples, channels, pixels...)."""
    site = example.links[-1].fit.site
    (found,) = outputs(written(example, chain), {"x": example.image}, site.name if site.after is None else site.after.output)
    return found.astype(np.float64)


def test_it_is_the_derivative_of_what_the_model_gives(example: Net, pool: ThreadPoolExecutor, normal: Normal) -> None:
    """The outputs are linear in the last one's weights, and in each one's as long as no activation changes its mind."""
    chain = example.chain(pool)
    for part in chain.parts:
        chain.look(part)
    start, step, count = chain.weights, random_step(chain, normal), len(chain.weights)
    for number in range(count):
        small = 1.0 if number == count - 1 else 1e-4
        only = Step(tuple(weight * (small if at == number else 0.0) for at, weight in enumerate(step.weights)))
        moved = [chain.push(part, only) for part in chain.parts]
        ends = []
        for sign in (1, -1):
            chain.weights = tuple(weight + sign * change for weight, change in zip(start, only.weights, strict=True))
            ends.append(gives(example, chain))
        chain.weights = start
        expected = np.moveaxis(ends[0] - ends[1], 1, -1).reshape(-1, ends[0].shape[1]) / 2
        found = np.zeros_like(expected)
        found[:, example.links[-1].fit.site.outputs] = np.concatenate(moved, axis=1).transpose(1, 0, 2)
        gaps = np.abs(expected - found) / np.sqrt(np.square(expected).mean())
        # A step of a ten-thousandth moves the outputs by some of these, of which float32 leaves three digits; where it makes an
        # activation change its mind, the outputs are off by more.
        assert (gaps.max() if small == 1 else np.quantile(gaps, 0.9)) < (1e-4 if small == 1 else 5e-3)


# --- what is found --------------------------------------------------------------------------------------------------------


def error_behind(example: Net, chain: Chain) -> float:
    """Return the chain's loss, computed from what ONNX Runtime gives: beyond what the activation lets pass, anything is right."""
    site, model = example.links[-1].fit.site, written(example, chain)
    behind = site.after.output if site.after is not None and not site.shortcut else site.target
    ends = [outputs(each, {"x": example.image}, behind)[0].astype(np.float64) for each in (example.dense, model)]
    low, high = site.clamp or (-np.inf, np.inf)
    gap = np.where(
        ends[0] <= low, np.maximum(ends[1] - low, 0), np.where(ends[0] >= high, np.minimum(ends[1] - high, 0), ends[1] - ends[0])
    )
    return float(np.square(gap).sum())


def test_the_loss_never_grows_and_is_that_of_the_model_that_is_written(example: Net, pool: ThreadPoolExecutor) -> None:
    chain = example.chain(pool)
    losses = [chain.loss()]
    assert losses[0] == pytest.approx(error_behind(example, chain), rel=1e-3)
    for _ in range(4):
        is_better = chain.improve(4)
        losses.append(chain.loss())
        assert losses[-1] <= losses[-2]
        assert losses[-1] < losses[-2] or not is_better
        assert losses[-1] == pytest.approx(error_behind(example, chain), rel=1e-3)
    assert losses[-1] < 0.7 * losses[0]


def reachable(normal: Normal) -> tuple[onnx.ModelProto, list[dict[str, np.ndarray]]]:
    """Return Convs of 6 inner channels in between whose product has rank 3: three channels are enough, if they are other ones."""
    first, product = normal(6, 6), normal(5, 3) @ normal(3, 6)
    dense = from_text(
        "m (float[N,6,5,5] x) => (float[N,5,5,5] b) { a = Conv (x, w1, b1) b = Conv (a, w2, b2) }",
        w1=first[:, :, None, None],
        b1=normal(6),
        w2=(product @ np.linalg.inv(first))[:, :, None, None],
        b2=normal(5),
    )
    return dense, batches(20, 6, 5, 5, name="x", count=4)


def narrowed(dense: onnx.ModelProto, name: str, channels: int, *keep: int) -> Matched:
    return match(dense, narrowing(spaces=(PlannedSpace(name, channels, keep),)))


def test_together_two_convs_reach_what_they_do_not_one_by_one(normal: Normal) -> None:
    dense, feeds = reachable(normal)
    matched = narrowed(dense, "a", 6, 0, 2, 5)
    errors = []
    for has_chains in (False, True):
        fitted = fit_layers(dense, matched, feeds, options=FitOptions(has_chains=has_chains), progress=lambda *_: None)
        errors.append(distance(*(outputs(model, feeds[0])[0] for model in (dense, fitted.model))))
    assert errors[0] > 0.1
    assert errors[1] < 0.2 * errors[0]


def test_channels_that_are_off_find_their_teachers(normal: Normal, pool: ThreadPoolExecutor) -> None:
    body = "a = Conv (x, w_6_4_3_3, b_6) r = Relu (a) b = Conv (r, w_5_6_1_1, b_5) end = Identity (b)"
    example = net(body, normal, size=(8, 8))
    chain = example.chain(pool)
    start = chain.loss()
    for _ in range(8):
        chain.improve(8)
    assert chain.loss() < 0.02 * start


def test_half_of_a_block_is_nearer_on_other_samples_too(normal: Normal) -> None:
    dense, feeds = residual_net(), batches(50, 4, 6, 6, count=8)
    other = {"image": normal(100, 4, 6, 6).astype(np.float32)}
    errors = []
    for has_chains in (False, True):
        options = FitOptions(has_chains=has_chains, is_choosing=True)
        fitted = fit_layers(dense, narrowed(dense, "first", 8, 0, 1, 2, 3), feeds, options=options, progress=lambda *_: None)
        errors.append(distance(*(outputs(model, other)[0] for model in (dense, fitted.model))))
    assert errors[1] < 0.97 * errors[0]


def test_weights_that_are_no_better_on_samples_held_back_are_not_taken(normal: Normal, pool: ThreadPoolExecutor) -> None:
    body = "a = Conv (x, w_8_4_3_3, b_8) r = Relu (a) b = Conv (r, w_5_8_3_3, b_5) end = Identity (b)"
    example = net(body, normal)
    fitted = chain_module.fit_chain(example.links, example.windows, example.seen, pool)
    assert fitted is not None
    # Held back: samples on which the weights are perfect as they are.
    perfect = replace(example.seen[-1], goal=outputs(example.masked, {"x": example.image[3:]}, "b")[0])
    assert chain_module.fit_chain(example.links, example.windows, [example.seen[0], perfect], pool) is None
    assert chain_module.fit_chain(example.links, example.windows, example.seen[:1], pool) is None


# --- what stays -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("depthwise", ["", "d = Conv <group = 8, pads = [1, 1, 1, 1]> (q, w2, b2) r = Clip (d, low, high)"])
def test_removed_channels_have_no_weight_in_what_would_read_them(depthwise: str, normal: Normal) -> None:
    middle = depthwise or "r = Relu (q)"
    dense = from_text(
        f"""m (float[N,4,6,6] x) => (float[N,5,6,6] b) {{ a = Conv (x, w1, b1) q = Clip (a, low, high) {middle}
        b = Conv (r, w3, b3) }}""",
        w1=normal(8, 4, 1, 1),
        b1=normal(8),
        w3=normal(5, 8, 1, 1),
        b3=normal(5),
        **({"w2": normal(8, 1, 3, 3), "b2": normal(8)} if depthwise else {}),
        low=np.float32(0),
        high=np.float32(6),
    )
    feeds = batches(20, 4, 6, 6, name="x")
    for is_choosing in (False, True):
        options = FitOptions(is_choosing=is_choosing)
        fitted = fit_layers(dense, narrowed(dense, "a", 8, 1, 2, 6), feeds, options=options, progress=lambda *_: None)
        (space,) = fitted.matched.spaces
        gone = np.setdiff1d(np.arange(8), space.keep)
        assert len(gone) == 5
        assert is_choosing or space.keep.tolist() == [1, 2, 6]
        last, leading = get_tensor(fitted.model, "w3"), get_tensor(fitted.model, "w2" if depthwise else "w1")
        assert not last[:, gone].any()
        assert last[:, space.keep].all()
        assert leading[space.keep].all()
        # Chosen when the first had been fitted already; if they are not fitted together then, it stays as it is.
        assert is_choosing or not leading[gone].any()


def test_channels_of_a_first_conv_that_go_take_their_moments_along(normal: Normal) -> None:
    body = """a = Conv <group = 4> (x, w_4_1_3_3, b_4) r = Relu (a) b = Conv (r, w_5_4_1_1, b_5) end = Identity (b)"""
    link, last = net(body, normal).links
    site = replace(last.fit.site, inputs=np.array([[1, 3]]))
    fewer, _ = linked([link, replace(last, fit=replace(last.fit, site=site))])
    assert fewer.fit.site.outputs.tolist() == fewer.fit.site.inputs.tolist() == [[1], [3]]
    for name in ("u", "t", "uu", "ut", "tt"):
        np.testing.assert_array_equal(getattr(fewer.total, name), getattr(link.total, name)[[1, 3]])
    np.testing.assert_array_equal(fewer.at.weight, link.at.weight[[1, 3]])


def test_jobs_and_memory_do_not_change_a_bit(normal: Normal, monkeypatch: pytest.MonkeyPatch) -> None:
    dense, _ = reachable(normal)
    matched, feeds = narrowed(dense, "a", 6, 0, 2, 5), batches(7, 6, 5, 5, name="x", count=11)
    found = set()
    for jobs, memory_share, held in ((1, 1.0, 2**27), (2, 1.0, 2**27), (3, 0.25, 2**27), (2, 1.0, 10**5), (1, 1.0, 0)):
        monkeypatch.setattr(newton, "HELD_BYTES", held)
        options = FitOptions(jobs=jobs, memory_share=memory_share, is_choosing=True)
        fitted = fit_layers(dense, matched, feeds, options=options, progress=lambda *_: None)
        found.add(hashlib.sha256(fitted.model.SerializeToString(deterministic=True)).hexdigest())
    assert len(found) == 1


# --- which Convs make a chain ---------------------------------------------------------------------------------------------


def chains_of(body: str, *, result: str = "y") -> dict[str, str]:
    model = from_text(f"m (float[N,4,H,W] x) => (float[N,C,H,W] {result}) {{ {body} }}")
    known = {"x", *(name for node in model.graph.node for name in node.output)}
    for name in dict.fromkeys(name for node in model.graph.node for name in node.input if name not in known):
        set_tensor(model, name, np.ones({"w": (4, 4, 1, 1), "d": (4, 1, 1, 1)}.get(name[0], (4,))))
    sites = find_sites(Flow(model), Constants(model), Matched())
    return {last: "".join(site.name for site in before) for last, before in find_chains(Flow(model), sites).items()}


@pytest.mark.parametrize(
    ("body", "chains"),
    [
        ("a = Conv (x, w1, b1) y = Conv (a, w2, b2)", {"y": "a"}),
        ("a = Conv (x, w1, b1) r = Relu (a) y = Conv (r, w2, b2)", {"y": "a"}),
        (f"a = Conv (x, w1) n = {BN} (a, g1, b1, m1, v1) r = Relu (n) y = Conv (r, w2, b2)", {"y": "a"}),
        ("a = Conv (x, w1, b1) r = Relu (a) b = Conv (r, w2, b2) q = Relu (b) y = Conv (q, w3, b3)", {"b": "a", "y": "ab"}),
        (
            "a = Conv (x, w1, b1) b = Conv (a, w2, b2) c = Conv (b, w3, b3) y = Conv (c, w4, b4)",
            {"b": "a", "c": "ab", "y": "bc"},
        ),
        # What a depthwise Conv gives is for the Conv behind it to say.
        ("a = Conv (x, w1, b1) b = Conv <group = 4> (a, d2, b2) y = Conv (b, w3, b3)", {"y": "ab"}),
        ("a = Conv (x, w1, b1) y = Conv <group = 4> (a, d2, b2)", {"y": "a"}),
        ("a = Conv (x, w1, b1) r = Relu (a) b = Conv (r, w2, b2) y = Add (b, x)", {"b": "a"}),
        ("a = Conv (x, w1, b1) s = Add (a, x) r = Relu (s) y = Conv (r, w2, b2)", {}),  # what it gives is not its own
        ("a = Conv (x, w1, b1) r = Sigmoid (a) y = Conv (r, w2, b2)", {}),
        ("a = Conv (x, w1, b1) r = Relu (a) b = Conv (r, w2, b2) y = Add (b, r)", {}),  # somebody else reads it
        ("a = Conv (x, w1) r = Relu (a) y = Conv (r, w2, b2)", {}),  # no constant to fit
        ("a = Conv (x, w1, b1) r = Relu (a) y = Conv (r, w2)", {}),
        ("a = Conv (x, w1, b1) r = Relu (a) y = Conv (r, w1, b2)", {}),  # a shared weight
        ("a = Conv (x, w1, b1) r = MaxPool <kernel_shape = [1, 1]> (a) y = Conv (r, w2, b2)", {}),
    ],
)
def test_a_chain_is_convs_with_nothing_else_between_them(body: str, chains: dict[str, str]) -> None:
    assert chains_of(body) == chains


def test_what_is_an_output_itself_leads_no_chain() -> None:
    body = "a = Conv (x, w1, b1) r = Relu (a) y = Conv (r, w2, b2)"
    assert chains_of(body, result="r, float[N,C,H,W] y") == {}


# --- how much is looked at ------------------------------------------------------------------------------------------------


@st.composite
def windows(draw: st.DrawFn) -> tuple[list[Window], tuple[int, ...]]:
    """Draw two or three windows, each moving over what the one before gives, and the size of the image."""
    rank = draw(st.integers(1, 2))
    size = tuple(draw(st.integers(12, 30)) for _ in range(rank))

    def one() -> Window:
        each = [[draw(st.integers(low, high)) for _ in range(rank)] for low, high in ((1, 3), (1, 3), (1, 2), (0, 2), (0, 2))]
        return Window(*map(tuple, each))

    return [one() for _ in range(draw(st.integers(2, 3)))], size


@settings(deadline=None, max_examples=200, derandomize=True)
@given(windows(), st.integers(3, 9), st.integers(0, 5))
def test_a_crop_gives_what_the_whole_image_gives_there(drawn: Any, side: int, seed: int) -> None:
    moving, size = drawn
    left = size
    for window in moving:
        left = window.places(left)
        assume(all(length > 0 for length in left))
    ranges = [chain_module._Range.of(moving, length, axis, side) for axis, length in enumerate(size)]
    assume(all(each.count > 0 for each in ranges))
    rng = np.random.default_rng(seed)
    image = rng.integers(-4, 5, (1, 1, *size)).astype(np.float64)
    kernels = [rng.integers(-4, 5, each.kernel) for each in moving]

    def through(values: np.ndarray, moving: list[Window]) -> np.ndarray:
        for window, kernel in zip(moving, kernels, strict=True):
            axes = range(-len(kernel.shape), 0)
            # A constant, so that padding behind the first Conv differs from what it gives.
            values = (
                np.tensordot(patches(values, window)[..., 0, *[slice(None)] * kernel.ndim], kernel, (axes, range(kernel.ndim)))[
                    :, None
                ]
                + 1
            )
        return values

    spans = [each.draw(rng) for each in ranges]
    pixels, places = (tuple(span[which] for span in spans) for which in (0, 1))
    cropped = image[(slice(None), slice(None), *pixels)]
    assert cropped.shape[2:] == tuple(each.length for each in ranges)
    bare = [window.unpadded() for window in moving]
    whole, part = through(image, moving), through(cropped, bare)
    np.testing.assert_array_equal(part, whole[(slice(None), slice(None), *places)])
    length = cropped.shape[2:]
    for number, window in enumerate(bare):
        assert set(window.unseen(length)) == {0}
        length = window.places(length)
        assert length == tuple(each.spans[number] for each in ranges)
    # No more places of the first than asked for, but what one place of the last needs.
    assert all(each.spans[0] <= side or each.count == 1 for each in ranges)


def fits_of(body: str, *shapes: tuple[int, ...]) -> tuple[Fit, Fit]:
    model = from_text(
        f"m (float[N,C,H,W] x) => (float[N,D,H,W] b) {{ {body} }}",
        **{f"w{number}": np.ones(shape) for number, shape in enumerate(shapes, 1)},
        **{f"b{number}": np.ones(shape[0]) for number, shape in enumerate(shapes, 1)},
    )
    constants = Constants(model)
    first, second = (Fit.of(site, constants, constants) for site in find_sites(Flow(model), constants, Matched()))
    return first, second


def unfolded_bytes(fits: Sequence[Fit], scene: Scene, size: tuple[int, ...]) -> int:
    """Return what the patches of all samples take."""
    if scene.box is not None:
        size = tuple(each.length for each in scene.box)
    places = []
    for window in scene.windows:
        size = window.places(size)
        places.append(math.prod(size))
    return 4 * scene.samples * sum(n * len(fit.site.inputs) * (fit.unknowns + 1) for n, fit in zip(places, fits, strict=True))


DEPTHWISE = "a = Conv <group = {c}, pads = [1, 1, 1, 1]> (x, w1, b1) r = Relu (a) b = Conv (r, w2, b2)"
EXPANDING = "a = Conv (x, w1, b1) r = Relu (a) b = Conv <group = {c}, pads = [1, 1, 1, 1]> (r, w2, b2)"
DENSE = "a = Conv <pads = [1, 1, 1, 1]> (x, w1, b1) r = Relu (a) b = Conv <pads = [1, 1, 1, 1]> (r, w2, b2)"


@pytest.mark.parametrize("size", [(1, 1), (7, 7), (32, 32), (112, 112), (8, 512), (1080, 1920)], ids=str)
@pytest.mark.parametrize("channels", [8, 960])
@pytest.mark.parametrize("kind", ["depthwise", "expanding", "dense"])
def test_patches_take_no_more_memory_than_they_may(kind: str, channels: int, size: tuple[int, ...]) -> None:
    c = channels
    if kind == "depthwise":
        fits = fits_of(DEPTHWISE.format(c=c), (c, 1, 3, 3), (c // 4, c, 1, 1))
    elif kind == "expanding":
        fits = fits_of(EXPANDING.format(c=c), (c, c // 4, 1, 1), (c, 1, 3, 3))
    else:
        fits = fits_of(DENSE, (c // 2, c // 2, 3, 3), (c // 2, c // 2, 3, 3))
    scene = Scene.of(fits, size)
    assert scene is not None
    assert scene.samples >= 3
    assert unfolded_bytes(fits, scene, size) <= UNFOLDED_BYTES
    crop = size if scene.box is None else tuple(each.length for each in scene.box)
    assert scene.samples * math.prod(scene.windows[0].places(crop)) <= POSITIONS
    assert (scene.box is not None) == (math.prod(size) > 2000)


def test_a_chain_is_left_alone_whose_one_sample_is_too_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chain_module, "UNFOLDED_BYTES", 10**4)
    dense, plan = residual_net(), plan_of(grouped("first", 8, 8))
    found = recover(dense, plan, RESIDUAL_FEEDS)
    expected = recover(dense, plan, RESIDUAL_FEEDS, options=FitOptions(has_chains=False))
    assert found.model.SerializeToString() == expected.model.SerializeToString()


def test_images_too_small_for_a_crop_without_padding_are_looked_at_whole() -> None:
    body = "a = Conv <pads = [1, 1, 1, 1]> (x, w1, b1) b = Conv <dilations = [40, 40], pads = [40, 40, 40, 40]> (a, w2, b2)"
    scene = Scene.of(fits_of(body, (4, 4, 3, 3), (4, 4, 3, 3)), (64, 64))
    assert scene is not None
    assert scene.box is None


@pytest.mark.skipif(not ZOO.exists(), reason="the real models of ../shared/zoo are not here")
def test_every_chain_of_a_mobile_net_has_its_samples() -> None:
    model = onnx.load(ZOO / "imagenet_mobilenet_v2_bn.onnx")
    shapes, constants = subject(model).shapes, Constants(model)
    sites = {site.name: site for site in find_sites(Flow(model), constants, Matched())}
    chains = find_chains(Flow(model), list(sites.values()))
    assert [len(before) for before in chains.values()].count(2) > 15
    for last, before in chains.items():
        fits = [Fit.of(site, constants, constants) for site in (*before, sites[last])]
        size = (224, 224) if before[0].source in Flow(model).inputs else shapes[before[0].source][2:]
        scene = Scene.of(fits, size)
        assert scene is not None
        assert scene.samples >= 25
        assert unfolded_bytes(fits, scene, size) <= UNFOLDED_BYTES


def test_samples_are_taken_evenly_from_all_batches() -> None:
    assert shared_out(10, 4) == [2, 3, 2, 3]
    assert shared_out(2, 5) == [0, 0, 1, 0, 1]
    for total, count in ((0, 3), (58, 20), (1000, 7)):
        numbers = shared_out(total, count)
        assert sum(numbers) == total
        assert max(numbers) - min(numbers) <= 1


def test_parts_have_all_samples_in_their_order(normal: Normal) -> None:
    values = normal(21, 2, 3, 3).astype(np.float32)
    seen = [Seen(values[start : start + 7], values[start : start + 7] + 1, values[start : start + 7] + 2) for start in (0, 7, 14)]
    parts = in_parts(seen)
    assert len(parts) == PARTS
    assert {len(part.images) for part in parts} == {2, 3}
    for name, more in (("images", 0), ("goal", 1), ("added", 2)):
        np.testing.assert_array_equal(np.concatenate([getattr(part, name) for part in parts]), values + np.float32(more))
    alone = in_parts([Seen(values[:1], values[:1], None)])
    assert len(alone) == 1
    assert alone[0].added is None


def test_images_of_other_sizes_than_the_first_are_passed_over(normal: Normal) -> None:
    dense = residual_net()
    for value in (dense.graph.input[0], dense.graph.output[0]):
        for axis in (2, 3):
            value.type.tensor_type.shape.dim[axis].dim_param = "HW"[axis - 2]
    feeds = [{"image": normal(20, 4, side, side).astype(np.float32)} for side in (6, 8, 6, 7)]
    plan = plan_of(grouped("first", 8, 8))
    found = recover(dense, plan, feeds).model
    for batch in feeds:
        errors = [
            distance(outputs(dense, batch)[0], outputs(model, batch)[0]) for model in (mask(dense, match(dense, plan)), found)
        ]
        assert errors[1] < errors[0]
