"""How strong each input channel of each layer is on the calibration samples."""

from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import onnx
from numpy.typing import NDArray

from onnx_gconv.model.network import Layer
from onnx_gconv.recover.flow import Flow
from onnx_gconv.recover.store import ActivationStore
from onnx_gconv.recover.walk import Walk, put_inputs
from onnx_gconv.runtime import Feeds


def input_strengths(
    model: onnx.ModelProto, layers: Sequence[Layer], feeds: Iterable[Feeds], *, jobs: int
) -> dict[str, NDArray[np.float64]]:
    """Return, by layer, the root of the mean square of each channel that it reads."""
    flow = Flow(model)
    sources = [flow.nodes[flow.producer[layer.name]].input[0] for layer in layers]
    found: dict[str, NDArray[np.float64]] = {}
    with ActivationStore() as store, ThreadPoolExecutor(jobs) as pool:
        shares = put_inputs(feeds, flow.inputs, [store])
        batches = [batch for share in shares for batch in share]
        walk = Walk(flow, store, later=[{source} for source in sources])
        for layer, source in zip(layers, sources, strict=True):
            stop = walk.next_stop()
            squares = pool.map(lambda batch, stop=stop, source=source: _mean_square(stop(batch)[source]), batches)
            found[layer.name] = np.sqrt(np.mean(list(squares), axis=0))
            walk.tidy()
    return found


def _mean_square(values: NDArray[np.generic]) -> NDArray[np.float64]:
    return np.asarray(np.square(values, dtype=np.float64).mean(axis=tuple(axis for axis in range(values.ndim) if axis != 1)))
