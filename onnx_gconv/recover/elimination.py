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
STEPS = 64  # all of P and W is brought up to date about so often: in wide spaces several channels go between
CANDIDATES = 4  # for each channel that goes: the cheapest ones, among which the next is looked for until then
SMALLER = 0.75  # share of the channels left at which what belongs to the others is let go
JITTER = 1e-12  # of a diagonal, to begin with, where rounding has made a matrix indefinite


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
    """Return how a space is emptied, down to `least` channels; those that are left then follow in any order.

    A channel's removal changes P and W of some channels in a way that only P and W of these decide. So between two times that
    all of P and W is brought up to date, those of the cheapest channels are, and the error of each removal is exact.
    """
    states = [_State(_inverse(reader.gram), reader.weight.copy(), reader.rows) for reader in readers]
    channels = len(readers[0].rows)
    at_once = max(1, channels // STEPS)
    names = left = np.arange(channels)  # of the channels that the states have, and which of them are left
    order: list[int] = []
    errors = [0.0]
    while len(left) > least:
        if len(left) < SMALLER * len(names):
            states, names, left = [state.of(left) for state in states], names[left], np.arange(len(left))
        count = min(at_once, len(left) - least)
        # A stable sort: of equal channels the first goes, on every machine.
        near = left[np.sort(np.argsort(_losses(states, left), kind="stable")[: CANDIDATES * count])]
        gone, lost = _remove_cheapest([state.of(near) for state in states], count)
        for state in states:
            state.remove(near[gone])
        order += names[near[gone]].tolist()
        errors += (errors[-1] + np.cumsum(lost)).tolist()
        left = left[~np.isin(left, near[gone])]
    errors += [errors[-1]] * (channels + 1 - len(errors))
    return Elimination(np.array([*order, *names[left].tolist()], dtype=np.int64), np.array(errors))


def without_others(gram: Doubles, weight: Doubles, rows: Channels) -> Doubles:
    """Return the weights of these rows that make up for all the others as far as the second moments allow."""
    others = np.setdiff1d(np.arange(len(gram)), rows)
    moved = scipy.linalg.cho_solve((_factor(gram[np.ix_(rows, rows)]), True), gram[np.ix_(rows, others)] @ weight[others])
    return np.asarray(weight[rows] + moved)


def _remove_cheapest(states: Sequence["_State"], count: int) -> tuple[list[int], list[float]]:
    """Remove so many channels, the cheapest each time, and return which and what each has cost."""
    gone: list[int] = []
    lost: list[float] = []
    left = np.arange(len(states[0].rows))
    for _ in range(count):
        losses = _losses(states, left)
        cheapest = int(np.argmin(losses))
        gone.append(int(left[cheapest]))
        lost.append(sum(state.remove(left[[cheapest]]) for state in states))
        left = np.delete(left, cheapest)
    return gone, lost


@dataclass(eq=False)
class _State:
    """One reader without the channels that have been removed."""

    inverse: Doubles
    weight: Doubles
    rows: Channels

    def of(self, channels: Channels) -> "_State":
        """Return what it is to these channels alone."""
        rows = self.rows[channels].reshape(-1)
        return _State(self.inverse[np.ix_(rows, rows)], self.weight[rows], np.arange(len(rows)).reshape(len(channels), -1))

    def losses(self, channels: Channels) -> Doubles:
        """Return what removing each of these channels would cost."""
        rows = self.rows[channels]
        blocks, weights = self.inverse[rows[:, :, None], rows[:, None, :]], self.weight[rows]
        blocks += JITTER * np.trace(blocks, axis1=1, axis2=2)[:, None, None] * np.eye(rows.shape[1])
        products = weights @ weights.transpose(0, 2, 1)
        return np.asarray(np.trace(np.linalg.solve(blocks, products), axis1=1, axis2=2))

    def remove(self, channels: Channels) -> float:
        """Let the other channels make up for these, and return the error that is left of that."""
        rows = self.rows[channels].reshape(-1)
        columns = self.inverse[:, rows]
        factor = _factor(columns[rows]), True
        solved = scipy.linalg.cho_solve(factor, self.weight[rows])
        lost = float((solved * self.weight[rows]).sum())
        self.weight -= columns @ solved
        self.inverse -= columns @ scipy.linalg.cho_solve(factor, columns.T)
        return max(lost, 0.0)


def _losses(states: Sequence[_State], channels: Channels) -> Doubles:
    return np.asarray(np.sum([state.losses(channels) for state in states], axis=0))


def _inverse(gram: Doubles) -> Doubles:
    """Return the inverse of a positive definite matrix."""
    inverse, failed = scipy.linalg.lapack.dpotri(_factor(gram), lower=1)
    assert failed == 0, "a factor has no zeros on its diagonal"
    for row in range(len(inverse)):  # in place: it may be large
        inverse[row, row + 1 :] = inverse[row + 1 :, row]
    return np.asarray(inverse)


def _factor(matrix: Doubles) -> Doubles:
    """Return the lower Cholesky factor of a matrix that is positive definite but for rounding."""
    factor, failed = scipy.linalg.lapack.dpotrf(matrix, lower=1)
    jitter = JITTER
    while failed and jitter < 1:
        more = jitter * float(np.abs(np.diagonal(matrix)).max()) or 1.0
        factor, failed = scipy.linalg.lapack.dpotrf(matrix + more * np.eye(len(matrix)), lower=1)
        jitter *= 100
    assert failed == 0, "second moments are finite"
    return np.asarray(factor)
