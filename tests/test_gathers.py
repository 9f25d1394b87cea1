"""Gathers in the search: brute force over all that can be written is the oracle, and what is predicted is written."""

import itertools
import json
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_placement import Random, differs
from tiny import from_text

from onnx_gconv.errors import BudgetError, ModelError, PlanError
from onnx_gconv.model.network import Layer
from onnx_gconv.pipeline import planning
from onnx_gconv.pipeline.choosing import table_menu
from onnx_gconv.pipeline.facts import Facts
from onnx_gconv.pipeline.gathers import GatherTimes, gathered_sides
from onnx_gconv.pipeline.job import Job
from onnx_gconv.pipeline.original import open_original
from onnx_gconv.pipeline.planned import Planned, Solved
from onnx_gconv.pipeline.planning import plan_within, solve
from onnx_gconv.pipeline.settings import GathersName, SearchName, Settings
from onnx_gconv.plans import Plan, PlannedLayer, Totals, from_json
from onnx_gconv.rewrite.group import carry_out, placement_of
from onnx_gconv.rewrite.mask import mask
from onnx_gconv.rewrite.match import match
from onnx_gconv.search.budget import Budget
from onnx_gconv.search.joint import JointResult, search_joint
from onnx_gconv.search.latency import LayerTimes
from onnx_gconv.search.menu import GroupCount, Menu, Product, Side, SpaceRow, Width
from onnx_gconv.search.orders import NO_ORDER, Demand, Orders, Seam

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


def plan_of(solved: Solved, grouped: Sequence[tuple[Layer, int, tuple[str, ...]]]) -> Plan:
    """Return the plan that gives these layers groups, with Gathers at these sides."""
    rows = []
    for layer, groups, sides in grouped:
        found = solved.groupings[layer.name, groups]
        orders = tuple(found.in_order.tolist()), tuple(found.out_order.tolist())
        rows.append(PlannedLayer(layer.name, "", layer.out_channels, layer.in_channels, groups, 0.5, *orders, sides))
    nothing = Totals(0, 0)
    return Plan("", "l2", "best", "exact", 0, {}, "free", nothing, nothing, tuple(rows), ())


def all_plans(solved: Solved) -> Iterator[tuple[float, int, Plan]]:
    """Every choice of groups and of sides with a Gather: its cost, its nanoseconds without Gathers, and its plan."""
    assert solved.table is not None
    layers = {layer.name: layer for layer in solved.network.layers}
    for choice in itertools.product(*(range(len(row.options)) for row in solved.table.rows)):
        chosen = [(name, row.options[i].groups) for row, i in zip(solved.table.rows, choice, strict=True) for name in row.names]
        grouped = [(layers[name], groups) for name, groups in chosen if groups > layers[name].groups]
        for flags in itertools.product([(), ("in",), ("out",), ("in", "out")], repeat=len(grouped)):
            plan = plan_of(solved, [(*each, sides) for each, sides in zip(grouped, flags, strict=True)])
            yield solved.table.cost(choice), solved.table.latency_ns(choice), plan


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
        assert plan_within(solved, Budget(max_latency_ms=1e3)).plan.layers == ()
        real = [(cost, base + facts.gathers.of_plan(plan)) for cost, base, plan in all_plans(solved)]
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


def test_the_time_is_kept_by_one_search(monkeypatch: pytest.MonkeyPatch) -> None:
    searched = []

    def counted(menu: Menu, budget: Budget) -> JointResult:
        searched.append(budget)
        return search_joint(menu, budget)

    monkeypatch.setattr(planning, "search_joint", counted)
    model = net("residual", 0)
    facts = facts_of(model, 0)
    assert facts.times is not None
    planned = plan_within(solved_of(model, facts, "free"), Budget(max_latency_ms=0.6 * facts.times.dense_ms))
    assert any(layer.gathered for layer in planned.plan.layers)
    assert [budget.max_latency_ms for budget in searched] == [0.6 * facts.times.dense_ms]


@pytest.mark.parametrize("gathers", ["free", "shared", "none"])
@pytest.mark.parametrize("kind", GRAPHS)
def test_the_local_search_counts_every_gather(kind: str, gathers: GathersName) -> None:
    model = net(kind, 0)
    facts = facts_of(model, 0)
    assert facts.times is not None
    try:
        solved = solved_of(model, facts, gathers, search="local")
    except ModelError:
        return
    for share in (0.95, 0.9, 0.8):
        planned = plan_within(solved, Budget(max_latency_ms=share * facts.times.dense_ms))
        assert predicted_ns(planned) <= share * facts.times.dense_ms * 1e6 + 1


