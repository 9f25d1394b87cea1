"""The commands with --calib and --eval: what they write, what they refuse, and that both are told."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from fitting import distance, outputs
from tiny import Finished, conv_net, from_text, gconv, listing, save

MODELS = Path(__file__).parents[1] / "models"
CONTRACTS = (Path(__file__).parents[1] / "docs" / "contracts.md").read_text(encoding="utf-8")
IMAGES = np.random.default_rng(0).standard_normal((60, 3, 8, 8)).astype(np.float32)
QUICK = ("--cost", "log", "--jobs", "1")  # where the search is not the subject


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Work in a folder that holds net.onnx and calib.npz."""
    monkeypatch.chdir(tmp_path)
    save(conv_net(), Path("net.onnx"))
    np.savez("calib.npz", image=IMAGES)
    return tmp_path


def compress(*flags: str, data: str = "calib.npz", output: str = "small.onnx") -> Finished:
    return gconv("compress", "net.onnx", "--calib", data, "-o", output, "-q", *flags)


def report(name: str = "small") -> dict[str, Any]:
    found: dict[str, Any] = json.loads(Path(f"{name}.report.json").read_text(encoding="utf-8"))
    return found


# --- the sample model -----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_sample_model_at_half_its_flops_is_right_on_97_of_100_test_images() -> None:
    done = gconv(
        "compress", MODELS / "digits.onnx", "--max-flops", "50%", "--calib", MODELS / "digits_calib.npz",
        "--eval", MODELS / "digits_test.npz", "--cost", "log", "-o", "digits.onnx",
    )  # fmt: skip
    assert done.code == 0, done.err
    found = report("digits")
    assert found["after"]["flops"] <= found["budget"]["max_flops"] == found["before"]["flops"] // 2
    judged, recovery = found["evaluation"], found["recovery"]
    assert (judged["samples"], judged["reference_top1"]) == (360, 1.0)
    assert judged["top1"] >= 0.97
    assert (recovery["samples"], recovery["method"]) == (500, "closed-form")
    assert recovery["output_error_after"] < 0.1 < 0.9 < recovery["output_error_before"]
    assert len(recovery["layers"]) == 16  # 15 Convs and the classifier: what stays dense is fitted, too
    # Before and after stand in the table.
    assert re.search(rf"top-1 +│ +100\.00% │ +{judged['top1']:.2%}", done.out)
    assert re.search(rf"output error +│ +{recovery['output_error_before']:.3f}", done.out)
    # What it wrote is what it judged.
    again = gconv("evaluate", "digits.onnx", "--data", MODELS / "digits_test.npz", "--json")
    assert json.loads(again.out)["top1"] == judged["top1"]


# --- the report -----------------------------------------------------------------------------------------------------------


def test_the_report_has_the_keys_of_the_contracts() -> None:
    np.savez("test.npz", image=IMAGES, labels=np.zeros(60, np.int64))
    assert compress("--groups", "2", "--eval", "test.npz").code == 0
    found = report()
    assert found["recovery"].keys() == {"samples", "method", "output_error_before", "output_error_after", "layers"}
    assert [layer["name"] for layer in found["recovery"]["layers"]] == ["c1", "c2", "c3", "scores"]
    assert {key for layer in found["recovery"]["layers"] for key in layer} == {"name", "label", "before", "after"}
    assert found["evaluation"].keys() == {
        "samples", "top1", "top5", "reference_top1", "reference_top5", "agreement", "outputs",
    }  # fmt: skip
    section = CONTRACTS.split("\n## report.json\n")[1].split("\n## ")[0]
    for key in (*found, *found["recovery"], *found["seconds"]):
        assert f"`{key}`" in section, key


