"""From a model to a plan: read, solve, choose."""

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import onnx

from onnx_gconv.errors import BudgetError, ModelError
from onnx_gconv.model.network import Layer, Network
from onnx_gconv.pipeline.choosing import Candidates, Left, by_rule, candidates, cost_table
from onnx_gconv.pipeline.coupling import solve_jointly
from onnx_gconv.pipeline.settings import Request
from onnx_gconv.pipeline.solving import Groupings, Progress, solve_all
from onnx_gconv.pipeline.trial import Costs, Guide, best_by_trial
from onnx_gconv.plans import Plan, PlannedLayer, SkippedConv, Totals
from onnx_gconv.search.budget import Budget
from onnx_gconv.search.exact import SearchResult, search_exact
from onnx_gconv.search.latency import Prediction
from onnx_gconv.search.local import search_local
from onnx_gconv.search.table import Table
from onnx_gconv.solve.grouping import Grouping

GathersMs = Callable[[Plan], float]  # what the Gathers take that a plan needs
SEARCHES_FOR_GATHERS = 6


@dataclass(frozen=True)
class Prepared:
    """A model solved for every number of groups that a plan may choose."""

    network: Network
    request: Request
    left: Left
    rule: dict[str, int] | None  # the choice, where a rule makes it
    table: Table | None  # what to search on, where none does
    groupings: Groupings


@dataclass(frozen=True)
class Planned:
    """A plan, how good the search found it to be, what it should take, and how long its two halves took."""

    plan: Plan
    found: SearchResult | None  # None where a rule chose
    prediction: Prediction | None  # None where no times are given
    prepared: Prepared
    solve_seconds: float = 0.0
    search_seconds: float = 0.0


def make_plan(
    model: onnx.ModelProto,
    network: Network,
    request: Request,
    *,
    sha256: str,
    progress: Progress,
    guide: Guide | None = None,
    gathers_ms: GathersMs | None = None,
) -> Planned:
    """Return the plan for a model, or refuse with what is feasible."""
    budget = resolve_budget(request, network)
    started = time.perf_counter()
    prepared = prepare(model, network, request, progress)
    solved = time.perf_counter()
    planned = plan_guided(prepared, budget, guide, sha256=sha256, gathers_ms=gathers_ms)
    return replace(planned, solve_seconds=solved - started, search_seconds=time.perf_counter() - solved)


def prepare(model: onnx.ModelProto, network: Network, request: Request, progress: Progress) -> Prepared:
    """Return the model solved: for the groups of a rule, or for all that a search may choose."""
    left, allowed, rule = decide_candidates(network, request)
    if request.gathers != "free":
        return _prepare_jointly(model, network, allowed, request, left, progress)
    wanted: dict[str, Sequence[int]] = {name: [g] for name, g in rule.items()} if rule is not None else wanted_numbers(allowed)
    groupings = solve_all(model, [layer for layer in network.layers if layer.name in wanted], wanted, request, progress)
    table = _table(network, allowed, groupings, request, left) if rule is None else None
    return Prepared(network, request, left, rule, table, groupings)


def _table(network: Network, allowed: Candidates, groupings: Groupings, request: Request, left: Left) -> Table:
    table = cost_table(network, allowed, groupings, request, left)
    return table.from_groups(request.least_groups) if request.least_groups else table


def _prepare_jointly(
    model: onnx.ModelProto, network: Network, allowed: Candidates, request: Request, left: Left, progress: Progress
) -> Prepared:
    """Return the model solved with shared partitions; a rule then chooses among the numbers of groups that they have."""
    joint, groupings = solve_jointly(model, network, allowed, request, left, progress)
    for name in allowed.keys() - joint.keys():
        left.setdefault(name, "it shares channels with Convs that no common number of groups fits")
    rule = by_rule(network.layers, joint, request, left)
    if not joint or rule == {}:
        raise ModelError(
            _nothing(list(left.values()), "no Conv would be grouped"), hint="use --gathers free, which couples no layers"
        )
    table = _table(network, joint, groupings, request, left) if rule is None else None
    return Prepared(network, request, left, rule, table, groupings)


