"""The paper's sort, groupings and importance."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from onnx_gconv.solve.grouping import block_diagonal_sum, canonical, inverse, keep_mask, kept_share
from onnx_gconv.solve.importance import importance
from onnx_gconv.solve.layer import Solver
from onnx_gconv.solve.sort import sort_channels


def best_by_brute_force(matrix: np.ndarray, groups: int) -> float:
    outs, ins = matrix.shape
    return max(
        block_diagonal_sum(matrix, groups, np.array(i), np.array(o))
        for o in itertools.permutations(range(outs))
        for i in itertools.permutations(range(ins))
    )


def permuted_block_diagonal(rng: np.random.Generator, channels: int, groups: int) -> np.ndarray:
    matrix = np.kron(np.eye(groups), np.ones((channels // groups,) * 2)) * rng.random((channels, channels))
    return matrix[rng.permutation(channels)][:, rng.permutation(channels)]


def algorithm_1(weights: np.ndarray, groups: int, rounds: int) -> tuple[list[int], list[int]]:
    """The supplement's Algorithm 1 word by word, with 1-based ranges, section 3.2's rounds, and plain Python sorts."""
    outs, ins = weights.shape
    i_in, i_out = list(range(ins)), list(range(outs))
    for g in range(groups, 0, -1):
        f_bar = range((g - 1) * outs // groups, g * outs // groups)
        c_bar = range((g - 1) * ins // groups, g * ins // groups)
        for _ in range(rounds):
            sigma_c = {c: sum(weights[i_out[f], i_in[c]] for f in f_bar) for c in range(g * ins // groups)}
            i_in = [i_in[c] for c in sorted(sigma_c, key=sigma_c.__getitem__)] + i_in[g * ins // groups :]
            sigma_f = {f: sum(weights[i_out[f], i_in[c]] for c in c_bar) for f in range(g * outs // groups)}
            i_out = [i_out[f] for f in sorted(sigma_f, key=sigma_f.__getitem__)] + i_out[g * outs // groups :]
    return i_in, i_out


@pytest.mark.parametrize(
    ("outs", "ins", "groups", "rounds"), [(6, 6, 3, 10), (8, 4, 2, 1), (12, 18, 6, 3), (5, 5, 1, 10), (4, 8, 4, 0)]
)
def test_the_sort_is_algorithm_1_of_the_supplement(outs: int, ins: int, groups: int, rounds: int) -> None:
    # Whole numbers, so that both add up exactly and ties are real ties.
    matrix = np.random.default_rng(outs).integers(0, 9, (outs, ins)).astype(float)
    in_order, out_order = sort_channels(matrix, groups, rounds=rounds)
    assert (in_order.tolist(), out_order.tolist()) == algorithm_1(matrix, groups, rounds)


def test_no_rounds_leave_every_channel_in_place() -> None:
    matrix = np.random.default_rng(0).random((6, 4))
    in_order, out_order = sort_channels(matrix, 2, rounds=0)
    assert in_order.tolist() == [0, 1, 2, 3]
    assert out_order.tolist() == [0, 1, 2, 3, 4, 5]


def test_most_permuted_block_diagonal_matrices_are_recovered_with_ten_rounds_and_few_with_none() -> None:
    """The paper's experiment (Figure 5, left): 128 channels, 16 groups; about 80 % come back whole."""
    rng = np.random.default_rng(0)
    ratios = {0: [], 10: []}
    for _ in range(60):
        matrix = permuted_block_diagonal(rng, 128, 16)
        for rounds, seen in ratios.items():
            seen.append(kept_share(matrix, 16, *sort_channels(matrix, 16, rounds=rounds)))
    exact = np.mean(np.array(ratios[10]) > 1 - 1e-12)
    assert 0.6 < exact < 0.95
    assert np.mean(ratios[0]) == pytest.approx(1 / 16, abs=0.01)


def test_the_sort_falls_into_the_supplements_worst_case() -> None:
    """4x4, G=2: 9 and 10 are the two largest in the bottom rows, but belong to different blocks, so greed mixes the blocks.

    The supplement's figure is not in the TeX source; this matrix is built to its description.
    """
    matrix = np.array([[8.0, 7.0, 0.0, 0.0], [0.0, 0.0, 8.0, 7.0], [8.0, 9.0, 0.0, 0.0], [0.0, 0.0, 8.0, 10.0]])
    orders = sort_channels(matrix, 2, rounds=10)
    assert sorted(orders[0][2:].tolist()) == [1, 3]
    assert block_diagonal_sum(matrix, 2, *orders) < best_by_brute_force(matrix, 2) == matrix.sum()


