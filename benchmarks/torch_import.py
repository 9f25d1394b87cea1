"""Import every model at hand into PyTorch, compare it with ONNX Runtime, write it back untrained, and print a Markdown table.

    python benchmarks/torch_import.py [-o benchmarks/torch_import.md] [FOLDER]

The folder defaults to ../shared/zoo; the shapes to feed, and what plain onnx2torch 1.5.15 made of a model, are those of INDEX.md
in it. Each model runs in a process of its own, on two seeded samples. Given are two differences: the largest of any output as a
share of the model's largest output, and as a share of that very output's largest value. Where the latter is above 1e-4, the graph
runs once more in float64, and both are held against that.
"""

import argparse
import json
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rows import need

if TYPE_CHECKING:
    import onnx

    from onnx_gconv.torch import OnnxModule

ROOT = Path(__file__).resolve().parent.parent
ZOO = ROOT.parent / "shared" / "zoo"
LIMIT = 1e-4  # of the largest value
HEAD = "| model | nodes | kinds | result | difference | of its own output | get a gradient | round trip | onnx2torch 1.5.15 |"
# Why a model is no case for training in PyTorch at all.
OUT_OF_SCOPE = {
    "qdq_mobilenetv2_imagenet": "integer weights behind QuantizeLinear: no float model",
    "neg_superres_customops": "operators of a library that is not there: ONNX Runtime refuses it, too",
}

# Where INDEX.md's shape does not fit seeded inputs: a random sampling rate takes silero's 8 kHz branch.
SHAPES = {"silero_vad_if": {"input": (1, 288), "state": (2, 1, 128)}}


def one(path: Path, shapes: dict[str, tuple[int, ...]]) -> dict[str, Any]:
    """Return what comes of one model: import, comparison, gradients, round trip."""
    import torch

    from onnx_gconv.errors import GconvError
    from onnx_gconv.model.file import load as load_file
    from onnx_gconv.runtime import feed_batches, run, session, with_outputs
    from onnx_gconv.torch import load, save_back
    from onnx_gconv.torch.comparing import require_equal, to_computable

    torch.set_num_threads(1)
    model = load_file(path)
    result: dict[str, Any] = {"nodes": len(model.graph.node), "kinds": len(Counter(node.op_type for node in model.graph.node))}
    try:
        module = load(model, shapes=shapes)  # refuses a model with a node that differs
        difference = require_equal(module, model, shapes=shapes)
    except GconvError as error:
        return result | {"error": str(error)}
    back = save_back(module, model)
    same = back.SerializeToString(deterministic=True) == model.SerializeToString(deterministic=True)
    result |= {
        "weights": len(list(module.parameters())),
        "left_off": len(model.graph.output) - len(module.output_names),
        "difference": of_the_largest(module, model, shapes),
        "of_own_output": difference.max_rel,
        "same": same,
    }
    active = session(with_outputs(model, module.output_names))
    feeds = next(iter(feed_batches(model, active, given=shapes, seed=0, samples=1)))
    if difference.max_rel > LIMIT:
        result |= in_float64(model, feeds, run(active, feeds))
    module.train()
    module.freeze_bn = True  # one sample has no statistics where a map is one pixel
    found = module(**{name: to_computable(feeds[name]) for name in module.input_names})
    made = [out for out in (found if isinstance(found, tuple) else (found,)) if out.requires_grad]
    if made:
        torch.stack([out.square().mean() for out in made]).sum().backward()
    moved = [p for p in module.parameters() if p.grad is not None and bool(p.grad.isfinite().all())]
    return result | {"with_gradient": len(moved)}


def of_the_largest(module: "OnnxModule", model: "onnx.ModelProto", shapes: dict[str, tuple[int, ...]]) -> float:
    """Return the largest difference of any number of any output, as a share of the largest number there is."""
    import numpy as np

    from onnx_gconv.runtime import feed_batches, run, session, with_outputs
    from onnx_gconv.torch.comparing import SAMPLES, tensors_of

    active = session(with_outputs(model, module.output_names))
    worst = 0.0
    for feeds in feed_batches(model, active, given=shapes, seed=0, samples=SAMPLES):
        expected = {name: np.asarray(value) for name, value in run(active, feeds).items()}
        found = tensors_of(module, feeds, list(expected))
        floats = {name: value for name, value in expected.items() if value.dtype.kind == "f" and value.size}
        gaps = [float(np.abs(value - found[name].numpy()).max()) for name, value in floats.items()]
        worst = max(worst, max(gaps) / max(float(np.abs(value).max()) for value in floats.values()))
    return worst


