"""Where weights are fitted: every Conv, ConvTranspose and Gemm with its own, what it should give, and who takes its bias."""

import math
from dataclasses import dataclass, replace

import numpy as np
import onnx
from numpy.typing import NDArray

from onnx_gconv.model.attributes import clip_range, floating, integer
from onnx_gconv.model.constants import STANDARD_DOMAINS, Constants
from onnx_gconv.model.network import FLOATS
from onnx_gconv.model.patches import spread_window
from onnx_gconv.model.transposed import CONVOLVING
from onnx_gconv.recover.flow import Flow
from onnx_gconv.rewrite.match import Matched, MatchedLayer

Channels = NDArray[np.int64]
FITTED = (*CONVOLVING, "Gemm")
PER_CHANNEL_EPSILON = 1e-12  # a channel that a normalization scales by less than this share of the largest is switched off


@dataclass(frozen=True)
class Normalization:
    """What a BatchNormalization does to each channel: scale * x + offset; and where it keeps its mean."""

    output: str
    scale: NDArray[np.float64]
    offset: NDArray[np.float64]
    spread: NDArray[np.float64]  # the root of the variance
    mean: str  # the tensor, "" if it is not its own


@dataclass(frozen=True)
class Site:
    """One Conv, ConvTranspose or Gemm to be fitted, in the compressed model.

    Its weights are to make `target`, a tensor of the dense model, out of its input in the compressed one. Where the target
    is the sum at the end of a residual block, `shortcut` is what the compressed model adds to it, so that the fit also corrects
    what the shortcut carries wrong.
    """

    name: str  # its output tensor
    node: onnx.NodeProto
    weight: str
    bias: str  # the tensor, "" if it has none of its own
    channels: int  # how many outputs it has in all
    outputs: Channels  # (blocks, outputs of each), those that are left
    inputs: Channels  # (blocks, the inputs that those see)
    target: str
    shortcut: str = ""
    after: Normalization | None = None  # the BatchNormalization that alone reads it
    rank: int = 0  # that its weight is to have; 0: any
    clamp: tuple[float, float] | None = None  # the Relu or Clip that alone reads the end of this: what it lets pass

    @property
    def source(self) -> str:
        return str(self.node.input[0])

    @property
    def label(self) -> str:
        return str(self.node.name or self.name)

    @property
    def is_gemm(self) -> bool:
        return bool(self.node.op_type == "Gemm")

    @property
    def is_transposed(self) -> bool:
        """Whether it is a ConvTranspose."""
        return bool(self.node.op_type == "ConvTranspose")

    @property
    def has_intercept(self) -> bool:
        """Whether a constant can be added to each output without a new parameter: in the bias, or in the mean behind it."""
        return bool(self.bias or (self.after is not None and self.after.mean))


def find_sites(flow: Flow, constants: Constants, matched: Matched) -> list[Site]:
    """Return what can be fitted in a model that is masked so, in graph order."""
    gone = {name for branch in matched.dropped for name in branch.nodes} - {branch.name for branch in matched.dropped}
    layers = {each.layer.name: each for each in matched.layers}
    sites = [
        _site(place, flow, constants, layers.get(node.output[0]), matched)
        for place, node in enumerate(flow.nodes)
        if node.op_type in FITTED and node.output[0] not in gone
    ]
    return [site for site in sites if site is not None]


def _site(place: int, flow: Flow, constants: Constants, planned: MatchedLayer | None, matched: Matched) -> Site | None:
    node = flow.nodes[place]
    if node.domain not in STANDARD_DOMAINS or not flow.is_moving(node.input[0]):
        return None
    name, weight = node.output[0], constants.origin(node.input[1])
    if not _is_own(weight, name, 1, constants) or (node.op_type == "Gemm" and not _is_plain(node)):
        return None
    value = constants.value(weight)
    if value.dtype.name not in FLOATS:
        return None
    if node.op_type == "ConvTranspose" and spread_window(node, value.shape[2:]) is None:
        return None
    outs, ins = _sides(node, value.shape)
    outputs, inputs = _blocks(node, (outs, ins), planned, matched)
    channels = outs
    bias = constants.origin(node.input[2]) if len(node.input) > 2 and node.input[2] else ""
    if bias and not (constants.is_constant(bias) and _is_one_row(constants.value(bias).shape, channels)):
        return None
    own_bias = bias if bias and _is_own(bias, name, 2, constants) and constants.value(bias).shape == (channels,) else ""
    after = _normalization(name, flow, constants)
    site = Site(name, node, weight, own_bias, channels, outputs, inputs, target=name, after=after, rank=matched.ranks.get(name, 0))
    site = _closing(site, place, flow)
    end = site.target if site.shortcut or after is None else after.output
    return replace(site, clamp=_clamp(end, flow, constants))


