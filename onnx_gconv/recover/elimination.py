"""Which channels of a space to remove, one after the other, and what that costs: second-order backward elimination.

Patches u of what reads the space have the second moments H. Its weights W are the best there are; without the rows z of a
channel, the best others make up for them as far as H allows, which leaves the error tr(W_z' P_zz^-1 W_z) with P = H^-1. Then W
and P are those of the problem without these rows, and the next channel is looked for. One pass has the error of every width.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from onnx_gconv.recover.definite import JITTER, Run, damped, inverted

Doubles = NDArray[np.float64]
Channels = NDArray[np.int64]
STEPS = 64  # all of P and W is brought up to date about so often: in wide spaces several channels go between
CANDIDATES = 4  # for each channel that goes: the cheapest ones, among which the next is looked for until then
SMALLER = 0.75  # share of the channels left at which what belongs to the others is let go
SPAN = 1024  # rows of P that are brought up to date as one piece of work


@dataclass(frozen=True, eq=False)
class Reader:
    """What one node that reads a space sees, and what it makes of it."""

    gram: Doubles  # second moments of its inputs about their mean, damped, or their inverse: (inputs x kernel) squared
    weight: Doubles  # (inputs x kernel, outputs), by the scale that errors count in
    rows: Channels  # (channels of the space, kernel): the rows of each channel
    is_inverse: bool = False


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


def eliminate(readers: Sequence[Reader], *, least: int = 0, run: Run = map) -> Elimination:
    """Return how a space is emptied, down to `least` channels; those that are left then follow in any order.

    A channel's removal changes P and W of some channels in a way that only P and W of these decide. So between two times that
    all of P and W is brought up to date, those of the cheapest channels are, and the error of each removal is exact.
    """
    inverses = (reader.gram if reader.is_inverse else damped(reader.gram, 0.0, run)[0].inverse(run) for reader in readers)
    states = [_State(inverse, reader.weight.copy(), reader.rows) for inverse, reader in zip(inverses, readers, strict=True)]
    channels = len(readers[0].rows)
    at_once = max(1, channels // STEPS)
    names = left = np.arange(channels)  # of the channels that the states have, and which of them are left
    order: list[int] = []
    errors = [0.0]
    while len(left) > least:
        if len(left) < SMALLER * len(names):
            states, names, left = [state.of(left, run) for state in states], names[left], np.arange(len(left))
        count = min(at_once, len(left) - least)
        losses = _losses(states, left)
        if count == 1:
            gone = left[[int(np.argmin(losses))]]
            lost = [sum(state.remove(gone, run) for state in states)]
        else:
            # A stable sort: of equal channels the first goes, on every machine.
            near = left[np.sort(np.argsort(losses, kind="stable")[: CANDIDATES * count])]
            cheapest, lost = _remove_cheapest([state.of(near) for state in states], count)
            gone = near[cheapest]
            for state in states:
                state.remove(gone, run)
        order += names[gone].tolist()
        errors += (errors[-1] + np.cumsum(lost)).tolist()
        left = left[~np.isin(left, gone)]
    errors += [errors[-1]] * (channels + 1 - len(errors))
    return Elimination(np.array([*order, *names[left].tolist()], dtype=np.int64), np.array(errors))


def without_others(inverse: Doubles, weight: Doubles, rows: Channels, run: Run = map) -> Doubles:
    """Return the weights of these rows that make up for all the others as far as the second moments allow; these are inverted."""
    others = np.setdiff1d(np.arange(len(inverse)), rows)
    moved = inverse[np.ix_(rows, others)] @ damped(inverse[np.ix_(others, others)], 0.0, run)[0].solve(weight[others], run)
    return np.asarray(weight[rows] - moved)


def _remove_cheapest(states: Sequence["_State"], count: int) -> tuple[list[int], list[float]]:
    """Remove so many channels, the cheapest each time, and return which and what each has cost."""
    gone: list[int] = []
    lost: list[float] = []
    left = np.arange(len(states[0].rows))
    for _ in range(count):
        cheapest = int(np.argmin(_losses(states, left)))
        gone.append(int(left[cheapest]))
        lost.append(sum(state.remove(left[[cheapest]]) for state in states))
        left = np.delete(left, cheapest)
    return gone, lost


class _State:
    """One reader without the channels that have been removed.

    P is what is stored less U'U, with some rows of U for each removal: only those parts of P are computed that are looked at.
    """

    def __init__(self, inverse: Doubles, weight: Doubles, rows: Channels) -> None:
        self.weight, self.rows = weight, rows
        self._stored = inverse
        self._u = np.empty((0, len(inverse)))  # with room for more
        self._used = 0
        self._blocks = inverse[rows[:, :, None], rows[:, None, :]]  # P of each channel

    def of(self, channels: Channels, run: Run = map) -> "_State":
        """Return what it is to these channels alone."""
        rows = self.rows[channels].reshape(-1)
        u = self._u[: self._used, rows]
        inverse = np.empty((len(rows), len(rows)))

        def some(span: slice) -> None:
            done = slice(span.stop)
            inverse[span, done] = self._stored[np.ix_(rows[span], rows[done])] - u[:, span].T @ u[:, done]
            inverse[: span.start, span] = inverse[span, : span.start].T

        _each(some, len(rows), run)
        return _State(inverse, self.weight[rows], np.arange(len(rows)).reshape(len(channels), -1))

    def losses(self, channels: Channels) -> Doubles:
        """Return what removing each of these channels would cost."""
        blocks, weights = self._blocks[channels], self.weight[self.rows[channels]]
        if blocks.shape[1] == 1:
            return np.asarray(np.square(weights[:, 0]).sum(axis=1) / ((1 + JITTER) * blocks[:, 0, 0]))
        blocks += JITTER * np.trace(blocks, axis1=1, axis2=2)[:, None, None] * np.eye(blocks.shape[1])
        products = weights @ weights.transpose(0, 2, 1)
        return np.asarray(np.trace(np.linalg.solve(blocks, products), axis1=1, axis2=2))

    def remove(self, channels: Channels, run: Run = map) -> float:
        """Let the other channels make up for these, and return the error that is left of that."""
        rows = self.rows[channels].reshape(-1)
        before = self._u[: self._used]
        of_rows = before[:, rows].T
        factor = _triangle(self._stored[np.ix_(rows, rows)] - of_rows @ of_rows.T)
        solved = factor @ self.weight[rows]
        new = self._more(len(rows))

        def some(span: slice) -> None:
            np.matmul(factor, self._stored[rows, span] - of_rows @ before[:, span], out=new[:, span])
            self.weight[span] -= new[:, span].T @ solved

        _each(some, len(self._stored), run)
        each = new.T[self.rows]  # (channels, kernel, rows that go)
        self._blocks -= each @ each.transpose(0, 2, 1)
        return float(np.square(solved).sum())

    def _more(self, count: int) -> Doubles:
        """Return so many new rows of U."""
        start, self._used = self._used, self._used + count
        if self._used > len(self._u):
            wider = np.empty((self._used + len(self._stored) // 8, len(self._stored)))
            wider[:start] = self._u[:start]
            self._u = wider
        return self._u[start : self._used]


def _each(function: Callable[[slice], None], size: int, run: Run) -> None:
    """Do a piece of work for each span of rows."""
    spans = [slice(start, min(start + SPAN, size)) for start in range(0, size, SPAN)]
    list(run(function, spans) if len(spans) > 1 else map(function, spans))


def _losses(states: Sequence[_State], channels: Channels) -> Doubles:
    return np.asarray(np.sum([state.losses(channels) for state in states], axis=0))


def _triangle(matrix: Doubles) -> Doubles:
    """Return the inverse of the lower Cholesky factor of a small matrix that is positive definite but for rounding."""
    try:
        return inverted(np.asarray(np.linalg.cholesky(matrix)))
    except np.linalg.LinAlgError:
        return inverted(damped(matrix, 0.0)[0].lower)
