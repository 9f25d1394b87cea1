"""The sections beside the compressed models: time, an exploration, fine-tuning."""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import get_args

from onnx_gconv.deploy.timing_file import Kind, Timing
from onnx_gconv.report.page.charts import (
    Mark,
    ModelTime,
    accuracy_by_budget,
    groups_by_budget,
    pareto,
    time_by_kind,
    training_curves,
)
from onnx_gconv.report.page.collection import Results, Run
from onnx_gconv.report.page.exploration_file import STAGES, Explored
from onnx_gconv.report.page.form_charts import forms_by_budget, widths_by_budget
from onnx_gconv.report.page.html import Html, details, element, paragraph, table, text
from onnx_gconv.report.page.metrics_file import Epoch
from onnx_gconv.report.page.run_section import share_left
from onnx_gconv.report.page.section import Folded, Part, Picture, Section
from onnx_gconv.report.tables import ms, short

OPEN_TRAININGS = 2
SLOWEST = 12  # layers of a measured model that are listed
KINDS: tuple[Kind, ...] = get_args(Kind)


def time_section(timings: Sequence[tuple[str, Timing]]) -> Section:
    """Return where the milliseconds went, the models of each device together."""
    parts: list[Part] = []
    names = telling_names([timing.model.path for _, timing in timings])
    ordered = sorted(enumerate(timings), key=lambda item: (_bench(item[1][1]), item[0]))
    for number, (bench, group) in enumerate(groupby(ordered, key=lambda item: _bench(item[1][1])), start=1):
        parts += _bench_parts(bench, [timing for _, (_, timing) in group], names, number)
    return Section("time", "Time", tuple(parts))


def exploration_section(exploration: Explored, results: Results) -> Section:
    """Return what each budget costs, and what was made of it."""
    marks = _marks(exploration, results)
    title, accuracies = _accuracies(exploration)
    # The file does not say by which costs a point was found; only with data can they differ from point to point.
    mixed = "Costs found by trial are of several kinds, and then points do not compare by them. " if accuracies else ""
    parts: list[Part] = [
        paragraph(
            f"{len(exploration.points)} budgets of {exploration.model}, from the model as it is to the smallest it can become."
        ),
        element("h3", text("Cost of each budget")),
        Picture(
            "exploration-cost",
            partial(pareto, exploration, marks),
            f"Pruning cost of {len(exploration.points)} budgets against the {_by(exploration)} that are left.",
            "No choice costs less within its budget where the search has proven it. " + mixed + _marks_caption(marks),
        ),
    ]
    if accuracies:
        parts += [
            element("h3", text("Accuracy of each budget")),
            Picture(
                "exploration-accuracy",
                partial(accuracy_by_budget, exploration, accuracies, marks if title == "top-1" else (), title),
                f"{title} of the budgets against the {_by(exploration)} that are left.",
                f"{title} of each point that was evaluated.",
            ),
        ]
    parts += _form_parts(exploration)
    parts.append(details("The points as a table", _points_table(exploration, title, accuracies, marks)))
    return Section("exploration", "Exploration", tuple(parts))


def _form_parts(exploration: Explored) -> Iterator[Part]:
    """Yield which forms each budget has chosen, and where."""
    has_widths = bool(exploration.spaces) and any(point.widths for point in exploration.points)
    if has_widths and exploration.before_macs:
        yield element("h3", text("Forms of each budget"))
        yield Picture(
            "exploration-forms",
            partial(forms_by_budget, exploration),
            "What is left of the MACs of the model at every budget, and which form took the others away.",
            "One bar for each budget: the MACs that are left, and those that are no more, by what took them.",
        )
    if has_widths:
        yield element("h3", text("Widths along the depth, for each budget"))
        yield Picture(
            "exploration-widths",
            partial(widths_by_budget, exploration),
            "Share of its channels that every space keeps at every budget: the smaller the budget the fewer.",
            "One row for each budget; the fainter the colour the fewer channels stay. × marks spaces that went with their branch.",
        )
    if exploration.layers and (any(point.groups for point in exploration.points) or not has_widths):
        yield element("h3", text("Groups along the depth, for each budget"))
        yield Picture(
            "exploration-groups",
            partial(groups_by_budget, exploration),
            "Number of groups of every Conv at every budget: the smaller the budget the more groups.",
            "One row for each budget; the stronger the colour the more groups.",
        )


