"""Plans carried out and, for this CPU, timed, until one keeps what is promised: not slower, and within a budget of time."""

import argparse
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from onnx_gconv.cli.plan import feasible_plans
from onnx_gconv.cli.recovering import guide
from onnx_gconv.cli.rewriting import rewrite
from onnx_gconv.cli.source import Source
from onnx_gconv.cli.story import Story
from onnx_gconv.cli.sweeping import with_latencies
from onnx_gconv.errors import LatencyError

if TYPE_CHECKING:
    from onnx_gconv.model.network import Network
    from onnx_gconv.pipeline.planner import GathersMs, Planned
    from onnx_gconv.pipeline.rewriting import Rewritten
    from onnx_gconv.pipeline.settings import Request
    from onnx_gconv.recover.calibration import Calibration
    from onnx_gconv.timing import Latency

MORE_TRIES = 3  # with a tighter budget, when a model takes longer than predicted
SECONDS = 2.0  # of timing; twice as long where a budget depends on it


@dataclass(frozen=True)
class Attempt:
    """One plan carried out: what `compress` may write."""

    planned: "Planned"
    rewritten: "Rewritten"
    latency: "Latency | None"  # None where it is not measured

    @property
    def ratio(self) -> float:
        """The measured share of the dense time; below any limit where nothing is measured."""
        return self.latency.ratio if self.latency is not None else 0.0

    @property
    def limit(self) -> float:
        """The share of the dense time that the budget allows; being no slower is always asked."""
        allowed, prediction = self.planned.plan.budget.get("max_latency_ms"), self.planned.prediction
        return min(1.0, allowed / prediction.before_ms) if allowed is not None and prediction is not None else 1.0


class Attempts:
    """All that the attempts at one model have in common."""

    def __init__(self, source: Source, network: "Network", args: argparse.Namespace, story: Story) -> None:
        self._source = source
        self._network = network
        self._args = args
        self._story = story

    def first_good(self, requests: "list[Request]", calibration: "Calibration | None") -> Attempt:
        """Return the first plan that is as fast as it must be; for a target that is not measured, the first plan."""
        story = self._story
        requests, gathers_ms = with_latencies(requests, self._source, self._network, self._args, story)
        slow: list[Attempt] = []
        with story.progress("solving") as progress:
            guided = guide(self._source, calibration, self._args, progress)
            plans = feasible_plans(self._source, self._network, requests, story, progress, guide=guided, gathers_ms=gathers_ms)
            for planned in plans:
                attempt = self._in_time(planned, gathers_ms)
                if attempt.ratio <= attempt.limit:
                    return attempt
                slow.append(attempt)
        best = min(slow, key=lambda attempt: attempt.ratio)
        for thinner in _thinned(best, self._network):
            less = len(best.planned.plan.layers) - len(thinner.plan.layers)
            story.tell(f"{best.ratio:.0%} of the dense time: {less} layers back to dense")
            attempt = self._carry_out(thinner)
            if attempt.ratio <= attempt.limit:
                return attempt
        if self._args.force:
            story.warn(f"{best.ratio:.2f} of the dense time, over {best.limit:.2f}, and written because of --force")
            return best
        raise _too_slow(best)

    def _in_time(self, planned: "Planned", gathers_ms: "GathersMs | None") -> Attempt:
        """Return the plan carried out; should it take longer than its budget, ever tighter ones of the same groupings."""
        from onnx_gconv.pipeline.planner import plan_within
        from onnx_gconv.search.budget import Budget

        attempt = self._carry_out(planned)
        asked = dict(planned.plan.budget)
        limit_ms = asked.pop("max_latency_ms", None)
        if limit_ms is None:
            return attempt
        counted = Budget(**{name: int(value) for name, value in asked.items()})
        for _ in range(MORE_TRIES):
            if attempt.ratio <= attempt.limit:
                break
            limit_ms *= 0.995 * attempt.limit / attempt.ratio
            self._story.tell(f"{attempt.ratio:.1%} of the dense time, over the {attempt.limit:.1%} asked: once more, tighter")
            tighter = plan_within(
                planned.prepared,
                replace(counted, max_latency_ms=limit_ms),
                sha256=planned.plan.source_sha256,
                gathers_ms=gathers_ms,
            )
            plan = replace(tighter.plan, budget=planned.plan.budget)
            attempt = self._carry_out(replace(planned, plan=plan, found=tighter.found, prediction=tighter.prediction))
        return attempt

    def _carry_out(self, planned: "Planned") -> Attempt:
        rewritten = rewrite(self._source, planned.plan, self._args, self._story, self._network.shapes)
        request = planned.prepared.request
        times = request.latencies
        is_here = request.target == "ort-cpu" and (times is None or times.host is None)
        if not is_here or self._args.no_verify:
            return Attempt(planned, rewritten, None)
        import numpy as np

        from onnx_gconv.runtime import random_feeds
        from onnx_gconv.timing import compare_latency

        feeds = random_feeds(self._source.model, self._network.input_shapes, np.random.default_rng(self._args.seed))
        seconds = SECONDS if times is None else 2 * SECONDS
        latency = compare_latency(self._source.model, rewritten.grouped, feeds, seconds=seconds)
        self._story.detail(f"with --gathers {planned.plan.gathers}: {latency.ratio:.3f} of the dense time")
        return Attempt(planned, rewritten, latency)


def _too_slow(best: Attempt) -> LatencyError:
    if best.limit < 1:
        return LatencyError(
            f"the model takes {best.ratio:.1%} of the dense time on this CPU, over the {best.limit:.1%} asked, though the times in "
            "the table promise less.",
            hint="make the table again with `bench --sweep`; --force writes all the same",
        )
    return LatencyError(
        f"grouping makes this model no faster on this CPU: {best.ratio:.2f} of the dense time at best, within the budget.",
        hint="a looser budget, or fewer layers with --include; --force writes all the same",
    )


def _thinned(attempt: Attempt, network: "Network") -> "Iterator[Planned]":
    """Yield the plan with ever more of its layers dense, those first that save least for what they read and write.

    Only as far as the budget allows: it is a promise, too. A budget of time has chosen the layers by their time already.
    """
    from onnx_gconv.pipeline.planner import without
    from onnx_gconv.search.budget import Budget

    plan = attempt.planned.plan
    if "max_latency_ms" in plan.budget:
        return
    layers = {layer.name: layer for layer in network.layers}

    def worth(name: str) -> float:
        layer = layers[name]
        return (layer.macs or 0) / max(1, layer.in_channels + layer.out_channels)

    ranked = sorted((layer.name for layer in plan.layers), key=worth)
    budget = Budget(**{name: int(value) for name, value in plan.budget.items()})
    for share in (4, 2):
        thinner = without(plan, network, set(ranked[: len(ranked) // share]), "grouping it does not pay on this CPU")
        fewer = 0 < len(thinner.layers) < len(plan.layers)
        if fewer and budget.allows(thinner.after.params, thinner.after.macs):
            yield replace(attempt.planned, plan=thinner, found=None)
