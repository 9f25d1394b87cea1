"""Making one point: plan within the budget, recover, write, verify, evaluate, fine-tune. The files are left in a folder."""

import json
import os
import time
import traceback
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import onnx

from onnx_gconv.data.open import open_data
from onnx_gconv.errors import GconvError, OutputError
from onnx_gconv.evaluation import evaluate
from onnx_gconv.exploration.goal import Brief, Goal, Tuning
from onnx_gconv.exploration.point import Point, planned_point
from onnx_gconv.listener import SILENT, ignore
from onnx_gconv.model.spaces import Spaces
from onnx_gconv.model.widths import Space
from onnx_gconv.pipeline.job import Job
from onnx_gconv.pipeline.original import Original, open_original
from onnx_gconv.pipeline.planned import Planned
from onnx_gconv.pipeline.planning import plan_guided, plan_within
from onnx_gconv.pipeline.recovering import guide_of, open_samples, recovered
from onnx_gconv.pipeline.rewriting import Rewritten, rewrite
from onnx_gconv.pipeline.settings import Settings
from onnx_gconv.pipeline.solving import Groupings
from onnx_gconv.pipeline.stopwatch import Stopwatch
from onnx_gconv.pipeline.trial import Eliminations, GroupCosts, Guide, Keeps, RankErrors, WidthCosts
from onnx_gconv.plans import Plan
from onnx_gconv.recover.calibration import Calibration
from onnx_gconv.recover.recovery import Recovery
from onnx_gconv.rewrite.mask import mask
from onnx_gconv.rewrite.match import Matched, match
from onnx_gconv.runtime import take_share

OUTCOME = "outcome.json"


@dataclass(frozen=True)
class KnownCosts:
    """A guide that knows already what the layers cost alone: that does not depend on the budget, so it is measured once."""

    guide: Guide
    known: GroupCosts

    def errors(self, found: Sequence[Space], spaces: Spaces, ranked: Collection[str]) -> tuple[Eliminations, RankErrors]:
        return self.guide.errors(found, spaces, ranked)

    def costs(self, groupings: Groupings, keeps: Keeps) -> tuple[GroupCosts, WidthCosts]:
        return self.known, self.guide.costs({}, keeps)[1] if keeps else {}

    def costs_in_company(self, groupings: Groupings, company: Plan) -> GroupCosts:
        return self.guide.costs_in_company(groupings, company)

    def following(self, names: Collection[str]) -> Mapping[str, float]:
        return self.guide.following(names)

    def judge(self, plans: Sequence[Plan]) -> Sequence[float]:
        return self.guide.judge(plans)


def make(brief: Brief, goal: Goal, folder: Path, *, threads: int) -> None:
    """Make a point and leave its files in the folder, with `outcome.json`: the point, or the sentence why there is none.

    What fails here would fail anywhere, so it is told and not tried again; only a process that dies leaves no outcome.
    """
    take_share(threads)
    os.environ["OMP_NUM_THREADS"] = str(threads)  # for PyTorch, which is not imported yet
    work = _Work(brief, goal, folder, replace(brief.settings, jobs=threads))
    started = time.process_time()
    try:
        point = work.done()
        seconds = {**work.watch.seconds, "cpu": time.process_time() - started}
        rounded = {name: round(value, 3) for name, value in seconds.items()}
        outcome: dict[str, object] = {"point": vars(point), "seconds": rounded}
    except OutputError as error:
        why = getattr(error.__cause__, "strerror", None) or error.__cause__ or error
        outcome = {"error": f"it cannot be written: {why}.", "hint": "free some space: the same command makes what is missing"}
    except GconvError as error:
        outcome = {"error": str(error), "hint": error.hint}
    except Exception as error:
        failed = f"onnx-gconv failed unexpectedly: {type(error).__name__}: {error}"
        outcome = {"error": failed, "hint": "run again with -v and report what it prints", "traceback": traceback.format_exc()}
    (folder / OUTCOME).write_text(json.dumps(outcome, ensure_ascii=False), encoding="utf-8")


