"""What layers take on a device, as a search needs it, and what is predicted for a choice."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol


class ConvTime(Protocol):
    """What one Conv takes with fewer channels, or with groups."""

    def nanoseconds(self, ins: int, outs: int, groups: int) -> int:
        """Return the time with so many input channels, output channels and groups."""


def behind(name: str) -> str:
    """Return what the 1x1 Conv goes by that a Conv of low rank has behind it."""
    return f"{name} behind"


@dataclass(frozen=True)
class LayerTimes:
    """What each Conv takes with so many channels and groups, and the whole model as it is.

    A prediction is `dense_ms` and, for each Conv that changes, the difference of its two times; one that goes takes none. Other
    nodes, where their times are known, take a share of them as large as that of the channels that are left.
    """

    runner: str
    host: str | None  # None for this machine
    dense_ms: float  # in the precision that was timed
    layers: Mapping[str, ConvTime]  # by the Conv's output tensor, depthwise Convs among them
    others_ns: Mapping[str, float] = field(default_factory=dict)  # by the first output
    float_ms: float | None = None  # the model as it was given, where another precision was timed

    @property
    def before_ms(self) -> float:
        """What the model takes as it was given: shares of a budget are of it."""
        return self.dense_ms if self.float_ms is None else self.float_ms

    def covers(self, name: str) -> bool:
        """Return whether there are times of this Conv."""
        return name in self.layers

    def covers_ranks(self, name: str) -> bool:
        """Return whether there are times of the two Convs that this one may become."""
        return name in self.layers and behind(name) in self.layers

    def layer_ns(self, name: str, ins: int, outs: int, groups: int) -> int:
        """Return the time of this Conv with so many input channels, output channels and groups; a depthwise one has all equal."""
        return self.layers[name].nanoseconds(ins, outs, groups)


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
