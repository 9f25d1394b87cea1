"""The plan: what to do to each Conv, and its file. The seam between deciding and doing."""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from onnx_gconv.errors import PlanError
from onnx_gconv.fields import Complaint, Fields
from onnx_gconv.fields import read_json as read_json_file

FORMAT = 1
MALFORMED = Complaint(PlanError, "re-run `onnx-gconv plan`", absent="make one with `onnx-gconv plan MODEL -o plan.json`")


@dataclass(frozen=True)
class PlannedLayer:
    """One layer to be grouped: G and the orders of its channels (`order[new] = old`)."""

    name: str
    label: str
    out_channels: int
    in_channels: int
    groups: int
    kept: float
    in_order: tuple[int, ...]
    out_order: tuple[int, ...]


@dataclass(frozen=True)
class SkippedConv:
    """One Conv that is left as it is, and why."""

    name: str
    reason: str


@dataclass(frozen=True)
class Totals:
    """Parameters and MACs of a whole model; MACs are None where they could not be counted."""

    params: int
    macs: int | None


@dataclass(frozen=True)
class Plan:
    """The decision: budget, criterion, seed, one grouping per chosen layer, and every other Conv with its reason."""

    source_sha256: str
    criterion: str
    solver: str
    search: str
    seed: int
    budget: Mapping[str, int | float]
    gathers: str
    before: Totals
    after: Totals
    layers: tuple[PlannedLayer, ...]
    skipped: tuple[SkippedConv, ...]

    def to_json(self) -> str:
        """Return the plan file's text: one layer a line, nothing in it that differs from run to run."""
        head = {
            "format": FORMAT,
            "source_sha256": self.source_sha256,
            "criterion": self.criterion,
            "solver": self.solver,
            "search": self.search,
            "seed": self.seed,
            "budget": dict(self.budget),
            "gathers": self.gathers,
            "before": vars(self.before),
            "after": vars(self.after),
        }
        lines = ",\n ".join(f"{json.dumps(key)}: {json.dumps(value, ensure_ascii=False)}" for key, value in head.items())
        return f'{{{lines},\n "layers": {_rows(self.layers)},\n "skipped": {_rows(self.skipped)}}}\n'


def _rows(items: tuple[PlannedLayer, ...] | tuple[SkippedConv, ...]) -> str:
    if not items:
        return "[]"
    return "[\n  " + ",\n  ".join(json.dumps(vars(item), ensure_ascii=False) for item in items) + "]"


def read_plan(path: str | os.PathLike[str]) -> Plan:
    """Return the plan in a file; every malformed field is named with its file and layer.

        plan = onnx_gconv.read_plan("small.plan.json")

    Whether it fits a model is found out when it is applied.
    """
    return from_json(read_json(Path(path)), str(path))


def read_json(path: Path) -> object:
    """Return what the JSON file holds, which should be a plan."""
    return read_json_file(path, MALFORMED)


def from_json(data: object, path: str) -> Plan:
    """Return the plan that parsed JSON stands for; `path` is for the messages."""
    top = Fields(data, path, MALFORMED)
    if top.integer("format") != FORMAT:
        raise PlanError(f"{path}: format {top.integer('format')} is not known.", hint=f"this version reads format {FORMAT}")
    if "source_sha256" not in top.names() and "verify" in top.names():
        raise PlanError(f"{path} is a report, not a plan.", hint="the plan is the .plan.json beside it")
    budget = top.inner("budget")
    plan = Plan(
        source_sha256=top.string("source_sha256"),
        criterion=top.string("criterion"),
        solver=top.string("solver"),
        search=top.string("search"),
        seed=top.integer("seed"),
        budget={name: budget.number(name) if name.endswith("_ms") else budget.integer(name) for name in budget.names()},
        gathers=top.string("gathers"),
        before=_totals(top.inner("before")),
        after=_totals(top.inner("after")),
        layers=tuple(_layer(fields) for fields in top.rows("layers")),
        skipped=tuple(SkippedConv(fields.string("name"), fields.string("reason")) for fields in top.rows("skipped")),
    )
    names = [layer.name for layer in plan.layers]
    for name in names:
        if names.count(name) > 1:
            raise PlanError(f"{path}: layer {name!r} appears twice.", hint="remove one of the two lines")
    return plan


def _totals(fields: Fields) -> Totals:
    return Totals(fields.integer("params"), None if fields.any("macs") is None else fields.integer("macs"))


def _layer(fields: Fields) -> PlannedLayer:
    fields = fields.named(fields.string("name"))
    layer = PlannedLayer(
        name=fields.string("name"),
        label=fields.string("label"),
        out_channels=fields.integer("out_channels"),
        in_channels=fields.integer("in_channels"),
        groups=fields.integer("groups"),
        kept=fields.number("kept"),
        in_order=_order(fields, "in_order", "in_channels"),
        out_order=_order(fields, "out_order", "out_channels"),
    )
    if layer.groups < 1 or layer.in_channels % layer.groups or layer.out_channels % layer.groups:
        raise PlanError(
            f"{fields.where}: {layer.groups} groups do not divide {layer.in_channels} input and {layer.out_channels} "
            "output channels.",
            hint="re-run `onnx-gconv plan` or edit the field 'groups'",
        )
    return layer


def _order(fields: Fields, field: str, channels_field: str) -> tuple[int, ...]:
    values, channels = fields.items(field), fields.integer(channels_field)
    if [type(value) for value in values] != [int] * channels or sorted(values) != list(range(channels)):  # type: ignore[type-var]
        raise fields.wrong(
            f"{field!r} is not an order of {channels} channels (each of 0 to {channels - 1} once)",
            "re-run `onnx-gconv plan` or correct the field",
        )
    return tuple(value for value in values if isinstance(value, int))
