"""Widths, dropped branches and groups on the command line: what is asked for, what is told, and what the report holds."""

import json
from pathlib import Path

import numpy as np
import onnx
import pytest
from random_cnn import RandomCnn
from tiny import conv_net, gconv, residual_net, save
from widths import Odds, done, graph, random_plan, subject

from onnx_gconv.model.network import read
from onnx_gconv.model.shapes import input_shapes
from onnx_gconv.pipeline.changes import changed_nodes, saved_macs
from onnx_gconv.report.wording import each_with, what_was_done
from onnx_gconv.runtime import observe_shapes

CALIB = ("--calib", "calib.npz")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with a residual network and data for it."""
    monkeypatch.chdir(tmp_path)
    model = residual_net()
    save(model, Path("net.onnx"))
    shape = [dim.dim_value for dim in model.graph.input[0].type.tensor_type.shape.dim]
    images = np.random.default_rng(0).standard_normal((120, *shape[1:])).astype(np.float32)
    np.savez("calib.npz", **{model.graph.input[0].name: images})
    return tmp_path


def run(*argv: str) -> str:
    done_ = gconv(*argv)
    assert done_.code == 0, done_.err
    return done_.out + done_.err


def read_json(name: str) -> dict:
    return json.loads(Path(name).read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    ("flags", "forms"),
    [
        ("--max-macs 70%", ["group"]),
        ("--max-macs 70% --calib calib.npz", ["width", "drop"]),
        ("--max-macs 70% --calib calib.npz --forms group", ["group"]),
        ("--max-macs 70% --calib calib.npz --forms drop,width", ["width", "drop"]),
        ("--max-macs 70% --calib calib.npz --forms width --width-step 3", ["width"]),
        ("--max-macs 70% --calib calib.npz --forms all", ["group", "width", "drop", "lowrank"]),
        ("--max-macs 97% --calib calib.npz --forms lowrank --width-step 1", ["lowrank"]),
        ("--max-macs 70% --calib calib.npz --gathers none", ["group"]),
        ("--max-macs 70% --calib calib.npz --cost log", ["group"]),
        ("--max-macs 70% --calib calib.npz --solver paper", ["group"]),
        ("--groups 2 --calib calib.npz", ["group"]),
    ],
)
def test_the_forms_are_those_that_are_asked_for_or_the_best_by_default(flags: str, forms: list[str]) -> None:
    run("plan", "net.onnx", *flags.split(), "-o", "plan.json")
    plan = read_json("plan.json")
    assert plan["forms"] == forms
    assert not plan["layers"] or "group" in forms
    assert not plan["spaces"] or "width" in forms
    assert not plan["dropped"] or "drop" in forms
    assert not plan["low_rank"] or "lowrank" in forms
    assert plan["spaces"] or plan["dropped"] or plan["layers"] or plan["low_rank"]
    if "--width-step" in flags:
        assert {len(space["keep"]) % 3 for space in plan["spaces"]} <= {0}


@pytest.mark.parametrize("command", ["plan", "compress", "explore"])
@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--forms wide", "--forms 'wide' is not known: choose from group, width, drop, lowrank, all"),
        ("--forms width", "--forms width is measured on data: give --calib DATA"),
        ("--calib calib.npz --forms width --search local", "--search local is the paper's, for groups only"),
        ("--calib calib.npz --forms width --width-step 0", "'0' is not a whole number of at least 1"),
        ("--calib calib.npz --forms group --width-step 4", "--width-step is for widths"),
        ("--width-step 4", "--width-step is for widths"),
    ],
)
def test_wrong_forms_are_told_in_one_sentence(command: str, flags: str, words: str) -> None:
    goal = [] if command == "explore" else ["--max-macs", "70%"]
    output = [] if command == "compress" else ["-o", "out"]
    refused = gconv(command, "net.onnx", *goal, *flags.split(), *output)
    assert refused.code == 2
    assert words in refused.err
    assert not Path("out").exists()


def test_what_is_done_to_spaces_branches_and_layers_is_told() -> None:
    told = run("compress", "net.onnx", "--max-macs", "60%", *CALIB, "-o", "small.onnx", "-v")
    plan = read_json("small.plan.json")
    assert plan["spaces"]
    spaces = f"narrowed {len(plan['spaces'])} space{'s' * (len(plan['spaces']) > 1)}"
    assert spaces in told
    assert "Narrowed spaces" in told
    assert "Gathers" not in told
    assert "grouped" not in told
    label = onnx.load("net.onnx").graph.node[0].name or plan["spaces"][0]["name"]
    assert label in told
    assert "-v lists them" in run("compress", "net.onnx", "--max-macs", "60%", *CALIB, "-o", "small.onnx")


def test_mask_and_apply_tell_what_a_plan_does() -> None:
    told = run("plan", "net.onnx", "--max-macs", "60%", *CALIB, "-o", "plan.json")
    spaces = len(read_json("plan.json")["spaces"])
    noun = "space" if spaces == 1 else "spaces"
    assert f"wrote plan.json: {spaces} {noun} to narrow" in told
    assert f"{spaces} {noun} masked" in run("mask", "net.onnx", "plan.json", "-o", "masked.onnx")
    told = run("apply", "masked.onnx", "plan.json", "-o", "small.onnx")
    assert f"{spaces} {noun} narrowed" in told
    assert "dropped 0% of their weight" in told
    assert "Gather" not in told


def test_the_report_has_what_became_of_spaces_branches_and_nodes() -> None:
    run("compress", "net.onnx", "--max-macs", "60%", *CALIB, "-o", "small.onnx")
    plan, report = read_json("small.plan.json"), read_json("small.report.json")
    assert report["forms"] == plan["forms"]
    told = [(space["name"], space["channels"], space["kept"]) for space in report["spaces"]]
    assert told == [(space["name"], space["channels"], len(space["keep"])) for space in plan["spaces"]]
    assert all(set(space) == {"name", "label", "channels", "kept"} for space in report["spaces"])
    assert [branch["name"] for branch in report["dropped"]] == [branch["name"] for branch in plan["dropped"]]
    for change in report["changed"]:
        assert set(change) == {"name", "label", "op", "macs_before", "macs_after", "saved"}
        assert change["macs_before"] - change["macs_after"] == sum(change["saved"].values())
    lost = sum(change["macs_before"] - change["macs_after"] for change in report["changed"])
    assert lost == report["before"]["macs"] - report["after"]["macs"]


@pytest.mark.parametrize("seed", range(40))
def test_where_the_macs_went_is_complete_whatever_the_forms(seed: int) -> None:
    it = subject(RandomCnn(seed).model())
    plan = random_plan(it, np.random.default_rng([seed, 1]), Odds(narrow=0.6, drop=0.3, group=0.6))
    made = done(it, plan)
    network = read(it.model, input_shapes(it.model, {}), observe=observe_shapes)
    after = read(made.written, input_shapes(made.written, {}), observe=observe_shapes).count.macs
    changes = changed_nodes(it.model, network, made.matched)
    assert network.count.macs is not None
    assert network.count.macs - sum(saved_macs(changes).values()) == after
    assert saved_macs(changes).keys() <= {"width", "drop", "group", "lowrank"}


def test_numbers_and_nouns_agree() -> None:
    assert what_was_done(spaces=9, branches=1, layers=3, convs=19) == "narrowed 9 spaces, dropped 1 branch, grouped 3 of 19 Convs"
    assert what_was_done(spaces=1, branches=2, layers=0, convs=19) == "narrowed 1 space, dropped 2 branches"
    assert what_was_done(spaces=0, branches=0, layers=0, convs=1) == "grouped 0 of 1 Conv"
    assert what_was_done(spaces=0, branches=0, layers=0, ranks=2, convs=19) == "factored 2 Convs"
    verbs = ("narrowed", "dropped", "factored", "grouped")
    assert each_with(verbs, spaces=2, branches=2, layers=1) == "2 spaces narrowed, 2 branches dropped, 1 Conv grouped"
    assert each_with(verbs, spaces=0, branches=0, layers=0, ranks=1) == "1 Conv factored"
    assert each_with(verbs, spaces=0, branches=0, layers=0) == "no Conv grouped"


def test_widths_are_found_though_no_conv_can_be_grouped() -> None:
    body = "a = Conv <pads = [1, 1, 1, 1]> (x, w_7_4_3_3) r = Relu (a) y = Conv (r, w_5_7_1_1)"
    save(graph(body, result="float[1,5,6,6] y"), Path("odd.onnx"))
    np.savez("odd.npz", x=np.random.default_rng(0).standard_normal((120, 4, 6, 6)).astype(np.float32))
    run("plan", "odd.onnx", "--max-macs", "70%", "--calib", "odd.npz", "--forms", "all", "-o", "plan.json")
    assert [space["name"] for space in read_json("plan.json")["spaces"]] == ["a"]
    run("explore", "odd.onnx", "-o", "sweep", "--points", "2", "--calib", "odd.npz", "--forms", "all")
    refused = gconv("plan", "odd.onnx", "--max-macs", "70%", "--calib", "odd.npz", "--forms", "group", "-o", "plan.json")
    assert refused.code == 1
    assert "none of the model's 2 Convs can be grouped" in refused.err


def test_a_budget_that_only_groups_can_meet_is_met_by_all_forms() -> None:
    save(conv_net(), Path("net.onnx"))
    np.savez("calib.npz", image=np.random.default_rng(0).standard_normal((120, 3, 8, 8)).astype(np.float32))
    flags = ("net.onnx", "--max-macs", "9%", *CALIB, "-o", "plan.json")
    assert "the budget cannot be met" in gconv("plan", *flags, "--forms", "width,drop").err
    run("plan", *flags, "--forms", "all")
    assert read_json("plan.json")["layers"]
