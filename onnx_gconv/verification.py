"""Whether two models are the same function: run both on seeded inputs and compare."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import TypeVar

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import numpy_helper

from onnx_gconv.errors import VerifyError
from onnx_gconv.model.attributes import integer
from onnx_gconv.model.shapes import Shape, free_inputs
from onnx_gconv.model.shell import is_large, shell
from onnx_gconv.runtime import Feeds, Output, lean_session, release_freed_memory, run, with_outputs
from onnx_gconv.steering import steered_batches

Order = NDArray[np.int64]
Item = TypeVar("Item")
ModelOrMaker = onnx.ModelProto | Callable[[], onnx.ModelProto]  # a model, or how to make it when its turn comes
# Masked and grouped are one sum in two orders, so they differ by rounding only: 5e-7 of the largest value was the worst
# on single fp32 layers, up to some 1e-5 through a hundred of them, and a wrong order gives more than 0.1.
TOLERANCE = {"float32": 1e-4, "float64": 1e-9, "float16": 2e-2, "bfloat16": 1e-1}
SAMPLES = 4
LAYERS_A_RUN = 16  # inner tensors fetched at once at first, to bound memory; small ones go in larger batches from then on
BYTES_A_RUN = 2**27
MOST_GROWTH = 8  # from one batch to the next: behind small tensors there may be large ones
SATURATING = ("Sigmoid", "HardSigmoid", "Softmax", "Tanh")
MOVING = ("Identity", "Reshape", "Transpose", "Squeeze", "Unsqueeze", "Flatten")  # change no number


@dataclass(frozen=True)
class Difference:
    """The worst difference seen in one output; relative to the largest value of that output."""

    max_abs: float
    max_rel: float
    inconclusive: str = ""  # why equality here says nothing, if it does not

    def as_dict(self) -> dict[str, object]:
        """Return it for JSON, which knows no infinity: null stands for it."""
        return {"max_abs": finite(self.max_abs), "max_rel": finite(self.max_rel), "inconclusive": self.inconclusive}


DIFFERENT = Difference(float("inf"), float("inf"))


@dataclass(frozen=True)
class Verification:
    """The outcome over all samples."""

    samples: int
    tolerance: float
    outputs: Mapping[str, Difference] = field(default_factory=dict)

    @property
    def max_abs_error(self) -> float:
        return max((d.max_abs for d in self.outputs.values() if not d.inconclusive), default=float("nan"))

    @property
    def max_rel_error(self) -> float:
        return max((d.max_rel for d in self.outputs.values() if not d.inconclusive), default=float("nan"))

    def as_dict(self) -> dict[str, object]:
        """Return the outcome for JSON, which knows no infinity: null stands for it."""
        return {
            "samples": self.samples,
            "max_abs_error": finite(self.max_abs_error),
            "max_rel_error": finite(self.max_rel_error),
            "tolerance": self.tolerance,
            "passed": self.passed,
        }

    @property
    def passed(self) -> bool:
        """Within tolerance, on at least one output that says something; NaN never passes."""
        return bool(self.max_rel_error <= self.tolerance)


def finite(number: float) -> float | None:
    """Return the number, or None for NaN and infinity."""
    return number if math.isfinite(number) else None


def compare(first: Output, second: Output) -> Difference:
    """Return the difference of two results of one output: arrays, or sequences and maps of them taken as one.

    Relative to the largest value in the whole output: 1e-7 in a map's smallest probability is rounding, too.
    """
    ones, twos = list(_leaves(first)), list(_leaves(second))
    if [(a.shape, a.dtype) for a in ones] != [(b.shape, b.dtype) for b in twos]:
        return DIFFERENT
    max_abs = largest = 0.0
    reason = "is empty"
    for a, b in zip(ones, twos, strict=True):
        if a.dtype.kind in "OSUbiu":  # labels, flags, indices
            if not np.array_equal(a, b):
                return DIFFERENT
            reason = "holds no floating-point numbers" if reason == "is empty" else reason
        elif a.size:
            x, y = a.astype(np.float64), b.astype(np.float64)
            if not np.isfinite(x).all():  # then nothing can be said: zero times NaN is NaN, a weight not there is not
                return Difference(0.0, 0.0, "holds NaN or infinity")
            if not np.isfinite(y).all():
                return DIFFERENT
            max_abs = max(max_abs, float(np.abs(x - y).max()))
            largest = max(largest, float(np.abs(x).max()), float(np.abs(y).max()))
            reason = "is all zero"
    return Difference(max_abs, max_abs / largest) if largest > 0 else Difference(0.0, 0.0, reason)


def _leaves(result: Output) -> Iterator[NDArray[np.generic]]:
    if isinstance(result, dict):
        yield np.asarray(list(result), dtype=object)
        result = list(result.values())
    if isinstance(result, list):
        for item in result:
            yield from _leaves(item)
    else:
        yield np.asarray(result)


def worst(differences: Sequence[Difference]) -> Difference:
    """Return the largest difference; inconclusive only if every one is."""
    telling = [d for d in differences if not d.inconclusive]
    if not telling:
        return differences[0] if differences else Difference(0.0, 0.0, inconclusive="is empty")
    return Difference(max(d.max_abs for d in telling), max(d.max_rel for d in telling))


def default_tolerance(model: onnx.ModelProto) -> float:
    """Return the tolerance for the least precise float type among the model's inputs, outputs and weights."""
    elements = {value.type.tensor_type.elem_type for value in (*free_inputs(model), *model.graph.output)}
    elements |= {tensor.data_type for tensor in model.graph.initializer}
    names = {onnx.TensorProto.DataType.Name(element).lower() for element in elements if element}
    kinds = {"float": "float32", "double": "float64", "float16": "float16", "bfloat16": "bfloat16"}
    # Only float64 throughout earns the tightest bound: a float32 anywhere rounds the rest.
    return max((TOLERANCE[kinds[name]] for name in names if name in kinds), default=TOLERANCE["float32"])


