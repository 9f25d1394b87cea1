"""Models in int8: QuantizeLinear and DequantizeLinear around what computes, written by ONNX Runtime's own quantiser.

Five things decide how good that is; docs/decisions.md has the measurements. Batch normalization is folded into the Convs first.
Channels that share a scale are brought to the same size. The ranges of the activations are those of least squared error, not the
smallest and largest number ever seen. Weights are rounded so that their errors cancel. And what comes after the last Conv stays
float: one scale for boxes and scores would leave nothing of the scores.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import onnx
import onnx.version_converter
import onnxruntime as ort
from numpy.typing import NDArray

from onnx_gconv.deploy.equalising import equalised
from onnx_gconv.deploy.opset import nodes_of, standard_opset
from onnx_gconv.deploy.rounding import rounded
from onnx_gconv.errors import ModelError
from onnx_gconv.listener import OnProgress, ignore
from onnx_gconv.model.file import load, save
from onnx_gconv.model.listed import delisted
from onnx_gconv.runtime import QUIET, Feeds, run, session
from onnx_gconv.staging import scratch

QuantisedFor = Literal["ort-cpu", "tensorrt"]
QDQ_OPSET = 13  # from which on quantisation can be per channel
QDQ_IR = 7
COMPUTING = ("Conv", "ConvTranspose", "Gemm", "MatMul")
QUANTISED = frozenset(
    {"QuantizeLinear", "DequantizeLinear", "DynamicQuantizeLinear", "QLinearConv", "QLinearMatMul", "ConvInteger", "MatMulInteger"}
)
BINS = 2048
LEVELS = 255
# Shares of the largest number at which a range may end.
SHARES = np.concatenate([np.linspace(1, 0.5, 26), np.linspace(0.48, 0.04, 45)])


def quantise(
    model: onnx.ModelProto,
    feeds: Callable[[], Iterable[Feeds]],
    made_for: QuantisedFor,
    *,
    is_fitted: bool = True,
    on_progress: OnProgress = ignore,
) -> onnx.ModelProto:
    """Return the model in int8, scales from these inputs; `feeds` is called several times.

    For ONNX Runtime activations are uint8, and all that it has int8 kernels for is quantised. For TensorRT they are int8 and
    symmetric, only what Convs and matrix products read is quantised, and biases are float: its parser refuses others.
    Unless it `is_fitted`, channels and weights are taken as they come: for timing, which does not depend on them.
    """
    _require_quantisable(model)
    with scratch() as folder:
        prepared = _prepared(model, folder)
        if is_fitted:
            prepared = equalised(prepared, feeds())
        ranges = _ranges(prepared, feeds, is_symmetric=made_for == "tensorrt", on_progress=on_progress)
        made = _written(prepared, ranges, feeds, made_for, folder)
    return rounded(made, prepared, feeds) if is_fitted else made


def _require_quantisable(model: onnx.ModelProto) -> None:
    kinds = {node.op_type for node in nodes_of(model.graph)}
    if kinds & QUANTISED:
        raise ModelError(
            f"the model is quantised already: it has {', '.join(sorted(kinds & QUANTISED))}.",
            hint="start from the float model, or leave out --precision int8",
        )
    if not any(node.op_type == "Conv" for node in model.graph.node):
        raise ModelError("the model has no Conv outside of inner graphs to quantise.", hint="leave out --precision int8")


def _prepared(model: onnx.ModelProto, folder: Path) -> onnx.ModelProto:
    """Return the same function as ONNX Runtime simplifies it: normalization folded, constants as initializers, nodes named."""
    source = onnx.ModelProto()
    source.CopyFrom(delisted(model))  # a weight that is listed as an input could be replaced
    source.ir_version = max(source.ir_version, QDQ_IR)
    if standard_opset(source) < QDQ_OPSET:
        source = onnx.version_converter.convert_version(source, QDQ_OPSET)
    path, simpler = folder / "float.onnx", folder / "simpler.onnx"
    save(source, path)
    options = ort.SessionOptions()
    options.log_severity_level = QUIET
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_BASIC
    options.optimized_model_filepath = str(simpler)
    ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    result = load(simpler)
    for number, node in enumerate(result.graph.node):  # names must differ, for nodes are excluded by them
        node.name = f"{node.name or node.op_type}_{number}"
    return result


@dataclass
class Seen:
    """How often an activation had which values."""

    low: float = np.inf
    high: float = -np.inf
    counts: NDArray[np.int64] | None = None

    def widen(self, values: NDArray[np.float32]) -> None:
        self.low, self.high = min(self.low, float(values.min())), max(self.high, float(values.max()))

    def count(self, values: NDArray[np.float32]) -> None:
        share = (values.reshape(-1) - np.float32(self.low)) * np.float32(BINS / ((self.high - self.low) or 1.0))
        found = np.bincount(np.clip(share.astype(np.int32), 0, BINS - 1), minlength=BINS)
        self.counts = found if self.counts is None else self.counts + found


def best_range(seen: Seen, *, is_symmetric: bool) -> tuple[float, float]:
    """Return where to clip: the range, zero inside, whose rounding and clipping together have the least squared error."""
    assert seen.counts is not None
    low, high = min(seen.low, 0.0), max(seen.high, 0.0)
    counts = seen.counts
    values = seen.low + (np.arange(BINS) + 0.5) * ((seen.high - seen.low) / BINS)

    def error(ends: tuple[float, float]) -> float:
        step = (ends[1] - ends[0]) / LEVELS
        beyond = np.maximum(values - ends[1], 0) + np.maximum(ends[0] - values, 0)
        return float((counts * (beyond**2 + step**2 / 12)).sum())

    if is_symmetric:
        most = max(-low, high)
        return min(((-most * share, most * share) for share in SHARES), key=error)
    best = (low, high)
    for _ in range(2):  # one end after the other, then once more
        best = min((best, *((low * share, best[1]) for share in SHARES)), key=error)
        best = min((best, *((best[0], high * share) for share in SHARES)), key=error)
    return best


def _ranges(
    model: onnx.ModelProto, feeds: Callable[[], Iterable[Feeds]], *, is_symmetric: bool, on_progress: OnProgress
) -> dict[str, tuple[float, float]]:
    """Return the range of every float activation: one pass for how far it goes, one for how often."""
    known = {tensor.name for tensor in model.graph.initializer} | {value.name for value in model.graph.output}
    watched = onnx.ModelProto()
    watched.CopyFrom(model)
    made = dict.fromkeys(name for node in model.graph.node for name in node.output if name and name not in known)
    watched.graph.output.extend(onnx.helper.make_empty_tensor_value_info(name) for name in made)
    active = session(watched)
    seen: dict[str, Seen] = {}
    for is_counting in (False, True):
        for number, batch in enumerate(feeds(), start=1):
            results: dict[str, Any] = {**run(active, batch), **batch}
            for name, values in results.items():
                if isinstance(values, np.ndarray) and values.dtype == np.float32 and values.size and np.isfinite(values).all():
                    entry = seen.setdefault(name, Seen())
                    entry.count(values) if is_counting else entry.widen(values)
            on_progress(number, None, "batches")
    return {name: best_range(entry, is_symmetric=is_symmetric) for name, entry in seen.items()}


def _tail(model: onnx.ModelProto) -> list[str]:
    """Return the names of the nodes behind which nothing computes."""
    needed: set[str] = set()
    tail = []
    for node in reversed(model.graph.node):
        if node.op_type in COMPUTING or needed & set(node.output):
            needed.update(node.input)
        else:
            tail.append(node.name)
    return [name for name in tail if name]


def saturates() -> bool:
    """Return whether this CPU's int8 kernels overflow: without VNNI the sum of two products of 8 bits is cut to 16."""
    graph = onnx.parser.parse_graph(
        """g (uint8[1,64,8,8] x, int8[64,64,1,1] w) => (int32[1,64,8,8] y) { y = ConvInteger (x, w) }"""
    )
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", QDQ_OPSET)], ir_version=QDQ_IR)
    weight = onnx.numpy_helper.from_array(np.full((64, 64, 1, 1), 127, np.int8), "w")
    model.graph.initializer.append(weight)
    del model.graph.input[1]
    found = run(session(model), {"x": np.full((1, 64, 8, 8), 255, np.uint8)})["y"]
    return bool((np.asarray(found) != 64 * 127 * 255).any())


