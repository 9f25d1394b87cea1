"""Pages as sessions: the commands of a page, the output it shows under them, and whether that is what they print.

A page holds console blocks, with `$ ` before each command. What stands behind `console` says how to read a block:

- `console`: the output is printed as it is shown, but for rounding errors such as 5.4e-07, which depend on the processor;
- `console near`: numbers may differ by 2 per cent of their value, and differences such as -0.28 by 2 points;
- `console varies`: numbers may differ, such as times;
- `needs-torch` and the like: left out where that module is not installed.

Lines that are or end in … are cut. A block without such a line shows all that is printed. A Python block whose first line is
`# NAME.py` is a file that the reader saves under that name. `pip` commands are not run.
"""

import importlib.util
import math
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tiny import Finished, gconv

NEAR = 0.02
NUMBER = re.compile(r"(?<!\w)[+-]\d+(?:\.\d+)?|\d+(?:\.\d+)?")  # the - of point-01 is no sign


@dataclass(frozen=True)
class Step:
    """A command, the lines shown under it, and how far their numbers may be off, as a share of their value."""

    command: str
    shown: tuple[str, ...]
    tolerance: float
    needs: frozenset[str]  # modules

    @property
    def can_run(self) -> bool:
        return all(importlib.util.find_spec(module) for module in self.needs)


@dataclass(frozen=True)
class SavedFile:
    """A file that the page asks to save."""

    name: str
    text: str


def session(page: str) -> Iterator[Step | SavedFile]:
    """Yield what a reader of the page does, one after another."""
    for info, block in re.findall(r"^```(console\b[^\n]*|python)\n(.*?)^```$", page, flags=re.MULTILINE | re.DOTALL):
        language, *words = info.split()
        if language == "python":
            if saved := re.match(r"# (\w+\.py)\n", block):
                yield SavedFile(saved[1], block)
            continue
        needs = frozenset(word.removeprefix("needs-") for word in words if word.startswith("needs-"))
        left = {word for word in words if not word.startswith("needs-")}
        tolerance = {frozenset(): 0.0, frozenset({"near"}): NEAR, frozenset({"varies"}): math.inf}[frozenset(left)]
        for command, shown in re.findall(r"^\$ (.*(?:\\\n.*)*)\n((?:(?!\$ ).*\n)*)", block, flags=re.MULTILINE):
            if not command.startswith("pip "):
                yield Step(command.replace("\\\n", " "), tuple(shown.splitlines()), tolerance, needs)


def run(command: str) -> Finished:
    """Run one command: ours in this process, any other in a shell that finds this Python first."""
    program, *arguments = shlex.split(command)
    if program == "onnx-gconv":
        return gconv(*arguments)
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    done = subprocess.run(["bash", "-c", command], env={**os.environ, "PATH": path}, capture_output=True, text=True, check=False)
    return Finished(done.returncode, done.stdout, done.stderr)


def difference(step: Step, done: Finished) -> str | None:
    """Return in what the page differs from what was printed, None if in nothing."""
    printed = [comparable(line) for line in (done.out + done.err).splitlines() if line.strip()]
    shown = [comparable(line) for line in step.shown if line.strip()]
    for line in shown:
        if not any(_same(line, other, step.tolerance) for other in printed):
            return f"the page shows a line that is not printed: {line}"
    if not any(line.endswith("…") for line in shown) and len(shown) != len(printed):
        return f"the page shows {len(shown)} lines, {len(printed)} are printed"
    return None


def comparable(line: str) -> str:
    """Return the line without padding, and with # for rounding errors: what is below 1e-04."""
    line = re.sub(r"([━─])\1+", r"\1", " ".join(line.split()))
    return re.sub(r"\d\.\d+e-(0[5-9]|[1-9]\d)", "#", line)


def _same(shown: str, printed: str, tolerance: float) -> bool:
    """Return whether a shown line is a printed one; one that ends in … may go on."""
    if shown.endswith("…"):
        return printed.startswith(shown.removesuffix("…").rstrip())
    if not tolerance:
        return shown == printed
    if NUMBER.sub("#", shown) != NUMBER.sub("#", printed):
        return False
    pairs = zip(NUMBER.findall(shown), NUMBER.findall(printed), strict=True)
    return all(_close(a, b, tolerance) for a, b in pairs)


def _close(shown: str, printed: str, tolerance: float) -> bool:
    points = 100 * tolerance if shown[0] in "+-" else 0.0
    return tolerance == math.inf or math.isclose(float(shown), float(printed), rel_tol=tolerance, abs_tol=points)
