"""Normalisations. BatchNormalization trains: its statistics follow the batches unless they are frozen."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from onnx_gconv.torch.node import Node, Results, operator


@operator("BatchNormalization", modal=True)
def batch_normalization(
    node: Node, x: Tensor, scale: Tensor, bias: Tensor, mean: Tensor, variance: Tensor, *, training: bool
) -> Results:
    """ONNX weighs the old statistics with `momentum`, PyTorch the new ones.

    running = momentum * running + (1 - momentum) * that of the batch; the variance of the batch is the unbiased one, as
    in PyTorch, where most models have been trained.
    """
    if node.get("training_mode", 0):
        raise NotImplementedError("a BatchNormalization exported in training mode has no inference to keep to; export in eval mode")
    follow, epsilon = 1.0 - node.get("momentum", 0.9), node.get("epsilon", 1e-5)
    if training and dist.is_initialized() and dist.get_world_size() > 1:
        return _batch_norm_of_all(x, scale, bias, mean, variance, follow=follow, epsilon=epsilon)
    return F.batch_norm(x, mean, variance, scale, bias, training, follow, epsilon)


def _batch_norm_of_all(
    x: Tensor, scale: Tensor, bias: Tensor, mean: Tensor, variance: Tensor, *, follow: float, epsilon: float
) -> Tensor:
    """Normalise by the statistics of the batches of all processes: N processes train as one with the whole batch does.

    torch.nn.SyncBatchNorm does the same, but on GPUs only.
    """
    total_of_all = _TotalOfAll.apply
    world, axes = dist.get_world_size(), [0, *range(2, x.ndim)]
    batch_mean = total_of_all(x.mean(axes)) / world
    shape = [1, -1, *[1] * (x.ndim - 2)]
    centred = x - batch_mean.reshape(shape)
    batch_variance = total_of_all(centred.square().mean(axes)) / world
    with torch.no_grad():
        count = world * x.numel() // x.shape[1]
        mean.lerp_(batch_mean.to(mean.dtype), follow)
        variance.lerp_((batch_variance * count / max(count - 1, 1)).to(variance.dtype), follow)
    factor = scale * torch.rsqrt(batch_variance + epsilon)
    return centred * factor.reshape(shape) + bias.reshape(shape)


class _TotalOfAll(torch.autograd.Function):
    """The sum over all processes; its gradient is the sum of their gradients."""

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        total = value.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return _TotalOfAll.forward(ctx, gradients[0])


@operator("InstanceNormalization")
def instance_normalization(node: Node, x: Tensor, scale: Tensor, bias: Tensor) -> Results:
    return F.instance_norm(x, weight=scale, bias=bias, eps=node.get("epsilon", 1e-5))


@operator("LayerNormalization")
def layer_normalization(node: Node, x: Tensor, scale: Tensor, bias: Tensor | None = None) -> Results:
    if len(node.outputs) > 1:
        raise NotImplementedError("the mean and deviation of a LayerNormalization are not supported")
    shape = x.shape[node.get("axis", -1) % x.ndim :]
    bias = None if bias is None else bias.expand(shape)
    return F.layer_norm(x, shape, scale.expand(shape), bias, node.get("epsilon", 1e-5))


@operator("GroupNormalization")
def group_normalization(node: Node, x: Tensor, scale: Tensor, bias: Tensor) -> Results:
    groups = node.attributes["num_groups"]
    if node.opset < 21:  # one scale for each group, from 21 on for each channel
        scale, bias = (value.repeat_interleave(x.shape[1] // groups) for value in (scale, bias))
    return F.group_norm(x, groups, scale, bias, node.get("epsilon", 1e-5))


@operator("LpNormalization")
def lp_normalization(node: Node, x: Tensor) -> Results:
    axis, p = node.get("axis", -1), node.get("p", 2)
    return F.normalize(x, p=p, dim=axis, eps=1e-12)


@operator("LRN")
def local_response_normalization(node: Node, x: Tensor) -> Results:
    size = node.attributes["size"]
    alpha, beta, bias = node.get("alpha", 1e-4), node.get("beta", 0.75), node.get("bias", 1.0)
    squares = x.square().unsqueeze(1)
    # An even window reaches one further up than down; PyTorch's own function has it the other way round.
    padding = [0] * 2 * (x.ndim - 2) + [(size - 1) // 2, size // 2]
    total = F.pad(squares, padding).unfold(2, size, 1).sum(-1).squeeze(1)
    return x / (bias + alpha / size * total).pow(beta)


@operator("MeanVarianceNormalization")
def mean_variance_normalization(node: Node, x: Tensor) -> Results:
    axes = node.get("axes", [0, 2, 3])
    centred = x - x.mean(axes, keepdim=True)
    return centred / (centred.square().mean(axes, keepdim=True).sqrt() + 1e-9)
