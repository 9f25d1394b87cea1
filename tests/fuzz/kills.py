"""Kill `compress` at placed and random moments, and look at what is left: results are whole, and folders go with the next run.

    python -m tests.fuzz.kills --runs 100 --seed 0

A run is a child of this process, forked when everything is imported, that writes one of two known results over the other one.
Placed moments are before every operation on the folder of the results, each in its turn; random ones are by the clock. Every third
run has a second writer for the same files, which nobody kills. After each, a reader looks, then another command writes there.
"""

import argparse
import hashlib
import json
import os
import random
import signal
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import numpy as np
from tiny import conv_net, save_external

import onnx_gconv
from onnx_gconv.cli.main import main as gconv
from onnx_gconv.staging import PREFIX

FOLDER = Path("out")
OPERATIONS = frozenset(
    {"os.rename", "os.link", "os.mkdir", "os.rmdir", "os.remove", "os.listdir", "os.scandir", "open", "tempfile.mkdtemp"}
)
PARTS = ("o.onnx", "o.onnx.data", "o.int8.onnx", "o.int8.onnx.data", "o.plan.json", "o.report.json")
COMMANDS = {groups: f"compress m.onnx --groups {groups} --calib c.npz --precision int8 -o out/o.onnx" for groups in (2, 4)}
OTHER = "plan m.onnx --groups 2 -o out/other.json"  # what the next command writes there
Result = tuple[str, ...]  # the hashes of its files
Work = str | Callable[[], int]  # a command, or anything that returns an exit code


@dataclass(frozen=True)
class Blow:
    """A signal to the run, and when: before that operation on the folder, or after so many seconds."""

    number: int = signal.SIGKILL
    operation: int | None = None
    seconds: float | None = None

    def earlier(self) -> "Blow":
        if self.seconds is not None:
            return replace(self, seconds=0.7 * self.seconds)
        return replace(self, operation=(self.operation or 1) - 1)


@dataclass
class Score:
    """What was seen."""

    whole: int = 0
    was: Counter[str] = field(default_factory=Counter)  # which result was there, or how a run ended
    problems: list[str] = field(default_factory=list)
    left_by_killed: int = 0  # folders, before the next run
    left: int = 0  # and after it


@contextmanager
def arena() -> Iterator[None]:
    """Be in a new folder with a model whose weights are apart, and samples."""
    here = Path.cwd()
    with tempfile.TemporaryDirectory(prefix="kills-") as name:
        os.chdir(name)
        try:
            save_external(conv_net(), Path("m.onnx"))
            np.savez("c.npz", image=np.random.default_rng(0).standard_normal((4, 3, 8, 8)).astype(np.float32))
            FOLDER.mkdir()
            yield
        finally:
            os.chdir(here)


def started(work: Work, blow: Blow | None = None, *, log: str = "log") -> int:
    """Start the work in a child process, which may hit itself on the way, and return its id."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of threads: what they hold, no child of ours asks for
        child = os.fork()
    if child:
        return child
    code = 70  # our own failure
    try:
        handle = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(handle, 1)
        os.dup2(handle, 2)
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
        if blow is not None and blow.operation is not None:
            _watch(blow)
        code = work() if callable(work) else _command(work)
        sys.stderr.flush()
    finally:
        os._exit(code)
    return 0


def _command(line: str) -> int:
    sys.argv = ["onnx-gconv", *line.split()]
    return gconv()


def _watch(blow: Blow) -> None:
    """Hit this process before the n-th operation on the folder; with 0, write down how many there are."""
    seen, place = 0, str(FOLDER)

    def hook(event: str, arguments: tuple[object, ...]) -> None:
        nonlocal seen
        if event == "fcntl.flock" or (event in OPERATIONS and any(place in str(each) for each in arguments)):
            seen += 1
            if seen == blow.operation:
                os.kill(os.getpid(), blow.number)
            elif not blow.operation:
                os.pwrite(1, f"{seen:6}".encode(), 10**6)

    sys.addaudithook(hook)


def ended(child: int) -> int:
    """Return the exit code of a child, below zero for the signal that killed it."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def run(work: Work, blow: Blow | None = None) -> int:
    """Do the work in a child process and return its exit code."""
    child = started(work, blow)
    if blow is not None and blow.seconds is not None:
        time.sleep(blow.seconds)
        os.kill(child, blow.number)
    return ended(child)


def operations(work: Work) -> int:
    """Return how many operations on the folder this is."""
    run(work, Blow(operation=0))
    return int(Path("log").read_bytes()[10**6 :])


