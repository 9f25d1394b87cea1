"""A budget in milliseconds over widths, dropped branches and groups: predicted, kept, measured, or refused with the true reason."""

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from tiny import conv_net, from_text, gconv, save

from onnx_gconv import timing
from onnx_gconv.deploy import here
from onnx_gconv.pipeline import compressing, in_time, settings
from onnx_gconv.pipeline.facts import Facts
from onnx_gconv.pipeline.gathers import GatherTimes
from onnx_gconv.pipeline.original import open_original
from onnx_gconv.pipeline.settings import CompressWishes, settings_of
from onnx_gconv.search.latency import LayerTimes, behind

CONV_NS = 100_000  # of every Conv, beside its weights
BLOCK = """
block (float[N,3,8,8] image) => (float[N,4] scores) {
    c1 = Conv <pads = [1, 1, 1, 1]> (image, w1)
    stream = Relu (c1)
    c2 = Conv (stream, w2)
    wide = Relu (c2)
    c3 = Conv <pads = [1, 1, 1, 1], group = 16> (wide, w3)
    each = Relu (c3)
    c4 = Conv (each, w4)
    total = Add (c4, stream)
    pooled = GlobalAveragePool (total)
    flat = Flatten (pooled)
    scores = Gemm <transB = 1> (flat, w5)
}
"""


def block_net() -> onnx.ModelProto:
    """An inverted residual block: 8 channels widened to 16, a depthwise Conv, and back."""
    rng = np.random.default_rng(0)
    shapes = {"w1": (8, 3, 3, 3), "w2": (16, 8, 1, 1), "w3": (16, 1, 3, 3), "w4": (8, 16, 1, 1), "w5": (4, 8)}
    return from_text(BLOCK, **{name: rng.standard_normal(shape) / 4 for name, shape in shapes.items()})


@dataclass(frozen=True)
class ToyTime:
    """A weight takes a microsecond."""

    taps: int

    def nanoseconds(self, ins: int, outs: int, groups: int) -> int:
        return CONV_NS + 1000 * self.taps * ins * outs // groups


def toy_ms(model: onnx.ModelProto) -> float:
    """What the whole model takes by the same rule: Gemms take nothing."""
    convs = [node for node in model.graph.node if node.op_type == "Conv"]
    weights = {tensor.name: int(np.prod(tensor.dims)) for tensor in model.graph.initializer}
    return sum(CONV_NS + 1000 * weights[node.input[1]] for node in convs) / 1e6


def toy_times(model: onnx.ModelProto, *, host: str | None = None, leave_out: str = "") -> LayerTimes:
    dims = {tensor.name: tensor.dims for tensor in model.graph.initializer}
    convs = [node for node in model.graph.node if node.op_type == "Conv" and node.output[0] != leave_out]
    layers = {node.output[0]: ToyTime(int(np.prod(dims[node.input[1]][2:]))) for node in convs}
    layers |= {behind(node.output[0]): ToyTime(1) for node in convs}
    return LayerTimes("ort-cpu", host, toy_ms(model), layers)


