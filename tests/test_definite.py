"""Positive definite matrices in tiles: the same as LAPACK's whole ones, and the same bits on any number of threads."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from fitting import Normal

from onnx_gconv.recover.definite import TILE, Doubles, factored

EXACT = 1e-9  # relative: double precision, and the matrices of these tests are well conditioned
SIZES = [1, 5, TILE - 1, TILE, TILE + 1, 2 * TILE + 7]


def definite(normal: Normal, size: int) -> Doubles:
    values = normal(size, size + 10)
    return np.asarray(values @ values.T / size + 0.1 * np.eye(size))


@pytest.mark.parametrize("size", SIZES)
def test_solutions_and_inverses_are_those_of_lapack(size: int, normal: Normal) -> None:
    matrix, values = definite(normal, size), normal(size, TILE + 3)
    factor = factored(matrix, 0.5)
    damped = matrix + 0.5 * np.eye(size)
    np.testing.assert_allclose(factor.solve(values), np.linalg.solve(damped, values), rtol=EXACT, atol=EXACT)
    np.testing.assert_allclose(factor.inverse(), np.linalg.inv(damped), rtol=EXACT, atol=EXACT)
    np.testing.assert_array_equal(factor.inverse(), factor.inverse().T)
    np.testing.assert_allclose(np.tril(factor.lower), np.linalg.cholesky(damped), rtol=EXACT, atol=EXACT)


def test_what_is_taken_off_is_taken_off(normal: Normal) -> None:
    matrix, less = definite(normal, TILE + 9), 0.01 * normal(TILE + 9)
    values = normal(TILE + 9, 2)
    expected = np.linalg.solve(matrix - np.outer(less, less), values)
    np.testing.assert_allclose(factored(matrix, less=less).solve(values), expected, rtol=EXACT, atol=EXACT)


def test_one_thread_and_three_give_the_same_bits(normal: Normal) -> None:
    matrix, values = definite(normal, 3 * TILE + 1), normal(3 * TILE + 1, 2 * TILE)
    alone = factored(matrix)
    with ThreadPoolExecutor(3) as pool:
        shared = factored(matrix, run=pool.map)
        np.testing.assert_array_equal(np.tril(shared.lower), np.tril(alone.lower))
        np.testing.assert_array_equal(shared.solve(values, pool.map), alone.solve(values))
        np.testing.assert_array_equal(shared.inverse(pool.map), alone.inverse())


def test_in_single_precision_solutions_are_near(normal: Normal) -> None:
    matrix, values = definite(normal, TILE + 20), normal(TILE + 20, 3)
    found = factored(matrix).single().solve(values.astype(np.float32))
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, np.linalg.solve(matrix, values), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("place", [3, TILE + 3])
def test_what_is_not_positive_definite_is_refused(place: int, normal: Normal) -> None:
    matrix = definite(normal, TILE + 20)
    matrix[place, place] = -1.0
    with pytest.raises(np.linalg.LinAlgError):
        factored(matrix)
