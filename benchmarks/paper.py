"""The evaluation of Zhao and Luk (2019) as far as it goes without their training budget: figures, then a page.

    OPENBLAS_NUM_THREADS=1 python benchmarks/paper.py [SECTION ...] [--page docs/paper.md]

Sections: counts (Tables 1 and 2), weights and matrices (Figure 5), configurations (Figure 6), heuristic (Table 3), page.
Every step is a line of benchmarks/paper.jsonl; one that is there is not run again, and `page` makes docs/paper.md and its
pictures of the lines alone. Needs ../shared and Pillow; `heuristic`, and `counts` for models that --arch lacks, PyTorch.
All of it takes about 25 minutes of one core.
"""

import argparse
import json
import re
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from cifar_images import SHARED
from finetune import command, write_data
from paper_page import EPOCHS, GROUPS, MODEL, RATE, TRAINING_IMAGES, UNIFORM, Finished, figures, page
from solver import layers, permuted_blocks

import onnx_gconv
from onnx_gconv.model.file import load
from onnx_gconv.model.network import read
from onnx_gconv.model.shapes import input_shapes
from onnx_gconv.solve.bound import kept_bound
from onnx_gconv.solve.layer import Solver

ROOT = Path(__file__).resolve().parent.parent
SOLVERS = (
    {"N_S=0": Solver("plain")}
    | {f"N_S={rounds}": Solver("paper", rounds) for rounds in (1, 2, 5, 10)}
    | {f"ours, effort {effort}": Solver("best", effort=effort) for effort in (0, 1)}
)
MATRICES_A_STEP = 50
TEST_IMAGES = 10_000
Result = dict[str, Any]


@dataclass(frozen=True)
class Step:
    """One line of the results: its name, and what finds it."""

    name: str
    run: Callable[[], Result]


# --- counts: the parameter and FLOP columns of Tables 1 and 2


def counts(args: argparse.Namespace) -> Iterator[Step]:
    for name, numbers in UNIFORM.items():
        for groups in numbers:
            yield Step(f"counts {name} G={groups}", lambda name=name, groups=groups: counted(args.arch, name, groups=groups))
    for name, limits in (
        ("resnet164", {"max_params": "1.46M", "max_flops": "333M"}),
        ("resnet164", {"max_params": "1.21M", "max_flops": "247M"}),
        ("densenet86", {"max_params": "50%", "max_flops": "50%"}),
    ):
        both = " ".join(limits.values())
        yield Step(f"counts {name} {both}", lambda name=name, limits=limits: counted(args.arch, name, limits=limits))


def counted(arch: Path, name: str, *, groups: int | None = None, limits: dict[str, str] | None = None) -> Result:
    """Return parameters and FLOPs with uniform groups or under limits; every Conv that can be grouped is, but for the first."""
    path = arch / f"{name}.onnx"
    if not path.exists():
        script = ROOT / "models" / "export_architectures.py"
        subprocess.run([sys.executable, str(script), name, "-o", str(arch)], check=True)
    model = load(path)
    network = read(model, input_shapes(model, {}))
    params, macs = network.count.params, network.count.macs
    if groups != 1:
        # What a choice of groups leaves does not depend on the permutation, nor, under limits, on the (random) weights.
        after = onnx_gconv.plan(model, groups=groups, solver="plain", **(limits or {})).plan.after
        params, macs = after.params, after.macs
    assert macs is not None
    stem = next(iter(network.count.node_macs.values()))
    return {"params": params, "flops": 2 * macs, "stem_flops": 2 * (stem or 0)}


# --- weights: Figure 5, right


def weights(args: argparse.Namespace) -> Iterator[Step]:
    for name in ("cifar10_resnet20_bn", "cifar10_resnet56_bn", "imagenet_mobilenet_v2_bn"):
        for solver in (*SOLVERS, "bound"):
            yield Step(f"weights {name} {solver}", lambda name=name, solver=solver: kept(name, solver))


