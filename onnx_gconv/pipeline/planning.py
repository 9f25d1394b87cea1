"""From a model to a plan: solve every layer, search the numbers of groups, write down the decision."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np
import onnx

from onnx_gconv.errors import BudgetError, ModelError
from onnx_gconv.model.network import Layer, Network
from onnx_gconv.model.shapes import dynamic_inputs
from onnx_gconv.pipeline.choosing import Candidates, Reasons, by_rule, candidates, layer_ns, option_table, table_menu
from onnx_gconv.pipeline.coupling import JOINED, solve_jointly
from onnx_gconv.pipeline.forms import Forms, find_forms, grouped, grouping_of, ranked, untouched
from onnx_gconv.pipeline.gathers import GatheredSides, SharedSides, gathered_sides, with_all_gathers
from onnx_gconv.pipeline.job import Job
from onnx_gconv.pipeline.offering import offered
from onnx_gconv.pipeline.original import why_unknown
from onnx_gconv.pipeline.planned import Planned, Solved
from onnx_gconv.pipeline.refusing import nothing_to_group, with_advice
from onnx_gconv.pipeline.settings import GathersName
from onnx_gconv.pipeline.solving import Groupings, solve_all
from onnx_gconv.pipeline.trial import Costs, Grouped, Guide, Narrowed, Ranked, best_by_trial, best_discount
from onnx_gconv.plans import Plan, PlannedLayer, SkippedConv, Totals
from onnx_gconv.rewrite.match import match
from onnx_gconv.search.budget import Budget
from onnx_gconv.search.exact import SearchResult, search_exact
from onnx_gconv.search.joint import search_joint
from onnx_gconv.search.latency import Prediction
from onnx_gconv.search.local import search_local
from onnx_gconv.search.menu import Menu
from onnx_gconv.search.table import Table
from onnx_gconv.solve.grouping import Grouping


def ways_of_gathers(job: Job) -> tuple[GathersName, ...]:
    """Return the ways of Gathers to try: the one that is asked for, or, where the target's time counts, the fastest first."""
    if job.settings.gathers is not None:
        return (job.settings.gathers,)
    if "group" not in job.settings.form_names:
        return ("none",)  # nothing will need one
    return ("free",) if job.facts.target == "generic" else ("none", "shared", "free")


def feasible_plans(job: Job, *, guide: Guide | None, least_groups: Mapping[str, int] | None = None) -> Iterator[Planned]:
    """Yield the plan of each way of Gathers that has one; if none has, fail as the last one did, which asks least.

    Under a budget of time all ways compete, since each one's time is predicted: the one of least cost comes first. With other
    forms beside groups their costs do not compare, and the first way that is in time is taken. Of `least_groups`, the groups of
    an earlier plan, no layer gets fewer.
    """

    def plans() -> Iterator[Planned]:
        failure: BudgetError | ModelError | None = None
        found = 0
        for gathers in ways_of_gathers(job):
            try:
                planned = make_plan(job, gathers, guide=guide, least_groups=least_groups or {})
            except (BudgetError, ModelError) as error:
                job.listener.detail(f"with --gathers {gathers}: {error}")
                failure = error
                continue
            found += 1
            yield planned
        if failure is not None and not found:
            raise failure

    if job.settings.max_latency is not None and job.settings.form_names == ("group",):
        yield from sorted(plans(), key=lambda planned: planned.search.cost if planned.search is not None else 0.0)
    else:
        yield from plans()


def make_plan(job: Job, gathers: GathersName, *, guide: Guide | None, least_groups: Mapping[str, int]) -> Planned:
    """Return the plan for a model, or refuse with what is feasible.

    Without Gathers, Convs that read a Concat can be grouped only if all that it joins stays in place, which costs the others some
    of their freedom. The plan is made without them as well, and the cheaper one taken; with samples, where a cost takes long to
    measure, only if the budget needs them.
    """
    if gathers != "none" or job.settings.rule is not None or "group" not in job.settings.form_names:
        return _make_plan(job, gathers, guide, least_groups, joins=True)
    failure: BudgetError | ModelError | None = None
    found: list[Planned] = []
    for joins in (False, True):
        try:
            found.append(_make_plan(job, gathers, guide, least_groups, joins=joins))
        except (BudgetError, ModelError) as error:
            failure = error
        if found and (guide is not None or JOINED not in found[0].solved.skipped.values()):
            break
    if failure is not None and not found:
        raise failure
    return min(found, key=lambda planned: planned.search.cost if planned.search is not None else 0.0)


