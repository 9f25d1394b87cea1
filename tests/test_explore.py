"""A sweep of budgets: exact at every point, and it goes on where it was."""

import json
import shutil
import sys
from pathlib import Path

import onnx
import pytest
from tiny import conv_net, gconv, listing, save

from onnx_gconv.exploration.solutions import SOLUTIONS
from onnx_gconv.pipeline import solving
from onnx_gconv.solve.layer import Solver


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return save(conv_net(), tmp_path / "net.onnx")


def explore(model: Path, *flags: str, folder: str = "sweep") -> dict:
    done = gconv("explore", model, "-o", folder, "--points", "6", "--json", *flags)
    assert done.code == 0, done.err
    return json.loads(done.out)


def test_points_run_from_the_model_as_it_is_to_the_smallest_and_each_has_its_plan(model: Path) -> None:
    data = explore(model)
    points = data["points"]
    assert json.loads(Path("sweep/explore.json").read_text()) == data
    assert [point["plan"] for point in points] == [f"point-{number:02}.plan.json" for number in range(6)]
    assert points[0]["groups"] == {}
    assert (points[0]["params"], points[0]["macs"]) == (data["before"]["params"], data["before"]["macs"])
    assert points[-1]["groups"] == {"c2": 8, "c3": 8}
    for point in points:
        assert point["macs"] <= point["budget"]["max_macs"]
        assert point["gap"] == 0
        plan = json.loads((Path("sweep") / point["plan"]).read_text())
        assert plan["after"] == {"params": point["params"], "macs": point["macs"]}
        assert {layer["name"]: layer["groups"] for layer in plan["layers"]} == point["groups"]
    costs = [point["cost"] for point in points]
    assert costs == sorted(costs)


def test_a_point_is_what_compress_finds_for_that_budget(model: Path) -> None:
    point = explore(model)["points"][3]
    limit = point["budget"]["max_macs"]
    assert gconv("compress", model, "--max-macs", str(limit), "-o", "direct.onnx").code == 0
    assert Path("direct.plan.json").read_bytes() == (Path("sweep") / point["plan"]).read_bytes()
    assert gconv("apply", model, Path("sweep") / point["plan"], "-o", "applied.onnx").code == 0
    assert onnx.load("applied.onnx") == onnx.load("direct.onnx")


def test_points_by_parameters(model: Path) -> None:
    for point in explore(model, "--by", "params")["points"]:
        assert point["params"] <= point["budget"]["max_params"]


@pytest.mark.slow
def test_interrupted_while_solving_it_goes_on_and_ends_as_if_it_had_not_been(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    explore(model, folder="whole")
    solved = []
    real = Solver.solve_each

    def interrupted(self: Solver, *args: object, **kwargs: object) -> object:
        if solved:
            raise KeyboardInterrupt
        solved.append(args)
        return real(self, *args, **kwargs)

    monkeypatch.setattr(Solver, "solve_each", interrupted)
    stopped = gconv("explore", model, "-o", "sweep", "--points", "6")
    assert stopped.code == 130
    assert stopped.err == "error: interrupted; 'sweep' keeps what is finished, and the same command continues from there.\n"
    assert len((Path("sweep") / SOLUTIONS).read_text().splitlines()) == 2  # what they are solutions of, and one layer
    monkeypatch.setattr(Solver, "solve_each", lambda self, *args, **kwargs: solved.append(args) or real(self, *args, **kwargs))
    explore(model)
    assert len(solved) == 2  # the first layer was not solved again
    assert listing(Path("sweep")) == listing(Path("whole"))


@pytest.mark.slow
def test_a_line_cut_off_in_the_middle_is_solved_again(model: Path) -> None:
    explore(model)
    shutil.copytree("sweep", "whole")
    store = Path("sweep") / SOLUTIONS
    store.write_bytes(store.read_bytes()[:-20])
    explore(model)
    assert listing(Path("sweep")) == listing(Path("whole"))


def test_a_folder_of_another_exploration_is_refused_and_left_alone(model: Path) -> None:
    explore(model)
    before = listing(Path("sweep"))
    refused = gconv("explore", model, "-o", "sweep", "--criterion", "l1")
    assert refused.code == 1
    assert "holds an exploration of another model or with other flags" in refused.err
    assert listing(Path("sweep")) == before


def test_a_folder_with_a_file_in_its_way_is_refused(model: Path) -> None:
    Path("sweep").write_text("in the way")
    assert gconv("explore", model, "-o", "sweep").code == 1
    Path("other").mkdir()
    (Path("other") / SOLUTIONS).write_text("not json\n")
    assert gconv("explore", model, "-o", "other").code == 1


@pytest.mark.slow
def test_the_pictures_are_drawn_and_the_same_each_time(model: Path) -> None:
    pytest.importorskip("matplotlib")
    explore(model, folder="one")
    explore(model, folder="two")
    for name in ("explore.svg", "explore.png"):
        assert len(Path("one", name).read_bytes()) > 5000
        assert Path("one", name).read_bytes() == Path("two", name).read_bytes()
    assert "pruning cost" in Path("one/explore.svg").read_text()


def test_without_matplotlib_everything_but_the_picture_is_written(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    done = gconv("explore", model, "-o", "sweep", "--points", "3")
    assert done.code == 0
    assert "pip install 'onnx-gconv[plot]'" in done.err
    assert sorted(path.name for path in Path("sweep").iterdir())[0] == "explore.json"


@pytest.mark.slow
def test_many_processes_find_what_one_finds(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    explore(model, "--jobs", "1", folder="one")
    monkeypatch.setattr(solving, "SECONDS_WORTH_PROCESSES", 0.0)
    explore(model, "--jobs", "2", folder="two")
    one, two = listing(Path("one")), listing(Path("two"))
    assert sorted(one.pop(SOLUTIONS).splitlines()) == sorted(two.pop(SOLUTIONS).splitlines())  # in the order they were found
    assert one == two
