"""The paper's layer-wise pruning: sort channels block by block (its section 3.2, supplement Algorithm 1)."""

import numpy as np

from onnx_gconv.solve.grouping import Order
from onnx_gconv.solve.importance import Matrix


def sort_channels(matrix: Matrix, groups: int, *, rounds: int) -> tuple[Order, Order]:
    """Return the input and output orders after the paper's sort with N_S = `rounds`; 0 rounds sort nothing.

    Blocks are settled from the last to the first. For block g, inputs are sorted by what they give to the block's
    outputs (sigma_c), then outputs by what they take from the block's inputs (sigma_f), ascending, so that the best end
    up in the block; channels of settled blocks are frozen. Algorithm 1 shows one round; section 3.2 (ii) asks for N_S.
    """
    out_channels, in_channels = matrix.shape
    by_input = np.ascontiguousarray(matrix.T)
    in_order, out_order = np.arange(in_channels), np.arange(out_channels)
    for g in range(groups, 0, -1):
        out_end, in_end = g * out_channels // groups, g * in_channels // groups
        out_start, in_start = (g - 1) * out_channels // groups, (g - 1) * in_channels // groups
        for _ in range(rounds):
            before = in_order[:in_end].copy(), out_order[:out_end].copy()
            # Sums over whole rows, added one by one: no pairwise summation whose rounding depends on the machine.
            sigma_c = matrix[out_order[out_start:out_end]].sum(axis=0)[in_order[:in_end]]
            # A stable sort: ties keep model order, so equal weights give one plan on every machine.
            in_order[:in_end] = in_order[:in_end][np.argsort(sigma_c, kind="stable")]
            sigma_f = by_input[in_order[in_start:in_end]].sum(axis=0)[out_order[:out_end]]
            out_order[:out_end] = out_order[:out_end][np.argsort(sigma_f, kind="stable")]
            if np.array_equal(before[0], in_order[:in_end]) and np.array_equal(before[1], out_order[:out_end]):
                break  # a round that moves nothing: no later one can
    return in_order, out_order
