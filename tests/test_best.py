"""The better solver: balanced assignment, alternation, splits, the whole, and the bound. Brute force and SciPy are the oracles."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linear_sum_assignment

from onnx_gconv.solve.alternate import Pair, alternate_many, alternate_one
from onnx_gconv.solve.best import BestSolver
from onnx_gconv.solve.bound import dual_bound, kept_bound, spectral_bound
from onnx_gconv.solve.grouping import Grouping, block_diagonal_sum, canonical, keep_mask
from onnx_gconv.solve.layer import Solver
from onnx_gconv.solve.partition import exchange_cycles, exchange_pairs, group_sums, total, tournament
from onnx_gconv.solve.split import random_pair, smallest_factor, split

SMALL_SHAPES = [(g * o, g * i, g) for g in range(2, 7) for o in range(1, 6 // g + 1) for i in range(1, 6 // g + 1)]
seeds = st.integers(0, 2**32 - 1)
# groups, channels per group of the outputs and of the inputs, seed
problems = st.tuples(st.integers(2, 7), st.integers(1, 5), st.integers(1, 5), seeds)


def memberships(channels: int, groups: int) -> np.ndarray:
    """Every partition into labelled groups as a 0/1 array: (partitions, channels, groups)."""
    labels = set(itertools.permutations(np.repeat(np.arange(groups), channels // groups).tolist()))
    return np.eye(groups)[np.array(sorted(labels))]


def optimum(matrix: np.ndarray, groups: int) -> float:
    outs, ins = (memberships(channels, groups) for channels in matrix.shape)
    return float(np.einsum("pog,oi,qig->pq", outs, matrix, ins, optimize=True).max())


def small_matrix(seed: int) -> tuple[np.ndarray, int]:
    """A matrix of at most 6x6 and a number of groups: uniform, half zeros, or small whole numbers with many ties."""
    rng = np.random.default_rng(seed)
    outs, ins, groups = SMALL_SHAPES[rng.integers(len(SMALL_SHAPES))]
    kinds = rng.random((outs, ins)), rng.random((outs, ins)) * (rng.random((outs, ins)) < 0.5), rng.integers(0, 4, (outs, ins)) / 1
    return kinds[seed % 3], groups


def is_partition(groups: np.ndarray, number: int, channels: int) -> bool:
    return groups.shape == (number, channels // number) and sorted(groups.reshape(-1).tolist()) == list(range(channels))


def is_sound(found: Grouping, matrix: np.ndarray, groups: int, *, existing: int = 1) -> bool:
    """Whether a grouping is a valid canonical partition, never joins two existing groups, and keeps what it says."""
    outs, ins = matrix.shape[0], matrix.shape[1] * existing
    if not is_partition(found.in_order.reshape(groups, -1), groups, ins):
        return False
    if not is_partition(found.out_order.reshape(groups, -1), groups, outs):
        return False
    blocks = np.kron(np.eye(existing), np.ones((outs // existing, ins // existing)))
    keep = keep_mask(groups, found.in_order, found.out_order)
    dense = np.zeros((outs, ins))
    dense[blocks.astype(bool)] = matrix.reshape(-1)
    again = canonical(groups, found.in_order, found.out_order)
    is_canonical = np.array_equal(again[0], found.in_order) and np.array_equal(again[1], found.out_order)
    kept = float(dense[keep].sum()) / float(matrix.sum()) if matrix.any() else 1.0
    return is_canonical and not (keep & (blocks == 0)).any() and found.kept == pytest.approx(kept, rel=1e-12)


@pytest.mark.parametrize("groups", range(1, 10))
def test_in_a_tournament_every_two_groups_meet_once_and_nobody_twice_in_a_round(groups: int) -> None:
    met = []
    for first, second in tournament(groups):
        assert len({*first.tolist(), *second.tolist()}) == 2 * len(first)
        met += [frozenset(pair) for pair in zip(first.tolist(), second.tolist(), strict=True)]
    assert sorted(map(sorted, met)) == [list(pair) for pair in itertools.combinations(range(groups), 2)]


def test_group_sums_add_up_the_rows_of_each_group() -> None:
    matrix = np.random.default_rng(0).random((2, 6, 5))
    outs = np.array([[[0, 3], [1, 4], [2, 5]], [[5, 4], [3, 2], [1, 0]]])
    expected = [[matrix[b, outs[b, g]].sum(axis=0) for g in range(3)] for b in range(2)]
    assert group_sums(matrix, outs) == pytest.approx(np.array(expected))


@given(problems)
def test_exchanging_pairs_gives_partitions_of_no_less_profit(case: tuple[int, int, int, int]) -> None:
    groups, size, batch, seed = case
    rng = np.random.default_rng(seed)
    profit = rng.random((batch, groups, groups * size))
    start = np.stack([rng.permutation(groups * size).reshape(groups, size) for _ in range(batch)])
    found = exchange_pairs(profit, start)
    assert all(is_partition(one, groups, groups * size) for one in found)
    assert (total(profit, found) >= total(profit, start) - 1e-12).all()
    if groups == 2:  # exact there
        best = [exact_assignment(one, size) for one in profit]
        assert total(profit, found) == pytest.approx(np.array(best))


def exact_assignment(profit: np.ndarray, size: int) -> float:
    """SciPy's optimum, with `size` places in each group."""
    places = np.repeat(profit.astype(np.float64), size, axis=0)
    return float(places[linear_sum_assignment(places, maximize=True)].sum())


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize(("groups", "size"), [(1, 12), (2, 7), (3, 4), (5, 6), (7, 3), (12, 5), (24, 1), (4, 40), (40, 4)])
def test_exchanging_cycles_solves_the_balanced_assignment_exactly(groups: int, size: int, dtype: type) -> None:
    rng = np.random.default_rng(groups)
    for kind in range(4):
        profit = rng.random((groups, groups * size)) if kind < 3 else rng.integers(0, 3, (groups, groups * size))
        start = rng.permutation(groups * size).reshape(groups, size)
        found, proven = exchange_cycles(profit.astype(dtype), start, rounds=10_000)
        assert proven
        assert is_partition(found, groups, groups * size)
        assert total(profit.astype(dtype), found) == pytest.approx(exact_assignment(profit.astype(dtype), size), rel=1e-6)


