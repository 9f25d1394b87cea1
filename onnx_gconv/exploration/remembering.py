"""What calibration data says of a model, measured once for all budgets and on disk as soon as it is known."""

import math
from collections.abc import Collection, Mapping, Sequence

import numpy as np

from onnx_gconv.exploration.folder import Dependencies, Folder
from onnx_gconv.model.spaces import Spaces
from onnx_gconv.model.widths import Space
from onnx_gconv.pipeline.solving import Groupings
from onnx_gconv.pipeline.trial import GroupCosts, Guide
from onnx_gconv.plans import Plan
from onnx_gconv.recover.elimination import Elimination
from onnx_gconv.solve.grouping import Order

COSTS = "costs.json"
WIDTH_COSTS = "width_costs.json"
ELIMINATIONS = "eliminations.json"
RANK_ERRORS = "rank_errors.json"


class RememberingGuide:
    """A guide whose answers that hold for every budget are kept in a folder, with the settings that they depend on."""

    def __init__(self, guide: Guide, folder: Folder, settings: Dependencies) -> None:
        self._guide, self._folder, self._settings = guide, folder, settings

    def costs(self, groupings: Groupings, company: Plan | None) -> GroupCosts:
        """Return what the layers cost, in company as it is measured now; what could not be measured is left out."""
        if company is not None:
            return self._guide.costs(groupings, company)

        def measure() -> list[dict[str, object]]:
            found = self._guide.costs(groupings, None)
            return [{"layer": name, "groups": g, "cost": cost} for (name, g), cost in found.items() if math.isfinite(cost)]

        entries = self._folder.remembered(COSTS, "costs", self._settings, measure)
        return {(entry["layer"], entry["groups"]): entry["cost"] for entry in entries}

    def eliminations(self, found: Sequence[Space], spaces: Spaces) -> Mapping[str, Elimination]:
        def measure() -> list[dict[str, object]]:
            emptied = self._guide.eliminations(found, spaces)
            return [{"name": name, "order": e.order.tolist(), "errors": e.errors.tolist()} for name, e in emptied.items()]

        entries = self._folder.remembered(ELIMINATIONS, "spaces", self._settings, measure)
        return {entry["name"]: Elimination(np.array(entry["order"]), np.array(entry["errors"])) for entry in entries}

    def rank_errors(self, names: Collection[str]) -> Mapping[str, Sequence[float]]:
        def measure() -> list[dict[str, object]]:
            return [{"layer": name, "errors": list(errors)} for name, errors in self._guide.rank_errors(names).items()]

        entries = self._folder.remembered(RANK_ERRORS, "layers", self._settings, measure)
        return {entry["layer"]: entry["errors"] for entry in entries}

    def width_costs(self, keeps: Mapping[str, Mapping[tuple[str, int], Order]]) -> Mapping[tuple[str, int], float]:
        def measure() -> list[dict[str, object]]:
            found = self._guide.width_costs(keeps)
            return [{"space": name, "channels": n, "cost": cost} for (name, n), cost in found.items() if math.isfinite(cost)]

        entries = self._folder.remembered(WIDTH_COSTS, "costs", self._settings, measure)
        return {(entry["space"], entry["channels"]): entry["cost"] for entry in entries}

    def following(self, names: Collection[str]) -> Mapping[str, float]:
        return self._guide.following(names)

    def judge(self, plans: Sequence[Plan]) -> Sequence[float]:
        return self._guide.judge(plans)
