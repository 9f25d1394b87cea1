"""All layers fitted, in closed form: walk through the dense and the compressed model once, and fit each Conv on the way."""

from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial, reduce
from operator import sub

import numpy as np
import onnx

from onnx_gconv.errors import DataError
from onnx_gconv.listener import OnProgress
from onnx_gconv.model.constants import Constants
from onnx_gconv.model.surgery import Surgery
from onnx_gconv.recover.chain import Scene, find_chains, fit_chain, in_parts, linked, shared_out
from onnx_gconv.recover.definite import Run
from onnx_gconv.recover.elimination import Reader, eliminate, without_others
from onnx_gconv.recover.fit import Fit
from onnx_gconv.recover.flow import Flow
from onnx_gconv.recover.newton import Link, Seen
from onnx_gconv.recover.normal import (
    Coefficients,
    Doubles,
    Equations,
    Moments,
    Rows,
    Sums,
    add_up,
    damping_between,
    moments,
    of_rank,
    residual,
    retarget,
    scarcity_damping,
    target_sums,
    variance,
)
from onnx_gconv.recover.site import Site, find_sites
from onnx_gconv.recover.store import MEMORY_BYTES, ActivationStore
from onnx_gconv.recover.walk import Arrays, Stop, Walk, put_inputs
from onnx_gconv.recover.work import SharedRows, Work
from onnx_gconv.rewrite.dropped import empty
from onnx_gconv.rewrite.mask import mask
from onnx_gconv.rewrite.match import Matched, MatchedSpace
from onnx_gconv.runtime import Feeds
from onnx_gconv.solve.grouping import Order

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
    has_chains: bool = True  # whether Convs in a row are fitted together as well
    is_choosing: bool = False  # whether the channels that stay are chosen anew, as many as the plan says
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
    """The masked model with fitted weights, what it is masked by in the end, and what each fit brought."""

    model: onnx.ModelProto
    matched: Matched
    layers: tuple[LayerError, ...]


def fit_layers(
    dense: onnx.ModelProto, matched: Matched, feeds: Iterable[Feeds], *, options: FitOptions, progress: OnProgress
) -> FittedModel:
    """Return the model masked, with its weights and biases fitted to the dense model."""
    chosen = _open_spaces(dense, matched) if options.is_choosing else {}
    everything = {each.space.name: np.arange(each.space.channels) for each in chosen.values()}
    open_matched = matched.rechosen(everything)
    fitted_names = {site.name for site in masked_sites(dense, open_matched)}
    # A rank is brought in by the fit, which starts from all of the weight.
    unfitted = {name: rank for name, rank in open_matched.ranks.items() if name not in fitted_names}
    masked = mask(dense, replace(open_matched, ranks=unfitted))
    sites = masked_sites(masked, open_matched)
    # A branch that is dropped leaves nothing: what is fitted behind it makes up for its mean, for less time than an Add takes.
    after = Flow(masked).counts_after(fitted_names)
    masked, emptied = empty(masked, [branch for branch in matched.dropped if after.get(branch.add)])
    sites = [site for site in sites if site.name not in emptied]
    fitted = fit_sites(dense, masked, sites, feeds, chosen=chosen, options=options, progress=progress)
    return FittedModel(fitted.model, matched.rechosen(fitted.keeps), fitted.layers)


def masked_sites(masked: onnx.ModelProto, matched: Matched) -> list[Site]:
    """Return all that can be fitted in a masked model; also what the plan leaves dense."""
    return find_sites(Flow(masked), Constants(masked), matched)


@dataclass(frozen=True)
class FittedSites:
    """A model with some sites fitted, the channels that were chosen on the way, by space, and what each fit brought."""

    model: onnx.ModelProto
    keeps: Mapping[str, Order]
    layers: tuple[LayerError, ...]


def fit_sites(
    dense: onnx.ModelProto,
    masked: onnx.ModelProto,
    sites: Sequence[Site],
    feeds: Iterable[Feeds],
    *,
    options: FitOptions,
    progress: OnProgress,
    chosen: Mapping[str, MatchedSpace] | None = None,
) -> FittedSites:
    """Return the masked model with these sites fitted to the dense one, in graph order; `chosen` by the reader that chooses.

    Targets come from the dense model, inputs from the compressed one as fitted so far; no node of either is run twice.
    """
    flows = Flow(dense), Flow(masked)
    chains = find_chains(flows[1], sites) if options.has_chains else {}
    stored = int(options.memory_share * MEMORY_BYTES)
    with (
        ActivationStore(stored) as dense_store,
        ActivationStore(stored) as compressed_store,
        ThreadPoolExecutor(options.jobs) as pool,
    ):
        work = Work(pool, options.jobs, put_inputs(feeds, flows[0].inputs, (dense_store, compressed_store)), options.memory_share)
        reads = [site_reads(site) | ({chains[site.name][0].source} if site.name in chains else set()) for site in sites]
        ahead = Walk(flows[0], dense_store, later=[{site.target} for site in sites])
        behind = Walk(flows[1], compressed_store, later=reads)
        fitter = _Fitter(options, work, ahead, behind, Constants(masked), Constants(dense), chosen or {}, chains)
        for number, site in enumerate(sites):
            progress(number, len(sites), site.label)
            fitter.fit(site)
            ahead.tidy()
            behind.tidy()
    progress(len(sites), len(sites), "done")
    surgery = Surgery(masked)
    for name, value in fitter.tensors.items():
        surgery.constant(name, value)
    return FittedSites(surgery.finish(), fitter.keeps, tuple(fitter.errors))


