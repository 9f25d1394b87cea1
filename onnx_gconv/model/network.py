"""A model as the rest of the tool sees it: layers that can be grouped, Convs that cannot, and what it all costs."""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import onnx
from numpy.typing import NDArray

from onnx_gconv.errors import ModelError
from onnx_gconv.model.attributes import integer
from onnx_gconv.model.bodies import STEERED, Body, bodies, times_made
from onnx_gconv.model.channelwise import PER_CHANNEL
from onnx_gconv.model.constants import STANDARD_DOMAINS, Constants, inner_graphs, stored
from onnx_gconv.model.count import CONVS, Count, count
from onnx_gconv.model.listed import FREE_INITIALIZERS_IR
from onnx_gconv.model.shapes import Shape, infer, require_affordable
from onnx_gconv.model.transposed import CONVOLVING, as_filters

FLOATS = frozenset({"float16", "bfloat16", "float32", "float64"})
QUANTISED_WEIGHT = "its weight is quantised (QuantizeLinear/DequantizeLinear)"
QUANTISED_CONVS = frozenset({"ConvInteger", "QLinearConv"})
ObserveShapes = Callable[[onnx.ModelProto, Sequence[str], Mapping[str, Shape]], dict[str, Shape]]


@dataclass(frozen=True)
class Layer:
    """One Conv or ConvTranspose that could be grouped, named by its output tensor."""

    name: str
    label: str
    out_channels: int
    in_channels: int
    kernel: Shape
    groups: int  # that it has already
    weight: str  # the tensor that holds the weight
    bias: str  # the tensor that holds the bias, "" if there is none
    bias_elsewhere: bool  # whether more than groupable Convs read the bias
    dtype: str
    macs: int | None
    is_transposed: bool = False  # a ConvTranspose

    @property
    def weights(self) -> int:
        """Number of weights, bias not included."""
        return self.out_channels * (self.in_channels // self.groups) * math.prod(self.kernel)

    @property
    def break_even_rank(self) -> int:
        """The smallest rank at which two Convs, the second 1x1, have no fewer weights than this one."""
        patch = self.in_channels * math.prod(self.kernel)
        return -(-patch * self.out_channels // (patch + self.out_channels))

    @property
    def legal_groups(self) -> tuple[int, ...]:
        """Every number of groups it can have, the present one first: G divides both channel counts and refines it."""
        common = math.gcd(self.in_channels, self.out_channels)
        return tuple(g for g in range(self.groups, common + 1, self.groups) if common % g == 0)

    def as_dict(self) -> dict[str, object]:
        """Return it for JSON."""
        names = ("name", "label", "out_channels", "in_channels", "kernel", "groups", "legal_groups", "dtype")
        return {name: getattr(self, name) for name in names} | {"params": self.weights, "macs": self.macs}


@dataclass(frozen=True)
class Skipped:
    """One Conv that stays as it is, and why."""

    name: str
    label: str
    reason: str


@dataclass(frozen=True)
class Network:
    """The layers and skipped Convs of a model in graph order, and its cost at `input_shapes`."""

    layers: tuple[Layer, ...]
    skipped: tuple[Skipped, ...]
    count: Count
    input_shapes: Mapping[str, Shape]
    shapes: Mapping[str, Shape]  # of every tensor that could be settled at these input shapes
    failed_run: str = ""  # why a run that was to settle shapes failed, if it did
    inside: tuple[Layer, ...] = ()  # layers in bodies of If, Loop and Scan: coupled with none of the others

    @property
    def all_layers(self) -> tuple[Layer, ...]:
        """The layers of the main graph, and those in bodies."""
        return *self.layers, *self.inside

    def as_dict(self) -> dict[str, object]:
        """Return it for JSON."""
        return {
            "input_shapes": self.input_shapes,
            "totals": {"params": self.count.params, "macs": self.count.macs, "flops": self.count.flops},
            "layers": [layer.as_dict() for layer in self.all_layers],
            "skipped": [vars(conv) for conv in self.skipped],
        }


def read(model: onnx.ModelProto, inputs: Mapping[str, Shape], *, observe: ObserveShapes | None = None) -> Network:
    """Return the network at these input shapes.

    Where shape inference cannot settle the shapes that MACs need, `observe` (a run of the model) is asked.
    """
    constants = Constants(model)
    settled = _settle(model, inputs, observe)
    _require_fitting(model, constants, settled.shapes)
    inner = bodies(model)
    counted = count(model, constants, settled.shapes, inner)
    layers, skipped = find_convs(model, constants, counted.node_macs)
    inside, skipped_inside = find_inside(model, constants, counted.node_macs, inner)
    whole = counted, dict(inputs), settled.shapes, settled.failed_run
    return Network(tuple(layers), (*skipped, *skipped_inside), *whole, tuple(inside))


def _require_fitting(model: onnx.ModelProto, constants: Constants, shapes: Mapping[str, Shape]) -> None:
    """Refuse a Conv or normalization whose constants are for another number of channels than it reads."""

    def shape_of(name: str) -> Shape | None:
        try:
            return constants.value(name).shape if name not in shapes and constants.is_constant(name) else shapes.get(name)
        except ModelError:  # it cannot be folded, which is told where its value is needed
            return None

    for node in model.graph.node:
        data = shapes.get(node.input[0]) if node.input and node.domain in STANDARD_DOMAINS else None
        for name in _misfits(node, data, shape_of) if data is not None and len(data) > 1 else ():
            raise ModelError(
                f"the {node.op_type} {node.name or node.output[0]!r} reads {node.input[0]!r} of {_times(data)}, which "
                f"does not fit {name!r} of {_times(shape_of(name))}.",
                hint="the model is malformed, or give another --input-shape",
            )


def _misfits(node: onnx.NodeProto, data: Shape, shape_of: Callable[[str], Shape | None]) -> Iterator[str]:
    """Yield the constants of a node that have other shapes than data of this shape asks for."""
    for slot in PER_CHANNEL.get(node.op_type, ()):
        if shape_of(node.input[slot]) not in (None, data[1:2]):
            yield node.input[slot]
    weight = shape_of(node.input[1]) if node.op_type in CONVOLVING else None
    if weight is not None and len(weight) > 2:
        groups = integer(node, "group", 1)
        whole, all_groups = weight[0], weight[1] * groups
        ins, outs = (all_groups, whole) if node.op_type == "Conv" else (whole, all_groups)
        if len(data) != len(weight) or data[1] != ins or whole % groups:
            yield node.input[1]
        if len(node.input) > 2 and node.input[2] and shape_of(node.input[2]) not in (None, (outs,)):
            yield node.input[2]


def _times(shape: Shape | None) -> str:
    return "x".join(map(str, shape or ()))


@dataclass(frozen=True)
class _Settled:
    """The shapes that are known, and why a run that was to tell the others failed, if it did."""

    shapes: dict[str, Shape]
    failed_run: str = ""


def settle_shapes(model: onnx.ModelProto, inputs: Mapping[str, Shape], *, observe: ObserveShapes | None) -> dict[str, Shape]:
    """Return the shape of every tensor that inference settles at these input shapes, or else a run of the model."""
    return _settle(model, inputs, observe).shapes


def _settle(model: onnx.ModelProto, inputs: Mapping[str, Shape], observe: ObserveShapes | None) -> _Settled:
    shapes = infer(model, inputs)
    require_affordable(shapes)
    missing = [name for node in model.graph.node for name in node.output if name and name not in shapes]
    inner = [body.graph for body in bodies(model) if any(map(_is_conv, body.graph.node))]
    made = times_made(model.graph) if inner else Counter[str]()
    hidden = [name for graph in inner for node in graph.node for name in node.output if made[name] == 1 and name not in shapes]
    if not (missing or hidden) or observe is None:
        return _Settled(shapes)
    try:
        return _Settled(shapes | observe(model, [*missing, *hidden], inputs))
    except ModelError as error:
        return _Settled(shapes, str(error))


def find_convs(
    model: onnx.ModelProto, constants: Constants, node_macs: Mapping[str, int | None]
) -> tuple[list[Layer], list[Skipped]]:
    """Return every Conv of the main graph in its order, as a layer or as skipped with the reason; and those of functions."""
    layers: list[Layer] = []
    skipped: list[Skipped] = []
    # A Conv and a ConvTranspose with one weight would each group it in its own way.
    weight_slots: dict[str, set[tuple[str, int]]] = {kind: set() for kind in CONVOLVING}
    for node in model.graph.node:
        if _is_conv(node):
            weight_slots[node.op_type].add((node.output[0], 1))
    for node in model.graph.node:
        if _is_conv(node):
            found = _layer(node, constants, node_macs)
            if isinstance(found, Layer) and not constants.readers(found.weight) <= weight_slots[node.op_type]:
                found = Skipped(found.name, found.label, f"its weight is also read by something that is not a {node.op_type}")
            if isinstance(found, Layer):
                layers.append(found)
            else:
                skipped.append(found)
        elif node.op_type in CONVS:
            skipped.append(Skipped(node.output[0], node.name or node.output[0], _why_other(node)))
    bias_slots = {(layer.name, 2) for layer in layers}
    layers = [
        replace(layer, bias_elsewhere=not constants.readers(layer.bias) <= bias_slots) if layer.bias else layer for layer in layers
    ]
    for function in model.functions:
        skipped += [
            Skipped(
                f"{function.name}:{node.output[0]}", node.name or node.output[0], f"it is inside the function {function.name!r}"
            )
            for node in _at_any_depth(function.node)
            if node.op_type in CONVS or node.op_type in CONVOLVING
        ]
    return layers, skipped


def find_inside(
    model: onnx.ModelProto, constants: Constants, node_macs: Mapping[str, int | None], inner: Sequence[Body]
) -> tuple[list[Layer], list[Skipped]]:
    """Return every Conv in a body of an If, Loop or Scan, as a layer of its own or as skipped with the reason."""
    layers: list[Layer] = []
    skipped: list[Skipped] = []
    made = times_made(model.graph) if inner else Counter[str]()
    for body in inner:
        outside = {name for graph in body.enclosing[1:] for name in stored(graph)}
        read_from = {node.output[0]: node.input[1:] for node in body.graph.node if _is_conv(node)}
        found, others = find_convs(body.model, body.constants, node_macs)
        for layer in found:
            why = _why_inside(layer, body, made)
            if why:
                others.append(Skipped(layer.name, layer.label, why))
            else:
                layers.append(layer)
        for conv in others:
            weights = [name for name in read_from.get(conv.name, []) if name in outside or constants.is_constant(name)]
            is_outside = any(name not in body.own for name in weights)
            reason = f"it is inside {body.where}, and its weight or bias is read outside it as well" if is_outside else conv.reason
            skipped.append(replace(conv, reason=reason))
    return layers, skipped


def _why_inside(layer: Layer, body: Body, made: Mapping[str, int]) -> str:
    """Return why a Conv that could be grouped in a main graph cannot be in this body, or nothing."""
    where = f"it is inside {body.where}"
    shared = [name for name in (layer.name, layer.weight, layer.bias) if name and made[name] > 1]
    if body.node.op_type not in STEERED:
        return where
    if not body.constants.is_stored(layer.weight):
        return f"{where}, and its weight is computed from constants"
    if body.whole.ir_version < FREE_INITIALIZERS_IR:
        return f"{where}, and before IR version {FREE_INITIALIZERS_IR} a body holds no weights of its own"
    if shared:
        return f"{where}, and another graph of the model has a tensor {shared[0]!r}, too"
    return ""


def is_quantised_throughout(skipped: Sequence[Skipped]) -> bool:
    """Return whether these are Convs, and all of them quantised."""
    reasons = {QUANTISED_WEIGHT, *map(_is_quantised, QUANTISED_CONVS)}
    return bool(skipped) and all(conv.reason in reasons for conv in skipped)


def layer_weight(constants: Constants, layer: Layer) -> NDArray[np.generic]:
    """Return the layer's weight, (Cout, Cin per group, *kernel), refusing NaN and infinity, which no importance can rank."""
    weight = constants.value(layer.weight)
    if not np.isfinite(weight).all():
        raise ModelError(
            f"the weight {layer.weight!r} of Conv {layer.label!r} holds NaN or infinity.",
            hint="export the model again from a healthy checkpoint",
        )
    return as_filters(weight, layer.groups) if layer.is_transposed else weight


def _is_conv(node: onnx.NodeProto) -> bool:
    return node.op_type in CONVOLVING and node.domain in STANDARD_DOMAINS


def _why_other(node: onnx.NodeProto) -> str:
    """Return why a Conv that is not ONNX's plain one stays as it is."""
    if node.op_type in QUANTISED_CONVS:
        return _is_quantised(node.op_type)
    if node.op_type == "FusedConv":
        return "what it is fused with is not known (FusedConv)"
    return f"it is a {node.op_type} of {node.domain or 'ai.onnx'}, not a plain Conv"


def _is_quantised(op_type: str) -> str:
    return f"it is quantised ({op_type})"


def _at_any_depth(nodes: Iterable[onnx.NodeProto]) -> Iterator[onnx.NodeProto]:
    """Yield the nodes, and those of their bodies."""
    for node in nodes:
        yield node
        for graph in inner_graphs(node):
            yield from _at_any_depth(graph.node)


def _layer(node: onnx.NodeProto, constants: Constants, node_macs: Mapping[str, int | None]) -> Layer | Skipped:
    name, label = node.output[0], node.name or node.output[0]

    def skip(reason: str) -> Skipped:
        return Skipped(name, label, reason)

    if constants.is_constant(name):
        return skip("it reads no input of the model: what it gives is constant")
    if not constants.is_constant(node.input[1]):
        return skip("its weight is computed at run time")
    if constants.quantised(node.input[1]):
        return skip(QUANTISED_WEIGHT)
    if len(node.input) > 2 and node.input[2] and not constants.is_constant(node.input[2]):
        return skip("its bias is computed at run time")
    try:
        weight = constants.value(node.input[1])
    except ModelError as error:
        return skip(str(error))
    if weight.dtype.name not in FLOATS:
        return skip(f"its weight has type {weight.dtype.name}")
    if weight.ndim < 3:
        return skip(f"its weight has only {weight.ndim} axes")
    groups, is_transposed = integer(node, "group", 1), node.op_type == "ConvTranspose"
    whole, of_one_group = weight.shape[:2]
    layer = Layer(
        name=name,
        label=label,
        out_channels=of_one_group * groups if is_transposed else whole,
        in_channels=whole if is_transposed else of_one_group * groups,
        kernel=weight.shape[2:],
        groups=groups,
        weight=constants.origin(node.input[1]),
        bias=constants.origin(node.input[2]) if len(node.input) > 2 else "",
        bias_elsewhere=False,
        dtype=weight.dtype.name,
        macs=node_macs.get(name),
        is_transposed=is_transposed,
    )
    if layer.groups == layer.in_channels:
        return skip("depthwise: each group has one input channel already" if groups > 1 else "it has one input channel")
    if len(layer.legal_groups) < 2:
        more = f" in each of its {groups} groups" if groups > 1 else ""
        return skip(
            f"{layer.in_channels // groups} input and {layer.out_channels // groups} output channels{more} have no common divisor"
        )
    return layer
