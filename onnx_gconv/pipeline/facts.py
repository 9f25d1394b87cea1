"""What was measured before a plan is made; what the user wants is in the settings."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from onnx_gconv.listener import Listener
from onnx_gconv.pipeline.gathers import GatherTimes
from onnx_gconv.pipeline.original import Original
from onnx_gconv.pipeline.settings import Settings, as_path
from onnx_gconv.pipeline.sweeping import block_here, read_times, sweep_here, target_of
from onnx_gconv.recover.activation import input_strengths
from onnx_gconv.recover.calibration import Calibration
from onnx_gconv.search.latency import LayerTimes
from onnx_gconv.search.target import CHANNEL_BLOCK, TargetName


@dataclass(frozen=True)
class Facts:
    """The device that a plan is for, and what is known of the layers by measurement."""

    target: TargetName = "generic"
    # By layer, for the criteria that need data: activation, the strength of each input; taylor, the importance of each kernel.
    importances: Mapping[str, NDArray[np.float64]] = field(default_factory=dict)
    times: LayerTimes | None = None  # for a budget in milliseconds
    gathers: GatherTimes | None = None  # there whenever `times` are
    block: int | None = None  # the multiple of channels that makes a group fast on the device, where it was measured

    @property
    def channel_block(self) -> int:
        """The multiple of channels that makes a group fast: as measured, or else what is usual for the target."""
        return CHANNEL_BLOCK[self.target] if self.block is None else self.block


def measure(original: Original, settings: Settings, samples: Calibration | None, listener: Listener) -> Facts:
    """Return the facts that the settings need: read from a table, or measured now."""
    target = settings.target or "generic"
    importances = _importances(original, settings, samples, listener)
    if settings.timing is None and settings.max_latency is None:
        return Facts(target, importances, block=block_here(threads=settings.threads) if target == "ort-cpu" else None)
    if settings.timing is None:
        forms = settings.form_names
        timed = sweep_here(
            original,
            listener,
            threads=settings.threads,
            precision=settings.timed_precision,
            with_groups="group" in forms,
            with_ranks="lowrank" in forms,
        )
    else:
        timed = read_times(original, as_path(settings.timing))
    runs_on = settings.target or target_of(timed.latencies.runner)
    # A table tells of its own device only: for another target what is usual there counts.
    block = timed.block if runs_on == target_of(timed.latencies.runner) else None
    return Facts(runs_on, importances, timed.latencies, timed.gathers, block)


def _importances(
    original: Original, settings: Settings, samples: Calibration | None, listener: Listener
) -> Mapping[str, NDArray[np.float64]]:
    layers = original.network.layers
    if samples is None or not layers:
        return {}
    if settings.criterion == "activation":
        return input_strengths(original.model, layers, samples.feeds(), jobs=settings.jobs)
    if settings.criterion == "taylor":
        from onnx_gconv.torch.taylor import kernel_moves

        return kernel_moves(
            original.model,
            layers,
            samples.feeds(),
            shapes=original.given_shapes,
            seed=settings.seed,
            on_batch=listener.phase("gradients"),
        )
    return {}
