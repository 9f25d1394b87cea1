"""Two Convs fitted together, through the activation between them, so that what the second gives is best.

Fitted one by one, the first gives what it gave in the dense model, though half of its channels may be gone. Fitted together, the
channels that are left take over from the others. This is least squares in the weights of both, but for the activation:
Gauss-Newton, a few steps of conjugate gradients in each round. At the present weights J, the derivative of the second's outputs,
is a Conv with what the activation lets pass, and a second Conv; its transpose a ConvTranspose and products with the patches. The
patches' second moments make a good preconditioner, so that few steps are enough.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import onnxruntime as ort
import scipy.linalg
from numpy.typing import NDArray
from onnx import TensorProto, helper

from onnx_gconv.recover.fit import Array, Fit
from onnx_gconv.recover.flow import Flow
from onnx_gconv.recover.normal import Coefficients, Doubles, Floats, Sums
from onnx_gconv.recover.patches import Window, patches, window_of
from onnx_gconv.recover.site import Site
from onnx_gconv.runtime import session

ROUNDS = 2
STEPS = 4
DAMPING = 1e-3  # of a step, by the mean square of the patches
HALVINGS = 4  # of a round's step, before it is given up
HELD_BYTES = 2**28  # patches of both Convs that are held at once
POSITIONS = 60_000  # that are looked at, at most
OPSET = 13  # of the two Convs that are run by themselves


def find_pairs(flow: Flow, sites: Sequence[Site]) -> dict[str, Site]:
    """Return, by the second's name, the first Conv of every pair: one that only the other reads, through an activation or none."""
    ends = {_end(site, flow): site for site in sites if _can_lead(site)}
    return {
        site.name: ends[site.source]
        for site in sites
        if site.source in ends and not site.is_gemm and site.has_intercept and site.inputs.size
    }


def _can_lead(site: Site) -> bool:
    return not site.is_gemm and not site.shortcut and site.has_intercept


def _end(site: Site, flow: Flow) -> str:
    """Return the tensor that the second Conv of a pair would read: behind the normalization and the activation."""
    end = site.after.output if site.after is not None else site.name
    if site.clamp is not None:
        end = flow.nodes[flow.readers[end][0]].output[0]
    readers = flow.readers.get(end, [])
    return end if len(readers) == 1 and end not in flow.outputs else ""


@dataclass(frozen=True, eq=False)
class Seen:
    """What the pair sees in some samples: the first's input, the second's target, and what a shortcut adds to it."""

    images: Array
    dense: Array
    shortcut: Array | None