def _open_spaces(dense: onnx.ModelProto, matched: Matched) -> dict[str, MatchedSpace]:
    """Return the narrowed spaces whose channels can be chosen when their one reader is fitted, by that reader."""
    fitted = {site.name for site in find_sites(Flow(dense), Constants(dense), matched)}
    fixed = {each.layer.name for each in matched.layers}
    return {
        each.space.readers[0]: each
        for each in matched.spaces
        if each.space.is_alone
        and len(each.space.readers) == 1
        and each.space.readers[0] in fitted
        and not fixed & {*each.space.readers, *each.space.writers}
    }


@dataclass(eq=False)
class _Fitter:
    """What one walk has found so far."""

    options: FitOptions
    work: Work
    ahead: Walk
    behind: Walk
    constants: Constants
    dense_constants: Constants
    chosen: Mapping[str, MatchedSpace]  # by the reader that chooses
    chains: dict[str, tuple[Site, ...]]  # those still to come: the Convs before a site that are fitted with it, by its name
    tensors: dict[str, np.ndarray] = field(default_factory=dict)
    keeps: dict[str, Order] = field(default_factory=dict)
    errors: list[LayerError] = field(default_factory=list)
    _links: dict[str, Link] = field(default_factory=dict)  # those of chains that are still to be fitted, by their names

    def fit(self, site: Site) -> None:
        """Fit one site, and let the walk go on with its weights."""
        fit, run = Fit.of(site, self.constants, self.dense_constants), self.work.pool.map
        targets, inputs = self.ahead.next_stop(), self.behind.next_stop()
        rows = site_rows(fit, targets, inputs, self.behind.stops, self.work, self.options)
        halves = half_moments(fit, rows)
        prior = fit.before
        if site.name in self.chosen:
            whole = add_up(halves)  # in the first half: they are large
            fit, columns, prior = self._choose(fit, whole)
            others = [half.of_inputs(columns) for half in halves[1:]]
            rows, halves = rows.of_inputs(columns), (reduce(sub, others, whole.of_inputs(columns)), *others)
            del whole
        # With the channels that stay: with all of them, the weights are right as they are, and no damping would be too much.
        damping = chosen_damping(prior, halves, self.options, has_intercept=site.has_intercept, run=run)
        total = add_up(halves)
        equations = Equations.of(total, damping, has_intercept=site.has_intercept, run=run)
        new = _ranked(fit, total, equations.solve(total, prior, run))
        self.errors.append(_error(site, total, fit, new))
        together = None
        if site.name in self.chains:
            rows.forget()  # the chain has patches of its own to hold
            together = self._fit_chain(Link(fit, new, total), targets, inputs)
        if together is not None:
            new = together
        elif site.clamp is not None:
            for _ in range(self.options.relaxations):
                relaxed = rows.map(partial(_relaxed_sums, fit, new))
                there = retarget(total, relaxed)
                new = _ranked(fit, there, equations.solve(there, prior, run))
        if self._is_to_come(site.name):
            self._links[site.name] = Link(fit, new, total)
        self._keep(fit.tensors(new))

    def _choose(self, fit: Fit, total: Sums) -> tuple[Fit, Order, Coefficients]:
        """Return the fit of the channels that stay, as many as the plan says, their columns, and the weights to start from.

        These make up for the channels that go: what the data leave open is to stay as the dense model has it, with all of them.
        """
        each, site = self.chosen[fit.site.name], fit.site
        damping = scarcity_damping(fit.unknowns, total.count, least=self.options.damping)
        run = self.work.pool.map
        equations = Equations.of(total, damping, has_intercept=site.has_intercept, run=run)
        best = equations.solve(total, fit.before, run)
        rows = np.arange(fit.unknowns).reshape(each.space.channels, -1)
        scale = fit.tail[0][site.outputs[0]]
        inverse = equations.inverse(total, run)
        del equations  # they are as large
        reader = Reader(inverse, best.weight[0] * scale, rows, is_inverse=True)
        keep = eliminate([reader], least=len(each.keep), run=run).keep(len(each.keep))
        self.keeps[each.space.name] = keep
        inputs, columns = site.inputs.reshape(each.space.channels, -1)[keep].reshape(1, -1), rows[keep].reshape(-1)
        prior = Coefficients(without_others(inverse, fit.before.weight[0], columns, run)[None], fit.before.intercept)
        return replace(fit, site=replace(site, inputs=inputs)), columns, prior

    def _fit_chain(self, last: Link, targets: Stop, inputs: Stop) -> Coefficients | None:
        """Fit a site together with those before it, whose weights change once more; None if that does not pay."""
        site = last.fit.site
        links = linked([*(self._links[each.name] for each in self.chains.pop(site.name)), last])
        self._links = {name: link for name, link in self._links.items() if self._is_to_come(name)}
        source, batches = links[0].fit.site.source, [batch for share in self.work.shares for batch in share]
        images = inputs(batches[0])[source].shape[1:]
        scene = Scene.of([link.fit for link in links], images[1:])
        if scene is None:
            return None

        def seen(batch: int, samples: int) -> Seen | None:
            if not samples or (arrays := inputs(batch))[source].shape[1:] != images:
                return None  # images of other sizes are passed over
            rng = np.random.default_rng([self.options.seed, self.behind.stops, batch])
            shortcut = arrays.get(site.shortcut)
            return scene.seen(last.fit, arrays[source], targets(batch)[site.target], shortcut, samples=samples, rng=rng)

        # Of all batches some: samples may come class by class.
        found = self.work.pool.map(seen, batches, shared_out(scene.samples, len(batches)))
        some = [each for each in found if each is not None]
        fitted = fit_chain(links, scene.windows, in_parts(some), self.work.pool) if some else None
        if fitted is None:
            return None
        for link, at in zip(links[:-1], fitted, strict=False):
            self._keep(link.fit.tensors(at))
            if link.fit.site.name in self._links:
                self._links[link.fit.site.name] = replace(link, at=at)
        list(self.work.pool.map(self.behind.again(site.source, given=source), batches))
        return fitted[-1]

    def _is_to_come(self, name: str) -> bool:
        """Return whether a site is part of a chain that is still to be fitted."""
        return any(name == site.name for chain in self.chains.values() for site in chain)

    def _keep(self, tensors: Mapping[str, np.ndarray]) -> None:
        self.behind.constants.update(tensors)
        self.tensors |= tensors