def _make_plan(job: Job, gathers: GathersName, guide: Guide | None, least_groups: Mapping[str, int], *, joins: bool) -> Planned:
    budget = resolve_budget(job)
    with job.watch("solve"):
        solved = solve(job, gathers, guide, joins=joins)
    if least_groups and solved.table is not None:
        solved = replace(solved, table=solved.table.from_groups(least_groups))
    try:
        with job.watch("search"):
            return plan_guided(solved, budget, guide, job.original.model)
    except BudgetError as error:
        raise with_advice(error, job) from error


def solve(job: Job, gathers: GathersName, guide: Guide | None, *, joins: bool = True) -> Solved:
    """Return the model solved: for the groups of a rule, or for all that a search may choose.

    `joins` says whether Convs that read a Concat take part where no Gather is allowed.
    """
    if guide is None or job.settings.form_names == ("group",):
        return _solve_groups(job, gathers, joins=joins)
    return with_forms(job, some_grouped(job, lambda: _solve_groups(job, gathers, joins=joins)), guide)


def some_grouped(job: Job, solved: Callable[[], Solved]) -> Solved:
    """Return the model solved for groups if they are among the forms; beside others it is no error that no Conv can be grouped."""
    if "group" not in job.settings.form_names:
        return nothing_grouped(job)
    try:
        return solved()
    except ModelError as error:
        job.listener.detail(f"without groups: {error}")
        return nothing_grouped(job)


def with_forms(job: Job, solved: Solved, guide: Guide) -> Solved:
    """Return the model with its widths and dropped branches measured, beside the groups that are solved."""
    rows = () if solved.table is None else solved.table.rows
    # Layers that share a weight can only be grouped alike, which a menu does not know: they stay.
    offered = {row.names[0]: tuple(option.groups for option in row.options) for row in rows if len(row.names) == 1}
    return replace(solved, forms=find_forms(job, guide, offered, solved.groupings))


def nothing_grouped(job: Job) -> Solved:
    """Return a model of which no layer is to be grouped."""
    original, network = job.original, offered(job, "none")
    skipped: Reasons = {conv.name: conv.reason for conv in network.skipped}
    return Solved(network, original.sha256, original.files, job.settings, job.facts, "none", skipped, None, None, {})


def _solve_groups(job: Job, gathers: GathersName, *, joins: bool) -> Solved:
    original, settings, facts = job.original, job.settings, job.facts
    network = offered(job, gathers)
    skipped, allowed, rule = decide_candidates(job, network)
    shared: SharedSides = {}
    if gathers == "free":
        wanted: dict[str, Sequence[int]] = {name: [g] for name, g in rule.items()} if rule is not None else wanted_numbers(allowed)
        layers = [layer for layer in network.layers if layer.name in wanted]
        groupings = solve_all(original.model, layers, wanted, settings, facts, progress=job.listener.phase("solving"))
    else:
        allowed, groupings, rule, shared = _solve_shared(job, allowed, gathers, skipped, joins=joins)
    table = option_table(network, allowed, groupings, settings, facts, skipped) if rule is None else None
    made_of = network, original.sha256, original.files, settings, facts, gathers, skipped, rule, table, groupings
    return Solved(*made_of, shared=shared)


def _solve_shared(
    job: Job, allowed: Candidates, gathers: GathersName, skipped: Reasons, *, joins: bool
) -> tuple[Candidates, Groupings, dict[str, int] | None, SharedSides]:
    """Return the candidates and groupings of shared partitions; a rule then chooses among the numbers of groups that they have."""
    joint, groupings, shared = solve_jointly(job, allowed, gathers, skipped, joins=joins)
    for name in allowed.keys() - joint.keys():
        skipped.setdefault(name, "it shares channels with Convs that no common number of groups fits")
    rule = by_rule(job.original.network.layers, joint, job.settings, skipped)
    if not joint or rule == {}:
        raise nothing_to_group(job, skipped, "no Conv would be grouped", "use --gathers free, which couples no layers")
    return joint, groupings, rule, shared


