"""The parts that a page is made of."""

from collections.abc import Iterator
from dataclasses import dataclass

from onnx_gconv.report.page.drawing import Draw
from onnx_gconv.report.page.html import Html


@dataclass(frozen=True)
class Picture:
    """A chart, what it is called as a file, what it shows in words, and what to know when looking at it."""

    name: str
    draw: Draw
    shows: str
    caption: str


@dataclass(frozen=True)
class Folded:
    """A picture behind its title, shown at once or when asked for."""

    title: str
    picture: Picture
    is_open: bool


Part = Html | Picture | Folded


@dataclass(frozen=True)
class Section:
    """A titled part of the page."""

    anchor: str
    title: str
    parts: tuple[Part, ...]

    def pictures(self) -> Iterator[Picture]:
        """Yield every picture of the section."""
        for part in self.parts:
            if isinstance(part, Picture):
                yield part
            elif isinstance(part, Folded):
                yield part.picture
