"""The points of `explore`: plans searched here, or jobs that make models of them."""

import argparse
from collections.abc import Iterator
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING

from onnx_gconv.cli import finetune, options
from onnx_gconv.cli.recovering import guide
from onnx_gconv.cli.source import Source
from onnx_gconv.cli.story import Story
from onnx_gconv.cli.training import require_torch
from onnx_gconv.errors import PointError

if TYPE_CHECKING:
    from onnx_gconv.exploration.engine import Engine
    from onnx_gconv.exploration.folder import Folder
    from onnx_gconv.exploration.job import Brief, Calibrating, Goal, Tuning
    from onnx_gconv.exploration.point import Point
    from onnx_gconv.exploration.running import Failure
    from onnx_gconv.model.network import Network
    from onnx_gconv.pipeline.planner import Prepared
    from onnx_gconv.pipeline.solving import Progress
    from onnx_gconv.recover.calibration import Calibration


def require_engine(args: argparse.Namespace) -> None:
    """Refuse before any work where a package is missing that the flags need."""
    if args.finetune is not None:
        require_torch("--finetune")
    if args.engine == "ray":
        from onnx_gconv.exploration.ray import require_cluster

        require_cluster(args.address)


class Exploring:
    """All that the points of one exploration have in common."""

    def __init__(self, source: Source, network: "Network", args: argparse.Namespace, story: Story) -> None:
        self._source = source
        self._network = network
        self._args = args
        self._story = story
        self._tuning: Tuning | None = None
        self._failures: list[Failure] = []

    def open_data(self) -> None:
        """Look at the data of --eval and --finetune, so that what is wrong with it is told before any work."""
        from onnx_gconv.data.open import open_data
        from onnx_gconv.exploration.job import Tuning

        args, preprocessing = self._args, options.preprocessing(self._args)
        if args.eval is not None:
            open_data(args.eval, self._source.model, preprocessing=preprocessing)
        if args.finetune is not None:
            data = open_data(args.finetune, self._source.model, preprocessing=preprocessing)
            self._tuning = Tuning(args.finetune, asdict(finetune.learning_settings(args, data)), args.device)

    def planned(self, prepared: "Prepared", sha256: str) -> "Iterator[list[Point]]":
        """Yield the points, all plans, once they are searched; their files are written."""
        from onnx_gconv.exploration.folder import Folder
        from onnx_gconv.exploration.point import planned_point
        from onnx_gconv.files import write_text
        from onnx_gconv.pipeline.planner import plan_within
        from onnx_gconv.plans import to_json

        points: list[Point] = []
        jobs = self._jobs(prepared)
        with self._story.progress("searching") as progress:
            for job in jobs:
                planned = plan_within(prepared, job.budget, sha256=sha256)
                assert planned.found is not None
                file = f"{job.name}.plan.json"
                write_text(self._args.output / file, to_json(planned.plan))
                points.append(planned_point(file, planned.plan, planned.found))
                progress(len(points), len(jobs), job.name)
        Folder(self._args.output, {}).tidy(points)
        yield points

    def made(self, prepared: "Prepared", calibration: "Calibration | None", sha256: str) -> "Iterator[list[Point]]":
        """Yield the points so far, in order, whenever there is one more."""
        from onnx_gconv.exploration.folder import Folder
        from onnx_gconv.exploration.point import Point
        from onnx_gconv.exploration.running import run_jobs

        settings = self._settings(prepared, sha256)
        folder = Folder(self._args.output, settings)
        brief = self._errand(prepared, self._calibrating(prepared, calibration, folder, settings), sha256)
        jobs = self._jobs(prepared)
        points: dict[str, Point] = {}
        with self._story.progress("exploring") as progress:
            progress(0, len(jobs), "")
            for result in run_jobs(brief, jobs, folder, self._engine()):
                if isinstance(result, Point):
                    points[result.name] = result
                    self._tell(result, progress, done=len(points) + len(self._failures), total=len(jobs))
                    yield [points[name] for name in sorted(points)]
                else:
                    self._failures.append(result)
                    self._story.warn(f"{result.name}: {result.message}")
                    self._story.detail(result.details)
        folder.tidy(list(points.values()))

    def require_all(self) -> None:
        """Fail if a point did, now that the others are written."""
        if self._failures:
            first = self._failures[0]
            names = ", ".join(sorted(failure.name for failure in self._failures))
            done = "the other points are written" if len(self._failures) < self._args.points else "no point is written"
            raise PointError(f"{names} could not be made: {first.message} ({done})", hint=first.hint)

    def _jobs(self, prepared: "Prepared") -> "list[Goal]":
        from onnx_gconv.exploration.running import jobs_for
        from onnx_gconv.exploration.solutions import budgets

        assert prepared.table is not None, "an exploration searches, it follows no rule"
        return jobs_for(budgets(prepared.table, self._args.by, self._args.points))

    def _engine(self) -> "Engine":
        if self._args.engine == "ray":
            from onnx_gconv.exploration.ray import run_on_ray

            return partial(run_on_ray, address=self._args.address, cores=self._args.jobs)
        from onnx_gconv.exploration.local import run_here

        return partial(run_here, cores=self._args.jobs)

    def _calibrating(
        self, prepared: "Prepared", calibration: "Calibration | None", folder: "Folder", settings: "dict[str, object]"
    ) -> "Calibrating | None":
        """Return the samples, and what the layers cost by them: that holds for all budgets, so it is measured here and once."""
        if calibration is None:
            return None
        from onnx_gconv.exploration.job import Calibrating
        from onnx_gconv.pipeline.planner import is_measured

        costs = None
        if is_measured(prepared):
            with self._story.progress("measuring") as progress:
                measuring = guide(self._source, calibration, self._args, progress)
                assert measuring is not None
                needed = {name: settings[name] for name in ("model", "solutions", "seed", "preprocessing", "calib")}
                costs = folder.costs(needed, lambda: measuring.costs(prepared.groupings, None))
        return Calibrating(self._args.calib, self._args.calib_samples, costs)

    def _errand(self, prepared: "Prepared", calibrating: "Calibrating | None", sha256: str) -> "Brief":
        from onnx_gconv.exploration.job import Brief

        return Brief(
            model=self._source.path,
            data_files=self._source.data_files,
            sha256=sha256,
            given_shapes=self._source.given_shapes,
            prepared=prepared,
            preprocessing=options.preprocessing(self._args),
            calibrating=calibrating,
            evaluated=self._args.eval,
            tuning=self._tuning,
        )

    def _settings(self, prepared: "Prepared", sha256: str) -> "dict[str, object]":
        """Return all that the points depend on: one made with other settings is made again."""
        from onnx_gconv.data.identity import data_identity
        from onnx_gconv.exploration.solutions import solution_settings

        args, request, tuning = self._args, prepared.request, self._tuning
        return {
            "model": [sha256, *(data_identity(str(path)) for path in self._source.data_files)],
            "input_shapes": self._source.given_shapes,
            "solutions": solution_settings(request, sha256),
            "search": request.search,
            "cost": request.cost,
            "gathers": request.gathers,
            "seed": request.seed,
            "preprocessing": vars(options.preprocessing(args)),
            "calib": args.calib and {**data_identity(args.calib), "samples": args.calib_samples},
            "eval": args.eval and data_identity(args.eval),
            "finetune": tuning and {**data_identity(tuning.data), **tuning.settings, "device": tuning.device},
        }

    def _tell(self, point: "Point", progress: "Progress", *, done: int, total: int) -> None:
        from onnx_gconv.exploration.point import measured

        progress(done, total, point.name)
        measure = measured([point])
        found = f", {measure.title} {measure.text(0)}" if measure is not None else ""
        left = f"{point.macs / self._network.count.macs:.1%} of the MACs" if point.macs and self._network.count.macs else ""
        self._story.tell(f"{done}/{total} {point.name}: {left or f'{point.params:,} parameters'}{found}")
