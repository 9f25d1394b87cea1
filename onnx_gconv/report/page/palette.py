"""Colours: of the page in light and dark, of figures in files, and of figures inside the page, which follow it."""

from dataclasses import dataclass, fields


@dataclass(frozen=True)
class Palette:
    """Colours by what they are for."""

    ground: str
    ink: str
    muted: str  # text of less weight, axes
    line: str  # rules, grids
    before: str  # how it was
    after: str  # how it is now
    third: str
    fourth: str
    fifth: str


LIGHT = Palette("#ffffff", "#1c2128", "#57606a", "#d5dae0", "#8896a6", "#0b63c5", "#b4540a", "#0a7d4f", "#7a3fb0")
DARK = Palette("#14181d", "#e4e8ec", "#9ba6b2", "#343c45", "#6b7886", "#6cb2ff", "#f0a35e", "#56c996", "#c39bea")
# Figures inside the page are drawn in colours that nothing else has, and each is then replaced by a CSS variable.
PAGE = Palette(*(f"#fe01{number:02x}" for number in range(1, 1 + len(fields(Palette)))))
VARIABLES = {getattr(PAGE, field.name): f"var(--{field.name})" for field in fields(Palette)}

# Matrices are pictures in one of two colours, more or less opaque, so that they go with any ground.
KEPT_RGB = (0x2F / 255, 0x81 / 255, 0xE0 / 255)
DROPPED_RGB = (0x80 / 255, 0x88 / 255, 0x92 / 255)


def css_variables(palette: Palette) -> str:
    """Return the palette as CSS declarations."""
    return " ".join(f"--{field.name}: {getattr(palette, field.name)};" for field in fields(palette))