def _is_own(tensor: str, reader: str, slot: int, constants: Constants) -> bool:
    """Return whether the model stores the tensor and this node alone reads it: only then can it be changed."""
    return constants.is_stored(tensor) and constants.readers(tensor) == {(reader, slot)}


def _is_one_row(shape: tuple[int, ...], outputs: int) -> bool:
    """Return whether a bias, which in a Gemm may have any shape that broadcasts, is the same for all samples."""
    return math.prod(shape) in (1, outputs) and math.prod(shape[:-1]) == 1


def _is_plain(gemm: onnx.NodeProto) -> bool:
    return not integer(gemm, "transA", 0) and floating(gemm, "alpha", 1.0) == 1.0 and floating(gemm, "beta", 1.0) == 1.0


def _sides(node: onnx.NodeProto, shape: tuple[int, ...]) -> tuple[int, int]:
    """Return how many outputs a node has by the shape of its weight, and how many inputs in each of its groups."""
    first, second = shape[:2]
    groups = integer(node, "group", 1)
    if node.op_type == "ConvTranspose":
        return second * groups, first // groups
    return (second, first) if node.op_type == "Gemm" and not integer(node, "transB", 0) else (first, second)


def _blocks(
    node: onnx.NodeProto, shape: tuple[int, int], planned: MatchedLayer | None, matched: Matched
) -> tuple[Channels, Channels]:
    if planned is not None:
        return planned.out_order.reshape(planned.groups, -1), planned.in_order.reshape(planned.groups, -1)
    name, groups = node.output[0], integer(node, "group", 1)
    rows, columns = shape
    outputs = matched.outputs.get(name, np.arange(rows))
    if groups > 1 and name in matched.outputs:  # depthwise: one block for each channel that is left
        return outputs[:, None], outputs[:, None]
    inputs = matched.inputs.get(name, np.arange(columns * groups))
    return outputs.reshape(groups, -1), inputs.reshape(groups, -1)


def _only_reader(tensor: str, flow: Flow) -> onnx.NodeProto | None:
    readers = flow.readers.get(tensor, [])
    return flow.nodes[readers[0]] if len(readers) == 1 and tensor not in flow.outputs else None


def _normalization(tensor: str, flow: Flow, constants: Constants) -> Normalization | None:
    node = _only_reader(tensor, flow)
    if node is None or node.op_type != "BatchNormalization" or node.domain not in STANDARD_DOMAINS or node.input[0] != tensor:
        return None
    if not all(constants.is_constant(name) for name in node.input[1:5]) or integer(node, "training_mode", 0):
        return None
    gamma, beta, mean, variance = (constants.value(name).astype(np.float64) for name in node.input[1:5])
    spread = np.sqrt(variance + floating(node, "epsilon", 1e-5))
    scale = gamma / spread
    if not np.isfinite(scale).all() or (np.abs(scale) <= PER_CHANNEL_EPSILON * np.abs(scale).max(initial=0.0)).any():
        return None  # a channel that is switched off cannot be asked for a target behind the switch
    own_mean = constants.origin(node.input[3])
    return Normalization(
        node.output[0], scale, beta - mean * scale, spread, own_mean if _is_own(own_mean, node.output[0], 3, constants) else ""
    )


def _closing(site: Site, place: int, flow: Flow) -> Site:
    """Return the site aimed at the sum that it closes, if it is the last to be fitted of all that the sum adds."""
    end = site.after.output if site.after is not None else site.name
    add = _only_reader(end, flow)
    if add is None or add.op_type != "Add" or add.domain not in STANDARD_DOMAINS:
        return site
    others = [name for name in add.input if name != end]
    if len(others) != 1 or not flow.is_moving(others[0]):
        return site
    (other,) = others
    before = flow.places_before([other], ())
    if any(at >= place and flow.nodes[at].op_type in FITTED for at in before):
        return site  # it depends on this site, or on one that is fitted later
    return replace(site, target=add.output[0], shortcut=other)


def _clamp(tensor: str, flow: Flow, constants: Constants) -> tuple[float, float] | None:
    """Return the range that the one activation reading the tensor lets pass; None if there is no such."""
    node = _only_reader(tensor, flow)
    if node is None or node.domain not in STANDARD_DOMAINS:
        return None
    if node.op_type == "Relu":
        return 0.0, math.inf
    return clip_range(node, constants) if node.op_type == "Clip" else None
