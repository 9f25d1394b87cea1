"""Accuracy against measured time, without training: one picture a model.

    python benchmarks/pareto.py -o benchmarks/pareto.md [--rows REGEX] [--torch PYTHON] [--list]

Needs ../shared, Pillow and matplotlib; rows of Torch-Pruning need PYTHON, an environment with torch-pruning and onnx_gconv. ONNX
Runtime on this CPU, one thread; asked for .8, .65 and .5 of the dense time, in int8 for .5, .4 and .35. What is drawn is the time
that was measured at the end, interleaved with the dense model. Data and judging are those of `benchmarks/forms.py`. Every row runs
in a process of its own and is kept in OUTPUT.jsonl: a row that is there is not run again. Seed 0.
"""

import argparse
import json
import os
import re
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from forms import SHARED, calibration, judging, time_ratio
from rows import need

CLASSIFIERS = ("cifar10_resnet20_folded", "cifar10_resnet56_folded", "imagenet_mobilenet_v2_bn")
MODELS = (*CLASSIFIERS, "nudenet_yolov8n", "u2netp")
TIMES = ("80%", "65%", "50%")
MORE_TIMES = {"imagenet_mobilenet_v2_bn": ("75%",)}  # for our own forms
INT8_TIMES = ("50%", "40%", "35%")  # int8 alone takes about half of the time: above that, nothing is narrowed
FORMS = {"width, drop": "width,drop", "all forms": "all", "groups": "group", "all forms + int8": "all"}  # by method
OWN_INT8 = "int8, ONNX Runtime's own"
OWN_UINT8 = f"{OWN_INT8}, uint8"
PRUNED, REFITTED = "Torch-Pruning", "Torch-Pruning, our fit"
# By method: marker, line, colour. The same in every picture.
MARKS = {
    "all forms": ("s", "-", "#d62728"),
    "width, drop": ("o", "-", "#1f77b4"),
    "groups": ("^", "-", "#2ca02c"),
    "L2": ("v", "--", "#8c564b"),
    PRUNED: ("x", ":", "#7f7f7f"),
    REFITTED: ("P", "--", "#ff7f0e"),
    "int8": ("*", "", "#9467bd"),
    OWN_INT8: ("X", "", "#17becf"),
    OWN_UINT8: ("p", "", "#bcbd22"),
    "all forms + int8": ("D", "-", "#e377c2"),
}
DEEPEST = 30  # points below the dense model that a picture shows
MINUTES = 15  # of CPU time, for one row
HEAD = """\
# Accuracy against measured time

Made by `python benchmarks/pareto.py -o benchmarks/pareto.md --torch PYTHON`. ONNX Runtime on this CPU, one thread. No training,
no labels: 1,000 images (CIFAR-10), 250 photographs (MobileNet-v2) or 64 photographs (the others) to calibrate on. Judged on the
10,000 test images, on 250 other photographs, or by the outputs on 64 others. *Time*: measured at the end, over dense; *over
asked*: how far that is above what was asked for, below where negative. *Same class*: as the dense model, in %. *Error*: relative,
of the outputs.

- **width, drop**, **all forms**, **groups**: `compress --max-latency`, the first is the default.
- **int8**: the dense model by `export --precision int8`. **all forms + int8**: `compress --forms all --precision int8`,
  whose `--max-latency` is that of the int8 model; what int8 alone reaches (80 %, 65 %) is the row of int8.
- **int8, ONNX Runtime's own**: the dense model by its `quant_pre_process` and `quantize_static`, QDQ, per channel, min-max, all
  else as it is by default. The opset of u2netp is raised to 13 for that. **uint8**: the same, but activations are uint8. By default
  they are int8, and then ONNX Runtime fuses fewer nodes on this CPU.
- **L2**: every space narrowed by one share (a fifth less for the first to a fifth more for the last, or all would step down at
  once), filters of largest norm stay, then our fit.
- **Torch-Pruning**: its magnitude pruner, BatchNormalization measured anew on the same samples. L1 or L2 norm, ranked by layer or
  over all layers, in MobileNet-v2 with or without the residual streams: the best by its error on the calibration samples. **our
  fit**: its channels, all weights fitted as ours; the best of four by a quick fit on a quarter of the samples, judged on the
  others.

L2 and Torch-Pruning take away as little as is in time by the clock, in widths of 16 channels, which suit this CPU, or of 8 or 4
where these are not in time. A layer keeps one such step: Torch-Pruning alone would leave it whole when its width is rounded down
to nothing. There is no Torch-Pruning of the detector and the segmenter: they are ONNX files without a PyTorch module. It follows
channels through modules such as `nn.Conv2d`, and our own import has none of these. Nor have they any normalization left to
measure anew.

A row is cut off after {minutes} minutes of CPU time. In the pictures, a small number is the height of a point that lies below the
frame.
"""


