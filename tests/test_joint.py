"""The joint search over widths and groups: brute force is the oracle, budgets are kept to the last MAC, real shapes are proven."""

import itertools
import re
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onnx_gconv.errors import BudgetError
from onnx_gconv.search import joint, network
from onnx_gconv.search.budget import Budget
from onnx_gconv.search.exact import SearchResult, search_exact
from onnx_gconv.search.joint import JointResult, search_joint, smallest_totals
from onnx_gconv.search.menu import GroupCount, Menu, Product, Side, SpaceRow, Width
from onnx_gconv.search.table import Option, Row, Table

HIGHS = 2e-6  # HiGHS stops within 1e-6 of the optimum
Choice = tuple[tuple[int, ...], tuple[int, ...]]
T = TypeVar("T")


def all_choices(menu: Menu) -> Iterator[Choice]:
    """Every legal choice."""
    for widths in itertools.product(*(range(len(row.options)) for row in menu.spaces)):
        if menu.is_legal(widths, [0] * len(menu.products)):
            able = [[i for i in range(len(p.options)) if menu.can_group(p, i, widths)] for p in menu.products]
            yield from ((widths, groups) for groups in itertools.product(*able))


def optimum(menu: Menu, budget: Budget) -> float | None:
    """The least cost within the budget, by brute force; None where nothing is within it."""
    return min((menu.cost(*choice) for choice in all_choices(menu) if menu.allows(*choice, budget)), default=None)


def as_it_is(menu: Menu) -> Choice:
    return (0,) * len(menu.spaces), (0,) * len(menu.products)


def share_of(menu: Menu, params: float | None, macs: float | None = None, latency: float | None = None) -> Budget:
    """The budget at these shares of the model as it is."""
    whole = zip(menu.dense, (params, macs, latency), strict=True)
    max_params, max_macs, max_ns = (None if part is None else int(part * amount) for amount, part in whole)
    return Budget(max_params, max_macs, max_latency_ms=None if max_ns is None else max_ns / 1e6)


def checked(menu: Menu, budget: Budget, *, seconds: float = 60.0) -> JointResult:
    """What the search finds, which is legal and within the budget."""
    found = search_joint(menu, budget, time_limit_seconds=seconds)
    assert menu.is_legal(found.widths, found.groups)
    assert menu.allows(found.widths, found.groups, budget)
    assert found.cost == menu.cost(found.widths, found.groups)
    assert found.bound <= found.cost
    return found


def check_optimum(menu: Menu, budget: Budget) -> None:
    """Compare with brute force; where nothing is within the budget, the range in the refusal is, and starts where it says."""
    best = optimum(menu, budget)
    if best is not None:
        found = checked(menu, budget)
        assert found.cost == pytest.approx(best, abs=HIGHS)
        assert found.bound <= best + 1e-9
        assert found.gap == 0
        return
    with pytest.raises(BudgetError, match="cannot be met") as refused:
        search_joint(menu, budget)
    found = re.findall(r"--(\S+) from ([\d,.]+)(?:ms)?", refused.value.hint)
    amounts = {name.replace("-", "_").replace("latency", "latency_ms"): value.replace(",", "") for name, value in found}
    assert amounts.keys() == budget.as_dict().keys()
    max_ms = amounts.pop("max_latency_ms", None)
    counted = Budget(**{name: int(value) for name, value in amounts.items()})
    checked(menu, replace(counted, max_latency_ms=None if max_ms is None else float(max_ms)))
    if len(found) == 1:  # of several together, one could be less where another is more
        less = Budget(**{name: value - 1 for name, value in counted.as_dict().items()})
        assert optimum(menu, less if max_ms is None else Budget(max_latency_ms=float(max_ms) - 1e-4)) is None


# Few different costs, zero among them: ties everywhere.
costs = st.one_of(st.sampled_from([0.0, 0.25, 0.5, 1.0]), st.floats(0, 3))


def some(values: st.SearchStrategy[T], least: int, most: int, *, unique: bool = False) -> st.SearchStrategy[tuple[T, ...]]:
    """Few or many, alike: lists of hypothesis are mostly short."""
    return st.integers(least, most).flatmap(lambda n: st.lists(values, min_size=n, max_size=n, unique=unique).map(tuple))


