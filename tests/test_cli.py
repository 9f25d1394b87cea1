"""The contract of the commands: which files they write, what is in them, what they print where, and that it repeats."""

import importlib.metadata
import json
import math
import os
import re
import subprocess
import sys
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from tiny import conv_net, gconv, get_tensor, listing, save, set_tensor

from onnx_gconv import __version__
from onnx_gconv.cli.main import COMMANDS

DIGITS = Path(__file__).parents[1] / "models" / "digits.onnx"

# The tiny net by hand, on 8x8 pixels: c1, c2, c3 and the Gemm.
PIXELS = 8 * 8
MACS = PIXELS * (8 * 3 * 9) + PIXELS * (8 * 8 * 9) + PIXELS * (8 * 8) + 8 * 4
PARAMS = (8 * 3 * 9 + 8) + (8 * 8 * 9 + 8) + (8 * 8 + 8) + (8 * 4 + 4)

PLAN_KEYS = {
    *("format", "source_sha256", "criterion", "solver", "search", "seed", "budget"),
    *("gathers", "before", "after", "layers", "skipped", "forms", "spaces", "dropped", "low_rank"),
}
PLAN_LAYER_KEYS = {"name", "label", "out_channels", "in_channels", "groups", "kept", "in_order", "out_order"}
REPORT_KEYS = {
    *("format", "model", "output", "before", "after", "budget", "budget_met", "layers", "skipped"),
    *("gathers", "verify", "recovery", "latency", "seconds"),
    # Beyond the design (docs/contracts.md): how good the search is, accuracy, and what the times of the layers promise.
    *("search", "evaluation", "predicted_latency"),
    # Forms beside groups, and the result in fewer bits.
    *("forms", "spaces", "dropped", "low_rank", "changed", "quantised"),
}
COST_KEYS = {"params", "macs", "flops", "bytes", "nodes"}
REPORT_LAYER_KEYS = {"name", "label", "groups", "kept", "macs_before", "macs_after"}
VERIFY_KEYS = {"samples", "max_abs_error", "max_rel_error", "tolerance", "passed"}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Every test works in a folder of its own that holds net.onnx."""
    monkeypatch.chdir(tmp_path)
    save(conv_net(), Path("net.onnx"))
    return tmp_path


def run(command: str) -> str:
    """Run a command that must work; return its stderr."""
    finished = gconv(*command.split())
    assert finished.code == 0, finished
    return finished.err


def process(command: str, *, cwd: Path | None = None, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a command in a process of its own."""
    argv = [sys.executable, "-m", "onnx_gconv", *command.split()]
    return subprocess.run(argv, capture_output=True, text=True, timeout=60, cwd=cwd, env=os.environ | environment)


def strict_json(text: str) -> Any:
    """Return parsed JSON; NaN and Infinity, which Python writes and no other reader takes, are errors."""

    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is not JSON")

    return json.loads(text, parse_constant=refuse)


def read_json(path: str) -> Any:
    return strict_json(Path(path).read_text(encoding="utf-8"))


def conv_groups(path: str) -> dict[str, int]:
    """Return the groups of each Conv in a file, by its weight's name less the suffix that grouping adds."""
    return {
        node.input[1].split("_")[0]: next((a.i for a in node.attribute if a.name == "group"), 1)
        for node in onnx.load(path).graph.node
        if node.op_type == "Conv"
    }


def count_by_hand(path: str) -> tuple[int, int]:
    """Return the parameters and MACs of a tiny net's file: every Conv has 8x8 results, the Gemm one row."""
    graph = onnx.load(path).graph
    sizes = {tensor.name: math.prod(tensor.dims) for tensor in graph.initializer}
    results = {"Conv": PIXELS, "Gemm": 1}
    nodes = [node for node in graph.node if node.op_type in results]
    params = sum(sizes[name] for name in {name for node in nodes for name in node.input[1:]})
    return params, sum(sizes[node.input[1]] * results[node.op_type] for node in nodes)


# --- compress -------------------------------------------------------------------------------------------------------------


