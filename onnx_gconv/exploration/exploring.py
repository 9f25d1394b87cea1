"""`explore`: the best plan, or model, for each of several budgets."""

import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal, Unpack, get_args

from onnx_gconv.cores import one_blas_thread
from onnx_gconv.data.identity import data_identity
from onnx_gconv.data.open import open_data
from onnx_gconv.errors import DataError, OutputError, PointError, UsageError
from onnx_gconv.exploration.engine import Engine
from onnx_gconv.exploration.folder import Folder, require_apart, require_kept
from onnx_gconv.exploration.goal import Brief, Goal, Tuning
from onnx_gconv.exploration.local import run_here
from onnx_gconv.exploration.point import Explored, Point, exploration_json, measured, planned_point
from onnx_gconv.exploration.ray import require_cluster, run_on_ray
from onnx_gconv.exploration.remembering import RememberingGuide
from onnx_gconv.exploration.running import Failure, goals_for, make_points
from onnx_gconv.exploration.solutions import Axis, budgets, gathers_of, solution_settings, solve_resumable
from onnx_gconv.files import locked, make_folder, write_text
from onnx_gconv.listener import SILENT, Listener
from onnx_gconv.model.network import Network
from onnx_gconv.model.widths import Space
from onnx_gconv.pipeline.extras import require_torch
from onnx_gconv.pipeline.facts import Facts, measure
from onnx_gconv.pipeline.job import Job
from onnx_gconv.pipeline.original import Original, open_original, require_float, tell_counts
from onnx_gconv.pipeline.planned import Solved
from onnx_gconv.pipeline.planning import plan_within
from onnx_gconv.pipeline.recovering import guide_of, open_samples
from onnx_gconv.pipeline.settings import ExploreWishes, Learning, PathLike, Settings, as_path, settings_of
from onnx_gconv.pipeline.trial import Guide
from onnx_gconv.recover.calibration import Calibration
from onnx_gconv.rewrite.match import match

EngineName = Literal["local", "ray"]


@dataclass(frozen=True, eq=False)
class Exploration:
    """The points of an exploration in the order of their budgets, and those that could not be made.

    `spaces` are the channel spaces that could be narrowed, where that was among the forms.
    """

    network: Network
    by: Axis
    points: tuple[Point, ...]
    failures: tuple[Failure, ...]
    spaces: tuple[Space, ...] = ()

    def require_all(self) -> None:
        """Fail if a point did; the others are written."""
        if self.failures:
            first = self.failures[0]
            names = ", ".join(sorted(failure.name for failure in self.failures))
            done = "the other points are written" if self.points else "no point is written"
            raise PointError(f"{names} could not be made: {first.message} ({done})", hint=first.hint)


@one_blas_thread
def explore(
    model: PathLike,
    output: PathLike,
    *,
    points: int = 12,
    by: Axis = "macs",
    finetune: str | None = None,
    learning: Learning | None = None,
    device: str = "auto",
    engine: EngineName = "local",
    address: str | None = None,
    listener: Listener = SILENT,
    **wishes: Unpack[ExploreWishes],
) -> Exploration:
    """Find the best plan for each of several budgets, from the model as it is down to the smallest; write them into a folder.

        found = onnx_gconv.explore("model.onnx", "sweep", points=8, calib="images.npz", eval="test.npz")
        print([(point.macs, point.evaluation["top1"]) for point in found.points])

    With `calib`, `eval` or `finetune` (data to train on) every point becomes a model. Points are made in processes of their own,
    `jobs` at a time or on a Ray cluster, so model and data are given by name. Called again after an interruption, it continues
    where it stopped.
    """
    if points < 1:
        raise UsageError(f"--points {points} explores nothing: ask for at least 1")
    for name, value, known in (("by", by, Axis), ("engine", engine, EngineName)):
        if value not in get_args(known):
            raise UsageError(f"--{name} {value!r} is not known: choose from {', '.join(get_args(known))}")
    settings = _named(settings_of("explore", wishes, ExploreWishes))
    has_models = any((settings.calib, settings.eval, finetune))
    _require_engine(engine, address, has_models=has_models)
    if finetune is not None:
        require_torch("--finetune")
    if settings.criterion == "taylor":
        require_torch("--criterion taylor")
    if not isinstance(model, str | os.PathLike):
        raise UsageError(f"explore makes points in processes of their own: name the model by its path, not {type(model).__name__}")
    original = open_original(model, settings.input_shape)
    tell_counts(original, listener)
    require_float(original.network)
    samples = open_samples(original, settings)
    if settings.eval is not None:  # what is wrong with it is told before any work
        open_data(settings.eval, original.model, preprocessing=settings.preprocessing)
    tuning = None if finetune is None else _tuning(original, settings, finetune, learning or {}, device)
    explorer = _Explorer(original, settings, as_path(output), points, by, tuning, listener)
    return explorer.explored(samples, _engine(engine, address, cores=settings.jobs) if has_models else None)


