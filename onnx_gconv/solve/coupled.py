"""Partitions chosen jointly: several layers share the partition of a channel space, so that no Gather is needed there.

A site is a set of channels to be partitioned; a term is a layer between two sites. Groups are halved level by level, so
that the partition into 2G groups refines the one into G: layers of one site may then differ in their number of groups.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from onnx_gconv.solve.importance import Matrix

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
    sites: Sequence[SharedAxis], terms: Sequence[Term], *, most_groups: int, seed: int, starts: int = 8, sweeps: int = 30
) -> list[Level]:
    """Return the levels 1, 2, 4, ... up to `most_groups`, as far as any term can use them."""
    rng = np.random.default_rng(seed)
    levels = [Level(1, {number: np.zeros(site.channels, dtype=np.int64) for number, site in enumerate(sites)})]
    while True:
        coarse = levels[-1]
        groups = 2 * coarse.groups
        open_sites = {number for number in coarse.labels if sites[number].channels % groups == 0}
        useful = [term for term in terms if {term.out_site, term.in_site} <= open_sites]
        open_sites &= {number for term in useful for number in (term.out_site, term.in_site)}
        if not useful or groups > most_groups:
            return levels
        halves = _halve(sites, useful, coarse, sorted(open_sites), rng, starts, sweeps)
        levels.append(Level(groups, {number: 2 * coarse.labels[number] + half for number, half in halves.items()}))


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