def test_compress_writes_exactly_the_model_the_plan_and_the_report(folder: Path) -> None:
    before = listing(folder)
    told = run("compress net.onnx --max-flops 50% -o small.onnx")
    after = listing(folder)
    assert set(after) - set(before) == {"small.onnx", "small.plan.json", "small.report.json"}
    assert after["net.onnx"] == before["net.onnx"]
    assert "wrote small.onnx, small.plan.json, small.report.json" in told


@pytest.mark.parametrize(
    ("model", "stem"), [("net.onnx", "net.gconv"), ("net.v2.onnx", "net.v2.gconv"), ("my net", "my net.gconv")]
)
def test_the_default_output_lies_beside_the_model_and_carries_its_name(model: str, stem: str, folder: Path) -> None:
    (folder / "inner").mkdir()
    save(conv_net(), folder / "inner" / model)
    assert gconv("compress", Path("inner", model), "--groups", "2").code == 0
    assert set(listing(folder / "inner")) == {model, f"{stem}.onnx", f"{stem}.plan.json", f"{stem}.report.json"}
    assert set(listing(folder)) - {"net.onnx", "inner"} == {f"inner/{name}" for name in listing(folder / "inner")}


def test_the_plan_file_has_exactly_the_agreed_keys_and_one_layer_a_line() -> None:
    run("compress net.onnx --groups 2 --max-params 90% -o small.onnx")
    plan = read_json("small.plan.json")
    assert set(plan) == PLAN_KEYS
    assert set(plan["before"]) == set(plan["after"]) == {"params", "macs"}
    assert plan["budget"] == {"max_params": PARAMS * 9 // 10}
    assert [layer["name"] for layer in plan["layers"]] == ["c2", "c3"]
    assert [conv["name"] for conv in plan["skipped"]] == ["c1"]
    assert all(set(layer) == PLAN_LAYER_KEYS for layer in plan["layers"])
    assert all(set(conv) == {"name", "reason"} for conv in plan["skipped"])
    lines = Path("small.plan.json").read_text(encoding="utf-8").splitlines()
    assert sum('"in_order"' in line for line in lines) == 2


def test_the_report_file_has_exactly_the_agreed_keys() -> None:
    run("compress net.onnx --max-flops 50% -o small.onnx")
    report = read_json("small.report.json")
    assert set(report) == REPORT_KEYS
    assert set(report["before"]) == set(report["after"]) == COST_KEYS
    assert all(set(layer) == REPORT_LAYER_KEYS for layer in report["layers"])
    assert all(set(conv) == {"name", "reason"} for conv in report["skipped"])
    assert set(report["gathers"]) == {"naive", "written", "remaining"}
    assert set(report["verify"]) == VERIFY_KEYS
    assert (report["format"], report["recovery"], report["latency"]) == (1, None, None)
    assert report["seconds"]
    assert all(seconds >= 0 for seconds in report["seconds"].values())


def test_the_report_says_what_the_files_are() -> None:
    run("compress net.onnx --groups 4 -o small.onnx")
    report, plan, written = read_json("small.report.json"), read_json("small.plan.json"), onnx.load("small.onnx")
    assert (report["model"], report["output"]) == ("net.onnx", "small.onnx")
    assert report["before"]["bytes"] == Path("net.onnx").stat().st_size
    assert report["after"]["bytes"] == Path("small.onnx").stat().st_size
    assert (report["before"]["nodes"], report["after"]["nodes"]) == (8, len(written.graph.node))
    assert report["gathers"]["naive"] == 2 * len(report["layers"])
    assert report["gathers"]["written"] == sum(node.op_type == "Gather" for node in written.graph.node)
    for told, planned in zip(report["layers"], plan["layers"], strict=True):
        assert {key: told[key] for key in ("name", "label", "groups", "kept")} == {
            key: planned[key] for key in ("name", "label", "groups", "kept")
        }
        assert told["macs_after"] * 4 == told["macs_before"]
    assert report["skipped"] == plan["skipped"]
    assert report["verify"]["passed"] is True
    assert 0 < report["verify"]["max_rel_error"] < 1e-5 < report["verify"]["tolerance"]


def test_a_layer_and_every_other_conv_is_in_the_plan_exactly_once() -> None:
    run("compress net.onnx --max-flops 60% -o small.onnx")
    plan = read_json("small.plan.json")
    assert sorted(conv["name"] for conv in (*plan["layers"], *plan["skipped"])) == ["c1", "c2", "c3"]


@pytest.mark.slow
@pytest.mark.parametrize("flags", ["--max-flops 50%", "--groups 2 --seed 3", "--max-group-channels 4 --criterion l1"])
def test_the_same_flags_give_the_same_bytes_in_another_process_with_other_threads(flags: str, folder: Path) -> None:
    results = []
    for number, (hash_seed, jobs) in enumerate([("1", "1"), ("2", "2")]):
        place = folder / str(number)
        place.mkdir()
        save(conv_net(channels=16), place / "net.onnx")
        finished = process(f"compress net.onnx {flags} --jobs {jobs}", cwd=place, PYTHONHASHSEED=hash_seed)
        assert finished.returncode == 0, finished.stderr
        files = listing(place)
        report = json.loads(files.pop("net.gconv.report.json") or b"")
        del report["seconds"]
        results.append((files, report))
    assert results[0] == results[1]


def test_a_budget_of_everything_changes_nothing() -> None:
    run("compress net.onnx --max-flops 100% -o same.onnx")
    assert onnx.load("same.onnx") == onnx.load("net.onnx")
    assert read_json("same.plan.json")["layers"] == []


# --- budgets --------------------------------------------------------------------------------------------------------------


def _amount(text: str, whole: int) -> Fraction:
    """Return what a limit stands for, exactly."""
    if text.endswith("%"):
        return Fraction(text[:-1]) * whole / 100
    return Fraction(text.rstrip("kM")) * {"k": 1000, "M": 10**6}.get(text[-1], 1)


@pytest.mark.parametrize(
    "limits",
    [
        *({"max_flops": f"{percent}%"} for percent in (99.99, 90, 75, 66.6, 50, 42, 34.62)),
        *({"max_macs": number} for number in ("54815", "36384", "36383", "0.03M", "18976")),
        *({"max_params": number} for number in ("99%", "0.7k", "596", "595", "50%", "356")),
        {"max_flops": "70%", "max_params": "50%"},
        {"max_flops": "40%", "max_macs": "45%", "max_params": "90%"},
    ],
    ids=lambda limits: " ".join(f"{name} {limit}" for name, limit in limits.items()),
)
def test_no_budget_is_ever_exceeded_by_what_is_written(limits: dict[str, str]) -> None:
    flags = " ".join(f"--{name.replace('_', '-')} {limit}" for name, limit in limits.items())
    run(f"compress net.onnx {flags} -o small.onnx")
    params, macs = count_by_hand("small.onnx")
    used = {"max_params": params, "max_macs": macs, "max_flops": 2 * macs}
    whole = {"max_params": PARAMS, "max_macs": MACS, "max_flops": 2 * MACS}
    for name, limit in limits.items():
        assert used[name] <= _amount(limit, whole[name])
    report, plan = read_json("small.report.json"), read_json("small.plan.json")
    assert count_by_hand("net.onnx") == (PARAMS, MACS)
    assert (report["before"]["params"], report["before"]["macs"], report["before"]["flops"]) == (PARAMS, MACS, 2 * MACS)
    assert (report["after"]["params"], report["after"]["macs"], report["after"]["flops"]) == (params, macs, 2 * macs)
    assert (plan["before"], plan["after"]) == ({"params": PARAMS, "macs": MACS}, {"params": params, "macs": macs})
    assert report["budget"] == plan["budget"] == {name: math.floor(_amount(limit, whole[name])) for name, limit in limits.items()}
    assert report["budget_met"] is True


def test_the_grouped_file_is_the_masked_function_to_another_runtime_and_not_the_original() -> None:
    # The oracle is ONNX's reference evaluator, which shares no code with ONNX Runtime.
    run("compress net.onnx --max-flops 50% -o small.onnx")
    run("mask net.onnx small.plan.json -o masked.onnx")
    image = np.random.default_rng(3).standard_normal((2, 3, 8, 8)).astype(np.float32)
    dense, masked, grouped = (
        onnx.reference.ReferenceEvaluator(path).run(None, {"image": image})[0] for path in ("net.onnx", "masked.onnx", "small.onnx")
    )
    assert np.abs(masked).max() > 0
    assert np.abs(grouped - masked).max() <= 1e-5 * np.abs(masked).max()
    assert np.abs(grouped - dense).max() > 1e-2 * np.abs(dense).max()


# --- what goes where ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "command",
    [
        "inspect net.onnx",
        "inspect wide.onnx",
        "plan net.onnx --groups 2 -o other.json",
        "compress net.onnx --groups 2 -o other.onnx",
        "compress wide.onnx --groups 2 -o other.onnx",
        "verify masked.onnx small.onnx",
    ],
)
def test_json_is_all_that_is_on_stdout(command: str) -> None:
    save(conv_net(size="S"), Path("wide.onnx"))  # dynamic axes: there is a note to tell, on stderr
    run("compress net.onnx --groups 2 -o small.onnx")
    run("mask net.onnx small.plan.json -o masked.onnx")
    finished = process(f"{command} --json")
    assert finished.returncode == 0, finished.stderr
    assert strict_json(finished.stdout)["format"] == (2 if command.startswith("plan") else 1)


