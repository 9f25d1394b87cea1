"""`compress`: the whole main job in one command."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

import onnx_gconv
from onnx_gconv.cli import options
from onnx_gconv.cli.plan import tell_search
from onnx_gconv.cli.story import Story
from onnx_gconv.files import data_file, precision_file, result_files
from onnx_gconv.report.wording import what_was_done

if TYPE_CHECKING:
    from onnx_gconv import Result

TEACH = """\
The whole job: plan, recover, write, verify, report. Writes OUT.onnx, OUT.plan.json and OUT.report.json, all or nothing.

  onnx-gconv compress model.onnx --max-macs 60% --calib images.npz --eval test.npz
  onnx-gconv compress model.onnx --max-flops 50% --calib photos/ --resize 256 --target ort-cpu
  onnx-gconv compress model.onnx --max-params 1.2M --exclude head -o small.onnx
  onnx-gconv compress model.onnx --max-latency 60% --calib images.npz

Give it --calib: a few hundred samples without labels. They tell which channels the model can spare, so it gets narrower where
that costs least, and residual branches that add little are dropped. The weights that are left are fitted, layer by layer, to what
the dense model does on the samples. That brings most of the accuracy back without training. Without --calib the Convs are grouped
by their weights alone, nothing is fitted, and most of the accuracy is lost until you train. --eval says how much is left.

With --max-latency the layers are timed first, on this CPU or by the table of `bench --sweep`, and on this CPU the result is
measured as well: it is never slower than asked. With --precision int8 it is the int8 model that keeps the time:

  onnx-gconv compress model.onnx --max-latency 35% --calib images.npz --precision int8

--forms says what may change:

  onnx-gconv compress model.onnx --max-macs 60% --calib images.npz --forms group
  onnx-gconv compress model.onnx --max-macs 60% --calib images.npz --forms all
"""


def add_flags(parser: argparse.ArgumentParser) -> None:
    options.add_model(parser)
    parser.add_argument(
        "-o", "--output", type=Path, metavar="OUT", help="the model to write (default <stem>.gconv.onnx beside MODEL)"
    )
    options.add_choosing(parser)
    options.add_calibration(parser)
    parser.add_argument(
        "--eval", metavar="DATA", help="print the accuracy on this data before and after (without labels: how often both agree)"
    )
    options.add_data_flags(parser)
    parser.add_argument(
        "--precision",
        choices=("fp32", "fp16", "int8"),
        help="write the result once more in this precision, as OUT.int8.onnx or OUT.fp16.onnx beside it; needs --calib. With int8, "
        "a --max-latency on this CPU is that of the int8 model, a share still of the float model's time before (default fp32: "
        "only the float model)",
    )
    options.add_lowering(parser)
    options.add_verifying(parser)
    parser.add_argument(
        "--force", action="store_true", help="with --target ort-cpu: write even if the result is slower than the model"
    )
    options.add_json(parser)


def run(args: argparse.Namespace) -> int:
    output: Path = args.output or args.model.with_name(f"{args.model.stem}.gconv.onnx")
    files = result_files(output)
    lower = [precision_file(output, args.precision)] if args.precision in ("fp16", "int8") else []
    options.check_outputs(args, *files, *lower, *map(data_file, [output, *lower]))
    with Story(args) as story:
        result = onnx_gconv.compress(args.model, listener=story.listener, **options.wishes(args))
        written = result.save(output)
    if args.json:
        print(files[-1].read_text(encoding="utf-8"), end="")
    else:
        _print(result, is_verbose=args.verbose)
    tell_search(result.clocked.planned, story)
    plan, network = result.plan, result.original.network
    convs = len(network.all_layers) + len(network.skipped)
    numbers = {"spaces": len(plan.spaces), "branches": len(plan.dropped), "layers": len(plan.layers), "ranks": len(plan.low_rank)}
    done = what_was_done(**numbers, convs=convs)
    story.tell(done + ("" if args.verbose else "; -v lists them"))
    story.wrote(written)
    return 0


def _print(result: "Result", *, is_verbose: bool) -> None:
    from onnx_gconv.report.tables import print_plan, print_result, print_skipped

    if is_verbose:
        planned = result.clocked.planned
        print_plan(result.plan, planned.bounds(result.original.model), planned.labels)
        print_skipped([(conv.name, conv.reason) for conv in result.plan.skipped])
    print_result(result)
