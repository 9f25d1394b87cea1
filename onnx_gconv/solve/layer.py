"""Solving one layer: the grouping for each wanted number of groups."""

from dataclasses import dataclass
from typing import Literal

import numpy as np

from onnx_gconv.solve.grouping import Grouping, block_diagonal_sum, canonical
from onnx_gconv.solve.importance import Matrix
from onnx_gconv.solve.sort import sort_channels

SolverName = Literal["paper", "plain"]


@dataclass(frozen=True)
class Solver:
    """Which algorithm orders the channels. `plain` is the paper's baseline: it leaves them where they are."""

    name: SolverName = "paper"
    sort_rounds: int = 10  # N_S

    def solve(self, matrix: Matrix, groups: int, *, existing: int = 1) -> Grouping:
        """Return the grouping of a layer into `groups`.

        A Conv that has `existing` groups already is solved inside each of them: `matrix` has then only the columns
        of each output's own group, (Cout, Cin / existing).
        """
        rounds = self.sort_rounds if self.name == "paper" else 0
        outs, ins = matrix.shape[0] // existing, matrix.shape[1]
        in_orders, out_orders, kept = [], [], 0.0
        for block in range(existing):
            part = matrix[block * outs : (block + 1) * outs]
            in_order, out_order = sort_channels(part, groups // existing, rounds=rounds)
            kept += block_diagonal_sum(part, groups // existing, in_order, out_order)
            in_orders.append(in_order + block * ins)
            out_orders.append(out_order + block * outs)
        total = float(matrix.sum())
        in_order, out_order = canonical(groups, np.concatenate(in_orders), np.concatenate(out_orders))
        return Grouping(groups, in_order, out_order, kept / total if total > 0 else 1.0)
