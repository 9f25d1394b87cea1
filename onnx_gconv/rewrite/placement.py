"""Where each tensor's channels lie, so that few Gathers are needed.

Each atom of the channel spaces gets one storage order. A grouped Conv needs its groups side by side in what it reads and
writes; where the storage has them so, in one sequence on both sides, no Gather is needed. Everything else, dense Convs,
BatchNormalizations and so on, follows any order by having its constants permuted.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx

from onnx_gconv.model.shapes import Shape
from onnx_gconv.model.spaces import ELEMENTWISE, PER_CHANNEL, UNARY, Spaces, Tie, consumers
from onnx_gconv.solve.grouping import Order, inverse


@dataclass(frozen=True)
class BlockConv:
    """A Conv with groups, planned or as it is: what it reads and writes, and in which groups."""

    name: str  # the tensor it writes
    label: str
    source: str  # the tensor it reads
    groups: int
    in_order: Order
    out_order: Order


@dataclass(frozen=True)
class Placed:
    """The orders in which a grouped Conv really reads and writes its channels."""

    conv: BlockConv
    in_order: Order
    out_order: Order


@dataclass(frozen=True)
class GatherAt:
    """A Gather of a tensor: before one reader (`conv`), or behind the tensor's producer, for all readers (conv "")."""

    tensor: str
    conv: str
    indices: Order
    layer: str  # the label of the Conv that needs it
    reason: str


@dataclass(frozen=True)
class Placement:
    """Everything the rewriting needs: how tensors are written and read, the grouped Convs, and the Gathers."""

    produced: Mapping[str, Order]  # by tensor: the order in which its producer writes it; missing: as in the model
    read: Mapping[str, Order]  # by tensor: the order in which its readers find it
    convs: tuple[Placed, ...]
    gathers: tuple[GatherAt, ...]
    ties: tuple[Tie, ...]  # the constants that follow these orders


def place(model: onnx.ModelProto, spaces: Spaces, convs: Sequence[BlockConv], shapes: Mapping[str, Shape]) -> Placement:
    """Return a placement: storage orders chosen by the size of the Gathers they save, the rest gathered."""
    storage, owners = _storage(spaces, convs, shapes)
    read = {name: _axis_order(axis.atoms, spaces, storage) for name, axis in spaces.axes.items()}
    produced = dict(read)
    readers = consumers(model)
    ends = {value.name for value in model.graph.output}
    placed: list[Placed] = []
    gathers: list[GatherAt] = []
    for conv in convs:
        before = read.get(conv.source, np.arange(len(conv.in_order)))
        after = read.get(conv.name, np.arange(len(conv.out_order)))
        ins, outs = _sequence(before, conv.in_order, conv.groups), _sequence(after, conv.out_order, conv.groups)
        if ins is not None and outs is not None and not np.array_equal(ins, outs):
            # Each side alone would do, but not both: gather the smaller tensor.
            if _elements(shapes, conv.source) < _elements(shapes, conv.name):
                ins = None
            else:
                outs = None
        sequence = ins if ins is not None else outs if outs is not None else np.arange(conv.groups)
        in_order = before if ins is not None else conv.in_order.reshape(conv.groups, -1)[sequence].reshape(-1)
        out_order = after if outs is not None else conv.out_order.reshape(conv.groups, -1)[sequence].reshape(-1)
        placed.append(Placed(conv, in_order, out_order))
        if ins is None:
            why = _reason(conv.source, spaces, owners, conv.label)
            gathers.append(GatherAt(conv.source, conv.name, inverse(before)[in_order], conv.label, f"reads: {why}"))
        if outs is None:
            last = _sink(conv.name, spaces, readers, ends, shapes)
            for tensor in last:
                produced[tensor] = out_order
                read[tensor] = out_order
            read[last[-1]] = after
            why = _reason(conv.name, spaces, owners, conv.label)
            gathers.append(GatherAt(last[-1], "", inverse(out_order)[after], conv.label, f"writes: {why}"))
    return Placement(produced, read, tuple(placed), tuple(gathers), spaces.ties)


