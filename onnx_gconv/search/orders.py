"""The orders in which channels are stored: which of them spare whom a Gather, and what the Gathers take.

A place is a set of channels that all lie in one order. Order 0 is the model's own; the others are numbered. A layer with groups
finds on either side the order that suits it, or has a Gather there. Layers without groups take any order.
"""

from dataclasses import dataclass
from itertools import product
from typing import Literal

import numpy as np
from numpy.typing import NDArray

SideName = Literal["in", "out"]
Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
NO_ORDER = -1


@dataclass(frozen=True)
class Case:
    """What a side of a layer meets: the order that is stored, and what became of the layer."""

    order: int
    is_grouped: bool  # whether it gets more groups
    is_narrowed: bool


@dataclass(frozen=True)
class Demand:
    """What one side of a layer wants of the place whose channels it reads or writes.

    Once a side of it is narrowed, a layer's groups are others, and suit nobody else: `order` then gives way to `narrowed_order`,
    which is the same where `order` suits nobody else anyway.
    """

    product: int  # its place in Menu.products
    layer: str
    side: SideName
    gather_ns: int
    existing: int  # groups that it has; with more of them it wants an order
    place: int | None  # None where only the model's own order can be had
    order: int  # that suits it; NO_ORDER if none does
    narrowed_order: int
    stays: bool = False  # whether also the groups that it has want an order: the model's own

    @property
    def is_own(self) -> bool:
        """Whether the order suits this side alone."""
        return self.order == self.narrowed_order

    def has_gather(self, case: Case) -> bool:
        """Return whether a layer has a Gather here."""
        return case.is_grouped and case.order != (self.narrowed_order if case.is_narrowed else self.order)

    def is_legal(self, case: Case) -> bool:
        """Return whether a place may have this order: one that suits a single side is only there for it."""
        if self.stays and not case.is_grouped:
            return case.order == 0
        if case.order > 0 and case.order == self.narrowed_order:
            return case.is_grouped and (case.is_narrowed or self.is_own)
        return True

    def tables(self, groups: NDArray[np.int64], narrowed: NDArray[np.bool_], orders: int) -> tuple[Floats, Ints]:
        """Return costs, infinite or 0, and nanoseconds: over axes (…narrowed, groups, order)."""
        costs, times = (np.zeros((*narrowed.shape, len(groups), orders), kind) for kind in (np.float64, np.int64))
        for is_narrowed, (option, number), order in product((False, True), enumerate(groups.tolist()), range(orders)):
            cells = narrowed == is_narrowed, option, order
            case = Case(order, is_grouped=number > self.existing, is_narrowed=is_narrowed)
            if not self.is_legal(case):
                costs[cells] = np.inf
            elif self.has_gather(case):
                times[cells] = self.gather_ns
        return costs, times


@dataclass(frozen=True)
class Seam:
    """Where channels of some places meet in the model's own order: a Gather, unless all of them have it."""

    places: tuple[int, ...]
    gather_ns: int


def only_ns(times: Ints) -> Ints:
    """Return these nanoseconds as amounts of no parameters and no MACs."""
    return np.stack([np.zeros_like(times), np.zeros_like(times), times], axis=-1)


@dataclass(frozen=True)
class Orders:
    """All places of a model, by the number of orders that each may have."""

    places: tuple[int, ...] = ()
    demands: tuple[Demand, ...] = ()
    seams: tuple[Seam, ...] = ()


NO_ORDERS = Orders()
