"""Calibration samples, and the weights that are left fitted to what the dense model does on them."""

from onnx_gconv.data.open import open_data
from onnx_gconv.pipeline.job import Job
from onnx_gconv.pipeline.original import Original
from onnx_gconv.pipeline.settings import Settings
from onnx_gconv.recover.calibration import Calibration, calibration
from onnx_gconv.recover.fitting import FitOptions, FittedModel
from onnx_gconv.recover.guide import CalibratedGuide
from onnx_gconv.recover.recovery import Recovery, recover
from onnx_gconv.rewrite.match import Matched

FEW_SAMPLES = 100


def open_samples(original: Original, settings: Settings) -> Calibration | None:
    """Return the samples that --calib names."""
    if settings.calib is None:
        return None
    data = open_data(settings.calib, original.model, preprocessing=settings.preprocessing)
    return calibration(data, original.model, settings.calib_samples)


def guide_of(job: Job, samples: Calibration | None) -> CalibratedGuide | None:
    """Return what measures costs on the calibration samples."""
    if samples is None:
        return None
    seed, jobs, progress = job.settings.seed, job.settings.jobs, job.listener.phase("measuring")
    shapes = job.original.network.shapes
    return CalibratedGuide(job.original.model, samples, seed=seed, jobs=jobs, progress=progress, shapes=shapes)


def recovered(job: Job, matched: Matched, samples: Calibration, *, is_choosing: bool = False) -> tuple[FittedModel, Recovery]:
    """Return the masked model with its weights fitted, and what that brought; `is_choosing`: which channels stay may change."""
    listener, settings = job.listener, job.settings
    options = FitOptions(seed=settings.seed, jobs=settings.jobs, is_choosing=is_choosing)
    fitted, recovery = recover(job.original.model, matched, samples, options=options, progress=listener.phase("recovering"))
    if _is_one_sample(samples):
        listener.warn("the first samples are identical: weights fitted to them will not suit other data")
    if recovery.samples < FEW_SAMPLES:
        listener.warn(
            f"fitted to only {recovery.samples} samples: the weights may suit these and no others. The output error cannot "
            "tell; `evaluate` on other samples can"
        )
    return fitted, recovery


def _is_one_sample(samples: Calibration) -> bool:
    """Return whether the first batch holds the same sample again and again: a sign of data that went wrong."""
    if not samples.is_shareable:
        return False  # reading it once more may change what a function gives next
    first = next(iter(samples.feeds()))
    return all(len(values) > 1 and bool((values == values[:1]).all()) for values in first.values())
