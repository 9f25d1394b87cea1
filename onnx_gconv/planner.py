"""From a model to a plan: read, solve, choose."""

import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import onnx

from onnx_gconv.errors import BudgetError, ModelError
from onnx_gconv.group_config import read_group_config
from onnx_gconv.model.constants import Constants
from onnx_gconv.model.network import Layer, Network, layer_weight
from onnx_gconv.plan import Plan, PlannedLayer, SkippedConv, Totals
from onnx_gconv.search.budget import Budget, Limit
from onnx_gconv.search.local import search_local
from onnx_gconv.search.rules import by_group_channels, uniform
from onnx_gconv.search.table import Option, Row, Table
from onnx_gconv.solve.grouping import Grouping
from onnx_gconv.solve.importance import Criterion, importance
from onnx_gconv.solve.layer import Solver

Groupings = dict[tuple[str, int], Grouping]  # by layer name and number of groups
Progress = Callable[[int, int, str], None]  # done, of how many, what


@dataclass(frozen=True)
class Request:
    """What the user asks of the planner: limits, at most one rule, and how to solve."""

    limits: Mapping[str, Limit] = field(default_factory=dict)  # max_params, max_macs, max_flops
    groups: int | None = None
    max_group_channels: int | None = None
    group_config: Path | None = None
    include: str | None = None  # regular expressions on layer and node names
    exclude: str | None = None
    min_group_channels: int = 1
    criterion: Criterion = "l2"
    solver: Solver = field(default_factory=Solver)
    seed: int = 0
    jobs: int = 1


@dataclass(frozen=True)
class Planned:
    """A plan, and how long its two halves took."""

    plan: Plan
    solve_seconds: float
    search_seconds: float


def make_plan(model: onnx.ModelProto, network: Network, request: Request, *, sha256: str, progress: Progress) -> Planned:
    """Return the plan for a model, or refuse with what is feasible."""
    if not network.layers:
        what = f"none of the model's {len(network.skipped)} Convs can be grouped"
        raise ModelError(
            _nothing([conv.reason for conv in network.skipped], what) if network.skipped else "the model has no Conv.",
            hint="`onnx-gconv inspect` lists every Conv and why it is skipped",
        )
    budget = resolve_budget(request.limits, network)
    left: dict[str, str] = {conv.name: conv.reason for conv in network.skipped}
    candidates = _candidates(network.layers, request, left)
    rule = _rule(network.layers, candidates, request, left)
    if not candidates or rule == {}:
        raise ModelError(
            _nothing(list(left.values()), "no Conv would be grouped"), hint="`onnx-gconv inspect` lists the legal numbers of groups"
        )
    started = time.perf_counter()
    wanted = {name: list(gs)[1:] for name, gs in candidates.items()} if rule is None else {name: [g] for name, g in rule.items()}
    groupings = solve_all(model, [layer for layer in network.layers if layer.name in wanted], wanted, request, progress)
    solved = time.perf_counter()
    chosen = _search(network, candidates, groupings, budget, left) if rule is None else rule
    plan = _plan(network, groupings, chosen, left, budget, request, sha256)
    if not budget.allows(plan.after.params, plan.after.macs):
        raise BudgetError(
            f"the chosen groups leave {plan.after.params:,} parameters and {plan.after.macs or 0:,} MACs, over the budget.",
            hint="leave out --groups, --max-group-channels or --group-config and let the search meet the budget",
        )
    return Planned(plan, solved - started, time.perf_counter() - solved)


def resolve_budget(limits: Mapping[str, Limit], network: Network) -> Budget:
    """Return the budget in absolute numbers; shares are of the whole model before."""
    count = network.count
    wholes = {"max_params": count.params, "max_macs": count.macs, "max_flops": count.flops}
    resolved = {}
    for name, limit in limits.items():
        whole = wholes[name]
        if whole is None:
            raise BudgetError(
                "the MACs of this model are not known: neither shape inference nor a run settles every shape.",
                hint="give --input-shape, or budget parameters with --max-params",
            )
        resolved[name] = limit.of(whole)
    return Budget(**resolved)


