"""Weights of an int8 model rounded so that the errors of a Conv's inputs cancel, not each to the nearest number.

The error of an output is (w - q)' H (w - q), H being the second moments of what the layer reads. One input after the other is
rounded, and those still to come make up for its error (GPTQ; the nearest plane of Babai). The scales stay as they are, and
the bias takes what rounding shifts the mean by.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import onnx
import scipy.linalg
from numpy.typing import NDArray
from onnx import numpy_helper

from onnx_gconv.model.attributes import floating, integer
from onnx_gconv.model.patches import choose, patches, window_of
from onnx_gconv.runtime import Feeds, run, session, with_outputs

Doubles = NDArray[np.float64]
DAMPING = 1e-3  # of the mean of H's diagonal
FLOAT32 = 1e-5  # what sums of float32 may be off by, relative, with room
POSITIONS_A_SAMPLE = 128
COLUMNS_AT_ONCE = 64
GRAM_BYTES = 2**28  # second moments that are held at once; more layers take another pass over the samples
LARGEST_GRAM_BYTES = 2**29  # of one layer: a larger one is rounded to the nearest


@dataclass(frozen=True)
class Site:
    """One Conv or Gemm of the float model, and the tensors of the int8 model that hold its weight and bias."""

    node: onnx.NodeProto
    weight: Doubles  # (blocks, inputs, outputs)
    kernel: tuple[int, ...]
    ints: str
    scale: Doubles  # (blocks, outputs)
    bias: str  # "" if it has none of its own
    bias_scale: str  # "" if the bias is float

    @property
    def gram_bytes(self) -> int:
        return 8 * len(self.weight) * int(self.weight.shape[1]) ** 2


@dataclass
class Moments:
    """Sums over positions of a layer's inputs, block by block."""

    count: int
    total: Doubles  # (blocks, inputs)
    gram: Doubles  # (blocks, inputs, inputs)


def rounded(int8: onnx.ModelProto, model: onnx.ModelProto, feeds: Callable[[], Iterable[Feeds]]) -> onnx.ModelProto:
    """Return the int8 model with its weights rounded anew, from those of the float model whose nodes have the same names."""
    result = onnx.ModelProto()
    result.CopyFrom(int8)
    stored = {tensor.name: tensor for tensor in result.graph.initializer}
    for sites in _portions(find_sites(int8, model)):
        for site, moments in zip(sites, _moments(model, sites, feeds()), strict=True):
            if moments is not None and np.isfinite(moments.gram).all():
                _round(site, moments, stored)
    return result


def find_sites(int8: onnx.ModelProto, model: onnx.ModelProto) -> list[Site]:
    """Return every Conv and Gemm whose weight is its own, with a scale for each output."""
    floats = {tensor.name: tensor for tensor in model.graph.initializer}
    stored = {tensor.name: tensor for tensor in int8.graph.initializer}
    makers = {node.output[0]: node for node in int8.graph.node if node.op_type == "DequantizeLinear"}
    uses = Counter(name for node in model.graph.node for name in node.input)
    same = {node.name: node for node in int8.graph.node if node.op_type in ("Conv", "Gemm")}
    found = (_site(node, same[node.name], floats, stored, makers, uses) for node in model.graph.node if node.name in same)
    return [site for site in found if site is not None and site.gram_bytes <= LARGEST_GRAM_BYTES]


