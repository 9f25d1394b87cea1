"""`bench`: the runner behind each name, the table and its files, and a fake Jetson behind a real ssh server on loopback."""

import contextlib
import getpass
import json
import os
import shutil
import socket
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import onnx
import pytest
from tiny import conv_net, gconv, save, save_external

from onnx_gconv.deploy.host import parse_host
from onnx_gconv.deploy.precision import typed
from onnx_gconv.deploy.program import PROGRAMS, program_file
from onnx_gconv.deploy.timing_file import from_json, read_timing
from onnx_gconv.errors import DeployError

ROOT = Path(__file__).parents[1]
STANDIN = Path(__file__).with_name("standin_trtexec.py")
SSHD = shutil.which("sshd") or next((path for path in ("/usr/sbin/sshd",) if os.path.exists(path)), None)
needs_sshd = pytest.mark.skipif(SSHD is None, reason="there is no sshd; on Debian: apt-get install openssh-server")


def grouped_pair(folder: Path) -> tuple[Path, Path]:
    """Write a model and a grouped one with Gathers, and return their paths."""
    first, second = save(conv_net(), folder / "net.onnx"), folder / "small.onnx"
    assert gconv("compress", first, "--groups", "2", "-o", second).code == 0
    return first, second


# Here


def test_the_first_model_is_the_baseline_and_files_are_timing_json(tmp_path: Path) -> None:
    first, second = grouped_pair(tmp_path)
    done = gconv("bench", first, second, "--runner", "ort-cpu", "--seconds", "0.1", "--timing-out", tmp_path / "t.json")
    assert done.code == 0, done.err
    assert "100.0%" in done.out
    assert "AMD" in done.out or "latency, ort-cpu fp32" in done.out
    one, two = read_timing(tmp_path / "t.json"), read_timing(tmp_path / "t.2.json")
    assert (one.model.path, two.model.path) == (str(first), str(second))
    assert two.layer_counts()["gather"] == sum(node.op_type == "Gather" for node in onnx.load(str(second)).graph.node) > 0


def test_json_holds_every_timing_with_its_ratio(tmp_path: Path) -> None:
    first, second = grouped_pair(tmp_path)
    data = json.loads(gconv("bench", first, second, "--runner", "ort-cpu", "--seconds", "0.1", "--json").out)
    assert (data["format"], data["runner"], data["host"]) == (1, "ort-cpu", None)
    assert data["models"][0]["ratio"] == 1
    for row in data["models"]:
        del row["ratio"]
        assert from_json(row, "stdout").runner == "ort-cpu"


@pytest.mark.parametrize("precision", ["fp16", "int8"])
def test_other_precisions_are_written_into_the_graph(tmp_path: Path, precision: str) -> None:
    model = conv_net()
    result = typed(model, precision, {"image": (1, 3, 8, 8)})  # type: ignore[arg-type]
    kinds = {node.op_type for node in result.graph.node}
    assert ("QuantizeLinear" in kinds) == (precision == "int8")
    weights = {tensor.data_type for tensor in result.graph.initializer if len(tensor.dims) == 4}
    assert weights == {onnx.TensorProto.FLOAT16 if precision == "fp16" else onnx.TensorProto.INT8}
    assert result.graph.input[0].type.tensor_type.elem_type == onnx.TensorProto.FLOAT
    save(model, tmp_path / "net.onnx")
    done = gconv("bench", tmp_path / "net.onnx", "--runner", "ort-cpu", "--precision", precision, "--seconds", "0.1", "--json")
    assert done.code == 0, done.err
    assert json.loads(done.out)["models"][0]["precision"] == precision


def test_a_runner_that_cannot_run_here_is_an_error_and_no_file(tmp_path: Path) -> None:
    save(conv_net(), tmp_path / "net.onnx")
    done = gconv("bench", tmp_path / "net.onnx", "--runner", "ort-cuda", "--timing-out", tmp_path / "t.json")
    if done.code == 0:
        pytest.skip("this machine has a GPU")
    assert done.code == 1
    assert "CUDAExecutionProvider" in done.err
    assert not (tmp_path / "t.json").exists()


