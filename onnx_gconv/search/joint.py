"""The exact search over widths of spaces and groups of layers together, with proof.

At given prices of the limits the best choice is found by elimination (network.py). The prices where the bound is highest tell, for
every case in its tables, how far it lifts the bound; few cases can be part of a choice better than one already known. These, the
core, are joined to a list of all choices that come into question. Where it is too long, HiGHS searches the core.
"""

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, linprog, milp
from scipy.sparse import csr_array

from onnx_gconv.native_output import native_stdout_silenced
from onnx_gconv.search.budget import Budget
from onnx_gconv.search.exact import TIME_LIMIT_SECONDS, SearchResult
from onnx_gconv.search.menu import Menu, Totals, refusal
from onnx_gconv.search.network import AMOUNTS, Floats, Ints, Places, Tree, network_of, tree_of

MOST_PAIRS = 2_000_000  # that are looked at to join two lists; where there would be more, HiGHS goes on
MOST_LISTED = 250_000  # of them that are left
ROUNDING = 1e-12  # far above what sums in float64 are off, of the largest cost; far below what matters
TINY = 1e-200  # below, parts of numbers are 0
HIGHEST_PRICE = 1e6  # of a whole limit, in the largest cost
FEWEST_PRICES = 10  # tried also when there is no time


@dataclass(frozen=True)
class JointResult:
    """A choice within the budget, its cost, and a proven lower bound of any choice's cost."""

    widths: tuple[int, ...]  # the option of each space
    groups: tuple[int, ...]  # the option of each product
    cost: float
    bound: float
    stored: tuple[int, ...] = ()  # the order of each place

    def as_dict(self) -> dict[str, float | None]:
        """Return cost, bound and gap for JSON."""
        return SearchResult([], self.cost, self.bound).as_dict()

    @property
    def gap(self) -> float:
        """How much the cost may be above the optimum at most; 0 is a proof of optimality (up to HiGHS's 1e-6)."""
        return SearchResult([], self.cost, self.bound).gap


def search_joint(menu: Menu, budget: Budget, *, time_limit_seconds: float = TIME_LIMIT_SECONDS) -> JointResult:
    """Return the widths and groups of least cost within the budget, with the gap that is left if time runs out."""
    until = time.monotonic() + time_limit_seconds
    tree = tree_of(network_of(menu, budget))
    values, bound = _search(tree, _start(menu, budget, tree), until)
    widths, groups, stored = tree.network.choice(values)
    return JointResult(widths, groups, cost := menu.cost(widths, groups), min(bound, cost), stored)


def smallest_totals(menu: Menu, row: int) -> Totals:
    """Return what the choice with the fewest parameters (row 0), MACs (1) or nanoseconds (2) takes."""
    tree = tree_of(network_of(menu, Budget()))
    return _totals(tree, _fewest(tree, row, {}, tree.network.as_it_is))


def _totals(tree: Tree, values: list[int]) -> Totals:
    params, macs, latency_ns = tree.network.amounts(values).tolist()
    return params, macs, latency_ns


def _start(menu: Menu, budget: Budget, tree: Tree) -> list[int]:
    """Return a choice within all limits; refuse a budget that none is within, with a range that can be had."""
    network = tree.network
    found = {-1: network.as_it_is}
    for row in network.limits:
        found[row] = _fewest(tree, row, {}, found[-1])
    if len(network.limits) > 1 and not any(map(network.fits, found.values())):  # limits may pull in different directions
        found[AMOUNTS] = _between(tree, found[-1])
    fitting = [values for values in found.values() if network.fits(values)]
    if fitting:
        return min(fitting, key=network.cost)
    # The totals are those of one choice, so that a budget of all of them can be had.
    nearest = min(
        (_totals(tree, values) for values in found.values()),
        key=lambda totals: max(totals[row] / max(limit, 1) for row, limit in network.limits.items()),
    )
    raise refusal(menu, budget, nearest)


def _between(tree: Tree, values: list[int]) -> list[int]:
    """Return a choice within all limits if there is one: one limit after the other is met, within those before."""
    held = dict[int, int]()
    for row, limit in tree.network.limits.items():
        if tree.network.amounts(values)[row] > limit:
            values = _fewest(tree, row, held, values)
        if tree.network.amounts(values)[row] > limit:
            break
        held[row] = limit
    return values


