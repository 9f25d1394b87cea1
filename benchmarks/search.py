"""The exact search under budgets: against brute force, with proof, and within the budget.

    OPENBLAS_NUM_THREADS=1 python benchmarks/search.py [SECTION ...] [--budgets 1000] [--models resnet164] [--kinds both]

Needs the architectures (`python models/export_architectures.py resnet50 resnet164 densenet86 -o /tmp/arch`).
"""

import argparse
import itertools
import statistics
import time
import zlib
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

import numpy as np
from rows import need

from onnx_gconv.errors import BudgetError
from onnx_gconv.model.network import Layer
from onnx_gconv.pipeline.facts import Facts
from onnx_gconv.pipeline.gathers import GatherTimes
from onnx_gconv.pipeline.job import Job
from onnx_gconv.pipeline.original import Original, open_original
from onnx_gconv.pipeline.planning import plan_within, solve
from onnx_gconv.pipeline.settings import Settings
from onnx_gconv.search.budget import Budget
from onnx_gconv.search.exact import search_exact
from onnx_gconv.search.latency import LayerTimes
from onnx_gconv.search.local import search_local
from onnx_gconv.search.table import Option, Row, Table

MODELS = ("resnet50", "resnet164", "densenet86")
KINDS = {"params": (True, False), "MACs": (False, True), "both": (True, True)}


def row(*cells: object) -> None:
    """Print a row of a Markdown table."""
    print(f"| {' | '.join(map(str, cells))} |", flush=True)


def header(*names: str) -> None:
    row(*names)
    row(*("---" for _ in names))


@cache
def table_of(path: Path) -> Table:
    """Return the cost table of a model: every layer solved for every legal number of groups."""
    need(path)
    solved = solve(Job(open_original(path), Settings()), "free", None)
    assert solved.table is not None
    return solved.table


def ends(table: Table) -> tuple[np.ndarray, np.ndarray]:
    """Return the parameters and MACs of the smallest and of the dense model."""
    return np.array(table.totals(table.smallest())), np.array(table.totals([0] * len(table.rows)))


def budget_at(table: Table, kind: str, shares: tuple[float, float]) -> Budget:
    """Return the budget at these shares of the way from the smallest to the dense model."""
    smallest, dense = ends(table)
    params, macs = (int(low + share * (high - low)) for low, high, share in zip(smallest, dense, shares, strict=True))
    return Budget(*(limit if wanted else None for limit, wanted in zip((params, macs), KINDS[kind], strict=True)))


def used(table: Table, choice: list[int], budget: Budget) -> float:
    """Return the used share of what is allowed; of the limit that binds, where there are two."""
    limits = zip(table.totals(choice), (budget.max_params, budget.macs), strict=True)
    return max(total / limit for total, limit in limits if limit is not None)


def by_brute_force(table: Table, budget: Budget) -> float:
    choices = itertools.product(*(range(len(row.options)) for row in table.rows))
    return min(table.cost(choice) for choice in choices if budget.allows(*table.totals(choice)))


def random_case(seed: int) -> tuple[Table, Budget]:
    """Return a table of up to four layers that look like Convs, and a budget that can be met."""
    rng = np.random.default_rng(seed)
    rows = []
    for number in range(rng.integers(1, 5)):
        weights, pixels, length = 9 * 64 ** int(rng.integers(1, 4)), int(rng.choice([49, 196, 3136])), int(rng.integers(2, 6))
        costs = np.sort(rng.random(length))
        options = (Option(2**k, float(costs[k]) if k else 0.0, weights >> k, (weights >> k) * pixels) for k in range(length))
        rows.append(Row((f"r{number}",), tuple(options)))
    table = Table(tuple(rows), int(rng.integers(10**4)), int(rng.integers(10**6)))
    kind = rng.choice(list(KINDS))
    return table, budget_at(table, kind, (float(rng.random()), float(rng.random())))


