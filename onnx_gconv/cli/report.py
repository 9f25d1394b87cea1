"""`report`: the results of other commands as one HTML page."""

import argparse
from pathlib import Path

from onnx_gconv.cli import options
from onnx_gconv.cli.story import Story
from onnx_gconv.errors import DependencyError, UsageError
from onnx_gconv.files import make_folder
from onnx_gconv.staging import staged

PAGES = (".html", ".htm")
TEACH = """\
Make one HTML page from what the other commands have written: sizes before and after, which forms the search chose along the
depth, channels kept, groups and kept share of each layer, importance matrices before and after the permutation, MACs and
milliseconds, Gathers and why they remain, the curves of an exploration and of fine-tuning. The page is a single file and needs no
network.

  onnx-gconv report model.gconv.report.json -o page.html     that model, with the files of the same name beside it
  onnx-gconv report results/ -o page.html                    everything in the folder
  onnx-gconv report sweep/ --point 5 -o page.html            an exploration, and one of its points layer by layer
  onnx-gconv report results/ -o page.html --figures figures  the charts as SVG and PNG, too

In a folder it looks for *.report.json, *.plan.json, timing.json, *.timing.json, *.metrics.jsonl and explore.json. The matrices
are those of the original model, which is looked for where it was and beside the report.
"""


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("results", type=Path, metavar="DIR|REPORT", help="a folder of results, or one report.json")
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="PAGE", help="the HTML file to write")
    parser.add_argument("--figures", type=Path, metavar="DIR", help="also write every chart as SVG and PNG into this folder")
    parser.add_argument("--model", type=Path, metavar="MODEL", help="the ONNX file that was planned, if it has moved")
    parser.add_argument(
        "--layer",
        action="append",
        default=[],
        metavar="NAME",
        help="show the importance matrix of this layer (default: the three that save the most MACs)",
    )
    parser.add_argument(
        "--point", type=options.natural, metavar="N", help="show point N of the exploration layer by layer, and mark it"
    )


def run(args: argparse.Namespace) -> int:
    options.check_outputs(args, args.output)
    if args.output.exists() and args.output.suffix not in PAGES:
        raise UsageError(f"the page would overwrite the file {args.output}, which is not an HTML page")
    _require_matplotlib()
    from onnx_gconv.report.page.collection import collect
    from onnx_gconv.report.page.page import page, picture_files, sections, show

    story = Story(args)
    results = collect(args.results, point=args.point)
    shown = show(results, model=args.model, layers=args.layer)
    for one in shown:
        if isinstance(one.source, str):
            story.warn(f"{one.run.name}: no importance matrices: {one.source}")
        elif one.source.remark:
            story.warn(f"{one.run.name}: '{one.source.path}': {one.source.remark}")
    parts = sections(results, shown)
    text = page(results, parts)
    figures = picture_files(parts) if args.figures is not None else {}
    with staged(args.output.parent) as staging:  # what cannot be written is met before anything is in its place
        (staging / args.output.name).write_text(text, encoding="utf-8")
        if args.figures is not None:
            _write_figures(args.figures, figures)
    drawn = len(figures) // 2
    story.tell(f"wrote {args.output}" + (f", and {drawn} charts as SVG and PNG into {args.figures}" if drawn else ""))
    return 0


def _write_figures(folder: Path, figures: dict[str, bytes]) -> None:
    make_folder(folder)
    with staged(folder) as staging:
        for name, data in figures.items():
            (staging / name).write_bytes(data)


def _require_matplotlib() -> None:
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise DependencyError(
            "the charts need matplotlib, which is not installed.", hint="pip install 'onnx-gconv[plot]'"
        ) from error