Run = Callable[..., tuple[int, str, dict[str, object]]]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Compress a model with the toy's times; what it takes `slow` times as long as predicted when it is measured.

    The toy's are those of another precision where the model takes `in_float` times as long in float.
    """

    def compress(
        model: onnx.ModelProto,
        *flags: str,
        slow: float = 1.0,
        times: object = None,
        gather_ns: int = 0,
        in_float: float = 1.0,
    ) -> tuple[int, str, dict[str, object]]:
        def measured(dense: onnx.ModelProto, result: onnx.ModelProto, *_: object, **__: object) -> timing.Latency:
            after_ms = toy_ms(result) * (slow if toy_ms(result) < toy_ms(dense) else 1)
            return timing.Latency("ort-cpu", in_float * toy_ms(dense), after_ms)

        known = toy_times(model) if times is None else times
        if in_float != 1:
            known = replace(toy_times(model), float_ms=in_float * toy_ms(model))
        facts = Facts("ort-cpu", {}, known, GatherTimes(model, open_original(model).network.shapes, lambda *_: gather_ns))
        monkeypatch.setattr(compressing, "measure", lambda *_: facts)
        monkeypatch.setattr(in_time, "compare_latency", measured)
        monkeypatch.setattr(in_time, "typed", lambda model, *_: model)  # the toy reads no int8
        save(model, tmp_path / "net.onnx")
        np.savez(tmp_path / "calib.npz", image=np.random.default_rng(1).standard_normal((40, 3, 8, 8)).astype(np.float32))
        out = ("-o", tmp_path / "small.onnx", "--json")
        done = gconv("compress", tmp_path / "net.onnx", "--calib", tmp_path / "calib.npz", "--width-step", "4", *flags, *out)
        return done.code, done.err, json.loads(done.out) if done.code == 0 else {}

    return compress


def ratio_of(path: Path, model: onnx.ModelProto) -> float:
    return toy_ms(onnx.load(str(path))) / toy_ms(model)


@pytest.mark.parametrize("forms", [(), ("--forms", "width"), ("--forms", "all"), ("--forms", "width,lowrank")])
@pytest.mark.parametrize("model", [conv_net(channels=16), block_net()], ids=["chain", "block"])
def test_a_budget_of_time_is_kept_and_predicted(run: Run, tmp_path: Path, model: onnx.ModelProto, forms: tuple[str, ...]) -> None:
    code, err, report = run(model, "--max-latency", "70%", *forms)
    assert code == 0, err
    predicted = report["predicted_latency"]
    assert isinstance(predicted, dict)
    # The toy times the written model as it was predicted: its times add up.
    real = ratio_of(tmp_path / "small.onnx", model)
    assert real == pytest.approx(predicted["ratio"], abs=1e-3)
    assert real <= 0.7
    plan = json.loads((tmp_path / "small.plan.json").read_text(encoding="utf-8"))
    assert plan["spaces"] or plan["dropped"] or plan["layers"] or plan["low_rank"]
    assert plan["budget"] == {"max_latency_ms": pytest.approx(0.7 * toy_ms(model), abs=1e-6)}
    assert report["budget_met"] is True


@pytest.mark.parametrize("gathers", ["free", "shared", "none"])
@pytest.mark.parametrize("model", [conv_net(channels=16), block_net()], ids=["chain", "block"])
def test_gathers_are_within_the_budget_beside_widths(run: Run, tmp_path: Path, model: onnx.ModelProto, gathers: str) -> None:
    flags = ("--max-latency", "60%", "--forms", "group,width", "--gathers", gathers)
    code, err, report = run(model, *flags, gather_ns=30_000)
    assert code == 0, err
    predicted = report["predicted_latency"]
    assert isinstance(predicted, dict)
    written = onnx.load(str(tmp_path / "small.onnx"))
    count = sum(node.op_type == "Gather" for node in written.graph.node)
    assert predicted["gathers_ms"] == pytest.approx(0.03 * count, abs=1e-4)
    assert toy_ms(written) + 0.03 * count <= 0.6 * toy_ms(model) + 1e-6


def test_what_is_not_in_the_table_takes_as_long_as_before(run: Run, tmp_path: Path) -> None:
    model = conv_net(channels=16)
    code, err, report = run(model, "--max-latency", "90%", "--exclude", "c3", times=toy_times(model, leave_out="c1"))
    assert code == 0, err
    predicted = report["predicted_latency"]
    assert isinstance(predicted, dict)
    assert ratio_of(tmp_path / "small.onnx", model) < predicted["ratio"] <= 0.9


def test_a_result_that_is_slower_than_predicted_is_planned_again_tighter(run: Run, tmp_path: Path) -> None:
    model = conv_net(channels=16)
    code, err, report = run(model, "--max-latency", "70%", slow=1.2)
    assert code == 0, err
    assert "trying again with a tighter budget" in err
    assert 1.2 * ratio_of(tmp_path / "small.onnx", model) <= 0.7
    assert report["budget"] == {"max_latency_ms": pytest.approx(0.7 * toy_ms(model), abs=1e-6)}
    code, err, _ = run(model, "--max-latency", "70%", slow=20.0)
    assert code == 1
    assert "over the 70.0% asked" in err


def test_what_a_tighter_budget_leaves_unused_is_tried_for(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A little over the time, then a budget that is half as large: there is much to be had between the two."""
    model = conv_net(channels=16)
    monkeypatch.setattr(in_time, "TIGHTER", (0.5,))
    without = run(model, "--max-latency", "70%", slow=1.1)
    assert without[0] == 0, without[1]
    used = 1.1 * ratio_of(tmp_path / "small.onnx", model)
    monkeypatch.setattr(in_time, "ROOM", 0.0)
    assert run(model, "--max-latency", "70%", slow=1.1)[0] == 0
    assert 1.1 * ratio_of(tmp_path / "small.onnx", model) < used <= 0.7


def test_what_is_faster_than_predicted_gets_more_of_its_channels_back(run: Run, tmp_path: Path) -> None:
    model = conv_net(channels=16)
    code, err, report = run(model, "--max-latency", "70%", slow=0.8)
    assert code == 0, err
    predicted = report["predicted_latency"]
    assert isinstance(predicted, dict)
    assert (
        predicted["ratio"]
        > 0.7
        >= 0.8 * ratio_of(tmp_path / "small.onnx", model)
        == pytest.approx(0.8 * predicted["ratio"], abs=1e-3)
    )
    assert report["budget"] == {"max_latency_ms": pytest.approx(0.7 * toy_ms(model), abs=1e-6)}
    assert report["budget_met"] is True