def samples_at_once(first: Fit, second: Fit, seen: Seen) -> int:
    """Return how many samples may be looked at in all."""
    window = window_of(first.site.node, first.kernel, seen.images.shape[2:])
    inner = np.prod(patches(seen.images[:1, :1], window).shape[1 : seen.images.ndim - 1])
    outer = np.prod(seen.dense.shape[2:])
    numbers = inner * (first.unknowns + 3) * len(first.site.outputs) + outer * (second.unknowns + 3) * len(second.site.outputs)
    return max(2, min(int(HELD_BYTES // (4 * numbers)), int(POSITIONS // inner)))


@dataclass(frozen=True, eq=False)
class Half:
    """One Conv of a pair as it was fitted by itself: its coefficients, and the moments that they were solved from."""

    fit: Fit
    at: Coefficients
    total: Sums

    def of_outputs(self, left: NDArray[np.int64]) -> "Half":
        """Return it with those of its outputs only that the next one reads."""
        outputs, at = self.fit.site.outputs, self.at
        if outputs.size == left.size:
            return self
        if len(outputs) == 1:
            places = np.isin(outputs[0], left)
            fewer = replace(self.fit.site, outputs=outputs[:, places])
            return replace(
                self, fit=replace(self.fit, site=fewer), at=Coefficients(at.weight[:, :, places], at.intercept[:, places])
            )
        blocks = np.isin(outputs[:, 0], left)  # depthwise: one output each
        total = replace(self.total, u=self.total.u[blocks], uu=self.total.uu[blocks])
        fewer = replace(self.fit.site, outputs=outputs[blocks], inputs=self.fit.site.inputs[blocks])
        return Half(replace(self.fit, site=fewer), Coefficients(at.weight[blocks], at.intercept[blocks]), total)


def fit_pair(first: Half, second: Half, seen: Sequence[Seen], pool: ThreadPoolExecutor) -> tuple[Coefficients, Coefficients]:
    """Return better coefficients of both, as found on these samples."""
    pair = _Pair(first, second, seen, pool)
    for _ in range(ROUNDS):
        if not pair.improve(STEPS):
            break
    return pair.coefficients()


@dataclass(eq=False)
class _Part:
    """Some samples, as both Convs see them."""

    u1: Floats  # (blocks, places, inputs and 1)
    places1: tuple[int, ...]  # samples, and pixels behind the first
    t: Floats  # (blocks, places, outputs)
    added: Floats | None
    places2: tuple[int, ...]
    u2: Floats | None = None  # at the present weights of the first, as is what follows
    slope: Floats | None = None  # of each inner channel: (places, channels)


class _Pair:
    """The state of the search: weights with their constant as a last row, as (blocks, inputs and 1, outputs)."""

    def __init__(self, first: Half, second: Half, seen: Sequence[Seen], pool: ThreadPoolExecutor) -> None:
        self._first, self._second = first.fit, second.fit
        self._pool = pool
        self._inner = np.sort(self._first.site.outputs.reshape(-1))
        self._place1 = np.searchsorted(self._inner, self._first.site.outputs)
        self._place2 = np.searchsorted(self._inner, self._second.site.inputs)
        self._tail1 = [value.astype(np.float32)[self._inner] for value in self._first.tail]
        # Errors count behind the second's normalization: its weights and targets are scaled by it here.
        self._scale2 = self._second.tail[0][self._second.site.outputs][:, None, :]
        self._w1 = _with_constant(first.at)
        self._w2 = _with_constant(second.at) * self._scale2
        size = self._size_behind_first(seen[0].images)
        window = window_of(self._second.site.node, self._second.kernel, size)
        self._forward = _session("Conv", window, {})
        missing = [
            full - ((part - 1) * stride + (extent - 1) * dilation + 1 - begin - end)
            for full, part, stride, extent, dilation, begin, end in zip(
                size, seen[0].dense.shape[2:], window.strides, window.kernel, window.dilations, window.begins, window.ends, strict=True
            )
        ]
        self._backward = _session("ConvTranspose", window, {"output_padding": missing})
        self._parts = list(pool.map(self._part, seen))
        self._factors1 = _factors(first.total, sum(part.u1.shape[1] for part in self._parts))
        self._factors2 = _factors(second.total, sum(part.t.shape[1] for part in self._parts))

    def coefficients(self) -> tuple[Coefficients, Coefficients]:
        w2 = self._w2 / self._scale2
        return Coefficients(self._w1[:, :-1], self._w1[:, -1]), Coefficients(w2[:, :-1], w2[:, -1])

    def improve(self, steps: int) -> bool:
        """Take one Gauss-Newton step, as far as so many steps of conjugate gradients find it; False if that is no better."""
        off = list(self._pool.map(self._look, self._parts))
        before = sum(float(np.square(values, dtype=np.float64).sum()) for values in off)
        strength = self._strength()
        kernel2 = self._kernel2(self._w2)

        def preconditioned(gradient: "_Step") -> "_Step":
            return _Step(_solve(self._factors1, gradient.w1) / strength, _solve(self._factors2, gradient.w2))

        def curved(step: "_Step") -> "_Step":
            found = sum(self._pool.map(partial(self._curve, step, kernel2), self._parts), _Step.zero())
            ridge1, ridge2 = self._factors1.ridge * strength, self._factors2.ridge
            return found + _Step(ridge1 * step.w1, ridge2 * step.w2)

        pairs = zip(self._parts, off, strict=True)
        gradient = sum(self._pool.map(lambda each: self._pull(each[0], each[1], kernel2), pairs), _Step.zero())
        step = _conjugate_gradients(gradient, curved, preconditioned, steps)
        for _ in range(HALVINGS):
            w1, w2 = self._w1 + step.w1, self._w2 + step.w2
            if sum(self._pool.map(partial(self._loss, w1, w2), self._parts)) < before:
                self._w1, self._w2 = w1, w2
                return True
            step = step * 0.5
        return False

    def _size_behind_first(self, images: Array) -> tuple[int, ...]:
        window = window_of(self._first.site.node, self._first.kernel, images.shape[2:])
        return patches(images[:1, :1], window).shape[1 : images.ndim - 1]

    def _part(self, seen: Seen) -> _Part:
        u1, places1 = _patches(self._first, seen.images, self._first.site.inputs)
        site = self._second.site
        shape = (places1[0], site.channels, *seen.dense.shape[2:])
        goal = self._second.goal(seen.dense, seen.shortcut, shape)
        added = None
        if seen.shortcut is not None and site.clamp is not None and seen.dense.shape == shape:
            added = _rows(np.broadcast_to(seen.shortcut, shape), site.outputs)
        return _Part(u1, places1, _rows(goal, site.outputs), added, (places1[0], *seen.dense.shape[2:]))

    def _look(self, part: _Part) -> Floats:
        """Note what the second sees at the present weights, and return how far off it is, scaled."""
        before = self._before_activation(part, self._w1)
        low, high = self._clamp
        part.slope = ((before > low) & (before < high)) * self._tail1[0]
        part.u2, _ = _patches(self._second, _map(np.clip(before, low, high), part.places1), self._place2)
        return self._off(part, np.matmul(part.u2, self._w2.astype(np.float32)))

    def _off(self, part: _Part, found: Floats) -> Floats:
        """Return how far the second's outputs are off, where the activation behind makes a difference."""
        scale = self._scale2.astype(np.float32)
        t = part.t
        if self._second.site.clamp is not None:
            t = self._second.relaxed_targets(t, part.added, found / scale)
        return np.asarray(scale * t - found)

    def _loss(self, w1: Doubles, w2: Doubles, part: _Part) -> float:
        inner = np.clip(self._before_activation(part, w1), *self._clamp)
        found = _run(self._forward, _map(inner, part.places1), self._kernel2(w2))
        rows = _rows(found, self._second_places) + w2[:, None, -1].astype(np.float32)
        return float(np.square(self._off(part, rows), dtype=np.float64).sum())

    def _curve(self, step: "_Step", kernel2: Floats, part: _Part) -> "_Step":
        """Return J'J step: how the outputs move with the step, and what that pulls at."""
        inner = self._inner_rows(np.matmul(part.u1, step.w1.astype(np.float32))) * _there(part.slope)
        moved = _rows(_run(self._forward, _map(inner, part.places1), kernel2), self._second_places)
        return self._pull(part, moved + np.matmul(_there(part.u2), step.w2.astype(np.float32)), kernel2)

    def _pull(self, part: _Part, off: Floats, kernel2: Floats) -> "_Step":
        """Return J' of how far the outputs are off."""
        outer = np.empty((off.shape[1], self._second.site.outputs.size), np.float32)
        outer[:, self._second_places.reshape(-1)] = off.transpose(1, 0, 2).reshape(off.shape[1], -1)
        pulled = _run(self._backward, _map(outer, part.places2), kernel2)
        inner = np.moveaxis(pulled, 1, -1).reshape(-1, len(self._inner)) * _there(part.slope)
        blocks = inner[:, self._place1].transpose(1, 0, 2)
        w1 = np.matmul(part.u1.transpose(0, 2, 1), blocks)
        return _Step(w1.astype(np.float64), np.matmul(_there(part.u2).transpose(0, 2, 1), off).astype(np.float64))

    def _before_activation(self, part: _Part, w1: Doubles) -> Floats:
        scale, offset = self._tail1
        return np.asarray(self._inner_rows(np.matmul(part.u1, w1.astype(np.float32))) * scale + offset)

    def _inner_rows(self, blocks: Floats) -> Floats:
        """Return the first's outputs as (places, inner channels)."""
        if len(blocks) == 1:
            return blocks[0]  # in one block they ascend
        rows = np.empty((blocks.shape[1], len(self._inner)), np.float32)
        rows[:, self._place1.reshape(-1)] = blocks.transpose(1, 0, 2).reshape(blocks.shape[1], -1)
        return rows

    @property
    def _clamp(self) -> tuple[float, float]:
        return self._first.site.clamp or (-np.inf, np.inf)

    @property
    def _second_places(self) -> NDArray[np.int64]:
        """Where the second's outputs lie among those that are left: (blocks, outputs)."""
        outputs = self._second.site.outputs
        return np.searchsorted(np.sort(outputs.reshape(-1)), outputs)

    def _kernel2(self, w2: Doubles) -> Floats:
        """Return the second's weight as a Conv without groups has it, of the inner channels and the outputs that are left."""
        kernel = self._second.kernel
        weight = np.zeros((self._second.site.outputs.size, len(self._inner), *kernel), np.float32)
        blocks = w2[:, :-1].reshape(len(w2), self._place2.shape[1], *kernel, -1)
        for places, inner, block in zip(self._second_places, self._place2, blocks, strict=True):
            weight[np.ix_(places, inner)] = np.moveaxis(block, -1, 0)
        return weight

    def _strength(self) -> Doubles:
        """Return how much each inner channel matters: what the second makes of it, as far as the activation lets it pass."""
        passing = np.mean([np.square(_there(part.slope), dtype=np.float64).mean(axis=0) for part in self._parts], axis=0)
        squares = np.square(self._kernel2(self._w2), dtype=np.float64)
        whole = squares.sum(axis=(0, *range(2, squares.ndim)))
        strength = whole * np.maximum(passing, 1e-3) + 1e-12
        return np.asarray(strength[self._place1][:, None, :])


@dataclass(frozen=True, eq=False)
class _Step:
    """A change of both weights."""

    w1: Doubles
    w2: Doubles

    @classmethod
    def zero(cls) -> "_Step":
        return cls(np.zeros(1), np.zeros(1))

    def __add__(self, other: "_Step") -> "_Step":
        return _Step(self.w1 + other.w1, self.w2 + other.w2)

    def __mul__(self, factor: float) -> "_Step":
        return _Step(factor * self.w1, factor * self.w2)

    def dot(self, other: "_Step") -> float:
        return float((self.w1 * other.w1).sum() + (self.w2 * other.w2).sum())


def _conjugate_gradients(
    gradient: _Step, curved: Callable[[_Step], _Step], preconditioned: Callable[[_Step], _Step], steps: int
) -> _Step:
    """Return nearly the step that `curved` makes the gradient of."""
    found, left = gradient * 0.0, gradient
    near = direction = preconditioned(left)
    size = left.dot(near)
    for _ in range(steps):
        pulled = curved(direction)
        along = direction.dot(pulled)
        if not along > 0:
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
    moments = np.empty((len(total.uu), size + 1, size + 1))
    moments[:, :-1, :-1], moments[:, -1, :-1], moments[:, :-1, -1], moments[:, -1, -1] = total.uu, total.u, total.u, total.count
    moments *= places / total.count
    ridge = DAMPING * np.trace(moments, axis1=1, axis2=2) / (size + 1)
    factors = [scipy.linalg.cholesky(block + each * np.eye(size + 1), lower=True) for block, each in zip(moments, ridge, strict=True)]
    return _Factors(factors, ridge[:, None, None])


def _solve(factors: _Factors, values: Doubles) -> Doubles:
    return np.stack([scipy.linalg.cho_solve((each, True), value) for each, value in zip(factors.factors, values, strict=True)])


def _with_constant(at: Coefficients) -> Doubles:
    return np.concatenate([at.weight, at.intercept[:, None, :]], axis=1)


def _there(values: Floats | None) -> Floats:
    assert values is not None, "what the second sees is looked at before steps are taken"
    return values


def _patches(fit: Fit, images: Array, inputs: NDArray[np.int64]) -> tuple[Floats, tuple[int, ...]]:
    """Return what each block of a Conv sees everywhere, and a 1: (blocks, places, inputs and 1); and the places."""
    views = patches(images, window_of(fit.site.node, fit.kernel, images.shape[2:]))
    places = views.shape[: images.ndim - 1]
    count, size = int(np.prod(places)), fit.unknowns
    result = np.ones((len(inputs), count, size + 1), np.float32)
    for block, channels in enumerate(inputs):
        seen = views if len(channels) == images.shape[1] else views[(..., channels, *[slice(None)] * len(fit.kernel))]
        result[block, :, :-1] = seen.reshape(count, size)
    return result, places


def _rows(values: Array, outputs: NDArray[np.int64]) -> Floats:
    """Return (samples, channels, pixels...) as (blocks, places, outputs)."""
    rows = np.moveaxis(values, 1, -1).reshape(-1, values.shape[1]).astype(np.float32)
    return np.ascontiguousarray(rows[:, outputs].transpose(1, 0, 2)) if len(outputs) > 1 else rows[None][:, :, outputs[0]]


def _map(rows: Floats, places: tuple[int, ...]) -> Floats:
    """Return (places, channels) as (samples, channels, pixels...)."""
    return np.ascontiguousarray(np.moveaxis(rows.reshape(*places, -1), -1, 1))


def _session(kind: str, window: Window, more: dict[str, list[int]]) -> ort.InferenceSession:
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
