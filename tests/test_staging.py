"""Results appear together or not at all, whoever dies when; and what the dead leave is finished or removed."""

import errno
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from tiny import conv_net, gconv, listing, save, save_external

if sys.platform == "win32":
    pytest.skip("needs fork", allow_module_level=True)

from fuzz import kills
from fuzz.kills import Blow, ended, operations, run, started

from onnx_gconv import staging
from onnx_gconv.errors import OutputError
from onnx_gconv.staging import PREFIX, READY, scratch, settle, staged

NAMES = ("a", "b", "c")
OUT = kills.FOLDER


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    OUT.mkdir()
    return OUT


def writing(version: str, *, names: tuple[str, ...] = NAMES) -> Callable[[], int]:
    def write() -> int:
        with staged(OUT) as new:
            for name in names:
                (new / name).write_text(version)
        return 0

    return write


def versions() -> set[str]:
    """Return which versions the files are of; one, if they are whole."""
    return {(OUT / name).read_text() if (OUT / name).exists() else "none" for name in NAMES}


def hidden() -> list[str]:
    return sorted(path.name for path in OUT.iterdir() if path.name.startswith("."))


def kill_everywhere(*, before: str) -> set[str]:
    """Kill a writer before each of its operations on the folder; return what was found, each time whole."""
    found = set()
    for operation in range(1, operations(writing("old")) + 1):
        if before == "old":
            writing("old")()
        else:
            for path in OUT.glob("[abc]"):
                path.unlink()
        assert run(writing("new"), Blow(operation=operation)) == -signal.SIGKILL
        settle(OUT)
        assert len(versions()) == 1, f"{versions()}, killed before operation {operation}"
        assert READY not in hidden()
        found |= versions()
        writing("other", names=("d",))()
        assert hidden() == []
    return found


@pytest.mark.parametrize("before", ["old", "none"])
def test_a_writer_that_is_killed_leaves_all_of_the_old_or_all_of_the_new(before: str) -> None:
    assert kill_everywhere(before=before) == {before, "new"}


def test_it_is_the_same_where_a_file_cannot_have_two_names(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_links(*_: object, **__: object) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "link", no_links)
    assert kill_everywhere(before="old") == {"old", "new"}


def test_this_test_can_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    def one_by_one(place: Path, folder: Path) -> None:
        for name in sorted(os.listdir(place / "new")):
            os.replace(place / "new" / name, folder / name)

    monkeypatch.setattr(staging, "_commit", one_by_one)
    with pytest.raises(AssertionError, match="killed before operation"):
        kill_everywhere(before="old")


@pytest.mark.parametrize("before", ["old", "none"])
@pytest.mark.parametrize("moved", [0, 1, 2])
def test_a_writer_that_is_killed_while_it_takes_back_what_failed_leaves_it_whole(
    moved: int, before: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.replace

    def failing(source: Path, target: Path) -> None:
        if target == OUT / NAMES[moved] and source.parent.name == "new":
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        real(source, target)

    def write() -> int:
        os.replace = failing
        try:
            writing("new")()
        except OutputError:
            return 1
        return 0

    def prepare() -> None:
        for path in OUT.glob("[abc]"):
            path.unlink()
        if before == "old":
            writing("old")()

    prepare()
    count = operations(write)
    assert versions() == {before}
    assert hidden() == []
    for operation in range(1, count + 1):
        prepare()
        assert run(write, Blow(operation=operation)) == -signal.SIGKILL
        settle(OUT)
        assert versions() in ({before}, {"new"}), f"killed before operation {operation}"


def test_of_two_writers_one_comes_after_the_other_and_a_third_that_dies_spoils_nothing() -> None:
    rng = random.Random(0)

    def often(version: str) -> Callable[[], int]:
        def write() -> int:
            for _ in range(40):
                writing(version)()
            return 0

        return write

    for _ in range(5):
        writers = [started(often("one"), log="one"), started(often("two"), log="two")]
        doomed = started(often("three"), log="three")
        time.sleep(rng.uniform(0.01, 0.1))
        os.kill(doomed, signal.SIGKILL)
        ended(doomed)
        assert [ended(writer) for writer in writers] == [0, 0], Path("one").read_text() + Path("two").read_text()
        settle(OUT)
        assert versions() in ({"one"}, {"two"})
        writing("other", names=("d",))()
        assert hidden() == []


def test_what_a_living_process_is_writing_is_left_alone() -> None:
    with staged(OUT) as new:
        (new / "a").write_text("slow")
        assert run(writing("fast")) == 0
        assert versions() == {"fast"}
        assert (new / "a").read_text() == "slow"
    assert (OUT / "a").read_text() == "slow"
    assert hidden() == []


def test_only_what_is_ours_is_removed() -> None:
    for name in (f"{PREFIX}notes", f"{PREFIX}my-own-folder", ".git"):
        (OUT / name).mkdir()
    (OUT / f"{PREFIX}abcdefgh").write_text("no folder")
    dead = OUT / f"{PREFIX}abcdefg0"
    dead.mkdir()
    (dead / "a").write_text("of a process that was killed")
    writing("new")()
    assert hidden() == sorted([f"{PREFIX}notes", f"{PREFIX}my-own-folder", f"{PREFIX}abcdefgh", ".git"])


def test_temporary_folders_of_the_dead_go_with_the_next_one_and_those_of_the_living_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(OUT))

    def die() -> int:
        with scratch() as folder:
            (folder / "activations").write_text("large")
            os.kill(os.getpid(), signal.SIGKILL)
        return 0

    assert run(die) == -signal.SIGKILL
    (dead,) = OUT.iterdir()
    with scratch() as first, scratch() as second:
        assert not dead.exists()
        assert sorted(OUT.iterdir()) == sorted([first, second])
    assert list(OUT.iterdir()) == []


