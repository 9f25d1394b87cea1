"""What one Conv takes at any width, by what it takes at some.

The time of a Conv is nearly bilinear in its two widths, so a few corners and straight lines between them tell the rest.
"""

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from onnx_gconv.search.latency import ConvTime

Point = tuple[int, int]  # input channels, output channels
Straight = tuple[int, int, float]  # two places on an axis, and how far from the first to the second


@dataclass(frozen=True)
class DenseTime:
    """A Conv without groups, or one whose groups stay as they are: its nanoseconds at every corner of its widths.

    A width that is no multiple of `step` takes as long as the next one: kernels that are not full take as long as full ones. Below
    the smallest corner nothing more is saved, since nobody has measured that. Times never fall when a width grows: where a corner
    was measured slower than a larger one, it counts as fast as that, so that the largest, which is the Conv as it is, stays as
    measured.
    """

    corners: Mapping[Point, float]  # every pair of the widths of both sides
    step: int

    def nanoseconds(self, ins: int, outs: int, groups: int) -> int:
        """Return the time at these widths; `groups` are what they are."""
        return round(self.at(ins, outs))

    def at(self, ins: int, outs: int) -> float:
        """Return the time at these widths, in nanoseconds."""
        across, along = self._axes
        low_in, high_in, in_share = _between(across, _full(ins, self.step))
        low_out, high_out, out_share = _between(along, _full(outs, self.step))
        rising = self._rising
        low = _mix(rising[low_in, low_out], rising[high_in, low_out], in_share)
        high = _mix(rising[low_in, high_out], rising[high_in, high_out], in_share)
        return _mix(low, high, out_share)

    @cached_property
    def _axes(self) -> tuple[list[int], list[int]]:
        return sorted({ins for ins, _ in self.corners}), sorted({outs for _, outs in self.corners})

    @cached_property
    def _rising(self) -> dict[Point, float]:
        across, along = self._axes
        found: dict[Point, float] = {}
        for i, ins in reversed(list(enumerate(across))):
            for j, outs in reversed(list(enumerate(along))):
                larger = [found[across[i + 1], outs]] if i + 1 < len(across) else []
                larger += [found[ins, along[j + 1]]] if j + 1 < len(along) else []
                found[ins, outs] = min([self.corners[ins, outs], *larger])
        return found


@dataclass(frozen=True)
class DepthwiseTime:
    """A depthwise Conv: its nanoseconds at some numbers of input channels, which are its groups."""

    widths: Mapping[int, float]
    step: int

    def nanoseconds(self, ins: int, outs: int, groups: int) -> int:
        """Return the time at this width; outputs and groups follow the inputs."""
        return self._line.nanoseconds(ins, 1, 1)

    @cached_property
    def _line(self) -> DenseTime:
        return DenseTime({(ins, 1): time for ins, time in self.widths.items()}, self.step)


@dataclass(frozen=True)
class GroupedTime:
    """A Conv that may get groups: what it takes without, and at some widths with each number of groups.

    Between the widths that were measured with these groups, the time follows that of the dense Conv. A number of groups that was
    not measured counts as the next smaller one that was.
    """

    dense: DenseTime
    groups: int  # that it has
    grouped: Mapping[int, Mapping[Point, float]]  # nanoseconds by groups and widths

    def nanoseconds(self, ins: int, outs: int, groups: int) -> int:
        """Return the time at these widths with so many groups."""
        measured = max((number for number in self.grouped if self.groups < number <= groups), default=self.groups)
        dense = self.dense.at(ins, outs)
        return round(dense if measured == self.groups else _along(self._lines[measured], dense))

    @cached_property
    def _lines(self) -> dict[int, list[tuple[float, float]]]:
        """By groups: the times of the dense Conv, ascending, and those with groups at the same widths, never falling."""
        lines: dict[int, list[tuple[float, float]]] = {}
        for number, points in self.grouped.items():
            rows = sorted(((self.dense.at(*point), time) for point, time in points.items()), reverse=True)
            least = math.inf
            line: list[tuple[float, float]] = []
            for dense, time in rows:
                least = min(least, time)
                if not line or dense < line[-1][0]:
                    line.append((dense, least))
            lines[number] = [(0.0, 0.0), *reversed(line)]
        return lines


@dataclass(frozen=True)
class InModel:
    """A Conv beside all others of its model, where it takes another share of the time than alone: caches are shared."""

    alone: ConvTime
    share: float

    def nanoseconds(self, ins: int, outs: int, groups: int) -> int:
        """Return the time at these widths with so many groups."""
        return round(self.share * self.alone.nanoseconds(ins, outs, groups))


def _full(width: int, step: int) -> int:
    return math.ceil(width / step) * step


def _between(axis: Sequence[int], width: int) -> Straight:
    """Return the two neighbours on the axis between which a width lies; beyond an end, that end twice."""
    if width <= axis[0]:
        return axis[0], axis[0], 0.0
    if width >= axis[-1]:
        return axis[-1], axis[-1], 0.0
    place = bisect_left(axis, width)
    low, high = axis[place - 1], axis[place]
    return low, high, (width - low) / (high - low)


def _mix(low: float, high: float, share: float) -> float:
    # Where both are the same, so is the result, to the last bit; never beyond either of them.
    return min(high, low + share * (high - low)) if low <= high else low + share * (high - low)


def _along(line: Sequence[tuple[float, float]], dense: float) -> float:
    """Return the time on a line through points; beyond its end, its last part goes on in proportion."""
    for (low, low_time), (high, high_time) in pairwise(line):
        if dense <= high:
            return low_time + (high_time - low_time) * (dense - low) / (high - low)
    return line[-1][1] * dense / line[-1][0]
