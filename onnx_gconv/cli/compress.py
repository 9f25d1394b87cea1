"""`compress`: the whole main job in one command."""

import argparse
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from onnx_gconv.cli import options
from onnx_gconv.cli.attempting import Attempt, Attempts
from onnx_gconv.cli.plan import predicted, searched
from onnx_gconv.cli.recovering import open_calibration, recovered, with_measured
from onnx_gconv.cli.rewriting import rewrite
from onnx_gconv.cli.source import Source, default_output, open_source, read_network
from onnx_gconv.cli.story import Story

if TYPE_CHECKING:
    import onnx

    from onnx_gconv.data.batch import Data
    from onnx_gconv.evaluation import Evaluation
    from onnx_gconv.model.network import Network
    from onnx_gconv.pipeline.rewriting import Rewritten
    from onnx_gconv.pipeline.settings import Request
    from onnx_gconv.plans import Plan
    from onnx_gconv.recover.recovery import Recovery
    from onnx_gconv.report.record import Cost, Outcome

TEACH = """\
Plan, group, verify, write and report. Writes OUT.onnx, OUT.plan.json and OUT.report.json, all or nothing.

  onnx-gconv compress model.onnx --max-flops 50%
  onnx-gconv compress model.onnx --max-params 1.2M --exclude head -o small.onnx
  onnx-gconv compress model.onnx --max-macs 60% --calib images.npz --eval test.npz

With --calib the weights that are left are fitted, layer by layer, to what the dense model does on these samples. That
brings most of the accuracy back without labels or training, and the search measures what each layer can bear.
"""


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = options.command(subparsers, "compress", "the whole job: plan, group, verify, write, report", TEACH)
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
    options.add_lowering(parser)
    options.add_verifying(parser)
    parser.add_argument(
        "--force", action="store_true", help="with --target ort-cpu: write even if the result is slower than the model"
    )
    options.add_json(parser)
    parser.set_defaults(run=partial(run, parser))


@dataclass(frozen=True)
class Made:
    """The compressed model, and how it came about."""

    attempt: Attempt
    rewritten: "Rewritten"
    recovery: "Recovery | None"
    evaluation: "Evaluation | None"
    seconds: dict[str, float]

    @property
    def plan(self) -> "Plan":
        return self.attempt.planned.plan


def run(parser: argparse.ArgumentParser, args: argparse.Namespace) -> int:
    options.check_choosing(args, parser)
    requests = options.requests(args)
    output: Path = args.output or default_output(args.model)
    options.check_outputs(args, parser, output, *_beside(output))
    story, started = Story(args), time.perf_counter()
    source = open_source(args)
    network = read_network(source, story)
    made = _make(source, network, requests, args, story, started=started)
    outcome, report, files = _write(made, source, network, output)
    if args.json:
        print(report, end="")
    else:
        _print(made, outcome, source, network, is_verbose=args.verbose)
    _tell(made, files, args, story)
    return 0


def _make(
    source: Source, network: "Network", requests: "list[Request]", args: argparse.Namespace, story: Story, *, started: float
) -> Made:
    """Plan, group, verify, recover and evaluate; `started` is when reading the model began."""
    from onnx_gconv.data.open import open_data

    calibration = open_calibration(source, args)
    requests = with_measured(requests, source, network, calibration, story)
    judged = None if args.eval is None else open_data(args.eval, source.model, preprocessing=options.preprocessing(args))
    read_done = time.perf_counter()
    attempt = Attempts(source, network, args, story).first_good(requests, calibration)
    rewritten, recovery = attempt.rewritten, None
    planned_done = time.perf_counter()
    if calibration is not None:
        fitted, recovery = recovered(source, attempt.planned.plan, calibration, args, story)
        rewritten = rewrite(fitted, attempt.planned.plan, args, story, network.shapes)
    recovery_done = time.perf_counter()
    evaluation = None if judged is None else _evaluate(source, rewritten.grouped, judged, story)
    solve, search = attempt.planned.solve_seconds, attempt.planned.search_seconds
    seconds = {
        "read": read_done - started,
        "solve": solve,
        "search": search,
        "rewrite_and_verify": planned_done - read_done - solve - search,
        "recover": recovery_done - planned_done,
        "evaluate": time.perf_counter() - recovery_done,
    }
    return Made(attempt, rewritten, recovery, evaluation, seconds)


