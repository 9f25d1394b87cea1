"""What `pareto.py` compares with: widths by a rule, narrowed until the model is in time, and ONNX Runtime's own int8."""

import contextlib
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx

import onnx_gconv
from onnx_gconv.errors import BudgetError
from onnx_gconv.model.constants import Constants
from onnx_gconv.model.spaces import Spaces, find_spaces
from onnx_gconv.model.widths import Space, find_widths
from onnx_gconv.pipeline.original import Original, open_original
from onnx_gconv.plans import Plan, PlannedSpace, Totals
from onnx_gconv.runtime import random_feeds
from onnx_gconv.timing import compare_latency

STEPS = (16, 8, 4)  # of widths: the first is what this CPU likes, the others are for what it cannot reach
BISECTIONS = 7
SPREAD = 0.2  # of L2's share between the first and the last space, to either side
SEARCH_SECONDS = 1.5  # of timing, for each model that is tried
QDQ_OPSET = 13  # from which on quantisation can be per channel
AT_ONCE = 25  # samples that ONNX Runtime's calibration sees together
Keeps = Mapping[str, tuple[int, ...]]  # the channels that stay, by the first output of a Conv that writes them


def narrowest_needed(path: Path, asked: str, keeps_of: Callable[[float, int], Keeps]) -> tuple[float, int]:
    """Return the smallest share to take away with which the model, as measured, is in time; and the step of widths.

    `keeps_of` has the channels for a share and a step. No weight is fitted for this: the time does not depend on it.
    """
    original, limit = open_original(path), float(asked.rstrip("%")) / 100
    feeds = random_feeds(original.model, original.network.input_shapes, np.random.default_rng(0))
    seen: dict[tuple[Any, ...], float] = {}

    def is_in_time(share: float, step: int) -> bool:
        keeps = keeps_of(share, step)
        widths = tuple(sorted((name, len(keep)) for name, keep in keeps.items()))
        if widths not in seen:
            made = onnx_gconv.apply(path, plan_of(original, keeps), verify=False).model
            seen[widths] = compare_latency(original.model, made, feeds, seconds=SEARCH_SECONDS).ratio
        return seen[widths] <= limit

    for step in STEPS:
        low, high = 0.0, 1.0
        if not is_in_time(high, step):
            continue
        for _ in range(BISECTIONS):
            middle = (low + high) / 2
            low, high = (low, middle) if is_in_time(middle, step) else (middle, high)
        return high, step
    raise BudgetError("this rule has no widths that are in time")


def plan_of(original: Original, keeps: Keeps) -> Plan:
    """Return the plan that keeps these channels; all that write a space must agree."""
    spaces, _ = spaces_of(original)
    planned = []
    for space in spaces:
        found = {keeps[writer] for writer in space.writers if writer in keeps}
        assert len(found) <= 1, f"the channels of {space.name} are not the same everywhere"
        planned += [PlannedSpace(space.name, space.channels, keep) for keep in found if len(keep) < space.channels]
    narrowed = {writer for space in spaces for writer in space.writers}
    assert keeps.keys() <= narrowed, f"cannot be narrowed: {keeps.keys() - narrowed}"
    count = original.network.count
    return Plan(
        source_sha256=original.sha256,
        criterion="l2",
        solver="best",
        search="exact",
        seed=0,
        budget={},
        gathers="none",
        before=Totals(count.params, count.macs),
        after=Totals(count.params, count.macs),
        layers=(),
        skipped=(),
        forms=("width",),
        spaces=tuple(planned),
    )


def spaces_of(original: Original) -> tuple[tuple[Space, ...], Spaces]:
    """Return what can be narrowed, and where the channels of each tensor are."""
    constants, shapes = Constants(original.model), original.network.shapes
    spaces = find_spaces(original.model, constants, shapes)
    return find_widths(original.model, constants, spaces, shapes).spaces, spaces


def l2_plan(path: Path, asked: str) -> Plan:
    """Return the plan that narrows every space by one share and keeps the filters of largest norm.

    Widths are powers of two in most models, so that at one share all would step down at once, and far too much: the share is a
    little less for the first spaces and a little more for the last.
    """
    original = open_original(path)
    narrowable, spaces = spaces_of(original)
    orders = {space.name: np.argsort(-_norms(original, space, spaces), kind="stable") for space in narrowable}

    def keeps_of(share: float, step: int) -> Keeps:
        keeps = {}
        for number, space in enumerate(narrowable):
            # All of it is taken from the first as well when the share is 1.
            own = min(1.0, share * (1 + SPREAD * (2 * number / len(narrowable) - 1)) / (1 - SPREAD))
            count = max(min(step, space.channels), round((1 - own) * space.channels / step) * step)
            if share > 0 and count < space.channels:
                keeps |= dict.fromkeys(space.writers, tuple(np.sort(orders[space.name][:count]).tolist()))
        return keeps

    return plan_of(original, keeps_of(*narrowest_needed(path, asked, keeps_of)))


def _norms(original: Original, space: Space, spaces: Spaces) -> Any:
    """Return the norm of each channel's filters, of all Convs that write it together."""
    nodes, constants = {node.output[0]: node for node in original.model.graph.node if node.output}, Constants(original.model)
    squares = np.zeros(space.channels)
    for writer in space.writers:
        node, atoms = nodes[writer], spaces.axes[writer].atoms
        assert node.op_type == "Conv", f"{writer} is no Conv"
        weight = constants.value(constants.origin(node.input[1]))
        first = sum(spaces.sizes[atom] for atom in atoms[: atoms.index(space.atom)])  # a Split may follow
        squares += np.square(weight[first : first + space.channels]).reshape(space.channels, -1).sum(axis=1)
    return np.sqrt(squares)


def int8_of_onnx_runtime(path: Path, calib: Mapping[str, Any], *, is_unsigned: bool) -> onnx.ModelProto:
    """Return the model as ONNX Runtime quantises it by itself: pre-processing, QDQ, per channel, min-max, all else as it is.

    Activations are int8 by default, or uint8, with which it fuses more. The opset is raised where it is too old for scales
    per channel, as its error message asks for.
    """
    from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType, quantize_static
    from onnxruntime.quantization.shape_inference import quant_pre_process

    class Samples(CalibrationDataReader):  # type: ignore[misc]
        def __init__(self, batches: Iterator[dict[str, Any]]) -> None:
            self._batches = batches

        def get_next(self) -> dict[str, Any] | None:
            return next(self._batches, None)

    model = open_original(path).model
    if max(entry.version for entry in model.opset_import if entry.domain in ("", "ai.onnx")) < QDQ_OPSET:
        model = onnx.version_converter.convert_version(model, QDQ_OPSET)
    is_free = not model.graph.input[0].type.tensor_type.shape.dim[0].dim_value
    (name, images), size = next(iter(calib.items())), AT_ONCE if is_free else 1
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):  # the pre-processing leaves files where it is
        before, prepared, after = (str(Path(folder) / f"{stage}.onnx") for stage in ("before", "prepared", "after"))
        onnx.save(model, before)
        try:
            quant_pre_process(before, prepared)
        except Exception:  # its symbolic shapes fail on some models; its documentation says to leave them out then
            quant_pre_process(before, prepared, skip_symbolic_shape=True)
        batches = ({name: images[at : at + size]} for at in range(0, len(images), size))
        kind = QuantType.QUInt8 if is_unsigned else QuantType.QInt8
        settings: Any = {"quant_format": QuantFormat.QDQ, "per_channel": True, "activation_type": kind}
        quantize_static(prepared, after, Samples(batches), **settings)
        return onnx.load(after)
