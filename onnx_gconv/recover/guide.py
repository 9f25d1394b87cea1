"""What calibration data tells the planner: costs of layers, and which of several plans recovers best."""

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cached_property
from itertools import islice

import numpy as np
import onnx

from onnx_gconv.listener import OnProgress
from onnx_gconv.model.constants import Constants
from onnx_gconv.model.network import find_convs
from onnx_gconv.model.shapes import Shape
from onnx_gconv.model.spaces import Spaces
from onnx_gconv.model.widths import Space
from onnx_gconv.plans import Plan
from onnx_gconv.recover.calibration import Calibration
from onnx_gconv.recover.divergence import divergence
from onnx_gconv.recover.elimination import Elimination
from onnx_gconv.recover.emptying import errors
from onnx_gconv.recover.fitting import FitOptions, fit_layers
from onnx_gconv.recover.flow import Flow
from onnx_gconv.recover.sensitivity import Key, Width, sensitivities
from onnx_gconv.recover.site import find_sites
from onnx_gconv.rewrite.match import Matched, match
from onnx_gconv.runtime import Feeds, Output, run, session
from onnx_gconv.solve.grouping import Grouping, Order

MEASURED = 192  # samples that layers are fitted to, at most, to measure what each costs
PROBES = 48  # of them, whose outputs are measured for every layer and number of groups
FITTED = 256  # that a trial is fitted to, at most
JUDGED = 448  # others, that it is judged on
JUDGED_AT = 4.0  # the temperature that classes are compared at: near what counts, and less noisy than that
# A trial need not find the best weights, only tell plans apart.
TRIAL_POSITIONS_A_WEIGHT = 30
TRIAL_LEAST_POSITIONS = 4000
TRIAL_RELAXATIONS = 0


