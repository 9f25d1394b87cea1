"""Where each tensor's channels lie, so that few Gathers are needed.

Each atom of the channel spaces gets one storage order. A grouped Conv needs its groups side by side in what it reads and
writes; where the storage has them so, in one sequence on both sides, no Gather is needed. Everything else, dense Convs,
BatchNormalizations and so on, follows any order by having its constants permuted.

A narrowed atom is placed like one that never had more channels than it keeps. Told in the model's own numbers, its order is
then a selection, which slices and permutes in one.
"""

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import onnx

from onnx_gconv.model.axes import Axis
from onnx_gconv.model.channelwise import ELEMENTWISE, PER_CHANNEL, UNARY
from onnx_gconv.model.shapes import Shape
from onnx_gconv.model.spaces import Spaces, consumers
from onnx_gconv.model.widths import kept_places
from onnx_gconv.solve.grouping import Order, inverse

Partition = tuple[int, ...]  # the group of each channel
Node = tuple[int, Partition, int]  # atom, partition, group


@dataclass(frozen=True)
class BlockConv:
    """A Conv with groups, planned or as it is: what it reads and writes, and in which groups."""

    name: str  # the tensor it writes
    label: str
    source: str  # the tensor it reads
    groups: int
    in_order: Order
    out_order: Order
    gathered: tuple[str, ...] = ()  # "in", "out": the sides that the storage is not for, since the plan wants a Gather there


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
    """Everything the rewriting needs: how tensors are written and read, the grouped Convs, and the Gathers.

    Orders name channels by the model's own numbers, those that stay and no others.
    """

    produced: Mapping[str, Order]  # by tensor: the order in which its producer writes it; missing: as in the model
    read: Mapping[str, Order]  # by tensor: the order in which its readers find it
    convs: tuple[Placed, ...]
    gathers: tuple[GatherAt, ...]
    spaces: Spaces  # of the model: the constants and numbers that follow
    narrowed: Mapping[str, int]  # by tensor that loses channels: how long its channel axis becomes
    inside: tuple["Placement", ...] = ()  # of the bodies with layers that a plan changes

    @property
    def all_gathers(self) -> tuple[GatherAt, ...]:
        """The Gathers, those in bodies too."""
        return sum((each.gathers for each in self.inside), self.gathers)


def place(
    model: onnx.ModelProto,
    spaces: Spaces,
    convs: Sequence[BlockConv],
    shapes: Mapping[str, Shape],
    keeps: Mapping[int, Order],
) -> Placement:
    """Return a placement: storage orders chosen by the size of the Gathers they save, the rest gathered.

    `keeps` are the channels that narrowed atoms keep.
    """
    left = {name: kept_places(spaces, name, keeps) for name in spaces.axes}
    lengths = {name: len(left[name]) * spaces.axes[name].repeat for name in left if name in shapes}
    narrowed = {name: length for name, length in lengths.items() if length != shapes[name][1]}
    drafted = _place(
        model,
        replace(spaces, sizes={**spaces.sizes, **{atom: len(keep) for atom, keep in keeps.items()}}),
        [replace(conv, in_order=_among_themselves(conv.in_order), out_order=_among_themselves(conv.out_order)) for conv in convs],
        {**shapes, **{name: (shapes[name][0], length, *shapes[name][2:]) for name, length in narrowed.items()}},
    )

    def told(name: str, order: Order) -> Order:
        return left[name][order] if name in left else order

    def changed(orders: Mapping[str, Order]) -> dict[str, Order]:
        all_told = {name: told(name, order) for name, order in orders.items()}
        return {name: order for name, order in all_told.items() if name in narrowed or not is_identity(order)}

    return replace(
        drafted,
        produced=changed(drafted.produced),
        read=changed(drafted.read),
        convs=tuple(
            Placed(placed.conv, told(placed.conv.source, placed.in_order), told(placed.conv.name, placed.out_order))
            for placed in drafted.convs
        ),
        spaces=spaces,
        narrowed=narrowed,
    )


def is_identity(order: Order) -> bool:
    """Return whether an order leaves every channel where it is; of all channels, that is."""
    return bool((order == np.arange(len(order))).all())


def _among_themselves(order: Order) -> Order:
    """Return an order of some channels as one of these alone, numbered from 0."""
    return inverse(np.argsort(order))


