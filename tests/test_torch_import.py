"""ONNX into PyTorch and back: every operator against ONNX Runtime, names, constants, BatchNormalization, refusals."""

import copy
from pathlib import Path

import numpy as np
import onnx
import pytest
from tiny import conv_net, get_tensor, save, set_tensor, with_custom_op

torch = pytest.importorskip("torch", reason="PyTorch is not installed: pip install 'onnx-gconv[torch]'")

from onnx_gconv.errors import ModelError, PlanError, VerifyError  # noqa: E402
from onnx_gconv.plans import Plan, PlannedLayer, Totals  # noqa: E402
from onnx_gconv.torch import comparing, load, save_back  # noqa: E402
from onnx_gconv.torch.importing import build  # noqa: E402
from onnx_gconv.torch.node import TABLE, Operator  # noqa: E402

pytestmark = pytest.mark.torch

ZOO = Path(__file__).parents[2] / "shared" / "zoo"


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)  # threads that wait for a busy core make small models fifty times slower


def graph(body: str, *, opset: int = 17, x: str = "float[2,4,9,7] x", **tensors: np.ndarray) -> onnx.ModelProto:
    """Return a model from x to y; `w`, `b` and other float tensors are its initializers."""
    text = f'<ir_version: 8, opset_import: ["" : {opset}]> g ({x}) => (float[N] y) {{ {body} }}'
    model = onnx.parser.parse_model(text)
    for name, value in tensors.items():
        set_tensor(model, name, value)
    return model