@dataclass(frozen=True)
class Row:
    """One run."""

    model: str
    method: str
    asked: str = ""  # --max-latency; nothing for int8 alone

    @property
    def name(self) -> str:
        """What --rows is matched with, and what a finished row is known by."""
        return f"{self.model} {self.method} {self.asked}".rstrip()


def rows() -> list[Row]:
    """Return all rows, those that are cheap first."""

    def of(method: str, models: tuple[str, ...] = MODELS) -> list[Row]:
        ours = method in ("width, drop", "all forms")
        least = INT8_TIMES if method == "all forms + int8" else TIMES
        times = {model: sorted((*least, *(MORE_TIMES.get(model, ()) if ours else ())), reverse=True) for model in models}
        return [Row(model, method, asked) for model in models for asked in times[model]]

    whole = [Row(model, method) for method in (OWN_INT8, OWN_UINT8, "int8") for model in MODELS]
    pruned = [row for pair in zip(of(PRUNED, CLASSIFIERS), of(REFITTED, CLASSIFIERS), strict=True) for row in pair]
    return [*whole, *of("width, drop"), *of("L2"), *pruned, *of("groups"), *of("all forms"), *of("all forms + int8")]


def run(row: Row, known: list[dict[str, Any]]) -> dict[str, Any]:
    """Return what one row measures, in this process."""
    import onnx_gconv
    from onnx_gconv.errors import GconvError

    path, (calib, samples) = SHARED / "zoo" / f"{row.model}.onnx", calibration(row.model)
    started, cpu_started = time.perf_counter(), time.process_time()
    no_limit = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (int(cpu_started + 60 * MINUTES), no_limit[1]))
    try:
        made, more = _made(row, path, calib, samples, known)
    except GconvError as error:
        return {"refused": str(error)}
    resource.setrlimit(resource.RLIMIT_CPU, no_limit)  # judging is not limited
    cost = {"seconds": time.perf_counter() - started, "cpu_seconds": time.process_time() - cpu_started}
    found = onnx_gconv.evaluate(made, judging(row.model), reference=path)
    judged = {"top1": found.top1, "dense_top1": found.reference_top1, "agreement": found.agreement}
    judged["error"] = max((gap.relative_l2 for gap in found.outputs.values()), default=None)
    return {**judged, "time": time_ratio(path, made), **cost, **more}


def _made(row: Row, path: Path, calib: Any, samples: int, known: list[dict[str, Any]]) -> tuple[Any, dict[str, Any]]:
    """Return the model of a row, and what else should be kept."""
    import onnx_gconv

    wishes: Any = {"calib": calib, "calib_samples": samples}
    if row.method in (PRUNED, REFITTED):
        from pareto_torch_pruning import Rival, torch_pruned

        rival = Rival(row.model, SHARED / "zoo", next(iter(calib.values())))
        made, choices = torch_pruned(rival, row.asked, calib, samples, is_fitted=row.method == REFITTED, known=known)
        return made, {"choices": choices}
    if row.method == "int8":
        return onnx_gconv.export(path, "ort-cpu", precision="int8", **wishes).model, {}
    if row.method in (OWN_INT8, OWN_UINT8):
        from pareto_rivals import int8_of_onnx_runtime

        return int8_of_onnx_runtime(path, calib, is_unsigned=row.method == OWN_UINT8), {}
    if row.method == "L2":
        from pareto_rivals import l2_plan

        return onnx_gconv.apply(path, l2_plan(path, row.asked), **wishes).model, {}
    wishes |= {"max_latency": row.asked, "forms": FORMS[row.method]}
    if not row.method.endswith("int8"):
        return onnx_gconv.compress(path, **wishes).model, {}
    result = onnx_gconv.compress(path, precision="int8", **wishes)
    assert result.quantised is not None
    return result.quantised.model, {}


def run_apart(row: Row, torch_python: str | None, known: list[dict[str, Any]]) -> dict[str, Any] | None:
    """Return what the row measures in a process of its own, None where it failed."""
    python = torch_python if row.method in (PRUNED, REFITTED) else sys.executable
    if python is None:
        print(f"left out, as there is no --torch: {row.name}", file=sys.stderr, flush=True)
        return None
    command = [python, __file__, "--only", json.dumps([asdict(row), known])]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False, env={"OPENBLAS_NUM_THREADS": "1", **os.environ})
    if done.returncode == -signal.SIGXCPU:
        return {"refused": f"cut off after {MINUTES} minutes of CPU time"}
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
            yield "| method | asked | time / dense | over asked | top-1 | same class | error | CPU s |\n" + "|---" * 8 + "|"
            yield from (_line(row, finished[row.name]) for row in sorted(there, key=lambda row: [*MARKS].index(row.method)))


