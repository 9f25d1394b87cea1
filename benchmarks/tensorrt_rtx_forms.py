"""Whether TensorRT-RTX builds engines of every form in fp16 and int8, for each real model that it accepts before.

    python benchmarks/tensorrt_rtx_forms.py -o benchmarks/tensorrt_rtx_forms.md [--rows REGEX] [--samples 20]

Needs the `tensorrt` extra, no GPU. Every run is the command itself: `compress --max-macs 70%` with each form, calibrated on 20
samples (noise or photographs: it is about structure), then `bench --runner tensorrt-rtx --precision fp16|int8` on the model and on
the results, and `export --target tensorrt --precision int8` of the results, whose file is built as it is. A form that cannot reach
70 % gets the next of 85, 99 and 99.6 % that it can, which its cell says. What is done is kept in OUTPUT.jsonl and not run again.
"""

import argparse
import json
import re
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import in_time
import numpy as np
from rows import need
from tensorrt_rtx import SHAPES
from zoo import ZOO, run

BEFORE = "before"
FORMS = {"width,drop": "width", "group": "group", "lowrank": "low rank"}
BUDGETS = ("70%", "85%", "99%", "99.6%")
HEAD = """\
# TensorRT-RTX builds engines of all forms, in fp16 and int8

Made by `python benchmarks/tensorrt_rtx_forms.py -o benchmarks/tensorrt_rtx_forms.md`, without a GPU; what the cells are, it says at
its top. A cell is yes, or the sentence with which it was refused. u2netp was run with 4 samples. All but low rank of the
CIFAR models, clp_det, MobileNet-v2, linknet, nudenet, opennsfw and ppocr_cls is from an earlier run, with 8 (groups of ppocr_cls
are not).

Where 70 % cannot be had: hardly a Conv of ppocr_cls_mobile can have groups of a multiple of 8 channels, as TensorRT wants them. The
main stream of spindle_unet1d cannot be narrowed, since a Conv leads from these channels into themselves.

"""


def built(path: Path, *flags: str) -> str:
    """Return yes if an engine is built, or why not."""
    code, _, error, _ = run(["bench", str(path), "--runner", "tensorrt-rtx", *flags, "--json"])
    return "yes" if code == 0 else f"no: {error}"


def before(path: Path) -> list[str]:
    """Return whether engines are built of the model as it is; only one cell if it is not accepted."""
    found = built(path, "--precision", "fp16")
    if found != "yes" and built(path) != "yes":
        return [f"not accepted before: {found}"]
    return [found, built(path, "--precision", "int8")]


def after(path: Path, forms: str, samples: int) -> list[str]:
    """Return whether engines are built of the model once it has these forms."""
    calib, output, exported = (path.with_suffix(suffix) for suffix in (".npz", ".small.onnx", ".int8.onnx"))
    in_time.SAMPLES = samples
    np.savez(calib, **in_time.data(path))
    data = ("--calib", str(calib), "--calib-samples", str(samples))
    for budget in BUDGETS:
        asked = ["compress", str(path), "--max-macs", budget, "--forms", forms, *data, "--target", "tensorrt", "--effort", "0"]
        code, _, error, _ = run([*asked, "-o", str(output)])
        if "budget cannot be met" not in error:
            break
    if code:
        return [f"not compressed: {error}", "", ""]
    found = [built(output, "--precision", precision) for precision in ("fp16", "int8")]
    code, _, error, _ = run(["export", str(output), "--target", "tensorrt", "--precision", "int8", *data, "-o", str(exported)])
    found.append(f"not exported: {error}" if code else built(exported))
    return found if budget == BUDGETS[0] else [f"{found[0]} (at {budget})", *found[1:]]


def parts(path: Path, finished: Mapping[tuple[str, str], list[str]], samples: int) -> Iterator[tuple[str, list[str]]]:
    """Yield what is not known yet of a model: its cells before, and by each form."""
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / path.name
        if path.stem in SHAPES:
            run(["export", str(path), "--target", "tensorrt", "--input-shape", SHAPES[path.stem], "-o", str(model)])
        else:
            model.write_bytes(path.read_bytes())
        is_accepted = len(finished.get((path.stem, BEFORE), ["", ""])) > 1
        if (path.stem, BEFORE) not in finished:
            cells = before(model)
            is_accepted = len(cells) > 1
            yield BEFORE, _without_folders(cells)
        for forms in FORMS:
            if is_accepted and (path.stem, forms) not in finished:
                yield forms, _without_folders(after(model, forms, samples))


def _without_folders(cells: list[str]) -> list[str]:
    return [re.sub(r"'/[^' ]*/(0-)?([^'/]*)'", r"'\2'", cell) for cell in cells]


def page(finished: Mapping[tuple[str, str], list[str]]) -> str:
    """Return the table, models that are not accepted last."""
    heads = [f"{BEFORE}: fp16", "int8", *(cell for name in FORMS.values() for cell in (f"{name}: fp16", "int8", "int8 by export"))]
    lines = [f"| model | {' | '.join(heads)} |", "|---" * (len(heads) + 1) + "|"]
    for model in sorted({model for model, _ in finished}, key=lambda model: (len(finished[model, BEFORE]) < 2, model)):
        cells = (finished[model, BEFORE] + [""])[:2]
        cells += [cell for forms in FORMS for cell in finished.get((model, forms), ["", "", ""])]
        lines.append(f"| {model} | {' | '.join(cell.replace('|', '/') for cell in cells)} |")
    return HEAD + "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output", type=Path, required=True, help="the page; what is done goes beside it")
    parser.add_argument("--rows", default="", metavar="REGEX", help="only models whose name it matches")
    parser.add_argument("--samples", type=int, default=20, help="whole batches of the models that have a fixed one")
    args = parser.parse_args()
    need(ZOO)
    kept = args.output.with_suffix(".jsonl")
    rows = [json.loads(text) for text in kept.read_text(encoding="utf-8").splitlines()] if kept.exists() else []
    finished: dict[tuple[str, str], list[str]] = {(row["model"], row["forms"]): row["cells"] for row in rows}
    for path in sorted(ZOO.glob("*.onnx")):
        if not re.search(args.rows, path.stem):
            continue
        for forms, cells in parts(path, finished, args.samples):
            finished[path.stem, forms] = cells
            with kept.open("a", encoding="utf-8") as stream:
                stream.write(json.dumps({"model": path.stem, "forms": forms, "cells": cells}) + "\n")
            print(path.stem, forms, *cells, sep=" | ", flush=True)
    args.output.write_text(page(finished), encoding="utf-8")


if __name__ == "__main__":
    main()
