"""What calibration data tells the planner."""

import time
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import onnx
import pytest
from fitting import Feeds, grouped, plan_of
from tiny import conv_net

from onnx_gconv.data.batch import Batch
from onnx_gconv.data.function import FunctionData
from onnx_gconv.data.inputs import model_inputs
from onnx_gconv.recover import guide as guide_module
from onnx_gconv.recover.calibration import Calibration
from onnx_gconv.recover.fitting import FittedModel, fit_layers
from onnx_gconv.recover.guide import CalibratedGuide
from onnx_gconv.rewrite.match import Matched

BATCH = 10


class Numbered:
    """Images whose first pixel is their number."""

    name, has_labels = "numbered", False

    def __init__(self, samples: int) -> None:
        self.samples = samples

    def batches(self, size: int, *, limit: int | None = None) -> Iterator[Batch]:
        images = np.random.default_rng(0).standard_normal((self.samples, 3, 8, 8)).astype(np.float32)
        images[:, 0, 0, 0] = np.arange(self.samples)
        stop = self.samples if limit is None else min(limit, self.samples)
        for first in range(0, stop, size):
            yield Batch({"image": images[first : min(first + size, stop)]}, None)


@pytest.mark.parametrize("samples", [20, 45, 250, 300, 1000])
def test_plans_are_judged_on_samples_that_they_are_not_fitted_to(samples: int, monkeypatch: pytest.MonkeyPatch) -> None:
    fitted: set[int] = set()
    judged: set[int] = set()

    def watched_reconstruct(dense: onnx.ModelProto, matched: Matched, feeds: Iterable[Feeds], **how: Any) -> Any:
        batches = list(feeds)
        fitted.update(int(number) for batch in batches for number in batch["image"][:, 0, 0, 0])
        found: FittedModel = fit_layers(dense, matched, batches, **how)
        return found

    run = guide_module.run

    def watched_run(active: Any, feeds: Feeds) -> Any:
        judged.update(int(number) for number in feeds["image"][:, 0, 0, 0])
        return run(active, feeds)

    monkeypatch.setattr(guide_module, "fit_layers", watched_reconstruct)
    monkeypatch.setattr(guide_module, "run", watched_run)
    calibration = Calibration(Numbered(samples), 1000, BATCH, is_fixed=False)
    guide = CalibratedGuide(conv_net(), calibration, seed=0, jobs=1, progress=lambda *_: None)
    assert guide.judge([plan_of(grouped("c2", 8, 8))])[0] > 0
    assert fitted
    assert judged
    assert not fitted & judged


def busy_images() -> Iterator[tuple[dict[str, np.ndarray], None]]:
    """A user's function that cannot be read twice at once."""
    assert not READERS, "read by two at once"
    READERS.append(1)
    try:
        rng = np.random.default_rng(0)
        for _ in range(6):
            time.sleep(0.05)  # long enough for another to come in
            yield {"image": rng.standard_normal((10, 3, 8, 8)).astype(np.float32)}, None
    finally:
        READERS.pop()


READERS: list[int] = []


@pytest.mark.slow
def test_a_users_function_is_read_by_one_judgement_at_a_time() -> None:
    model = conv_net()
    data = FunctionData("busy", False, busy_images, model_inputs(model))
    plans = [plan_of(grouped("c2", 8, 8, groups=groups)) for groups in (2, 4)]
    calibration = Calibration(data, 60, BATCH, is_fixed=False)
    one, two = (CalibratedGuide(model, calibration, seed=0, jobs=jobs, progress=lambda *_: None) for jobs in (1, 2))
    assert one.judge(plans) == two.judge(plans)


def test_plans_judged_side_by_side_are_judged_as_one_by_one() -> None:
    plans = [plan_of(grouped("c2", 8, 8, groups=groups)) for groups in (2, 4, 8)]
    calibration = Calibration(Numbered(300), 300, BATCH, is_fixed=False)
    together, alone = (CalibratedGuide(conv_net(), calibration, seed=0, jobs=jobs, progress=lambda *_: None) for jobs in (2, 1))
    assert together.judge(plans) == [alone.judge([plan])[0] for plan in plans]
