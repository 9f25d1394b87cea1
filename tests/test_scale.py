"""Models with thousands of Convs, very wide ones, and large images: what must not grow with them."""

from collections.abc import Callable, Sequence

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from tiny import conv_net, set_tensor

from onnx_gconv import runtime, verification
from onnx_gconv.model.shapes import infer
from onnx_gconv.runtime import observe_shapes
from onnx_gconv.solve import partition
from onnx_gconv.solve.partition import exchange_cycles, group_sums, total
from onnx_gconv.verification import verify


def test_shapes_are_observed_in_one_run_that_gives_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    model = conv_net(size=16)
    inputs = {"image": (2, 3, 16, 16)}
    names = [name for node in model.graph.node for name in node.output]
    given: list[dict[str, object]] = []
    really = runtime.run

    def noting(
        active: ort.InferenceSession, feeds: runtime.Feeds, outputs: Sequence[str] | None = None
    ) -> dict[str, runtime.Output]:
        given.append(really(active, feeds, outputs))
        return dict(given[-1])

    monkeypatch.setattr(runtime, "run", noting)
    shapes = observe_shapes(model, names, inputs)
    assert shapes == {name: shape for name, shape in infer(model, inputs).items() if name in names}
    assert len(given) == 1
    assert all(np.asarray(value).size <= 4 for value in given[0].values())


def test_a_sequence_has_no_shape_and_hides_no_other() -> None:
    text = """<ir_version: 8, opset_import: ["" : 17]>
        m (float[2,4] x) => (float[2,4] y) { s = SplitToSequence <axis = 1> (x)  y = ConcatFromSequence <axis = 1> (s) }"""
    assert observe_shapes(onnx.parser.parse_model(text), ["s", "y"], {"x": (2, 4)}) == {"y": (2, 4)}


def dead_chain(length: int, *, shift: float = 0.0) -> onnx.ModelProto:
    """Return a chain of Convs whose last result is all zero, so that only its inner tensors can tell."""
    lines = "\n".join(f"c{n + 1} = Conv (c{n}, w{n})" for n in range(length))
    head = '<ir_version: 8, opset_import: ["" : 17]> m (float[1,4,2,2] c0) => (float[1,4,2,2] y)'
    model = onnx.parser.parse_model(f"{head} {{ {lines} y = Mul (c{length}, zero) }}")
    for number in range(length):
        set_tensor(model, f"w{number}", np.eye(4).reshape(4, 4, 1, 1) + shift * (number == length - 1))
    return set_tensor(model, "zero", np.zeros(1))


def test_many_small_inner_tensors_are_compared_in_few_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    sessions = []
    really = runtime.lean_session

    def counting(make: Callable[[], onnx.ModelProto]) -> ort.InferenceSession:
        sessions.append(make)
        return really(make)

    monkeypatch.setattr(verification, "lean_session", counting)
    inner = {f"c{number}": None for number in range(1, 301)}
    found = verify(dead_chain(300), dead_chain(300), tolerance=1e-6, seed=0, inner=inner)
    assert found.passed
    assert set(inner) <= found.outputs.keys()
    assert len(sessions) <= 8  # of 16, 128 and 156 tensors, after the outputs; two models each
    assert not verify(dead_chain(300), dead_chain(300, shift=0.1), tolerance=1e-6, seed=0, inner=inner).passed


def test_large_inner_tensors_stay_in_small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verification, "BYTES_A_RUN", 1)
    sizes: list[int] = []
    really = runtime.with_outputs

    def noting(model: onnx.ModelProto, names: Sequence[str]) -> onnx.ModelProto:
        sizes.append(len(names))
        return really(model, names)

    monkeypatch.setattr(verification, "with_outputs", noting)
    verify(dead_chain(40), dead_chain(40), tolerance=1e-6, seed=0, inner={f"c{number}": None for number in range(1, 41)})
    assert sizes == [16, 16, 16, 16, 8, 8]


def test_of_very_many_groups_the_best_moves_come_close_to_all(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    matrix = rng.gamma(0.5, size=(1, 128, 128))
    groups = np.arange(128).reshape(64, 2)
    profit = group_sums(matrix, groups[None])[0]
    exact, is_best = exchange_cycles(profit, groups, rounds=200)
    monkeypatch.setattr(partition, "MOST_GROUPS_TO_MATCH", 32)
    monkeypatch.setattr(partition, "PARTNERS", 16)
    found, is_proven = exchange_cycles(profit, groups, rounds=200)
    assert (is_best, is_proven) == (True, False)
    assert sorted(found.ravel()) == list(range(128))
    before, best, close = (float(total(profit, each)) for each in (groups, exact, found))
    assert before < close <= best + 1e-9
    assert close - before >= 0.95 * (best - before)
