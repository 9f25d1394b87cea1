"""Recovery of plans with widths, dropped branches and groups: which channels stay, what is zero, and that it can be written."""

from pathlib import Path

import numpy as np
import onnx
import pytest
from fitting import Normal, batches, distance, grouped, outputs
from random_cnn import RandomCnn
from tiny import from_text, gconv, get_tensor, residual_net, save
from widths import Done, Odds, Subject, graph, plan_of, random_plan, subject

from onnx_gconv.errors import DataError
from onnx_gconv.model.constants import Constants
from onnx_gconv.plans import Plan, PlannedSpace, read_plan
from onnx_gconv.recover.fitting import FitOptions, FittedModel, fit_layers
from onnx_gconv.recover.flow import Flow
from onnx_gconv.recover.site import find_sites
from onnx_gconv.rewrite.group import carry_out, group, placement_of
from onnx_gconv.rewrite.mask import dropped_share, mask
from onnx_gconv.rewrite.match import Matched, match
from onnx_gconv.verification import verify

TOLERANCE = 5e-5  # float32 rounding through a dozen layers, where outputs may cancel
ODDS = (
    Odds(narrow=0.8),
    Odds(narrow=0.7, group=0.6),
    Odds(drop=0.7, narrow=0.3),
    Odds(narrow=0.6, drop=0.3, group=0.6),
    Odds(narrow=0.9, share=0.3),
    Odds(narrow=0.4, group=0.2, rank=0.7),
)


def images(count: int, seed: int = 5) -> list[dict[str, np.ndarray]]:
    """Return samples for models that take one at a time."""
    rng = np.random.default_rng(seed)
    return [{"x": rng.standard_normal((1, 3, 8, 8)).astype(np.float32)} for _ in range(count)]


def fitted_to(model: onnx.ModelProto, matched: Matched, feeds: list[dict[str, np.ndarray]], **options: bool) -> FittedModel:
    return fit_layers(model, matched, feeds, options=FitOptions(**options), progress=lambda *_: None)


def check(it: Subject, plan: Plan, feeds: list[dict[str, np.ndarray]], *, is_choosing: bool) -> tuple[int, int]:
    """Check one plan, and return how many of its spaces were open and how many got other channels."""
    matched = match(it.model, plan, shapes=it.shapes)
    found = fitted_to(it.model, matched, feeds, is_choosing=is_choosing)
    # As many channels of every space as the plan says, and its own wherever nothing could be chosen.
    fitted = {site.name for site in find_sites(Flow(it.model), Constants(it.model), matched)}
    grouped_layers = {each.layer.name for each in matched.layers}
    opened = changed = 0
    for before, after in zip(matched.spaces, found.matched.spaces, strict=True):
        space = before.space
        assert after.space is space
        assert len(after.keep) == len(before.keep)
        assert sorted({*after.keep.tolist()}) == after.keep.tolist()
        is_open = is_choosing and space.is_alone and len(space.readers) == 1 and space.readers[0] in fitted
        is_open = is_open and not grouped_layers & {*space.readers, *space.writers}
        opened += is_open
        changed += before.keep.tolist() != after.keep.tolist()
        assert is_open or before.keep.tolist() == after.keep.tolist()
    # The plan with these channels, matched anew, is what recovery says it is masked by.
    rechosen = plan.keeping({each.space.name: tuple(each.keep.tolist()) for each in found.matched.spaces})
    anew = match(it.model, rechosen, shapes=it.shapes)
    for side in ("inputs", "outputs"):
        one, two = getattr(anew, side), getattr(found.matched, side)
        assert {name: value.tolist() for name, value in one.items()} == {name: value.tolist() for name, value in two.items()}
    # Masked already, to the last bit; and what is written is the same function.
    assert dropped_share(found.model, found.matched) == 0.0
    assert mask(found.model, found.matched).SerializeToString() == found.model.SerializeToString()
    placement = placement_of(found.model, anew, shapes=it.shapes)
    written = carry_out(found.model, anew, placement)
    assert Done(anew, placement, found.model, written).verified(tolerance=TOLERANCE).passed
    return opened, changed


@pytest.mark.parametrize("kind", range(len(ODDS)))
def test_a_recovered_model_is_masked_and_can_be_written(kind: int) -> None:
    counts = []
    for seed in range(12 * kind, 12 * kind + 12):
        it = subject(RandomCnn(seed).model())
        plan = random_plan(it, np.random.default_rng([seed, 1]), ODDS[kind])
        counts.append(check(it, plan, images(4), is_choosing=seed % 3 > 0))
    opened, changed = np.sum(counts, axis=0)
    assert opened >= changed
    assert opened > 2