def _fewest(tree: Tree, row: int, limits: Mapping[int, int], start: list[int]) -> list[int]:
    """Return the choice that takes least of an amount. However long it takes: a refusal must be right."""
    return _search(replace(tree, network=tree.network.minimising(row, limits)), start, math.inf)[0]


@dataclass(frozen=True)
class Priced:
    """What prices of the limits tell: a bound of any choice's cost, and how far each cell of each bucket lifts it."""

    bound: float
    prices: Floats  # of a parameter, of a MAC, of a nanosecond
    lifts: list[Floats]


def _price(tree: Tree, start: list[int], until: float) -> tuple[Priced, list[int]]:
    """Return the prices where the bound is highest, and the best choice met on the way.

    Every choice gives a bound above: no prices lift the bound above its cost + prices · (amounts - limits). The next prices are
    always those where all these bounds together are highest, until the bound below is there too.
    """
    network, rows = tree.network, list(tree.network.limits)
    limits = np.array(list(network.limits.values()), np.float64)
    unit, scale = np.maximum(limits, 1.0), network.scale
    top, choices = Priced(-math.inf, np.zeros(AMOUNTS), []), [start]
    costs, above = [network.cost(start)], [(network.amounts(start)[rows] - limits) / unit]
    prices = np.zeros(len(rows))
    while True:
        each = np.zeros(AMOUNTS)
        each[rows] = prices / unit
        bound, lifts = tree.eliminated(each)
        top = max(top, Priced(bound - float(each[rows] @ limits), each, lifts), key=lambda priced: priced.bound)
        values = tree.values(lifts)
        if values in choices or not math.isfinite(network.cost(values)):
            break
        choices.append(values)
        costs.append(network.cost(values))
        above.append((network.amounts(values)[rows] - limits) / unit)
        if len(choices) > FEWEST_PRICES and time.monotonic() > until:
            break
        box = [(None, None), *[(0.0, HIGHEST_PRICE * scale)] * len(rows)]
        highest = linprog([-1.0, *[0.0] * len(rows)], np.insert(-np.array(above), 0, 1.0, axis=1), costs, bounds=box)
        if highest.x is None or highest.x[0] - top.bound <= ROUNDING * scale:
            break
        prices = highest.x[1:]
    return top, min(filter(network.fits, choices), key=network.cost)


def _search(tree: Tree, start: list[int], until: float) -> tuple[list[int], float]:
    """Return the choice of least cost within the limits, or the best found in time, and a bound of any choice's cost."""
    network = tree.network
    priced, best = _price(tree, start, until)
    bound, rounding = priced.bound, max(ROUNDING * network.scale, TINY)
    gap = network.cost(best) - bound
    if gap <= rounding:
        return best, bound
    least = tree.least(priced.lifts)
    levels = np.sort(np.concatenate([cells[cells <= gap] for cells in least]))
    wanted = min(gap / 32, max(gap / 1024, levels[min(2 * len(least), len(levels) - 1)]))
    while time.monotonic() < until:
        # A choice that costs less than bound + reach has only cells that lift the bound by less: a low guess leaves few.
        reach = max(min(gap, wanted), rounding)
        found, lower = _solve(_core(tree, priced, least, reach), until)
        bound = max(bound, min(lower, priced.bound + reach))
        if found is not None and network.cost(found) < network.cost(best):
            best, gap = found, network.cost(found) - priced.bound
        if gap <= reach:
            break
        wanted = 1.4 * reach
    return best, bound


@dataclass(frozen=True)
class Cells:
    """Parts of choices: the values of a bucket's variables, and what these and all that were joined with them come to."""

    values: dict[int, Ints]
    lifts: Floats  # how far they lift the bound
    others: Floats  # how far all other variables do at least
    amounts: Ints  # (limits, cells): more than the least there must be
    pairs: tuple["Cells", Places, "Cells", Places] | None = None  # what has been joined to these cells

    def at(self, places: Places) -> "Cells":
        values = {variable: value[places] for variable, value in self.values.items()}
        pairs = None if self.pairs is None else (self.pairs[0], self.pairs[1][places], self.pairs[2], self.pairs[3][places])
        return Cells(values, self.lifts[places], self.others[places], self.amounts[:, places], pairs)

    def choice(self, place: int) -> dict[int, int]:
        """Return the values of all variables in one of the cells."""
        known, open_cells = dict[int, int](), [(self, place)]
        while open_cells:
            cells, place = open_cells.pop()
            known |= {variable: int(value[place]) for variable, value in cells.values.items()}
            if cells.pairs is not None:
                one, left, other, right = cells.pairs
                open_cells += [(one, int(left[place])), (other, int(right[place]))]
        return known


