"""Balanced partitions, as index arrays: row g of a (G, n/G) array holds the channels of group g."""

from functools import cache

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linear_sum_assignment
from scipy.sparse import csr_array
from scipy.sparse.csgraph import min_weight_full_bipartite_matching

Groups = NDArray[np.int64]  # (..., G, channels per group)
Profit = NDArray[np.floating]  # (..., G, channels): what each channel adds to each group

# An assignment of all groups to all takes the cube of their number: of more than this, each has only so many partners.
MOST_GROUPS_TO_MATCH = 1024
PARTNERS = 32


def group_sums(matrix: NDArray[np.floating], outs: Groups) -> Profit:
    """Return what each group of outputs gets from each input: (batch, G, Cin).

    `matrix` is (batch, Cout, Cin), `outs` (batch, G, Cout/G). Rows are added one by one, so the rounding is the same on
    every machine.
    """
    batch, groups, size = outs.shape
    rows = matrix[np.arange(batch)[:, None], outs.reshape(batch, -1)]
    return np.asarray(rows.reshape(batch, groups, size, -1).sum(axis=2))


def total(profit: Profit, groups: Groups) -> NDArray[np.float64]:
    """Return the summed profit of each partition of a batch."""
    return np.asarray(np.take_along_axis(profit, groups, axis=-1).sum(axis=(-2, -1), dtype=np.float64))


@cache
def tournament(groups: int) -> tuple[tuple[NDArray[np.int64], NDArray[np.int64]], ...]:
    """Return rounds of disjoint pairs in which every two groups meet once (the circle method)."""
    players = groups + groups % 2
    ring = list(range(players))
    rounds = []
    for _ in range(players - 1):
        pairs = [(a, b) for a, b in zip(ring[: players // 2], ring[: players // 2 - 1 : -1], strict=True) if max(a, b) < groups]
        rounds.append((np.array([a for a, _ in pairs], dtype=np.int64), np.array([b for _, b in pairs], dtype=np.int64)))
        ring = [ring[0], ring[-1], *ring[1:-1]]
    return tuple(rounds)


def exchange_pairs(profit: Profit, groups: Groups) -> Groups:
    """Return the partitions after every two groups have shared out their channels in the best way once.

    For two groups the best way is a sort by the difference of the profits; all pairs of a round, in all partitions of
    the batch, are sorted together. With two groups in all this is the exact optimum.
    """
    result = groups.copy()
    size = groups.shape[-1]
    batch = np.arange(len(groups))[:, None, None]
    for first, second in tournament(groups.shape[1]):
        channels = np.concatenate([result[:, first], result[:, second]], axis=2)
        difference = profit[batch, second[:, None], channels] - profit[batch, first[:, None], channels]
        pairs = np.arange(len(first))[:, None]
        channels = channels[batch, pairs, difference.argsort(axis=2, kind="stable")]  # what take_along_axis does, in less time
        result[:, first], result[:, second] = channels[:, :, :size], channels[:, :, size:]
    return result


def exchange_cycles(profit: Profit, groups: Groups, *, rounds: int) -> tuple[Groups, bool]:
    """Return a better partition, and whether it is the best of all: the transportation problem solved.

    In a round each group may hand one channel on and take one in. The gain of handing its best channel for h from g to h
    is an entry of a (G, G) matrix, 0 on the diagonal; a linear assignment over it is the best set of disjoint cyclic
    exchanges. When that gains nothing there is no profitable cycle left, and the partition is optimal (Klein 1967). Of more
    than a thousand groups only the best moves are looked at, and nothing is proven.
    """
    result = groups.copy()
    number = len(groups)
    each = np.arange(number)
    for _ in range(rounds):
        own = np.take_along_axis(profit, result, axis=1)
        gains = _best_gains(profit, result, own)
        gains[each, each] = 0
        to = _best_cycles(gains)
        gain = float(gains[to, each].sum(dtype=np.float64))
        # Sums of float32 are not exact: a gain below their rounding is none.
        if gain <= 1e-6 * float(np.abs(own).max()):
            return result, number <= MOST_GROUPS_TO_MATCH
        moving = each[to != each]
        given = np.zeros(number, dtype=np.int64)  # the slot that each mover gives away, and that its giver fills
        given[moving] = (profit[to[moving][:, None], result[moving]] - own[moving]).argmax(axis=1)
        channels = result[moving, given[moving]]
        result[to[moving], given[to[moving]]] = channels
    return result, False


def _best_gains(profit: Profit, groups: Groups, own: Profit) -> Profit:
    """Return entry [to, from]: the most that moving one channel between two groups adds."""
    number, size = groups.shape
    if size > number:
        return np.asarray((np.take(profit, groups.reshape(-1), axis=1).reshape(number, number, size) - own[None]).max(axis=2))
    best = np.take(profit, groups[:, 0], axis=1) - own[:, 0]
    for slot in range(1, size):  # few slots of many groups: whole matrices at a time
        np.maximum(best, np.take(profit, groups[:, slot], axis=1) - own[:, slot], out=best)
    return best


def _best_cycles(gains: Profit) -> NDArray[np.int64]:
    """Return where each group hands a channel, itself if it hands none: the disjoint cycles of most gain.

    The gain of a move [to, from] is that of none on the diagonal, so that every group may stay out.
    """
    number = len(gains)
    if number <= MOST_GROUPS_TO_MATCH:
        return np.asarray(linear_sum_assignment(gains.T, maximize=True)[1])
    each = np.arange(number)
    partners = np.argpartition(-gains.T, PARTNERS, axis=1)[:, :PARTNERS]
    givers, takers = np.repeat(each, PARTNERS), partners.reshape(-1)
    others = givers != takers
    givers, takers = np.concatenate([givers[others], each]), np.concatenate([takers[others], each])
    weights = gains[takers, givers].astype(np.float64)
    # All weights positive: zero would mean that there is no such move.
    moves = csr_array((weights.max() + 1 - weights, (givers, takers)), shape=gains.shape)
    return np.asarray(min_weight_full_bipartite_matching(moves)[1], dtype=np.int64)
