"""How much any grouping could keep at most: an upper bound, so that a gap can be told."""

import numpy as np

from onnx_gconv.solve.importance import Matrix


def kept_bound(matrix: Matrix, groups: int, *, existing: int = 1) -> float:
    """Return an upper bound of the share that a grouping into `groups` keeps: the better of a spectral and a dual one."""
    outs, parts = matrix.shape[0] // existing, groups // existing
    blocks = [matrix[block * outs : (block + 1) * outs] for block in range(existing)]
    bound = sum(min(spectral_bound(block, parts), dual_bound(block, parts)) for block in blocks)
    total = float(matrix.sum())
    return min(1.0, bound / total) if total > 0 else 1.0


def spectral_bound(matrix: Matrix, groups: int) -> float:
    """Return the bound sum(M)/G + sqrt(Cout Cin)/G (s_1 + ... + s_{G-1}), with s the singular values of the centred M.

    With X and Y the 0/1 matrices of who is in which group, a grouping keeps tr(X' M Y). Their means over the groups give
    sum(M)/G, the cross terms vanish, and what is left has G-1 singular values sqrt(Cout/G) and sqrt(Cin/G): von Neumann's
    trace inequality does the rest. Tight where importances are nearly even, as in most trained layers.
    """
    centred = matrix - matrix.mean(axis=0, keepdims=True)
    centred -= centred.mean(axis=1, keepdims=True)
    values = np.linalg.svd(centred, compute_uv=False)
    return float(matrix.sum() + np.sqrt(matrix.size) * values[: groups - 1].sum()) / groups


def dual_bound(matrix: Matrix, groups: int, *, rounds: int = 3) -> float:
    """Return the bound from prices of rows and columns. Tight where the importances are nearly block-diagonal.

    A grouping keeps exactly Cin/G entries in each row and Cout/G in each column. Dropping the rest of its structure leaves
    a transportation problem, whose Lagrange dual with prices u of rows and v of columns is

        sum_o u_o Cin/G + sum_i v_i Cout/G + sum_oi max(0, M_oi - u_o - v_i)

    for any u and v an upper bound. Minimised over u with v fixed, u_o is the Cin/G-th largest of M_o - v; then v in turn.
    With v = 0 that is the plain row bound, and so on: never worse than the row and column bounds.
    """
    return min(_dual_descent(matrix, groups, rounds), _dual_descent(matrix.T, groups, rounds))


def _dual_descent(matrix: Matrix, groups: int, rounds: int) -> float:
    in_row, in_column = matrix.shape[1] // groups, matrix.shape[0] // groups
    rows, columns = np.zeros((matrix.shape[0], 1)), np.zeros((1, matrix.shape[1]))
    best = float("inf")
    for _ in range(rounds):
        rows = _nth_largest(matrix - columns, in_row, axis=1)
        best = min(best, _dual(matrix, rows, columns, in_row, in_column))
        columns = _nth_largest(matrix - rows, in_column, axis=0)
        best = min(best, _dual(matrix, rows, columns, in_row, in_column))
    return best


def _nth_largest(values: Matrix, n: int, *, axis: int) -> Matrix:
    place = values.shape[axis] - n
    return np.asarray(np.take(np.partition(values, place, axis=axis), [place], axis=axis))


def _dual(matrix: Matrix, rows: Matrix, columns: Matrix, in_row: int, in_column: int) -> float:
    excess = np.maximum(matrix - rows - columns, 0).sum()
    return float(rows.sum() * in_row + columns.sum() * in_column + excess)
