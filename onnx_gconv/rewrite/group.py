"""The written model: planned Convs become grouped Convs, with a Gather only where no weight can absorb the order.

Narrowed spaces lose their channels everywhere, and dropped branches their nodes. A Conv of low rank becomes two.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import numpy as np
import onnx
import onnx_graphsurgeon as gs
from numpy.typing import NDArray

from onnx_gconv.errors import ModelError
from onnx_gconv.model.attributes import integer
from onnx_gconv.model.constants import STANDARD_DOMAINS, Constants
from onnx_gconv.model.shapes import Shape, infer, input_shapes
from onnx_gconv.model.spaces import Spaces, find_spaces
from onnx_gconv.model.surgery import Surgery
from onnx_gconv.model.transposed import CONVOLVING
from onnx_gconv.rewrite.dropped import drop, erase
from onnx_gconv.rewrite.inside import of_bodies, rewrite_bodies
from onnx_gconv.rewrite.low_rank import factor
from onnx_gconv.rewrite.lowering import LoweringName, lower
from onnx_gconv.rewrite.match import Matched
from onnx_gconv.rewrite.placement import BlockConv, GatherAt, Placed, Placement, is_identity, place
from onnx_gconv.rewrite.taken import Follow, Taken, take_along, take_blocks
from onnx_gconv.solve.grouping import Order


@dataclass(frozen=True, eq=False)
class Written:
    """A model rewritten, and what its constants come from. Those that nothing is said of are as they were, or new."""

    model: onnx.ModelProto
    taken: Mapping[str, Taken]  # by name
    computed_with: frozenset[str]  # stored tensors of the model that new constants were computed from


@dataclass(frozen=True, eq=False)
class _Edit:
    """A model on its way. `shared` are the constants and Gathers made so far, so that equal ones are written once.

    `by_place`: constants count as equal if they were taken from the same places. Otherwise it is enough that their numbers are
    the same, which may end when they are trained.
    """

    surgery: Surgery
    constants: Constants
    by_place: bool
    shared: dict[tuple[object, ...], str] = field(default_factory=dict)
    taken: dict[str, Taken] = field(default_factory=dict)
    computed_with: set[str] = field(default_factory=set)


def group(model: onnx.ModelProto, matched: Matched, *, shapes: Mapping[str, Shape] | None = None) -> onnx.ModelProto:
    """Return the model with all that the plan takes away gone; the same function as `mask(model, matched)`."""
    return carry_out(model, matched, placement_of(model, matched, shapes=shapes))


def placement_of(model: onnx.ModelProto, matched: Matched, *, shapes: Mapping[str, Shape] | None = None) -> Placement:
    """Return where the channels of every tensor will lie. Tensors of unknown shape keep the model's order."""
    constants = Constants(model)
    known = infer(model, input_shapes(model, {})) if shapes is None else shapes
    spaces = find_spaces(model, constants, known)
    placed = place(model, spaces, _block_convs(model, spaces, matched), known, _keeps(spaces, matched))
    inside = [placement_of(body.model, own, shapes=known) for body, own in of_bodies(model, matched.inside)]
    return replace(placed, inside=tuple(inside))


def _keeps(spaces: Spaces, matched: Matched) -> dict[int, Order]:
    """Return the channels that are left of each narrowed atom.

    Found anew: what can follow an order, and so how atoms are numbered, may depend on weights, which may be other ones by now.
    """
    result = {}
    for each in matched.spaces:
        axis = spaces.axes.get(each.space.name)
        atom = axis.atoms[0] if axis is not None and len(axis.atoms) == 1 else -1
        if atom < 0 or atom in spaces.pinned or atom in spaces.sized or spaces.sizes[atom] != each.space.channels:
            raise ModelError(
                f"the channels of {each.space.name!r} cannot be narrowed in this model any more.",
                hint="plan this very model: `onnx-gconv plan`",
            )
        result[atom] = each.keep
    return result


