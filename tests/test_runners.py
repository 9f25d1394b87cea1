"""The runners: what they read of NVIDIA's and ONNX Runtime's output, the flags they choose, and what they refuse."""

import ast
import hashlib
import importlib.util
import json
import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import onnx
import pytest
from tiny import conv_net, save, with_custom_op

from onnx_gconv.deploy.timing_file import Timing, from_json, read_timing

RUNNERS = Path(__file__).parents[1] / "runners"
LOGS = Path(__file__).parents[2] / "shared" / "facts" / "trtexec-logs"
STANDIN = Path(__file__).with_name("standin_trtexec.py")
FILES = sorted(RUNNERS.glob("*.py"))
needs_logs = pytest.mark.skipif(not LOGS.exists(), reason="the real logs of ../shared are not here")
needs_rtx = pytest.mark.skipif(importlib.util.find_spec("tensorrt_rtx") is None, reason="tensorrt-rtx-cu12 is not installed")

# Written by hand in the forms of 8.2 (one percentile, end-to-end line) and 10 (three percentiles, warnings).
SUMMARY_8_2 = """\
[11/16/2026-12:00:00] [I] === Performance summary ===
[11/16/2026-12:00:00] [I] Throughput: 50.5 qps
[11/16/2026-12:00:00] [I] Latency: min = 19 ms, max = 23 ms, mean = 20.5 ms, median = 20 ms, percentile(99%) = 22.5 ms
[11/16/2026-12:00:00] [I] End-to-End Host Latency: min = 19.1 ms, max = 23 ms, mean = 21 ms, median = 20.5 ms
[11/16/2026-12:00:00] [I] GPU Compute Time: min = 18 ms, max = 22 ms, mean = 19.5 ms, median = 19 ms, percentile(99%) = 21.5 ms
[11/16/2026-12:00:00] [I] Total Host Walltime: 3.01 s
"""
SUMMARY_10 = """\
[11/16/2026-12:00:00] [I] === Performance summary ===
[11/16/2026-12:00:00] [I] Throughput: 500 qps
[11/16/2026-12:00:00] [I] Latency: min = 1 ms, max = 3 ms, mean = 2 ms, median = 1.9 ms, percentile(90%) = 2.5 ms, \
percentile(95%) = 2.75 ms, percentile(99%) = 2.9 ms
[11/16/2026-12:00:00] [I] GPU Compute Time: min = 0.9 ms, max = 2e+00 ms, mean = 1.5 ms, median = 1.4 ms, percentile(99%) = 2 ms
[11/16/2026-12:00:00] [W] * GPU compute time is unstable, with coefficient of variance = 5%.
"""


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"runner_{name}", RUNNERS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


trtexec = load("trtexec")


def run(runner: str, *arguments: str | Path, **environment: str) -> "subprocess.CompletedProcess[str]":
    """Run a runner as a user of the target would."""
    command = [sys.executable, str(RUNNERS / f"{runner}.py"), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, **environment}, timeout=120)


@pytest.fixture
def standin(tmp_path: Path) -> Path:
    """Return a folder with a trtexec to put on the PATH."""
    folder = tmp_path / "bin"
    folder.mkdir()
    program = folder / "trtexec"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} {STANDIN} "$@"\n')
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    return folder


# What holds for all of them


