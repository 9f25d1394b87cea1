"""What became of the Convs and channel spaces of a compressed model, with charts and tables."""

from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial

from onnx_gconv.report.page.charts import DepthLayer
from onnx_gconv.report.page.collection import Run
from onnx_gconv.report.page.form_charts import DepthSpace, forms_along_depth, widths_along_depth
from onnx_gconv.report.page.html import Html, details, element, table, text
from onnx_gconv.report.page.section import Part, Picture
from onnx_gconv.report.tables import short
from onnx_gconv.report.wording import SAVED_BY, counted, each_with, what_was_done

SHORT_LIST = 12  # rows that are shown at once; longer tables are folded


def told(run: Run) -> str:
    """Return what was done, or what a plan would do, in words."""
    spaces, branches, layers, ranks = len(run.widths()), len(run.dropped()), len(run.groups()), len(run.ranks())
    report = run.report
    if report is None:
        verbs = ("to narrow", "to drop", "to factor", "to group")
        return each_with(verbs, spaces=spaces, branches=branches, layers=layers, ranks=ranks)
    convs = {conv.name for conv in report.skipped} | {layer.name for layer in report.layers}
    convs |= {node.name for node in report.changed if node.op == "Conv"}
    return what_was_done(spaces=spaces, branches=branches, layers=layers, ranks=ranks, convs=len(convs))


def form_parts(run: Run, depth: Sequence[DepthLayer], *, whole: bool) -> Iterator[Part]:
    """Yield which forms were chosen, where anything but groups was: along the depth, by form, and space by space."""
    if not run.widths() and not run.dropped() and not run.ranks():
        return
    saved = Counter[str]()
    for layer in depth:
        saved.update(layer.saved)
    if any(saved.values()):
        which = "Every Conv that could be grouped or was changed" if whole else "The Convs that were changed"
        gone = "; × marks those of dropped branches" if saved["drop"] else ""
        shares = [f"{SAVED_BY[form]} {short(macs)}" for form in SAVED_BY if (macs := saved[form])]
        yield element("h3", text("Forms along the depth"))
        yield Picture(
            f"{run.name}-forms",
            partial(forms_along_depth, depth),
            f"What is left of the MACs of each Conv, and what took the others: {', '.join(shares)}. A table has the numbers.",
            f"{which}{gone}. MACs that are no more, by what took them: {', '.join(shares)}.",
        )
    spaces = _spaces(run)
    if spaces:
        yield element("h3", text("Channels kept"))
        least = min(spaces, key=lambda space: space.kept / space.channels)
        yield Picture(
            f"{run.name}-widths",
            partial(widths_along_depth, spaces),
            f"Channels of {counted(len(spaces), 'narrowed space')} before and after. A table below has the numbers.",
            "A space is written and read by several Convs, which all shrink with it. The narrowest of them is that of "
            f"{least.label}, which keeps {least.kept} of {least.channels} channels.",
        )
        rows = [(str(s.place), s.label, str(s.channels), str(s.kept), f"{s.kept / s.channels:.1%}") for s in spaces]
        head = ("space", "written by", "channels", "kept", "share")
        yield details("The narrowed spaces as a table", table(f"Narrowed spaces, {run.name}", head, rows, words=2))
    yield from _dropped(run)


def _spaces(run: Run) -> list[DepthSpace]:
    if run.report is not None:
        found = [(space.label, space.channels, space.kept) for space in run.report.spaces]
    else:
        found = [(space.name, space.channels, len(space.keep)) for space in run.plan.spaces] if run.plan is not None else []
    return [DepthSpace(place, *each) for place, each in enumerate(found, start=1)]


def _dropped(run: Run) -> Iterator[Html]:
    labels = [label for _, label in run.report.dropped] if run.report is not None else list(run.dropped())
    if labels:
        yield element("h3", text("Dropped branches"))
        rows = table(f"Dropped branches, {run.name}", ("last Conv",), [(label,) for label in labels])
        summary = f"{counted(len(labels), 'branch')}, each replaced by its mean"
        yield details(summary, rows, is_open=len(labels) <= SHORT_LIST)
