"""Tables for people, on stdout."""

from collections import Counter
from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.table import Table

from onnx_gconv.deploy.timing_file import Timing
from onnx_gconv.evaluation import Evaluation
from onnx_gconv.exploration.point import Point, before_tuning, dominated, measured
from onnx_gconv.exploration.solutions import Axis
from onnx_gconv.model.network import Network
from onnx_gconv.pipeline.quantised import Quantised
from onnx_gconv.pipeline.result import Result
from onnx_gconv.plans import Plan
from onnx_gconv.verification import Verification

UNITS = ((10**9, "G"), (10**6, "M"), (10**3, "k"))


def short(number: float | None) -> str:
    """Return the number in three or four digits: 11.7M, 507k, 12; a question mark when it is not known."""
    if number is None:
        return "?"
    for size, unit in UNITS:
        if number >= size:
            return f"{number / size:.4g}{unit}"
    return f"{number:.4g}"


def _console() -> Console:
    # Not a terminal: wide enough that nothing is cut, as `| less -S` or a file would want it.
    console = Console(markup=False, highlight=False, emoji=False)
    return console if console.is_terminal else Console(width=160, markup=False, highlight=False, emoji=False)


def print_network(network: Network) -> None:
    """Print every Conv: shape, legal G, what it costs; those skipped with the reason; totals."""
    console = _console()
    table = Table("layer", "in → out", "kernel", "legal groups", "weights", "MACs", title="Convs that can be grouped")
    for column in table.columns[4:]:
        column.justify = "right"
    for layer in network.all_layers:
        channels = f"{layer.in_channels} → {layer.out_channels}" + (f" (groups {layer.groups})" if layer.groups > 1 else "")
        legal = " ".join(map(str, layer.legal_groups[1:]))
        table.add_row(layer.label, channels, "×".join(map(str, layer.kernel)), legal, short(layer.weights), short(layer.macs))
    if network.all_layers:
        console.print(table)
    print_skipped([(conv.label, conv.reason) for conv in network.skipped])
    count = network.count
    print(
        f"{len(network.all_layers)} of {len(network.all_layers) + len(network.skipped)} Convs can be grouped. "
        f"Whole model: {short(count.params)} parameters, {short(count.macs)} MACs, {short(count.flops)} FLOPs."
    )


def print_skipped(rows: Sequence[tuple[str, str]]) -> None:
    """Print skipped Convs with the reason."""
    if rows:
        table = Table("Conv", "why", title="Skipped Convs")
        for name, reason in rows:
            table.add_row(name, reason)
        _console().print(table)


def print_plan(plan: Plan, bounds: Mapping[str, float], labels: Mapping[str, str]) -> None:
    """Print each narrowed space with the channels it keeps, each dropped branch, each grouped layer; `labels` are for people."""
    if plan.spaces:
        table = Table("space of", "channels", "kept", "share", title="Narrowed spaces")
        for column in table.columns[1:]:
            column.justify = "right"
        for space in plan.spaces:
            kept = len(space.keep)
            table.add_row(labels.get(space.name, space.name), str(space.channels), str(kept), f"{kept / space.channels:.1%}")
        _console().print(table)
    if plan.dropped:
        table = Table("last Conv", title="Dropped branches")
        for branch in plan.dropped:
            table.add_row(labels.get(branch.name, branch.name))
        _console().print(table)
    if plan.low_rank:
        table = Table("Conv", "rank", title="Low rank")
        table.columns[1].justify = "right"
        for each in plan.low_rank:
            table.add_row(labels.get(each.name, each.name), str(each.rank))
        _console().print(table)
    if plan.layers or not any(plan.changes):
        _print_groups(plan, bounds)


def _print_groups(plan: Plan, bounds: Mapping[str, float]) -> None:
    """Print each grouped layer with the share of importance it keeps, and could keep at most."""
    table = Table("layer", "in → out", "groups", "kept", *(["at most"] if bounds else []), title="Grouped layers")
    for column in table.columns[2:]:
        column.justify = "right"
    for layer in plan.layers:
        row = [layer.label, f"{len(layer.in_order)} → {len(layer.out_order)}", str(layer.groups), f"{layer.kept:.1%}"]
        table.add_row(*row, *([f"{bounds[layer.name]:.1%}"] if bounds else []))
    _console().print(table)