def test_errors_in_the_report_are_those_of_the_models() -> None:
    assert compress("--groups", "2").code == 0
    assert gconv("mask", "net.onnx", "small.plan.json", "-o", "masked.onnx").code == 0
    results = [outputs(onnx.load(name), {"image": IMAGES})[0] for name in ("net.onnx", "masked.onnx", "small.onnx")]
    recovery = report()["recovery"]
    assert recovery["output_error_before"] == pytest.approx(distance(results[0], results[1]), rel=1e-4)
    assert recovery["output_error_after"] == pytest.approx(distance(results[0], results[2]), rel=1e-4)
    assert recovery["output_error_after"] < 0.5 * recovery["output_error_before"]


def test_without_data_recovery_and_evaluation_are_null() -> None:
    assert gconv("compress", "net.onnx", "--groups", "2", "-o", "small.onnx", "-q").code == 0
    found = report()
    assert (found["recovery"], found["evaluation"]) == (None, None)


def test_data_without_labels_says_how_often_both_models_agree() -> None:
    done = gconv("compress", "net.onnx", "--groups", "2", "--eval", "calib.npz", "-o", "small.onnx")
    assert done.code == 0, done.err
    found = report()
    same = [outputs(onnx.load(name), {"image": IMAGES})[0].argmax(axis=1) for name in ("net.onnx", "small.onnx")]
    assert found["recovery"] is None
    assert (found["evaluation"]["top1"], found["evaluation"]["reference_top1"]) == (None, None)
    assert found["evaluation"]["agreement"] == pytest.approx(np.mean(same[0] == same[1]))
    assert "same class as before" in done.out
    assert "top-1" not in done.out


# --- samples --------------------------------------------------------------------------------------------------------------


def test_calib_samples_are_the_first_ones() -> None:
    np.savez("first.npz", image=IMAGES[:20])
    assert compress("--groups", "2", "--calib-samples", "20", output="a.onnx").code == 0
    assert compress("--groups", "2", data="first.npz", output="b.onnx").code == 0
    assert compress("--groups", "2", output="c.onnx").code == 0
    one, two, all_of_them = (Path(f"{name}.onnx").read_bytes() for name in "abc")
    assert one == two != all_of_them
    assert (report("a")["recovery"]["samples"], report("c")["recovery"]["samples"]) == (20, 60)


def test_that_samples_are_few_is_told() -> None:
    np.savez("many.npz", image=np.random.default_rng(1).standard_normal((100, 3, 8, 8)).astype(np.float32))
    command = ("compress", "net.onnx", "--groups", "2", "-o", "small.onnx", "--calib")
    few, many = (gconv(*command, data) for data in ("calib.npz", "many.npz"))
    assert "warning: fitted to only 60 samples: the weights may suit these and no others" in few.err
    assert "warning" not in many.err


def test_labels_of_calibration_data_are_not_looked_at() -> None:
    np.savez("labelled.npz", image=IMAGES, labels=np.full(60, 99))  # the model has 4 classes
    assert compress("--groups", "2", output="a.onnx").code == 0
    done = compress("--groups", "2", data="labelled.npz", output="b.onnx")
    assert done.code == 0, done.err
    assert Path("a.onnx").read_bytes() == Path("b.onnx").read_bytes()


def test_a_model_with_a_fixed_batch_is_calibrated_on_whole_batches() -> None:
    model = conv_net()
    model.graph.input[0].type.tensor_type.shape.dim[0].dim_value = 25
    save(model, Path("net.onnx"))
    np.savez("whole.npz", image=IMAGES[:50])
    assert compress("--groups", "2", output="a.onnx").code == 0
    assert compress("--groups", "2", data="whole.npz", output="b.onnx").code == 0
    assert Path("a.onnx").read_bytes() == Path("b.onnx").read_bytes()
    np.savez("few.npz", image=IMAGES[:24])
    before = listing(Path())
    done = compress("--groups", "2", data="few.npz", output="c.onnx")
    assert (done.code, listing(Path())) == (1, before)
    assert "no whole batch of 25 samples" in done.err


