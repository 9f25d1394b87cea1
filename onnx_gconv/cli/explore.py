"""`explore`: many budgets."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

import onnx_gconv
from onnx_gconv.cli import finetune, options
from onnx_gconv.cli.story import Story
from onnx_gconv.errors import OutputError
from onnx_gconv.staging import staged

if TYPE_CHECKING:
    from onnx_gconv import Exploration

TEACH = """\
Find the best plan for each of several budgets, from the model as it is down to the smallest it can become. Writes a plan for
each point (point-00.plan.json and so on), explore.json and a picture into DIR. The layers are solved once. Start it again with
the same flags after an interruption, and it continues where it stopped.

  onnx-gconv explore model.onnx -o sweep --points 12
  onnx-gconv apply model.onnx sweep/point-05.plan.json -o small.onnx

With --calib, --eval or --finetune each point becomes a model, point-05.onnx, made as `compress` makes it: with --calib narrower and
without branches that add little, else grouped, unless --forms says otherwise. The table and the picture show accuracy, which
points another one beats, and which forms each budget has chosen. Points are independent: they run in --jobs processes here, or on
a Ray cluster. A process that dies is replaced, and finished points are not made again.

  onnx-gconv explore model.onnx -o sweep --points 8 --calib images.npz --eval test.npz
  onnx-gconv explore model.onnx -o sweep --calib images.npz --eval test.npz --finetune train.npz --epochs 5
  onnx-gconv explore model.onnx -o sweep --calib images.npz --eval test.npz --engine ray --address head:6379
"""


def add_flags(parser: argparse.ArgumentParser) -> None:
    options.add_model(parser)
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="DIR", help="the folder to write into")
    parser.add_argument("--points", type=options.positive, default=12, metavar="N", help="how many budgets (default 12)")
    parser.add_argument("--by", choices=("macs", "params"), default="macs", help="what the budgets limit (default macs)")
    options.add_method(parser)
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


def run(args: argparse.Namespace) -> int:
    folder: Path = args.output
    has_models = any((args.calib, args.eval, args.finetune))
    with Story(args) as story:
        found = onnx_gconv.explore(
            args.model,
            folder,
            points=args.points,
            by=args.by,
            finetune=args.finetune,
            learning=finetune.learning(args),
            device=args.device,
            engine=args.engine,
            address=args.address,
            listener=story.listener,
            **options.wishes(args),
        )
        pictures = _draw(found, folder, story) if found.points else []
    if args.json and found.points:
        print((folder / "explore.json").read_text(encoding="utf-8"), end="")
    elif found.points:
        from onnx_gconv.report.tables import print_exploration

        print_exploration(found.points, found.network, found.by)
    if found.points:
        made = f"{len(found.points)} plan{'s' * (len(found.points) > 1)}{' and models' * has_models}"
        story.tell(f"wrote {', '.join([made, 'explore.json', *(path.name for path in pictures)])} into {folder}")
    found.require_all()
    return 0


def _draw(found: "Exploration", folder: Path, story: Story) -> list[Path]:
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        story.warn("no picture: matplotlib is not installed; pip install 'onnx-gconv[plot]'")
        return []
    from onnx_gconv.report.picture import draw_exploration

    try:
        with staged(folder) as staging:
            return [folder / path.name for path in draw_exploration(found, staging / "explore")]
    except OutputError as error:
        story.warn(f"no picture: {str(error).partition('; nothing')[0].rstrip('.')}")
        return []
