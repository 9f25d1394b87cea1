"""The model that a plan was made from: found again, and what its kernels matter."""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx

from onnx_gconv.errors import ModelError
from onnx_gconv.model.bodies import bodies
from onnx_gconv.model.constants import Constants
from onnx_gconv.model.file import load, sha256
from onnx_gconv.model.network import Layer, Skipped, find_convs, find_inside, layer_weight
from onnx_gconv.plans import Plan, PlannedLayer
from onnx_gconv.solve.importance import Matrix, importance


@dataclass(frozen=True, eq=False)
class PlannedModel:
    """A model and its Convs. `remark` is empty, or says why it may not be the one that was planned."""

    path: Path
    layers: tuple[Layer, ...]
    skipped: tuple[Skipped, ...]
    constants: Constants
    labels: Mapping[str, str]  # of all nodes, by first output, in graph order
    remark: str

    def depth(self, plan: Plan, changed: Collection[str]) -> list[tuple[str, str, int]]:
        """Return the name and label of every Conv that could be grouped or was changed, in graph order, and its groups now."""
        groups = {layer.name: layer.groups for layer in self.layers} | {layer.name: layer.groups for layer in plan.layers}
        shown = {layer.name for layer in self.layers} | {*changed}
        return [(name, label, groups.get(name, 1)) for name, label in self.labels.items() if name in shown]

    def importance(self, planned: PlannedLayer, criterion: str) -> Matrix | None:
        """Return the (Cout, Cin) matrix by `l1`, else by `l2`; None where the layer does not fit the plan.

        Kernels that a Conv with groups does not have are zero.
        """
        layer = next((layer for layer in self.layers if layer.name == planned.name), None)
        if layer is None or (layer.out_channels, layer.in_channels) != (planned.out_channels, planned.in_channels):
            return None
        parts = importance(layer_weight(self.constants, layer), "l1" if criterion == "l1" else "l2")
        whole = np.zeros((layer.out_channels, layer.in_channels))
        for block in np.split(np.arange(layer.out_channels), layer.groups):
            first = block[0] * layer.groups // layer.out_channels * parts.shape[1]
            whole[block, first : first + parts.shape[1]] = parts[block]
        return whole


def find_source(plan: Plan, named: Iterable[str], folder: Path, *, given: Path | None) -> PlannedModel | str:
    """Return the model that was planned, or the sentence why it could not be found.

    `named` are the paths that reports have for it, as they were given then: from here, from `folder`, or just beside.
    `given` is the user's own word; its hash may differ, as it does after fine-tuning, but that is said.
    """
    if given is not None:
        digest = _digest(given)
        other = digest is not None and digest != plan.source_sha256
        return _open(given, "its hash is not that of the model that was planned" if other else "")
    others = []
    for name in dict.fromkeys(named):
        for path in dict.fromkeys((Path(name), folder / name, folder / Path(name).name, folder.parent / Path(name).name)):
            digest = _digest(path)
            if digest == plan.source_sha256:
                try:
                    return _open(path, "")
                except ModelError as error:  # its data file is gone
                    return str(error)
            if digest is not None:
                others.append(path)
    if others:
        return f"'{others[0]}' is not the file that was planned: its hash differs."
    return "the model that was planned was not found."


def _digest(path: Path) -> str | None:
    try:
        return sha256(path)
    except OSError:
        return None


def _open(path: Path, remark: str) -> PlannedModel:
    model: onnx.ModelProto = load(path)
    constants = Constants(model)
    layers, skipped = find_convs(model, constants, {})
    inside, skipped_inside = find_inside(model, constants, {}, bodies(model))
    labels = {node.output[0]: node.name or node.output[0] for node in model.graph.node if node.output}
    return PlannedModel(path, (*layers, *inside), (*skipped, *skipped_inside), constants, labels, remark)
