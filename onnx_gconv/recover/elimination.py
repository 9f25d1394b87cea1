"""Which channels of a space to remove, one after the other, and what that costs: second-order backward elimination.

Patches u of what reads the space have the second moments H. Its weights W are the best there are; without the rows z of a
channel, the best others make up for them as far as H allows, which leaves the error tr(W_z' P_zz^-1 W_z) with P = H^-1. Then W
and P are those of the problem without these rows, and the next channel is looked for. One pass has the error of every width.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import scipy.linalg
from numpy.typing import NDArray

Doubles = NDArray[np.float64]
Channels = NDArray[np.int64]
STEPS = 64  # a pass removes channels in about so many steps: of wide spaces several at once


@dataclass(frozen=True, eq=False)
class Reader:
    """What one node that reads a space sees, and what it makes of it."""

    gram: Doubles  # second moments of its inputs about their mean, damped: (inputs x kernel) squared
    weight: Doubles  # (inputs x kernel, outputs), by the scale that errors count in
    rows: Channels  # (channels of the space, kernel): the rows of each channel


@dataclass(frozen=True, eq=False)
class Elimination:
    """The channels of a space in the order in which they go, and the error when so many of them are gone."""

    order: Channels
    errors: Doubles  # one more than channels: of 0 gone, 1 gone, ... all gone

    def keep(self, channels: int) -> Channels:
        """Return which channels stay when so many do, ascending."""
        return np.sort(self.order[len(self.order) - channels :])

    def error(self, channels: int) -> float:
        """Return the error when so many channels stay."""
        return float(self.errors[len(self.order) - channels])


def eliminate(readers: Sequence[Reader], *, least: int = 0) -> Elimination:
    """Return how a space is emptied, down to `least` channels; those that are left then follow in any order."""
    states = [_State(reader) for reader in readers]
    channels = len(readers[0].rows)
    at_once = max(1, channels // STEPS)
    left = np.arange(channels)
    order: list[Channels] = []
    errors = [0.0]
    while len(left) > least:
        losses = np.sum([state.losses(left) for state in states], axis=0)
        # A stable sort: of equal channels the first goes, on every machine.
        chosen = np.sort(np.argsort(losses, kind="stable")[: min(at_once, len(left) - least)])
        lost = sum(state.remove(left[chosen]) for state in states)
        errors += (errors[-1] + lost * (np.arange(len(chosen)) + 1) / len(chosen)).tolist()
        order.append(left[chosen])
        left = np.delete(left, chosen)
    order.append(left)
    errors += [errors[-1]] * (channels + 1 - len(errors))
    return Elimination(np.concatenate(order), np.array(errors))


class _State:
    """One reader without the channels that have been removed."""

    def __init__(self, reader: Reader) -> None:
        self._inverse = _inverse(reader.gram)
        self._weight = reader.weight.copy()
        self._rows = reader.rows

    def losses(self, channels: Channels) -> Doubles:
        """Return what removing each of these channels would cost."""
        rows = self._rows[channels]
        blocks, weights = self._inverse[rows[:, :, None], rows[:, None, :]], self._weight[rows]
        if rows.shape[1] == 1:
            return np.asarray(np.square(weights[:, 0]).sum(axis=1) / blocks[:, 0, 0])
        products = weights @ weights.transpose(0, 2, 1)
        return np.asarray(np.trace(np.linalg.solve(blocks, products), axis1=1, axis2=2))

    def remove(self, channels: Channels) -> float:
        """Let the other channels make up for these, and return the error that is left of that."""
        rows = self._rows[channels].reshape(-1)
        columns = self._inverse[:, rows]
        factor = scipy.linalg.cho_factor(columns[rows])
        solved = scipy.linalg.cho_solve(factor, self._weight[rows])
        lost = float((solved * self._weight[rows]).sum())
        self._weight -= columns @ solved
        self._inverse -= columns @ scipy.linalg.cho_solve(factor, columns.T)
        return lost


def _inverse(gram: Doubles) -> Doubles:
    """Return the inverse of a positive definite matrix."""
    factor, info = scipy.linalg.lapack.dpotrf(gram, lower=1)
    inverse, failed = scipy.linalg.lapack.dpotri(factor, lower=1)
    assert info == failed == 0, "a damped Gram matrix is positive definite"
    return np.asarray(np.tril(inverse) + np.tril(inverse, -1).T)