def test_json_of_plan_and_compress_is_what_their_files_hold() -> None:
    finished = gconv("plan", "net.onnx", "--groups", "2", "-o", "plan.json", "--json")
    assert finished.out == Path("plan.json").read_text(encoding="utf-8")
    finished = gconv("compress", "net.onnx", "--groups", "2", "-o", "small.onnx", "--json")
    assert finished.out == Path("small.report.json").read_text(encoding="utf-8")


def test_a_plan_to_stdout_is_the_plan_file_and_writes_none(folder: Path) -> None:
    run("plan net.onnx --groups 2 -o plan.json")
    before = listing(folder)
    finished = gconv("plan", "net.onnx", "--groups", "2", "-o", "-")
    assert (finished.code, finished.out) == (0, Path("plan.json").read_text(encoding="utf-8"))
    assert listing(folder) == before


@pytest.mark.parametrize("other", ["shape", "nan"])
def test_json_of_a_failed_verify_is_still_json(other: str) -> None:
    model = conv_net()
    if other == "shape":
        set_tensor(set_tensor(model, "w4", np.ones((5, 8))), "b4", np.ones(5))
        model.graph.output[0].type.tensor_type.shape.dim[1].dim_value = 5
    else:
        set_tensor(model, "b4", np.full(4, np.nan))
    save(model, Path("other.onnx"))
    finished = gconv("verify", "net.onnx", "other.onnx", "--json")
    assert finished.code == 1
    assert strict_json(finished.out)["passed"] is False


