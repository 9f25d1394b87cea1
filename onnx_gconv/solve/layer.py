"""Solving one layer: the grouping for each wanted number of groups."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import numpy as np

from onnx_gconv.solve.best import BestSolver
from onnx_gconv.solve.grouping import Grouping, Order, block_diagonal_sum, canonical
from onnx_gconv.solve.importance import Matrix
from onnx_gconv.solve.sort import sort_channels

SolverName = Literal["best", "paper", "plain"]


@dataclass(frozen=True)
class Solver:
    """Which algorithm orders the channels, and how hard it tries.

    `best` alternates exact assignments, `paper` sorts, `plain` leaves the channels where they are (the paper's baseline).
    """

    name: SolverName = "best"
    sort_rounds: int = 10  # N_S, for `paper`
    effort: int = 1  # 0 to 3, for `best`
    seed: int = 0

    def solve(self, matrix: Matrix, groups: int, *, existing: int = 1) -> Grouping:
        """Return the grouping of a layer into `groups`."""
        return self.solve_each(matrix, [groups], existing=existing)[groups]

    def solve_each(self, matrix: Matrix, numbers: Iterable[int], *, existing: int = 1) -> dict[int, Grouping]:
        """Return the grouping for each number of groups.

        A Conv that has `existing` groups already is solved inside each of them: `matrix` has then only the columns
        of each output's own group, (Cout, Cin / existing).
        """
        outs, ins = matrix.shape[0] // existing, matrix.shape[1]
        blocks = [matrix[block * outs : (block + 1) * outs] for block in range(existing)]
        solvers = [BestSolver(block, effort=self.effort, seed=self.seed) for block in blocks] if self.name == "best" else []
        total = float(matrix.sum())
        result = {}
        for groups in sorted(numbers):  # ascending: few groups are the start for many
            in_orders, out_orders, kept = [], [], 0.0
            for number, block in enumerate(blocks):
                if solvers:
                    pair = solvers[number].solve(groups // existing)
                    in_order, out_order = pair.ins.reshape(-1), pair.outs.reshape(-1)
                else:
                    in_order, out_order = self._sorted(block, groups // existing)
                kept += block_diagonal_sum(block, groups // existing, in_order, out_order)
                in_orders.append(in_order + number * ins)
                out_orders.append(out_order + number * outs)
            orders = canonical(groups, np.concatenate(in_orders), np.concatenate(out_orders))
            result[groups] = Grouping(groups, *orders, kept / total if total > 0 else 1.0)
        return result

    def _sorted(self, matrix: Matrix, groups: int) -> tuple[Order, Order]:
        return sort_channels(matrix, groups, rounds=self.sort_rounds if self.name == "paper" else 0)