@dataclass(frozen=True)
class Core:
    """All that a choice may be made of that costs up to bound + reach: one cell of every part, and they agree."""

    tree: Tree
    bound: float
    reach: float
    parts: dict[int, Cells]  # by bucket; others may be part of it
    room: Ints  # (limits,): for amounts
    prices: Floats  # (limits,)


def _core(tree: Tree, priced: Priced, least: list[Floats], reach: float) -> Core:
    """Return the core, with buckets joined where that leaves few cells: often to a list of all choices that come into question."""
    network, rows = tree.network, list(tree.network.limits)
    parts = dict[int, Cells]()
    for number, (bucket, lifted, total) in enumerate(zip(tree.buckets, priced.lifts, least, strict=True)):
        inside = np.nonzero(total <= reach + ROUNDING * network.scale)
        values = dict(zip(bucket.axes, inside, strict=True))
        values[bucket.variable] = network.value_of(bucket.variable, values)
        amounts = np.zeros((len(inside[0]), AMOUNTS), np.int64)
        for factor in (network.factors[place] for place in bucket.factors):
            amounts += factor.amounts[tuple(values[variable] for variable in factor.scope)]
        parts[number] = Cells(values, lifted[inside], total[inside] - lifted[inside], amounts[:, rows].T)
    lowest = sum((cells.amounts.min(axis=1) for cells in parts.values()), network.fixed_amounts[rows])
    parts = {n: replace(cells, amounts=cells.amounts - cells.amounts.min(axis=1, keepdims=True)) for n, cells in parts.items()}
    core = Core(tree, priced.bound, reach, parts, np.array(list(network.limits.values())) - lowest, priced.prices[rows])
    return core if tree.is_relaxed else _listed(core)


def _listed(core: Core) -> Core:
    """Return the core as one list of choices, every part joined into its parent; as it is where lists become too long."""
    tree, parts = core.tree, dict(core.parts)
    most = {number: cells.amounts.max(axis=1) for number, cells in parts.items()}
    others = np.sum(list(most.values()), axis=0)  # what all parts take at most

    def join(number: int, other: int, variables: Sequence[int]) -> bool:
        nonlocal others
        others = others - most[number] - most.pop(other)
        joined = _joined(core, parts[number], parts.pop(other), variables, others)
        if joined is None:
            return False
        # What is still to be joined may ask for any of the values.
        parts[number] = _undominated(core, joined, tuple(joined.values) if tree.parents[other] == number else ())
        most[number] = parts[number].amounts.max(axis=1, initial=0)
        others = others + most[number]
        return True

    for number, bucket in enumerate(tree.buckets):
        if not all(join(number, child, tree.buckets[child].rest) for child in bucket.children):
            return core
        parts[number] = _undominated(core, parts[number], bucket.rest)
    while len(parts) > 1:  # those without a parent have nothing to agree in: always the two shortest
        number, other = sorted(parts, key=lambda n: (len(parts[n].lifts), n))[:2]
        if not join(number, other, ()):
            return core
    return replace(core, parts=parts)


def _joined(core: Core, one: Cells, other: Cells, variables: Sequence[int], most: Ints) -> Cells | None:
    """Return all pairs of cells that agree in some variables and are within reach and room; None if they are too many.

    Room that is left has its price too: what all the others, which take `most` at most, cannot fill is out of reach with them.
    """
    reach = core.reach + ROUNDING * core.tree.network.scale
    free, to_go = core.room[:, None] - one.amounts, reach - one.lifts - one.others
    keys, other_keys = _cases(core, (one, other), variables)
    windows = [_window(keys, other_keys, other.lifts, np.zeros_like(to_go), to_go)]
    for row in np.flatnonzero(core.prices > TINY):
        low = free[row] - most[row] - to_go / core.prices[row]
        windows.append(_window(keys, other_keys, other.amounts[row], low, free[row]))
    order, first, count = min(windows, key=lambda window: window[2].sum())
    if count.sum() > MOST_PAIRS:
        return None
    left = np.repeat(np.arange(len(count)), count)
    right = order[np.arange(len(left)) + np.repeat(first - np.cumsum(count) + count, count)]
    lifts, amounts = one.lifts[left] + other.lifts[right], one.amounts[:, left] + other.amounts[:, right]
    free = core.room[:, None] - amounts
    wasted = core.prices @ np.maximum(free - most[:, None], 0)
    good = np.flatnonzero((free >= 0).all(axis=0) & (lifts + one.others[left] + wasted <= reach))
    left, right = left[good], right[good]
    values = {variable: value[left] for variable, value in one.values.items()}
    joined = Cells(values, lifts[good], one.others[left], amounts[:, good], (one, left, other, right))
    return joined if len(good) <= MOST_LISTED else None


