"""`explore`: many budgets."""

import argparse
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from onnx_gconv.cli import finetune, options
from onnx_gconv.cli.exploring import Exploring, require_engine
from onnx_gconv.cli.recovering import open_calibration, with_measured
from onnx_gconv.cli.source import open_source, read_network
from onnx_gconv.cli.stopping import STOPS
from onnx_gconv.cli.story import Story

if TYPE_CHECKING:
    from onnx_gconv.exploration.point import Point
    from onnx_gconv.model.network import Network

TEACH = """\
Find the best plan for each of several budgets, from the model as it is down to the smallest it can become. Writes into
DIR a plan for each point (point-00.plan.json …), explore.json and a picture. The layers are solved once; interrupted and
started again with the same flags, it goes on where it was.

  onnx-gconv explore model.onnx -o sweep --points 12
  onnx-gconv apply model.onnx sweep/point-05.plan.json -o grouped.onnx

With --calib, --eval or --finetune each point becomes a model, point-05.onnx, recovered, grouped and verified as `compress`
does it; then the table and the picture show accuracy, and which points another one beats. Points are independent jobs: they
run in --jobs processes here, or on a Ray cluster. A process that dies is replaced, and finished points are not done again.

  onnx-gconv explore model.onnx -o sweep --points 8 --calib images.npz --eval test.npz
  onnx-gconv explore model.onnx -o sweep --calib images.npz --eval test.npz --finetune train.npz --epochs 5
  onnx-gconv explore model.onnx -o sweep --calib images.npz --eval test.npz --engine ray --address head:6379
"""


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = options.command(subparsers, "explore", "the best plan for each of several budgets", TEACH)
    options.add_model(parser)
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="DIR", help="the folder to write into")
    parser.add_argument("--points", type=options.positive, default=12, metavar="N", help="how many budgets (default 12)")
    parser.add_argument("--by", choices=("macs", "params"), default="macs", help="what the budgets limit (default macs)")
    options.add_method(parser, measured=True)
    options.add_calibration(parser)
    parser.add_argument("--eval", metavar="DATA", help="measure every point on this data (without labels: how often it agrees)")
    parser.add_argument("--finetune", metavar="DATA", help="train every point on this data, too; needs PyTorch")
    finetune.add_learning(parser, "with --finetune")
    finetune.add_device(parser)
    options.add_data_flags(parser)
    engine = parser.add_argument_group("engine", "what runs the points that --calib, --eval or --finetune make")
    engine.add_argument(
        "--engine", choices=("local", "ray"), default="local", help="processes here (default), or tasks of a Ray cluster"
    )
    engine.add_argument(
        "--address",
        metavar="HOST:PORT",
        help="the cluster for --engine ray, as `ray start --head` prints it (default: one of this machine, of --jobs cores). "
        "Models and .npz files travel to it; folders of images and functions must be there, at the same place, on every machine",
    )
    options.add_json(parser)
    parser.set_defaults(run=partial(run, parser))


def run(parser: argparse.ArgumentParser, args: argparse.Namespace) -> int:
    has_jobs = _check(args, parser)
    request = options.request(args)
    from onnx_gconv.exploration.folder import require_kept
    from onnx_gconv.exploration.point import exploration_json
    from onnx_gconv.exploration.solutions import prepare_resumable
    from onnx_gconv.files import locked, make_folder, write_text
    from onnx_gconv.model.file import sha256

    require_engine(args)
    story = Story(args)
    source = open_source(args)
    network = read_network(source, story)
    calibration = open_calibration(source, args)
    exploring = Exploring(source, network, args, story)
    exploring.open_data()
    [request] = with_measured([request], source, network, calibration, story)
    folder: Path = args.output
    make_folder(folder)
    digest = sha256(source.path)
    text, points = "", list["Point"]()
    try:
        with locked(folder):
            require_kept(folder, args.points, has_models=has_jobs, has_tuned=args.finetune is not None)
            with story.progress("solving") as progress:
                prepared = prepare_resumable(source.model, network, request, sha256=digest, folder=folder, progress=progress)
            for points in exploring.made(prepared, calibration, digest) if has_jobs else exploring.planned(prepared, digest):
                text = exploration_json(str(source.path), args.by, points, network, digest)
                write_text(folder / "explore.json", text)
            pictures = _draw(points, network, args, story) if points else []
    except STOPS as stop:
        # Before the first point is known, nobody knows which of those in the folder are of this exploration.
        kept = f"{len(points)} of {args.points} points" if points else "what is finished"
        raise type(stop)(f"'{folder}' keeps {kept}, and the same command goes on from there.") from stop
    if args.json:
        print(text, end="")
    elif points:
        from onnx_gconv.report.tables import print_exploration

        print_exploration(points, network, args.by)
    if points:
        made = f"{len(points)} plan{'s' * (len(points) > 1)}{' and models' * has_jobs}"
        story.tell(f"wrote {', '.join([made, 'explore.json', *(path.name for path in pictures)])} into {folder}")
    exploring.require_all()
    return 0


def _check(args: argparse.Namespace, parser: argparse.ArgumentParser) -> bool:
    """Return whether points are more than plans; leave with a usage error where flags do not fit."""
    options.check_measured(args, parser)
    has_jobs = any((args.calib, args.eval, args.finetune))
    if args.address and args.engine != "ray":
        parser.error("--address is of a Ray cluster: give --engine ray")
    if args.engine == "ray" and not has_jobs:
        parser.error("--engine ray runs what --calib, --eval or --finetune ask for; plans alone are searched here, soon")
    return has_jobs


def _draw(points: "Sequence[Point]", network: "Network", args: argparse.Namespace, story: Story) -> list[Path]:
    from onnx_gconv.files import staged

    try:
        import matplotlib  # noqa: F401
    except ImportError:
        story.warn("no picture: matplotlib is not installed; pip install 'onnx-gconv[plot]'")
        return []
    from onnx_gconv.report.picture import draw_exploration

    with staged(args.output) as staging:
        return [args.output / path.name for path in draw_exploration(points, network, args.by, staging / "explore")]