def _place(model: onnx.ModelProto, spaces: Spaces, convs: Sequence[BlockConv], shapes: Mapping[str, Shape]) -> Placement:
    """Return a placement of channels that all stay."""
    spaces = _with_joined(spaces, convs)
    storage = Storage(spaces, convs, shapes)
    read = {name: storage.order(axis.atoms) for name, axis in spaces.axes.items()}
    produced = dict(read)
    readers = consumers(model)
    ends = {value.name for value in model.graph.output}
    placed: list[Placed] = []
    gathers: list[GatherAt] = []
    for conv in convs:
        before = read.get(conv.source, np.arange(len(conv.in_order)))
        after = read.get(conv.name, np.arange(len(conv.out_order)))
        ins = None if "in" in conv.gathered else _sequence(before, conv.in_order, conv.groups)
        outs = None if "out" in conv.gathered else _sequence(after, conv.out_order, conv.groups)
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
        if ins is None and not np.array_equal(before, in_order):
            why = storage.reason(conv.source, conv.label)
            gathers.append(GatherAt(conv.source, conv.name, inverse(before)[in_order], conv.label, f"reads: {why}"))
        if outs is None and not np.array_equal(after, out_order):
            path = sink(conv.name, spaces, readers, ends, shapes)
            produced |= dict.fromkeys(path, out_order)
            read |= dict.fromkeys(path[:-1], out_order)
            why = storage.reason(conv.name, conv.label)
            gathers.append(GatherAt(path[-1], "", inverse(out_order)[after], conv.label, f"writes: {why}"))
    for junction in spaces.junctions:
        inner = read[junction.source] + junction.before
        length = junction.before + len(inner) + junction.after
        made = np.concatenate([np.arange(junction.before), inner, np.arange(length - junction.after, length)])
        if not np.array_equal(made, read[junction.tensor]):
            why = "writes: a wider stream begins here"
            gathers.append(GatherAt(junction.tensor, "", inverse(made)[read[junction.tensor]], junction.tensor, why))
    return Placement(produced, read, tuple(placed), tuple(gathers), spaces, {})


def _with_joined(spaces: Spaces, convs: Sequence[BlockConv]) -> Spaces:
    """Return the spaces with one atom, pinned, in place of several whose channels a Conv reads joined, group after group.

    These stay where they are then, so that the Conv needs no Gather for what it reads.
    """
    axes, sizes, pinned = dict(spaces.axes), dict(spaces.sizes), set(spaces.pinned)
    for conv in convs:
        axis = spaces.axes.get(conv.source)
        if axis is None or axis.repeat > 1 or len(axis.atoms) < 2 or "in" in conv.gathered:
            continue
        partition = _partition(conv.in_order, conv.groups)
        if partition == tuple(sorted(partition)):
            pinned.update(axis.atoms)
            if axes[conv.source] is axis:
                axes[conv.source] = Axis((-1 - len(sizes),))
                sizes[axes[conv.source].atoms[0]] = len(partition)
                pinned.update(axes[conv.source].atoms)
    return replace(spaces, axes=axes, sizes=sizes, pinned=frozenset(pinned))


