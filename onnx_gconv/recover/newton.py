"""Two Convs as least squares in the weights of both: what they give, its derivative, and steps that bring it nearer.

But for the activation between them this is least squares twice. So: Gauss-Newton, a few steps of conjugate gradients in each
round. At the present weights J, the derivative of the second's outputs, is a Conv with what the activation lets pass, and a
second Conv; its transpose a ConvTranspose and products with the patches. The patches' second moments make a good preconditioner,
so that few steps are enough.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import onnxruntime as ort
import scipy.linalg
from numpy.typing import NDArray
from onnx import TensorProto, helper

from onnx_gconv.recover.fit import Array, Fit
from onnx_gconv.recover.normal import Coefficients, Doubles, Floats, Sums
from onnx_gconv.recover.patches import Window, patches
from onnx_gconv.runtime import session

Channels = NDArray[np.int64]
DAMPING = 1e-3  # of a step, by the mean square of the patches
HALVINGS = 4  # of a round's step, before it is given up
HELD_BYTES = 2**27  # patches of both Convs that are held; those of more samples are made anew whenever they are needed
OPSET = 13  # of the two Convs that are run by themselves


@dataclass(frozen=True, eq=False)
class Half:
    """One Conv of a pair as it was fitted by itself: its coefficients, and the moments that they were solved from."""

    fit: Fit
    at: Coefficients
    total: Sums


@dataclass(frozen=True, eq=False)
class Seen:
    """Some samples: what the first reads, what the second should give, and what a shortcut adds behind it where that matters."""

    images: Array
    goal: Floats
    added: Floats | None


@dataclass(frozen=True, eq=False)
class Step:
    """A change of both weights, or what pulls at them."""

    w1: Doubles
    w2: Doubles

    def __add__(self, other: "Step") -> "Step":
        return Step(self.w1 + other.w1, self.w2 + other.w2)

    def __mul__(self, factor: float) -> "Step":
        return Step(factor * self.w1, factor * self.w2)

    def dot(self, other: "Step") -> float:
        return float((self.w1 * other.w1).sum() + (self.w2 * other.w2).sum())


@dataclass(eq=False)
class Part:
    """Some samples, as both Convs see them."""

    images: Array
    places1: tuple[int, ...]  # samples, and pixels behind the first
    t: Floats  # (blocks, places, outputs)
    added: Floats | None
    places2: tuple[int, ...]
    u1: Floats | None = None  # patches: (blocks, places, inputs and 1); None where they are made when needed
    inner: Floats | None = None  # what the second reads at the present weights of the first, as is what follows
    slope: Floats | None = None  # of each inner channel: (places, channels)
    u2: Floats | None = None


class Pair:
    """Two Convs and the present weights of both, with the constant as a last row: (blocks, inputs and 1, outputs).

    Those of the second are scaled by the normalization behind it, for errors count there. Inner channels are those that the
    first gives and the second reads, ascending.
    """

    def __init__(
        self, first: Half, second: Half, windows: tuple[Window, Window], seen: Sequence[Seen], pool: ThreadPoolExecutor
    ) -> None:
        self._first, self._second = first.fit, second.fit
        self._windows = windows
        self._pool = pool
        inner = np.sort(self._first.site.outputs.reshape(-1))
        self._place1 = np.searchsorted(inner, self._first.site.outputs)  # where the inner channels of each block lie
        self._place2 = np.searchsorted(inner, self._second.site.inputs)
        assert np.array_equal(inner, np.sort(self._second.site.inputs.reshape(-1))), "the second reads what the first gives"
        self._scale1, self._offset1 = (value.astype(np.float32)[inner] for value in self._first.tail)
        self._scale2 = self._second.tail[0][self._second.site.outputs][:, None, :]
        self.w1 = _with_constant(first.at)
        self.w2 = _with_constant(second.at) * self._scale2
        # What no place of the second reaches would be missing in the result of its transpose.
        missing = windows[1].unseen(windows[0].places(seen[0].images.shape[2:]))
        groups = len(self._place2)
        self._forward = _session("Conv", windows[1], group=groups)
        self._backward = _session("ConvTranspose", windows[1], group=groups, output_padding=missing)
        self.parts = list(map(self.part, seen))
        held = np.cumsum([self._patch_bytes(part) for part in self.parts]) <= HELD_BYTES
        self._held = {id(part) for part, is_held in zip(self.parts, held, strict=True) if is_held}
        self._factors1 = _factors(first.total, sum(math.prod(part.places1) for part in self.parts))
        self._factors2 = _factors(second.total, sum(math.prod(part.places2) for part in self.parts))

    def coefficients(self) -> tuple[Coefficients, Coefficients]:
        """Return the present weights of both Convs."""
        w2 = self.w2 / self._scale2
        return Coefficients(self.w1[:, :-1], self.w1[:, -1]), Coefficients(w2[:, :-1], w2[:, -1])

    def improve(self, steps: int) -> bool:
        """Take one Gauss-Newton step, as far as so many steps of conjugate gradients find it; False if that is no better."""
        begun = list(self._pool.map(self._begin, self.parts))
        before, gradient = sum(loss for loss, _ in begun), _total(pulled for _, pulled in begun)
        strength = self._strength()

        def preconditioned(gradient: Step) -> Step:
            return Step(_solve(self._factors1, gradient.w1) / strength, _solve(self._factors2, gradient.w2))

        def curved(step: Step) -> Step:
            found = _total(self._pool.map(partial(self._curve, step), self.parts))
            return found + Step(self._factors1.ridge * strength * step.w1, self._factors2.ridge * step.w2)

        step = _conjugate_gradients(gradient, curved, preconditioned, steps)
        for _ in range(HALVINGS):
            w1, w2 = self.w1 + step.w1, self.w2 + step.w2
            if sum(self._pool.map(partial(self._loss_at, w1, w2), self.parts)) < before:
                self.w1, self.w2 = w1, w2
                return True
            step = step * 0.5
        return False

    def loss(self) -> float:
        """Return the sum of squared errors at the present weights, where the activation behind makes a difference."""
        return sum(self._pool.map(partial(self._loss_at, self.w1, self.w2), self.parts))

    def loss_on(self, part: Part) -> float:
        """Return the sum of squared errors on some samples, perhaps others."""
        return self._loss_at(self.w1, self.w2, part)

    def look(self, part: Part) -> tuple[Part, Floats]:
        """Note what the second sees at the present weights; return the part with all patches, and how far off the outputs are."""
        u1 = self._u1(part)
        before = self._before_activation(u1, self.w1)
        low, high = self._clamp
        part.slope = ((before > low) & (before < high)) * self._scale1
        part.inner = _map(np.clip(before, low, high), part.places1)
        part.u2 = None
        u2 = self._u2(part)
        if id(part) in self._held:
            part.u1, part.u2 = u1, u2
        return replace(part, u1=u1, u2=u2), self._off(part, np.matmul(u2, self.w2.astype(np.float32)))

    def _begin(self, part: Part) -> tuple[float, Step]:
        """Return the loss at the present weights, and what pulls at them."""
        seen, off = self.look(part)
        return _square(off), self.pull(seen, off)

    def _curve(self, step: Step, part: Part) -> Step:
        """Return J'J step."""
        seen = replace(part, u1=self._u1(part), u2=self._u2(part))
        return self.pull(seen, self.push(seen, step))

    def _u1(self, part: Part) -> Floats:
        if part.u1 is not None:
            return part.u1
        return _patches(self._first, self._windows[0], part.images, self._first.site.inputs)

    def _u2(self, part: Part) -> Floats:
        return part.u2 if part.u2 is not None else _patches(self._second, self._windows[1], _there(part.inner), self._place2)

    def _patch_bytes(self, part: Part) -> int:
        counts = math.prod(part.places1) * len(self._place1), math.prod(part.places2) * len(self._place2)
        return 4 * sum(count * (fit.unknowns + 1) for count, fit in zip(counts, (self._first, self._second), strict=True))

    def push(self, part: Part, step: Step) -> Floats:
        """Return J step: how the second's outputs move with it. The part has been looked at."""
        inner = self._inner_rows(np.matmul(self._u1(part), step.w1.astype(np.float32))) * _there(part.slope)
        return np.asarray(self._convolved(part, inner, self.w2) + np.matmul(self._u2(part), step.w2.astype(np.float32)))

    def pull(self, part: Part, off: Floats) -> Step:
        """Return J' of how far the outputs are off."""
        outer = _map(off.transpose(1, 0, 2).reshape(off.shape[1], -1), part.places2)
        pulled = _run(self._backward, outer, self._kernel2(self.w2))
        slope = _there(part.slope)
        inner = np.empty_like(slope)
        inner[:, self._place2.reshape(-1)] = np.moveaxis(pulled, 1, -1).reshape(slope.shape)
        blocks = (inner * slope)[:, self._place1].transpose(1, 0, 2)
        w1, w2 = (np.matmul(u.transpose(0, 2, 1), pull) for u, pull in ((self._u1(part), blocks), (self._u2(part), off)))
        return Step(w1.astype(np.float64), w2.astype(np.float64))

    def part(self, seen: Seen) -> Part:
        """Return some samples as rows."""
        outputs = self._second.site.outputs
        places1 = self._windows[0].places(seen.images.shape[2:])
        added = None if seen.added is None else _rows(seen.added, outputs)
        places = (len(seen.images), *places1), (len(seen.images), *seen.goal.shape[2:])
        return Part(seen.images, places[0], _rows(seen.goal, outputs), added, places[1])

    def _off(self, part: Part, found: Floats) -> Floats:
        """Return how far the second's outputs are off, where the activation behind makes a difference."""
        scale = self._scale2.astype(np.float32)
        t = part.t
        if self._second.site.clamp is not None:
            t = self._second.relaxed_targets(t, part.added, found / scale)
        return np.asarray(scale * t - found)

    def _loss_at(self, w1: Doubles, w2: Doubles, part: Part) -> float:
        inner = np.clip(self._before_activation(self._u1(part), w1), *self._clamp)
        return _square(self._off(part, self._convolved(part, inner, w2) + w2[:, None, -1].astype(np.float32)))

    def _convolved(self, part: Part, inner: Floats, w2: Doubles) -> Floats:
        """Return what the second's weights make of (places, inner channels): (blocks, places, outputs)."""
        blocks = inner if len(self._place2) == 1 else inner[:, self._place2.reshape(-1)]
        found = _run(self._forward, _map(blocks, part.places1), self._kernel2(w2))
        rows = np.moveaxis(found, 1, -1).reshape(-1, *self._second.site.outputs.shape)
        return np.ascontiguousarray(rows.transpose(1, 0, 2))

    def _before_activation(self, u1: Floats, w1: Doubles) -> Floats:
        return np.asarray(self._inner_rows(np.matmul(u1, w1.astype(np.float32))) * self._scale1 + self._offset1)

    def _inner_rows(self, blocks: Floats) -> Floats:
        """Return the first's outputs as (places, inner channels)."""
        if len(blocks) == 1:
            return np.asarray(blocks[0])  # in one block they ascend
        rows = np.empty((blocks.shape[1], self._place1.size), np.float32)
        rows[:, self._place1.reshape(-1)] = blocks.transpose(1, 0, 2).reshape(blocks.shape[1], -1)
        return rows

    @property
    def _clamp(self) -> tuple[float, float]:
        return self._first.site.clamp or (-np.inf, np.inf)

    def _kernel2(self, w2: Doubles) -> Floats:
        """Return the second's weight as a Conv in so many groups as it has blocks has it."""
        kernel = self._second.kernel
        blocks = w2[:, :-1].reshape(*self._place2.shape, *kernel, -1).astype(np.float32)
        return np.ascontiguousarray(np.moveaxis(blocks, -1, 1)).reshape(-1, self._place2.shape[1], *kernel)

    def _strength(self) -> Doubles:
        """Return how much each inner channel matters: what the second makes of it, as far as the activation lets it pass."""
        passing = np.mean([np.square(_there(part.slope), dtype=np.float64).mean(axis=0) for part in self.parts], axis=0)
        whole = np.empty(self._place2.size)
        whole[self._place2] = np.square(self.w2[:, :-1]).reshape(*self._place2.shape, -1).sum(axis=2)
        strength = whole * np.maximum(passing, 1e-3) + 1e-12
        return np.asarray(strength[self._place1][:, None, :])


