"""Saying no to a budget or a choice, with what would help and is not set already."""

from collections.abc import Sequence
from typing import get_args

from onnx_gconv.errors import BudgetError, ModelError
from onnx_gconv.pipeline.choosing import Reasons
from onnx_gconv.pipeline.job import Job
from onnx_gconv.pipeline.settings import FormName
from onnx_gconv.search.budget import FEASIBLE


def with_advice(error: BudgetError, job: Job) -> BudgetError:
    """Return the error of a budget that cannot be met, with what would allow a smaller model."""
    ways = _ways_lower(job) if error.hint.startswith(FEASIBLE) else []
    return BudgetError(str(error), hint=f"{error.hint}; to go lower, {' or '.join(ways)}" if ways else error.hint)


def _ways_lower(job: Job) -> list[str]:
    """Return what would allow a smaller model and is not set already."""
    settings, forms, is_timed = job.settings, job.settings.form_names, job.settings.max_latency is not None
    ways = {
        "leave out --include": settings.include is not None,
        "exclude fewer layers": settings.exclude is not None,
        "use --forms all": settings.calib is not None and set(forms) != set(get_args(FormName)),
        "use --forms all with --calib": settings.calib is None,
        "lower --min-group-channels": settings.min_group_channels > 1,
        "use --gathers free": "group" in forms and settings.gathers in ("none", "shared"),
        # In time, a narrower step or smaller groups than the target likes bring nothing.
        "take a smaller --width-step": not is_timed and not {"width", "lowrank"}.isdisjoint(forms) and settings.width_step != 1,
        "use --target generic": not is_timed and job.facts.target != "generic",
    }
    return [way for way, helps in ways.items() if helps]


def nothing_to_group(job: Job, skipped: Reasons, what: str, hint: str) -> ModelError:
    """Return the error with the reasons; where there are several, with the Convs that each is of."""
    network = job.original.network
    labels = {layer.name: layer.label for layer in network.all_layers} | {conv.name: conv.label for conv in network.skipped}
    convs: dict[str, list[str]] = {}
    for name, reason in skipped.items():
        convs.setdefault(reason, []).append(labels.get(name, name))
    if len(convs) == 1:
        return ModelError(f"{what}: {next(iter(convs))}.", hint=hint)
    told = [f"{_some(names)}: {reason}" for reason, names in convs.items()]
    more = f"; and other reasons ({len(told) - 3})" if len(told) > 3 else ""
    return ModelError(f"{what}. {'; '.join(told[:3])}{more}.", hint=hint)


def _some(names: Sequence[str]) -> str:
    """Return the first of the names, and how many there are besides."""
    others = f" and {len(names) - 1} other{'s' * (len(names) > 2)}" if len(names) > 1 else ""
    return repr(names[0]) + others