class Storage:
    """One order for each atom: the groups of as many Convs as possible side by side.

    Of the partitions that Convs ask for, an atom takes the one whose Gathers would be largest, and every other one that
    refines it or that it refines: nested partitions can all lie side by side.
    """

    def __init__(self, spaces: Spaces, convs: Sequence[BlockConv], shapes: Mapping[str, Shape]) -> None:
        self._spaces = spaces
        self._owners: dict[int, str] = {}
        saved: dict[int, dict[Partition, int]] = defaultdict(lambda: defaultdict(int))
        for conv in convs:
            for side, tensor, order in (("in", conv.source, conv.in_order), ("out", conv.name, conv.out_order)):
                atom = only_atom(spaces, tensor)
                if atom is not None and side not in conv.gathered:
                    partition = _partition(order, conv.groups)
                    self._owners.setdefault(atom, conv.label)
                    saved[atom][partition] += _elements(shapes, tensor)
        self._chains = {atom: self._chain(atom, demands) for atom, demands in saved.items()}
        towers = self._towers(convs, shapes)
        self._orders = {atom: self._order(atom, towers) for atom in self._chains if atom not in spaces.pinned}

    def _chain(self, atom: int, demands: Mapping[Partition, int]) -> list[Partition]:
        """Return the partitions that an atom satisfies, from coarse to fine."""
        chain: list[Partition] = []
        for partition in sorted(demands, key=lambda partition: -demands[partition]):
            # A pinned atom has its channels in place, so its groups must lie side by side as they are.
            fits = partition == tuple(sorted(partition)) if atom in self._spaces.pinned else True
            if fits and all(_nested(partition, other) for other in chain):
                chain.append(partition)
        return sorted(chain, key=max)

    def _towers(self, convs: Sequence[BlockConv], shapes: Mapping[str, Shape]) -> "Towers":
        """Return the groups of all atoms, joined where a Conv leads from one into the other.

        A Conv reads and writes its groups in one sequence, so what it joins must have one place everywhere.
        """
        towers = Towers(self._chains, self._spaces.pinned)
        for conv in sorted(convs, key=lambda conv: -_elements(shapes, conv.source) - _elements(shapes, conv.name)):
            source, result = only_atom(self._spaces, conv.source), only_atom(self._spaces, conv.name)
            if source is None or result is None or conv.gathered:
                continue
            ends = [(source, _partition(conv.in_order, conv.groups)), (result, _partition(conv.out_order, conv.groups))]
            if all(partition in self._chains[atom] for atom, partition in ends):
                first = [order.reshape(conv.groups, -1)[:, 0] for order in (conv.in_order, conv.out_order)]
                towers.join(ends[0], ends[1], list(zip(first[0].tolist(), first[1].tolist(), strict=True)))
        return towers

    def _order(self, atom: int, towers: "Towers") -> Order:
        chain = self._chains[atom]
        places = {partition: towers.places(atom, partition) for partition in chain}
        channels = range(self._spaces.sizes[atom])
        return np.array(sorted(channels, key=lambda c: (*(places[partition][partition[c]] for partition in chain), c)))

    def order(self, atoms: tuple[int, ...]) -> Order:
        """Return the order of an axis."""
        pieces, start = [], 0
        for atom in atoms:
            size = self._spaces.sizes[atom]
            pieces.append(self._orders.get(atom, np.arange(size)) + start)
            start += size
        return np.concatenate(pieces) if pieces else np.arange(0)

    def reason(self, tensor: str, label: str) -> str:
        """Return why the storage of a tensor does not suit a Conv."""
        axis = self._spaces.axes.get(tensor)
        if axis is None:
            return "the shape of the tensor is not known"
        if any(atom in self._spaces.pinned for atom in axis.atoms):
            return "the order of these channels is pinned by a graph input or output or an op that is not channel-wise"
        if len(axis.atoms) > 1:
            return f"its groups mix channels of {len(axis.atoms)} tensors that are joined here"
        owner = self._owners.get(axis.atoms[0])
        if owner is None:
            return "the plan leaves these channels where they are"
        return f"the channels are in the order that {owner!r} wants" if owner != label else "its two sides differ in sequence"


def only_atom(spaces: Spaces, tensor: str) -> int | None:
    """Return the atom whose channels a tensor has, each once and no others."""
    axis = spaces.axes.get(tensor)
    return axis.atoms[0] if axis is not None and axis.repeat == 1 and len(axis.atoms) == 1 else None


