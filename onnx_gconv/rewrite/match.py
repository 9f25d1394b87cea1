"""A plan matched with a model: names and shapes agree; weights may differ, a fine-tuned model matches too."""

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace

import numpy as np
import onnx

from onnx_gconv.errors import PlanError
from onnx_gconv.model.bodies import bodies
from onnx_gconv.model.constants import Constants
from onnx_gconv.model.network import Layer, find_convs, find_inside
from onnx_gconv.model.shapes import Shape, infer, input_shapes
from onnx_gconv.model.spaces import Spaces, find_spaces
from onnx_gconv.model.widths import WRITING, Branch, Space, Widths, find_widths, is_read, kept_places
from onnx_gconv.plans import LowRank, Plan, PlannedLayer, PlannedSpace
from onnx_gconv.solve.grouping import Order

HINT = "plan this very model: `onnx-gconv plan`"


@dataclass(frozen=True, eq=False)
class MatchedLayer:
    """A layer of the model, and what the plan does to it."""

    layer: Layer
    groups: int
    in_order: Order
    out_order: Order
    gathered: tuple[str, ...] = ()  # the sides at which the plan wants a Gather


@dataclass(frozen=True, eq=False)
class MatchedSpace:
    """A channel space of the model, and the channels that it keeps."""

    space: Space
    keep: Order


@dataclass(frozen=True, eq=False)
class Matched:
    """All that a plan does to a graph; made once and handed on: it holds for every model with this graph, whatever its weights.

    Of a node that reads or writes narrowed channels, `inputs` and `outputs` say which of its own are left, by its first output:
    the columns and the rows of its weight. A dropped branch's last Conv has no inputs.

    `own` are constants of nodes on such channels that other nodes read as well, by node and slot. They follow the channels
    because they are one number throughout; a training would end that, unless the masked model gives each its own.
    """

    layers: tuple[MatchedLayer, ...] = ()
    spaces: tuple[MatchedSpace, ...] = ()
    dropped: tuple[Branch, ...] = ()
    inputs: Mapping[str, Order] = field(default_factory=dict)
    outputs: Mapping[str, Order] = field(default_factory=dict)
    own: frozenset[tuple[str, int]] = frozenset()
    ranks: Mapping[str, int] = field(default_factory=dict)  # of the Convs that become two
    inside: tuple[MatchedLayer, ...] = ()  # layers in bodies of If, Loop and Scan

    def __bool__(self) -> bool:
        return bool(self.layers or self.inside or self.spaces or self.dropped or self.ranks)

    def rechosen(self, keeps: Mapping[str, Order]) -> "Matched":
        """Return the same with other channels kept of these spaces, by name; they must be alone on their axes."""
        spaces, inputs, outputs = [], dict(self.inputs), dict(self.outputs)
        for each in self.spaces:
            space, keep = each.space, keeps.get(each.space.name, each.keep)
            spaces.append(MatchedSpace(space, keep))
            if space.name in keeps:
                for name in space.readers:
                    pixels = len(self.inputs[name]) // len(each.keep)
                    inputs[name] = (keep[:, None] * pixels + np.arange(pixels)).reshape(-1)
                outputs |= dict.fromkeys((*space.writers, *space.passing), keep)
        return replace(self, spaces=tuple(spaces), inputs=inputs, outputs=outputs)

    def changed_in(self, written: onnx.ModelProto) -> list[str]:
        """Return a tensor of each thing that the plan changes: what tells whether that was done right, if the outputs do not.

        The Add of a branch of which nothing is left is not among what was written.
        """
        there = {name for node in written.graph.node for name in node.output}
        narrowed = [each.space.name for each in self.spaces]
        sums = [branch.add for branch in self.dropped if branch.add in there]
        return [each.layer.name for each in self.layers] + narrowed + sums + [*self.ranks]

    @property
    def sides(self) -> tuple[Mapping[str, Order], Mapping[str, Order]]:
        """The outputs and the inputs that are left, as the axes of a Conv's weight go."""
        return self.outputs, self.inputs

    @property
    def keeps(self) -> dict[int, Order]:
        """The channels that are left of each narrowed atom."""
        return {each.space.atom: each.keep for each in self.spaces}


