"""One chart a function: values and a style in, a figure out."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import PatchCollection
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle
from matplotlib.ticker import FuncFormatter, MaxNLocator, PercentFormatter
from numpy.typing import NDArray

from onnx_gconv.plans import PlannedLayer
from onnx_gconv.report.page.drawing import Style
from onnx_gconv.report.page.exploration_file import Explored
from onnx_gconv.report.page.metrics_file import Epoch
from onnx_gconv.report.page.palette import DROPPED_RGB, KEPT_RGB
from onnx_gconv.report.tables import short
from onnx_gconv.solve.grouping import keep_mask
from onnx_gconv.solve.importance import Matrix

LARGEST_IMAGE = 256  # rows and columns: more are not seen, and would make the page heavy
FULL_COLOUR_QUANTILE = 0.99  # one kernel far above the rest would leave the others invisible


@dataclass(frozen=True)
class DepthLayer:
    """One Conv on its place along the depth of the model, counted from 1."""

    place: int
    label: str
    groups: int
    kept: float | None  # None where the Conv is as it was
    macs_before: int | None
    macs_after: int | None
    saved: Mapping[str, int] = field(default_factory=dict)  # MACs, by form


@dataclass(frozen=True)
class ModelTime:
    """Where the time of one measured model went, by kind of layer."""

    name: str
    parts_ms: Mapping[str, float]


@dataclass(frozen=True)
class Mark:
    """A compressed model beside an exploration."""

    name: str
    left: float  # share of what the budgets limit
    accuracy: float | None
    point: str | None  # the point that makes the same choice


def groups_along_depth(layers: Sequence[DepthLayer], style: Style) -> Figure:
    """G of each Conv from the input to the output (the paper's supplement, its figure of an explored configuration)."""
    figure, axes = along_depth([layer.place for layer in layers], style)
    places, groups = [layer.place for layer in layers], [layer.groups for layer in layers]
    axes.vlines(places, 1, groups, color=style.palette.before, linewidth=_stroke(layers, style))
    axes.plot(places, groups, "o", color=style.palette.after, markersize=min(5.0, 1 + _stroke(layers, style)), linestyle="none")
    axes.set_yscale("log", base=2)
    highest = max(2, *groups)
    axes.set_yticks([2**i for i in range(int(np.ceil(np.log2(highest))) + 1)])
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.minorticks_off()
    axes.set(ylabel="groups", ylim=(0.85, highest * 1.25))
    return figure


def kept_along_depth(layers: Sequence[DepthLayer], style: Style) -> Figure:
    """The kept share of each grouped Conv, and 1/G, what groups drawn at random keep on average."""
    figure, axes = along_depth([layer.place for layer in layers], style)
    grouped = [layer for layer in layers if layer.kept is not None]
    places = [layer.place for layer in grouped]
    axes.bar(places, [layer.kept or 0.0 for layer in grouped], color=style.palette.after, width=0.75, label="kept")
    at_random = [1 / layer.groups for layer in grouped]
    ends = ([place - 0.5 for place in places], [place + 0.5 for place in places])
    axes.hlines(at_random, *ends, color=style.palette.third, linewidth=2, label="groups at random (1/G)")
    axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    axes.set(ylabel="importance kept", ylim=(0, min(1.0, 1.15 * max([layer.kept or 0.0 for layer in grouped] + at_random))))
    legend(figure, axes, style)
    return figure


def macs_along_depth(layers: Sequence[DepthLayer], style: Style) -> Figure:
    """The MACs of each changed Conv, before and after."""
    figure, axes = along_depth([layer.place for layer in layers], style)
    changed = [layer for layer in layers if layer.macs_before is not None and layer.macs_after is not None]
    places = [layer.place for layer in changed]
    axes.bar(places, [layer.macs_before or 0 for layer in changed], color=style.palette.before, width=0.75, label="before")
    axes.bar(places, [layer.macs_after or 0 for layer in changed], color=style.palette.after, width=0.75, label="after")
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: short(value)))
    axes.set(ylabel="MACs")
    legend(figure, axes, style)
    return figure


def importance_matrix(matrix: Matrix, layer: PlannedLayer, style: Style) -> Figure:
    """The importance of each kernel, with channels as they are in the model, and permuted with the groups as blocks."""
    room = style.width if style.narrow else style.width // 2
    tall = min(1.4, max(0.5, matrix.shape[0] / matrix.shape[1]))
    figure = style.figure(int((room - 60) * tall + 60) * (2 if style.narrow else 1))
    panels = figure.subplots(2, 1) if style.narrow else figure.subplots(1, 2)
    kept = keep_mask(layer.groups, np.array(layer.in_order), np.array(layer.out_order), shape=(matrix.shape[0], matrix.shape[1]))
    as_planned = np.ix_(layer.out_order, layer.in_order)
    for axes, title, values, mask in (
        (panels[0], "as in the model", matrix, kept),
        (panels[1], f"permuted into {layer.groups} groups", matrix[as_planned], kept[as_planned]),
    ):
        picture = _picture(values, mask, float(np.quantile(matrix, FULL_COLOUR_QUANTILE)))
        axes.imshow(picture, extent=(0, values.shape[1], values.shape[0], 0), aspect="auto")
        axes.set(title=title, xlabel="input channel", ylabel="output channel")
        axes.spines[:].set_visible(True)
        axes.spines[:].set_color(style.palette.line)
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_locator(MaxNLocator(4, integer=True))
    _blocks(panels[1], (len(layer.out_order), len(layer.in_order)), layer.groups, style)
    panels[1].set(xticks=[], yticks=[])
    return figure


