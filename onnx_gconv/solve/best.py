"""The better solver: good starts, alternating assignment, and escapes from local optima; as much of each as `effort` says."""

from dataclasses import dataclass

import numpy as np

from onnx_gconv.solve.alternate import Importances, Pair, alternate_many, alternate_one
from onnx_gconv.solve.grouping import block_diagonal_sum
from onnx_gconv.solve.importance import Matrix
from onnx_gconv.solve.partition import Groups
from onnx_gconv.solve.sort import sort_channels
from onnx_gconv.solve.split import random_pair, smallest_factor, split

SORT_ROUNDS = 10  # the paper's N_S


@dataclass(frozen=True)
class Effort:
    """How hard to try. Work on a matrix is bounded in entries, so that large layers get few starts and small ones many."""

    random_entries: int  # entries of all random starts together
    split_entries: int  # entries of all starts of a split together
    splits: int  # splits of the coarser grouping, on a small matrix
    paper_entries: int  # largest matrix to try the paper's sort on
    steps: int  # alternations of the last, exact refinement
    rounds: int  # cycle exchanges in each of them
    escapes: int  # perturb the best and alternate again


EFFORTS = (
    Effort(0, 2**14, 1, 0, steps=1, rounds=2, escapes=0),
    Effort(2**16, 2**15, 3, 2**18, steps=2, rounds=6, escapes=0),
    Effort(2**18, 2**17, 8, 2**24, steps=10, rounds=50, escapes=8),
    Effort(2**20, 2**19, 16, 2**24, steps=50, rounds=1000, escapes=32),
)
MOST_STARTS = 64
# From here on so few exact steps are affordable that the paper's sort, which is cheap by comparison, can be ahead.
HUGE_ENTRIES = 2**22
# Random starts need pairwise exchange to get anywhere; with more groups a split of a good coarser grouping is better.
MOST_GROUPS_AT_RANDOM = 8
# Below this, refining to the end costs nothing worth saving.
SMALL_ENTRIES = 2**14


class BestSolver:
    """Solves one matrix for several numbers of groups, each from the best coarser grouping found before."""

    def __init__(self, matrix: Matrix, *, effort: int, seed: int) -> None:
        self._matrix = matrix
        self._effort = EFFORTS[effort]
        self._seed = seed
        # Half the memory traffic; what is kept is added up in float64 at the end.
        self._entries: Importances = matrix.astype(np.float32)[None]
        self._flipped = np.ascontiguousarray(self._entries.transpose(0, 2, 1))
        self._is_small = matrix.size <= SMALL_ENTRIES
        outs, ins = matrix.shape
        self._known = {1: Pair(np.arange(ins)[None, None], np.arange(outs)[None, None])}

    def solve(self, groups: int) -> Pair:
        """Return a grouping, never worse than the paper's sort where the effort includes trying that."""
        if groups == 1:
            return self._known[1]
        rng = np.random.default_rng([self._seed, groups])
        splits = self._effort.splits if self._is_small else 1
        starts = [self._split(groups, rng) for _ in range(splits)]
        random = min(self._effort.random_entries // self._matrix.size, MOST_STARTS)
        if random and groups <= MOST_GROUPS_AT_RANDOM:
            starts.append(self._best_of(random_pair(rng, random, self._matrix.shape, groups)))
        best = max((self._refine(start) for start in starts), key=lambda found: found[1])
        if self._matrix.size <= self._effort.paper_entries or (self._effort.paper_entries and self._matrix.size >= HUGE_ENTRIES):
            best = self._or_paper(best, groups)
        for _ in range(self._effort.escapes):
            best = self._escape(best, rng)
        self._known[groups] = best[0]
        return best[0]

    def _or_paper(self, best: tuple[Pair, float], groups: int) -> tuple[Pair, float]:
        """Return the best, or what comes of the paper's sort if that alone keeps more already."""
        in_order, out_order = sort_channels(self._matrix, groups, rounds=SORT_ROUNDS)
        if block_diagonal_sum(self._matrix, groups, in_order, out_order) <= best[1]:
            return best
        return self._refine(Pair(in_order.reshape(1, groups, -1), out_order.reshape(1, groups, -1)))

    def _split(self, groups: int, rng: np.random.Generator) -> Pair:
        number = max(known for known in self._known if groups % known == 0 and known < groups)
        pair = self._known[number]
        while number < groups:
            parts = smallest_factor(groups // number)
            # A split of g groups reads 1/g of the matrix.
            starts = int(np.clip(self._effort.split_entries * number // self._matrix.size, 1, 8))
            pair = split(self._entries, pair, parts, rng, starts=starts, steps=8)
            number *= parts
        return pair

    def _best_of(self, starts: Pair) -> Pair:
        """Return the best of many starts after alternating from all of them at once."""
        batch = np.broadcast_to(self._entries, (len(starts.ins), *self._matrix.shape))
        pairs, kept = alternate_many(batch, starts, steps=20)
        return pairs.pick(int(kept.argmax()))

    def _refine(self, start: Pair) -> tuple[Pair, float]:
        steps, rounds = (20, 100) if self._is_small else (self._effort.steps, self._effort.rounds)
        return alternate_one(self._entries, self._flipped, start, steps=steps, rounds=rounds, tolerance=1e-6)

    def _escape(self, best: tuple[Pair, float], rng: np.random.Generator) -> tuple[Pair, float]:
        """Return the better of the best and a perturbed copy of it, improved anew."""
        found = self._refine(Pair(_shaken(best[0].ins, rng), _shaken(best[0].outs, rng)))
        return max(best, found, key=lambda candidate: candidate[1])


def _shaken(groups: Groups, rng: np.random.Generator) -> Groups:
    """Return a partition with a quarter of its channels dealt out anew."""
    flat = groups.reshape(-1).copy()
    places = rng.choice(len(flat), size=max(2, len(flat) // 4), replace=False)
    flat[places] = flat[rng.permutation(places)]
    return flat.reshape(groups.shape)
