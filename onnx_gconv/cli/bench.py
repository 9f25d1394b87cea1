"""`bench`: how long models take on a device, the first one being the baseline."""

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import onnx_gconv
from onnx_gconv.cli import options
from onnx_gconv.cli.story import Story
from onnx_gconv.errors import UsageError
from onnx_gconv.staging import staged

if TYPE_CHECKING:
    from onnx_gconv import Timing

RUNNERS = ("ort-cpu", "ort-cuda", "ort-tensorrt", "trtexec", "tensorrt", "tensorrt-rtx")
TEACH = """\
Measure models with a runner, here or on another machine over ssh. The first model is the baseline of the ratios. The models
take turns, so that whatever disturbs one disturbs all. Programs and models are copied to the host, and nothing is left there.

  onnx-gconv bench model.onnx model.gconv.onnx --runner ort-cpu
  onnx-gconv bench model.onnx model.gconv.onnx --runner trtexec --precision fp16 --host ssh://nvidia@jetson

With --sweep, every layer of the models is timed with every number of groups that suits the device. The table is for
`compress --max-latency 60% --timing table.json`. Start it again after an interruption, and it continues where it stopped.

  onnx-gconv bench model.onnx --runner ort-cpu --sweep --timing-out table.json
"""


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("models", type=Path, nargs="+", metavar="MODEL", help="ONNX files; the first is the baseline")
    options.add_input_shape(parser)
    parser.add_argument(
        "--runner", choices=RUNNERS, required=True, help="what measures: ONNX Runtime, or TensorRT in one of its forms"
    )
    parser.add_argument(
        "--precision", choices=("fp32", "fp16", "int8"), default="fp32", help="arithmetic to measure (default fp32)"
    )
    parser.add_argument(
        "--sweep", action="store_true", help="time every layer with every number of groups; --timing-out is the table to fill"
    )
    parser.add_argument(
        "--timing-out", type=Path, metavar="FILE", help="write timing.json; further models to timing.2.json and so on"
    )
    parser.add_argument("--seconds", type=options.positive_number, default=3.0, metavar="S", help="for each model (default 3)")
    parser.add_argument("--threads", type=options.positive, metavar="N", help="of ort-cpu (default 1, which is timed most exactly)")
    where = parser.add_argument_group("host")
    where.add_argument("--host", metavar="ssh://USER@HOST[:PORT]", help="measure there; ssh must work without a password")
    where.add_argument("--python", default="python3", metavar="FILE", help="the host's Python (default python3)")
    where.add_argument("--trtexec", metavar="FILE", help="where trtexec is, if not on the PATH nor in its usual places")
    where.add_argument(
        "--timeout", type=options.positive_number, default=3600.0, metavar="S", help="seconds to wait for the runner (default 3600)"
    )
    options.add_json(parser)


# The flags that say where and how to measure.
DEVICE = ("runner", "precision", "seconds", "threads", "host", "python", "trtexec", "timeout")


def _wishes(args: argparse.Namespace) -> dict[str, Any]:
    """Return the wishes that are not the device's."""
    return {name: value for name, value in options.wishes(args).items() if name not in DEVICE}


def run(args: argparse.Namespace) -> int:
    if args.trtexec is not None and args.runner != "trtexec":
        raise UsageError("--trtexec is for --runner trtexec")
    device = onnx_gconv.Device(**{name: getattr(args, name) for name in DEVICE})
    if args.sweep:
        return _sweep(args, device)
    files = [] if args.timing_out is None else _numbered(args.timing_out, len(args.models))
    options.check_outputs(args, *files)
    with Story(args) as story:
        timings = onnx_gconv.bench(args.models, device, listener=story.listener, **_wishes(args))
    if files:
        with staged(args.timing_out.parent) as staging:
            for file, timing in zip(files, timings, strict=True):
                (staging / file.name).write_text(timing.to_json(), encoding="utf-8")
    if args.json:
        print(json.dumps({"format": 1, "runner": args.runner, "host": args.host, "models": _rows(timings)}, indent=1))
    else:
        from onnx_gconv.report.tables import print_timings

        print_timings(timings)
    if files:
        sys.stdout.flush()
        story.wrote(files)
    return 0


def _sweep(args: argparse.Namespace, device: "onnx_gconv.Device") -> int:
    if args.timing_out is None or args.runner == "tensorrt-rtx":
        raise UsageError("--sweep needs --timing-out FILE, and a runner that runs")
    options.check_outputs(args, args.timing_out)
    with Story(args) as story:
        table = onnx_gconv.sweep(args.models, device, args.timing_out, listener=story.listener, **_wishes(args))
        times = sum(len(by_groups) for by_groups in table.layers.values())
        story.tell(f"wrote {args.timing_out}: {times} times of {len(table.layers)} layer shapes, {len(table.gathers)} of Gathers")
    if args.json:
        print(args.timing_out.read_text(encoding="utf-8"), end="")
    return 0


def _numbered(first: Path, count: int) -> list[Path]:
    """Return where so many timings go."""
    return [first, *(first.with_name(f"{first.stem}.{number}{first.suffix}") for number in range(2, count + 1))]


def _rows(timings: "list[Timing]") -> list[dict[str, object]]:
    baseline = timings[0].compared_ms
    rows = []
    for timing in timings:
        now = timing.compared_ms
        ratio = round(now.median / baseline.median, 4) if now is not None and baseline is not None else None
        rows.append({**timing.as_dict(), "ratio": ratio})
    return rows