@st.composite
def rows(draw: st.DrawFn) -> SpaceRow:
    full = draw(st.sampled_from([4, 8, 6, 3]))
    narrower = draw(some(st.integers(0, full - 1), 0, 3, unique=True))
    return SpaceRow("space", (Width(full, 0.0), *(Width(channels, draw(costs)) for channels in sorted(narrower, reverse=True))))


@dataclass(frozen=True)
class Noise:
    """Times without any rule: fewer channels may be slower. Tens of microseconds."""

    seed: int

    def __call__(self, ins: int, outs: int, groups: int) -> int:
        return 1000 * (zlib.crc32(repr((self.seed, ins, outs, groups)).encode()) % 40)


clocks = st.one_of(st.none(), st.integers(0, 99).map(Noise))


@st.composite
def products(draw: st.DrawFn, spaces: int) -> Product:
    members = some(st.integers(0, spaces - 1), 0, 3)  # a Concat may have the same space twice
    ins, outs = (Side(draw(st.sampled_from([0, 1, 4])), draw(members)) for _ in range(2))
    counts = draw(st.sampled_from([(1,), (1, 2), (1, 4), (1, 2, 4), (2, 4)]))
    if counts[0] > 1 and (ins.spaces or outs.spaces or ins.fixed % 2 or outs.fixed % 2):
        counts = (1,)
    options = tuple(GroupCount(groups, draw(costs) if place else 0.0) for place, groups in enumerate(counts))
    ranks = draw(some(st.integers(1, 5), 0, 2, unique=True)) if counts[0] == 1 else ()
    options += tuple(GroupCount(1, draw(costs), rank) for rank in ranks)
    units = draw(st.sampled_from([1, 9, 25])), draw(st.sampled_from([0, 9, 7 * 49]))
    return Product(("layer",), ins, outs, *units, options, draw(clocks), draw(st.sampled_from([0, 1, 49])), draw(clocks))


@st.composite
def menus(draw: st.DrawFn) -> Menu:
    spaces = draw(some(rows(), 1, 4))
    alike = some(st.integers(0, len(spaces) - 1), 1, min(len(spaces), 3), unique=True)
    menu = Menu(
        spaces=spaces,
        products=draw(some(products(len(spaces)), 1, 4)),
        together=draw(some(alike, 0, 1)),
        fixed_params=draw(st.integers(0, 50)),
        fixed_macs=draw(st.integers(0, 50)),
    )
    # Layers may take longer alone than in the model, which as it is takes some time.
    return replace(menu, fixed_latency_ns=max(1000 * draw(st.integers(-20, 50)), -menu.dense[2]))


maybe = st.one_of(st.none(), st.floats(0, 1.1))
shares = st.tuples(st.floats(0, 1.1), maybe, maybe).flatmap(st.permutations)