def image_step(matrix: Matrix) -> int:
    """Return how many rows and columns of the matrix make one pixel."""
    return int(-(-max(matrix.shape) // LARGEST_IMAGE))


def time_by_kind(models: Sequence[ModelTime], style: Style) -> Figure:
    """Where the time of each model went, one bar a model."""
    figure = style.figure(70 + 58 * len(models))
    axes = figure.subplots()
    colours = dict(zip(("conv", "gather", "reformat", "other"), _series(style), strict=True))
    for row, model in enumerate(models):
        start = 0.0
        for kind, value in model.parts_ms.items():
            axes.barh(row, value, left=start, height=0.5, color=colours[kind], label=kind if row == 0 else None)
            start += value
        axes.text(0, row - 0.34, _short_name(model.name, style), va="bottom")
    axes.set(xlabel="milliseconds, the layers' times added up", ylim=(len(models) - 0.5, -0.75), yticks=[])
    axes.spines["left"].set_visible(False)
    axes.grid(axis="x")
    legend(figure, axes, style)
    return figure


def pareto(exploration: Explored, marks: Sequence[Mark], style: Style) -> Figure:
    """The cost of each budget, what was made of the exploration marked."""
    figure = style.figure(280)
    axes = figure.subplots()
    points = [(left, point) for point in exploration.points if (left := exploration.left(point)) is not None]
    axes.plot([left for left, _ in points], [point.cost for _, point in points], "o-", color=style.palette.after, label="points")
    costs = {point.name: (left, point.cost) for left, point in points}
    room = 4.0 * max(1, len(marks) - 1)  # lines at the same place take turns
    for number, mark in enumerate(marks):
        colour = (style.palette.third, style.palette.fourth)[number % 2]
        if mark.point in costs:
            axes.plot(*costs[mark.point], "o", markersize=13, fillstyle="none", markeredgewidth=2, color=colour, label=mark.name)
        else:
            axes.axvline(mark.left, color=colour, linestyle=(4.0 * number, (4.0, room)), label=mark.name)
    axes.set(ylabel="pruning cost", ylim=(0, None))
    _budget_axis(axes, exploration)
    legend(figure, axes, style, names=True)
    return figure


def accuracy_by_budget(
    exploration: Explored, accuracies: Mapping[str, Mapping[str, float]], marks: Sequence[Mark], title: str, style: Style
) -> Figure:
    """The accuracy of each budget after each stage (`accuracies`: by stage, then by point), and of what was made."""
    figure = style.figure(280)
    axes = figure.subplots()
    left = {point.name: exploration.left(point) for point in exploration.points}
    for (stage, values), colour in zip(accuracies.items(), _series(style), strict=False):
        pairs = [(share, values[name]) for name, share in left.items() if share is not None and name in values]
        axes.plot(*zip(*pairs, strict=True), "o-", color=colour, label=stage)
    for mark in marks:
        if mark.accuracy is not None:
            axes.plot(mark.left, mark.accuracy, "D", color=style.palette.ink, markersize=7, fillstyle="none", label=mark.name)
    axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    axes.set(ylabel=title, ylim=(-0.02, 1.02))
    _budget_axis(axes, exploration)
    legend(figure, axes, style, names=True)
    return figure


def groups_by_budget(exploration: Explored, style: Style) -> Figure:
    """G of every Conv at every budget: rows are points, columns the layers along the depth."""
    figure = style.figure(60 + max(120, 24 * len(exploration.points)))
    axes = figure.subplots()
    groups = np.array([[point.groups.get(name, 1) for name, _ in exploration.layers] for point in exploration.points], float)
    picture = np.empty((*groups.shape, 4))
    picture[..., :3] = KEPT_RGB
    opacity = np.where(groups > 1, 0.15 + 0.85 * np.log2(groups) / max(1.0, float(np.log2(groups.max()))), 0.0)
    picture[..., 3] = opacity
    axes.imshow(picture, extent=(0.5, groups.shape[1] + 0.5, groups.shape[0], 0), aspect="auto")
    row_names(axes, exploration)
    axes.set(xlabel="layer, from input to output")
    axes.xaxis.set_major_locator(MaxNLocator(8, integer=True))
    used = {int(g): float(a) for g, a in zip(groups.ravel(), opacity.ravel(), strict=True)}
    handles = [Patch(facecolor=(*KEPT_RGB, used[g]), edgecolor=style.palette.line, label=_groups_label(g)) for g in sorted(used)]
    columns = 3 if style.narrow else 9
    figure.legend(handles=handles, loc="outside upper left", ncols=min(columns, len(handles)), title="groups", alignment="left")
    return figure


def row_names(axes: Axes, exploration: Explored) -> None:
    """Name the rows of a chart, one for each point, by what is left at it."""
    left = [exploration.left(point) for point in exploration.points]
    axes.set_yticks(np.arange(len(left)) + 0.5, ["?" if share is None else f"{share:.0%}" for share in left])
    axes.set(ylabel=f"{budget_name(exploration)} left")


def _groups_label(groups: int) -> str:
    return "as it was" if groups == 1 else str(groups)


def training_curves(epochs: Sequence[Epoch], style: Style) -> Figure:
    """The losses of each epoch, and the accuracy where there is one."""
    accuracies = [(e.epoch, e.validation_accuracy) for e in epochs if e.validation_accuracy is not None]
    number = 2 if accuracies else 1
    figure = style.figure(230 * number if style.narrow else 260)
    panels = figure.subplots(number, 1, squeeze=False) if style.narrow else figure.subplots(1, number, squeeze=False)
    losses, *rest = panels.ravel()
    for title, colour, marker, pairs in (
        ("training", style.palette.before, "s", [(e.epoch, e.train_loss) for e in epochs if e.train_loss is not None]),
        ("validation", style.palette.after, "o", [(e.epoch, e.validation_loss) for e in epochs if e.validation_loss is not None]),
    ):
        if pairs:
            losses.plot(*zip(*pairs, strict=True), f"{marker}-", color=colour, label=title)
    losses.set(title="loss", xlabel="epoch")
    losses.legend()
    for axes in rest:
        axes.plot(*zip(*accuracies, strict=True), "o-", color=style.palette.after)
        axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=None))
        axes.set(title="validation accuracy", xlabel="epoch")
    for axes in panels.ravel():
        axes.grid(axis="y")
        axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    return figure


