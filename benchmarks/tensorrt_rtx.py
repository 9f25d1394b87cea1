"""Whether TensorRT-RTX accepts each real model, before and after compression, and which layers it makes of them.

    python benchmarks/tensorrt_rtx.py [-o benchmarks/tensorrt_rtx.md] [FOLDER]

Needs the `tensorrt` extra, no GPU. Every run is the command itself: `compress --groups 2` for each way of Gathers, then `bench
--runner tensorrt-rtx` on the model and the three results. Layers are those of NVIDIA's parser: conv / gather / reformat / other.
"""

import argparse
import json
import tempfile
from pathlib import Path

from rows import need
from zoo import ZOO, run

WAYS = ("free", "shared", "none")
# What TensorRT thinks of a graph depends on its structure; how good the groups are is measured elsewhere.
QUICK = ("--no-verify", "--solver", "paper", "--effort", "0", "--jobs", "1")
# Where dynamic axes need another size than batch 1 and 224 pixels; fixed by `export` first, for ppocr_cls_mobile calls its height
# and width by one name, and TensorRT then wants them equal.
SHAPES = {"ppocr_cls_mobile": "1x3x48x192", "linknet_methane_dyn": "1x4x256x256"}


def layers(path: Path) -> str:
    """Return the layer counts, or the sentence with which the model is refused."""
    code, text, error, *_ = run(["bench", str(path), "--runner", "tensorrt-rtx", "--json"])
    if code:
        return f"refused: {error.replace(str(path), path.name)}"
    kinds = [layer["kind"] for layer in json.loads(text)["models"][0]["layers"]]
    return " / ".join(str(kinds.count(kind)) for kind in ("conv", "gather", "reformat", "other"))


def row(path: Path, folder: Path) -> str:
    if path.stem in SHAPES:
        fixed = folder / path.name
        run(["export", str(path), "--target", "tensorrt", "--input-shape", SHAPES[path.stem], "-o", str(fixed)])
        path = fixed
    cells = [layers(path)]
    for way in WAYS if not cells[0].startswith("refused") else ():
        output = folder / f"{path.stem}.{way}.onnx"
        code, _, error, *_ = run(["compress", str(path), "--groups", "2", "--gathers", way, *QUICK, "-o", str(output)])
        cells.append(f"not compressed: {error}" if code else layers(output))
    cells += ["" for _ in range(1 + len(WAYS) - len(cells))]
    return f"| {path.stem} | {' | '.join(cell.replace('|', '/') for cell in cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path, default=ZOO)
    parser.add_argument("-o", "--output", type=Path, help="also write the table to this file")
    args = parser.parse_args()
    need(args.folder)
    lines = [f"| model | before | {' | '.join(WAYS)} |", f"|---|---|{'---|' * len(WAYS)}"]
    print("\n".join(lines), flush=True)
    with tempfile.TemporaryDirectory() as folder:
        for path in sorted(args.folder.glob("*.onnx")):
            lines.append(row(path, Path(folder)))
            print(lines[-1], flush=True)
    if args.output:
        head = (
            f"# TensorRT-RTX on every real model\n\nMade by `python benchmarks/tensorrt_rtx.py -o {args.output}`, without a GPU.\n"
        )
        about = "Engines were built of all models whose cell has layers (conv / gather / reformat / other). Compressed with\n"
        about += f"`--groups 2 {' '.join(QUICK)}`: what is looked at is the structure.\n"
        args.output.write_text(f"{head}{about}\n" + "\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