def _conjugate_gradients(
    gradient: Step, curved: Callable[[Step], Step], preconditioned: Callable[[Step], Step], steps: int
) -> Step:
    """Return nearly the step that `curved` makes the gradient of."""
    found, left = gradient * 0.0, gradient
    near = direction = preconditioned(left)
    size = left.dot(near)
    for _ in range(steps):
        pulled = curved(direction)
        along = direction.dot(pulled)
        if not (along > 0 and size > 0):
            break
        found, left = found + direction * (size / along), left + pulled * (-size / along)
        near = preconditioned(left)
        size, last = left.dot(near), size
        direction = near + direction * (size / last)
    return found


@dataclass(frozen=True, eq=False)
class _Factors:
    """Cholesky factors of damped second moments, block by block, and the damping of each."""

    factors: list[Doubles]
    ridge: Doubles  # (blocks, 1, 1)


def _factors(total: Sums, places: int) -> _Factors:
    """Return the factors for so many places, out of the moments of others."""
    size = total.uu.shape[1]
    factors, ridges = [], []
    for uu, u in zip(total.uu, total.u, strict=True):
        moments = np.empty((size + 1, size + 1), order="F")
        moments[:-1, :-1], moments[-1, :-1], moments[:-1, -1], moments[-1, -1] = uu, u, u, total.count
        moments *= places / total.count
        ridge = DAMPING * float(np.trace(moments)) / (size + 1)
        factors.append(_factor(moments, ridge))
        ridges.append(ridge)
    return _Factors(factors, np.array(ridges)[:, None, None])


