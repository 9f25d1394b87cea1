"""Orders, and groupings: G with a partition of the inputs and one of the outputs into G equal parts.

One convention for orders everywhere: `order[new] = old`, as in `numpy.take` and ONNX Gather.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from onnx_gconv.solve.importance import Matrix

Order = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Grouping:
    """Group g has the inputs `in_order[g*Cin/G : (g+1)*Cin/G]`, and its outputs likewise; always canonical."""

    groups: int
    in_order: Order
    out_order: Order
    kept: float  # share of the importance inside the groups


def inverse(order: Order) -> Order:
    """Return the order that undoes `order`."""
    result = np.empty_like(order)
    result[order] = np.arange(len(order))
    return result


def canonical(groups: int, in_order: Order, out_order: Order) -> tuple[Order, Order]:
    """Return the same groups written the one agreed way, so that equal groupings give equal plans.

    Channels ascend within a group, and groups follow their smallest input channel.
    """
    inputs = np.sort(in_order.reshape(groups, -1), axis=1)
    outputs = np.sort(out_order.reshape(groups, -1), axis=1)
    by_first_input = np.argsort(inputs[:, 0])
    return inputs[by_first_input].reshape(-1), outputs[by_first_input].reshape(-1)


def block_diagonal_sum(matrix: Matrix, groups: int, in_order: Order, out_order: Order) -> float:
    """Return the importance inside the groups."""
    inputs, outputs = in_order.reshape(groups, -1), out_order.reshape(groups, -1)
    return float(matrix[outputs[:, :, None], inputs[:, None, :]].sum())


def kept_share(matrix: Matrix, groups: int, in_order: Order, out_order: Order) -> float:
    """Return the share of the importance inside the groups; all of it when there is none to lose."""
    total = float(matrix.sum())
    return block_diagonal_sum(matrix, groups, in_order, out_order) / total if total > 0 else 1.0


def keep_mask(groups: int, in_order: Order, out_order: Order, *, shape: tuple[int, int] | None = None) -> NDArray[np.bool_]:
    """Return the (Cout, Cin) mask that holds exactly where output o and input i fall in the same group.

    Orders may be of some of the channels only: of how many in all, `shape` says. The others are in no group.
    """
    outs, ins = shape or (len(out_order), len(in_order))
    in_group, out_group = np.full(ins, -1), np.full(outs, -2)
    in_group[in_order] = np.repeat(np.arange(groups), len(in_order) // groups)
    out_group[out_order] = np.repeat(np.arange(groups), len(out_order) // groups)
    return np.asarray(out_group[:, None] == in_group[None, :])
