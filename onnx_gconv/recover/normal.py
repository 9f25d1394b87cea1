"""Normal equations of a site, added up batch by batch, and their solution."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from onnx_gconv.recover.definite import Factor, Run, damped

Doubles = NDArray[np.float64]
Floats = NDArray[np.float32]
ROUNDING = 1e-10  # what float64 sums may be off by, relative, with room
DAMPING_STEPS = 6
DAMPING_OUTPUTS = 256  # that are enough to choose a damping by
SMALL = 64  # unknowns of a block up to which all blocks are solved at once
SCARCITY = 0.1  # the damping of an elimination where there are as many inputs as positions


@dataclass(frozen=True, eq=False)
class Rows:
    """What a site sees and should give, position by position."""

    u: Floats  # (blocks, positions, inputs)
    t: Floats  # (blocks, positions, outputs)
    added: Floats | None  # what a shortcut adds behind it, where an activation follows on that: (blocks, positions, outputs)
    centre: "Centre | None" = None  # what was taken off the inputs

    @property
    def nbytes(self) -> int:
        return self.u.nbytes + self.t.nbytes + (0 if self.added is None else self.added.nbytes)


@dataclass(frozen=True, eq=False)
class Centre:
    """A value near the mean of each channel, and the sum of what is left without it: not quite zero."""

    value: Doubles  # (blocks, channels)
    rest: Doubles


def of_inputs(rows: Rows, columns: NDArray[np.int64]) -> Rows:
    """Return the rows with some of the inputs only."""
    centre = rows.centre
    fewer = None if centre is None else Centre(centre.value[:, columns], centre.rest[:, columns])
    return replace(rows, u=rows.u[:, :, columns], centre=fewer)


def centred(rows: Rows) -> Rows:
    """Return the rows with their inputs about their mean, in place: once, for they are looked at several times."""
    with np.errstate(invalid="ignore", over="ignore"):  # NaN and infinity are found in the sum of all
        about = _Centred.of(rows.u, out=rows.u)
    return replace(rows, u=about.values, centre=Centre(about.centre, about.rest))


def join(parts: Sequence[Rows]) -> Rows:
    """Return the rows as one; none of them may be centred."""
    if len(parts) == 1:
        return parts[0]
    added = [part.added for part in parts if part.added is not None]
    u, t = (np.concatenate([getattr(part, name) for part in parts], axis=1) for name in ("u", "t"))
    return Rows(u, t, np.concatenate(added, axis=1) if added else None)


@dataclass
class Sums:
    """Second moments of inputs u and targets t over all positions; one entry for each block.

    Memory is that of the Gram matrix: (inputs of a block x kernel) squared, for each block.
    """

    count: int
    u: Doubles  # (blocks, inputs)
    t: Doubles  # (blocks, outputs)
    uu: Doubles  # (blocks, inputs, inputs)
    ut: Doubles  # (blocks, inputs, outputs)
    tt: Doubles  # (blocks, outputs)

    def __iadd__(self, other: "Sums") -> "Sums":
        self.count += other.count
        with np.errstate(invalid="ignore", over="ignore"):  # as in `sums`
            for name in ("u", "t", "uu", "ut", "tt"):
                getattr(self, name).__iadd__(getattr(other, name))
        return self

    def __sub__(self, other: "Sums") -> "Sums":
        """Return the moments of the positions that the other one, a part of it, does not have."""
        each = (getattr(self, name) - getattr(other, name) for name in ("u", "t", "uu", "ut", "tt"))
        return Sums(self.count - other.count, *each)

    def of_outputs(self, every: int) -> "Sums":
        """Return the moments with one output in so many."""
        return replace(self, t=self.t[:, ::every], ut=self.ut[:, :, ::every], tt=self.tt[:, ::every])

    def of_inputs(self, columns: NDArray[np.int64]) -> "Sums":
        """Return the moments of some of the inputs, the same of each block."""
        square = self.uu[:, columns[:, None], columns[None, :]]
        return replace(self, u=self.u[:, columns], uu=square, ut=self.ut[:, columns])


def add_up(parts: Iterable[Sums]) -> Sums:
    """Return the sum, in place of the first; added in the order given: the same bits whatever thread made a part."""
    each = iter(parts)
    total = next(each)
    for part in each:
        total += part
    return total


@dataclass(frozen=True)
class Coefficients:
    """The weights of each block, and the constant added to each output."""

    weight: Doubles  # (blocks, inputs, outputs)
    intercept: Doubles  # (blocks, outputs)


def sums(rows: Rows) -> Sums:
    """Return the moments of some rows."""
    found = Moments()
    found.add(moments(rows))
    return found.total()


@dataclass(frozen=True, eq=False)
class Piece:
    """Moments of some rows as they are added up."""

    count: int
    u: "_Centred"
    uu: Floats  # about the centre
    targets: tuple[Doubles, Doubles, Doubles]


def moments(rows: Rows) -> Piece:
    """Return the moments of some rows, to be added up.

    Products in float32, where they are three times faster; the rows are few, and their sums are added in float64. The
    products are of numbers about their mean, which is added back in float64: far off centre, float32 would lose the spread.
    """
    with np.errstate(invalid="ignore", over="ignore"):  # NaN and infinity are found in the sum of all
        u = _inputs(rows)
        uu = np.matmul(u.values.transpose(0, 2, 1), u.values)
        return Piece(rows.u.shape[1], replace(u, values=u.values[:, :0]), uu, target_sums(rows))


class Moments:
    """Moments of pieces, added up in the order in which they come: the same bits whatever thread made them."""

    def __init__(self) -> None:
        self._sums: tuple[Doubles, Doubles, Doubles, Doubles] | None = None  # t, ut, tt, and uu about the centres
        self._inputs: list[_Centred] = []
        self._count = 0

    def add(self, piece: Piece) -> None:
        """Add one: what it has may be changed."""
        if self._sums is None:
            self._sums = *piece.targets, piece.uu.astype(np.float64)
        else:
            *targets, uu = self._sums
            with np.errstate(invalid="ignore", over="ignore"):  # as in `moments`
                for own, more in zip(targets, piece.targets, strict=True):
                    own += more
                uu += piece.uu
        self._inputs.append(piece.u)
        self._count += piece.count

    def total(self) -> Sums:
        """Return the sum; what the centres of all pieces add to it is a product of two small matrices."""
        assert self._sums is not None
        t, ut, tt, uu = self._sums
        centres, rests, totals = (np.stack([getattr(each, name) for each in self._inputs], axis=2) for name in _Centred.SUMS)
        with np.errstate(invalid="ignore", over="ignore"):
            uu += np.concatenate([rests, centres], axis=2) @ np.concatenate([centres, totals], axis=2).transpose(0, 2, 1)
        return Sums(self._count, totals.sum(axis=2), t, uu, ut, tt)


def target_sums(rows: Rows) -> tuple[Doubles, Doubles, Doubles]:
    """Return the moments that the targets have a part in: t, ut and tt."""
    u, t = _inputs(rows), _Centred.of(rows.t)
    squares = np.square(t.values, dtype=np.float64).sum(axis=1) + t.centre * (t.rest + t.total)
    return t.total, u.times(t), squares


def _inputs(rows: Rows) -> "_Centred":
    if rows.centre is None:
        return _Centred.of(rows.u)
    centre, rest = rows.centre.value, rows.centre.rest
    return _Centred(rows.u, centre, rest + rows.u.shape[1] * centre, rest)


@dataclass(frozen=True, eq=False)
class _Centred:
    """Values (blocks, positions, channels) about a centre near their mean."""

    values: Floats
    centre: Doubles  # (blocks, channels)
    total: Doubles  # sum of the values as they were
    rest: Doubles  # sum of the values about the centre: not quite zero

    SUMS: ClassVar = ("centre", "rest", "total")

    @classmethod
    def of(cls, values: Floats, out: Floats | None = None) -> "_Centred":
        total = values.sum(axis=1, dtype=np.float64)
        centre = (total / values.shape[1]).astype(np.float32)
        exact = centre.astype(np.float64)
        return cls(np.subtract(values, centre[:, None], out=out), exact, total, total - values.shape[1] * exact)

    def times(self, other: "_Centred") -> Doubles:
        """Return the sum over the positions of the outer products of the values as they were."""
        product = np.matmul(self.values.transpose(0, 2, 1), other.values)
        return np.asarray(product + _outer(self.rest, other.centre) + _outer(self.centre, other.total))


def _outer(a: Doubles, b: Doubles) -> Doubles:
    return np.asarray(a[:, :, None] * b[:, None, :])


def retarget(total: Sums, parts: Iterable[tuple[Doubles, Doubles, Doubles]]) -> Sums:
    """Return the moments of the same inputs with other targets."""
    each = iter(parts)
    t, ut, tt = next(each)
    for more in each:
        t, ut, tt = t + more[0], ut + more[1], tt + more[2]
    return replace(total, t=t, ut=ut, tt=tt)


def predict(rows: Rows, at: Coefficients) -> Floats:
    """Return what these coefficients give: (blocks, positions, outputs)."""
    constant = at.intercept if rows.centre is None else at.intercept + _applied(rows.centre.value, at.weight)
    found = np.matmul(rows.u, at.weight.astype(np.float32))
    found += constant.astype(np.float32)[:, None, :]
    return np.asarray(found)


@dataclass(frozen=True, eq=False)
class Equations:
    """Normal equations of some inputs at a damping, ready to be solved for any targets.

    The weights minimise |t - w u - b|^2 + damping * mean(diag uu) * |w - prior|^2 (the intercept is free): what the data do not
    decide, such as the weights of a channel that is always zero, stays as it was.
    """

    has_intercept: bool
    ridges: Doubles  # (blocks, 1, 1)
    small: Doubles  # all matrices, where they are small
    factors: tuple[Factor, ...]  # those of each block elsewhere

    @classmethod
    def of(cls, total: Sums, damping: float, *, has_intercept: bool, run: Run = map) -> "Equations":
        """Return the equations of these inputs."""
        size = total.u.shape[1]
        off = _off(total, has_intercept=has_intercept)
        ridges = [_ridge(uu, less, damping) for uu, less in zip(total.uu, off, strict=True)]
        each = np.array(ridges)[:, None, None]
        if size <= SMALL:
            return cls(has_intercept, each, total.uu - _outer(off, off) + each * np.eye(size), ())
        found = [damped(uu, ridge, run, less=less) for uu, ridge, less in zip(total.uu, ridges, off, strict=True)]
        each = np.array([ridge for _, ridge in found])[:, None, None]
        return cls(has_intercept, each, total.uu[:0], tuple(factor for factor, _ in found))

    def solve(self, total: Sums, prior: Coefficients, run: Run = map) -> Coefficients:
        """Return the weights for these targets; the inputs are those that the equations are of."""
        means = total.u / total.count, total.t / total.count
        cross = total.ut - _outer(total.u, means[1]) if self.has_intercept else total.ut
        wanted = cross + self.ridges * prior.weight
        if self.factors:
            weight = np.stack([factor.solve(each, run) for factor, each in zip(self.factors, wanted, strict=True)])
        else:
            weight = np.asarray(np.linalg.solve(self.small, wanted), np.float64)
        if not self.has_intercept:
            return Coefficients(weight, prior.intercept)
        return Coefficients(weight, means[1] - _applied(means[0], weight))

    def inverse(self, total: Sums, run: Run = map) -> Doubles:
        """Return the inverse of `damped_gram`, of the only block."""
        found = self.factors[0].inverse(run) if self.factors else np.asarray(np.linalg.inv(self.small[0]), np.float64)
        found *= total.count
        still = _still(total.uu[0], _off(total, has_intercept=self.has_intercept)[0])
        found[still], found[:, still] = 0.0, 0.0
        found[still, still] = total.count / (ROUNDING * self.ridges[0, 0, 0])
        return found


def solve(total: Sums, prior: Coefficients, *, damping: float, has_intercept: bool, run: Run = map) -> Coefficients:
    """Return the weights that bring the inputs closest to the targets, as `Equations` say."""
    return Equations.of(total, damping, has_intercept=has_intercept, run=run).solve(total, prior, run)


def of_rank(total: Sums, at: Coefficients, rank: int, *, scale: Doubles, has_intercept: bool) -> Coefficients:
    """Return the coefficients of this rank that give nearest to what these give, each output by its scale; of one block.

    With H the second moments and W by the scale, they are W V V' with V the first eigenvectors of W'HW.
    """
    off = _off(total, has_intercept=has_intercept)[0]
    gram = total.uu[0] - np.outer(off, off)
    weight = at.weight[0] * scale
    _, vectors = np.linalg.eigh(weight.T @ gram @ weight)  # ascending
    first = vectors[:, -rank:]
    lower = ((weight @ first) @ first.T / scale)[None]
    if not has_intercept:
        return Coefficients(lower, at.intercept)
    return Coefficients(lower, at.intercept + _applied(total.u / total.count, at.weight - lower))


def scarcity_damping(inputs: int, positions: int, *, least: float) -> float:
    """Return the damping of second moments that channels are eliminated by.

    Few positions make any channel look as if others could make up for it: the fewer there are for each input, the more damping.
    """
    return max(least, SCARCITY * (inputs / positions) ** 2)


def damped_gram(total: Sums, damping: float, *, has_intercept: bool) -> Doubles:
    """Return the second moments that `solve` solves with, of one position on average and of the only block.

    Inputs that never vary are worth nothing whatever their weights are: theirs are zero, but for what keeps the matrix definite.
    """
    raw, off = total.uu[0], _off(total, has_intercept=has_intercept)[0]
    gram: Doubles = raw - np.outer(off, off)
    ridge = np.full(len(gram), _ridge(raw, off, damping))
    still = _still(raw, off)
    gram[still], gram[:, still] = 0.0, 0.0
    ridge[still] *= ROUNDING
    gram[np.diag_indices(len(gram))] += ridge
    gram /= total.count
    return gram


def _off(total: Sums, *, has_intercept: bool) -> Doubles:
    """Return what is taken off the second moments of each block, as the outer product with itself, to have them about the mean."""
    return total.u / np.sqrt(total.count) if has_intercept else np.zeros_like(total.u)


def _still(raw: Doubles, less: Doubles) -> NDArray[np.intp]:
    """Return which inputs of a block never vary."""
    whole = np.diagonal(raw)
    return np.flatnonzero(whole - np.square(less) <= ROUNDING * whole)


def _ridge(raw: Doubles, less: Doubles, damping: float) -> float:
    """Return what is added to the diagonal of a block, the second moments being raw - less less'.

    Inputs that do not vary leave nothing but rounding in the Gram matrix, which must not decide anything.
    """
    whole = float(np.trace(raw))
    spread = max(damping * (whole - float(np.square(less).sum())), ROUNDING * whole)
    return spread / max(1, len(raw)) or 1.0  # nothing ever came in: all stays as it was


def damping_between(halves: tuple[Sums, Sums], prior: Coefficients, *, least: float, has_intercept: bool, run: Run = map) -> float:
    """Return the damping, from `least` on in steps of ten, at which what is solved on one half of the data does best on the other.

    A late layer sees fewer independent samples than it has weights: with little damping it would learn them by heart.
    """
    every = max(1, -(-prior.intercept.shape[1] // DAMPING_OUTPUTS))
    halves = halves[0].of_outputs(every), halves[1].of_outputs(every)
    prior = Coefficients(prior.weight[:, :, ::every], prior.intercept[:, ::every])
    best, found = float("inf"), least
    for step in range(DAMPING_STEPS):
        damping = least * 10.0**step

        def error(pair: tuple[Sums, Sums], damping: float = damping) -> float:
            at = solve(pair[0], prior, damping=damping, has_intercept=has_intercept)
            return float(residual(pair[1], at).sum())

        errors = sum(run(error, (halves, halves[::-1])))
        if not errors < best:
            break
        best, found = errors, damping
    return found


def residual(total: Sums, at: Coefficients) -> Doubles:
    """Return the sum of squared errors of each output: (blocks, outputs)."""
    w, b = at.weight, at.intercept
    error = total.tt + (w * (np.matmul(total.uu, w) - 2 * total.ut)).sum(axis=1)
    error += b * (2 * _applied(total.u, w) - 2 * total.t + total.count * b)
    return np.asarray(np.maximum(error, 0.0))  # rounding


def _applied(u: Doubles, weight: Doubles) -> Doubles:
    """Return what weights make of one input of each block: (blocks, outputs)."""
    return np.asarray(np.matmul(u[:, None, :], weight)[:, 0])


def variance(total: Sums) -> Doubles:
    """Return the sum of squared deviations of each target from its mean: (blocks, outputs)."""
    return np.maximum(total.tt - np.square(total.t) / total.count, 0.0)
