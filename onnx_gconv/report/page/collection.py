"""What there is to report on: the files of a folder, or one report with the files of the same name beside it."""

import re
from dataclasses import dataclass
from pathlib import Path

from onnx_gconv.deploy.timing_file import MALFORMED as MALFORMED_TIMING
from onnx_gconv.deploy.timing_file import Timing
from onnx_gconv.deploy.timing_file import from_json as timing_from_json
from onnx_gconv.errors import ReportError
from onnx_gconv.fields import read_json
from onnx_gconv.plans import Plan, read_plan
from onnx_gconv.report.page.exploration_file import Explored, ExploredPoint, read_exploration
from onnx_gconv.report.page.metrics_file import Epoch, read_metrics
from onnx_gconv.report.page.report_file import Report, read_report
from onnx_gconv.staging import settle

POINT_HINT = "--point goes with the folder of `onnx-gconv explore`"
POINT = re.compile(r"point-(\d+)\.plan\.json")
# "timing.json", "fast.timing.json"; `bench` numbers further models: "timing.2.json".
TIMING = re.compile(r"(?:(?P<stem>.+)\.)?timing(?:\.(?P<number>\d+))?\.json")


@dataclass(frozen=True)
class Run:
    """One compressed model: its report, its plan, or both."""

    name: str
    report: Report | None
    plan: Plan | None

    def groups(self) -> dict[str, int]:
        """Return the number of groups of each grouped Conv, by layer name."""
        layers = self.plan.layers if self.plan is not None else self.report.layers if self.report is not None else ()
        return {layer.name: layer.groups for layer in layers}

    def widths(self) -> dict[str, int]:
        """Return the channels that each narrowed space keeps, by its name."""
        if self.plan is not None:
            return {space.name: len(space.keep) for space in self.plan.spaces}
        return {space.name: space.kept for space in self.report.spaces} if self.report is not None else {}

    def dropped(self) -> tuple[str, ...]:
        """Return the branches that are dropped."""
        if self.plan is not None:
            return tuple(branch.name for branch in self.plan.dropped)
        return tuple(name for name, _ in self.report.dropped) if self.report is not None else ()

    def ranks(self) -> dict[str, int]:
        """Return the rank of each Conv that has a low one, by its name."""
        if self.plan is not None:
            return {each.name: each.rank for each in self.plan.low_rank}
        return dict(self.report.low_rank) if self.report is not None else {}

    def is_made_of(self, point: ExploredPoint) -> bool:
        """Return whether the point makes the same choice."""
        widths = {space: kept for space, kept in point.widths.items() if kept}
        mine = self.groups(), self.widths(), {*self.dropped()}, self.ranks()
        return (point.groups, widths, {*point.dropped}, point.low_rank) == mine


@dataclass(frozen=True)
class Results:
    """Everything that was found, in the order of the file names."""

    folder: Path
    runs: tuple[Run, ...]
    timings: tuple[tuple[str, Timing], ...]  # with their files' names
    trainings: tuple[tuple[str, tuple[Epoch, ...]], ...]  # likewise
    exploration: Explored | None
    left_out: tuple[str, ...] = ()  # sentences: which files are not shown, and why

    def chosen(self) -> dict[str, str]:
        """Return the point of the exploration that each run has made real, where one has: its name by the run's."""
        points = self.exploration.points if self.exploration is not None else ()
        same = {run.name: [p.name for p in points if run.is_made_of(p)] for run in self.runs}
        return {run: names[0] for run, names in same.items() if names}


def collect(path: Path, *, point: int | None = None) -> Results:
    """Return what the folder holds, or the report and the files of its stem; `point` adds one of an exploration."""
    settle(path if path.is_dir() else path.parent)
    if not path.exists():
        raise ReportError(f"there is no file or folder '{path}'.", hint="name a report.json, or the folder that holds the results")
    if path.is_dir():
        results = _of_folder(path, point)
        if not (results.runs or results.timings or results.trainings or results.exploration):
            raise ReportError(
                f"there are no results in '{path}'.",
                hint="it should hold some of *.report.json, *.plan.json, timing.json, *.metrics.jsonl or explore.json",
            )
        return results
    if point is not None:
        raise ReportError(
            f"'{path}' is not the folder of an exploration.", hint="--point goes with the folder of `onnx-gconv explore`"
        )
    return _of_report(path)