def _site(
    node: onnx.NodeProto,
    quantised: onnx.NodeProto,
    floats: dict[str, onnx.TensorProto],
    stored: dict[str, onnx.TensorProto],
    makers: dict[str, onnx.NodeProto],
    uses: Counter[str],
) -> Site | None:
    maker = makers.get(quantised.input[1])
    is_plain = not integer(node, "transA", 0) and floating(node, "alpha", 1.0) == 1.0 and floating(node, "beta", 1.0) == 1.0
    is_own = node.input[1] in floats and uses[node.input[1]] == 1 and node.input[0] not in floats
    if maker is None or maker.input[0] not in stored or not is_own or not is_plain:
        return None
    weight = _as_rows(numpy_helper.to_array(floats[node.input[1]]), node)
    kernel, groups = weight.shape[2:], integer(node, "group", 1)
    rows = weight.astype(np.float64).reshape(groups, len(weight) // groups, -1).transpose(0, 2, 1)
    scale = numpy_helper.to_array(stored[maker.input[1]]).astype(np.float64)
    if scale.size not in (1, len(weight)):
        return None
    scale = np.broadcast_to(scale.reshape(-1), (len(weight),)).reshape(groups, -1)
    bias = bias_scale = ""
    if len(node.input) > 2 and uses[node.input[2]] == 1 and node.input[2] in floats:
        taker = makers.get(quantised.input[2])
        bias = quantised.input[2] if taker is None else taker.input[0]
        bias_scale = "" if taker is None else taker.input[1]
        if bias not in stored or math.prod(stored[bias].dims) != len(weight):
            bias = bias_scale = ""
    return Site(node, rows, kernel, maker.input[0], scale, bias, bias_scale)


def _as_rows(weight: NDArray[np.generic], node: onnx.NodeProto) -> NDArray[np.generic]:
    """Return the weight with its outputs first."""
    return weight.T if node.op_type == "Gemm" and not integer(node, "transB", 0) else weight


def _portions(sites: Sequence[Site]) -> Iterator[list[Site]]:
    """Yield the sites in runs whose second moments can be held at once."""
    portion: list[Site] = []
    for site in sites:
        if portion and sum(each.gram_bytes for each in (*portion, site)) > GRAM_BYTES:
            yield portion
            portion = []
        portion.append(site)
    if portion:
        yield portion


def _moments(model: onnx.ModelProto, sites: Sequence[Site], feeds: Iterable[Feeds]) -> list[Moments | None]:
    """Return the moments of what each site reads in the float model, at some positions of every sample."""
    inputs = {value.name for value in model.graph.input}
    names = dict.fromkeys(site.node.input[0] for site in sites)
    active = session(with_outputs(model, [name for name in names if name not in inputs] or [model.graph.output[0].name]))
    found: list[Moments | None] = [None] * len(sites)
    for number, batch in enumerate(feeds):
        values = {**run(active, batch), **batch}
        for place, site in enumerate(sites):
            rows = _rows(site, np.asarray(values[site.node.input[0]]), np.random.default_rng([number, place]))
            with np.errstate(invalid="ignore", over="ignore"):  # what is not finite is found in the sum
                total, gram = rows.sum(axis=1, dtype=np.float64), np.matmul(rows.transpose(0, 2, 1), rows)
            before = found[place]
            if before is None:
                found[place] = Moments(rows.shape[1], total, gram.astype(np.float64))
            else:
                before.count += rows.shape[1]
                before.total += total
                before.gram += gram
    return found


def _rows(site: Site, values: NDArray[np.generic], rng: np.random.Generator) -> NDArray[np.float32]:
    """Return (blocks, positions, inputs)."""
    views = values
    if site.node.op_type == "Conv":
        views = patches(values, window_of(site.node, site.kernel, values.shape[2:]))
    rank = 1 + len(site.kernel)
    chosen = choose(views.shape[:rank], POSITIONS_A_SAMPLE * len(values), rng)
    flat = views.reshape(math.prod(views.shape[:rank]), -1) if chosen is None else views[chosen]
    blocks, columns = site.weight.shape[:2]
    return np.ascontiguousarray(flat.reshape(-1, blocks, columns).transpose(1, 0, 2), dtype=np.float32)


def _round(site: Site, moments: Moments, stored: dict[str, onnx.TensorProto]) -> None:
    """Put the rounded weights, and the bias that goes with them, into the model's tensors."""
    mean = moments.total / moments.count
    gram = moments.gram / moments.count
    diagonal = np.arange(gram.shape[1])
    raw = gram[:, diagonal, diagonal].mean(axis=1)
    if site.bias:
        gram -= mean[:, :, None] * mean[:, None, :]
    # Inputs that do not vary leave nothing but rounding, which must not decide anything.
    ridge = np.maximum(DAMPING * gram[:, diagonal, diagonal].mean(axis=1), FLOAT32 * raw)
    gram[:, diagonal, diagonal] += np.where(ridge > 0, ridge, 1.0)[:, None]
    before = numpy_helper.to_array(stored[site.ints])
    limit = int(np.abs(before.astype(np.int32)).max(initial=0))  # as far as the quantiser goes: 7 bits on some CPUs
    if not limit:
        return
    ints = round_in_turn(site.weight / site.scale[:, None, :], gram, limit)
    rows = ints.transpose(0, 2, 1).reshape(_as_rows(before, site.node).shape)
    stored[site.ints].CopyFrom(numpy_helper.from_array(_like(_as_rows(rows, site.node), before), site.ints))
    if site.bias:
        shift = np.einsum("bi,bio->bo", mean, site.weight - ints * site.scale[:, None, :]).reshape(-1)
        bias = numpy_helper.to_array(stored[site.bias])
        if site.bias_scale:
            shift = np.rint(shift / numpy_helper.to_array(stored[site.bias_scale]).astype(np.float64))
            limits = np.iinfo(bias.dtype)
            shift = np.clip(bias + shift, limits.min, limits.max) - bias
        stored[site.bias].CopyFrom(numpy_helper.from_array(_like(bias + shift.reshape(bias.shape), bias), site.bias))


def _like(values: NDArray[np.generic], other: NDArray[np.generic]) -> NDArray[np.generic]:
    return np.ascontiguousarray(values.astype(other.dtype))


def round_in_turn(weight: Doubles, gram: Doubles, limit: int) -> Doubles:
    """Return whole numbers between -limit and limit, at least as near to the weights as the nearest ones are, measured by `gram`.

    Inputs that matter most come first, while there are others left to make up for them. With H = R'R and R's diagonal divided
    out, input i is to become w_i + sum over the j before it of R_ij (w_j - q_j).
    Shapes: weight (blocks, inputs, outputs), gram (blocks, inputs, inputs).
    """
    order = np.argsort(np.diagonal(gram, axis1=1, axis2=2), axis=1, kind="stable")  # taken from its end
    w = np.take_along_axis(weight, order[:, :, None], axis=1)
    h = np.take_along_axis(np.take_along_axis(gram, order[:, :, None], axis=1), order[:, None, :], axis=2)
    r = np.stack([scipy.linalg.cholesky(block) for block in h])
    r /= np.diagonal(r, axis1=1, axis2=2)[:, :, None].copy()
    aim, q = w.copy(), np.empty_like(w)
    for end in range(w.shape[1], 0, -COLUMNS_AT_ONCE):
        start = max(0, end - COLUMNS_AT_ONCE)
        for i in range(end - 1, start - 1, -1):
            there = slice(i + 1, end)
            aim[:, i] += np.matmul(r[:, i, None, there], w[:, there] - q[:, there])[:, 0]
            q[:, i] = np.clip(np.rint(aim[:, i]), -limit, limit)
        done = slice(start, end)
        aim[:, :start] += np.matmul(r[:, :start, done], w[:, done] - q[:, done])
    nearest = np.clip(np.rint(w), -limit, limit)
    is_worse = _error(w - q, h) > _error(w - nearest, h)
    q = np.where(is_worse[:, None, :], nearest, q)
    return np.take_along_axis(q, np.argsort(order, axis=1)[:, :, None], axis=1)


def _error(difference: Doubles, gram: Doubles) -> Doubles:
    return np.asarray((difference * np.matmul(gram, difference)).sum(axis=1))
