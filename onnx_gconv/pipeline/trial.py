"""Plans by trial: several are made, each is carried out and recovered in a hurry, and what is left of the outputs decides.

What a layer costs is not known beforehand. Whatever is taken for it, the layers that come after one are fitted to
what is left of it, and make up for a part of its error; so the costs of early layers are discounted. How much is tried, too.
"""

import functools
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from onnx_gconv.errors import BudgetError
from onnx_gconv.model.spaces import Spaces
from onnx_gconv.model.widths import Space
from onnx_gconv.pipeline.choosing import pruning_cost
from onnx_gconv.pipeline.settings import CostName
from onnx_gconv.pipeline.solving import Groupings
from onnx_gconv.plans import Plan
from onnx_gconv.recover.elimination import Elimination
from onnx_gconv.solve.grouping import Order


@dataclass(frozen=True)
class Narrowed:
    """A space that keeps so many channels."""

    space: str
    channels: int


@dataclass(frozen=True)
class Ranked:
    """A layer of a low rank."""

    layer: str
    rank: int


Grouped = tuple[str, int]  # a layer, and its number of groups
GroupCosts = Mapping[Grouped, float]
WidthCosts = Mapping[tuple[str, int], float]  # by space and number of channels
Keeps = Mapping[str, Mapping[tuple[str, int], Order]]  # by reader: the channels that stay, by space and their number
Eliminations = Mapping[str, Elimination]  # by space
RankErrors = Mapping[str, Sequence[float]]  # by layer: of rank 0, 1, ...
Costs = Mapping[Any, float]  # by Grouped, Narrowed or Ranked: a Mapping of one of them is none of all to a type checker

# A layer that the whole model follows costs exp(-discount) of what it would cost at the end.
DISCOUNTS = (0.0, 1.0, 2.0, 3.0, 4.0, 6.0, 8.0)
FIRST = 2  # the place of the discount that is tried first
FIRST_IN_COMPANY = 1  # these costs count already what the others make up for
MARGIN = 0.03  # by which a plan has to be better than one tried before it: less is the noise of judging


class Guide(Protocol):
    """What calibration data says of a model: the planner asks, and does not know how it is found out."""

    def errors(self, found: Sequence[Space], spaces: Spaces, ranked: Collection[str]) -> tuple[Eliminations, RankErrors]:
        """Return how each space would be emptied, and the errors of rank 0, 1, ... of these layers.

        What cannot be told has no entry. Both rest on the same second moments, so they are asked for at once.
        """

    def costs(self, groupings: Groupings, keeps: Keeps) -> tuple[GroupCosts, WidthCosts]:
        """Return how far the outputs are off with one layer grouped anew, or one space narrowed to these channels, alone.

        The channels are given by the space's reader. What cannot be measured has no entry.
        """

    def costs_in_company(self, groupings: Groupings, company: Plan) -> GroupCosts:
        """Return the costs of groups beside a plan's other layers; a layer's present number of groups is measured, too."""

    def following(self, names: Collection[str]) -> Mapping[str, float]:
        """Return which share of all that recovery fits comes after each layer, from 0 to 1."""

    def judge(self, plans: Sequence[Plan]) -> Sequence[float]:
        """Return how far the outputs are off once each plan is carried out and recovered."""


class HasPlan(Protocol):
    @property
    def plan(self) -> Plan: ...


Proposal = TypeVar("Proposal", bound=HasPlan)
Search = Callable[[Costs], Proposal]
# Which share of all that recovery fits comes after it, and so corrects its error.
Following = Callable[[Grouped | Narrowed | Ranked], float]


@dataclass(frozen=True)
class _Tried(Generic[Proposal]):
    """A plan, and how far off its outputs are."""

    found: Proposal
    off: float

    def beats(self, other: "_Tried[Proposal]") -> bool:
        return self.off < (1 - MARGIN) * other.off


