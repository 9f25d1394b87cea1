"""The exact search: brute force is the oracle, budgets are kept to the last MAC, and a gap is told where time runs out."""

import itertools
from collections.abc import Sequence
from dataclasses import replace
from itertools import islice

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onnx_gconv.errors import BudgetError
from onnx_gconv.search.budget import Budget
from onnx_gconv.search.exact import SearchResult, search_exact
from onnx_gconv.search.local import search_local
from onnx_gconv.search.table import Option, Row, Table

HIGHS = 2e-6  # HiGHS stops within 1e-6 of the optimum


def table_of(rows: Sequence[Sequence[tuple[float, int, int]]], *, fixed_params: int = 0, fixed_macs: int = 0) -> Table:
    """A table out of (cost, params, MACs) for each option of each row."""
    options = [tuple(Option(2**k, *option) for k, option in enumerate(row)) for row in rows]
    return Table(tuple(Row((f"r{i}",), row) for i, row in enumerate(options)), fixed_params, fixed_macs)


def all_choices(table: Table) -> list[tuple[int, ...]]:
    return list(itertools.product(*(range(len(row.options)) for row in table.rows)))


def optimum(table: Table, budget: Budget) -> float:
    return min(table.cost(choice) for choice in all_choices(table) if budget.allows(*table.totals(choice)))


# Few different costs and sizes, zero among them: ties everywhere. Sizes never grow with the number of groups.
costs = st.one_of(st.sampled_from([0.0, 0.25, 0.5, 1.0]), st.floats(0, 3))
sizes = st.one_of(st.sampled_from([0, 8, 64]), st.integers(0, 5000))
rows = st.integers(1, 4).flatmap(
    lambda n: st.tuples(
        st.lists(costs, min_size=n, max_size=n),
        st.lists(sizes, min_size=n, max_size=n).map(lambda values: sorted(values, reverse=True)),
        st.lists(sizes, min_size=n, max_size=n).map(lambda values: sorted(values, reverse=True)),
    ).map(lambda columns: list(zip(*columns, strict=True)))
)
tables = st.builds(
    lambda found, params, macs: table_of(found, fixed_params=params, fixed_macs=macs),
    st.lists(rows, min_size=1, max_size=4),
    st.integers(0, 100),
    st.integers(0, 100),
)
kinds = st.sampled_from([(True, False), (False, True), (True, True)])


def budget_between(table: Table, kind: tuple[bool, bool], shares: tuple[float, float]) -> Budget:
    """The budget at these shares of the way from the smallest to the dense model."""
    ends = zip(table.totals(table.smallest()), table.totals([0] * len(table.rows)), shares, kind, strict=True)
    return Budget(*(int(low + share * (high - low)) if wanted else None for low, high, share, wanted in ends))


@settings(deadline=None)
@given(tables, kinds, st.tuples(st.floats(0, 1.1), st.floats(0, 1.1)))
def test_it_equals_brute_force_within_the_budget_and_with_proof(
    table: Table, kind: tuple[bool, bool], shares: tuple[float, float]
) -> None:
    budget = budget_between(table, kind, shares)
    found = search_exact(table, budget)
    assert budget.allows(*table.totals(found.choice))
    assert found.cost == table.cost(found.choice)
    assert found.cost == pytest.approx(optimum(table, budget), abs=HIGHS)
    assert found.gap == 0


@settings(deadline=None, max_examples=50)
@given(tables, kinds, st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1)), min_size=2, max_size=4))
def test_a_looser_budget_never_costs_more(table: Table, kind: tuple[bool, bool], shares: list[tuple[float, float]]) -> None:
    params, macs = (sorted(one) for one in zip(*shares, strict=True))
    found = [search_exact(table, budget_between(table, kind, pair)).cost for pair in zip(params, macs, strict=True)]
    assert all(tight >= loose - HIGHS for tight, loose in itertools.pairwise(found))