def training_section(trainings: Sequence[tuple[str, tuple[Epoch, ...]]]) -> Section:
    """Return the curves of each fine-tuning; of many, as an exploration has them, only the first are shown at once."""
    parts: list[Part] = []
    for number, (name, epochs) in enumerate(trainings):
        last = epochs[-1]
        accuracy = "" if last.validation_accuracy is None else f" Validation accuracy at the end: {last.validation_accuracy:.2%}."
        picture = Picture(
            f"training-{name.removesuffix('.jsonl')}",
            partial(training_curves, epochs),
            f"Losses of {last.epoch} epochs of fine-tuning.{accuracy}",
            f"{last.epoch} epochs; epoch 0 is the start.{accuracy}",
        )
        parts += [Folded(name, picture, is_open=number < OPEN_TRAININGS), _epochs_table(name, epochs)]
    return Section("training", "Fine-tuning", tuple(parts))


def _epochs_table(name: str, epochs: Sequence[Epoch]) -> Html:
    rows = [
        (
            "start" if epoch.epoch == 0 else str(epoch.epoch),
            *(_number(value, ".4g") for value in (epoch.learning_rate, epoch.train_loss, epoch.validation_loss)),
            _number(epoch.validation_accuracy, ".2%"),
            f"{epoch.seconds:.1f}",
        )
        for epoch in epochs
    ]
    head = ("epoch", "learning rate", "training loss", "validation loss", "accuracy", "seconds")
    return details(f"The epochs of {name} as a table", table(f"Epochs, {name}", head, rows))


def telling_names(paths: Sequence[str]) -> dict[str, str]:
    """Return the file name of each path, with as many of its folders before it as tell it from the other paths."""
    tails = {path: _tails(Path(path).parts) for path in paths}
    names = {}
    for path, mine in tails.items():
        others = {tail for other, theirs in tails.items() if other != path for tail in theirs}
        names[path] = next((tail for tail in mine if tail not in others), path)
    return names


def _tails(parts: Sequence[str]) -> list[str]:
    return [str(Path(*parts[-count:])) for count in range(1, len(parts) + 1)]


def _bench(timing: Timing) -> str:
    threads = timing.device["threads"]
    more = f", {threads} thread{'s' if threads != 1 else ''}" if threads else ""
    return f"{timing.runner} {timing.precision}, {timing.device['name'] or 'no device'}{more}"


def _bench_parts(bench: str, timings: list[Timing], names: Mapping[str, str], number: int) -> Iterator[Part]:
    yield element("h3", text(bench))
    baseline = timings[0].compared_ms
    models = [
        ModelTime(names[t.model.path], {kind: t.summary[f"{kind}_ms"] or 0.0 for kind in KINDS})
        for t in timings
        if t.layers and any(t.summary.values())
    ]
    if models:
        gathers = [f"{model.name}: {model.parts_ms['gather'] / sum(model.parts_ms.values()):.1%}" for model in models]
        yield Picture(
            f"time-{number}",
            partial(time_by_kind, models),
            f"Milliseconds of {len(models)} models in Convs, Gathers, reformatting and other layers. The table has the numbers.",
            f"The layers' times are from a run of their own, with profiling. Share of the Gathers: {'; '.join(gathers)}.",
        )
    if baseline is None:
        rows = [(timing.model.path, *map(str, timing.layer_counts().values())) for timing in timings]
        yield paragraph("Built, not run: how many layers of each kind there are.")
        yield table(f"Layers, {bench}", ("model", *KINDS), rows)
    else:
        yield table(f"Time, {bench}", ("model", "median", "p95", "ratio", *KINDS), [_time_row(t, baseline.median) for t in timings])
    for timing in timings:
        slowest = sorted((layer for layer in timing.layers if layer.median_ms), key=lambda layer: -(layer.median_ms or 0.0))[
            :SLOWEST
        ]
        if slowest:
            rows = [(layer.name, layer.kind, ms(layer.median_ms), _number(layer.share, ".1%")) for layer in slowest]
            title = f"The slowest layers of {names[timing.model.path]}"
            yield details(title, table(title, ("layer", "kind", "time", "share"), rows, words=2))
    warnings = list(dict.fromkeys(warning for timing in timings for warning in timing.warnings))
    if warnings:
        yield element("ul", *(element("li", text(warning)) for warning in warnings), class_="note")