def carry_out(
    model: onnx.ModelProto, matched: Matched, placement: Placement, *, lowering: LoweringName = "group"
) -> onnx.ModelProto:
    """Return the model rewritten to a placement.

    With x' = x[in_order] and y' = y[out_order], the kept weights are the diagonal blocks of W[out_order][:, in_order], so
    y' is a grouped Conv of x'. Bodies have placements of their own.
    """
    placements = iter(placement.inside)
    model = rewrite_bodies(model, matched, lambda body, own: carry_out(body.model, own, next(placements), lowering=lowering))
    edit = _Edit(Surgery(model), Constants(model), by_place=False)
    grouped = _rewrite(edit, matched, placement)
    if lowering != "group":
        opset = next(entry.version for entry in model.opset_import if entry.domain in STANDARD_DOMAINS)
        for node in grouped:
            lower(edit.surgery, node, lowering, opset)
    return edit.surgery.finish(placement.narrowed)


def write(model: onnx.ModelProto, matched: Matched, placement: Placement) -> Written:
    """Return the model rewritten to a placement, with the same constants whatever numbers they hold."""
    edit = _Edit(Surgery(model), Constants(model), by_place=True)
    _rewrite(edit, matched, placement)
    return Written(edit.surgery.finish(placement.narrowed), edit.taken, frozenset(edit.computed_with))


def _rewrite(edit: _Edit, matched: Matched, placement: Placement) -> list[gs.Node]:
    """Do all that a plan says, and return its grouped Convs."""
    remnants = [drop(edit.surgery, edit.constants, branch, placement.read.get(branch.add)) for branch in matched.dropped]
    for remnant in remnants:
        if remnant.taken is not None:
            edit.taken[remnant.name] = remnant.taken
        else:
            edit.computed_with.update(remnant.computed_with)
    existing = {each.layer.name: each.layer.groups for each in matched.layers}
    for placed in placement.convs:
        _write_blocks(edit, placed, existing.get(placed.conv.name, placed.conv.groups))
    done = {placed.conv.name for placed in placement.convs}.union(*(branch.nodes for branch in matched.dropped))
    _permute_constants(edit, placement, done)
    _write_numbers(edit, placement)
    for name, rank in matched.ranks.items():
        factor(edit.surgery, edit.surgery.node_of(name), rank)
    grouped = [edit.surgery.node_of(name) for name in existing]  # a Gather may take over the name of what a Conv writes
    for gather in placement.gathers:
        _write_gather(edit, gather)
    erase(edit.surgery, remnants)  # last: until here nodes are known by what they give
    return grouped


def _block_convs(model: onnx.ModelProto, spaces: Spaces, matched: Matched) -> list[BlockConv]:
    """Return the Convs that will have groups: planned ones, and those that have them and stay as they are."""
    planned = {item.layer.name: item for item in matched.layers}
    result = []
    for node in model.graph.node:
        name = node.output[0] if node.output else ""
        if name in planned:
            item = planned[name]
            sides = item.in_order, item.out_order, item.gathered
            result.append(BlockConv(name, item.layer.label, node.input[0], item.groups, *sides))
        elif name in spaces.blocked:
            groups = integer(node, "group", 1)
            ins, outs = (sum(spaces.sizes[atom] for atom in spaces.axes[tensor].atoms) for tensor in (node.input[0], name))
            result.append(BlockConv(name, node.name or name, node.input[0], groups, np.arange(ins), np.arange(outs)))
    return result


def _write_blocks(edit: _Edit, placed: Placed, existing: int) -> None:
    """Give a grouped Conv the weight and bias for the orders in which it reads and writes."""
    conv = placed.conv
    node = edit.surgery.node_of(conv.name)
    if existing == conv.groups and is_identity(placed.in_order) and is_identity(placed.out_order):
        return
    origin = edit.constants.origin(node.inputs[1].name)
    weight = edit.constants.value(origin)
    orders = placed.in_order, placed.out_order
    # The weight of a ConvTranspose has its inputs where that of a Conv has its outputs.
    along = orders[::-1] if node.op == "ConvTranspose" else orders
    taken = take_blocks(origin, weight.shape, existing, conv.groups, along)
    node.inputs[1] = _constant(edit, taken.key, f"{origin}_g{conv.groups}", lambda: taken.of(weight), taken)
    node.attrs["group"] = conv.groups
    if len(node.inputs) > 2 and node.inputs[2].name:
        _permute(edit, node, 2, [(0, placed.out_order, 1)])


