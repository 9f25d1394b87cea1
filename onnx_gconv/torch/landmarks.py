"""Tensors inside a model at which it is held to its teacher, besides its outputs."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

import torch
from torch import Tensor, nn

from onnx_gconv.torch.module import OnnxModule, Program
from onnx_gconv.torch.node import Node

JOINS = frozenset({"Add", "Sum", "Concat"})
ACTIVATIONS = frozenset({"Relu", "Clip", "LeakyRelu", "PRelu", "HardSwish", "Elu"})
ALL: Mapping[str, Tensor] = MappingProxyType({})


@dataclass(frozen=True, eq=False)
class Sight:
    """Where a student can be compared with its teacher, and by which channels of each; all, for a tensor that is not named."""

    ends: tuple[str, ...]
    student: Mapping[str, Tensor] = field(default_factory=dict)
    teacher: Mapping[str, Tensor] = field(default_factory=dict)


def block_ends(program: Program) -> tuple[str, ...]:
    """Return the names of what comes out of each block.

    At every depth a pruned model can be told what to give; from the outputs alone the early layers learn slowly. Blocks end
    where branches join. Inside of them a model is free to find other ways. In a model without branches, what each activation
    gives has to do.
    """
    return tuple(_joined(program)) or tuple(node.outputs[0] for node in program.nodes if node.op in ACTIVATIONS)


def landmarks(ends: Collection[str], student: Program, teacher: Program) -> tuple[str, ...]:
    """Return those of the student's ends that the teacher has, too; its outputs are compared anyway."""
    theirs = {name for node in teacher.nodes for name in node.outputs}
    return tuple(name for name in ends if name in theirs and name not in student.outputs)


def _joined(program: Program) -> Iterator[str]:
    """Yield the results of nodes that join what was computed, behind their activation."""
    computed = {*program.inputs, *(name for node in program.nodes for name in node.outputs)}
    readers: dict[str, list[Node]] = {}
    for node in program.nodes:
        for name in node.inputs:
            readers.setdefault(name, []).append(node)
    for node in program.nodes:
        if node.op in JOINS and sum(name in computed for name in node.inputs) > 1:
            result = node.outputs[0]
            reading = readers.get(result, [])
            yield reading[0].outputs[0] if len(reading) == 1 and reading[0].op in ACTIVATIONS else result


class WithLandmarks(nn.Module):
    """A module that gives its outputs, and what it has at its landmarks: all that the loss reads, for a wrapper to see.

    Of a landmark that `channels` names, it gives these channels.
    """

    def __init__(self, module: OnnxModule, names: Sequence[str], channels: Mapping[str, Tensor] = ALL) -> None:
        super().__init__()
        self.module = module
        self.names = names
        self.channels = channels

    def forward(self, **inputs: Tensor) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        outputs = self.module.output_names
        values = self.module.run(inputs, {*outputs, *self.names})
        return tuple(values[name] for name in outputs), tuple(self._landmark(name, values[name]) for name in self.names)

    def _landmark(self, name: str, value: Tensor) -> Tensor:
        channels = self.channels.get(name)
        # A teacher of one's own choice may have something else under this name.
        if channels is None or value.ndim < 2 or value.shape[1] <= int(channels.max()):
            return value
        return torch.index_select(value, 1, channels.to(value.device))
