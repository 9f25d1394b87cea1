"""The compact model to train: what a plan leaves, and the way back of every trained number into the masked model."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import numpy as np
import onnx
from numpy.typing import NDArray

from onnx_gconv.model.constants import Constants
from onnx_gconv.rewrite.group import Written, write
from onnx_gconv.rewrite.match import Matched
from onnx_gconv.rewrite.placement import Placement
from onnx_gconv.solve.grouping import Order

Arrays = Mapping[str, NDArray[np.generic]]


@dataclass(frozen=True, eq=False)
class Compact:
    """A masked model as its plan writes it; the same function.

    The same graph and names come of every model with the masked one's graph, whatever its weights. That is why it may differ
    from what `carry_out` writes, which leaves a constant as it is where an order happens to change nothing.
    """

    written: Written
    channels: Mapping[str, Order]  # by tensor: which places of the masked model's axis 1 it has; missing: all, in place
    narrowed: frozenset[str]  # the tensors that have fewer of them

    @property
    def model(self) -> onnx.ModelProto:
        return self.written.model

    def source(self, name: str) -> str:
        """Return the masked model's tensor that a constant comes from."""
        taken = self.written.taken.get(name)
        return name if taken is None else taken.source

    def returned(self, values: Arrays, constants: Constants) -> dict[str, NDArray[np.generic]]:
        """Return the masked model's tensors for these values of the compact model's constants, by name.

        What the compact model does not have keeps the value that it has in `constants`, the masked model's: zero where masked.
        """
        result = {}
        for name, value in values.items():
            taken = self.written.taken.get(name)
            result[self.source(name)] = value if taken is None else taken.put(constants.value(taken.source), value)
        return result

    def obstacle(self, trained: Collection[str], constants: Constants) -> str:
        """Return why this cannot be trained in the place of the masked model, "" if it can.

        `trained` are the tensors that a training of the masked model changes, `constants` the masked model's.
        """
        seen: set[str] = set()
        for name in (*(tensor.name for tensor in self.model.graph.initializer), *_constant_nodes(self.model)):
            source = self.source(name)
            if source in trained and source in seen:
                return f"several nodes read the weight {source!r}, each in an order of its own"
            seen.add(source)
        # What is left of a dropped branch stays as it is, if what it was computed with does.
        lost = (self.written.computed_with & seen).intersection(trained)
        for taken in self.written.taken.values():
            lost |= constants.stored_in(taken.source).intersection(trained) - {taken.source}
        return f"the weight {min(lost)!r} is computed with before it is used" if lost else ""


def compact(model: onnx.ModelProto, matched: Matched, placement: Placement) -> Compact:
    """Return the compact model of a masked one."""
    axes, channels = placement.spaces.axes, {}
    for name, order in placement.read.items():
        repeat = axes[name].repeat if name in axes else 1
        channels[name] = (order[:, None] * repeat + np.arange(repeat)).reshape(-1)
    return Compact(write(model, matched, placement), channels, frozenset(placement.narrowed))


def _constant_nodes(model: onnx.ModelProto) -> list[str]:
    return [node.output[0] for node in model.graph.node if node.op_type == "Constant"]
