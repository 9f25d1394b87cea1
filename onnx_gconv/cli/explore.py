"""`explore`: a sweep of budgets."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from onnx_gconv.cli import options
from onnx_gconv.cli.source import open_source, read_network
from onnx_gconv.cli.story import Story

if TYPE_CHECKING:
    from onnx_gconv.model.network import Network
    from onnx_gconv.planning.exploration import Point

TEACH = """\
Find the best plan for each of several budgets, from the model as it is down to the smallest it can become. Writes into
DIR a plan for each point (point-00.plan.json …), explore.json and a picture. The layers are solved once; interrupted and
started again with the same flags, it goes on where it was.

  onnx-gconv explore model.onnx -o sweep --points 12
  onnx-gconv apply model.onnx sweep/point-05.plan.json -o grouped.onnx
"""


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = options.command(subparsers, "explore", "the best plan for each of several budgets", TEACH)
    options.add_model(parser)
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="DIR", help="the folder to write into")
    parser.add_argument("--points", type=options.positive, default=12, metavar="N", help="how many budgets (default 12)")
    parser.add_argument("--by", choices=("macs", "params"), default="macs", help="what the budgets limit (default macs)")
    options.add_method(parser, measured=False)
    options.add_json(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    request = options.request(args)
    from onnx_gconv.files import make_folder, write_text
    from onnx_gconv.model.file import sha256
    from onnx_gconv.planning.exploration import exploration_json, explore_points, prepare_resumable

    story = Story(args)
    source = open_source(args)
    network = read_network(source, story)
    digest = sha256(source.path)
    folder: Path = args.output
    make_folder(folder)
    with story.progress("solving") as progress:
        prepared = prepare_resumable(source.model, network, request, sha256=digest, folder=folder, progress=progress)
    points = []
    with story.progress("searching") as progress:
        for point in explore_points(prepared, axis=args.by, points=args.points, sha256=digest, folder=folder):
            points.append(point)
            progress(len(points), args.points, point.file)
    for stale in set(folder.glob("point-*.plan.json")) - {folder / point.file for point in points}:
        stale.unlink()  # of an earlier sweep with more points
    text = exploration_json(str(source.path), args.by, points, network, digest)
    write_text(folder / "explore.json", text)
    pictures = _draw(points, network, folder, story)
    if args.json:
        print(text, end="")
    else:
        from onnx_gconv.report.tables import print_exploration

        print_exploration(points, network)
    story.tell(f"wrote {len(points)} plans, explore.json{''.join(f', {path.name}' for path in pictures)} into {folder}")
    return 0


def _draw(points: "list[Point]", network: "Network", folder: Path, story: Story) -> list[Path]:
    from onnx_gconv.files import staged

    try:
        import matplotlib  # noqa: F401
    except ImportError:
        story.warn("no picture: matplotlib is not installed; pip install 'onnx-gconv[plot]'")
        return []
    from onnx_gconv.report.picture import draw_exploration

    with staged(folder) as staging:
        return [folder / path.name for path in draw_exploration(points, network, staging / "explore")]