def test_the_tx2_runner_is_python_3_6_with_the_standard_library_only() -> None:
    text = (RUNNERS / "trtexec.py").read_text(encoding="utf-8")
    tree = ast.parse(text, feature_version=(3, 6))
    names = {alias.name.split(".")[0] for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    names |= {str(node.module).split(".")[0] for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert names <= sys.stdlib_module_names


def test_the_tx2_runner_calls_nothing_that_python_3_6_lacks() -> None:
    pytest.importorskip("vermin", reason="vermin, of the dev extra, is not installed")
    start = [sys.executable, "-c", "from vermin import main; main()"]
    command = [*start, "--no-tips", "-t=3.6-", "--violations", str(RUNNERS / "trtexec.py")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def definitions(path: Path) -> dict[str, str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    found = [node for node in tree.body if isinstance(node, (ast.FunctionDef, ast.ClassDef))]
    return {node.name: ast.unparse(node) for node in found}


def test_what_two_runners_share_is_the_same_in_both() -> None:
    # Each is one self-contained file, so they cannot share code but by copies; `main`, `measure` and such are their own.
    own = {"main", "measure", "time_each", "profile", "timing", "kind_of", "run", "random_feeds"}
    all_of_them = [definitions(path) for path in FILES]
    shared = {name for one in all_of_them for other in all_of_them if one is not other for name in one.keys() & other.keys()} - own
    assert {"model_facts", "spread", "write_timings", "parse_shapes", "build", "in_child"} <= shared
    for name in shared:
        assert len({found[name] for found in all_of_them if name in found}) == 1, name
    assert definitions(RUNNERS / "trtexec.py")["kind_of"] == definitions(RUNNERS / "tensorrt_api.py")["kind_of"]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_model_that_is_not_there_is_one_sentence_and_exit_code_1(path: Path, tmp_path: Path, standin: Path) -> None:
    place = f"{standin}{os.pathsep}{os.environ['PATH']}"
    done = run(path.stem, tmp_path / "missing.onnx", "-o", tmp_path / "t.json", PATH=place)
    assert done.returncode == 1
    assert done.stderr.startswith("error: ")
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "t.json").exists()


def test_opset_and_ir_version_are_read_without_the_onnx_package(tmp_path: Path) -> None:
    model = with_custom_op(conv_net(), "r1")  # a second domain, which does not count
    save(model, tmp_path / "m.onnx")
    facts = trtexec.model_facts(tmp_path / "m.onnx")
    assert (facts["opset"], facts["ir_version"]) == (17, 8)
    assert facts["sha256"] == hashlib.sha256((tmp_path / "m.onnx").read_bytes()).hexdigest()


def test_the_spread_of_one_to_a_hundred() -> None:
    spread = trtexec.spread([float(number) for number in range(100, 0, -1)])
    assert spread == {"min": 1, "mean": 50.5, "median": 50.5, "p90": 90, "p95": 95, "p99": 99, "max": 100}


# trtexec: parsing


@pytest.mark.parametrize(
    ("number", "version"), [(8201, (8, 2, 1)), (8503, (8, 5, 3)), (100900, (10, 9, 0)), (101300, (10, 13, 0)), (110000, (11, 0, 0))]
)
def test_versions_in_the_banner(number: int, version: tuple[int, int, int]) -> None:
    assert trtexec.parse_version(f"&&&& RUNNING TensorRT.trtexec [TensorRT v{number}] # trtexec --help") == version


def test_a_trtexec_before_8_2_is_refused() -> None:
    with pytest.raises(trtexec.RunnerError, match=r"8\.0\.1 is too old"):
        trtexec.parse_version("[TensorRT v8001]")


def test_the_summary_of_8_2() -> None:
    summary, throughput, warnings = trtexec.parse_summary(SUMMARY_8_2)
    assert throughput == 50.5
    assert summary["GPU Compute Time"] == {"min": 18, "max": 22, "mean": 19.5, "median": 19, "p99": 21.5}
    assert trtexec.summary_spread(summary["Latency"]) == {
        "min": 19,
        "mean": 20.5,
        "median": 20,
        "p90": None,
        "p95": None,
        "p99": 22.5,
        "max": 23,
    }
    assert warnings == []


def test_the_summary_of_10() -> None:
    summary, throughput, warnings = trtexec.parse_summary("an earlier line\n" + SUMMARY_10)
    assert (throughput, summary["Latency"]["p95"], summary["GPU Compute Time"]["max"]) == (500, 2.75, 2)
    assert warnings == ["GPU compute time is unstable, with coefficient of variance = 5%."]


def test_a_log_without_a_summary_is_refused() -> None:
    with pytest.raises(trtexec.RunnerError, match="no performance summary"):
        trtexec.parse_summary("[I] Starting inference\n")


@needs_logs
@pytest.mark.parametrize(
    ("file", "version", "qps", "median", "p95"),
    [
        ("trtexec_8.2.1_jetson_fp32.log", (8, 2, 1), 11.0613, 90.0183, None),
        ("trtexec_10.9_resnet50.log", (10, 9, 0), 691.435, 1.39775, 1.67834),
        ("trtexec_10.13_bf16.log", (10, 13, 0), 0.562059, 1667.19, 1673.94),
    ],
)
def test_real_logs(file: str, version: tuple[int, ...], qps: float, median: float, p95: float | None) -> None:
    text = (LOGS / file).read_text(encoding="utf-8")
    summary, throughput, _ = trtexec.parse_summary(text)
    assert trtexec.parse_version(text) == version
    assert throughput == qps
    assert summary["GPU Compute Time"]["median"] == median
    assert summary["GPU Compute Time"].get("p95") == p95


@needs_logs
def test_the_real_jetson_log_names_device_and_shapes() -> None:
    text = (LOGS / "trtexec_8.2.1_jetson_fp32.log").read_text(encoding="utf-8")
    assert trtexec.parse_device(text) == ("NVIDIA Tegra X1", "5.3")
    assert trtexec.parse_shapes_made(text) == {"input": [1, 3, 288, 800]}


@needs_logs
def test_the_real_profile_and_times() -> None:
    profile = trtexec.parse_profile((LOGS / "trex_resnet_a100_fp16.profile.json").read_text(encoding="utf-8"))
    kinds = [kind for _, kind, _ in profile]
    assert profile[0] == ("Reformatting CopyNode for Input Tensor 0 to Conv_0 + Relu_1", "reformat", 0.080896)
    assert profile[1] == ("Conv_0 + Relu_1", "conv", 0.111616)
    assert (kinds.count("conv"), kinds.count("gather")) == (20, 0)
    rows = trtexec.parse_times((LOGS / "trex_resnet_a100_fp16.timing.json").read_text(encoding="utf-8"), 200)
    assert len(rows) == 40  # 8.4 leaves out the warm-up itself: the first rows, early as they are, count
    assert trtexec.spread([row["computeMs"] for row in rows])["median"] == pytest.approx(0.8438, abs=1e-3)


def test_warm_up_queries_are_dropped_in_the_form_of_8_2_only() -> None:
    rows = [{"startComputeMs": start, "computeMs": 1.0, "latencyMs": 1.5} for start in (0.0, 199.0, 200.0, 300.0)]
    assert len(trtexec.parse_times(json.dumps(rows), 200)) == 4
    old = [{**row, "endToEndMs": 2.0} for row in rows]
    assert [row["startComputeMs"] for row in trtexec.parse_times(json.dumps(old), 200)] == [200, 300]


@pytest.mark.parametrize(("median", "expected"), [("", 2.0), (' "medianMs" : 1.5,', 1.5)], ids=["8.2", "8.4 and 10"])
def test_profiles_with_names_that_are_not_escaped(median: str, expected: float) -> None:
    row = f', {{ "name" : "a \\ "b", conv", "timeMs" : 20, "averageMs" : 2,{median} "percentage" : 100 }}'
    assert trtexec.parse_profile(f'[\n  {{ "count" : 10 }}\n{row}\n]') == [('a \\ "b", conv', "conv", expected)]


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("/layer1/conv1/Conv + /layer1/relu/Relu", "conv"),
        ("/layer1/conv1/Conv_in_gather", "gather"),
        ("Reformatting CopyNode for Output Tensor 0 to /conv1/Conv_out_gather", "reformat"),
        ("/gather/conv2/Conv", "conv"),
        ("(Unnamed Layer* 3) [Gather]", "gather"),
        ("PWN(/relu/Relu)", "other"),
    ],
)
def test_kinds_of_layers(name: str, kind: str) -> None:
    assert trtexec.kind_of(name) == kind


# trtexec: running


def timed(tmp_path: Path, standin: Path, version: int, *flags: str, capability: str = "8.6") -> Timing:
    save(conv_net(), tmp_path / "m.onnx")
    place = f"{standin}{os.pathsep}{os.environ['PATH']}"
    environment = {"PATH": place, "STANDIN_VERSION": str(version), "STANDIN_CAPABILITY": capability}
    done = run("trtexec", tmp_path / "m.onnx", "-o", tmp_path / "t.json", *flags, **environment)
    assert done.returncode == 0, done.stderr
    return read_timing(tmp_path / "t.json")


@pytest.mark.parametrize("version", [8201, 8401, 8501, 8601, 100900, 101300, 110000])
def test_every_version_is_given_flags_that_it_knows(tmp_path: Path, standin: Path, version: int) -> None:
    timing = timed(tmp_path, standin, version)
    assert timing.runner == "trtexec"
    assert timing.versions["tensorrt"] == ".".join(map(str, trtexec.parse_version(f"[TensorRT v{version}]")))
    assert timing.gpu_compute_ms is not None
    assert timing.latency_ms is not None
    # 5 ms, not the 15 ms of the stand-in's warm-up: that is left out in 8.2's file, too.
    assert (timing.gpu_compute_ms.max, timing.latency_ms.p95) == (5, 5.5)
    assert timing.summary == {"conv_ms": 3, "gather_ms": 0, "reformat_ms": 0.5, "other_ms": 0.25}
    assert timing.shapes == {"image": (1, 3, 8, 8)}
    assert sum(layer.share or 0 for layer in timing.layers) == pytest.approx(1)


@pytest.mark.parametrize("version", [8201, 101300])
def test_fp16_is_a_flag_up_to_10(tmp_path: Path, standin: Path, version: int) -> None:
    assert timed(tmp_path, standin, version, "--precision", "fp16").precision == "fp16"


def test_fp16_on_11_needs_a_model_that_has_it(tmp_path: Path, standin: Path) -> None:
    assert timed(tmp_path, standin, 110000, "--precision", "fp16", "--typed").precision == "fp16"
    place = f"{standin}{os.pathsep}{os.environ['PATH']}"
    done = run("trtexec", tmp_path / "m.onnx", "-o", "x", "--precision", "fp16", PATH=place, STANDIN_VERSION="110000")
    assert done.returncode == 1
    assert "takes the precision from the model's own types" in done.stderr


def test_int8_is_refused_on_a_tx2_before_the_build_is_done(tmp_path: Path, standin: Path) -> None:
    save(conv_net(), tmp_path / "m.onnx")
    place = f"{standin}{os.pathsep}{os.environ['PATH']}"
    done = run("trtexec", tmp_path / "m.onnx", "-o", tmp_path / "t.json", "--precision", "int8", PATH=place)
    assert done.returncode == 1
    assert "compute capability 6.2" in done.stderr
    assert "has no int8 arithmetic" in done.stderr
    assert timed(tmp_path, standin, 8601, "--precision", "int8").precision == "int8"


def test_a_flag_that_trtexec_does_not_know_is_reported(tmp_path: Path, standin: Path) -> None:
    tool = trtexec.Trtexec(str(standin / "trtexec"), 60)
    with pytest.raises(trtexec.RunnerError, match="Unknown option: --memPoolSize") as caught:
        tool.run(["--onnx=m.onnx", "--memPoolSize=workspace:64"], "build")
    assert "does not know a flag" in caught.value.hint


@pytest.mark.slow
def test_a_trtexec_that_hangs_is_stopped(tmp_path: Path) -> None:
    program = tmp_path / "trtexec"
    program.write_text("#!/bin/sh\necho '&&&& RUNNING TensorRT.trtexec [TensorRT v8201]'\nexec sleep 60\n")
    program.chmod(0o755)
    with pytest.raises(trtexec.RunnerError, match=r"stopped after 0 seconds|stopped after 1 seconds"):
        trtexec.Trtexec(str(program), 0.5)


# ONNX Runtime


def test_ort_times_two_models_in_turns(tmp_path: Path) -> None:
    first, second = save(conv_net(), tmp_path / "a.onnx"), save(conv_net(channels=16), tmp_path / "b.onnx")
    done = run("ort", first, second, "-o", tmp_path / "t.json", "--seconds", "0.1", "--shapes", "image:2x3x8x8")
    assert done.returncode == 0, done.stderr
    one, two = read_timing(tmp_path / "t.json"), read_timing(tmp_path / "t.2.json")
    assert (one.runner, one.device["threads"], one.shapes) == ("ort-cpu", 1, {"image": (2, 3, 8, 8)})
    assert one.run["iterations"] == two.run["iterations"]  # turn by turn
    assert one.latency_ms is not None
    assert one.layer_counts()["conv"] == 3
    parts = [value for value in one.summary.values() if value is not None]
    assert sum(parts) == pytest.approx(one.latency_ms.median)


def test_ort_names_the_input_with_dynamic_axes(tmp_path: Path) -> None:
    save(conv_net(size="S"), tmp_path / "m.onnx")
    done = run("ort", tmp_path / "m.onnx", "-o", tmp_path / "t.json")
    assert done.returncode == 1
    assert "input 'image'" in done.stderr
    assert "--shapes image:" in done.stderr


def test_a_provider_that_fell_back_is_an_error(tmp_path: Path) -> None:
    runner = load("ort")
    session = SimpleNamespace(get_providers=lambda: ["CPUExecutionProvider"])
    fake = SimpleNamespace(
        __version__="1.31.1",
        get_available_providers=lambda: ["CUDAExecutionProvider", "CPUExecutionProvider"],
        SessionOptions=SimpleNamespace,
        InferenceSession=lambda path, options, providers: session,
    )
    with pytest.raises(runner.RunnerError, match="CUDAExecutionProvider could not start; ONNX Runtime fell back to CPU"):
        runner.open_session(fake, "m.onnx", SimpleNamespace(provider="cuda", threads=1))


def test_nodes_of_an_ort_profile() -> None:
    runner = load("ort")
    ops = [("a", "Conv"), ("b", "Gather"), ("c", "ReorderOutput"), ("d", "FusedConv"), ("e", "Relu")]
    events = [
        {"cat": "Node", "name": f"{name}_kernel_time", "dur": 1000 * (run + 1), "args": {"op_name": op, "provider": "P"}}
        for run in range(runner.WARM_UP + 3)
        for name, op in ops
    ]
    events += [{"cat": "Node", "name": "a_fence_before", "dur": 9, "args": {"op_name": "Conv"}}, {"cat": "Session", "name": "x"}]
    layers, providers = runner.read_profile(events)
    assert [kind for _, kind, _ in layers] == ["conv", "gather", "reformat", "conv", "other"]
    assert {median for _, _, median in layers} == {runner.WARM_UP + 2}  # of the three runs behind the warm-up
    assert providers == {"P": 5}


# TensorRT's Python API


def test_without_a_driver_tensorrt_is_one_clear_sentence(tmp_path: Path) -> None:
    if shutil.which("nvidia-smi"):
        pytest.skip("this machine seems to have a GPU")
    save(conv_net(), tmp_path / "m.onnx")
    done = run("tensorrt_api", tmp_path / "m.onnx", "-o", tmp_path / "t.json")
    assert done.returncode == 1
    assert len(done.stderr.splitlines()) == 2  # error and hint
    assert "driver" in done.stderr


def test_a_crash_of_the_child_is_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    runner = load("tensorrt_api")
    crashing = tmp_path / "crash.py"
    crashing.write_text("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)")
    monkeypatch.setattr(runner, "__file__", str(crashing))
    with pytest.raises(runner.RunnerError, match=r"TensorRT crashed \(SIGSEGV\)"):
        runner.in_child([], "TensorRT")


class FakeCuda:
    """A GPU on which every run takes 2 ms."""

    def open(self) -> tuple[str, str]:
        return "NVIDIA Toy", "8.6"

    def call(self, name: str, *arguments: object) -> None:
        assert name in ("cuEventRecord", "cuEventSynchronize")

    def allocate(self, data: bytes) -> int:
        return len(data)

    def stream(self) -> SimpleNamespace:
        return SimpleNamespace(value=7)

    def event(self) -> object:
        return object()

    def elapsed_ms(self, start: object, end: object) -> float:
        return 2.0


class FakeTensorrt(ModuleType):
    """As much of TensorRT's Python API as the runner uses, as version 8.5 or 11 has it; the engine has an input and an output."""

    def __init__(self, version: str) -> None:
        super().__init__("tensorrt")
        is_old = version.startswith("8")
        self.__version__ = version
        self.asked: list[object] = []
        self.ILogger = type("ILogger", (), {"ERROR": 1, "INTERNAL_ERROR": 0, "__init__": lambda self: None})
        self.IProfiler = type("IProfiler", (), {"__init__": lambda self: None})
        self.TensorIOMode = SimpleNamespace(INPUT="input", OUTPUT="output")
        self.MemoryPoolType = SimpleNamespace(WORKSPACE="workspace")
        self.DataType = SimpleNamespace(FLOAT=SimpleNamespace(itemsize=4))
        self.NetworkDefinitionCreationFlag = SimpleNamespace(EXPLICIT_BATCH=0) if is_old else SimpleNamespace()
        self.BuilderFlag = SimpleNamespace(FP16="fp16", INT8="int8") if is_old else SimpleNamespace()
        self.Builder = lambda logger: SimpleNamespace(
            create_network=self.create_network,
            create_builder_config=lambda: SimpleNamespace(
                set_memory_pool_limit=lambda pool, size: self.asked.append((pool, size)),
                set_flag=self.asked.append,
                add_optimization_profile=self.asked.append,
            ),
            create_optimization_profile=lambda: SimpleNamespace(set_shape=lambda *shapes: self.asked.append(shapes)),
            build_serialized_network=lambda network, config: b"plan",
        )
        self.OnnxParser = lambda network, logger: SimpleNamespace(parse_from_file=lambda path: True)
        self.Runtime = lambda logger: SimpleNamespace(deserialize_cuda_engine=lambda plan: self)

    def create_network(self, flags: int) -> SimpleNamespace:
        self.asked.append(("flags", flags))
        return SimpleNamespace(num_inputs=1, get_input=lambda number: SimpleNamespace(name="image", shape=(-1, 3, 8, 8)))

    num_io_tensors = 2

    def get_tensor_name(self, number: int) -> str:
        return ("image", "scores")[number]

    def get_tensor_mode(self, name: str) -> str:
        return "input" if name == "image" else "output"

    def get_tensor_shape(self, name: str) -> tuple[int, ...]:
        return (-1, 3, 8, 8) if name == "image" else (-1, 4)

    def get_tensor_dtype(self, name: str) -> object:
        return self.DataType.FLOAT

    def create_execution_context(self) -> SimpleNamespace:
        shapes = {"image": (1, 3, 8, 8), "scores": (1, 4)}
        context = SimpleNamespace(profiler=None, set_input_shape=lambda name, shape: None, get_tensor_shape=shapes.__getitem__)

        def run(stream: int) -> bool:
            if context.profiler is not None:
                context.profiler.report_layer_time("Conv_0 + Relu_1", 1.5)
                context.profiler.report_layer_time("Conv_0_in_gather", 0.5)
            return True

        context.execute_async_v3 = run
        context.set_tensor_address = lambda name, address: self.asked.append((name, address))
        return context


@pytest.mark.parametrize("version", ["8.5.3", "11.0.0"])
def test_the_api_runner_measures_with_the_calls_of_each_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str
) -> None:
    runner, fake = load("tensorrt_api"), FakeTensorrt(version)
    monkeypatch.setitem(sys.modules, "tensorrt", fake)
    monkeypatch.setattr(runner, "Cuda", FakeCuda)
    save(conv_net(), tmp_path / "m.onnx")
    is_old = version.startswith("8")
    args = SimpleNamespace(
        models=[str(tmp_path / "m.onnx")],
        shapes=["image:1x3x8x8"],
        precision="fp16",
        typed=not is_old,
        workspace=64,
        seconds=0.01,
        profile=True,
    )
    timing = from_json(runner.measure(args)[0], "fake")
    assert timing.gpu_compute_ms is not None
    assert timing.gpu_compute_ms.median == 2
    assert timing.summary == {"conv_ms": 1.5, "gather_ms": 0.5, "reformat_ms": 0, "other_ms": 0}
    assert (timing.shapes, timing.device["compute_capability"]) == ({"image": (1, 3, 8, 8)}, "8.6")
    assert ("flags", 1 if is_old else 0) in fake.asked  # EXPLICIT_BATCH is asked for where it exists
    assert ("fp16" in fake.asked) == is_old
    assert ("workspace", 64 << 20) in fake.asked
    assert ("image", 3 * 8 * 8 * 4) in fake.asked  # the fake address is the size
    args.typed = False
    if not is_old:
        with pytest.raises(runner.RunnerError, match="takes the precision from the model's own types"):
            runner.measure(args)


