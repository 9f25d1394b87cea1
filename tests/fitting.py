"""Least squares done once more, the plain way, to hold recovery against; and what its tests are built of."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import onnx
import onnxruntime as ort

from onnx_gconv.plans import Plan, PlannedLayer, Totals
from onnx_gconv.recover.fitting import FitOptions, FittedSites, fit_sites, masked_sites
from onnx_gconv.recover.site import Site
from onnx_gconv.rewrite.mask import mask
from onnx_gconv.rewrite.match import match

Feeds = dict[str, np.ndarray]
Normal = Callable[..., np.ndarray]  # the fixture `normal`


def grouped(name: str, out_channels: int, in_channels: int, *, groups: int = 2, seed: int | None = None) -> PlannedLayer:
    """Return a layer to be grouped, channels as they come, or drawn."""
    ins, outs = np.arange(in_channels), np.arange(out_channels)
    if seed is not None:
        rng = np.random.default_rng(seed)
        ins, outs = rng.permutation(ins), rng.permutation(outs)
    return PlannedLayer(name, name, out_channels, in_channels, groups, 0.5, tuple(ins.tolist()), tuple(outs.tolist()))


def plan_of(*layers: PlannedLayer) -> Plan:
    """Return a plan that does this to the layers."""
    return Plan("", "l2", "best", "uniform", 0, {}, "free", Totals(0, 0), Totals(0, 0), layers, ())


def batches(*shape: int, name: str = "image", count: int = 3, seed: int = 1) -> list[dict[str, np.ndarray]]:
    rng = np.random.default_rng(seed)
    return [{name: rng.standard_normal(shape).astype(np.float32)} for _ in range(count)]


# For the residual net of tiny.py.
RESIDUAL_PLAN = plan_of(grouped("stem", 8, 4, seed=1), grouped("first", 8, 8, seed=2), grouped("last", 8, 8, seed=3))
RESIDUAL_FEEDS = batches(40, 4, 6, 6)


def recover(
    dense: onnx.ModelProto,
    plan: Plan,
    feeds: Iterable[Feeds],
    *,
    sites: Sequence[Site] | None = None,
    options: FitOptions | None = None,
) -> FittedSites:
    """Return the model masked by the plan with its weights fitted."""
    masked = mask(dense, match(dense, plan))
    found = masked_sites(masked, match(masked, plan)) if sites is None else sites
    return fit_sites(dense, masked, found, feeds, options=options or FitOptions(), progress=lambda *_: None)


def outputs(model: onnx.ModelProto, feeds: Feeds, *names: str) -> list[np.ndarray]:
    """Return these tensors of the model, or its outputs, by ONNX Runtime."""
    copy = onnx.ModelProto.FromString(model.SerializeToString())
    if names:
        del copy.graph.output[:]
        copy.graph.output.extend(onnx.helper.make_empty_tensor_value_info(name) for name in names)
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    found = ort.InferenceSession(copy.SerializeToString(), options, providers=["CPUExecutionProvider"]).run(None, feeds)
    return list(found)


def distance(reference: np.ndarray, found: np.ndarray) -> float:
    """Return the distance of two finite arrays, relative to the reference, which is not all zero."""
    reference, found = reference.astype(np.float64), found.astype(np.float64)
    assert reference.shape == found.shape
    assert np.isfinite(reference).all()
    assert np.isfinite(found).all()
    assert np.linalg.norm(reference) > 0
    return float(np.linalg.norm(reference - found) / np.linalg.norm(reference))


def unfold(images: np.ndarray, conv: onnx.NodeProto, kernel: Sequence[int]) -> np.ndarray:
    """Return (positions, channels, kernel elements): what a Conv gives whose every output is one element of its window."""
    channels, size = images.shape[1], int(np.prod(kernel))
    one_each = np.eye(channels * size, dtype=np.float32).reshape(-1, channels, *kernel)
    node = onnx.NodeProto()
    node.CopyFrom(conv)
    node.input[:], node.output[:] = ["x", "w"], ["y"]
    graph = onnx.helper.make_graph(
        [node],
        "unfold",
        [onnx.helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, images.shape)],
        [onnx.helper.make_empty_tensor_value_info("y")],
        [onnx.numpy_helper.from_array(one_each, "w")],
    )
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 17)], ir_version=8)
    (columns,) = outputs(model, {"x": images.astype(np.float32)})
    return np.moveaxis(columns, 1, -1).reshape(-1, channels, size).astype(np.float64)


@dataclass(frozen=True)
class Behind:
    """What follows on a Conv: something may be added, then only values from `low` to `high` pass."""

    low: float
    high: float = np.inf
    added: np.ndarray | None = None
    rounds: int = 0  # of moving targets that do not pass to where the fit has them, and fitting again


def fit_conv(
    images: np.ndarray,
    target: np.ndarray,
    conv: onnx.NodeProto,
    prior: np.ndarray,
    layer: PlannedLayer,
    *,
    damping: float,
    behind: Behind | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Return the weight and bias of a Conv with one group, fitted within the layer's groups by NumPy's least squares.

    The target is what comes out behind what is added. Damping is a row for each unknown that asks it to stay what it was.
    """
    behind = behind or Behind(-np.inf)
    columns = unfold(images, conv, prior.shape[2:])
    total = np.moveaxis(target, 1, -1).reshape(len(columns), -1).astype(np.float64)
    added = np.zeros_like(total)
    if behind.added is not None:
        added += np.moveaxis(behind.added, 1, -1).reshape(len(columns), -1)
    weight, bias = np.zeros(prior.shape), np.zeros(len(prior))
    ins, outs = (np.reshape(order, (layer.groups, -1)) for order in (layer.in_order, layer.out_order))
    for inputs, chosen in zip(ins, outs, strict=True):
        block = np.ix_(chosen, inputs)
        u, before = columns[:, inputs].reshape(len(columns), -1), prior[block].reshape(len(chosen), -1).T.astype(np.float64)
        wanted, base = total[:, chosen].copy(), added[:, chosen]
        found, constant = damped_lstsq(u, wanted - base, before, damping)
        for _ in range(behind.rounds):
            now = u @ found + constant + base
            moved = np.where(wanted <= behind.low, np.minimum(now, behind.low), wanted)
            moved = np.where(wanted >= behind.high, np.maximum(now, behind.high), moved)
            found, constant = damped_lstsq(u, moved - base, before, damping)
        weight[block] = found.T.reshape(len(chosen), len(inputs), *prior.shape[2:])
        bias[chosen] = constant
    return weight, bias


def damped_lstsq(u: np.ndarray, t: np.ndarray, before: np.ndarray, damping: float) -> tuple[np.ndarray, np.ndarray]:
    """Return weights and constants; the weights are pulled back to what they were, the constants are free."""
    u_mean, t_mean = u.mean(axis=0), t.mean(axis=0)
    root = np.sqrt(damping * np.square(u - u_mean).sum() / u.shape[1])
    rows, targets = np.vstack([u - u_mean, root * np.eye(u.shape[1])]), np.vstack([t - t_mean, root * before])
    found = np.linalg.lstsq(rows, targets, rcond=None)[0]
    return found, t_mean - u_mean @ found
