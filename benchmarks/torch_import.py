"""Import every model at hand into PyTorch, compare it with ONNX Runtime, write it back untrained, and print a Markdown table.

    python benchmarks/torch_import.py [-o benchmarks/torch_import.md] [FOLDER]

The folder defaults to ../shared/zoo; what plain onnx2torch 1.5.15 made of a model is quoted from INDEX.md in it. Each model runs in a
process of its own. The difference is the largest over all outputs, as a share of the output's largest value, on two seeded samples.
"""

import argparse
import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import onnx

ROOT = Path(__file__).resolve().parent.parent
ZOO = ROOT.parent / "shared" / "zoo"
LIMIT = 1e-4  # of an output's largest value
HEAD = "| model | nodes | kinds | weights trained | result | difference | a step trains | round trip | onnx2torch 1.5.15 |"
# Why a model is no case for training in PyTorch at all.
OUT_OF_SCOPE = {
    "qdq_mobilenetv2_imagenet": "integer weights behind QuantizeLinear: no float model",
    "neg_superres_customops": "operators of a library that is not there: ONNX Runtime refuses it, too",
}


def one(path: Path) -> dict[str, Any]:
    """Return what comes of one model: import, comparison, one step of training, round trip."""
    import torch

    from onnx_gconv.errors import GconvError
    from onnx_gconv.model.file import load as load_file
    from onnx_gconv.runtime import feed_batches, session, with_outputs
    from onnx_gconv.torch import load, save_back
    from onnx_gconv.torch.comparing import require_equal, to_computable

    torch.set_num_threads(1)
    model = load_file(path)
    result: dict[str, Any] = {"nodes": len(model.graph.node), "kinds": len(Counter(node.op_type for node in model.graph.node))}
    try:
        module = load(model)
        difference = require_equal(module, model)
    except GconvError as error:
        return result | {"error": str(error)}
    back = save_back(module, model)
    same = back.SerializeToString(deterministic=True) == model.SerializeToString(deterministic=True)
    result |= {
        "weights": len(list(module.parameters())),
        "left_off": len(model.graph.output) - len(module.output_names),
        "difference": difference.max_rel,
        "same": same,
    }
    active = session(with_outputs(model, module.output_names))
    feeds = next(iter(feed_batches(model, active, given={}, seed=0, samples=1)))
    module.train()
    module.freeze_bn = True  # one sample has no statistics where a map is one pixel
    outputs = module(**{name: to_computable(feeds[name]) for name in module.input_names})
    floats = [out for out in (outputs if isinstance(outputs, tuple) else (outputs,)) if out.requires_grad]
    if floats:
        torch.stack([out.square().mean() for out in floats]).sum().backward()
    moved = [p for p in module.parameters() if p.grad is not None and bool(p.grad.isfinite().all())]
    return result | {"with_gradient": len(moved)}


def onnx2torch_column(folder: Path) -> dict[str, str]:
    """Return what INDEX.md says of plain onnx2torch, by file name."""
    index = folder / "INDEX.md"
    lines = index.read_text(encoding="utf-8").splitlines() if index.exists() else []
    cells = [[cell.strip() for cell in line.strip().strip("|").split("|")] for line in lines if line.startswith("| ")]
    return {row[0]: row[-1] for row in cells if row[0].endswith(".onnx")}


def row(path: Path, said: str) -> tuple[str, bool]:
    """Return the table row of a model, and whether it came through."""
    done = subprocess.run([sys.executable, __file__, "--one", str(path)], capture_output=True, text=True, check=False)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        return f"| {path.stem} | | | | CRASHED: {last} | | | | {said} |", False
    got = json.loads(done.stdout.splitlines()[-1])
    if "error" in got:
        return f"| {path.stem} | {got['nodes']} | {got['kinds']} | | refused: {got['error']} | | | | {said} |", False
    good = got["same"] and got["difference"] <= LIMIT
    left_off = f", {got['left_off']} outputs left off" if got["left_off"] else ""
    return (
        f"| {path.stem} | {got['nodes']} | {got['kinds']} | {got['weights']} | {'imported' if good else 'DIFFERS'}{left_off} "
        f"| {got['difference']:.1e} | {got['with_gradient']} of {got['weights']} | {'same bytes' if got['same'] else 'CHANGED'} "
        f"| {said} |"
    ), good


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path, default=ZOO)
    parser.add_argument("-o", "--output", type=Path, help="also write the table to this file")
    parser.add_argument("--one", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print(json.dumps(one(args.one)))
        return
    said = onnx2torch_column(args.folder)
    lines = [HEAD, "|---" * HEAD.count(" | ") + "|---|"]
    print("\n".join(lines), flush=True)
    good = asked = 0
    for path in sorted(args.folder.glob("*.onnx")):
        text, came = row(path, said.get(path.name, ""))
        if path.stem in OUT_OF_SCOPE:
            text += f" (not counted: {OUT_OF_SCOPE[path.stem]})"
        else:
            asked, good = asked + 1, good + came
        print(text, flush=True)
        lines.append(text)
    by_others = sum(said.get(path.name, "").startswith("ok") for path in args.folder.glob("*.onnx"))
    total = (
        f"{good} of the {asked} models whose operators make sense in PyTorch come in with a difference of at most {LIMIT:g} and go "
        f"back with the same bytes; plain onnx2torch imports {by_others}."
    )
    print(total)
    if args.output:
        made = "Made by `python benchmarks/torch_import.py -o benchmarks/torch_import.md`; models as in ../shared/zoo.\n\n"
        made += " ".join((__doc__ or "").split("\n\n")[2].split()) + (
            " A step trains: weights that get a finite gradient from the squared outputs.\n\n"
        )
        args.output.write_text(f"# Import into PyTorch\n\n{made}{total}\n\n" + "\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