@dataclass
class _Work:
    """A point on its way."""

    brief: Brief
    goal: Goal
    folder: Path
    settings: Settings
    watch: Stopwatch = field(default_factory=Stopwatch)

    def done(self) -> Point:
        name, tuning = self.goal.name, self.brief.tuning
        with self.watch("read"):
            original = open_original(self.brief.model, self.brief.given_shapes)
            samples = open_samples(original, self.settings)
        job = Job(original, self.settings)
        with self.watch("search"):
            planned = self._planned(job, samples)
        matched = match(original.model, planned.plan, shapes=original.network.shapes)
        with self.watch("recover"):
            start, matched, recovery = self._recovered(job, matched, samples)
        plan = planned.plan.keeping({each.space.name: tuple(each.keep.tolist()) for each in matched.spaces})
        planned = replace(planned, plan=plan)
        planned.save(self.folder / f"{name}.plan.json")
        rewritten = self._written(job, start, matched, f"{name}.onnx")
        finetuned = None
        if tuning is not None and matched:
            finetuned = self._tuned(job, start, plan, matched, tuning)
        return planned_point(
            original,
            f"{name}.plan.json",
            planned,
            matched,
            model=f"{name}.onnx",
            recovery=None if recovery is None else recovery.as_dict(),
            evaluation=self._evaluation(rewritten, original),
            finetuned=finetuned,
        )

    def _planned(self, job: Job, samples: Calibration | None) -> Planned:
        solved, costs, budget = self.brief.solved, self.brief.costs, self.goal.budget
        # Where the model fits as it is there is nothing to choose, and nothing to measure or try.
        fits = budget.allows(solved.network.count.params, solved.network.count.macs)
        if fits and solved.forms is None:
            return plan_within(solved, budget)
        if fits:
            solved = replace(solved, settings=replace(solved.settings, effort=0))
        guide: Guide | None = guide_of(job, samples)
        if guide is not None and costs is not None:
            guide = KnownCosts(guide, costs)
        return plan_guided(solved, budget, guide, job.original.model)

    def _recovered(
        self, job: Job, matched: Matched, samples: Calibration | None
    ) -> tuple[onnx.ModelProto, Matched, Recovery | None]:
        """Return the masked model, fitted where there are samples; a model that nothing was dropped from needs no fit."""
        if samples is None or not matched:
            return mask(job.original.model, matched), matched, None
        fitted, recovery = recovered(job, matched, samples, is_choosing=True)
        return fitted.model, fitted.matched, recovery

    def _written(self, job: Job, masked: onnx.ModelProto, matched: Matched, file: str) -> Rewritten:
        """Group a masked model, verify it, and write it into the folder."""
        with self.watch("rewrite_and_verify"):
            rewritten = rewrite(job, masked, matched)
            rewritten.save(self.folder / file)
        return rewritten

    def _evaluation(self, rewritten: Rewritten, original: Original) -> dict[str, object] | None:
        if self.settings.eval is None:
            return None
        with self.watch("evaluate"):
            data = open_data(self.settings.eval, original.model, preprocessing=self.settings.preprocessing)
            return evaluate(rewritten.model, data, reference=original.model).as_dict()

    def _tuned(self, job: Job, start: onnx.ModelProto, plan: Plan, matched: Matched, tuning: Tuning) -> dict[str, object]:
        """Train from where recovery ended, and return what that brought."""
        from onnx_gconv.torch import checkpoint
        from onnx_gconv.torch.finetuning import Task, finetune, metrics_beside
        from onnx_gconv.torch.team import assembled
        from onnx_gconv.torch.training import TrainingSettings

        original, how = job.original, TrainingSettings(**tuning.settings)
        output = self.folder / f"{self.goal.name}.tuned.onnx"
        with self.watch("finetune"), assembled(tuning.device) as team:
            data = open_data(tuning.data, original.model, preprocessing=self.settings.preprocessing)
            task = Task(start, plan, original.model if how.distill > 0 else None, data, original.given_shapes)
            tuned = finetune(task, how, team, output=output, resume=False, listener=SILENT, on_epoch=ignore)
        checkpoint.path_beside(output).unlink()  # only a training that stopped needs it
        best = {name: value for name, value in vars(tuned.best).items() if name != "seconds"}
        rewritten = self._written(job, tuned.model, matched, output.name)
        return {
            "model": output.name,
            "metrics": metrics_beside(output).name,
            "epochs": how.epochs,
            "best": best,
            "evaluation": self._evaluation(rewritten, original),
        }