def nearly_tied(seed: int) -> Table:
    """Four layers of about 1e10 MACs: totals that differ by a few MACs, far below HiGHS's relative tolerance of 1e-6."""
    rng = np.random.default_rng(seed)
    rows = []
    for _ in range(4):
        macs, costs = int(rng.integers(10**10 - 50, 10**10 + 50)), np.sort(rng.random(4))
        rows.append([(float(costs[k]) if k else 0.0, macs // 2**k, macs // 2**k) for k in range(4)])
    return table_of(rows)


def tight_budgets(table: Table, seed: int) -> list[Budget]:
    """Budgets one below, at, and one above the total of some choice."""
    totals = sorted({table.totals(choice)[1] for choice in all_choices(table)})
    total = totals[int(np.random.default_rng(seed).integers(1, len(totals)))]
    return [Budget(max_macs=total + more) for more in (-1, 0, 1)]


@pytest.mark.slow
def test_a_budget_of_ten_billion_is_kept_to_the_last_mac() -> None:
    for seed in range(40):
        table = nearly_tied(seed)
        for budget in tight_budgets(table, seed):
            assert budget.allows(*table.totals(search_exact(table, budget).choice))


@pytest.mark.slow
@pytest.mark.parametrize("twins", [False, True], ids=["single", "twins"])
def test_the_optimum_is_found_also_where_it_fills_the_budget_to_the_last_mac(twins: bool) -> None:
    for seed in range(8 if twins else 40):
        table = nearly_tied(seed)
        if twins:  # two layers of each shape, of different costs
            rng = np.random.default_rng(seed)
            others = (
                replace(row, options=tuple(replace(o, cost=o.cost * rng.random()) for o in row.options)) for row in table.rows
            )
            table = replace(table, rows=(*table.rows[:3], *islice(others, 3)))
        for budget in tight_budgets(table, seed):
            found, best = search_exact(table, budget), optimum(table, budget)
            assert found.gap == 0
            assert found.cost == pytest.approx(best, abs=HIGHS)


def test_asking_for_exactly_what_a_choice_takes_is_enough() -> None:
    table = conv_like(12, seed=0)
    budget = budget_between(table, (False, True), (1.0, 0.4))
    found = search_exact(table, budget)
    again = search_exact(table, Budget(max_macs=table.totals(found.choice)[1]))
    assert again.cost == pytest.approx(found.cost, abs=HIGHS)
    assert search_exact(table, Budget(max_macs=table.totals(found.choice)[1] - 1)).cost >= found.cost - HIGHS


def conv_like(layers: int, seed: int) -> Table:
    rng = np.random.default_rng(seed)
    rows = []
    for _ in range(layers):
        weights, pixels = 9 * 64 * int(rng.integers(1, 64)), int(rng.choice([49, 196, 784]))
        costs = np.cumsum(rng.random(6))
        rows.append([(float(costs[k - 1]) if k else 0.0, weights >> k, (weights >> k) * pixels) for k in range(7)])
    return table_of(rows, fixed_params=1000, fixed_macs=10**6)


@pytest.mark.parametrize("seconds", [0.0, 1e-4])
def test_out_of_time_it_still_returns_a_choice_within_the_budget_and_an_honest_gap(seconds: float) -> None:
    table = conv_like(60, seed=1)
    budget = budget_between(table, (True, True), (0.4, 0.4))
    found, proven = search_exact(table, budget, time_limit_seconds=seconds), search_exact(table, budget)
    assert budget.allows(*table.totals(found.choice))
    assert found.cost <= table.cost(search_local(table, budget))
    assert proven.gap == 0
    assert found.gap > 0
    assert found.cost - found.gap <= proven.cost + HIGHS


def test_it_is_never_dearer_than_the_papers_local_search() -> None:
    for seed in range(5):
        table = conv_like(20, seed=seed)
        budget = budget_between(table, (True, True), (0.5, 0.3))
        assert search_exact(table, budget).cost <= table.cost(search_local(table, budget))


def test_a_budget_that_the_dense_model_meets_costs_nothing() -> None:
    table = conv_like(5, seed=2)
    params, macs = table.totals([0] * 5)
    assert search_exact(table, Budget(max_params=params, max_macs=macs)) == SearchResult([0] * 5, 0.0, 0.0)


def test_no_decision_is_no_cost() -> None:
    assert search_exact(table_of([], fixed_params=5, fixed_macs=7), Budget(max_params=5)) == SearchResult([], 0.0, 0.0)


def test_a_budget_below_the_smallest_model_is_refused_and_the_smallest_itself_is_not() -> None:
    table = conv_like(4, seed=3)
    params, macs = table.totals(table.smallest())
    with pytest.raises(BudgetError, match="cannot be met"):
        search_exact(table, Budget(max_macs=macs - 1))
    with pytest.raises(BudgetError, match="cannot be met"):
        search_exact(table, Budget(max_params=params - 1, max_macs=2 * macs))
    assert table.totals(search_exact(table, Budget(max_macs=macs)).choice) == (params, macs)


def test_the_gap_is_zero_up_to_the_tolerance_of_the_solver() -> None:
    assert SearchResult([], 5.0, 4.0).gap == 1.0
    assert SearchResult([], 5.0, 5.0).gap == 0
    assert SearchResult([], 5.0, 5.0 - 9e-6).gap == 0  # within 2e-6 of 5
    assert SearchResult([], 0.5, 0.5 - 1e-5).gap == pytest.approx(1e-5)
    assert SearchResult([], 0.5, float("-inf")).gap == float("inf")  # the local search proves nothing