def test_a_time_that_no_width_reaches_is_refused_with_the_range_that_can_be_had(run: Run) -> None:
    model = conv_net(channels=16)
    code, err, _ = run(model, "--max-latency", "1%")
    assert code == 1
    lowest = err.split("--max-latency from ")[1].split("(")[1].split("%")[0]
    assert run(model, "--max-latency", f"{lowest}%")[0] == 0
    assert run(model, "--max-latency", f"{float(lowest) - 0.02}%")[0] == 1


def test_with_int8_the_budget_is_that_of_the_int8_model_and_a_share_of_the_float_models_time(run: Run, tmp_path: Path) -> None:
    model = conv_net(channels=16)
    code, err, report = run(model, "--max-latency", "30%", "--precision", "int8", in_float=2.0)
    assert code == 0, err
    assert report["budget"] == {"max_latency_ms": pytest.approx(0.6 * toy_ms(model), abs=1e-6)}
    assert report["budget_met"] is True
    predicted, lower = report["predicted_latency"], report["quantised"]
    assert isinstance(predicted, dict)
    assert isinstance(lower, dict)
    assert predicted["before_ms"] == pytest.approx(2 * toy_ms(model), abs=1e-4)
    ratio = ratio_of(tmp_path / "small.onnx", model) / 2
    assert ratio <= 0.3
    assert [predicted["ratio"], lower["latency"]["ratio"]] == pytest.approx([ratio, ratio], abs=1e-3)
    assert report["latency"] is None  # the float model's, which nobody asked for


def test_what_int8_reaches_alone_is_not_narrowed(run: Run, tmp_path: Path) -> None:
    model = conv_net(channels=16)
    code, err, report = run(model, "--max-latency", "55%", "--precision", "int8", in_float=2.0)
    assert code == 0, err
    assert "within the budget as it is in int8" in err
    assert ratio_of(tmp_path / "small.onnx", model) == 1
    assert report["quantised"] is not None


def test_a_time_that_int8_does_not_reach_is_refused_as_a_share_of_the_float_models(run: Run) -> None:
    model = conv_net(channels=16)
    code, err, _ = run(model, "--max-latency", "1%", "--precision", "int8", in_float=2.0)
    assert code == 1
    assert "--precision int8" not in err  # it is set already
    lowest = err.split("--max-latency from ")[1].split("(")[1].split("%")[0]
    assert run(model, "--max-latency", f"{lowest}%", "--precision", "int8", in_float=2.0)[0] == 0
    assert run(model, "--max-latency", f"{float(lowest) - 0.02}%", "--precision", "int8", in_float=2.0)[0] == 1
    code, err, _ = run(model, "--max-latency", "1%")
    assert "--precision int8" in err


def test_times_of_another_host_are_not_measured_here(run: Run) -> None:
    model = conv_net(channels=16)
    code, err, report = run(model, "--max-latency", "80%", slow=9.0, times=toy_times(model, host="ssh://toy"))
    assert code == 0, err
    assert report["latency"] is None


def test_a_budget_of_time_alone_is_for_this_cpu() -> None:
    assert settings_of("compress", {"max_latency": 0.6}, CompressWishes).target == "ort-cpu"
    assert settings_of("compress", {"max_latency": 0.6, "timing": "t.json"}, CompressWishes).target is None
    assert settings_of("compress", {"max_macs": 0.6}, CompressWishes).target is None
    assert settings_of("compress", {"max_latency": 0.6, "calib": "x.npz"}, CompressWishes).form_names == ("width", "drop")
    assert settings_of("compress", {"max_latency": 0.6}, CompressWishes).form_names == ("group",)


def test_auto_is_what_this_machine_has(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(here, "SIGNS_OF_A_GPU", (str(tmp_path / "gpu"),))
    monkeypatch.setattr(here, "TRTEXEC", str(tmp_path / "elsewhere"))
    assert settings_of("compress", {"max_macs": 0.6, "target": "auto"}, CompressWishes).target == "ort-cpu"
    (tmp_path / "gpu").touch()
    assert settings.target_here() == "tensorrt"
    (tmp_path / "gpu").unlink()
    (tmp_path / "trtexec").touch(mode=0o755)
    assert settings.target_here() == "tensorrt"
    assert settings_of("compress", {"max_macs": 0.6, "target": "auto", "timing": "t.json"}, CompressWishes).target is None


def test_threads_reach_the_timing_of_the_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def session(model: onnx.ModelProto, *, threads: int) -> object:
        seen.append(threads)
        return real(model, threads=threads)

    real = timing.session
    monkeypatch.setattr(timing, "session", session)
    monkeypatch.setattr(in_time, "SECONDS", 0.01)
    done = gconv(
        *("compress", save(conv_net(channels=32), tmp_path / "net.onnx"), "--max-macs", "90%"),
        *("--target", "ort-cpu", "--threads", "2", "--force"),
    )
    assert done.code == 0, done.err
    assert set(seen) == {2}
