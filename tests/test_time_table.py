"""Times at widths that nobody measured, tables kept on disk, the probed block, and a fair start for models with listed inputs."""

import json
import runpy
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_latency_budget import ToyDevice, network_of, swept
from tiny import conv_net, gconv

import onnx_gconv
from onnx_gconv import timing
from onnx_gconv.deploy.block import SIZES, block_of
from onnx_gconv.deploy.convs import corners, find_swept
from onnx_gconv.deploy.machine import bench_here
from onnx_gconv.deploy.sweep import Gauge, probed, sweep, times_of
from onnx_gconv.deploy.time_cache import SWITCH, cache_file
from onnx_gconv.deploy.time_table import TimeTable, read_table, write_table
from onnx_gconv.deploy.timing_file import Timing
from onnx_gconv.model.listed import delisted, listed_initializers
from onnx_gconv.pipeline.original import open_original
from onnx_gconv.runtime import random_feeds, run, session
from onnx_gconv.search.width_times import DenseTime, DepthwiseTime, GroupedTime

# Interpolation

AXIS = (16, 32, 64)
grids = st.lists(st.floats(1, 1e6), min_size=9, max_size=9)


def grid(values: Sequence[float]) -> DenseTime:
    places = [(ins, outs) for ins in AXIS for outs in AXIS]
    return DenseTime(dict(zip(places, values, strict=True)), 16)


@settings(deadline=None)
@given(grids)
def test_times_never_fall_when_a_width_grows_and_the_dense_one_is_as_measured(values: list[float]) -> None:
    time = grid(values)
    seen = np.array([[time.nanoseconds(ins, outs, 1) for outs in range(1, 65)] for ins in range(1, 65)])
    assert (np.diff(seen, axis=0) >= 0).all()
    assert (np.diff(seen, axis=1) >= 0).all()
    assert seen[-1, -1] == round(values[-1])


def test_interpolation_is_exact_at_measured_widths_and_ragged_ones_take_as_long_as_the_next_multiple() -> None:
    time = DenseTime({(ins, outs): 10.0 * ins * outs for ins in AXIS for outs in AXIS}, 16)
    for ins in AXIS:
        for outs in AXIS:
            assert time.nanoseconds(ins, outs, 1) == 10 * ins * outs
    assert time.nanoseconds(48, 48, 1) == 10 * 48 * 48  # a product of widths is bilinear
    assert time.nanoseconds(33, 17, 1) == time.nanoseconds(48, 32, 1)
    assert time.nanoseconds(1, 1, 1) == 10 * 16 * 16  # nothing is known below


def test_a_depthwise_conv_has_one_width() -> None:
    time = DepthwiseTime({16: 100.0, 64: 400.0}, 16)
    assert [time.nanoseconds(k, k, k) for k in (16, 30, 32, 64)] == [100, 200, 200, 400]


def test_groups_follow_the_dense_conv_and_unmeasured_ones_save_no_more_than_fewer_do() -> None:
    dense = DenseTime({(ins, outs): 10.0 * ins * outs for ins in AXIS for outs in AXIS}, 16)
    time = GroupedTime(dense, 1, {2: {(64, 64): 22_000.0, (32, 32): 6_000.0}})
    assert time.nanoseconds(64, 64, 2) == 22_000
    assert time.nanoseconds(32, 32, 2) == 6_000
    assert time.nanoseconds(32, 16, 2) == 3_000  # in proportion below
    assert time.nanoseconds(64, 64, 4) == 22_000
    assert time.nanoseconds(64, 64, 1) == 40_960


def test_the_corners_of_a_side_are_multiples_of_the_step_and_all_of_it() -> None:
    assert corners(256, 16, is_open=True) == [16, 64, 128, 256]
    assert corners(24, 16, is_open=True) == [16, 24]
    assert corners(3, 16, is_open=True) == [3]
    assert corners(256, 16, is_open=False) == [256]


# The sweep


