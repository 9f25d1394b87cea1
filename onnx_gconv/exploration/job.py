"""What is to be done for a point: a job, and what all jobs of an exploration have in common. Both travel to other processes."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from onnx_gconv.data.preprocessing import Preprocessing
from onnx_gconv.model.shapes import Shape
from onnx_gconv.pipeline.planner import Prepared
from onnx_gconv.pipeline.trial import Costs
from onnx_gconv.search.budget import Budget


@dataclass(frozen=True)
class Goal:
    """One point to be done."""

    name: str  # point-03
    budget: Budget


def job_names(count: int) -> list[str]:
    """Return the names of so many jobs, point-00 and so on; in the order of their names they are in that of their budgets."""
    width = max(2, len(str(count - 1)))
    return [f"point-{number:0{width}}" for number in range(count)]


@dataclass(frozen=True)
class Calibrating:
    """The samples to recover on, and what the layers cost by them, where the search asks."""

    data: str
    samples: int
    costs: Costs | None


@dataclass(frozen=True)
class Tuning:
    """How to fine-tune; `settings` are those of the training, by name."""

    data: str
    settings: Mapping[str, object]
    device: str


@dataclass(frozen=True)
class Brief:
    """What the jobs of one exploration have in common."""

    model: Path
    data_files: tuple[Path, ...]  # beside it, with weights
    sha256: str
    given_shapes: Mapping[str, Shape]
    prepared: Prepared
    preprocessing: Preprocessing
    calibrating: Calibrating | None
    evaluated: str | None  # the data to evaluate on
    tuning: Tuning | None

    @property
    def data(self) -> list[str]:
        """The data that a job reads, as the user named it."""
        named = (self.calibrating and self.calibrating.data, self.evaluated, self.tuning and self.tuning.data)
        return [text for text in named if text]

    def elsewhere(self, model: Path, data: Mapping[str, str]) -> "Brief":
        """Return the same with its files at other places: `data` says where, by the user's names."""
        calibrating, tuning = self.calibrating, self.tuning
        return replace(
            self,
            model=model,
            data_files=tuple(model.parent / path.relative_to(self.model.parent) for path in self.data_files),
            calibrating=calibrating and replace(calibrating, data=data[calibrating.data]),
            evaluated=self.evaluated and data[self.evaluated],
            tuning=tuning and replace(tuning, data=data[tuning.data]),
        )
