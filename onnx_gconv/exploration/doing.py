"""Doing one job: plan within the budget, recover, group, verify, evaluate, fine-tune. The files are left in a folder."""

import json
import os
import time
import traceback
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import onnx

from onnx_gconv.data.open import open_data
from onnx_gconv.errors import GconvError
from onnx_gconv.evaluation import evaluate
from onnx_gconv.exploration.job import Brief, Goal, Tuning
from onnx_gconv.exploration.point import Point, planned_point
from onnx_gconv.model.file import load, save
from onnx_gconv.pipeline.planner import Planned, plan_guided
from onnx_gconv.pipeline.rewriting import rewrite_verified
from onnx_gconv.pipeline.solving import Groupings
from onnx_gconv.pipeline.trial import Costs, Guide
from onnx_gconv.plans import Plan, to_json
from onnx_gconv.recover.calibration import Calibration, calibration
from onnx_gconv.recover.fitting import FitOptions
from onnx_gconv.recover.guide import CalibratedGuide
from onnx_gconv.recover.recovery import Recovery, recover
from onnx_gconv.rewrite.mask import mask
from onnx_gconv.runtime import take_share

OUTCOME = "outcome.json"


@dataclass(frozen=True)
class KnownCosts:
    """A guide that knows already what the layers cost alone: that does not depend on the budget, so it is measured once."""

    guide: Guide
    known: Costs

    def costs(self, groupings: Groupings, company: Plan | None) -> Costs:
        return self.known if company is None else self.guide.costs(groupings, company)

    def following(self, names: Collection[str]) -> Mapping[str, float]:
        return self.guide.following(names)

    def judge(self, plans: Sequence[Plan]) -> Sequence[float]:
        return self.guide.judge(plans)


def do(brief: Brief, job: Goal, folder: Path, *, threads: int) -> None:
    """Do a job and leave its files in the folder, with `outcome.json`: the point, or the sentence why there is none.

    What fails here would fail anywhere, so it is told and not tried again; only a process that dies leaves no outcome.
    """
    take_share(threads)
    os.environ["OMP_NUM_THREADS"] = str(threads)  # for PyTorch, which is not imported yet
    work = _Work(brief, job, folder, threads)
    started = time.process_time()
    try:
        point = work.done()
        seconds = {**work.seconds, "cpu": round(time.process_time() - started, 3)}
        outcome: dict[str, object] = {"point": vars(point), "seconds": seconds}
    except GconvError as error:
        outcome = {"error": str(error), "hint": error.hint}
    except Exception as error:
        failed = f"onnx-gconv failed unexpectedly: {type(error).__name__}: {error}"
        outcome = {"error": failed, "hint": "run again with -v and report what it prints", "traceback": traceback.format_exc()}
    (folder / OUTCOME).write_text(json.dumps(outcome, ensure_ascii=False), encoding="utf-8")