@dataclass(frozen=True)
class Sampling:
    """On which inputs models are compared."""

    seed: int
    samples: int
    shapes: Mapping[str, Shape]


@dataclass(frozen=True)
class Seen:
    """What one model gave, and on which inputs; of the model itself only the structure is kept."""

    structure: onnx.ModelProto
    feeds: list[Feeds]
    results: list[dict[str, Output]]


def verify(
    first: ModelOrMaker,
    second: ModelOrMaker,
    *,
    tolerance: float,
    seed: int,
    samples: int = SAMPLES,
    shapes: Mapping[str, Shape] | None = None,
    inner: Mapping[str, Order | None] | None = None,
    orders: Mapping[str, Order] | None = None,
) -> Verification:
    """Return how far the second model is from the first over all outputs.

    `inner` names tensors that both models compute, with the order in which the second has their channels (None: the same).
    They are compared instead of outputs that cannot tell: labels and indices, which flip on a tie, and outputs that are all
    zero or NaN on these inputs; and beside outputs that agree to the last bit, as a saturated softmax does whatever came
    before it. With `inner`, of an output that is a Sigmoid or the like in both, what goes into it is compared instead: on noise a
    detector's scores may all be 1e-6, so that rounding looks like a difference, or all 1, so that nothing does. `orders` are those
    in which the second model has the channels of any tensor, where they are other ones. Without, outputs decide: who compares two
    models of his own asks for these.
    """
    how = Sampling(seed, samples, shapes or {})
    result = Verification(samples, tolerance, _differences(first, second, how))
    if inner is not None:
        result = _before_saturation(first, second, how, result, orders or {})
    undecided = [name for name, d in result.outputs.items() if d.inconclusive or d.max_rel == float("inf")]
    if inner and (undecided or result.max_abs_error == 0):
        outputs = {name: d for name, d in result.outputs.items() if name not in undecided}
        outputs |= _inner_differences(first, second, how, inner)
        result = Verification(samples, tolerance, outputs)
    telling = [d for d in result.outputs.values() if not d.inconclusive]
    if not telling:
        reasons = "; ".join(f"{name!r} {d.inconclusive}" for name, d in result.outputs.items())
        raise VerifyError(
            f"the two models cannot be told apart on random inputs: {reasons}.",
            hint="try --input-shape with another size",
        )
    return result


def _before_saturation(
    first: ModelOrMaker, second: ModelOrMaker, how: Sampling, result: Verification, orders: Mapping[str, Order]
) -> Verification:
    """Return the outcome with what goes into a Sigmoid or the like in place of what comes out.

    Both models have the very same nodes from there on, but for a Gather that brings the channels back into their order, so that
    equal numbers going in are proof enough, and a better one: scores that are all 1, or all 1e-7, tell nothing of what is before.
    """
    one, other = (_ends(shell(each() if callable(each) else each)) for each in (first, second))
    tensors = {name: one[name].tensor for name in result.outputs if _is_same_end(name, one, other, orders)}
    before = {tensor: orders.get(tensor) for tensor in tensors.values()}
    found = _differences(first, second, how, before) if before else {}
    told = {
        name: found[tensors[name]] if name in tensors and not found[tensors[name]].inconclusive else difference
        for name, difference in result.outputs.items()
    }
    return Verification(result.samples, result.tolerance, told)


@dataclass(frozen=True)
class _End:
    """How an output comes out of what goes into its saturating activation: from which tensor, by which nodes, in which order."""

    tensor: str
    nodes: tuple[tuple[str, ...], ...]
    gathered: tuple[int, ...] = ()  # the places that a Gather on the way takes


def _is_same_end(name: str, first: Mapping[str, _End], second: Mapping[str, _End], orders: Mapping[str, Order]) -> bool:
    """Return whether an output comes out of the same tensor in the same way in both, each channel in its place."""
    one, other = first.get(name), second.get(name)
    if one is None or other is None or one.gathered or (one.tensor, one.nodes) != (other.tensor, other.nodes):
        return False
    order = orders.get(one.tensor)
    if order is None:
        return not other.gathered
    # The second has channel order[i] at place i, and takes those places that undo it.
    places = order[list(other.gathered)] if other.gathered else order
    return len(places) == len(order) and bool((places == np.arange(len(order))).all())


