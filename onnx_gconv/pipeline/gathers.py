"""The Gathers of a model's plans: what those of a plan take, and which a search can choose between."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import onnx

from onnx_gconv.model.constants import Constants
from onnx_gconv.model.network import Layer
from onnx_gconv.model.shapes import Shape
from onnx_gconv.model.spaces import Spaces, consumers, find_spaces
from onnx_gconv.model.transposed import CONVOLVING
from onnx_gconv.plans import Plan
from onnx_gconv.rewrite.group import placement_of
from onnx_gconv.rewrite.match import match
from onnx_gconv.rewrite.placement import is_identity, only_atom, sink
from onnx_gconv.search.joint import JointResult
from onnx_gconv.search.menu import Menu, Product
from onnx_gconv.search.orders import NO_ORDER, Demand, Orders, Seam, SideName
from onnx_gconv.search.table import Table
from onnx_gconv.solve.grouping import Grouping

SIDES: tuple[SideName, ...] = ("in", "out")
FEW_SIDES = 2  # of the channels inside a block; more read or write a stream
MOST_MEETING = 2  # places of which a search looks at all orders together; the Gather of more is counted from above

Solutions = Mapping[tuple[str, int], Grouping]  # by layer and number of groups
GatheredSides = dict[str, list[str]]  # by layer: the sides that have a Gather
SharedSides = Mapping[tuple[str, SideName], int]  # by layer and side: which partition it shares with others


@dataclass(frozen=True, eq=False)
class GatherTimes:
    """What Gathers of a model's tensors take, in nanoseconds: before a reader, or behind the producer."""

    model: onnx.ModelProto
    shapes: Mapping[str, Shape]
    nanoseconds: Callable[[str, bool], int]  # by tensor, and whether it stands behind the producer

    def of_plan(self, plan: Plan) -> int:
        """Return what the Gathers take that a plan's model has."""
        placement = placement_of(self.model, match(self.model, plan, shapes=self.shapes), shapes=self.shapes)
        # Readers of one tensor that want the same order share one Gather.
        distinct = {(gather.tensor, gather.conv == "", gather.indices.tobytes()) for gather in placement.gathers}
        return sum(self.nanoseconds(tensor, is_behind) for tensor, is_behind, _ in distinct)

    def offered(self, menu: Menu, layers: Sequence[Layer], groupings: Solutions, shared: SharedSides) -> Menu:
        """Return the menu with the orders that channels may be stored in, and what the Gathers take that these do not spare."""
        return replace(menu, orders=_Finding(self, menu.products, layers, groupings, shared).orders())


