"""Random small CNNs of the blocks that real ones are made of, with random weights, biases and statistics."""

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

BLOCKS = (
    *["plain"] * 4,
    *["residual"] * 6,
    *("depthwise", "excite", "dense", "cross_stage", "parallel", "scale", "grow", "grow", "transpose"),
    *("pool", "pool", "slice", "pad", "grouped", "reader", "odd"),
)
CHANNELS = (4, 6, 8, 12)


class RandomCnn:
    """Builds a graph block by block: `tensor`, `channels` and `size` are what the next one reads."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.opset = int(self.rng.choice([12, 17, 18]))
        self.nodes: list[onnx.NodeProto] = []
        self.tensors: list[onnx.TensorProto] = []
        self.zeros: dict[int, str] = {}  # exporters merge equal biases
        self.tensor, self.channels, self.size = "x", 3, 8
        self.plain()
        for _ in range(int(self.rng.integers(2, 7))):
            getattr(self, str(self.rng.choice(BLOCKS)))()
        self.head()

    def model(self) -> onnx.ModelProto:
        ends = [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 3, 8, 8])]
        shape = [1, 3, self.size, self.size] if self.channels == 3 else [1, 5]
        results = [helper.make_tensor_value_info(self.tensor, TensorProto.FLOAT, shape)]
        graph = helper.make_graph(self.nodes, "cnn", ends, results, self.tensors)
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", self.opset)], ir_version=8)
        model.metadata_props.add(key="author", value="nobody")
        # With every shape in the file: one that is not corrected makes the checker fail.
        return onnx.shape_inference.infer_shapes(model, strict_mode=True, data_prop=True)

    # ---- single nodes

    def flip(self, chance: float = 0.5) -> bool:
        return bool(self.rng.random() < chance)

    def constant(self, value: NDArray[np.generic]) -> str:
        name = f"c{len(self.tensors)}"
        self.tensors.append(numpy_helper.from_array(value, name))
        return name

    def random(self, *shape: int, low: float = -1.0, high: float = 1.0) -> str:
        return self.constant(self.rng.uniform(low, high, shape).astype(np.float32))

    def whole(self, *numbers: int) -> str:
        return self.constant(np.array(numbers, dtype=np.int64))

    def nodes_of(self, kind: str, inputs: list[str], outputs: int = 1, **attributes: object) -> list[str]:
        names = [f"{kind.lower()}{len(self.nodes)}_{index}" for index in range(outputs)]
        self.nodes.append(helper.make_node(kind, inputs, names, name=f"n{len(self.nodes)}", **attributes))
        return names

    def node(self, kind: str, inputs: list[str], **attributes: object) -> str:
        return self.nodes_of(kind, inputs, **attributes)[0]

    def conv(self, source: str, ins: int, outs: int, *, k: int = 1, group: int = 1, stride: int = 1) -> str:
        limit = (3 / (ins // group * k * k)) ** 0.5
        inputs = [source, self.random(outs, ins // group, k, k, low=-limit, high=limit)]
        kind = self.rng.choice(["own", "none", "shared"], p=[0.6, 0.25, 0.15])
        if kind == "own":
            inputs.append(self.random(outs))
        elif kind == "shared":
            self.zeros.setdefault(outs, self.constant(np.zeros(outs, np.float32)))
            inputs.append(self.zeros[outs])
        return self.node("Conv", inputs, pads=[k // 2] * 4, group=group, strides=[stride, stride])

    def norm(self, source: str, channels: int) -> str:
        if self.flip(0.4):
            return source
        scale, shift, mean = (self.random(channels, low=low, high=high) for low, high in ((0.5, 1.5), (-0.5, 0.5), (-0.3, 0.3)))
        variance = self.random(channels, low=0.3, high=1.5)
        return self.node("BatchNormalization", [source, scale, shift, mean, variance], epsilon=1e-3)

    def act(self, source: str, channels: int) -> str:
        kind = str(self.rng.choice(["Relu", "Relu", "LeakyRelu", "PRelu", "Clip", "Swish", "Identity"]))
        if kind == "PRelu":
            return self.node("PRelu", [source, self.random(channels, 1, 1)])
        if kind == "Clip":
            bounds = [self.constant(np.array(bound, np.float32)) for bound in (-0.5, 6.0)]
            return self.node("Clip", [source, *bounds])
        if kind == "Swish":
            return self.node("Mul", [source, self.node("Sigmoid", [source])])
        return self.node(kind, [source])

    def pick(self) -> int:
        return int(self.rng.choice(CHANNELS))

    # ---- blocks

    def plain(self) -> None:
        outs = self.pick()
        made = self.conv(self.tensor, self.channels, outs, k=int(self.rng.choice([1, 3])))
        self.tensor, self.channels = self.act(self.norm(made, outs), outs), outs

    def depthwise(self) -> None:
        made = self.conv(self.tensor, self.channels, self.channels, k=3, group=self.channels)
        self.tensor = self.act(self.norm(made, self.channels), self.channels)

    def excite(self) -> None:
        self.tensor = self._excited(self.tensor, self.channels)

    def _excited(self, source: str, channels: int) -> str:
        pooled = self.node("GlobalAveragePool", [source])
        squeezed = self.node("Relu", [self.conv(pooled, channels, 4)])
        return self.node("Mul", [source, self.node("Sigmoid", [self.conv(squeezed, 4, channels)])])

    def residual(self) -> None:
        outs = self.channels if self.flip(0.75) else self.pick()
        inner = self.pick()
        kind = str(self.rng.choice(["basic", "bottleneck", "mobile"]))
        made = self.act(self.norm(self.conv(self.tensor, self.channels, inner, k=3 if kind == "basic" else 1), inner), inner)
        if kind == "bottleneck":
            made = self.act(self.norm(self.conv(made, inner, inner, k=3), inner), inner)
        elif kind == "mobile":
            made = self.act(self.norm(self.conv(made, inner, inner, k=3, group=inner), inner), inner)
            made = self._excited(made, inner) if self.flip(0.3) else made
        made = self.norm(self.conv(made, inner, outs, k=3 if kind == "basic" else 1), outs)
        shortcut = self.tensor
        if outs != self.channels:
            shortcut = self.norm(self.conv(self.tensor, self.channels, outs), outs)
        total = self.node("Add", [made, shortcut] if self.flip() else [shortcut, made])
        self.tensor, self.channels = self.act(total, outs) if self.flip(0.7) else total, outs

    def dense(self) -> None:
        """DenseNet: what was there stays, beside something new."""
        if self.channels <= 16:
            more = self.pick()
            made = self.act(self.conv(self.tensor, self.channels, more, k=3), more)
            self.tensor, self.channels = self.node("Concat", [self.tensor, made], axis=1), self.channels + more

    def parallel(self) -> None:
        one, two = self.pick(), self.pick()
        parts = [self.act(self.conv(self.tensor, self.channels, outs, k=k), outs) for outs, k in ((one, 1), (two, 3))]
        self.tensor, self.channels = self.node("Concat", parts, axis=1), one + two

    def cross_stage(self) -> None:
        """YOLO: one part goes straight on, the other through a Conv."""
        first = int(self.rng.choice([2, self.channels // 2]))
        sizes = [first, self.channels - first]
        if not 0 < first < self.channels:
            return
        is_equal = sizes[0] == sizes[1] and self.flip(0.3)
        inputs, attributes = [self.tensor], {}
        if is_equal and self.opset >= 18:
            attributes["num_outputs"] = 2
        elif not is_equal and self.opset >= 13:
            inputs.append(self.whole(*sizes))
        elif not is_equal:
            attributes["split"] = sizes
        one, two = self.nodes_of("Split", inputs, 2, axis=1, **attributes)
        more = self.pick()
        made = self.act(self.conv(two, sizes[1], more, k=3), more)
        self.tensor, self.channels = self.node("Concat", [one, two, made], axis=1), self.channels + more

    def scale(self) -> None:
        shapes = [(self.channels, 1, 1), (1, self.channels, 1, 1), (1,), (self.channels, self.size, self.size)]
        shape = shapes[int(self.rng.integers(4))]
        self.tensor = self.node(str(self.rng.choice(["Mul", "Add", "Sub", "Max"])), [self.tensor, self.random(*shape)])

    def pool(self) -> None:
        if self.size >= 4:
            kind = str(self.rng.choice(["MaxPool", "AveragePool"]))
            self.tensor = self.node(kind, [self.tensor], kernel_shape=[2, 2], strides=[2, 2])
            self.size //= 2

    def grow(self) -> None:
        """Resize, its sizes as constants, as factors, or taken from what it reads."""
        if self.size > 8:
            return
        self.size *= 2
        kind = str(self.rng.choice(["sizes", "scales", "shape", "half constant"]))
        unused = self.constant(np.zeros(0, np.float32)) if self.opset < 13 else ""
        if kind == "scales":
            inputs = [unused, self.constant(np.array([1, 1, 2, 2], np.float32))]
        elif kind == "sizes":
            inputs = [unused, unused, self.whole(1, self.channels, self.size, self.size)]
        elif kind == "shape":
            shape = self.node("Shape", [self.tensor])
            begin = self.node("Slice", [shape, self.whole(0), self.whole(2)])
            inputs = [unused, unused, self.node("Concat", [begin, self.whole(self.size, self.size)], axis=0)]
        else:
            shape = self.node("Shape", [self.tensor])
            pixels = self.node("Mul", [self.node("Slice", [shape, self.whole(2), self.whole(4)]), self.whole(2)])
            inputs = [unused, unused, self.node("Concat", [self.whole(1, self.channels), pixels], axis=0)]
        self.tensor = self.node("Resize", [self.tensor, *inputs], mode="nearest")

    def transpose(self) -> None:
        outs = self.pick()
        limit = (3 / (self.channels * 9)) ** 0.5
        weight = self.random(self.channels, outs, 3, 3, low=-limit, high=limit)
        self.tensor = self.node("ConvTranspose", [self.tensor, weight, self.random(outs)], pads=[1] * 4)
        self.channels = outs

    def slice(self) -> None:
        start, end = sorted(int(v) for v in self.rng.choice(self.channels + 1, 2, replace=False))
        self.tensor = self.node("Slice", [self.tensor, self.whole(start), self.whole(end), self.whole(1)])
        self.channels = end - start

    def pad(self) -> None:
        if self.channels <= 12:
            self.tensor, self.channels = self.node("Pad", [self.tensor, self.whole(0, 2, 0, 0, 0, 2, 0, 0)]), self.channels + 4

    def grouped(self) -> None:
        if self.channels % 2 == 0:
            self.tensor, self.channels = self.conv(self.tensor, self.channels, 8, group=2), 8

    def reader(self) -> None:
        """Something that is computed from the shape: with the number of channels in it, or not."""
        shape = self.node("Shape", [self.tensor])
        index = int(self.rng.choice([1, 2]))
        number = self.node("Cast", [self.node("Gather", [shape, self.whole(index)])], to=TensorProto.FLOAT)
        self.tensor = self.node("Div", [self.tensor, number])

    def odd(self) -> None:
        """Not channel-wise: it mixes channels, so it pins them."""
        self.tensor = self.node("Softmax", [self.tensor], axis=1)

    def head(self) -> None:
        """A classifier, or a map that a Conv makes."""
        if self.flip(0.3):
            self.tensor, self.channels = self.conv(self.tensor, self.channels, 3), 3
            return
        if self.flip(0.6):
            self.tensor, self.size = self.node("GlobalAveragePool", [self.tensor]), 1
        wide = self.channels * self.size**2
        flat = self._flat(wide)
        hidden = self.pick()
        limit = (3 / wide) ** 0.5
        if self.flip():
            made = self.node("Gemm", [flat, self.random(hidden, wide, low=-limit, high=limit), self.random(hidden)], transB=1)
            made = self.node("Relu", [made])
            self.tensor, self.channels = self.node("Gemm", [made, self.random(hidden, 5), self.random(1, 5)]), 5
        else:
            made = self.node("MatMul", [flat, self.random(wide, hidden, low=-limit, high=limit)])
            made = self.node("Add", [made, self.random(hidden)])
            self.tensor, self.channels = self.node("MatMul", [made, self.random(hidden, 5)]), 5

    def _flat(self, wide: int) -> str:
        kind = str(self.rng.choice(["Flatten", "rest", "number", "shape"]))
        if kind == "Flatten":
            return self.node("Flatten", [self.tensor])
        if kind == "shape":
            batch = self.node("Gather", [self.node("Shape", [self.tensor]), self.whole(0)])
            return self.node("Reshape", [self.tensor, self.node("Concat", [batch, self.whole(-1)], axis=0)])
        return self.node("Reshape", [self.tensor, self.whole(1, -1) if kind == "rest" else self.whole(-1, wide)])
