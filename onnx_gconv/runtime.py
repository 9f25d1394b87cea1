"""ONNX Runtime: sessions, and seeded inputs to feed them."""

import ctypes
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import metadata
from types import MappingProxyType

import numpy as np
import onnx
import onnxruntime as ort
from numpy.typing import NDArray

from onnx_gconv.errors import ModelError
from onnx_gconv.model.apart import is_large_model, written_apart
from onnx_gconv.model.shapes import Shape, free_inputs, input_shapes

Feeds = dict[str, NDArray[np.generic]]
Output = object  # an array, or a list or dict of them for sequences and maps

# Tried in this order for dynamic axes: small first, larger ones for models that pool many times.
SMALL_SIZES = (64, 32, 128, 224, 256, 320, 512, 640)
# What these give has no shape.
NO_TENSORS = frozenset(
    {
        "Optional",
        "SequenceConstruct",
        "SequenceEmpty",
        "SequenceErase",
        "SequenceInsert",
        "SequenceMap",
        "SplitToSequence",
        "ZipMap",
    }
)  # fmt: skip
NOTHING_STEERED: Mapping[str, int] = MappingProxyType({})
# What 0 threads stand for: ONNX Runtime's own choice, or this process's share of the cores.
_share = {"threads": 0}
QUIET = 4  # ONNX Runtime's log level for fatal errors: what fails here comes back as an exception


def take_share(threads: int) -> None:
    """Let sessions of this process take so many threads unless told otherwise: other processes want the rest of the cores."""
    _share["threads"] = threads


def session(model: onnx.ModelProto, *, threads: int = 0) -> ort.InferenceSession:
    """Return a CPU session as a user of the model would run it, or say why ONNX Runtime refuses the model.

    With 0 threads it takes this process's share of the cores (`take_share`), or else all of them.
    """
    return _session(lambda: model, threads=threads, is_lean=False)


def lean_session(make: Callable[[], onnx.ModelProto], *, holds_little: bool = False) -> ort.InferenceSession:
    """Return a CPU session for a few runs; a large model is made for it, and gone before ONNX Runtime copies the weights.

    One that holds little lets go of every tensor as soon as it can, and computes shapes as soon as it can: by default all of
    these would come last, and keep everything.
    """
    return _session(make, threads=0, is_lean=True, holds_little=holds_little)


def release_freed_memory() -> None:
    """Give what ended sessions freed back to the system, where the C library would keep it: of a large model, its size."""
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's; musl has none and keeps little
        if trim is not None:
            trim(0)


def _session(
    make: Callable[[], onnx.ModelProto], *, threads: int, is_lean: bool, holds_little: bool = False
) -> ort.InferenceSession:
    model = make()
    options = ort.SessionOptions()
    if holds_little:
        options.execution_order = ort.ExecutionOrder.PRIORITY_BASED
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_BASIC  # or changes of layout come in between
        options.enable_cpu_mem_arena = options.enable_mem_pattern = False
    options.intra_op_num_threads = threads or _share["threads"]
    options.log_severity_level = QUIET
    if not is_large_model(model):
        return _load(model.SerializeToString(), options)
    if is_lean:
        # All but the changes of layout, which hold every weight a second time.
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
        options.enable_cpu_mem_arena = False  # one small output would keep the whole arena alive
    with written_apart(model) as path:  # ONNX Runtime maps these files; above 2 GiB they are the only way
        del model
        return _load(str(path), options)


def _load(source: str | bytes, options: ort.SessionOptions) -> ort.InferenceSession:
    try:
        return ort.InferenceSession(source, options, providers=["CPUExecutionProvider"])
    except Exception as error:  # ONNX Runtime's exceptions share no base class but Exception
        raise ModelError(
            f"ONNX Runtime {ort.__version__} cannot load the model: {_first_line(error)}",
            hint="only models that ONNX Runtime runs can be verified",
        ) from error


def run(active: ort.InferenceSession, feeds: Feeds, outputs: Sequence[str] | None = None) -> dict[str, Output]:
    """Return the outputs by name."""
    names = list(outputs) if outputs is not None else [value.name for value in active.get_outputs()]
    try:
        return dict(zip(names, active.run(names, feeds), strict=True))
    except Exception as error:
        shapes = ", ".join(f"{name} {'x'.join(map(str, value.shape))}" for name, value in feeds.items())
        raise ModelError(
            f"ONNX Runtime cannot run the model on inputs {shapes}: {_first_line(error)}",
            hint=_what_to_give(active),
        ) from error


def _what_to_give(active: ort.InferenceSession) -> str:
    """Return which inputs another shape can be given for, and what they declare."""
    declared = {value.name: [dim if isinstance(dim, int) else "?" for dim in value.shape] for value in active.get_inputs()}
    wishes = [f"{name}={'x'.join(map(str, dims))}" for name, dims in declared.items() if "?" in dims]
    if not wishes:
        return "the model fixes the shapes of all its inputs: check that it runs in ONNX Runtime at all"
    return f"give a shape that the model accepts, with numbers for the ?: --input-shape {' '.join(wishes)}"


