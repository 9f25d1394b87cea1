"""All cases through workers, and the figures."""

import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from .cases import Outcome

WALL_SECONDS = 300
ROOT = Path(__file__).parent.parent.parent


@dataclass
class Figures:
    """What came of all cases."""

    cases: int = 0
    accepted: int = 0  # commands with exit code 0
    refused: int = 0  # commands with exit code 1
    compared: int = 0
    wrong: list[tuple[str, str]] = field(default_factory=list)  # case, and what

    def add(self, outcome: Outcome) -> None:
        self.cases += 1
        self.accepted += outcome.codes.count(0)
        self.refused += outcome.codes.count(1)
        self.compared += outcome.compared
        self.wrong += [(f"{outcome.case} ({outcome.what})", what) for what in outcome.wrong]

    def __str__(self) -> str:
        lines = [f"{case}: {what}" for case, what in self.wrong]
        lines.append(
            f"{self.cases} cases, {self.accepted} commands did their job, {self.refused} refused, "
            f"{self.compared} results compared, {len(self.wrong)} wrong"
        )
        return "\n".join(lines)


def fuzz(cases: Iterable[str], *, seed: int = 0, tell: Callable[[Outcome], None] = lambda outcome: None) -> Figures:
    """Run all cases, one process at a time, and return what came of them."""
    figures = Figures()
    worker: subprocess.Popen[str] | None = None
    try:
        for case in cases:
            worker = worker or _start(seed)
            outcome = _ask(worker, case)
            if outcome is None:
                code = _end(worker)
                how = "took too long" if code in (-signal.SIGPROF, -signal.SIGKILL) else f"crashed with code {code}"
                outcome = Outcome(case, wrong=[how])
                worker = None
            figures.add(outcome)
            tell(outcome)
    finally:
        if worker is not None:
            _end(worker)
    return figures


def _end(worker: "subprocess.Popen[str]") -> int:
    """Return how a worker ended that is dying, or end it."""
    try:
        worker.communicate(timeout=10)
    except subprocess.TimeoutExpired:
        worker.kill()
        worker.communicate()
    return worker.returncode


def _start(seed: int) -> subprocess.Popen[str]:
    # The same checkout as this one, and one thread: the CPU time is that of the case.
    paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    environment = os.environ | {"PYTHONPATH": paths, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.fuzz.worker", str(seed)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment, cwd=ROOT)


def _ask(worker: "subprocess.Popen[str]", case: str) -> Outcome | None:
    """Return what came of a case, None if the worker died of it or is stuck."""
    assert worker.stdin is not None
    assert worker.stdout is not None
    print(case, file=worker.stdin, flush=True)
    ready, _, _ = select.select([worker.stdout], [], [], WALL_SECONDS)
    line = worker.stdout.readline() if ready else ""
    return Outcome(**json.loads(line)) if line else None
