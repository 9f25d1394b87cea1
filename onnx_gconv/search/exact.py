"""The exact search: a multiple-choice knapsack, solved by HiGHS with proof."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csr_array

from onnx_gconv.errors import BudgetError
from onnx_gconv.native_output import native_stdout_silenced
from onnx_gconv.search.budget import Budget
from onnx_gconv.search.local import search_local
from onnx_gconv.search.table import Table, require_feasible

TIME_LIMIT_SECONDS = 60.0
# HiGHS takes a constraint as met within 1e-6 of its right-hand side (scaled to 1): such a step over is not allowed here.
FEASIBILITY = 1e-6


@dataclass(frozen=True)
class Found:
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
        return gap if gap > 2e-6 * max(1.0, self.cost) else 0.0


def search_exact(table: Table, budget: Budget, *, time_limit_seconds: float = TIME_LIMIT_SECONDS) -> Found:
    """Return the choice of least cost within the budget, with the gap that is left if time runs out."""
    require_feasible(table, budget)
    if not table.rows:
        return Found([], 0.0, 0.0)
    best, bound, slack = _fallback(table, budget), 0.0, 0.0
    # The first solve allows HiGHS its tolerance: its bound holds. Should it step over the budget, the next ones tighten it.
    for attempt in range(3):
        solved = _solve(table, budget, slack, time_limit_seconds)
        if solved is None:
            break
        choice, lower = solved
        bound = lower if attempt == 0 else bound
        if table.allows(choice, budget):
            if best is None or table.cost(choice) < best.cost:
                best = Found(choice, table.cost(choice), bound)
            break
        slack = 2 * FEASIBILITY * (attempt + 1)
    if best is None:
        raise BudgetError(
            "the budgets cannot all be met at once: each one alone can, but no choice was found that is within all of them.",
            hint="loosen one of the limits",
        )
    return Found(best.choice, best.cost, min(bound, best.cost))


def _fallback(table: Table, budget: Budget) -> Found | None:
    """Return the local search's choice; None where several limits leave it without a start."""
    try:
        choice = search_local(table, budget)
    except BudgetError:
        return None
    return Found(choice, table.cost(choice), 0.0)


def _solve(table: Table, budget: Budget, slack: float, seconds: float) -> tuple[list[int], float] | None:
    options = [option for row in table.rows for option in row.options]
    sizes = [len(row.options) for row in table.rows]
    row_of = np.repeat(np.arange(len(sizes)), sizes)
    pick_one = csr_array((np.ones(len(options)), (row_of, np.arange(len(options)))), shape=(len(sizes), len(options)))
    constraints = [LinearConstraint(pick_one, 1, 1)]
    for limit, fixed, amounts in (
        (budget.max_params, table.fixed_params, [[option.params for option in row.options] for row in table.rows]),
        (budget.macs, table.fixed_macs, [[option.macs for option in row.options] for row in table.rows]),
        (budget.latency_ns, table.fixed_latency_ns, [[option.latency_ns for option in row.options] for row in table.rows]),
    ):
        if limit is not None:
            constraints.append(_within(amounts, limit - fixed, slack))
    with native_stdout_silenced():  # some versions of HiGHS leave debugging lines there
        result = milp(
            np.array([option.cost for option in options]),
            integrality=np.ones(len(options)),
            bounds=Bounds(0, 1),
            constraints=constraints,
            options={"mip_rel_gap": 0.0, "time_limit": seconds},
        )
    if result.x is None:
        return None
    chosen = np.split(result.x, np.cumsum(sizes)[:-1])
    lower = result.mip_dual_bound if result.mip_dual_bound is not None else 0.0
    return [int(part.argmax()) for part in chosen], float(lower)


def _within(amounts: Sequence[Sequence[int]], room: int, slack: float) -> LinearConstraint:
    """Return the constraint that the chosen amounts fit, in the smallest whole numbers, half a step from any choice.

    Every row takes its least amount anyway; what is more is a multiple of a common step, a large one for Convs. Half a step
    of room more allows nothing more, and while the numbers are small HiGHS's tolerances of 1e-6 decide nothing.
    """
    least = [min(row) for row in amounts]
    more = [amount - low for row, low in zip(amounts, least, strict=True) for amount in row]
    step = math.gcd(*more) or 1
    limit = (room - sum(least)) // step + 0.5
    return LinearConstraint(np.array([amount // step for amount in more])[None] / limit, -np.inf, 1 - slack)