def test_groups_in_place_need_no_gather() -> None:
    model = net("residual", 0)
    facts = facts_of(model, 0, gather_ns=10**6)
    assert facts.times is not None
    job = Job(open_original(model), Settings(max_latency=0.5, min_group_channels=4, solver="plain"), facts)
    planned = plan_within(solve(job, "free", None), Budget(max_latency_ms=0.5 * facts.times.dense_ms))
    assert len(planned.plan.layers) == 3


def test_without_a_budget_of_time_a_plan_says_nothing_of_gathers() -> None:
    model = net("residual", 0)
    timed, plain = (solved_of(model, facts, "free") for facts in (facts_of(model, 0), Facts()))
    plans = [plan_within(solved, Budget(max_params=700)).plan for solved in (timed, plain)]
    assert plans[0].to_json() == plans[1].to_json()
    assert '"gathered"' not in plans[0].to_json()


def test_a_plan_file_tells_where_gathers_stand() -> None:
    model = net("residual", 0)
    facts = facts_of(model, 0)
    assert facts.times is not None
    plan = plan_within(solved_of(model, facts, "free"), Budget(max_latency_ms=0.6 * facts.times.dense_ms)).plan
    told = json.loads(plan.to_json())
    assert from_json(told, "p.json") == plan
    told["layers"][0]["gathered"] = ["up"]
    with pytest.raises(PlanError, match="'gathered' names the sides of a layer"):
        from_json(told, "p.json")


# Every known op


