"""How a constant of the written model was taken from one of the model, which is also the way back."""

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod

import numpy as np
from numpy.typing import NDArray

from onnx_gconv.solve.grouping import Order

Follow = tuple[int, Order, int]  # an axis of a constant, the order it follows, and how many numbers in a row each channel has


@dataclass(frozen=True, eq=False)
class Taken:
    """A constant that is `source[index]`, laid out in another shape. No number of the source is taken twice.

    The index is of the first axes, as NumPy has it: its arrays are broadcast against each other.
    """

    source: str
    index: tuple[Order, ...]
    shape: tuple[int, ...]

    @property
    def key(self) -> tuple[object, ...]:
        """What two constants that are one have in common."""
        return self.source, self.shape, *((places.shape, places.tobytes()) for places in self.index)

    def is_all_of(self, source: NDArray[np.generic]) -> bool:
        """Return whether the source is taken as it is: every number, in its place."""
        if self.shape != source.shape:
            return False
        numbers = np.arange(prod(source.shape[: len(self.index)])).reshape(source.shape[: len(self.index)])
        return bool((numbers[self.index].ravel() == numbers.ravel()).all())

    def of(self, source: NDArray[np.generic]) -> NDArray[np.generic]:
        """Return the constant that a source with these numbers gives."""
        return np.ascontiguousarray(source[self.index]).reshape(self.shape)

    def put(self, source: NDArray[np.generic], value: NDArray[np.generic]) -> NDArray[np.generic]:
        """Return the source with the constant's numbers where they were taken from, and its own elsewhere."""
        result = source.copy()
        places = np.broadcast_shapes(*(each.shape for each in self.index))
        result[self.index] = value.reshape(*places, *source.shape[len(self.index) :])
        return result


def take_along(source: str, shape: tuple[int, ...], follows: Iterable[Follow]) -> Taken:
    """Return a constant of this shape in these orders, axis by axis; an order may leave channels out."""
    places = [np.arange(size) for size in shape]
    last = -1
    for dim, order, repeat in follows:
        places[dim] = places[dim][(order[:, None] * repeat + np.arange(repeat)).reshape(-1)]
        last = max(last, dim)
    # Only as many axes as are needed: what lies behind them is copied in one piece.
    return Taken(source, np.ix_(*places[: last + 1]), tuple(map(len, places)))


def take_blocks(source: str, shape: tuple[int, ...], existing: int, groups: int, orders: tuple[Order, Order]) -> Taken:
    """Return the diagonal blocks of a weight in these orders of its inputs and outputs: (Cout, Cin / G, *kernel).

    `existing` are the groups that the weight has already.
    """
    inputs, outputs = (order.reshape(groups, -1) for order in orders)
    # The weight of a Conv that has groups already holds only its own group's columns: count them from there.
    columns = inputs - inputs[:, :1] // shape[1] * shape[1] if existing > 1 else inputs
    return Taken(source, (outputs[:, :, None], columns[:, None, :]), (outputs.size, inputs.shape[1], *shape[2:]))
