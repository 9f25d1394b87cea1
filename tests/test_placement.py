"""Channel orders: random small graphs of every known op stay the same function, whatever is grouped how."""

from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator
from onnx.reference.ops.op_conv_transpose import ConvTranspose as DenseConvTranspose

import onnx_gconv
from onnx_gconv.errors import BudgetError, ModelError
from onnx_gconv.model.axes import Atoms
from onnx_gconv.model.constants import Constants
from onnx_gconv.model.network import find_convs
from onnx_gconv.plans import Plan, PlannedLayer, Totals
from onnx_gconv.rewrite.group import carry_out, placement_of
from onnx_gconv.rewrite.mask import mask
from onnx_gconv.rewrite.match import match
from onnx_gconv.verification import compare

SIZE = 4
KINDS = (*["conv"] * 5, "grouped", "depthwise", "unary", "norm", "scale", *["add"] * 2, "concat", "split", "slice", "pad", "se")
KINDS += ("transpose", "odd")


class Random:
    """Builds a random graph: every tensor in `live` can be read by what comes next."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.nodes: list[onnx.NodeProto] = []
        self.tensors: list[onnx.TensorProto] = []
        self.live: list[tuple[str, int]] = [("x", 4)]
        self.number = 0
        for _ in range(int(self.rng.integers(4, 14))):
            self.step()

    def name(self) -> str:
        self.number += 1
        return f"t{self.number}"

    def constant(self, *shape: int, positive: bool = False) -> str:
        value = (self.rng.standard_normal(shape) / np.sqrt(np.prod(shape[1:]))).astype(np.float32)
        name = f"c{len(self.tensors)}"
        self.tensors.append(numpy_helper.from_array(np.abs(value) + 0.5 if positive else value, name))
        return name

    def whole(self, *numbers: int) -> str:
        name = f"c{len(self.tensors)}"
        self.tensors.append(numpy_helper.from_array(np.array(numbers, dtype=np.int64), name))
        return name

    def node(self, kind: str, inputs: list[str], outputs: int = 1, **attributes: object) -> list[str]:
        names = [self.name() for _ in range(outputs)]
        self.nodes.append(helper.make_node(kind, inputs, names, **attributes))
        return names

    def pick(self, channels: int | None = None) -> tuple[str, int]:
        fitting = [item for item in self.live if channels in (None, item[1])]
        return fitting[int(self.rng.integers(max(0, len(fitting) - 4), len(fitting)))]  # mostly the newest

    def step(self) -> None:
        kind = self.rng.choice(
            ["conv"] * 5
            + [
                "grouped",
                "depthwise",
                "unary",
                "norm",
                "scale",
                "add",
                "add",
                "concat",
                "split",
                "slice",
                "pad",
                "se",
                "transpose",
                "odd",
            ]
        )
        name, channels = self.pick()
        getattr(self, f"_{kind}")(name, channels)

    def _push(self, name: str, channels: int) -> None:
        self.live.append((name, channels))

    def _conv(self, name: str, channels: int) -> None:
        outs = int(self.rng.choice([4, 6, 8, 12, channels]))
        k = int(self.rng.choice([1, 3]))
        bias = [self.constant(outs)] if self.rng.random() < 0.5 else []
        self._push(*self.node("Conv", [name, self.constant(outs, channels, k, k), *bias], pads=[k // 2] * 4), outs)

    def _grouped(self, name: str, channels: int) -> None:
        if channels % 2 == 0:
            self._push(*self.node("Conv", [name, self.constant(8, channels // 2, 1, 1), self.constant(8)], group=2), 8)

    def _depthwise(self, name: str, channels: int) -> None:
        inputs = [name, self.constant(channels, 1, 3, 3), self.constant(channels)]
        self._push(*self.node("Conv", inputs, group=channels, pads=[1] * 4), channels)

    def _unary(self, name: str, channels: int) -> None:
        kind = str(self.rng.choice(["Relu", "Sigmoid", "LeakyRelu", "Identity", "Tanh", "HardSwish"]))
        self._push(*self.node(kind, [name]), channels)

    def _norm(self, name: str, channels: int) -> None:
        if self.rng.random() < 0.5:
            inputs = [self.constant(channels) for _ in range(3)] + [self.constant(channels, positive=True)]
            self._push(*self.node("BatchNormalization", [name, *inputs]), channels)
        else:
            self._push(*self.node("InstanceNormalization", [name, self.constant(channels), self.constant(channels)]), channels)

    def _scale(self, name: str, channels: int) -> None:
        shape = [(channels, 1, 1), (1, channels, 1, 1), (1,), (channels, SIZE, SIZE)][int(self.rng.integers(4))]
        kind = str(self.rng.choice(["Mul", "Add", "Sub", "PRelu", "Max"]))
        inputs = [name, self.constant(*shape)]
        self._push(*self.node(kind, inputs), channels)

    def _add(self, name: str, channels: int) -> None:
        other, _ = self.pick(channels)
        self._push(*self.node(str(self.rng.choice(["Add", "Mul", "Sub", "Max"])), [name, other]), channels)

    def _concat(self, name: str, channels: int) -> None:
        other, more = self.pick()
        if channels + more <= 24:
            self._push(*self.node("Concat", [name, other], axis=1), channels + more)

    def _split(self, name: str, channels: int) -> None:
        first = int(self.rng.choice([2, channels // 2]))
        if 0 < first < channels:
            one, two = self.node("Split", [name, self.whole(first, channels - first)], 2, axis=1)
            self._push(one, first)
            self._push(two, channels - first)

    def _slice(self, name: str, channels: int) -> None:
        start, end = sorted(int(v) for v in self.rng.choice(channels + 1, 2, replace=False))
        self._push(*self.node("Slice", [name, self.whole(start), self.whole(end), self.whole(1)]), end - start)

    def _pad(self, name: str, channels: int) -> None:
        if channels <= 12:
            self._push(*self.node("Pad", [name, self.whole(0, 2, 0, 0, 0, 2, 0, 0)]), channels + 4)

    def _se(self, name: str, channels: int) -> None:
        (pooled,) = self.node("GlobalAveragePool", [name])
        (squeezed,) = self.node("Conv", [pooled, self.constant(4, channels, 1, 1)])
        (excited,) = self.node("Conv", [self.node("Relu", [squeezed])[0], self.constant(channels, 4, 1, 1)])
        self._push(*self.node("Mul", [name, self.node("Sigmoid", [excited])[0]]), channels)

    def _transpose(self, name: str, channels: int) -> None:
        self._push(*self.node("ConvTranspose", [name, self.constant(channels, 6, 3, 3), self.constant(6)], pads=[1] * 4), 6)

    def _odd(self, name: str, channels: int) -> None:
        """An op that is not channel-wise: it mixes or names channels, so it has to pin them."""
        if self.rng.random() < 0.5:
            self.tensors.append(numpy_helper.from_array(np.array(1), f"c{len(self.tensors)}"))
            self._push(*self.node("CumSum", [name, f"c{len(self.tensors) - 1}"]), channels)
        else:
            self._push(*self.node("Softmax", [name], axis=1), channels)

    def model(self) -> onnx.ModelProto:
        read = {name for node in self.nodes for name in node.input}
        ends = [(name, channels) for name, channels in self.live[1:] if name not in read] or [self.live[-1]]
        results = []
        for name, channels in ends:
            if self.rng.random() < 0.5:  # a classifier behind Flatten, which sees channels times pixels
                (flat,) = (
                    self.node("Flatten", [name]) if self.rng.random() < 0.5 else self.node("Reshape", [name, self.whole(1, -1)])
                )
                (name,) = self.node("Gemm", [flat, self.constant(3, channels * SIZE * SIZE), self.constant(3)], transB=1)
                results.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, 3]))
            else:
                results.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, channels, SIZE, SIZE]))
        inputs = [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 4, SIZE, SIZE])]
        graph = helper.make_graph(self.nodes, "random", inputs, results, self.tensors)
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def random_plan(model: onnx.ModelProto, rng: np.random.Generator) -> Plan:
    layers, _ = find_convs(model, Constants(model), {})
    planned = []
    for layer in layers:
        if rng.random() < 0.8:
            groups = int(rng.choice(layer.legal_groups[1:]))
            orders = []
            for channels in (layer.in_channels, layer.out_channels):  # arbitrary inside the groups that the Conv has
                part = channels // layer.groups
                orders.append(tuple(int(c) for g in range(layer.groups) for c in rng.permutation(part) + g * part))
            planned.append(PlannedLayer(layer.name, layer.name, layer.out_channels, layer.in_channels, groups, 0.5, *orders))
    return Plan("", "l2", "paper", "local", 0, {}, "free", Totals(0, 0), Totals(0, 0), tuple(planned), ())


class ConvTranspose(DenseConvTranspose):
    """Group by group: with groups, onnx 1.23 takes the wrong part of the weight."""

    op_domain = ""

    def _run(self, x: np.ndarray, weight: np.ndarray, bias: np.ndarray | None = None, **attributes: Any) -> tuple[np.ndarray]:
        groups = attributes.pop("group", None) or 1
        parts = [np.split(x, groups, axis=1), np.split(weight, groups), [None] * groups if bias is None else np.split(bias, groups)]
        results = [super(ConvTranspose, self)._run(*part, group=1, **attributes)[0] for part in zip(*parts, strict=True)]
        return (np.concatenate(results, axis=1),)


def differs(one: onnx.ModelProto, two: onnx.ModelProto, seed: int) -> float:
    x = np.random.default_rng(seed).standard_normal((1, 4, SIZE, SIZE)).astype(np.float32)
    results = [ReferenceEvaluator(model, new_ops=[ConvTranspose]).run(None, {"x": x}) for model in (one, two)]
    return max(compare(a, b).max_rel for a, b in zip(*results, strict=True))


@pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning")  # the reference evaluator's Sigmoid of a large number
@pytest.mark.parametrize("start", range(0, 500, 50))
def test_random_graphs_stay_the_same_function(start: int) -> None:
    """500 graphs; tolerance: float32 rounding through a dozen layers, where outputs may cancel."""
    grouped_convs = saved = 0
    for seed in range(start, start + 50):
        model = Random(seed).model()
        plan = random_plan(model, np.random.default_rng([seed, 1]))
        placement = placement_of(model, match(model, plan))
        grouped = carry_out(model, match(model, plan), placement)
        onnx.checker.check_model(grouped, full_check=True)
        assert differs(mask(model, match(model, plan)), grouped, seed) < 1e-4, seed
        grouped_convs += len(plan.layers)
        saved += 2 * len(placement.convs) - len(placement.gathers)
    assert grouped_convs > 50
    assert saved > 0


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning")
@pytest.mark.parametrize("gathers", ["shared", "none"])
@pytest.mark.parametrize("start", range(0, 250, 50))
def test_random_graphs_with_shared_partitions_stay_the_same_function(start: int, gathers: str) -> None:
    grouped_convs = clean = tried = 0
    for seed in range(start, start + 50):
        model = Random(seed).model()
        try:
            plan = onnx_gconv.plan(model, gathers=gathers, max_params="80%", search="local", seed=seed).plan
        except (ModelError, BudgetError):
            continue  # nothing can be grouped so, or not enough
        placement = placement_of(model, match(model, plan))
        grouped = carry_out(model, match(model, plan), placement)
        assert differs(mask(model, match(model, plan)), grouped, seed) < 1e-4, seed
        grouped_convs += len(plan.layers)
        tried += 1
        clean += all("wider stream" in gather.reason for gather in placement.gathers)
    assert grouped_convs > 20
    if gathers == "none":
        assert clean == tried


@pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning")
@pytest.mark.parametrize("form", ["split", "matmul"])
def test_other_lowerings_are_the_same_function(form: str) -> None:
    kinds: set[str] = set()
    for seed in range(40):
        model = Random(seed).model()
        plan = random_plan(model, np.random.default_rng([seed, 1]))
        grouped = carry_out(model, match(model, plan), placement_of(model, match(model, plan)), lowering=form)
        onnx.checker.check_model(grouped, full_check=True)
        assert differs(mask(model, match(model, plan)), grouped, seed) < 1e-4, seed
        kinds |= {node.op_type for node in grouped.graph.node} - {node.op_type for node in model.graph.node}
    assert {"split": "Split", "matmul": "MatMul"}[form] in kinds


@pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning")
def test_one_order_not_inverted_is_caught() -> None:
    caught = tried = 0
    for seed in range(40):
        model = Random(seed).model()
        plan = random_plan(model, np.random.default_rng([seed, 1]))
        grouped = carry_out(model, match(model, plan), placement_of(model, match(model, plan)))
        for tensor in grouped.graph.initializer:
            order = numpy_helper.to_array(tensor)
            if "_order" in tensor.name and order.dtype == np.int32 and not np.array_equal(np.argsort(order), order):
                tried += 1
                tensor.CopyFrom(numpy_helper.from_array(np.argsort(order).astype(np.int32), tensor.name))
                caught += differs(mask(model, match(model, plan)), grouped, seed) > 1e-4  # as in the test above
                break
    assert tried >= 15
    assert caught >= 0.85 * tried  # a Relu or Sigmoid that saturates may hide everything before it from the outputs


def chain(*kinds: str) -> onnx.ModelProto:
    """Return Convs of 8 channels with these ops between them."""
    rng = np.random.default_rng(0)
    nodes, tensors, last = [], [], "x"
    for number, kind in enumerate(kinds):
        inputs = [last]
        if kind == "Conv":
            tensors.append(numpy_helper.from_array(rng.standard_normal((8, 8, 1, 1)).astype(np.float32), f"w{number}"))
            inputs.append(f"w{number}")
        nodes.append(helper.make_node(kind, inputs, [f"t{number}"]))
        last = f"t{number}"
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, 8, SIZE, SIZE]) for name in ("x", last)]
    graph = helper.make_graph(nodes, "chain", ends[:1], ends[1:], tensors)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def scattered(name: str, groups: int = 2, seed: int = 0) -> PlannedLayer:
    rng = np.random.default_rng(seed)
    return PlannedLayer(name, name, 8, 8, groups, 0.5, tuple(rng.permutation(8).tolist()), tuple(rng.permutation(8).tolist()))


def written(model: onnx.ModelProto, *layers: PlannedLayer) -> list[str]:
    plan = Plan("", "l2", "paper", "local", 0, {}, "free", Totals(0, 0), Totals(0, 0), layers, ())
    return [node.op_type for node in carry_out(model, match(model, plan), placement_of(model, match(model, plan))).graph.node]


def test_a_grouped_conv_between_dense_ones_needs_no_gather() -> None:
    assert written(chain("Conv", "Relu", "Conv", "Relu", "Conv"), scattered("t2")) == ["Conv", "Relu", "Conv", "Relu", "Conv"]


def test_two_grouped_convs_in_a_row_need_one_gather_behind_the_activation() -> None:
    model = chain("Conv", "Conv", "Relu", "Conv", "Conv")
    assert written(model, scattered("t1"), scattered("t3", seed=1)) == ["Conv", "Conv", "Relu", "Gather", "Conv", "Conv"]


def test_a_gather_stays_in_front_of_weights_for_each_channel_where_shapes_are_not_known() -> None:
    rng = np.random.default_rng(0)
    model = chain("Conv", "Relu", "BatchNormalization", "Conv")
    for name in ("scale", "shift", "mean", "variance"):
        model.graph.node[2].input.append(name)
        model.graph.initializer.append(numpy_helper.from_array(rng.uniform(1, 2, 8).astype(np.float32), name))
    plan = Plan(
        "", "l2", "paper", "local", 0, {}, "free", Totals(0, 0), Totals(0, 0), (scattered("t0"), scattered("t3", seed=1)), ()
    )
    matched = match(model, plan)
    feeds = {"x": rng.standard_normal((1, 8, SIZE, SIZE)).astype(np.float32)}
    (expected,) = ReferenceEvaluator(mask(model, matched)).run(None, feeds)
    for shapes in ({}, None):
        grouped = carry_out(model, matched, placement_of(model, matched, shapes=shapes))
        np.testing.assert_allclose(ReferenceEvaluator(grouped).run(None, feeds)[0], expected, atol=1e-5)


def test_inputs_and_outputs_of_the_graph_are_never_reordered() -> None:
    assert written(chain("Conv"), scattered("t0")) == ["Gather", "Conv", "Gather"]


def test_two_readers_of_one_order_share_a_gather() -> None:
    model = chain("Conv", "Conv")
    model.graph.node[1].input[0] = "x"
    model.graph.output.append(helper.make_tensor_value_info("t0", TensorProto.FLOAT, [1, 8, SIZE, SIZE]))
    layer = scattered("t0")
    same = PlannedLayer("t1", "t1", 8, 8, 2, 0.5, layer.in_order, tuple(range(8)))
    assert written(model, layer, same).count("Gather") == 2  # one for both inputs, one behind t0


def test_atoms_are_cut_and_joined_consistently() -> None:
    atoms = Atoms()
    one, two = atoms.new(8), atoms.new(8)
    atoms.unify([one], [two])
    first, rest = atoms.cut([one], 3)
    assert atoms.expand([two]) == (*first, *rest)
    assert [atoms.size(atom) for atom in atoms.expand([two])] == [3, 5]
    three = atoms.new(8)
    atoms.cut([three], 5)
    atoms.unify([two], [three])
    assert [atoms.size(atom) for atom in atoms.expand([one])] == [3, 2, 3]
    assert atoms.expand([one]) == atoms.expand([three])
    atoms.pin(atoms.expand([three])[:1])
    assert [atoms.is_pinned(atom) for atom in atoms.expand([one])] == [True, False, False]
    four = atoms.new(4)
    atoms.unify([four, four], [atoms.new(8)])
    assert atoms.length([four, four]) == 8