def _beside(output: Path) -> tuple[Path, Path]:
    """Return where the plan and the report of a model go."""
    return output.with_name(f"{output.stem}.plan.json"), output.with_name(f"{output.stem}.report.json")


def _write(made: Made, source: Source, network: "Network", output: Path) -> "tuple[Outcome, str, list[Path]]":
    """Write the model, its plan and its report, all or nothing; return what was reported, the report's text, and the files."""
    from onnx_gconv.files import staged
    from onnx_gconv.model.file import save
    from onnx_gconv.plans import to_json as plan_json
    from onnx_gconv.report.record import to_json as report_json

    plan_file, report_file = (path.name for path in _beside(output))
    with staged(output.parent) as staging:
        size = save(made.rewritten.grouped, staging / output.name, external_data=source.has_external_data)
        outcome = _outcome(made, source, network, output, size)
        _require_counts(outcome.after, made.plan)
        report = report_json(outcome, made.plan, network)
        (staging / plan_file).write_text(plan_json(made.plan), encoding="utf-8")
        (staging / report_file).write_text(report, encoding="utf-8")
        names = (output.name, f"{output.name}.data", plan_file, report_file)
        files = [output.parent / name for name in names if (staging / name).exists()]  # most models have no data file
    return outcome, report, files


def _outcome(made: Made, source: Source, network: "Network", output: Path, size: int) -> "Outcome":
    from onnx_gconv.report.record import Cost, Outcome

    planned, rewritten, count = made.attempt.planned, made.rewritten, network.count
    return Outcome(
        model=str(source.path),
        output=str(output),
        before=Cost(count.params, count.macs, source.bytes_on_disk, len(source.model.graph.node)),
        after=_cost(source, rewritten.grouped, size),
        gathers=rewritten.gathers,
        gather_reasons=rewritten.reasons,
        latency=made.attempt.latency,
        predicted=planned.prediction,
        search=None if planned.found is None else planned.found.as_dict(),
        verification=rewritten.verification,
        recovery=made.recovery,
        evaluation=made.evaluation,
        seconds=made.seconds,
    )


def _print(made: Made, outcome: "Outcome", source: Source, network: "Network", *, is_verbose: bool) -> None:
    from onnx_gconv.pipeline.bounds import layer_bounds
    from onnx_gconv.report.tables import print_outcome, print_plan, print_skipped

    if is_verbose:
        print_plan(made.plan, layer_bounds(source.model, network, made.plan, made.attempt.planned.prepared.request))
        print_skipped([(conv.name, conv.reason) for conv in made.plan.skipped], title="Convs that stay as they are")
    print_outcome(outcome)


def _tell(made: Made, files: list[Path], args: argparse.Namespace, story: Story) -> None:
    planned, plan = made.attempt.planned, made.plan
    if planned.found is not None:
        story.tell(searched(planned.found))
    if planned.prediction is not None:
        story.tell(predicted(planned.prediction))
    more = "" if args.verbose else "; -v lists them"
    story.tell(f"grouped {len(plan.layers)} of {len(plan.layers) + len(plan.skipped)} Convs{more}")
    story.wrote(files)


def _evaluate(source: Source, grouped: "onnx.ModelProto", data: "Data", story: Story) -> "Evaluation":
    from onnx_gconv.evaluation import evaluate

    with story.progress("evaluating") as progress:
        return evaluate(grouped, data, reference=source.model, on_progress=progress)


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
