"""One site in numbers: its weights as coefficients, its moments on a batch, and the new weights back in their tensors."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from onnx_gconv.errors import DataError
from onnx_gconv.model.attributes import integer
from onnx_gconv.model.constants import Constants
from onnx_gconv.model.patches import choose, patches, spread, spread_window, window_of
from onnx_gconv.model.transposed import as_filters, as_stored
from onnx_gconv.recover.normal import Coefficients, Doubles, Floats, Rows, Sums, predict
from onnx_gconv.recover.site import Site
from onnx_gconv.solve.grouping import Grouping

Array = NDArray[np.generic]


@dataclass(frozen=True, eq=False)
class Fit:
    """A site with the weights that it has now."""

    site: Site
    weight: Array
    bias: Array | None  # of its own or not; None if it has none
    mean: Array | None  # that of the normalization behind it, if it takes the constant
    dense_mean: Array | None  # what that is in the dense model; another one, if the model has been fitted before

    @classmethod
    def of(cls, site: Site, constants: Constants, dense: Constants) -> "Fit":
        """Return the site with what the model stores for it."""
        node = site.node
        bias = constants.value(node.input[2]) if len(node.input) > 2 and node.input[2] else None
        taker = site.after.mean if site.after is not None and not site.bias else ""
        mean, dense_mean = (each.value(taker) if taker else None for each in (constants, dense))
        return cls(site, constants.value(site.weight), bias, mean, dense_mean)

    @property
    def kernel(self) -> tuple[int, ...]:
        return self.weight.shape[2:]

    @property
    def unknowns(self) -> int:
        """Number of weights of one output."""
        return int(self.site.inputs.shape[1]) * math.prod(self.kernel)

    @property
    def before(self) -> Coefficients:
        """The present weights; the constant is what the fit may change, so a bias that is not its own counts as none."""
        picked = self._rows[self.site.outputs[:, :, None], self._columns[:, None, :]]
        weight = picked.reshape(*self.site.outputs.shape, self.unknowns).transpose(0, 2, 1)
        own = self.bias is not None and self.site.bias
        constant = self.bias.astype(np.float64) if self.bias is not None and own else np.zeros(self.site.channels)
        return Coefficients(weight, constant[self.site.outputs])

    def goal(self, dense: Array, shortcut: Array | None, shape: Sequence[int]) -> Floats:
        """Return what the site itself, which gives this shape, has to give so that its target comes out.

        That is past the shortcut and the normalization. A site whose result is added to something larger is to give the mean
        over all that it is added to.
        """
        channels = (-1, *[1] * (len(shape) - 2))
        if shortcut is None:
            constant = self._mean_shift - self._foreign_bias
            return np.asarray(dense.astype(np.float32) + constant.astype(np.float32).reshape(channels))
        wanted = dense.astype(np.float32) - shortcut.astype(np.float32)
        wanted = wanted.mean(axis=tuple(range(wanted.ndim - len(shape))))
        smaller = tuple(axis for axis, size in enumerate(shape) if size < wanted.shape[axis])
        wanted = wanted.mean(axis=smaller, keepdims=True) if smaller else wanted
        scale, offset = (value.astype(np.float32).reshape(channels) for value in self.tail)
        return np.asarray((wanted - offset) / scale)

    def added(self, dense: Array, shortcut: Array | None, shape: Sequence[int]) -> Floats | None:
        """Return what a shortcut adds behind the site to each value of its own, if an activation follows on that."""
        if shortcut is None or self.site.clamp is None or dense.shape != tuple(shape):
            return None
        return np.broadcast_to(shortcut.astype(np.float32), tuple(shape))

    def rows(self, images: Array, dense: Array, shortcut: Array | None, *, most: int, rng: np.random.Generator) -> Rows:
        """Return what the site sees and should give in one batch, at `most` of its positions at most."""
        site = self.site
        if not all(_is_finite(values) for values in (images, dense, shortcut) if values is not None):
            raise DataError(
                f"on the calibration samples, what goes into layer {site.label!r} or comes out of it is not finite.",
                hint="look for NaN and very large numbers in the data; a model in float16 may overflow",
            )
        if len(site.inputs) == 1 and site.inputs.size < images.shape[1]:
            images = images[:, site.inputs[0]]  # what is not read need not be unfolded
        views = self._unfolded(images)
        places = views.shape[: 1 if site.is_gemm else images.ndim - 1]
        shape = (places[0], site.channels, *places[1:])
        chosen = choose(places, most, rng)

        def at_places(values: Array) -> Floats:
            assert values.shape == shape, (site.name, shape, values.shape)
            last = np.moveaxis(values, 1, -1)
            return np.asarray(last if chosen is None else last[chosen], np.float32).reshape(-1, site.channels)

        # A copy in any case: rows are changed in place, and what they are views of may be stored.
        seen = np.array(views, np.float32, order="C") if chosen is None else np.ascontiguousarray(views[chosen], np.float32)
        count = math.prod(places) if chosen is None else len(chosen[0])
        u = seen.reshape(count, images.shape[1], math.prod(self.kernel))
        if len(site.inputs) == 1:
            blocks = u.reshape(1, len(u), self.unknowns)
        else:
            blocks = u.transpose(1, 0, 2)[site.inputs].transpose(0, 2, 1, 3).reshape(len(site.inputs), len(u), self.unknowns)
        if dense.shape == shape and (shortcut is None or shortcut.shape == shape):  # most positions may not be looked at
            dense, shortcut = at_places(dense), None if shortcut is None else at_places(shortcut)
            goal, added = self.goal(dense, shortcut, dense.shape), self.added(dense, shortcut, dense.shape)
        else:
            goal, added = self.goal(dense, shortcut, shape), self.added(dense, shortcut, shape)
            goal, added = at_places(goal), None if added is None else at_places(added)
        return Rows(np.ascontiguousarray(blocks), _by_block(goal, site), None if added is None else _by_block(added, site))

    def relaxed(self, rows: Rows, at: Coefficients) -> Rows:
        """Return the rows with targets moved to what is found, wherever the activation behind makes no difference.

        Where the dense model is below what a Relu lets pass, any value below is as good. Fitting to the relaxed targets is the
        least-squares step of a majorisation: what never grows is the error where the target passes plus what wrongly passes.
        """
        return replace(rows, t=self.relaxed_targets(rows.t, rows.added, predict(rows, at)))

    def relaxed_targets(self, t: Floats, added: Floats | None, present: Floats) -> Floats:
        """Return the targets, moved to what is found at present wherever the activation behind makes no difference."""
        assert self.site.clamp is not None
        if self.site.shortcut and added is None:
            return t  # it is added to something larger, where the activation sees more than one value of each
        low, high = self.site.clamp
        scale, offset = (value.astype(np.float32)[self.site.outputs][:, None, :] for value in self.tail)
        base = offset if added is None else offset + added
        wanted, found = scale * t + base, scale * present + base
        if high != np.inf:  # a Relu has none
            wanted = np.where(wanted >= high, np.maximum(found, high), wanted)
        wanted = np.where(wanted <= low, np.minimum(found, low), wanted)
        return np.asarray((wanted - base) / scale, dtype=np.float32)

    def tensors(self, fitted: Coefficients) -> dict[str, Array]:
        """Return the tensors that hold these coefficients; without a bias, the mean behind the Conv takes the constant."""
        site = self.site
        rows = np.zeros_like(self._rows)
        kernel = math.prod(self.kernel)
        values = fitted.weight.transpose(0, 2, 1).reshape(*site.outputs.shape, site.inputs.shape[1], kernel)
        rows[site.outputs[:, :, None], self._columns[:, None, :]] = values
        result = {site.weight: _cast(self._stored(rows), self.weight)}
        # Outputs that are gone keep their constants; nobody reads them.
        constant = np.zeros(site.channels)
        if site.bias and self.bias is not None:
            constant += self.bias.astype(np.float64)
        constant[site.outputs] = fitted.intercept
        if site.bias:
            result[site.bias] = _cast(constant, self.weight)
        elif self.mean is not None:
            assert site.after is not None
            result[site.after.mean] = _cast(self.mean.astype(np.float64) - constant, self.mean)
        return result

    def regrouped(self, total: Sums, grouping: Grouping) -> tuple["Fit", Sums]:
        """Return the fit in finer groups, and their part of the moments."""
        ins, outs = self.site.inputs.shape[1], self.site.outputs.shape[1]
        inputs, outputs = grouping.in_order.reshape(grouping.groups, -1), grouping.out_order.reshape(grouping.groups, -1)
        kernel = math.prod(self.kernel)
        columns = ((inputs % ins)[:, :, None] * kernel + np.arange(kernel)).reshape(grouping.groups, -1)
        rows = outputs % outs
        owner = (inputs[:, 0] // ins)[:, None]  # the present block that each new one lies in
        moments = Sums(
            total.count,
            total.u[owner, columns],
            total.t[owner, rows],
            total.uu[owner[:, :, None], columns[:, :, None], columns[:, None, :]],
            total.ut[owner[:, :, None], columns[:, :, None], rows[:, None, :]],
            total.tt[owner, rows],
        )
        return replace(self, site=replace(self.site, outputs=outputs, inputs=inputs)), moments

    @property
    def _foreign_bias(self) -> Doubles:
        """A bias that is not its own is added whatever is fitted."""
        if self.bias is None or self.site.bias:
            return np.zeros(self.site.channels)
        return np.broadcast_to(self.bias.astype(np.float64).reshape(-1), self.site.channels)

    @property
    def _mean_shift(self) -> Doubles:
        """How much more than in the dense model the normalization behind it takes off."""
        if self.mean is None or self.dense_mean is None:
            return np.zeros(self.site.channels)
        return self.mean.astype(np.float64) - self.dense_mean.astype(np.float64)

    @property
    def tail(self) -> tuple[Doubles, Doubles]:
        """What happens to each output on the way to the sum or the activation: scale * x + offset."""
        after = self.site.after
        if after is None:
            return np.ones(self.site.channels), self._foreign_bias
        return after.scale, after.offset + after.scale * self._foreign_bias

    def _unfolded(self, images: Array) -> Array:
        """Return what the site sees at each of its places: (sample, place..., input, kernel...)."""
        node = self.site.node
        if self.site.is_gemm:
            return images
        if self.site.is_transposed:
            window = spread_window(node, self.kernel)
            assert window is not None, "otherwise it is no site"
            return patches(spread(images, node), window)
        return patches(images, window_of(node, self.kernel, images.shape[2:]))

    @property
    def _is_turned(self) -> bool:
        """Whether the weight has its inputs first, as that of a Gemm may."""
        return self.site.is_gemm and not integer(self.site.node, "transB", 0)

    @property
    def _rows(self) -> Doubles:
        """The weight as (outputs, inputs that it has columns for, kernel)."""
        rows = (self.weight.T if self._is_turned else self.weight).astype(np.float64)
        if self.site.is_transposed:
            rows = np.flip(as_filters(rows, self._groups), self._spatial).astype(np.float64)
        return rows.reshape(*rows.shape[:2], -1)

    def _stored(self, rows: Doubles) -> Array:
        """Return such rows as the weight lies."""
        if self.site.is_transposed:
            return as_stored(np.flip(rows.reshape(*rows.shape[:2], *self.kernel), self._spatial), self._groups)
        return rows.reshape(self.weight.shape[::-1]).T if self._is_turned else rows.reshape(self.weight.shape)

    @property
    def _groups(self) -> int:
        """That the node has."""
        return integer(self.site.node, "group", 1)

    @property
    def _spatial(self) -> tuple[int, ...]:
        return tuple(range(2, self.weight.ndim))

    @property
    def _columns(self) -> NDArray[np.int64]:
        """Which column of the weight each input has: a Conv with groups has columns for one group's inputs only."""
        return np.asarray(self.site.inputs % self._rows.shape[1])


def _is_finite(values: Array) -> bool:
    """Return whether all values are finite; so they are if their sum is, which is quicker to tell."""
    with np.errstate(invalid="ignore", over="ignore"):
        return bool(np.isfinite(values.sum()) or np.isfinite(values).all())


def _by_block(rows: Floats, site: Site) -> Floats:
    """Return (places, channels) as (blocks, places, outputs)."""
    return np.asarray(rows.T[site.outputs].transpose(0, 2, 1))


def _cast(value: Array, like: Array) -> Array:
    return np.ascontiguousarray(value.astype(like.dtype))
