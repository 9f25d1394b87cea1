"""report.json, read back."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from onnx_gconv.errors import ReportError
from onnx_gconv.fields import Complaint, Fields, read_json
from onnx_gconv.plans import SkippedConv

FORMAT = 1
MALFORMED = Complaint(ReportError, "write it again with `onnx-gconv compress`")
COSTS = ("params", "macs", "flops", "bytes", "nodes")


@dataclass(frozen=True)
class ReportedLayer:
    """One grouped Conv."""

    name: str
    label: str
    groups: int
    kept: float
    macs_before: int | None
    macs_after: int | None


@dataclass(frozen=True)
class ReportedSpace:
    """One narrowed channel space."""

    name: str
    label: str
    channels: int
    kept: int


@dataclass(frozen=True)
class ReportedNode:
    """One node whose MACs are not what they were."""

    name: str
    label: str
    op: str
    macs_before: int | None
    macs_after: int | None
    saved: Mapping[str, int]  # MACs, by form


@dataclass(frozen=True)
class Change:
    """A figure before and after; None where it is not known."""

    before: float | None
    after: float | None


@dataclass(frozen=True)
class Accuracy:
    """Shares of the samples, from 0 to 1."""

    samples: int
    top1: Change
    top5: Change
    agreement: float | None


@dataclass(frozen=True)
class Check:
    """The verification."""

    max_rel_error: float | None
    tolerance: float
    passed: bool


@dataclass(frozen=True)
class Report:
    """One report.json, what a page shows of it."""

    model: str
    output: str
    before: Mapping[str, int | None]  # by COSTS
    after: Mapping[str, int | None]
    budget: Mapping[str, float]
    search_cost: float | None
    search_gap: float | None
    forms: tuple[str, ...]
    layers: tuple[ReportedLayer, ...]
    spaces: tuple[ReportedSpace, ...]
    dropped: tuple[tuple[str, str], ...]  # name and label of each branch's last Conv
    low_rank: tuple[tuple[str, int], ...]  # name and rank of each Conv that is two now
    changed: tuple[ReportedNode, ...]
    skipped: tuple[SkippedConv, ...]
    gathers_naive: int
    gathers_written: int
    gathers_remaining: tuple[tuple[str, str], ...]  # the layer that needs it, and why
    check: Check | None
    recovered_samples: int | None
    output_error: Change | None  # masked only, and after recovery
    accuracy: Accuracy | None
    latency: Mapping[str, Change]  # what measured or predicted it: milliseconds


def read_report(path: Path) -> Report:
    """Return the report in the file; every malformed field is named with its file."""
    top = Fields(read_json(path, MALFORMED), str(path), MALFORMED)
    if top.integer("format") != FORMAT:
        raise top.wrong(f"format {top.integer('format')} is not known", f"this version reads format {FORMAT}")
    budget, gathers = top.inner("budget"), top.inner("gathers")
    search, recovery, check = (top.optional_inner(name) for name in ("search", "recovery", "verify"))
    remaining = gathers.rows("remaining") if "remaining" in gathers.names() else []
    layers, has_forms = tuple(_layer(row) for row in top.rows("layers")), "forms" in top.names()  # earlier versions had groups only
    return Report(
        model=top.string("model"),
        output=top.string("output"),
        before=_costs(top.inner("before")),
        after=_costs(top.inner("after")),
        budget={name: budget.number(name) for name in budget.names()},
        search_cost=None if search is None else search.optional_number("cost"),
        search_gap=None if search is None else search.optional_number("gap"),
        forms=top.strings("forms") if has_forms else ("group",),
        layers=layers,
        spaces=tuple(_space(row) for row in top.rows("spaces")) if has_forms else (),
        dropped=tuple((row.string("name"), row.string("label")) for row in top.rows("dropped")) if has_forms else (),
        low_rank=tuple((row.string("name"), row.integer("rank")) for row in top.rows("low_rank"))
        if "low_rank" in top.names()
        else (),
        changed=tuple(_node(row) for row in top.rows("changed")) if has_forms else tuple(map(_only_grouped, layers)),
        skipped=tuple(SkippedConv(row.string("name"), row.string("reason")) for row in top.rows("skipped")),
        gathers_naive=gathers.integer("naive"),
        gathers_written=gathers.integer("written"),
        gathers_remaining=tuple((row.string("layer"), row.string("reason")) for row in remaining),
        check=None if check is None else _check(check),
        recovered_samples=None if recovery is None else recovery.integer("samples"),
        output_error=None if recovery is None else _change(recovery, "output_error_before", "output_error_after"),
        accuracy=_accuracy(top.optional_inner("evaluation")),
        latency=_latency(top),
    )


def _costs(fields: Fields) -> dict[str, int | None]:
    return {name: None if fields.any(name) is None else fields.integer(name) for name in COSTS}


def _layer(row: Fields) -> ReportedLayer:
    row = row.named(row.string("name"))
    macs = [None if row.any(name) is None else row.integer(name) for name in ("macs_before", "macs_after")]
    if row.integer("groups") < 1:
        raise row.wrong(f"'groups' is {row.integer('groups')}", MALFORMED.remedy)
    return ReportedLayer(row.string("name"), row.string("label"), row.integer("groups"), row.number("kept"), macs[0], macs[1])


def _space(row: Fields) -> ReportedSpace:
    row = row.named(row.string("name"))
    space = ReportedSpace(row.string("name"), row.string("label"), row.integer("channels"), row.integer("kept"))
    if not 0 < space.kept <= space.channels:
        raise row.wrong(f"'kept' is {space.kept} of {space.channels} channels", MALFORMED.remedy)
    return space


def _node(row: Fields) -> ReportedNode:
    row = row.named(row.string("name"))
    macs = [None if row.any(name) is None else row.integer(name) for name in ("macs_before", "macs_after")]
    saved = row.inner("saved")
    forms = {form: saved.integer(form) for form in saved.names()}
    return ReportedNode(row.string("name"), row.string("label"), row.string("op"), macs[0], macs[1], forms)


def _only_grouped(layer: ReportedLayer) -> ReportedNode:
    saved = {} if layer.macs_before is None or layer.macs_after is None else {"group": layer.macs_before - layer.macs_after}
    return ReportedNode(layer.name, layer.label, "Conv", layer.macs_before, layer.macs_after, saved)


def _check(fields: Fields) -> Check:
    passed = fields.any("passed")
    if not isinstance(passed, bool):
        raise fields.wrong("'passed' must be true or false", MALFORMED.remedy)
    return Check(fields.maybe_number("max_rel_error"), fields.number("tolerance"), passed)


def _change(fields: Fields, before: str, after: str) -> Change:
    return Change(fields.optional_number(before), fields.optional_number(after))


def _accuracy(fields: Fields | None) -> Accuracy | None:
    if fields is None:
        return None
    return Accuracy(
        fields.integer("samples"),
        _change(fields, "reference_top1", "top1"),
        _change(fields, "reference_top5", "top5"),
        fields.optional_number("agreement"),
    )


def _latency(top: Fields) -> dict[str, Change]:
    result = {}
    for field, what in (("predicted_latency", "predicted"), ("latency", "latency")):
        fields = top.optional_inner(field)
        if fields is not None:
            result[f"{what}, {fields.string('runner')}"] = _change(fields, "before_ms", "after_ms")
    return result
