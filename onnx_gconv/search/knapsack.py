"""The search as a multiple-choice knapsack: arrays over all options, prices of the budgets, and choices that cannot be bettered
one row at a time."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linprog
from scipy.sparse import csr_array

from onnx_gconv.search.budget import Budget
from onnx_gconv.search.table import Table

Chosen = NDArray[np.intp]  # the option of each row, numbered over all rows
ONE = 1 - 1e-6  # what a linear program's solution counts as 1 from


@dataclass(frozen=True)
class Knapsack:
    """Every option of every row, row after row, and how much of each limit there is to spend.

    Every row takes its least amount anyway. What is more is counted in whole steps, their greatest common divisor: large for
    Convs, so that the numbers are small and no tolerance decides.
    """

    row: NDArray[np.intp]  # of each option
    kind: NDArray[np.intp]  # of each option: options of one kind take the same, in rows that have the same kinds
    costs: NDArray[np.float64]
    amounts: NDArray[np.int64]  # (limits, options)
    room: NDArray[np.int64]  # (limits,)

    @property
    def first(self) -> Chosen:
        """The first option of each row."""
        return np.searchsorted(self.row, np.arange(self.row[-1] + 1))

    def fits(self, chosen: Chosen) -> bool:
        """Return whether a choice is within every limit, in whole numbers."""
        return bool((self.amounts[:, chosen].sum(axis=1) <= self.room).all())

    def cost(self, chosen: Chosen) -> float:
        return float(self.costs[chosen].sum())

    def least(self, values: NDArray[np.float64]) -> Chosen:
        """Return the choice of the option with the least value in each row, the last of equal ones."""
        order = np.lexsort((-np.arange(len(values)), values, self.row))
        return order[self.first]


def knapsack_of(table: Table, budget: Budget) -> Knapsack:
    """Return a table under a budget."""
    limited = [
        (limit - fixed, [[getattr(option, name) for option in row.options] for row in table.rows])
        for name, limit, fixed in (
            ("params", budget.max_params, table.fixed_params),
            ("macs", budget.macs, table.fixed_macs),
            ("latency_ns", budget.latency_ns, table.fixed_latency_ns),
        )
        if limit is not None
    ]
    counted = [_in_steps(amounts, room) for room, amounts in limited]
    sizes = [len(row.options) for row in table.rows]
    kinds: dict[tuple[object, ...], int] = {}
    kind = []
    for row in table.rows:
        all_of_row = tuple((option.params, option.macs, option.latency_ns) for option in row.options)
        kind += [kinds.setdefault((all_of_row, number), len(kinds)) for number in range(len(all_of_row))]
    return Knapsack(
        row=np.repeat(np.arange(len(sizes)), sizes),
        kind=np.array(kind),
        costs=np.array([option.cost for row in table.rows for option in row.options]),
        amounts=np.array([amounts for amounts, _ in counted], np.int64).reshape(len(counted), -1),
        room=np.array([room for _, room in counted], np.int64),
    )


def _in_steps(amounts: Sequence[Sequence[int]], room: int) -> tuple[list[int], int]:
    """Return what each option takes more than the least of its row, and the room for it."""
    least = [min(row) for row in amounts]
    more = [amount - low for row, low in zip(amounts, least, strict=True) for amount in row]
    step = math.gcd(*more) or 1
    return [amount // step for amount in more], (room - sum(least)) // step


@dataclass(frozen=True)
class Priced:
    """What the linear program tells: a bound of any choice's cost, and how far an option lifts it."""

    bound: float
    extra: NDArray[np.float64]  # a choice with this option costs at least bound + extra
    rounded: Chosen  # a choice near the program's solution, perhaps beyond the limits


def price(knapsack: Knapsack) -> Priced:
    """Return the options at the best prices of the limits.

    For any prices p >= 0, a choice within the limits costs at least the sum over rows of min(cost + p amount), less p room
    (Lagrange). The dual values of the linear program are the prices where this bound is highest; it holds for any, so
    nothing rests on the program's tolerances.
    """
    first, options = knapsack.first, len(knapsack.row)
    pick_one = csr_array((np.ones(options), (knapsack.row, np.arange(options))), shape=(len(first), options))
    possible = (knapsack.amounts <= knapsack.room[:, None]).all(axis=0)
    unit = np.maximum(knapsack.room, 1)[:, None]
    amounts, room = knapsack.amounts / unit, knapsack.room / unit[:, 0]
    program = linprog(
        knapsack.costs, amounts, room, pick_one, np.ones(len(first)), bounds=np.stack([np.zeros(options), possible], axis=1)
    )
    rounded = knapsack.least(amounts.sum(axis=0))
    if program.x is None:
        prices = np.zeros(len(room))
    else:
        prices = np.maximum(-program.ineqlin.marginals, 0)
        taken = np.flatnonzero(program.x > ONE)
        rounded[knapsack.row[taken]] = taken  # all but the few rows that the program divides between options
    priced = np.where(possible, knapsack.costs + prices @ amounts, np.inf)
    least = np.minimum.reduceat(priced, first)
    with np.errstate(invalid="ignore"):  # a row without a possible option: then there is no choice at all
        return Priced(float(least.sum() - prices @ room), priced - least[knapsack.row], rounded)


def improved(knapsack: Knapsack, chosen: Chosen) -> Chosen:
    """Return a choice that no other option of a single row betters within the limits."""
    chosen = chosen.copy()
    while True:
        instead = chosen[knapsack.row]  # what each option would take the place of
        totals = knapsack.amounts[:, chosen].sum(axis=1, keepdims=True)
        fits = (totals + knapsack.amounts - knapsack.amounts[:, instead] <= knapsack.room[:, None]).all(axis=0)
        change = np.where(fits, knapsack.costs - knapsack.costs[instead], np.inf)
        best = int(change.argmin())
        if change[best] >= 0:
            return chosen
        chosen[knapsack.row[best]] = best