def _window(keys: Places, other_keys: Places, level: Floats, low: Floats, high: Floats) -> tuple[Places, Places, Places]:
    """Return an order of other cells, and for each key where in it those of a level from low to high (or near it) start, and how
    many these are."""
    unit = 4 * max(float(level.max(initial=0)), TINY)  # levels are a quarter at most in it: key + level is an order by both
    order = (other_keys + level / unit).argsort(kind="stable")
    levels = (other_keys + level / unit)[order]
    first = np.searchsorted(levels, keys + np.clip(low / unit - 1e-9, -0.25, 0.5))
    end = np.searchsorted(levels, keys + np.clip(high / unit + 1e-9, -0.25, 0.5), "right")
    return order, first, np.maximum(end - first, 0)


def _cases(core: Core, cells: Sequence[Cells], variables: Sequence[int]) -> list[Places]:
    """Return numbers of the cases of some variables, for several lists of cells."""
    sizes = [core.tree.network.sizes[variable] for variable in variables]
    raw = [
        np.ravel_multi_index([some.values[variable] for variable in variables], sizes) if sizes else np.zeros(len(some.lifts), int)
        for some in cells
    ]
    numbers = np.unique(np.concatenate(raw), return_inverse=True)[1]
    return np.split(numbers, np.cumsum([len(one) for one in raw])[:-1])


