"""A plan recovered: fitted weights in the masked model, and the record of what that brought."""

from dataclasses import dataclass

import onnx

from onnx_gconv.evaluate import evaluate
from onnx_gconv.plan import Plan
from onnx_gconv.recover.calibration import Calibration
from onnx_gconv.recover.reconstruct import Effort, LayerError, Progress, plan_sites, reconstruct
from onnx_gconv.rewrite.mask import mask
from onnx_gconv.verify import finite

METHOD = "closed-form"


@dataclass(frozen=True)
class Recovery:
    """What recovery did; output errors are |found - dense| / |dense| over all outputs and samples, the worst output counts."""

    samples: int
    output_error_before: float  # masked only
    output_error_after: float
    layers: tuple[LayerError, ...]

    def as_dict(self) -> dict[str, object]:
        """Return the record for report.json."""
        return {
            "samples": self.samples,
            "method": METHOD,
            "output_error_before": finite(self.output_error_before),
            "output_error_after": finite(self.output_error_after),
            "layers": [vars(layer) for layer in self.layers],
        }


def recover(
    model: onnx.ModelProto, plan: Plan, calibration: Calibration, *, effort: Effort, progress: Progress
) -> tuple[onnx.ModelProto, Recovery]:
    """Return the masked model with weights fitted to the dense one's behaviour on the calibration samples."""
    masked = mask(model, plan)
    fitted = reconstruct(model, masked, plan_sites(masked, plan), calibration.feeds(), effort=effort, progress=progress)
    before, after = (
        evaluate(candidate, calibration.data, reference=model, limit=calibration.samples) for candidate in (masked, fitted.model)
    )
    errors = [max((gap.relative_l2 for gap in found.outputs.values()), default=float("nan")) for found in (before, after)]
    return fitted.model, Recovery(after.samples, errors[0], errors[1], fitted.layers)