def kept(name: str, solver: str) -> Result:
    """Return, for each G, the share of the importance that stays, of all layers that can have G groups together."""
    inside, whole, number = (dict.fromkeys(GROUPS, 0.0) for _ in range(3))
    for layer, matrix in layers(SHARED / "zoo" / f"{name}.onnx"):
        legal = [g for g in GROUPS if g in layer.legal_groups and layer.groups == 1]
        if solver == "bound":
            found = {g: kept_bound(matrix, g) for g in legal}
        else:
            found = {g: one.kept for g, one in SOLVERS[solver].solve_each(matrix, legal).items()}
        for g, share in found.items():
            inside[g] += share * float(matrix.sum())
            whole[g] += float(matrix.sum())
            number[g] += 1
    return {"kept": {str(g): inside[g] / whole[g] for g in GROUPS}, "layers": {str(g): int(number[g]) for g in GROUPS}}


# --- matrices: Figure 5, left


def matrices(args: argparse.Namespace) -> Iterator[Step]:
    for first in range(0, args.matrices, MATRICES_A_STEP):
        seeds = range(first, min(first + MATRICES_A_STEP, args.matrices))
        yield Step(f"matrices {seeds[0]} to {seeds[-1]}", lambda seeds=seeds: recovered(seeds))


def recovered(seeds: range) -> Result:
    """Return the recovery ratio of each solver on the permuted block-diagonal matrix of each seed."""
    found: dict[str, list[float]] = {name: [] for name in SOLVERS}
    for seed in seeds:
        matrix = permuted_blocks(seed, channels=128, groups=16)
        for name, solver in SOLVERS.items():
            found[name].append(round(solver.solve(matrix, 16).kept, 12))
    return {"ratios": found}


# --- configurations: Figure 6

PAPER_SEARCH = ("--solver", "paper", "--search", "local", "--cost", "share")


def configurations(args: argparse.Namespace) -> Iterator[Step]:
    shares = ("75%", "136090", "69274", "35866")  # the last three are what uniform G = 2, 4 and 8 leave
    ways: dict[str, tuple[str, ...]] = {f"uniform G={g}": ("--groups", str(g)) for g in (2, 4, 8)}
    ways |= {f"explored {share}": ("--max-params", share) for share in shares}
    ways |= {f"G_M={channels}": ("--max-group-channels", str(channels)) for channels in (32, 16, 8)}
    ways |= {f"paper's search {share}": ("--max-params", share, *PAPER_SEARCH) for share in shares}
    for way, flags in ways.items():
        yield Step(f"configurations {way}", lambda flags=flags: compressed(args, flags))


def compressed(args: argparse.Namespace, flags: tuple[str, ...]) -> Result:
    """Return what `compress` makes of the model with these flags: size, estimated cost, accuracy after recovery."""
    data = write_data(args.work / "data", TRAINING_IMAGES, TEST_IMAGES)
    out = args.work / "compressed.onnx"
    report = json.loads(
        command(
            *("compress", model_path(), *flags, "--calib", data["calibration"], "--jobs", 1),
            *("--eval", data["test"], "-o", out, "-q", "--json"),
        )
    )
    return {
        "params": report["after"]["params"],
        "flops": report["after"]["flops"],
        "cost": sum(1 - layer["kept"] for layer in report["layers"]),
        "groups": [layer["groups"] for layer in report["layers"]],
        "dense": report["evaluation"]["reference_top1"],
        "top1": report["evaluation"]["top1"],
        "dense_params": report["before"]["params"],
    }


def model_path() -> Path:
    return SHARED / "zoo" / f"{MODEL}.onnx"


# --- heuristic: Table 3


def heuristic(args: argparse.Namespace) -> Iterator[Step]:
    for seed in range(args.seeds):
        for groups in (2, 8):
            for solver in ("plain", "paper", "best"):
                yield Step(
                    f"heuristic G={groups} {solver} seed {seed}",
                    lambda groups=groups, solver=solver, seed=seed: tuned(args, groups, solver, seed),
                )