@given(problems, st.integers(0, 3))
def test_exchanging_few_cycles_never_lowers_the_profit(case: tuple[int, int, int, int], rounds: int) -> None:
    groups, size, _, seed = case
    rng = np.random.default_rng(seed)
    profit, start = rng.random((groups, groups * size)), rng.permutation(groups * size).reshape(groups, size)
    found, proven = exchange_cycles(profit, start, rounds=rounds)
    assert is_partition(found, groups, groups * size)
    assert total(profit, found) >= total(profit, start) - 1e-12
    if proven:
        assert total(profit, found) == pytest.approx(exact_assignment(profit, size), rel=1e-5)


@given(problems, st.integers(1, 4))
def test_alternating_never_lowers_what_is_kept_and_tells_how_much_it_is(case: tuple[int, int, int, int], steps: int) -> None:
    groups, out_size, in_size, seed = case
    rng = np.random.default_rng(seed)
    matrix = rng.random((groups * out_size, groups * in_size))
    entries = matrix.astype(np.float32)[None]
    starts = random_pair(rng, 3, matrix.shape, groups)
    many, kept_many = alternate_many(np.repeat(entries, 3, axis=0), starts, steps=steps)
    flipped = np.ascontiguousarray(entries.transpose(0, 2, 1))
    one, kept_one = alternate_one(entries, flipped, starts.pick(0), steps=steps, rounds=5, tolerance=1e-6)
    before = block_diagonal_sum(matrix, groups, starts.ins[0].reshape(-1), starts.outs[0].reshape(-1))
    for found, kept in ((many.pick(0), kept_many[0]), (one, kept_one)):
        assert is_partition(found.ins[0], groups, matrix.shape[1])
        assert is_partition(found.outs[0], groups, matrix.shape[0])
        exactly = block_diagonal_sum(matrix, groups, found.ins[0].reshape(-1), found.outs[0].reshape(-1))
        assert kept == pytest.approx(exactly, rel=1e-5)  # float32
        assert exactly >= before * (1 - 1e-6)


