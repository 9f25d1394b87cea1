"""ONNX models trained in PyTorch: import, masks that hold, write-back. Needs the extra `torch`; nothing else imports it."""

from collections.abc import Mapping
from pathlib import Path

import onnx

from onnx_gconv.model.file import load as load_file
from onnx_gconv.model.network import settle_shapes
from onnx_gconv.model.shapes import Shape, input_shapes
from onnx_gconv.plans import Plan, read_plan
from onnx_gconv.rewrite.match import match
from onnx_gconv.runtime import observe_shapes
from onnx_gconv.torch.comparing import require_equal
from onnx_gconv.torch.importing import build
from onnx_gconv.torch.masks import hold_masks
from onnx_gconv.torch.module import OnnxModule
from onnx_gconv.torch.write_back import save_back

__all__ = ["OnnxModule", "load", "save_back"]


def load(
    model: onnx.ModelProto | Path | str,
    plan: Plan | Path | str | None = None,
    *,
    shapes: Mapping[str, Shape] | None = None,
    seed: int = 0,
) -> OnnxModule:
    """Return a module to train, found equal to ONNX Runtime on seeded inputs.

    With a plan, the weights that it drops are zero and stay zero under any optimiser.

    Args:
        shapes: of the inputs to compare at, by name, where axes are dynamic and no small size suits the model.
    """
    proto = model if isinstance(model, onnx.ModelProto) else load_file(Path(model))
    module = build(proto)
    require_equal(module, proto, shapes=shapes, seed=seed)
    if plan is not None:
        plan = plan if isinstance(plan, Plan) else read_plan(Path(plan))
        needs_shapes = plan.spaces or plan.dropped
        tensors = settle_shapes(proto, input_shapes(proto, shapes or {}), observe=observe_shapes) if needs_shapes else None
        hold_masks(module, proto, match(proto, plan, shapes=tensors))
    return module
