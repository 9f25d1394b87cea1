"""What runs goals: here or on a cluster, each in a process that may die."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from onnx_gconv.exploration.goal import Brief, Goal

TRIES = 3  # that a goal has when the process that does it dies


@dataclass(frozen=True)
class Lost:
    """A goal whose process died every time, and how."""

    how: str


Parts = Callable[[Goal], Path]  # makes an empty folder for the files of a goal
# Yields each goal as it is done, its files and its outcome in its part; in any order.
Engine = Callable[[Brief, Sequence[Goal], Parts], Iterator[tuple[Goal, Lost | None]]]