def killed_while_moving(write: Callable[[], int], count: int) -> None:
    """Kill the writer when it has moved some of its files but not all."""
    for operation in range(count, 0, -1):
        run(write, Blow(operation=operation))
        if (OUT / READY).is_dir() and 0 < len(list((OUT / READY / "new").iterdir())) < 3:
            return
    raise AssertionError("it was never in the middle")


def test_results_that_cannot_be_moved_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    killed_while_moving(writing("new"), operations(writing("old")))

    def denied(*_: object) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(os, "replace", denied)
    with pytest.raises(
        OutputError, match="a command that was killed, which cannot be moved to where they belong: Permission denied"
    ):
        settle(OUT)


@pytest.mark.parametrize(
    "command",
    [
        "verify out/o.onnx out/o.onnx",
        "report out/o.report.json -o page.html",
        "report out -o page.html",
        "apply m.onnx out/o.plan.json -o x.onnx",
    ],
)
def test_whoever_reads_finishes_first_what_a_killed_command_had_ready(command: str) -> None:
    save_external(conv_net(), Path("m.onnx"))
    trios = {}
    for groups in (2, 4):
        assert gconv("compress", "m.onnx", "--groups", str(groups), "-o", "out/o.onnx").code == 0
        trios[groups] = {path.name: path.read_bytes() for path in OUT.iterdir()}
    ready = OUT / READY  # as one leaves it that was killed after the first of its files
    (ready / "new").mkdir(parents=True)
    (ready / "old").mkdir()
    for number, (name, content) in enumerate(trios[2].items()):
        (OUT / name if number == 0 else ready / "new" / name).write_bytes(content)
    done = gconv(*command.split())
    assert done.code == 0, done.err
    assert {path.name: path.read_bytes() for path in OUT.iterdir()} == trios[2]


@pytest.mark.slow
def test_a_few_kills_of_a_whole_command() -> None:
    # In a process of its own: children that run models must not be forked from one that has run some.
    root = Path(kills.__file__).parents[2]
    environment = os.environ | {"PYTHONPATH": str(root)}
    done = subprocess.run(
        [sys.executable, "-m", "tests.fuzz.kills", "--runs", "8"], cwd=root, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "whole results: 8 of 8" in done.stdout


def test_the_same_command_twice_on_a_model_with_external_data_replaces_its_results() -> None:
    save_external(conv_net(), Path("m.onnx"))
    for command in ("compress m.onnx --groups 2", "compress m.onnx --groups 2 -o out/o.onnx"):
        assert gconv(*command.split()).code == 0
        before = {name: content for name, content in listing(Path()).items() if not name.endswith("report.json")}
        done = gconv(*command.split())
        assert done.code == 0, done.err
        assert before.items() <= listing(Path()).items()


def test_the_data_of_a_result_is_as_readable_as_its_model() -> None:
    save_external(conv_net(), Path("m.onnx"))
    assert gconv("compress", "m.onnx", "--groups", "2", "-o", "out/o.onnx").code == 0
    modes = {(OUT / name).stat().st_mode & 0o777 for name in ("o.onnx", "o.onnx.data", "o.plan.json")}
    save(conv_net(), Path("plain"))
    assert modes == {Path("plain").stat().st_mode & 0o777}
