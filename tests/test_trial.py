"""Plans by trial, with a guide that knows what each plan is worth."""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import onnx
import pytest
from fitting import grouped, plan_of
from tiny import conv_net, residual_net

from onnx_gconv.pipeline.solving import Groupings
from onnx_gconv.pipeline.trial import DISCOUNTS, FIRST, Costs, best_by_trial
from onnx_gconv.plans import Plan
from onnx_gconv.recover.flow import Flow
from onnx_gconv.solve.grouping import Grouping

ALONE, COMPANY = 100.0, 10_000.0  # what the guide answers: recognised again in what is searched on


@dataclass(frozen=True)
class Found:
    plan: Plan
    costs: Costs


@dataclass
class Guide:
    """Follows a table: what a plan is worth by the cost of the early layer that it was found by."""

    worth: Mapping[float, float]
    judged: list[float] = field(default_factory=list)
    asked: list[Plan | None] = field(default_factory=list)

    def costs(self, groupings: Groupings, keeps: object) -> tuple[dict[tuple[str, int], float], dict[tuple[str, int], float]]:
        assert not keeps
        self.asked.append(None)
        return dict.fromkeys(groupings, ALONE), {}

    def costs_in_company(self, groupings: Groupings, company: Plan) -> dict[tuple[str, int], float]:
        self.asked.append(company)
        return dict.fromkeys(groupings, COMPANY * len(self.asked))

    def following(self, names: Collection[str]) -> dict[str, float]:
        return {name: 1.0 if name == "early" else 0.0 for name in names}

    def judge(self, plans: Sequence[Plan]) -> list[float]:
        found = [plan.layers[0].kept for plan in plans]
        assert not set(found) & set(self.judged), "no plan is judged twice"
        self.judged += found
        return [next((worth for cost, worth in self.worth.items() if math.isclose(one, cost)), 9.0) for one in found]


def grouping(kept: float) -> Grouping:
    return Grouping(2, np.arange(8), np.arange(8), kept)


GROUPINGS: Groupings = {("early", 2): grouping(0.25), ("late", 2): grouping(0.25)}
LOG, SHARE = -math.log(0.25), 0.75


def search(costs: Costs) -> Found:
    """The "plan" carries the cost of its early layer where a plan has what is kept: so the guide can tell by what it was found."""
    layer = grouped("early", 8, 8)
    return Found(plan_of(type(layer)(**{**vars(layer), "kept": costs["early", 2]})), costs)


def at(cost: float, discount: float) -> float:
    return cost * math.exp(-discount)


def test_only_early_layers_are_discounted() -> None:
    found = best_by_trial(Guide({}), GROUPINGS, search, effort=0)
    assert found.costs == {("early", 2): pytest.approx(at(LOG, DISCOUNTS[FIRST])), ("late", 2): pytest.approx(LOG)}


@pytest.mark.parametrize("family", [LOG, SHARE])
def test_without_effort_nothing_is_measured_and_the_better_of_two_costs_wins(family: float) -> None:
    guide = Guide({at(family, DISCOUNTS[FIRST]): 1.0})
    found = best_by_trial(guide, GROUPINGS, search, effort=0)
    assert found.costs["late", 2] == pytest.approx(family)
    assert (guide.asked, len(guide.judged)) == ([], 2)


@pytest.mark.parametrize(("family", "effort"), [(ALONE, 1), (LOG, 1), (SHARE, 2)])
@pytest.mark.parametrize("best", range(len(DISCOUNTS)))
def test_the_best_costs_are_tried_with_other_discounts_as_long_as_that_helps(family: float, effort: int, best: int) -> None:
    guide = Guide({at(family, discount): 1.0 + abs(place - best) for place, discount in enumerate(DISCOUNTS)})
    found = best_by_trial(guide, GROUPINGS, search, effort=effort)
    assert found.costs["early", 2] == pytest.approx(at(family, DISCOUNTS[best]))
    if effort == 1:
        assert guide.asked == [None]
        assert len(guide.judged) <= len(DISCOUNTS)


def test_at_effort_3_costs_that_do_badly_at_first_are_climbed_too() -> None:
    guide = Guide({at(LOG, DISCOUNTS[FIRST]): 2.0, at(SHARE, DISCOUNTS[FIRST]): 3.0, at(SHARE, DISCOUNTS[FIRST + 1]): 1.0})
    assert best_by_trial(guide, GROUPINGS, search, effort=3).costs["late", 2] == pytest.approx(SHARE)


def test_more_effort_measures_in_the_company_of_the_best_and_keeps_what_is_better() -> None:
    guide = Guide({at(ALONE, DISCOUNTS[FIRST]): 2.0, at(2 * COMPANY, 1.0): 1.0})
    found = best_by_trial(guide, GROUPINGS, search, effort=2)
    assert found.costs["late", 2] == 2 * COMPANY
    assert [None if plan is None else plan.layers[0].kept for plan in guide.asked] == [None, at(ALONE, DISCOUNTS[FIRST])]


def test_a_worse_company_is_not_kept_and_not_asked_again() -> None:
    guide = Guide({at(ALONE, DISCOUNTS[FIRST]): 2.0})
    found = best_by_trial(guide, GROUPINGS, search, effort=3)
    assert found.costs["late", 2] == ALONE
    assert len(guide.asked) == 2


@pytest.mark.parametrize(("log", "expected"), [(0.98, ALONE), (0.96, LOG)])
def test_what_is_hardly_better_than_a_plan_before_it_is_not_taken(log: float, expected: float) -> None:
    guide = Guide({at(ALONE, DISCOUNTS[FIRST]): 1.0, at(LOG, DISCOUNTS[FIRST]): log})
    assert best_by_trial(guide, GROUPINGS, search, effort=1).costs["late", 2] == pytest.approx(expected)


def test_outputs_that_say_nothing_leave_the_first_plan() -> None:
    guide = Guide(dict.fromkeys([at(family, d) for family in (LOG, SHARE, ALONE) for d in DISCOUNTS], math.nan))
    assert best_by_trial(guide, GROUPINGS, search, effort=1).costs["late", 2] == pytest.approx(ALONE)


@pytest.mark.parametrize("model", [conv_net, residual_net])
def test_what_comes_after_a_tensor_is_counted_once_however_many_ways_lead_there(model: Callable[[], onnx.ModelProto]) -> None:
    flow = Flow(model())
    names = [node.output[0] for node in flow.nodes if node.op_type == "Conv"]
    counts = flow.counts_after(names)
    for name in flow.producer:
        assert counts.get(name, 0) == sum(
            other != name and flow.producer[name] in flow.places_before([other], ()) for other in names
        )
    assert counts[flow.inputs[0]] == len(names)
