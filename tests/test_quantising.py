"""int8: what is quantised and what is not, that the same samples give the same bytes, and what is refused."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from tiny import conv_net, from_text, gconv, listing, no_conv, save

import onnx_gconv
from onnx_gconv.deploy.quantising import BINS, Seen, best_range, quantise
from onnx_gconv.errors import ModelError, UsageError

SHAPE = (16, 3, 8, 8)


@pytest.fixture
def samples(tmp_path: Path) -> Path:
    np.savez(tmp_path / "calib.npz", image=np.random.default_rng(0).standard_normal(SHAPE).astype(np.float32))
    return tmp_path / "calib.npz"


def stored_types(model: onnx.ModelProto) -> set[int]:
    """Return the types of the tensors that a DequantizeLinear reads from the file."""
    stored = {tensor.name: tensor.data_type for tensor in model.graph.initializer}
    read = {node.input[0] for node in model.graph.node if node.op_type == "DequantizeLinear"}
    return {stored[name] for name in read & stored.keys()}


def zero_points(model: onnx.ModelProto) -> dict[str, np.ndarray]:
    stored = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    return {node.output[0]: stored[node.input[2]] for node in model.graph.node if node.op_type == "QuantizeLinear"}


def test_ort_gets_uint8_activations_and_tensorrt_symmetric_int8_ones_and_float_biases(tmp_path: Path, samples: Path) -> None:
    for_cpu = onnx_gconv.export(conv_net(), "ort-cpu", precision="int8", calib=samples)
    assert {zero.dtype for zero in zero_points(for_cpu.model).values()} == {np.dtype(np.uint8)}
    assert stored_types(for_cpu.model) == {onnx.TensorProto.INT8, onnx.TensorProto.INT32}
    for_tensorrt = onnx_gconv.export(conv_net(), "tensorrt", precision="int8", calib=samples)
    found = zero_points(for_tensorrt.model).values()
    assert {zero.dtype for zero in found} == {np.dtype(np.int8)}
    assert not any(zero.any() for zero in found)
    assert stored_types(for_tensorrt.model) == {onnx.TensorProto.INT8}
    for exported in (for_cpu, for_tensorrt):
        onnx.checker.check_model(exported.model, full_check=True)
        assert exported.evaluation is not None
        assert exported.evaluation.samples == SHAPE[0]
        # 255 levels through a few layers: some percent, and not nothing.
        assert all(0 < distance.relative_l2 < 0.1 for distance in exported.evaluation.outputs.values())


def test_the_command_writes_what_it_says_and_the_model_stays_float_outside(tmp_path: Path, samples: Path) -> None:
    save(conv_net(), tmp_path / "net.onnx")
    done = gconv("export", tmp_path / "net.onnx", "--precision", "int8", "--calib", samples, "-o", tmp_path / "q.onnx", "--json")
    assert done.code == 0, done.err
    data = json.loads(done.out)
    assert (data["precision"], data["verify"], data["evaluation"]["samples"]) == ("int8", None, SHAPE[0])
    written = onnx.load(str(tmp_path / "q.onnx"))
    values = [*written.graph.input, *written.graph.output]
    assert {value.type.tensor_type.elem_type for value in values} == {onnx.TensorProto.FLOAT}
    assert [value.name for value in values] == [value.name for value in (*conv_net().graph.input, *conv_net().graph.output)]


def test_the_same_samples_give_the_same_bytes_in_every_process(tmp_path: Path, samples: Path) -> None:
    save(conv_net(), tmp_path / "net.onnx")
    found = set()
    for seed in ("1", "2"):  # sets of names have another order in each
        out = tmp_path / f"{seed}.onnx"
        command = ["export", str(tmp_path / "net.onnx"), "--precision", "int8", "--calib", str(samples), "-o", str(out), "-q"]
        subprocess.run([sys.executable, "-m", "onnx_gconv", *command], check=True, env=os.environ | {"PYTHONHASHSEED": seed})
        found.add(out.read_bytes())
    assert len(found) == 1


def test_normalization_is_folded_and_what_follows_the_last_conv_stays_float() -> None:
    model = from_text(
        """net (float[N,2,4,4] x) => (float[N,2,4,4] y) {
            a = Conv (x, w) b = BatchNormalization (a, one, zero, zero, one) c = Relu (b)
            d = Conv (c, w) e = Sigmoid (d) y = Mul (e, d)
        }""",
        w=np.random.default_rng(0).standard_normal((2, 2, 1, 1)),
        one=np.ones(2),
        zero=np.zeros(2),
    )
    feeds = [{"x": np.random.default_rng(1).standard_normal((8, 2, 4, 4)).astype(np.float32)}]
    result = quantise(model, lambda: feeds, "ort-cpu")
    kinds = [node.op_type for node in result.graph.node]
    assert "BatchNormalization" not in kinds
    assert kinds[-2:] == ["Sigmoid", "Mul"]
    assert not any(name.startswith(("e_", "y_")) for name in zero_points(result))


def test_an_outlier_is_clipped_and_even_values_are_not() -> None:
    counts = np.full(BINS, 1000)
    even = Seen(-1.0, 1.0, counts)
    assert best_range(even, is_symmetric=True) == (-1.0, 1.0)
    assert best_range(even, is_symmetric=False) == (-1.0, 1.0)
    counts = np.zeros(BINS, np.int64)
    counts[:20], counts[-1] = 100_000, 1
    low, high = best_range(Seen(0.0, 100.0, counts), is_symmetric=False)
    assert low == 0
    # N h² / (12 · 255²) + (100 − h)² is least here; h is looked for in steps of 1.
    assert high == pytest.approx(100 / (1 + counts.sum() / (12 * 255**2)), abs=1)


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (("--precision", "int8"), "--precision int8 takes its scales from data: give --calib"),
        (("--calib", "x.npz"), "--calib is for --precision int8"),
        (("--precision", "int8", "--calib", "x.npz", "--target", "tx2"), "has no int8 arithmetic"),
    ],
)
def test_flags_that_do_not_go_together_are_refused(tmp_path: Path, flags: tuple[str, ...], reason: str) -> None:
    save(conv_net(), tmp_path / "net.onnx")
    before = listing(tmp_path)
    done = gconv("export", tmp_path / "net.onnx", *flags, "-o", tmp_path / "q.onnx")
    assert done.code == 2
    assert reason in done.err
    assert listing(tmp_path) == before


def test_models_without_a_conv_and_quantised_ones_are_refused(samples: Path) -> None:
    quantised = onnx_gconv.export(conv_net(), precision="int8", calib=samples).model
    with pytest.raises(ModelError, match="is quantised already: it has DequantizeLinear, QuantizeLinear"):
        onnx_gconv.export(quantised, precision="int8", calib=samples)
    with pytest.raises(ModelError, match="has no Conv"):
        quantise(no_conv(), list, "ort-cpu")
    with pytest.raises(UsageError, match="'int4' is not known"):
        onnx_gconv.export(conv_net(), precision="int4")  # type: ignore[arg-type]


def test_half_precision_is_verified() -> None:
    exported = onnx_gconv.export(conv_net(), "tensorrt", precision="fp16")
    weights = {tensor.data_type for tensor in exported.model.graph.initializer if len(tensor.dims) == 4}
    assert weights == {onnx.TensorProto.FLOAT16}
    assert exported.verification is not None
    assert exported.verification.passed


@pytest.mark.parametrize("precision", ["fp16", "int8"])
def test_nvidias_parser_builds_what_is_written(tmp_path: Path, samples: Path, precision: str) -> None:
    pytest.importorskip("tensorrt_rtx", reason="tensorrt-rtx-cu12 is not installed")
    save(conv_net(), tmp_path / "net.onnx")
    calib = ("--calib", samples) if precision == "int8" else ()
    flags = ("--target", "tensorrt", "--precision", precision, *calib, "-o", tmp_path / "typed.onnx")
    assert gconv("export", tmp_path / "net.onnx", *flags).code == 0
    done = gconv("bench", tmp_path / "typed.onnx", "--runner", "tensorrt-rtx", "--json")
    assert done.code == 0, done.err
    done = gconv("bench", tmp_path / "net.onnx", "--runner", "tensorrt-rtx", "--precision", precision, "--json")
    assert done.code == 0, done.err


def test_compress_writes_the_same_in_int8_beside_it_and_reports_both(tmp_path: Path, samples: Path) -> None:
    save(conv_net(), tmp_path / "net.onnx")
    flags = ("--groups", "2", "--calib", samples, "--eval", samples)
    assert gconv("compress", tmp_path / "net.onnx", *flags, "-o", tmp_path / "float.onnx").code == 0
    flags = (*flags, "--precision", "int8", "-o", tmp_path / "small.onnx")
    done = gconv("compress", tmp_path / "net.onnx", *flags)
    assert done.code == 0, done.err
    assert "int8: error to float" in done.out
    # The float model and its plan are what they are without it.
    for end in ("onnx", "plan.json"):
        assert (tmp_path / f"small.{end}").read_bytes() == (tmp_path / f"float.{end}").read_bytes()
    written = onnx.load(str(tmp_path / "small.int8.onnx"))
    onnx.checker.check_model(written, full_check=True)
    again = onnx_gconv.export(tmp_path / "small.onnx", precision="int8", calib=samples)
    assert written.SerializeToString() == again.model.SerializeToString()
    report = json.loads((tmp_path / "small.report.json").read_text())
    assert json.loads((tmp_path / "float.report.json").read_text())["quantised"] is None
    quantised = report["quantised"]
    assert (quantised["precision"], quantised["latency"], quantised["closeness"]["samples"]) == ("int8", None, SHAPE[0])
    assert quantised["bytes"] == (tmp_path / "small.int8.onnx").stat().st_size
    assert quantised["evaluation"]["outputs"].keys() == report["evaluation"]["outputs"].keys()


def test_compress_refuses_int8_without_samples_and_over_its_own_input(tmp_path: Path, samples: Path) -> None:
    save(conv_net(), tmp_path / "net.int8.onnx")
    before = listing(tmp_path)
    done = gconv("compress", tmp_path / "net.int8.onnx", "--groups", "2", "--precision", "int8")
    assert (done.code, "give --calib DATA" in done.err) == (2, True)
    flags = ("--groups", "2", "--precision", "int8", "--calib", samples, "-o", tmp_path / "net.onnx")
    done = gconv("compress", tmp_path / "net.int8.onnx", *flags)
    assert (done.code, "would overwrite the model itself" in done.err) == (2, True)
    assert listing(tmp_path) == before
