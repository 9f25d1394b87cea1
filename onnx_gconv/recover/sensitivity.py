"""What grouping one layer alone does to the model's outputs: the cost that a search should add up."""

from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import onnx
from numpy.typing import NDArray

from onnx_gconv.model.constants import Constants
from onnx_gconv.recover.divergence import divergence
from onnx_gconv.recover.fit import Fit
from onnx_gconv.recover.flow import Flow
from onnx_gconv.recover.normal import Rows, Sums, solve
from onnx_gconv.recover.reconstruct import DAMPING, Progress
from onnx_gconv.recover.site import find_sites
from onnx_gconv.recover.store import Store
from onnx_gconv.recover.walk import Walk, put_inputs
from onnx_gconv.recover.work import Work
from onnx_gconv.runtime import Feeds, run, session
from onnx_gconv.solve.grouping import Grouping

Key = tuple[str, int]  # layer, number of groups
POSITIONS_A_WEIGHT = 30
LEAST_POSITIONS = 10_000


def sensitivities(
    model: onnx.ModelProto,
    groupings: Mapping[Key, Grouping],
    feeds: Iterable[Feeds],
    *,
    probes: int,
    seed: int,
    jobs: int,
    progress: Progress,
) -> dict[Key, float]:
    """Return, for each layer and number of groups, the divergence of the outputs when that layer alone is grouped and fitted.

    The dense model is walked through once; from each layer on, what is left of it runs once for each number of groups, on
    the first `probes` batches only. A layer that cannot be fitted has no entry.
    """
    flow, constants = Flow(model), Constants(model)
    names = {name for name, _ in groupings}
    sites = [site for site in find_sites(flow, constants, {}) if site.name in names]
    found: dict[Key, float] = {}
    with Store() as store, ThreadPoolExecutor(jobs) as pool:
        work = Work(pool, put_inputs(feeds, flow.inputs, [store]))
        probed = [batch for share in work.shares for batch in share][:probes]
        whole = session(model, threads=jobs)
        expected = [run(whole, {name: store.get(name, batch) for name in flow.inputs}) for batch in probed]
        walk = Walk(flow, store, later=[*({site.source} for site in sites), flow.outputs])
        for number, site in enumerate(sites):
            progress(number, len(sites), site.label)
            fit = Fit.of(site, constants)
            total = _input_moments(fit, walk, work, seed)
            rest = _Rest(walk, store, fit)

            def cost(key: Key, fit: Fit = fit, total: Sums = total, rest: _Rest = rest) -> float:
                other, moments = fit.regrouped(total, groupings[key])
                new = solve(moments, other.before, damping=DAMPING, has_intercept=fit.site.has_intercept)
                tensors = other.tensors(new)
                return float(np.mean([divergence(expected[batch], rest.outputs(batch, tensors)) for batch in probed]))

            keys = [key for key in groupings if key[0] == site.name]
            found |= dict(zip(keys, pool.map(cost, keys), strict=True))
            walk.tidy()
    progress(len(sites), len(sites), "done")
    return found


class _Rest:
    """What is left of a model from one layer on, with that layer's weights as inputs."""

    def __init__(self, walk: Walk, store: Store, fit: Fit) -> None:
        self._store = store
        known = {name: store.get(name, 0) for name in store.names()}
        weights: dict[str, NDArray[np.generic]] = fit.tensors(fit.before)
        places = walk.flow.places_before(walk.flow.outputs, known)
        self._session = session(walk.flow.piece(places, known | weights, walk.flow.outputs, {}), threads=1)
        self._inputs = [value.name for value in self._session.get_inputs() if value.name not in weights]

    def outputs(self, batch: int, weights: Mapping[str, NDArray[np.generic]]) -> dict[str, object]:
        """Return the model's outputs with these weights in the layer."""
        return run(self._session, {name: self._store.get(name, batch) for name in self._inputs} | dict(weights))


def _input_moments(fit: Fit, walk: Walk, work: Work, seed: int) -> Sums:
    """Return the moments of the layer's inputs in the dense model; the target's follow from the weights."""
    compute = walk.next_stop()
    most = work.positions(fit.unknowns, a_weight=POSITIONS_A_WEIGHT, least=LEAST_POSITIONS)

    def rows(batch: int) -> Rows:
        rng = np.random.default_rng([seed, walk.stops, batch])
        return fit.rows(compute(batch)[fit.site.source], None, most=most, rng=rng)

    return work.sum(rows)
