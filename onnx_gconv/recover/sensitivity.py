"""What grouping one layer does to the model's outputs: the cost that a search should add up."""

from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import onnx
from numpy.typing import NDArray

from onnx_gconv.listener import OnProgress
from onnx_gconv.model.constants import Constants
from onnx_gconv.recover.divergence import score_error
from onnx_gconv.recover.fit import Fit
from onnx_gconv.recover.fitting import FitOptions, chosen_damping, half_moments, shared_rows, site_reads
from onnx_gconv.recover.flow import Flow
from onnx_gconv.recover.normal import Coefficients, Sums, add_up, residual, solve, variance
from onnx_gconv.recover.site import find_sites
from onnx_gconv.recover.store import ActivationStore
from onnx_gconv.recover.walk import Walk, put_inputs
from onnx_gconv.recover.work import Work
from onnx_gconv.rewrite.match import Matched
from onnx_gconv.runtime import Feeds, run, session
from onnx_gconv.solve.grouping import Grouping, Order

Key = tuple[str, int]  # layer, number of groups
Width = tuple[str, int]  # space, channels that stay


def sensitivities(
    dense: onnx.ModelProto,
    model: onnx.ModelProto,
    groupings: Mapping[Key, Grouping],
    feeds: Iterable[Feeds],
    *,
    probes: int,
    options: FitOptions,
    progress: OnProgress,
    keeps: Mapping[str, Mapping[Width, Order]] | None = None,
) -> tuple[dict[Key, float], dict[Width, float]]:
    """Return, for each layer and number of groups, how far the outputs are off when the layer gets these groups and is fitted.

    Everything else is as `model` has it: the dense model itself, or one masked and recovered, whose layers are then tried
    with other groups in the company of the rest. Both are walked through once; from each layer on, what is left of `model`
    runs once for every other number of groups, on the first `probes` batches only. A layer that cannot be fitted has no entry.
    `keeps` has, by the node that reads a space, the channels left of it at some widths: what these cost comes second.
    """
    flows = Flow(dense), Flow(model)
    constants, dense_constants = Constants(model), Constants(dense)
    keeps = keeps or {}
    names = {name for name, _ in groupings} | keeps.keys()
    # Without a plan: every layer sees all its inputs, so that their moments serve any grouping.
    sites = [site for site in find_sites(flows[1], constants, Matched()) if site.name in names]
    found: dict[Key, float] = {}
    narrowed: dict[Width, float] = {}
    with ActivationStore() as dense_store, ActivationStore() as store, ThreadPoolExecutor(options.jobs) as pool:
        work = Work(pool, options.jobs, put_inputs(feeds, flows[0].inputs, (dense_store, store)))
        probed = [batch for share in work.shares for batch in share][:probes]
        whole = session(dense, threads=options.jobs)
        expected = [run(whole, {name: store.get(name, batch) for name in flows[0].inputs}) for batch in probed]
        ahead = Walk(flows[0], dense_store, later=[{site.target} for site in sites])
        walk = Walk(flows[1], store, later=[*(site_reads(site) for site in sites), flows[1].outputs])
        for number, site in enumerate(sites):
            progress(number, len(sites), site.label)
            fit = Fit.of(site, constants, dense_constants)
            halves = half_moments(fit, shared_rows(fit, ahead, walk, work, options))
            ahead.tidy()
            walk.tidy()
            rest = _Rest(walk, store, fit)

            def measured(at: Fitted, rest: _Rest = rest) -> float:
                tensors = at.fit.tensors(at.coefficients)
                gaps = [score_error(one, rest.outputs(batch, tensors)) for one, batch in zip(expected, probed, strict=True)]
                return float(np.mean(gaps))

            left = keeps.get(site.name, {})
            narrow = pool.map(partial(_narrowed, fit, halves, options), left.values())
            narrowed |= zip(left, pool.map(measured, narrow), strict=True)
            keys = sorted((key for key in groupings if key[0] == site.name), key=lambda key: key[1])
            if not keys:
                continue
            fitted = list(pool.map(partial(_fitted, fit, halves, options), (groupings[key] for key in keys)))
            every_other = sorted({*range(0, len(keys), 2), len(keys) - 1})
            costs = list(pool.map(measured, (fitted[at] for at in every_other)))
            found |= zip(keys, _between([at.error for at in fitted], every_other, costs), strict=True)
    progress(len(sites), len(sites), "done")
    return found, narrowed


@dataclass(frozen=True, eq=False)
class Fitted:
    """A layer fitted in some groups, and the squared error that leaves, as a share of its target's variance."""

    fit: Fit
    coefficients: Coefficients
    error: float


def _fitted(fit: Fit, halves: tuple[Sums, ...], options: FitOptions, grouping: Grouping) -> Fitted:
    regrouped = [fit.regrouped(half, grouping) for half in halves]
    other, parts = regrouped[0][0], tuple(part for _, part in regrouped)
    damping = chosen_damping(other.before, parts, options, has_intercept=fit.site.has_intercept)
    part = add_up(parts)
    new = solve(part, other.before, damping=damping, has_intercept=fit.site.has_intercept)
    error = float(residual(part, new).sum()) / (float(variance(part).sum()) or 1.0)
    return Fitted(other, new, error)


def _narrowed(fit: Fit, halves: tuple[Sums, ...], options: FitOptions, keep: Order) -> Fitted:
    """Return a reader fitted to some of its channels."""
    kernel = fit.unknowns // fit.site.inputs.shape[1]
    columns = (keep[:, None] * kernel + np.arange(kernel)).reshape(-1)
    other = replace(fit, site=replace(fit.site, inputs=fit.site.inputs[:, keep]))
    parts = tuple(half.of_inputs(columns) for half in halves)
    total = add_up(parts)
    new = solve(total, other.before, damping=options.damping, has_intercept=fit.site.has_intercept)
    return Fitted(other, new, float("nan"))


def _between(errors: Sequence[float], at: Sequence[int], costs: Sequence[float]) -> list[float]:
    """Return the cost for each error, having measured some: what is in between follows the error.

    Outputs move with the error of a layer, so the errors, which are cheap to know, say where between two measurements a cost lies.
    """
    order = np.argsort([errors[index] for index in at], kind="stable")
    known = np.array([errors[index] for index in at])[order]
    result = np.interp(errors, known, np.array(costs)[order])
    result[list(at)] = costs
    return [float(cost) for cost in result]


class _Rest:
    """What is left of a model from one layer on, with that layer's weights as inputs."""

    def __init__(self, walk: Walk, store: ActivationStore, fit: Fit) -> None:
        self._store = store
        known = {name: store.get(name, 0) for name in store.names()}
        weights: dict[str, NDArray[np.generic]] = fit.tensors(fit.before)
        self._made = [name for name in walk.flow.outputs if name in known]  # before the layer
        left = [name for name in walk.flow.outputs if name not in known]
        places = walk.flow.places_before(left, known)
        self._session = session(walk.flow.piece(places, known | weights, left, {}), threads=1) if left else None
        self._inputs = [] if self._session is None else [value.name for value in self._session.get_inputs()]

    def outputs(self, batch: int, weights: Mapping[str, NDArray[np.generic]]) -> dict[str, object]:
        """Return the model's outputs with these weights in the layer."""
        made: dict[str, object] = {name: self._store.get(name, batch) for name in self._made}
        if self._session is None:
            return made
        feeds = {name: weights[name] if name in weights else self._store.get(name, batch) for name in self._inputs}
        return made | run(self._session, feeds)
