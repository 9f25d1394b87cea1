"""Partitions that layers share: any common divisor, each level refining the one before."""

from itertools import combinations

import numpy as np
import onnx
import pytest
from tiny import from_text

import onnx_gconv
from onnx_gconv.pipeline.settings import GathersName
from onnx_gconv.solve.coupled import SharedAxis, Term, largest_factor, prime_factors, solve_coupled
from onnx_gconv.verification import verify


def block_matrix(rng: np.random.Generator, outs: np.ndarray, ins: np.ndarray) -> np.ndarray:
    """Return an importance that is large exactly where these labels agree."""
    return np.where(outs[:, None] == ins[None, :], 10.0, 1.0) + 0.01 * rng.random((len(outs), len(ins)))


def shuffled(rng: np.random.Generator, groups: int, channels: int) -> np.ndarray:
    return rng.permutation(np.repeat(np.arange(groups), channels // groups))


def same_partition(one: np.ndarray, other: np.ndarray) -> bool:
    return len(set(zip(one.tolist(), other.tolist(), strict=True))) == len(set(one.tolist())) == len(set(other.tolist()))


@pytest.mark.parametrize("groups", [2, 3, 5, 6])
def test_hidden_groups_of_a_stream_are_found(groups: int) -> None:
    rng = np.random.default_rng(0)
    hidden = [shuffled(rng, groups, channels) for channels in (30, 60, 30)]
    terms = [Term(block_matrix(rng, hidden[1], hidden[0]), 1, 0), Term(block_matrix(rng, hidden[2], hidden[1]), 2, 1)]
    levels = solve_coupled([SharedAxis(30), SharedAxis(60), SharedAxis(30)], terms, most_groups=groups, only=groups, seed=0)
    assert levels[-1].groups == groups
    for number, labels in levels[-1].labels.items():
        assert same_partition(labels, hidden[number])


def test_a_small_one_in_three_is_solved_as_well_as_by_trying_everything() -> None:
    rng = np.random.default_rng(3)
    matrix = rng.random((6, 6))
    found = solve_coupled([SharedAxis(6), SharedAxis(6)], [Term(matrix, 1, 0)], most_groups=3, only=3, seed=0, starts=32)[-1]
    kept = matrix[found.labels[1][:, None] == found.labels[0][None, :]].sum()

    def pairings(left: tuple[int, ...]) -> list[list[tuple[int, int]]]:
        if not left:
            return [[]]
        return [[(left[0], other), *rest] for other in left[1:] for rest in pairings(tuple(c for c in left[1:] if c != other))]

    def best_for(pairs: list[tuple[int, int]]) -> float:
        profit = np.array([matrix[:, list(pair)].sum(axis=1) for pair in pairs])
        return max(
            float(profit[0, list(a)].sum() + profit[1, list(b)].sum() + profit[2, [c for c in range(6) if c not in (*a, *b)]].sum())
            for a in combinations(range(6), 2)
            for b in combinations([c for c in range(6) if c not in a], 2)
        )

    assert kept >= 0.999 * max(best_for(pairs) for pairs in pairings(tuple(range(6))))


def test_levels_refine_each_other_and_halves_come_first() -> None:
    rng = np.random.default_rng(0)
    sites = [SharedAxis(24), SharedAxis(24), SharedAxis(9), SharedAxis(9)]
    terms = [Term(rng.random((24, 24)), 1, 0), Term(rng.random((9, 9)), 3, 2)]
    levels = {level.groups: level.labels for level in solve_coupled(sites, terms, most_groups=24, seed=0)}
    assert sorted(levels) == [1, 2, 3, 4, 8, 9, 24]
    for coarse, fine in ((2, 4), (4, 8), (8, 24), (3, 9)):
        for number in levels[fine]:
            pairs = set(zip(levels[coarse][number].tolist(), levels[fine][number].tolist(), strict=True))
            assert len(pairs) == fine
            assert np.bincount(levels[fine][number]).tolist() == [sites[number].channels // fine] * fine


def test_a_fixed_site_keeps_its_stretches() -> None:
    matrix = np.random.default_rng(0).random((9, 9))
    (_, level, *_) = solve_coupled([SharedAxis(9, fixed=True), SharedAxis(9)], [Term(matrix, 1, 0)], most_groups=3, seed=0)
    assert level.labels[0].tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2]


def test_factors() -> None:
    assert prime_factors(360) == [2, 3, 5]
    assert [largest_factor(number) for number in (1, 8, 24, 49)] == [1, 2, 3, 7]


def stream_of(channels: int) -> onnx.ModelProto:
    """Return a stem and two residual blocks on its stream."""
    rng = np.random.default_rng(0)
    shapes = {"w0": (channels, 3, 3, 3)} | {f"w{n}": (channels, channels, 3, 3) for n in range(1, 5)}
    return from_text(
        """m (float[1,3,8,8] x) => (float[1,4,1,1] y) {
            s = Conv <pads = [1, 1, 1, 1]> (x, w0)
            a = Conv <pads = [1, 1, 1, 1]> (s, w1)  b = Relu (a)  c = Conv <pads = [1, 1, 1, 1]> (b, w2)  d = Add (s, c)
            e = Conv <pads = [1, 1, 1, 1]> (d, w3)  f = Relu (e)  g = Conv <pads = [1, 1, 1, 1]> (f, w4)  h = Add (d, g)
            p = GlobalAveragePool (h)  y = Conv (p, w5) }""",
        **{name: rng.standard_normal(shape) / 10 for name, shape in shapes.items()},
        w5=rng.standard_normal((4, channels, 1, 1)),
    )


@pytest.mark.parametrize("gathers", ["none", "shared"])
@pytest.mark.parametrize(("channels", "groups"), [(9, 3), (15, 5), (24, 3), (24, 6), (24, 12)])
def test_any_common_divisor_without_a_gather(gathers: GathersName, channels: int, groups: int) -> None:
    result = onnx_gconv.compress(stream_of(channels), groups=groups, gathers=gathers)
    assert {layer.name: layer.groups for layer in result.plan.layers if layer.in_channels > 3} == dict.fromkeys("aceg", groups)
    if gathers == "none":
        assert "Gather" not in [node.op_type for node in result.model.graph.node]
    assert result.rewritten.verification is not None
    assert result.rewritten.verification.passed


def test_a_budget_is_met_with_channels_that_cannot_be_halved() -> None:
    result = onnx_gconv.compress(stream_of(27), max_macs=0.4, gathers="none")
    assert {layer.groups for layer in result.plan.layers} <= {3, 9, 27}
    assert result.report["budget_met"]
    assert "Gather" not in [node.op_type for node in result.model.graph.node]


def joined(*, first: int, second: int, outs: int) -> onnx.ModelProto:
    """Return two Convs of one input, what they give joined, and a Conv that reads that; both are also read alone."""
    rng = np.random.default_rng(1)
    shapes = {"wa": (first, 12, 3, 3), "wb": (second, 12, 1, 1), "wc": (outs, first + second, 3, 3), "wd": (outs, outs, 1, 1)}
    return from_text(
        """m (float[1,3,8,8] x) => (float[1,N,8,8] y, float[1,M,8,8] z) {
            s0 = Conv (x, ws)  s = Relu (s0)
            a0 = Conv <pads = [1, 1, 1, 1]> (s, wa)  a = Relu (a0)  b = Conv (s, wb)
            j = Concat <axis = 1> (a, b)  k = Relu (j)
            c0 = Conv <pads = [1, 1, 1, 1]> (k, wc)  c = Relu (c0)  d = Conv (c, wd)  y0 = Relu (d)
            y = Conv (y0, we)  z = Conv (a, wf) }""",
        **{name: rng.standard_normal(shape) / 5 for name, shape in shapes.items()},
        ws=rng.standard_normal((12, 3, 1, 1)),
        we=rng.standard_normal((5, outs, 1, 1)),
        wf=rng.standard_normal((7, first, 1, 1)),
    )


@pytest.mark.parametrize(("first", "second", "outs", "groups"), [(8, 8, 16, 4), (8, 16, 12, 6), (12, 6, 18, 3), (8, 4, 24, 2)])
def test_convs_that_read_a_concat_take_part_without_a_gather(first: int, second: int, outs: int, groups: int) -> None:
    model = joined(first=first, second=second, outs=outs)
    result = onnx_gconv.compress(model, groups=groups, gathers="none", exclude="^[yz]$")
    assert {layer.name: layer.groups for layer in result.plan.layers}["c0"] == groups
    assert "Gather" not in [node.op_type for node in result.model.graph.node]
    assert result.rewritten.verification is not None
    assert result.rewritten.verification.passed
    masked = onnx_gconv.mask(model, result.plan).model
    assert verify(masked, result.model, tolerance=1e-5, seed=3).passed


@pytest.mark.parametrize("share", [0.7, 0.5, 0.35])
def test_a_budget_over_a_concat_needs_no_gather(share: float) -> None:
    result = onnx_gconv.compress(joined(first=16, second=8, outs=24), max_macs=share, gathers="none")
    assert result.report["budget_met"]
    assert "Gather" not in [node.op_type for node in result.model.graph.node]