def print_totals(before: dict[str, int | None], after: dict[str, int | None]) -> None:
    """Print what the model costs before and after, and the share that is left."""
    table = _totals_table(before, after)
    _console().print(table)


def print_result(result: Result) -> None:
    """Print the before/after table of a compressed model: costs, Gathers if any Conv is grouped, latency, verification error."""
    table = _totals_table(result.before.as_dict(), result.after.as_dict())
    naive, written = result.rewritten.gathers
    if naive:
        table.add_row("Gathers", "0", str(written), f"of {naive} naive")
    latency, prediction, verification = result.latency, result.prediction, result.rewritten.verification
    if prediction is not None:
        table.add_row(
            f"predicted, {prediction.runner}", ms(prediction.before_ms), ms(prediction.after_ms), f"{prediction.ratio:.1%}"
        )
    if latency is not None:
        table.add_row(f"latency, {latency.runner}", ms(latency.before_ms), ms(latency.after_ms), f"{latency.ratio:.1%}")
    recovery = result.recovery
    if recovery is not None:
        table.add_row(
            "output error", f"{recovery.output_error_before:.3f} masked", f"{recovery.output_error_after:.3f}", "on fitted samples"
        )
    if result.evaluation is not None:
        for row in _accuracy_rows(result.evaluation):
            table.add_row(*row)
    if result.quantised is not None:
        for row in _quantised_rows(result.quantised, result.before.bytes):
            table.add_row(*row)
    if verification is None:
        table.add_row("verification", "", "not run", "")
    else:
        state = "passed" if verification.passed else "FAILED"
        table.add_row("verification", "", f"{verification.max_rel_error:.1e}", f"{state}, limit {verification.tolerance:.0e}")
    _console().print(table)


def _quantised_rows(quantised: Quantised, bytes_before: int) -> list[tuple[str, str, str, str]]:
    """Return what the model is in fewer bits: its size, its time, how good it is, how close to the float model."""
    name, latency, closeness = quantised.precision, quantised.latency, quantised.closeness
    size = quantised.model.ByteSize()
    rows = [(f"{name}: size", short(bytes_before) + "B", short(size) + "B", f"{size / bytes_before:.1%}")]
    if latency is not None:
        rows.append((f"{name}: latency", ms(latency.before_ms), ms(latency.after_ms), f"{latency.ratio:.1%}"))
    if quantised.evaluation is not None:
        rows += [(f"{name}: {row[0]}", *row[1:]) for row in _accuracy_rows(quantised.evaluation)]
    far = max((distance.relative_l2 for distance in closeness.outputs.values()), default=0.0)
    rows.append((f"{name}: error to float", "", f"{far:.3f}", "on calibration samples"))
    return rows


def _accuracy_rows(found: Evaluation) -> list[tuple[str, str, str, str]]:
    """Return what changed in accuracy: before, after, and the difference in points."""
    rows = []
    for name, before, after in (("top-1", found.reference_top1, found.top1), ("top-5", found.reference_top5, found.top5)):
        if before is not None and after is not None:
            rows.append((name, f"{before:.2%}", f"{after:.2%}", f"{100 * (after - before):+.2f}"))
    if found.agreement is not None:
        rows.append(("same class as before", "", f"{found.agreement:.2%}", f"of {found.samples}"))
    return rows


def _totals_table(before: dict[str, int | None], after: dict[str, int | None]) -> Table:
    titles = {"params": "parameters", "macs": "MACs", "flops": "FLOPs", "bytes": "size", "nodes": "nodes"}
    table = Table("", "before", "after", "left")
    for column in table.columns[1:]:
        column.justify = "right"
    for key, value in before.items():
        left, now = "", after[key]
        if value and now is not None:
            left = f"{now / value:.1%}"
        unit = "B" if key == "bytes" else ""
        text = [str(number) if key == "nodes" else short(number) + unit for number in (value, now)]
        table.add_row(titles[key], *text, left)
    return table


