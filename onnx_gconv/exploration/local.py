"""Goals on this machine: a process for each, so many at a time."""

import errno
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from multiprocessing.connection import wait
from multiprocessing.context import SpawnProcess
from pathlib import Path

from onnx_gconv.cores import starting_workers
from onnx_gconv.exploration.doing import OUTCOME, make
from onnx_gconv.exploration.engine import TRIES, Lost, Parts
from onnx_gconv.exploration.goal import Brief, Goal
from onnx_gconv.staging import scratch

BRIEF = "brief.pickle"
ERRNO = 100  # in an exit code: what comes on top is the error of the operating system that ended the process


def run_here(brief: Brief, goals: Sequence[Goal], parts: Parts, *, cores: int) -> Iterator[tuple[Goal, Lost | None]]:
    """Yield each goal when it is done, or lost for good because its process died again and again.

    A process for each goal and not a pool: a pool breaks as a whole when one of its processes dies.
    """
    at_once = max(1, min(cores, len(goals)))
    threads = max(1, cores // at_once)
    queue = list(reversed(goals))
    tries = dict.fromkeys((goal.name for goal in goals), 0)
    running: dict[int, tuple[SpawnProcess, Goal, Path]] = {}
    stack = ExitStack()
    folder = stack.enter_context(scratch())  # of all processes: one that is killed cannot tidy up
    try:
        while queue or running:
            while queue and len(running) < at_once:
                goal = queue.pop()
                part = parts(goal)
                process = _started(brief, goal, part, folder, threads)
                tries[goal.name] += 1
                running[process.sentinel] = process, goal, part
            for sentinel in wait(list(running)):
                assert isinstance(sentinel, int)
                process, goal, part = running.pop(sentinel)
                process.join()
                failed = (process.exitcode or 0) - ERRNO
                if failed > 0:  # the next one would not fare better
                    raise OSError(failed, os.strerror(failed))
                if (part / OUTCOME).exists():
                    yield goal, None
                elif tries[goal.name] < TRIES:
                    queue.append(goal)
                else:
                    yield goal, Lost(_how(process.exitcode))
    finally:
        for process, _, _ in running.values():
            process.kill()
        for process, _, _ in running.values():
            process.join()
        stack.close()


def _started(brief: Brief, goal: Goal, part: Path, temporary: Path, threads: int) -> SpawnProcess:
    # By file: a child that dies before it has read a long message from its pipe would leave its parent writing for ever.
    (part / BRIEF).write_bytes(pickle.dumps(brief))
    # Spawned, not forked: ONNX Runtime's threads may be running.
    args = (goal, part, temporary, threads)
    process = multiprocessing.get_context("spawn").Process(target=_do, args=args, name=goal.name, daemon=True)
    with starting_workers():
        process.start()
    return process


def _do(goal: Goal, part: Path, temporary: Path, threads: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the main process's, which ends its workers
    threading.Thread(target=_end_with_parent, daemon=True).start()
    os.dup2(sys.stderr.fileno(), 1)  # stdout carries the result of the command
    tempfile.tempdir = str(temporary)
    brief: Brief = pickle.loads((part / BRIEF).read_bytes())
    (part / BRIEF).unlink()
    try:
        make(brief, goal, part, threads=threads)
    except OSError as error:  # no room even to say what went wrong
        os._exit(ERRNO + (error.errno or errno.EIO))


def _end_with_parent() -> None:
    """Wait until the main process is gone, killed perhaps, and go too: nobody would take the result."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _how(exit_code: int | None) -> str:
    return f"signal {-exit_code}" if exit_code is not None and exit_code < 0 else f"exit code {exit_code}"