def in_float64(model: "onnx.ModelProto", feeds: Any, expected: Any) -> dict[str, float]:
    """Return how far ONNX Runtime and the module are from a run of the same graph in double precision."""
    import numpy as np
    import torch

    from onnx_gconv.torch.importing import build

    def outputs(dtype: torch.dtype) -> dict[str, Any]:
        module = build(model).eval().to(dtype)
        floats = {name: dtype if kind == torch.float32 else kind for name, kind in module.program.inputs.items()}
        module.program = replace(module.program, inputs=floats)
        module._numbers = {name: v.to(dtype) if v.is_floating_point() else v for name, v in module._numbers.items()}
        with torch.no_grad():
            found = module.run({name: torch.from_numpy(np.asarray(feeds[name])) for name in floats}, list(expected))
        return {name: value.numpy() for name, value in found.items()}

    def distance(values: Any) -> float:
        return max(float(np.abs(exact[name] - values[name]).max() / np.abs(exact[name]).max()) for name in exact)

    exact = outputs(torch.float64)
    return {"float64_ort": distance(expected), "float64_ours": distance(outputs(torch.float32))}


def fed(folder: Path, path: Path) -> dict[str, tuple[int, ...]]:
    """Return the input shapes that INDEX.md feeds a model, by name."""
    cells = _index(folder).get(path.name)
    if path.stem in SHAPES or cells is None:
        return SHAPES.get(path.stem, {})
    names = [text.strip().split("[")[0] for text in cells[6].split(";")]
    shapes = [text.strip() for text in cells[7].split(";")]
    return {name: tuple(map(int, shape.split("x"))) for name, shape in zip(names, shapes, strict=False) if shape}


def _index(folder: Path) -> dict[str, list[str]]:
    index = folder / "INDEX.md"
    lines = index.read_text(encoding="utf-8").splitlines() if index.exists() else []
    cells = [[cell.strip() for cell in line.strip().strip("|").split("|")] for line in lines if line.startswith("| ")]
    return {row[0]: row for row in cells if row[0].endswith(".onnx")}


def onnx2torch_column(folder: Path) -> dict[str, str]:
    """Return what INDEX.md says of plain onnx2torch, by file name."""
    return {name: row[-1] for name, row in _index(folder).items()}


def row(path: Path, said: str) -> tuple[str, str]:
    """Return the table row of a model, and what came of it: equal, nodes equal, or nothing."""
    done = subprocess.run([sys.executable, __file__, "--one", str(path)], capture_output=True, text=True, check=False)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        return f"| {path.stem} | | | CRASHED: {last} | | | | | {said} |", "nothing"
    got = json.loads(done.stdout.splitlines()[-1])
    if "error" in got:
        return f"| {path.stem} | {got['nodes']} | {got['kinds']} | refused: {got['error']} | | | | | {said} |", "nothing"
    came = "equal" if got["difference"] <= LIMIT else "nodes equal"
    exact = f"; to float64: ONNX Runtime {got['float64_ort']:.1e}, ours {got['float64_ours']:.1e}" if "float64_ort" in got else ""
    left_off = f", {got['left_off']} outputs left off" if got["left_off"] else ""
    differences = f"{got['difference']:.1e} | {got['of_own_output']:.1e}{exact}"
    return (
        f"| {path.stem} | {got['nodes']} | {got['kinds']} | imported, {came}{left_off} | {differences} "
        f"| {got['with_gradient']} of {got['weights']} | {'same bytes' if got['same'] else 'CHANGED'} | {said} |"
    ), came if got["same"] else "nothing"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path, default=ZOO)
    parser.add_argument("-o", "--output", type=Path, help="also write the table to this file")
    parser.add_argument("--one", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print(json.dumps(one(args.one, fed(args.one.parent, args.one))))
        return
    need(args.folder)
    said = onnx2torch_column(args.folder)
    lines = [HEAD, "|---" * (HEAD.count("|") - 1) + "|"]
    print("\n".join(lines), flush=True)
    counts: Counter[str] = Counter()
    for path in sorted(args.folder.glob("*.onnx")):
        note = f" Not counted: {OUT_OF_SCOPE[path.stem]}." if path.stem in OUT_OF_SCOPE else ""
        text, came = row(path, said.get(path.name, "") + note)
        if not note:
            counts[came] += 1
        print(text, flush=True)
        lines.append(text)
    by_others = sum(text.startswith("ok") for text in said.values())
    total = (
        f"Of the {counts.total()} models whose operators make sense in PyTorch, {counts.total() - counts['nothing']} come in with "
        f"every node equal to ONNX Runtime's to {LIMIT:g}, and go back untrained with the same bytes; {counts['equal']} of them "
        f"have outputs equal to {LIMIT:g} of the largest one, too. Plain onnx2torch imports {by_others}."
    )
    print(total)
    if args.output:
        made = "Made by `python benchmarks/torch_import.py -o benchmarks/torch_import.md`; models as in ../shared/zoo. "
        args.output.write_text(
            f"# Import into PyTorch\n\n{made}{' '.join((__doc__ or '').split(chr(10) * 2)[2].split())}\n\n{total}\n\n"
            + "\n".join(lines)
            + "\n",
            encoding="utf-8",
        )


if __name__ == "__main__":
    main()
