"""`plan`: decide, and write the decision to a file that people can read and edit."""

import argparse
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from onnx_gconv.cli import options
from onnx_gconv.cli.recovering import guide, open_calibration, with_measured
from onnx_gconv.cli.refining import add_refining, check_refining, refine
from onnx_gconv.cli.source import Source, open_source, read_network
from onnx_gconv.cli.story import Story
from onnx_gconv.cli.sweeping import with_latencies
from onnx_gconv.cli.training import require_torch

if TYPE_CHECKING:
    from collections.abc import Iterator

    import onnx

    from onnx_gconv.model.network import Network
    from onnx_gconv.pipeline.planner import GathersMs, Planned
    from onnx_gconv.pipeline.settings import Request
    from onnx_gconv.pipeline.solving import Progress
    from onnx_gconv.pipeline.trial import Guide
    from onnx_gconv.search.exact import SearchResult
    from onnx_gconv.search.latency import Prediction

TEACH = """\
Choose the number of groups of each Conv and which channels go together; write it as a plan, one layer a line.
Carry it out with `mask` and `apply`. Editing a plan by hand is fine: it is checked when it is read.

  onnx-gconv plan model.onnx --max-flops 50% -o plan.json
  onnx-gconv plan model.onnx --groups 4 --exclude 'head' -o plan.json
  onnx-gconv plan model.onnx --max-macs 30% --refine-steps 2 --refine-data train.npz -o plan.json --refined start.onnx
"""


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = options.command(subparsers, "plan", "choose the groups of each Conv and write a plan file", TEACH)
    options.add_model(parser)
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="PLAN", help="the plan file to write; - for stdout")
    options.add_choosing(parser)
    options.add_calibration(parser)
    add_refining(parser)
    options.add_data_flags(parser)
    options.add_json(parser)
    parser.set_defaults(run=partial(run, parser))


def run(parser: argparse.ArgumentParser, args: argparse.Namespace) -> int:
    options.check_choosing(args, parser)
    requests = options.requests(args)
    if str(args.output) != "-":
        options.check_outputs(args, parser, args.output)
    check_refining(args, parser)
    if args.refine_steps is not None:
        require_torch("--refine-steps")
    from onnx_gconv.files import write_text
    from onnx_gconv.pipeline.bounds import layer_bounds
    from onnx_gconv.plans import to_json

    story = Story(args)
    source = open_source(args)
    network = read_network(source, story)
    calibration = open_calibration(source, args)
    requests = with_measured(requests, source, network, calibration, story)
    requests, gathers_ms = with_latencies(requests, source, network, args, story)
    if args.refine_steps is not None:
        planned = _refined(source, network, requests, args, story)
    else:
        with story.progress("solving") as progress:
            guided = guide(source, calibration, args, progress)
            planned = next(feasible_plans(source, network, requests, story, progress, guide=guided, gathers_ms=gathers_ms))
    plan = planned.plan
    text = to_json(plan)
    if str(args.output) == "-":
        sys.stdout.write(text)
        return 0
    write_text(args.output, text)
    if args.json:
        sys.stdout.write(text)
        return 0
    from onnx_gconv.report.tables import print_plan, print_skipped, print_totals

    print_plan(plan, layer_bounds(source.model, network, plan, requests[0]) if args.verbose else {})
    if args.verbose:
        print_skipped([(conv.name, conv.reason) for conv in plan.skipped], title="Convs that stay as they are")
    print_totals(dict(vars(plan.before)), dict(vars(plan.after)))
    if planned.found is not None:
        story.tell(searched(planned.found))
    if planned.prediction is not None:
        story.tell(predicted(planned.prediction))
    story.tell(f"wrote {args.output}: {len(plan.layers)} layers to group, {len(plan.skipped)} Convs as they are")
    return 0


def _refined(source: Source, network: "Network", requests: "list[Request]", args: argparse.Namespace, story: Story) -> "Planned":
    """Return the plan of a search with fine-tuning inside, and write the model it ended with if --refined asks for it."""

    def plan_by(model: "onnx.ModelProto", asked: "list[Request]") -> "Planned":
        with story.progress("solving") as progress:
            tuned = replace(source, model=model)
            return next(feasible_plans(tuned, network, asked, story, progress, guide=None, gathers_ms=None))

    refined = refine(source, network, requests, args, story, plan=plan_by)
    if args.refined is not None:
        from onnx_gconv.model.file import save_atomically

        files = save_atomically(refined.start, args.refined, external_data=source.has_external_data)
        story.wrote(files, "the refined weights, masked by the plan")
    return refined.planned


def feasible_plans(
    source: Source,
    network: "Network",
    requests: "list[Request]",
    story: Story,
    progress: "Progress",
    *,
    guide: "Guide | None",
    gathers_ms: "GathersMs | None",
) -> "Iterator[Planned]":
    """Yield the plan of each request that has one; if none has, fail as the last one did, which asks least.

    Under a budget of time all ways of Gathers compete, since each one's time is predicted: the one of least cost comes first.
    """
    from onnx_gconv.errors import BudgetError, ModelError
    from onnx_gconv.model.file import sha256
    from onnx_gconv.pipeline.planner import make_plan

    digest = sha256(source.path)

    def plans() -> "Iterator[Planned]":
        failure: BudgetError | ModelError | None = None
        found = 0
        for request in requests:
            try:
                planned = make_plan(
                    source.model, network, request, sha256=digest, progress=progress, gathers_ms=gathers_ms, guide=guide
                )
            except (BudgetError, ModelError) as error:
                story.detail(f"with --gathers {request.gathers}: {error}")
                failure = error
                continue
            found += 1
            yield planned
        if failure is not None and not found:
            raise failure

    if "max_latency_ms" in requests[0].limits:
        yield from sorted(plans(), key=lambda planned: planned.found.cost if planned.found is not None else 0.0)
    else:
        yield from plans()


def searched(found: "SearchResult") -> str:
    """Return one sentence on how good the search's choice is."""
    known = found.as_dict()
    if known["gap"] is None:
        return f"search: cost {found.cost:.4f}, by the local search, which proves nothing"
    if known["gap"] == 0:
        return f"search: cost {found.cost:.4f}, proven to be the least within the budget"
    return f"search: cost {found.cost:.4f}; time ran out, the least is proven to be at least {found.bound:.4f}"


def predicted(prediction: "Prediction") -> str:
    """Return one sentence on what the model should take."""
    return (
        f"predicted on {prediction.runner}: {prediction.after_ms:.4g} ms, {prediction.ratio:.1%} of {prediction.before_ms:.4g} ms "
        f"(Gathers {prediction.gathers_ms:.3g} ms)"
    )
