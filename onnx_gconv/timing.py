"""Latency on this machine's CPU: models interleaved in one process, on thread CPU time, so that other load does not count."""

import statistics
import time
from collections.abc import Sequence

import onnx
import onnxruntime as ort

from onnx_gconv.runtime import Feeds, session

WARM_UP = 3


def time_models(models: Sequence[onnx.ModelProto], feeds: Feeds, *, seconds: float) -> list[float]:
    """Return the median milliseconds of each model on the same inputs, with one thread.

    All models take turns for about this many seconds. With one thread ONNX Runtime works in the calling thread, whose CPU
    time is counted: a wall clock gave impossible ratios under load.
    """
    sessions = [session(model, threads=1) for model in models]
    for active in sessions:
        for _ in range(WARM_UP):
            active.run(None, feeds)
    seen: list[list[float]] = [[] for _ in models]
    until = time.perf_counter() + seconds
    while time.perf_counter() < until or len(seen[0]) < 5:
        for active, times in zip(sessions, seen, strict=True):
            times.append(_run_ms(active, feeds))
    return [statistics.median(times) for times in seen]


def _run_ms(active: ort.InferenceSession, feeds: Feeds) -> float:
    started = time.thread_time_ns()
    active.run(None, feeds)
    return (time.thread_time_ns() - started) / 1e6
