"""A menu as a network: every decision is a variable, and tables tell what few of them cost and take together.

At given prices of parameters, MACs and nanoseconds the best choice is found by elimination: one variable after the other is
decided for every case of its neighbours.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, reduce
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from onnx_gconv.search.budget import Budget
from onnx_gconv.search.menu import Menu, Product
from onnx_gconv.search.orders import Demand, Seam, only_ns

AMOUNTS = 3  # parameters (0), MACs (1), nanoseconds (2)
MOST_CELLS = 1 << 23  # of one table; what needs more is relaxed, and bounds are less tight

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Places = NDArray[np.intp]
Item = tuple[set[int], int, int]  # variables, and the factor or the bucket that tells about them, or -1


@dataclass(frozen=True)
class Factor:
    """What some variables cost and take together; the cost is infinite where they do not go together."""

    scope: tuple[int, ...]  # ascending
    costs: Floats  # an axis for each variable
    amounts: Ints  # the same and a last axis: parameters, MACs, nanoseconds


@dataclass(frozen=True)
class Sum:
    """A variable that follows from two others: the channels of both."""

    parts: tuple[int, int]
    values: Ints  # its value, for each value of the one and the other


@dataclass(frozen=True)
class Network:
    """A menu as variables, numbered from 0: the spaces, then sums of spaces, numbers of groups and orders as they come.

    Every product joins two variables at most, as a side of several spaces is a variable of its own. A value is the place of an
    option; a sum's value is the place of its channels among all that it may have.
    """

    sizes: tuple[int, ...]  # how many values each variable has
    factors: tuple[Factor, ...]
    sums: Mapping[int, Sum]
    spaces: int  # how many of the variables are spaces
    groups: tuple[int | None, ...]  # the variable of each product; none where it has one option only
    places: tuple[int, ...]  # the variable of the order of each place
    fixed_cost: float
    fixed_amounts: Ints
    limits: Mapping[int, int]  # the most there may be of each amount that is limited

    def fits(self, values: Sequence[int]) -> bool:
        """Return whether a choice is within every limit, in whole numbers."""
        amounts = self.amounts(values)
        return all(int(amounts[row]) <= limit for row, limit in self.limits.items())

    def cost(self, values: Sequence[int]) -> float:
        """Return the cost of a choice; infinite where it is not legal."""
        return self.fixed_cost + sum(float(factor.costs[tuple(values[v] for v in factor.scope)]) for factor in self.factors)

    def amounts(self, values: Sequence[int]) -> Ints:
        """Return the parameters, MACs and nanoseconds of a choice."""
        total = self.fixed_amounts.copy()
        for factor in self.factors:
            total += factor.amounts[tuple(values[v] for v in factor.scope)]
        return total

    @property
    def as_it_is(self) -> list[int]:
        """The choice of every first option."""
        values = [0] * len(self.sizes)
        for variable, total in self.sums.items():  # parts come before their sum
            first, second = total.parts
            values[variable] = int(total.values[values[first], values[second]])
        return values

    def value_of(self, variable: int, known: Mapping[int, Ints]) -> Ints:
        """Return the values of a variable, known or a sum of known ones."""
        if variable in known:
            return known[variable]
        first, second = self.sums[variable].parts
        return self.sums[variable].values[known[first], known[second]]

    def choice(self, values: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
        """Return the options of the spaces and of the products, and the orders of the places."""
        groups = tuple(0 if variable is None else values[variable] for variable in self.groups)
        return tuple(values[: self.spaces]), groups, tuple(values[variable] for variable in self.places)

    @cached_property
    def scale(self) -> float:
        """A sum that no cost of a choice exceeds: what rounding is measured in."""
        return abs(self.fixed_cost) + sum(float(np.abs(f.costs[np.isfinite(f.costs)]).max()) for f in self.factors)

    def minimising(self, amount: int, limits: Mapping[int, int]) -> "Network":
        """Return the network whose cost is one of its amounts, in a unit of about all of it; under other limits."""
        # A power of two, so that whole numbers are as exact in this unit as they were.
        unit = 2.0 ** -int(self.amounts(self.as_it_is)[amount]).bit_length()
        factors = (replace(f, costs=np.where(np.isfinite(f.costs), f.amounts[..., amount] * unit, np.inf)) for f in self.factors)
        return replace(self, factors=tuple(factors), fixed_cost=float(self.fixed_amounts[amount]) * unit, limits=limits)


def network_of(menu: Menu, budget: Budget) -> Network:
    """Return the menu under a budget as a network."""
    build = _Building(menu)
    for space, row in enumerate(menu.spaces):
        build.add((space,), np.array([width.cost for width in row.options]), np.zeros((len(row.options), AMOUNTS), np.int64))
    for alike in menu.together:
        for one, other in pairwise(alike):
            torn = (build.channels[one] == 0)[:, None] != (build.channels[other] == 0)
            build.add((one, other), np.where(torn, np.inf, 0.0), np.zeros((*torn.shape, AMOUNTS), np.int64))
    # Small sides first, so that large ones find sums to go on from: what a dense block's layer reads grows from layer to layer.
    order = sorted(range(len(menu.products)), key=lambda p: len(menu.products[p].ins.spaces) + len(menu.products[p].outs.spaces))
    groups = {number: build.product(menu.products[number]) for number in order}
    places = tuple(build.place(orders) for orders in menu.orders.places)
    for demand in menu.orders.demands:
        build.demand(demand, groups[demand.product], None if demand.place is None else places[demand.place])
    for seam in menu.orders.seams:
        build.seam(seam, [places[place] for place in seam.places])
    return Network(
        sizes=tuple(len(channels) for channels in build.channels),
        factors=tuple(build.factors.values()),
        sums=build.sums,
        spaces=len(menu.spaces),
        groups=tuple(groups[number] for number in range(len(menu.products))),
        places=places,
        fixed_cost=build.fixed_cost,
        fixed_amounts=build.fixed_amounts,
        limits={row: limit for row, limit in enumerate(budget.amounts) if limit is not None},
    )


class _Building:
    """A network as it grows."""

    def __init__(self, menu: Menu) -> None:
        self.menu = menu
        self.channels: list[Ints] = [np.array([o.channels for o in row.options], np.int64) for row in menu.spaces]
        self.known: dict[tuple[int, ...], int] = {(space,): space for space in range(len(menu.spaces))}
        self.sums: dict[int, Sum] = {}
        self.factors: dict[tuple[int, ...], Factor] = {}
        self.fixed_cost = 0.0
        self.fixed_amounts = np.array([menu.fixed_params, menu.fixed_macs, menu.fixed_latency_ns], np.int64)

    def add(self, scope: Sequence[int], costs: Floats, amounts: Ints) -> None:
        """Add what variables cost and take together, to what is known of them."""
        if not scope:
            self.fixed_cost, self.fixed_amounts = self.fixed_cost + float(costs), self.fixed_amounts + amounts
            return
        order = sorted(range(len(scope)), key=lambda axis: scope[axis])
        key = tuple(scope[axis] for axis in order)
        costs, amounts = costs.transpose(order), amounts.transpose([*order, len(order)])
        if (known := self.factors.get(key)) is not None:
            costs, amounts = known.costs + costs, known.amounts + amounts
        self.factors[key] = Factor(key, costs, amounts)

    def variable(self, spaces: Sequence[int]) -> int:
        """Return the variable of a side: a space, or the sum of several; one that is there twice counts twice."""
        wanted = Counter(spaces)
        have = max((known for known in self.known if Counter(known) <= wanted), key=lambda known: (len(known), known))
        for space in sorted((wanted - Counter(have)).elements()):
            totals = self.channels[self.known[have]][:, None] + self.channels[space]
            channels, values = np.unique(totals, return_inverse=True)
            parts = self.known[have], space
            have = tuple(sorted((*have, space)))
            self.known[have] = len(self.channels)
            self.sums[len(self.channels)] = Sum(parts, values.reshape(totals.shape).astype(np.int64))
            self.channels.append(channels)
        return self.known[have]

    def product(self, product: Product) -> int | None:
        """Add a product, and return the variable of its groups if it has a choice."""
        sides, first = (product.ins, product.outs), product.options[0]
        is_linear = product.clock is None and not (product.ins.spaces and product.outs.spaces)
        if len(product.options) == 1 and first.groups == 1 and is_linear:
            unit = np.array([product.params, product.macs, 0], np.int64)
            # Linear: each space for itself, and no sum is needed.
            for side, other in (sides, sides[::-1]):
                for space in side.spaces:
                    channels = self.channels[space]
                    self.add((space,), np.zeros(len(channels)), channels[:, None] * unit * other.fixed)
            self.add((), np.array(first.cost), unit * product.ins.fixed * product.outs.fixed)
            return None
        scope = [self.variable(side.spaces) if side.spaces else None for side in sides]
        costs, amounts = self._tables(product, scope)
        if scope[0] is not None and scope[0] == scope[1]:
            costs, amounts = np.einsum("iig->ig", costs)[None], np.einsum("iiga->iga", amounts)[None]
            scope[0] = None
        groups = None
        if len(product.options) > 1:
            groups = self.new(np.array([option.groups for option in product.options], np.int64))
        scope.append(groups)
        self._add_present(scope, costs, amounts)
        return groups

    def new(self, values: Ints) -> int:
        """Return a new variable of these values."""
        self.channels.append(values)
        return len(self.channels) - 1

    def place(self, orders: int) -> int:
        """Return a new variable: the order of a place."""
        place = self.new(np.arange(orders))
        self.add((place,), np.zeros(orders), np.zeros((orders, AMOUNTS), np.int64))
        return place

    def _add_present(self, scope: Sequence[int | None], costs: Floats, amounts: Ints) -> None:
        """Add a table of which some axes are of no variable and have one place."""
        gone = tuple(axis for axis, variable in enumerate(scope) if variable is None)
        self.add([variable for variable in scope if variable is not None], costs.squeeze(gone), amounts.squeeze(gone))

    def demand(self, demand: Demand, groups: int | None, place: int | None) -> None:
        """Add the Gather at a side of a layer."""
        product = self.menu.products[demand.product]
        sides = [side if side.spaces and not demand.is_own else None for side in (product.ins, product.outs)]
        scope = [None if side is None else self.variable(side.spaces) for side in sides]
        if scope[0] == scope[1]:
            scope[0] = None
        narrowed = np.zeros((1, 1), np.bool_)
        for axis, (side, variable) in enumerate(zip((product.ins, product.outs), scope, strict=True)):
            if variable is not None:
                is_less = side.fixed + self.channels[variable] < self.menu.full(side)
                narrowed = narrowed | np.expand_dims(is_less, 1 - axis)
        options = np.array([option.groups for option in product.options], np.int64)
        costs, times = demand.tables(options, narrowed, 1 if place is None else len(self.channels[place]))
        self._add_present([*scope, groups, place], costs, only_ns(times))

    def seam(self, seam: Seam, places: Sequence[int]) -> None:
        """Add the Gather where places meet."""
        times = np.where(reduce(np.logical_or.outer, (self.channels[place] != 0 for place in places)), seam.gather_ns, 0)
        self.add(places, np.zeros(times.shape), only_ns(times))

    def _tables(self, product: Product, scope: Sequence[int | None]) -> tuple[Floats, Ints]:
        """Return costs (ins, outs, groups) and amounts (ins, outs, groups, AMOUNTS)."""
        here = [
            side.fixed + (np.zeros(1, np.int64) if variable is None else self.channels[variable])
            for side, variable in zip((product.ins, product.outs), scope, strict=True)
        ]
        ins, outs = here[0][:, None, None], here[1][:, None]
        groups = np.array([option.groups for option in product.options], np.int64)
        legal = np.ones((ins.size, outs.size, groups.size), np.bool_)
        for side, channels in ((product.ins, ins), (product.outs, outs)):
            whole = channels == self.menu.full(side)
            legal &= (channels > 0) & (channels % groups == 0) & (whole if side.is_mixed else True)
        ranks = np.array([option.rank for option in product.options], np.int64)
        legal = np.where(ranks > 0, ranks < np.minimum(product.params * ins, outs), legal)
        legal[:, :, 0] = True
        costs = np.where(legal, np.array([option.cost for option in product.options]), np.inf)
        amounts = (ins * outs)[..., None] * np.array([product.params, product.macs, 0], np.int64) // groups[:, None]
        for place in np.flatnonzero(ranks):
            for cell in zip(*np.nonzero(legal[:, :, place]), strict=True):
                amounts[*cell, place] = product.amounts(int(here[0][cell[0]]), int(here[1][cell[1]]), 1, int(ranks[place]))
        for cell in zip(*np.nonzero(legal), strict=True) if product.clock is not None else ():
            amounts[*cell, 2] = product.latency_ns(
                int(here[0][cell[0]]), int(here[1][cell[1]]), int(groups[cell[2]]), int(ranks[cell[2]])
            )
        return costs, amounts


@dataclass(frozen=True)
class Bucket:
    """The elimination of one variable: a table over its neighbours, and over itself unless it follows from them as a sum does."""

    variable: int
    factors: tuple[int, ...]
    children: tuple[int, ...]  # buckets whose message is part of the table
    rest: tuple[int, ...]  # the axes of its message: what is left of its table when the variable is decided
    axes: tuple[int, ...]  # of its table; the variable's own is the first


@dataclass(frozen=True)
class Tree:
    """The order of elimination. A bucket's message goes to its parent; a variable with several buckets is relaxed there."""

    network: Network
    buckets: tuple[Bucket, ...]
    parents: tuple[int, ...]  # -1 for a bucket that leaves nothing to decide

    @property
    def is_relaxed(self) -> bool:
        """Whether a variable may be decided differently in different tables, as one table of all was too large."""
        return len(self.buckets) > len(self.network.sizes)

    def eliminated(self, prices: Floats) -> tuple[float, list[Floats]]:
        """Return a bound of any choice's cost + prices · amounts, and for each bucket how far each of its cells lifts it.

        The bound is the least such sum itself, unless variables are relaxed. What the cells of a choice lift it by adds up.
        """
        bound = self.network.fixed_cost + float(prices @ self.network.fixed_amounts)
        messages, lifts = [np.zeros(0)] * len(self.buckets), []
        for number, bucket in enumerate(self.buckets):
            table = np.zeros([self.network.sizes[variable] for variable in bucket.axes])
            for place in bucket.factors:
                factor, priced = self.network.factors[place], self.network.factors[place].costs
                for row in np.flatnonzero(prices):
                    priced = priced + prices[row] * factor.amounts[..., row]
                table += self._spread(bucket, factor.scope, priced)
            for child in bucket.children:
                table += self._spread(bucket, self.buckets[child].rest, messages[child])
            message = table if bucket.variable in self.network.sums else table.min(axis=0)
            lifts.append(np.subtract(table, message, out=np.full(table.shape, np.inf), where=np.isfinite(table)))
            messages[number] = message
            bound += float(message) if self.parents[number] < 0 else 0.0
        return bound, lifts

    def _spread(self, bucket: Bucket, scope: tuple[int, ...], array: Floats) -> Floats:
        """Return an array over some variables such that it broadcasts against a bucket's table."""
        if bucket.variable not in bucket.axes and bucket.variable in scope:
            return array[self._places(bucket, scope)]
        order = sorted(range(len(scope)), key=lambda axis: bucket.axes.index(scope[axis]))
        missing = tuple(axis for axis, variable in enumerate(bucket.axes) if variable not in scope)
        return np.expand_dims(array.transpose(order), missing)

    def _places(self, bucket: Bucket, scope: tuple[int, ...]) -> tuple[Ints, ...]:
        """Return the values of some variables in each cell of a bucket's table, to be broadcast."""
        grid = dict(zip(bucket.axes, np.ogrid[*(slice(self.network.sizes[v]) for v in bucket.axes)], strict=True))
        return tuple(self.network.value_of(variable, grid) for variable in scope)

    def least(self, lifts: Sequence[Floats]) -> list[Floats]:
        """Return how far each cell lifts the bound together with the best of all others."""
        total = list(lifts)
        for number in reversed(range(len(self.buckets))):  # parents come after their children
            bucket, up = self.buckets[number], self.parents[number]
            if up < 0:
                continue
            *places, above = np.broadcast_arrays(*self._places(self.buckets[up], bucket.rest), total[up])
            least = np.full([self.network.sizes[variable] for variable in bucket.rest], np.inf)
            np.minimum.at(least, tuple(places), above)
            total[number] = lifts[number] + least
        return total

    def values(self, lifts: Sequence[Floats]) -> list[int]:
        """Return the choice that lifts the bound least, the first option of equal ones; perhaps not legal where relaxed."""
        known: dict[int, Ints] = {}
        lifted: dict[int, Floats] = {}
        for number in reversed(range(len(self.buckets))):
            bucket = self.buckets[number]
            if bucket.variable in self.network.sums:
                known[bucket.variable] = self.network.value_of(bucket.variable, known)
                continue
            here: tuple[Any, ...] = (slice(None), *(known[variable] for variable in bucket.rest))
            lifted[bucket.variable] = lifted.get(bucket.variable, np.zeros(1)) + lifts[number][here]
            known[bucket.variable] = np.asarray(lifted[bucket.variable].argmin())
        return [int(known[variable]) for variable in range(len(self.network.sizes))]