@needs_rtx
def test_the_names_that_the_api_runner_uses_exist_today() -> None:
    # TensorRT-RTX has the API of TensorRT 10 and later: what is called only on a GPU can at least be looked up.
    import tensorrt_rtx as trt

    for owner, names in {
        trt.IExecutionContext: "execute_async_v3 set_tensor_address set_input_shape get_tensor_shape profiler",
        trt.ICudaEngine: "num_io_tensors get_tensor_name get_tensor_mode get_tensor_shape get_tensor_dtype",
        trt.Runtime: "deserialize_cuda_engine",
        trt.IBuilderConfig: "set_memory_pool_limit set_flag add_optimization_profile",
        trt.IProfiler: "report_layer_time",
        trt.DataType.FLOAT: "itemsize",
    }.items():
        assert all(hasattr(owner, name) for name in names.split()), owner
    assert trt.MemoryPoolType.WORKSPACE is not None
    assert trt.TensorIOMode.INPUT is not None


# TensorRT-RTX, really


@pytest.mark.slow
@needs_rtx
@pytest.mark.parametrize("gathers", ["free", "shared", "none"])
def test_engines_are_built_of_a_model_before_and_after_compression(tmp_path: Path, gathers: str) -> None:
    from tiny import gconv

    digits = RUNNERS.parent / "models" / "digits.onnx"
    small = tmp_path / "small.onnx"
    assert gconv("compress", digits, "--groups", "2", "--gathers", gathers, "-o", small).code == 0
    done = run("tensorrt_rtx", digits, small, "-o", tmp_path / "t.json", "--engines", tmp_path, "--shapes", "input:1x1x8x8")
    assert done.returncode == 0, done.stderr
    before, after = read_timing(tmp_path / "t.json"), read_timing(tmp_path / "t.2.json")
    assert before.latency_ms is None
    assert before.layer_counts()["conv"] == after.layer_counts()["conv"] == 15
    written = sum(node.op_type == "Gather" for node in onnx.load(str(small)).graph.node)
    assert after.layer_counts()["gather"] - before.layer_counts()["gather"] == written
    assert (tmp_path / "small.onnx.engine").stat().st_size > 0


@needs_rtx
def test_engines_are_built_of_two_more_models(tmp_path: Path) -> None:
    first, second = save(conv_net(channels=16), tmp_path / "a.onnx"), save(conv_net(channels=8, seed=1), tmp_path / "b.onnx")
    done = run("tensorrt_rtx", first, second, "-o", tmp_path / "t.json", "--shapes", "image:1x3x8x8")
    assert done.returncode == 0, done.stderr
    assert read_timing(tmp_path / "t.2.json").layer_counts()["conv"] == 3


@needs_rtx
def test_tensorrt_names_the_node_that_it_refuses(tmp_path: Path) -> None:
    save(with_custom_op(conv_net(), "r1"), tmp_path / "m.onnx")
    done = run("tensorrt_rtx", tmp_path / "m.onnx", "-o", tmp_path / "t.json", "--shapes", "image:1x3x8x8")
    assert done.returncode == 1
    assert "Sharpen" in done.stderr
    assert "Traceback" not in done.stderr
    done = run("tensorrt_rtx", save(conv_net(), tmp_path / "d.onnx"), "-o", tmp_path / "t.json")
    assert "input 'image'" in done.stderr
    assert "dynamic axes" in done.stderr
