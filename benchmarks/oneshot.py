"""What is left of a model's accuracy after one-shot compression without labels or training, and what the alternatives leave.

    python benchmarks/oneshot.py -o benchmarks/oneshot.md [--rows REGEX] [--images 10000] [--samples 5000]

Needs ../shared and Pillow. Calibration: the first training images of CIFAR-10, without labels, 1,000 or 5,000 of them; judged
on the test images. Smaller --samples and --images make a quick try of it. Every row runs in a process of its own and is kept
in OUTPUT.jsonl: a row that is there is not run again. Seed 0.
"""

import argparse
import json
import os
import re
import resource
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from rows import need

if TYPE_CHECKING:
    import onnx
    from cifar_images import Images

    from onnx_gconv.pipeline.settings import CostName, GathersName

SHARED = Path(__file__).resolve().parent.parent.parent / "shared"
SEED = 0
JOBS = os.cpu_count() or 1
Finished = Mapping[str, Mapping[str, Any]]  # what the rows that are done measured, by name
Method = Literal["dense", "recovered", "masked", "BN statistics", "channels", "Torch-Pruning local", "Torch-Pruning global"]
PLANNED: tuple[Method, ...] = ("recovered", "masked", "BN statistics")
ASKED = (("cifar10_resnet20", "72.99%"), ("cifar10_resnet20", "50%"), ("cifar10_resnet56", "47.16%"))
ELSEWHERE_BUDGET = "76.92%"  # a 1.3th
ELSEWHERE_SAMPLES = 250
AT_ONCE = 50  # samples whose divergences are averaged
# Models without CIFAR's classes: side of their images here, and whether they want them normalised.
ELSEWHERE = {"imagenet_mobilenet_v2_bn": (224, True), "nudenet_yolov8n": (224, False)}
HEAD = """\
# One-shot compression without labels or training

Made by `python benchmarks/oneshot.py -o benchmarks/{name} --torch PYTHON --images {images}`: CIFAR-10, top-1 in % of the first
{images:,} test images; calibration on the first training images, without labels; seed {seed}. Seconds, CPU seconds and peak
memory are those of planning and recovery; other work was running on the {cores} cores, so that CPU seconds say more than seconds.
"Recovered" rows with 1,000 images by `trial` are of the present version, all others of earlier ones, whose fit was weaker.

- recovered: `compress --calib`
- masked: grouped, nothing else
- BN statistics: mean and variance of each BatchNormalization measured anew
- channels: the weakest inner channels of each residual block left out (L2 norm of their filters, the same share in every
  block), all weights fitted by the same closed form
- Torch-Pruning: channels of least L1 magnitude left out, the same share in every layer (local) or by one ranking (global)
"""


@dataclass(frozen=True)
class Row:
    """One run."""

    model: str
    budget: str  # --max-macs
    method: "Method" = "recovered"
    cost: "CostName" = "trial"
    gathers: "GathersName" = "free"
    samples: int = 1000
    effort: int = 1

    @property
    def name(self) -> str:
        """What --rows is matched with, and what a finished row is known by."""
        *most, effort = map(str, vars(self).values())
        return " ".join(most if self.effort == 1 else [*most, f"effort {effort}"])


def sections(most_samples: int) -> dict[str, list[Row]]:
    """Return the rows under their headings; a row may be under several, and is run once."""
    folded = [(f"{model}_folded", budget) for model, budget in ASKED]
    both = [(f"{model}_{kind}", budget) for model, budget in ASKED for kind in ("bn", "folded")]
    with_bn = [(f"{model}_bn", budget) for model, budget in ASKED]
    costs: tuple[CostName, ...] = ("trial", "sensitivity", "log", "share")
    orders: tuple[GathersName, ...] = ("free", "shared", "none")
    all_rows = {
        "Recovered, as `compress --calib` does it": [
            *(Row(model, "100%", "dense", samples=0) for model in dict.fromkeys(model for model, _ in both)),
            *(Row(*asked, samples=samples) for asked in both for samples in (1000, 5000)),
        ],
        "The same with `--effort 2`": [Row(*asked, effort=2) for asked in both],
        "Channel pruning instead, with the same refit": [
            Row(*asked, "channels", samples=samples) for asked in folded for samples in (1000, 5000)
        ],
        "Torch-Pruning instead: L1 magnitude, BN statistics measured anew": [
            Row(*asked, method, samples=samples)
            for asked in with_bn
            for method in ("Torch-Pruning local", "Torch-Pruning global")
            for samples in (0, 1000)
        ],
        "Without recovery (the plan of the default cost without data)": [
            *(Row(*asked, "masked", cost="log", samples=0) for asked in both),
            *(Row(*asked, "BN statistics", cost="log") for asked in with_bn),
        ],
        "What the search minimises": [Row(*asked, cost=cost) for asked in both for cost in costs],
        "Partitions: one for each Conv, or shared": [Row(*asked, gathers=order) for asked in folded for order in orders],
        "Beyond CIFAR: distance to the dense model": [
            Row(model, ELSEWHERE_BUDGET, cost=cost, samples=ELSEWHERE_SAMPLES) for model in ELSEWHERE for cost in costs
        ],
    }
    return {
        heading: list(dict.fromkeys(replace(row, samples=min(row.samples, most_samples)) for row in rows))
        for heading, rows in all_rows.items()
    }


