"""Low rank: the factors of a weight, what each rank costs, and the form from the search to the written model."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from tiny import conv_net, gconv, get_tensor, save
from widths import graph, plan_of

import onnx_gconv
from onnx_gconv.deploy.convs import find_swept
from onnx_gconv.errors import TrainingError
from onnx_gconv.model.constants import Constants
from onnx_gconv.model.network import read
from onnx_gconv.model.shapes import input_shapes
from onnx_gconv.model.spaces import find_spaces
from onnx_gconv.pipeline.menus import ranks_of
from onnx_gconv.plans import LowRank, read_plan
from onnx_gconv.recover.emptying import errors
from onnx_gconv.recover.fitting import FitOptions, fit_layers
from onnx_gconv.recover.flow import Flow
from onnx_gconv.recover.normal import Coefficients, Sums, of_rank
from onnx_gconv.recover.spectra import left_by_rank
from onnx_gconv.recover.walk import Walk
from onnx_gconv.rewrite.low_rank import factors, product
from onnx_gconv.rewrite.mask import mask
from onnx_gconv.rewrite.match import match
from onnx_gconv.search.latency import behind

RNG = np.random.default_rng(0)
WEIGHT = RNG.standard_normal((6, 4, 3, 3)).astype(np.float32)


def error(gram: np.ndarray, difference: np.ndarray) -> float:
    return float(np.trace(difference.T @ gram @ difference))


def moments(inputs: np.ndarray, targets: np.ndarray) -> Sums:
    u, t = inputs[None], targets[None]
    uu, ut = u.transpose(0, 2, 1) @ u, u.transpose(0, 2, 1) @ t
    return Sums(len(inputs), u.sum(axis=1), t.sum(axis=1), uu, ut, np.square(t).sum(axis=1))


# ---- numbers


@pytest.mark.parametrize("rank", range(1, 6))
def test_the_factors_make_the_product_and_it_is_the_nearest_of_its_rank(rank: int) -> None:
    both = factors(WEIGHT, rank)
    assert both.first.shape == (rank, 4, 3, 3)
    assert both.second.shape == (6, rank, 1, 1)
    made = np.einsum("or,rikl->oikl", both.second[:, :, 0, 0], both.first)
    lower = product(WEIGHT, rank)
    assert np.abs(made - lower).max() < 1e-6
    values = np.linalg.svd(WEIGHT.reshape(6, -1), compute_uv=False)
    assert np.square(WEIGHT - lower).sum() == pytest.approx(np.square(values[rank:]).sum(), rel=1e-5)


def test_a_product_of_its_rank_stays_as_it_is_to_the_last_bit() -> None:
    lower = product(WEIGHT, 3)
    assert product(lower, 3) is lower
    assert product(lower, 4) is lower
    assert product(lower, 2) is not lower


@pytest.mark.parametrize("rank", [1, 2, 4])
def test_no_other_weight_of_a_rank_leaves_less(rank: int) -> None:
    """Alternating least squares from many starts is the oracle: it minimises over both factors, and knows no eigenvalue."""
    mix = RNG.standard_normal((8, 8))
    gram, weight = mix @ mix.T, RNG.standard_normal((8, 5))
    best = np.inf
    for _ in range(20):
        second = RNG.standard_normal((rank, 5))
        for _ in range(400):
            first = weight @ np.linalg.pinv(second)
            second = np.linalg.solve(first.T @ gram @ first, first.T @ gram @ weight)
        best = min(best, error(gram, weight - first @ second))
    found = left_by_rank(gram, weight)
    assert found[rank] == pytest.approx(best, rel=1e-6)
    assert found[0] == pytest.approx(error(gram, weight))
    assert found[5] == 0.0


@pytest.mark.parametrize("has_intercept", [True, False])
def test_fitted_coefficients_of_a_rank_leave_what_is_told(has_intercept: bool) -> None:
    inputs = RNG.standard_normal((200, 7)) @ RNG.standard_normal((7, 7)) + 1.0
    weight, scale = RNG.standard_normal((7, 5)), np.array([1.0, -2.0, 0.5, 3.0, 1.0])
    total = moments(inputs, inputs @ weight)
    at = Coefficients(weight[None], np.zeros((1, 5)))
    lower = of_rank(total, at, 2, scale=scale, has_intercept=has_intercept)
    assert np.linalg.matrix_rank(lower.weight[0], tol=1e-9) == 2
    off = (inputs @ (lower.weight[0] - weight) + lower.intercept[0]) * scale
    seen = inputs - inputs.mean(axis=0) if has_intercept else inputs
    assert np.square(off).sum() == pytest.approx(left_by_rank(seen.T @ seen, weight * scale)[2], rel=1e-9)


# ---- the model


def test_the_errors_of_ranks_are_shares_of_what_the_layer_gives() -> None:
    model = conv_net(channels=8)
    feeds = [{"image": RNG.standard_normal((40, 3, 8, 8)).astype(np.float32)}]
    spaces = find_spaces(model, Constants(model), {})
    _, found = errors(model, [], spaces, {"c2", "c3"}, feeds, options=FitOptions(), progress=lambda *_: None)
    assert found.keys() == {"c2", "c3"}
    for left in found.values():
        assert left[0] == pytest.approx(1.0, abs=0.05)  # of rank 0 all is left, but for the damping
        assert (np.diff(left) <= 0).all()
        assert left[-1] == 0.0


def test_recovery_brings_the_rank_in_and_fits_what_follows() -> None:
    model = conv_net(channels=8)
    feeds = [{"image": RNG.standard_normal((60, 3, 8, 8)).astype(np.float32)} for _ in range(4)]
    plan = plan_of(ranks=(LowRank("c2", 3),))
    matched = match(model, plan)
    fitted = fit_layers(model, matched, feeds, options=FitOptions(), progress=lambda *_: None)
    name = next(node for node in model.graph.node if node.output[0] == "c2").input[1]
    values = np.linalg.svd(get_tensor(fitted.model, name).reshape(8, -1).astype(np.float64), compute_uv=False)
    assert values[3] < 1e-6 * values[0]
    by_rank = onnx_gconv.evaluate(fitted.model, feeds[0], reference=model).outputs
    plain = onnx_gconv.evaluate(mask(model, matched), feeds[0], reference=model).outputs
    assert max(gap.relative_l2 for gap in by_rank.values()) < max(gap.relative_l2 for gap in plain.values())


def test_only_ranks_that_save_something_are_offered() -> None:
    model = graph("a = Conv (x, w_12_4_3_3) y = Conv (a, w_5_12_1_1)")
    (layer, *_) = read(model, input_shapes(model, {})).layers
    assert ranks_of(layer, 2) == (8, 6, 4, 2)  # of 36 x 12 weights; 9 x (36 + 12) are as many
    assert layer.break_even_rank == 9


def test_a_sweep_with_ranks_times_both_convs() -> None:
    model = conv_net(channels=32)
    network = read(model, input_shapes(model, {}))
    plain, ranked = find_swept(model, network), find_swept(model, network, with_ranks=True)
    names = [conv.name for conv in ranked]
    assert [conv.name for conv in plain] == [name for name in names if "behind" not in name]
    second = next(conv for conv in ranked if conv.name == behind("c2"))
    assert (second.ins, second.outs, second.shape.kernel) == (32, 32, (1, 1))
    assert second.shape.input == tuple(network.shapes["c2"])


# ---- the commands


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    save(conv_net(channels=12), Path("net.onnx"))
    np.savez("calib.npz", image=np.random.default_rng(1).standard_normal((80, 3, 8, 8)).astype(np.float32))
    return tmp_path


@pytest.mark.usefixtures("folder")
def test_compress_writes_two_convs_and_all_that_is_told_of_them() -> None:
    flags = ("--max-macs", "70%", "--calib", "calib.npz", "--forms", "lowrank", "--width-step", "1")
    done = gconv("compress", "net.onnx", *flags, "-o", "small.onnx")
    assert done.code == 0, done.err
    assert "factored" in done.out + done.err
    plan, report = read_plan("small.plan.json"), json.loads(Path("small.report.json").read_text(encoding="utf-8"))
    assert plan.low_rank
    assert not plan.spaces
    assert report["verify"]["passed"]
    assert [(row["name"], row["rank"]) for row in report["low_rank"]] == [(each.name, each.rank) for each in plan.low_rank]
    assert report["after"]["macs"] == plan.after.macs <= 0.7 * report["before"]["macs"]
    assert sum(row["saved"]["lowrank"] for row in report["changed"]) == report["before"]["macs"] - report["after"]["macs"]
    before, after = (onnx.load(name).graph.node for name in ("net.onnx", "small.onnx"))
    convs = [sum(node.op_type == "Conv" for node in nodes) for nodes in (before, after)]
    assert convs[1] == convs[0] + len(plan.low_rank)
    for command in ("mask", "apply"):
        again = gconv(command, "net.onnx", "small.plan.json", "-o", f"{command}.onnx")
        assert again.code == 0, again.err
    # A masked model loses nothing more.
    last = gconv("apply", "mask.onnx", "small.plan.json", "-o", "again.onnx")
    assert "dropped 0%" in last.out + last.err
    assert gconv("report", "small.report.json", "-o", "page.html").code == 0


@pytest.mark.usefixtures("folder")
def test_the_product_of_a_low_rank_is_not_trained() -> None:
    torch = pytest.importorskip("onnx_gconv.torch")
    with pytest.raises(TrainingError, match="'c2' a low rank, which training would not keep"):
        torch.load(Path("net.onnx"), plan_of(ranks=(LowRank("c2", 3),)))


def test_all_forms_walk_through_the_dense_model_once_for_errors_and_once_for_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    walks: list[int] = []
    begun = Walk.__init__

    def counted(self: Walk, flow: Flow, *args: Any, **names: Any) -> None:
        walks.append(len(flow.nodes))
        begun(self, flow, *args, **names)

    monkeypatch.setattr(Walk, "__init__", counted)
    model, images = conv_net(channels=16), RNG.standard_normal((40, 3, 8, 8)).astype(np.float32)
    planned = onnx_gconv.plan(model, max_macs=0.6, forms="all", calib={"image": images}, effort=0, gathers="free", width_step=2)
    assert planned.plan.changes
    assert (
        len(walks) == 3
    )  # errors; costs have a walk through the dense and one through the compressed model, which are the same here
