"""What calibration data says of a model, measured once for all budgets and on disk as soon as it is known."""

import math
from collections.abc import Collection, Mapping, Sequence
from functools import cache

import numpy as np

from onnx_gconv.exploration.folder import Dependencies, Folder
from onnx_gconv.model.spaces import Spaces
from onnx_gconv.model.widths import Space
from onnx_gconv.pipeline.solving import Groupings
from onnx_gconv.pipeline.trial import Eliminations, GroupCosts, Guide, Keeps, RankErrors, WidthCosts
from onnx_gconv.plans import Plan
from onnx_gconv.recover.elimination import Elimination

COSTS = "costs.json"
WIDTH_COSTS = "width_costs.json"
ELIMINATIONS = "eliminations.json"
RANK_ERRORS = "rank_errors.json"


class RememberingGuide:
    """A guide whose answers that hold for every budget are kept in a folder, with the settings that they depend on."""

    def __init__(self, guide: Guide, folder: Folder, settings: Dependencies) -> None:
        self._guide, self._folder, self._settings = guide, folder, settings

    def errors(self, found: Sequence[Space], spaces: Spaces, ranked: Collection[str]) -> tuple[Eliminations, RankErrors]:
        """Return the errors of widths and ranks, which are measured in one go."""
        measured = cache(lambda: self._guide.errors(found, spaces, ranked))

        def emptied() -> list[dict[str, object]]:
            each = measured()[0].items()
            return [{"name": name, "order": e.order.tolist(), "errors": e.errors.tolist()} for name, e in each]

        def of_ranks() -> list[dict[str, object]]:
            return [{"layer": name, "errors": list(errors)} for name, errors in measured()[1].items()]

        entries = self._folder.remembered(ELIMINATIONS, "spaces", self._settings, emptied)
        ranks = self._folder.remembered(RANK_ERRORS, "layers", self._settings, of_ranks) if ranked else []
        return (
            {entry["name"]: Elimination(np.array(entry["order"]), np.array(entry["errors"])) for entry in entries},
            {entry["layer"]: entry["errors"] for entry in ranks},
        )

    def costs(self, groupings: Groupings, keeps: Keeps) -> tuple[GroupCosts, WidthCosts]:
        """Return what groups and widths cost alone, which is measured in one go; what could not be measured is left out."""
        measured = cache(lambda: self._guide.costs(groupings, keeps))

        def of_groups() -> list[dict[str, object]]:
            found = measured()[0].items()
            return [{"layer": name, "groups": g, "cost": cost} for (name, g), cost in found if math.isfinite(cost)]

        def of_widths() -> list[dict[str, object]]:
            found = measured()[1].items()
            return [{"space": name, "channels": n, "cost": cost} for (name, n), cost in found if math.isfinite(cost)]

        groups = self._folder.remembered(COSTS, "costs", self._settings, of_groups)
        widths = self._folder.remembered(WIDTH_COSTS, "costs", self._settings, of_widths) if keeps else []
        return (
            {(entry["layer"], entry["groups"]): entry["cost"] for entry in groups},
            {(entry["space"], entry["channels"]): entry["cost"] for entry in widths},
        )

    def costs_in_company(self, groupings: Groupings, company: Plan) -> GroupCosts:
        return self._guide.costs_in_company(groupings, company)

    def following(self, names: Collection[str]) -> Mapping[str, float]:
        return self._guide.following(names)

    def judge(self, plans: Sequence[Plan]) -> Sequence[float]:
        return self._guide.judge(plans)
