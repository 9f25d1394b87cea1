"""What layers take on a device, as a search needs it, and what is predicted for a choice."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class LayerLatencies:
    """The milliseconds of each layer with each measured number of groups, and of the whole model as it is."""

    runner: str
    host: str | None  # None for this machine
    dense_ms: float
    layer_ms: Mapping[str, Mapping[int, float]]  # by layer name and groups; the present number of groups is among them

    def saved_ms(self, name: str, existing: int, groups: int) -> float:
        """Return how much less the layer takes with this number of groups.

        Only differences are used: what a layer measured alone has in addition, such as a change of layout, is in both.
        """
        return self.layer_ms[name][existing] - self.layer_ms[name][groups]


@dataclass(frozen=True)
class Prediction:
    """What the model takes before and after, by the times of its layers and the Gathers that are written."""

    runner: str
    before_ms: float
    after_ms: float
    gathers_ms: float  # part of after_ms

    @property
    def ratio(self) -> float:
        return self.after_ms / self.before_ms

    def as_dict(self) -> dict[str, object]:
        """Return it as report.json has it."""
        return {
            "runner": self.runner,
            "before_ms": round(self.before_ms, 4),
            "after_ms": round(self.after_ms, 4),
            "gathers_ms": round(self.gathers_ms, 4),
            "ratio": round(self.ratio, 4),
        }