def run(row: Row, images: int) -> dict[str, Any]:
    """Return what one row measures, in this process: the peak memory is that of compression alone."""
    from onnx_gconv.model.file import load

    model = load(SHARED / "zoo" / f"{row.model}.onnx")
    calibration, test = _data(model, row, images)
    started, cpu_started = time.perf_counter(), time.process_time()
    before, after, share = _compressed(row, model, calibration)
    cost = {
        "macs": share,
        "seconds": time.perf_counter() - started,
        "cpu_seconds": time.process_time() - cpu_started,
        "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }
    return cost | (_distances(model, before, after, test) if row.model in ELSEWHERE else _accuracy(after, test))


def _data(model: "onnx.ModelProto", row: Row, images: int) -> "tuple[Images, Images]":
    from cifar_images import SIDE, cifar_images

    side, is_normalised = ELSEWHERE.get(row.model, (SIDE, True))
    name = model.graph.input[0].name
    train = cifar_images("train", max(1, row.samples), name, side=side, is_normalised=is_normalised)
    limit = min(images, row.samples) if row.model in ELSEWHERE else images
    return train.unlabelled(), cifar_images("test", limit, name, side=side, is_normalised=is_normalised)


def _compressed(row: Row, model: "onnx.ModelProto", data: "Images") -> "tuple[onnx.ModelProto, onnx.ModelProto, float]":
    """Return the model masked, the same after what the row does to recover it, and the share of the MACs that is left."""
    from oneshot_alternatives import prune_channels, with_fresh_statistics

    import onnx_gconv
    from onnx_gconv.recover.calibration import calibration
    from onnx_gconv.recover.fitting import FitOptions
    from onnx_gconv.search.budget import parse_limit

    if row.method == "dense":
        return model, model, 1.0
    network, samples = onnx_gconv.inspect(model), calibration(data, model, row.samples)
    macs = network.count.macs
    assert macs is not None
    if row.method == "channels":
        options, most = FitOptions(seed=SEED, jobs=JOBS), parse_limit(row.budget).of(macs)
        pruned, left = prune_channels(model, network, most, samples.feeds(), options=options)
        return model, pruned, left / macs
    calib: Any = {"calib": data, "calib_samples": row.samples} if row.samples else {}
    method: Any = {"cost": row.cost, "gathers": row.gathers, "effort": row.effort}
    plan = onnx_gconv.plan(model, max_macs=row.budget, seed=SEED, **calib, **method).plan
    masked = after = onnx_gconv.mask(model, plan, verify=False).model
    if row.method == "BN statistics":
        after = with_fresh_statistics(masked, samples.feeds())
    elif row.method == "recovered":
        after = onnx_gconv.apply(model, plan, seed=SEED, **calib).model
    return masked, after, (plan.after.macs or 0) / macs


def _accuracy(model: "onnx.ModelProto", test: "Images") -> dict[str, Any]:
    from onnx_gconv.evaluation import evaluate

    return {"top1": evaluate(model, test).top1}


def _distances(
    dense: "onnx.ModelProto", masked: "onnx.ModelProto", fitted: "onnx.ModelProto", test: "Images"
) -> dict[str, list[float | None]]:
    """Return, for the model before and after recovery: relative L2 of the outputs, KL divergence and agreement of classes."""
    import numpy as np

    from onnx_gconv.evaluation import evaluate
    from onnx_gconv.recover.divergence import divergence
    from onnx_gconv.runtime import run as run_session
    from onnx_gconv.runtime import session

    def divergences(model: "onnx.ModelProto") -> Iterator[float]:
        one, two = session(dense), session(model)
        for batch in test.batches(AT_ONCE):
            yield divergence(run_session(one, batch.inputs), run_session(two, batch.inputs))

    found = [evaluate(model, test.unlabelled(), reference=dense) for model in (masked, fitted)]
    classifies = found[0].agreement is not None
    return {
        "relative_l2": [max(gap.relative_l2 for gap in each.outputs.values()) for each in found],
        "kl": [float(np.mean(list(divergences(model)))) for model in (masked, fitted)] if classifies else [None, None],
        "agreement": [each.agreement for each in found],
    }


def run_apart(row: Row, images: int, torch_python: str | None) -> dict[str, Any] | None:
    """Return what the row measures in a process of its own, None where it failed."""
    command = [sys.executable, __file__, "--only", json.dumps(asdict(row))]
    if row.method.startswith("Torch-Pruning"):
        if torch_python is None:
            print(f"left out, as there is no --torch: {row.name}", file=sys.stderr, flush=True)
            return None
        depth = row.model.removeprefix("cifar10_resnet").removesuffix("_bn")
        command = [torch_python, str(Path(__file__).with_name("oneshot_torch_pruning.py")), "--depth", depth]
        command += ["--budget", row.budget, "--scope", row.method.split()[1], "--samples", str(row.samples)]
    # One thread for each product of matrices, as the command has it: calibration batches are shared out instead.
    environment = {"OPENBLAS_NUM_THREADS": "1", **os.environ}
    done = subprocess.run([*command, "--images", str(images)], stdout=subprocess.PIPE, text=True, check=False, env=environment)
    if done.returncode:
        print(f"failed: {row.name}", file=sys.stderr, flush=True)
        return None
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def page(headed: Mapping[str, list[Row]], finished: Finished) -> Iterator[str]:
    """Yield the lines of the result page: the rows that are there."""
    for heading, rows in headed.items():
        there = [row for row in rows if row.name in finished]
        if not there:
            continue
        is_elsewhere = there[0].model in ELSEWHERE
        yield f"\n## {heading}\n"
        judged = "relative L2 | KL | same class" if is_elsewhere else "top-1"
        yield f"| model | MACs left | method | cost | gathers | images | {judged} | s | CPU s | peak MiB |"
        yield "|---" * (11 if is_elsewhere else 9) + "|---|"
        for row in there:
            yield _line(row, finished[row.name], is_elsewhere=is_elsewhere)


def _line(row: Row, found: Mapping[str, Any], *, is_elsewhere: bool) -> str:
    def change(name: str, form: str) -> str:
        before, after = found[name]
        return "" if after is None else f"{before:{form}} → {after:{form}}"

    judged = (
        [change("relative_l2", ".3f"), change("kl", ".3f"), change("agreement", ".1%")]
        if is_elsewhere
        else [f"{100 * found['top1']:.2f}"]
    )
    is_planned = row.method in PLANNED
    cells = [
        row.model,
        f"{found['macs']:.2%}",
        row.method,
        row.cost if is_planned else "",
        row.gathers if is_planned else "",
        f"{row.samples:,}" if row.samples else "",
        *judged,
        *(f"{found[name]:.0f}" if row.method != "dense" else "" for name in ("seconds", "cpu_seconds", "peak_mib")),
    ]
    return f"| {' | '.join(cells)} |"


def write(path: Path, headed: Mapping[str, list[Row]], finished: Finished, images: int) -> None:
    """Write the result page."""
    head = HEAD.format(name=path.name, images=images, seed=SEED, cores=JOBS)
    path.write_text(head + "\n".join(page(headed, finished)) + "\n", encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output", type=Path, default=Path("oneshot.md"), help="the page; finished rows go beside it")
    parser.add_argument("--rows", default="", metavar="REGEX", help="run only rows whose name it matches")
    parser.add_argument("--images", type=int, default=10_000, help="test images (default all 10,000)")
    parser.add_argument("--samples", type=int, default=5_000, help="calibration images at most (default 5,000)")
    parser.add_argument("--torch", metavar="PYTHON", help="the Python of an environment with torch-pruning, for its rows")
    parser.add_argument("--list", action="store_true", help="print the names of the rows and stop")
    parser.add_argument("--only", help=argparse.SUPPRESS)  # the row that this process runs
    args = parser.parse_args()
    if args.only:
        print(json.dumps(run(Row(**json.loads(args.only)), args.images)))
        return 0
    headed = sections(args.samples)
    rows = dict.fromkeys(row for section in headed.values() for row in section)
    chosen = [row for row in rows if re.search(args.rows, row.name)]
    if args.list:
        print("\n".join(row.name for row in chosen))
        return 0
    need(SHARED)
    kept = args.output.with_suffix(".jsonl")
    lines = [json.loads(line) for line in kept.read_text(encoding="utf-8").splitlines()] if kept.exists() else []
    finished = {line["row"]: line for line in lines if line["images"] == args.images}
    failed = 0
    for row in chosen:
        if row.name in finished:
            continue
        found = run_apart(row, args.images, args.torch)
        if found is None:
            failed += 1
            continue
        finished[row.name] = {"row": row.name, "images": args.images, **found}
        with kept.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(finished[row.name]) + "\n")
        write(args.output, headed, finished, args.images)
        print(_line(row, found, is_elsewhere=row.model in ELSEWHERE), flush=True)
    write(args.output, headed, finished, args.images)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