@pytest.mark.parametrize("version", ["8201", "101300", "110000"])
def test_trtexec_gets_fp16_as_its_version_wants_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    program = install_standin(tmp_path / "bin")
    monkeypatch.setenv("STANDIN_VERSION", version)
    save(conv_net(), tmp_path / "net.onnx")
    flags = ("--trtexec", program, "--precision", "fp16", "--json")
    done = gconv("bench", tmp_path / "net.onnx", "--runner", "trtexec", *flags)
    assert done.code == 0, done.err
    row = json.loads(done.out)["models"][0]
    # On 11 a model of half precision was measured, not the file that was named.
    assert (row["model"]["sha256"] != read_sha256(tmp_path / "net.onnx")) == (version == "110000")
    assert row["model"]["path"] == str(tmp_path / "net.onnx")


def read_sha256(path: Path) -> str:
    from onnx_gconv.model.file import sha256

    return sha256(path)


def test_an_input_without_axes_needs_no_shape(tmp_path: Path) -> None:
    text = '<ir_version: 8, opset_import: ["" : 17]> m (float[N] x, float s) => (float[N] y) { y = Mul (x, s) }'
    save(onnx.parser.parse_model(text), tmp_path / "m.onnx")
    done = gconv("bench", tmp_path / "m.onnx", "--runner", "ort-cpu", "--seconds", "0.05", "--json")
    assert done.code == 0, done.err
    assert json.loads(done.out)["models"][0]["shapes"] == {"x": [1], "s": []}


def test_every_runner_name_has_its_program() -> None:
    for runner in PROGRAMS:
        assert program_file(runner).is_file()


@pytest.mark.slow
def test_an_installed_package_finds_the_runners_from_another_folder(tmp_path: Path) -> None:
    source = tmp_path / "source"
    wanted = ("onnx_gconv", "runners", "setup.py", "pyproject.toml", "README.md", "LICENSE")
    source.mkdir()
    for name in wanted:
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, source / name)  # type: ignore[operator]
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", str(tmp_path), str(source)]
    built = subprocess.run(command, capture_output=True, text=True, check=False)
    if built.returncode and "setuptools" in built.stderr:
        pytest.skip(f"no wheel can be built here: {built.stderr.strip().splitlines()[-1]}")
    assert built.returncode == 0, built.stderr
    place = tmp_path / "site"
    with zipfile.ZipFile(next(tmp_path.glob("*.whl"))) as wheel:
        wheel.extractall(place)
    assert {path.name for path in place.iterdir() if not path.name.endswith(".dist-info")} == {"onnx_gconv"}
    save(conv_net(), tmp_path / "net.onnx")
    code = "import sys; from onnx_gconv.cli.main import main; import onnx_gconv; print(onnx_gconv.__file__); sys.exit(main())"
    arguments = ["bench", "net.onnx", "--runner", "ort-cpu", "--seconds", "0.1", "--timing-out", "t.json"]
    environment = {**os.environ, "PYTHONPATH": str(place)}
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert str(place) in done.stdout
    assert str(place) in read_timing(tmp_path / "t.json").command[0]


# timing.json


def test_a_timing_file_survives_reading_and_writing(tmp_path: Path) -> None:
    save(conv_net(), tmp_path / "net.onnx")
    assert (
        gconv("bench", tmp_path / "net.onnx", "--runner", "ort-cpu", "--seconds", "0.1", "--timing-out", tmp_path / "t.json").code
        == 0
    )
    text = (tmp_path / "t.json").read_text(encoding="utf-8")
    assert from_json(json.loads(text), "t").to_json() == text


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": 2}, "format 2 is not known"),
        ({"runner": "abacus"}, "'runner' is 'abacus'"),
        ({"precision": None}, "'precision' must be a string, not null"),
        ({"latency_ms": {"min": 3, "mean": 2, "median": 2, "max": 4, "p90": 1, "p95": 1, "p99": 1}}, "out of order"),
        ({"latency_ms": {"min": 3}}, "latency_ms: the field 'mean' is missing"),
        ({"device": {}}, "device: the field 'name' is missing"),
        ({"layers": [{"name": "a", "kind": "magic"}]}, r"layers\[0\]: 'kind' is 'magic'"),
        ({"shapes": {"image": [1, "x"]}}, "'image' must be a list of whole numbers"),
    ],
)
def test_a_malformed_timing_names_file_and_field(tmp_path: Path, change: dict[str, object], message: str) -> None:
    save(conv_net(), tmp_path / "net.onnx")
    gconv("bench", tmp_path / "net.onnx", "--runner", "ort-cpu", "--seconds", "0.05", "--timing-out", tmp_path / "t.json")
    data = json.loads((tmp_path / "t.json").read_text(encoding="utf-8"))
    with pytest.raises(DeployError, match=f"t.json.*{message}"):
        from_json({**data, **change}, "t.json")


