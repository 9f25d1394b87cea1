"""The page put together: one HTML file that needs nothing else, and the same pictures as files."""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from onnx_gconv.errors import ReportError
from onnx_gconv.report.page.collection import Results
from onnx_gconv.report.page.drawing import NARROW, WIDE, files, inline_svg
from onnx_gconv.report.page.html import Html, breakable, details, element, text
from onnx_gconv.report.page.other_sections import exploration_section, time_section, training_section
from onnx_gconv.report.page.run_section import Shown, overview, run_section
from onnx_gconv.report.page.section import Folded, Part, Picture, Section
from onnx_gconv.report.page.source import PlannedModel, find_source
from onnx_gconv.report.page.style import STYLE

# Nothing may be fetched, and no script may run, whatever is in a file name.
POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"


def show(results: Results, *, model: Path | None, layers: Sequence[str]) -> list[Shown]:
    """Return every run with the model it was made from; `layers` are those whose matrices are wanted."""
    known = [layer for run in results.runs if run.plan is not None for layer in run.plan.layers]
    for name in layers:
        if not any(name in (layer.name, layer.label) for layer in known):
            some = ", ".join(repr(layer.label) for layer in known[:3])
            hint = (
                f"there are {some}{' and so on' if len(known) > 3 else ''}" if known else "matrices need a plan beside the report"
            )
            raise ReportError(f"there is no grouped layer {name!r}.", hint=hint)
    named = [run.report.model for run in results.runs if run.report is not None]
    if results.exploration is not None:
        named.append(results.exploration.model)
    shown = []
    for run in results.runs:
        source: PlannedModel | str = "there is no plan."
        if run.plan is not None:
            mine = [run.report.model, *named] if run.report is not None else named
            source = find_source(run.plan, mine, results.folder, given=model)
        shown.append(Shown(run, source, tuple(layers)))
    return shown


def sections(results: Results, shown: Sequence[Shown]) -> list[Section]:
    """Return the sections of the page."""
    found = [run_section(run, f"run-{number}") for number, run in enumerate(shown, start=1)]
    if results.timings:
        found.append(time_section(results.timings))
    if results.exploration is not None:
        found.append(exploration_section(results.exploration, results))
    if results.trainings:
        found.append(training_section(results.trainings))
    return found


def page(results: Results, parts: Sequence[Section]) -> str:
    """Return the text of the HTML file. The same results give the same text."""
    title = _title(results)
    names = dict(_named(parts))
    head = [
        Html('<meta charset="utf-8">'),
        Html('<meta name="viewport" content="width=device-width, initial-scale=1">'),
        Html(f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'),
        element("title", text(title)),
        element("style", Html(STYLE)),
    ]
    links = [element("li", element("a", text(part.title), href=f"#{part.anchor}")) for part in parts]
    header = [element("h1", breakable(title))]
    if len(parts) > 1:
        header.append(element("nav", element("ul", *links), aria_label="Sections"))
    body = []
    if len(results.runs) > 1:
        body += [element("h2", text("All models")), overview(results.runs)]
    body += [element("section", *_section(part, names), aria_labelledby=part.anchor) for part in parts]
    body += [element("p", text(sentence), class_="note") for sentence in results.left_out]
    whole = element("html", element("head", *head), element("body", element("header", *header), element("main", *body)), lang="en")
    return f"<!DOCTYPE html>\n{whole}\n"


def picture_files(parts: Sequence[Section]) -> dict[str, bytes]:
    """Return every picture of the page as SVG and PNG, by file name."""
    return {f"{name}{suffix}": data for picture, name in _named(parts) for suffix, data in files(picture.draw, salt=name).items()}


def _title(results: Results) -> str:
    models = [run.report.model for run in results.runs if run.report is not None]
    models += [results.exploration.model] if results.exploration is not None else []
    models += [timing.model.path for _, timing in results.timings[:1]]
    names = dict.fromkeys(re.split(r"[/\\]", model)[-1] for model in models)
    return f"{', '.join(names)}, compressed" if 0 < len(names) <= 3 else "Compressed models"


def _named(parts: Sequence[Section]) -> Iterator[tuple[Picture, str]]:
    """Yield every picture with a name that no other has, and that any file system takes."""
    taken: set[str] = set()
    for section in parts:
        for picture in section.pictures():
            plain = re.sub(r"[^A-Za-z0-9._-]+", "-", picture.name).strip("-.")[:100]
            name = next(n for n in (plain, *(f"{plain}-{i}" for i in range(2, len(taken) + 3))) if n.lower() not in taken)
            taken.add(name.lower())
            yield picture, name


def _section(section: Section, names: dict[Picture, str]) -> Iterator[Html]:
    yield element("h2", breakable(section.title), id=section.anchor)
    for part in section.parts:
        yield _part(part, names)


def _part(part: Part, names: dict[Picture, str]) -> Html:
    if isinstance(part, Picture):
        return _figure(part, names[part])
    if isinstance(part, Folded):
        return details(part.title, _figure(part.picture, names[part.picture]), is_open=part.is_open)
    return part


def _figure(picture: Picture, name: str) -> Html:
    """Return the picture drawn for wide and for narrow screens; one of the two is shown."""
    drawn = [
        element("div", Html(inline_svg(picture.draw, width=width, salt=f"{name}-{kind}")), class_=kind)
        for kind, width in (("wide", WIDE), ("narrow", NARROW))
    ]
    chart = element("div", *drawn, class_="chart", role="img", aria_label=picture.shows)
    return element("figure", chart, element("figcaption", text(picture.caption)))
