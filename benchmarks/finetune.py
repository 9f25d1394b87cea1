"""What fine-tuning brings back on CIFAR-10, and what each part of it brings: `plan`, `finetune`, `apply`, `evaluate`.

    python benchmarks/finetune.py -o benchmarks/finetune.md [--rows REGEX] [--images 50000] [--epochs 10]

Needs ../shared, Pillow and PyTorch. Every row is four commands, in processes of their own, trained on the first training images
and judged on all test images. A row that is in OUTPUT.jsonl is not run again, and an interrupted one goes on where it was.
With 50,000 images an epoch of ResNet-20 takes minutes on two cores, one of ResNet-56 three times as long.
"""

import argparse
import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from cifar_images import SHARED, cifar_images
from forms import Row as FormsRow
from forms import uniform_plan
from rows import need

CALIBRATION_IMAGES = 1000
RATE = 0.1
WIDTHS = "width,drop"


@dataclass(frozen=True)
class Row:
    """One training: where it starts, and what it learns from."""

    model: str
    budget: str  # --max-macs
    # --forms; or "paper": its sort, its cost and its search; or "L2 widths", "eliminated widths": one share for all spaces, as in
    # forms.py. Rows of before widths were there have "ours" for groups.
    plan: str
    start: str  # "masked" or "recovered"
    learns_from: str  # "labels", "teacher" (no label is read) or "both"
    epochs: int

    @property
    def name(self) -> str:
        return " ".join(map(str, vars(self).values()))


def rows(epochs: int) -> Iterator[Row]:
    resnet20 = ("cifar10_resnet20_bn", "50%")
    for learns_from in ("labels", "teacher", "both"):
        yield Row(*resnet20, WIDTHS, "recovered", learns_from, epochs)
    for plan in ("group", "L2 widths", "eliminated widths"):
        yield Row(*resnet20, plan, "recovered", "teacher", epochs)
    yield Row(*resnet20, WIDTHS, "masked", "teacher", epochs)
    yield Row(*resnet20, "paper", "recovered", "teacher", epochs)
    yield Row(*resnet20, "paper", "masked", "teacher", epochs)
    yield Row("cifar10_resnet20_folded", "50%", WIDTHS, "recovered", "labels", epochs)
    for learns_from in ("labels", "teacher"):
        yield Row("cifar10_resnet56_bn", "47.16%", WIDTHS, "recovered", learns_from, epochs)


def run(row: Row, data: dict[str, Path], folder: Path) -> dict[str, Any]:
    """Return the accuracies of one row, from 0 to 1, and what the training took."""
    folder.mkdir(parents=True, exist_ok=True)
    model, plan, tuned, grouped = (
        SHARED / "zoo" / f"{row.model}.onnx",
        *(folder / n for n in ("plan.json", "tuned.onnx", "grouped.onnx")),
    )
    paper = ["--solver", "paper", "--search", "local", "--cost", "share"]
    if row.plan == "paper":
        command("plan", model, "--max-macs", row.budget, *paper, "-o", plan)
    elif row.plan.endswith("widths"):
        calib = dict(np.load(data["calibration"]))
        plan.write_text(uniform_plan(FormsRow(row.model, row.budget, row.plan), model, calib).to_json(), encoding="utf-8")
    else:
        forms = ["--forms", row.plan, *(("--width-step", "1") if "width" in row.plan else ())]
        command("plan", model, "--max-macs", row.budget, "--calib", data["calibration"], *forms, "-o", plan)
    started = time.perf_counter()
    command(
        *("finetune", model, plan, "--data", data["images" if row.learns_from == "teacher" else "labelled"], "-o", tuned),
        *("--epochs", row.epochs, "--lr", RATE, "--augment", "crop,flip"),
        *(("--distill", "0.5") if row.learns_from == "both" else ()),
        *(("--calib", data["calibration"]) if row.start == "recovered" else ()),
        *(("--resume",) if tuned.with_name("tuned.checkpoint.pt").exists() else ()),
    )
    seconds = time.perf_counter() - started
    command("apply", tuned, plan, "-o", grouped)
    evaluation = json.loads(command("evaluate", grouped, "--data", data["test"], "--reference", model, "--json"))
    history = [json.loads(line) for line in tuned.with_name("tuned.metrics.jsonl").read_text().splitlines()]
    return {
        "dense": evaluation["reference_top1"],
        "accuracy": evaluation["top1"],
        "validation": [round(record["validation_accuracy"], 4) for record in history],
        "seconds": seconds,
    }


def command(*arguments: object) -> str:
    """Return what a command prints; its story goes to this program's stderr."""
    argv = [sys.executable, "-m", "onnx_gconv", *map(str, arguments)]
    done = subprocess.run(argv, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        sys.exit(f"failed: {' '.join(argv)}")
    return done.stdout


def write_data(folder: Path, images: int, test_images: int) -> dict[str, Path]:
    """Return the data files, written unless they are there."""
    folder.mkdir(parents=True, exist_ok=True)
    result = {}
    for name, split, limit, has_labels in (
        ("calibration", "train", CALIBRATION_IMAGES, False),
        ("images", "train", images, False),
        ("labelled", "train", images, True),
        ("test", "test", test_images, True),
    ):
        result[name] = folder / f"{name}-{limit}.npz"
        if not result[name].exists():
            (batch,) = cifar_images(split, limit, "input").batches(limit)
            assert batch.labels is not None
            np.savez(result[name], **batch.inputs, **({"labels": batch.labels} if has_labels else {}))
    return result


def table(finished: dict[str, dict[str, Any]], epochs: int) -> str:
    lines = [
        "| model | MACs | plan | start | learns from | epochs | dense | tuned | held back, epoch by epoch | minutes |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows(epochs):
        if row.name in finished:
            got = finished[row.name]
            curve = " ".join(f"{100 * value:.1f}" for value in got["validation"])
            lines.append(
                f"| {row.model} | {row.budget} | {row.plan} | {row.start} | {row.learns_from} | {row.epochs} "
                f"| {got['dense']:.2%} | {got['accuracy']:.2%} | {curve} | {got['seconds'] / 60:.0f} |"
            )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--work", type=Path, default=Path("/tmp/onnx-gconv-finetune"), help="folder for data and checkpoints")
    parser.add_argument("--rows", default="", help="only rows whose name matches")
    parser.add_argument("--images", type=int, default=50_000, help="training images")
    parser.add_argument("--test-images", type=int, default=10_000)
    parser.add_argument("--epochs", type=int, default=10)
    args = parser.parse_args()
    need(SHARED)
    data = write_data(args.work / "data", args.images, args.test_images)
    kept = args.output.with_suffix(".jsonl")
    lines = kept.read_text().splitlines() if kept.exists() else []
    finished = {entry["row"]: entry for entry in map(json.loads, lines)}
    for row in rows(args.epochs):
        if re.search(args.rows, row.name) and row.name not in finished:
            print(f"== {row.name}", file=sys.stderr)
            finished[row.name] = {"row": row.name, **run(row, data, args.work / f"{row.name.replace(' ', '-')}-{args.images}")}
            with kept.open("a") as file:
                file.write(json.dumps(finished[row.name]) + "\n")
        args.output.write_text(table(finished, args.epochs))
    print(table(finished, args.epochs))


if __name__ == "__main__":
    main()