class _Trial(Generic[Proposal]):
    """Plans tried so far: no plan is judged twice, whatever costs it was found by."""

    def __init__(self, guide: Guide, following: Following, search: Search[Proposal]) -> None:
        self._guide = guide
        self._search = search
        self._following = following
        self._off: dict[tuple[object, ...], float] = {}
        self._found: dict[tuple[int, int], tuple[Costs, Proposal]] = {}  # with the costs, so that no others get their id

    def tried(self, *costs_and_places: tuple[Costs, int]) -> list[_Tried[Proposal]]:
        """Return the plans by these costs, each with the discount at a place; they are judged side by side."""
        found = [self.found(costs, place) for costs, place in costs_and_places]
        new = {each.plan.changes: each.plan for each in found if each.plan.changes not in self._off}
        judged = self._guide.judge(list(new.values()))
        self._off |= {changes: math.inf if math.isnan(off) else off for changes, off in zip(new, judged, strict=True)}
        return [_Tried(each, self._off[each.plan.changes]) for each in found]

    def found(self, costs: Costs, place: int) -> Proposal:
        """Return the plan by these costs with the discount at a place; it is searched once."""
        key = id(costs), place
        if key not in self._found:
            self._found[key] = costs, self._search(self._discounted(costs, DISCOUNTS[place]))
        return self._found[key][1]

    def able(self, families: Sequence[Costs]) -> Iterator[Costs]:
        """Yield the costs that have a plan within the budget: some rule out groups, and a tight budget may need them."""
        failure: BudgetError | None = None
        count = 0
        for costs in families:
            try:
                self.found(costs, FIRST)
            except BudgetError as error:
                failure = error
                continue
            count += 1
            yield costs
        if failure is not None and not count:
            raise failure

    def climb(self, costs: Costs, start: int) -> _Tried[Proposal]:
        """Return the best plan found by these costs, going from one discount to the next as long as that is better."""
        (best,) = self.tried((costs, start))
        more, less = self.tried((costs, start + 1), (costs, start - 1))
        step = 1 if more.off <= less.off else -1
        other, place = (more, start + 1) if step == 1 else (less, start - 1)
        while other.beats(best):
            best, place = other, place + step
            if not 0 <= place < len(DISCOUNTS):
                break
            (other,) = self.tried((costs, place))
        return best

    def _discounted(self, costs: Costs, discount: float) -> Costs:
        return {key: cost * math.exp(-discount * self._following(key)) for key, cost in costs.items()}


def best_by_trial(guide: Guide, groupings: Groupings, search: Search[Proposal], *, effort: int) -> Proposal:
    """Return the plan that recovers best, of those that `search` finds by several costs.

    Costs are, from effort 1 on, what a layer costs measured alone; and -log of what is kept of it; at effort 0 and from 2 on also
    what is not kept. The best of them is then tried with other discounts, at effort 3 each. From effort 2 on the layers are
    measured again in the company of the best plan, at effort 3 twice.
    """
    following = guide.following({name for name, _ in groupings})
    trial = _Trial(guide, lambda key: following.get(key[0], 0.0) if isinstance(key, tuple) else 0.0, search)
    families: list[Costs] = [guide.costs(groupings, {})[0]] if effort >= 1 else []
    families.append(_kept_costs(groupings, "log"))
    if effort != 1:
        families.append(_kept_costs(groupings, "share"))
    tried = trial.tried(*((costs, FIRST) for costs in families))
    best = _best(tried)
    if effort >= 1:
        climbing = families if effort >= 3 else [families[tried.index(best)]]
        best = _best([best, *(trial.climb(costs, FIRST) for costs in climbing)])
    for _ in range(effort - 1):
        other = trial.climb(guide.costs_in_company(groupings, best.found.plan), FIRST_IN_COMPANY)
        if not other.beats(best):
            break
        best = other
    return best.found


def best_discount(
    guide: Guide, families: Sequence[Costs], following: Following, search: Search[Proposal], *, effort: int
) -> Proposal:
    """Return the plan that recovers best, of those by these costs; from effort 2 on also at other discounts.

    At effort 0 nothing is tried, nor where there is nothing to choose. Other discounts are no default: a quick fit does not tell
    plans of widths well enough apart (docs/forms.md).
    """
    trial = _Trial(guide, following, search)
    able = trial.able(families)
    if effort == 0:
        return trial.found(next(able), FIRST)
    families = list(able)
    if effort == 1 and len(families) == 1:
        return trial.found(families[0], FIRST)
    tried = trial.tried(*((costs, FIRST) for costs in families))
    best = _best(tried)
    if effort == 1:
        return best.found
    climbing = families if effort >= 3 else [families[tried.index(best)]]
    return _best([best, *(trial.climb(costs, FIRST) for costs in climbing)]).found


def _best(tried: Sequence[_Tried[Proposal]]) -> _Tried[Proposal]:
    """Return the best, and of those that are about as good the first."""
    return functools.reduce(lambda best, other: other if other.beats(best) else best, tried)


def _kept_costs(groupings: Groupings, cost: CostName) -> dict[tuple[str, int], float]:
    return {key: pruning_cost(grouping.kept, cost) for key, grouping in groupings.items()}
