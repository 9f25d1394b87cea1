"""Accuracy against measured time, without training: one picture a model.

    python benchmarks/pareto.py -o benchmarks/pareto.md [--rows REGEX] [--list]

Needs ../shared, Pillow and matplotlib. ONNX Runtime on this CPU, one thread; asked for .8, .65 and .5 of the dense time. What is
drawn is the time that was measured at the end, interleaved with the dense model. Data and judging are those of
`benchmarks/forms.py`. Every row runs in a process of its own and is kept in OUTPUT.jsonl: a row that is there is not run again.

"L2" narrows every inner space by one share, in steps that suit the CPU, keeps the filters of largest norm, and has the same fit;
its share is the largest that is predicted to be in time. "int8" is the dense model in int8, ONNX Runtime's QDQ. Seed 0.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from forms import SHARED, calibration, judging, norms, time_ratio

MODELS = ("cifar10_resnet20_folded", "cifar10_resnet56_folded", "imagenet_mobilenet_v2_bn", "nudenet_yolov8n")
TIMES = ("80%", "65%", "50%")
FORMS = {"width, drop": "width,drop", "all forms": "all", "groups": "group"}  # by what a row is called; the first is the default
MARKS = {"width, drop": "o-", "all forms": "s-", "groups": "^-", "L2": "v--", "int8": "*", "width, drop + int8": "D-"}
HEAD = """\
# Accuracy against measured time

