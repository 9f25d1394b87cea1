"""What an exploration of budgets starts from: layers solved once, each on disk as it is found, and the budgets."""

import hashlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal

import numpy as np

from onnx_gconv.errors import BudgetError, PlanError
from onnx_gconv.files import write_text
from onnx_gconv.pipeline.choosing import option_table
from onnx_gconv.pipeline.facts import Facts
from onnx_gconv.pipeline.job import Job
from onnx_gconv.pipeline.offering import offered
from onnx_gconv.pipeline.planned import Solved
from onnx_gconv.pipeline.planning import decide_candidates, solve, some_grouped, wanted_numbers, with_forms
from onnx_gconv.pipeline.settings import GathersName, Settings
from onnx_gconv.pipeline.solving import Groupings, Problem, Solutions, problems, solve_each
from onnx_gconv.pipeline.trial import Guide
from onnx_gconv.search.budget import Budget
from onnx_gconv.search.joint import smallest_totals
from onnx_gconv.solve.grouping import Grouping

Axis = Literal["macs", "params"]
SOLUTIONS = "solutions.jsonl"


class SolutionFile:
    """The solved layers of an exploration, one a line, appended as they are found.

    The first line says what they are solutions of; a folder with other ones is refused, not overwritten.
    """

    def __init__(self, path: Path, settings: dict[str, object]) -> None:
        self._path = path
        self._solutions: dict[tuple[str, int], Solutions] = {}
        if not path.exists():
            write_text(path, json.dumps(settings) + "\n")
            return
        lines = path.read_text(encoding="utf-8").split("\n")
        if lines[0] != json.dumps(settings):
            raise PlanError(
                f"'{path.parent}' holds an exploration of another model or with other flags.", hint="use another folder"
            )
        # What follows the last newline was cut off in mid-write.
        for line in lines[1:-1]:
            entry = json.loads(line)
            self._solutions[entry["weight"], entry["existing"]] = {
                int(g): Grouping(int(g), np.array(ins), np.array(outs), kept) for g, (kept, ins, outs) in entry["groups"].items()
            }
        write_text(path, "\n".join(lines[:-1]) + "\n")

    def get(self, problem: Problem) -> Solutions | None:
        return self._solutions.get(_key(problem))

    def add(self, problem: Problem, solutions: Solutions) -> None:
        groups = {g: (found.kept, found.in_order.tolist(), found.out_order.tolist()) for g, found in solutions.items()}
        weight, existing = _key(problem)
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"weight": weight, "existing": existing, "groups": groups}) + "\n")


def _key(problem: Problem) -> tuple[str, int]:
    return problem.layers[0].weight, problem.layers[0].groups


def solve_resumable(job: Job, folder: Path, guide: Guide | None) -> Solved:
    """Return the model solved for all that a search may choose; layers that the folder has already are not solved again.

    A `guide` measures widths and branches; what it remembers is not measured again either.
    """
    forms, gathers = job.settings.form_names, gathers_of(job.settings)
    if forms == ("group",):
        # Shared partitions are one joint problem: nothing to store.
        return _solve_layers(job, folder) if gathers == "free" else solve(job, gathers, None)
    assert guide is not None, "the settings refuse such forms without data"
    if "group" in forms and gathers != "free":
        return solve(job, gathers, guide)
    _open_solutions(job, folder)  # also without layers to solve: a folder of another exploration is refused
    return with_forms(job, some_grouped(job, lambda: _solve_layers(job, folder)), guide)


def gathers_of(settings: Settings) -> GathersName:
    """Return the way of Gathers of all points."""
    return settings.gathers or "free" if "group" in settings.form_names else "none"


def _open_solutions(job: Job, folder: Path) -> SolutionFile:
    """Return the file of solutions; what is there of another exploration is refused."""
    return SolutionFile(folder / SOLUTIONS, solution_settings(job.settings, job.facts, job.original.sha256))


def _solve_layers(job: Job, folder: Path) -> Solved:
    """Return the layers solved for every number of groups, each with the best permutation that it could have."""
    original, settings, facts = job.original, job.settings, job.facts
    network = offered(job, "free")
    skipped, allowed, rule = decide_candidates(job, network)
    assert rule is None, "an exploration searches, it follows no rule"
    file = _open_solutions(job, folder)
    todo = problems([layer for layer in network.layers if layer.name in allowed], wanted_numbers(allowed))
    known = [(problem, solutions) for problem in todo if (solutions := file.get(problem)) is not None]
    missing = [problem for problem in todo if file.get(problem) is None]
    groupings: Groupings = {}

    def all_solutions() -> Iterator[tuple[Problem, Solutions]]:
        yield from known
        progress = job.listener.phase("solving")
        for problem, solutions in solve_each(original.model, missing, settings, facts, progress=progress):
            file.add(problem, solutions)
            yield problem, solutions

    for problem, solutions in all_solutions():
        groupings |= {(layer.name, g): grouping for layer in problem.layers for g, grouping in solutions.items()}
    table = option_table(network, allowed, groupings, settings, facts, skipped)
    return Solved(network, original.sha256, original.files, settings, facts, "free", skipped, None, table, groupings)


def solution_settings(settings: Settings, facts: Facts, sha256: str) -> dict[str, object]:
    """Return what the solutions depend on; the number of processes is not among it."""
    digest = hashlib.sha256()
    for name, values in sorted(facts.importances.items()):
        digest.update(name.encode() + values.tobytes())
    measured = {"measured": digest.hexdigest()} if facts.importances else {}
    forms = {} if settings.form_names == ("group",) else {"forms": settings.form_names, "width_step": settings.width_step}
    return {
        "format": 1,
        "source_sha256": sha256,
        "criterion": settings.criterion,
        "solver": vars(settings.how_to_solve),
        "include": settings.include,
        "exclude": settings.exclude,
        "min_group_channels": settings.min_group_channels,
        "target": facts.target,
        **measured,
        **forms,
    }


def budgets(solved: Solved, axis: Axis, points: int) -> list[Budget]:
    """Return evenly spaced budgets from the model as it is down to the smallest there is."""
    which = 0 if axis == "params" else 1
    if solved.forms is not None:
        menus = [solved.forms.priced(costs) for costs in solved.forms.costs]
        dense: Sequence[int] = menus[0].dense
        smallest: Sequence[int] = min((smallest_totals(menu, which) for menu in menus), key=lambda totals: totals[which])
    else:
        assert solved.table is not None, "an exploration searches, it follows no rule"
        dense, smallest = solved.table.totals([0] * len(solved.table.rows)), solved.table.totals(solved.table.smallest())
    if smallest[which] == dense[which] or (axis == "macs" and solved.network.count.macs is None):
        raise BudgetError(
            "there is nothing to explore: no choice changes the MACs.", hint="explore --by params, or give --input-shape"
        )
    amounts = [round(amount) for amount in np.linspace(dense[which], smallest[which], points)]
    return [Budget(max_params=amount) if axis == "params" else Budget(max_macs=amount) for amount in amounts]