def _ends(structure: onnx.ModelProto) -> dict[str, _End]:
    """Return the ends of the outputs that have one."""
    makers = {name: node for node in structure.graph.node for name in node.output if name}
    constants = {tensor.name: tensor for tensor in structure.graph.initializer}
    found = {}
    for output in structure.graph.output:
        name, nodes, gathered = output.name, list[tuple[str, ...]](), tuple[int, ...]()
        while name in makers and (makers[name].op_type in MOVING or (not gathered and _is_gather(makers[name], constants))):
            node = makers[name]
            if node.op_type == "Gather":
                gathered = tuple(numpy_helper.to_array(constants[node.input[1]]).tolist())
            else:
                nodes.append(_way(node))
            name = node.input[0]
        if name in makers and makers[name].op_type in SATURATING:
            found[output.name] = _End(makers[name].input[0], (*nodes, _way(makers[name])), gathered)
    return found


def _way(node: onnx.NodeProto) -> tuple[str, ...]:
    """Return what a node does, whatever its data and its result are called."""
    return (node.domain, node.op_type, *node.input[1:], *(str(each) for each in sorted(node.attribute, key=lambda each: each.name)))


def _is_gather(node: onnx.NodeProto, constants: Mapping[str, onnx.TensorProto]) -> bool:
    """Return whether a node takes channels at places that are known here."""
    if node.op_type != "Gather" or node.input[1] not in constants or integer(node, "axis", 0) != 1:
        return False
    places = constants[node.input[1]]
    return not is_large(places) and len(places.dims) == 1


def _inner_differences(
    first: ModelOrMaker, second: ModelOrMaker, how: Sampling, inner: Mapping[str, Order | None]
) -> dict[str, Difference]:
    """Return the worst difference of each inner tensor: as many at once as memory allows, since each batch loads both models."""
    found: dict[str, Difference] = {}
    left, size = list(inner), LAYERS_A_RUN
    while left:
        names, left = left[:size], left[size:]
        differences, held = _compared(first, second, how, {name: inner[name] for name in names})
        found |= differences
        size = max(LAYERS_A_RUN, min(MOST_GROWTH * size, len(names) * BYTES_A_RUN // max(held, 1)))
    return found


def _differences(
    first: ModelOrMaker, second: ModelOrMaker, how: Sampling, inner: Mapping[str, Order | None] | None = None
) -> dict[str, Difference]:
    """Return the worst difference of each output, or of each inner tensor."""
    return _compared(first, second, how, inner)[0]


def _compared(
    first: ModelOrMaker, second: ModelOrMaker, how: Sampling, inner: Mapping[str, Order | None] | None
) -> tuple[dict[str, Difference], int]:
    """Return the worst differences, and how many bytes one model gave. One model after the other: memory is dear."""
    names = None if inner is None else list(inner)
    one = _watch(first, names, how)
    release_freed_memory()
    two = _watch(second, names, how, like=one)
    release_freed_memory()
    seen: dict[str, list[Difference]] = {}
    for expected, found in zip(one.results, two.results, strict=True):
        for name in expected:
            order = None if inner is None else inner[name]
            value = expected[name] if order is None else np.take(np.asarray(expected[name]), order, axis=1)
            seen.setdefault(name, []).append(compare(value, found[name]))
    held = sum(value.nbytes for result in one.results for value in result.values() if isinstance(value, np.ndarray))
    return {name: worst(differences) for name, differences in seen.items()}, held


def _watch(source: ModelOrMaker, names: Sequence[str] | None, how: Sampling, *, like: Seen | None = None) -> Seen:
    """Return what a model gives on seeded inputs, or on the very inputs of another one."""
    structures: list[onnx.ModelProto] = []

    def make() -> onnx.ModelProto:
        model = source() if callable(source) else source
        model = model if names is None else with_outputs(model, names)
        structures.append(shell(model))
        if like is not None:
            require_same_interface(like.structure, structures[0])
        return model

    active = lean_session(make)
    (structure,) = structures
    if like is not None:
        feeds = like.feeds
    else:
        feeds = steered_batches(structure, active, given=how.shapes, seed=how.seed, samples=how.samples)
    return Seen(structure, feeds, [run(active, batch) for batch in feeds])


def batched(items: Iterable[Item], size: int) -> Iterator[list[Item]]:
    """Yield the items in lists of at most this size."""
    rest = iter(items)
    while batch := list(islice(rest, size)):
        yield batch


def require_same_interface(first: onnx.ModelProto, second: onnx.ModelProto) -> None:
    """Refuse two models whose inputs or outputs have different names."""
    for kind, a, b in (
        ("inputs", free_inputs(first), free_inputs(second)),
        ("outputs", list(first.graph.output), list(second.graph.output)),
    ):
        names = sorted(value.name for value in a), sorted(value.name for value in b)
        if names[0] != names[1]:
            raise VerifyError(
                f"the models have different {kind}: {', '.join(names[0])} and {', '.join(names[1])}.",
                hint="compare two models made from the same source",
            )
