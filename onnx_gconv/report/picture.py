"""The picture of an exploration: what each budget costs, and what became of spaces and layers (the supplement's Figure 5)."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from onnx_gconv.exploration.exploring import Exploration
from onnx_gconv.exploration.point import Point, before_tuning, dominated, measured
from onnx_gconv.exploration.solutions import Axis
from onnx_gconv.model.network import Network
from onnx_gconv.report.wording import SAVED_BY

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = {"width": "tab:orange", "drop": "tab:gray", "group": "tab:green", "lowrank": "tab:purple"}


def draw_exploration(exploration: Exploration, stem: Path) -> list[Path]:
    """Write `<stem>.svg` and `<stem>.png` and return their paths. Needs matplotlib."""
    import matplotlib

    # Fixed ids: the same exploration gives the same bytes.
    with matplotlib.rc_context({"svg.hashsalt": "onnx-gconv", "svg.fonttype": "none", "font.size": 9}):
        figure = _figure(exploration)
        paths = [stem.with_suffix(suffix) for suffix in (".svg", ".png")]
        figure.savefig(paths[0], metadata={"Date": None})
        figure.savefig(paths[1], dpi=150, metadata={"Software": None})
    return paths


def _figure(exploration: Exploration) -> "Figure":
    from matplotlib.figure import Figure

    points, network = exploration.points, exploration.network
    macs = [_percent(point.macs, network.count.macs) for point in points]
    has_widths = any(point.widths for point in points)
    has_groups = any(point.groups for point in points) or not has_widths
    forms = [form for form in COLOURS if any(point.saved.get(form) for point in points)]
    panels = [2.0, *([1.4] if len(forms) > 1 else []), *([2.2] if has_widths else []), *([3.0] if has_groups else [])]
    figure = Figure(figsize=(9, 1.5 * sum(panels)), layout="constrained")
    curve, *rest = figure.subplots(len(panels), 1, height_ratios=panels)
    _draw_curve(curve, points, macs, network, exploration.by)
    for axes in rest:
        axes.set_yticks(np.arange(len(points)) + 0.5, [f"{value:.0f}" for value in macs])
        axes.set(ylabel="MACs left, %", ylim=(len(points), 0))
    if len(forms) > 1:
        _draw_forms(rest.pop(0), points, forms, network)
    if has_widths:
        _draw_widths(figure, rest.pop(0), exploration)
    if has_groups:
        _draw_groups(figure, rest.pop(0), points, network)
    return figure


def _draw_forms(axes: "Axes", points: Sequence[Point], forms: Sequence[str], network: Network) -> None:
    """Draw where the MACs of the model went, one bar a budget."""
    for row, point in enumerate(points):
        start = _percent(point.macs, network.count.macs)
        axes.barh(row + 0.5, start, color="tab:blue", height=0.7, label="left" if row == 0 else None)
        for form in forms:
            share = _percent(point.saved.get(form, 0), network.count.macs)
            axes.barh(row + 0.5, share, left=start, color=COLOURS[form], height=0.7, label=SAVED_BY[form] if row == 0 else None)
            start += share
    axes.set(xlabel="MACs of the model, %", xlim=(0, 100))
    axes.legend(ncols=4, loc="lower left", bbox_to_anchor=(0, 1), frameon=False)


def _draw_widths(figure: "Figure", axes: "Axes", exploration: Exploration) -> None:
    """Draw which share of its channels each space keeps; one that went with its branch is crossed out."""
    from matplotlib.colors import Normalize

    widths = [[point.widths.get(space.name, space.channels) for space in exploration.spaces] for point in exploration.points]
    shares = np.array(widths) / np.array([space.channels for space in exploration.spaces])
    picture = axes.pcolormesh(100 * shares, norm=Normalize(0, 100), cmap="viridis")
    rows, columns = np.nonzero(shares == 0)
    axes.plot(columns + 0.5, rows + 0.5, "x", color="white", markersize=4)
    axes.set(xlabel="channel space, from input to output (x: gone with its branch)")
    figure.colorbar(picture, ax=axes, label="channels kept, %")


def _draw_groups(figure: "Figure", axes: "Axes", points: Sequence[Point], network: Network) -> None:
    from matplotlib.colors import LogNorm

    groups = np.array([[point.groups.get(layer.name, layer.groups) for layer in network.all_layers] for point in points])
    picture = axes.pcolormesh(groups, norm=LogNorm(1, max(2, int(groups.max()))), cmap="viridis")
    axes.set(xlabel="layer, from input to output")
    figure.colorbar(picture, ax=axes, label="groups")


def _draw_curve(curve: "Axes", points: Sequence[Point], macs: list[float], network: Network, axis: Axis) -> None:
    """Draw what is left over the pruning cost; or, where points were measured, how good they are over what is left."""
    params = [_percent(point.params, network.count.params) for point in points]
    measure = measured(points)
    curve.grid(alpha=0.3)
    if measure is None:
        costs = [point.cost for point in points]
        curve.plot(costs, macs, "o-", label="MACs")
        curve.plot(costs, params, "s--", label="parameters")
        curve.set(xlabel="pruning cost", ylabel="left, %", ylim=(0, None))
        curve.legend()
        return
    left, scale = np.array(macs if axis == "macs" else params), 1 if measure.is_error else 100
    values, is_best = scale * np.array(measure.values), ~np.array(dominated(points, axis))
    before = before_tuning(points)
    if before is not None and any(point.finetuned for point in points):
        curve.plot(left, scale * np.array(before.values), "s--", color="tab:gray", label="not fine-tuned")
    curve.plot(left[is_best], values[is_best], "o-", label="best of its size")
    if not is_best.all():
        curve.plot(left[~is_best], values[~is_best], "x", color="tab:red", label="dominated: another is as small and as good")
    what = "MACs" if axis == "macs" else "parameters"
    curve.set(xlabel=f"{what} left, %", ylabel=measure.title + ("" if measure.is_error else ", %"))
    curve.legend()


def _percent(part: int | None, whole: int | None) -> float:
    return 100 * part / whole if part is not None and whole else float("nan")
