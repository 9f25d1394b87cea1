"""Charts of the forms: what became of each Conv and channel space, in one model and from budget to budget."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator, PercentFormatter

from onnx_gconv.report.page.charts import DepthLayer, along_depth, budget_name, legend, row_names
from onnx_gconv.report.page.drawing import Style
from onnx_gconv.report.page.exploration_file import Explored
from onnx_gconv.report.page.palette import KEPT_RGB
from onnx_gconv.report.wording import SAVED_BY


@dataclass(frozen=True)
class DepthSpace:
    """One narrowed channel space on its place among them, counted from 1."""

    place: int
    label: str
    channels: int
    kept: int


def forms_along_depth(layers: Sequence[DepthLayer], style: Style) -> Figure:
    """What is left of the MACs of each Conv, and which form took the others away; what is gone altogether is crossed out."""
    figure, axes = along_depth([layer.place for layer in layers], style)
    places = np.array([layer.place for layer in layers])
    shares = {form: np.array([_share(layer, form) for layer in layers]) for form in SAVED_BY}
    bottom = 1 - sum(shares.values(), np.zeros(len(layers)))
    axes.bar(places, bottom, color=style.palette.after, width=0.8, label="left")
    for form, colour in _colours(style).items():
        if shares[form].any():
            axes.bar(places, shares[form], bottom=bottom, color=colour, width=0.8, label=SAVED_BY[form])
            bottom = bottom + shares[form]
    gone = places[shares["drop"] > 0]
    if len(gone):
        axes.plot(gone, np.full(len(gone), 0.5), "x", color=style.palette.ground, markersize=5, markeredgewidth=1.5)
    axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    axes.set(ylabel="MACs of the Conv", ylim=(0, 1))
    legend(figure, axes, style)
    return figure


def widths_along_depth(spaces: Sequence[DepthSpace], style: Style) -> Figure:
    """The channels of each narrowed space, before and after."""
    figure, axes = along_depth([space.place for space in spaces], style)
    axes.set(xlabel="narrowed channel space, from input to output", ylabel="channels")
    places = [space.place for space in spaces]
    axes.bar(places, [space.channels for space in spaces], color=style.palette.before, width=0.75, label="before")
    axes.bar(places, [space.kept for space in spaces], color=style.palette.after, width=0.75, label="after")
    legend(figure, axes, style)
    return figure


def forms_by_budget(exploration: Explored, style: Style) -> Figure:
    """Where the MACs of the model went, one bar a budget."""
    figure = style.figure(90 + 24 * len(exploration.points))
    axes = figure.subplots()
    whole = exploration.before_macs or 1
    rows = np.arange(len(exploration.points)) + 0.5
    left = np.array([(point.macs or 0) / whole for point in exploration.points])
    axes.barh(rows, left, color=style.palette.after, height=0.7, label="left")
    for form, colour in _colours(style).items():
        shares = np.array([point.saved.get(form, 0) / whole for point in exploration.points])
        if shares.any():
            axes.barh(rows, shares, left=left, color=colour, height=0.7, label=SAVED_BY[form])
            left = left + shares
    axes.xaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    row_names(axes, exploration)
    axes.set(xlabel="MACs of the model", xlim=(0, 1), ylim=(len(rows), 0))
    legend(figure, axes, style)
    return figure


def widths_by_budget(exploration: Explored, style: Style) -> Figure:
    """The share of its channels that each space keeps at every budget: rows are points, columns the spaces along the depth."""
    figure = style.figure(60 + max(120, 24 * len(exploration.points)))
    axes = figure.subplots()
    kept = [[point.widths.get(s.name, s.channels) / s.channels for s in exploration.spaces] for point in exploration.points]
    shares = np.array(kept, float)
    picture = np.empty((*shares.shape, 4))
    picture[..., :3] = KEPT_RGB
    picture[..., 3] = shares
    axes.imshow(picture, extent=(0.5, shares.shape[1] + 0.5, shares.shape[0], 0), aspect="auto")
    rows, columns = np.nonzero(shares == 0)
    axes.plot(columns + 1, rows + 0.5, "x", color=style.palette.third, markersize=5, markeredgewidth=1.5)
    row_names(axes, exploration)
    axes.set(ylabel=f"{budget_name(exploration)} left", xlabel="channel space, from input to output", ylim=(len(shares), 0))
    axes.xaxis.set_major_locator(MaxNLocator(8, integer=True))
    handles = [
        Patch(facecolor=(*KEPT_RGB, share), edgecolor=style.palette.line, label=f"{share:.0%}") for share in (1.0, 0.75, 0.5, 0.25)
    ]
    figure.legend(handles=handles, loc="outside upper left", ncols=len(handles), title="channels kept", alignment="left")
    return figure


def _share(layer: DepthLayer, form: str) -> float:
    return layer.saved.get(form, 0) / layer.macs_before if layer.macs_before else 0.0


def _colours(style: Style) -> Mapping[str, str]:
    return {
        "width": style.palette.third,
        "drop": style.palette.before,
        "group": style.palette.fourth,
        "lowrank": style.palette.fifth,
    }