def site_reads(site: Site) -> set[str]:
    """Return what a fit needs of the compressed model."""
    return {site.source, site.shortcut} if site.shortcut else {site.source}


def shared_rows(fit: Fit, ahead: Walk, behind: Walk, work: Work, options: FitOptions) -> SharedRows:
    """Return a site's inputs in the compressed model and its targets from the dense one; both walks go on to it."""
    targets, inputs = ahead.next_stop(), behind.next_stop()
    return site_rows(fit, targets, inputs, behind.stops, work, options)


def site_rows(fit: Fit, targets: Stop, inputs: Stop, stop: int, work: Work, options: FitOptions) -> SharedRows:
    """Return a site's rows at a stop of both walks, which has a number: it draws the positions."""
    site = fit.site
    most = work.positions(max(options.least_positions, options.positions_a_weight * fit.unknowns))

    def rows(batch: int) -> Rows:
        compressed: Arrays = inputs(batch)
        rng = np.random.default_rng([options.seed, stop, batch])
        dense = targets(batch)[site.target]
        return fit.rows(compressed[site.source], dense, compressed.get(site.shortcut), most=most, rng=rng)

    return work.rows(rows)


def half_moments(fit: Fit, rows: SharedRows, *, parts: int = 2) -> tuple[Sums, ...]:
    """Return the moments of every other share of the samples and of those between, refusing NaN and infinity.

    Where there is but one share, it is the only half. There may be other `parts` than halves.
    """
    each = [Moments() for _ in range(parts)]
    count = 0
    for number, piece in enumerate(rows.map(moments)):
        each[number % parts].add(piece)
        count = number + 1
    halves = [part.total() for part in each[:count]]
    if not all(np.isfinite(values).all() for half in halves for values in (half.u, half.t, half.uu, half.ut)):
        raise DataError(
            f"on the calibration samples, Conv or Gemm {fit.site.label!r} reads or gives NaN, infinity, or numbers too large to "
            "square.",
            hint="check that the samples are preprocessed as the model expects",
        )
    return tuple(halves)


def chosen_damping(
    prior: Coefficients, halves: tuple[Sums, ...], options: FitOptions, *, has_intercept: bool, run: Run = map
) -> float:
    """Return how much a fit is damped: as each half of the samples likes it best from the other."""
    if len(halves) < 2 or not options.is_validated:
        return options.damping
    return damping_between((halves[0], halves[1]), prior, least=options.damping, has_intercept=has_intercept, run=run)


def _ranked(fit: Fit, total: Sums, at: Coefficients) -> Coefficients:
    """Return the coefficients with the rank that the site is to have."""
    site = fit.site
    if not site.rank or site.rank >= site.outputs.size:
        return at
    return of_rank(total, at, site.rank, scale=fit.tail[0][site.outputs[0]], has_intercept=site.has_intercept)


def _relaxed_sums(fit: Fit, at: Coefficients, rows: Rows) -> tuple[Doubles, Doubles, Doubles]:
    return target_sums(fit.relaxed(rows, at))


def _error(site: Site, total: Sums, fit: Fit, new: Coefficients) -> LayerError:
    whole = float(variance(total).sum()) or 1.0
    before, after = (float(residual(total, at).sum()) / whole for at in (fit.before, new))
    return LayerError(site.name, site.label, before, after)