@pytest.mark.parametrize(
    "command",
    [
        "inspect wide.onnx",
        "plan wide.onnx --groups 2 -o other.json",
        "compress wide.onnx --groups 2 -o other.onnx",
        "compress wide.onnx --groups 2 -o other.onnx --no-verify",
        "mask net.onnx small.plan.json -o other.onnx",
        "apply net.onnx small.plan.json -o other.onnx",
        "verify net.onnx net.onnx",
    ],
)
def test_quiet_is_silent_on_stderr(command: str, capfd: pytest.CaptureFixture[str]) -> None:
    save(conv_net(size="S"), Path("wide.onnx"))
    run("compress net.onnx --groups 2 -o small.onnx")
    finished = gconv(*command.split(), "-q")
    assert (finished.code, finished.err) == (0, "")
    assert capfd.readouterr() == ("", "")  # native code writes past Python's streams


def test_the_result_is_on_stdout_and_the_story_on_stderr() -> None:
    finished = gconv("compress", "net.onnx", "--groups", "2", "-o", "small.onnx")
    assert "parameters" in finished.out
    assert "passed" in finished.out
    assert "wrote" not in finished.out
    assert "wrote small.onnx" in finished.err
    assert "\x1b" not in finished.out + finished.err  # no colours, no bars: this is not a terminal