def small(args: argparse.Namespace) -> None:
    above, gaps = [], []
    for seed in range(args.cases):
        table, budget = random_case(seed)
        found = search_exact(table, budget)
        assert budget.allows(*table.totals(found.choice))
        above.append(found.cost - by_brute_force(table, budget))
        gaps.append(found.gap)
    header("random tables of up to 4 layers", "equal to brute force", "worst above the optimum", "proven (gap 0)")
    row(args.cases, sum(more < 1e-6 for more in above), f"{max(above):.1e}", gaps.count(0))


def proof(args: argparse.Namespace) -> None:
    header("model", "layers", "options", "budget", "cost", "gap", "CPU s", "used", "paper's local search")
    for name, kind, share in itertools.product(args.models, args.kinds, (0.7, 0.5, 0.3)):
        table = table_of(args.arch / f"{name}.onnx")
        budget = budget_at(table, kind, (share, share))
        cost, gap, of_budget, _, seconds = searched(budget, table=table)
        local = search_local(table, budget)
        size = len(table.rows), sum(len(one.options) for one in table.rows)
        found = f"{cost:.4f}", f"{gap:.1e}", f"{seconds:.2f}", f"{of_budget:.3%}"
        row(
            name,
            *size,
            f"{share:.0%} of the way, {kind}",
            *found,
            f"{table.cost(local):.4f}, {used(table, local, budget):.1%} used",
        )


def searched(budget: Budget, *, table: Table) -> tuple[float, float, float, bool, float]:
    """Return cost, gap and share used of one search, whether it kept the budget, and its seconds of CPU time."""
    started = time.process_time()
    found = search_exact(table, budget)
    seconds = time.process_time() - started
    return found.cost, found.gap, used(table, found.choice, budget), budget.allows(*table.totals(found.choice)), seconds