def result() -> Result:
    """Return what there is now, as hashes; a report without its seconds."""
    hashes = []
    for name in PARTS:
        path = FOLDER / name
        content = path.read_bytes() if path.exists() else b"none"
        if name.endswith(".report.json") and path.exists():
            content = json.dumps({**json.loads(content), "seconds": None}).encode()
        hashes.append(hashlib.sha256(content).hexdigest()[:12])
    return tuple(hashes)


def folders() -> list[str]:
    return sorted(path.name for path in FOLDER.iterdir() if path.name.startswith(PREFIX))


def known() -> dict[Result, str]:
    """Return both results by their hashes."""
    found = {}
    for groups, command in COMMANDS.items():
        assert run(command) == 0, Path("log").read_text()
        found[result()] = f"groups {groups}"
    assert len(found) == len(COMMANDS)
    return found


def killed(blows: Sequence[Blow], *, rivals: bool) -> Score:
    """Return what came of a run for each blow."""
    score, names = Score(), known()
    for index, blow in enumerate(blows):
        old, new = (2, 4) if index % 2 else (4, 2)
        code = 0
        while code == 0:  # it was over before the blow fell
            assert run(COMMANDS[old]) == 0
            rival = started(COMMANDS[old], log="rival") if rivals and index % 3 == 2 else None
            code = run(COMMANDS[new], blow)
            if rival is not None and ended(rival) != 0:
                score.problems.append(f"{blow}: the other writer failed: {Path('rival').read_text()}")
            blow = blow.earlier()
        score.left_by_killed += len(folders())
        onnx_gconv.read_plan(FOLDER / "o.plan.json")  # any reader
        seen = names.get(result())
        score.was[f"{'killed' if code == -signal.SIGKILL else f'exit {code}'}, {seen or 'MIXED'}"] += 1
        if code not in (-signal.SIGKILL, 130, 143):
            score.problems.append(f"{blow}: exit {code}: {Path('log').read_text(errors='replace')[:500]}")
        if seen is None:
            score.problems.append(f"{blow}: mixed: {result()}")
        elif code in (130, 143):
            lies = _lies(code, is_written=seen == f"groups {new}", has_rival=rival is not None)
            score.problems += [f"{blow}: {lie}" for lie in lies]
        assert run(OTHER) == 0
        score.left += len(folders())
        score.whole += seen is not None and names.get(result()) == seen
    return score


def _lies(code: int, *, is_written: bool, has_rival: bool) -> list[str]:
    """Return what is wrong in what a run said that was told to stop."""
    said = Path("log").read_text(errors="replace")
    lines = [line for line in said.splitlines() if not line.startswith(("note: ", "warning: "))]
    how = {130: "interrupted", 143: "terminated"}[code]
    whole = f"error: {how}; written: "
    if not lines or "Traceback" in said or not lines[-1].startswith(f"error: {how}; "):
        return [f"it said {said!r}"]
    if not has_rival and lines[-1].startswith(whole) != is_written:
        return [f"it said {lines[-1]!r}, and the result is {'there' if is_written else 'not there'}"]
    return [f"it left {folders()}"] if folders() and not has_rival else []


def blows(runs: int, count: int, seed: int, numbers: Sequence[int] = (signal.SIGKILL,)) -> list[Blow]:
    """Return so many: three in four placed, one after the other over all operations, and one at random."""
    rng = random.Random(seed)
    placed = 3 * runs // 4
    first = [Blow(rng.choice(numbers), operation=1 + round(i * (count - 1) / max(1, placed - 1))) for i in range(placed)]
    return first + [Blow(rng.choice(numbers), seconds=rng.uniform(0, 1.2)) for _ in range(runs - placed)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--polite", action="store_true", help="SIGINT and SIGTERM in place of SIGKILL")
    args = parser.parse_args()
    numbers = (signal.SIGINT, signal.SIGTERM) if args.polite else (signal.SIGKILL,)
    began = time.monotonic()
    with arena():
        known()
        count = operations(COMMANDS[2])
        score = killed(blows(args.runs, count, args.seed, numbers), rivals=not args.polite)
    print(f"{args.runs} runs over {count} operations on the folder, {time.monotonic() - began:.0f} s")
    for what, times in sorted(score.was.items()):
        print(f"  {what}: {times}")
    print(f"whole results: {score.whole} of {args.runs}")
    print(f"folders that the killed left: {score.left_by_killed}, and after the next run: {score.left}")
    print(*score.problems, sep="\n")
    return 1 if score.problems or score.whole < args.runs or score.left else 0


if __name__ == "__main__":
    sys.exit(main())