def separable() -> onnx.ModelProto:
    """Return 8 channels that become 32, a depthwise Conv, and 8 channels again."""
    shapes = {"w1": (32, 8, 1, 1), "w2": (32, 1, 1, 1), "w3": (8, 32, 1, 1)}
    nodes = [
        onnx.helper.make_node("Conv", ["x", "w1"], ["a"]),
        onnx.helper.make_node("Conv", ["a", "w2"], ["b"], group=32),
        onnx.helper.make_node("Relu", ["b"], ["c"]),
        onnx.helper.make_node("Conv", ["c", "w3"], ["y"]),
    ]
    ends = [onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, (1, 8, 6, 6)) for name in "xy"]
    weights = [onnx.numpy_helper.from_array(np.ones(shape, np.float32), name) for name, shape in shapes.items()]
    graph = onnx.helper.make_graph(nodes, "g", ends[:1], ends[1:], weights)
    return onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 17)], ir_version=8)


SEPARABLE = separable()


def test_depthwise_convs_are_timed_with_their_space(tmp_path: Path) -> None:
    network = network_of(SEPARABLE)
    assert [(conv.name, conv.is_depthwise) for conv in find_swept(SEPARABLE, network)] == [("a", False), ("b", True), ("y", False)]
    times = times_of(swept(SEPARABLE, tmp_path / "t.json", ToyDevice(), block=8), SEPARABLE, network, path=tmp_path)
    assert all(times.covers(name) for name in "aby")
    assert times.layer_ns("b", 32, 32, 32) - times.layer_ns("b", 16, 16, 16) == 16_000  # a weight is a microsecond to the toy
    assert times.layer_ns("y", 32, 8, 1) - times.layer_ns("y", 24, 8, 1) == 64_000


def test_a_table_of_before_knows_groups_and_no_widths(tmp_path: Path) -> None:
    model, path = conv_net(channels=16), tmp_path / "t.json"
    made = swept(model, path, ToyDevice())
    dense = {shape: times for shape, times in made.layers.items() if shape.input[1] == shape.out_channels == 16}
    bench = replace(made.bench, runtime=None, instructions=None)
    write_table(replace(made, bench=bench, layers=dense, block=None), path)
    data = json.loads(path.read_text(encoding="utf-8"))
    assert "block" not in data
    for name in ("runtime", "instructions"):
        del data["bench"][name]
    path.write_text(json.dumps(data), encoding="utf-8")
    times = times_of(read_table(path), model, network_of(model), path=path)
    assert times.layer_ns("c2", 16, 16, 2) < times.layer_ns("c2", 16, 16, 1) == times.layer_ns("c2", 8, 8, 1)


# The block


@pytest.mark.parametrize(
    ("times", "block"),
    [
        ((109, 62, 44, 83, 69), 16),  # AVX-512, measured
        ((110, 70, 50, 36, 80), 8),
        ((110, 80, 64, 55, 50), 1),  # no blocked layout
        ((100, 70, 50, 61, 60), 1),  # no clear jump
    ],
)
def test_the_block_is_where_less_work_takes_more_time(tmp_path: Path, times: tuple[int, ...], block: int) -> None:
    assert block_of(dict(zip(SIZES, times, strict=True))) == block
    toy = ToyDevice()

    def measure(models: Sequence[onnx.ModelProto]) -> list[Timing]:
        plain = toy.measure(models)
        spread = plain[0].latency_ms
        assert spread is not None
        return [plain[0], *(replace(each, latency_ms=replace(spread, min=ms)) for each, ms in zip(plain[1:], times, strict=True))]

    path = tmp_path / "t.json"
    assert probed(path, Gauge(measure, None, None)).block == block
    assert probed(path, Gauge(measure, None, None)).block == block
    assert len(toy.calls) == 1, "it is in the file"


def test_the_runner_and_this_package_see_the_same_machine() -> None:
    runner = runpy.run_path(str(Path(__file__).parent.parent / "runners/ort.py"))
    assert bench_here("fp32", 1).instructions == runner["instructions"]()


# The cache


def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Callable[[], TimeTable]]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv(SWITCH, raising=False)
    bench = bench_here("fp32", 1)
    path = cache_file(bench)
    assert path is not None
    assert path.is_relative_to(tmp_path / "onnx-gconv" / "times")
    assert bench.runtime is not None
    assert bench.runtime.split()[1] in path.name
    assert str(bench.instructions) in path.name

    def fill() -> TimeTable:
        made = replace(swept(conv_net(), tmp_path / "toy.json", ToyDevice()), bench=bench)
        write_table(made, path)
        return made

    return path, fill


