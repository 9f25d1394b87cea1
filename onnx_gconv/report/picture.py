"""The picture of an exploration: what each budget costs, and the groups of every layer (the paper's supplement, Figure 5)."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from onnx_gconv.exploration.point import Point, before_tuning, dominated, measured
from onnx_gconv.exploration.solutions import Axis
from onnx_gconv.model.network import Network

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def draw_exploration(points: Sequence[Point], network: Network, axis: Axis, stem: Path) -> list[Path]:
    """Write `<stem>.svg` and `<stem>.png` and return their paths. Needs matplotlib."""
    import matplotlib

    # Fixed ids: the same exploration gives the same bytes.
    with matplotlib.rc_context({"svg.hashsalt": "onnx-gconv", "svg.fonttype": "none", "font.size": 9}):
        figure = _figure(points, network, axis)
        paths = [stem.with_suffix(suffix) for suffix in (".svg", ".png")]
        figure.savefig(paths[0], metadata={"Date": None})
        figure.savefig(paths[1], dpi=150, metadata={"Software": None})
    return paths


def _figure(points: Sequence[Point], network: Network, axis: Axis) -> "Figure":
    from matplotlib.colors import LogNorm
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 7.5), layout="constrained")
    curve, grid = figure.subplots(2, 1, height_ratios=(2, 3))
    macs = [_percent(point.macs, network.count.macs) for point in points]
    _draw_curve(curve, points, macs, network, axis)
    groups = np.array([[point.groups.get(layer.name, layer.groups) for layer in network.layers] for point in points])
    picture = grid.pcolormesh(groups, norm=LogNorm(1, max(2, int(groups.max()))), cmap="viridis")
    grid.set(xlabel="layer, from input to output", ylabel="MACs left, %")
    grid.set_yticks(np.arange(len(points)) + 0.5, [f"{value:.0f}" for value in macs])
    grid.invert_yaxis()
    figure.colorbar(picture, ax=grid, label="groups")
    return figure


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