# Over ssh


@pytest.mark.parametrize(
    "text",
    [
        *("jetson", "ssh://", "http://jetson", "ssh://me@jetson:ssh", "ssh://-oProxyCommand=x", "ssh://a b"),
        *("ssh://me@-host", "ssh://-me@host", "ssh://me@.host", "ssh://host:0", "ssh://host:65536", "ssh://host:99999999"),
    ],
)
def test_a_host_that_is_no_ssh_address_is_refused(text: str) -> None:
    with pytest.raises(DeployError, match="is not an ssh address"):
        parse_host(text, python="python3", timeout_seconds=1)


def install_standin(folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    program = folder / "trtexec"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} {STANDIN} "$@"\n')
    program.chmod(0o755)
    return program


@pytest.fixture(scope="module")
def jetson(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., str]]:
    """Return a function that starts an ssh server on loopback, with keys of its own, and returns its address for --host.

    Our `ssh` and `scp` find a client configuration by way of wrappers on the PATH: what is tested is the system's own ssh.
    """
    with contextlib.ExitStack() as stack, pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("jetson")
        for name in ("host_key", "user_key"):
            subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)], check=True)
        shutil.copy(folder / "user_key.pub", folder / "authorized_keys")
        public = (folder / "host_key.pub").read_text()
        (folder / "client").write_text(
            f"IdentityFile {folder}/user_key\nIdentitiesOnly yes\n"
            f"UserKnownHostsFile {folder}/known_hosts\nStrictHostKeyChecking yes\n"
        )
        (folder / "bin").mkdir()
        for name in ("ssh", "scp"):
            (folder / "bin" / name).write_text(f'#!/bin/sh\nexec {shutil.which(name)} -F {folder}/client "$@"\n')
            (folder / "bin" / name).chmod(0o755)
        patch.setenv("PATH", f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}")

        def start(*, path: str) -> str:
            port = free_port()
            with (folder / "known_hosts").open("a") as known:
                known.write(f"[127.0.0.1]:{port} {public}")
            settings = {
                "Port": port,
                "ListenAddress": "127.0.0.1",
                "HostKey": folder / "host_key",
                "PidFile": "none",
                "UsePAM": "no",
                "AuthorizedKeysFile": folder / "authorized_keys",
                "StrictModes": "no",
                "PasswordAuthentication": "no",
                "Subsystem": "sftp internal-sftp",
                "SetEnv": f"PATH={path}",
            }
            config = folder / f"server-{port}"
            config.write_text("".join(f"{key} {value}\n" for key, value in settings.items()))
            assert SSHD is not None
            server = subprocess.Popen(
                [SSHD, "-D", "-E", str(config) + ".log", "-f", str(config)], stderr=subprocess.PIPE, text=True
            )
            stack.callback(stop, server)
            wait_for(server, port)
            return f"ssh://{getpass.getuser()}@127.0.0.1:{port}"

        yield start


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_for(server: "subprocess.Popen[str]", port: int) -> None:
    for _ in range(100):
        if server.poll() is not None:
            assert server.stderr is not None
            pytest.skip(f"sshd does not start here: {server.stderr.read().strip()}")
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
            return
        time.sleep(0.1)
    pytest.skip("sshd does not listen")


def stop(server: "subprocess.Popen[str]") -> None:
    server.terminate()
    server.wait(10)
    assert server.stderr is not None
    server.stderr.close()


