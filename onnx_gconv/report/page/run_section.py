"""One compressed model on the page: what it cost and costs, layer by layer, and which channels went together."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from onnx_gconv.plans import Plan, PlannedLayer
from onnx_gconv.report.page.charts import (
    FULL_COLOUR_QUANTILE,
    DepthLayer,
    groups_along_depth,
    image_step,
    importance_matrix,
    kept_along_depth,
    macs_along_depth,
)
from onnx_gconv.report.page.collection import Run
from onnx_gconv.report.page.form_parts import SHORT_LIST, form_parts, told
from onnx_gconv.report.page.html import Html, code, details, element, paragraph, table, text
from onnx_gconv.report.page.report_file import COSTS, Change, Report
from onnx_gconv.report.page.section import Folded, Part, Picture, Section
from onnx_gconv.report.page.source import PlannedModel
from onnx_gconv.report.tables import ms, short
from onnx_gconv.solve.importance import Matrix

TITLES = {"params": "parameters", "macs": "MACs", "flops": "FLOPs", "bytes": "size", "nodes": "nodes"}
BUDGETS = {"max_params": "parameters", "max_macs": "MACs", "max_flops": "FLOPs", "max_latency_ms": "ms"}
MATRICES = 3  # that are shown unless the user names layers


@dataclass(frozen=True)
class Shown:
    """A run with what could be found of the model it was made from; a sentence where that is missing."""

    run: Run
    source: PlannedModel | str
    layers: tuple[str, ...]  # names or labels of those whose matrices are wanted; () for the most interesting ones


def run_section(shown: Shown, anchor: str) -> Section:
    """Return the section of one compressed model."""
    run, name = shown.run, shown.run.name
    depth = _depth(shown)
    parts: list[Part] = [*_summary(run)]
    if run.report is not None:
        rows = _before_and_after(run.report)
        parts += [_heading("Before and after"), table(f"Before and after, {name}", ("", "before", "after", "left"), rows)]
    elif run.plan is not None:
        parts += [
            _heading("Before and after"),
            table(f"Before and after, {name}", ("", "before", "after", "left"), _planned(run.plan)),
        ]
    whole = isinstance(shown.source, PlannedModel)
    parts += form_parts(run, depth, whole=whole)
    parts += _layer_parts(name, depth, run, whole=whole)
    if run.groups() or not (run.widths() or run.dropped() or run.ranks()):
        parts += [_heading("Which channels go together"), *_matrix_parts(shown)]
        if run.report is not None:
            parts += [_heading("Gathers left, and why"), *_gather_parts(run.report, name)]
    skipped = run.plan.skipped if run.plan is not None else run.report.skipped if run.report is not None else ()
    if skipped:
        reasons = table(f"Skipped Convs, {name}", ("Conv", "why"), [(conv.name, conv.reason) for conv in skipped], words=2)
        parts += [_heading("Skipped Convs"), _folded(f"{len(skipped)} Convs with the reason", reasons, len(skipped))]
    return Section(anchor, name, tuple(parts))


def overview(runs: Sequence[Run]) -> Html:
    """Return a table with a row for each run."""
    rows = []
    for run in runs:
        report, plan = run.report, run.plan
        before, after = _totals(run)
        accuracy = report.accuracy.top1.after if report is not None and report.accuracy is not None else None
        times = list(report.latency.values()) if report is not None else []
        rows.append(
            (
                run.name,
                str(len(run.widths()) or ""),
                str(len(run.dropped()) or ""),
                str(len(run.ranks()) or ""),
                str(len(run.groups())),
                _left(Change(before["params"], after["params"])),
                _left(Change(before["macs"], after["macs"])),
                "" if accuracy is None else f"{accuracy:.2%}",
                _left(times[-1]) if times else "",
                plan.gathers if plan is not None else "",
            )
        )
    head = ("model", "narrowed", "dropped", "factored", "grouped", "parameters", "MACs", "top-1", "time", "gathers")
    used = [column for column in range(len(head)) if any(row[column] for row in rows)]
    return table("All models, and what is left of each", [head[c] for c in used], [[row[c] for c in used] for row in rows])


def _totals(run: Run) -> tuple[dict[str, int | None], dict[str, int | None]]:
    if run.report is not None:
        return dict(run.report.before), dict(run.report.after)
    assert run.plan is not None, "a run has a report or a plan"
    return {**vars(run.plan.before)}, {**vars(run.plan.after)}


def share_left(run: Run, what: str) -> float | None:
    """Return the share of the parameters or MACs that is left; None where it could not be counted."""
    before, after = (total[what] for total in _totals(run))
    return after / before if before and after is not None else None


def _heading(title: str) -> Html:
    return element("h3", text(title))


def _folded(summary: str, content: Html, rows: int) -> Html:
    return details(summary, content, is_open=rows <= SHORT_LIST)


def _summary(run: Run) -> Iterator[Html]:
    report, plan = run.report, run.plan
    if report is not None:
        yield element("p", code(report.model), text(" became "), code(report.output), text(f": {told(run)}."))
    elif plan is not None:
        yield paragraph(f"A plan: {told(run)}.")
    budget = report.budget if report is not None else plan.budget if plan is not None else {}
    sentences = []
    if budget:
        limits = [f"{short(value)} {BUDGETS.get(name, name)}" for name, value in budget.items()]
        sentences.append(f"Budget: at most {' and '.join(limits)}.")
    if report is not None and report.search_cost is not None:
        proof = "proven to be the least within the budget" if report.search_gap == 0 else "not proven to be the least"
        sentences.append(f"Cost of the choice: {report.search_cost:.4g}, {proof}.")
    if plan is not None:
        groups = f", criterion {plan.criterion}, solver {plan.solver}, gathers {plan.gathers}" if "group" in plan.forms else ""
        sentences.append(f"Forms to choose from: {', '.join(plan.forms)}; search {plan.search}{groups}.")
    if report is not None and report.recovered_samples is not None:
        sentences.append(f"Weights fitted on {report.recovered_samples} unlabelled samples.")
    if sentences:
        yield element("p", text(" ".join(sentences)), class_="lead")


def _before_and_after(report: Report) -> list[tuple[str, str, str, str]]:
    rows = []
    for key in COSTS:
        change = Change(report.before[key], report.after[key])
        unit = "B" if key == "bytes" else ""
        before, after = (
            "?" if v is None else str(int(v)) if key == "nodes" else short(v) + unit for v in (change.before, change.after)
        )
        rows.append((TITLES[key], before, after, _left(change)))
    if report.gathers_naive:
        rows.append(("Gathers", "0", str(report.gathers_written), f"of {report.gathers_naive} naive"))
    rows += [(what, ms(change.before), ms(change.after), _left(change)) for what, change in report.latency.items()]
    if report.output_error is not None:
        found = (report.output_error.before, report.output_error.after)
        before, after = ("?" if value is None else f"{value:.3f}" for value in found)
        rows.append(("output error", f"{before} masked", after, "on fitted samples"))
    if report.accuracy is not None:
        for name, change in (("top-1", report.accuracy.top1), ("top-5", report.accuracy.top5)):
            if change.before is not None and change.after is not None:
                points = f"{100 * (change.after - change.before):+.2f} points"
                rows.append((name, f"{change.before:.2%}", f"{change.after:.2%}", points))
        if report.accuracy.agreement is not None:
            rows.append(("same class as before", "", f"{report.accuracy.agreement:.2%}", f"of {report.accuracy.samples} samples"))
    check = report.check
    if check is None:
        rows.append(("verification", "", "not run", ""))
    else:
        error = "?" if check.max_rel_error is None else f"{check.max_rel_error:.1e}"
        rows.append(("verification", "", error, f"{'passed' if check.passed else 'FAILED'}, limit {check.tolerance:g}"))
    return rows


def _planned(plan: Plan) -> list[tuple[str, str, str, str]]:
    changes = {"params": Change(plan.before.params, plan.after.params), "macs": Change(plan.before.macs, plan.after.macs)}
    return [(TITLES[key], short(change.before), short(change.after), _left(change)) for key, change in changes.items()]


def _left(change: Change) -> str:
    return f"{change.after / change.before:.1%}" if change.before and change.after is not None else ""


def _depth(shown: Shown) -> list[DepthLayer]:
    """Return the Convs along the depth: all that could be grouped where the model is known, else those that were changed."""
    plan, report = shown.run.plan, shown.run.report
    grouped = plan.layers if plan is not None else report.layers if report is not None else ()
    kept, now = ({layer.name: getattr(layer, field) for layer in grouped} for field in ("kept", "groups"))
    changed = {node.name: node for node in report.changed} if report is not None else {}
    if isinstance(shown.source, PlannedModel) and plan is not None:
        convs = shown.source.depth(plan, changed.keys())
    else:
        shown_nodes = changed.values() if report is not None else grouped
        convs = [(each.name, each.label, now.get(each.name, 1)) for each in shown_nodes]
    result = []
    for place, (name, label, groups) in enumerate(convs, start=1):
        found = changed.get(name)
        macs = (None, None, {}) if found is None else (found.macs_before, found.macs_after, found.saved)
        result.append(DepthLayer(place, label, groups, kept.get(name), *macs))
    return result


def _layer_parts(name: str, depth: list[DepthLayer], run: Run, *, whole: bool) -> Iterator[Part]:
    if any(layer.kept is not None for layer in depth):
        yield from _group_parts(name, depth, whole=whole)
    changed = [layer for layer in depth if layer.kept is not None or layer.saved]
    if any(layer.macs_before is not None for layer in changed):
        yield _heading("Where the MACs went")
        yield Picture(
            f"{name}-macs",
            partial(macs_along_depth, depth),
            "MACs of each changed Conv before and after. The table below has the numbers.",
            _macs_caption(changed, run),
        )
    if not changed:
        return
    forms = any(layer.saved.keys() - {"group"} for layer in changed)
    rows = [
        (
            str(layer.place),
            layer.label,
            *([", ".join(layer.saved)] if forms else []),
            str(layer.groups),
            "" if layer.kept is None else f"{layer.kept:.1%}",
            "" if layer.macs_before is None else short(layer.macs_before),
            "" if layer.macs_after is None else short(layer.macs_after),
        )
        for layer in depth
    ]
    head = ("layer", "name", *(["form"] if forms else []), "groups", "kept", "MACs before", "MACs after")
    yield details("The layers as a table", table(f"Layers, {name}", head, rows, words=3 if forms else 2))


def _group_parts(name: str, depth: list[DepthLayer], *, whole: bool) -> Iterator[Part]:
    grouped = [layer for layer in depth if layer.kept is not None]
    numbers = sorted({layer.groups for layer in grouped})
    which = (
        "Every Conv that could be grouped; one group means as it was." if whole else "The grouped Convs; the others are not shown."
    )
    yield _heading("Groups along the depth")
    yield Picture(
        f"{name}-groups",
        partial(groups_along_depth, depth if whole else grouped),
        f"{len(grouped)} Convs have {_listed(numbers)} groups. The table below has the number of each.",
        which,
    )
    yield _heading("What the groups keep")
    least = min(grouped, key=lambda layer: layer.kept or 0.0)
    yield Picture(
        f"{name}-kept",
        partial(kept_along_depth, depth if whole else grouped),
        f"Share of the importance that each grouped Conv keeps, the least {least.kept:.1%} in {least.label}.",
        "Share of the importance inside the groups, beside what groups drawn at random keep on average.",
    )


def _macs_caption(changed: list[DepthLayer], run: Run) -> str:
    before, after = (sum(v or 0 for v in values) for values in zip(*((c.macs_before, c.macs_after) for c in changed), strict=True))
    text_ = f"The changed Convs went from {short(before)} to {short(after)} MACs."
    whole = run.report.before["macs"] if run.report is not None else None
    return text_ if whole is None else f"{text_} Everything else is {short(whole - before)} MACs, as it was."


def _matrix_parts(shown: Shown) -> Iterator[Part]:
    plan, source = shown.run.plan, shown.source
    if plan is None:
        yield _note("The importance matrices are not shown: there is no plan beside the report.")
        return
    if not plan.layers:
        yield paragraph("No Conv is grouped.")
        return
    if isinstance(source, str):
        yield _note(f"The importance matrices are not shown: {source} Name the model with --model.")
        return
    if source.remark:
        yield _note(f"These are the weights of '{source.path}', but {source.remark}.")
    if plan.criterion not in ("l1", "l2"):
        yield _note(f"The plan was made by the criterion {plan.criterion}, which takes data; shown is the L2 norm.")
    first = True
    for layer in _wanted(shown, plan):
        matrix = source.importance(layer, plan.criterion)
        if matrix is None:
            yield _note(f"The layer {layer.label!r} of the model does not fit the plan.")
            continue
        title = f"{layer.label}: {len(layer.in_order)} → {len(layer.out_order)} channels, {layer.groups} groups"
        yield Folded(title, _matrix_picture(shown.run.name, matrix, layer, plan.criterion), is_open=first)
        first = False


def _matrix_picture(run: str, matrix: Matrix, layer: PlannedLayer, criterion: str) -> Picture:
    norm, step = "L1" if criterion == "l1" else "L2", image_step(matrix)
    caption = (
        f"Importance ({norm} norm) of each kernel: the stronger the colour the larger, full at the {FULL_COLOUR_QUANTILE:.0%} "
        f"quantile. Blue is kept ({layer.kept:.1%} of the importance), grey is dropped; the blocks are the groups."
    )
    return Picture(
        f"{run}-importance-{layer.label}",
        partial(importance_matrix, matrix, layer),
        f"Importance of the kernels of {layer.label} as in the model, and with its channels permuted into {layer.groups} groups, "
        f"which keep {layer.kept:.1%}.",
        caption + (f" One pixel is the mean of {step} × {step} kernels." if step > 1 else ""),
    )


def _wanted(shown: Shown, plan: Plan) -> list[PlannedLayer]:
    """Return the layers that the user named, or else those that save the most MACs, or weights where MACs are not known."""
    if shown.layers:
        return [layer for layer in plan.layers if {layer.name, layer.label} & set(shown.layers)]
    saved: dict[str, float] = {layer.name: layer.in_channels * layer.out_channels * (1 - 1 / layer.groups) for layer in plan.layers}
    if shown.run.report is not None:
        known = {layer.name: layer for layer in shown.run.report.layers}
        pairs = [(name, known[name].macs_before, known[name].macs_after) for name in saved if name in known]
        if all(before is not None and after is not None for _, before, after in pairs) and len(pairs) == len(saved):
            saved = {name: (before or 0) - (after or 0) for name, before, after in pairs}
    return sorted(plan.layers, key=lambda layer: -saved[layer.name])[:MATRICES]


def _gather_parts(report: Report, name: str) -> Iterator[Part]:
    written, naive = report.gathers_written, report.gathers_naive
    yield paragraph(
        f"{written} Gathers were written; two for each grouped Conv would have been {naive}. The others are absorbed by weights."
    )
    if report.gathers_remaining:
        rows = table(f"Gathers left, {name}", ("layer", "why"), report.gathers_remaining, words=2)
        yield _folded(f"{len(report.gathers_remaining)} Gathers with the reason", rows, len(report.gathers_remaining))


def _note(sentence: str) -> Html:
    return element("p", text(sentence), class_="note")


def _listed(numbers: Sequence[int]) -> str:
    return str(numbers[0]) if len(numbers) == 1 else f"{', '.join(map(str, numbers[:-1]))} or {numbers[-1]}"
