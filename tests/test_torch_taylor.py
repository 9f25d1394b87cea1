"""The criterion `taylor`: against what ONNX Runtime gives with one kernel made smaller, and from the command line."""

import json
from pathlib import Path

import numpy as np
import onnx
import pytest
from tiny import conv_net, from_text, gconv, get_tensor, save, set_tensor

torch = pytest.importorskip("torch", reason="PyTorch is not installed: pip install 'onnx-gconv[torch]'")

from onnx_gconv.errors import DataError, ModelError  # noqa: E402
from onnx_gconv.model.network import Layer, read  # noqa: E402
from onnx_gconv.runtime import Feeds, run, session  # noqa: E402
from onnx_gconv.torch import taylor  # noqa: E402

pytestmark = pytest.mark.torch

SMALL = 1e-3  # by which share a kernel is made smaller, to see the outputs move


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def moves(model: onnx.ModelProto, layers: tuple[Layer, ...], *feeds: Feeds) -> dict[str, np.ndarray]:
    return taylor.kernel_moves(model, layers, feeds, shapes={}, seed=0, on_batch=lambda *_: None)


def derivative(model: onnx.ModelProto, layer: Layer, kernel: tuple[int, int], feeds: Feeds, output: str) -> np.ndarray:
    """Return how fast the output moves as a kernel is made larger: the difference of two runs."""
    weight = get_tensor(model, layer.weight).copy()

    def scaled(by: float) -> np.ndarray:
        other = onnx.ModelProto()
        other.CopyFrom(model)
        changed = weight.copy()
        changed[kernel] *= by
        set_tensor(other, layer.weight, changed)
        return np.asarray(run(session(other), feeds)[output], dtype=np.float64)

    return (scaled(1 + SMALL) - scaled(1 - SMALL)) / (2 * SMALL)


def one_number(groups: int, rng: np.random.Generator) -> onnx.ModelProto:
    text = f"""g (float[N,4,5,5] x) => (float[N,1] y) {{ a = Conv <group = {groups}> (x, w) t = Tanh (a)
        p = GlobalAveragePool (t) f = Flatten (p) y = Gemm (f, v) }}"""
    return from_text(text, w=rng.standard_normal((8, 4 // groups, 3, 3)) / 4, v=rng.standard_normal((8, 1)))


@pytest.mark.parametrize("groups", [1, 2])
def test_of_one_number_it_is_how_fast_that_moves(groups: int, rng: np.random.Generator) -> None:
    model = one_number(groups, rng)
    layers = read(model, {"x": (1, 4, 5, 5)}).layers
    feeds: Feeds = {"x": rng.standard_normal((1, 4, 5, 5)).astype(np.float32)}
    found = moves(model, layers, feeds)["a"]
    assert found.shape == (8, 4 // groups)
    expected = [[abs(float(derivative(model, layers[0], (o, i), feeds, "y").item())) for i in range(4 // groups)] for o in range(8)]
    # Differences of float32 numbers of about 1, divided by 2e-3, are good to about 1e-4.
    np.testing.assert_allclose(found, expected, atol=3e-4)
    assert np.max(expected) > 0.05


def test_of_many_numbers_it_is_the_root_of_their_squares_in_expectation(
    monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator
) -> None:
    model = conv_net(channels=4)
    layers = read(model, {"image": (1, 3, 8, 8)}).layers
    feeds: Feeds = {"image": rng.standard_normal((3, 3, 8, 8)).astype(np.float32)}
    monkeypatch.setattr(taylor, "DRAWS", 3000)
    found = moves(model, layers, feeds)
    scores = np.asarray(run(session(model), feeds)["scores"], dtype=np.float64)
    for layer in layers:
        for kernel in ((0, 0), (1, 2), (3, 3)):
            change = derivative(model, layer, kernel, feeds, "scores")
            expected = np.sqrt(np.square(change).sum() / scores.shape[1]) / scores.std()
            # 3,000 squares have a relative error of about sqrt(2 / 3000) = .026, their root of half that: four times it.
            assert found[layer.name][kernel] == pytest.approx(expected, rel=0.05, abs=1e-3)


def test_an_output_counts_the_same_whatever_its_scale(rng: np.random.Generator) -> None:
    text = "g (float[N,4,5,5] x) => (float[N,6,3,3] y) { a = Conv (x, w) y = Mul (a, s) }"
    w, x = rng.standard_normal((6, 4, 3, 3)), rng.standard_normal((2, 4, 5, 5)).astype(np.float32)
    small, large = (from_text(text, w=w, s=np.float32(s)) for s in (1.0, 1000.0))
    layers = read(small, {"x": (2, 4, 5, 5)}).layers
    np.testing.assert_allclose(moves(small, layers, {"x": x})["a"], moves(large, layers, {"x": x})["a"], rtol=1e-5)


def test_a_gradient_that_is_not_finite_is_refused(rng: np.random.Generator) -> None:
    model = one_number(1, rng)
    layers = read(model, {"x": (1, 4, 5, 5)}).layers
    with pytest.raises(DataError, match="not finite"):
        moves(model, layers, {"x": np.full((1, 4, 5, 5), np.nan, dtype=np.float32)})


def test_outputs_that_hang_on_no_weight_are_refused(rng: np.random.Generator) -> None:
    model = from_text("g (float[N,4,5,5] x) => (int64[4] y) { a = Conv (x, w) y = Shape (a) }", w=rng.standard_normal((6, 4, 3, 3)))
    layers = read(model, {"x": (1, 4, 5, 5)}).layers
    with pytest.raises(ModelError, match="depends on its weights"):
        moves(model, layers, {"x": np.ones((1, 4, 5, 5), dtype=np.float32)})


def test_the_command_plans_by_it_and_twice_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator
) -> None:
    monkeypatch.chdir(tmp_path)
    save(conv_net(), Path("net.onnx"))
    np.savez("calib.npz", image=rng.standard_normal((40, 3, 8, 8)).astype(np.float32))
    texts = []
    for name in ("one", "two"):
        flags = ("--criterion", "taylor", "--calib", "calib.npz", "--cost", "log", "--max-macs", "60%", "-q")
        done = gconv("plan", "net.onnx", *flags, "-o", f"{name}.json")
        assert done.code == 0, done.err
        texts.append(Path(f"{name}.json").read_text())
    by_norm = gconv("plan", "net.onnx", "--max-macs", "60%", "-q", "-o", "norm.json")
    assert by_norm.code == 0
    assert texts[0] == texts[1]
    plan, other = json.loads(texts[0]), json.loads(Path("norm.json").read_text())
    assert plan["criterion"] == "taylor"
    assert [layer["kept"] for layer in plan["layers"]] != [layer["kept"] for layer in other["layers"]]
