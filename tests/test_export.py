"""`export`: what a target reads, the same function as before, and what cannot be converted named."""

import json
from pathlib import Path

import numpy as np
import onnx
import pytest
from tiny import conv_net, gconv, save, set_tensor, with_custom_op

from onnx_gconv.deploy.exporting import convert
from onnx_gconv.deploy.opset import lower_opset, standard_opset
from onnx_gconv.verification import verify

ZOO = Path(__file__).parents[2] / "shared" / "zoo"
NEWER = """
<ir_version: 8, opset_import: ["" : {opset}]>
newer (float[N,4,6,6] image) => (float[N,4,6,6] out) <int64[4] indices = {{3, 1, 0, 2}}, int64[1] axes = {{1}}> {{
    {body}
}}
"""


def parsed(body: str, *, opset: int) -> onnx.ModelProto:
    return onnx.parser.parse_model(NEWER.format(body=body, opset=opset))


def test_a_tx2_gets_opset_13_ir_7_and_int32_indices(tmp_path: Path) -> None:
    save(conv_net(), tmp_path / "net.onnx")
    assert gconv("compress", tmp_path / "net.onnx", "--groups", "2", "-o", tmp_path / "small.onnx").code == 0
    done = gconv("export", tmp_path / "small.onnx", "--target", "tx2", "--batch", "1", "-o", tmp_path / "tx2.onnx", "--json")
    assert done.code == 0, done.err
    data = json.loads(done.out)
    assert (data["opset"], data["ir_version"], data["verify"]["passed"]) == (13, 7, True)
    model = onnx.load(str(tmp_path / "tx2.onnx"))
    onnx.checker.check_model(model, full_check=True)
    gathers = [node for node in model.graph.node if node.op_type == "Gather"]
    types = {tensor.name: tensor.data_type for tensor in model.graph.initializer}
    assert gathers
    assert {types[node.input[1]] for node in gathers} == {onnx.TensorProto.INT32}
    assert model.graph.input[0].type.tensor_type.shape.dim[0].dim_value == 1
    assert model.graph.output[0].type.tensor_type.shape.dim[0].dim_value == 1


@pytest.mark.parametrize(
    ("opset", "body"),
    [
        (15, "a = Shape <start = 0> (image) out = Reshape <allowzero = 0> (image, a)"),
        (18, "a, b = Split <axis = 1, num_outputs = 2> (image) out = Concat <axis = 1> (b, a)"),
        (18, "a = ReduceMean <keepdims = 1> (image, axes) out = Add (image, a)"),
        (21, "a = Gather <axis = 1> (image, indices) out = Relu (a)"),
        (19, "a = AveragePool <kernel_shape = [3, 3], pads = [1, 1, 1, 1]> (image) out = Identity (a)"),
    ],
    ids=["Shape", "Split", "ReduceMean", "Gather", "AveragePool"],
)
def test_newer_operators_become_what_they_were(opset: int, body: str) -> None:
    model = parsed(body, opset=opset)
    before = model.SerializeToString()
    result = convert(model, "tx2", shapes={"image": (2, 4, 6, 6)}).model
    assert model.SerializeToString() == before
    assert (standard_opset(result), result.ir_version) == (13, 7)
    onnx.checker.check_model(result, full_check=True)
    assert verify(model, result, tolerance=1e-6, seed=0, shapes={"image": (2, 4, 6, 6)}).passed


def test_what_has_no_form_in_the_old_opset_is_named(tmp_path: Path) -> None:
    body = "a = HardSwish (image) out = Mish (a)"
    save(parsed(body, opset=18), tmp_path / "m.onnx")
    done = gconv("export", tmp_path / "m.onnx", "--target", "tx2", "-o", tmp_path / "out.onnx")
    assert done.code == 1
    assert "HardSwish 'a' (it exists only from opset 14 on), Mish 'out' (it exists only from opset 18 on)" in done.err
    assert not (tmp_path / "out.onnx").exists()


def test_axes_that_are_computed_are_named() -> None:
    model = parsed("s = Shape (image) a = Slice (s, axes, axes) out = ReduceMean (image, s)", opset=18)
    assert lower_opset(model, 13) == ["ReduceMean 'out' (its axes are computed at run time)"]


def test_indices_that_something_else_reads_stay_int64() -> None:
    model = parsed(
        "a = Gather <axis = 1> (image, indices) b = Cast <to = 1> (indices) c = Reshape (b, s) out = Mul (a, c)", opset=13
    )
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.array([1, 4, 1, 1]), "s"))
    result = convert(model, "tensorrt", shapes={}).model
    kept = next(tensor for tensor in result.graph.initializer if tensor.name == "indices")
    assert kept.data_type == onnx.TensorProto.INT64


def test_a_converted_model_that_differs_is_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from onnx_gconv.deploy import exporting

    save(conv_net(), tmp_path / "net.onnx")
    wrong = exporting.Conversion(set_tensor(conv_net(), "b4", np.ones(4)), ())
    monkeypatch.setattr(exporting, "convert", lambda *args, **kwargs: wrong)
    done = gconv("export", tmp_path / "net.onnx", "--target", "tx2", "-o", tmp_path / "out.onnx")
    assert done.code == 1
    assert "the converted model differs" in done.err
    assert not (tmp_path / "out.onnx").exists()


def test_a_batch_that_is_fixed_already_or_not_the_only_open_axis_is_refused(tmp_path: Path) -> None:
    fixed = conv_net()
    fixed.graph.input[0].type.tensor_type.shape.dim[0].dim_value = 2
    save(fixed, tmp_path / "fixed.onnx")
    done = gconv("export", tmp_path / "fixed.onnx", "--target", "tx2", "--batch", "8", "-o", tmp_path / "out.onnx")
    assert "has the fixed batch 2" in done.err
    save(conv_net(size="S"), tmp_path / "open.onnx")
    done = gconv("export", tmp_path / "open.onnx", "--target", "tx2", "--batch", "1", "-o", tmp_path / "out.onnx")
    assert "--input-shape" in done.err
    done = gconv("export", tmp_path / "open.onnx", "--target", "tx2", "--input-shape", "1x3x16x16", "-o", tmp_path / "out.onnx")
    assert done.code == 0, done.err


def test_a_model_that_cannot_run_is_written_only_without_the_check(tmp_path: Path) -> None:
    save(with_custom_op(conv_net(), "r1"), tmp_path / "net.onnx")
    assert gconv("export", tmp_path / "net.onnx", "--target", "tx2", "-o", tmp_path / "out.onnx").code == 1
    assert gconv("export", tmp_path / "net.onnx", "--target", "tx2", "-o", tmp_path / "out.onnx", "--no-verify").code == 0


@pytest.mark.skipif(not ZOO.exists(), reason="the models of ../shared are not here")
@pytest.mark.parametrize("name", ["cifar10_resnet20_bn", "nudenet_yolov8n", "spindle_unet1d", "clp_det"])
def test_real_models_for_the_tx2(tmp_path: Path, name: str) -> None:
    done = gconv("export", ZOO / f"{name}.onnx", "--target", "tx2", "-o", tmp_path / "out.onnx", "--json")
    assert done.code == 0, done.err
    data = json.loads(done.out)
    assert data["opset"] <= 13
    assert data["ir_version"] <= 7
    assert data["verify"]["max_rel_error"] == 0