def weights(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


W33, B4 = weights(4, 4, 3, 3), weights(4)
NORM = {"s": weights(4), "b": weights(4), "m": weights(4), "v": np.abs(weights(4)) + 0.5}
MATRIX = "float[3,5] x"
SEQUENCE = "float[6,2,3] x"
LSTM = {"w": weights(2, 16, 3), "r": weights(2, 16, 4), "bb": weights(2, 32)}
GRU = {"w": weights(1, 12, 3), "r": weights(1, 12, 4), "bb": weights(1, 24)}

# What to run, the opset, and what differs from the default input and tensors.
CASES = {
    "Conv with uneven pads": ("y = Conv <pads = [0, 1, 2, 1], strides = [2, 1]> (x, w, b)", 17, {"w": W33, "b": B4}),
    "Conv dilated": ("y = Conv <dilations = [2, 1], pads = [2, 1, 2, 1]> (x, w)", 17, {"w": W33}),
    "Conv same upper": ('y = Conv <auto_pad = "SAME_UPPER", strides = [2, 2]> (x, w)', 17, {"w": W33}),
    "Conv same lower": ('y = Conv <auto_pad = "SAME_LOWER", strides = [2, 2]> (x, w)', 17, {"w": weights(4, 4, 2, 2)}),
    "Conv valid": ('y = Conv <auto_pad = "VALID"> (x, w)', 17, {"w": W33}),
    "Conv grouped": ("y = Conv <group = 2> (x, w)", 17, {"w": weights(6, 2, 3, 3)}),
    "Conv 1d": ("y = Conv <pads = [1, 1]> (x, w)", 17, {"w": weights(5, 4, 3), "x": "float[2,4,9] x"}),
    "Conv 3d": ("y = Conv (x, w)", 17, {"w": weights(3, 2, 2, 2, 2), "x": "float[1,2,4,5,3] x"}),
    "ConvTranspose": (
        "y = ConvTranspose <strides = [2, 2], pads = [1, 1, 1, 1], output_padding = [1, 0]> (x, w, b)",
        17,
        {"w": W33, "b": B4},
    ),
    "ConvTranspose with uneven pads": ("y = ConvTranspose <strides = [2, 2], pads = [0, 1, 1, 0]> (x, w)", 17, {"w": W33}),
    "ConvTranspose same": ('y = ConvTranspose <strides = [2, 3], auto_pad = "SAME_UPPER"> (x, w)', 17, {"w": W33}),
    "ConvTranspose to a shape": (
        "y = ConvTranspose <strides = [2, 2], output_shape = [20, 14]> (x, w, b)",
        17,
        {"w": W33, "b": B4},
    ),
    "MaxPool same": ('y = MaxPool <kernel_shape = [3, 2], strides = [2, 2], auto_pad = "SAME_UPPER"> (x)', 17, {}),
    "MaxPool ceil": ("y = MaxPool <kernel_shape = [2, 2], strides = [2, 2], ceil_mode = 1> (x)", 17, {}),
    "MaxPool with uneven pads": ("y = MaxPool <kernel_shape = [3, 3], pads = [0, 0, 1, 1], strides = [2, 2]> (x)", 12, {}),
    "AveragePool with pads": ("y = AveragePool <kernel_shape = [3, 3], pads = [1, 1, 1, 1]> (x)", 17, {}),
    "AveragePool counting pads": (
        "y = AveragePool <kernel_shape = [3, 3], pads = [1, 1, 1, 1], count_include_pad = 1> (x)",
        17,
        {},
    ),
    "AveragePool with uneven pads": ("y = AveragePool <kernel_shape = [3, 3], pads = [0, 1, 1, 0]> (x)", 17, {}),
    "LpPool": ("y = LpPool <kernel_shape = [2, 3], p = 2> (x)", 17, {}),
    "global pools": ("a = GlobalAveragePool (x) b = GlobalMaxPool (x) y = Add (a, b)", 17, {}),
    "BatchNormalization": ("y = BatchNormalization (x, s, b, m, v)", 17, NORM),
    "InstanceNormalization": ("y = InstanceNormalization (x, s, b)", 17, {"s": B4, "b": B4}),
    "LayerNormalization": ("y = LayerNormalization <axis = -1> (x, s, b)", 17, {"s": weights(7), "b": weights(7)}),
    "GroupNormalization": ("y = GroupNormalization <num_groups = 2> (x, s, b)", 21, {"s": B4, "b": B4}),
    "LRN": ("y = LRN <size = 3, alpha = 0.5, bias = 2.0> (x)", 17, {}),
    "LpNormalization": ("y = LpNormalization <axis = 1> (x)", 17, {}),
    "MeanVarianceNormalization": ("y = MeanVarianceNormalization (x)", 17, {}),
    "Gemm": (
        "y = Gemm <transA = 1, transB = 1, alpha = 0.5, beta = 2.0> (x, w, b)",
        17,
        {"w": weights(4, 3), "b": B4, "x": MATRIX},
    ),
    "MatMul with its bias": ("h = MatMul (x, w) y = Add (h, b)", 17, {"w": weights(5, 4), "b": B4, "x": MATRIX}),
    "Einsum": ('y = Einsum <equation = "nchw,oc->nohw"> (x, w)', 17, {"w": weights(3, 4)}),
    "Softmax of old, over all axes": ("y = Softmax <axis = 2> (x)", 11, {}),
    "Softmax": ("y = Softmax <axis = 1> (x)", 17, {}),
    "LogSoftmax": ("y = LogSoftmax (x)", 17, {}),
    "activations": (
        "a = LeakyRelu <alpha = 0.2> (x) b = Elu (a) c = Selu (b) d = HardSigmoid (x) e = Softplus (c) f = Mul (d, e) "
        "g = ThresholdedRelu (f) h = HardSwish (x) i = Add (g, h) j = Celu <alpha = 2.0> (x) k = Softsign (j) y = Add (i, k)",
        17,
        {},
    ),
    "Gelu": ('y = Gelu <approximate = "tanh"> (x)', 20, {}),
    "Mish": ("y = Mish (x)", 18, {}),
    "Shrink": ("y = Shrink <lambd = 0.7, bias = 0.1> (x)", 17, {}),
    "PRelu": ("y = PRelu (x, w)", 17, {"w": weights(4, 1, 1)}),
    "Clip by attributes": ("y = Clip <min = -0.5, max = 0.25> (x)", 7, {}),
    "Clip by inputs": ("lo = Constant <value_float = -0.5> () y = Clip (x, lo)", 17, {}),
    "variadic": ("a = Max (x, w) b = Min (a, x) c = Sum (a, b, x) y = Mean (c, x)", 17, {"w": weights(4, 1, 1)}),
    "logic": (
        "z = Constant <value_float = 0.1> () a = Greater (x, z) n = Neg (x) l = Less (n, z) b = Not (a) c = And (l, b) "
        "d = Xor (c, a) e = Equal (d, l) f = Or (e, c) y = Where (f, x, n)",
        17,
        {},
    ),
    "Pow and Mod": ("t = Constant <value_float = 2.0> () a = Pow (x, t) y = Mod <fmod = 1> (a, t)", 17, {}),
    "unary": ("a = Abs (x) b = Sqrt (a) c = Erf (b) d = Exp (c) e = Log (d) f = Round (x) g = Tanh (f) y = Add (e, g)", 17, {}),
    "whole numbers divide towards zero": (
        "s = Shape (x) n = Neg (s) k = Constant <value_ints = [4, 3, 2, 5]> () d = Div (n, k) c = Cast <to = 1> (d) y = Add (c, w)",
        17,
        {"w": B4},
    ),
    "reductions by attribute": (
        "a = ReduceMean <axes = [2, 3]> (x) b = ReduceMax <axes = [1], keepdims = 1> (x) y = Add (a, b)",
        13,
        {},
    ),
    "reductions by input": (
        "i = Constant <value_ints = [1, -1]> () a = ReduceMean (x, i) b = ReduceL2 (x, i) "
        "c = ReduceSum (x, i) d = Sub (a, b) y = Add (c, d)",
        18,
        {},
    ),
    "other reductions": (
        "a = ReduceSumSquare <axes = [1]> (x) b = ReduceLogSumExp <axes = [1]> (x) c = ReduceProd <axes = [1]> (x) "
        "d = ReduceMin <axes = [1]> (x) e = ReduceL1 <axes = [1]> (x) y = Sum (a, b, c, d, e)",
        13,
        {},
    ),
    "ReduceMean without axes": ("y = ReduceMean <keepdims = 0> (x)", 17, {}),
    "TopK": ("k = Constant <value_ints = [3]> () y, i = TopK <axis = 2> (x, k)", 17, {}),
    "CumSum": ("a = Constant <value_int = 2> () y = CumSum <exclusive = 1, reverse = 1> (x, a)", 17, {}),
    "ArgMax": ("i = ArgMax <axis = 1> (x) c = Cast <to = 1> (i) y = Add (c, x)", 17, {}),
    "Reshape with 0 and -1": ("s = Constant <value_ints = [0, 2, -1]> () y = Reshape (x, s)", 17, {}),
    "shape arithmetic": (
        "s = Shape (x) z = Constant <value_int = 0> () n = Gather (s, z) a = Constant <value_ints = [0]> () u = Unsqueeze (n, a) "
        "m = Constant <value_ints = [-1]> () t = Concat <axis = 0> (u, m) y = Reshape (x, t)",
        17,
        {},
    ),
    "Squeeze and Unsqueeze of old": ("a = Unsqueeze <axes = [0, 3]> (x) y = Squeeze <axes = [0]> (a)", 11, {}),
    "Flatten and Transpose": ("t = Transpose <perm = [0, 2, 3, 1]> (x) y = Flatten <axis = 2> (t)", 17, {}),
    "Split of old": ("a, b = Split <axis = 1, split = [1, 3]> (x) y = Mul (a, b)", 11, {}),
    "Split by number": ("a, b = Split <axis = 2, num_outputs = 2> (x) c = ReduceMean (a) y = Mul (b, c)", 18, {}),
    "Slice by attributes": ("y = Slice <starts = [1, -3], ends = [3, 1000], axes = [1, 3]> (x)", 9, {}),
    "Slice backwards": (
        "s = Constant <value_ints = [-1]> () e = Constant <value_ints = [-9999]> () a = Constant <value_ints = [2]> () "
        "t = Constant <value_ints = [-2]> () y = Slice (x, s, e, a, t)",
        17,
        {},
    ),
    "Gather": ("i = Constant <value = int64[2,2] {0, -1, 2, 1}> () y = Gather <axis = 1> (x, i)", 17, {}),
    "GatherElements": ("i = Constant <value = int64[1,1,1,3] {0, -1, 2}> () y = GatherElements <axis = 3> (x, i)", 17, {}),
    "GatherND": ("i = Constant <value = int64[2,1,2] {0, 1, 3, 4}> () y = GatherND <batch_dims = 1> (x, i)", 17, {}),
    "ScatterND": (
        "i = Constant <value = int64[1,2] {1, 2}> () y = ScatterND (x, i, w)",
        17,
        {"w": weights(1, 9, 7)},
    ),
    "ScatterElements": (
        'i = Constant <value = int64[1,1,1,2] {3, 0}> () y = ScatterElements <axis = 3, reduction = "add"> (x, i, w)',
        18,
        {"w": weights(1, 1, 1, 2)},
    ),
    "Expand and Tile": (
        "a = Constant <value_ints = [3, 1, 1, 1, 1]> () e = Expand (x, a) "
        "r = Constant <value_ints = [1, 1, 2, 1, 1]> () y = Tile (e, r)",
        17,
        {},
    ),
    "OneHot": (
        "i = ArgMax <axis = 1, keepdims = 0> (x) d = Constant <value_int = 4> () v = Constant <value_floats = [0.5, 2.0]> () "
        "y = OneHot <axis = 1> (i, d, v)",
        17,
        {},
    ),
    "Range and ConstantOfShape": (
        "s = Constant <value_float = 1.0> () l = Constant <value_float = 8.0> () r = Range (s, l, s) n = Shape (r) "
        "c = ConstantOfShape <value = float[1] {2.5}> (n) m = Mul (r, c) y = Add (x, m)",
        17,
        {},
    ),
    "Trilu and EyeLike": ("a = Trilu <upper = 0> (x) b = EyeLike <k = 1> (x) y = Add (a, b)", 17, {"x": MATRIX}),
    "DepthToSpace": ("y = DepthToSpace <blocksize = 2> (x)", 17, {}),
    "DepthToSpace column first": ('y = DepthToSpace <blocksize = 2, mode = "CRD"> (x)', 17, {}),
    "SpaceToDepth": ("y = SpaceToDepth <blocksize = 2> (x)", 17, {"x": "float[1,3,4,6] x"}),
    "Pad": (
        "p = Constant <value_ints = [0, 1, -1, 2, 0, 0, 1, 0]> () v = Constant <value_float = 3.0> () y = Pad (x, p, v)",
        17,
        {},
    ),
    "Pad reflecting": ('y = Pad <mode = "reflect", pads = [0, 0, 3, 2, 0, 0, 1, 6]> (x)', 10, {}),
    "Pad with the edge": ('y = Pad <mode = "edge", pads = [0, 0, 3, 2, 0, 0, 1, 6]> (x)', 10, {}),
    "Upsample of old": ('y = Upsample <mode = "nearest", scales = [1.0, 1.0, 2.0, 3.0]> (x)', 7, {}),
    "Resize of old": ("s = Constant <value = float[4] {1.0, 1.0, 2.0, 1.5}> () y = Resize (x, s)", 10, {}),
    "Resize linear": ('s = Constant <value = float[4] {1.0, 1.0, 1.7, 0.6}> () y = Resize <mode = "linear"> (x, , s)', 13, {}),
    "Resize linear with corners": (
        'n = Constant <value_ints = [2, 4, 5, 16]> () y = Resize <mode = "linear", coordinate_transformation_mode = '
        '"align_corners"> (x, , , n)',
        13,
        {},
    ),
    "Resize cubic": (
        'n = Constant <value_ints = [2, 4, 13, 16]> () y = Resize <mode = "cubic", coordinate_transformation_mode = '
        '"pytorch_half_pixel", exclude_outside = 1> (x, , , n)',
        13,
        {},
    ),
    "Resize nearest": (
        's = Constant <value = float[4] {1.0, 1.0, 2.0, 2.0}> () y = Resize <coordinate_transformation_mode = "asymmetric", '
        'nearest_mode = "floor"> (x, , s)',
        13,
        {},
    ),
    "Resize nearest half pixel": ("n = Constant <value_ints = [2, 4, 5, 12]> () y = Resize (x, , , n)", 13, {}),
    "GridSample": ("y = GridSample (x, w)", 16, {"w": weights(2, 3, 5, 2) / 2}),
    "LSTM both ways": (
        'y, h, c = LSTM <hidden_size = 4, direction = "bidirectional"> (x, w, r, bb)',
        17,
        {**LSTM, "x": SEQUENCE},
    ),
    "GRU": ("y, h = GRU <hidden_size = 4, linear_before_reset = 1> (x, w, r, bb)", 17, {**GRU, "x": SEQUENCE}),
    "GRU resetting first, backwards": ('y, h = GRU <hidden_size = 4, direction = "reverse"> (x, w, r)', 17, {**GRU, "x": SEQUENCE}),
    "RNN": ("y, h = RNN <hidden_size = 4> (x, w, r)", 17, {"w": weights(1, 4, 3), "r": weights(1, 4, 4), "x": SEQUENCE}),
    "Dropout": ("y, m = Dropout (x)", 12, {}),
    "If": (
        "z = Constant <value_float = 0.0> () m = ReduceMax <keepdims = 0> (x) c = Greater (m, z) y = If (c) <"
        "then_branch = t () => (float[N] a) { two = Constant <value_float = 2.0> () a = Mul (x, two) }, "
        "else_branch = e () => (float[N] b) { b = Neg (x) }>",
        13,
        {},
    ),
    "legacy": ("a = ImageScaler <scale = 2.0, bias = [1.0, 2.0, 3.0, 4.0]> (x) y = Crop <border = [1, 2, 1, 0]> (a)", 7, {}),
}


@pytest.mark.parametrize("case", CASES)
def test_an_operator_computes_what_onnx_runtime_computes(case: str) -> None:
    body, opset, settings = CASES[case]
    tensors = {name: value for name, value in settings.items() if name != "x"}
    # Among the settings, only "x" is text.
    model = graph(body, opset=opset, **({"x": settings["x"]} if "x" in settings else {}), **tensors)  # type: ignore[arg-type]
    module = build(model)
    difference = comparing.require_equal(module, model)
    assert not difference.inconclusive
    assert difference.max_rel <= 2e-5  # some hundred times the rounding of float32: sums of up to 63 numbers, a few operators


@pytest.mark.parametrize("op", sorted(TABLE))
def test_every_operator_of_the_table_has_a_case_or_is_a_plain_torch_function(op: str) -> None:
    covered = any(f"{op} (" in body or f"{op} <" in body for body, _, _ in CASES.values())
    assert covered or op in UNTESTED_HERE


# One-line calls of the PyTorch function of the same name, in the tables of elementwise.py and reduction.py, and rare ones.
UNTESTED_HERE = {
    *("Acos", "Acosh", "ArgMin", "Asin", "Asinh", "Atan", "Atanh", "BitwiseAnd", "BitwiseOr", "BitwiseXor", "CastLike"),
    *("Ceil", "Cos", "Cosh", "Floor", "GreaterOrEqual", "Identity", "IsInf", "IsNaN", "LessOrEqual", "NonZero"),
    *("Reciprocal", "ReduceLogSum", "Relu", "Scatter", "Sigmoid", "Sign", "Sin", "Sinh", "Size", "Tan"),
    *("Affine", "ParametricSoftplus", "ScaledTanh", "Swish", "com.microsoft:Gelu", "com.microsoft:QuickGelu"),
}


def test_a_mismatch_names_the_first_tensor_that_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    relu = TABLE["Relu"]
    monkeypatch.setitem(TABLE, "Relu", Operator(lambda node, x: relu.run(node, x) + 1e-3, relu.numbers, relu.modal))
    with pytest.raises(VerifyError, match=r"first in 'r1', made by the Relu node 'r1'"):
        load(conv_net())


def test_an_operator_nobody_knows_is_refused_by_its_name() -> None:
    with pytest.raises(ModelError, match=r"does not know my.ops:Sharpen"):
        load(with_custom_op(conv_net(), "r1"))


def test_what_pytorch_cannot_do_with_the_result_is_left_off() -> None:
    model = graph("h = Conv (x, w) i = ArgMax <axis = 1> (h) y = NonMaxSuppression (h, h)", w=W33)
    module = build(model)
    assert module.output_names == ("h",)


def test_parameters_have_the_names_of_the_file_whatever_these_are() -> None:
    names = ["layer1.0.conv", "layer1.0", "forward", "a..b", "x/y:0"]
    body = " ".join(f"h{i} = Relu ({'x' if i == 0 else f'c{i - 1}'}) c{i} = Identity (h{i})" for i in range(len(names)))
    model = graph(f"{body} y = Identity (c{len(names) - 1})")
    for i, name in enumerate(names):
        node = next(node for node in model.graph.node if node.output[0] == f"c{i}")
        node.CopyFrom(onnx.helper.make_node("Conv", [f"h{i}", name], [f"c{i}"]))
        set_tensor(model, name, weights(4, 4, 1, 1, seed=i))
    module = load(model)
    assert [name for name, _ in module.named_parameters()] != []
    assert {name for name, _ in module.named_parameters()} == set(names) == set(module.state_dict())
    twin = copy.deepcopy(module)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.add_(1.0)
    module.load_state_dict(twin.state_dict())
    for i, name in enumerate(names):
        assert np.array_equal(get_tensor(save_back(module, model), name), weights(4, 4, 1, 1, seed=i) + 1)


def constants_for_initializers(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return the model with every weight in a Constant node, as Paddle's exporter writes them."""
    result = onnx.ModelProto()
    result.CopyFrom(model)
    del result.graph.initializer[:], result.graph.node[:]
    for tensor in model.graph.initializer:
        result.graph.node.append(onnx.helper.make_node("Constant", [], [tensor.name], value=tensor))
    result.graph.node.extend(model.graph.node)
    return result


@pytest.mark.parametrize("form", [conv_net, lambda: constants_for_initializers(conv_net())], ids=["initializers", "Constant nodes"])
def test_a_round_trip_without_training_changes_no_byte(form: object) -> None:
    model = form()  # type: ignore[operator]
    before = model.SerializeToString(deterministic=True)
    module = load(model)
    assert {name for name, _ in module.named_parameters()} == {f"{kind}{number}" for kind in "wb" for number in (1, 2, 3, 4)}
    assert save_back(module, model).SerializeToString(deterministic=True) == before
    assert model.SerializeToString(deterministic=True) == before


def test_trained_weights_go_back_where_they_were_and_nothing_else_changes() -> None:
    model = constants_for_initializers(conv_net())
    module = load(model)
    with torch.no_grad():
        dict(module.named_parameters())["w2"].mul_(2.0)
    result = save_back(module, model)
    changed = [a.output[0] for a, b in zip(model.graph.node, result.graph.node, strict=True) if a != b]
    assert changed == ["w2"]
    comparing.require_equal(module, result)


def test_half_precision_weights_train_in_single_precision_and_keep_their_type() -> None:
    text = '<ir_version: 8, opset_import: ["" : 17]> g (float16[1,4,5,5] x) => (float16[1,4,3,3] y) { y = Conv (x, w) }'
    model = onnx.parser.parse_model(text)
    model.graph.initializer.append(onnx.numpy_helper.from_array(W33.astype(np.float16), "w"))
    module = load(model)
    assert next(module.parameters()).dtype == torch.float32
    assert save_back(module, model) == model
    with torch.no_grad():
        next(module.parameters()).add_(0.5)
    tuned = save_back(module, model).graph.initializer[0]
    assert tuned.data_type == onnx.TensorProto.FLOAT16


def test_constants_of_the_function_are_not_trained_but_a_bias_behind_a_reshape_is() -> None:
    model = graph(
        "s = Constant <value_ints = [1, 4, 1, 1]> () r = Reshape (bias, s) h = Conv (x, w) k = Add (h, r) y = Mul (k, six)",
        w=W33,
        bias=B4,
        six=np.array([6.0]),
    )
    module = load(model)
    assert {name for name, _ in module.named_parameters()} == {"w", "bias"}
    module(torch.ones(2, 4, 9, 7)).sum().backward()
    assert all(parameter.grad is not None and bool(parameter.grad.any()) for parameter in module.parameters())


def batch_norm_model(momentum: float = 0.8) -> onnx.ModelProto:
    return graph(f"y = BatchNormalization <momentum = {momentum}> (x, s, b, m, v)", **NORM)


def test_the_statistics_of_a_batch_normalization_follow_the_batches_by_onnx_momentum() -> None:
    model = batch_norm_model(momentum=0.8)
    module = load(model).train()
    x = torch.from_numpy(weights(8, 4, 9, 7, seed=3)) * 2 + 1
    module(x)
    values = x.transpose(0, 1).reshape(4, -1).double().numpy()
    result = save_back(module, model)
    assert np.allclose(get_tensor(result, "m"), 0.8 * NORM["m"] + 0.2 * values.mean(1), rtol=1e-5)
    assert np.allclose(get_tensor(result, "v"), 0.8 * NORM["v"] + 0.2 * values.var(1, ddof=1), rtol=1e-5)


def test_frozen_statistics_stay_and_are_used_in_training() -> None:
    model = batch_norm_model()
    module = load(model)
    x = torch.from_numpy(weights(8, 4, 9, 7, seed=3)) + 1
    expected = module.eval()(x)
    module.freeze_bn = True
    assert torch.equal(module.train()(x), expected)
    assert save_back(module, model) == model
    module.freeze_bn = False
    assert not torch.allclose(module(x), expected)


def plan_of(*layers: tuple[str, int, int]) -> Plan:
    """Return a plan that groups each (Conv, channels, groups) without permuting."""
    rows = tuple(PlannedLayer(name, name, c, c, g, 0.5, tuple(range(c)), tuple(range(c))) for name, c, g in layers)
    return Plan("", "l2", "best", "uniform", 0, {}, "free", Totals(1, 1), Totals(1, 1), rows, ())


OPTIMISERS = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.1),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.5),
}


