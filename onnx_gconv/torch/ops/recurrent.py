"""LSTM, GRU and RNN, step by step: so the gates and their order are those of the ONNX text."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from onnx_gconv.torch.node import Node, Results, operator

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "relu": torch.relu,
}


@operator("LSTM")
def lstm(
    node: Node,
    x: Tensor,
    w: Tensor,
    r: Tensor,
    b: Tensor | None = None,
    lengths: Tensor | None = None,
    h0: Tensor | None = None,
    c0: Tensor | None = None,
    p: Tensor | None = None,
) -> Results:
    _require_plain(node, x, lengths)
    f, g, h = _activations(node, ("sigmoid", "tanh", "tanh"))
    if p is not None and p.any():
        raise NotImplementedError("an LSTM with peepholes is not supported")

    def step(gates: Tensor, state: tuple[Tensor, Tensor], recurrent: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        hidden, cell = state
        i, o, forget, c = (gates + hidden @ recurrent.T + bias).chunk(4, -1)
        cell = f(forget) * cell + f(i) * g(c)
        return f(o) * h(cell), cell

    hidden, cells, outputs = [], [], []
    for direction, number in _directions(node, w):
        start = _start(h0, x, r, number), _start(c0, x, r, number)
        result, state = _walk(x, direction, _Weights(w, r, b, number), start, step)
        outputs.append(result)
        hidden.append(state[0])
        cells.append(state[1])
    return _results(node, outputs, torch.stack(hidden), torch.stack(cells))


@operator("GRU")
def gru(
    node: Node,
    x: Tensor,
    w: Tensor,
    r: Tensor,
    b: Tensor | None = None,
    lengths: Tensor | None = None,
    h0: Tensor | None = None,
) -> Results:
    _require_plain(node, x, lengths)
    f, g = _activations(node, ("sigmoid", "tanh"))
    reset_later = bool(node.get("linear_before_reset", 0))

    def step(gates: Tensor, state: tuple[Tensor], recurrent: Tensor, bias: Tensor) -> tuple[Tensor]:
        (hidden,) = state
        gate_z, gate_r, gate_h = gates.chunk(3, -1)
        (rz, rr, rh), (bz, br, bh) = recurrent.chunk(3), bias.chunk(3)
        update = f(gate_z + hidden @ rz.T + bz)
        reset = f(gate_r + hidden @ rr.T + br)
        inner = reset * (hidden @ rh.T + bh) if reset_later else (reset * hidden) @ rh.T + bh
        return ((1 - update) * g(gate_h + inner) + update * hidden,)

    return _single_state(node, x, (w, r, b, h0), step)


@operator("RNN")
def rnn(
    node: Node,
    x: Tensor,
    w: Tensor,
    r: Tensor,
    b: Tensor | None = None,
    lengths: Tensor | None = None,
    h0: Tensor | None = None,
) -> Results:
    _require_plain(node, x, lengths)
    (f,) = _activations(node, ("tanh",))

    def step(gates: Tensor, state: tuple[Tensor], recurrent: Tensor, bias: Tensor) -> tuple[Tensor]:
        return (f(gates + state[0] @ recurrent.T + bias),)

    return _single_state(node, x, (w, r, b, h0), step)


class _Weights:
    """The weights of one direction; the bias of the input apart from that of the state."""

    def __init__(self, w: Tensor, r: Tensor, b: Tensor | None, number: int) -> None:
        self.input, self.recurrent = w[number], r[number]
        both = b[number] if b is not None else w.new_zeros(2 * w.shape[1])
        self.input_bias, self.state_bias = both.chunk(2)


def _single_state(
    node: Node, x: Tensor, tensors: tuple[Tensor, Tensor, Tensor | None, Tensor | None], step: Callable[..., tuple[Tensor, ...]]
) -> Results:
    w, r, b, h0 = tensors
    outputs, hidden = [], []
    for direction, number in _directions(node, w):
        result, state = _walk(x, direction, _Weights(w, r, b, number), (_start(h0, x, r, number),), step)
        outputs.append(result)
        hidden.append(state[0])
    return _results(node, outputs, torch.stack(hidden))


def _walk(
    x: Tensor, direction: int, weights: _Weights, state: tuple[Tensor, ...], step: Callable[..., tuple[Tensor, ...]]
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Return the hidden states in time order, and the last state."""
    gates = x @ weights.input.T + weights.input_bias
    outputs = []
    for now in gates.unbind(0)[::direction]:
        state = step(now, state, weights.recurrent, weights.state_bias)
        outputs.append(state[0])
    return torch.stack(outputs[::direction]), state


def _require_plain(node: Node, x: Tensor, lengths: Tensor | None) -> None:
    for name in ("clip", "input_forget", "layout"):
        if node.get(name, 0):
            raise NotImplementedError(f"the attribute {name} of {node.op} is not supported")
    if lengths is not None and bool((lengths != x.shape[0]).any()):
        raise NotImplementedError(f"a {node.op} over sequences of different lengths is not supported")


def _activations(node: Node, defaults: tuple[str, ...]) -> list[Callable[[Tensor], Tensor]]:
    names = [name.decode() if isinstance(name, bytes) else name for name in node.get("activations", defaults)]
    names = [name.lower() for name in names]
    if any(name not in ACTIVATIONS for name in names) or names[: len(defaults)] * (len(names) // len(defaults)) != names:
        raise NotImplementedError(f"the activations {', '.join(names)} of {node.op} are not supported")
    return [ACTIVATIONS[name] for name in names[: len(defaults)]]


def _directions(node: Node, w: Tensor) -> Iterator[tuple[int, int]]:
    """Yield 1 for forward and -1 for backward, with the number of its weights."""
    backwards = {"forward": (1,), "reverse": (-1,), "bidirectional": (1, -1)}[node.get("direction", "forward")]
    yield from zip(backwards, range(w.shape[0]), strict=True)


def _start(given: Tensor | None, x: Tensor, r: Tensor, number: int) -> Tensor:
    return given[number] if given is not None else x.new_zeros(x.shape[1], r.shape[2])


def _results(node: Node, outputs: list[Tensor], *last: Tensor) -> Results:
    return (torch.stack(outputs, dim=1), *last)[: len(node.outputs)]