# With tables of one cell at most, all variables are relaxed; where no pair may be listed, HiGHS decides.
@pytest.mark.parametrize(
    ("cells", "pairs"), [(network.MOST_CELLS, joint.MOST_PAIRS), (network.MOST_CELLS, 0), (1, 0)], ids=["listed", "milp", "relaxed"]
)
@settings(deadline=None, max_examples=200)
@given(menu=menus(), parts=shares)
def test_it_equals_brute_force_within_the_budget_and_with_proof(
    cells: int, pairs: int, menu: Menu, parts: Sequence[float | None]
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(network, "MOST_CELLS", cells)
        patch.setattr(joint, "MOST_PAIRS", pairs)
        check_optimum(menu, share_of(menu, *parts))


@settings(deadline=None, max_examples=200)
@given(menus(), st.integers(0), st.integers(-1, 1), st.sampled_from(["params", "macs", "flops", "latency", "both", "all"]))
def test_budgets_at_what_a_choice_takes_are_kept_to_the_last_one(menu: Menu, pick: int, more: int, kind: str) -> None:
    choices = list(all_choices(menu))
    params, macs, ns = (max(0, amount + more) for amount in menu.totals(*choices[pick % len(choices)]))
    budgets = {
        "params": Budget(params),
        "macs": Budget(None, macs),
        "flops": Budget(None, None, 2 * macs + 1),
        "latency": Budget(max_latency_ms=ns / 1e6),
        "both": Budget(params, macs),
        "all": Budget(params, macs, max_latency_ms=ns / 1e6),
    }
    check_optimum(menu, budgets[kind])


@settings(deadline=None, max_examples=50)
@given(menus(), st.tuples(st.floats(0, 1), st.floats(0, 1)).map(sorted))
def test_a_looser_budget_never_costs_more(menu: Menu, parts: list[float]) -> None:
    tight, loose = (share_of(menu, part) for part in parts)
    if optimum(menu, tight) is not None:
        assert search_joint(menu, tight).cost >= search_joint(menu, loose).cost - HIGHS


@settings(deadline=None, max_examples=50)
@given(menus(), st.sampled_from([0, 1, 2]))
def test_the_smallest_totals_are_those_of_a_choice_and_none_has_less(menu: Menu, row: int) -> None:
    totals = {menu.totals(*choice) for choice in all_choices(menu)}
    smallest = smallest_totals(menu, row)
    assert smallest in totals
    assert smallest[row] == min(one[row] for one in totals)


def nearly_tied(seed: int) -> Menu:
    """Spaces of about 1e10 MACs a channel: totals that differ by a few MACs, far below HiGHS's relative tolerance of 1e-6."""
    rng = np.random.default_rng(seed)
    costs = np.sort(rng.random((4, 4)))
    spaces = (tuple(Width(8 >> k, float(row[k]) if k else 0.0) for k in range(4)) for row in costs)
    units = rng.integers(10**10 - 50, 10**10 + 50, 4).tolist()
    layers = (Product(("layer",), Side(1), Side(0, (space,)), 1, unit) for space, unit in enumerate(units))
    return Menu(tuple(SpaceRow("space", options) for options in spaces), tuple(layers))


def test_a_choice_that_is_over_by_less_than_the_solver_sees_is_ruled_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joint, "MOST_PAIRS", 0)  # the solver decides
    for seed in range(10):
        menu = nearly_tied(seed)
        totals = sorted({menu.totals(*choice)[1] for choice in all_choices(menu)})
        total = totals[int(np.random.default_rng(seed).integers(1, len(totals)))]
        for more in (-1, 0, 1):
            check_optimum(menu, Budget(max_macs=total + more))


def curve(rng: np.random.Generator, full: int, step: int, *, can_go: bool = False) -> SpaceRow:
    """A space whose channels have saliences of their own: the first ones go cheaply, the last ones dearly."""
    saliences = np.sort(rng.gamma(rng.uniform(0.5, 2), size=full))
    costs = np.append(0, np.cumsum(saliences)) * rng.uniform(0.3, 3) / saliences.sum()
    return SpaceRow("space", tuple(Width(w, float(costs[full - w])) for w in (*range(full, 0, -step), *[0] * can_go)))