def _written(
    model: onnx.ModelProto,
    ranges: dict[str, tuple[float, float]],
    feeds: Callable[[], Iterable[Feeds]],
    made_for: QuantisedFor,
    folder: Path,
) -> onnx.ModelProto:
    from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType, quantize_static

    class OneBatch(CalibrationDataReader):  # type: ignore[misc]
        """The quantiser wants to see some data; all ranges are given."""

        def __init__(self, batches: Iterator[Feeds]) -> None:
            self._left = iter([next(batches)])

        def get_next(self) -> Feeds | None:
            return next(self._left, None)

    is_tensorrt = made_for == "tensorrt"
    kinds: Sequence[str] | None = COMPUTING if is_tensorrt else None
    before, after = folder / "prepared.onnx", folder / "int8.onnx"
    save(model, before)
    quantize_static(
        str(before),
        str(after),
        OneBatch(iter(feeds())),
        quant_format=QuantFormat.QDQ,
        per_channel=True,
        reduce_range=not is_tensorrt and saturates(),
        activation_type=QuantType.QInt8 if is_tensorrt else QuantType.QUInt8,
        weight_type=QuantType.QInt8,
        op_types_to_quantize=None if kinds is None else list(kinds),
        nodes_to_exclude=_tail(model),
        extra_options={
            "ActivationSymmetric": is_tensorrt,
            "WeightSymmetric": True,
            "QuantizeBias": not is_tensorrt,
            "OpTypesToExcludeOutputQuantization": list(kinds or ()),
            "TensorQuantOverrides": {
                name: [{"rmin": np.float32(low), "rmax": np.float32(high)}] for name, (low, high) in ranges.items()
            },
        },
    )
    result = load(after)
    result.producer_name, result.producer_version = model.producer_name, model.producer_version
    used = {node.domain or "" for node in nodes_of(result.graph)} | {""}
    opsets = [entry for entry in result.opset_import if ("" if entry.domain == "ai.onnx" else entry.domain) in used]
    del result.opset_import[:]
    result.opset_import.extend(sorted(opsets, key=lambda entry: entry.domain))
    return result