def test_a_reader_that_leaves_early_gets_no_traceback() -> None:
    argv = [sys.executable, "-m", "onnx_gconv", "inspect", "net.onnx"]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as reader:
        assert reader.stdout is not None
        assert reader.stderr is not None
        reader.stdout.close()
        assert reader.stderr.read() == ""


def test_a_bug_of_ours_is_one_sentence_and_with_v_a_traceback(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    def broken(*args: object, **kwargs: object) -> None:
        raise RuntimeError("boom")

    monkeypatch.setattr("onnx_gconv.pipeline.planning.make_plan", broken)
    before = listing(folder)
    finished = gconv("compress", "net.onnx", "--groups", "2")
    assert finished.code == 1
    assert finished.err.startswith("error: onnx-gconv failed unexpectedly: RuntimeError: boom\nhint: ")
    assert "Traceback" in gconv("compress", "net.onnx", "--groups", "2", "-v").err
    assert listing(folder) == before


# --- step by step ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("flags", ["--max-flops 50%", "--groups 2", "--groups 8 --solver plain", "--max-params 40%"])
def test_plan_and_apply_give_the_bytes_of_compress_from_the_original_and_from_the_masked_model(flags: str) -> None:
    run(f"compress net.onnx {flags} -o small.onnx")
    run(f"plan net.onnx {flags} -o plan.json")
    run("mask net.onnx plan.json -o masked.onnx")
    run("apply net.onnx plan.json -o grouped.onnx")
    run("apply masked.onnx plan.json -o regrouped.onnx")
    assert Path("plan.json").read_bytes() == Path("small.plan.json").read_bytes()
    assert Path("grouped.onnx").read_bytes() == Path("small.onnx").read_bytes()
    assert Path("regrouped.onnx").read_bytes() == Path("small.onnx").read_bytes()


def test_mask_zeroes_weights_outside_the_groups_and_changes_nothing_else() -> None:
    run("plan net.onnx --groups 2 -o plan.json")
    run("mask net.onnx plan.json -o masked.onnx")
    expected = onnx.load("net.onnx")
    for layer in read_json("plan.json")["layers"]:
        name = layer["name"].replace("c", "w")
        weight = np.zeros_like(get_tensor(expected, name))
        for block in range(2):
            inputs, outputs = layer["in_order"][4 * block : 4 * block + 4], layer["out_order"][4 * block : 4 * block + 4]
            weight[np.ix_(outputs, inputs)] = get_tensor(expected, name)[np.ix_(outputs, inputs)]
        next(tensor for tensor in expected.graph.initializer if tensor.name == name).raw_data = weight.tobytes()
    assert onnx.load("masked.onnx") == expected


def _dropped(told: str) -> str:
    match = re.search(r"dropped (\S+%?) of their weight", told)
    assert match is not None, told
    return match[1]


def test_apply_tells_how_much_weight_it_drops_and_exactly_none_of_a_masked_model() -> None:
    run("plan net.onnx --groups 2 -o plan.json")
    run("mask net.onnx plan.json -o masked.onnx")
    dense, masked = (
        sum(np.abs(get_tensor(onnx.load(path), name).astype(np.float64)).sum() for name in ("w2", "w3"))
        for path in ("net.onnx", "masked.onnx")
    )
    told = _dropped(run("apply net.onnx plan.json -o grouped.onnx"))
    assert float(told.rstrip("%")) / 100 == pytest.approx(1 - masked / dense, abs=1e-6)
    nothing = _dropped(run("apply masked.onnx plan.json -o grouped.onnx"))
    assert float(nothing.rstrip("%")) == 0


def leaking_model() -> str:
    """Return how much of the planned weight, in percent, lies outside the groups of plan.json in the new file tuned.onnx."""
    run("plan net.onnx --groups 2 -o plan.json")
    run("mask net.onnx plan.json -o masked.onnx")
    model = onnx.load("masked.onnx")
    weight = get_tensor(model, "w2")
    inside = np.abs(weight.astype(np.float64)).sum() + np.abs(get_tensor(model, "w3").astype(np.float64)).sum()
    leaked = weight == 0
    weight[leaked] = 1e-8  # a fine-tuning that let go of the mask
    save(set_tensor(model, "w2", weight), Path("tuned.onnx"))
    outside = leaked.sum() * float(np.float32(1e-8))
    return f"{100 * outside / (inside + outside):.6g}%"


def test_apply_refuses_a_tuned_model_whose_masks_leak_and_names_the_share(folder: Path) -> None:
    share = leaking_model()
    before = listing(folder)
    refused = gconv("apply", "tuned.onnx", "plan.json", "-o", "grouped.onnx")
    assert refused.code == 1
    assert f"'tuned.onnx' is not the model that was planned, and has {share} of" in refused.err
    assert "--allow-drop" in refused.err
    assert listing(folder) == before


def test_a_leak_is_dropped_when_asked_to_and_told_without_rounding_it_to_nothing() -> None:
    share = leaking_model()
    assert _dropped(run("apply tuned.onnx plan.json -o grouped.onnx --allow-drop")) == share
    run("verify masked.onnx grouped.onnx")
    assert _dropped(run("apply masked.onnx plan.json -o grouped.onnx")) == "0%"


def test_verify_accepts_masked_against_grouped_and_rejects_the_original() -> None:
    run("compress net.onnx --groups 2 -o small.onnx")
    run("mask net.onnx small.plan.json -o masked.onnx")
    accepted = gconv("verify", "masked.onnx", "small.onnx", "--json")
    assert accepted.code == 0
    assert strict_json(accepted.out)["max_rel_error"] < 1e-5
    rejected = gconv("verify", "net.onnx", "small.onnx", "--json")
    assert rejected.code == 1
    assert rejected.err.startswith("error: 'net.onnx' and 'small.onnx' differ by ")
    assert strict_json(rejected.out)["passed"] is False
    assert strict_json(rejected.out)["max_rel_error"] > 0.01


@pytest.mark.parametrize(("tolerance", "code"), [("10", 0), ("1e-12", 1)])
def test_the_tolerance_of_verify_decides(tolerance: str, code: int) -> None:
    run("compress net.onnx --groups 2 -o small.onnx")
    assert gconv("verify", "net.onnx", "small.onnx", "--tolerance", tolerance).code == code


def test_a_fine_tuned_masked_model_can_be_applied() -> None:
    run("plan net.onnx --groups 2 -o plan.json")
    run("mask net.onnx plan.json -o masked.onnx")
    tuned = onnx.load("masked.onnx")
    for name in ("w1", "w2", "w3", "b2"):
        set_tensor(tuned, name, get_tensor(tuned, name) * 1.5)
    save(tuned, Path("tuned.onnx"))
    assert float(_dropped(run("apply tuned.onnx plan.json -o grouped.onnx")).rstrip("%")) == 0
    run("verify tuned.onnx grouped.onnx")


def test_a_plan_without_one_of_its_layer_lines_still_applies() -> None:
    run("plan net.onnx --groups 2 -o plan.json")
    lines = Path("plan.json").read_text(encoding="utf-8").splitlines(keepends=True)
    (line,) = (index for index, text in enumerate(lines) if text.startswith('  {"name": "c2"'))
    Path("edited.json").write_text("".join(lines[:line] + lines[line + 1 :]), encoding="utf-8")
    run("apply net.onnx edited.json -o grouped.onnx")
    assert conv_groups("grouped.onnx") == {"w1": 1, "w2": 1, "w3": 2}
    run("mask net.onnx edited.json -o masked.onnx")
    run("verify masked.onnx grouped.onnx")


def test_a_layer_set_to_one_group_by_hand_stays_dense_and_no_gather_is_told_for_it() -> None:
    run("plan net.onnx --groups 2 -o plan.json")
    plan = read_json("plan.json")
    plan["layers"][0]["groups"] = 1
    Path("edited.json").write_text(json.dumps(plan), encoding="utf-8")
    told = run("apply net.onnx edited.json -o grouped.onnx")
    assert conv_groups("grouped.onnx") == {"w1": 1, "w2": 1, "w3": 2}
    gathers = sum(node.op_type == "Gather" for node in onnx.load("grouped.onnx").graph.node)
    assert f"1 Conv grouped, {gathers} Gather" in told


def test_orders_changed_by_hand_are_followed() -> None:
    run("plan net.onnx --groups 2 -o plan.json")
    plan = read_json("plan.json")
    for layer in plan["layers"]:
        layer["in_order"], layer["out_order"] = list(range(8)), list(range(8))
    Path("edited.json").write_text(json.dumps(plan), encoding="utf-8")
    run("apply net.onnx edited.json -o grouped.onnx")
    assert [node.op_type for node in onnx.load("grouped.onnx").graph.node] == [
        node.op_type for node in onnx.load("net.onnx").graph.node
    ]  # nothing moves: no Gather is needed


@pytest.mark.parametrize("module", ["module.w2", "w2"])
def test_a_group_configuration_of_the_papers_authors_is_borrowed(module: str) -> None:
    Path("config.json").write_text(json.dumps({module: {"G": 4, "F": 8, "C": 8}, "module.w1": {"G": 1, "F": 8, "C": 3}}))
    run("compress net.onnx --group-config config.json -o small.onnx")
    assert conv_groups("small.onnx") == {"w1": 1, "w2": 4, "w3": 1}


def test_the_groups_of_another_plan_are_borrowed_and_the_channels_ordered_anew() -> None:
    run("plan net.onnx --groups 4 --exclude c3 --solver plain -o plan.json")
    run("compress net.onnx --group-config plan.json -o small.onnx")
    assert conv_groups("small.onnx") == {"w1": 1, "w2": 4, "w3": 1}
    assert read_json("small.plan.json")["layers"][0]["kept"] > read_json("plan.json")["layers"][0]["kept"]


# --- choosing layers ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "groups"),
    [
        ("--groups 2", {"w1": 1, "w2": 2, "w3": 2}),
        ("--groups 4 --include c2", {"w1": 1, "w2": 4, "w3": 1}),
        ("--groups 4 --exclude c2", {"w1": 1, "w2": 1, "w3": 4}),
        ("--max-group-channels 2", {"w1": 1, "w2": 4, "w3": 4}),
        ("--max-flops 34.62%", {"w1": 1, "w2": 8, "w3": 8}),
        ("--max-flops 50% --exclude c3", {"w1": 1, "w2": 4, "w3": 1}),
    ],
)
def test_the_flags_choose_the_groups_that_are_written(flags: str, groups: dict[str, int]) -> None:
    run(f"compress net.onnx {flags} -o small.onnx")
    assert conv_groups("small.onnx") == groups


