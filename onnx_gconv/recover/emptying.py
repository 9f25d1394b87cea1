"""How every space of a model could be emptied, and what the ranks of its layers cost: one walk through the dense model."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace

import numpy as np
import onnx
from numpy.typing import NDArray

from onnx_gconv.listener import OnProgress
from onnx_gconv.model.constants import Constants
from onnx_gconv.model.spaces import Spaces
from onnx_gconv.model.widths import Space
from onnx_gconv.recover.elimination import Elimination, Reader, eliminate
from onnx_gconv.recover.fit import Fit
from onnx_gconv.recover.fitting import FitOptions, half_moments, site_reads, site_rows
from onnx_gconv.recover.flow import Flow
from onnx_gconv.recover.normal import Doubles, damped_gram, scarcity_damping
from onnx_gconv.recover.site import Site, find_sites
from onnx_gconv.recover.spectra import left_by_rank
from onnx_gconv.recover.store import ActivationStore
from onnx_gconv.recover.walk import Arrays, Walk, put_inputs
from onnx_gconv.recover.work import Work
from onnx_gconv.rewrite.match import Matched
from onnx_gconv.runtime import Feeds

# Positions that the second moments of a reader rest on, for each of its inputs and at least: an order of channels needs fewer
# than a fit does.
POSITIONS_AN_INPUT = 5
LEAST_POSITIONS = 8_000
WAITING_BYTES = 2**28  # Gram matrices of eliminations that are not done


def errors(
    dense: onnx.ModelProto,
    found: Sequence[Space],
    spaces: Spaces,
    ranked: Collection[str],
    feeds: Iterable[Feeds],
    *,
    options: FitOptions,
    progress: OnProgress,
) -> tuple[dict[str, Elimination], dict[str, list[float]]]:
    """Return how each space is emptied, and the errors of rank 0, 1, ... of some layers, by name.

    What is read by something that cannot be fitted has no entry. Errors are shares of the variance of what the reader's result
    is: of the sum, where it closes a residual block.
    """
    flow, constants = Flow(dense), Constants(dense)
    wanted = {reader for space in found for reader in space.readers} | {*ranked}
    sites = [site for site in find_sites(flow, constants, Matched()) if site.name in wanted and len(site.inputs) == 1]
    open_spaces = [space for space in found if {*space.readers} <= {site.name for site in sites}]
    begun: dict[str, Future[Elimination]] = {}
    seen: dict[str, Seen] = {}
    ranks: dict[str, list[float]] = {}
    options = replace(options, positions_a_weight=POSITIONS_AN_INPUT, least_positions=LEAST_POSITIONS)
    with ActivationStore() as store, ThreadPoolExecutor(options.jobs) as pool:
        work = Work(pool, options.jobs, put_inputs(feeds, flow.inputs, (store,)))
        walk = Walk(flow, store, later=[{site.target, *site_reads(site)} for site in sites])
        queue = _Queue(pool)
        for number, site in enumerate(sites):
            progress(number, len(sites), site.label)
            seen[site.name] = look(Fit.of(site, constants, constants), walk, work, options)
            walk.tidy()
            if site.name in ranked:
                ranks[site.name] = left_by_rank(seen[site.name].gram, seen[site.name].weight).tolist()
            for space in open_spaces:
                if space.name not in begun and {*space.readers} <= seen.keys():
                    begun[space.name] = queue.submit([seen[name].reader(space, spaces) for name in space.readers])
            still = {name for space in open_spaces if space.name not in begun for name in space.readers}
            seen = {name: each for name, each in seen.items() if name in still}  # Gram matrices are large
        result = {name: future.result() for name, future in begun.items()}
    progress(len(sites), len(sites), "done")
    return result, ranks


class _Queue:
    """Eliminations that go on while the walk does, as many as fit in memory."""

    def __init__(self, pool: ThreadPoolExecutor) -> None:
        self._pool = pool
        self._waiting: list[tuple[Future[Elimination], int]] = []

    def submit(self, readers: Sequence[Reader]) -> "Future[Elimination]":
        """Begin one, once there is room for it."""
        size = sum(reader.gram.nbytes for reader in readers)
        self._waiting = [(future, taken) for future, taken in self._waiting if not future.done()]
        while self._waiting and sum(taken for _, taken in self._waiting) + size > WAITING_BYTES:
            self._waiting.pop(0)[0].result()
        future = self._pool.submit(eliminate, readers)
        self._waiting.append((future, size))
        return future


@dataclass(frozen=True, eq=False)
class Seen:
    """What one site reads, in second moments, and its weights in units of its result's deviation."""

    site: Site
    gram: Doubles
    weight: Doubles

    def reader(self, space: Space, spaces: Spaces) -> Reader:
        """Return it as a reader of one of the spaces that it reads."""
        axis = spaces.axes[self.site.source]
        start = sum(spaces.sizes[atom] for atom in axis.atoms[: axis.atoms.index(space.atom)])
        channels = sum(spaces.sizes[atom] for atom in axis.atoms)
        rows = np.arange(len(self.gram)).reshape(channels, -1)
        return Reader(self.gram, self.weight, rows[start : start + space.channels])


def look(fit: Fit, walk: Walk, work: Work, options: FitOptions) -> Seen:
    """Return what a site reads and has, at the next stop of a walk through the dense model."""
    stop = walk.next_stop()
    site, spreads = fit.site, dict[int, _Spread]()

    def noted(batch: int) -> Arrays:
        found = stop(batch)
        spreads[batch] = _Spread.of(found[site.target])
        return found

    (total,) = half_moments(fit, site_rows(fit, noted, stop, walk.stops, work, options), parts=1)
    scale = fit.tail[0][site.outputs[0]]
    # A target before the normalization is scaled by it as the weights are; a sum behind it is what it is.
    variance = _variance(spreads) if site.shortcut else _variance(spreads) * np.square(fit.tail[0])
    deviation = float(np.sqrt(variance.sum())) or 1.0
    damping = scarcity_damping(fit.unknowns, total.count, least=options.damping)
    gram = damped_gram(total, damping, has_intercept=site.has_intercept)
    return Seen(site, gram, fit.before.weight[0] * scale / deviation)


@dataclass(frozen=True, eq=False)
class _Spread:
    """Sums over a batch of each channel's values and their squares."""

    count: int
    values: Doubles
    squares: Doubles

    @classmethod
    def of(cls, values: NDArray[np.generic]) -> "_Spread":
        rows = values.reshape(*values.shape[:2], -1).astype(np.float32, copy=False)
        mean = rows.mean(axis=2)  # of each sample: about it, float32 is exact enough
        about = rows - mean[:, :, None]
        with np.errstate(invalid="ignore", over="ignore"):  # NaN and infinity are found in the moments
            within = np.matmul(about[:, :, None], about[:, :, :, None])[:, :, 0, 0].astype(np.float64)
        each, size = mean.astype(np.float64), rows.shape[2]
        return cls(len(rows) * size, size * each.sum(axis=0), (within + size * np.square(each)).sum(axis=0))


def _variance(spreads: Mapping[int, _Spread]) -> Doubles:
    """Return the variance of each channel over all batches, added up in their order."""
    ordered = [spreads[batch] for batch in sorted(spreads)]
    count = sum(each.count for each in ordered)
    mean, square = (np.sum([getattr(each, name) for each in ordered], axis=0) / count for name in ("values", "squares"))
    return np.asarray(np.maximum(square - np.square(mean), 0.0))