class Towers:
    """Groups of different atoms that Convs join, as classes with one place in every atom (union-find).

    A node is (atom, partition, group). Two groups of one partition can never be in one class.
    """

    def __init__(self, chains: Mapping[int, list[Partition]], pinned: Collection[int]) -> None:
        self._chains = chains
        self._pinned = pinned
        self._parent: dict[Node, Node] = {}
        self._members: dict[Node, list[Node]] = {}
        for atom, chain in chains.items():
            for partition in chain:
                for group in range(max(partition) + 1):
                    node = atom, partition, group
                    self._parent[node], self._members[node] = node, [node]

    def join(self, one: tuple[int, Partition], other: tuple[int, Partition], pairs: Sequence[tuple[int, int]]) -> None:
        """Join the groups that these pairs of channels are in, and the coarser groups around them; nothing on a conflict."""
        for left in self._chains[one[0]]:
            right = next((p for p in self._chains[other[0]] if max(p) == max(left)), None)
            if right is not None and max(left) <= max(one[1]):
                self._join_all({((one[0], left, left[a]), (other[0], right, right[b])) for a, b in pairs})

    def _join_all(self, pairs: "set[tuple[Node, Node]]") -> None:
        for a, b in pairs:
            kinds = {node[:2] for node in self._members[self._find(a)]}
            if self._find(a) != self._find(b) and any(node[:2] in kinds for node in self._members[self._find(b)]):
                return
        for a, b in sorted(pairs):
            one, two = self._find(a), self._find(b)
            if one != two:
                self._parent[two] = one
                self._members[one] += self._members.pop(two)

    def places(self, atom: int, partition: Partition) -> list[tuple[int, ...]]:
        """Return a sort key for each group: the same for joined groups, wherever they are."""
        return [self._place((atom, partition, group)) for group in range(max(partition) + 1)]

    def _place(self, node: "Node") -> tuple[int, ...]:
        members = self._members[self._find(node)]
        above = [coarser for member in members if (coarser := self._around(member)) is not None]
        # Where the groups, or finer ones inside them, lie in a pinned atom; or else where they lie in the first of all.
        else_at = self._pinned_inside.get(self._find(node), min(members)[2])
        own = next((group for atom, _, group in members if atom in self._pinned), else_at)
        return (*(self._place(min(above)) if above else ()), own)

    @cached_property
    def _pinned_inside(self) -> dict[Node, int]:
        """Where one of the finer groups inside lies in a pinned atom, by class."""
        pinned = {self._find(node): node[2] for node in self._parent if node[0] in self._pinned}
        found: dict[Node, int] = {}
        for node in sorted(self._parent, key=lambda node: -max(node[1])) if pinned else ():  # fine groups first
            root, coarser = self._find(node), self._around(node)
            if coarser is not None and (root in pinned or root in found):
                found.setdefault(self._find(coarser), pinned[root] if root in pinned else found[root])
        return found

    def _around(self, node: "Node") -> "Node | None":
        """Return the next coarser group of the same atom that contains this one."""
        atom, partition, group = node
        chain = self._chains[atom]
        index = chain.index(partition)
        return (atom, chain[index - 1], chain[index - 1][partition.index(group)]) if index else None

    def _find(self, node: "Node") -> "Node":
        while self._parent[node] != node:
            node = self._parent[node]
        return node


def _partition(order: Order, groups: int) -> Partition:
    """Return the group of each channel, groups numbered by their smallest channel: equal partitions are equal tuples."""
    labels = np.empty(len(order), dtype=np.int64)
    labels[order] = np.repeat(np.arange(groups), len(order) // groups)
    _, first = np.unique(labels, return_index=True)
    number = np.empty(groups, dtype=np.int64)
    number[np.argsort(first)] = np.arange(groups)
    return tuple(number[labels].tolist())


def _nested(one: Partition, other: Partition) -> bool:
    """Return whether one partition refines the other, or the other way round."""
    pairs = len(set(zip(one, other, strict=True)))
    return pairs == max(max(one), max(other)) + 1


def _sequence(stored: Order, order: Order, groups: int) -> Order | None:
    """Return which group lies at each place of a stored axis, or None if some group is not side by side."""
    group_of = np.empty(len(order), dtype=np.int64)
    group_of[order] = np.repeat(np.arange(groups), len(order) // groups)
    blocks = group_of[stored].reshape(groups, -1)
    return blocks[:, 0] if (blocks == blocks[:, :1]).all() else None


def _elements(shapes: Mapping[str, Shape], tensor: str) -> int:
    return int(np.prod(shapes.get(tensor, (1,))))


def sink(
    tensor: str, spaces: Spaces, readers: Mapping[str, list[onnx.NodeProto]], ends: set[str], shapes: Mapping[str, Shape]
) -> list[str]:
    """Return the tensors from a Conv's output down to where its Gather costs least: behind the activation, say."""
    path = [tensor]
    # A tensor of unknown shape has no axis: nobody can say what of the next node would have to follow.
    while tensor in spaces.axes and tensor not in ends and len(readers.get(tensor, [])) == 1:
        (node,) = readers[tensor]
        result = node.output[0]
        others = [name for name in node.input if name in spaces.axes and name != tensor]
        follows = node.op_type in UNARY or node.op_type in PER_CHANNEL or node.op_type in ELEMENTWISE
        # Without an axis nothing is tied to the order: weights for each channel would stay as they are.
        if not follows or others or tensor not in spaces.axes or spaces.axes.get(result) != spaces.axes[tensor]:
            break
        if list(node.input).count(tensor) != 1 or _elements(shapes, result) > _elements(shapes, tensor):
            break
        path.append(result)
        tensor = result
    return path
