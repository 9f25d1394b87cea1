"""Points of an exploration as jobs: recovered and evaluated, in processes that may die, in a folder that remembers."""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from multiprocessing import active_children
from pathlib import Path

import numpy as np
import onnx
import pytest
from tiny import Finished, conv_net, gconv, listing, save, save_external, write_module

from onnx_gconv.exploration.folder import Folder
from onnx_gconv.exploration.goal import Goal
from onnx_gconv.exploration.point import Point, dominated
from onnx_gconv.files import locked
from onnx_gconv.stopping import Terminated

POINTS = 3
NAMES = [f"point-{number:02}" for number in range(POINTS)]
RESULTS = [f"{name}.result.json" for name in NAMES]
FLAGS = ("--calib", "calib.npz", "--eval", "test.npz")
MEASURED = ("costs.json", "eliminations.json", "width_costs.json")


@pytest.fixture(scope="module")
def explored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a model, data, and what an undisturbed exploration makes of them."""
    folder = tmp_path_factory.mktemp("explored")
    rng = np.random.default_rng(0)
    images = rng.standard_normal((80, 3, 8, 8)).astype(np.float32)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        save(conv_net(), Path("net.onnx"))
        np.savez("calib.npz", image=rng.standard_normal((120, 3, 8, 8)).astype(np.float32))
        np.savez("test.npz", image=images, labels=rng.integers(0, 4, 80))
        np.savez("unlabelled.npz", image=images)
        explore(*FLAGS, folder="whole")
    return folder


@pytest.fixture
def here(explored: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the same in a folder that a test may change, which is the current one."""
    shutil.copytree(explored, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(*flags: str | Path, folder: str = "sweep", model: str = "net.onnx", jobs: int = 2) -> Finished:
    return gconv("explore", model, "-o", folder, "--points", str(POINTS), "--jobs", str(jobs), "--json", *flags)


def explore(*flags: str | Path, folder: str = "sweep", jobs: int = 2) -> dict:
    done = run(*flags, folder=folder, jobs=jobs)
    assert done.code == 0, done.err
    return json.loads(done.out)


def made(folder: str) -> dict[str, bytes | None]:
    """Return the files of an exploration; of results and metrics, which say how long it took, only that they are there."""
    found = listing(Path(folder))
    return {name: None if name.endswith((".result.json", ".metrics.jsonl")) else content for name, content in found.items()}


@contextmanager
def killing(find: Callable[[], int | None]) -> Iterator[list[int]]:
    """Kill the first process that `find` finds, once, and yield the list of those killed."""
    killed: list[int] = []
    over = threading.Event()

    def look() -> None:
        while not over.is_set() and not killed:
            process = find()
            if process is not None:
                os.kill(process, signal.SIGKILL)
                killed.append(process)
            time.sleep(0.005)

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield killed
    finally:
        over.set()
        thread.join()


def test_a_point_is_what_compress_makes_for_that_budget(here: Path) -> None:
    points = json.loads(Path("whole/explore.json").read_text())["points"]
    assert [point["plan"] for point in points] == [f"{name}.plan.json" for name in NAMES]
    for point in points[1:]:
        limit = str(point["budget"]["max_macs"])
        assert gconv("compress", "net.onnx", "--max-macs", limit, *FLAGS, "-o", "direct.onnx").code == 0
        report = json.loads(Path("direct.report.json").read_text())
        assert Path("direct.plan.json").read_bytes() == Path("whole", point["plan"]).read_bytes()
        assert onnx.load("direct.onnx") == onnx.load(Path("whole", point["model"]))
        assert report["recovery"] == point["recovery"]
        assert report["evaluation"] == point["evaluation"]


def test_the_first_point_is_the_model_as_it_is(here: Path) -> None:
    first = json.loads(Path("whole/explore.json").read_text())["points"][0]
    assert first["groups"] == {}
    assert first["recovery"] is None
    assert first["evaluation"]["agreement"] == 1
    assert gconv("verify", "net.onnx", "whole/point-00.onnx", "--tolerance", "1e-6").code == 0


@pytest.mark.slow
def test_evaluation_alone_needs_no_calibration_and_plans_alone_leave_no_models(here: Path) -> None:
    points = explore("--eval", "unlabelled.npz")["points"]
    assert [point["model"] for point in points] == [f"{name}.onnx" for name in NAMES]
    for path in Path("sweep").glob("*.onnx"):  # or they would have to be kept
        path.unlink()
    Path("sweep/point-of-interest.txt").write_text("mine")
    for plan, point in zip(explore()["points"], points, strict=True):
        assert point["groups"] == plan["groups"]
        assert point["recovery"] is None
        assert point["evaluation"]["top1"] is None
        assert 0 <= point["evaluation"]["agreement"] <= 1
        assert plan["model"] is None
    left = sorted(path.name for path in Path("sweep").glob("point-*"))
    assert left == [*(f"{name}.plan.json" for name in NAMES), "point-of-interest.txt"]


@pytest.mark.parametrize("file", ["point-00.onnx", "point-03.onnx", "point-01.tuned.onnx"])
def test_models_that_an_exploration_would_remove_and_not_replace_are_kept_and_it_is_refused(file: str, here: Path) -> None:
    Path("sweep").mkdir()
    Path("sweep", file).write_text("took hours")
    before = listing(Path("sweep"))
    done = run() if file == "point-00.onnx" else run(*FLAGS)  # plans alone have no models
    assert done.code == 1
    assert f"'sweep' has models of another exploration, which this one would remove: {file}." in done.err
    assert listing(Path("sweep")) == before


def times(folder: str) -> dict[str, int]:
    """Return when each file of points and of what was measured was written."""
    return {path.name: path.stat().st_mtime_ns for path in Path(folder).iterdir() if path.name.startswith(("point", *MEASURED))}


def test_started_again_nothing_is_done_twice(here: Path) -> None:
    before, files = times("whole"), made("whole")
    assert explore(*FLAGS, folder="whole", jobs=1) == json.loads(files["explore.json"] or b"")
    assert times("whole") == before
    assert made("whole") == files


@pytest.mark.slow
def test_a_point_without_its_model_is_made_again(here: Path) -> None:
    before, files = times("whole"), made("whole")
    Path("whole/point-01.onnx").unlink()
    explore(*FLAGS, folder="whole")
    assert made("whole") == files
    assert {name[:8] for name, time in times("whole").items() if time != before[name]} == {"point-01"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("forms", "measured"), [("group", {"costs.json"}), ("width", {"eliminations.json"}), ("all", {*MEASURED})], ids=str
)
def test_points_of_other_settings_are_made_again_and_what_is_measured_only_if_it_must_be(
    forms: str, measured: set[str], here: Path
) -> None:
    explore(*FLAGS, "--forms", forms)
    before = times("sweep")
    points = explore("--calib", "calib.npz", "--eval", "unlabelled.npz", "--forms", forms)["points"]
    assert all(point["evaluation"]["top1"] is None for point in points)
    after = times("sweep")
    assert {name for name in before if after[name] == before[name]} == measured
    np.savez("calib.npz", image=np.load("calib.npz")["image"][::-1])
    assert explore("--calib", "calib.npz", "--forms", forms)["points"][1]["evaluation"] is None
    again = times("sweep")
    assert all(again[name] != after[name] for name in measured)


@pytest.mark.slow
def test_other_forms_and_other_steps_are_another_exploration(here: Path) -> None:
    for flags in (("--forms", "group"), ("--width-step", "4"), ("--forms", "width")):
        refused = run(*FLAGS, *flags, folder="whole")
        assert refused.code == 1
        assert "holds an exploration of another model or with other flags" in refused.err


def test_points_tell_what_became_of_spaces_branches_and_layers(here: Path) -> None:
    told = json.loads(Path("whole/explore.json").read_text())
    channels = {space["name"]: space["channels"] for space in told["spaces"]}
    for point in told["points"]:
        plan = json.loads(Path("whole", point["plan"]).read_text())
        kept = {name: width for name, width in point["widths"].items() if width}
        assert kept == {space["name"]: len(space["keep"]) for space in plan["spaces"]}
        assert all(width < channels[name] for name, width in point["widths"].items())
        assert point["dropped"] == [branch["name"] for branch in plan["dropped"]]
        assert told["before"]["macs"] - sum(point["saved"].values()) == point["macs"]
    assert told["points"][-1]["widths"].keys() == channels.keys()
    assert not told["points"][0]["widths"]


@pytest.mark.slow
def test_a_model_with_external_data_gives_such_models(here: Path) -> None:
    Path("large").mkdir()
    save_external(conv_net(channels=16), Path("large/net.onnx"))
    done = run("--eval", "test.npz", model="large/net.onnx")
    assert done.code == 0, done.err
    assert Path("sweep/point-02.onnx.data").exists()
    onnx.checker.check_model("sweep/point-02.onnx")


@pytest.mark.slow
def test_a_process_that_is_killed_is_replaced(here: Path) -> None:
    with killing(lambda: next((child.pid for child in active_children() if child.name == "point-01"), None)) as killed:
        explore(*FLAGS)
    assert killed
    assert made("sweep") == made("whole")


def data_that_fails_at_point_01(how: str) -> str:
    """Return the name of a function that gives data; for point-01 it leaves a mark in the file `tries`, then does `how`."""
    write_module(
        "failing",
        "import os\n"
        "from multiprocessing import current_process\n"
        "def data():\n"
        "    yield np.ones((4, 3, 8, 8), np.float32), np.zeros(4, int)\n"
        "    if current_process().name == 'point-01':\n"
        "        open('tries', 'a').write('x')\n"
        f"        {how}\n",
    )
    return "failing:data"


@pytest.mark.slow
def test_what_a_process_that_dies_had_in_the_temporary_folder_is_removed(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", "temporary")
    monkeypatch.setenv("TMPDIR", "temporary")
    done = run(
        "--eval", data_that_fails_at_point_01("import tempfile; print(tempfile.mkdtemp(), file=open('left', 'a')); os._exit(9)")
    )
    assert done.code == 1
    left = [Path(line) for line in Path("left").read_text().splitlines()]
    assert len(left) == 3
    assert all(Path("temporary").resolve() in folder.resolve().parents for folder in left)
    assert not any(folder.exists() for folder in left)
    assert not [*Path("temporary").glob("onnx-gconv-*")]


@pytest.mark.slow
def test_a_process_that_dies_again_and_again_fails_its_point_and_no_other(here: Path) -> None:
    done = run("--eval", data_that_fails_at_point_01("os._exit(9)"))
    assert done.code == 1
    assert "point-01 could not be made: the process that made it died 3 times (exit code 9)" in done.err
    assert "hint: perhaps memory ran out" in done.err
    assert Path("tries").read_text() == "xxx"
    assert [point["plan"][:8] for point in json.loads(done.out)["points"]] == ["point-00", "point-02"]
    assert not list(Path("sweep").glob(".*"))


@pytest.mark.slow
def test_an_error_is_told_once_and_not_tried_again(here: Path) -> None:
    done = run("--eval", data_that_fails_at_point_01("yield np.ones((4, 3, 8, 8), np.float32), np.full(4, 7)"))
    assert done.code == 1
    assert "error: point-01 could not be made: the label of sample 4 (from 0) is 7, but the model has 4 classes." in done.err
    assert Path("tries").read_text() == "x"
    assert len(json.loads(done.out)["points"]) == POINTS - 1


def start(*flags: str) -> subprocess.Popen[bytes]:
    """Start the command in a process of its own."""
    command = [sys.executable, "-m", "onnx_gconv", "explore", "net.onnx", "-o", "sweep", "--points", str(POINTS), "--jobs", "1"]
    path = os.pathsep.join([str(Path(__file__).parent.parent), os.environ.get("PYTHONPATH", "")])
    return subprocess.Popen([*command, *flags], env=os.environ | {"PYTHONPATH": path}, stderr=subprocess.DEVNULL)


def wait_for(what: Callable[[], bool], seconds: float = 120) -> None:
    until = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < until, "it takes too long"
        time.sleep(0.01)


def is_running(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def children(process: int) -> list[int]:
    """Return the processes below this one, as far down as they go."""
    below: list[int] = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(path.read_text().rsplit(")", 1)[1].split()[1])
        except OSError:  # it has just ended
            continue
        if parent == process:
            below += [int(path.parent.name), *children(int(path.parent.name))]
    return below


@pytest.mark.slow
@pytest.mark.parametrize(("stop", "how", "code"), [(KeyboardInterrupt, "interrupted", 130), (Terminated, "terminated", 143)])
def test_stopped_it_says_how_many_points_are_kept_and_goes_on_from_them(
    stop: type[BaseException], how: str, code: int, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep = Folder.keep

    def stopped_at_the_third(self: Folder, job: Goal) -> object:
        if len(list(self.path.glob("*.result.json"))) == 2:
            raise stop
        return keep(self, job)

    with monkeypatch.context() as patch:
        patch.setattr(Folder, "keep", stopped_at_the_third)
        stopped = run(*FLAGS, jobs=1)
    assert (stopped.code, stopped.out) == (code, "")
    told = f"error: {how}; 'sweep' keeps 2 of 3 points, and the same command continues from there."
    assert stopped.err.splitlines()[-1] == told
    before = times("sweep")
    explore(*FLAGS, jobs=1)
    assert all(times("sweep")[f"{name}.onnx"] == before[f"{name}.onnx"] for name in NAMES[:2])
    assert made("sweep") == made("whole")


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc")
def test_killed_itself_it_goes_on_and_ends_as_if_it_had_not_been(here: Path) -> None:
    driver = start(*FLAGS)
    wait_for(lambda: Path("sweep", RESULTS[0]).exists())
    below = children(driver.pid)
    driver.kill()
    driver.wait()
    wait_for(lambda: not any(is_running(process) for process in below), 30)  # workers go with it
    before = {name: time for name, time in times("sweep").items() if Path("sweep", f"{name[:8]}.result.json").exists()}
    assert {name[:8] for name in before} < set(NAMES)  # some are done, not all
    Path("sweep", ".onnx-gconv-cut_here").mkdir()  # as if it had been killed while it wrote the files of a point
    explore(*FLAGS, jobs=1)
    assert {name: times("sweep")[name] for name in before} == before
    assert made("sweep") == made("whole")


def test_a_folder_that_another_process_is_writing_into_is_refused(here: Path) -> None:
    pytest.importorskip("fcntl", reason="no locks on this system")
    files = listing(Path("whole"))
    with locked(Path("whole")):
        done = run("--eval", "test.npz", folder="whole")
    assert done.code == 1
    assert "another process is writing into 'whole'" in done.err
    assert listing(Path("whole")) == files


def test_usage_errors(here: Path) -> None:
    assert run("--engine", "ray").code == 2
    assert run("--eval", "test.npz", "--address", "head:6379").code == 2
    assert run("--cost", "trial").code == 2
    assert not Path("sweep").exists()


def test_wrong_data_is_told_before_any_work(here: Path) -> None:
    for flags in (("--eval", "gone.npz"), ("--calib", "gone.npz")):
        done = run(*flags)
        assert done.code == 1
        assert "there is no file 'gone.npz'" in done.err
    assert not Path("sweep").exists()


def test_without_ray_or_torch_it_says_what_to_install(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    done = run("--eval", "test.npz", "--engine", "ray")
    assert done.code == 1
    assert "pip install 'onnx-gconv[ray]'" in done.err
    assert not Path("sweep").exists()


def point(name: str, macs: int, top1: float | None, *, tuned: float | None = None, error: float | None = None) -> Point:
    def evaluation(share: float | None) -> dict | None:
        return None if share is None else {"top1": share, "agreement": 0.5, "outputs": {}}

    return Point(
        plan=f"{name}.plan.json",
        budget={"max_macs": macs},
        params=macs,
        macs=macs,
        cost=0.0,
        bound=0.0,
        gap=0.0,
        groups={},
        recovery=None if error is None else {"output_error_after": error},
        evaluation=evaluation(top1),
        finetuned=None if tuned is None else {"evaluation": evaluation(tuned)},
    )


def test_a_point_is_dominated_by_one_that_is_as_small_and_better_or_as_good_and_smaller() -> None:
    points = [point("a", 100, 0.9), point("b", 80, 0.9), point("c", 60, 0.7), point("d", 60, 0.8), point("e", 40, 0.6)]
    assert dominated(points, "macs") == [True, False, True, False, False]
    assert dominated([points[1], points[1]], "macs") == [False, False]  # equals beat nobody


def test_fine_tuned_points_are_judged_as_they_are_then() -> None:
    points = [point("a", 100, 0.9), point("b", 80, 0.5, tuned=0.95)]
    assert dominated(points, "macs") == [True, False]


def test_without_evaluation_the_error_after_recovery_judges() -> None:
    points = [point("a", 100, None), point("b", 80, None, error=0.3), point("c", 60, None, error=0.2)]
    assert dominated(points, "macs") == [False, True, False]
    assert dominated([point("a", 100, None), point("b", 80, None)], "macs") == [False, False]  # nothing is known


def on_ray(test: Callable[[Path], None]) -> Callable[[Path], None]:
    """Mark a test that starts a cluster of its own on this machine."""
    marks = [
        pytest.mark.ray,
        pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed"),
        pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc"),
        pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning"),  # Ray's own
    ]
    for mark in marks:
        test = mark(test)
    return test


def ray_worker_at_work() -> int | None:
    """Return a process of this test's cluster that does a job just now: Ray names it so."""
    for process in children(os.getpid()):
        try:
            if b"ray::do_remotely" in Path(f"/proc/{process}/cmdline").read_bytes():
                return process
        except OSError:  # it has just ended
            continue
    return None


@pytest.mark.slow
@on_ray
def test_on_a_cluster_a_worker_that_is_killed_is_replaced_and_no_point_is_there_twice(here: Path) -> None:
    with killing(ray_worker_at_work) as killed:
        data = explore(*FLAGS, "--engine", "ray")
    assert killed
    assert [point["plan"] for point in data["points"]] == [f"{name}.plan.json" for name in NAMES]
    assert made("sweep") == made("whole")


@pytest.mark.slow
@on_ray
def test_on_a_cluster_deaths_and_errors_are_told_as_here(here: Path) -> None:
    write_module(
        "unlucky",
        "import os\n"
        "def data():\n"
        "    if os.getpid() != MAIN:\n"
        "        open('tries', 'a').write('x')\n"
        "        os._exit(9)\n"
        "    return [(np.ones((4, 3, 8, 8), np.float32), None)]\n"
        f"MAIN = {os.getpid()}\n",
    )
    done = run("--eval", "unlucky:data", "--engine", "ray")
    assert done.code == 1
    assert "point-00, point-01, point-02 could not be made: the process that made it died 3 times (WorkerCrashedError)" in done.err
    assert Path("tries").read_text() == "x" * 3 * POINTS
    np.savez("wrong.npz", image=np.ones((4, 3, 8, 8), np.float32), labels=np.full(4, 7))
    done = run("--eval", "wrong.npz", "--engine", "ray")
    assert done.code == 1
    assert "could not be made: the label of sample 0 (from 0) is 7, but the model has 4 classes." in done.err
    assert json.loads(done.out or "{}") == {}


@pytest.mark.slow
@on_ray
def test_a_cluster_that_is_not_there_is_an_error(here: Path) -> None:
    done = run("--eval", "test.npz", "--engine", "ray", "--address", "127.0.0.1:1")
    assert done.code == 1
    assert "cannot connect to the Ray cluster 127.0.0.1:1: [Errno 111] Connection refused" in done.err
    assert not Path("sweep").exists()


@pytest.mark.slow
@pytest.mark.torch
def test_fine_tuned_points_are_trained_from_where_recovery_ended(here: Path) -> None:
    pytest.importorskip("torch", reason="PyTorch is not installed")
    data = explore(*FLAGS, "--finetune", "calib.npz", "--epochs", "2", "--batch-size", "40", "--device", "cpu")
    assert data["points"][0]["finetuned"] is None  # the model as it is
    for name, point in zip(NAMES[1:], data["points"][1:], strict=True):
        tuned = point["finetuned"]
        assert (tuned["model"], tuned["epochs"]) == (f"{name}.tuned.onnx", 2)
        assert tuned["evaluation"]["samples"] == 80
        # Without labels the training is towards the dense model, and its first record is of the recovered one.
        records = [json.loads(line) for line in Path("sweep", tuned["metrics"]).read_text().splitlines()]
        assert [record["epoch"] for record in records] == [0, 1, 2]
        assert tuned["best"] == {key: value for key, value in records[tuned["best"]["epoch"]].items() if key != "seconds"}
        whole = json.loads(Path("whole/explore.json").read_text())["points"][int(name[-2:])]
        assert point["evaluation"] == whole["evaluation"]
        grouped = onnx.load(Path("sweep", tuned["model"]))
        assert {node.output[0]: node.attribute for node in grouped.graph.node}.keys() >= point["groups"].keys()
    assert not list(Path("sweep").glob("*.checkpoint.pt"))