def test_kept_times_are_found_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, fill = kept(tmp_path, monkeypatch)
    made = fill()
    assert cache_file(bench_here("fp32", 1)) == path
    assert read_table(path) == made
    assert cache_file(bench_here("fp32", 2)) != path


@pytest.mark.parametrize("text", ["", "{", "[]", '{"format": 9}'])
def test_a_broken_cache_is_no_error_and_goes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    path, _ = kept(tmp_path, monkeypatch)
    path.write_text(text, encoding="utf-8")
    assert cache_file(bench_here("fp32", 1)) == path
    assert not path.exists()


def test_times_of_another_version_are_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, fill = kept(tmp_path, monkeypatch)
    made = fill()
    write_table(replace(made, bench=replace(made.bench, runtime="onnxruntime 0.1")), path)
    assert cache_file(bench_here("fp32", 1)) == path
    assert not path.exists()


def test_the_cache_can_be_switched_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept(tmp_path, monkeypatch)
    monkeypatch.setenv(SWITCH, "off")
    assert cache_file(bench_here("fp32", 1)) is None


def test_an_interrupted_table_is_resumed(tmp_path: Path) -> None:
    toy, path, model = ToyDevice(), tmp_path / "t.json", conv_net(channels=32)
    whole = swept(model, tmp_path / "whole.json", ToyDevice())

    def interrupted(models: Sequence[onnx.ModelProto]) -> list[Timing]:
        if len(toy.calls) == 3:
            raise KeyboardInterrupt
        return toy.measure(models)

    with pytest.raises(KeyboardInterrupt):
        sweep(model, network_of(model), path, device=Gauge(interrupted, None, 1), progress=lambda *_: None)
    begun = read_table(path)
    assert 0 < len(begun.layers) < len(whole.layers) or not begun.gathers
    assert swept(model, path, toy) == whole


# A fair start


def listed(ir_version: int) -> onnx.ModelProto:
    model = conv_net()
    model.graph.input.extend(onnx.helper.make_tensor_value_info(t.name, t.data_type, t.dims) for t in model.graph.initializer)
    model.ir_version = ir_version
    return model


@pytest.mark.parametrize("ir_version", [3, 8])
def test_listed_initialisers_leave_the_inputs_and_nothing_else_changes(ir_version: int) -> None:
    model = listed(ir_version)
    before = model.SerializeToString()
    fair = delisted(model)
    assert model.SerializeToString() == before
    assert [value.name for value in fair.graph.input] == ["image"]
    assert fair.ir_version == max(4, ir_version)
    feeds = random_feeds(model, network_of(model).input_shapes, np.random.default_rng(0))
    one, two = run(session(model), feeds), run(session(fair), feeds)
    assert all(np.array_equal(np.asarray(one[name]), np.asarray(two[name])) for name in one)
    assert delisted(fair) is fair


@pytest.mark.parametrize("ir_version", [3, 8])
def test_the_written_model_lists_none_and_the_command_says_so(tmp_path: Path, ir_version: int) -> None:
    onnx.save(listed(ir_version), str(tmp_path / "net.onnx"))
    done = gconv("compress", tmp_path / "net.onnx", "--groups", "2", "-o", tmp_path / "out.onnx")
    assert done.code == 0, done.err
    assert "initialisers are also listed as inputs" in done.err
    written = onnx.load(str(tmp_path / "out.onnx"))
    assert listed_initializers(written) == []
    assert written.ir_version == max(4, ir_version)
    assert onnx_gconv.verify(tmp_path / "out.onnx", tmp_path / "out.onnx").passed


def test_both_sides_of_a_timing_are_without(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[onnx.ModelProto] = []
    real = timing.session

    def watched(model: onnx.ModelProto, *, threads: int = 0) -> object:
        seen.append(model)
        return real(model, threads=threads)

    monkeypatch.setattr(timing, "session", watched)
    model = listed(8)
    feeds = random_feeds(model, network_of(model).input_shapes, np.random.default_rng(0))
    timing.compare_latency(model, conv_net(), feeds, seconds=0.01)
    assert [listed_initializers(each) for each in seen] == [[], []]


def test_an_original_knows_how_many_were_listed() -> None:
    assert open_original(listed(8)).listed == len(conv_net().graph.initializer)
    assert open_original(conv_net()).listed == 0