def tree_of(network: Network) -> Tree:
    """Return an order of elimination with small tables: always the variable whose table is smallest."""
    sizes, sums = network.sizes, network.sums
    near: list[set[int]] = [set() for _ in sizes]
    for joined in [*(factor.scope for factor in network.factors), *((v, *total.parts) for v, total in sums.items())]:
        for variable in joined:
            near[variable] |= set(joined) - {variable}
    left = dict.fromkeys(range(len(sizes)), 0)
    open_sums = {v: set(total.parts) for v, total in sums.items()}
    items = [(set(factor.scope), number, -1) for number, factor in enumerate(network.factors)]
    buckets, parents = list[Bucket](), list[int]()
    changed = set(left)
    while left:
        for variable in changed:
            own = 1 if variable in sums else sizes[variable]
            left[variable] = own * math.prod(sizes[other] for other in near[variable])
        held = set().union(*open_sums.values())  # a sum is eliminated before its parts, which it follows from
        variable = min(left.keys() - held, key=lambda v: (left[v], v))
        changed = near[variable]
        for other in changed:
            near[other] = (near[other] | changed) - {variable, other}
        del left[variable]
        extra = open_sums.pop(variable, set())
        mine = [item for item in items if variable in item[0]]
        items = [item for item in items if variable not in item[0]]
        for scope, parts in _split(mine, extra, sizes):
            rest = tuple(sorted(scope - {variable}))
            factors, children = tuple(f for _, f, b in parts if b < 0), tuple(b for _, _, b in parts if b >= 0)
            for child in children:
                parents[child] = len(buckets)
            if rest:
                items.append((set(rest), -1, len(buckets)))
            buckets.append(Bucket(variable, factors, children, rest, rest if variable in sums else (variable, *rest)))
            parents.append(-1)
    return Tree(network, tuple(buckets), tuple(parents))


def _split(items: list[Item], extra: set[int], sizes: Sequence[int]) -> list[tuple[set[int], list[Item]]]:
    """Return the items of one variable in as few tables as have at most MOST_CELLS cells."""
    tables = list[tuple[set[int], list[Item]]]()
    for item in sorted(items, key=lambda item: -math.prod(sizes[v] for v in item[0])):
        for scope, parts in tables:
            if math.prod(sizes[v] for v in scope | item[0]) <= MOST_CELLS:
                scope |= item[0]
                parts.append(item)
                break
        else:
            tables.append((item[0] | extra, [item]))
    return tables
