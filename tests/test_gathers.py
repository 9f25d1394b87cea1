"""Gathers in the search: brute force over all that can be written is the oracle, and what is predicted is written."""

import itertools
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import onnx
import pytest
from tiny import from_text

from onnx_gconv.errors import BudgetError, ModelError
from onnx_gconv.pipeline.facts import Facts
from onnx_gconv.pipeline.gathers import GatherTimes
from onnx_gconv.pipeline.job import Job
from onnx_gconv.pipeline.original import open_original
from onnx_gconv.pipeline.planned import Planned, Solved
from onnx_gconv.pipeline.planning import plan_within, solve
from onnx_gconv.pipeline.settings import GathersName, SearchName, Settings
from onnx_gconv.plans import Plan, PlannedLayer
from onnx_gconv.search.budget import Budget
from onnx_gconv.search.latency import LayerTimes

HIGHS = 2e-6  # HiGHS stops within 1e-6 of the optimum
HEAD, TAIL = "net (float[1,3,6,6] image) => (float[1,4] scores) { stem = Conv (image, w0) x = Relu (stem)", "}"
END = "pooled = GlobalAveragePool (last) flat = Flatten (pooled) scores = Gemm <transB = 1> (flat, w9)"
# By the nodes between the stem and the end, and the shapes of their weights.
GRAPHS = {
    "chain": ("a = Conv (x, w1) r = Relu (a) b = Conv (r, w2) s = Relu (b) last = Conv (s, w3)", [(16, 16)] * 3),
    "residual": (
        "a = Conv (x, w1) r = Relu (a) b = Conv (r, w2) t = Add (b, x) y = Relu (t) c = Conv (y, w3) last = Add (c, y)",
        [(16, 16)] * 3,
    ),
    "readers": ("a = Conv (x, w1) b = Conv (x, w2) s = Add (a, b) last = Conv (s, w3)", [(16, 16)] * 3),
    "concat": ("a = Conv (x, w1) b = Conv (x, w2) s = Concat <axis = 1> (a, b) last = Conv (s, w3)", [(8, 16), (8, 16), (16, 16)]),
    "wider": (
        "a = Conv (x, w1) p = Pad (x, pads) t = Add (a, p) b = Conv (t, w2) last = Conv (b, w3)",
        [(24, 16), (24, 24), (16, 24)],
    ),
    "grouped": (
        "a = Conv (x, w1) r = Relu (a) b = Conv <group = 2> (r, w2) s = Relu (b) last = Conv (s, w3)",
        [(16, 16), (16, 8), (16, 16)],
    ),
}


def net(kind: str, seed: int) -> onnx.ModelProto:
    rng = np.random.default_rng(seed)
    nodes, shapes = GRAPHS[kind]
    tensors = {f"w{number}": rng.standard_normal((*shape, 1, 1)) for number, shape in enumerate([(16, 3), *shapes])}
    tensors |= {"w9": rng.standard_normal((4, 16)), "pads": np.array([0, 0, 0, 0, 0, 8, 0, 0])}
    return from_text(f"{HEAD} {nodes} {END} {TAIL}", **tensors)


def noise(*what: object) -> int:
    """Return a number below 1000 that only depends on what it is asked for."""
    return zlib.crc32(repr(what).encode()) % 1000


@dataclass(frozen=True)
class ToyTime:
    """Groups save time, more or less."""

    seed: object

    def nanoseconds(self, ins: int, outs: int, groups: int) -> int:
        return 100_000 // groups + 10 * noise(self.seed, groups)


def facts_of(model: onnx.ModelProto, seed: int, *, gather_ns: int = 25) -> Facts:
    network = open_original(model).network
    times = {layer.name: ToyTime((seed, layer.name)) for layer in network.layers}

    def gather(tensor: str, is_behind: bool) -> int:
        return gather_ns * noise(seed, tensor, is_behind)

    dense_ms = 0.05 + sum(times[layer.name].nanoseconds(0, 0, layer.groups) for layer in network.layers) / 1e6
    return Facts("generic", {}, LayerTimes("toy", None, dense_ms, times), GatherTimes(model, network.shapes, gather))


def solved_of(model: onnx.ModelProto, facts: Facts, gathers: GathersName, *, search: SearchName = "exact") -> Solved:
    job = Job(open_original(model), Settings(max_latency=0.5, min_group_channels=4, search=search), facts)
    return solve(job, gathers, None)


def all_plans(solved: Solved, plan: Plan) -> Iterator[tuple[float, int, Plan]]:
    """Every choice of groups and of sides with a Gather: its cost, its nanoseconds without Gathers, and its plan."""
    assert solved.table is not None
    layers = {layer.name: layer for layer in solved.network.layers}
    for choice in itertools.product(*(range(len(row.options)) for row in solved.table.rows)):
        chosen = [(name, row.options[i].groups) for row, i in zip(solved.table.rows, choice, strict=True) for name in row.names]
        grouped = [(layers[name], groups) for name, groups in chosen if groups > layers[name].groups]
        for flags in itertools.product([(), ("in",), ("out",), ("in", "out")], repeat=len(grouped)):
            rows = []
            for (layer, groups), sides in zip(grouped, flags, strict=True):
                found = solved.groupings[layer.name, groups]
                orders = tuple(found.in_order.tolist()), tuple(found.out_order.tolist())
                rows.append(PlannedLayer(layer.name, "", layer.out_channels, layer.in_channels, groups, 0.5, *orders, sides))
            yield solved.table.cost(choice), solved.table.latency_ns(choice), replace(plan, layers=tuple(rows))


def predicted_ns(planned: Planned) -> float:
    assert planned.prediction is not None
    return planned.prediction.after_ms * 1e6


@pytest.mark.parametrize("gathers", ["free", "shared", "none"])
@pytest.mark.parametrize("kind", GRAPHS)
def test_the_search_with_gathers_is_exact(kind: str, gathers: GathersName) -> None:
    if (kind, gathers) == ("grouped", "shared"):
        pytest.skip("what a Conv that keeps its groups reads stays in place, which may take a Gather more")
    for seed in range(2):
        model = net(kind, seed)
        facts = facts_of(model, seed)
        assert facts.gathers is not None
        try:
            solved = solved_of(model, facts, gathers)
        except ModelError:
            assert gathers == "none"
            continue
        anything = plan_within(solved, Budget(max_latency_ms=1e3))
        assert anything.plan.layers == ()
        real = [(cost, base + facts.gathers.of_plan(plan)) for cost, base, plan in all_plans(solved, anything.plan)]
        assert facts.times is not None
        fastest, dense = min(ns for _, ns in real), round(facts.times.dense_ms * 1e6)
        for share in (0.0, 0.1, 0.3, 0.6, 0.9):
            limit = fastest + share * (dense - fastest)
            planned = plan_within(solved, Budget(max_latency_ms=limit / 1e6))
            assert planned.search is not None
            assert predicted_ns(planned) <= limit + 1
            assert planned.search.cost == pytest.approx(min(cost for cost, ns in real if ns <= limit), abs=HIGHS)
            assert planned.search.gap == 0
        with pytest.raises(BudgetError, match="cannot be met"):
            plan_within(solved, Budget(max_latency_ms=(fastest - 1) / 1e6))
