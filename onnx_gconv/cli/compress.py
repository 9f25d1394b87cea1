"""`compress`: the whole main job in one command."""

import argparse
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from onnx_gconv.cli import options
from onnx_gconv.cli.plan import searched
from onnx_gconv.cli.rewriting import rewrite
from onnx_gconv.cli.source import Source, default_output, open_source, read_network
from onnx_gconv.cli.story import Story

if TYPE_CHECKING:
    import onnx

    from onnx_gconv.plan import Plan
    from onnx_gconv.report.record import Cost

TEACH = """\
Plan, group, verify, write and report. Writes OUT.onnx, OUT.plan.json and OUT.report.json, all or nothing.

  onnx-gconv compress model.onnx --max-flops 50%
  onnx-gconv compress model.onnx --max-params 1.2M --exclude head -o small.onnx
"""


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = options.command(subparsers, "compress", "the whole job: plan, group, verify, write, report", TEACH)
    options.add_model(parser)
    parser.add_argument(
        "-o", "--output", type=Path, metavar="OUT", help="the model to write (default <stem>.gconv.onnx beside MODEL)"
    )
    options.add_choosing(parser)
    options.add_verifying(parser)
    options.add_json(parser)
    parser.set_defaults(run=partial(run, parser))


def run(parser: argparse.ArgumentParser, args: argparse.Namespace) -> int:
    options.check_choosing(args, parser)
    request = options.request(args)
    from onnx_gconv.files import staged
    from onnx_gconv.model.file import bytes_on_disk, has_external_data, save, sha256
    from onnx_gconv.plan import to_json as plan_json
    from onnx_gconv.planning.bounds import layer_bounds
    from onnx_gconv.planning.planner import make_plan
    from onnx_gconv.report.record import Outcome
    from onnx_gconv.report.record import to_json as report_json

    story = Story(args)
    output: Path = args.output or default_output(args.model)
    started = time.perf_counter()
    source = open_source(args)
    network = read_network(source, story)
    read_done = time.perf_counter()
    with story.progress("solving") as progress:
        planned = make_plan(source.model, network, request, sha256=sha256(source.path), progress=progress)
    plan = planned.plan
    planned_done = time.perf_counter()
    rewritten = rewrite(source, plan, args, story, network.shapes)
    seconds = {
        "read": read_done - started,
        "solve": planned.solve_seconds,
        "search": planned.search_seconds,
        "rewrite_and_verify": time.perf_counter() - planned_done,
    }
    with staged(output.parent) as staging:
        save(rewritten.grouped, staging / output.name, external_data=has_external_data(source.path))
        outcome = Outcome(
            model=str(source.path),
            output=str(output),
            before=_cost(source, source.model, bytes_on_disk(source.path)),
            after=_cost(source, rewritten.grouped, bytes_on_disk(staging / output.name)),
            gathers=rewritten.gathers,
            search=None if planned.found is None else planned.found.as_dict(),
            verification=rewritten.verification,
            seconds=seconds,
        )
        _require_counts(outcome.after, plan)
        report = report_json(outcome, plan, network)
        (staging / f"{output.stem}.plan.json").write_text(plan_json(plan), encoding="utf-8")
        (staging / f"{output.stem}.report.json").write_text(report, encoding="utf-8")
    if args.json:
        print(report, end="")
    else:
        from onnx_gconv.report.tables import print_outcome, print_plan, print_skipped

        if args.verbose:
            print_plan(plan, layer_bounds(source.model, network, plan))
            print_skipped([(conv.name, conv.reason) for conv in plan.skipped], title="Convs that stay as they are")
        print_outcome(outcome.before, outcome.after, gathers=outcome.gathers, verification=outcome.verification)
    stem = output.with_suffix("")
    if planned.found is not None:
        story.tell(searched(planned.found))
    story.tell(f"grouped {len(plan.layers)} of {len(plan.layers) + len(plan.skipped)} Convs; -v lists them")
    story.tell(f"wrote {output}, {stem}.plan.json, {stem}.report.json")
    return 0


def _cost(source: Source, model: "onnx.ModelProto", size: int) -> "Cost":
    from onnx_gconv.model.network import read
    from onnx_gconv.model.shapes import input_shapes
    from onnx_gconv.report.record import Cost
    from onnx_gconv.runtime import observe_shapes

    count = read(model, input_shapes(model, source.given_shapes), observe=observe_shapes).count
    return Cost(count.params, count.macs, size, len(model.graph.node))


def _require_counts(after: "Cost", plan: "Plan") -> None:
    """The budget was promised on predicted counts: what is written must not count more.

    It may count a little less: a bias of equal numbers that several Convs share is not written anew for each.
    """
    assert after.params <= plan.after.params, (after, plan.after)
    assert after.macs == plan.after.macs, (after, plan.after)