@given(problems, st.sampled_from([2, 3, 5]))
def test_a_split_refines_the_groups_it_is_given(case: tuple[int, int, int, int], parts: int) -> None:
    groups, out_size, in_size, seed = case
    rng = np.random.default_rng(seed)
    shape = groups * parts * out_size, groups * parts * in_size
    coarse = random_pair(rng, 1, shape, groups)
    fine = split(rng.random((1, *shape)), coarse, parts, rng, starts=2, steps=3)
    for finer, coarser, channels in ((fine.ins[0], coarse.ins[0], shape[1]), (fine.outs[0], coarse.outs[0], shape[0])):
        assert is_partition(finer, groups * parts, channels)
        assert [set(group) for group in finer.reshape(groups, -1).tolist()] == [set(group) for group in coarser.tolist()]


def test_the_smallest_factor_is_a_prime() -> None:
    assert [smallest_factor(n) for n in (2, 3, 4, 9, 15, 35, 49, 97)] == [2, 3, 2, 3, 3, 5, 7, 97]


def test_one_group_holds_every_channel() -> None:
    assert exchange_pairs(np.ones((1, 1, 3)), np.array([[[2, 0, 1]]])).tolist() == [[[2, 0, 1]]]
    assert Solver("best").solve(np.ones((4, 6)), 1).kept == 1.0


@pytest.mark.slow
@pytest.mark.parametrize("effort", range(4))
@settings(deadline=None, max_examples=12)
@given(problems, st.integers(1, 3))
def test_every_grouping_is_sound_also_inside_existing_groups(effort: int, case: tuple[int, int, int, int], existing: int) -> None:
    groups, out_size, in_size, seed = case
    matrix = np.random.default_rng(seed).exponential(size=(existing * groups * out_size, groups * in_size))
    found = Solver("best", effort=effort, seed=seed).solve(matrix, groups * existing, existing=existing)
    assert found.groups == groups * existing
    assert is_sound(found, matrix, groups * existing, existing=existing)


@settings(deadline=None, max_examples=60)
@given(problems, st.sampled_from([1, 2]), st.sampled_from([0.5, 1, 4]))
def test_nothing_keeps_less_than_the_papers_sort(case: tuple[int, int, int, int], effort: int, power: float) -> None:
    groups, out_size, in_size, seed = case
    matrix = np.random.default_rng(seed).random((groups * out_size, groups * in_size)) ** power
    best, paper = Solver("best", effort=effort, seed=seed).solve(matrix, groups), Solver("paper").solve(matrix, groups)
    assert best.kept >= paper.kept - 1e-12


@pytest.mark.parametrize(("outs", "ins"), [(48, 32), (160, 96)])  # below and above the size that is refined to the end
def test_one_seed_gives_one_answer_and_the_sequence_of_asking_does_not_matter_for_soundness(outs: int, ins: int) -> None:
    matrix = np.random.default_rng(3).random((outs, ins))
    numbers = [2, 4, 8, 16]
    one, two = Solver("best", seed=5).solve_each(matrix, numbers), Solver("best", seed=5).solve_each(matrix, reversed(numbers))
    assert all(np.array_equal(one[g].in_order, two[g].in_order) for g in numbers)
    assert all(np.array_equal(one[g].out_order, two[g].out_order) for g in numbers)
    solver = BestSolver(matrix, effort=1, seed=5)
    for groups in (8, 2, 16, 8, 4):
        pair = solver.solve(groups)
        assert is_partition(pair.ins[0], groups, ins)
        assert is_partition(pair.outs[0], groups, outs)


def test_the_optimum_is_found_on_nearly_all_small_matrices() -> None:
    found = []
    for seed in range(150):
        matrix, groups = small_matrix(seed)
        grouping = Solver("best").solve(matrix, groups)
        kept = block_diagonal_sum(matrix, groups, grouping.in_order, grouping.out_order)
        found.append(kept >= optimum(matrix, groups) - 1e-9)
    assert np.mean(found) >= 0.99


def test_permuted_block_diagonal_matrices_are_recovered_exactly() -> None:
    """The paper's Figure 5, left, where its own sort finds about three in four; and the supplement's worst case."""
    rng = np.random.default_rng(0)
    for _ in range(15):
        blocks = np.kron(np.eye(16), np.ones((8, 8))) * rng.random((128, 128))
        matrix = blocks[rng.permutation(128)][:, rng.permutation(128)]
        assert Solver("best").solve(matrix, 16).kept == pytest.approx(1, abs=1e-12)
    worst = np.array([[8.0, 7.0, 0.0, 0.0], [0.0, 0.0, 8.0, 7.0], [8.0, 9.0, 0.0, 0.0], [0.0, 0.0, 8.0, 10.0]])
    assert Solver("best").solve(worst, 2).kept == 1.0