def _time_row(timing: Timing, baseline: float) -> tuple[str, ...]:
    now = timing.compared_ms
    parts = [ms(timing.summary[f"{kind}_ms"]) if timing.layers else "" for kind in KINDS]
    if now is None:
        return (timing.model.path, "not run", "", "", *parts)
    ratio = f"{now.median / baseline:.1%}" if baseline > 0 else ""
    return (timing.model.path, ms(now.median), ms(now.p95), ratio, *parts)


def _by(exploration: Explored) -> str:
    return "parameters" if exploration.by == "params" else "MACs"


def _marks(exploration: Explored, results: Results) -> list[Mark]:
    """Return the runs that were made from the model that was explored."""
    chosen, marks = results.chosen(), []
    for run in results.runs:
        left = share_left(run, exploration.by)
        if left is not None and _same_model(run, exploration):
            accuracy = run.report.accuracy.top1.after if run.report is not None and run.report.accuracy is not None else None
            marks.append(Mark(run.name, left, accuracy, chosen.get(run.name)))
    return marks


def _same_model(run: Run, exploration: Explored) -> bool:
    if run.plan is not None:
        return run.plan.source_sha256 == exploration.source_sha256
    return run.report is not None and Path(run.report.model).name == Path(exploration.model).name


def _marks_caption(marks: Sequence[Mark]) -> str:
    made = [(mark.name, mark.point) for mark in marks if mark.point is not None]
    rings = [name if name == point else f"{name} is {point}" for name, point in made]
    lines = [mark.name for mark in marks if mark.point is None]
    text_ = f"Chosen, with a ring: {', '.join(rings)}. " if rings else ""
    return text_ + (
        f"Vertical lines: models beside the exploration that are none of its points ({', '.join(lines)})." if lines else ""
    )


def _accuracies(exploration: Explored) -> tuple[str, dict[str, dict[str, float]]]:
    """Return top-1 by stage and point, or else agreement, if every evaluated point has it."""
    evaluated = [point for point in exploration.points if point.top1 or point.agreement]
    for title, figure in (("top-1", "top1"), ("same class as the dense model", "agreement")):
        values = {point.name: getattr(point, figure) for point in evaluated}
        if evaluated and all(values.values()):
            stages = {stage: {name: found[stage] for name, found in values.items() if stage in found} for _, stage in STAGES}
            return title, {stage: found for stage, found in stages.items() if found}
    return "", {}


def _points_table(exploration: Explored, title: str, accuracies: dict[str, dict[str, float]], marks: Sequence[Mark]) -> Html:
    made = {mark.point: mark.name for mark in marks}
    has_widths = bool(exploration.spaces) and any(point.widths for point in exploration.points)
    has_ranks = any(point.low_rank for point in exploration.points)
    forms = (*["narrowed", "dropped"] * has_widths, *["factored"] * has_ranks, "grouped")
    rows = [
        (
            point.name,
            short(point.params),
            short(point.macs),
            _number(exploration.left(point), ".1%"),
            f"{point.cost:.4f}" + ("" if point.proven else " (not proven)"),
            *([str(sum(map(bool, point.widths.values()))), str(len(point.dropped))] if has_widths else []),
            *([str(len(point.low_rank))] if has_ranks else []),
            str(len(point.groups)),
            *(_number(found.get(point.name), ".2%") for found in accuracies.values()),
            made.get(point.name, ""),
        )
        for point in exploration.points
    ]
    stages = [f"{title}, {stage}" for stage in accuracies]
    head = ("point", "parameters", "MACs", f"{_by(exploration)} left", "cost", *forms, *stages, "chosen")
    return table("Points of the exploration", head, rows)


def _number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)
