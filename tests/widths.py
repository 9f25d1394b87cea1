"""Random plans with widths, dropped branches and groups, and what they must cost: counted here, from the plan alone."""

import json
import math
from dataclasses import dataclass, field

import numpy as np
import onnx
from numpy.typing import ArrayLike
from tiny import from_text

from onnx_gconv.model.constants import Constants
from onnx_gconv.model.network import find_convs, settle_shapes
from onnx_gconv.model.shapes import Shape, input_shapes
from onnx_gconv.model.spaces import Spaces, find_spaces
from onnx_gconv.model.transposed import CONVOLVING
from onnx_gconv.model.widths import Branch, Widths, find_widths, kept_places
from onnx_gconv.plans import DroppedBranch, LowRank, Plan, PlannedLayer, PlannedSpace, Totals, from_json
from onnx_gconv.rewrite.group import carry_out, placement_of
from onnx_gconv.rewrite.mask import mask
from onnx_gconv.rewrite.match import Matched, match
from onnx_gconv.rewrite.placement import Placement
from onnx_gconv.runtime import observe_shapes
from onnx_gconv.verification import Verification, verify


def graph(body: str, *, result: str = "float[1,C,h,w] y", more: str = "", **tensors: ArrayLike) -> onnx.ModelProto:
    """Return a graph of one image of 4 channels and 6x6 pixels; what is not given of w*, b*, n* and so on is random."""
    model = from_text(f"net (float[1,4,6,6] x{more}) => ({result}) {{ {body} }}", **tensors)
    rng = np.random.default_rng(0)
    known = {tensor.name for tensor in model.graph.initializer} | {value.name for value in model.graph.input}
    known |= {name for node in model.graph.node for name in node.output}
    for name in dict.fromkeys(name for node in model.graph.node for name in node.input if name not in {*known, ""}):
        kind, *sizes = name.split("_")  # w_8_4_3_3 is a weight of that shape, w_8_4_3_3_b another one, v_8 a variance
        value = rng.standard_normal([int(size) for size in sizes if size.isdigit()])
        value = np.abs(value) + 0.5 if kind.startswith("v") else value
        model.graph.initializer.append(onnx.numpy_helper.from_array(value.astype(np.float32), name))
    return model


def plan_of(
    layers: tuple[PlannedLayer, ...] = (),
    spaces: tuple[PlannedSpace, ...] = (),
    dropped: tuple[str, ...] = (),
    ranks: tuple[LowRank, ...] = (),
) -> Plan:
    """Return a plan of these changes, as it comes back from its file."""
    totals = Totals(0, 0)
    ends = tuple(DroppedBranch(name) for name in dropped)
    forms = ("group", "width", "drop", "lowrank")
    plan = Plan("", "l2", "best", "exact", 0, {}, "free", totals, totals, layers, (), forms, spaces, ends, ranks)
    read_back = from_json(json.loads(plan.to_json()), "plan.json")
    assert read_back == plan
    return read_back


@dataclass(frozen=True, eq=False)
class Subject:
    """A model, with all that is found in it."""

    model: onnx.ModelProto
    shapes: dict[str, Shape]
    constants: Constants
    spaces: Spaces
    widths: Widths


def subject(model: onnx.ModelProto, shapes: dict[str, Shape] | None = None) -> Subject:
    constants = Constants(model)
    known = settle_shapes(model, input_shapes(model, {}), observe=observe_shapes) if shapes is None else shapes
    spaces = find_spaces(model, constants, known)
    return Subject(model, known, constants, spaces, find_widths(model, constants, spaces, known))


@dataclass(frozen=True)
class Odds:
    """How likely a plan does something to each thing."""

    narrow: float = 0.0
    drop: float = 0.0
    group: float = 0.0
    share: float | None = None  # of the channels that stay; None for anything
    rank: float = 0.0


def random_plan(it: Subject, rng: np.random.Generator, odds: Odds) -> Plan:
    dropped: list[Branch] = []
    for branch in it.widths.branches:
        clash = any(branch.name in other.nodes or other.name in branch.nodes or branch.add == other.add for other in dropped)
        if rng.random() < odds.drop and not clash:
            dropped.append(branch)
    gone = {name for branch in dropped for name in (*branch.spaces, *branch.nodes)}
    keeps: dict[int, np.ndarray] = {}
    spaces = []
    for space in it.widths.spaces:
        if space.name not in gone and rng.random() < odds.narrow:
            share = odds.share if odds.share is not None else rng.random()
            keep = np.sort(rng.choice(space.channels, max(1, int(share * space.channels)), replace=False))
            keeps[space.atom] = keep
            spaces.append(PlannedSpace(space.name, space.channels, tuple(keep.tolist())))
    sources = {node.output[0]: node.input[0] for node in it.model.graph.node if node.op_type in CONVOLVING}
    layers = []
    for layer in find_convs(it.model, it.constants, {})[0]:
        if layer.name in gone or rng.random() >= odds.group:
            continue
        sides = [(sources[layer.name], layer.in_channels), (layer.name, layer.out_channels)]
        ins, outs = (kept_places(it.spaces, name, keeps) if name in it.spaces.axes else np.arange(n) for name, n in sides)
        common = math.gcd(len(ins), len(outs))
        legal = [g for g in range(2 * layer.groups, common + 1, layer.groups) if common % g == 0]
        if legal:
            orders = [  # arbitrary inside the groups that the Conv has
                tuple(int(c) for part in np.split(side, layer.groups) for c in rng.permutation(part)) for side in (ins, outs)
            ]
            groups = int(rng.choice(legal))
            layers.append(PlannedLayer(layer.name, layer.name, layer.out_channels, layer.in_channels, groups, 0.5, *orders))
    grouped, ranks = {layer.name for layer in layers}, []
    for layer in find_convs(it.model, it.constants, {})[0] if odds.rank else ():
        is_dense = layer.groups == 1 and not layer.is_transposed and it.constants.readers(layer.weight) == {(layer.name, 1)}
        if is_dense and layer.name not in {*gone, *grouped} and rng.random() < odds.rank:
            sides = [(sources[layer.name], layer.in_channels), (layer.name, layer.out_channels)]
            ins, outs = (len(kept_places(it.spaces, name, keeps)) if name in it.spaces.axes else n for name, n in sides)
            most = min(ins * math.prod(layer.kernel), outs)
            ranks += [LowRank(layer.name, int(rng.integers(1, most)))] if most > 1 else []
    return plan_of(tuple(layers), tuple(spaces), tuple(branch.name for branch in dropped), tuple(ranks))