@pytest.mark.slow
@pytest.mark.parametrize("start", range(60, 300, 60))
def test_many_recovered_models_are_masked_and_can_be_written(start: int) -> None:
    for seed in range(start, start + 60):
        it = subject(RandomCnn(seed).model())
        plan = random_plan(it, np.random.default_rng([seed, 1]), ODDS[seed % len(ODDS)])
        check(it, plan, images(4), is_choosing=seed % 3 > 0)


# --- which channels stay --------------------------------------------------------------------------------------------------


def block(normal: Normal) -> onnx.ModelProto:
    """Return a block of two Convs whose inner channels 1, 4 and 6 do all the work."""
    last = 0.01 * normal(8, 8, 3, 3)
    last[:, [1, 4, 6]] *= 100
    return from_text(
        """m (float[N,8,6,6] x) => (float[N,8,6,6] y) { first = Conv <pads = [1, 1, 1, 1]> (x, w1, b1) r = Relu (first)
        last = Conv <pads = [1, 1, 1, 1]> (r, w2, b2) y = Add (last, x) }""",
        w1=normal(8, 8, 3, 3) / 4,
        b1=normal(8) / 4,
        w2=last,
        b2=normal(8),
    )


NORM = "BatchNormalization (d, s_8, t_8, m_8, v_8)"
FEEDS = batches(20, 8, 6, 6, name="x")


@pytest.mark.parametrize("has_chains", [True, False])
def test_the_channels_that_matter_are_chosen_whatever_the_plan_keeps(normal: Normal, *, has_chains: bool) -> None:
    dense = block(normal)
    matched = match(dense, plan_of(spaces=(PlannedSpace("first", 8, (0, 2, 3)),)))
    chosen, given = (fitted_to(dense, matched, FEEDS, is_choosing=flag, has_chains=has_chains) for flag in (True, False))
    assert chosen.matched.spaces[0].keep.tolist() == [1, 4, 6]
    assert given.matched.spaces[0].keep.tolist() == [0, 2, 3]
    weight = get_tensor(chosen.model, "w2")
    assert np.flatnonzero(np.abs(weight).sum(axis=(0, 2, 3))).tolist() == [1, 4, 6]
    errors = [distance(*(outputs(model, FEEDS[0])[0] for model in (dense, each.model))) for each in (chosen, given)]
    assert errors[0] < 0.2 * errors[1]


def test_channels_are_chosen_by_what_the_normalization_behind_makes_of_them(normal: Normal) -> None:
    """Channel 0 feeds an output that is scaled up a hundred times, channel 1 one that is scaled down as much."""
    weight = np.zeros((2, 2, 1, 1))
    weight[0, 0], weight[1, 1] = 1.0, 10.0
    dense = from_text(
        """m (float[N,2,6,6] x) => (float[N,2,6,6] y) { a = Conv (x, w1, b1) r = Relu (a) b = Conv (r, w2)
        y = BatchNormalization (b, gamma, beta, mean, var) }""",
        w1=np.eye(2)[:, :, None, None],
        b1=np.zeros(2),
        w2=weight,
        gamma=np.array([100.0, 0.01]),
        beta=np.zeros(2),
        mean=np.zeros(2),
        var=np.ones(2),
    )
    matched = match(dense, plan_of(spaces=(PlannedSpace("a", 2, (1,)),)))
    found = fitted_to(dense, matched, batches(20, 2, 6, 6, name="x"), is_choosing=True)
    assert found.matched.spaces[0].keep.tolist() == [0]


def test_a_gemm_behind_pixels_chooses_channels_whole(normal: Normal) -> None:
    weight = 0.01 * normal(5, 6, 4)
    weight[:, [2, 3]] *= 100
    dense = from_text(
        """m (float[N,4,2,2] x) => (float[N,5] y) { a = Conv (x, w1, b1) r = Relu (a) f = Flatten (r)
        y = Gemm <transB = 1> (f, w2, b2) }""",
        w1=normal(6, 4, 1, 1),
        b1=normal(6),
        w2=weight.reshape(5, 24),
        b2=normal(5),
    )
    model = subject(dense_of_one(dense))
    matched = match(model.model, plan_of(spaces=(PlannedSpace("a", 6, (0, 1)),)), shapes=model.shapes)
    found = fitted_to(model.model, matched, [{"x": normal(1, 4, 2, 2).astype(np.float32)} for _ in range(60)], is_choosing=True)
    assert found.matched.spaces[0].keep.tolist() == [2, 3]
    assert np.flatnonzero(np.abs(get_tensor(found.model, "w2")).sum(axis=0)).tolist() == list(range(8, 16))


