"""The cost table: for each layer, what every number of groups costs and saves."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median

from onnx_gconv.errors import BudgetError
from onnx_gconv.search.budget import FEASIBLE, Budget, share


@dataclass(frozen=True)
class Option:
    """One number of groups for one row: its pruning cost, and what is left of weights and MACs."""

    groups: int
    cost: float
    params: int
    macs: int
    latency_ns: int = 0  # where a budget limits it


@dataclass(frozen=True)
class Row:
    """One decision: a layer, or several that share a weight and so can only shrink together."""

    names: tuple[str, ...]
    options: tuple[Option, ...]  # ascending in groups; the first is the layer as it is, or as an earlier choice has it


@dataclass(frozen=True)
class Table:
    """Every decision, and what the rest of the model costs."""

    rows: tuple[Row, ...]
    fixed_params: int
    fixed_macs: int
    fixed_latency_ns: int = 0  # below 0 where layers take longer alone than in the model

    def totals(self, choice: Sequence[int]) -> tuple[int, int]:
        """Return the parameters and MACs of the model when row r takes its option choice[r]."""
        chosen = [row.options[index] for row, index in zip(self.rows, choice, strict=True)]
        return self.fixed_params + sum(o.params for o in chosen), self.fixed_macs + sum(o.macs for o in chosen)

    def latency_ns(self, choice: Sequence[int]) -> int:
        """Return the latency of the model, Gathers not included."""
        return self.fixed_latency_ns + sum(row.options[index].latency_ns for row, index in zip(self.rows, choice, strict=True))

    def allows(self, choice: Sequence[int], budget: Budget) -> bool:
        """Return whether a choice is within every limit."""
        limit = budget.latency_ns
        return budget.allows(*self.totals(choice)) and (limit is None or self.latency_ns(choice) <= limit)

    def cost(self, choice: Sequence[int]) -> float:
        """Return the summed pruning cost of a choice."""
        return sum(row.options[index].cost for row, index in zip(self.rows, choice, strict=True))

    def priced(self, costs: Mapping[tuple[str, int], float]) -> "Table":
        """Return the table with other costs, by layer and number of groups; a layer as it is costs nothing unless they say.

        What `costs` does not know keeps its own, brought to the same scale by the median of the others.
        """
        known = [(row, option, _known(costs, row, option)) for row in self.rows for option in row.options]
        ratios = [cost / option.cost for _, option, cost in known if cost is not None and option.cost > 0]
        scale = median(ratios) if ratios else 1.0
        prices = {(row.names, option.groups): option.cost * scale if cost is None else cost for row, option, cost in known}
        rows = (
            Row(row.names, tuple(replace(option, cost=prices[row.names, option.groups]) for option in row.options))
            for row in self.rows
        )
        return replace(self, rows=tuple(rows))

    def from_groups(self, least: Mapping[str, int]) -> "Table":
        """Return the table without the numbers of groups below those of an earlier choice, by layer."""

        def left(row: Row) -> tuple[Option, ...]:
            fewest = max(least.get(name, 0) for name in row.names)
            return tuple(option for option in row.options if option.groups >= fewest)

        return replace(self, rows=tuple(Row(row.names, left(row)) for row in self.rows))

    def smallest(self) -> list[int]:
        """Return the choice with every layer at its largest number of groups."""
        return [len(row.options) - 1 for row in self.rows]

    def fastest(self) -> list[int]:
        """Return the choice with every layer at its fastest number of groups, the fewest of those that tie."""
        return [min(range(len(row.options)), key=lambda i: (row.options[i].latency_ns, i)) for row in self.rows]


def _known(costs: Mapping[tuple[str, int], float], row: Row, option: Option) -> float | None:
    found = [costs.get((name, option.groups), math.nan) for name in row.names]
    return sum(found) if all(map(math.isfinite, found)) else None


def require_feasible(table: Table, budget: Budget) -> None:
    """Refuse a budget that even the smallest or the fastest model breaks, with the range that can be had."""
    limit, fastest, dense = budget.latency_ns, table.latency_ns(table.fastest()), table.latency_ns([0] * len(table.rows))
    if limit is not None and fastest > limit:
        raise BudgetError(
            f"the budget cannot be met: you asked for {limit / 1e6:.4g} ms, but even with every layer at its fastest number of "
            f"groups the model takes {fastest / 1e6:.4g} ms, by the times in the table.",
            hint=f"{FEASIBLE} --max-latency from {budget.time_share(fastest, dense)} up to 100%",
        )
    params, macs = table.totals(table.smallest())
    if budget.allows(params, macs):
        return
    dense_params, dense_macs = table.totals([0] * len(table.rows))
    ranges = []
    if budget.max_params is not None:
        ranges.append(f"--max-params from {params:,} ({share(params, dense_params)})")
    if budget.max_macs is not None:
        ranges.append(f"--max-macs from {macs:,} ({share(macs, dense_macs)})")
    if budget.max_flops is not None:
        ranges.append(f"--max-flops from {2 * macs:,} ({share(macs, dense_macs)})")
    still = [f"{params:,} parameters"] if budget.max_params is not None else []
    still += [f"{macs:,} MACs"] if budget.max_macs is not None else []
    still += [f"{2 * macs:,} FLOPs"] if budget.max_flops is not None else []
    asked = ", ".join(f"{name.replace('_', ' ')} {value:,}" for name, value in budget.as_dict().items())
    raise BudgetError(
        f"the budget cannot be met: you asked for {asked}, but even with every layer at its largest number of groups the model "
        f"has {' and '.join(still)}.",
        hint=f"{FEASIBLE} {'; '.join(ranges)} up to 100%",
    )
