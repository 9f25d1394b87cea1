"""Budgets, rules and the local search."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onnx_gconv.errors import BudgetError
from onnx_gconv.search.budget import Budget, parse_limit
from onnx_gconv.search.local import search_local
from onnx_gconv.search.rules import by_group_channels, uniform
from onnx_gconv.search.table import Option, Row, Table

option_costs = st.lists(st.floats(0, 1), min_size=1, max_size=4).map(sorted)
tables = st.lists(st.tuples(st.integers(1, 100), st.integers(1, 50), option_costs), min_size=1, max_size=5).map(
    lambda rows: Table(
        tuple(
            Row(
                (f"r{i}",),
                tuple(
                    Option(2**k, cost, (weights * 8) // 2**k, (weights * area * 8) // 2**k) for k, cost in enumerate([0.0, *costs])
                ),
            )
            for i, (weights, area, costs) in enumerate(rows)
        ),
        fixed_params=13,
        fixed_macs=17,
    )
)


@given(tables, st.floats(0, 1.2), st.floats(0, 1.2))
def test_the_local_search_never_exceeds_a_budget_and_refuses_only_impossible_ones(table: Table, params: float, macs: float) -> None:
    dense = table.totals([0] * len(table.rows))
    smallest = table.totals(table.smallest())
    budget = Budget(max_params=int(dense[0] * params), max_macs=int(dense[1] * macs))
    if budget.allows(*smallest):
        assert budget.allows(*table.totals(search_local(table, budget)))
    else:
        with pytest.raises(BudgetError, match="cannot be met"):
            search_local(table, budget)


@given(tables)
def test_a_budget_that_the_dense_model_meets_changes_nothing(table: Table) -> None:
    params, macs = table.totals([0] * len(table.rows))
    assert search_local(table, Budget(max_params=params, max_macs=macs)) == [0] * len(table.rows)


@given(tables, st.floats(0, 1))
def test_no_single_layer_could_still_step_down_within_the_budget(table: Table, share: float) -> None:
    smallest, dense = table.totals(table.smallest())[1], table.totals([0] * len(table.rows))[1]
    budget = Budget(max_macs=int(smallest + share * (dense - smallest)))
    choice = search_local(table, budget)
    for row in range(len(choice)):
        if choice[row] > 0:
            looser = [index - (r == row) for r, index in enumerate(choice)]
            assert not budget.allows(*table.totals(looser))


def test_the_layer_that_lowers_the_cost_most_takes_the_first_step() -> None:
    rows = tuple(Row((name,), (Option(1, 0.0, 4, 4), Option(2, cost, 2, 2))) for name, cost in (("cheap", 0.1), ("dear", 0.9)))
    assert search_local(Table(rows, 0, 0), Budget(max_params=6)) == [1, 0]


def test_the_refusal_names_a_range_that_is_feasible() -> None:
    table = Table((Row(("a",), (Option(1, 0.0, 100, 1000), Option(2, 0.5, 50, 500))),), 10, 7)
    with pytest.raises(BudgetError) as refusal:
        search_local(table, Budget(max_params=59))
    assert "--max-params from 60 (54.55%)" in refusal.value.hint
    assert table.totals(search_local(table, Budget(max_params=parse_limit("54.55%").of(110)))) == (60, 507)


@pytest.mark.parametrize(
    ("text", "whole", "amount"),
    [
        ("50%", 41, 20),
        ("70%", 10, 7),
        ("100%", 3, 3),
        ("1.9G", 0, 1_900_000_000),
        ("300M", 0, 300_000_000),
        ("5k", 0, 5000),
        ("1200", 0, 1200),
        (" .5 % ", 1000, 5),
    ],
)
def test_budgets_are_read_as_people_write_them(text: str, whole: int, amount: int) -> None:
    assert parse_limit(text).of(whole) == amount


@pytest.mark.parametrize("text", ["", "abc", "-5%", "0", "0%", "1.2.3", "5 apples", "%", "nan", "1e400"])
def test_what_is_not_a_budget_is_refused(text: str) -> None:
    with pytest.raises(BudgetError, match="is not a budget"):
        parse_limit(text)


@pytest.mark.parametrize(("text", "meant"), [("50", "50%"), ("0.5", "50%"), ("1", "100%")])
def test_a_share_without_its_percent_sign_is_refused_with_what_was_meant(text: str, meant: str) -> None:
    with pytest.raises(BudgetError) as refusal:
        parse_limit(text)
    assert refusal.value.hint.endswith(meant)


def test_flops_are_two_macs_and_the_tighter_limit_holds() -> None:
    assert Budget(max_flops=21).macs == 10
    assert Budget(max_macs=9, max_flops=21).macs == 9
    assert not Budget(max_flops=21).allows(0, 11)
    assert not Budget(max_macs=10**9).allows(0, None)


def test_the_rules_answer_with_a_number_or_the_reason() -> None:
    assert uniform((1, 2, 4), 4) == 4
    assert "only 1, 2, 4" in str(uniform((1, 2, 4), 8))
    assert by_group_channels((1, 2, 4, 8), 32, in_channels=64, out_channels=128) == 4
    assert "already" in str(by_group_channels((1, 2), 32, in_channels=16, out_channels=32))
    assert "no legal number" in str(by_group_channels((1, 3), 16, in_channels=96, out_channels=99))
