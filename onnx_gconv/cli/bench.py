"""`bench`: how long models take on a device, the first one being the baseline."""

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from onnx_gconv.cli import options
from onnx_gconv.cli.story import Story

if TYPE_CHECKING:
    from onnx_gconv.deploy.host import Host
    from onnx_gconv.deploy.program import RunnerCall
    from onnx_gconv.deploy.timing_file import Timing

RUNNERS = ("ort-cpu", "ort-cuda", "ort-tensorrt", "trtexec", "tensorrt", "tensorrt-rtx")
TEACH = """\
Measure models with a runner, here or on another machine over ssh. The first model is the baseline of the ratios; all take
turns, so that what disturbs one disturbs all. Programs and models are copied to the host, and nothing is left there.

  onnx-gconv bench model.onnx model.gconv.onnx --runner ort-cpu
  onnx-gconv bench model.onnx model.gconv.onnx --runner trtexec --precision fp16 --host ssh://nvidia@jetson

With --sweep, every layer of the models is timed with every number of groups that suits the device, into a table for
`compress --max-latency 60% --timing table.json`. Interrupted and started again, it goes on where it was.

  onnx-gconv bench model.onnx --runner ort-cpu --sweep --timing-out table.json
"""


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = options.command(subparsers, "bench", "measure latency, here or on a device over ssh", TEACH)
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
    parser.set_defaults(run=partial(run, parser))


def run(parser: argparse.ArgumentParser, args: argparse.Namespace) -> int:
    if args.trtexec is not None and args.runner != "trtexec":
        parser.error("--trtexec is for --runner trtexec")
    story = Story(args)
    if args.sweep:
        if args.timing_out is None or args.runner == "tensorrt-rtx":
            parser.error("--sweep needs --timing-out FILE, and a runner that runs")
        options.check_outputs(args, parser, args.timing_out)
        return _sweep(args, host_of(args), story)
    if args.timing_out is not None:
        options.check_outputs(args, parser, *_numbered(args.timing_out, len(args.models)))
    with tempfile.TemporaryDirectory() as scratch:
        timings = measured(args, host_of(args), Path(scratch), story)
    for text in dict.fromkeys(warning for timing in timings for warning in timing.warnings):
        story.warn(text)
    files = _write(args.timing_out, timings) if args.timing_out is not None else []
    if args.json:
        print(json.dumps({"format": 1, "runner": args.runner, "host": args.host, "models": _rows(timings)}, indent=1))
    else:
        from onnx_gconv.report.tables import print_timings

        print_timings(timings)
    if files:
        sys.stdout.flush()
        story.wrote(files)
    return 0


def _sweep(args: argparse.Namespace, host: "Host", story: Story) -> int:
    from onnx_gconv.cli.source import open_source, read_network
    from onnx_gconv.cli.sweeping import run_sweep

    for path in args.models:
        source = open_source(argparse.Namespace(model=path, input_shape=args.input_shape))
        network = read_network(source, story)
        job = job_of(args, [path], dict(network.input_shapes), host)
        table = run_sweep(source, network, job, host, args.timing_out, story)
    times = sum(len(by_groups) for by_groups in table.layers.values())
    story.tell(f"wrote {args.timing_out}: {times} times of {len(table.layers)} layer shapes, {len(table.gathers)} of Gathers")
    if args.json:
        print(args.timing_out.read_text(encoding="utf-8"), end="")
    return 0


def host_of(args: argparse.Namespace) -> "Host":
    """Return the machine that --host names, or this one."""
    from onnx_gconv.deploy.host import ThisMachine, parse_host

    if args.host is None:
        return ThisMachine(args.timeout)
    return parse_host(args.host, python=args.python, timeout_seconds=args.timeout)


def measured(args: argparse.Namespace, host: "Host", scratch: Path, story: Story) -> "list[Timing]":
    """Return the timings of the models, in the precision that is asked for."""
    from onnx_gconv.model.file import load
    from onnx_gconv.model.shapes import has_dynamic_axes, input_shapes, parse_input_shapes

    first = load(args.models[0])
    given = parse_input_shapes(args.input_shape, first)
    shapes = input_shapes(first, given)
    if has_dynamic_axes(first, given):
        text = ", ".join(f"{name}={'x'.join(map(str, shape))}" for name, shape in shapes.items())
        story.tell(f"note: measured at {text}; --input-shape sets another size")
    job = job_of(args, args.models, shapes, host)
    if job.typed:
        job = replace(job, models=_typed_copies(job, shapes, scratch))
    with story.progress("measuring"):
        timings = host.measure(job)
    return [replace(timing, model=replace(timing.model, path=str(path))) for timing, path in zip(timings, args.models, strict=True)]


def job_of(args: argparse.Namespace, models: "Sequence[Path]", shapes: "dict[str, tuple[int, ...]]", host: "Host") -> "RunnerCall":
    """Return what the flags ask of the runner."""
    from onnx_gconv.deploy.program import ASKS_FOR_PRECISION, FIRST_TYPED_TENSORRT, RunnerCall
    from onnx_gconv.model.file import load
    from onnx_gconv.model.shapes import dynamic_inputs

    extra = ("--trtexec", args.trtexec) if args.trtexec is not None else ()
    typed = args.precision != "fp32"
    if typed and args.runner in ASKS_FOR_PRECISION:
        version = host.versions(args.runner, extra)["tensorrt"]
        typed = int(version.split(".")[0]) >= FIRST_TYPED_TENSORRT
    dynamic = {name for model in models for name in dynamic_inputs(load(model))}
    return RunnerCall(
        runner=args.runner,
        models=tuple(models),
        shapes=tuple(f"{name}:{'x'.join(map(str, shape))}" for name, shape in shapes.items() if name in dynamic),
        precision=args.precision,
        typed=typed,
        seconds=args.seconds,
        threads=args.threads,
        extra=extra,
    )


def _typed_copies(job: "RunnerCall", shapes: "dict[str, tuple[int, ...]]", scratch: Path) -> tuple[Path, ...]:
    from onnx_gconv.deploy.precision import typed
    from onnx_gconv.model.file import load, save

    copies = []
    for number, path in enumerate(job.models):
        copy = scratch / f"{number}-{path.name}"
        save(typed(load(path), job.precision, shapes), copy)
        copies.append(copy)
    return tuple(copies)


def _write(first: Path, timings: "list[Timing]") -> list[Path]:
    from onnx_gconv.deploy.timing_file import to_json
    from onnx_gconv.files import staged

    files = _numbered(first, len(timings))
    with staged(first.parent) as staging:
        for file, timing in zip(files, timings, strict=True):
            (staging / file.name).write_text(to_json(timing), encoding="utf-8")
    return files


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
