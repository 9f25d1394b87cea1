"""The menu of a model: what its spaces and layers may become, and what everything costs as a function of that."""

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import onnx

from onnx_gconv.model.constants import Constants
from onnx_gconv.model.count import LEARNED_INPUTS, MULTIPLYING
from onnx_gconv.model.network import Layer, Network
from onnx_gconv.model.spaces import Spaces, Tie
from onnx_gconv.model.transposed import CONVOLVING
from onnx_gconv.model.widths import Branch, Space
from onnx_gconv.search.latency import LayerTimes, behind
from onnx_gconv.search.menu import Clock, GroupCount, Menu, Product, Side, SpaceRow, Width
from onnx_gconv.search.target import is_aligned

LEAST_STEPS = 4  # of a space, where the target leaves the step to us


@dataclass(frozen=True)
class Offer:
    """What a search may choose from: spaces with the widths that they may have, branches to drop, groups of layers."""

    spaces: tuple[Space, ...]
    widths: Mapping[str, tuple[int, ...]]  # by space, descending from all its channels; 0 where it goes with its branch
    branches: tuple[Branch, ...]
    groups: Mapping[str, tuple[int, ...]]  # by layer, the present number first
    ranks: Mapping[str, tuple[int, ...]] = field(default_factory=dict)  # by layer, descending


@dataclass(frozen=True)
class Watch:
    """What is known of times: of each Conv, and the multiple of channels below which groups are slow."""

    times: LayerTimes
    block: int

    def clock(self, name: str, *, existing: int, is_depthwise: bool) -> Clock | None:
        """Return the time of a Conv by its channels and groups, None where there is none of it.

        Groups that are no multiple of the block count as if they saved nothing: nobody has measured how slow they are.
        """
        if not self.times.covers(name):
            return None

        @functools.cache
        def nanoseconds(ins: int, outs: int, groups: int) -> int:
            if is_depthwise:
                return self.times.layer_ns(name, ins, ins, ins)
            is_fast = groups == existing or is_aligned(groups, self.block, in_channels=ins, out_channels=outs)
            return self.times.layer_ns(name, ins, outs, groups if is_fast else existing)

        return nanoseconds

    def rank_clock(self, name: str) -> Clock | None:
        """Return the time of the two Convs that one becomes, by its channels and its rank; None where there is none of it."""
        if not self.times.covers_ranks(name):
            return None

        @functools.cache
        def nanoseconds(ins: int, outs: int, rank: int) -> int:
            return self.times.layer_ns(name, ins, rank, 1) + self.times.layer_ns(behind(name), rank, outs, 1)

        return nanoseconds


def widths_of(space: Space, step: int, *, is_narrowed: bool, is_dropped: bool) -> tuple[int, ...]:
    """Return the widths that a space may have, all its channels first."""
    steps = range(space.channels - 1, 0, -1) if is_narrowed else range(0)
    return (space.channels, *(width for width in steps if width % step == 0), *((0,) if is_dropped else ()))


def ranks_of(layer: Layer, step: int) -> tuple[int, ...]:
    """Return the ranks that a layer may have, descending: those with which two Convs take less than one."""
    return () if layer.groups > 1 or layer.is_transposed else tuple(reversed(range(step, layer.break_even_rank, step)))


def menu_of(model: onnx.ModelProto, network: Network, spaces: Spaces, offer: Offer, watch: Watch | None = None) -> Menu:
    """Return the menu, every option free of cost. Parameters are counted from above: what is shared counts for each reader.

    With a watch it knows times as well. What no time is known of takes as long as before.
    """
    constants = Constants(model)
    counting = _Counting(network, spaces, offer, constants, watch)
    products = [product for node in model.graph.node for product in counting.products(node)] + counting.others()
    rows = tuple(SpaceRow(s.name, tuple(Width(channels, 0.0) for channels in offer.widths[s.name])) for s in offer.spaces)
    place = {space.name: number for number, space in enumerate(offer.spaces)}
    together = tuple(tuple(place[name] for name in branch.spaces) for branch in offer.branches if len(branch.spaces) > 1)
    menu = Menu(rows, tuple(products), together)
    params, macs, latency_ns = menu.dense
    # What is not in a product stays; shared constants may make the products count more than there is.
    fixed = max(0, network.count.params - params) + sum(counting.copied(node) for node in model.graph.node)
    rest_ns = 0 if watch is None else round(watch.times.dense_ms * 1e6) - latency_ns
    return replace(menu, fixed_params=fixed, fixed_macs=(network.count.macs or 0) - macs, fixed_latency_ns=rest_ns)


def _by_channels(rate: float) -> Clock:
    return lambda ins, outs, groups: round(rate * ins)


def _by_outputs(rate: float) -> Clock:
    return lambda ins, outs, groups: round(rate * outs)


