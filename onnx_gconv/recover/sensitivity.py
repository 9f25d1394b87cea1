"""What grouping one layer does to the model's outputs: the cost that a search should add up."""

from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import onnx
from numpy.typing import NDArray

from onnx_gconv.model.constants import Constants
from onnx_gconv.recover.divergence import divergence
from onnx_gconv.recover.fit import Fit
from onnx_gconv.recover.flow import Flow
from onnx_gconv.recover.normal import Sums, solve
from onnx_gconv.recover.reconstruct import Effort, Progress, shared_rows, site_reads, total_moments
from onnx_gconv.recover.site import find_sites
from onnx_gconv.recover.store import Store
from onnx_gconv.recover.walk import Walk, put_inputs
from onnx_gconv.recover.work import Work
from onnx_gconv.runtime import Feeds, run, session
from onnx_gconv.solve.grouping import Grouping

Key = tuple[str, int]  # layer, number of groups


def sensitivities(
    dense: onnx.ModelProto,
    model: onnx.ModelProto,
    groupings: Mapping[Key, Grouping],
    feeds: Iterable[Feeds],
    *,
    probes: int,
    effort: Effort,
    progress: Progress,
) -> dict[Key, float]:
    """Return, for each layer and number of groups, how far the outputs are off when the layer gets these groups and is fitted.

    Everything else is as `model` has it: the dense model itself, or one masked and recovered, whose layers are then tried
    with other groups in the company of the rest. Both are walked through once; from each layer on, what is left of `model`
    runs once for each number of groups, on the first `probes` batches only. A layer that cannot be fitted has no entry.
    """
    flows = Flow(dense), Flow(model)
    constants = Constants(model)
    names = {name for name, _ in groupings}
    # Without a plan: every layer sees all its inputs, so that their moments serve any grouping.
    sites = [site for site in find_sites(flows[1], constants, {}) if site.name in names]
    found: dict[Key, float] = {}
    with Store() as dense_store, Store() as store, ThreadPoolExecutor(effort.jobs) as pool:
        work = Work(pool, put_inputs(feeds, flows[0].inputs, (dense_store, store)))
        probed = [batch for share in work.shares for batch in share][:probes]
        whole = session(dense, threads=effort.jobs)
        expected = [run(whole, {name: store.get(name, batch) for name in flows[0].inputs}) for batch in probed]
        ahead = Walk(flows[0], dense_store, later=[{site.target} for site in sites])
        walk = Walk(flows[1], store, later=[*(site_reads(site) for site in sites), flows[1].outputs])
        for number, site in enumerate(sites):
            progress(number, len(sites), site.label)
            fit = Fit.of(site, constants)
            total = total_moments(fit, shared_rows(fit, ahead, walk, work, effort))
            ahead.tidy()
            walk.tidy()
            rest = _Rest(walk, store, fit)

            def cost(key: Key, fit: Fit = fit, total: Sums = total, rest: _Rest = rest) -> float:
                other, part = fit.regrouped(total, groupings[key])
                new = solve(part, other.before, damping=effort.damping, has_intercept=fit.site.has_intercept)
                tensors = other.tensors(new)
                gaps = [divergence(expected[at], rest.outputs(batch, tensors)) for at, batch in enumerate(probed)]
                return float(np.mean(gaps))

            keys = [key for key in groupings if key[0] == site.name]
            found |= dict(zip(keys, pool.map(cost, keys), strict=True))
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