def random_feeds(model: onnx.ModelProto, shapes: Mapping[str, Shape], rng: np.random.Generator) -> Feeds:
    """Return inputs that suit each input's type: standard normal floats, pixel values for uint8, small whole numbers."""
    feeds: Feeds = {}
    for value in free_inputs(model):
        element = value.type.tensor_type.elem_type
        if value.name not in shapes or not element:
            raise ModelError(
                f"input {value.name!r} has no known shape and type.", hint=f"give it with --input-shape {value.name}=1x3x224x224"
            )
        if element == onnx.TensorProto.STRING:
            feeds[value.name] = np.full(shapes[value.name], "a", dtype=object)
            continue
        dtype = onnx.helper.tensor_dtype_to_np_dtype(element)
        if np.issubdtype(dtype, np.integer):
            # Whole numbers may be indices, lengths or flags: 0 and 1 are legal nearly everywhere.
            high = 256 if dtype == np.uint8 else 2
            feeds[value.name] = rng.integers(0, high, shapes[value.name]).astype(dtype)
        elif dtype == np.bool_:
            feeds[value.name] = rng.integers(0, 2, shapes[value.name]).astype(dtype)
        else:
            feeds[value.name] = rng.standard_normal(shapes[value.name]).astype(dtype)
    return feeds


def steered(feeds: Feeds, steering: Mapping[str, int]) -> Feeds:
    """Return the feeds with one number throughout for each input of the steering."""
    return feeds | {name: np.full_like(feeds[name], value) for name, value in steering.items()}


def feed_batches(
    model: onnx.ModelProto,
    active: ort.InferenceSession,
    *,
    given: Mapping[str, Shape],
    seed: int,
    samples: int,
    steering: Mapping[str, int] = NOTHING_STEERED,
) -> Iterator[Feeds]:
    """Yield seeded inputs that the model really runs on; dynamic axes get the first small size that works.

    The inputs of `steering` are these numbers throughout.
    """

    def feeds() -> Feeds:
        return steered(random_feeds(model, shapes, rng), steering)

    failure: ModelError | None = None
    for spatial in SMALL_SIZES:
        shapes = input_shapes(model, given, spatial=spatial)
        rng = np.random.default_rng(seed)
        first = feeds()
        try:
            run(active, first)
        except ModelError as error:
            if shapes == input_shapes(model, given, spatial=1):
                raise  # nothing is dynamic: no other size to try
            failure = failure or error
            continue
        yield first
        for _ in range(samples - 1):
            yield feeds()
        return
    assert failure is not None
    raise failure


def with_outputs(model: onnx.ModelProto, names: Sequence[str]) -> onnx.ModelProto:
    """Return the model with these tensors as its only outputs."""
    result = onnx.ModelProto()
    result.CopyFrom(model)
    del result.graph.output[:]
    result.graph.output.extend(onnx.helper.make_empty_tensor_value_info(name) for name in names)
    return result


def observe_shapes(
    model: onnx.ModelProto, names: Sequence[str], inputs: Mapping[str, Shape], steerings: Sequence[Mapping[str, int]] = ({},)
) -> dict[str, Shape]:
    """Return the shapes that these tensors really have in a run at these input shapes; nothing of those in bodies.

    The run gives the shapes alone: ONNX Runtime lets go of each tensor when it has been read, so that large ones cost nothing.
    It is made with the first of the steerings that the model runs with.
    """
    makers = {name: node for node in model.graph.node for name in node.output}
    observed = {name: f"{name}::shape" for name in names if name in makers and makers[name].op_type not in NO_TENSORS}
    if not observed:
        return {}

    def make() -> onnx.ModelProto:
        result = with_outputs(model, list(observed.values()))
        result.graph.node.extend(onnx.helper.make_node("Shape", [name], [shape]) for name, shape in observed.items())
        return result

    failure: ModelError | None = None
    try:
        feeds, active = random_feeds(model, inputs, np.random.default_rng(0)), lean_session(make, holds_little=True)
        for steering in steerings:
            try:
                results = run(active, steered(feeds, steering))
            except ModelError as error:
                failure = failure or error
                continue
            return {name: tuple(np.asarray(results[shape]).tolist()) for name, shape in observed.items()}
    finally:
        release_freed_memory()
    assert failure is not None, "there is a steering to try"
    raise failure


def installation_conflict() -> str | None:
    """Return what is wrong when the CPU and GPU packages of ONNX Runtime overwrite each other, else None."""
    installed = {name for name in ("onnxruntime", "onnxruntime-gpu") if _is_installed(name)}
    if len(installed) == 2 and "CUDAExecutionProvider" not in ort.get_available_providers():
        return (
            "onnxruntime and onnxruntime-gpu are both installed and the CPU one has overwritten the other: no GPU will be "
            "used. Fix: pip uninstall -y onnxruntime onnxruntime-gpu && pip install onnxruntime-gpu"
        )
    return None


def _is_installed(name: str) -> bool:
    try:
        metadata.version(name)
    except metadata.PackageNotFoundError:
        return False
    return True


def _first_line(error: Exception) -> str:
    return " ".join(str(error).split())[:300]