def match(model: onnx.ModelProto, plan: Plan, *, shapes: Mapping[str, Shape] | None = None) -> Matched:
    """Return what the plan does to the model, or say what does not fit.

    `shapes` are those of the model's tensors; they are inferred where they are not given, and needed for spaces only.
    """
    constants = Constants(model)
    narrowing = _Narrowing(model, constants, plan, shapes)
    layers, skipped = find_convs(model, constants, {})
    inside, skipped_inside = find_inside(model, constants, {}, bodies(model))
    by_name = {layer.name: layer for layer in (*layers, *inside)}
    reasons = {conv.name: conv.reason for conv in (*skipped, *skipped_inside)}
    result = []
    for planned in plan.layers:
        if planned.name not in by_name:
            why = f"cannot be grouped in this model: {reasons[planned.name]}" if planned.name in reasons else "is not in this model"
            raise PlanError(f"the plan's layer {planned.name!r} {why}.", hint=HINT)
        layer = by_name[planned.name]
        narrowing.require_orders(layer, planned)
        result.append(_match_layer(layer, planned))
    # A plan may say in so many words that a layer keeps the groups it has.
    grouped = [matched for matched in result if matched.groups != matched.layer.groups]
    in_main = {layer.name: layer for layer in layers}
    ranks = {each.name: _match_rank(in_main, constants, narrowing, plan, each) for each in plan.low_rank}
    main, within = ([each for each in grouped if (each.layer.name in in_main) == is_main] for is_main in (True, False))
    sides = narrowing.inputs, narrowing.outputs
    return Matched(tuple(main), narrowing.spaces, narrowing.dropped, *sides, narrowing.own, ranks, tuple(within))


class _Narrowing:
    """The widths and dropped branches of a plan, found in a model."""

    def __init__(self, model: onnx.ModelProto, constants: Constants, plan: Plan, shapes: Mapping[str, Shape] | None) -> None:
        self.spaces: tuple[MatchedSpace, ...] = ()
        self.dropped: tuple[Branch, ...] = ()
        self.inputs: dict[str, Order] = {}
        self.outputs: dict[str, Order] = {}
        self.own: frozenset[tuple[str, int]] = frozenset()
        if not plan.spaces and not plan.dropped:
            return
        known = infer(model, input_shapes(model, {})) if shapes is None else shapes
        spaces = find_spaces(model, constants, known)
        widths = find_widths(model, constants, spaces, known)
        found = [_match_space(widths, spaces, planned) for planned in plan.spaces]
        self.spaces = tuple(each for each in found if len(each.keep) < each.space.channels)
        self.dropped = tuple(_match_branch(widths, each.name) for each in plan.dropped)
        self._require_present(plan)
        keeps = {each.space.atom: each.keep for each in self.spaces}
        weighted = {node.output[0] for node in model.graph.node if node.op_type in WRITING}
        for tie in spaces.ties:
            if tie.slot == 1 and tie.node in weighted and set(spaces.axes[tie.tensor].atoms) & keeps.keys():
                axis = spaces.axes[tie.tensor]
                places = kept_places(spaces, tie.tensor, keeps)
                side = self.inputs if is_read(tie) else self.outputs
                side[tie.node] = (places[:, None] * axis.repeat + np.arange(axis.repeat)).reshape(-1)
        self.inputs |= {branch.name: np.arange(0) for branch in self.dropped}
        self.own = frozenset(self._shared(model, constants, spaces, keeps.keys()))

    def _shared(
        self, model: onnx.ModelProto, constants: Constants, spaces: Spaces, narrowed: Collection[int]
    ) -> Iterator[tuple[str, int]]:
        """Yield the constants that nodes on narrowed channels, or in dropped branches, share with other nodes."""
        nodes = {node.output[0]: node for node in model.graph.node if node.output}
        gone = frozenset[str]().union(*(branch.nodes for branch in self.dropped))
        for tie in spaces.ties:
            node = nodes[tie.node]
            atoms = {atom for name in (*node.input, *node.output) if name in spaces.axes for atom in spaces.axes[name].atoms}
            is_touched = tie.node in gone or not atoms.isdisjoint(narrowed)
            if is_touched and len(constants.readers(constants.origin(node.input[tie.slot]))) > 1:
                yield tie.node, tie.slot

    def _require_present(self, plan: Plan) -> None:
        """Refuse to do anything to what lies in a dropped branch, or to drop both sides of an Add."""
        for branch in self.dropped:
            inside = [("groups the layer", layer.name, "layers") for layer in plan.layers if layer.name in branch.nodes]
            inside += [("narrows the space", space.name, "spaces") for space in plan.spaces if space.name in branch.spaces]
            inside += [
                ("drops the branch of", other.name, "dropped")
                for other in self.dropped
                if other.name != branch.name and (other.name in branch.nodes or other.add == branch.add)
            ]
            for what, name, field_name in inside:
                raise PlanError(
                    f"the plan {what} {name!r}, but also drops the branch of {branch.name!r}, and with it that.",
                    hint=f"remove the one from {field_name!r}, or the other from 'dropped'",
                )

    def require_orders(self, layer: Layer, planned: PlannedLayer) -> None:
        """Refuse orders that are not of exactly the channels that stay."""
        sides = (
            ("in_order", planned.in_order, self.inputs.get(layer.name, np.arange(planned.in_channels))),
            ("out_order", planned.out_order, self.outputs.get(layer.name, np.arange(planned.out_channels))),
        )
        for name, order, stay in sides:
            if sorted(order) != stay.tolist():
                raise PlanError(
                    f"{name!r} of the plan's layer {planned.name!r} does not have exactly the {len(stay)} channels that stay.",
                    hint="re-run `onnx-gconv plan` or edit the plan",
                )


