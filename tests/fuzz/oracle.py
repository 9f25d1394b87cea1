"""Whether an accepted result is right, found without the tool: with ONNX Runtime, onnx and NumPy alone."""

from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort

RUNS = 2
LIMITS = {np.dtype(np.float32): 1e-3, np.dtype(np.float64): 1e-3, np.dtype(np.float16): 5e-2}


def differs(source: str, masked: str, result: str) -> str | None:
    """Return in what a result differs from its masked model or that from its source, "" if in nothing, None if nobody can tell."""
    try:
        return _differs(source, masked, result)
    except MemoryError:  # a model of a million pixels, in the little room that a worker has
        return None


def _differs(source: str, masked: str, result: str) -> str | None:
    changed = _changed(onnx.load(source, load_external_data=False), onnx.load(masked, load_external_data=False))
    if changed:
        return changed
    sessions = [_session(path) for path in (source, masked, result)]
    if any(session is None for session in sessions):
        refused = [path for path, session in zip((source, masked, result), sessions, strict=True) if session is None]
        # What ONNX Runtime does not take before, it need not take after.
        return None if source in refused else f"ONNX Runtime does not load {refused}"
    told = False
    for seed in range(RUNS):
        feeds = _feeds(sessions[0], np.random.default_rng(seed))
        try:
            sessions[0].run(None, feeds)
        except Exception:  # inputs that it does not take
            return None
        one, other = (session.run(None, feeds) for session in sessions[1:])
        for a, b in zip(one, other, strict=True):
            if not isinstance(a, np.ndarray) or a.dtype not in LIMITS or not a.size:
                continue
            if a.shape != b.shape:
                return f"shapes {a.shape} and {b.shape}"
            if not np.isfinite(a).all() or not np.abs(a).max():
                continue
            told = True
            distance = float(np.abs(a.astype(np.float64) - b).max() / np.abs(a).max())
            if not distance <= LIMITS[a.dtype]:
                return f"{distance:.1e} of the largest value"
    return "" if told else None


def _changed(source: onnx.ModelProto, masked: onnx.ModelProto) -> str:
    """Return what masking did beside setting weights to zero."""
    after = {tensor.name: tensor for tensor in masked.graph.initializer}
    for tensor in source.graph.initializer:
        if tensor.name in after and tensor.data_location != onnx.TensorProto.EXTERNAL:
            a, b = onnx.numpy_helper.to_array(tensor), onnx.numpy_helper.to_array(after[tensor.name])
            if a.shape != b.shape or (np.not_equal(a, b) & np.not_equal(b, 0) & ~(np.not_equal(a, a))).any():
                return f"the tensor {tensor.name!r} has other numbers than zeros in the masked model"
    kinds = [sorted(node.op_type for node in model.graph.node if "Conv" in node.op_type) for model in (source, masked)]
    kinds[0] = sorted(kind.replace("FusedConv", "Conv") for kind in kinds[0])
    kinds[1] = sorted(kind.replace("FusedConv", "Conv") for kind in kinds[1])
    return "" if kinds[0] == kinds[1] else f"the masked model has other Convs: {kinds}"


def _session(path: str) -> ort.InferenceSession | None:
    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    # As little of ONNX Runtime's own rewriting as there is.
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    try:
        return ort.InferenceSession(str(Path(path)), options, providers=["CPUExecutionProvider"])
    except Exception:
        return None


def _feeds(session: ort.InferenceSession, rng: np.random.Generator) -> dict[str, np.ndarray]:
    feeds = {}
    for value in session.get_inputs():
        shape = [dim if isinstance(dim, int) and dim > 0 else (1 if axis == 0 else 8) for axis, dim in enumerate(value.shape)]
        kind = {"tensor(float)": np.float32, "tensor(double)": np.float64, "tensor(float16)": np.float16, "tensor(bool)": np.bool_}
        feeds[value.name] = rng.standard_normal(shape).astype(kind.get(value.type, np.int64))
    return feeds