def _permute_constants(edit: _Edit, placement: Placement, done: set[str]) -> None:
    """Let every constant follow the order of the channels it is tied to; `done` are nodes that have theirs, or are gone."""
    by_input: dict[tuple[str, int], list[Follow]] = defaultdict(list)
    for tie in placement.spaces.ties:
        # A node's own output is tied as it is written; a tensor that it reads, as it is found.
        orders = placement.produced if tie.tensor == tie.node else placement.read
        if tie.tensor in orders and tie.node not in done:
            by_input[tie.node, tie.slot].append((tie.dim, orders[tie.tensor], placement.spaces.axes[tie.tensor].repeat))
    for (name, slot), follows in by_input.items():
        node = edit.surgery.node_of(name)
        _permute(edit, node, slot, follows)
        if node.op in CONVOLVING and node.attrs.get("group", 1) > 1:  # depthwise: one group for each channel that is left
            node.attrs["group"] = len(placement.produced[name])


def _permute(edit: _Edit, node: gs.Node, slot: int, follows: list[Follow]) -> None:
    """Put the constant in an input slot into these orders, axis by axis."""
    origin = edit.constants.origin(node.inputs[slot].name)
    original = edit.constants.value(origin)
    taken = take_along(origin, original.shape, follows)
    value = taken.of(original)
    # One number throughout may be shared with others: leave it, as long as it can.
    if taken.is_all_of(original) or (not edit.by_place and np.array_equal(value, original)):
        return
    is_one_number = not edit.by_place and bool((value == value.flat[0]).all())
    key = (origin, value.shape) if is_one_number else taken.key
    node.inputs[slot] = _constant(edit, key, f"{origin}_ordered", lambda: value, taken)


def _write_numbers(edit: _Edit, placement: Placement) -> None:
    """Put the new number of channels wherever a node has the old one among its sizes."""
    by_input: dict[tuple[str, int], dict[int, int]] = defaultdict(dict)
    for measure in placement.spaces.measures:
        if measure.tensor in placement.narrowed:
            by_input[measure.node, measure.slot][measure.index] = placement.narrowed[measure.tensor]
    for (name, slot), numbers in by_input.items():
        node = edit.surgery.node_of(name)
        if slot < 0:
            node.attrs["split"] = [numbers.get(index, number) for index, number in enumerate(node.attrs["split"])]
            continue
        origin = edit.constants.origin(node.inputs[slot].name)
        sizes = edit.constants.value(origin).copy()
        np.put(sizes, list(numbers), list(numbers.values()))
        node.inputs[slot] = _constant(edit, (origin, sizes.tobytes()), f"{origin}_narrowed", sizes.copy)


def _constant(
    edit: _Edit, key: tuple[object, ...], name: str, make: Callable[[], NDArray[np.generic]], taken: Taken | None = None
) -> gs.Tensor:
    """Return the constant of this key, made at its first use."""
    if key not in edit.shared:
        edit.shared[key] = edit.surgery.unique(name)
        edit.surgery.constant(edit.shared[key], make())
        if taken is not None:
            edit.taken[edit.shared[key]] = taken
    return edit.surgery.tensor(edit.shared[key])


def _write_gather(edit: _Edit, gather: GatherAt) -> None:
    surgery, shared = edit.surgery, edit.shared
    # int32: TensorRT adds a cast for every int64 index.
    indices = gather.indices.astype(np.int32)
    order = _constant(edit, ("order", indices.tobytes()), f"{gather.layer}_order", lambda: indices)
    if not gather.conv:  # behind the producer: every reader finds the result under the old name
        producer = surgery.node_of(gather.tensor)
        result, before = producer.outputs[0], surgery.variable(f"{gather.tensor}_grouped")
        producer.outputs[0] = before
        node = gs.Node("Gather", surgery.unique(f"{gather.layer}_out_gather"), {"axis": 1}, [before, order], [result])
        surgery.insert(node, after=producer)
        return
    conv = surgery.node_of(gather.conv)
    key = "gather", gather.tensor, indices.tobytes()
    if key in shared:  # another reader of the tensor wants the same order
        conv.inputs[0] = surgery.node_of(shared[key]).outputs[0]
        return
    gathered = surgery.variable(f"{gather.layer}_in_grouped")
    shared[key] = gathered.name
    node = gs.Node("Gather", surgery.unique(f"{gather.layer}_in_gather"), {"axis": 1}, [conv.inputs[0], order], [gathered])
    surgery.insert(node, before=conv)
    conv.inputs[0] = gathered