def along_depth(places: Sequence[int], style: Style) -> tuple[Figure, Axes]:
    """Return an empty chart with a place for each layer."""
    figure = style.figure(230)
    axes = figure.subplots()
    axes.set(xlabel="layer, from input to output", xlim=(0.3, max(places) + 0.7))
    axes.xaxis.set_major_locator(MaxNLocator(10 if not style.narrow else 6, integer=True, min_n_ticks=1))
    axes.grid(axis="y")
    return figure, axes


def _stroke(layers: Sequence[DepthLayer], style: Style) -> float:
    """Return how thick a line each layer can have without touching the next one's."""
    return min(4.0, max(0.8, 0.5 * style.width / max(layer.place for layer in layers)))


def _series(style: Style) -> tuple[str, str, str, str]:
    return style.palette.after, style.palette.third, style.palette.fourth, style.palette.before


def legend(figure: Figure, axes: Axes, style: Style, *, names: bool = False) -> None:
    """Put the legend above the chart, where it covers nothing; `names` may be long."""
    handles, labels = axes.get_legend_handles_labels()
    if len(axes.containers) == 1:  # matplotlib has bars behind lines
        handles, labels = handles[::-1], labels[::-1]
    columns = 1 if names and style.narrow else 2 if names or style.narrow else 4
    labels = [_short_name(label, style) for label in labels]
    figure.legend(handles, labels, loc="outside upper left", ncols=min(columns, max(1, len(handles))))


def budget_name(exploration: Explored) -> str:
    """Return what the budgets limit."""
    return "parameters" if exploration.by == "params" else "MACs"


def _budget_axis(axes: Axes, exploration: Explored) -> None:
    axes.xaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    axes.set(xlabel=f"{budget_name(exploration)} left", xlim=(1.04, -0.02))
    axes.grid()


def _short_name(name: str, style: Style) -> str:
    room = 36 if style.narrow else 60
    return name if len(name) <= room else f"…{name[1 - room :]}"


def _picture(values: Matrix, mask: NDArray[np.bool_], full: float) -> NDArray[np.float64]:
    """Return an RGBA picture of the matrix: the more important the more opaque, what is kept in its own colour."""
    step = image_step(values)
    strength = _pooled(np.clip(values / full if full > 0 else values, 0, 1), step)
    share = _pooled(mask.astype(np.float64), step)[..., None]
    picture = np.empty((*strength.shape, 4))
    picture[..., :3] = share * KEPT_RGB + (1 - share) * DROPPED_RGB
    picture[..., 3] = strength
    return picture


def _pooled(values: Matrix, step: int) -> Matrix:
    """Return the mean of each step by step square; those at the end may be smaller."""
    rows, columns = (np.arange(0, size, step) for size in values.shape)
    sums = np.add.reduceat(np.add.reduceat(values, rows, axis=0), columns, axis=1)
    sizes = np.outer(np.diff([*rows, values.shape[0]]), np.diff([*columns, values.shape[1]]))
    return np.asarray(sums / sizes)


def _blocks(axes: Axes, shape: tuple[int, ...], groups: int, style: Style) -> None:
    height, width = shape[0] / groups, shape[1] / groups
    blocks = [Rectangle((g * width, g * height), width, height) for g in range(groups)]
    axes.add_collection(
        PatchCollection(blocks, facecolor="none", edgecolor=style.palette.third, linewidth=1.5 if groups <= 16 else 0.8)
    )
