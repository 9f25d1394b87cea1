"""What calibration data tells the planner."""

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import onnx
import pytest
from fitting import Feeds, grouped, plan_of
from tiny import conv_net

from onnx_gconv.data.batch import Batch
from onnx_gconv.recover import guide as guide_module
from onnx_gconv.recover.calibration import Calibration
from onnx_gconv.recover.guide import CalibratedGuide
from onnx_gconv.recover.reconstruct import Reconstruction, reconstruct

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

    def watched_reconstruct(dense: onnx.ModelProto, masked: onnx.ModelProto, sites: Any, feeds: Iterable[Feeds], **how: Any) -> Any:
        batches = list(feeds)
        fitted.update(int(number) for batch in batches for number in batch["image"][:, 0, 0, 0])
        found: Reconstruction = reconstruct(dense, masked, sites, batches, **how)
        return found

    run = guide_module.run

    def watched_run(active: Any, feeds: Feeds) -> Any:
        judged.update(int(number) for number in feeds["image"][:, 0, 0, 0])
        return run(active, feeds)

    monkeypatch.setattr(guide_module, "reconstruct", watched_reconstruct)
    monkeypatch.setattr(guide_module, "run", watched_run)
    calibration = Calibration(Numbered(samples), 1000, BATCH, is_fixed=False)
    guide = CalibratedGuide(conv_net(), calibration, seed=0, jobs=1, progress=lambda *_: None)
    assert guide.judge([plan_of(grouped("c2", 8, 8))])[0] > 0
    assert fitted
    assert judged
    assert not fitted & judged