def _named(settings: Settings) -> Settings:
    """Return the settings with their data by name; other processes cannot read what is in this one's memory."""
    for name in ("calib", "eval"):
        data = getattr(settings, name)
        if data is not None and not isinstance(data, str | os.PathLike):
            raise DataError(
                f"--{name}: points are made in processes of their own, so data in memory cannot reach them.",
                hint="name an .npz file, a folder of images, or package.module:function",
            )
    calib, judging = settings.calib, settings.eval
    return replace(settings, calib=None if calib is None else str(calib), eval=None if judging is None else str(judging))


def _require_engine(engine: EngineName, address: str | None, *, has_models: bool) -> None:
    """Refuse before any work where the cluster makes no sense or is not there."""
    if address and engine != "ray":
        raise UsageError("--address needs --engine ray")
    if engine == "ray":
        if not has_models:
            raise UsageError("--engine ray has nothing to do: add --calib, --eval or --finetune (plans alone take seconds, here)")
        require_cluster(address)


def _engine(name: EngineName, address: str | None, *, cores: int) -> Engine:
    if name == "local":
        return partial(run_here, cores=cores)
    return partial(run_on_ray, address=address, cores=cores)


def _tuning(original: Original, settings: Settings, data: str, learning: Learning, device: str) -> Tuning:
    from onnx_gconv.pipeline.tuning import training_settings

    samples = open_data(data, original.model, preprocessing=settings.preprocessing)
    return Tuning(data, asdict(training_settings(learning, samples, seed=settings.seed)), device)


def _remembering(guide: Guide | None, folder: Folder, dependencies: dict[str, object]) -> RememberingGuide | None:
    needed = {name: dependencies[name] for name in ("model", "solutions", "seed", "preprocessing", "calib")}
    return None if guide is None else RememberingGuide(guide, folder, needed)


