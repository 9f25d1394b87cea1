"""The exact search, with proof.

A linear program prices the limits of the budget. At these prices most options are so dear that no choice with one of them can
better a choice already known; HiGHS searches what is left, the core.
"""

import math
import time
from contextlib import suppress
from dataclasses import dataclass

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, linear_sum_assignment, milp
from scipy.sparse import csr_array, eye_array, hstack

from onnx_gconv.errors import BudgetError
from onnx_gconv.native_output import native_stdout_silenced
from onnx_gconv.search.budget import Budget
from onnx_gconv.search.knapsack import Chosen, Knapsack, Priced, improved, knapsack_of, price
from onnx_gconv.search.local import search_local
from onnx_gconv.search.table import Table, require_feasible

TIME_LIMIT_SECONDS = 60.0
ROUNDING = 1e-9  # far above what sums of costs in float64 are off, far below what matters
PROVEN = 2e-6  # HiGHS's tolerance, of a cost of at least 1


@dataclass(frozen=True)
class SearchResult:
    """A choice within the budget, its cost, and a proven lower bound of any choice's cost."""

    choice: list[int]
    cost: float
    bound: float

    def as_dict(self) -> dict[str, float | None]:
        """Return cost, bound and gap for JSON; null where nothing is proven, as by the local search."""
        proven = math.isfinite(self.bound)
        return {"cost": self.cost, "bound": self.bound if proven else None, "gap": self.gap if proven else None}

    @property
    def gap(self) -> float:
        """How much the cost may be above the optimum at most; 0 is a proof of optimality (up to HiGHS's 1e-6)."""
        gap = self.cost - self.bound
        return gap if gap > PROVEN * max(1.0, self.cost) else 0.0


def search_exact(table: Table, budget: Budget, *, time_limit_seconds: float = TIME_LIMIT_SECONDS) -> SearchResult:
    """Return the choice of least cost within the budget, with the gap that is left if time runs out."""
    until = time.monotonic() + time_limit_seconds
    require_feasible(table, budget)
    if not table.rows:
        return SearchResult([], 0.0, 0.0)
    knapsack = knapsack_of(table, budget)
    priced = price(knapsack)
    best = min((improved(knapsack, start) for start in _starts(table, budget, knapsack, priced)), key=knapsack.cost)
    core = Core(knapsack, best, priced.bound, np.flatnonzero(priced.bound + priced.extra <= knapsack.cost(best) + ROUNDING))
    bound, covers = priced.bound, list[Chosen]()
    # HiGHS takes a choice that is over a large budget by 1e-6 of it for fitting: such a one is ruled out, and it looks again.
    while core.scale > ROUNDING and (seconds := until - time.monotonic()) > 0:
        chosen, lower = _solve(core, covers, seconds)
        bound = max(bound, lower)
        if knapsack.fits(chosen):
            best = min(best, chosen, key=knapsack.cost)
            break
        covers.append(_cover(knapsack, chosen))
    choice = (best - knapsack.first).tolist()
    return SearchResult(choice, table.cost(choice), min(bound, table.cost(choice)))


def _starts(table: Table, budget: Budget, knapsack: Knapsack, priced: Priced) -> list[Chosen]:
    """Return choices within all limits. Parameters and MACs fall together with more groups, but times need not."""
    candidates = [priced.rounded, knapsack.least((knapsack.amounts / np.maximum(knapsack.room, 1)[:, None]).sum(axis=0))]
    candidates += [knapsack.least(amounts.astype(np.float64)) for amounts in knapsack.amounts]
    with suppress(BudgetError):  # where several limits leave it without a start
        candidates.append(knapsack.first + np.array(search_local(table, budget)))
    fitting = [chosen for chosen in candidates if knapsack.fits(chosen)] or _any_fitting(knapsack)
    if not fitting:
        raise BudgetError(
            "the budgets cannot all be met at once: each one alone can, but no choice was found that is within all of them.",
            hint="loosen one of the limits",
        )
    return fitting


def _any_fitting(knapsack: Knapsack) -> list[Chosen]:
    """Return a choice within all limits, if HiGHS finds one: for limits that pull in different directions."""
    options, rows = len(knapsack.row), len(knapsack.first)
    pick_one = csr_array((np.ones(options), (knapsack.row, np.arange(options))), shape=(rows, options))
    within = LinearConstraint(knapsack.amounts / (knapsack.room[:, None] + 0.5), -np.inf, 1)
    if (knapsack.room < 0).any():
        return []
    with native_stdout_silenced():
        result = milp(
            knapsack.costs,
            integrality=np.ones(options),
            bounds=Bounds(0, 1),
            constraints=[LinearConstraint(pick_one, 1, 1), within],
        )
    if result.x is None:
        return []
    chosen = np.flatnonzero(result.x > 0.5)
    return [chosen] if len(chosen) == rows and knapsack.fits(chosen) else []


