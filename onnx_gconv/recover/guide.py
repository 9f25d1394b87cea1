"""What calibration data tells the planner: costs of layers, and which of several plans recovers best."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice

import numpy as np
import onnx

from onnx_gconv.plan import Plan
from onnx_gconv.recover.calibration import Calibration
from onnx_gconv.recover.divergence import divergence
from onnx_gconv.recover.reconstruct import Effort, Progress, plan_sites, reconstruct
from onnx_gconv.recover.sensitivity import Key, sensitivities
from onnx_gconv.rewrite.mask import mask
from onnx_gconv.runtime import run, session
from onnx_gconv.solve.grouping import Grouping

SAMPLES = 256  # of which inputs are measured
PROBES = 128  # of which outputs are measured, for every layer and number of groups
JUDGED = 1024  # on which a trial is judged
# A trial need not find the best weights, only tell plans apart.
TRIAL_POSITIONS_A_WEIGHT = 40


@dataclass(frozen=True)
class CalibratedGuide:
    """Answers from measurements on the calibration samples."""

    model: onnx.ModelProto
    calibration: Calibration
    seed: int
    jobs: int
    progress: Progress

    def costs(self, groupings: Mapping[Key, Grouping]) -> dict[Key, float]:
        """Return the divergence of the outputs when one layer alone is grouped and fitted."""
        return sensitivities(
            self.model,
            self.model,
            groupings,
            self.calibration.feeds(SAMPLES),
            probes=-(-PROBES // self.calibration.batch),
            effort=self._quick,
            progress=self.progress,
        )

    @property
    def _quick(self) -> Effort:
        return Effort(positions_a_weight=TRIAL_POSITIONS_A_WEIGHT, seed=self.seed, jobs=self.jobs)

    def judge(self, plan: Plan) -> float:
        """Return the divergence of the outputs after the plan and a quick reconstruction, a small error for a good plan."""
        seen = -(-SAMPLES // self.calibration.batch)
        masked = mask(self.model, plan)
        fitted = reconstruct(
            self.model,
            masked,
            plan_sites(masked, plan),
            islice(self.calibration.feeds(), seen),
            effort=self._quick,
            progress=self.progress,
        )
        # On other samples than it was fitted to, where there are some.
        judged = -(-JUDGED // self.calibration.batch)
        gaps = list(self._gaps(fitted.model, seen, seen + judged)) or list(self._gaps(fitted.model, 0, seen))
        return float(np.mean(gaps))

    def _gaps(self, model: onnx.ModelProto, start: int, stop: int) -> Iterator[float]:
        """Yield the divergence of the model from the dense one in each of some batches."""
        one, two = session(self.model), session(model)
        for batch in islice(self.calibration.feeds(), start, stop):
            yield divergence(run(one, batch), run(two, batch))
