"""What is to be made: a goal for each point, and the brief that all share. Both travel to other processes."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from onnx_gconv.model.shapes import Shape
from onnx_gconv.pipeline.planned import Solved
from onnx_gconv.pipeline.settings import Settings
from onnx_gconv.pipeline.trial import GroupCosts
from onnx_gconv.search.budget import Budget


@dataclass(frozen=True)
class Goal:
    """One point to be made."""

    name: str  # point-03
    budget: Budget


def goal_names(count: int) -> list[str]:
    """Return the names of so many goals, point-00 and so on; in the order of their names they are in that of their budgets."""
    width = max(2, len(str(count - 1)))
    return [f"point-{number:0{width}}" for number in range(count)]


@dataclass(frozen=True)
class Tuning:
    """How to fine-tune; `settings` are those of the training, by name."""

    data: str
    settings: Mapping[str, Any]
    device: str


@dataclass(frozen=True, eq=False)
class Brief:
    """What the goals of one exploration have in common."""

    model: Path
    data_files: tuple[Path, ...]  # beside it, with weights
    given_shapes: Mapping[str, Shape]
    settings: Settings
    solved: Solved
    costs: GroupCosts | None  # what the layers cost by the calibration samples, where the search asks
    tuning: Tuning | None

    @property
    def calib(self) -> str | None:
        return _named(self.settings.calib)

    @property
    def eval(self) -> str | None:
        return _named(self.settings.eval)

    @property
    def data(self) -> list[str]:
        """The data that a goal needs, as the user named it."""
        named = (self.calib, self.eval, self.tuning and self.tuning.data)
        return [text for text in named if text]

    def elsewhere(self, model: Path, data: Mapping[str, str]) -> "Brief":
        """Return the same with its files at other places: `data` says where, by the user's names."""
        calib, judging, tuning = self.calib, self.eval, self.tuning
        return replace(
            self,
            model=model,
            data_files=tuple(model.parent / path.relative_to(self.model.parent) for path in self.data_files),
            settings=replace(self.settings, calib=calib and data[calib], eval=judging and data[judging]),
            tuning=tuning and replace(tuning, data=data[tuning.data]),
        )


def _named(data: object) -> str | None:
    assert data is None or isinstance(data, str), "an exploration takes data by name, for other processes read it"
    return data
