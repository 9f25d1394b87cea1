"""Parameters and multiply-accumulates (MACs) of a whole model.

Parameters are the learned tensors: weights and biases of Conv, ConvTranspose, Gemm and MatMul, scale and bias of
normalisations, slopes of PRelu, weights of recurrent layers; a tensor that several nodes read counts once. Running
statistics are not learned. MACs are those of Conv, ConvTranspose, Gemm and MatMul, quantised and fused ones too; FLOPs = 2 x MACs,
as in the paper.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import onnx

from onnx_gconv.model.attributes import integer
from onnx_gconv.model.bodies import Body
from onnx_gconv.model.constants import Constants
from onnx_gconv.model.shapes import Shape

LEARNED_INPUTS: dict[str, tuple[int, ...]] = {
    "BatchNormalization": (1, 2),
    "Conv": (1, 2),
    "ConvInteger": (1,),
    "ConvTranspose": (1, 2),
    "DeformConv": (1, 3),
    "FusedConv": (1, 2),
    "FusedGemm": (1, 2),
    "FusedMatMul": (0, 1),
    "GRU": (1, 2, 3),
    "Gemm": (1, 2),
    "GroupNormalization": (1, 2),
    "InstanceNormalization": (1, 2),
    "LSTM": (1, 2, 3),
    "LayerNormalization": (1, 2),
    "MatMul": (0, 1),
    "MatMulInteger": (0, 1),
    "NhwcFusedConv": (1, 2),
    "PRelu": (1,),
    "QLinearConv": (3, 8),
    "QLinearMatMul": (0, 3),
    "RNN": (1, 2, 3),
}
# Ops of a Conv's arithmetic, and the input that the weight is.
CONVS = {"Conv": 1, "ConvInteger": 1, "DeformConv": 1, "FusedConv": 1, "NhwcFusedConv": 1, "QLinearConv": 3}
PRODUCTS = {"FusedGemm": 1, "FusedMatMul": 1, "Gemm": 1, "MatMul": 1, "MatMulInteger": 1, "QLinearMatMul": 3}
MULTIPLYING = CONVS | PRODUCTS | {"ConvTranspose": 1}


@dataclass(frozen=True)
class Count:
    """What a model costs. `macs` is None when the shape of some multiplying node is not known."""

    params: int
    macs: int | None
    node_macs: Mapping[str, int | None]  # by the node's first output

    @property
    def flops(self) -> int | None:
        return None if self.macs is None else 2 * self.macs


def count(model: onnx.ModelProto, constants: Constants, shapes: Mapping[str, Shape], inner: Sequence[Body]) -> Count:
    """Return the parameters and MACs of the main graph and of its bodies, all of them as if each ran once.

    What a body multiplies in shapes that are not known is left out, unless nothing else is there to count.
    """
    learned = _learned(model.graph.node, constants, shapes)
    node_macs = {node.output[0]: _macs(node, shapes) for node in model.graph.node if node.op_type in MULTIPLYING}
    params, inside = sum(learned.values()), dict[str, int | None]()
    for body in inner:
        params += sum(_learned(body.graph.node, body.constants, shapes).values())
        learned_outside = _learned(body.graph.node, constants, shapes)
        params += sum(size for name, size in learned_outside.items() if name not in body.own and name not in learned)
        learned |= learned_outside
        inside |= {node.output[0]: _macs(node, shapes) for node in body.graph.node if node.op_type in MULTIPLYING}
    known = [macs for macs in (*node_macs.values(), *inside.values()) if macs is not None]
    is_known = None not in node_macs.values() and (known or not inside)
    return Count(params, sum(known) if is_known else None, node_macs | inside)


def _learned(nodes: Iterable[onnx.NodeProto], constants: Constants, shapes: Mapping[str, Shape]) -> dict[str, int]:
    """Return the size of each learned tensor, by the name of what holds it."""
    learned: dict[str, int] = {}
    for node in nodes:
        for slot in LEARNED_INPUTS.get(node.op_type, ()):
            if slot < len(node.input) and constants.is_constant(node.input[slot]):
                origin = constants.origin(node.input[slot])
                shape = shapes.get(origin, shapes.get(node.input[slot]))
                learned[origin] = math.prod(constants.value(origin).shape if shape is None else shape)
    return learned


def _macs(node: onnx.NodeProto, shapes: Mapping[str, Shape]) -> int | None:
    slot = MULTIPLYING[node.op_type]
    data, weight, result = (shapes.get(name) for name in (node.input[0], "".join(node.input[slot : slot + 1]), node.output[0]))
    if result is None or (weight is None and node.op_type != "Gemm"):
        return None
    if node.op_type in CONVS:
        return math.prod(result) * math.prod(weight[1:]) if weight else None
    if not data:
        return None
    if node.op_type == "ConvTranspose":
        return math.prod(data) * math.prod(weight[1:]) if weight else None
    # Of a transposed product the inner axis is the one before the last.
    inner = data[-2 if len(data) > 1 and integer(node, "transA", 0) else -1]
    return math.prod(result) * inner
