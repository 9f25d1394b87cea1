"""What planning makes: a model solved, and a plan with how good it was found to be."""

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from onnx_gconv.files import require_output, write_text
from onnx_gconv.model.constants import Constants
from onnx_gconv.model.network import Network
from onnx_gconv.pipeline.choosing import Reasons
from onnx_gconv.pipeline.facts import Facts
from onnx_gconv.pipeline.forms import Forms
from onnx_gconv.pipeline.gathers import SharedSides
from onnx_gconv.pipeline.importances import layer_importance
from onnx_gconv.pipeline.original import ModelLike, open_original
from onnx_gconv.pipeline.rewriting import Rewritten
from onnx_gconv.pipeline.settings import GathersName, PathLike, Settings, as_path
from onnx_gconv.pipeline.solving import Groupings
from onnx_gconv.plans import Plan
from onnx_gconv.search.exact import SearchResult
from onnx_gconv.search.joint import JointResult
from onnx_gconv.search.latency import Prediction
from onnx_gconv.search.table import Table
from onnx_gconv.solve.bound import kept_bound


@dataclass(frozen=True, eq=False)
class Solved:
    """A model solved for every number of groups that a plan may choose: all that a search for any budget needs."""

    network: Network
    sha256: str
    made_from: tuple[Path, ...]  # the files of the model
    settings: Settings
    facts: Facts
    gathers: GathersName
    skipped: Reasons
    rule: dict[str, int] | None  # the choice, where a rule makes it
    table: Table | None  # what to search on, where none does
    groupings: Groupings
    forms: Forms | None = None  # widths and dropped branches, where they are among the forms
    shared: SharedSides = field(default_factory=dict)  # who has a partition in common

    @property
    def is_measured(self) -> bool:
        """Whether a search asks a guide what each layer costs alone."""
        cost = self.settings.cost_name
        is_asked = cost == "sensitivity" or (cost == "trial" and self.settings.effort >= 1)
        return self.table is not None and is_asked


@dataclass(frozen=True, eq=False)
class Planned:
    """A plan, how good the search found it to be, and how long it should take on the device that was timed."""

    plan: Plan
    search: SearchResult | JointResult | None  # None where a rule chose
    prediction: Prediction | None  # None where no times are given
    solved: Solved = field(repr=False)
    refined: Rewritten | None = field(default=None, repr=False)  # the weights it was chosen by, masked, if they were tuned

    @property
    def labels(self) -> dict[str, str]:
        """What people call the spaces, branches and layers of low rank that can be changed, by their names."""
        offer = None if self.solved.forms is None else self.solved.forms.offer
        if offer is None:
            return {}
        layers = {layer.name: layer.label for layer in self.solved.network.layers if layer.name in offer.ranks}
        branches = {branch.name: branch.label for branch in offer.branches}
        return layers | {space.name: space.label for space in offer.spaces} | branches

    def bounds(self, model: ModelLike) -> dict[str, float]:
        """Return, by planned layer of this model, the most that any grouping into its number of groups could keep."""
        constants, solved = Constants(open_original(model).model), self.solved
        layers = {layer.name: layer for layer in solved.network.layers}
        found = {}
        for planned in self.plan.layers:
            layer = layers[planned.name]
            matrix = layer_importance(constants, layer, solved.settings.criterion, solved.facts)
            if (len(planned.out_order), len(planned.in_order)) != (layer.out_channels, layer.in_channels):
                matrix = matrix[np.ix_(sorted(planned.out_order), sorted(planned.in_order))]
            found[planned.name] = kept_bound(matrix, planned.groups, existing=layer.groups)
        return found

    def save(self, path: PathLike) -> None:
        """Write the plan file."""
        require_output(as_path(path), made_from=self.solved.made_from)
        write_text(as_path(path), self.plan.to_json())
