"""The first plan that is as fast as it must be: not slower than the model, and within a budget of time."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from onnx_gconv.deploy.precision import typed
from onnx_gconv.deploy.timing_file import Precision
from onnx_gconv.errors import BudgetError, LatencyError
from onnx_gconv.pipeline.job import Job
from onnx_gconv.pipeline.planned import Planned
from onnx_gconv.pipeline.planning import feasible_plans, plan_again, without
from onnx_gconv.pipeline.trial import Guide
from onnx_gconv.plans import Plan
from onnx_gconv.rewrite.dropped import empty
from onnx_gconv.rewrite.group import carry_out, placement_of
from onnx_gconv.rewrite.match import Matched, match
from onnx_gconv.runtime import random_feeds
from onnx_gconv.search.budget import Budget
from onnx_gconv.timing import Latency, compare_latency

# How much tighter than by proportion the next budget is, when a model takes longer than predicted: the first time there is hope.
TIGHTER = (0.995, 0.985, 0.97, 0.95)
ROOM, NEARLY = 0.97, 0.995  # of the time allowed: what takes less leaves something to be had; how much of it is asked for then
SECONDS = 2.0  # of timing; twice as long where a budget depends on it


@dataclass(frozen=True, eq=False)
class Clocked:
    """A plan, and what it takes on this CPU in this precision, where that was measured."""

    planned: Planned
    latency: Latency | None
    precision: Precision = "fp32"

    @property
    def plan(self) -> Plan:
        return self.planned.plan

    def keeping(self, matched: Matched) -> "Clocked":
        """Return the same with the channels kept that were chosen in the end: as many, so neither counts nor times change."""
        plan = self.plan.keeping({each.space.name: tuple(each.keep.tolist()) for each in matched.spaces})
        return replace(self, planned=replace(self.planned, plan=plan))

    @property
    def ratio(self) -> float:
        """The measured share of the dense time; below any limit where nothing is measured."""
        return self.latency.ratio if self.latency is not None else 0.0

    @property
    def limit(self) -> float:
        """The share of the dense time that the budget allows; being no slower is always asked."""
        allowed, prediction = self.plan.budget.get("max_latency_ms"), self.planned.prediction
        return min(1.0, allowed / prediction.before_ms) if allowed is not None and prediction is not None else 1.0

    @property
    def is_in_time(self) -> bool:
        return self.ratio <= self.limit


class Chooser:
    """All that the candidates for one model have in common."""

    def __init__(self, job: Job) -> None:
        self._job = job

    def first_in_time(self, guide: Guide | None) -> Clocked:
        """Return the first plan that is as fast as it must be; for a target that is not measured here, the first plan."""
        listener = self._job.listener
        slow: list[Clocked] = []
        for planned in self._feasible(guide):
            clocked = self._adjusted(self._timed(planned))
            if clocked.is_in_time:
                return clocked
            slow.append(clocked)
        best = min(slow, key=lambda clocked: clocked.ratio)
        for thinner in self._thinned(best):
            less = len(best.plan.layers) - len(thinner.plan.layers)
            listener.note(f"{best.ratio:.0%} of the dense time: {less} layers back to dense")
            clocked = self._timed(thinner)
            if clocked.is_in_time:
                return clocked
        if self._job.settings.force:
            listener.warn(
                f"it takes {best.ratio:.2f} of the dense time, over the {best.limit:.2f} allowed; written because of --force"
            )
            return best
        raise _too_slow(best)

    def _feasible(self, guide: Guide | None) -> Iterator[Planned]:
        settings = self._job.settings
        try:
            yield from feasible_plans(self._job, guide=guide)
        except BudgetError as error:
            if settings.max_latency is None or settings.timing is not None or settings.precision == "int8":
                raise
            raise BudgetError(str(error), hint=f"{error.hint}; or take --precision int8, whose time counts then") from error

    def _adjusted(self, clocked: Clocked) -> Clocked:
        """Return the clocked; or, should it take longer than its budget, the first of ever tighter ones that does not.

        If it has room left, a looser one is tried as well, below what was too slow: time that is not used is accuracy lost. Where a
        tighter budget cannot be met, the clocked is what it is: the next way of Gathers has its turn.
        """
        planned = clocked.planned
        asked = dict(planned.plan.budget)
        limit_ms = asked.pop("max_latency_ms", None)
        if limit_ms is None:
            return clocked
        counted = Budget(**{name: int(value) for name, value in asked.items()})
        over_ms = None
        for tighter_by in TIGHTER:
            if clocked.is_in_time:
                break
            over_ms, limit_ms = limit_ms, limit_ms * tighter_by * clocked.limit / clocked.ratio
            self._job.listener.note(
                f"{clocked.ratio:.1%} of the dense time, over the {clocked.limit:.1%} asked: trying again with a tighter budget"
            )
            tighter = self._again(planned, replace(counted, max_latency_ms=limit_ms))
            if tighter is None:
                return clocked
            clocked = self._timed(tighter)
        if clocked.latency is not None and clocked.ratio < ROOM * clocked.limit:
            more_ms = limit_ms * NEARLY * clocked.limit / clocked.ratio
            more_ms = more_ms if over_ms is None else min(more_ms, math.sqrt(over_ms * limit_ms))
            looser = self._again(planned, replace(counted, max_latency_ms=more_ms))
            if looser is not None and looser.plan != clocked.plan and (timed := self._timed(looser)).is_in_time:
                return timed
        return clocked

    def _again(self, planned: Planned, budget: Budget) -> Planned | None:
        """Return the plan within another budget, which says what the user asked for, not what we asked of the search."""
        try:
            found = plan_again(planned, budget, self._job.original.model)
        except BudgetError as error:
            self._job.listener.detail(f"with --gathers {planned.plan.gathers}, tighter: {error}")
            return None
        return replace(found, plan=replace(found.plan, budget=planned.plan.budget))

    def _timed(self, planned: Planned) -> Clocked:
        """Return the plan with its time on this CPU, if this CPU is what it is for."""
        original, settings, facts = self._job.original, self._job.settings, self._job.facts
        is_here = facts.target == "ort-cpu" and (facts.times is None or facts.times.host is None)
        if not is_here or not settings.verify:  # a model that ONNX Runtime cannot run cannot be timed either
            return Clocked(planned, None)
        with self._job.watch("measure"):
            matched = match(original.model, planned.plan, shapes=original.network.shapes)
            placement = placement_of(original.model, matched, shapes=original.network.shapes)
            emptied, _ = empty(original.model, matched.dropped)  # as recovery leaves them
            grouped = carry_out(emptied, matched, placement, lowering=settings.lowering)
            feeds = random_feeds(original.model, original.network.input_shapes, np.random.default_rng(settings.seed))
            seconds = SECONDS if facts.times is None else 2 * SECONDS
            precision = settings.timed_precision
            made = typed(grouped, precision, original.network.input_shapes)
            latency = compare_latency(original.model, made, feeds, seconds=seconds, threads=settings.threads)
        self._job.listener.detail(f"with --gathers {planned.plan.gathers}: {latency.ratio:.3f} of the dense time")
        return Clocked(planned, latency, precision)

    def _thinned(self, slow: Clocked) -> Iterator[Planned]:
        """Yield the plan with ever more of its layers dense, those first that save least for what they read and write.

        Only as far as the budget allows: it is a promise, too. A budget of time has chosen the layers by their time already.
        """
        plan, network = slow.plan, self._job.original.network
        if "max_latency_ms" in plan.budget or plan.spaces or plan.dropped or plan.low_rank:  # `without` counts groups only
            return
        layers = {layer.name: layer for layer in network.layers}

        def worth(name: str) -> float:
            layer = layers[name]
            return (layer.macs or 0) / max(1, layer.in_channels + layer.out_channels)

        ranked = sorted((layer.name for layer in plan.layers), key=worth)
        budget = Budget(**{name: int(value) for name, value in plan.budget.items()})
        for share in (4, 2):
            thinner = without(plan, network, set(ranked[: len(ranked) // share]), "it is no faster grouped on this CPU")
            fewer = 0 < len(thinner.layers) < len(plan.layers)
            if fewer and budget.allows(thinner.after.params, thinner.after.macs):
                yield replace(slow.planned, plan=thinner, search=None)


def _too_slow(best: Clocked) -> LatencyError:
    if best.limit < 1:
        return LatencyError(
            f"the model takes {best.ratio:.1%} of the dense time on this CPU, over the {best.limit:.1%} asked, though the times in "
            "the table promise less.",
            hint="make the table again with `bench --sweep`; --force writes all the same",
        )
    return LatencyError(
        f"compressing makes this model no faster on this CPU: {best.ratio:.2f} of the dense time at best, within the budget.",
        hint="a looser budget, fewer layers with --include, other --forms or a larger --width-step; --force writes all the same",
    )