def wanted_numbers(allowed: Candidates) -> dict[str, Sequence[int]]:
    """Return what a search needs solved: every candidate but the layer as it is."""
    return {name: numbers[1:] for name, numbers in allowed.items()}


def decide_candidates(job: Job, network: Network) -> tuple[Reasons, Candidates, dict[str, int] | None]:
    """Return who is skipped and why, the candidates of the others, and a rule's choice; refuse where nothing could be grouped."""
    hint = "`onnx-gconv inspect` lists every Conv, its legal numbers of groups, and why one is skipped"
    skipped: Reasons = {conv.name: conv.reason for conv in network.skipped}
    if not network.layers:
        if not skipped:
            raise ModelError("the model has no Conv.", hint=hint)
        what = f"none of the model's {len(skipped)} Convs can" if len(skipped) > 1 else "the model's only Conv cannot"
        raise nothing_to_group(job, skipped, f"{what} be grouped", hint)
    allowed = candidates(network.layers, job.settings, job.facts, skipped)
    rule = by_rule(network.layers, allowed, job.settings, skipped)
    if not allowed or rule == {}:
        raise nothing_to_group(job, skipped, "no Conv would be grouped", hint)
    return skipped, allowed, rule


def resolve_budget(job: Job) -> Budget:
    """Return the budget in absolute numbers; shares are of the whole model before."""
    count, limits, times = job.original.network.count, job.settings.limits, job.facts.times
    wholes = {"max_params": count.params, "max_macs": count.macs, "max_flops": count.flops}
    resolved: dict[str, int] = {}
    for name in limits.keys() & wholes.keys():
        whole = wholes[name]
        if whole is None:
            wishes = " ".join(f"--input-shape {name}=…" for name in dynamic_inputs(job.original.model))
            raise BudgetError(
                f"the MACs of this model are not known: {why_unknown(job.original.network)}".rstrip(".") + ".",
                hint=f"{f'give {wishes}, or ' if wishes else ''}budget parameters with --max-params",
            )
        resolved[name] = limits[name].of(whole)
    latency = limits.get("max_latency_ms")
    if latency is None:
        return Budget(**resolved)
    assert times is not None, "a budget in milliseconds comes with measured times"
    limit_ms = round(latency.value * (times.before_ms if latency.is_share else 1), 6)
    return Budget(**resolved, max_latency_ms=limit_ms, before_ms=times.float_ms)


def plan_guided(solved: Solved, budget: Budget, guide: Guide | None, model: onnx.ModelProto) -> Planned:
    """Return the plan by measured costs where the settings ask for them: of each layer grouped alone, or by trial."""
    table, cost = solved.table, solved.settings.cost_name
    if guide is not None and solved.forms is not None:
        forms = solved.forms

        def following(key: Grouped | Narrowed | Ranked) -> float:
            if isinstance(key, Narrowed):
                return forms.following.get(key.space, 0.0)
            return of_layers.get(key.layer if isinstance(key, Ranked) else key[0], 0.0)

        of_layers = guide.following(forms.offer.groups.keys() | forms.offer.ranks.keys())
        effort = solved.settings.effort if cost == "trial" else 0

        def chosen(costs: Costs) -> Planned:
            return _plan_forms(solved, forms, costs, budget, model)

        return best_discount(guide, forms.costs, following, chosen, effort=effort)
    if guide is None or table is None or cost not in ("sensitivity", "trial"):
        return plan_within(solved, budget)

    def search(costs: Costs) -> Planned:
        of_groups = {key: cost for key, cost in costs.items() if not isinstance(key, Narrowed | Ranked)}
        return plan_within(replace(solved, table=table.priced(of_groups)), budget)

    if cost == "sensitivity":
        return search(guide.costs(solved.groupings, {})[0])
    return best_by_trial(guide, solved.groupings, search, effort=solved.settings.effort)