def solve_all(
    model: onnx.ModelProto, layers: Sequence[Layer], wanted: Mapping[str, Iterable[int]], request: Request, progress: Progress
) -> Groupings:
    """Return the grouping of each layer for each wanted number of groups. Layers that share a weight share the solution."""
    constants = Constants(model)
    groupings: Groupings = {}
    by_problem: dict[tuple[str, int], list[Layer]] = {}
    for layer in layers:
        by_problem.setdefault((layer.weight, layer.groups), []).append(layer)

    def solve_one(sharing: list[Layer]) -> list[tuple[int, Grouping]]:
        first = sharing[0]
        matrix = importance(layer_weight(constants, first), request.criterion)
        numbers = sorted({g for layer in sharing for g in wanted[layer.name]})
        return [(g, request.solver.solve(matrix, g, existing=first.groups)) for g in numbers]

    problems = list(by_problem.values())
    progress(0, len(problems), "solving")
    # NumPy's sums, sorts and gathers let go of the interpreter lock, so threads use both cores.
    pool = ThreadPoolExecutor(request.jobs)
    try:
        for done, (sharing, solutions) in enumerate(zip(problems, pool.map(solve_one, problems), strict=True), start=1):
            groupings |= {(layer.name, g): grouping for layer in sharing for g, grouping in solutions}
            progress(done, len(problems), sharing[0].label)
    finally:
        pool.shutdown(cancel_futures=True)  # on Ctrl-C, do not first finish every queued layer
    return groupings


def _nothing(reasons: Sequence[str], what: str) -> str:
    distinct = list(dict.fromkeys(reasons))
    more = f"; and {len(distinct) - 3} more reasons" if len(distinct) > 3 else ""
    return f"{what}: {'; '.join(distinct[:3])}{more}."


