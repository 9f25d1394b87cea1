"""Large models, written in pieces or apart to save memory: to the byte the same file, the same function, and left as they were."""

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper
from test_surgery import LIGHT, ZOO, decorated
from tiny import conv_net, get_tensor, set_tensor

from onnx_gconv import runtime
from onnx_gconv.errors import ModelError
from onnx_gconv.model import apart
from onnx_gconv.model.apart import written_apart
from onnx_gconv.model.check import check
from onnx_gconv.model.file import load, save
from onnx_gconv.model.shell import is_large
from onnx_gconv.model.stream import serialised
from onnx_gconv.verification import verify


def with_large_constant() -> onnx.ModelProto:
    """A model of which one large weight lies in a Constant node and the others in initializers, one of them typed."""
    model = conv_net(channels=48)
    weight = get_tensor(model, "w2")
    kept = [tensor for tensor in model.graph.initializer if tensor.name not in ("w2", "w3")]
    typed = helper.make_tensor("w3", onnx.TensorProto.FLOAT, get_tensor(model, "w3").shape, get_tensor(model, "w3").ravel())
    del model.graph.initializer[:]
    model.graph.initializer.extend([*kept, typed])
    model.graph.node.insert(0, helper.make_node("Constant", [], ["w2"], value=numpy_helper.from_array(weight)))
    assert not model.graph.initializer[-1].raw_data
    assert is_large(model.graph.initializer[-1])
    return model


def one_large(model: onnx.ModelProto) -> onnx.ModelProto:
    assert any(is_large(tensor) for tensor in model.graph.initializer)
    return model


@pytest.mark.parametrize("make", [conv_net, decorated, with_large_constant])
def test_the_pieces_are_the_bytes_of_the_model(make: Callable[[], onnx.ModelProto], tmp_path: Path) -> None:
    model = make()
    whole = model.SerializeToString(deterministic=True)
    assert b"".join(serialised(model)) == whole
    assert save(model, tmp_path / "model.onnx") == len(whole)
    assert (tmp_path / "model.onnx").read_bytes() == whole


@pytest.mark.parametrize("folder", [ZOO, LIGHT], ids=["zoo", "light"])
def test_the_pieces_of_a_real_model_are_its_bytes(folder: Path) -> None:
    paths = [path for path in sorted(folder.glob("*.onnx")) if os.path.getsize(path) < 20_000_000]
    if not paths:
        pytest.skip(f"no models in {folder}")
    for path in paths:
        model = onnx.load(path)
        assert b"".join(serialised(model)) == model.SerializeToString(deterministic=True), path.name


def test_the_size_with_external_data_is_that_of_both_files(tmp_path: Path) -> None:
    size = save(conv_net(channels=48), tmp_path / "model.onnx", external_data=True)
    assert size == sum(path.stat().st_size for path in tmp_path.iterdir())
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize("make", [lambda: one_large(conv_net(channels=48)), with_large_constant], ids=["weights", "constant"])
def test_a_model_that_goes_by_way_of_files_is_the_same_function_and_stays_as_it_was(
    make: Callable[[], onnx.ModelProto], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, in_memory = make(), make()
    before = model.SerializeToString(deterministic=True)
    feeds = {"image": np.random.default_rng(0).standard_normal((1, 3, 8, 8)).astype(np.float32)}
    expected = runtime.run(runtime.session(in_memory), feeds)
    monkeypatch.setattr(apart, "LARGEST_IN_MEMORY_BYTES", 0)
    assert np.array_equal(runtime.run(runtime.session(model), feeds)["scores"], expected["scores"])
    assert verify(model, in_memory, tolerance=1e-6, seed=0).passed
    spoiled = set_tensor(make(), "w1", get_tensor(model, "w1")[::-1])
    assert not verify(model, spoiled, tolerance=1e-6, seed=0).passed
    assert check(model, model) is None
    # It was not: a verified model came out with another byte in each tensor than one written with --no-verify.
    assert model.SerializeToString(deterministic=True) == before


def test_the_files_are_valid_while_they_last_and_then_gone() -> None:
    model = one_large(conv_net(channels=48))
    with written_apart(model) as path:
        read = load(path)
        folder = path.parent
    assert not folder.exists()
    for tensor in model.graph.initializer:
        assert np.array_equal(get_tensor(read, tensor.name), get_tensor(model, tensor.name))


def test_a_full_temporary_folder_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "missing"))
    with pytest.raises(ModelError, match="temporary copy of the model cannot be written"), written_apart(conv_net()):
        pass
