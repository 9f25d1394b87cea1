"""An ONNX graph as a PyTorch module: its nodes run in order, its weights are parameters under their ONNX names."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from onnx_gconv.errors import GconvError, ModelError
from onnx_gconv.torch.node import TABLE, Node, Results

Values = dict[str, Tensor]
Place = tuple[nn.Module, str]


@dataclass(frozen=True, eq=False)
class Body:
    """One branch of an If."""

    nodes: tuple[Node, ...]
    constants: Mapping[str, Tensor]
    outputs: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class Program:
    """What runs: the nodes in order, what goes in, what comes out."""

    nodes: tuple[Node, ...]
    inputs: Mapping[str, torch.dtype]
    outputs: tuple[str, ...]
    output_ops: Mapping[str, str]  # which operator makes each output


@dataclass(frozen=True, eq=False)
class Tensors:
    """The constant tensors of a graph, by what becomes of them."""

    learned: Values  # trained by gradients
    statistics: Values  # of BatchNormalization, trained by following the batches
    fixed: Values  # never change, and lie where the data lies
    numbers: Values  # never change, and are read as numbers: axes, shapes, limits


class OnnxModule(nn.Module):
    """A graph to train. `named_parameters()` and `state_dict()` have the names of the ONNX file.

    `freeze_bn` keeps the statistics of BatchNormalization as they are, also in training.
    """

    def __init__(self, program: Program, tensors: Tensors) -> None:
        super().__init__()
        self.program = program
        self.freeze_bn = False
        self._parameter_at: dict[str, Place] = {}
        self._statistic_at: dict[str, Place] = {}
        self._fixed_at: dict[str, Place] = {}
        for name, value in tensors.learned.items():
            holder, key = self._parameter_at[name] = self._place(name)
            holder._parameters[key] = nn.Parameter(value)
        for name, value in tensors.statistics.items():
            holder, key = self._statistic_at[name] = self._place(name)
            holder._buffers[key] = value
        for name, value in tensors.fixed.items():
            holder, key = self._fixed_at[name] = self._place(name)
            holder._buffers[key] = value
            holder._non_persistent_buffers_set.add(key)  # not in state_dict(): they are part of the graph
        self._numbers = dict(tensors.numbers)
        self._keep: Values = {}
        self._last_use = _last_uses(program)

    def _place(self, name: str) -> Place:
        """Return the module and the key for a name: `a.b.weight` is `weight` in the module `b` in the module `a`.

        That is how PyTorch joins names. Tensors are set in its dictionaries and not by its setters, which refuse some
        names that ONNX allows: that of a method, that of another tensor with more behind a dot.
        """
        *path, key = name.split(".")
        holder: nn.Module = self
        for part in path:
            inner = holder._modules.get(part)
            if inner is None:
                inner = holder._modules[part] = nn.Module()
            holder = inner
        return holder, key

    @property
    def input_names(self) -> tuple[str, ...]:
        return tuple(self.program.inputs)

    @property
    def output_names(self) -> tuple[str, ...]:
        return self.program.outputs

    def hold(self, masks: Mapping[str, Tensor]) -> None:
        """Set the weights outside these masks to zero, where any optimiser will leave them.

        The graph reads such a weight through its mask, so the gradient outside is exactly zero. A weight that is zero and
        has no gradient gets no momentum and no decay, so it stays zero.
        """
        weights = dict(self.named_parameters())
        for name, keep in masks.items():
            self._keep[name] = keep.to(weights[name].device)
            with torch.no_grad():
                weights[name].masked_fill_(~self._keep[name], 0.0)

    def masks(self) -> Values:
        """Return what is held: for some weights, True where they may differ from zero."""
        return dict(self._keep)

    def constants(self) -> Values:
        """Return all tensors that do not depend on the inputs, as the graph reads them."""
        return {
            **self._numbers,
            **{name: _buffer(place) for name, place in self._fixed_at.items()},
            **self.trained(),
        }

    def trained(self) -> Values:
        """Return the weights and statistics by name, as the graph reads them: through their masks."""
        statistics = {name: _buffer(place) for name, place in self._statistic_at.items()}
        return {name: self._weight(name, place) for name, place in self._parameter_at.items()} | statistics

    def _weight(self, name: str, place: Place) -> Tensor:
        weight = place[0]._parameters[place[1]]
        assert weight is not None
        keep = self._keep.get(name)
        if keep is None:
            return weight
        if keep.device != weight.device:  # the module has moved
            keep = self._keep[name] = keep.to(weight.device)
        return torch.where(keep, weight, 0.0)

    def forward(self, *inputs: Tensor, **named: Tensor) -> Tensor | tuple[Tensor, ...]:
        """Return the outputs of the graph, one tensor if there is one; inputs by position or by name."""
        values = self.run(dict(zip(self.program.inputs, inputs, strict=False)) | named, self.program.outputs)
        results = tuple(values[name] for name in self.program.outputs)
        return results[0] if len(results) == 1 else results

    def run(self, feeds: Mapping[str, Tensor], wanted: Collection[str]) -> Values:
        """Return tensors of the graph by name; all others are let go as soon as nothing reads them any more."""
        missing = self.program.inputs.keys() - feeds.keys()
        if missing:
            raise TypeError(f"the inputs {', '.join(sorted(missing))} are not given")
        values = self.constants()
        keep = {*wanted, *values}
        values |= {name: feeds[name].to(dtype) for name, dtype in self.program.inputs.items()}
        for node, done in zip(self.program.nodes, self._last_use, strict=True):
            run_node(node, values, training=self.training, freeze_bn=self.freeze_bn)
            for name in done:
                if name not in keep:
                    del values[name]
        return {name: values[name] for name in wanted}


def _buffer(place: Place) -> Tensor:
    value = place[0]._buffers[place[1]]
    assert value is not None
    return value


@contextmanager
def explained() -> Iterator[None]:
    """Turn whatever PyTorch raises while a model is taken in into one sentence for the user."""
    try:
        yield
    except GconvError:
        raise
    except Exception as error:
        where = " ".join(getattr(error, "__notes__", []))
        raise ModelError(
            f"the model cannot run in PyTorch: {' '.join(str(error).split())[:300]} {where}".rstrip() + ".",
            hint="tune the output of `mask` in the framework that the model came from; `apply` takes the result",
        ) from error


def run_node(node: Node, values: Values, *, training: bool = False, freeze_bn: bool = True) -> None:
    """Run one node on named tensors and add what it makes."""
    inputs = [values[name] if name else None for name in node.inputs]
    try:
        if node.op == "If":
            results: Results = _branch(node, inputs[0], values, training=training, freeze_bn=freeze_bn)
        else:
            entry = TABLE[node.op]
            mode: dict[str, Any] = {}
            if entry.modal:
                mode["training"] = training and not (freeze_bn and node.op == "BatchNormalization")
            results = entry.run(node, *_on_one_device(inputs, entry.numbers), **mode)
    except Exception as error:
        error.add_note(f"in the {node.op} node {node.label!r}")
        raise
    made = (results,) if isinstance(results, Tensor) else results
    # A node may declare fewer outputs than its operator has, or leave some unnamed.
    values.update((name, value) for name, value in zip(node.outputs, made, strict=False) if name)


def _branch(node: Node, condition: Tensor | None, outer: Values, *, training: bool, freeze_bn: bool) -> Results:
    assert condition is not None
    body: Body = node.attributes["then_branch" if bool(condition) else "else_branch"]
    values = {**outer, **body.constants}
    for inner in body.nodes:
        run_node(inner, values, training=training, freeze_bn=freeze_bn)
    return [values[name] for name in body.outputs]


def _on_one_device(inputs: Sequence[Tensor | None], numbers: frozenset[int]) -> list[Tensor | None]:
    """Return the inputs where the data lies; those that are read as numbers stay where they are."""
    data = [value.device for slot, value in enumerate(inputs) if value is not None and slot not in numbers]
    target = next((device for device in data if device.type != "cpu"), None)
    if target is None:
        return list(inputs)
    return [value if value is None or slot in numbers else value.to(target) for slot, value in enumerate(inputs)]


def _last_uses(program: Program) -> list[list[str]]:
    """Return for each node the tensors that nothing reads after it."""
    last: dict[str, int] = {}
    for index, node in enumerate(program.nodes):
        for name in (*reads(node), *node.outputs):
            if name:
                last[name] = index
    result: list[list[str]] = [[] for _ in program.nodes]
    for name, index in last.items():
        result[index].append(name)
    return result


def reads(node: Node) -> list[str]:
    """Return the names that a node reads, its branches included."""
    inner: list[str] = []
    for value in node.attributes.values():
        if isinstance(value, Body):
            own = {name for inside in value.nodes for name in inside.outputs} | value.constants.keys()
            read = {name for inside in value.nodes for name in reads(inside)} | set(value.outputs)
            inner += sorted(read - own)
    return [*node.inputs, *inner]
