"""One site in numbers: its weights as coefficients, its moments on a batch, and the new weights back in their tensors."""

import math
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from onnx_gconv.model.attributes import integer
from onnx_gconv.model.constants import Constants
from onnx_gconv.recover.normal import Coefficients, Doubles, Rows, Sums
from onnx_gconv.recover.patches import choose, patches, window_of
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

    @classmethod
    def of(cls, site: Site, constants: Constants) -> "Fit":
        """Return the site with what the model stores for it."""
        node = site.node
        bias = constants.value(node.input[2]) if len(node.input) > 2 and node.input[2] else None
        mean = constants.value(site.after.mean) if site.after is not None and site.after.mean and not site.bias else None
        return cls(site, constants.value(site.weight), bias, mean)

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
        weight = picked.reshape(*self.site.outputs.shape, -1).transpose(0, 2, 1)
        own = self.bias is not None and self.site.bias
        constant = self.bias.astype(np.float64) if self.bias is not None and own else np.zeros(self.site.outputs.size)
        return Coefficients(weight, constant[self.site.outputs])

    def goal(self, dense: Array, shortcut: Array | None) -> Array:
        """Return what the site itself has to give so that its target comes out: past the shortcut and the normalization."""
        wanted = dense.astype(np.float32)
        channels = (-1, *[1] * (wanted.ndim - 2))
        if shortcut is not None:
            wanted = wanted - shortcut.astype(np.float32)
            if self.site.after is not None:
                wanted -= self.site.after.offset.astype(np.float32).reshape(channels)
                wanted /= self.site.after.scale.astype(np.float32).reshape(channels)
        if self.bias is not None and not self.site.bias:  # it is added whatever is fitted
            wanted = wanted - self.bias.astype(np.float32).reshape(channels)
        return wanted

    def rows(self, images: Array, goal: Array | None, *, most: int, rng: np.random.Generator) -> Rows:
        """Return inputs and targets of one batch, at `most` of its positions at most; without a goal, targets are zero."""
        site = self.site
        views = images if site.is_gemm else patches(images, window_of(site.node, self.kernel, images.shape[2:]))
        places = views.shape[: 1 if site.is_gemm else images.ndim - 1]
        goals = np.zeros((*places, site.outputs.size), np.float32) if goal is None else np.moveaxis(goal, 1, -1)
        assert goals.shape[:-1] == places, (site.name, views.shape, goals.shape)
        chosen = choose(places, most, rng)
        if chosen is not None:
            views, goals = views[chosen], goals[chosen]
        u = np.ascontiguousarray(views, dtype=np.float32).reshape(-1, images.shape[1], math.prod(self.kernel))
        t = np.ascontiguousarray(goals, dtype=np.float32).reshape(len(u), -1)
        blocks = u.transpose(1, 0, 2)[site.inputs].transpose(0, 2, 1, 3).reshape(len(site.inputs), len(u), -1)
        return blocks, t.T[site.outputs].transpose(0, 2, 1)

    def tensors(self, fitted: Coefficients) -> dict[str, Array]:
        """Return the tensors that hold these coefficients; without a bias, the mean behind the Conv takes the constant."""
        site = self.site
        rows = np.zeros_like(self._rows)
        values = fitted.weight.transpose(0, 2, 1).reshape(*site.outputs.shape, site.inputs.shape[1], -1)
        rows[site.outputs[:, :, None], self._columns[:, None, :]] = values
        shape = self.weight.shape[::-1] if self._is_transposed else self.weight.shape
        weight = rows.reshape(shape)
        result = {site.weight: _cast(weight.T if self._is_transposed else weight, self.weight)}
        constant = np.empty(site.outputs.size)
        constant[site.outputs] = fitted.intercept
        if site.bias:
            result[site.bias] = _cast(constant, self.weight)
        elif self.mean is not None:
            assert site.after is not None
            result[site.after.mean] = _cast(self.mean.astype(np.float64) - constant, self.mean)
        return result

    def regrouped(self, total: Sums, grouping: Grouping) -> tuple["Fit", Sums]:
        """Return the fit in other groups, and the moments it has if its target is what the present weights give."""
        site = replace(
            self.site,
            outputs=grouping.out_order.reshape(grouping.groups, -1),
            inputs=grouping.in_order.reshape(grouping.groups, -1),
        )
        other = replace(self, site=site)
        present = self.before
        owner = site.inputs[:, 0] // self.site.inputs.shape[1]  # the present block that each new one lies in
        kernel = math.prod(self.kernel)
        u, uu, t, ut = [], [], [], []
        for block, inputs, outputs in zip(owner, site.inputs, site.outputs, strict=True):
            columns = (inputs % self.site.inputs.shape[1])[:, None] * kernel + np.arange(kernel)
            columns = columns.reshape(-1)
            rows = outputs % self.site.outputs.shape[1]
            weight, constant = present.weight[block][:, rows], present.intercept[block][rows]
            u.append(total.u[block][columns])
            uu.append(total.uu[block][np.ix_(columns, columns)])
            t.append(total.u[block] @ weight + total.count * constant)
            ut.append(total.uu[block][columns] @ weight + np.outer(u[-1], constant))
        sums_of_t = np.stack(t)
        return other, Sums(total.count, np.stack(u), sums_of_t, np.stack(uu), np.stack(ut), tt=np.zeros_like(sums_of_t))

    @property
    def _is_transposed(self) -> bool:
        return self.site.is_gemm and not integer(self.site.node, "transB", 0)

    @property
    def _rows(self) -> Doubles:
        """The weight as (outputs, inputs that it has columns for, kernel)."""
        rows = (self.weight.T if self._is_transposed else self.weight).astype(np.float64)
        return rows.reshape(*rows.shape[:2], -1)

    @property
    def _columns(self) -> NDArray[np.int64]:
        """Which column of the weight each input has: a Conv with groups has columns for one group's inputs only."""
        return np.asarray(self.site.inputs % self._rows.shape[1])


def _cast(value: Doubles, like: Array) -> Array:
    return np.ascontiguousarray(value.astype(like.dtype))
