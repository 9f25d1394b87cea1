"""Whether an imported module computes what ONNX Runtime computes, and where it first does not."""

from collections.abc import Mapping

import numpy as np
import onnx
import torch
from numpy.typing import NDArray

from onnx_gconv.errors import VerifyError
from onnx_gconv.model.shapes import Shape
from onnx_gconv.runtime import Feeds, Output, feed_batches, run, session, with_outputs
from onnx_gconv.torch.module import OnnxModule, explained, reads, run_node
from onnx_gconv.torch.node import DTYPES
from onnx_gconv.verification import Difference, batched, compare, default_tolerance, worst

SAMPLES = 2
NODES_A_RUN = 64  # whose tensors are fetched at once, to bound memory


def require_equal(
    module: OnnxModule, model: onnx.ModelProto, *, shapes: Mapping[str, Shape] | None = None, seed: int = 0
) -> Difference:
    """Return the worst difference of any output to ONNX Runtime, over seeded inputs.

    Where it is beyond the tolerance, every node is looked at by itself, and the first one that differs is refused.
    """
    active = session(with_outputs(model, module.output_names))
    tolerance = default_tolerance(model)
    differences = []
    for feeds in feed_batches(model, active, given=shapes or {}, seed=seed, samples=SAMPLES):
        expected = run(active, feeds)
        found = tensors_of(module, feeds, list(expected))
        outputs = [compare(expected[name], _array(found[name], expected[name])) for name in expected]
        difference = worst(outputs)
        # NaN and infinity are not within the tolerance.
        if difference.inconclusive or not all(one.inconclusive or one.max_rel <= tolerance for one in outputs):
            _require_equal_nodes(module, model, feeds, tolerance)
            return difference
        differences.append(difference)
    return worst(differences)


def tensors_of(module: OnnxModule, feeds: Feeds, names: list[str]) -> dict[str, torch.Tensor]:
    """Return tensors of the module on these inputs, without gradients and as in inference."""
    was_training, device = module.training, next((p.device for p in module.parameters()), torch.device("cpu"))
    module.eval()
    try:
        with torch.no_grad(), explained():
            inputs = {name: to_computable(feeds[name]).to(device) for name in module.program.inputs}
            return module.run(inputs, names)
    finally:
        module.train(was_training)


def to_computable(value: Output) -> torch.Tensor:
    """Return an array as a tensor of the type that the module computes in."""
    array = np.asarray(value)
    element = onnx.helper.np_dtype_to_tensor_dtype(array.dtype)
    wide = array.astype(np.float32) if DTYPES[element] == torch.float32 else array
    return torch.from_numpy(np.array(wide)).to(DTYPES[element])


def _array(value: torch.Tensor, like: Output) -> NDArray[np.generic]:
    return value.detach().cpu().numpy().astype(np.asarray(like).dtype)


def _require_equal_nodes(module: OnnxModule, model: onnx.ModelProto, feeds: Feeds, tolerance: float) -> None:
    """Refuse the first node that makes something else than ONNX Runtime from the very tensors that ONNX Runtime gives it.

    Models amplify rounding, and some outputs are tiny on random inputs: then two right implementations differ at the end.
    Node by node that cannot build up, and a difference is held against the largest number that went into it.
    """
    parameters = {name: value.detach().cpu() for name, value in module.constants().items()}
    for nodes in batched(module.program.nodes, NODES_A_RUN):
        names = {name for node in nodes for name in (*reads(node), *node.outputs) if name}
        asked = sorted(names - parameters.keys() - feeds.keys())
        values = run(session(with_outputs(model, asked)), feeds) | dict(feeds)
        known = parameters | {name: to_computable(values[name]) for name in values}
        for node in nodes:
            made = dict(known)
            with explained():
                run_node(node, made)
            read = max((_largest(known[name]) for name in reads(node) if name), default=0.0)
            for name in filter(None, node.outputs):
                expected, found = np.asarray(values[name]), _array(made[name], values[name])
                difference = compare(expected, found)
                limit = tolerance * max(read, _largest(known[name]))
                if not difference.inconclusive and not difference.max_abs <= limit:
                    raise VerifyError(
                        f"the PyTorch module differs from ONNX Runtime first in {name!r}, made by the {node.op} node "
                        f"{node.label!r}, by {difference.max_abs:.1e} (limit {limit:.1e}).",
                        hint="this is a bug of onnx-gconv: please report it with the model",
                    )


def _largest(value: torch.Tensor) -> float:
    return float(value.abs().max()) if value.is_floating_point() and value.numel() else 0.0
