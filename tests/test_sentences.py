"""What is said when something cannot be had: only what is true, and only advice that is not taken already."""

import errno
import os
from pathlib import Path

import numpy as np
import pytest
from tiny import conv_net, gconv, save

from onnx_gconv.exploration import local
from onnx_gconv.exploration.solutions import SolutionFile

FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    save(conv_net(channels=64), Path("net.onnx"))
    np.savez("calib.npz", image=np.random.default_rng(0).standard_normal((8, 3, 8, 8)).astype(np.float32))


def hint(command: str) -> str:
    done = gconv(*command.split())
    assert done.code == 1, done
    return done.err.splitlines()[-1]


@pytest.mark.parametrize(
    ("flags", "advice"),
    [
        ("", "use --forms all with --calib"),
        ("--exclude c2", "exclude fewer layers or use --forms all with --calib"),
        ("--include c", "leave out --include or use --forms all with --calib"),
        ("--min-group-channels 4", "use --forms all with --calib or lower --min-group-channels"),
        ("--gathers none", "use --forms all with --calib or use --gathers free"),
        ("--target ort-cpu", "use --forms all with --calib or use --target generic"),
        ("--calib calib.npz --forms group", "use --forms all"),
        ("--calib calib.npz --width-step 1 --forms all", ""),
        ("--calib calib.npz --forms all", "take a smaller --width-step"),
    ],
)
def test_a_budget_that_cannot_be_met_advises_what_is_not_set_yet(flags: str, advice: str) -> None:
    told = hint(f"plan net.onnx --max-macs 0.01% -o out.json {flags}")
    assert told.startswith("hint: feasible: --max-macs from ")
    assert told.partition(" up to 100%")[2] == (f"; to go lower, {advice}" if advice else "")


def test_the_reasons_of_several_convs_carry_their_names() -> None:
    done = gconv("plan", "net.onnx", "--groups", "2", "--include", "nothing", "-o", "out.json")
    told = "'c1': 3 input and 64 output channels have no common divisor; 'c2' and 1 other: not named by --include."
    assert done.err.startswith(f"error: no Conv would be grouped. {told}"), done.err


@pytest.mark.parametrize(
    "command", ["inspect -o.onnx", "compress --groups 2 -o.onnx", "plan -o.onnx", "compress net.onnx --groups 2 -o -x.onnx"]
)
def test_a_file_whose_name_begins_with_a_dash_is_explained(command: str) -> None:
    Path("net.onnx").rename("-o.onnx")
    done = gconv(*command.split())
    assert done.code == 2
    assert done.err.splitlines()[-1] == f"hint: a file whose name begins with a dash is named ./{command.split()[-1]}"


@pytest.mark.parametrize(
    "command",
    [
        "inspect ./-o.onnx",
        "inspect -- -o.onnx",
        "compress ./-o.onnx --groups 2",
        "compress --groups 2 -o ./-c.onnx -- -o.onnx",
        "bench ./-o.onnx --runner ort-cpu --seconds 0.05 --timing-out ./-t.json",
    ],
)
def test_a_file_whose_name_begins_with_a_dash_works(command: str) -> None:
    Path("net.onnx").rename("-o.onnx")
    done = gconv(*command.split())
    assert done.code == 0, done.err


@pytest.mark.parametrize("flags", ["--forms group", "--calib calib.npz --forms group"])
def test_a_full_disk_in_an_exploration_says_what_is_kept(flags: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(SolutionFile, "add", lambda *_: (_ for _ in ()).throw(FULL))
        done = gconv(*f"explore net.onnx -o sweep --points 2 {flags}".split())
    assert done.code == 1
    assert done.err.splitlines()[-2:] == [
        "error: the exploration cannot go on: No space left on device; 'sweep' keeps what is finished, and the same command "
        "continues from there.",
        "hint: free some space, and start it again",
    ]
    assert gconv(*f"explore net.onnx -o sweep --points 2 {flags}".split()).code == 0


def test_a_disk_that_fills_up_between_points_says_how_many_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    real, calls = local._started, iter(range(99))

    def second_fails(*given: object) -> object:
        if next(calls) == 1:
            raise FULL
        return real(*given)  # type: ignore[arg-type]

    command = "explore net.onnx -o sweep --points 3 --jobs 1 --calib calib.npz"
    with monkeypatch.context() as patch:
        patch.setattr(local, "_started", second_fails)
        done = gconv(*command.split())
    assert done.code == 1
    assert "No space left on device; 'sweep' keeps 1 of 3 points, and the same command continues from there." in done.err
    assert not [path.name for path in Path("sweep").iterdir() if path.name.startswith(".")]
    assert gconv(*command.split()).code == 0
