"""A plan recovered: fitted weights in the masked model, and the record of what that brought."""

from collections.abc import Iterator
from dataclasses import dataclass

import onnx

from onnx_gconv.evaluation import evaluate_each
from onnx_gconv.listener import OnProgress
from onnx_gconv.recover.calibration import Calibration
from onnx_gconv.recover.fitting import FitOptions, FittedModel, LayerError, fit_layers
from onnx_gconv.rewrite.mask import mask
from onnx_gconv.rewrite.match import Matched
from onnx_gconv.runtime import Feeds
from onnx_gconv.verification import finite

METHOD = "closed-form"
COMPARED = 250  # samples that are enough to say how far the outputs are off


@dataclass(frozen=True)
class Recovery:
    """What recovery did; output errors are |found - dense| / |dense| over the first 250 samples, the worst output counts."""

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
    model: onnx.ModelProto, matched: Matched, calibration: Calibration, *, options: FitOptions, progress: OnProgress
) -> tuple[FittedModel, Recovery]:
    """Return the masked model with weights fitted to the dense one's behaviour on the calibration samples."""
    samples = 0

    def counted() -> Iterator[Feeds]:
        nonlocal samples
        for feeds in calibration.feeds():
            samples += len(next(iter(feeds.values())))
            yield feeds

    fitted = fit_layers(model, matched, counted(), options=options, progress=progress)
    limit = min(COMPARED, calibration.samples)
    masked = mask(model, fitted.matched)
    found = evaluate_each((masked, fitted.model), calibration.data, reference=model, limit=limit)
    before, after = (max((gap.relative_l2 for gap in each.outputs.values()), default=float("nan")) for each in found)
    return fitted, Recovery(samples, before, after, fitted.layers)