def plan_again(planned: Planned, budget: Budget, model: onnx.ModelProto) -> Planned:
    """Return the plan of least cost within another budget, by the same costs."""
    solved, forms = planned.solved, planned.solved.forms
    return plan_within(solved, budget) if forms is None else _plan_forms(solved, forms, forms.costs[0], budget, model)


def _plan_forms(solved: Solved, forms: Forms, costs: Costs, budget: Budget, model: onnx.ModelProto) -> Planned:
    """Return the plan of least cost within the budget, over all forms; what it is asked for again has these costs only."""
    solved = replace(solved, forms=replace(forms, costs=(costs,)))
    menu = forms.priced(costs)
    if budget.latency_ns is not None:
        menu = _with_gathers(solved, menu)
    found = search_joint(menu, budget)
    spaces, dropped = forms.narrowed(menu, found)
    network, settings = solved.network, solved.settings
    plan = replace(_plan(solved, {}, {}, budget, {}), forms=settings.form_names, spaces=spaces, dropped=dropped)
    plan = replace(plan, low_rank=ranked(menu, found))
    matched = match(model, plan, shapes=network.shapes)
    layers = {layer.name: layer for layer in network.layers}
    gone = {name for branch in matched.dropped for name in branch.nodes}
    chosen = {name: groups for name, groups in grouped(menu, found).items() if name not in gone}
    planned, gathered = [], gathered_sides(menu, found)
    for name, groups in chosen.items():
        layer = layers[name]
        sides = (
            matched.inputs.get(name, np.arange(layer.in_channels)),
            matched.outputs.get(name, np.arange(layer.out_channels)),
        )
        grouping = grouping_of(layer, groups, sides, solved.groupings, model, solved.facts, settings)
        planned.append(_planned_layer(layer, grouping, gathered.get(name, ())))
    reasons = untouched(network, {*chosen, *matched.inputs, *matched.outputs, *matched.ranks, *gone}, solved.skipped)
    params, macs, latency_ns = menu.totals(found.widths, found.groups)
    after = Totals(params, None if network.count.macs is None else macs)
    skipped = tuple(SkippedConv(name, reason) for name, reason in reasons.items())
    plan = replace(plan, after=after, layers=tuple(planned), skipped=skipped)
    return _in_time(Planned(plan, found, _predict(solved, plan, latency_ns / 1e6), solved), budget)


def plan_within(solved: Solved, budget: Budget) -> Planned:
    """Return the plan of least cost within the budget."""
    found, chosen, gathered, skipped = None, solved.rule, GatheredSides(), dict(solved.skipped)
    if chosen is None:
        found, gathered = _search(solved, budget)
        chosen = _chosen(solved, found.choice, skipped)
    plan = _plan(solved, chosen, skipped, budget, gathered)
    if not budget.allows(plan.after.params, plan.after.macs):
        raise _over_budget(f"leave {plan.after.params:,} parameters and {plan.after.macs or 0:,} MACs, over the budget")
    return _in_time(Planned(plan, found, _predict_groups(solved, plan), solved), budget)


def _in_time(planned: Planned, budget: Budget) -> Planned:
    """Return the planned, unless it takes too long: what a rule chose may, and a search counts Gathers from above."""
    limit, prediction = budget.max_latency_ms, planned.prediction
    # A nanosecond is beyond what any prediction tells; sums of milliseconds are not exact.
    if limit is not None and prediction is not None and prediction.after_ms > limit + 1e-6:
        raise _over_budget(f"take {prediction.after_ms:.4g} ms, over the budget of {limit:.4g} ms")
    return planned


def _over_budget(what: str) -> BudgetError:
    return BudgetError(
        f"the chosen groups {what}.",
        hint="leave out --groups, --max-group-channels or --group-config and let the search meet the budget",
    )


def _predict_groups(solved: Solved, plan: Plan) -> Prediction | None:
    times = solved.facts.times
    if times is None:
        return None
    layers = {layer.name: layer for layer in solved.network.layers}
    changed = [(layers[planned.name], planned.groups) for planned in plan.layers]
    saved_ns = sum(layer_ns(times, layer, layer.groups) - layer_ns(times, layer, groups) for layer, groups in changed)
    return _predict(solved, plan, times.dense_ms - saved_ns / 1e6)


