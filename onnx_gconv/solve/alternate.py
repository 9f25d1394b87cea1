"""Alternating assignment: with the outputs' partition fixed, share out the inputs; then swap roles; until nothing improves."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from onnx_gconv.solve.partition import Groups, Profit, exchange_cycles, exchange_pairs, group_sums, total

Importances = NDArray[np.floating]  # (batch, Cout, Cin)

# Sorting pairs moves many channels at once, which pays for few large groups; cycles are exact and pay for many small ones.
MOST_GROUPS_TO_PAIR = 16


@dataclass(frozen=True)
class Pair:
    """A partition of the inputs and one of the outputs, for each problem of a batch."""

    ins: Groups  # (batch, G, Cin/G)
    outs: Groups  # (batch, G, Cout/G)

    def pick(self, index: int | NDArray[np.int64]) -> "Pair":
        """Return the problems of the batch that `index` names, as a batch."""
        chosen = np.atleast_1d(index)
        return Pair(self.ins[chosen], self.outs[chosen])


def alternate_many(matrix: Importances, start: Pair, *, steps: int, tolerance: float = 1e-5) -> tuple[Pair, NDArray[np.float64]]:
    """Return better pairs for a whole batch at once, and what they keep; assignments are by pairwise exchange."""
    flipped = matrix.transpose(0, 2, 1)
    ins, outs = start.ins, start.outs
    kept = np.zeros(len(ins))
    for _ in range(steps):
        ins = exchange_pairs(group_sums(matrix, outs), ins)
        profit = group_sums(flipped, ins)
        outs = exchange_pairs(profit, outs)
        now = total(profit, outs)
        if (now <= kept * (1 + tolerance)).all():
            break
        kept = now
    return Pair(ins, outs), np.maximum(kept, now)


def alternate_one(
    matrix: Importances, flipped: Importances, start: Pair, *, steps: int, rounds: int, tolerance: float
) -> tuple[Pair, float]:
    """Return a better pair for one problem, and what it keeps; assignments are exact where `rounds` suffice.

    `matrix` and `flipped`, its transpose, are (1, Cout, Cin) and (1, Cin, Cout), both contiguous.
    """
    ins, outs = start.ins, start.outs
    kept = 0.0
    for _ in range(steps):
        ins = _assign(group_sums(matrix, outs), ins, rounds)
        profit = group_sums(flipped, ins)
        outs = _assign(profit, outs, rounds)
        now = float(total(profit, outs)[0])
        if now <= kept * (1 + tolerance):
            break
        kept = now
    return Pair(ins, outs), max(kept, now)


def _assign(profit: Profit, groups: Groups, rounds: int) -> Groups:
    number = groups.shape[1]
    if number <= MOST_GROUPS_TO_PAIR:
        groups = exchange_pairs(profit, groups)
    if number == 2:
        return groups
    return exchange_cycles(profit[0], groups[0], rounds=rounds)[0][None]
