"""The paper's local search (its Algorithm 2, supplement Algorithm 2), made to keep its promise."""

from onnx_gconv.errors import BudgetError
from onnx_gconv.search.budget import Budget
from onnx_gconv.search.table import Table, require_feasible


def search_local(table: Table, budget: Budget) -> list[int]:
    """Return an option per row, within the budget.

    Start with every layer at its largest number of groups and, step by step, give the layer whose next smaller number
    lowers the total cost most its step. The paper stops after the first step that breaks the budget and returns that
    state; here such a step is not taken, its layer is closed, and the others go on: what is returned always fits.
    """
    require_feasible(table, budget)
    # Most groups are not always fastest: where they are not, and time is what is short, the start is the fastest choice.
    choice = table.smallest() if table.allows(table.smallest(), budget) else table.fastest()
    if not table.allows(choice, budget):
        raise BudgetError(
            "the local search finds no start: neither the smallest nor the fastest choice is within all limits.",
            hint="use --search exact, or loosen one of the limits",
        )
    params, macs = table.totals(choice)
    latency_ns = table.latency_ns(choice)
    open_rows = {row for row, index in enumerate(choice) if index > 0}
    while open_rows:
        # Ties go to the earlier layer: one plan on every machine.
        best = min(open_rows, key=lambda row: (_change(table, row, choice[row]), row))
        now, then = table.rows[best].options[choice[best]], table.rows[best].options[choice[best] - 1]
        new_params, new_macs = params + then.params - now.params, macs + then.macs - now.macs
        new_latency_ns = latency_ns + then.latency_ns - now.latency_ns
        in_time = budget.latency_ns is None or new_latency_ns <= budget.latency_ns
        if not in_time or not budget.allows(new_params, new_macs):
            open_rows.discard(best)
            continue
        params, macs, latency_ns = new_params, new_macs, new_latency_ns
        choice[best] -= 1
        if choice[best] == 0:
            open_rows.discard(best)
    return choice


def _change(table: Table, row: int, index: int) -> float:
    options = table.rows[row].options
    return options[index - 1].cost - options[index].cost