def _storage(spaces: Spaces, convs: Sequence[BlockConv], shapes: Mapping[str, Shape]) -> tuple[dict[int, Order], dict[int, str]]:
    """Return the order of each atom that grouped Convs ask for, and who asked.

    Demands that can hold together are the same order; of several, the one whose Gathers would be largest wins.
    """
    saved: dict[int, dict[bytes, int]] = defaultdict(lambda: defaultdict(int))
    orders: dict[tuple[int, bytes], Order] = {}
    asked: dict[tuple[int, bytes], str] = {}
    for conv in convs:
        for tensor, order in ((conv.source, conv.in_order), (conv.name, conv.out_order)):
            axis = spaces.axes.get(tensor)
            if axis is None or axis.repeat != 1:
                continue
            for atom, local in _per_atom(axis.atoms, spaces, order, conv.groups):
                if atom not in spaces.pinned:
                    key = local.tobytes()
                    saved[atom][key] += _elements(shapes, tensor)
                    orders.setdefault((atom, key), local)
                    asked.setdefault((atom, key), conv.label)
    best = {atom: max(demands, key=lambda key, d=demands: d[key]) for atom, demands in saved.items()}  # type: ignore[misc]
    return {atom: orders[atom, key] for atom, key in best.items()}, {atom: asked[atom, key] for atom, key in best.items()}


def _per_atom(atoms: tuple[int, ...], spaces: Spaces, order: Order, groups: int) -> list[tuple[int, Order]]:
    """Return what an order asks of each atom; nothing if a group has channels of two atoms."""
    group_of = np.empty(len(order), dtype=np.int64)
    group_of[order] = np.repeat(np.arange(groups), len(order) // groups)
    result, start = [], 0
    for atom in atoms:
        end = start + spaces.sizes[atom]
        inside = order[(order >= start) & (order < end)] - start
        if np.isin(group_of[start:end], np.delete(group_of, np.s_[start:end])).any():
            return []
        result.append((atom, inside))
        start = end
    return result


def _axis_order(atoms: tuple[int, ...], spaces: Spaces, storage: Mapping[int, Order]) -> Order:
    pieces, start = [], 0
    for atom in atoms:
        size = spaces.sizes[atom]
        pieces.append(storage.get(atom, np.arange(size)) + start)
        start += size
    return np.concatenate(pieces) if pieces else np.arange(0)


def _sequence(stored: Order, order: Order, groups: int) -> Order | None:
    """Return which group lies at each place of a stored axis, or None if some group is not side by side."""
    group_of = np.empty(len(order), dtype=np.int64)
    group_of[order] = np.repeat(np.arange(groups), len(order) // groups)
    blocks = group_of[stored].reshape(groups, -1)
    return blocks[:, 0] if (blocks == blocks[:, :1]).all() else None


def _elements(shapes: Mapping[str, Shape], tensor: str) -> int:
    return int(np.prod(shapes.get(tensor, (1,))))


def _sink(
    tensor: str, spaces: Spaces, readers: Mapping[str, list[onnx.NodeProto]], ends: set[str], shapes: Mapping[str, Shape]
) -> list[str]:
    """Return the tensors from a Conv's output down to where its Gather costs least: behind the activation, say."""
    path = [tensor]
    while tensor not in ends and len(readers.get(tensor, [])) == 1:
        (node,) = readers[tensor]
        result = node.output[0]
        others = [name for name in node.input if name in spaces.axes and name != tensor]
        follows = node.op_type in UNARY or node.op_type in PER_CHANNEL or node.op_type in ELEMENTWISE
        if not follows or others or spaces.axes.get(result) != spaces.axes.get(tensor):
            break
        if list(node.input).count(tensor) != 1 or _elements(shapes, result) > _elements(shapes, tensor):
            break
        path.append(result)
        tensor = result
    return path


def _reason(tensor: str, spaces: Spaces, owners: Mapping[int, str], label: str) -> str:
    axis = spaces.axes.get(tensor)
    if axis is None:
        return "the shape of the tensor is not known"
    if any(atom in spaces.pinned for atom in axis.atoms):
        return "the order of these channels is pinned by a graph input or output or an op that is not channel-wise"
    if len(axis.atoms) > 1:
        return f"its groups mix channels of {len(axis.atoms)} tensors that are joined here"
    others = sorted({owners[atom] for atom in axis.atoms if atom in owners} - {label})
    return (
        f"the channels are in the order that {others[0]!r} wants"
        if others
        else "its two sides want their groups in different sequences"
    )