def wanted_numbers(allowed: Candidates) -> dict[str, Sequence[int]]:
    """Return what a search needs solved: every candidate but the layer as it is."""
    return {name: numbers[1:] for name, numbers in allowed.items()}


def decide_candidates(network: Network, request: Request) -> tuple[Left, Candidates, dict[str, int] | None]:
    """Return who is left and why, the candidates of the others, and a rule's choice; refuse where nothing could be grouped."""
    if not network.layers:
        what = f"none of the model's {len(network.skipped)} Convs can be grouped"
        raise ModelError(
            _nothing([conv.reason for conv in network.skipped], what) if network.skipped else "the model has no Conv.",
            hint="`onnx-gconv inspect` lists every Conv and why it is skipped",
        )
    left: Left = {conv.name: conv.reason for conv in network.skipped}
    allowed = candidates(network.layers, request, left)
    rule = by_rule(network.layers, allowed, request, left)
    if not allowed or rule == {}:
        raise ModelError(
            _nothing(list(left.values()), "no Conv would be grouped"), hint="`onnx-gconv inspect` lists the legal numbers of groups"
        )
    return left, allowed, rule


def plan_within(prepared: Prepared, budget: Budget, *, sha256: str, gathers_ms: GathersMs | None = None) -> Planned:
    """Return the plan of least cost within the budget.

    Which Gathers a choice needs is known only once it is made, so their time is no part of the search: it is set aside from
    the budget, as much as the last choice needed, until a choice with its Gathers fits.
    """
    limit, aside_ms = budget.max_latency_ms, 0.0
    for _ in range(SEARCHES_FOR_GATHERS):
        planned = _plan_once(prepared, budget, aside_ms, sha256, gathers_ms)
        prediction = planned.prediction
        if limit is None or prediction is None or prediction.after_ms <= limit:
            return planned
        if prepared.rule is not None:
            raise BudgetError(
                f"the chosen groups take {prediction.after_ms:.4g} ms, over the budget of {limit:.4g} ms.",
                hint="leave out --groups, --max-group-channels or --group-config and let the search meet the budget",
            )
        aside_ms = max(aside_ms + 1e-3 * limit, prediction.gathers_ms)
        if aside_ms >= limit:
            break
    raise BudgetError(
        f"the budget cannot be met: {limit:.4g} ms is asked, and the Gathers alone take {aside_ms:.4g} ms.",
        hint="--gathers none needs no Gathers, --gathers shared fewer",
    )


def _plan_once(prepared: Prepared, budget: Budget, aside_ms: float, sha256: str, gathers_ms: GathersMs | None) -> Planned:
    """Return the plan of least cost within the budget, of whose time a part is set aside."""
    found, chosen, left = None, prepared.rule, dict(prepared.left)
    if chosen is None:
        assert prepared.table is not None
        limit = budget.max_latency_ms
        found = _search(
            prepared.table, budget if limit is None else replace(budget, max_latency_ms=limit - aside_ms), prepared.request
        )
        chosen = _chosen(prepared, found.choice, left)
    plan = _plan(prepared, chosen, left, budget, sha256)
    if not budget.allows(plan.after.params, plan.after.macs):
        raise BudgetError(
            f"the chosen groups leave {plan.after.params:,} parameters and {plan.after.macs or 0:,} MACs, over the budget.",
            hint="leave out --groups, --max-group-channels or --group-config and let the search meet the budget",
        )
    return Planned(plan, found, _predict(prepared, plan, gathers_ms), prepared)


def _predict(prepared: Prepared, plan: Plan, gathers_ms: GathersMs | None) -> Prediction | None:
    times = prepared.request.latencies
    if times is None or gathers_ms is None:
        return None
    existing = {layer.name: layer.groups for layer in prepared.network.layers}
    saved = sum(times.saved_ms(layer.name, existing[layer.name], layer.groups) for layer in plan.layers)
    moved = gathers_ms(plan)
    return Prediction(times.runner, times.dense_ms, times.dense_ms - saved + moved, moved)


