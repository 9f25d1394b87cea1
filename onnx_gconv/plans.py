"""The plan: what to do to each Conv and channel space, and its file. The seam between deciding and doing."""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from onnx_gconv.errors import PlanError
from onnx_gconv.fields import Complaint, Fields
from onnx_gconv.fields import read_json as read_json_file

FORMAT = 2
GROUPS_ONLY = 1  # the format before widths and dropped branches, which is still read
MALFORMED = Complaint(PlanError, "re-run `onnx-gconv plan`", absent="make one with `onnx-gconv plan MODEL -o plan.json`")


@dataclass(frozen=True)
class PlannedLayer:
    """One layer to be grouped: G and the orders of its channels (`order[new] = old`); channels that go are in no order."""

    name: str
    label: str
    out_channels: int
    in_channels: int
    groups: int
    kept: float
    in_order: tuple[int, ...]
    out_order: tuple[int, ...]
    gathered: tuple[str, ...] = ()  # "in", "out": the sides at which a Gather is to stand; otherwise only where none can be spared


@dataclass(frozen=True)
class PlannedSpace:
    """One channel space to be narrowed: the channels that stay, ascending."""

    name: str
    channels: int
    keep: tuple[int, ...]


@dataclass(frozen=True)
class DroppedBranch:
    """One residual branch that becomes its mean, by its last Conv."""

    name: str


@dataclass(frozen=True)
class LowRank:
    """One Conv that becomes two: its own kernel to `rank` channels, then 1x1 to all its outputs."""

    name: str
    rank: int
    groups: int = 1  # of the first


@dataclass(frozen=True)
class SkippedConv:
    """One Conv that is left as it is, and why."""

    name: str
    reason: str


Row = PlannedLayer | PlannedSpace | LowRank | DroppedBranch | SkippedConv


@dataclass(frozen=True)
class Totals:
    """Parameters and MACs of a whole model; MACs are None where they could not be counted."""

    params: int
    macs: int | None


@dataclass(frozen=True)
class Plan:
    """The decision: budget, criterion, seed, one grouping per grouped layer, one keep per narrowed space, what is dropped."""

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
    forms: tuple[str, ...] = ("group",)  # that the search chose from
    spaces: tuple[PlannedSpace, ...] = ()
    dropped: tuple[DroppedBranch, ...] = ()
    low_rank: tuple[LowRank, ...] = ()

    @property
    def changes(self) -> tuple[object, ...]:
        """What is done to the model: two plans with the same changes make the same model."""
        return self.layers, self.spaces, self.dropped, self.low_rank

    def keeping(self, keeps: Mapping[str, tuple[int, ...]]) -> "Plan":
        """Return the plan with other channels kept, as many of each space, by its name."""
        return replace(self, spaces=tuple(replace(space, keep=keeps.get(space.name, space.keep)) for space in self.spaces))

    def to_json(self) -> str:
        """Return the plan file's text: one layer a line, nothing in it that differs from run to run."""
        head = {
            "format": FORMAT,
            "forms": list(self.forms),
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
        rows: dict[str, Sequence[Row]] = {
            "layers": self.layers,
            "spaces": self.spaces,
            "low_rank": self.low_rank,
            "dropped": self.dropped,
            "skipped": self.skipped,
        }
        lists = ",\n ".join(f"{json.dumps(key)}: {_rows(items)}" for key, items in rows.items())
        return f"{{{lines},\n {lists}}}\n"


def _rows(items: Sequence[Row]) -> str:
    if not items:
        return "[]"
    told = [{key: value for key, value in vars(item).items() if key != "gathered" or value} for item in items]
    return "[\n  " + ",\n  ".join(json.dumps(row, ensure_ascii=False) for row in told) + "]"


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
    if top.integer("format") not in (GROUPS_ONLY, FORMAT):
        known = f"this version reads formats {GROUPS_ONLY} and {FORMAT}"
        raise PlanError(f"{path}: format {top.integer('format')} is not known.", hint=known)
    if "source_sha256" not in top.names() and "verify" in top.names():
        raise PlanError(f"{path} is a report, not a plan.", hint="the plan is the .plan.json beside it")
    budget, has_forms = top.inner("budget"), top.integer("format") != GROUPS_ONLY
    spaces = tuple(_space(fields) for fields in top.rows("spaces")) if has_forms else ()
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
        layers=tuple(_layer(fields, some_go=bool(spaces)) for fields in top.rows("layers")),
        skipped=tuple(SkippedConv(fields.string("name"), fields.string("reason")) for fields in top.rows("skipped")),
        forms=top.strings("forms") if has_forms else ("group",),
        spaces=spaces,
        dropped=tuple(DroppedBranch(fields.string("name")) for fields in top.rows("dropped")) if has_forms else (),
        low_rank=tuple(_low_rank(fields) for fields in top.rows("low_rank")) if has_forms and "low_rank" in top.names() else (),
    )
    kinds = (("layer", plan.layers), ("space", plan.spaces), ("dropped branch", plan.dropped), ("low rank", plan.low_rank))
    for kind, items in kinds:
        names = [item.name for item in items]
        for name in names:
            if names.count(name) > 1:
                raise PlanError(f"{path}: {kind} {name!r} appears twice.", hint="remove one of the two lines")
    return plan


