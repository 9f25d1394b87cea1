"""Second-order backward elimination: the error of every width is that of the best fit without the others, channel by channel."""

from itertools import combinations

import numpy as np
import pytest
from fitting import Normal

from onnx_gconv.recover.elimination import STEPS, Elimination, Reader, eliminate, without_others
from onnx_gconv.recover.normal import Coefficients, Equations, Rows, damped_gram, solve, sums

EXACT = 1e-9  # relative: all is double precision, and the Gram matrices of these tests are well conditioned


def reader(normal: Normal, channels: int, *, kernel: int = 1, outputs: int = 3, correlated: float = 0.7) -> Reader:
    """Return a reader of channels that have something in common, each by its own strength."""
    size = channels * kernel
    common = normal(size, 2) * correlated
    gram = common @ common.T + np.diag(0.1 + np.square(normal(size)))
    return Reader(gram, normal(size, outputs), np.arange(size).reshape(channels, kernel))


def best_error(one: Reader, gone: list[int]) -> float:
    """Return what the best weights without these channels leave: normal equations of the other rows, solved directly."""
    left = np.setdiff1d(np.arange(len(one.gram)), one.rows[gone].reshape(-1))
    cross = one.gram @ one.weight  # of the inputs with what the full weights give
    whole = float((one.weight * cross).sum())
    if not len(left):
        return whole
    fitted = np.linalg.solve(one.gram[np.ix_(left, left)], cross[left])
    return whole - float((fitted * cross[left]).sum())


def nested_errors(readers: list[Reader], found: Elimination) -> list[float]:
    return [sum(best_error(one, found.order[:gone].tolist()) for one in readers) for gone in range(len(found.order) + 1)]


@pytest.mark.parametrize("kernel", [1, 9])
@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("channels", [1, 2, 5, 6])
def test_errors_are_those_of_refits_and_each_step_takes_the_cheapest(
    channels: int, count: int, kernel: int, normal: Normal
) -> None:
    readers = [reader(normal, channels, kernel=kernel, outputs=2 + number) for number in range(count)]
    found = eliminate(readers)
    assert sorted(found.order.tolist()) == list(range(channels))
    np.testing.assert_allclose(found.errors, nested_errors(readers, found), rtol=EXACT, atol=EXACT)
    gone: list[int] = []
    for channel in found.order.tolist():
        others = {each: sum(best_error(one, [*gone, each]) for one in readers) for each in range(channels) if each not in gone}
        assert channel == min(others, key=others.__getitem__)
        gone.append(channel)
    # Of the sets of each size, none is better than the best; greedy ones are seldom far from it.
    for stay in range(1, channels):
        every = [sum(best_error(one, list(gone)) for one in readers) for gone in combinations(range(channels), channels - stay)]
        assert found.error(stay) >= min(every) * (1 - EXACT)


def test_readers_may_have_different_kernels_and_read_other_channels_beside(normal: Normal) -> None:
    """As where a Concat joins two spaces: the second reader has rows that belong to neither channel of this one."""
    one, wide = reader(normal, 4), reader(normal, 7, kernel=4)
    beside = Reader(wide.gram, wide.weight, wide.rows[[1, 2, 4, 6]])
    found = eliminate([one, beside])
    np.testing.assert_allclose(found.errors, nested_errors([one, beside], found), rtol=EXACT, atol=EXACT)


def test_what_is_given_is_not_changed(normal: Normal) -> None:
    one = reader(normal, 5, kernel=2)
    gram, weight = one.gram.copy(), one.weight.copy()
    eliminate([one])
    np.testing.assert_array_equal(one.gram, gram)
    np.testing.assert_array_equal(one.weight, weight)


def test_equal_channels_go_in_their_order() -> None:
    one = Reader(np.eye(6), np.ones((6, 2)), np.arange(6)[:, None])
    assert eliminate([one]).order.tolist() == [0, 1, 2, 3, 4, 5]
    ranked = Reader(np.eye(6), np.array([[2.0], [1], [2], [1], [1], [3]]), np.arange(6)[:, None])
    assert eliminate([ranked]).order.tolist() == [1, 3, 4, 0, 2, 5]
    assert eliminate([ranked]).errors.tolist() == pytest.approx([0, 1, 2, 3, 7, 11, 20])


def test_the_order_is_the_same_every_time(normal: Normal) -> None:
    one = reader(normal, 2 * STEPS + 5, correlated=0.0)
    twins = Reader(one.gram, np.ones_like(one.weight), one.rows)
    first, second = eliminate([twins]), eliminate([twins])
    np.testing.assert_array_equal(first.order, second.order)
    np.testing.assert_array_equal(first.errors, second.errors)


def test_of_wide_spaces_the_errors_of_all_widths_are_exact_too(normal: Normal) -> None:
    """So wide that several channels go before all is brought up to date."""
    one = reader(normal, 4 * STEPS + 3)
    found = eliminate([one])
    assert sorted(found.order.tolist()) == list(range(4 * STEPS + 3))
    places = [0, 1, 2, 3, 4, 5, 50, 101, 130, 202, 257, 258, 259]
    expected = [best_error(one, found.order[:gone].tolist()) for gone in places]
    np.testing.assert_allclose(found.errors[places], expected, rtol=1e-7, atol=1e-7)
    assert (np.diff(found.errors) >= 0).all()