# --- inspect --------------------------------------------------------------------------------------------------------------

EVERY_KIND = """
<ir_version: 8, opset_import: ["" : 17]>
kinds (float[1,8,8,8] x, float[8,8,1,1] fed) => (float[1,1,8,8] y) {
    plain = Conv (x, w8)
    again = Conv (plain, w8)
    two_groups = Conv <group = 2> (again, w4)
    depthwise = Conv <group = 8> (two_groups, w1)
    run_time = Conv (depthwise, fed)
    narrow = Conv (run_time, one)
    y = Conv (narrow, single)
}
"""


def every_kind() -> onnx.ModelProto:
    model = onnx.parser.parse_model(EVERY_KIND)
    rng = np.random.default_rng(0)
    for name, shape in {"w8": (8, 8), "w4": (8, 4), "w1": (8, 1), "one": (1, 8), "single": (1, 1)}.items():
        set_tensor(model, name, rng.standard_normal((*shape, 1, 1)))
    return model


@pytest.mark.parametrize("kind", ["tiny", "every kind", "digits"])
def test_inspect_lists_every_conv_exactly_once(kind: str) -> None:
    if kind == "digits":
        Path("net.onnx").write_bytes(DIGITS.read_bytes())
    elif kind == "every kind":
        save(every_kind(), Path("net.onnx"))
    data = strict_json(gconv("inspect", "net.onnx", "--json").out)
    convs = [node.output[0] for node in onnx.load("net.onnx").graph.node if node.op_type == "Conv"]
    assert convs
    assert sorted(conv["name"] for conv in (*data["layers"], *data["skipped"])) == sorted(convs)
    assert all(conv["reason"] for conv in data["skipped"])


