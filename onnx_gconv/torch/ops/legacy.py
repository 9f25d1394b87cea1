"""Experimental operators of the first opsets, which ONNX Runtime still runs."""

import torch
from torch import Tensor

from onnx_gconv.torch.node import Node, Results, operator


@operator("ImageScaler")
def image_scaler(node: Node, x: Tensor) -> Results:
    bias = torch.tensor(node.get("bias", [0.0]), dtype=x.dtype, device=x.device)
    return x * node.get("scale", 1.0) + bias.reshape(-1, 1, 1)


@operator("Crop")
def crop(node: Node, x: Tensor) -> Results:
    left, top, right, bottom = node.attributes["border"]
    height, width = node.get("scale", [x.shape[2] - top - bottom, x.shape[3] - left - right])
    return x[:, :, top : top + height, left : left + width]


@operator("Affine")
def affine(node: Node, x: Tensor) -> Results:
    return x * node.get("alpha", 1.0) + node.get("beta", 0.0)


@operator("ParametricSoftplus")
def parametric_softplus(node: Node, x: Tensor) -> Results:
    return node.get("alpha", 1.0) * torch.nn.functional.softplus(node.get("beta", 1.0) * x)


@operator("ScaledTanh")
def scaled_tanh(node: Node, x: Tensor) -> Results:
    return node.get("alpha", 1.0) * torch.tanh(node.get("beta", 1.0) * x)
