"""A short run of the fuzz driver; `python -m tests.fuzz` is the long one."""

import numpy as np
import onnx
from fuzz.driver import fuzz
from fuzz.oracle import differs
from tiny import conv_net, get_tensor, save, set_tensor

MODELS, OTHERS = 60, 20


def test_files_that_are_wrong_are_refused_clearly_or_worked_on_rightly() -> None:
    cases = [f"models:{number}" for number in range(MODELS)] + [f"others:{number}" for number in range(OTHERS)]
    figures = fuzz(cases, seed=7)
    assert figures.cases == MODELS + OTHERS
    assert not figures.wrong, str(figures)
    assert figures.compared > 0  # some of them are accepted, and then it is looked whether rightly
    assert figures.refused > figures.accepted / 4


def test_the_oracle_sees_a_wrong_result_and_a_wrong_masked_model(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    zeroed = get_tensor(conv_net(), "w2")
    zeroed[:4, 4:] = 0
    for name, weight in (("source", get_tensor(conv_net(), "w2")), ("masked", zeroed), ("other", zeroed[::-1])):
        save(set_tensor(conv_net(), "w2", np.ascontiguousarray(weight)), tmp_path / f"{name}.onnx")
    assert differs("source.onnx", "masked.onnx", "masked.onnx") == ""
    assert "of the largest value" in str(differs("source.onnx", "masked.onnx", "other.onnx"))
    assert "other numbers than zeros" in str(differs("source.onnx", "other.onnx", "other.onnx"))
    (tmp_path / "broken.onnx").write_bytes(onnx.ModelProto(ir_version=8).SerializeToString())
    assert "does not load" in str(differs("source.onnx", "masked.onnx", "broken.onnx"))
