"""Partitions chosen jointly: several layers share the partition of a channel space, so that no Gather is needed there.

A site is a set of channels to be partitioned; a term is a layer between two sites. Groups are split level by level, so that the
partition into 2G groups refines the one into G: layers of one site may then differ in their number of groups. Each site has a
path of such numbers. They are halved as long as a layer can use it, and then split in three, five, and so on.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from onnx_gconv.solve.importance import Matrix
from onnx_gconv.solve.partition import Groups, Profit, exchange_pairs, total
from onnx_gconv.solve.split import smallest_factor

POWER_ITERATIONS = 8

Labels = NDArray[np.int64]  # the group of each channel of a site
Blocks = NDArray[np.float32]  # (groups, outputs, inputs)
Signs = NDArray[np.float32]  # (channels, starts): +1 and -1 are the two halves


@dataclass(frozen=True)
class SharedAxis:
    """Channels with one partition; a fixed site has its channels in place: group g is the g-th stretch of them."""

    channels: int
    fixed: bool = False


@dataclass(frozen=True)
class Term:
    """A layer: its importance, (Cout, Cin), and the sites of its outputs and inputs."""

    matrix: Matrix
    out_site: int
    in_site: int


@dataclass(frozen=True)
class Level:
    """A partition of the sites into `groups` groups each; sites whose channels that does not divide are missing."""

    groups: int
    labels: dict[int, Labels]


def solve_coupled(
    sites: Sequence[SharedAxis],
    terms: Sequence[Term],
    *,
    most_groups: int,
    seed: int,
    only: int | None = None,
    starts: int = 8,
    sweeps: int = 30,
) -> list[Level]:
    """Return levels of up to `most_groups`, as far as any term can use them; `only` if none but this number is wanted."""
    rng = np.random.default_rng(seed)
    paths = [_path(number, sites, terms, most_groups, only) for number in range(len(sites))]
    levels = {1: Level(1, {number: np.zeros(site.channels, dtype=np.int64) for number, site in enumerate(sites)})}
    # Halves first: their random starts are one sequence.
    for groups in sorted(set[int]().union(*paths), key=lambda groups: (largest_factor(groups) > 2, groups)):
        parts = largest_factor(groups)
        coarse = levels.get(groups // parts)
        if coarse is None:
            continue
        open_sites = {number for number in coarse.labels if groups in paths[number]}
        useful = [term for term in terms if {term.out_site, term.in_site} <= open_sites]
        numbers = sorted(open_sites & {number for term in useful for number in (term.out_site, term.in_site)})
        if not useful:
            continue
        if parts == 2:
            found = _halve(sites, useful, coarse, numbers, rng, starts, sweeps)
        else:
            found = split_coupled(sites, useful, coarse, numbers, parts, np.random.default_rng([seed, groups]), starts, sweeps)
        levels[groups] = Level(groups, {number: parts * coarse.labels[number] + part for number, part in found.items()})
    return [levels[groups] for groups in sorted(levels)]


def _path(number: int, sites: Sequence[SharedAxis], terms: Sequence[Term], most_groups: int, only: int | None) -> set[int]:
    """Return the numbers of groups that a site has beside 1: each a multiple of the one before, by ever larger prime factors."""
    if only is not None and largest_factor(only) == 2:
        only = None  # halves lead there
    ends = [(term.out_site, term.in_site) for term in terms if number in (term.out_site, term.in_site)]
    common = {math.gcd(sites[one].channels, sites[other].channels) for one, other in ends}
    path: set[int] = set()
    groups = factor = 1
    while True:
        usable = [each for each in common if each % groups == 0 and (only is None or each % only == 0)]
        factors = {p for each in usable for p in prime_factors(math.gcd(each, only or each) // groups) if p >= factor}
        fitting = sorted(p for p in factors if p * groups <= most_groups)
        if not fitting:
            return path
        factor = fitting[0]
        groups *= factor
        path.add(groups)


def prime_factors(number: int) -> list[int]:
    """Return the distinct prime factors, ascending."""
    found = []
    while number > 1:
        factor = smallest_factor(number)
        found.append(factor)
        while number % factor == 0:
            number //= factor
    return found


def largest_factor(number: int) -> int:
    """Return the largest prime factor."""
    return max(prime_factors(number), default=1)


def _halve(
    sites: Sequence[SharedAxis],
    terms: Sequence[Term],
    coarse: Level,
    numbers: list[int],
    rng: np.random.Generator,
    starts: int,
    sweeps: int,
) -> dict[int, Labels]:
    """Return 0 or 1 for each channel of each site: the halves of every group, all groups of all sites at once.

    Within a group, a term keeps (sum + x' M y) / 2 with x and y the signs of its outputs and inputs. With all other sites
    fixed, the best signs of one site are the upper half of its field, group by group; site after site, until nothing moves.
    """
    members = {number: _members(coarse.labels[number], coarse.groups) for number in numbers}
    blocks = [_within_groups(term, members) for term in terms]
    signs: dict[int, Signs] = {}
    for number in numbers:
        size = sites[number].channels
        field = np.arange(size, 0, -1.0)[:, None] if sites[number].fixed else rng.standard_normal((size, starts))
        signs[number] = np.broadcast_to(field, (size, starts)).astype(np.float32)
        if sites[number].fixed:
            signs[number] = _upper_halves(signs[number], members[number])
    # Real numbers before signs: a few power iterations turn random starts towards what all terms together favour.
    for _ in range(POWER_ITERATIONS):
        for number in numbers:
            if not sites[number].fixed:
                signs[number] = _centred(_field(number, terms, blocks, signs, members), members[number])
    for number in numbers:
        if not sites[number].fixed:
            signs[number] = _upper_halves(signs[number], members[number])
    kept = np.full(starts, -np.inf)
    for _ in range(sweeps):
        for number in numbers:
            if not sites[number].fixed:
                signs[number] = _upper_halves(_field(number, terms, blocks, signs, members), members[number])
        now = np.zeros(starts)
        for term, block in zip(terms, blocks, strict=True):
            taken = block @ signs[term.in_site][members[term.in_site]]
            now += (signs[term.out_site][members[term.out_site]] * taken).sum(axis=(0, 1), dtype=np.float64)
        if (now <= kept + 1e-6 * np.abs(now)).all():
            break
        kept = np.maximum(now, kept)
    best = int(np.argmax(kept))
    return {number: (signs[number][:, best] < 0).astype(np.int64) for number in numbers}


def split_coupled(
    sites: Sequence[SharedAxis],
    terms: Sequence[Term],
    coarse: Level,
    numbers: list[int],
    parts: int,
    rng: np.random.Generator,
    starts: int,
    sweeps: int,
) -> dict[int, Labels]:
    """Return 0 to `parts` - 1 for each channel of each site: the parts of every group, all groups of all sites at once.

    With all other sites fixed, what each channel of a site adds to each part is known, and every two parts share out their
    channels in the best way; site after site, until nothing is gained.
    """
    members = {number: _members(coarse.labels[number], coarse.groups) for number in numbers}
    blocks = [_within_groups(term, members) for term in terms]
    shared: dict[int, Groups] = {}  # (starts x groups, parts, channels of each)
    for number in numbers:
        groups, size = members[number].shape
        places = np.tile(np.arange(size), (starts * groups, 1))
        shared[number] = (places if sites[number].fixed else rng.permuted(places, axis=1)).reshape(len(places), parts, -1)

    def profit(number: int) -> Profit:
        groups, size = members[number].shape
        total_profit = np.zeros((starts, groups, size, parts), dtype=np.float32)
        for term, block in zip(terms, blocks, strict=True):
            if term.out_site == number:
                total_profit += block @ _memberships(shared[term.in_site], starts)
            if term.in_site == number:
                total_profit += block.transpose(0, 2, 1) @ _memberships(shared[term.out_site], starts)
        return total_profit.reshape(starts * groups, size, parts).transpose(0, 2, 1)

    kept = np.full(starts, -np.inf)
    for _ in range(sweeps):
        now = np.zeros(starts)
        for number in numbers:
            gained = profit(number)
            if not sites[number].fixed:
                shared[number] = exchange_pairs(gained, shared[number])
            now += total(gained, shared[number]).reshape(starts, -1).sum(axis=1)
        if (now <= kept + 1e-6 * np.abs(now)).all():
            break
        kept = np.maximum(now, kept)
    best = int(np.argmax(kept))
    labels = {}
    for number in numbers:
        groups, size = members[number].shape
        labels[number] = np.empty(sites[number].channels, dtype=np.int64)
        chosen = shared[number].reshape(starts, groups, parts, -1)[best]
        inside = np.take_along_axis(members[number], chosen.reshape(groups, size), axis=1)
        labels[number][inside] = np.repeat(np.arange(parts), size // parts)
    return labels


def _memberships(shared: Groups, starts: int) -> NDArray[np.float32]:
    """Return 1 where a channel is in a part, else 0: (starts, groups, channels, parts)."""
    problems, parts, each = shared.shape
    result = np.zeros((problems, parts * each, parts), dtype=np.float32)
    result[np.arange(problems)[:, None, None], shared, np.arange(parts)[:, None]] = 1
    return result.reshape(starts, problems // starts, parts * each, parts)


def _within_groups(term: Term, members: dict[int, NDArray[np.int64]]) -> Blocks:
    """Return a term's importance inside each group: (groups, outputs, inputs)."""
    # Every term counts alike, as in the sum of kept shares, however large its weights are.
    scale = max(float(term.matrix.sum()), 1e-30)
    outs, ins = members[term.out_site], members[term.in_site]
    return (term.matrix[outs[:, :, None], ins[:, None, :]] / scale).astype(np.float32)


def _members(labels: Labels, groups: int) -> NDArray[np.int64]:
    return np.argsort(labels, kind="stable").reshape(groups, -1)


def _field(
    number: int,
    terms: Sequence[Term],
    blocks: Sequence[Blocks],
    signs: dict[int, Signs],
    members: dict[int, NDArray[np.int64]],
) -> Signs:
    """Return what each channel of a site gains by being in the first half, from all terms it is in."""
    field = np.zeros_like(signs[number])
    for term, block in zip(terms, blocks, strict=True):
        if term.out_site == number:
            field[members[number]] += block @ signs[term.in_site][members[term.in_site]]
        if term.in_site == number:
            field[members[number]] += block.transpose(0, 2, 1) @ signs[term.out_site][members[term.out_site]]
    return field


def _centred(field: Signs, members: NDArray[np.int64]) -> Signs:
    """Return the field with zero mean in each group, scaled to the length of a vector of signs."""
    result = np.empty_like(field)
    result[members] = field[members] - field[members].mean(axis=1, keepdims=True)
    return np.asarray(result * np.sqrt(len(field)) / np.maximum(np.linalg.norm(result, axis=0), 1e-30))


def _upper_halves(field: Signs, members: NDArray[np.int64]) -> Signs:
    """Return +1 for the upper half of each group by field, -1 for the rest."""
    size = members.shape[1]
    order = np.argsort(-field[members], axis=1, kind="stable")  # (groups, size, starts)
    signs = np.empty_like(field)
    starts = np.arange(field.shape[1])
    top = np.take_along_axis(np.broadcast_to(members[:, :, None], order.shape), order, axis=1)
    signs[top[:, : size // 2].reshape(-1, len(starts)), starts] = 1
    signs[top[:, size // 2 :].reshape(-1, len(starts)), starts] = -1
    return signs