@dataclass(frozen=True)
class Kernel:
    """Times as a CPU has them: blocks of channels that are full or not, small groups that are slow, and noise."""

    seed: int
    work: int  # MACs for each pair of channels

    def __call__(self, ins: int, outs: int, groups: int) -> int:
        blocks = -(-ins // groups // 8) * -(-outs // groups // 8) * groups * 64
        noise = 1 + zlib.crc32(repr((self.seed, ins, outs, groups)).encode()) % 1000 / 20000
        return round(3000 + blocks * self.work * noise / 30 + 20 * (ins + outs))


class Drawing:
    """A menu as it is drawn, layer after layer."""

    def __init__(self, seed: int, most_groups: int) -> None:
        self.rng, self.most_groups = np.random.default_rng(seed), most_groups
        self.spaces, self.products, self.together = list[SpaceRow](), list[Product](), list[tuple[int, ...]]()

    def space(self, full: int, step: int, *, can_go: bool = False) -> Side:
        self.spaces.append(curve(self.rng, full, step, can_go=can_go))
        return Side(0, (len(self.spaces) - 1,))

    def conv(self, ins: Side, outs: Side, taps: int, pixels: int) -> None:
        whole = Menu(tuple(self.spaces), ())
        scale, power = self.rng.uniform(0.3, 3), self.rng.uniform(1, 2)
        counts = [
            g for g in (2**k for k in range(10)) if g <= self.most_groups and whole.full(ins) % g == whole.full(outs) % g == 0
        ]
        options = (GroupCount(g, float(scale * ((1 - 1 / g) ** power + np.log2(g) / 10))) for g in counts)
        kernel = Kernel(int(self.rng.integers(1 << 30)), taps * pixels)
        self.products.append(Product((f"conv{len(self.products)}",), ins, outs, taps, taps * pixels, tuple(options), kernel))
        self.products.append(Product((), Side(1), outs, 2, 0))  # scale and bias of the normalisation

    def bottleneck(self, ins: Side, outs: Side, inner: int, step: int, pixels: int, *, can_go: bool) -> None:
        first, second = self.space(inner, step, can_go=can_go), self.space(inner, step, can_go=can_go)
        for one, other, taps in ((ins, first, 1), (first, second, 9), (second, outs, 1)):
            self.conv(one, other, taps, pixels)
        self.together.append(first.spaces + second.spaces)

    def dense(self, atoms: Side, inner: int, growth: int, pixels: int) -> Side:
        """A layer that reads all atoms; return them with the one it adds."""
        middle, atom = self.space(inner, inner // 6, can_go=True), self.space(growth, growth // 6 or 1, can_go=True)
        self.conv(atoms, middle, 1, pixels)
        self.conv(middle, atom, 9, pixels)
        self.together.append(middle.spaces + atom.spaces)
        return Side(0, atoms.spaces + atom.spaces)

    @property
    def menu(self) -> Menu:
        return Menu(tuple(self.spaces), tuple(self.products), tuple(self.together), 1000, 10**6, 10**5)


def resnet56(seed: int) -> Menu:
    """27 basic blocks: every inner space between two fixed sides, every width."""
    drawing = Drawing(seed, 32)
    for stage, (width, pixels) in enumerate(((16, 1024), (32, 256), (64, 64))):
        for block in range(9):
            inner = drawing.space(width, 1, can_go=block > 0)
            drawing.conv(Side(width // 2 if stage and not block else width), inner, 9, pixels)
            drawing.conv(inner, Side(width), 9, pixels)
    return drawing.menu


def resnet50(seed: int) -> Menu:
    """16 bottlenecks on streams that may be narrower too."""
    drawing = Drawing(seed, 512)
    stream = drawing.space(64, 8)
    drawing.conv(Side(3), stream, 49, 112**2)
    for blocks, width, pixels in ((3, 64, 56**2), (4, 128, 28**2), (6, 256, 14**2), (3, 512, 7**2)):
        wide = drawing.space(4 * width, width // 8)
        drawing.conv(stream, wide, 1, pixels)
        for block in range(blocks):
            drawing.bottleneck(stream, wide, width, 8, pixels, can_go=block > 0)
            stream = wide
    drawing.products.append(Product(("fc",), stream, Side(1000), 1, 1))
    return drawing.menu


def resnet164(seed: int) -> Menu:
    """54 bottlenecks between fixed sides: many spaces of one shape."""
    drawing, ins = Drawing(seed, 32), 16
    for width, pixels in ((16, 1024), (32, 256), (64, 64)):
        for block in range(18):
            drawing.bottleneck(Side(ins), Side(4 * width), width, width // 16, pixels, can_go=block > 0)
            ins = 4 * width
    return drawing.menu


def densenet86(seed: int) -> Menu:
    """Three dense blocks: each layer reads the channels of all layers before it."""
    drawing, full = Drawing(seed, 8), 24
    atoms = drawing.space(24, 4)
    drawing.conv(Side(3), atoms, 9, 1024)
    for stage, pixels in enumerate((1024, 256, 64)):
        for _ in range(14):
            atoms, full = drawing.dense(atoms, 48, 12, pixels), full + 12
        if stage < 2:
            full //= 2
            narrow = drawing.space(full, full // 6)
            drawing.conv(atoms, narrow, 1, pixels)
            atoms = narrow
    drawing.products.append(Product(("fc",), atoms, Side(10), 1, 1))
    return drawing.menu


def test_what_is_listed_is_what_the_solver_finds() -> None:
    for seed in range(20):
        drawing = Drawing(seed, 8)
        atoms = drawing.space(16, 4)
        for _ in range(5):
            atoms = drawing.dense(atoms, 16, 4, 16)
        budget = share_of(drawing.menu, 0.5)
        listed = checked(drawing.menu, budget)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(joint, "MOST_PAIRS", 0)
            assert listed.cost == pytest.approx(checked(drawing.menu, budget).cost, abs=HIGHS)


REAL = [resnet56, resnet50, resnet164, densenet86]


@pytest.mark.parametrize(
    "parts", [(0.5, None), (0.6, 0.4), (None, None, 0.5), (0.5, 0.6, 0.6)], ids=["params", "both", "latency", "all"]
)
@pytest.mark.parametrize("model", REAL)
def test_menus_of_real_shapes_are_solved_with_proof(model: Callable[[int], Menu], parts: tuple[float | None, ...]) -> None:
    menu = model(0)
    assert checked(menu, share_of(menu, *parts)).gap == 0


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 4))
@pytest.mark.parametrize("model", REAL)
def test_so_they_are_at_every_budget(model: Callable[[int], Menu], seed: int) -> None:
    menu = model(seed)
    for parts in ((0.35, None), (None, 0.3), (0.7, 0.8), (0.35, 0.5), (None, None, 0.35), (None, None, 0.8), (0.5, 0.6, 0.6)):
        assert checked(menu, share_of(menu, *parts), seconds=600.0).gap == 0  # a busy machine is no reason to fail


@pytest.mark.parametrize("model", REAL)
def test_out_of_time_it_still_returns_a_choice_within_the_budget_and_an_honest_gap(model: Callable[[int], Menu]) -> None:
    menu = model(0)
    budget = share_of(menu, 0.6, 0.4)
    found, proven = checked(menu, budget, seconds=0.0), checked(menu, budget)
    assert found.gap > 0
    assert found.cost <= 1.1 * proven.cost
    assert found.bound <= proven.cost


def test_the_same_menu_has_the_same_result() -> None:
    menu = densenet86(0)
    budget = share_of(menu, 0.5, 0.5)
    assert search_joint(menu, budget) == search_joint(menu, budget)


def test_without_spaces_it_is_the_search_over_groups() -> None:
    rng = np.random.default_rng(0)
    layers, table = [], []
    for _ in range(20):
        costs = [0.0, *np.cumsum(rng.random(5)).tolist()]
        options = tuple(GroupCount(2**k, costs[k]) for k in range(6))
        layer = Product(("layer",), Side(64), Side(32), 9, 9 * int(rng.choice([49, 196, 784])), options)
        layers.append(layer)
        table.append(Row(layer.names, tuple(Option(o.groups, o.cost, *layer.amounts(64, 32, o.groups)[:2]) for o in options)))
    menu = Menu((), tuple(layers))
    budget = share_of(menu, 0.4, 0.3)
    assert checked(menu, budget).cost == pytest.approx(search_exact(Table(tuple(table), 0, 0), budget).cost, abs=HIGHS)


def test_a_budget_that_the_model_meets_costs_nothing() -> None:
    menu = resnet164(0)
    assert search_joint(menu, Budget(*menu.dense[:2])) == JointResult(*as_it_is(menu), 0.0, 0.0)
    assert search_joint(menu, Budget()) == JointResult(*as_it_is(menu), 0.0, 0.0)
    assert search_joint(Menu((), (), fixed_params=5), Budget(max_params=5)) == JointResult((), (), 0.0, 0.0)


def pulled_apart() -> Menu:
    """A space that has to be wide for groups, which save MACs; narrow, it saves parameters."""
    space = SpaceRow("space", (Width(8, 0.0), Width(7, 1.0)))
    grouped = Product(("grouped",), Side(8), Side(0, (0,)), 0, 10, (GroupCount(1, 0.0), GroupCount(8, 1.0)))
    return Menu((space,), (grouped, Product(("plain",), Side(1), Side(0, (0,)), 10, 0)))


def test_limits_that_pull_in_different_directions_are_refused_only_together() -> None:
    menu = pulled_apart()
    checked(menu, Budget(max_params=70))
    checked(menu, Budget(max_macs=80))
    check_optimum(menu, Budget(max_params=70, max_macs=80))
    check_optimum(menu, Budget(max_params=69, max_macs=79))
    check_optimum(menu, Budget(max_params=80, max_macs=80))


def test_a_start_is_found_between_the_limits() -> None:
    """Neither the choice with the fewest parameters nor that with the fewest MACs is within the other limit."""
    one = pulled_apart()
    second = (replace(one.products[0], outs=Side(0, (1,))), replace(one.products[1], outs=Side(0, (1,))))
    check_optimum(Menu(one.spaces * 2, one.products + second), Budget(max_params=150, max_macs=640))


def test_a_refusal_tells_the_smallest_model() -> None:
    menu = pulled_apart()
    with pytest.raises(BudgetError) as refused:
        search_joint(menu, Budget(max_params=10, max_flops=2))
    assert str(refused.value) == (
        "the budget cannot be met: you asked for max params 10, max flops 2, but even the smallest model needs 80 parameters and "
        "160 FLOPs."
    )
    assert refused.value.hint.startswith("feasible: --max-params from 80 (100.00%); --max-flops from 160 (12.50%) up to 100%")


def test_a_refusal_of_a_time_tells_the_fastest_model_which_need_not_be_the_smallest() -> None:
    space = SpaceRow("space", (Width(8, 0.0), Width(6, 1.0), Width(4, 2.0)))
    times = {8: 5_000_000, 6: 2_345_678, 4: 3_000_000}
    conv = Product(("layer",), Side(3), Side(0, (0,)), 9, 9, clock=lambda ins, outs, groups: times[outs])
    menu = Menu((space,), (conv,), fixed_latency_ns=1_000_000)
    with pytest.raises(BudgetError) as refused:
        search_joint(menu, Budget(max_latency_ms=3.0))
    assert str(refused.value) == (
        "the budget cannot be met: you asked for max latency 3.0 ms, but even the smallest model needs 3.3457 ms."
    )
    assert refused.value.hint.startswith("feasible: --max-latency from 3.3457ms (55.77%) up to 100%")
    assert checked(menu, Budget(max_latency_ms=3.3457)).widths == (1,)


def test_what_is_gone_takes_no_time() -> None:
    space = SpaceRow("space", (Width(8, 0.0), Width(0, 1.0)))
    conv = Product(("layer",), Side(0, (0,)), Side(4), 9, 9, clock=lambda ins, outs, groups: 10**6)
    assert Menu((space,), (conv,), fixed_latency_ns=5).totals((1,), (0,)) == (0, 0, 5)


def test_the_gap_is_told_as_by_the_other_search() -> None:
    found, other = JointResult((0,), (1,), 5.0, 4.0), SearchResult([], 5.0, 4.0)
    assert found.gap == other.gap == 1
    assert found.as_dict() == other.as_dict() == {"cost": 5.0, "bound": 4.0, "gap": 1.0}
    assert JointResult((), (), 5.0, 5.0 - 9e-6).gap == 0


def test_groups_divide_both_sides_and_do_not_tear_what_was_joined() -> None:
    spaces = tuple(SpaceRow("space", (Width(8, 0.0), Width(6, 1.0), Width(0, 2.0))) for _ in range(2))
    counts = (GroupCount(1, 0.0), GroupCount(2, 1.0), GroupCount(4, 2.0))
    single, mixed, beside = (
        Product(("layer",), Side(8), side, 1, 3, counts) for side in (Side(0, (0,)), Side(0, (0, 1)), Side(8, (0,)))
    )
    menu = Menu(spaces, (single, mixed, beside), together=((0, 1),), fixed_params=5, fixed_macs=7)

    def able(product: Product, widths: Sequence[int]) -> list[int]:
        return [place for place in range(3) if menu.can_group(product, place, widths)]

    assert [able(single, (width, 0)) for width in range(3)] == [[0, 1, 2], [0, 1], [0]]
    assert [able(mixed, widths) for widths in ((0, 0), (1, 0), (0, 1), (2, 2))] == [[0, 1, 2], [0], [0], [0]]
    assert [able(beside, (width, 0)) for width in range(3)] == [[0, 1, 2], [0], [0]]
    assert menu.is_legal((2, 2), (0, 0, 0))
    assert not menu.is_legal((2, 0), (0, 0, 0))
    assert menu.totals((1, 0), (1, 0, 0)) == (5 + 24 + 112 + 112, 7 + 3 * (24 + 112 + 112), 0)
    assert menu.totals((2, 2), (0, 0, 0)) == (5 + 64, 7 + 3 * 64, 0)
    assert menu.cost((1, 0), (1, 0, 0)) == 2
