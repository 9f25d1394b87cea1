"""The folder of an exploration is its memory: what is finished is there, and is not done again."""

import json
import os
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from onnx_gconv.errors import OutputError
from onnx_gconv.exploration.doing import OUTCOME
from onnx_gconv.exploration.goal import Goal, goal_names
from onnx_gconv.exploration.point import Point
from onnx_gconv.files import make_folder, replaced, write_text
from onnx_gconv.staging import staged

OURS = re.compile(r"point-\d+\.(plan\.json|result\.json|(tuned\.)?onnx(\.data)?|tuned\.metrics\.jsonl)")
MEMORY = frozenset(
    {"explore.json", "explore.png", "explore.svg", "solutions.jsonl"}
    | {"costs.json", "width_costs.json", "eliminations.json", "rank_errors.json"}
)
UNFINISHED = re.compile(r"\.point-\d+")
Dependencies = Mapping[str, object]


class Folder:
    """Results of points, each with the settings that it was made with."""

    def __init__(self, path: Path, settings: Dependencies) -> None:
        self.path = path
        self._settings = settings

    def finished(self, goal: Goal) -> Point | None:
        """Return the point if it was made with the same settings and its files are there."""
        found = _read(self._result(goal))
        if found is None or found.get("settings") != self._settings_of(goal):
            return None
        point = Point(**found["point"])
        files = (file for file in self._files(point) if not file.endswith(".data"))  # which a small model has not
        return point if all((self.path / file).exists() for file in files) else None

    def part(self, goal: Goal) -> Path:
        """Return an empty hidden folder for the files of a goal that is about to be done."""
        part = self.path / f".{goal.name}"
        shutil.rmtree(part, ignore_errors=True)
        make_folder(part)
        return part

    def keep(self, goal: Goal) -> Point | Mapping[str, str]:
        """Move what a goal has left in its part into the folder and return its point; or the error that it left instead."""
        part = self.path / f".{goal.name}"
        outcome: dict[str, Any] = json.loads((part / OUTCOME).read_text(encoding="utf-8"))
        if "error" in outcome:
            return outcome
        # The result goes first and comes last: whoever sees it sees the files that it is about.
        self._result(goal).unlink(missing_ok=True)
        (part / OUTCOME).unlink()
        with staged(self.path) as staging:
            for file in part.iterdir():
                os.replace(file, staging / file.name)
        result = {"format": 1, "settings": self._settings_of(goal), **outcome}
        write_text(self._result(goal), json.dumps(result, indent=1, ensure_ascii=False) + "\n")
        shutil.rmtree(part, ignore_errors=True)
        return Point(**outcome["point"])

    def tidy(self, points: Sequence[Point]) -> None:
        """Remove what earlier explorations have left that these points do not have."""
        kept = {file for point in points for file in self._files(point)}
        for path in self.path.iterdir():
            if OURS.fullmatch(path.name) and path.name not in kept:
                path.unlink()

    def drop_parts(self) -> None:
        """Remove what unfinished goals have left."""
        for path in list(self.path.iterdir()):
            if UNFINISHED.fullmatch(path.name):
                shutil.rmtree(path, ignore_errors=True)

    def _files(self, point: Point) -> list[str]:
        tuned = point.finetuned or {}
        models = [file for file in (point.model, tuned.get("model")) if file]
        results = [f"{point.name}.result.json"] if models else []
        return [point.plan, *results, *models, *(f"{file}.data" for file in models), *filter(None, [tuned.get("metrics")])]

    def remembered(
        self, file: str, key: str, settings: Dependencies, measure: Callable[[], list[dict[str, object]]]
    ) -> list[dict[str, Any]]:
        """Return the entries of a file, under this key, measured now unless they are known from before for the same settings."""
        path = self.path / file
        found = _read(path)
        if found is None or found.get("settings") != _plain(settings):
            entries = ",\n  ".join(json.dumps(entry, ensure_ascii=False) for entry in measure())  # one a line
            write_text(path, f'{{"format": 1,\n "settings": {json.dumps(settings)},\n "{key}": [\n  {entries}]}}\n')
            found = _read(path)
            assert found is not None, "it was written just now"
        return list(found[key])

    def _result(self, goal: Goal) -> Path:
        return self.path / f"{goal.name}.result.json"

    def _settings_of(self, goal: Goal) -> object:
        return _plain({"budget": goal.budget.as_dict(), **self._settings})


def require_apart(folder: Path, sources: Sequence[Path]) -> None:
    """Refuse a folder in which an exploration would replace or remove what it is made from: one of its own points, say."""
    for path in sorted(folder.iterdir()):
        if (OURS.fullmatch(path.name) or path.name in MEMORY) and replaced(path, sources) is not None:
            raise OutputError(
                f"'{path}' is a file that this exploration is made from, and would replace.", hint="choose another folder with -o"
            )


def require_kept(folder: Path, points: int, *, has_models: bool, has_tuned: bool) -> None:
    """Refuse a folder with models that an exploration of so many points would remove and not replace: they took long to make."""
    ends = [".onnx"] * has_models + [".tuned.onnx"] * has_tuned
    ours = {name + end for name in goal_names(points) for end in ends}
    lost = sorted(path.name for path in folder.glob("point-*.onnx") if OURS.fullmatch(path.name) and path.name not in ours)
    if lost:
        listed = ", ".join(lost[:3]) + (f" and {len(lost) - 3} more" if len(lost) > 3 else "")
        raise OutputError(
            f"'{folder}' has models of another exploration, which this one would remove: {listed}.",
            hint="choose another folder with -o, or delete these files",
        )


def _plain(value: object) -> object:
    """Return the value as it comes back from a file: tuples are lists there."""
    return json.loads(json.dumps(value))


def _read(path: Path) -> dict[str, Any] | None:
    """Return what is in a file of ours, None where there is none; one that was damaged is no result either."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return None
    except OSError as error:
        raise OutputError(f"cannot read '{path}': {error.strerror}.", hint="choose another folder with -o") from error
    return found if isinstance(found, dict) and found.get("format") == 1 else None