def _factor(moments: Doubles, ridge: float) -> Doubles:
    """Return the Cholesky factor of damped moments; rounding may ask for more damping, which a preconditioner can bear."""
    for _ in range(10):
        factor, failed = scipy.linalg.lapack.dpotrf(moments + ridge * np.eye(len(moments)), lower=1, overwrite_a=1)
        if not failed:
            return np.asarray(factor)
        ridge *= 10
    raise AssertionError("second moments are finite")


def _solve(factors: _Factors, values: Doubles) -> Doubles:
    return np.stack([scipy.linalg.cho_solve((each, True), value) for each, value in zip(factors.factors, values, strict=True)])


def _with_constant(at: Coefficients) -> Doubles:
    return np.concatenate([at.weight, at.intercept[:, None, :]], axis=1)


def _there(values: Floats | None) -> Floats:
    assert values is not None, "what the second sees is looked at before steps are taken"
    return values


def _square(values: Floats) -> float:
    return float(np.square(values, dtype=np.float64).sum())


def _total(steps: Iterable[Step]) -> Step:
    """Return the sum, added in the order given: the same bits whatever thread made a part."""
    each = iter(steps)
    total = next(each)
    for step in each:
        total += step
    return total


def _patches(fit: Fit, window: Window, images: Array, inputs: Channels) -> Floats:
    """Return what each block of a Conv sees everywhere, and a 1: (blocks, places, inputs and 1)."""
    views = patches(images, window)
    count, size = math.prod(views.shape[: images.ndim - 1]), fit.unknowns
    result = np.ones((len(inputs), count, size + 1), np.float32)
    for block, channels in enumerate(inputs):
        seen = views if len(channels) == images.shape[1] else views[(..., channels, *[slice(None)] * len(fit.kernel))]
        result[block, :, :-1] = seen.reshape(count, size)
    return result


