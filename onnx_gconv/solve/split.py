"""A start for many groups out of few: split each group of a coarser grouping on its own."""

import numpy as np

from onnx_gconv.solve.alternate import Importances, Pair, alternate_many
from onnx_gconv.solve.partition import Groups


def smallest_factor(number: int) -> int:
    """Return the smallest prime factor."""
    return next((p for p in range(2, int(number**0.5) + 1) if number % p == 0), number)


def split(matrix: Importances, coarse: Pair, parts: int, rng: np.random.Generator, *, starts: int, steps: int) -> Pair:
    """Return a grouping with each group of `coarse` split into `parts`, all groups solved together.

    The groups of a coarse grouping do not touch each other, so this is a batch of small problems, `starts` for each.
    """
    (ins,), (outs,) = coarse.ins, coarse.outs
    number = len(ins)
    blocks = matrix[0][outs[:, :, None], ins[:, None, :]]
    batch = np.repeat(blocks, starts, axis=0)
    local = Pair(_random_groups(rng, len(batch), ins.shape[1], parts), _random_groups(rng, len(batch), outs.shape[1], parts))
    local, kept = alternate_many(batch, local, steps=steps)
    best = local.pick(np.arange(number) * starts + kept.reshape(number, starts).argmax(axis=1))
    each = np.arange(number)[:, None, None]
    return Pair(ins[each, best.ins].reshape(1, number * parts, -1), outs[each, best.outs].reshape(1, number * parts, -1))


def random_pair(rng: np.random.Generator, batch: int, shape: tuple[int, ...], groups: int) -> Pair:
    """Return random partitions of the inputs and outputs of a (Cout, Cin) matrix."""
    return Pair(_random_groups(rng, batch, shape[1], groups), _random_groups(rng, batch, shape[0], groups))


def _random_groups(rng: np.random.Generator, batch: int, channels: int, groups: int) -> Groups:
    orders = rng.permuted(np.tile(np.arange(channels), (batch, 1)), axis=1)
    return orders.reshape(batch, groups, -1)
