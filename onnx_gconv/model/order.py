"""Who reads what: every tensor is made once and before it is read, in the graph and in those inside it.

ONNX wants nodes in that order, ONNX Runtime sorts them itself, and some exporters rely on it. Here they are sorted on reading.
"""

import heapq
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise

import onnx

from onnx_gconv.errors import ModelError
from onnx_gconv.model.constants import inner_graphs

HINT = "the graph is malformed: export it again"


def in_order(model: onnx.ModelProto, where: str) -> onnx.ModelProto:
    """Return the model with every node behind those that it reads, in inner graphs too; itself where they are so.

    A tensor that is made twice, read but made by nothing, or that depends on itself is refused.
    """
    result = model
    if not all(_is_in_order(body.node) for body in (model.graph, *model.functions)):
        result = onnx.ModelProto()
        result.CopyFrom(model)
    _sort(result.graph, frozenset(), where)
    for function in result.functions:
        place = f"{where}: function {function.name!r}"
        _require_wired(function.node, {*function.input}, function.output, place)
        _sort_nodes(function.node, frozenset(function.input), place)
    return result


def _sort(graph: onnx.GraphProto, outer: frozenset[str], where: str) -> None:
    stored = [*(tensor.name for tensor in graph.initializer), *(sparse.values.name for sparse in graph.sparse_initializer)]
    inputs = [value.name for value in graph.input]
    for names, what in ((stored, "initializers"), (inputs, "inputs")):
        twice = _twice(names)
        if twice is not None:
            raise ModelError(f"{where}: two {what} are called {twice!r}.", hint=HINT)
    _require_wired(graph.node, {*stored, *inputs}, [value.name for value in graph.output], where, outer)
    _sort_nodes(graph.node, outer | {*stored, *inputs}, where)


def _require_wired(
    nodes: Sequence[onnx.NodeProto], given: set[str], outputs: Iterable[str], where: str, outer: frozenset[str] = frozenset()
) -> None:
    made = [name for node in nodes for name in node.output if name]
    twice = _twice([*given, *made])
    if twice is not None:
        who = "two nodes make" if twice not in given else "a node makes"
        also = ", which is an input or initializer" if twice in given else ""
        raise ModelError(f"{where}: {who} the tensor {twice!r}{also}.", hint=HINT)
    known = outer.union(given, made)
    for node in nodes:
        for name in _reads(node):
            if name and name not in known:
                label = node.name or next(filter(None, node.output), "")
                raise ModelError(f"{where}: the {node.op_type} node {label!r} reads {name!r}, which nothing makes.", hint=HINT)
    for name in outputs:
        if name not in known:
            raise ModelError(f"{where}: nothing makes the output {name!r}.", hint=HINT)


def _sort_nodes(nodes: Sequence[onnx.NodeProto], outer: frozenset[str], where: str) -> None:
    scope = outer.union(name for node in nodes for name in node.output)
    for node in nodes:
        for inner in inner_graphs(node):
            _sort(inner, scope, where)
    if not _is_sorted(nodes):
        places = {name: place for place, name in enumerate(_sorted_keys(nodes, where))}
        nodes.sort(key=lambda node: places[_key(node)])  # type: ignore[attr-defined]  # a repeated field has it


def _key(node: onnx.NodeProto) -> str:
    first: str = next(name for name in node.output if name)
    return first


def _sorted_keys(nodes: Sequence[onnx.NodeProto], where: str) -> Iterator[str]:
    """Yield the nodes, each by its first result, as near to their order in the file as can be."""
    makers = {name: place for place, node in enumerate(nodes) for name in node.output if name}
    needed = [{makers[name] for name in _reads(node) if name in makers} for node in nodes]
    readers: dict[int, list[int]] = defaultdict(list)
    for place, sources in enumerate(needed):
        for source in sources:
            readers[source].append(place)
    waiting = [len(sources) for sources in needed]
    ready = [place for place, count in enumerate(waiting) if not count]
    done = 0
    while ready:
        place = heapq.heappop(ready)
        done += 1
        yield _key(nodes[place])
        for reader in readers[place]:
            waiting[reader] -= 1
            if not waiting[reader]:
                heapq.heappush(ready, reader)
    if done < len(nodes):
        place = next(place for place, count in enumerate(waiting) if count)
        seen: set[int] = set()
        while place not in seen:  # backwards, until it comes round
            seen.add(place)
            place = next(source for source in needed[place] if waiting[source])
        raise ModelError(f"{where}: the nodes go in a circle: the tensor {_key(nodes[place])!r} depends on itself.", hint=HINT)


def _is_in_order(nodes: Sequence[onnx.NodeProto]) -> bool:
    return _is_sorted(nodes) and all(_is_in_order(inner.node) for node in nodes for inner in inner_graphs(node))


def _is_sorted(nodes: Sequence[onnx.NodeProto]) -> bool:
    pending = {name for node in nodes for name in node.output if name}
    for node in nodes:
        if any(name in pending for name in _reads(node)):
            return False
        pending.difference_update(node.output)
    return True


def _reads(node: onnx.NodeProto) -> Iterator[str]:
    """Yield what a node reads, and what its inner graphs take from outside."""
    yield from node.input
    for inner in inner_graphs(node):
        own = {name for each in inner.node for name in each.output}
        own.update(value.name for value in inner.input)
        own.update(tensor.name for tensor in inner.initializer)
        own.update(sparse.values.name for sparse in inner.sparse_initializer)
        taken = [name for each in inner.node for name in _reads(each)]
        yield from (name for name in (*taken, *(value.name for value in inner.output)) if name not in own)


def _twice(names: Iterable[str]) -> str | None:
    return next((one for one, other in pairwise(sorted(names)) if one == other), None)
