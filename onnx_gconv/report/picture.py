"""The picture of an exploration: what each budget costs, and the groups of every layer (the paper's supplement, Figure 5)."""

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from onnx_gconv.model.network import Network
from onnx_gconv.planning.exploration import Point

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def draw_exploration(points: list[Point], network: Network, stem: Path) -> list[Path]:
    """Write `<stem>.svg` and `<stem>.png` and return their paths. Needs matplotlib."""
    import matplotlib

    # Fixed ids: the same exploration gives the same bytes.
    with matplotlib.rc_context({"svg.hashsalt": "onnx-gconv", "svg.fonttype": "none", "font.size": 9}):
        figure = _figure(points, network)
        paths = [stem.with_suffix(suffix) for suffix in (".svg", ".png")]
        figure.savefig(paths[0], metadata={"Date": None})
        figure.savefig(paths[1], dpi=150, metadata={"Software": None})
    return paths


def _figure(points: list[Point], network: Network) -> "Figure":
    from matplotlib.colors import LogNorm
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 7.5), layout="constrained")
    curve, grid = figure.subplots(2, 1, height_ratios=(2, 3))
    macs = [_percent(point.plan.after.macs, network.count.macs) for point in points]
    params = [_percent(point.plan.after.params, network.count.params) for point in points]
    costs = [point.found.cost for point in points]
    curve.plot(costs, macs, "o-", label="MACs")
    curve.plot(costs, params, "s--", label="parameters")
    curve.set(xlabel="pruning cost", ylabel="left, %", ylim=(0, None))
    curve.grid(alpha=0.3)
    curve.legend()
    groups = np.array([[_groups(point).get(layer.name, layer.groups) for layer in network.layers] for point in points])
    picture = grid.pcolormesh(groups, norm=LogNorm(1, max(2, int(groups.max()))), cmap="viridis")
    grid.set(xlabel="layer, from input to output", ylabel="MACs left, %")
    grid.set_yticks(np.arange(len(points)) + 0.5, [f"{value:.0f}" for value in macs])
    grid.invert_yaxis()
    figure.colorbar(picture, ax=grid, label="groups")
    return figure


def _groups(point: Point) -> dict[str, int]:
    return {layer.name: layer.groups for layer in point.plan.layers}


def _percent(part: int | None, whole: int | None) -> float:
    return 100 * part / whole if part is not None and whole else float("nan")