@dataclass
class _Work:
    """A job on its way."""

    brief: Brief
    job: Goal
    folder: Path
    threads: int
    seconds: dict[str, float] = field(default_factory=dict)

    def done(self) -> Point:
        brief, name = self.brief, self.job.name
        with self._timed("read"):
            model = load(brief.model)
            samples = self._calibration(model)
        with self._timed("search"):
            planned = self._planned(model, samples)
        plan, found = planned.plan, planned.found
        assert found is not None, "an exploration searches, it follows no rule"
        (self.folder / f"{name}.plan.json").write_text(to_json(plan), encoding="utf-8")
        with self._timed("recover"):
            start, recovery = self._recovered(model, plan, samples)
        self._write(start, plan, f"{name}.onnx")
        finetuned = None
        if brief.tuning is not None and plan.layers:
            finetuned = self._tuned(model, start, plan, brief.tuning)
        return planned_point(
            f"{name}.plan.json",
            plan,
            found,
            model=f"{name}.onnx",
            recovery=None if recovery is None else recovery.as_dict(),
            evaluation=self._evaluation(f"{name}.onnx", model),
            finetuned=finetuned,
        )

    def _calibration(self, model: onnx.ModelProto) -> Calibration | None:
        asked = self.brief.calibrating
        if asked is None:
            return None
        return calibration(open_data(asked.data, model, preprocessing=self.brief.preprocessing), model, asked.samples)

    def _planned(self, model: onnx.ModelProto, samples: Calibration | None) -> Planned:
        brief, guide = self.brief, None
        count = brief.prepared.network.count
        # Where the model fits as it is there is nothing to choose, and nothing to measure.
        if samples is not None and brief.calibrating is not None and not self.job.budget.allows(count.params, count.macs):
            seed = brief.prepared.request.seed
            measuring = CalibratedGuide(model, samples, seed=seed, jobs=self.threads, progress=_silent)
            guide = measuring if brief.calibrating.costs is None else KnownCosts(measuring, brief.calibrating.costs)
        return plan_guided(brief.prepared, self.job.budget, guide, sha256=brief.sha256)

    def _recovered(
        self, model: onnx.ModelProto, plan: Plan, samples: Calibration | None
    ) -> tuple[onnx.ModelProto, Recovery | None]:
        """Return the masked model, fitted where there are samples; a model that nothing was dropped from needs no fit."""
        if samples is None or not plan.layers:
            return mask(model, plan), None
        effort = FitOptions(seed=self.brief.prepared.request.seed, jobs=self.threads)
        return recover(model, plan, samples, effort=effort, progress=_silent)

    def _write(self, masked: onnx.ModelProto, plan: Plan, file: str) -> None:
        """Group a masked model, verify it, and write it into the folder."""
        prepared = self.brief.prepared
        with self._timed("rewrite_and_verify"):
            rewritten = rewrite_verified(
                masked,
                plan,
                shapes=prepared.network.shapes,
                given_shapes=self.brief.given_shapes,
                seed=prepared.request.seed,
            )
            save(rewritten.grouped, self.folder / file, external_data=bool(self.brief.data_files))

    def _evaluation(self, file: str, reference: onnx.ModelProto) -> dict[str, object] | None:
        if self.brief.evaluated is None:
            return None
        with self._timed("evaluate"):
            data = open_data(self.brief.evaluated, reference, preprocessing=self.brief.preprocessing)
            return evaluate(load(self.folder / file), data, reference=reference).as_dict()

    def _tuned(self, model: onnx.ModelProto, start: onnx.ModelProto, plan: Plan, tuning: Tuning) -> dict[str, object]:
        """Train from where recovery ended, and return what that brought."""
        from onnx_gconv.torch import checkpoint
        from onnx_gconv.torch.finetuning import Listener, Task, finetune, metrics_beside
        from onnx_gconv.torch.team import assembled
        from onnx_gconv.torch.training import TrainingSettings

        settings = TrainingSettings(**_any(tuning.settings))
        output = self.folder / f"{self.job.name}.tuned.onnx"
        with self._timed("finetune"), assembled(tuning.device) as team:
            data = open_data(tuning.data, model, preprocessing=self.brief.preprocessing)
            task = Task(start, plan, model if settings.distill > 0 else None, data, self.brief.given_shapes)
            listener = Listener(_silent, lambda record: None)
            tuned = finetune(task, settings, team, output=output, resume=False, listener=listener)
        checkpoint.path_beside(output).unlink()  # only a training that stopped needs it
        best = {name: value for name, value in vars(tuned.best).items() if name != "seconds"}
        self._write(tuned.model, plan, output.name)
        return {
            "model": output.name,
            "metrics": metrics_beside(output).name,
            "epochs": settings.epochs,
            "best": best,
            "evaluation": self._evaluation(output.name, model),
        }

    @contextmanager
    def _timed(self, what: str) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self.seconds[what] = round(self.seconds.get(what, 0.0) + time.perf_counter() - started, 3)


def _any(settings: Mapping[str, object]) -> dict[str, Any]:
    return dict(settings)


def _silent(done: int, total: int | None, what: str) -> None:
    """A job has no terminal to show its progress on."""
