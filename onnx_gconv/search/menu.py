"""The menu: for each channel space what its widths cost, for each product of two sides what its groups and ranks cost."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from onnx_gconv.errors import BudgetError
from onnx_gconv.search.budget import FEASIBLE, Budget, share
from onnx_gconv.search.orders import NO_ORDERS, Case, Demand, Orders

Clock = Callable[[int, int, int], int]  # whole nanoseconds, by the channels of both sides and the groups
Totals = tuple[int, int, int]  # parameters, MACs, nanoseconds


@dataclass(frozen=True)
class Width:
    """One width that a space may have; with 0 channels it is gone (a dropped residual branch)."""

    channels: int
    cost: float


@dataclass(frozen=True)
class SpaceRow:
    """One decision: the channels that several layers share, and so can only lose together."""

    name: str
    options: tuple[Width, ...]  # descending in channels; the first is the space as it is

    @property
    def full(self) -> int:
        """The channels of the space as it is."""
        return self.options[0].channels


@dataclass(frozen=True)
class Side:
    """How many channels a product has on one side: some that stay, and those of spaces."""

    fixed: int
    spaces: tuple[int, ...] = ()  # places in Menu.spaces; a Concat may have the same space twice

    @property
    def is_mixed(self) -> bool:
        """Whether channels of different origin meet here: groups would tear them, unless all of them are there."""
        return len(self.spaces) + bool(self.fixed) > 1


@dataclass(frozen=True)
class GroupCount:
    """One number of groups for one product, or a rank, and what it costs.

    With a rank the product is two: all inputs to so many channels, and from these, place by place, to all outputs.
    """

    groups: int
    cost: float
    rank: int = 0  # 0: it is one


@dataclass(frozen=True)
class Product:
    """Weights that join every channel of one side with every one of the other, divided by the groups."""

    names: tuple[str, ...]  # the layers behind it; none for biases and the like
    ins: Side
    outs: Side
    params: int  # for each pair of channels, ungrouped
    macs: int
    options: tuple[GroupCount, ...] = (GroupCount(1, 0.0),)  # ascending; the first is how it is now, above 1 with fixed sides only
    clock: Clock | None = None  # none where nothing is known of its time, which then counts among what is fixed
    places: int = 0  # of its outputs: the MACs of a 1x1 kernel for each pair of channels, which a rank has behind it
    rank_clock: Clock | None = None  # whole nanoseconds, by the channels of both sides and the rank

    def amounts(self, ins: int, outs: int, groups: int, rank: int = 0) -> Totals:
        """Return the parameters, MACs and nanoseconds with so many channels and groups, or with a rank."""
        if rank:
            params, macs = self.params * ins * rank + rank * outs, self.macs * ins * rank + self.places * rank * outs
            return params, macs, self.latency_ns(ins, outs, groups, rank)
        return self.params * ins * outs // groups, self.macs * ins * outs // groups, self.latency_ns(ins, outs, groups)

    def latency_ns(self, ins: int, outs: int, groups: int, rank: int = 0) -> int:
        """Return the time with so many channels and groups, or a rank: as measured, so fewer channels may be slower."""
        if rank and self.rank_clock is not None:
            return self.rank_clock(ins, outs, rank)
        return self.clock(ins, outs, groups) if self.clock is not None and ins and outs else 0


@dataclass(frozen=True)
class Menu:
    """Every decision, and what the rest of the model costs."""

    spaces: tuple[SpaceRow, ...]
    products: tuple[Product, ...]
    together: tuple[tuple[int, ...], ...] = ()  # spaces that are gone together or not at all
    fixed_params: int = 0
    fixed_macs: int = 0
    fixed_latency_ns: int = 0  # below 0 where layers take longer alone than in the model
    orders: Orders = NO_ORDERS  # of channels, where Gathers take time

    def full(self, side: Side) -> int:
        """Return the channels of a side when every space is as it is."""
        return side.fixed + sum(self.spaces[space].full for space in side.spaces)

    def channels(self, side: Side, widths: Sequence[int]) -> int:
        """Return the channels of a side when space s takes its option widths[s]."""
        return side.fixed + sum(self.spaces[space].options[widths[space]].channels for space in side.spaces)

    @property
    def dense(self) -> Totals:
        """What the model takes as it is."""
        return self.totals([0] * len(self.spaces), [0] * len(self.products))

    def totals(self, widths: Sequence[int], groups: Sequence[int], stored: Sequence[int] = ()) -> Totals:
        """Return what the model takes when space s takes its option widths[s] and product p its option groups[p].

        The channels of place q are in its order stored[q]; without `stored`, Gathers are not counted.
        """
        params, macs, latency_ns = self.fixed_params, self.fixed_macs, self.fixed_latency_ns
        for product, index in zip(self.products, groups, strict=True):
            sides = self.channels(product.ins, widths), self.channels(product.outs, widths)
            more = product.amounts(*sides, product.options[index].groups, product.options[index].rank)
            params, macs, latency_ns = params + more[0], macs + more[1], latency_ns + more[2]
        return params, macs, latency_ns + (self.gathers_ns(widths, groups, stored) if stored else 0)

    def gathered(self, widths: Sequence[int], groups: Sequence[int], stored: Sequence[int]) -> list[Demand]:
        """Return the sides of layers at which a choice has a Gather."""
        return [demand for demand in self.orders.demands if demand.has_gather(self._case(demand, widths, groups, stored))]

    def gathers_ns(self, widths: Sequence[int], groups: Sequence[int], stored: Sequence[int]) -> int:
        """Return what the Gathers of a choice take."""
        seams = sum(seam.gather_ns for seam in self.orders.seams if any(stored[place] for place in seam.places))
        return seams + sum(demand.gather_ns for demand in self.gathered(widths, groups, stored))

    def _case(self, demand: Demand, widths: Sequence[int], groups: Sequence[int], stored: Sequence[int]) -> Case:
        product = self.products[demand.product]
        return Case(
            0 if demand.place is None else stored[demand.place],
            is_grouped=product.options[groups[demand.product]].groups > demand.existing,
            is_narrowed=any(self.channels(side, widths) < self.full(side) for side in (product.ins, product.outs)),
        )

    def cost(self, widths: Sequence[int], groups: Sequence[int]) -> float:
        """Return the summed cost of a choice."""
        chosen = [row.options[index].cost for row, index in zip(self.spaces, widths, strict=True)]
        return sum(chosen) + sum(product.options[index].cost for product, index in zip(self.products, groups, strict=True))

    def is_legal(self, widths: Sequence[int], groups: Sequence[int], stored: Sequence[int] = ()) -> bool:
        """Return whether a model with these widths, groups and orders can be built."""
        if stored and not all(demand.is_legal(self._case(demand, widths, groups, stored)) for demand in self.orders.demands):
            return False
        for alike in self.together:
            if len({self.spaces[space].options[widths[space]].channels == 0 for space in alike}) > 1:
                return False
        return all(self.can_group(product, index, widths) for product, index in zip(self.products, groups, strict=True))

    def can_group(self, product: Product, index: int, widths: Sequence[int]) -> bool:
        """Return whether a product can take an option at these widths."""
        sides = (product.ins, self.channels(product.ins, widths)), (product.outs, self.channels(product.outs, widths))
        groups, rank = product.options[index].groups, product.options[index].rank
        if rank:  # no matrix has more than it has rows, or columns
            return rank < min(product.params * sides[0][1], sides[1][1])
        return index == 0 or all(
            channels > 0 and channels % groups == 0 and not (side.is_mixed and channels < self.full(side))
            for side, channels in sides
        )

    def allows(self, widths: Sequence[int], groups: Sequence[int], budget: Budget, stored: Sequence[int] = ()) -> bool:
        """Return whether a choice is within every limit."""
        params, macs, latency_ns = self.totals(widths, groups, stored)
        return budget.allows(params, macs) and (budget.latency_ns is None or latency_ns <= budget.latency_ns)


def refusal(menu: Menu, budget: Budget, smallest: Totals) -> BudgetError:
    """Return the error for a budget that cannot be met, with the range that can be had: from these totals on."""
    (params, macs, latency_ns), (all_params, all_macs, all_ns) = smallest, menu.dense
    milliseconds = -(-max(latency_ns, 0) // 100) / 10**4  # rounded up, so that asking for what is printed is enough
    words = (
        ("--max-params", budget.max_params, f"{params:,}", "parameters", share(params, all_params)),
        ("--max-macs", budget.max_macs, f"{macs:,}", "MACs", share(macs, all_macs)),
        ("--max-flops", budget.max_flops, f"{2 * macs:,}", "FLOPs", share(macs, all_macs)),
        ("--max-latency", budget.max_latency_ms, f"{milliseconds:.4f}", "ms", budget.time_share(latency_ns, all_ns)),
    )
    limited = [(option, limit, amount, unit, part) for option, limit, amount, unit, part in words if limit is not None]
    asked = ", ".join(f"max {option[6:]} {limit:,}{' ms' * (unit == 'ms')}" for option, limit, _, unit, _ in limited)
    still = " and ".join(f"{amount} {unit}" for _, _, amount, unit, _ in limited)
    ranges = "; ".join(f"{option} from {amount}{unit * (unit == 'ms')} ({part})" for option, _, amount, unit, part in limited)
    return BudgetError(
        f"the budget cannot be met: you asked for {asked}, but even the smallest model needs {still}.",
        hint=f"{FEASIBLE} {ranges} up to 100%",
    )
