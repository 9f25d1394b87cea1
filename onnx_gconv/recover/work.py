"""Calibration batches shared out to threads."""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from onnx_gconv.recover.normal import Rows, centred, join, of_inputs

Made = TypeVar("Made")
HELD_BYTES = 2**28  # rows of one site that are held in memory; more are made anew whenever they are needed


@dataclass(frozen=True)
class Work:
    """A pool of threads, and the batches in runs: NumPy and ONNX Runtime leave the interpreter free while they compute."""

    pool: ThreadPoolExecutor
    jobs: int  # threads of the pool
    shares: Sequence[range]
    memory_share: float = 1.0  # of what may be held

    def positions(self, wanted: int) -> int:
        """Return how many positions to look at in a batch, to look at so many in all."""
        return -(-wanted // sum(map(len, self.shares)))

    def rows(self, make: Callable[[int], Rows]) -> "SharedRows":
        """Return the rows of each share of the batches, `make` being how to get those of a batch."""
        return SharedRows(self, make)


class SharedRows:
    """The rows of one site, made when first asked for and held as far as they fit."""

    def __init__(self, work: Work, make: Callable[[int], Rows]) -> None:
        self._work = work
        self._make = make
        self._held: dict[int, Rows] = {}
        self._bytes = 0
        self._columns: NDArray[np.int64] | None = None

    def of_inputs(self, columns: NDArray[np.int64]) -> "SharedRows":
        """Return these rows with some of the inputs only."""
        self._columns = columns
        self._held = {start: of_inputs(rows, columns) for start, rows in self._held.items()}
        self._bytes = sum(rows.nbytes for rows in self._held.values())
        return self

    def forget(self) -> None:
        """Let go of what is held: the rows are made anew should they be asked for again."""
        self._held, self._bytes = {}, 0

    def map(self, function: Callable[[Rows], Made]) -> Iterator[Made]:
        """Return what the function makes of each share, in their order, so that sums have always the same bits."""
        shares = iter(self._work.shares)

        def begin(count: int) -> list[Future[Made]]:
            return [self._work.pool.submit(lambda share: function(self._get(share)), share) for share in islice(shares, count)]

        # No more at once than there are threads and one: what is made may be large, and nobody may have asked for it yet.
        begun = begin(self._work.jobs + 1)
        while begun:
            yield begun.pop(0).result()
            begun += begin(1)

    def _get(self, share: range) -> Rows:
        held = self._held.get(share.start)
        if held is not None:
            return held
        rows = centred(join([self._make(batch) for batch in share]))
        if self._columns is not None:
            rows = of_inputs(rows, self._columns)
        if self._bytes + rows.nbytes <= self._work.memory_share * HELD_BYTES:
            self._bytes += rows.nbytes
            self._held[share.start] = rows
        return rows