class _Finding:
    """The places of a model: atoms whose order is free, each with the orders that somebody may want.

    Gathers are counted from above. Layers have an order in common where they were solved together. Otherwise each one has its own,
    though by chance two may be the same. What a Conv that keeps its groups reads or writes stays where it is.
    """

    def __init__(
        self,
        times: GatherTimes,
        products: Sequence[Product],
        layers: Sequence[Layer],
        groupings: Solutions,
        shared: SharedSides,
    ) -> None:
        model, self._times, self._shared = times.model, times, shared
        self._existing = {layer.name: layer.groups for layer in layers}
        self._moving = {name for (name, _), each in groupings.items() if not _lies_in_place(each)}
        self._products = {
            name: number for number, product in enumerate(products) if len(product.options) > 1 for name in product.names
        }
        self._narrowed = {name for product in products if product.ins.spaces or product.outs.spaces for name in product.names}
        self._spaces: Spaces = find_spaces(model, Constants(model), times.shapes)
        self._readers = consumers(model)
        self._ends = {value.name for value in model.graph.output}
        self._sources = {node.output[0]: node.input[0] for node in model.graph.node if node.op_type in CONVOLVING}
        self._kept = sorted(self._spaces.blocked - self._products.keys())
        ends = (tensor for name in self._products for tensor in (self._sources[name], name))
        self._sides = Counter(only_atom(self._spaces, tensor) for tensor in ends)
        self._in_place = {only_atom(self._spaces, tensor) for name in self._kept for tensor in (self._sources[name], name)}
        self._meetings = list(self._find_meetings())
        self._meeting = {atom for atoms, _, _ in self._meetings for atom in atoms}
        self._places: dict[int, int] = {}  # by atom
        self._numbers: list[dict[object, int]] = []  # by place: the numbers of its orders, by who wants them

    def orders(self) -> Orders:
        """Return the places, what layers want of them, and where they meet."""
        demands = [self._demand(name, side) for name in self._products for side in SIDES]
        seams = list(self._seams())
        return Orders(tuple(1 + len(numbers) for numbers in self._numbers), tuple(demands), tuple(seams))

    def _demand(self, name: str, side: SideName) -> Demand:
        tensor = self._sources[name] if side == "in" else name
        behind = side == "out"
        gathered = self._sunk(name) if behind else tensor
        atom, site = only_atom(self._spaces, tensor), self._shared.get((name, side))
        # In a stream a narrowed layer has a Gather, lest an order for each one of them make the search long.
        is_narrowed = name in self._narrowed
        has_own = is_narrowed or name in self._moving if site is None else is_narrowed and self._sides[atom] <= FEW_SIDES
        place = self._place(atom) if atom is not None and self._is_open(atom, site, has_own=has_own) else None
        own = self._number(place, (name, side)) if place is not None and has_own else NO_ORDER
        # Order 0 where its groups lie in place, or where there is no choice but the order that all have in common.
        common = 0 if place is None or site is None else self._number(place, site)
        return Demand(
            product=self._products[name],
            layer=name,
            side=side,
            gather_ns=self._times.nanoseconds(gathered, behind),
            existing=self._existing[name],
            place=place,
            order=own if site is None and name in self._moving else common,
            narrowed_order=own,
            stays=name in self._spaces.blocked,
        )

    def _sunk(self, name: str) -> str:
        """Return the tensor that a Gather behind a Conv makes."""
        return sink(name, self._spaces, self._readers, self._ends, self._times.shapes)[-1]

    def _place(self, atom: int) -> int:
        if atom not in self._places:
            self._places[atom] = len(self._numbers)
            self._numbers.append({})
        return self._places[atom]

    def _number(self, place: int, wanted: object) -> int:
        """Return the number of an order of a place."""
        return self._numbers[place].setdefault(wanted, 1 + len(self._numbers[place]))

    def _is_open(self, atom: int, site: int | None, *, has_own: bool) -> bool:
        """Return whether there is a choice of orders."""
        if atom in self._spaces.pinned or (atom in self._in_place and (site is None or atom not in self._meeting)):
            return False
        return site is None or has_own or atom in self._meeting

    def _find_meetings(self) -> Iterator[tuple[frozenset[int], str, bool]]:
        """Yield atoms whose channels somebody wants in the model's own order, the tensor, and whether its producer does.

        Where a wider stream begins, its channels are in the order of the narrower one. A Conv that keeps its groups may read
        several atoms joined.
        """
        axes = self._spaces.axes
        for junction in self._spaces.junctions:
            yield frozenset({*axes[junction.source].atoms, *axes[junction.tensor].atoms}), junction.tensor, True
        for name in self._kept:
            for tensor, behind in ((self._sources[name], False), (name, True)):
                if only_atom(self._spaces, tensor) is None and tensor in axes:
                    yield frozenset(axes[tensor].atoms), tensor, behind

    def _seams(self) -> Iterator[Seam]:
        """Yield where places meet."""
        for atoms, tensor, behind in self._meetings:
            places = tuple(sorted(self._places[atom] for atom in atoms if atom in self._places))
            if places:
                gathered = self._sunk(tensor) if behind and tensor in self._kept else tensor
                nanoseconds = self._times.nanoseconds(gathered, behind)
                together = [places] if len(places) <= MOST_MEETING else [(place,) for place in places]
                yield from (Seam(each, nanoseconds) for each in together)


def _lies_in_place(grouping: Grouping) -> bool:
    return is_identity(grouping.in_order) and is_identity(grouping.out_order)


def gathered_sides(menu: Menu, found: JointResult) -> GatheredSides:
    """Return the sides at which layers have a Gather by a choice from the menu."""
    sides = GatheredSides()
    for demand in menu.gathered(found.widths, found.groups, found.stored):
        sides.setdefault(demand.layer, []).append(demand.side)
    return sides


def with_all_gathers(table: Table, orders: Orders) -> Table:
    """Return the table with every Gather counted that any choice may need, for a search that knows no orders."""
    rows = []
    for number, row in enumerate(table.rows):
        wanting = [demand for demand in orders.demands if demand.product == number and demand.is_own]

        def more_ns(groups: int, wanting: Sequence[Demand] = wanting) -> int:
            return sum(demand.gather_ns for demand in wanting if groups > demand.existing)

        options = (replace(option, latency_ns=option.latency_ns + more_ns(option.groups)) for option in row.options)
        rows.append(replace(row, options=tuple(options)))
    seams_ns = sum(seam.gather_ns for seam in orders.seams)
    return replace(table, rows=tuple(rows), fixed_latency_ns=table.fixed_latency_ns + seams_ns)
