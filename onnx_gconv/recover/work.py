"""Calibration batches shared out to threads."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from onnx_gconv.recover.normal import Rows, Sums, add_up, sums


@dataclass(frozen=True)
class Work:
    """A pool of threads, and the batches in runs: NumPy and ONNX Runtime leave the interpreter free while they compute."""

    pool: ThreadPoolExecutor
    shares: Sequence[range]

    def positions(self, unknowns: int, *, a_weight: int, least: int) -> int:
        """Return how many positions to look at in a batch."""
        return -(-max(least, a_weight * unknowns) // sum(map(len, self.shares)))

    def sum(self, rows: Callable[[int], Rows]) -> Sums:
        """Return the moments of the rows of every batch."""
        return add_up(self.pool.map(lambda share: sums([rows(batch) for batch in share]), self.shares))