@pytest.mark.parametrize("channels", [5, 16, 60])
def test_one_channel_per_group_is_a_linear_assignment_and_solved_exactly(channels: int) -> None:
    matrix = np.random.default_rng(channels).random((channels, channels))
    exact = matrix[linear_sum_assignment(matrix, maximize=True)].sum() / matrix.sum()
    assert Solver("best").solve(matrix, channels).kept == pytest.approx(exact, rel=1e-6)


@pytest.mark.parametrize("effort", range(4))
@pytest.mark.parametrize(("outs", "ins", "groups"), [(8, 8, 4), (12, 4, 2), (6, 30, 6), (5, 5, 5)])
def test_zeros_lose_nothing_and_constants_keep_one_share_in_g(effort: int, outs: int, ins: int, groups: int) -> None:
    solver = Solver("best", effort=effort)
    zeros, constants = solver.solve(np.zeros((outs, ins)), groups), solver.solve(np.full((outs, ins), 0.1), groups)
    assert zeros.kept == 1.0
    assert constants.kept == pytest.approx(1 / groups, rel=1e-12)
    assert is_sound(zeros, np.zeros((outs, ins)), groups)
    assert is_sound(constants, np.full((outs, ins), 0.1), groups)


def test_kept_is_added_up_in_double_precision() -> None:
    matrix = 1 + 1e-9 * np.random.default_rng(0).random((64, 64))  # all equal in float32
    found = Solver("best").solve(matrix, 4)
    assert is_sound(found, matrix, 4)
    spread = 10.0 ** np.random.default_rng(0).uniform(-12, 12, (64, 64))
    assert is_sound(Solver("best").solve(spread, 4), spread, 4)


def row_and_column_bound(matrix: np.ndarray, groups: int) -> float:
    """The Cin/G largest of every row, or the Cout/G largest of every column: no grouping keeps more."""
    rows = np.sort(matrix, axis=1)[:, -(matrix.shape[1] // groups) :].sum()
    columns = np.sort(matrix, axis=0)[-(matrix.shape[0] // groups) :].sum()
    return float(min(rows, columns))


@given(seeds)
def test_the_bound_is_between_the_optimum_and_the_row_and_column_bound(seed: int) -> None:
    matrix, groups = small_matrix(seed)
    most = optimum(matrix, groups)
    assert spectral_bound(matrix, groups) >= most - 1e-9
    assert dual_bound(matrix, groups) >= most - 1e-9
    assert dual_bound(matrix, groups) <= row_and_column_bound(matrix, groups) + 1e-9
    if matrix.any():
        share = kept_bound(matrix, groups)
        assert most / matrix.sum() - 1e-9 <= share <= row_and_column_bound(matrix, groups) / matrix.sum() + 1e-9


def test_the_bound_is_tight_where_it_can_be() -> None:
    blocks = np.kron(np.eye(4), np.ones((3, 5))) * np.random.default_rng(0).random((12, 20))
    assert kept_bound(blocks, 4) == pytest.approx(1)
    assert kept_bound(np.full((12, 20), 0.3), 4) == pytest.approx(1 / 4)
    assert kept_bound(np.zeros((4, 4)), 2) == 1.0


@settings(deadline=None)
@given(st.integers(1, 3), st.integers(1, 4), seeds)
def test_the_bound_holds_inside_existing_groups(existing: int, size: int, seed: int) -> None:
    matrix = np.random.default_rng(seed).random((existing * 2 * size, 6))
    found = Solver("best", effort=0).solve(matrix, 2 * existing, existing=existing)
    assert found.kept <= kept_bound(matrix, 2 * existing, existing=existing) + 1e-9


def test_a_pair_can_be_picked_out_of_a_batch() -> None:
    batch = random_pair(np.random.default_rng(0), 3, (4, 6), 2)
    one = batch.pick(1)
    assert isinstance(one, Pair)
    assert np.array_equal(one.ins, batch.ins[1:2])
    assert np.array_equal(one.outs, batch.outs[1:2])
