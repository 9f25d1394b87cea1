"""How long a job on calibration samples will take, told before the long part of it."""

from onnx_gconv.pipeline.job import Job
from onnx_gconv.recover.calibration import Calibration
from onnx_gconv.recover.forecast import Forecast, here
from onnx_gconv.recover.guide import fitted_samples

WORTH_TELLING = 10.0  # seconds
# Plans that are tried, about, by effort: where widths and branches are the only forms, beside groups, and where groups are alone.
TRIALS = {"without groups": (0, 0, 4, 5), "beside groups": (0, 3, 6, 10), "groups alone": (2, 5, 9, 14)}
# How often costs are measured at the outputs.
MEASURED = {"without groups": (0, 0, 0, 0), "beside groups": (1, 1, 1, 1), "groups alone": (0, 1, 2, 3)}


def tell_time(job: Job, samples: Calibration, *, is_fitted: bool) -> None:
    """Tell about how long choosing will take, and fitting if the weights are fitted, too."""
    seconds = expected_seconds(job, samples, is_fitted=is_fitted)
    if seconds is not None and seconds >= WORTH_TELLING:
        what = "measuring, choosing and fitting" if is_fitted else "measuring and choosing"
        job.listener.note(f"{what} on {samples.count} samples will take {about(seconds)}")


def expected_seconds(job: Job, samples: Calibration, *, is_fitted: bool) -> float | None:
    """Return about how long it takes on this machine if nothing else runs; None where the shapes are not known."""
    original, settings = job.original, job.settings
    macs = original.network.count.macs
    if macs is None:
        return None
    at_once = max(1, next((shape[0] for shape in original.network.input_shapes.values() if shape), 1))  # counts are of a batch
    forecast = Forecast(
        original.model,
        original.network.shapes,
        macs=macs // at_once,
        samples=samples.count,
        fitted=fitted_samples(samples),
    )
    forms = settings.form_names
    searched = "groups alone" if forms == ("group",) else "beside groups" if "group" in forms else "without groups"
    effort = settings.effort if settings.cost_name == "trial" else 0
    trials, measured = (0, 0) if settings.rule is not None else (TRIALS[searched][effort], MEASURED[searched][effort])
    seconds = trials * forecast.trial() + measured * forecast.costs()
    seconds += forecast.errors() if searched != "groups alone" else 0.0
    seconds += forecast.recovery() if is_fitted else 0.0
    return here(seconds, settings.jobs)


def about(seconds: float) -> str:
    """Return a time as one would say it: the first digits are not sure."""
    if seconds < 90:
        return f"about {max(10, round(seconds, -1)):.0f} seconds"
    minutes = round(seconds / 60)
    return f"about {minutes} minutes" if minutes < 90 else f"about {round(minutes / 60)} hours"