def test_the_worked_example_of_the_docs() -> None:
    """docs/algorithm.md walks through this matrix; keep both in step."""
    matrix = np.array([[1.0, 8.0, 2.0, 7.0], [9.0, 1.0, 6.0, 2.0], [1.0, 8.0, 2.0, 9.0], [5.0, 2.0, 6.0, 1.0]])
    grouping = Solver("paper").solve(matrix, 2)
    assert grouping.in_order.tolist() == [0, 2, 1, 3]
    assert grouping.out_order.tolist() == [1, 3, 0, 2]
    assert grouping.kept == pytest.approx(58 / 70)
    assert Solver("plain").solve(matrix, 2).kept == pytest.approx(37 / 70)


def test_importance_is_the_norm_of_each_kernel() -> None:
    weight = np.array([[[[3.0, -4.0]], [[0.0, 0.0]]], [[[1.0, 1.0]], [[-2.0, 0.0]]]], dtype=np.float16)
    assert importance(weight, "l2") == pytest.approx(np.array([[5, 0], [2**0.5, 2]]))
    assert importance(weight, "l1") == pytest.approx(np.array([[7, 0], [2, 2]]))


orders = st.integers(1, 4).flatmap(
    lambda groups: st.tuples(
        st.just(groups),
        st.integers(1, 3).flatmap(lambda n: st.permutations(range(groups * n))),
        st.integers(1, 3).flatmap(lambda n: st.permutations(range(groups * n))),
    )
)


@given(orders, st.randoms(use_true_random=False))
def test_equal_groupings_have_one_canonical_form(case: tuple[int, list[int], list[int]], random: object) -> None:
    groups, in_list, out_list = case
    in_order, out_order = np.array(in_list), np.array(out_list)
    shuffled = np.array(random.sample(range(groups), groups))  # the same groups in another sequence, channels too
    inputs = [random.sample(part, len(part)) for part in in_order.reshape(groups, -1)[shuffled].tolist()]
    outputs = [random.sample(part, len(part)) for part in out_order.reshape(groups, -1)[shuffled].tolist()]
    one = canonical(groups, in_order, out_order)
    two = canonical(groups, np.array(inputs).reshape(-1), np.array(outputs).reshape(-1))
    assert all(np.array_equal(a, b) for a, b in zip(one, two, strict=True))
    assert np.array_equal(keep_mask(groups, *one), keep_mask(groups, in_order, out_order))


@given(orders)
def test_the_mask_keeps_exactly_the_block_diagonal(case: tuple[int, list[int], list[int]]) -> None:
    groups, in_order, out_order = case[0], np.array(case[1]), np.array(case[2])
    blocks = np.kron(np.eye(groups), np.ones((len(out_order) // groups, len(in_order) // groups)))
    permuted = keep_mask(groups, in_order, out_order)[out_order][:, in_order]
    assert np.array_equal(permuted, blocks.astype(bool))
    assert np.array_equal(in_order[inverse(in_order)], np.arange(len(in_order)))


def test_a_conv_with_groups_is_solved_inside_each_of_them() -> None:
    matrix = np.random.default_rng(0).random((8, 4))  # 8 outputs, 2 groups of 4 inputs each
    grouping = Solver("paper").solve(matrix, 4, existing=2)
    assert sorted(grouping.in_order[:4].tolist()) == [0, 1, 2, 3]
    assert sorted(grouping.out_order[:4].tolist()) == [0, 1, 2, 3]
    halves = [Solver("paper").solve(matrix[half], 2) for half in (slice(0, 4), slice(4, 8))]
    kept = sum(h.kept * matrix[half].sum() for h, half in zip(halves, (slice(0, 4), slice(4, 8)), strict=True))
    assert grouping.kept == pytest.approx(kept / matrix.sum())


def test_a_layer_of_zeros_loses_nothing() -> None:
    assert Solver("paper").solve(np.zeros((4, 4)), 2).kept == 1.0