def test_inspect_tells_layers_from_convs_that_cannot_be_grouped() -> None:
    save(every_kind(), Path("net.onnx"))
    data = strict_json(gconv("inspect", "net.onnx", "--json").out)
    assert {layer["name"]: layer["legal_groups"] for layer in data["layers"]} == {
        "plain": [1, 2, 4, 8],
        "again": [1, 2, 4, 8],
        "two_groups": [2, 4, 8],
    }
    assert [conv["name"] for conv in data["skipped"]] == ["depthwise", "run_time", "narrow", "y"]


def test_inspect_counts_as_done_by_hand() -> None:
    data = strict_json(gconv("inspect", "net.onnx", "--json").out)
    assert data["totals"] == {"params": PARAMS, "macs": MACS, "flops": 2 * MACS}
    assert {layer["name"]: (layer["params"], layer["macs"]) for layer in data["layers"]} == {
        "c2": (8 * 8 * 9, PIXELS * 8 * 8 * 9),
        "c3": (8 * 8, PIXELS * 8 * 8),
    }


@pytest.mark.parametrize(("size", "pixels"), [(16, 256), (5, 25)])
def test_inspect_counts_macs_at_the_input_shape_that_is_given(size: int, pixels: int) -> None:
    save(conv_net(size="S"), Path("wide.onnx"))
    data = strict_json(gconv("inspect", "wide.onnx", "--json", "--input-shape", f"1x3x{size}x{size}").out)
    assert data["totals"]["macs"] == (MACS - 32) // PIXELS * pixels + 32