def budgets(args: argparse.Namespace) -> None:
    counts = "budgets", "exceeded", "gap 0", "largest gap", "looser but dearer"
    header("model", "kind", *counts, "used, least", "used, median", "under 99 %", "mean CPU s", "worst CPU s")
    each = -(-args.budgets // (len(args.models) * len(args.kinds)))
    shares = np.random.default_rng(args.seed).random((each, 2))
    with ProcessPoolExecutor(args.jobs) as pool:
        for name, kind in itertools.product(args.models, args.kinds):
            table = table_of(args.arch / f"{name}.onnx")
            asked = [budget_at(table, kind, (float(a), float(b))) for a, b in shares]
            found = list(pool.map(partial(searched, table=table), asked, chunksize=4))
            costs, gaps, use, kept, seconds = zip(*found, strict=True)
            counts = each, kept.count(False), gaps.count(0), f"{max(gaps):.1e}", dearer(asked, costs)
            usage = f"{min(use):.2%}", f"{statistics.median(use):.3%}", sum(share < 0.99 for share in use)
            row(name, kind, *counts, *usage, f"{statistics.mean(seconds):.2f}", f"{max(seconds):.2f}")


def dearer(asked: list[Budget], costs: tuple[float, ...]) -> int:
    """Return how many pairs of budgets there are where the looser one costs more."""
    limits = np.array([[np.inf if limit is None else limit for limit in (budget.max_params, budget.macs)] for budget in asked])
    looser = (limits[:, None] >= limits[None]).all(axis=2)
    return int((looser & (np.array(costs)[:, None] > np.array(costs)[None] + 1e-6)).sum())


def resnet164(args: argparse.Namespace) -> None:
    header("ResNet-164, asked", "params of the plan", "used", "gap", "the paper's authors' own")
    table = table_of(args.arch / "resnet164.onnx")
    for millions, theirs in ((1.6, "1.61 M"), (1.4, "1.41 M"), (1.2, "1.21 M"), (1.0, ""), (0.8, "")):
        budget = Budget(max_params=int(millions * 1e6))
        found = search_exact(table, budget)
        params, _ = table.totals(found.choice)
        row(f"{millions} M", f"{params:,}", f"{used(table, found.choice, budget):.3%}", f"{found.gap:.1e}", theirs)


@dataclass(frozen=True)
class ToyTime:
    """20 MACs a nanosecond, more or less, and something for the groups."""

    layer: Layer

    def nanoseconds(self, ins: int, outs: int, groups: int) -> int:
        more = 1 + 0.2 * zlib.crc32(f"{self.layer.name} {groups}".encode()) / 2**32
        return 20_000 + round((self.layer.macs or 0) / 20 * (1 / groups + 0.05 * (groups > 1)) * more)


def toy_facts(original: Original, ns_each: float) -> Facts:
    """Return made-up times; a Gather takes so many nanoseconds for each number."""
    network = original.network
    times = {layer.name: ToyTime(layer) for layer in network.layers}
    dense_ms = (
        3 + sum(time.nanoseconds(0, 0, layer.groups) for layer, time in zip(network.layers, times.values(), strict=True)) / 1e6
    )
    gathers = GatherTimes(original.model, network.shapes, lambda tensor, _: round(ns_each * np.prod(network.shapes[tensor])))
    return Facts("ort-cpu", {}, LayerTimes("toy", None, dense_ms, times), gathers, 16)


def gathers(args: argparse.Namespace) -> None:
    header(
        "model",
        "Gathers",
        "ns for each number",
        "of the dense time",
        "cost",
        "gap",
        "CPU s",
        "grouped",
        "Gathers' share of the time",
    )
    for name, way, ns_each in itertools.product(args.models, ("free", "shared", "none"), (0.6, 5.0)):
        need(args.arch / f"{name}.onnx")
        original = open_original(args.arch / f"{name}.onnx")
        facts = toy_facts(original, ns_each)
        solved = solve(Job(original, Settings(max_latency=0.5, solver="paper", jobs=args.jobs), facts), way, None)
        assert facts.times is not None
        for share in (0.8, 0.6, 0.5):
            started = time.process_time()
            try:
                planned = plan_within(solved, Budget(max_latency_ms=share * facts.times.dense_ms))
            except BudgetError:
                row(name, way, ns_each, f"{share:.0%}", "cannot be met", "", f"{time.process_time() - started:.1f}", "", "")
                continue
            assert planned.search is not None
            assert planned.prediction is not None
            found = f"{planned.search.cost:.4f}", f"{planned.search.gap:.1e}", f"{time.process_time() - started:.1f}"
            part = f"{planned.prediction.gathers_ms / planned.prediction.after_ms:.1%}"
            row(name, way, ns_each, f"{share:.0%}", *found, len(planned.plan.layers), part)


SECTIONS = {"small": small, "proof": proof, "budgets": budgets, "resnet164": resnet164, "gathers": gathers}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sections", nargs="*", help="what to measure (default: all)", metavar="SECTION")
    parser.add_argument("--budgets", type=int, default=1000, help="random budgets, over all models and kinds")
    parser.add_argument("--cases", type=int, default=500, help="small tables to solve by brute force")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS, help="for the sections proof and budgets")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS), help="for the sections proof and budgets")
    parser.add_argument("--seed", type=int, default=0, help="of the random budgets")
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    parser.add_argument("--arch", type=Path, default=Path("/tmp/arch"))
    args = parser.parse_args()
    # Not `choices`: Python 3.11 holds the empty list that stands for "all" against them.
    if unknown := set(args.sections) - SECTIONS.keys():
        parser.error(f"no section is called {sorted(unknown)[0]!r}; choose from {', '.join(SECTIONS)}")
    for name in args.sections or SECTIONS:
        print(f"\n## {name}\n", flush=True)
        started = time.perf_counter()
        SECTIONS[name](args)
        print(f"\n({time.perf_counter() - started:.0f} s)", flush=True)


if __name__ == "__main__":
    main()
