"""What goes wrong on the user's side: one `error:` line, one `hint:` line, the right exit code, and not a file touched."""

import errno
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from tiny import conv_net, gconv, get_tensor, listing, no_conv, save, save_external, set_tensor, with_custom_op

MODEL = conv_net().SerializeToString(deterministic=True)
OPSET_BYTES = 2 + len(conv_net().opset_import[0].SerializeToString())  # the file's last field, with its tag and length

READING = {
    "inspect": "inspect bad.onnx",
    "plan": "plan bad.onnx --groups 2 -o out.json",
    "compress": "compress bad.onnx --groups 2 -o out.onnx",
    "mask": "mask bad.onnx plan.json -o out.onnx",
    "apply": "apply bad.onnx plan.json --allow-drop -o out.onnx",
    "verify": "verify bad.onnx good.onnx",
    "verify the other": "verify good.onnx bad.onnx",
}
WRITING = {
    "plan": "plan good.onnx --groups 2 -o {}.json",
    "compress": "compress good.onnx --groups 2 -o {}.onnx",
    "mask": "mask good.onnx plan.json -o {}.onnx",
    "apply": "apply good.onnx plan.json -o {}.onnx",
}


def reading(*names: str) -> pytest.MarkDecorator:
    """Run the test with each of these commands on bad.onnx."""
    return pytest.mark.parametrize("command", [READING[name] for name in names], ids=names)


each_reading = reading(*READING)
each_rewriting = reading("compress", "mask", "apply")
each_writing = pytest.mark.parametrize("command", WRITING.values(), ids=list(WRITING))