def is_measured(prepared: Prepared) -> bool:
    """Return whether a search asks a guide what each layer costs alone."""
    request = prepared.request
    is_asked = request.cost == "sensitivity" or (request.cost == "trial" and request.solver.effort >= 1)
    return prepared.table is not None and is_asked


def plan_guided(
    prepared: Prepared, budget: Budget, guide: Guide | None, *, sha256: str, gathers_ms: GathersMs | None = None
) -> Planned:
    """Return the plan by measured costs where the request asks for them: of each layer grouped alone, or by trial."""
    table = prepared.table
    if guide is None or table is None or prepared.request.cost not in ("sensitivity", "trial"):
        return plan_within(prepared, budget, sha256=sha256, gathers_ms=gathers_ms)

    def search(costs: Costs) -> Planned:
        return plan_within(replace(prepared, table=table.priced(costs)), budget, sha256=sha256, gathers_ms=gathers_ms)

    if prepared.request.cost == "sensitivity":
        return search(guide.costs(prepared.groupings, None))
    return best_by_trial(guide, prepared.groupings, search, effort=prepared.request.solver.effort)


def without(plan: Plan, network: Network, names: Collection[str], reason: str) -> Plan:
    """Return the plan with these layers left as they are."""
    kept = {layer.name: layer for layer in plan.layers if layer.name not in names}
    left = tuple(SkippedConv(layer.name, reason) for layer in plan.layers if layer.name in names)
    return replace(plan, layers=tuple(kept.values()), skipped=(*plan.skipped, *left), after=_after(network, kept))


def _search(table: Table, budget: Budget, request: Request) -> SearchResult:
    if request.search == "exact":
        return search_exact(table, budget)
    choice = search_local(table, budget)
    return SearchResult(choice, table.cost(choice), float("-inf"))


def _chosen(prepared: Prepared, choice: Sequence[int], left: Left) -> dict[str, int]:
    assert prepared.table is not None
    existing = {layer.name: layer.groups for layer in prepared.network.layers}
    chosen = {}
    for row, index in zip(prepared.table.rows, choice, strict=True):
        for name in row.names:
            if row.options[index].groups > existing[name]:
                chosen[name] = row.options[index].groups
            else:
                left[name] = "the budget is met without it"
    return chosen


def resolve_budget(request: Request, network: Network) -> Budget:
    """Return the budget in absolute numbers; shares are of the whole model before."""
    count = network.count
    wholes = {"max_params": count.params, "max_macs": count.macs, "max_flops": count.flops}
    resolved: dict[str, int] = {}
    for name, limit in request.limits.items():
        if name not in wholes:
            continue
        whole = wholes[name]
        if whole is None:
            raise BudgetError(
                "the MACs of this model are not known: neither shape inference nor a run settles every shape.",
                hint="give --input-shape, or budget parameters with --max-params",
            )
        resolved[name] = limit.of(whole)
    latency = request.limits.get("max_latency_ms")
    if latency is None:
        return Budget(**resolved)
    assert request.latencies is not None, "a budget in milliseconds comes with measured times"
    return Budget(**resolved, max_latency_ms=round(latency.value * (request.latencies.dense_ms if latency.is_share else 1), 6))


def _nothing(reasons: Sequence[str], what: str) -> str:
    distinct = list(dict.fromkeys(reasons))
    more = f"; and other reasons ({len(distinct) - 3})" if len(distinct) > 3 else ""
    return f"{what}: {'; '.join(distinct[:3])}{more}."


def _plan(prepared: Prepared, chosen: Mapping[str, int], left: Left, budget: Budget, sha256: str) -> Plan:
    network, request = prepared.network, prepared.request
    planned = {
        layer.name: _planned_layer(layer, prepared.groupings[layer.name, chosen[layer.name]])
        for layer in network.layers
        if layer.name in chosen
    }
    return Plan(
        source_sha256=sha256,
        criterion=request.criterion,
        solver=request.solver.name,
        search=request.search_name,
        seed=request.seed,
        budget=budget.as_dict(),
        gathers=request.gathers,
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