# --- planning -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cost", ["trial", "sensitivity", "log"])
def test_a_budget_is_kept_whatever_the_cost(cost: str) -> None:
    done = compress("--max-flops", "60%", "--max-params", "70%", "--cost", cost, "--jobs", "1")
    assert done.code == 0, done.err
    found = report()
    assert found["after"]["flops"] <= found["budget"]["max_flops"] == int(0.6 * found["before"]["flops"])
    assert found["after"]["params"] <= found["budget"]["max_params"] == int(0.7 * found["before"]["params"])
    counted = json.loads(gconv("inspect", "small.onnx", "--json", "-q").out)["totals"]
    assert (counted["flops"], counted["params"]) == (found["after"]["flops"], found["after"]["params"])


def test_a_plan_by_measured_costs_is_the_same_to_the_last_byte_each_time() -> None:
    plans = []
    for jobs in ("1", "2", "2"):
        flags = ("--max-flops", "60%", "--calib", "calib.npz", "--jobs", jobs)
        assert gconv("plan", "net.onnx", *flags, "-o", "plan.json", "-q").code == 0
        plans.append(Path("plan.json").read_bytes())
    assert plans[0] == plans[1] == plans[2]


TWO_CONVS = """
m (float[N,8,6,6] image) => (float[N,8,6,6] y) {
    loud = Conv (image, w1, b1)
    quiet = Conv (image, w2, b2)
    hushed = Mul (quiet, little)
    y = Add (loud, hushed)
}
"""


def test_measured_costs_group_what_the_outputs_do_not_depend_on(rng: np.random.Generator) -> None:
    """By its weights `loud` loses less, so that -log(kept) groups it. But `quiet` hardly reaches the output."""
    loud = rng.standard_normal((8, 8, 1, 1))
    loud[:4, 4:] /= 4
    loud[4:, :4] /= 4
    tensors = {"w2": rng.standard_normal((8, 8, 1, 1)), "b1": np.zeros(8), "b2": np.zeros(8), "little": np.float32(0.01)}
    save(from_text(TWO_CONVS, w1=loud, **tensors), Path("net.onnx"))
    np.savez("calib.npz", image=rng.standard_normal((60, 8, 6, 6)).astype(np.float32))
    chosen = {}
    for cost in ("log", "sensitivity", "trial"):
        flags = ("--max-macs", "75%", "--calib", "calib.npz", "--cost", cost, "--jobs", "1")
        assert gconv("plan", "net.onnx", *flags, "-o", "plan.json", "-q").code == 0
        chosen[cost] = {layer["name"] for layer in json.loads(Path("plan.json").read_text(encoding="utf-8"))["layers"]}
    assert chosen == {"log": {"loud"}, "sensitivity": {"quiet"}, "trial": {"quiet"}}


def test_apply_with_the_plan_and_the_data_of_compress_writes_the_same_model() -> None:
    assert compress("--max-flops", "60%", *QUICK).code == 0
    flags = ("--calib", "calib.npz", "--jobs", "2", "-o", "applied.onnx")
    done = gconv("apply", "net.onnx", "small.plan.json", *flags)
    assert done.code == 0, done.err
    assert Path("applied.onnx").read_bytes() == Path("small.onnx").read_bytes()
    assert "recovered on 60 samples: output error" in done.err
    assert gconv("apply", "net.onnx", "small.plan.json", "-o", "plain.onnx", "-q").code == 0
    assert Path("plain.onnx").read_bytes() != Path("small.onnx").read_bytes()


def test_samples_that_are_all_the_same_are_told() -> None:
    np.savez("same.npz", image=np.repeat(IMAGES[:1], 60, axis=0))
    flags = ("apply", "net.onnx", "plan.json", "-o", "small.onnx", "--calib")
    assert gconv("plan", "net.onnx", "--groups", "2", "-q", "-o", "plan.json").code == 0
    assert "the first samples are identical" in gconv(*flags, "same.npz").err
    assert "the first samples are identical" not in gconv(*flags, "calib.npz").err


def test_that_nothing_is_verified_is_told_once_though_the_model_is_rewritten_twice() -> None:
    done = gconv("compress", "net.onnx", "--groups", "2", "--calib", "calib.npz", "--no-verify", "-o", "small.onnx")
    assert done.code == 0, done.err
    assert done.err.count("warning: not verified: --no-verify was given") == 1