@dataclass(frozen=True, eq=False)
class Done:
    """A plan carried out."""

    matched: Matched
    placement: Placement
    masked: onnx.ModelProto
    written: onnx.ModelProto

    def verified(
        self, *, tolerance: float, written: onnx.ModelProto | None = None, shapes: dict[str, Shape] | None = None
    ) -> Verification:
        """Compare masked and written model, and every tensor that changed, if the outputs say nothing."""
        compared = written or self.written
        there = {name for node in compared.graph.node for name in node.output}
        names = [each.layer.name for each in self.matched.layers] + [each.space.name for each in self.matched.spaces]
        names += [branch.add for branch in self.matched.dropped if branch.add in there] + [*self.matched.ranks]
        inner = {name: self.placement.read.get(name) for name in names}
        return verify(self.masked, compared, tolerance=tolerance, seed=0, shapes=shapes, inner=inner)


def done(it: Subject, plan: Plan, *, lowering: str = "group") -> Done:
    matched = match(it.model, plan, shapes=it.shapes)
    placement = placement_of(it.model, matched, shapes=it.shapes)
    written = carry_out(it.model, matched, placement, lowering=lowering)
    return Done(matched, placement, mask(it.model, matched), written)


@dataclass
class Expected:
    """Parameters and MACs of the model that a plan describes, from the number of channels of each tensor."""

    it: Subject
    plan: Plan
    params: dict[tuple[str, int], int] = field(default_factory=dict)
    macs: int = 0

    def __post_init__(self) -> None:
        atoms = {space.name: space.atom for space in self.it.widths.spaces}
        self._keeps = {atoms[space.name]: np.array(space.keep) for space in self.plan.spaces}
        branches = {branch.name: branch for branch in self.it.widths.branches}
        gone = {name for each in self.plan.dropped for name in branches[each.name].nodes}
        self._groups = {layer.name: layer.groups for layer in self.plan.layers}
        self._ranks = {each.name: each.rank for each in self.plan.low_rank}
        for node in self.it.model.graph.node:
            if node.output[0] not in gone and not self.it.constants.is_constant(node.output[0]):
                self._visit(node)

    def _number(self, tensor: str) -> int:
        if tensor not in self.it.spaces.axes:
            return self.it.shapes[tensor][1]
        return len(kept_places(self.it.spaces, tensor, self._keeps)) * self.it.spaces.axes[tensor].repeat

    def _learn(self, node: onnx.NodeProto, slot: int, size: int) -> None:
        """Count a tensor; two biases of zeros that were one stay one if they are equally long still."""
        if slot < len(node.input) and node.input[slot]:
            self.params[node.input[slot], size] = size

    def _visit(self, node: onnx.NodeProto) -> None:
        if node.op_type in ("BatchNormalization", "InstanceNormalization", "PRelu"):
            for slot in (1,) if node.op_type == "PRelu" else (1, 2):
                self._learn(node, slot, self._number(node.output[0]))
        if node.op_type not in ("Conv", "ConvTranspose", "Gemm", "MatMul"):
            return
        data, result = self.it.shapes[node.input[0]], self.it.shapes[node.output[0]]
        if node.op_type == "MatMul" and len(data) > 2:  # not a matter of channels
            self.macs += math.prod(result) * data[-1]
            if self.it.constants.is_constant(node.input[1]):
                self._learn(node, 1, math.prod(self.it.constants.value(node.input[1]).shape))
            return
        ins, outs = self._number(node.input[0]), self._number(node.output[0])
        kernel = math.prod(self.it.shapes[node.input[1]][2:])
        existing = next((a.i for a in node.attribute if a.name == "group"), 1)
        is_depthwise = existing > 1 and existing == data[1] == result[1]
        weights = outs * ins * kernel // (ins if is_depthwise else self._groups.get(node.output[0], existing))
        if node.output[0] in self._ranks:
            weights = self._ranks[node.output[0]] * (ins * kernel + outs)
        batch, _, *pixels = data if node.op_type == "ConvTranspose" else result
        self.macs += weights * batch * math.prod(pixels)
        self._learn(node, 1, weights)
        self._learn(node, 2, outs)
