"""What every rank of a layer would cost: reduced-rank regression, in one walk through the dense model.

Patches u of a layer have the second moments H = LL'. Of all weights of rank r, those that give nearest to what W gives are W V V',
with V the first r right singular vectors of L'W. They leave the squares of the other singular values: eigenvalues of W'HW.
"""

from collections.abc import Collection, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import onnx

from onnx_gconv.listener import OnProgress
from onnx_gconv.model.constants import Constants
from onnx_gconv.recover.emptying import LEAST_POSITIONS, POSITIONS_AN_INPUT, look
from onnx_gconv.recover.fit import Fit
from onnx_gconv.recover.fitting import FitOptions, site_reads
from onnx_gconv.recover.flow import Flow
from onnx_gconv.recover.normal import Doubles
from onnx_gconv.recover.site import find_sites
from onnx_gconv.recover.store import ActivationStore
from onnx_gconv.recover.walk import Walk, put_inputs
from onnx_gconv.recover.work import Work
from onnx_gconv.rewrite.match import Matched
from onnx_gconv.runtime import Feeds


def rank_errors(
    dense: onnx.ModelProto, names: Collection[str], feeds: Iterable[Feeds], *, options: FitOptions, progress: OnProgress
) -> dict[str, Doubles]:
    """Return the errors of rank 0, 1, ... of each layer that can be fitted, in the unit that those of widths have."""
    flow, constants = Flow(dense), Constants(dense)
    sites = [site for site in find_sites(flow, constants, Matched()) if site.name in names and len(site.inputs) == 1]
    options = replace(options, positions_a_weight=POSITIONS_AN_INPUT, least_positions=LEAST_POSITIONS)
    found: dict[str, Doubles] = {}
    with ActivationStore() as store, ThreadPoolExecutor(options.jobs) as pool:
        work = Work(pool, options.jobs, put_inputs(feeds, flow.inputs, (store,)))
        walk = Walk(flow, store, later=[{site.target, *site_reads(site)} for site in sites])
        for number, site in enumerate(sites):
            progress(number, len(sites), site.label)
            seen = look(Fit.of(site, constants, constants), walk, work, options)
            found[site.name] = left_by_rank(seen.gram, seen.weight)
            walk.tidy()
    progress(len(sites), len(sites), "done")
    return found


def left_by_rank(gram: Doubles, weight: Doubles) -> Doubles:
    """Return what the best weights of rank 0, 1, ... leave of what these (inputs, outputs) give."""
    squares = np.maximum(np.linalg.eigvalsh(weight.T @ gram @ weight), 0.0)  # ascending
    return np.concatenate([np.cumsum(squares)[::-1], [0.0]])