def _of_folder(folder: Path, point: int | None) -> Results:
    names = sorted(path.name for path in folder.iterdir() if path.is_file())
    stems: dict[str, None] = {}  # a set that keeps its order
    for name in names:
        for kind in ("report", "plan"):
            stem = _stem(name, kind)
            if stem is not None and not POINT.fullmatch(name):
                stems[stem] = None
    runs = [_run(folder, stem) for stem in stems]
    exploration = read_exploration(folder / "explore.json") if "explore.json" in names else None
    if point is not None:
        runs.insert(0, _point_run(folder, exploration, point))
    timings, left_out = _timings(folder, [name for name in names if TIMING.fullmatch(name)])
    trainings = [
        (name, read_metrics(folder / name)) for name in names if name == "metrics.jsonl" or name.endswith(".metrics.jsonl")
    ]
    return Results(folder, tuple(runs), timings, tuple(trainings), exploration, left_out)


def _of_report(path: Path) -> Results:
    folder, stem = path.parent, _stem(path.name, "report")
    report = read_report(path)
    if stem is None:
        return Results(folder, (Run(path.stem, report, None),), (), (), None)
    beside = sorted(other.name for other in folder.iterdir() if other.is_file())
    plan = _file(folder, stem, "plan", ".json")
    timings, left_out = _timings(folder, [n for n in beside if (m := TIMING.fullmatch(n)) and (m["stem"] or "") == stem])
    metrics = _file(folder, stem, "metrics", ".jsonl")
    trainings = ((metrics.name, read_metrics(metrics)),) if metrics.is_file() else ()
    run = Run(stem or path.stem, report, read_plan(plan) if plan.is_file() else None)
    return Results(folder, (run,), timings, trainings, None, left_out)


def _stem(name: str, kind: str) -> str | None:
    """Return what comes before the kind, "" where nothing does; None for another kind of file."""
    if name == f"{kind}.json":
        return ""
    return name.removesuffix(f".{kind}.json") if name.endswith(f".{kind}.json") else None


def _file(folder: Path, stem: str, kind: str, suffix: str) -> Path:
    return folder / (f"{stem}.{kind}{suffix}" if stem else f"{kind}{suffix}")


def _run(folder: Path, stem: str) -> Run:
    report, plan = (_file(folder, stem, kind, ".json") for kind in ("report", "plan"))
    return Run(
        stem or (report.stem if report.is_file() else plan.stem),
        read_report(report) if report.is_file() else None,
        read_plan(plan) if plan.is_file() else None,
    )


def _point_run(folder: Path, exploration: Explored | None, point: int) -> Run:
    numbers = {int(found[1]): path for path in sorted(folder.iterdir()) if (found := POINT.fullmatch(path.name))}
    if exploration is None or point not in numbers:
        there = f"there are points {min(numbers)} to {max(numbers)}" if exploration and numbers else "it holds no exploration"
        raise ReportError(f"'{folder}' has no point {point}: {there}.", hint=POINT_HINT)
    return Run(numbers[point].name.removesuffix(".plan.json"), None, read_plan(numbers[point]))


def _timings(folder: Path, names: list[str]) -> tuple[tuple[tuple[str, Timing], ...], tuple[str, ...]]:
    """Return the timings in these files, `bench`'s first model first, and what is said of files that are none."""
    timings, left_out = [], []
    for name in sorted(names, key=_timing_key):
        data = read_json(folder / name, MALFORMED_TIMING)
        if isinstance(data, dict) and "yardstick_ms" in data:
            left_out.append(f"{name} is a table of `bench --sweep`, not the timing of a model.")
        else:
            timings.append((name, timing_from_json(data, str(folder / name))))
    return tuple(timings), tuple(left_out)


def _timing_key(name: str) -> tuple[str, int]:
    found = TIMING.fullmatch(name)
    assert found is not None, "only names that matched are sorted"
    return found["stem"] or "", int(found["number"] or 1)
