"""An exploration on its way: which points there are to make, and each of them as it is made."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from onnx_gconv.exploration.engine import TRIES, Engine
from onnx_gconv.exploration.folder import Folder
from onnx_gconv.exploration.goal import Brief, Goal, goal_names
from onnx_gconv.exploration.point import Point
from onnx_gconv.search.budget import Budget


@dataclass(frozen=True)
class Failure:
    """A point that could not be made, and why."""

    name: str
    message: str
    hint: str
    details: str = ""  # the traceback of a bug


def goals_for(budgets: Sequence[Budget]) -> list[Goal]:
    """Return a goal for each budget, named point-00 and so on."""
    return [Goal(name, budget) for name, budget in zip(goal_names(len(budgets)), budgets, strict=True)]


def make_points(brief: Brief, goals: Sequence[Goal], folder: Folder, engine: Engine) -> Iterator[Point | Failure]:
    """Yield those points that the folder has already, then each other one when it is made and kept there.

    A point that fails stops no other: they have nothing to do with each other.
    """
    todo = []
    for goal in goals:
        point = folder.finished(goal)
        if point is None:
            todo.append(goal)
        else:
            yield point
    try:
        for goal, lost in engine(brief, todo, folder.part) if todo else ():
            if lost is not None:
                message = f"the process that made it died {TRIES} times ({lost.how})."
                yield Failure(goal.name, message, "perhaps memory ran out: try fewer --jobs")
                continue
            kept = folder.keep(goal)
            yield kept if isinstance(kept, Point) else Failure(goal.name, kept["error"], kept["hint"], kept.get("traceback", ""))
    finally:
        folder.drop_parts()
