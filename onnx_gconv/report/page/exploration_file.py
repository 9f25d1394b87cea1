"""explore.json, read back."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from onnx_gconv.errors import ReportError
from onnx_gconv.fields import Complaint, Fields, read_json

FORMAT = 1
MALFORMED = Complaint(ReportError, "run `onnx-gconv explore` again into the same folder")
# Where the figures of a point are that was run on data, and how a page calls what it was then.
STAGES = (("evaluation", "without training"), ("finetuned", "fine-tuned"))


@dataclass(frozen=True)
class ExploredPoint:
    """One budget and what was found for it."""

    name: str  # of the plan's file, less its suffix
    params: int
    macs: int | None
    cost: float
    proven: bool
    groups: Mapping[str, int]  # by layer name; missing: as in the model
    widths: Mapping[str, int]  # by space name: the channels that stay, 0 if it went with its branch; missing: as in the model
    dropped: tuple[str, ...]  # branches
    saved: Mapping[str, int]  # MACs, by form
    low_rank: Mapping[str, int]  # ranks, by layer
    top1: Mapping[str, float]  # share of samples, by the stage's name for people, where it was measured
    agreement: Mapping[str, float]  # with the dense model, likewise


@dataclass(frozen=True)
class ExploredSpace:
    """One channel space that can be narrowed."""

    name: str
    label: str
    channels: int


@dataclass(frozen=True)
class Explored:
    """One explore.json."""

    model: str
    source_sha256: str
    by: str  # macs or params
    before_params: int
    before_macs: int | None
    layers: tuple[tuple[str, str], ...]  # name and label of every Conv that can be grouped
    spaces: tuple[ExploredSpace, ...]  # that can be narrowed
    points: tuple[ExploredPoint, ...]

    def left(self, point: ExploredPoint) -> float | None:
        """Return the share of what the budgets limit that the point leaves; None where it could not be counted."""
        now, whole = (point.params, self.before_params) if self.by == "params" else (point.macs, self.before_macs)
        return now / whole if now is not None and whole else None


def read_exploration(path: Path) -> Explored:
    """Return the exploration in the file; every malformed field is named with its file."""
    top = Fields(read_json(path, MALFORMED), str(path), MALFORMED)
    if top.integer("format") != FORMAT:
        raise top.wrong(f"format {top.integer('format')} is not known", f"this version reads format {FORMAT}")
    before = top.inner("before")
    by = top.string("by")
    if by not in ("macs", "params"):
        raise top.wrong(f"'by' is {by!r}, not macs or params", MALFORMED.remedy)
    if not top.items("points"):
        raise top.wrong("'points' is empty", MALFORMED.remedy)
    return Explored(
        model=top.string("model"),
        source_sha256=top.string("source_sha256"),
        by=by,
        before_params=before.integer("params"),
        before_macs=_maybe_integer(before, "macs"),
        layers=tuple((row.string("name"), row.string("label")) for row in top.rows("layers")),
        spaces=tuple(_space(row) for row in top.rows("spaces")) if "spaces" in top.names() else (),
        points=tuple(_point(row) for row in top.rows("points")),
    )


def _point(row: Fields) -> ExploredPoint:
    return ExploredPoint(
        name=row.string("plan").removesuffix(".plan.json"),
        params=row.integer("params"),
        macs=_maybe_integer(row, "macs"),
        cost=row.number("cost"),
        proven=row.optional_number("gap") == 0,
        groups=_integers(row, "groups"),
        widths=_integers(row, "widths"),
        dropped=row.strings("dropped") if "dropped" in row.names() else (),
        saved=_integers(row, "saved"),
        low_rank=_integers(row, "low_rank"),
        top1=_measured(row, "top1"),
        agreement=_measured(row, "agreement"),
    )


def _space(row: Fields) -> ExploredSpace:
    space = ExploredSpace(row.string("name"), row.string("label"), row.integer("channels"))
    if space.channels < 1:
        raise row.wrong(f"'channels' is {space.channels}", MALFORMED.remedy)
    return space


def _integers(row: Fields, field: str) -> dict[str, int]:
    """Return whole numbers by name; earlier versions had groups only."""
    found = row.inner(field) if field == "groups" or field in row.names() else None
    return {} if found is None else {name: found.integer(name) for name in found.names()}


def _measured(row: Fields, figure: str) -> dict[str, float]:
    """Return a figure after each stage that has it, there or in an evaluation of its own."""
    found = {}
    for key, title in STAGES:
        stage = row.optional_inner(key)
        for place in (stage, None if stage is None else stage.optional_inner("evaluation")):
            value = None if place is None else place.optional_number(figure)
            if value is not None:
                found[title] = value
    return found


def _maybe_integer(fields: Fields, field: str) -> int | None:
    return None if fields.any(field) is None else fields.integer(field)