class _Counting:
    """How the parameters and MACs of each node follow from widths and groups."""

    def __init__(self, network: Network, spaces: Spaces, offer: Offer, constants: Constants, watch: Watch | None) -> None:
        self._network, self._spaces, self._offer, self._constants, self._watch = network, spaces, offer, constants, watch
        self._layers = {layer.name: layer for layer in network.layers}
        self._place = {space.atom: number for number, space in enumerate(offer.spaces)}
        self._ties: dict[tuple[str, int], list[Tie]] = {}
        for tie in spaces.ties:
            self._ties.setdefault((tie.node, tie.slot), []).append(tie)

    def products(self, node: onnx.NodeProto) -> Sequence[Product]:
        """Return what a node has that may change."""
        return [product for slot in LEARNED_INPUTS.get(node.op_type, ()) if (product := self._product(node, slot)) is not None]

    def copied(self, node: onnx.NodeProto) -> int:
        """Return how many numbers of a node are its own once something that it works on is narrowed, and shared until then.

        Fitting and training want a bias that is its own, also of a Conv that only reads the space.
        """
        if not any(atom in self._place for name in (*node.input, *node.output) for atom in self._atoms(name)):
            return 0
        slots = [slot for slot in LEARNED_INPUTS.get(node.op_type, ()) if (node.output[0], slot) in self._ties]
        origins = [self._constants.origin(node.input[slot]) for slot in slots if self._product(node, slot) is None]
        return sum(self._constants.value(origin).size for origin in origins if len(self._constants.readers(origin)) > 1)

    def _atoms(self, tensor: str) -> tuple[int, ...]:
        return self._spaces.axes[tensor].atoms if tensor in self._spaces.axes else ()

    def _product(self, node: onnx.NodeProto, slot: int) -> Product | None:
        name = node.output[0]
        if slot >= len(node.input) or not self._constants.is_constant(node.input[slot]):
            return None
        ties = self._ties.get((name, slot), [])
        groups = self._offer.groups.get(name, ()) if slot == 1 and node.op_type in CONVOLVING else ()
        ranks = self._offer.ranks.get(name, ()) if slot == 1 and node.op_type in CONVOLVING else ()
        sides = [self._side(tie.tensor) for tie in ties]
        if not any(side.spaces for side in sides) and len(groups) < 2 and not ranks:
            return None
        numbers = math.prod(self._constants.value(node.input[slot]).shape)
        macs = self._network.count.node_macs.get(name) or 0 if slot == 1 and node.op_type in MULTIPLYING else 0
        places = macs // numbers
        existing = groups[0] if groups else 1
        # It has groups already, or its axes follow no others: both sides stay.
        if (groups or ranks) and (existing > 1 or len(sides) < 2):
            layer = self._layers[name]
            sides, numbers, macs = [Side(layer.in_channels), Side(layer.out_channels)], numbers * existing, macs * existing
        pairs = math.prod(self._full(side) for side in sides)
        ins, outs = (*sides, Side(1), Side(1))[:2]
        options = tuple(GroupCount(number, 0.0) for number in groups) or (GroupCount(1, 0.0),)
        options += tuple(GroupCount(1, 0.0, rank) for rank in ranks)
        names = (name,) if groups or ranks else ()
        clock, rank_clock = None, None
        if self._watch is not None and slot == 1 and node.op_type == "Conv":
            clock = self._watch.clock(name, existing=options[0].groups, is_depthwise=len(sides) == 1)
            rank_clock = self._watch.rank_clock(name) if ranks else None
        return Product(names, ins, outs, numbers // pairs, macs // pairs, options, clock, places, rank_clock)

    def others(self) -> list[Product]:
        """Return what nodes other than Convs take, for each space whose channels they work on; an Add goes with its branch."""
        rates: dict[int, float] = {}
        products = []
        branches = {branch.add: branch for branch in self._offer.branches}
        place = {space.name: number for number, space in enumerate(self._offer.spaces)}
        for tensor, nanoseconds in self._watch.times.others_ns.items() if self._watch is not None else ():
            side = self._side(tensor) if tensor in self._spaces.axes else Side(1)
            rate = nanoseconds / (self._full(side) or 1)  # a tensor may have no channels
            if tensor in branches:
                inner = Side(0, (place[branches[tensor].spaces[0]],))
                products.append(Product((), inner, side, 0, 0, clock=_by_outputs(rate)))
                continue
            for space in side.spaces:
                rates[space] = rates.get(space, 0.0) + rate
        alone = [Product((), Side(0, (space,)), Side(1), 0, 0, clock=_by_channels(rate)) for space, rate in rates.items()]
        return alone + products

    def _full(self, side: Side) -> int:
        return side.fixed + sum(self._offer.spaces[number].channels for number in side.spaces)

    def _side(self, tensor: str) -> Side:
        axis = self._spaces.axes[tensor]
        fixed = sum(self._spaces.sizes[atom] for atom in axis.atoms if atom not in self._place)
        return Side(fixed, tuple(self._place[atom] for atom in axis.atoms if atom in self._place))