def _predict(solved: Solved, plan: Plan, without_gathers_ms: float) -> Prediction | None:
    """Return the prediction for a plan whose layers take so long; None without times."""
    times, gathers = solved.facts.times, solved.facts.gathers
    if times is None or gathers is None:
        return None
    moved = gathers.of_plan(plan) / 1e6 if plan.layers else 0.0
    return Prediction(times.runner, times.before_ms, without_gathers_ms + moved, moved)


def _search(solved: Solved, budget: Budget) -> tuple[SearchResult, GatheredSides]:
    """Return the options of the table's rows, and the sides of layers that have a Gather where time counts."""
    table, is_exact = solved.table, solved.settings.search == "exact"
    assert table is not None
    if budget.latency_ns is None:
        return search_exact(table, budget) if is_exact else _locally(table, budget), {}
    menu = _with_gathers(solved, table_menu(table, solved.network.layers))
    if not is_exact:
        return _locally(with_all_gathers(table, menu.orders), budget), {}
    found = search_joint(menu, budget)
    return SearchResult(list(found.groups), found.cost, found.bound), gathered_sides(menu, found)


def _locally(table: Table, budget: Budget) -> SearchResult:
    choice = search_local(table, budget)
    return SearchResult(choice, table.cost(choice), float("-inf"))


def _with_gathers(solved: Solved, menu: Menu) -> Menu:
    """Return the menu with the orders of channels, and what the Gathers between them take, where that is known."""
    gathers = solved.facts.gathers
    return menu if gathers is None else gathers.offered(menu, solved.network.layers, solved.groupings, solved.shared)


def _chosen(solved: Solved, choice: Sequence[int], skipped: Reasons) -> dict[str, int]:
    assert solved.table is not None
    existing = {layer.name: layer.groups for layer in solved.network.layers}
    chosen = {}
    for row, index in zip(solved.table.rows, choice, strict=True):
        for name in row.names:
            if row.options[index].groups > existing[name]:
                chosen[name] = row.options[index].groups
            else:
                skipped[name] = "the budget is met without it"
    return chosen


def without(plan: Plan, network: Network, names: Collection[str], reason: str) -> Plan:
    """Return the plan with these layers skipped, too."""
    kept = {layer.name: layer for layer in plan.layers if layer.name not in names}
    skipped = tuple(SkippedConv(layer.name, reason) for layer in plan.layers if layer.name in names)
    return replace(plan, layers=tuple(kept.values()), skipped=(*plan.skipped, *skipped), after=_after(network, kept))


def _plan(solved: Solved, chosen: Mapping[str, int], skipped: Reasons, budget: Budget, gathered: GatheredSides) -> Plan:
    network, settings = solved.network, solved.settings
    planned = {
        layer.name: _planned_layer(layer, solved.groupings[layer.name, chosen[layer.name]], gathered.get(layer.name, ()))
        for layer in network.layers
        if layer.name in chosen
    }
    return Plan(
        source_sha256=solved.sha256,
        criterion=settings.criterion,
        solver=settings.solver,
        search=settings.rule or settings.search,
        seed=settings.seed,
        budget=budget.as_dict(),
        gathers=solved.gathers,
        before=Totals(network.count.params, network.count.macs),
        after=_after(network, planned),
        layers=tuple(planned.values()),
        skipped=tuple(SkippedConv(name, reason) for name, reason in skipped.items() if name not in chosen),
    )


def _planned_layer(layer: Layer, grouping: Grouping, gathered: Sequence[str]) -> PlannedLayer:
    return PlannedLayer(
        name=layer.name,
        label=layer.label,
        out_channels=layer.out_channels,
        in_channels=layer.in_channels,
        groups=grouping.groups,
        kept=round(grouping.kept, 6),
        in_order=tuple(grouping.in_order.tolist()),
        out_order=tuple(grouping.out_order.tolist()),
        gathered=tuple(gathered),
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
