"""Tensors inside a model at which it is held to its teacher, besides its outputs."""

from collections.abc import Iterator, Sequence

from torch import Tensor, nn

from onnx_gconv.torch.module import OnnxModule, Program
from onnx_gconv.torch.node import Node

JOINS = frozenset({"Add", "Sum", "Concat"})
ACTIVATIONS = frozenset({"Relu", "Clip", "LeakyRelu", "PRelu", "HardSwish", "Elu"})


def landmarks(student: Program, teacher: Program) -> tuple[str, ...]:
    """Return the names of what comes out of each block of the student, where the teacher has it too.

    A pruned model has all channels of its teacher, so at every depth it can be told what to give; from the outputs alone the
    early layers learn slowly. Blocks end where branches join. Inside of them a model is free to find other ways. In a
    model without branches, what each activation gives has to do.
    """
    theirs = {name for node in teacher.nodes for name in node.outputs}
    found = tuple(_joined(student)) or tuple(node.outputs[0] for node in student.nodes if node.op in ACTIVATIONS)
    return tuple(name for name in found if name in theirs and name not in student.outputs)


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
    """A module that gives its outputs, and what it has at its landmarks: all that the loss reads, for a wrapper to see."""

    def __init__(self, module: OnnxModule, names: Sequence[str]) -> None:
        super().__init__()
        self.module = module
        self.names = names

    def forward(self, **inputs: Tensor) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        outputs = self.module.output_names
        values = self.module.run(inputs, {*outputs, *self.names})
        return tuple(values[name] for name in outputs), tuple(values[name] for name in self.names)