def _match_space(widths: Widths, spaces: Spaces, planned: PlannedSpace) -> MatchedSpace:
    space = next((space for space in widths.spaces if space.name == planned.name), None)
    if space is None:
        raise PlanError(f"the plan's space {planned.name!r} {_why_not(widths, spaces, planned.name)}.", hint=HINT)
    if space.channels != planned.channels:
        raise PlanError(
            f"the plan's space {planned.name!r} has {planned.channels} channels, the model's has {space.channels}.", hint=HINT
        )
    return MatchedSpace(space, np.asarray(planned.keep, dtype=np.int64))


def _why_not(widths: Widths, spaces: Spaces, name: str) -> str:
    """Return why no space that can be narrowed goes by this name."""
    if name not in spaces.axes:
        return "is not in this model"
    atoms = spaces.axes[name].atoms
    called = [space.name for space in widths.spaces if space.atom in atoms]
    if called:
        return f"goes by another name in this model: {', '.join(map(repr, called))}"
    reasons = dict.fromkeys(widths.refused.get(atom, "no tensor has them alone") for atom in atoms)
    return f"cannot be narrowed in this model: {', '.join(reasons)}"


def _match_branch(widths: Widths, name: str) -> Branch:
    for branch in widths.branches:
        if branch.name == name:
            return branch
    raise PlanError(f"the plan drops the branch of {name!r}, but no residual branch of this model ends there.", hint=HINT)


def _match_rank(layers: Mapping[str, Layer], constants: Constants, narrowing: _Narrowing, plan: Plan, planned: LowRank) -> int:
    """Return the rank of a planned Conv, which must be there, dense, with a weight of its own and of more than this rank."""
    name, layer = planned.name, layers.get(planned.name)
    if layer is None:
        raise PlanError(f"the plan gives {name!r} a low rank, but no layer of this model goes by that name.", hint=HINT)
    gone = [branch.name for branch in narrowing.dropped if name in branch.nodes]
    reasons = {
        "it is a ConvTranspose": layer.is_transposed,
        "it is grouped as well": layer.groups > 1 or any(each.name == name for each in plan.layers),
        f"the plan drops the branch of {gone[:1]!r}, and with it that": bool(gone),
        "others read its weight as well": constants.readers(layer.weight) != {(name, 1)},
    }
    for reason, is_so in reasons.items():
        if is_so:
            raise PlanError(f"the plan gives {name!r} a low rank, but {reason}.", hint="remove its line from 'low_rank'")
    ins, outs = (
        len(side.get(name, np.arange(size)))
        for side, size in ((narrowing.inputs, layer.in_channels), (narrowing.outputs, layer.out_channels))
    )
    if planned.rank >= min(ins * math.prod(layer.kernel), outs):
        raise PlanError(
            f"the plan gives {name!r} a rank of {planned.rank}, but with {ins} input and {outs} output channels only a smaller "
            "one is low.",
            hint="remove its line from 'low_rank', or lower its rank",
        )
    return planned.rank


def _match_layer(layer: Layer, planned: PlannedLayer) -> MatchedLayer:
    if (layer.out_channels, layer.in_channels) != (planned.out_channels, planned.in_channels):
        raise PlanError(
            f"the plan's layer {planned.name!r} has {planned.in_channels} input and {planned.out_channels} output channels, "
            f"the model's has {layer.in_channels} and {layer.out_channels}.",
            hint=HINT,
        )
    ins, outs = len(planned.in_order), len(planned.out_order)
    legal = replace(layer, in_channels=ins, out_channels=outs).legal_groups  # of the channels that stay
    if planned.groups not in legal:
        raise PlanError(
            f"the plan's layer {planned.name!r} asks for {planned.groups} groups, but {ins} input and "
            f"{outs} output channels allow only {', '.join(map(str, legal))}.",
            hint="re-run `onnx-gconv plan` or edit the plan",
        )
    orders = np.asarray(planned.in_order), np.asarray(planned.out_order)
    matched = MatchedLayer(layer, planned.groups, *orders, planned.gathered)
    # Each new group must lie inside one of the groups the Conv has already.
    old_in = matched.in_order.reshape(planned.groups, -1) // (layer.in_channels // layer.groups)
    old_out = matched.out_order.reshape(planned.groups, -1) // (layer.out_channels // layer.groups)
    if (old_in != old_in[:, :1]).any() or (old_out != old_in[:, :1]).any():
        raise PlanError(
            f"the plan's layer {planned.name!r} mixes channels of the {layer.groups} groups that the Conv has already.",
            hint="re-run `onnx-gconv plan` or edit the plan's orders",
        )
    return matched
