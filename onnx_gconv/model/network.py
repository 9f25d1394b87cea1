"""A model as the rest of the tool sees it: layers that can be grouped, Convs that cannot, and what it all costs."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import onnx
from numpy.typing import NDArray

from onnx_gconv.errors import ModelError
from onnx_gconv.model.attributes import integer
from onnx_gconv.model.constants import STANDARD_DOMAINS, Constants, inner_graphs
from onnx_gconv.model.count import Count, count
from onnx_gconv.model.shapes import Shape, infer
from onnx_gconv.model.transposed import CONVOLVING, as_filters

FLOATS = frozenset({"float16", "bfloat16", "float32", "float64"})
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

    def as_dict(self) -> dict[str, object]:
        """Return it for JSON."""
        return {
            "input_shapes": self.input_shapes,
            "totals": {"params": self.count.params, "macs": self.count.macs, "flops": self.count.flops},
            "layers": [layer.as_dict() for layer in self.layers],
            "skipped": [vars(conv) for conv in self.skipped],
        }


def read(model: onnx.ModelProto, inputs: Mapping[str, Shape], *, observe: ObserveShapes | None = None) -> Network:
    """Return the network at these input shapes.

    Where shape inference cannot settle the shapes that MACs need, `observe` (a run of the model) is asked.
    """
    constants = Constants(model)
    shapes = settle_shapes(model, inputs, observe=observe)
    counted = count(model, constants, shapes)
    layers, skipped = find_convs(model, constants, counted.node_macs)
    return Network(tuple(layers), tuple(skipped), counted, dict(inputs), shapes)


def settle_shapes(model: onnx.ModelProto, inputs: Mapping[str, Shape], *, observe: ObserveShapes | None) -> dict[str, Shape]:
    """Return the shape of every tensor that inference settles at these input shapes, or else a run of the model."""
    shapes = infer(model, inputs)
    missing = [name for node in model.graph.node for name in node.output if name and name not in shapes]
    if missing and observe is not None:
        shapes |= observe(model, missing, inputs)
    return shapes


def find_convs(
    model: onnx.ModelProto, constants: Constants, node_macs: Mapping[str, int | None]
) -> tuple[list[Layer], list[Skipped]]:
    """Return every Conv of the model in graph order, as a layer or as skipped with the reason."""
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
        skipped += _inside(node)
    bias_slots = {(layer.name, 2) for layer in layers}
    layers = [
        replace(layer, bias_elsewhere=not constants.readers(layer.bias) <= bias_slots) if layer.bias else layer for layer in layers
    ]
    for function in model.functions:
        skipped += [
            Skipped(
                f"{function.name}:{node.output[0]}", node.name or node.output[0], f"it is inside the function {function.name!r}"
            )
            for node in function.node
            if _is_conv(node)
        ]
    return layers, skipped


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


def _inside(node: onnx.NodeProto) -> Iterator[Skipped]:
    for graph in inner_graphs(node):
        for inner in graph.node:
            if _is_conv(inner):
                where = f"it is inside the {node.op_type} node {node.name or node.output[0]!r}"
                yield Skipped(inner.output[0], inner.name or inner.output[0], where)
            yield from _inside(inner)


def _layer(node: onnx.NodeProto, constants: Constants, node_macs: Mapping[str, int | None]) -> Layer | Skipped:
    name, label = node.output[0], node.name or node.output[0]

    def skip(reason: str) -> Skipped:
        return Skipped(name, label, reason)

    if not constants.is_constant(node.input[1]):
        return skip("its weight is computed at run time")
    if constants.quantised(node.input[1]):
        return skip("its weight is quantised (QuantizeLinear/DequantizeLinear)")
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
