"""ResNets with random weights, made without torch, where only shapes matter: `python benchmarks/resnet50.py -o resnet50.onnx`."""

import argparse
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

BLOCKS = {50: (3, 4, 6, 3), 101: (3, 4, 23, 3)}  # of each stage, by depth
WIDTHS = (64, 128, 256, 512)  # inner channels of each stage
EXPANSION, CLASSES, SIDE = 4, 1000, 224


class Drawing:
    """A graph as it grows: every method adds nodes and returns the name of what they make."""

    def __init__(self) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self.weights: list[onnx.TensorProto] = []
        self.rng = np.random.default_rng(0)

    def node(self, kind: str, *inputs: str, **attributes: object) -> str:
        name = f"{kind.lower()}_{len(self.nodes)}"
        self.nodes.append(helper.make_node(kind, inputs, [name], name=name, **attributes))
        return name

    def weight(self, *shape: int, scale: float) -> str:
        name = f"weight_{len(self.weights)}"
        self.weights.append(numpy_helper.from_array((scale * self.rng.standard_normal(shape)).astype(np.float32), name))
        return name

    def conv(self, source: str, ins: int, outs: int, kernel: int, stride: int = 1, gain: float = 2.0) -> str:
        weight = self.weight(outs, ins, kernel, kernel, scale=(gain / (ins * kernel**2)) ** 0.5)  # He: activations keep their size
        half = kernel // 2
        inputs = (source, weight, self.weight(outs, scale=0.1))
        return self.node("Conv", *inputs, kernel_shape=[kernel] * 2, strides=[stride] * 2, pads=[half] * 4)

    def block(self, source: str, ins: int, width: int, stride: int) -> str:
        inner = self.node("Relu", self.conv(source, ins, width, 1))
        inner = self.node("Relu", self.conv(inner, width, width, 3, stride))
        branch = self.conv(inner, width, EXPANSION * width, 1, gain=0.5)
        if stride > 1 or ins != EXPANSION * width:
            source = self.conv(source, ins, EXPANSION * width, 1, stride, gain=1.0)
        return self.node("Relu", self.node("Add", branch, source))


def resnet(depth: int = 50) -> onnx.ModelProto:
    """Return the model, batch normalization folded into its Convs."""
    drawing, ins = Drawing(), 64
    stream = drawing.node("Relu", drawing.conv("input", 3, ins, 7, 2))
    stream = drawing.node("MaxPool", stream, kernel_shape=[3, 3], strides=[2, 2], pads=[1, 1, 1, 1])
    for number, (blocks, width) in enumerate(zip(BLOCKS[depth], WIDTHS, strict=True)):
        for block in range(blocks):
            stream = drawing.block(stream, ins, width, 2 if number and not block else 1)
            ins = EXPANSION * width
    flat = drawing.node("Flatten", drawing.node("GlobalAveragePool", stream))
    logits = drawing.node("Gemm", flat, drawing.weight(CLASSES, ins, scale=ins**-0.5), drawing.weight(CLASSES, scale=0.1), transB=1)
    ends = [
        helper.make_tensor_value_info("input", TensorProto.FLOAT, [1, 3, SIDE, SIDE]),
        helper.make_tensor_value_info(logits, TensorProto.FLOAT, [1, CLASSES]),
    ]
    graph = helper.make_graph(drawing.nodes, f"resnet{depth}", ends[:1], ends[1:], drawing.weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-o", "--output", type=Path, default=Path("resnet50.onnx"))
    parser.add_argument("--depth", type=int, choices=BLOCKS, default=50)
    args = parser.parse_args()
    onnx.save(resnet(args.depth), args.output)