def dense_of_one(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return the model for one sample at a time."""
    for value in (*model.graph.input, *model.graph.output):
        value.type.tensor_type.shape.dim[0].dim_value = 1
    return model


@pytest.mark.parametrize(
    "body",
    [
        "b = Conv (r, w2, b2) c = Conv (r, w3, b3) y = Add (b, c)",  # two readers
        "m = Concat <axis = 1> (r, x) b = Conv (m, wide, b2) y = Relu (b)",  # not alone on its axis
        'y = ConvTranspose <auto_pad = "SAME_UPPER"> (r, w2, b2)',  # the reader is not fitted
    ],
)
def test_other_spaces_keep_the_plans_channels(body: str, normal: Normal) -> None:
    tensors = {f"{kind}{number}": normal(*(8, 8, 1, 1) if kind == "w" else (8,)) for kind in "wb" for number in (1, 2, 3)}
    tensors["wide"] = normal(8, 16, 1, 1)
    text = f"a = Conv (x, w1, b1) r = Relu (a) {body}"
    dense = from_text(f"m (float[N,8,6,6] x) => (float[N,8,6,6] y) {{ {text} }}", **{k: v for k, v in tensors.items() if k in text})
    it = subject(dense)
    matched = match(dense, plan_of(spaces=(PlannedSpace("a", 8, (0, 2, 5)),)), shapes=it.shapes)
    found = fitted_to(dense, matched, FEEDS, is_choosing=True)
    assert found.matched.spaces[0].keep.tolist() == [0, 2, 5]


@pytest.mark.parametrize("name", ["first", "last"])
def test_what_has_groups_keeps_the_plans_channels(name: str, normal: Normal) -> None:
    sides = {"first": (range(8), (1, 2, 3, 7)), "last": ((1, 2, 3, 7), range(8))}[name]
    layer = grouped(name, 8, 8)
    layer = type(layer)(*(layer.name, layer.label, 8, 8, 2, 0.5), *(tuple(side) for side in sides))
    dense = block(normal)
    matched = match(dense, plan_of((layer,), (PlannedSpace("first", 8, (1, 2, 3, 7)),)))
    found = fitted_to(dense, matched, FEEDS, is_choosing=True)
    assert found.matched.spaces[0].keep.tolist() == [1, 2, 3, 7]


def test_a_dropped_branch_becomes_what_it_gives_on_average_where_nothing_is_fitted_behind_it(normal: Normal) -> None:
    dense = block(normal)
    matched = match(dense, plan_of(dropped=("last",)))
    found = fitted_to(dense, matched, FEEDS).model
    assert not get_tensor(found, "w2").any()
    image = {"x": np.concatenate([batch["x"] for batch in FEEDS])}
    (branch,) = outputs(dense, image, "last")
    np.testing.assert_allclose(get_tensor(found, "b2"), branch.mean(axis=(0, 2, 3)), atol=1e-4)
    np.testing.assert_array_equal(get_tensor(found, "w1"), get_tensor(dense, "w1"))  # not fitted: nobody reads it


@pytest.mark.parametrize(
    "last", ["e = Conv (r, u_8_8_1_1, c_8)", f"d = Conv (r, u_8_8_1_1) e = {NORM}"], ids=["bias", "normalization"]
)
def test_a_dropped_branch_leaves_nothing_where_what_is_fitted_behind_it_makes_up_for_its_mean(last: str) -> None:
    inner = f"c = Conv <pads = [1, 1, 1, 1]> (s, w_8_8_3_3, b_8) r = Relu (c) {last}"
    model = graph(f"a = Conv (x, w_8_4_1_1, a_8) s = Relu (a) {inner} t = Add (e, s) q = Relu (t) y = Conv (q, w_3_8_1_1, b_3)")
    rng = np.random.default_rng(0)
    feeds = [{"x": rng.standard_normal((1, 4, 6, 6)).astype(np.float32)} for _ in range(60)]
    matched = match(model, plan_of(dropped=("d" if "d =" in last else "e",)))
    found = fitted_to(model, matched, feeds).model
    assert not get_tensor(found, "u_8_8_1_1").any()
    # Not even the Add, and a Relu of what a Relu gave, are written.
    written = group(found, matched)
    assert [node.op_type for node in written.graph.node] == ["Conv", "Relu", "Conv"]
    assert verify(found, written, tolerance=TOLERANCE, seed=0).passed
    means = [np.mean([outputs(each, feed, "y")[0] for feed in feeds], axis=(0, 1, 3, 4)) for each in (model, found)]
    np.testing.assert_allclose(means[1], means[0], atol=1e-4)


def test_an_add_that_the_model_gives_out_stays() -> None:
    model = graph("s = Relu (x) c = Conv (s, w_4_4_1_1) r = Relu (c) e = Conv (r, u_4_4_1_1) y = Add (e, s)")
    written = group(model, match(model, plan_of(dropped=("e",))))
    assert [node.op_type for node in written.graph.node] == ["Relu", "Add"]


# --- the command line -----------------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_apply_keeps_what_the_plan_keeps(folder: Path) -> None:
    """A plan that is given is carried out as it is: only `compress`, which makes the plan, may choose once more."""
    model = save(residual_net(), folder / "model.onnx")
    np.savez(folder / "calib.npz", image=np.random.default_rng(0).standard_normal((60, 4, 6, 6)).astype(np.float32))
    plan = plan_of(spaces=(PlannedSpace("first", 8, (0, 3, 7)),))
    Path("plan.json").write_text(plan.to_json(), encoding="utf-8")
    done = gconv("apply", model, "plan.json", "--calib", "calib.npz", "--allow-drop", "-o", "out.onnx")
    assert done.code == 0, done.err
    assert read_plan("plan.json").spaces == plan.spaces
    written = onnx.load("out.onnx")
    first, last = (get_tensor(written, node.input[1]) for node in written.graph.node if node.output[0] in ("first", "last"))
    assert first.shape == (3, 8, 3, 3)
    matched = match(residual_net(), plan)
    expected = fitted_to(residual_net(), matched, [{"image": part} for part in np.split(np.load("calib.npz")["image"], [50])])
    np.testing.assert_allclose(last, get_tensor(expected.model, "w2")[:, [0, 3, 7]], atol=1e-5)


# --- data and models that are hard ----------------------------------------------------------------------------------------


def narrow_net(normal: Normal, *, rank: int = 2, dtype: type = np.float32, **tensors: np.ndarray) -> onnx.ModelProto:
    """Return a block around an Add whose inner space has 8 channels, with normalizations."""
    kind, axes, pads = {np.float32: "float", np.float16: "float16"}[dtype], ",".join("5" * rank), ",".join("1" * 2 * rank)
    made = {"w1": normal(8, 4, *[3] * rank) / 4, "w2": normal(4, 8, *[3] * rank) / 6}
    for number, channels in (("1", 8), ("2", 4)):
        made |= {f"gamma{number}": 1 + 0.1 * normal(channels), f"var{number}": 0.5 + np.square(normal(channels))}
        made |= {f"beta{number}": normal(channels) / 4, f"mean{number}": normal(channels) / 4}
    return from_text(
        f"""m ({kind}[N,4,{axes}] x) => ({kind}[N,4,{axes}] y) {{ a = Conv <pads = [{pads}]> (x, w1)
        n = BatchNormalization (a, gamma1, beta1, mean1, var1) r = Relu (n) b = Conv <pads = [{pads}]> (r, w2)
        c = BatchNormalization (b, gamma2, beta2, mean2, var2) s = Add (c, x) y = Relu (s) }}""",
        **{name: value.astype(dtype) for name, value in (made | tensors).items()},
    )


HALF = plan_of(spaces=(PlannedSpace("a", 8, (0, 1, 2, 3)),))


def recovered(dense: onnx.ModelProto, feeds: list[dict[str, np.ndarray]], plan: Plan = HALF) -> tuple[FittedModel, float, float]:
    """Return the model fitted with other channels chosen, and its error on the first batch beside that of the masked model."""
    matched = match(dense, plan)
    found = fitted_to(dense, matched, feeds, is_choosing=True)
    assert mask(found.model, found.matched).SerializeToString() == found.model.SerializeToString()
    (wanted,), *ends = (outputs(model, feeds[0]) for model in (dense, mask(dense, found.matched), found.model))
    before, after = (float(np.linalg.norm(wanted.astype(np.float64) - end)) for (end,) in ends)
    assert np.isfinite([before, after]).all()
    return found, before, after


@pytest.mark.parametrize("rank", [1, 2, 3])
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_convs_of_any_rank_and_precision_are_narrowed(rank: int, dtype: type, normal: Normal) -> None:
    feeds = [{"x": normal(16, 4, *[5] * rank).astype(dtype)} for _ in range(6)]
    found, before, after = recovered(narrow_net(normal, rank=rank, dtype=dtype), feeds)
    assert after < 0.8 * before
    assert {get_tensor(found.model, name).dtype for name in ("w1", "w2", "mean1", "mean2")} == {np.dtype(dtype)}


def test_inputs_that_are_all_zero_change_nothing_that_can_be_seen(normal: Normal) -> None:
    feeds = [{"x": np.zeros((8, 4, 5, 5), np.float32)} for _ in range(3)]
    _, before, after = recovered(narrow_net(normal), feeds)
    assert after <= before + 1e-3


def test_channels_that_never_pass_the_activation_go_first(normal: Normal) -> None:
    dead = [0, 3, 5, 6]
    beta = normal(8) / 4
    beta[dead] = -100
    feeds = batches(16, 4, 5, 5, name="x", count=6)
    dense = narrow_net(normal, beta1=beta)
    found, before, after = recovered(dense, feeds)
    assert found.matched.spaces[0].keep.tolist() == [1, 2, 4, 7]
    assert after < 1e-3 * np.linalg.norm(outputs(dense, feeds[0])[0])
    assert before < 1e-3 * np.linalg.norm(outputs(dense, feeds[0])[0])


def test_where_all_channels_are_dead_the_branch_is_its_constant(normal: Normal) -> None:
    feeds = batches(16, 4, 5, 5, name="x", count=4)
    _, before, after = recovered(narrow_net(normal, beta1=np.full(8, -100.0)), feeds)
    assert max(before, after) < 1e-2


@pytest.mark.parametrize("off", [[2], [0, 1, 2, 3, 4, 5], list(range(8))])
def test_channels_that_a_normalization_switches_off_are_worth_only_their_constant(off: list[int], normal: Normal) -> None:
    gamma = 1 + 0.1 * normal(8)
    gamma[off] = 0.0
    feeds = batches(16, 4, 5, 5, name="x", count=6)
    dense = narrow_net(normal, gamma1=gamma)
    found, before, after = recovered(dense, feeds)
    assert after <= before + 1e-3
    live = [channel for channel in range(8) if channel not in off]
    if len(live) <= 4:
        assert {*live} <= {*found.matched.spaces[0].keep.tolist()}


def test_a_branch_that_is_constant_is_left_so(normal: Normal) -> None:
    feeds = batches(16, 4, 5, 5, name="x", count=4)
    _, before, after = recovered(narrow_net(normal, w2=np.zeros((4, 8, 3, 3))), feeds)
    assert max(before, after) < 1e-2


@pytest.mark.parametrize("samples", [1, 2, 3])
def test_a_few_samples_are_enough_to_go_on(samples: int, normal: Normal) -> None:
    _, before, after = recovered(narrow_net(normal), [{"x": normal(1, 4, 5, 5).astype(np.float32)} for _ in range(samples)])
    assert after < before
    recovered(narrow_net(normal), [{"x": normal(samples, 4, 5, 5).astype(np.float32)}])


@pytest.mark.parametrize("value", [np.nan, np.inf, 1e30])
def test_samples_with_impossible_numbers_are_refused(value: float, normal: Normal) -> None:
    feeds = batches(16, 4, 5, 5, name="x", count=4)
    feeds[2]["x"][3, 2, 1, 0] = value
    with pytest.raises(DataError, match=r"'a'|'b'"):
        recovered(narrow_net(normal), feeds)


def test_copies_of_one_channel_are_told_apart_by_their_order(normal: Normal) -> None:
    """Gram matrices of rank 1: nothing decides but that one of them stays.

    It has to do the work of eight: damping that suited the weights of all would keep its own as they were.
    """
    one = np.tile(normal(1, 4, 3, 3), (8, 1, 1, 1)) / 4
    same = {f"{name}1": np.full(8, value) for name, value in (("gamma", 1.0), ("var", 1.0), ("beta", 0.5), ("mean", 0.1))}
    feeds = batches(16, 4, 5, 5, name="x", count=4)
    plan = plan_of(spaces=(PlannedSpace("a", 8, (4,)),))
    dense = narrow_net(normal, w1=one, **same)
    found, before, after = recovered(dense, feeds, plan)
    assert len(found.matched.spaces[0].keep) == 1
    assert after < 0.01 * before