def test_the_layers_of_a_plan_by_activations_are_listed_with_their_bounds() -> None:
    flags = ("--criterion", "activation", "--calib", "calib.npz", "--max-flops", "60%", *QUICK)
    done = gconv("compress", "net.onnx", *flags, "-o", "small.onnx", "-v")
    assert done.code == 0, done.err
    shown = {layer["label"] for layer in report()["layers"] if layer["label"] in done.out}
    assert shown == {layer["label"] for layer in report()["layers"]} != set()


# --- refusals -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["compress", "plan"])
@pytest.mark.parametrize("flag", ["--cost sensitivity", "--cost trial", "--criterion activation"])
def test_what_is_measured_needs_data(folder: Path, command: str, flag: str) -> None:
    before = listing(folder)
    done = gconv(command, "net.onnx", "--max-flops", "60%", *flag.split(), "-o", "out")
    assert (done.code, listing(folder)) == (2, before)
    assert "--calib" in done.err


@pytest.mark.parametrize("samples", ["0", "-1", "some"])
def test_calib_samples_is_a_whole_number_from_1_on(samples: str) -> None:
    assert compress("--groups", "2", "--calib-samples", samples).code == 2


BAD = {
    "missing.npz": None,
    "name.npz": {"picture": IMAGES},
    "shape.npz": {"image": IMAGES[:, :2]},
    "none.npz": {"image": IMAGES[:0]},
    "objects.npz": {"image": np.array([{}], dtype=object)},
    "nan.npz": {"image": np.where(IMAGES > 3, np.nan, IMAGES)},
}


@pytest.mark.parametrize("name", list(BAD))
@pytest.mark.parametrize("flag", ["--calib", "--eval"])
def test_bad_data_is_one_error_and_nothing_is_written(folder: Path, name: str, flag: str) -> None:
    arrays = BAD[name]
    if arrays is not None:
        np.savez(name, **arrays)
    before = listing(folder)
    done = gconv("compress", "net.onnx", "--groups", "2", flag, name, "-o", "small.onnx", "-q")
    assert (done.code, done.out, listing(folder)) == (1, "", before)
    assert done.err.startswith("error: ")
    assert "unexpectedly" not in done.err
    assert done.err.count("error: ") == 1


@pytest.mark.parametrize("name", list(BAD))
def test_plan_and_apply_refuse_bad_data_too(folder: Path, name: str) -> None:
    assert gconv("plan", "net.onnx", "--groups", "2", "-o", "plan.json", "-q").code == 0
    arrays = BAD[name]
    if arrays is not None:
        np.savez(name, **arrays)
    before = listing(folder)
    for command in (("plan", "net.onnx", "--max-flops", "60%"), ("apply", "net.onnx", "plan.json")):
        done = gconv(*command, "--calib", name, "-o", "out", "-q")
        assert (done.code, listing(folder)) == (1, before)
        assert done.err.startswith("error: ")
        assert "unexpectedly" not in done.err


def test_samples_that_only_onnx_runtime_refuses_are_named_as_what_is_wrong() -> None:
    rng = np.random.default_rng(0)
    weights = {"w": (8, 4, 1, 1), "v": (8, 8, 1, 1), "places": (1, 8, 6, 6)}
    text = "m (float[N,4,S,S] x) => (y) { c = Conv (x, w) r = Relu (c) p = Add (r, places) y = Conv (p, v) }"
    save(
        from_text(text, **{name: rng.standard_normal(shape).astype(np.float32) for name, shape in weights.items()}),
        Path("net.onnx"),
    )
    np.savez("calib.npz", x=rng.standard_normal((60, 4, 8, 8)).astype(np.float32))
    done = compress("--max-macs", "70%", "--input-shape", "1x4x6x6")
    assert done.code == 1
    assert "the model does not run on the calibration samples" in done.err
    assert "hint: give samples in a shape that the model accepts" in done.err
    assert not Path("small.onnx").exists()
