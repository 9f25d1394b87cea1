"""Points of an exploration, how good they are, and explore.json."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from onnx_gconv.exploration.solutions import Axis
from onnx_gconv.model.network import Network
from onnx_gconv.model.widths import Space
from onnx_gconv.pipeline.changes import changed_nodes, saved_macs
from onnx_gconv.pipeline.original import Original
from onnx_gconv.pipeline.planned import Planned
from onnx_gconv.rewrite.match import Matched

Record = Mapping[str, Any]  # as JSON has it


@dataclass(frozen=True)
class Point:
    """One budget and what was made within it: an entry of explore.json, key by key."""

    plan: str  # file names
    budget: Mapping[str, float]
    params: int
    macs: int | None
    cost: float
    bound: float | None  # None where nothing is proven
    gap: float | None
    groups: Mapping[str, int]  # by layer, of those that are grouped
    widths: Mapping[str, int] = field(default_factory=dict)  # by space, of those that are narrowed; 0 if it went with its branch
    dropped: Sequence[str] = ()  # branches
    low_rank: Mapping[str, int] = field(default_factory=dict)  # ranks, by layer
    saved: Mapping[str, int] = field(default_factory=dict)  # MACs, by form
    model: str | None = None
    recovery: Record | None = None  # as in report.json
    evaluation: Record | None = None  # as of `evaluate --json`
    finetuned: Record | None = None  # its model, its best epoch, its evaluation

    @property
    def name(self) -> str:
        return self.plan.removesuffix(".plan.json")

    @property
    def narrowed(self) -> dict[str, int]:
        """The channels of each space that keeps some of them."""
        return {space: channels for space, channels in self.widths.items() if channels}


@dataclass(frozen=True)
class Measure:
    """How good each point is, by one measure for all."""

    title: str
    values: Sequence[float]
    is_error: bool  # whether less is better

    def text(self, index: int) -> str:
        return f"{self.values[index]:.3g}" if self.is_error else f"{self.values[index]:.2%}"


def planned_point(original: Original, file: str, planned: Planned, matched: Matched, **made: Any) -> Point:
    """Return the point of a plan for this model, with what was `made` of it."""
    plan, found = planned.plan, planned.search
    assert found is not None, "an exploration searches, it follows no rule"
    known = found.as_dict()
    gone = {name: 0 for branch in matched.dropped for name in branch.spaces}
    return Point(
        plan=file,
        budget=dict(plan.budget),
        params=plan.after.params,
        macs=plan.after.macs,
        cost=found.cost,
        bound=known["bound"],
        gap=known["gap"],
        groups={layer.name: layer.groups for layer in plan.layers},
        widths={space.name: len(space.keep) for space in plan.spaces} | gone,
        dropped=[branch.name for branch in plan.dropped],
        low_rank={each.name: each.rank for each in plan.low_rank},
        saved=saved_macs(changed_nodes(original.model, original.network, matched)),
        **made,
    )


def measured(points: Sequence[Point]) -> Measure | None:
    """Return how good the points are in the end: by labels, else by agreement, else by distance; None where nothing was run."""
    final = [(point.finetuned or {}).get("evaluation") or point.evaluation for point in points]
    return _accuracy(final) or _output_error(points)


def before_tuning(points: Sequence[Point]) -> Measure | None:
    """Return how good the points were without fine-tuning, by the same measure."""
    return _accuracy([point.evaluation for point in points])


def _accuracy(evaluations: Sequence[Record | None]) -> Measure | None:
    found = [evaluation for evaluation in evaluations if evaluation is not None]
    if not found or len(found) < len(evaluations):
        return None
    for title, key in (("top-1", "top1"), ("same class", "agreement")):
        if found[0][key] is not None:
            return Measure(title, [float(evaluation[key]) for evaluation in found], is_error=False)
    return Measure("output error", [_distance(evaluation["outputs"]) for evaluation in found], is_error=True)


def _distance(outputs: Mapping[str, Record]) -> float:
    return max(_number(output["relative_l2"]) for output in outputs.values())


def _output_error(points: Sequence[Point]) -> Measure | None:
    """Return the error on the calibration samples; the model as it is, which nobody recovers, has none."""
    if not any(point.recovery for point in points):
        return None
    errors = [_number(point.recovery["output_error_after"]) if point.recovery else 0.0 for point in points]
    return Measure("output error", errors, is_error=True)


def _number(value: float | None) -> float:
    return float("inf") if value is None else value  # JSON has null for infinity


def dominated(points: Sequence[Point], axis: Axis) -> list[bool]:
    """Return, for each point, whether another one is as small and as good, and better in one of the two.

    None is where nothing was measured: the pruning cost of an exact search only rises with a tighter budget.
    """
    measure = measured(points)
    if measure is None:
        return [False] * len(points)
    sign = 1 if measure.is_error else -1
    pairs = [(_size(point, axis), sign * value) for point, value in zip(points, measure.values, strict=True)]
    return [any(a <= size and b <= worth and (a, b) != (size, worth) for a, b in pairs) for size, worth in pairs]


def _size(point: Point, axis: Axis) -> int:
    return point.params if axis == "params" or point.macs is None else point.macs


@dataclass(frozen=True, eq=False)
class Explored:
    """What the points of an exploration have in common, as explore.json tells it."""

    model: str  # its path, as given
    axis: Axis
    network: Network
    sha256: str
    spaces: Sequence[Space]  # that could be narrowed


def exploration_json(explored: Explored, points: Sequence[Point]) -> str:
    """Return the text of explore.json."""
    network, axis = explored.network, explored.axis
    data = {
        "format": 1,
        "model": explored.model,
        "source_sha256": explored.sha256,
        "by": axis,
        "before": {"params": network.count.params, "macs": network.count.macs},
        "layers": [{"name": layer.name, "label": layer.label} for layer in network.all_layers],
        "spaces": [{"name": space.name, "label": space.label, "channels": space.channels} for space in explored.spaces],
        "points": [
            vars(point) | {"dominated": is_dominated} for point, is_dominated in zip(points, dominated(points, axis), strict=True)
        ],
    }
    return json.dumps(data, indent=1, ensure_ascii=False) + "\n"