def _candidates(layers: Sequence[Layer], request: Request, left: dict[str, str]) -> dict[str, tuple[int, ...]]:
    """Return the numbers of groups that each layer may have, the present one first; note in `left` who may not."""
    allowed: dict[str, tuple[int, ...]] = {}
    for layer in layers:
        names = (layer.name, layer.label)
        if request.include is not None and not any(re.search(request.include, name) for name in names):
            left[layer.name] = "not named by --include"
        elif request.exclude is not None and any(re.search(request.exclude, name) for name in names):
            left[layer.name] = "named by --exclude"
        else:
            smallest = min(layer.in_channels, layer.out_channels)
            enough = tuple(g for g in layer.legal_groups[1:] if smallest // g >= request.min_group_channels)
            if enough:
                allowed[layer.name] = (layer.groups, *enough)
            else:
                left[layer.name] = f"every legal number of groups leaves fewer than {request.min_group_channels} channels per group"
    return allowed


def _rule(
    layers: Sequence[Layer], candidates: Mapping[str, tuple[int, ...]], request: Request, left: dict[str, str]
) -> dict[str, int] | None:
    """Return the groups by rule, or None when a search is to choose them."""
    if request.groups is None and request.max_group_channels is None and request.group_config is None:
        return None
    config = read_group_config(request.group_config, layers) if request.group_config is not None else None
    chosen: dict[str, int] = {}
    for layer in layers:
        if layer.name not in candidates:
            continue
        legal = candidates[layer.name]
        answer: int | str
        if request.groups is not None:
            answer = uniform(legal, request.groups)
        elif request.max_group_channels is not None:
            answer = by_group_channels(
                legal, request.max_group_channels, in_channels=layer.in_channels, out_channels=layer.out_channels
            )
        else:
            assert config is not None
            answer = uniform(legal, config[layer.name]) if layer.name in config else "not in the group configuration"
        if isinstance(answer, int) and answer > layer.groups:
            chosen[layer.name] = answer
        else:
            left[layer.name] = answer if isinstance(answer, str) else f"it has {layer.groups} groups already"
    return chosen


def _search(
    network: Network, candidates: Mapping[str, tuple[int, ...]], groupings: Groupings, budget: Budget, left: dict[str, str]
) -> dict[str, int]:
    by_name = {layer.name: layer for layer in network.layers}
    rows = _rows(network.layers, candidates, groupings, left, count_macs=network.count.macs is not None)
    dense = [row.options[0] for row in rows]
    table = Table(
        tuple(rows),
        network.count.params - sum(option.params for option in dense) + _most_bias_copies(network.layers),
        (network.count.macs or 0) - sum(option.macs for option in dense),  # 0 throughout where MACs are not known
    )
    chosen = {}
    for row, index in zip(rows, search_local(table, budget), strict=True):
        for name in row.names:
            groups = row.options[index].groups
            if groups > by_name[name].groups:
                chosen[name] = groups
            else:
                left[name] = "the budget is met without it"
    return chosen


def _rows(
    layers: Sequence[Layer],
    candidates: Mapping[str, tuple[int, ...]],
    groupings: Groupings,
    left: dict[str, str],
    *,
    count_macs: bool,
) -> list[Row]:
    """Return the decisions of a search. Layers that share a weight are one: the weight shrinks once, if all agree."""
    by_weight: dict[str, list[Layer]] = {}
    for layer in layers:
        by_weight.setdefault(layer.weight, []).append(layer)
    rows = []
    for sharing in by_weight.values():
        free = [layer for layer in sharing if layer.name in candidates]
        if not free:
            continue
        if len(free) < len(sharing) or len({layer.groups for layer in sharing}) > 1:
            left.update({layer.name: "it shares its weight with a Conv that cannot be grouped alike" for layer in free})
            continue
        first = sharing[0]
        common = [g for g in candidates[first.name] if all(g in candidates[layer.name] for layer in sharing)]
        options = []
        for groups in common:
            cost = sum(0.0 if groups == layer.groups else 1.0 - groupings[layer.name, groups].kept for layer in sharing)
            macs = sum((layer.macs or 0) * layer.groups // groups for layer in sharing) if count_macs else 0
            options.append(Option(groups, cost, first.weights * first.groups // groups, macs))
        rows.append(Row(tuple(layer.name for layer in sharing), tuple(options)))
    return rows


def _plan(
    network: Network,
    groupings: Groupings,
    chosen: Mapping[str, int],
    left: Mapping[str, str],
    budget: Budget,
    request: Request,
    sha256: str,
) -> Plan:
    planned = {
        layer.name: _planned_layer(layer, groupings[layer.name, chosen[layer.name]])
        for layer in network.layers
        if layer.name in chosen
    }
    return Plan(
        source_sha256=sha256,
        criterion=request.criterion,
        solver=request.solver.name,
        search=_search_name(request),
        seed=request.seed,
        budget=budget.as_dict(),
        gathers="free",
        before=Totals(network.count.params, network.count.macs),
        after=_after(network, planned),
        layers=tuple(planned.values()),
        skipped=tuple(SkippedConv(name, reason) for name, reason in left.items() if name not in chosen),
    )


def _planned_layer(layer: Layer, grouping: Grouping) -> PlannedLayer:
    return PlannedLayer(
        name=layer.name,
        label=layer.label,
        out_channels=layer.out_channels,
        in_channels=layer.in_channels,
        groups=grouping.groups,
        kept=round(grouping.kept, 6),
        in_order=tuple(grouping.in_order.tolist()),
        out_order=tuple(grouping.out_order.tolist()),
    )


def _search_name(request: Request) -> str:
    if request.groups is not None:
        return "uniform"
    if request.max_group_channels is not None:
        return "max-group-channels"
    return "group-config" if request.group_config is not None else "local"


def _after(network: Network, planned: Mapping[str, PlannedLayer]) -> Totals:
    """Return what the model costs with the planned groups.

    A weight is stored once for each way it is grouped, a bias once for each order it is read in.
    """
    before: dict[str, int] = {}
    after: dict[tuple[object, ...], int] = {}
    macs_saved = 0
    for layer in network.layers:
        plan = planned.get(layer.name)
        groups = layer.groups if plan is None else plan.groups
        before[layer.weight] = layer.weights
        after[layer.weight, layer.groups, groups] = layer.weights * layer.groups // groups
        if layer.bias:
            before[layer.bias] = after[layer.bias, _bias_order(plan)] = layer.out_channels
            if layer.bias_elsewhere:
                after[layer.bias, None] = layer.out_channels
        macs_saved += (layer.macs or 0) - (layer.macs or 0) * layer.groups // groups
    params = network.count.params - sum(before.values()) + sum(after.values())
    return Totals(params, None if network.count.macs is None else network.count.macs - macs_saved)


def _bias_order(plan: PlannedLayer | None) -> tuple[int, ...] | None:
    return None if plan is None or plan.out_order == tuple(range(plan.out_channels)) else plan.out_order


def _most_bias_copies(layers: Sequence[Layer]) -> int:
    """Return how many parameters shared biases can add at most, when every reader wants its own order."""
    copies = sum(layer.out_channels for layer in layers if layer.bias)
    stored = {layer.bias: layer.out_channels for layer in layers if layer.bias and not layer.bias_elsewhere}
    return copies - sum(stored.values())