def tuned(args: argparse.Namespace, groups: int, solver: str, seed: int) -> Result:
    """Return the accuracy of uniform groups before and after fine-tuning from the masked weights, and what was kept."""
    data = write_data(args.work / "data", TRAINING_IMAGES, TEST_IMAGES)
    plan, after, grouped = (args.work / name for name in ("plan.json", "tuned.onnx", "grouped.onnx"))
    command("plan", model_path(), "--groups", groups, "--solver", solver, "-o", plan, "-q", "--jobs", 1)
    command(
        *("finetune", model_path(), plan, "--data", data["labelled"], "-o", after, "--epochs", EPOCHS, "--batch-size", 64),
        *("--augment", "crop,flip", "--lr", RATE, "--val-split", 0, "--seed", seed, "-q"),
    )
    command("apply", after, plan, "-o", grouped, "-q")
    judged = json.loads(command("evaluate", grouped, "--data", data["test"], "--json"))
    shares = [layer["kept"] for layer in json.loads(plan.read_text())["layers"]]
    return {"top1": judged["top1"], "kept": float(np.mean(shares))}


SECTIONS: dict[str, Callable[[argparse.Namespace], Iterator[Step]]] = {
    "counts": counts,
    "weights": weights,
    "configurations": configurations,
    "heuristic": heuristic,
    "matrices": matrices,
}


def read_results(path: Path) -> dict[str, Result]:
    """Return the finished steps by name."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return {entry["step"]: entry for entry in map(json.loads, lines)}


def page_of(finished: Finished) -> str:
    """Return the page of these steps, which also says what of a run with the default flags is missing."""
    args = make_parser().parse_args([])
    return page(finished, [step.name for section in SECTIONS.values() for step in section(args)])


def cpu_seconds() -> float:
    """Return what this process and those it has waited for have taken."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sections", nargs="*", metavar="SECTION", help="what to run (default: all)")
    parser.add_argument("-o", "--output", type=Path, default=ROOT / "benchmarks" / "paper.jsonl", help="the finished steps")
    parser.add_argument("--steps", default="", metavar="REGEX", help="only steps whose name matches")
    parser.add_argument("--page", type=Path, default=ROOT / "docs" / "paper.md", help="where to write the page")
    parser.add_argument("--arch", type=Path, default=Path("/tmp/arch"), help="folder of models/export_architectures.py")
    parser.add_argument("--work", type=Path, default=Path("/tmp/onnx-gconv-paper"), help="folder for data and models")
    parser.add_argument("--matrices", type=int, default=1000, help="random matrices to recover (default 1000)")
    parser.add_argument("--seeds", type=int, default=1, help="trainings of each row of Table 3 (default 1)")
    return parser


def main() -> int:
    parser = make_parser()
    args = parser.parse_args()
    # Not `choices`: Python 3.11 holds the empty list that stands for "all" against them.
    if unknown := set(args.sections) - {*SECTIONS, "page"}:
        parser.error(f"no section is called {sorted(unknown)[0]!r}; choose from {', '.join((*SECTIONS, 'page'))}")
    if not SHARED.exists():
        print(f"error: there is no folder '{SHARED}'.\nhint: it holds CIFAR-10 and the trained models", file=sys.stderr)
        return 1
    args.work.mkdir(parents=True, exist_ok=True)
    finished = read_results(args.output)
    wanted = args.sections or (*SECTIONS, "page")
    for step in (step for name in SECTIONS if name in wanted for step in SECTIONS[name](args)):
        if step.name in finished or not re.search(args.steps, step.name):
            continue
        started = cpu_seconds()
        entry = {"step": step.name, **step.run(), "cpu_seconds": round(cpu_seconds() - started, 1)}
        with args.output.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(entry) + "\n")
        finished[step.name] = entry
        print(f"{step.name}: {entry['cpu_seconds']} CPU s", file=sys.stderr, flush=True)
    if "page" in wanted:
        args.page.write_text(page_of(finished), encoding="utf-8")
        figures(finished, args.page.parent / "images")
    return 0


if __name__ == "__main__":
    sys.exit(main())
