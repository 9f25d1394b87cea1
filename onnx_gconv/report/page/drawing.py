"""Figures as text and bytes: SVG that follows the page's colours, SVG and PNG files. The same figure, the same bytes."""

import io
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from xml.etree import ElementTree

import matplotlib
from matplotlib.figure import Figure

from onnx_gconv.report.page.palette import LIGHT, PAGE, VARIABLES, Palette

WIDE, NARROW = 800, 344  # pixels; on a screen of 400 the margins take the rest
FONT_PIXELS = 12
SVG, XLINK = "http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"


@dataclass(frozen=True)
class Style:
    """The room that a chart has, and its colours."""

    width: int  # pixels, which are points to matplotlib: a page shows the SVG at its own size
    palette: Palette

    @property
    def narrow(self) -> bool:
        return self.width < 500

    def figure(self, height: int) -> Figure:
        """Return an empty figure of this width."""
        return Figure(figsize=(self.width / 72, height / 72), layout="constrained", facecolor="none")


Draw = Callable[[Style], Figure]


def inline_svg(draw: Draw, *, width: int, salt: str) -> str:
    """Return the chart as an <svg> element for an HTML page, in the page's own colours; `salt` keeps its ids apart."""
    style = Style(width, PAGE)
    with _settings(style, salt):
        root = ElementTree.fromstring(_svg(draw(style)))
    for parent in root.iter():
        for child in list(parent):
            # Its style is for all elements, and would be for the whole page; the metadata is for nobody.
            if child.tag in (f"{{{SVG}}}metadata", f"{{{SVG}}}style"):
                parent.remove(child)
    _forget_unused_ids(root)
    for element in root.iter():
        if "style" in element.attrib:
            element.set("style", re.sub(r"#fe01\d\d", lambda found: VARIABLES[found[0]], element.attrib["style"]))
    for attribute in ("width", "height", "version"):
        root.attrib.pop(attribute, None)
    ElementTree.register_namespace("", SVG)
    ElementTree.register_namespace("xlink", XLINK)
    return re.sub(r">\s+<", "><", ElementTree.tostring(root, encoding="unicode"))


def files(draw: Draw, *, salt: str) -> dict[str, bytes]:
    """Return the chart as files of its own, by suffix, on a white ground."""
    style = Style(WIDE, LIGHT)
    with _settings(style, salt):
        figure = draw(style)
        figure.set_facecolor(LIGHT.ground)
        png = io.BytesIO()
        figure.savefig(png, format="png", dpi=144, metadata={"Software": None})
        return {".svg": _svg(figure).encode(), ".png": png.getvalue()}


@contextmanager
def _settings(style: Style, salt: str) -> Iterator[None]:
    palette = style.palette
    settings: dict[Any, Any] = {
        "svg.hashsalt": salt,
        "svg.fonttype": "none",
        "text.parse_math": False,  # a dollar sign in a file name is a dollar sign
        "font.size": FONT_PIXELS,
        "axes.titlesize": FONT_PIXELS,
        "axes.titleweight": "bold",
        "axes.titlelocation": "left",
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.edgecolor": palette.muted,
        "axes.labelcolor": palette.ink,
        "axes.titlecolor": palette.ink,
        "axes.facecolor": "none",
        "axes.axisbelow": True,
        "text.color": palette.ink,
        "xtick.color": palette.muted,
        "ytick.color": palette.muted,
        "xtick.labelcolor": palette.ink,
        "ytick.labelcolor": palette.ink,
        "grid.color": palette.line,
        "grid.linewidth": 0.8,
        "legend.frameon": False,
        "legend.fontsize": FONT_PIXELS,
        "image.interpolation": "none",
        "lines.markersize": 5,
    }
    with matplotlib.rc_context(settings), warnings.catch_warnings():
        # Names may have letters that the font of the measuring does not; the browser has its own.
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        yield


def _svg(figure: Figure) -> str:
    text = io.StringIO()
    figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    return text.getvalue()


def _forget_unused_ids(root: ElementTree.Element) -> None:
    """Drop the ids that nothing refers to: matplotlib calls the first axes of every figure alike."""
    values = [value for element in root.iter() for value in element.attrib.values()]
    used = {name for value in values for name in re.findall(r"#([^)\s\"']+)", value)}
    for element in root.iter():
        if element.get("id") not in used:
            element.attrib.pop("id", None)