@pytest.fixture(scope="module")
def plan_text(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("plan")
    save(conv_net(), folder / "good.onnx")
    assert gconv("plan", folder / "good.onnx", "--groups", "2", "-o", folder / "plan.json").code == 0
    return (folder / "plan.json").read_text(encoding="utf-8")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, plan_text: str, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Every test works in a folder of its own that holds good.onnx and its plan.json."""
    monkeypatch.chdir(tmp_path)
    Path("good.onnx").write_bytes(MODEL)
    Path("plan.json").write_text(plan_text, encoding="utf-8")
    return tmp_path


def refuse(command: str, *words: str) -> str:
    """Run a command that must fail the way that users can act on; return what it said."""
    before = listing(Path())
    finished = gconv(*command.split())
    said = [line for line in finished.err.splitlines() if not line.startswith(("note: ", "warning: "))]
    assert finished.code == 1, finished
    assert [line.partition(": ")[0] for line in said] == ["error", "hint"], finished.err
    assert "unexpectedly" not in finished.err, finished.err
    assert finished.out == ""
    assert listing(Path()) == before
    for word in words:
        assert word in finished.err
    return finished.err


def succeed(command: str) -> str:
    """Run a command that must work; return its stderr."""
    finished = gconv(*command.split())
    assert finished.code == 0, finished
    return finished.err


# --- files that are no models ---------------------------------------------------------------------------------------------

LFS_POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"4d7a" * 16 + b"\nsize 46830571\n"
NO_MODELS = {
    "empty": b"",
    "text": b"# ResNet-18\n\nDownload the model from the release page.\n",
    "json": b'{"format": 1}',
    "html": b"<!DOCTYPE html><html><body>404 Not Found</body></html>",
    "git lfs pointer": LFS_POINTER,
    "zeros": bytes(4096),
    **{f"random bytes {seed}": np.random.default_rng(seed).bytes(5000) for seed in range(4)},
    **{f"cut at {share:.0%}": MODEL[: int(share * len(MODEL))] for share in (0.01, 0.1, 0.5, 0.9)},
    "cut after the first field": MODEL[:2],
    "cut by one byte": MODEL[:-1],
    "cut before the opset": MODEL[:-OPSET_BYTES],
}


@each_reading
@pytest.mark.parametrize("content", NO_MODELS.values(), ids=list(NO_MODELS))
def test_a_file_that_is_no_model_is_refused_by_name(command: str, content: bytes) -> None:
    Path("bad.onnx").write_bytes(content)
    refuse(command, "'bad.onnx'")


def test_a_model_cut_anywhere_is_refused() -> None:
    for length in range(1, len(MODEL), 61):
        Path("bad.onnx").write_bytes(MODEL[:length])
        refuse("inspect bad.onnx", "'bad.onnx'")


@each_reading
def test_a_missing_model_is_refused_by_name(command: str) -> None:
    refuse(command, "there is no file 'bad.onnx'")


@each_reading
def test_a_folder_in_place_of_a_model_is_refused(command: str) -> None:
    Path("bad.onnx").mkdir()
    refuse(command, "'bad.onnx' is a folder")


@each_reading
def test_a_model_that_may_not_be_read_is_refused(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # Not with chmod: tests may run as root, whom nothing is forbidden.
    real = Path.read_bytes

    def read_bytes(path: Path) -> bytes:
        if path.name == "bad.onnx":
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        return real(path)

    monkeypatch.setattr(Path, "read_bytes", read_bytes)
    refuse(command, "cannot read 'bad.onnx': Permission denied")


# --- models that cannot be worked on --------------------------------------------------------------------------------------


@reading("plan", "compress")
def test_a_model_without_a_conv_is_refused(command: str) -> None:
    save(no_conv(), Path("bad.onnx"))
    refuse(command, "the model has no Conv")


def test_inspect_of_a_model_without_a_conv_says_that_there_are_none() -> None:
    save(no_conv(), Path("bad.onnx"))
    finished = gconv("inspect", "bad.onnx", "--json")
    assert finished.code == 0
    assert (json.loads(finished.out)["layers"], json.loads(finished.out)["skipped"]) == ([], [])


@reading("plan", "compress", "mask", "apply")
@pytest.mark.parametrize("values", [[np.nan], [np.inf], [-np.inf], [np.inf, -np.inf]], ids=str)
def test_a_layer_weight_that_is_not_finite_is_refused_by_name(command: str, values: list[float]) -> None:
    model = conv_net()
    weight = get_tensor(model, "w3")
    weight.flat[5 : 5 + len(values)] = values
    save(set_tensor(model, "w3", weight), Path("bad.onnx"))
    refuse(command, "'w3'", "'c3'", "NaN or infinity")


@each_rewriting
def test_a_nan_outside_the_layers_is_named_as_the_reason_and_not_as_a_bug(command: str) -> None:
    model = conv_net()
    weight = get_tensor(model, "w1")  # c1 is skipped, but feeds NaN to the layers
    weight.flat[0] = np.nan
    save(set_tensor(model, "w1", weight), Path("bad.onnx"))
    assert "bug of onnx-gconv" not in refuse(command, "NaN")


def _without_weight(model: onnx.ModelProto) -> None:
    del model.graph.node[2].input[1:]


def _without_output(model: onnx.ModelProto) -> None:
    del model.graph.node[1].output[:]


def _short_weight(model: onnx.ModelProto) -> None:
    weight = next(tensor for tensor in model.graph.initializer if tensor.name == "w2")
    weight.raw_data = weight.raw_data[:100]


def _flat_weight(model: onnx.ModelProto) -> None:
    set_tensor(model, "w2", np.ones(4))


def _unknown_type(model: onnx.ModelProto) -> None:
    next(tensor for tensor in model.graph.initializer if tensor.name == "w2").data_type = 99


def _zero_groups(model: onnx.ModelProto) -> None:
    model.graph.node[2].attribute.append(onnx.helper.make_attribute("group", 0))


def _wrong_groups(model: onnx.ModelProto) -> None:
    model.graph.node[2].attribute.append(onnx.helper.make_attribute("group", 3))


def _dangling_weight(model: onnx.ModelProto) -> None:
    model.graph.node[2].input[1] = "nowhere"


def _made_twice(model: onnx.ModelProto) -> None:
    model.graph.node[3].output[0] = "c2"
    model.graph.node[4].input[0] = "c2"


@each_rewriting
@pytest.mark.parametrize(
    "spoil",
    [
        _without_weight,
        _without_output,
        _short_weight,
        _flat_weight,
        _unknown_type,
        _zero_groups,
        _wrong_groups,
        _dangling_weight,
        _made_twice,
    ],
)
def test_a_malformed_graph_is_refused(command: str, spoil: Callable[[onnx.ModelProto], None]) -> None:
    model = conv_net()
    spoil(model)
    save(model, Path("bad.onnx"))
    refuse(command)


# --- ops that nobody knows ------------------------------------------------------------------------------------------------


@each_rewriting
@pytest.mark.parametrize("place", ["r2", "scores"])
def test_a_custom_op_is_refused_and_no_verify_writes_all_the_same(command: str, place: str) -> None:
    save(with_custom_op(conv_net(), place), Path("bad.onnx"))
    refuse(command, "my.ops", "--no-verify")
    assert "not verified" in succeed(f"{command} --no-verify")
    written = onnx.load("out.onnx")
    assert [node.op_type for node in written.graph.node if node.domain == "my.ops"] == ["Sharpen"]
    assert {entry.domain: entry.version for entry in written.opset_import} == {"": 17, "my.ops": 1}


def test_the_report_of_an_unverified_model_says_so() -> None:
    save(with_custom_op(conv_net(), "r2"), Path("bad.onnx"))
    succeed(f"{READING['compress']} --no-verify")
    report = json.loads(Path("out.report.json").read_text())
    assert report["verify"] is None
    assert report["after"]["macs"] is None  # c3 lies behind the custom op: nobody knows its size
    assert report["after"]["params"] == 916 - 576 // 2 - 64 // 2


def test_a_flop_budget_without_known_macs_is_refused_and_a_parameter_budget_is_met() -> None:
    save(with_custom_op(conv_net(), "r2"), Path("bad.onnx"))
    refuse("plan bad.onnx --max-flops 60% -o out.json", "MACs of this model are not known", "--max-params")
    succeed("plan bad.onnx --max-params 60% -o out.json")
    assert json.loads(Path("out.json").read_text())["after"]["params"] <= 916 * 0.6


def test_a_refused_parameter_budget_makes_up_no_macs() -> None:
    save(with_custom_op(conv_net(), "r2"), Path("bad.onnx"))
    said = refuse("plan bad.onnx --max-params 5% -o out.json", "356 parameters")
    assert not re.search(r"\d MACs", said)


def test_verify_gives_no_hint_that_it_does_not_understand() -> None:
    save(with_custom_op(conv_net(), "scores"), Path("bad.onnx"))
    assert "--no-verify" not in refuse(READING["verify"], "my.ops")


# --- weights in other files -----------------------------------------------------------------------------------------------


@each_reading
def test_missing_external_data_is_refused_by_its_name(command: str) -> None:
    save_external(conv_net(), Path("bad.onnx"), data="weights.bin")
    Path("weights.bin").unlink()
    refuse(command, "'bad.onnx'", "weights.bin")


@reading("inspect", "compress", "mask", "verify")
def test_external_data_that_is_cut_short_is_refused(command: str) -> None:
    save_external(conv_net(), Path("bad.onnx"), data="weights.bin")
    Path("weights.bin").write_bytes(Path("weights.bin").read_bytes()[:-1000])
    refuse(command, "weights.bin")


def test_external_data_outside_the_folder_is_not_read() -> None:
    Path("inner").mkdir()
    save_external(conv_net(), Path("inner/bad.onnx"), data="weights.bin")
    model = onnx.load("inner/bad.onnx", load_external_data=False)
    for tensor in model.graph.initializer:
        next(entry for entry in tensor.external_data if entry.key == "location").value = "../weights.bin"
    save(model, Path("inner/bad.onnx"))
    shutil.move("inner/weights.bin", "weights.bin")
    refuse("inspect inner/bad.onnx", "../weights.bin")


def _scores(path: str) -> np.ndarray:
    image = np.random.default_rng(7).standard_normal((2, 3, 8, 8)).astype(np.float32)
    return ort.InferenceSession(path, providers=["CPUExecutionProvider"]).run(None, {"image": image})[0]


@pytest.mark.parametrize("name", ["compress", "mask", "apply"])
def test_external_data_stays_external_and_the_result_runs_from_any_folder(name: str, folder: Path) -> None:
    save_external(conv_net(), Path("bad.onnx"), data="weights.bin")
    before = listing(folder)
    said = succeed(READING[name])
    new = {path: content for path, content in listing(folder).items() if path not in before}
    assert listing(folder) == before | new  # the source and its data are as they were
    extra = ["out.plan.json", "out.report.json"] if name == "compress" else []
    written = ["out.onnx", "out.onnx.data", *extra]
    assert set(new) == set(written)
    assert f"wrote {', '.join(written)}" in said

    external = {
        tensor.name: next(entry.value for entry in tensor.external_data if entry.key == "location")
        for tensor in onnx.load("out.onnx", load_external_data=False).graph.initializer
        if tensor.data_location == onnx.TensorProto.EXTERNAL
    }
    assert set(external.values()) == {"out.onnx.data"}

    moved = folder / "elsewhere"
    moved.mkdir()
    for file in ("out.onnx", "out.onnx.data"):
        shutil.move(file, moved / file)
    succeed(WRITING[name].format("single"))  # the same model in one file
    np.testing.assert_array_equal(_scores(str(moved / "out.onnx")), _scores("single.onnx"))


def test_the_reported_size_of_external_data_is_that_of_the_files() -> None:
    save_external(conv_net(), Path("bad.onnx"), data="weights.bin")
    succeed(READING["compress"])
    report = json.loads(Path("out.report.json").read_text())
    assert report["before"]["bytes"] == Path("bad.onnx").stat().st_size + Path("weights.bin").stat().st_size
    assert report["after"]["bytes"] == Path("out.onnx").stat().st_size + Path("out.onnx.data").stat().st_size


# --- places that cannot be written to -------------------------------------------------------------------------------------


@each_writing
@pytest.mark.parametrize("target", ["missing/out", "good.onnx/out", "/proc/out", "/sys/out"])
def test_an_output_folder_that_takes_no_files_is_refused_by_name(command: str, target: str) -> None:
    if target.startswith("/") and not Path(target).parent.is_dir():
        pytest.skip("Linux only")
    refuse(command.format(target), f"cannot write into '{Path(target).parent}'")


@each_writing
def test_a_read_only_output_folder_is_refused(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def read_only(*args: object, **kwargs: object) -> str:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(tempfile, "mkdtemp", read_only)
    refuse(command.format("out"), "cannot write into '.'", "Read-only file system")


@pytest.mark.parametrize(
    ("name", "taken"),
    [
        ("plan", "out.json"),
        ("mask", "out.onnx"),
        ("apply", "out.onnx"),
        ("compress", "out.onnx"),
        ("compress", "out.plan.json"),
        ("compress", "out.report.json"),
    ],
)
def test_an_output_path_that_is_a_folder_is_refused(name: str, taken: str) -> None:
    Path(taken).mkdir()
    Path(taken, "precious.txt").write_text("keep me")
    refuse(WRITING[name].format("out"), taken, "it is a folder")


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes here")
@each_writing
def test_a_pipe_is_not_replaced_by_a_file(command: str) -> None:
    for name in ("out.json", "out.onnx", "out"):
        os.mkfifo(name)
    done = gconv(*command.format("out").split())
    assert done.code == 1
    assert "it is a device or pipe" in done.err
    assert all(Path(name).is_fifo() for name in ("out.json", "out.onnx", "out"))


def _fail_with(error: BaseException, *, calls_before: int = 0, real: Callable[..., Any] | None = None) -> Callable[..., Any]:
    """Return a function that raises once, after so many calls that go to the real one."""
    count = iter(range(10**6))

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if next(count) == calls_before or real is None:
            raise error
        return real(*args, **kwargs)

    return wrapper


DISK_FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@each_writing
@pytest.mark.parametrize("rewriting", [False, True], ids=["first time", "over an old result"])
def test_a_full_disk_leaves_everything_as_it_was(command: str, rewriting: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if rewriting:
        succeed(command.replace("--groups 2", "--groups 4").format("out"))

    def half_a_model(model: onnx.ModelProto, *_: object) -> Iterator[bytes]:
        yield model.SerializeToString()[:100]
        raise DISK_FULL

    monkeypatch.setattr("onnx_gconv.model.file.serialised", half_a_model)
    monkeypatch.setattr(Path, "write_text", _fail_with(DISK_FULL))
    refuse(command.format("out"), "No space left on device", "nothing was written")


@pytest.mark.parametrize("calls_before", [0, 1])
def test_a_disk_that_fills_up_after_the_model_leaves_no_model(calls_before: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "write_text", _fail_with(DISK_FULL, calls_before=calls_before, real=Path.write_text))
    refuse(WRITING["compress"].format("out"), "No space left on device")


@pytest.mark.parametrize("calls_before", [0, 1, 2])
@pytest.mark.parametrize("rewriting", [False, True], ids=["first time", "over an old result"])
def test_a_failing_rename_leaves_none_of_the_three_files(
    calls_before: int, rewriting: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if rewriting:
        succeed("compress good.onnx --groups 4 -o out.onnx")
    monkeypatch.setattr(os, "replace", _fail_with(DISK_FULL, calls_before=calls_before, real=os.replace))
    refuse(WRITING["compress"].format("out"), "No space left on device")


def _run_with_file_limit(command: str, *, largest: int) -> subprocess.CompletedProcess[str]:
    """Run a command in a process whose files the kernel lets grow to `largest` bytes only."""
    program = (
        "import resource, sys; from onnx_gconv.cli.main import main; "
        f"resource.setrlimit(resource.RLIMIT_FSIZE, ({largest}, {largest})); sys.exit(main(sys.argv[1:]))"
    )
    return subprocess.run([sys.executable, "-c", program, *command.split()], capture_output=True, text=True, timeout=60)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="needs setrlimit")
@pytest.mark.parametrize("external", [False, True])
def test_a_write_that_the_kernel_stops_leaves_nothing(external: bool, folder: Path) -> None:
    (save_external if external else save)(conv_net(), Path("bad.onnx"))
    before = listing(folder)
    finished = _run_with_file_limit(READING["compress"], largest=1000)
    assert finished.returncode == 1, finished
    assert "File too large" in finished.stderr
    assert [line.partition(": ")[0] for line in finished.stderr.splitlines()] == ["warning", "error", "hint"]
    assert listing(folder) == before


# --- Ctrl-C ---------------------------------------------------------------------------------------------------------------


def interrupt(command: str) -> None:
    before = listing(Path())
    finished = gconv(*command.split())
    assert finished.code == 130, finished
    told = [line for line in finished.err.splitlines() if not line.startswith("warning: ")]
    assert told == ["error: interrupted; no result was written."]
    assert listing(Path()) == before


@pytest.mark.parametrize(
    "moment",
    [
        "onnx_gconv.pipeline.original.load_with_data_files",
        "onnx_gconv.pipeline.planning.make_plan",
        "onnx_gconv.pipeline.rewriting.carry_out",
        "onnx_gconv.pipeline.rewriting.verify",
        "onnx_gconv.pipeline.result.save",
        "onnx_gconv.pipeline.result.Result._report",
    ],
)
def test_ctrl_c_at_any_moment_leaves_nothing(moment: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moment, _fail_with(KeyboardInterrupt()))
    interrupt("compress good.onnx --groups 2 -o out.onnx")


@pytest.mark.parametrize("calls_before", [0, 1, 2])
def test_ctrl_c_between_the_renames_leaves_none_of_the_three_files(calls_before: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "replace", _fail_with(KeyboardInterrupt(), calls_before=calls_before, real=os.replace))
    interrupt("compress good.onnx --groups 2 -o out.onnx")


@pytest.mark.skipif(sys.platform == "win32", reason="POSIX signals")
def test_a_real_sigint_ends_a_running_compress_with_130_and_leaves_nothing(folder: Path) -> None:
    save(conv_net(channels=512, size="S"), Path("big.onnx"))  # some seconds of solving and verifying
    before = listing(folder)
    # A test run in the background ignores SIGINT, and its children inherit that.
    program = (
        "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); "
        "from onnx_gconv.cli.main import main; sys.exit(main(sys.argv[1:]))"
    )
    argv = [sys.executable, "-c", program, "compress", "big.onnx", "--max-params", "50%"]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        try:
            assert process.stderr.readline().startswith("note: MACs are counted at")  # told just before solving begins
            process.send_signal(signal.SIGINT)
            out, err = process.communicate(timeout=60)
        finally:
            process.kill()
    assert (process.returncode, out, err) == (130, "", "error: interrupted; no result was written.\n")
    assert listing(folder) == before


@pytest.mark.skipif(sys.platform == "win32", reason="POSIX signals")
def test_a_real_sigterm_ends_a_running_compress_with_143_and_leaves_no_temporary_folder(
    folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    np.savez("calib.npz", image=np.ones((8, 3, 8, 8), np.float32))
    temporary = tmp_path_factory.mktemp("temporary")
    before = listing(folder)
    # Nothing fits into memory, so activations are in a temporary folder; the first fit does not end.
    program = (
        "import sys, time; from onnx_gconv.recover import fitting; from onnx_gconv.cli.main import main\n"
        "fitting.MEMORY_BYTES = 0\n"
        "fitting._Fitter.fit = lambda *_: print('fitting', flush=True) or time.sleep(60)\n"
        "sys.exit(main())"
    )
    command = "compress good.onnx --groups 2 --calib calib.npz -o out.onnx"
    argv = [sys.executable, "-c", program, *command.split()]
    environment = os.environ | {"TMPDIR": str(temporary)}
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == "fitting\n"
            assert list(temporary.glob("onnx-gconv-*"))
            process.send_signal(signal.SIGTERM)
            out, err = process.communicate(timeout=60)
        finally:
            process.kill()
    assert (process.returncode, out, err) == (143, "", "error: terminated; no result was written.\n")
    assert not list(temporary.glob("onnx-gconv-*"))  # ONNX Runtime may leave a file of its own there
    assert listing(folder) == before


# --- budgets --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("flag", ["--max-flops", "--max-macs", "--max-params"])
@pytest.mark.parametrize("budget", ["abc", "0", "0%", "-5", "50%%", "%", "nan", "inf", "1e9", "1,000", "5kk"])
def test_a_malformed_budget_is_refused_by_its_text(flag: str, budget: str) -> None:
    refuse(f"plan good.onnx {flag} {budget} -o out.json", repr(budget), "50%")


def test_a_budget_beyond_every_number_is_no_crash() -> None:
    assert "unexpectedly" not in gconv("plan", "good.onnx", "--max-params", "9" * 400, "-o", "out.json").err


@pytest.mark.parametrize("command", ["plan good.onnx -o out.json", "compress good.onnx -o out.onnx"])
@pytest.mark.parametrize("flags", [["--max-flops"], ["--max-macs"], ["--max-params"], ["--max-flops", "--max-params"]], ids="".join)
def test_an_impossible_budget_is_refused_and_what_the_hint_offers_works(command: str, flags: list[str]) -> None:
    said = refuse(" ".join([command, *(f"{flag} 5%" for flag in flags)]), "the budget cannot be met")
    offers = dict(re.findall(r"(--max-\w+) from ([\d,]+) \(", said))
    shares = dict(re.findall(r"(--max-\w+) from [\d,]+ \(([\d.]+%)\)", said))
    assert list(offers) == list(shares)
    assert set(offers) == set(flags)
    for offer in (offers, shares):
        succeed(" ".join([command, *(f"{flag} {value.replace(',', '')}" for flag, value in offer.items())]))
    smallest = {"--max-flops": 37952, "--max-macs": 18976, "--max-params": 356}  # by hand: c2 and c3 at 8 groups
    assert {flag: int(value.replace(",", "")) for flag, value in offers.items()} == {flag: smallest[flag] for flag in flags}
    below = [f"{flag} {smallest[flag] - 1}" for flag in flags]
    refuse(" ".join([command, *below]), "the budget cannot be met")


def test_a_rule_that_breaks_the_budget_is_refused() -> None:
    refuse("compress good.onnx --groups 2 --max-flops 50% -o out.onnx", "over the budget", "--groups")


@pytest.mark.parametrize(
    "choice", ["--groups 3", "--groups 2 --include nothing", "--groups 2 --exclude .", "--max-group-channels 8"]
)
def test_choosing_nothing_is_refused(choice: str) -> None:
    refuse(f"compress good.onnx {choice} -o out.onnx", "no Conv would be grouped")


# --- usage ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("command", "word"),
    [
        ("", "COMMAND"),
        ("shrink good.onnx", "shrink"),
        ("inspect", "MODEL"),
        ("compress good.onnx", "say how much"),
        ("plan good.onnx -o out.json", "say how much"),
        ("plan good.onnx --groups 2", "-o"),
        ("mask good.onnx -o out.onnx", "PLAN"),
        ("apply good.onnx plan.json", "-o"),
        ("compress good.onnx --groups 0", "--groups"),
        ("compress good.onnx --groups two", "--groups"),
        ("compress good.onnx --groups 2 --max-group-channels 4", "not allowed with"),
        ("compress good.onnx --groups 2 --exclude (", "not a regular expression"),
        ("compress good.onnx --groups 2 --seed x", "--seed"),
        ("compress good.onnx --groups 2 --seed -1", "--seed"),
        ("compress good.onnx --groups 2 -v -q", "not allowed with"),
        ("verify good.onnx good.onnx --tolerance x", "--tolerance"),
        ("verify good.onnx good.onnx --seed -1", "--seed"),
    ],
)
def test_wrong_usage_exits_2_and_names_the_argument(command: str, word: str, folder: Path) -> None:
    before = listing(folder)
    finished = gconv(*command.split())
    assert finished.code == 2, finished
    assert finished.out == ""
    assert finished.err.startswith("usage: onnx-gconv")
    assert word in finished.err.splitlines()[-1]
    assert listing(folder) == before


# --- plans ----------------------------------------------------------------------------------------------------------------

TOP_FIELDS = (
    *("format", "source_sha256", "criterion", "solver", "search", "seed", "budget"),
    *("gathers", "before", "after", "layers", "skipped"),
)
LAYER_FIELDS = ("label", "out_channels", "in_channels", "groups", "kept", "in_order", "out_order")
Edit = Callable[[dict[str, Any]], object]

each_planning = pytest.mark.parametrize(
    "command", [f"{name} good.onnx bad.json -o out.onnx" for name in ("mask", "apply")], ids=["mask", "apply"]
)


def edit_plan(edit: Edit) -> None:
    plan = json.loads(Path("plan.json").read_text(encoding="utf-8"))
    edit(plan)
    Path("bad.json").write_text(json.dumps(plan), encoding="utf-8")


@each_planning
@pytest.mark.parametrize(
    "content",
    [b"", b"layers: c2", b'{"format": 1,', b"[]", b"null", b'"plan"', MODEL, b"\xff\xfe", b"[" * 10**5, b"1" * 5000, LFS_POINTER],
    ids=["empty", "yaml", "cut", "list", "null", "string", "model", "not utf-8", "deep", "huge number", "lfs pointer"],
)
def test_a_file_that_is_no_plan_is_refused_by_name(command: str, content: bytes) -> None:
    Path("bad.json").write_bytes(content)
    refuse(command, "bad.json")


@each_planning
def test_a_missing_plan_and_a_folder_are_refused_by_name(command: str) -> None:
    refuse(command, "there is no file 'bad.json'")
    Path("bad.json").mkdir()
    refuse(command, "cannot read 'bad.json'")


@pytest.mark.parametrize("value", [None, "missing"])
@pytest.mark.parametrize("field", TOP_FIELDS)
def test_a_plan_field_that_is_missing_or_of_the_wrong_type_is_named(field: str, value: str | None) -> None:
    edit_plan(lambda plan: plan.pop(field) if value == "missing" else plan.update({field: None}))
    refuse("apply good.onnx bad.json -o out.onnx", "bad.json", field)


@pytest.mark.parametrize("value", [None, "missing"])
@pytest.mark.parametrize("field", LAYER_FIELDS)
def test_a_layer_field_that_is_missing_or_of_the_wrong_type_is_named_with_its_layer(field: str, value: str | None) -> None:
    edit_plan(lambda plan: plan["layers"][1].pop(field) if value == "missing" else plan["layers"][1].update({field: None}))
    refuse("apply good.onnx bad.json -o out.onnx", "bad.json", "'c3'", f"'{field}'")


def _layer(**fields: object) -> Edit:
    return lambda plan: plan["layers"][0].update(fields)


SMALLER = {"out_channels": 4, "in_channels": 4, "in_order": [0, 1, 2, 3], "out_order": [0, 1, 2, 3]}
PLAN_EDITS: dict[str, tuple[Edit, tuple[str, ...]]] = {
    "unknown format": (lambda plan: plan.update(format=3), ("bad.json", "format 3")),
    "layer without a name": (lambda plan: plan["layers"][0].pop("name"), ("bad.json", "layers[0]", "'name'")),
    "layer that is a number": (lambda plan: plan["layers"].append(3), ("bad.json", "layers[2]")),
    "skipped without a reason": (lambda plan: plan["skipped"][0].pop("reason"), ("bad.json", "skipped[0]", "'reason'")),
    "budget that is a text": (lambda plan: plan.update(budget={"max_macs": "many"}), ("bad.json", "budget", "'max_macs'")),
    "totals without macs": (lambda plan: plan["after"].pop("macs"), ("bad.json", "after", "'macs'")),
    "order with a repeat": (_layer(in_order=[0, 0, 2, 3, 4, 5, 6, 7]), ("bad.json", "'c2'", "'in_order'")),
    "order too short": (_layer(out_order=[0, 1, 2]), ("bad.json", "'c2'", "'out_order'")),
    "order out of range": (_layer(out_order=[1, 2, 3, 4, 5, 6, 7, 8]), ("bad.json", "'c2'", "'out_order'")),
    "order from below": (_layer(out_order=[-1, 0, 1, 2, 3, 4, 5, 6]), ("bad.json", "'c2'", "'out_order'")),
    "order of fractions": (_layer(in_order=[0.0, 1, 2, 3, 4, 5, 6, 7]), ("bad.json", "'c2'", "'in_order'")),
    "order of booleans": (_layer(in_order=[False, True, 2, 3, 4, 5, 6, 7]), ("bad.json", "'c2'", "'in_order'")),
    "order of texts": (_layer(in_order=list("01234567")), ("bad.json", "'c2'", "'in_order'")),
    "groups that do not divide": (_layer(groups=3), ("bad.json", "'c2'", "3 groups")),
    "more groups than channels": (_layer(groups=16), ("bad.json", "'c2'", "16 groups")),
    "zero groups": (_layer(groups=0), ("bad.json", "'c2'", "0 groups")),
    "negative groups": (_layer(groups=-2), ("bad.json", "'c2'", "-2 groups")),
    "groups that are a text": (_layer(groups="2"), ("bad.json", "'c2'", "'groups'")),
    "groups that are true": (_layer(groups=True), ("bad.json", "'c2'", "'groups'")),
    "layer that is there twice": (lambda plan: plan["layers"].append(plan["layers"][0]), ("bad.json", "'c2'", "twice")),
    "layer that the model has not": (_layer(name="nowhere"), ("'nowhere'", "is not in this model")),
    "layer that is no Conv": (_layer(name="r1"), ("'r1'", "is not in this model")),
    "layer that cannot be grouped": (_layer(name="c1"), ("'c1'", "cannot be grouped")),
    "layer of another shape": (_layer(**SMALLER), ("'c2'", "4 input and 4 output", "8 and 8")),
}


@each_planning
@pytest.mark.parametrize(("edit", "words"), PLAN_EDITS.values(), ids=list(PLAN_EDITS))
def test_a_malformed_plan_is_refused_with_the_place_of_the_fault(command: str, edit: Edit, words: tuple[str, ...]) -> None:
    edit_plan(edit)
    refuse(command, *words)


@pytest.mark.parametrize(
    ("content", "word"),
    [
        ("G = 2", "is not JSON"),
        ("[1, 2]", "neither a plan nor a group configuration"),
        ('{"module.w2": 2}', "neither a plan nor a group configuration"),
        ('{"module.w2": {"G": "2"}}', "neither a plan nor a group configuration"),
        ('{"module.layer9": {"G": 2}}', "'layer9'"),
        ('{"module.w2": {"G": 2, "F": 16, "C": 8}}', "F=16"),
        ('{"module.w2": {"G": 3}}', "3 groups"),
        ('{"module.w2": {"G": 0}}', "0 groups"),
        ('{"format": 1}', "is missing"),
    ],
)
def test_a_malformed_group_configuration_is_refused(content: str, word: str) -> None:
    Path("bad.json").write_text(content)
    refuse("plan good.onnx --group-config bad.json -o out.json", "bad.json", word)


# --- input shapes ---------------------------------------------------------------------------------------------------------


@each_reading
@pytest.mark.parametrize(
    ("shape", "words"),
    [
        ("picture=1x3x8x8", ("'picture'", "image")),
        ("1x3x8", ("'image'", "1x3x8", "?x3x8x8")),
        ("1x3x8x8x1", ("'image'", "?x3x8x8")),
        ("1x3x9x9", ("'image'", "1x3x9x9", "?x3x8x8")),
        ("0x3x8x8", ("'image'", "0x3x8x8")),
        ("-1x3x8x8", ("'image'", "-1x3x8x8")),
        ("1xthreex8x8", ("1xthreex8x8", "1x3x224x224")),
        ("1.5x3x8x8", ("1.5x3x8x8", "1x3x224x224")),
        ("image=", ("'image='", "1x3x224x224")),
    ],
)
def test_a_wrong_input_shape_is_refused(command: str, shape: str, words: tuple[str, ...]) -> None:
    Path("bad.onnx").write_bytes(MODEL)
    refuse(f"{command} --input-shape={shape}", *words)


def test_an_input_shape_without_a_name_is_refused_where_there_are_two_inputs() -> None:
    model = conv_net()
    model.graph.input.append(onnx.helper.make_tensor_value_info("second", onnx.TensorProto.FLOAT, [1]))
    save(model, Path("bad.onnx"))
    refuse("inspect bad.onnx --input-shape 1x3x8x8", "image, second")
    succeed("inspect bad.onnx --input-shape image=1x3x8x8 --input-shape second=1")


def test_a_size_that_the_model_cannot_run_at_is_refused_by_onnx_runtime_and_named() -> None:
    model = conv_net(size="S")
    model.graph.node[0].attribute[0].ints[:] = [0, 0, 0, 0]  # no padding: a 3x3 kernel does not fit on 1 pixel
    save(model, Path("bad.onnx"))
    refuse("compress bad.onnx --groups 2 -o out.onnx --input-shape 1x3x1x1", "1x3x1x1", "--input-shape")
    succeed("compress bad.onnx --groups 2 -o out.onnx --input-shape 1x3x5x5")


# --- outputs that cannot tell ---------------------------------------------------------------------------------------------


def _with_scores(bias: float) -> onnx.ModelProto:
    model = conv_net()
    return set_tensor(set_tensor(model, "w4", np.zeros((4, 8))), "b4", np.full(4, bias))


@pytest.mark.parametrize(("bias", "why"), [(0.0, "all zero"), (np.nan, "NaN"), (np.inf, "NaN or infinity")])
def test_verify_refuses_outputs_that_cannot_tell(bias: float, why: str) -> None:
    save(_with_scores(bias), Path("bad.onnx"))
    refuse("verify bad.onnx bad.onnx", "'scores'", why)


@pytest.mark.parametrize("bias", [0.0, np.nan, np.inf])
def test_compress_compares_inner_tensors_where_the_outputs_cannot_tell(bias: float) -> None:
    save(_with_scores(bias), Path("bad.onnx"))
    succeed(READING["compress"])
    verify = json.loads(Path("out.report.json").read_text())["verify"]
    assert verify["passed"] is True
    assert 0 < verify["max_rel_error"] < 1e-5  # exactly 0 would mean that nothing was compared


def test_compress_refuses_a_model_in_which_every_tensor_is_zero() -> None:
    model = conv_net()
    for tensor in list(model.graph.initializer):
        set_tensor(model, tensor.name, np.zeros(tensor.dims))
    save(model, Path("bad.onnx"))
    refuse(READING["compress"], "cannot be told apart", "all zero", "--no-verify")


@each_rewriting
def test_a_rewriting_that_is_another_function_is_never_written(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("bad.onnx").write_bytes(MODEL)
    monkeypatch.setattr("onnx_gconv.pipeline.rewriting.carry_out", lambda model, plan, placement, lowering: model)  # groups nothing
    assert "--no-verify" not in refuse(command, "the compressed model differs from the masked one")


# --- verify ---------------------------------------------------------------------------------------------------------------


def test_verify_refuses_models_with_different_inputs_or_outputs() -> None:
    model = conv_net()
    model.graph.output[0].name = model.graph.node[-1].output[0] = "logits"
    save(model, Path("bad.onnx"))
    refuse("verify good.onnx bad.onnx", "different outputs", "scores", "logits")
    save(no_conv(), Path("bad.onnx"))
    refuse("verify good.onnx bad.onnx", "different inputs", "image")


@pytest.mark.parametrize("samples", ["0", "-3"])
def test_verify_refuses_to_compare_nothing(samples: str) -> None:
    finished = gconv(*f"verify good.onnx good.onnx --samples {samples}".split())
    assert (finished.code, finished.out) == (2, "")
    assert f"--samples {samples} compares nothing" in finished.err


@pytest.mark.parametrize(
    "command",
    [
        "mask good.onnx plan.json -o plan.json",
        "apply good.onnx plan.json -o plan.json",
        "plan good.onnx --group-config plan.json -o plan.json",
        "compress good.onnx --group-config out.plan.json -o out.onnx",  # the plan of the result goes there
        "compress good.onnx --groups 2 --calib data.npz -o data.npz",
        "bench good.onnx --runner ort-cpu --timing-out good.onnx",
        "bench other.onnx good.2.onnx --runner ort-cpu --timing-out good.onnx",
        "export good.onnx --target tensorrt -o good.onnx",
        "report out.report.json -o out.report.json",
        "report . -o plan.json",
        "report . -o good.onnx",
    ],
)
def test_a_result_never_replaces_what_it_is_made_from(command: str, folder: Path) -> None:
    before = listing(folder)
    finished = gconv(*command.split())
    assert finished.code == 2
    assert "would overwrite the" in finished.err
    assert listing(folder) == before


@pytest.mark.parametrize(
    "command",
    [
        "plan missing.onnx --groups 2 -o no/such/out.json",
        "compress missing.onnx --groups 2 -o no/such/out.onnx",
        "mask missing.onnx plan.json -o no/such/out.onnx",
        "apply missing.onnx plan.json -o no/such/out.onnx",
        "bench missing.onnx --runner ort-cpu --timing-out no/such/out.json",
        "bench missing.onnx --runner ort-cpu --sweep --timing-out no/such/out.json",
        "report missing -o no/such/out.html",
    ],
)
def test_where_the_result_goes_is_checked_before_anything_is_read(command: str) -> None:
    refuse(command, "cannot write into 'no/such': there is no such folder.")


def test_a_report_is_not_taken_for_a_plan() -> None:
    assert gconv("compress", "good.onnx", "--groups", "2", "-o", "out.onnx").code == 0
    refuse("mask good.onnx out.report.json -o masked.onnx", "out.report.json is a report, not a plan.")


def test_masking_another_model_than_was_planned_is_told() -> None:
    other = conv_net()
    other.producer_name = "somebody else"
    save(other, Path("other.onnx"))
    assert "warning: 'other.onnx' is not the model that was planned" in succeed("mask other.onnx plan.json -o out.onnx")
    assert "warning" not in succeed("mask good.onnx plan.json -o out.onnx")