def _undominated(core: Core, cells: Cells, variables: Sequence[int]) -> Cells:
    """Return the cells without those that cost and take as much as another one at least, in the same case of the variables."""
    count = len(cells.lifts)
    if count < 2:
        return cells
    (case,) = _cases(core, (cells,), variables)
    for other in cells.amounts[1:-1]:  # of three limits, the one between has to be equal
        case = np.unique(np.stack([case, other]), axis=1, return_inverse=True)[1].reshape(-1)
    cost = np.unique(cells.lifts - core.prices @ cells.amounts, return_inverse=True)[1]
    amount = np.unique(cells.amounts[-1], return_inverse=True)[1]
    left, place, width = np.lexsort((cost, amount, cells.amounts[0], case)), np.arange(count), 1
    # What dominates a cell comes before it. Halves of blocks of 2, 4, 8, …: which cell of a right half is dominated by one of the
    # left half? There the second amount and the cost decide: the lowest cost among lower amounts.
    while width < count:
        is_right = place // width % 2 == 1
        block = np.cumsum(np.append(0, (np.diff(case[left]) != 0) | (np.diff(place // (2 * width)) != 0)))
        by = ((block * count + amount[left]) * 2 + is_right).argsort()
        restart = block[by] * (count + 1)  # the costs of each block are below all before
        lowest = np.minimum.accumulate(np.where(is_right, count, cost[left])[by] - restart) + restart
        kept = np.ones(len(left), np.bool_)
        kept[by] = ~is_right[by] | (lowest > cost[left][by])
        left, place, width = left[kept], place[kept], 2 * width
    return cells.at(np.sort(left))


def _solve(core: Core, until: float) -> tuple[list[int] | None, float]:
    """Return the best choice of the core, or the best that HiGHS finds in time, and a bound of any choice's cost in the core."""
    if len(core.parts) > 1:
        return _solve_milp(core, until)
    (cells,) = core.parts.values()
    left = core.room[:, None] - cells.amounts
    costs = np.where((left >= 0).all(axis=0), core.bound + cells.lifts + core.prices @ left, np.inf)
    if not np.isfinite(costs).any():
        return None, math.inf
    known = cells.choice(int(costs.argmin()))
    return [known[variable] for variable in range(len(known))], float(costs.min())


def _agreement(core: Core) -> tuple[csr_array, Floats]:
    """Return the rows that make the cells of all parts one choice, and their right-hand sides."""
    ends = np.cumsum([len(cells.lifts) for cells in core.parts.values()])
    columns = {n: np.arange(end - len(cells.lifts), end) for (n, cells), end in zip(core.parts.items(), ends, strict=True)}
    entries, sides, copies = list[tuple[Ints, Ints, Floats]](), list[float](), dict[int, int]()

    def agree(one: int, other: int, variables: Sequence[int]) -> None:
        rows = _cases(core, (core.parts[one], core.parts[other]), variables)
        for row, number, sign in zip(rows, (one, other), (1.0, -1.0), strict=True):
            entries.append((row + len(sides), columns[number], np.full(len(row), sign)))
        sides.extend([0.0] * (1 + max(int(row.max()) for row in rows)))

    for number in core.parts:
        bucket, up = core.tree.buckets[number], core.tree.parents[number]
        if up >= 0:
            agree(number, up, bucket.rest)
        else:
            entries.append((np.full(len(columns[number]), len(sides)), columns[number], np.ones(len(columns[number]))))
            sides.append(1.0)
        if copies.setdefault(bucket.variable, number) != number:
            agree(number, copies[bucket.variable], (bucket.variable,))
    row, column, entry = (np.concatenate(items) for items in zip(*entries, strict=True))
    return csr_array((entry, (row, column)), shape=(len(sides), ends[-1] + len(core.room))), np.array(sides)


def _solve_milp(core: Core, until: float) -> tuple[list[int] | None, float]:
    """Return the best choice of the core that HiGHS finds in time, and a bound of any choice's cost in the core."""
    network, part = core.tree.network, np.repeat(np.arange(len(core.parts)), [len(cells.lifts) for cells in core.parts.values()])
    amounts = np.concatenate([cells.amounts for cells in core.parts.values()], axis=1)
    steps = np.maximum(np.gcd.reduce(amounts, axis=1), 1)
    room, spare = np.divmod(core.room, steps)
    if (room < 0).any():
        return None, math.inf
    amounts //= steps[:, None]
    # What is left of the room is a column, in units of the room. A little room more allows nothing more, and keeps whole choices
    # away from where tolerances decide.
    unit = np.maximum(room, 1)
    margin = np.minimum(0.5, 1e-5 * unit)
    base = core.bound + float(core.prices @ (spare - margin * steps))
    is_cell = np.arange(len(part) + len(room)) < len(part)
    matrix, sides = _agreement(core)
    within = np.hstack([amounts / unit[:, None], np.eye(len(room))])
    constraints = [LinearConstraint(matrix, sides, sides), LinearConstraint(within, *[(room + margin) / unit] * 2)]
    lifts = np.concatenate([cells.lifts for cells in core.parts.values()])
    while True:
        with native_stdout_silenced():  # some versions of HiGHS leave debugging lines there
            result = milp(
                np.append(lifts, core.prices * steps * unit) / core.reach,
                integrality=is_cell,
                bounds=Bounds(0, np.where(is_cell, 1.0, np.inf)),
                constraints=constraints,
                options={"mip_rel_gap": 0.0, "time_limit": max(until - time.monotonic(), 0.0)},
            )
        dual = math.inf if result.status == 2 else -math.inf if result.mip_dual_bound is None else result.mip_dual_bound
        lower = base + core.reach * dual
        if result.x is None:
            return None, lower
        first = np.searchsorted(part, np.arange(len(core.parts) + 1))
        chosen = np.lexsort((result.x[: len(part)], part))[first[1:] - 1]  # the largest of each part
        taken = amounts[:, chosen]
        over = taken.sum(axis=1) > room
        if not over.any():
            picked = zip(core.parts.values(), chosen - first[:-1], strict=True)
            known = {variable: value for cells, cell in picked for variable, value in cells.choice(cell).items()}
            values = [known[variable] for variable in range(len(known))]
            return values if math.isfinite(network.cost(values)) and network.fits(values) else None, lower
        # HiGHS takes a choice that is over a large budget by 1e-6 of it for fitting: rule it out with all that take more.
        at_least = taken[over.argmax()]
        inside = (at_least[part] > 0) & (amounts[over.argmax()] >= at_least[part])
        cover = np.append(inside, np.zeros(len(room)))[None]
        constraints.append(LinearConstraint(cover, -np.inf, np.count_nonzero(at_least) - 1))