# --- help, version, start -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["", *COMMANDS])
def test_help_of_every_command_exits_0_and_shows_an_example(command: str) -> None:
    finished = gconv(*command.split(), "--help")
    assert (finished.code, finished.err) == (0, "")
    assert finished.out.startswith(f"usage: onnx-gconv {command}".rstrip())
    assert f"\n  onnx-gconv {command}" in finished.out


def test_the_help_lists_every_command() -> None:
    text = gconv("--help").out
    assert [command for command in COMMANDS if f"\n    {command} " not in text] == []


def test_building_every_help_imports_nothing_heavy() -> None:
    program = """
import argparse, sys
from onnx_gconv.cli.main import build_parser
parser = build_parser()
(commands,) = (action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
texts = [parser.format_help(), *(command.format_help() for command in commands.choices.values())]
print(len(texts), sorted({"onnx", "numpy", "scipy", "onnxruntime", "onnx_graphsurgeon", "torch", "rich"} & set(sys.modules)))
"""
    finished = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert finished.stderr == ""
    count, heavy = finished.stdout.split(maxsplit=1)
    assert int(count) > len(COMMANDS)
    assert heavy.strip() == "[]"


def test_the_version_is_that_of_the_package() -> None:
    finished = process("--version")
    assert (finished.returncode, finished.stdout, finished.stderr) == (0, f"onnx-gconv {__version__}\n", "")
    assert importlib.metadata.version("onnx-gconv") == __version__


def test_the_console_script_is_the_same_program() -> None:
    (script,) = importlib.metadata.entry_points(group="console_scripts", name="onnx-gconv")
    assert script.value == "onnx_gconv.cli.main:main"


@pytest.mark.parametrize("command", sorted(COMMANDS))
def test_wrong_usage_is_told_in_two_lines(command: str) -> None:
    finished = gconv(command)
    usage, error = finished.err.splitlines()
    assert finished.code == 2
    assert usage.startswith(f"usage: onnx-gconv {command} ")
    assert error.startswith(f"onnx-gconv {command}: error: ")