@pytest.mark.parametrize("name", OPTIMISERS)
def test_masked_weights_stay_exactly_zero_under_any_optimiser_and_in_its_state(name: str) -> None:
    model = conv_net()
    module = load(model, plan_of(("c2", 8, 4), ("c3", 8, 2))).train()
    parameters = dict(module.named_parameters())
    optimiser = OPTIMISERS[name](module.parameters())
    keep = {weight: np.kron(np.eye(groups), np.ones((8 // groups, 8 // groups))) > 0 for weight, groups in (("w2", 4), ("w3", 2))}
    start = {name: parameter.detach().clone() for name, parameter in parameters.items()}
    drawn = torch.randn(3, 4, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    for images in drawn:
        optimiser.zero_grad()
        module(images).square().sum().backward()
        optimiser.step()
        for weight, mask in keep.items():
            outside = torch.from_numpy(~mask)
            assert not parameters[weight][outside].any()
            for state in optimiser.state[parameters[weight]].values():
                if torch.is_tensor(state) and state.shape == parameters[weight].shape:
                    assert not state[outside].any()
    for weight, mask in keep.items():
        assert bool((parameters[weight] != start[weight])[torch.from_numpy(mask)].all())
    assert not get_tensor(save_back(module, model), "w2")[~keep["w2"]].any()


def test_a_weight_that_others_read_too_cannot_be_masked_in_place() -> None:
    model = graph("h = Conv <pads = [1, 1, 1, 1]> (x, w) y = Conv <pads = [1, 1, 1, 1]> (h, w)", w=W33)
    with pytest.raises(PlanError, match=r"'w' .* read by others too") as refused:
        load(model, plan_of(("h", 4, 2)))
    assert "onnx-gconv mask" in refused.value.hint
    load(model, plan_of(("h", 4, 2), ("y", 4, 2)))


def test_weights_cannot_be_written_into_a_model_without_them(tmp_path: Path) -> None:
    module = load(save(conv_net(), tmp_path / "net.onnx"))
    with pytest.raises(ModelError, match=r"no tensor 'w1' of shape 8x3x3x3"):
        save_back(module, conv_net(channels=4))


@pytest.mark.skipif(not ZOO.exists(), reason="the real models of ../shared/zoo are not here")
@pytest.mark.parametrize("name", ["cifar10_resnet20_bn", "ppocr_cls_mobile", "squeezenet_winml_op7", "clp_det"])
def test_a_real_model_comes_in_and_goes_back_unchanged(name: str) -> None:
    model = onnx.load(ZOO / f"{name}.onnx")
    module = build(model)
    assert comparing.require_equal(module, model).max_rel <= 1e-4
    assert save_back(module, model) == model
