"""Whether TensorRT-RTX builds engines of every form in fp16 and int8, for each real model that it accepts before.

    python benchmarks/tensorrt_rtx_forms.py [-o benchmarks/tensorrt_rtx_forms.md] [--rows REGEX]

Needs the `tensorrt` extra, no GPU. Every run is the command itself: `compress --max-macs 70%` with widths and with groups,
calibrated on 20 samples (noise or photographs: it is about structure), then `bench --runner tensorrt-rtx --precision fp16|int8` on
the model and on both results, and `export --target tensorrt --precision int8` of both, whose file is built as it is.
"""

import argparse
import re
import tempfile
from pathlib import Path

import in_time
import numpy as np
from tensorrt_rtx import SHAPES
from zoo import FOLDERS, run

FORMS = ("width,drop", "group")
SAMPLES = 20  # whole batches of the model that has a fixed one
HEAD = """\
# TensorRT-RTX builds engines of all forms, in fp16 and int8

Made by `python benchmarks/tensorrt_rtx_forms.py -o benchmarks/tensorrt_rtx_forms.md`, without a GPU; what the cells are, it says at
its top. A cell is yes, or the sentence with which it was refused.

| model | before: fp16 | int8 | width: fp16 | int8 | int8 by export | group: fp16 | int8 | int8 by export |
|---|---|---|---|---|---|---|---|---|
"""


def built(path: Path, *flags: str) -> str:
    """Return yes if an engine is built, or why not."""
    code, _, error, _ = run(["bench", str(path), "--runner", "tensorrt-rtx", *flags, "--json"])
    return "yes" if code == 0 else f"no: {error}"


def cells(path: Path, folder: Path) -> list[str]:
    """Return the row of a model; of one that is not accepted, why."""
    if path.stem in SHAPES:
        fixed = folder / path.name
        run(["export", str(path), "--target", "tensorrt", "--input-shape", SHAPES[path.stem], "-o", str(fixed)])
        path = fixed
    found = [built(path, "--precision", "fp16")]
    if found[0] != "yes" and built(path) != "yes":
        return [f"not accepted before: {found[0]}"]
    found.append(built(path, "--precision", "int8"))
    calib = folder / "calib.npz"
    np.savez(calib, **in_time.data(path))
    data = ("--calib", str(calib), "--calib-samples", str(SAMPLES))
    for forms in FORMS:
        output, exported = folder / f"{path.stem}.{forms}.onnx", folder / f"{path.stem}.{forms}.int8.onnx"
        asked = ["compress", str(path), "--max-macs", "70%", "--forms", forms, *data, "--target", "tensorrt", "--effort", "0"]
        code, _, error, _ = run([*asked, "-o", str(output)])
        if code:
            found += [f"not compressed: {error}", "", ""]
            continue
        found += [built(output, "--precision", precision) for precision in ("fp16", "int8")]
        code, _, error, _ = run(["export", str(output), "--target", "tensorrt", "--precision", "int8", *data, "-o", str(exported)])
        found.append(f"not exported: {error}" if code else built(exported))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output", type=Path, help="also write the table to this file")
    parser.add_argument("--rows", default="", metavar="REGEX", help="only models whose name it matches")
    args = parser.parse_args()
    in_time.SAMPLES = SAMPLES
    lines: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        for path in sorted(FOLDERS[0].glob("*.onnx")):
            if re.search(args.rows, path.stem):
                row = [cell.replace("|", "/").replace(str(folder) + "/", "") for cell in cells(path, Path(folder))]
                lines.append(f"| {path.stem} | {' | '.join(row + [''] * (8 - len(row)))} |")
                print(lines[-1], flush=True)
                if args.output:
                    args.output.write_text(HEAD + "\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