def test_of_two_equal_channels_in_a_wide_space_one_stays(normal: Normal) -> None:
    """Either can go for nothing, but not both: what is cheap by itself is looked at again when the other is gone."""
    half = 2 * STEPS
    small = reader(normal, half, correlated=0.0)
    copies = np.tile(np.arange(half), 2)
    gram = small.gram[np.ix_(copies, copies)] + 1e-9 * np.eye(2 * half)
    one = Reader(gram, small.weight[copies] / 2, np.arange(2 * half)[:, None])
    found = eliminate([one], least=half)
    assert sorted((found.keep(half) % half).tolist()) == list(range(half))
    assert found.error(half) < 1e-6 * best_error(one, list(range(2 * half)))


def test_an_elimination_that_stops_early_is_the_beginning_of_the_whole_one(normal: Normal) -> None:
    one = reader(normal, 12, kernel=4)
    whole, part = eliminate([one]), eliminate([one], least=7)
    np.testing.assert_array_equal(part.order[:5], whole.order[:5])
    np.testing.assert_array_equal(part.errors[:6], whole.errors[:6])
    assert part.keep(7).tolist() == sorted(whole.order[5:].tolist())
    assert (part.errors[6:] == part.errors[5]).all()
    assert len(part.errors) == 13


def seen(normal: Normal, positions: int, channels: int, dead: list[int], constant: list[int]) -> Rows:
    u = (normal(1, positions, channels) @ normal(channels, channels) + normal(channels)).astype(np.float32)
    u[:, :, dead] = 0.0
    u[:, :, constant] = 7.5
    return Rows(u, normal(1, positions, 3).astype(np.float32), None)


@pytest.mark.parametrize("has_intercept", [True, False])
def test_dead_channels_go_first_and_cost_nothing_however_large_their_weights(normal: Normal, *, has_intercept: bool) -> None:
    """A damped fit leaves their weights as they were. With an intercept, channels that never vary are as good as dead."""
    dead, constant = [1, 4], [6] if has_intercept else []
    total = sums(seen(normal, 500, 8, dead, constant))
    prior = Coefficients(1000 * normal(1, 8, 3), np.zeros((1, 3)))
    weight = solve(total, prior, damping=1e-3, has_intercept=has_intercept).weight[0]
    assert np.abs(weight[dead]).min() > 1
    gram = damped_gram(total, 1e-3, has_intercept=has_intercept)
    found = eliminate([Reader(gram, weight, np.arange(8)[:, None])])
    still = len(dead) + len(constant)
    assert sorted(found.order[:still].tolist()) == sorted(dead + constant)
    assert found.errors[still] < 1e-6 * found.errors[still + 1]


@pytest.mark.parametrize("channels", [8, 80])
def test_the_inverse_of_equations_is_that_of_the_damped_moments(channels: int, normal: Normal) -> None:
    """Whether all is solved at once or by a factor, and with channels that are dead or never vary."""
    total = sums(seen(normal, 500, channels, [1, 4], [6]))
    found = Equations.of(total, 1e-2, has_intercept=True).inverse(total)
    expected = np.linalg.inv(damped_gram(total, 1e-2, has_intercept=True))
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-6 * np.abs(np.delete(expected, [1, 4, 6], axis=0)).max())


def test_weights_make_up_for_others_as_normal_equations_do(normal: Normal) -> None:
    one = reader(normal, 12)
    rows = np.array([0, 3, 4, 7, 11])
    found = without_others(np.linalg.inv(one.gram), one.weight, rows)
    expected = np.linalg.solve(one.gram[np.ix_(rows, rows)], (one.gram @ one.weight)[rows])
    np.testing.assert_allclose(found, expected, rtol=EXACT, atol=EXACT)


def test_where_nothing_ever_comes_in_all_channels_go_for_nothing() -> None:
    rows = Rows(np.zeros((1, 50, 4), np.float32), np.ones((1, 50, 2), np.float32), None)
    gram = damped_gram(sums(rows), 1e-3, has_intercept=True)
    found = eliminate([Reader(gram, np.ones((4, 2)), np.arange(4)[:, None])])
    assert found.order.tolist() == [0, 1, 2, 3]
    assert found.errors[-1] < 1e-8


def test_second_moments_that_rounding_has_made_indefinite_are_mended(normal: Normal) -> None:
    factor = normal(20, 3)
    gram = factor @ factor.T - 1e-13 * np.eye(20)  # of rank 3, and below zero in the other directions
    assert np.linalg.eigvalsh(gram).min() < 0
    found = eliminate([Reader(gram, normal(20, 4), np.arange(20)[:, None])])
    assert np.isfinite(found.errors).all()
    assert sorted(found.order.tolist()) == list(range(20))
    assert found.error(3) < 1e-3 * found.error(0)  # any three channels do
