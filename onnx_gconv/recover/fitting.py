"""All layers fitted, in closed form: walk through the dense and the compressed model once, and fit each Conv on the way."""

from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

import numpy as np
import onnx

from onnx_gconv.errors import DataError
from onnx_gconv.listener import OnProgress
from onnx_gconv.model.constants import Constants
from onnx_gconv.model.surgery import Surgery
from onnx_gconv.recover.fit import Fit
from onnx_gconv.recover.flow import Flow
from onnx_gconv.recover.normal import (
    Coefficients,
    Doubles,
    Rows,
    Sums,
    add_up,
    damping_between,
    residual,
    retarget,
    solve,
    sums,
    target_sums,
    variance,
)
from onnx_gconv.recover.site import Site, find_sites
from onnx_gconv.recover.store import MEMORY_BYTES, ActivationStore
from onnx_gconv.recover.walk import Arrays, Walk, put_inputs
from onnx_gconv.recover.work import SharedRows, Work
from onnx_gconv.rewrite.match import Matched
from onnx_gconv.runtime import Feeds

DAMPING = 1e-3
# Positions that a fit looks at, for each weight of an output and at least: neighbouring patches tell much the same.
POSITIONS_A_WEIGHT = 120
LEAST_POSITIONS = 20_000
RELAXATIONS = 2


@dataclass(frozen=True)
class FitOptions:
    """How layers are fitted."""

    damping: float = DAMPING
    is_validated: bool = True  # whether there may be more damping, as much as the samples themselves like
    positions_a_weight: int = POSITIONS_A_WEIGHT
    least_positions: int = LEAST_POSITIONS
    relaxations: int = RELAXATIONS
    seed: int = 0
    jobs: int = 1
    memory_share: float = 1.0  # of what may be held, where several are made at once


@dataclass(frozen=True)
class LayerError:
    """The squared error of one fitted layer, as a share of its target's variance, with the weights as they were and fitted."""

    name: str
    label: str
    before: float
    after: float


@dataclass(frozen=True)
class FittedModel:
    """The masked model with fitted weights, and what each fit brought."""

    model: onnx.ModelProto
    layers: tuple[LayerError, ...]


def fit_layers(
    dense: onnx.ModelProto,
    masked: onnx.ModelProto,
    sites: Sequence[Site],
    feeds: Iterable[Feeds],
    *,
    options: FitOptions,
    progress: OnProgress,
) -> FittedModel:
    """Return the masked model with the weights and biases of these sites fitted to the dense model, in graph order.

    Targets come from the dense model, inputs from the compressed one as fitted so far; no node of either is run twice.
    """
    flows = Flow(dense), Flow(masked)
    constants, dense_constants = Constants(masked), Constants(dense)
    fitted: dict[str, np.ndarray] = {}
    errors = []
    stored = int(options.memory_share * MEMORY_BYTES)
    with (
        ActivationStore(stored) as dense_store,
        ActivationStore(stored) as compressed_store,
        ThreadPoolExecutor(options.jobs) as pool,
    ):
        work = Work(pool, put_inputs(feeds, flows[0].inputs, (dense_store, compressed_store)), options.memory_share)
        ahead = Walk(flows[0], dense_store, later=[{site.target} for site in sites])
        behind = Walk(flows[1], compressed_store, later=[site_reads(site) for site in sites])
        for number, site in enumerate(sites):
            progress(number, len(sites), site.label)
            fit = Fit.of(site, constants, dense_constants)
            new, error = _fitted(fit, shared_rows(fit, ahead, behind, work, options), options)
            errors.append(error)
            ahead.tidy()
            behind.tidy()
            tensors = fit.tensors(new)
            behind.constants.update(tensors)
            fitted |= tensors
    progress(len(sites), len(sites), "done")
    surgery = Surgery(masked)
    for name, value in fitted.items():
        surgery.constant(name, value)
    return FittedModel(surgery.finish(), tuple(errors))


def masked_sites(masked: onnx.ModelProto, matched: Matched) -> list[Site]:
    """Return all that can be fitted in a masked model; also what the plan leaves dense."""
    return find_sites(Flow(masked), Constants(masked), {each.layer.name: each for each in matched})


def site_reads(site: Site) -> set[str]:
    """Return what a fit needs of the compressed model."""
    return {site.source, site.shortcut} if site.shortcut else {site.source}


def shared_rows(fit: Fit, ahead: Walk, behind: Walk, work: Work, options: FitOptions) -> SharedRows:
    """Return a site's inputs in the compressed model and its targets from the dense one; both walks go on to it."""
    site = fit.site
    targets, inputs = ahead.next_stop(), behind.next_stop()
    most = work.positions(max(options.least_positions, options.positions_a_weight * fit.unknowns))

    def rows(batch: int) -> Rows:
        compressed: Arrays = inputs(batch)
        rng = np.random.default_rng([options.seed, behind.stops, batch])
        dense = targets(batch)[site.target]
        return fit.rows(compressed[site.source], dense, compressed.get(site.shortcut), most=most, rng=rng)

    return work.rows(rows)


def half_moments(fit: Fit, rows: SharedRows) -> tuple[Sums, ...]:
    """Return the moments of every other share of the samples and of those between, refusing NaN and infinity.

    Where there is but one share, it is the only half.
    """
    halves: list[Sums] = []
    for number, part in enumerate(rows.map(sums)):
        if number < 2:
            halves.append(part)
        else:
            halves[number % 2] += part
    if not all(np.isfinite(values).all() for half in halves for values in (half.u, half.t, half.uu, half.ut)):
        raise DataError(
            f"on the calibration samples, Conv or Gemm {fit.site.label!r} reads or gives NaN, infinity, or numbers too large to "
            "square.",
            hint="check that the samples are preprocessed as the model expects",
        )
    return tuple(halves)


def chosen_damping(fit: Fit, halves: tuple[Sums, ...], options: FitOptions) -> float:
    """Return how much a fit is damped: as each half of the samples likes it best from the other."""
    if len(halves) < 2 or not options.is_validated:
        return options.damping
    return damping_between((halves[0], halves[1]), fit.before, least=options.damping, has_intercept=fit.site.has_intercept)


def _fitted(fit: Fit, rows: SharedRows, options: FitOptions) -> tuple[Coefficients, LayerError]:
    """Return the best weights; where an activation follows, those that are best behind it."""
    halves = half_moments(fit, rows)
    damping = chosen_damping(fit, halves, options)

    def solved(total: Sums) -> Coefficients:
        return solve(total, fit.before, damping=damping, has_intercept=fit.site.has_intercept)

    total = add_up(halves)
    new = solved(total)
    error = _error(fit.site, total, fit, new)
    if fit.site.clamp is not None:
        for _ in range(options.relaxations):
            relaxed = rows.map(partial(_relaxed_sums, fit, new))
            new = solved(retarget(total, relaxed))
    return new, error


def _relaxed_sums(fit: Fit, at: Coefficients, rows: Rows) -> tuple[Doubles, Doubles, Doubles]:
    return target_sums(fit.relaxed(rows, at))


def _error(site: Site, total: Sums, fit: Fit, new: Coefficients) -> LayerError:
    whole = float(variance(total).sum()) or 1.0
    before, after = (float(residual(total, at).sum()) / whole for at in (fit.before, new))
    return LayerError(site.name, site.label, before, after)
