"""Verification catches one wrong order of channels, also where scores come out of a Sigmoid and are all but zero on noise."""

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import numpy_helper
from tiny import from_text

import onnx_gconv
from onnx_gconv.errors import VerifyError
from onnx_gconv.rewrite.group import carry_out

ZOO = Path(__file__).parent.parent.parent / "shared/zoo"
DETECTORS = ("centerface", "ppocrv6_tiny_det", "u2netp")


def detector() -> onnx.ModelProto:
    """Return a score map whose scores are below 1e-6 on noise."""

    def normal(seed: int, *shape: int) -> np.ndarray:
        return np.random.default_rng(seed).standard_normal(shape) / np.sqrt(np.prod(shape[1:]))

    return from_text(
        """detector (float[N,4,8,8] image) => (float[N,4,8,8] scores) {
        c1 = Conv <pads = [1, 1, 1, 1]> (image, w1)
        r1 = Relu (c1)
        c2 = Conv <pads = [1, 1, 1, 1]> (r1, w2)
        r2 = Relu (c2)
        c3 = Conv (r2, w3)
        far = Sub (c3, offset)
        scores = Sigmoid (far)
    }""",
        w1=normal(1, 16, 4, 3, 3), w2=normal(2, 16, 16, 3, 3), w3=normal(3, 4, 16, 1, 1), offset=np.float32(15),
    )  # fmt: skip


def with_channels_swapped(model: onnx.ModelProto, source: onnx.ModelProto, which: float) -> onnx.ModelProto:
    """Return the model with two filters of one Conv that was grouped in each other's place; `which` says how deep it lies."""
    before = {node.output[0]: node.SerializeToString() for node in source.graph.node if node.op_type == "Conv"}
    grouped = [
        node
        for node in model.graph.node
        if node.op_type == "Conv" and before.get(node.output[0]) != node.SerializeToString() and "_g2" in node.input[1]
    ]
    name = grouped[int(which * (len(grouped) - 1))].input[1]
    result = onnx.ModelProto()
    result.CopyFrom(model)
    tensor = next(each for each in result.graph.initializer if each.name == name)
    weight = numpy_helper.to_array(tensor).copy()
    # The two that differ most: filters of nothing may change places.
    order = np.argsort(np.abs(weight).reshape(len(weight), -1).sum(axis=1))
    weight[[order[-1], order[0]]] = weight[[order[0], order[-1]]]
    tensor.CopyFrom(numpy_helper.from_array(weight, name))
    return result


def require_caught(model: onnx.ModelProto | Path, which: float, monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(source: onnx.ModelProto, *args: object, **options: object) -> onnx.ModelProto:
        return with_channels_swapped(carry_out(source, *args, **options), source, which)

    monkeypatch.setattr("onnx_gconv.pipeline.rewriting.carry_out", wrong)
    with pytest.raises(VerifyError, match="differs from the masked one"):
        onnx_gconv.compress(model, groups=2)


@pytest.mark.parametrize("which", [0.0, 1.0])
def test_one_wrong_order_before_a_sigmoid_is_caught(which: float, monkeypatch: pytest.MonkeyPatch) -> None:
    right = onnx_gconv.compress(detector(), groups=2)
    assert right.report["verify"]["passed"]
    require_caught(detector(), which, monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("name", DETECTORS)
def test_real_detectors_are_verified_and_one_wrong_order_is_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path = ZOO / f"{name}.onnx"
    if not path.exists():
        pytest.skip("the zoo is not here")
    assert onnx_gconv.compress(path, groups=2).report["verify"]["passed"]
    for which in (0.0, 0.5, 1.0):
        require_caught(path, which, monkeypatch)