def _line(row: Row, found: Mapping[str, Any]) -> str:
    if "refused" in found:
        return f"| {row.method} | {row.asked} | | | {found['refused']} | | | |"
    over = f"{found['time'] / (float(row.asked.rstrip('%')) / 100) - 1:+.1%}" if row.asked else ""
    shares = ["" if found[name] is None else f"{100 * found[name]:.2f}" for name in ("top1", "agreement")]
    cells = [row.method, row.asked, f"{found['time']:.3f}", over, *shares, f"{found['error']:.4f}", f"{found['cpu_seconds']:.0f}"]
    return f"| {' | '.join(cells)} |"


def draw(model: str, finished: Mapping[str, Mapping[str, Any]], path: Path) -> bool:
    """Write the picture of a model, if there is something on it."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    mpl.rcParams["svg.hashsalt"] = "onnx-gconv"  # the same rows make the same file
    drawn = [finished[row.name] for row in rows() if row.model == model and "time" in finished.get(row.name, {})]
    if not drawn:
        return False
    figure, axes = pyplot.subplots(figsize=(8.4, 4.6))
    is_error, dense = drawn[0]["top1"] is None, 100 * (drawn[0]["dense_top1"] or 0)
    floor = 0.0 if is_error else dense - DEEPEST
    for method, (marker, line, colour) in MARKS.items():
        of_method = (finished.get(row.name, {}) for row in rows() if row.model == model and row.method == method)
        points = sorted(
            (found["time"], found["error"] if is_error else 100 * found["top1"]) for found in of_method if "time" in found
        )
        if points:
            shown = [(x, max(y, floor)) for x, y in points]
            axes.plot(*zip(*shown, strict=True), marker=marker, linestyle=line or "none", color=colour, label=method, clip_on=False)
            for x, y in points:
                if y < floor:
                    axes.annotate(f"{y:.0f}", (x, floor), (4, 4), textcoords="offset points", fontsize=7, color=colour)
    if is_error:
        axes.set_yscale("log")
    else:
        axes.axhline(dense, color="grey", linewidth=0.8, linestyle=":")
        axes.set_ylim(floor, None)
    label = "relative error of the outputs (lower is better)" if is_error else "top-1, %"
    axes.set(title=model, xlabel="measured time / dense", ylabel=label)
    axes.grid(alpha=0.3, which="both")
    axes.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), fontsize=8, frameon=False)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)
    return True


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output", type=Path, default=Path("pareto.md"), help="the page; rows and pictures go beside it")
    parser.add_argument("--rows", default="", metavar="REGEX", help="run only rows whose name it matches")
    parser.add_argument("--torch", metavar="PYTHON", help="the Python of an environment with torch-pruning, for its rows")
    parser.add_argument("--list", action="store_true", help="print the names of the rows and stop")
    parser.add_argument("--only", help=argparse.SUPPRESS)  # the row that this process runs
    args = parser.parse_args()
    if args.only:
        row, known = json.loads(args.only)
        print(json.dumps(run(Row(**row), known)))
        return 0
    asked = [row for row in rows() if re.search(args.rows, row.name)]
    if args.list:
        print("\n".join(row.name for row in asked))
        return 0
    need(SHARED)
    kept = args.output.with_suffix(".jsonl")
    lines = [json.loads(line) for line in kept.read_text(encoding="utf-8").splitlines()] if kept.exists() else []
    finished = {line["row"]: line for line in lines}
    for row in asked:
        # What Torch-Pruning's own row found need not be looked for again.
        known = finished.get(Row(row.model, PRUNED, row.asked).name, {}).get("choices", []) if row.method == REFITTED else []
        if row.name not in finished and (found := run_apart(row, args.torch, known)) is not None:
            finished[row.name] = {"row": row.name, **found}
            with kept.open("a", encoding="utf-8") as stream:
                stream.write(json.dumps(finished[row.name]) + "\n")
            print(row.model, _line(row, found), flush=True)
    pictures = {model: args.output.with_name(f"{args.output.stem}_{model}.svg") for model in MODELS}
    pictures = {model: path for model, path in pictures.items() if draw(model, finished, path)}
    page_text = HEAD.format(minutes=MINUTES) + "\n".join(page(finished, pictures)) + "\n"
    args.output.write_text(page_text, encoding="utf-8")
    return 0 if all(row.name in finished for row in asked) else 1


if __name__ == "__main__":
    sys.exit(main())