class CalibratedGuide:
    """Answers from measurements on the calibration samples."""

    def __init__(
        self,
        model: onnx.ModelProto,
        calibration: Calibration,
        *,
        seed: int,
        jobs: int,
        progress: OnProgress,
        shapes: Mapping[str, Shape] | None = None,
    ) -> None:
        self._model = model
        self._shapes = shapes
        self._calibration = calibration
        self._options = FitOptions(
            positions_a_weight=TRIAL_POSITIONS_A_WEIGHT,
            least_positions=TRIAL_LEAST_POSITIONS,
            relaxations=TRIAL_RELAXATIONS,
            has_chains=False,
            is_choosing=True,
            seed=seed,
            jobs=jobs,
        )
        self._progress = progress

    def errors(
        self, found: Sequence[Space], spaces: Spaces, ranked: Collection[str]
    ) -> tuple[dict[str, Elimination], dict[str, list[float]]]:
        """Return how each space would be emptied, and the errors of rank 0, 1, ... of these layers."""
        feeds = self._calibration.feeds(self._fitted_samples)
        return errors(self._model, found, spaces, ranked, feeds, options=self._options, progress=self._progress)

    def costs(
        self, groupings: Mapping[Key, Grouping], keeps: Mapping[str, Mapping[Width, Order]]
    ) -> tuple[dict[Key, float], dict[Width, float]]:
        """Return the error of the outputs when one layer is grouped anew, or one space narrowed, and fitted, alone."""
        groups, widths = self._measured(self._model, groupings, keeps)
        return _without_least(groups, most=0.0), widths

    def costs_in_company(self, groupings: Mapping[Key, Grouping], company: Plan) -> dict[Key, float]:
        """Return the costs of groups beside a plan's other layers.

        The least of each layer is taken off: what is left is what the choice of its groups costs.
        """
        every = {**groupings, **_as_they_are(self._model, groupings)}
        return _without_least(self._measured(self._recovered(company, self._options), every, {})[0])

    def _measured(
        self, model: onnx.ModelProto, groupings: Mapping[Key, Grouping], keeps: Mapping[str, Mapping[Width, Order]]
    ) -> tuple[dict[Key, float], dict[Width, float]]:
        feeds = self._calibration.feeds(min(MEASURED, self._fitted_samples))
        probes, options, progress = self._batches(PROBES), self._options, self._progress
        return sensitivities(self._model, model, groupings, feeds, probes=probes, options=options, progress=progress, keeps=keeps)

    def following(self, names: Collection[str]) -> dict[str, float]:
        """Return which share of what can be fitted comes after each layer, and so corrects some of its error."""
        flow = Flow(self._model)
        sites = find_sites(flow, Constants(self._model), Matched())
        counts = flow.counts_after([site.name for site in sites])
        return {name: counts.get(name, 0) / max(1, len(sites)) for name in names}

    def judge(self, plans: Sequence[Plan]) -> list[float]:
        """Return the divergence of the outputs after each plan and a quick fit.

        Plans are judged side by side, for much of a fit is done by one thread.
        """
        if not plans:
            return []
        expected = self._expected
        at_once = min(self._options.jobs, len(plans)) if self._calibration.is_shareable else 1
        options = replace(self._options, jobs=max(1, self._options.jobs // at_once), memory_share=1 / at_once)

        def judged(plan: Plan) -> float:
            active = session(self._recovered(plan, options, is_told=plan is plans[0]), threads=options.jobs)
            pairs = zip(expected, self._judged(), strict=True)
            return float(np.mean([divergence(one, run(active, feeds), temperature=JUDGED_AT) for one, feeds in pairs]))

        with ThreadPoolExecutor(at_once) as pool:
            return list(pool.map(judged, plans))

    def _recovered(self, plan: Plan, options: FitOptions, *, is_told: bool = True) -> onnx.ModelProto:
        """Return the plan carried out, quickly. Of several at once, one tells how far it is."""
        matched = match(self._model, plan, shapes=self._shapes)
        feeds = self._calibration.feeds(self._fitted_samples)
        progress = self._progress if is_told else lambda *_: None
        return fit_layers(self._model, matched, feeds, options=options, progress=progress).model

    @cached_property
    def _expected(self) -> list[dict[str, Output]]:
        """What the dense model makes of the samples that plans are judged on."""
        active = session(self._model)
        return [run(active, feeds) for feeds in self._judged()]

    def _judged(self) -> Iterator[Feeds]:
        """Yield samples that plans are judged on: such as they are not fitted to, where there are enough."""
        fitted, judged = self._batches(self._fitted_samples), self._batches(JUDGED)
        seen = 0
        for feeds in islice(self._calibration.feeds(), fitted, fitted + judged):
            seen += 1
            yield feeds
        if seen == 0:
            yield from islice(self._calibration.feeds(), judged)

    @cached_property
    def _fitted_samples(self) -> int:
        return fitted_samples(self._calibration)

    def _batches(self, samples: int) -> int:
        return -(-samples // self._calibration.batch)


def fitted_samples(calibration: Calibration) -> int:
    """Return how many samples layers are fitted to. Of few samples a third only judges: any plan looks good on its own samples."""
    batches = -(-calibration.count // calibration.batch)
    return min(FITTED, calibration.batch * max(1, 2 * batches // 3))


def _without_least(costs: Mapping[Key, float], *, most: float = math.inf) -> dict[Key, float]:
    """Return the costs without the least of each layer, as far as that is not above `most`."""
    least: dict[str, float] = {}
    for (name, _), cost in costs.items():
        least[name] = min(cost, least.get(name, most))
    return {key: cost - least[key[0]] for key, cost in costs.items()}


def _as_they_are(model: onnx.ModelProto, groupings: Mapping[Key, Grouping]) -> dict[Key, Grouping]:
    """Return the layers in the groups that they have: one, mostly."""
    layers, _ = find_convs(model, Constants(model), {})
    names = {name for name, _ in groupings}
    return {
        (layer.name, layer.groups): Grouping(layer.groups, np.arange(layer.in_channels), np.arange(layer.out_channels), 1.0)
        for layer in layers
        if layer.name in names
    }