Made by `python benchmarks/pareto.py -o benchmarks/pareto.md`; what the rows are, it says at its top. Time: measured, compressed
over dense. Judged: top-1 in %, or for the detector the relative error of its outputs, which should be low.
"""


@dataclass(frozen=True)
class Row:
    """One run."""

    model: str
    method: str
    asked: str  # --max-latency; nothing for int8 alone

    @property
    def name(self) -> str:
        """What --rows is matched with, and what a finished row is known by."""
        return f"{self.model} {self.method} {self.asked}".rstrip()


def rows() -> list[Row]:
    """Return all rows, those that most depends on first."""
    first = [row for model in MODELS for row in (Row(model, "int8", ""), *(Row(model, "width, drop", asked) for asked in TIMES))]
    others = ("width, drop + int8", "L2", "groups", "all forms")
    return [*first, *(Row(model, method, asked) for method in others for model in MODELS for asked in TIMES)]


def run(row: Row) -> dict[str, Any]:
    """Return what one row measures, in this process."""
    import onnx_gconv
    from onnx_gconv.errors import GconvError

    path, (calib, samples) = SHARED / "zoo" / f"{row.model}.onnx", calibration(row.model)
    started, cpu_started = time.perf_counter(), time.process_time()
    try:
        made = _made(row, path, calib, samples)
    except GconvError as error:
        return {"refused": str(error)}
    cost = {"seconds": time.perf_counter() - started, "cpu_seconds": time.process_time() - cpu_started}
    found = onnx_gconv.evaluate(made, judging(row.model), reference=path)
    error = max((gap.relative_l2 for gap in found.outputs.values()), default=None)
    return {"top1": found.top1, "dense_top1": found.reference_top1, "error": error, "time": time_ratio(path, made), **cost}


def _made(row: Row, path: Path, calib: Any, samples: int) -> Any:
    """Return the model of a row."""
    import onnx_gconv

    if row.method == "int8":
        return onnx_gconv.export(path, "ort-cpu", precision="int8", calib=calib, calib_samples=samples).model
    if row.method == "L2":
        return onnx_gconv.apply(path, _uniform_plan(path, row.asked, calib), calib=calib, calib_samples=samples).model
    wishes: Any = {"max_latency": row.asked, "calib": calib, "calib_samples": samples}
    if row.method.endswith("int8"):
        result = onnx_gconv.compress(path, precision="int8", **wishes)
        assert result.quantised is not None
        return result.quantised.model
    return onnx_gconv.compress(path, forms=FORMS[row.method], **wishes).model


def _uniform_plan(path: Path, asked: str, calib: Any) -> Any:
    """Return the plan that narrows every inner space by one share, as little as is predicted to be in time."""
    from dataclasses import replace

    import numpy as np

    from onnx_gconv.errors import BudgetError
    from onnx_gconv.listener import SILENT
    from onnx_gconv.pipeline.facts import measure
    from onnx_gconv.pipeline.forms import find_forms
    from onnx_gconv.pipeline.job import Job
    from onnx_gconv.pipeline.original import open_original
    from onnx_gconv.pipeline.planning import make_plan, resolve_budget
    from onnx_gconv.pipeline.recovering import guide_of, open_samples
    from onnx_gconv.pipeline.settings import Settings
    from onnx_gconv.plans import PlannedSpace, Totals

    settings = Settings(max_latency=asked, calib=calib, forms="width", target="ort-cpu")
    original = open_original(path)
    opened = open_samples(original, settings)
    job = Job(original, settings, measure(original, settings, opened, SILENT), SILENT)
    guide = guide_of(job, opened)
    assert guide is not None
    menu = (forms := find_forms(job, guide, {}, {})).menu
    limit, none = resolve_budget(job).latency_ns or 0, [0] * len(menu.products)

    def indices(share: float) -> list[int]:
        fitting = ([i for i, width in enumerate(space.options) if width.channels <= share * space.full] for space in menu.spaces)
        return [min(found, default=len(space.options) - 1) for found, space in zip(fitting, menu.spaces, strict=True)]

    shares = (step / 100 for step in range(100, 0, -1))
    widths = next((indices(share) for share in shares if menu.totals(indices(share), none)[2] <= limit), None)
    if widths is None:
        raise BudgetError("no share of all widths is in time")
    weights = {tensor.name: tensor for tensor in original.model.graph.initializer}
    spaces = []
    for space, row, option in zip(forms.offer.spaces, menu.spaces, widths, strict=True):
        count = row.options[option].channels
        if 0 < count < space.channels:
            order = np.argsort(-norms(original.model, space.writers[0], weights), kind="stable")
            spaces.append(PlannedSpace(space.name, space.channels, tuple(np.sort(order[:count]).tolist())))
    planned = make_plan(replace(job, settings=replace(settings, max_latency="100%")), "none", guide=guide, least_groups={}).plan
    after = Totals(*menu.totals(widths, none)[:2])
    return replace(planned, spaces=tuple(spaces), dropped=(), layers=(), budget={}, after=after)


def run_apart(row: Row) -> dict[str, Any] | None:
    """Return what the row measures in a process of its own, None where it failed."""
    command = [sys.executable, __file__, "--only", json.dumps(asdict(row))]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False, env={"OPENBLAS_NUM_THREADS": "1", **os.environ})
    if done.returncode:
        print(f"failed: {row.name}", file=sys.stderr, flush=True)
        return None
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def page(finished: Mapping[str, Mapping[str, Any]], pictures: Mapping[str, Path]) -> Iterator[str]:
    """Yield the lines of the result page: the rows that are there."""
    for model in MODELS:
        there = [row for row in rows() if row.model == model and row.name in finished]
        if there:
            dense = next((finished[row.name]["dense_top1"] for row in there if finished[row.name].get("dense_top1")), None)
            yield f"\n## {model}" + ("" if dense is None else f", dense {100 * dense:.2f} %") + "\n"
            yield f"![{model}]({pictures[model].name})\n" if model in pictures else ""
            yield "| method | asked | time / dense | judged | CPU s |\n|---|---|---|---|---|"
            yield from (_line(row, finished[row.name]) for row in there)


def _line(row: Row, found: Mapping[str, Any]) -> str:
    if "refused" in found:
        return f"| {row.method} | {row.asked} | | refused: {found['refused']} | |"
    judged = f"{found['error']:.4f}" if found["top1"] is None else f"{100 * found['top1']:.2f}"
    return f"| {row.method} | {row.asked} | {found['time']:.3f} | {judged} | {found['cpu_seconds']:.0f} |"


def draw(model: str, finished: Mapping[str, Mapping[str, Any]], path: Path) -> bool:
    """Write the picture of a model, if there is something on it."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    mpl.rcParams["svg.hashsalt"] = "onnx-gconv"  # the same rows make the same file
    figure, axes = pyplot.subplots(figsize=(6.4, 4.2))
    drawn = [finished[row.name] for row in rows() if row.model == model and "time" in finished.get(row.name, {})]
    is_error = any(found["top1"] is None for found in drawn)
    for method, mark in MARKS.items():
        of_method = (finished.get(row.name, {}) for row in rows() if row.model == model and row.method == method)
        points = sorted(
            (found["time"], found["error"] if is_error else 100 * found["top1"]) for found in of_method if "time" in found
        )
        if points:
            axes.plot(*zip(*points, strict=True), mark, label=method)
    if not is_error and drawn:
        axes.axhline(100 * drawn[0]["dense_top1"], color="grey", linewidth=0.8, linestyle=":")
    axes.set(title=model, xlabel="measured time / dense", ylabel="relative error of the outputs" if is_error else "top-1, %")
    axes.grid(alpha=0.3)
    if drawn:
        axes.legend()
        figure.tight_layout()
        figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)
    return bool(drawn)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output", type=Path, default=Path("pareto.md"), help="the page; rows and pictures go beside it")
    parser.add_argument("--rows", default="", metavar="REGEX", help="run only rows whose name it matches")
    parser.add_argument("--list", action="store_true", help="print the names of the rows and stop")
    parser.add_argument("--only", help=argparse.SUPPRESS)  # the row that this process runs
    args = parser.parse_args()
    if args.only:
        print(json.dumps(run(Row(**json.loads(args.only)))))
        return 0
    asked = [row for row in rows() if re.search(args.rows, row.name)]
    if args.list:
        print("\n".join(row.name for row in asked))
        return 0
    kept = args.output.with_suffix(".jsonl")
    lines = [json.loads(line) for line in kept.read_text(encoding="utf-8").splitlines()] if kept.exists() else []
    finished = {line["row"]: line for line in lines}
    for row in asked:
        if row.name not in finished and (found := run_apart(row)) is not None:
            finished[row.name] = {"row": row.name, **found}
            with kept.open("a", encoding="utf-8") as stream:
                stream.write(json.dumps(finished[row.name]) + "\n")
            print(row.model, _line(row, found), flush=True)
    pictures = {model: args.output.with_name(f"{args.output.stem}_{model}.svg") for model in MODELS}
    pictures = {model: path for model, path in pictures.items() if draw(model, finished, path)}
    args.output.write_text(HEAD + "\n".join(page(finished, pictures)) + "\n", encoding="utf-8")
    return 0 if all(row.name in finished for row in asked) else 1


if __name__ == "__main__":
    sys.exit(main())