def print_exploration(points: Sequence[Point], network: Network, axis: Axis) -> None:
    """Print what each budget gives: parameters, MACs, how good it is or else its cost, and what was done to spaces and layers."""
    measure, before = measured(points), before_tuning(points)
    is_tuned = any(point.finetuned for point in points) and before is not None
    worth = ["cost"] if measure is None else [f"untuned {before.title}", measure.title] if before and is_tuned else [measure.title]
    has_widths = any(point.widths for point in points)
    has_ranks = any(point.low_rank for point in points)
    has_groups = any(point.groups for point in points) or not (has_widths or has_ranks)
    forms = ["narrowed", "dropped"] * has_widths + ["factored"] * has_ranks + ["groups: layers"] * has_groups
    table = Table("plan", "params", "left", "MACs", "left", *worth, *forms, title="Exploration")
    for column in table.columns[1:]:
        column.justify = "left" if column.header == "groups: layers" else "right"
    is_dominated = dominated(points, axis)
    for index, point in enumerate(points):
        numbers = Counter(point.groups.values())
        used = "  ".join(f"{groups}: {count}" for groups, count in sorted(numbers.items()))
        if measure is None:
            found = [f"{point.cost:.4f}" + ("" if point.gap == 0 else " (not proven)")]
        else:
            found = [before.text(index)] if before and is_tuned else []
            found.append(("dominated  " if is_dominated[index] else "") + measure.text(index))
        table.add_row(
            point.name,
            short(point.params),
            f"{point.params / network.count.params:.1%}",
            short(point.macs),
            f"{point.macs / network.count.macs:.1%}" if point.macs and network.count.macs else "",
            *found,
            *([str(len(point.narrowed)), str(len(point.dropped))] if has_widths else []),
            *([str(len(point.low_rank))] if has_ranks else []),
            *([used or "none"] if has_groups else []),
        )
    _console().print(table)


def print_timings(timings: Sequence[Timing]) -> None:
    """Print the latency of each model against the first, and where its time goes; layer counts where nothing was run."""
    first = timings[0]
    device = first.device["name"] or "no device"
    baseline = first.compared_ms
    if baseline is None:
        table = Table("model", "conv", "gather", "reformat", "other", title=f"Layers, {first.runner} (built, not run)")
    else:
        what = "GPU time" if first.gpu_compute_ms is not None else "latency"
        columns = ("model", "median", "p95", "ratio", "conv", "gather", "reformat", "other")
        table = Table(*columns, title=f"{what}, {first.runner} {first.precision}, {device}")
    for column in table.columns[1:]:
        column.justify = "right"
    for timing in timings:
        now = timing.compared_ms
        if now is None or baseline is None:
            table.add_row(timing.model.path, *map(str, timing.layer_counts().values()))
        else:
            parts = [ms(value) for value in timing.summary.values()] if timing.layers else [""] * 4
            table.add_row(timing.model.path, ms(now.median), ms(now.p95), f"{now.median / baseline.median:.1%}", *parts)
    _console().print(table)


def ms(value: float | None) -> str:
    """Return a time in milliseconds; a question mark when it is not known."""
    return "?" if value is None else f"{value:.4g} ms"


def print_verification(verification: Verification) -> None:
    """Print the worst difference of each output."""
    table = Table("output", "max difference", "of the largest value", "", title=f"{verification.samples} seeded inputs")
    for name, difference in verification.outputs.items():
        remark = difference.inconclusive or ("ok" if difference.max_rel <= verification.tolerance else "differs")
        table.add_row(name, f"{difference.max_abs:.2e}", f"{difference.max_rel:.2e}", remark)
    _console().print(table)


def print_evaluation(evaluation: Evaluation) -> None:
    """Print the accuracy, beside the reference's if there is one, and the distance of each output."""

    def text(share: float | None) -> str:
        return "" if share is None else f"{share:.2%} ({round(share * evaluation.samples)})"

    table = Table("", "model", title=f"{evaluation.samples} samples")
    rows = {"top-1": (evaluation.top1, evaluation.reference_top1), "top-5": (evaluation.top5, evaluation.reference_top5)}
    if evaluation.reference_top1 is not None:
        table.add_column("reference")
    for title, shares in rows.items():
        if shares[0] is not None:
            table.add_row(title, *map(text, shares[: len(table.columns) - 1]))
    if evaluation.agreement is not None:
        table.add_row("same class as the reference", text(evaluation.agreement))
    for column in table.columns[1:]:
        column.justify = "right"
    if table.rows:
        _console().print(table)
    if evaluation.outputs:
        distances = Table(
            "output", "max difference", "relative L2 error", title=f"distance to the reference, {evaluation.samples} samples"
        )
        for name, distance in evaluation.outputs.items():
            distances.add_row(name, f"{distance.max_abs:.3g}", f"{distance.relative_l2:.3g}")
        _console().print(distances)