def random_choice(menu: Menu, rng: np.random.Generator) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Groups and orders that go together; orders as the model has them if no others are found."""
    groups = tuple(int(rng.integers(len(product.options))) for product in menu.products)
    for _ in range(20):
        stored = tuple(int(rng.integers(orders)) for orders in menu.orders.places)
        if menu.is_legal((), groups, stored):
            return groups, stored
    return groups, (0,) * len(menu.orders.places)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning")
@pytest.mark.parametrize("gathers", ["free", "shared", "none"])
def test_random_graphs_have_the_gathers_that_were_counted(gathers: GathersName) -> None:
    """Never more of them; and they stay the same function. Tolerance: float32 rounding through a dozen layers."""
    equal = tried = 0
    for seed in range(150):
        model = Random(seed).model()
        facts, rng = facts_of(model, seed), np.random.default_rng([seed, 2])
        assert facts.gathers is not None
        try:
            solved = solve(Job(open_original(model), Settings(max_latency=0.5), facts), gathers, None)
        except ModelError:
            continue
        assert solved.table is not None
        menu = facts.gathers.offered(
            table_menu(solved.table, solved.network.layers), solved.network.layers, solved.groupings, solved.shared
        )
        for _ in range(3):
            groups, stored = random_choice(menu, rng)
            sides = gathered_sides(menu, JointResult((), groups, 0.0, 0.0, stored))
            rows = [
                (layer, product.options[index].groups)
                for product, index in zip(menu.products, groups, strict=True)
                for layer in solved.network.layers
                if layer.name in product.names and product.options[index].groups > layer.groups
            ]
            plan = plan_of(solved, [(layer, number, tuple(sides.get(layer.name, ()))) for layer, number in rows])
            counted, real = menu.gathers_ns((), groups, stored), facts.gathers.of_plan(plan)
            # A Conv that keeps its groups lies in place, but `none` cannot always see to it.
            keeps = any(layer.groups > 1 for layer in solved.network.layers)
            assert real <= counted or (gathers == "none" and keeps), (seed, groups, stored)
            matched = match(model, plan)
            grouped = carry_out(model, matched, placement_of(model, matched))
            assert differs(mask(model, matched), grouped, seed) < 1e-4, seed
            tried += bool(rows)
            equal += bool(rows) and real == counted
    assert tried > 100
    assert equal > 0.2 * tried  # of few channels, groups are the same by chance, and the more layers are grouped, the more often


# The search alone, with widths


@dataclass(frozen=True)
class Noise:
    """Times without any rule."""

    seed: int

    def __call__(self, ins: int, outs: int, groups: int) -> int:
        return 40 * noise(self.seed, ins, outs, groups)


@st.composite
def menus(draw: st.DrawFn) -> Menu:
    """Two or three layers between spaces that may be narrowed; each side wants an order of its own, or one in common, or none."""
    cost = st.floats(0, 2)
    rows = [SpaceRow(f"s{n}", (Width(4, 0.0), Width(2, draw(cost)))) for n in range(draw(st.integers(0, 2)))]
    sides = st.sampled_from([Side(4), *(Side(0, (n,)) for n in range(len(rows)))])
    products = []
    for number in range(draw(st.integers(2, 3))):
        options = (GroupCount(1, 0.0), *(GroupCount(groups, draw(cost)) for groups in (2, 4)[: draw(st.integers(0, 2))]))
        products.append(Product((f"p{number}",), draw(sides), draw(sides), 1, 1, options, Noise(draw(st.integers(0, 99)))))
    places = [1] * draw(st.integers(1, 2))  # how many orders each has so far: the model's own
    common = dict[int, int]()
    demands = []
    for number, side in itertools.product(range(len(products)), ("in", "out")):
        place = draw(st.sampled_from([None, *range(len(places))]))
        order = narrowed = NO_ORDER
        if place is not None:
            places[place] += 1
            order = narrowed = places[place] - 1
            if draw(st.booleans()):
                if place not in common:
                    places[place] += 1
                    common[place] = places[place] - 1
                order = common[place]
        ns = 20 * draw(st.integers(0, 999))
        demands.append(Demand(number, f"p{number}", side, ns, 1, place, order, narrowed, stays=draw(st.integers(0, 9)) == 0))
    seams = (Seam(tuple(range(len(places))), 20 * draw(st.integers(0, 999))),) if draw(st.booleans()) else ()
    return Menu(tuple(rows), tuple(products), orders=Orders(tuple(places), tuple(demands), seams))


def all_choices(menu: Menu) -> Iterator[tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]]:
    ranges = [row.options for row in menu.spaces], [product.options for product in menu.products]
    widths, groups = (list(itertools.product(*(range(len(options)) for options in each))) for each in ranges)
    stored = list(itertools.product(*(range(orders) for orders in menu.orders.places)))
    yield from (choice for choice in itertools.product(widths, groups, stored) if menu.is_legal(*choice))


@settings(max_examples=120, deadline=None)
@given(menus(), st.floats(0, 1))
def test_the_search_over_widths_groups_and_orders_is_exact(menu: Menu, share: float) -> None:
    choices = [(menu.cost(*choice[:2]), menu.totals(*choice)[2]) for choice in all_choices(menu)]
    fastest, dense = min(ns for _, ns in choices), menu.dense[2]
    limit = fastest + round(share * (dense - fastest))
    found = search_joint(menu, Budget(max_latency_ms=limit / 1e6))
    assert menu.is_legal(found.widths, found.groups, found.stored)
    assert menu.totals(found.widths, found.groups, found.stored)[2] <= limit
    assert found.cost == pytest.approx(min(cost for cost, ns in choices if ns <= limit), abs=HIGHS)
    assert found.gap == 0


# Real shapes


def resnet50_like(width: int) -> onnx.ModelProto:
    """ResNet-50, its stages `width` channels wide and so on: 52 layers, 37 places."""
    text, weights = ["stem = Conv (image, w0) x = Relu (stem)"], {"w0": (width, 3, 1, 1)}

    def conv(source: str, ins: int, outs: int, kernel: int) -> str:
        name = f"c{len(weights)}"
        weights[f"v{name[1:]}"] = (outs, ins, kernel, kernel)
        text.append(f"{name} = Conv <pads = [{', '.join([str(kernel // 2)] * 4)}]> ({source}, v{name[1:]}) {name}r = Relu ({name})")
        return name

    x, channels = "x", width
    for stage, blocks in enumerate((3, 4, 6, 3)):
        inner = width * 2**stage
        for block in range(blocks):
            first = conv(x, channels, inner, 1)
            last = conv(f"{conv(f'{first}r', inner, inner, 3)}r", inner, 4 * inner, 1)
            shortcut = x if block else conv(x, channels, 4 * inner, 1)
            text.append(f"{last}t = Add ({last}, {shortcut}) {last}x = Relu ({last}t)")
            x, channels = f"{last}x", 4 * inner
    rng = np.random.default_rng(0)
    tensors = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in weights.items()}
    body = f"{' '.join(text)} last = Relu ({x}) {END}"
    return from_text(
        f"net (float[1,3,4,4] image) => (float[1,4] scores) {{ {body} }}", **tensors, w9=rng.standard_normal((4, channels))
    )


@pytest.mark.parametrize("gathers", ["free", "shared"])
def test_a_resnet50_is_proven(gathers: GathersName) -> None:
    model = resnet50_like(16)
    facts = facts_of(model, 0)
    assert facts.times is not None
    job = Job(open_original(model), Settings(max_latency=0.5, min_group_channels=4, solver="paper", jobs=1), facts)
    solved = solve(job, gathers, None)
    for share in (0.8, 0.6):
        planned = plan_within(solved, Budget(max_latency_ms=share * facts.times.dense_ms))
        assert planned.search is not None
        assert planned.search.gap == 0
        assert predicted_ns(planned) <= share * facts.times.dense_ms * 1e6 + 1
        assert any(layer.gathered for layer in planned.plan.layers)