def _totals(fields: Fields) -> Totals:
    return Totals(fields.integer("params"), None if fields.any("macs") is None else fields.integer("macs"))


def _layer(fields: Fields, *, some_go: bool) -> PlannedLayer:
    fields = fields.named(fields.string("name"))
    layer = PlannedLayer(
        name=fields.string("name"),
        label=fields.string("label"),
        out_channels=fields.integer("out_channels"),
        in_channels=fields.integer("in_channels"),
        groups=fields.integer("groups"),
        kept=fields.number("kept"),
        in_order=_order(fields, "in_order", "in_channels", some_go=some_go),
        out_order=_order(fields, "out_order", "out_channels", some_go=some_go),
        gathered=fields.strings("gathered") if "gathered" in fields.names() else (),
    )
    if not set(layer.gathered) <= {"in", "out"}:
        raise fields.wrong('\'gathered\' names the sides of a layer: "in", "out"', MALFORMED.remedy)
    ins, outs = len(layer.in_order), len(layer.out_order)
    if layer.groups < 1 or ins % layer.groups or outs % layer.groups:
        raise PlanError(
            f"{fields.where}: {layer.groups} groups do not divide {ins} input and {outs} output channels.",
            hint="re-run `onnx-gconv plan` or edit the field 'groups'",
        )
    return layer


def _space(fields: Fields) -> PlannedSpace:
    fields = fields.named(fields.string("name"))
    channels, keep = fields.integer("channels"), fields.integers("keep")
    if not keep or list(keep) != sorted(set(keep)) or keep[0] < 0 or keep[-1] >= channels:
        raise fields.wrong(
            f"'keep' is not a choice of {channels} channels (some of 0 to {channels - 1}, ascending, each once, at least one)",
            "re-run `onnx-gconv plan` or correct the field; a branch without channels belongs to 'dropped'",
        )
    return PlannedSpace(fields.string("name"), channels, keep)


def _low_rank(fields: Fields) -> LowRank:
    fields = fields.named(fields.string("name"))
    rank, groups = fields.integer("rank"), fields.integer("groups")
    if rank < 1:
        raise fields.wrong(f"a rank of {rank} leaves nothing", "give at least 1")
    if groups != 1:
        raise fields.wrong(f"a low rank with {groups} groups is not known to this version", "set 'groups' to 1")
    return LowRank(fields.string("name"), rank, groups)


def _order(fields: Fields, field: str, channels_field: str, *, some_go: bool) -> tuple[int, ...]:
    """Return an order of all channels, or of those that stay: whether these are the ones that stay is known with the model."""
    order, channels = fields.integers(field), fields.integer(channels_field)
    is_complete = bool(order) and (some_go or len(order) == channels)
    if not is_complete or len(set(order)) != len(order) or min(order) < 0 or max(order) >= channels:
        but = ", but for those that go" if some_go else ""
        raise fields.wrong(
            f"{field!r} is not an order of {channels} channels (each of 0 to {channels - 1} once{but})",
            "re-run `onnx-gconv plan` or correct the field",
        )
    return order
