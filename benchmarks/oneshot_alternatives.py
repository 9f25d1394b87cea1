"""What one could do instead of grouping and recovery: prune inner channels, or only measure BatchNormalization anew."""

from collections.abc import Iterable
from dataclasses import replace
from itertools import cycle

import numpy as np
import onnx

from onnx_gconv.model.constants import Constants
from onnx_gconv.model.network import Layer, Network
from onnx_gconv.model.surgery import Surgery
from onnx_gconv.recover.fitting import FitOptions, fit_sites
from onnx_gconv.recover.flow import Flow
from onnx_gconv.recover.site import find_sites
from onnx_gconv.recover.store import ActivationStore
from onnx_gconv.recover.walk import Walk, put_inputs
from onnx_gconv.rewrite.match import Matched
from onnx_gconv.runtime import Feeds

Pair = tuple[Layer, Layer]


def with_fresh_statistics(model: onnx.ModelProto, feeds: Iterable[Feeds]) -> onnx.ModelProto:
    """Return the model with every BatchNormalization's mean and variance measured on these inputs, in graph order."""
    flow = Flow(model)
    norms = [node for node in flow.nodes if node.op_type == "BatchNormalization" and flow.is_moving(node.input[0])]
    with ActivationStore() as store:
        batches = [batch for share in put_inputs(feeds, flow.inputs, [store]) for batch in share]
        walk = Walk(flow, store, later=[{norm.input[0]} for norm in norms])
        for norm in norms:
            compute = walk.next_stop()
            count, total, squares = 0, np.zeros(()), np.zeros(())
            for batch in batches:
                values = np.moveaxis(compute(batch)[norm.input[0]], 1, -1)
                rows = values.reshape(-1, values.shape[-1]).astype(np.float64)
                count, total, squares = count + len(rows), total + rows.sum(axis=0), squares + np.square(rows).sum(axis=0)
            mean = total / count
            variance = np.maximum(squares / count - np.square(mean), 0.0)
            walk.constants |= {norm.input[3]: mean.astype(np.float32), norm.input[4]: variance.astype(np.float32)}
            walk.tidy()
    surgery = Surgery(model)
    for name, value in walk.constants.items():
        surgery.constant(name, value)
    return surgery.finish()


def prune_channels(
    model: onnx.ModelProto, network: Network, max_macs: int, feeds: Iterable[Feeds], *, options: FitOptions
) -> tuple[onnx.ModelProto, int]:
    """Return the model without the weakest inner channels, the same share in every block, all fitted anew; and its MACs.

    The graph stays dense: the second Conv of a block has zeros for what it no longer reads, which is the same function as
    one without those channels, so MACs are those that are left when they are cut out.
    """
    pairs = inner_pairs(model, network)
    counted = _kept_counts(network, pairs, max_macs)
    constants, surgery = Constants(model), Surgery(model)
    kept_of = {}
    for first, second in pairs:
        strength = np.linalg.norm(constants.value(first.weight).reshape(first.out_channels, -1), axis=1)
        kept = np.sort(np.argsort(-strength, kind="stable")[: counted[first.name]])
        kept_of[second.name] = kept
        weight = np.zeros_like(constants.value(second.weight))
        weight[:, kept] = constants.value(second.weight)[:, kept]
        surgery.constant(second.weight, weight)
    masked = surgery.finish()
    sites = [
        replace(site, inputs=kept_of[site.name][None]) if site.name in kept_of else site
        for site in find_sites(Flow(masked), Constants(masked), Matched())
    ]
    fitted = fit_sites(model, masked, sites, feeds, options=options, progress=lambda *_: None)
    return fitted.model, macs_with(network, pairs, counted)


def _kept_counts(network: Network, pairs: list[Pair], max_macs: int) -> dict[str, int]:
    """Return how many channels stay behind the first Conv of each pair: one share for all, as large as the MACs allow.

    Narrow blocks make coarse steps. So it starts at the step above, and single channels go, from the widest blocks first.
    """
    steps = sorted({kept / first.out_channels for first, _ in pairs for kept in range(1, first.out_channels + 1)})
    shares = ({first.name: max(1, int(step * first.out_channels)) for first, _ in pairs} for step in steps)
    counts = next(counts for counts in shares if macs_with(network, pairs, counts) > max_macs)
    for first, _ in cycle(sorted(pairs, key=lambda pair: -pair[0].out_channels)):
        if macs_with(network, pairs, counts) <= max_macs:
            return counts
        counts[first.name] = max(1, counts[first.name] - 1)
    raise AssertionError("a model without inner channels")


def inner_pairs(model: onnx.ModelProto, network: Network) -> list[Pair]:
    """Return every two Convs with only a Relu between them: channels that nobody else reads."""
    flow = Flow(model)
    layers = {layer.name: layer for layer in network.layers if layer.groups == 1}
    found = []
    for first in layers.values():
        relu = _only_reader(flow, first.name)
        if relu is None or relu.op_type != "Relu":
            continue
        conv = _only_reader(flow, relu.output[0])
        if conv is not None and conv.output[0] in layers:
            found.append((first, layers[conv.output[0]]))
    return found


def macs_with(network: Network, pairs: list[Pair], kept: dict[str, int]) -> int:
    """Return the MACs of the model with so many channels behind the first Conv of each pair."""
    assert network.count.macs is not None
    left = {layer.name: layer.macs or 0 for layer in network.layers}
    whole = sum(left.values())
    for first, second in pairs:
        for layer in (first, second):
            left[layer.name] = left[layer.name] * kept[first.name] // first.out_channels
    return network.count.macs - whole + sum(left.values())


def _only_reader(flow: Flow, tensor: str) -> onnx.NodeProto | None:
    readers = flow.readers.get(tensor, [])
    return flow.nodes[readers[0]] if len(readers) == 1 and tensor not in flow.outputs else None
