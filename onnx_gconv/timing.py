"""Latency on this machine's CPU: models interleaved in one process, on thread CPU time, so that other load does not count."""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import onnx
import onnxruntime as ort

from onnx_gconv.model.listed import delisted
from onnx_gconv.runtime import Feeds, session

WARM_UP = 3
LEAST_RUNS = 7


@dataclass(frozen=True)
class Latency:
    """What a run of the model took before and after."""

    runner: str
    before_ms: float
    after_ms: float

    @property
    def ratio(self) -> float:
        return self.after_ms / self.before_ms

    def as_dict(self) -> dict[str, object]:
        """Return it as report.json has it."""
        return {
            "runner": self.runner,
            "before_ms": round(self.before_ms, 4),
            "after_ms": round(self.after_ms, 4),
            "ratio": round(self.ratio, 4),
        }


def compare_latency(
    dense: onnx.ModelProto, result: onnx.ModelProto, feeds: Feeds, *, seconds: float = 2.0, threads: int = 1
) -> Latency:
    """Return how long both take on this CPU."""
    before, after = time_models([dense, result], feeds, seconds=seconds, threads=threads)
    return Latency("ort-cpu", before, after)


def time_models(models: Sequence[onnx.ModelProto], feeds: Feeds, *, seconds: float, threads: int = 1) -> list[float]:
    """Return the median milliseconds of each model on the same inputs.

    All models take turns for about this many seconds of CPU time, so that a busy machine does not mean fewer runs. With one
    thread ONNX Runtime works in the calling thread, whose CPU time is counted: a wall clock gave impossible ratios under load.
    With more threads there is nothing else to go by.
    """
    clock_ns = time.thread_time_ns if threads == 1 else time.perf_counter_ns
    # A fair start for all: a model whose initialisers are listed as inputs is slow for a reason of its own.
    sessions = [session(delisted(model), threads=threads) for model in models]
    for active in sessions:
        for _ in range(WARM_UP):
            active.run(None, feeds)
    seen: list[list[float]] = [[] for _ in models]
    until = time.thread_time() + seconds
    while time.thread_time() < until or len(seen[0]) < LEAST_RUNS:
        for active, times in zip(sessions, seen, strict=True):
            times.append(_run_ms(active, feeds, clock_ns))
    return [statistics.median(times) for times in seen]


def _run_ms(active: ort.InferenceSession, feeds: Feeds, clock_ns: Callable[[], int]) -> float:
    started = clock_ns()
    active.run(None, feeds)
    return (clock_ns() - started) / 1e6