@pytest.fixture(scope="module")
def tx2(jetson: Callable[..., str], tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the address of a host whose PATH has a trtexec like that of TensorRT 8.2.1."""
    program = install_standin(tmp_path_factory.mktemp("tx2"))
    return jetson(path=f"{program.parent}:{Path(sys.executable).parent}:/usr/bin:/bin")


def left_behind() -> set[str]:
    return {path.name for path in Path("/tmp").glob("onnx-gconv.*")}


@needs_sshd
def test_two_models_go_to_the_jetson_and_a_table_comes_back(tmp_path: Path, tx2: str) -> None:
    first, second = grouped_pair(tmp_path)
    before = left_behind()
    done = gconv(
        "bench", first, second, "--runner", "trtexec", "--host", tx2, "--precision", "fp16", "--timing-out", tmp_path / "t.json"
    )
    assert done.code == 0, done.err
    one, two = read_timing(tmp_path / "t.json"), read_timing(tmp_path / "t.2.json")
    assert one.versions["tensorrt"] == "8.2.1"
    assert (one.device["name"], one.device["compute_capability"]) == ("NVIDIA Tegra X2", "6.2")
    assert (one.precision, one.model.path) == ("fp16", str(first))
    gathers = onnx.load(str(second)).SerializeToString().count(b"Gather")
    assert one.gpu_compute_ms is not None
    assert two.gpu_compute_ms is not None
    assert two.gpu_compute_ms.median - one.gpu_compute_ms.median == gathers > 0  # the stand-in's cost of a Gather: 1 ms
    assert f"{two.gpu_compute_ms.median / one.gpu_compute_ms.median:.1%}" in done.out
    assert "GPU time, trtexec fp16, NVIDIA Tegra X2" in done.out
    assert left_behind() == before


@needs_sshd
def test_a_sweep_on_the_jetson_and_a_budget_of_its_time(tmp_path: Path, tx2: str) -> None:
    save(conv_net(channels=16), tmp_path / "net.onnx")
    table = tmp_path / "table.json"
    done = gconv("bench", tmp_path / "net.onnx", "--runner", "trtexec", "--host", tx2, "--sweep", "--timing-out", table)
    assert done.code == 0, done.err
    bench = json.loads(table.read_text(encoding="utf-8"))["bench"]
    assert (bench["runner"], bench["host"], bench["device"]) == ("trtexec", tx2, "NVIDIA Tegra X2")
    # To the stand-in all layers are alike, so no grouping saves time there: all that can be had is what is there.
    done = gconv("plan", tmp_path / "net.onnx", "--max-latency", "100%", "--timing", table, "-o", tmp_path / "p.json")
    assert done.code == 0, done.err
    assert "predicted on trtexec" in done.err
    done = gconv("plan", tmp_path / "net.onnx", "--max-latency", "50%", "--timing", table, "-o", tmp_path / "p.json")
    assert done.code == 1
    assert "even the smallest model needs 5.0000 ms" in done.err


@needs_sshd
def test_a_sweep_logs_in_once_and_goes_on_where_it_was(tmp_path: Path, tx2: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    save(conv_net(channels=16), tmp_path / "net.onnx")
    log = next(tmp_path_factory.getbasetemp().glob(f"jetson*/server-{tx2.rpartition(':')[2]}.log"))
    asked = ("bench", tmp_path / "net.onnx", "--runner", "trtexec", "--host", tx2, "--sweep", "--timing-out", tmp_path / "t.json")
    before = log.read_text().count("Accepted publickey")
    assert gconv(*asked).code == 0
    assert log.read_text().count("Accepted publickey") - before == 1
    table = json.loads((tmp_path / "t.json").read_text(encoding="utf-8"))
    widths = {row["input"][1] for row in table["layers"]}
    assert min(widths) < max(widths) == 16  # widths are timed there as well as groups
    # What is missing is all that is timed again.
    (tmp_path / "t.json").write_text(json.dumps({**table, "layers": table["layers"][:2]}), encoding="utf-8")
    assert gconv(*asked).code == 0
    again = json.loads((tmp_path / "t.json").read_text(encoding="utf-8"))
    assert again["layers"][:2] == table["layers"][:2]
    assert len(again["layers"]) == len(table["layers"])


@needs_sshd
def test_a_model_with_external_data_goes_whole(tmp_path: Path, tx2: str) -> None:
    save_external(conv_net(), tmp_path / "net.onnx")
    done = gconv(
        "bench", tmp_path / "net.onnx", "--runner", "ort-cpu", "--host", tx2, "--python", sys.executable, "--seconds", "0.1"
    )
    assert done.code == 0, done.err


@needs_sshd
def test_int8_on_a_tx2_is_refused_with_the_reason(tmp_path: Path, tx2: str) -> None:
    save(conv_net(), tmp_path / "net.onnx")
    done = gconv("bench", tmp_path / "net.onnx", "--runner", "trtexec", "--host", tx2, "--precision", "int8")
    assert done.code == 1
    assert "(compute capability 6.2) has no int8 arithmetic" in done.err
    assert "fp16" in done.err


@needs_sshd
def test_a_build_that_fails_there_is_told_in_trtexecs_words(tmp_path: Path, tx2: str) -> None:
    save(conv_net(), tmp_path / "unsupported.onnx")
    before = left_behind()
    done = gconv("bench", tmp_path / "unsupported.onnx", "--runner", "trtexec", "--host", tx2, "--timing-out", tmp_path / "t.json")
    assert done.code == 1
    assert "trtexec could not build an engine of '0/unsupported.onnx'" in done.err
    assert "Sharpen" in done.err
    assert "onnx-gconv export --target tx2" in done.err
    assert not (tmp_path / "t.json").exists()
    assert left_behind() == before


@needs_sshd
def test_a_connection_that_is_lost_in_the_middle_is_an_error(tmp_path: Path, tx2: str) -> None:
    save(conv_net(), tmp_path / "lost.onnx")
    done = gconv("bench", tmp_path / "lost.onnx", "--runner", "trtexec", "--host", tx2, "--timing-out", tmp_path / "t.json")
    assert done.code == 1
    assert "cannot run the runner trtexec on" in done.err
    assert "the connection was lost" in done.err
    assert not (tmp_path / "t.json").exists()


@needs_sshd
def test_a_host_without_trtexec_says_so(tmp_path: Path, jetson: Callable[..., str]) -> None:
    if any(Path(place).exists() for place in ("/usr/src/tensorrt/bin/trtexec", "/usr/local/tensorrt/bin/trtexec")):
        pytest.skip("this machine has trtexec")
    save(conv_net(), tmp_path / "net.onnx")
    host = jetson(path=f"{Path(sys.executable).parent}:/usr/bin:/bin")
    done = gconv("bench", tmp_path / "net.onnx", "--runner", "trtexec", "--host", host)
    assert done.code == 1
    assert "there is no trtexec on the PATH" in done.err
    assert "JetPack" in done.err


@needs_sshd
def test_a_host_without_python_says_so(tmp_path: Path, tx2: str) -> None:
    save(conv_net(), tmp_path / "net.onnx")
    done = gconv("bench", tmp_path / "net.onnx", "--runner", "trtexec", "--host", tx2, "--python", "python9")
    assert done.code == 1
    assert "has no 'python9'" in done.err
    assert "--python" in done.err


@needs_sshd
def test_a_host_that_cannot_be_reached_is_an_error(tmp_path: Path, tx2: str) -> None:
    save(conv_net(), tmp_path / "net.onnx")
    done = gconv("bench", tmp_path / "net.onnx", "--runner", "trtexec", "--host", f"ssh://nobody@127.0.0.1:{free_port()}")
    assert done.code == 1
    assert "Connection refused" in done.err
    assert "must work without a password" in done.err


@needs_sshd
def test_a_host_that_wants_a_password_is_an_error_and_not_a_prompt(tmp_path: Path, tx2: str) -> None:
    save(conv_net(), tmp_path / "net.onnx")
    done = gconv("bench", tmp_path / "net.onnx", "--runner", "trtexec", "--host", tx2.replace(getpass.getuser(), "nobody"))
    assert done.code == 1
    assert "Permission denied" in done.err
