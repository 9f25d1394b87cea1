"""How far the outputs would move without a kernel, to first order: the criterion `taylor`."""

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import onnx
import torch
from numpy.typing import NDArray
from torch import Tensor

from onnx_gconv.errors import DataError, ModelError
from onnx_gconv.listener import OnProgress
from onnx_gconv.model.network import Layer
from onnx_gconv.model.shapes import Shape
from onnx_gconv.model.transposed import as_filters
from onnx_gconv.runtime import Feeds
from onnx_gconv.torch import load
from onnx_gconv.torch.comparing import to_computable

DRAWS = 4  # of signs for each batch


def kernel_moves(
    model: onnx.ModelProto,
    layers: Sequence[Layer],
    feeds: Iterable[Feeds],
    *,
    shapes: Mapping[str, Shape],
    seed: int,
    on_batch: OnProgress,
) -> dict[str, NDArray[np.float64]]:
    """Return, by layer, the root of the expected squared move of the outputs when a kernel is set to zero.

    Taken out, a kernel w changes an output y by about -<dy/dw, w>. With random signs s on all numbers of y, the expectation of
    <d(s y)/dw, w>^2 is the sum of these changes squared: some gradients stand for one of each number of the outputs. In the
    literature it is a loss that changes (Molchanov et al. 2017), and labels are needed.
    """
    module = load(model, shapes=shapes, seed=seed).eval()
    parameters = dict(module.named_parameters())
    for layer in layers:
        if layer.weight not in parameters:
            raise ModelError(
                f"the weight of {layer.label!r} is not one that PyTorch can differentiate by.",
                hint="--criterion l2 needs no gradients",
            )
    weights = {layer.name: parameters[layer.weight] for layer in layers}
    generator = torch.Generator().manual_seed(seed)
    total = {name: torch.zeros(weight.shape[:2], dtype=torch.float64) for name, weight in weights.items()}
    draws = 0
    for number, batch in enumerate(feeds):
        on_batch(number, None, "")
        outputs = module(**{name: to_computable(batch[name]) for name in module.input_names})
        for draw in range(DRAWS):
            move = _signed(outputs if isinstance(outputs, tuple) else (outputs,), generator)
            gradients = torch.autograd.grad(move, list(weights.values()), retain_graph=draw < DRAWS - 1, allow_unused=True)
            for (name, weight), gradient in zip(weights.items(), gradients, strict=True):
                if gradient is not None:
                    total[name] += (weight.detach() * gradient).double().flatten(2).sum(2).square()
            draws += 1
    found = {name: np.asarray(np.sqrt(value.numpy() / max(draws, 1))) for name, value in total.items()}
    found |= {layer.name: as_filters(found[layer.name], layer.groups) for layer in layers if layer.is_transposed}
    if not all(np.isfinite(value).all() for value in found.values()):
        raise DataError(
            "on the calibration samples, a gradient is not finite.", hint="look for NaN and very large numbers in the data"
        )
    return found


def _signed(outputs: Sequence[Tensor], generator: torch.Generator) -> Tensor:
    """Return the sum of the outputs under random signs, each output as much as any other, whatever its scale and size."""
    parts = []
    for value in outputs:
        if value.requires_grad:
            scale = float(value.detach().float().std(correction=0)) or 1.0
            signs = torch.randint(2, value.shape, generator=generator, dtype=value.dtype) * 2 - 1
            parts.append((signs * value).sum() / (scale * value[0].numel() ** 0.5))
    if not parts:
        raise ModelError("no output of the model depends on its weights.", hint="--criterion l2 needs no gradients")
    return torch.stack(parts).sum()