@dataclass(frozen=True)
class Core:
    """The options that a choice better than `best` may have; every other one lifts the bound above the cost of `best`."""

    knapsack: Knapsack
    best: Chosen
    bound: float
    options: Chosen

    @property
    def scale(self) -> float:
        """How much can be gained over `best` at most: the unit of HiGHS's objective, as its tolerances are absolute."""
        return self.knapsack.cost(self.best) - self.bound


def _solve(core: Core, covers: list[Chosen], seconds: float) -> tuple[Chosen, float]:
    """Return a choice from the core, the best one if time allows, and a bound of any choice's cost.

    Layers of one shape differ in cost alone, so the limits see only how many of them take each kind of option. These counts are
    the whole numbers to search for: with counts fixed, who takes what is an assignment, whose linear program has whole
    solutions by itself. Symmetric layers, over which HiGHS would branch without end, cost nothing this way.
    """
    knapsack, options = core.knapsack, core.options
    kinds, example, kind = np.unique(knapsack.kind[options], return_index=True, return_inverse=True)
    every, none = np.arange(len(options)), csr_array((len(knapsack.first), len(kinds)))
    ones = np.ones(len(options))
    pick_one = hstack([csr_array((ones, (knapsack.row[options], every)), shape=(none.shape[0], len(options))), none])
    count = hstack([csr_array((ones, (kind, every)), shape=(len(kinds), len(options))), -eye_array(len(kinds))])
    # Half a step of room more allows nothing more, and keeps whole choices away from where tolerances decide.
    amounts = knapsack.amounts[:, options[example]] / (knapsack.room[:, None] + 0.5)
    constraints = [
        LinearConstraint(pick_one, 1, 1),
        LinearConstraint(count, 0, 0),
        LinearConstraint(np.hstack([np.zeros((len(amounts), len(options))), amounts]), -np.inf, 1),
    ]
    for cover in covers:
        inside = np.append(np.isin(options, cover), np.zeros(len(kinds)))
        constraints.append(LinearConstraint(inside[None], -np.inf, len(np.unique(knapsack.row[cover])) - 1))
    gains = (knapsack.costs[options] - knapsack.costs[core.best][knapsack.row[options]]) / core.scale
    with native_stdout_silenced():  # some versions of HiGHS leave debugging lines there
        result = milp(
            np.append(gains, np.zeros(len(kinds))),
            # Covers are about single rows: with one, the assignment is not whole by itself.
            integrality=np.append(np.full(len(options), bool(covers)), np.ones(len(kinds))),
            bounds=Bounds(0, np.append(ones, np.full(len(kinds), np.inf))),
            constraints=constraints,
            options={"mip_rel_gap": 0.0, "time_limit": seconds},
        )
    lower = core.bound if result.mip_dual_bound is None else knapsack.cost(core.best) + core.scale * result.mip_dual_bound
    if result.x is None:
        return core.best, float(lower)
    if covers:
        taken = options[result.x[: len(options)] > 0.5]
        return taken[np.argsort(knapsack.row[taken])], float(lower)
    counts = np.zeros(knapsack.kind.max() + 1, np.intp)
    counts[kinds] = result.x[len(options) :].round()
    return _assigned(knapsack, counts), float(lower)


def _assigned(knapsack: Knapsack, counts: Chosen) -> Chosen:
    """Return the cheapest choice with so many options of each kind."""
    chosen, first_kind = knapsack.first, knapsack.kind[knapsack.first]
    for number in np.unique(first_kind):
        alike = np.flatnonzero(first_kind == number)
        size = np.count_nonzero(knapsack.row == alike[0])
        options = chosen[alike][:, None] + np.repeat(np.arange(size), counts[number : number + size])
        chosen[alike] = options[linear_sum_assignment(knapsack.costs[options])]
    return chosen


def _cover(knapsack: Knapsack, chosen: Chosen) -> Chosen:
    """Return options of which no choice within the limits has one in every row they are of: `chosen` and all that take more."""
    over = int((knapsack.amounts[:, chosen].sum(axis=1) > knapsack.room).argmax())
    amounts = knapsack.amounts[over]
    taken = amounts[chosen][knapsack.row]
    return np.flatnonzero((taken > 0) & (amounts >= taken))