class _Explorer:
    """All that the points of one exploration have in common."""

    def __init__(
        self,
        original: Original,
        settings: Settings,
        folder: Path,
        count: int,
        by: Axis,
        tuning: Tuning | None,
        listener: Listener,
    ) -> None:
        self._original, self._settings, self._path = original, settings, folder
        self._count, self._by, self._tuning = count, by, tuning
        self._listener = listener
        self._failures: list[Failure] = []

    def explored(self, samples: Calibration | None, engine: Engine | None) -> Exploration:
        """Return the points, each in the folder as soon as it is there; without an engine they are plans only."""
        original, points = self._original, list[Point]()
        job = Job(original, self._settings, measure(original, self._settings, samples, self._listener), self._listener)
        make_folder(self._path)
        try:
            with locked(self._path):
                require_apart(self._path, self._sources())
                require_kept(self._path, self._count, has_models=engine is not None, has_tuned=self._tuning is not None)
                dependencies = self._dependencies(job.facts)
                folder = Folder(self._path, dependencies)
                guide = _remembering(guide_of(job, samples), folder, dependencies)
                solved = solve_resumable(job, self._path, guide)
                spaces = () if solved.forms is None else solved.forms.offer.spaces
                explored = Explored(str(original.path), self._by, original.network, original.sha256, spaces)
                for points in self._plans(solved) if engine is None else self._models(solved, guide, folder, engine):
                    write_text(self._path / "explore.json", exploration_json(explored, points))
        except BaseException as stop:
            # Before the first point is known, nobody knows which of those in the folder are of this exploration.
            kept = f"{len(points)} of {self._count} points" if points else "what is finished"
            told = f"'{self._path}' keeps {kept}, and the same command continues from there."
            failed = stop.__cause__ if isinstance(stop, OutputError) else stop
            if isinstance(failed, OSError) and not isinstance(failed, BlockingIOError):  # a full disk, say
                problem = f"the exploration cannot go on: {failed.strerror or failed}; {told}"
                raise OutputError(problem, hint="free some space, and start it again") from stop
            if isinstance(stop, Exception):
                raise
            raise type(stop)(told) from stop  # Ctrl-C, say
        return Exploration(original.network, self._by, tuple(points), tuple(self._failures), spaces)

    def _plans(self, solved: Solved) -> Iterator[list[Point]]:
        """Yield the points, all plans, once they are searched; their files are written."""
        points: list[Point] = []
        goals = self._goals(solved)
        for goal in goals:
            planned = plan_within(solved, goal.budget)
            file = f"{goal.name}.plan.json"
            planned.save(self._path / file)
            matched = match(self._original.model, planned.plan, shapes=solved.network.shapes)
            points.append(planned_point(self._original, file, planned, matched))
            self._listener.progress("searching", len(points), len(goals), goal.name)
        Folder(self._path, {}).tidy(points)
        yield points

    def _models(self, solved: Solved, guide: RememberingGuide | None, folder: Folder, engine: Engine) -> Iterator[list[Point]]:
        """Yield the points so far, in order, whenever there is one more."""
        # What the layers cost by the samples holds for all budgets, so it is measured here and once.
        is_asked = guide is not None and solved.forms is None and solved.is_measured
        costs = guide.costs(solved.groupings, {})[0] if guide is not None and is_asked else None
        original, goals = self._original, self._goals(solved)
        assert original.path is not None, "an exploration has its model by name"
        brief = Brief(original.path, original.data_files, original.given_shapes, self._settings, solved, costs, self._tuning)
        points: dict[str, Point] = {}
        self._listener.progress("exploring", 0, len(goals), "")
        for result in make_points(brief, goals, folder, engine):
            if isinstance(result, Point):
                points[result.name] = result
                self._tell(result, done=len(points) + len(self._failures), total=len(goals))
                yield [points[name] for name in sorted(points)]
            else:
                self._failures.append(result)
                self._listener.warn(f"{result.name}: {result.message}")
                self._listener.detail(result.details)
        folder.tidy(list(points.values()))

    def _sources(self) -> list[Path]:
        """Return the files that the exploration reads, as far as they are files."""
        tuning = None if self._tuning is None else self._tuning.data
        data = (self._settings.calib, self._settings.eval, tuning)
        return [*self._original.files, *(Path(str(name)) for name in data if name is not None)]

    def _goals(self, solved: Solved) -> list[Goal]:
        return goals_for(budgets(solved, self._by, self._count))

    def _dependencies(self, facts: Facts) -> dict[str, object]:
        """Return all that the points depend on: one made with other settings is made again."""
        settings, tuning, original = self._settings, self._tuning, self._original
        calib, judging = settings.calib, settings.eval
        return {
            "model": [original.sha256, *(data_identity(str(path)) for path in original.data_files)],
            "input_shapes": original.given_shapes,
            "solutions": solution_settings(settings, facts, original.sha256),
            "search": settings.search,
            "cost": settings.cost_name,
            "gathers": gathers_of(settings),
            "seed": settings.seed,
            "preprocessing": vars(settings.preprocessing),
            "calib": calib and {**data_identity(str(calib)), "samples": settings.calib_samples},
            "eval": judging and data_identity(str(judging)),
            "finetune": tuning and {**data_identity(tuning.data), **tuning.settings, "device": tuning.device},
        }

    def _tell(self, point: Point, *, done: int, total: int) -> None:
        self._listener.progress("exploring", done, total, point.name)
        measure, macs = measured([point]), self._original.network.count.macs
        found = f", {measure.title} {measure.text(0)}" if measure is not None else ""
        left = f"{point.macs / macs:.1%} of the MACs" if point.macs and macs else ""
        self._listener.note(f"{done}/{total} {point.name}: {left or f'{point.params:,} parameters'}{found}")