def _rows(values: Floats, outputs: Channels) -> Floats:
    """Return (samples, channels, pixels...) as (blocks, places, outputs)."""
    rows = np.moveaxis(values, 1, -1).reshape(-1, values.shape[1])
    return np.ascontiguousarray(rows[:, outputs].transpose(1, 0, 2))


def _map(rows: Floats, places: tuple[int, ...]) -> Floats:
    """Return (places, channels) as (samples, channels, pixels...)."""
    return np.ascontiguousarray(np.moveaxis(rows.reshape(*places, -1), -1, 1))


def _session(kind: str, window: Window, **more: Any) -> ort.InferenceSession:
    """Return a Conv or its transpose as a model of its own, with the weight as an input."""
    axes = [None] * (2 + len(window.kernel))
    pads, strides, dilations = [*window.begins, *window.ends], list(window.strides), list(window.dilations)
    node = helper.make_node(kind, ["x", "w"], ["y"], pads=pads, strides=strides, dilations=dilations, **more)
    inputs = [helper.make_tensor_value_info(name, TensorProto.FLOAT, axes) for name in ("x", "w")]
    graph = helper.make_graph([node], "pair", inputs, [helper.make_empty_tensor_value_info("y")])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=8)
    return session(model, threads=1)


def _run(active: ort.InferenceSession, images: Floats, kernel: Floats) -> Floats:
    return np.asarray(active.run(None, {"x": images, "w": kernel})[0])
