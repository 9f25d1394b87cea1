"""How long `compress --calib` takes, and how much memory, against images, depth and width.

    python benchmarks/scale.py -o benchmarks/scale.md [--rows REGEX] [--list]

Models have random weights and images are noise: work follows the shapes. Only MobileNet-v2 is a trained one, from ../shared. Every
row runs in a process of its own and is kept in OUTPUT.jsonl: a row that is there is not run again. Seed 0, all cores.
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
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper
from resnet50 import Drawing, resnet50

ZOO = Path(__file__).resolve().parent.parent.parent / "shared" / "zoo"
DEPTHS = (20, 56, 110)
HEAD = """\
# Work and memory of `compress --calib`, against images, depth and width

Made by `python benchmarks/scale.py -o benchmarks/scale.md`; what the rows are, it says at its top. CPU seconds are those of all
threads, user and system. An exponent of 1 is linear growth: it is the slope of log CPU seconds against log images, or log depth.
"""


@dataclass(frozen=True)
class Row:
    """One run."""

    model: str  # resnetN, N layers on 32 pixels but for resnet50; or mobilenet_v2
    images: int
    budget: str = "70%"  # --max-macs

    @property
    def name(self) -> str:
        """What --rows is matched with, and what a finished row is known by."""
        return f"{self.model} {self.images}"


def sections() -> dict[str, list[Row]]:
    """Return the rows under their headings. A row may stand under several."""
    return {
        "Images": [Row("resnet20", images) for images in (64, 250, 1000)],
        "Depth": [Row(f"resnet{depth}", 250) for depth in DEPTHS],
        "ResNet-50, 224 pixels": [Row("resnet50", images) for images in (16, 64, 250)],
        "MobileNet-v2, 224 pixels": [Row("mobilenet_v2", images) for images in (64, 250)],
    }


def cifar_resnet(depth: int) -> onnx.ModelProto:
    """Return a ResNet of basic blocks for 32 pixels, of this many layers, batch normalization folded."""
    drawing, ins = Drawing(), 16
    stream = drawing.node("Relu", drawing.conv("input", 3, ins, 3))
    for width in (16, 32, 64):
        for block in range((depth - 2) // 6):
            stride = 2 if width > 16 and not block else 1
            inner = drawing.node("Relu", drawing.conv(stream, ins, width, 3, stride))
            branch = drawing.conv(inner, width, width, 3, gain=0.5)
            shortcut = stream if ins == width else drawing.conv(stream, ins, width, 1, stride, gain=1.0)
            stream, ins = drawing.node("Relu", drawing.node("Add", branch, shortcut)), width
    flat = drawing.node("Flatten", drawing.node("GlobalAveragePool", stream))
    logits = drawing.node("Gemm", flat, drawing.weight(10, ins, scale=ins**-0.5), drawing.weight(10, scale=0.1), transB=1)
    shapes = {"input": [3, 32, 32], logits: [10]}
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", *shape]) for name, shape in shapes.items()]
    graph = helper.make_graph(drawing.nodes, f"resnet{depth}", ends[:1], ends[1:], drawing.weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def run(row: Row) -> dict[str, Any]:
    """Return what one row takes, in this process."""
    import onnx_gconv

    if row.model == "mobilenet_v2":
        model = onnx.load(ZOO / "imagenet_mobilenet_v2_bn.onnx")
    else:
        model = resnet50() if row.model == "resnet50" else cifar_resnet(int(row.model.removeprefix("resnet")))
    side = 32 if row.model.startswith("resnet") and row.model != "resnet50" else 224
    images = np.random.default_rng(0).standard_normal((row.images, 3, side, side), dtype=np.float32)
    started, cpu_started = time.perf_counter(), time.process_time()
    result = onnx_gconv.compress(model, max_macs=row.budget, calib={model.graph.input[0].name: images}, calib_samples=row.images)
    return {
        "seconds": time.perf_counter() - started,
        "cpu_seconds": time.process_time() - cpu_started,
        "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "phases": {name: round(seconds, 2) for name, seconds in result.seconds.items()},
    }


def run_apart(row: Row) -> dict[str, Any] | None:
    """Return what the row takes in a process of its own, None where it failed."""
    command = [sys.executable, __file__, "--only", json.dumps(asdict(row))]
    environment = {"OPENBLAS_NUM_THREADS": "1", **os.environ}
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False, env=environment)
    if done.returncode:
        print(f"failed: {row.name}", file=sys.stderr, flush=True)
        return None
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def exponent(sizes: list[int], seconds: list[float]) -> float:
    """Return the power of the size that the seconds grow with."""
    return float(np.polyfit(np.log(sizes), np.log(seconds), 1)[0])


def page(finished: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """Yield the lines of the result page: the rows that are there."""
    for heading, rows in sections().items():
        there = [row for row in rows if row.name in finished]
        if there:
            yield f"\n## {heading}\n"
            yield "| model | images | CPU s | wall s | measuring and searching, recovering: wall s | peak MiB |"
            yield "|---" * 6 + "|"
            yield from (_line(row, finished[row.name]) for row in there)
        if len(there) > 1:
            sizes = [int(row.model.removeprefix("resnet")) if heading == "Depth" else row.images for row in there]
            yield f"\nExponent: {exponent(sizes, [finished[row.name]['cpu_seconds'] for row in there]):.2f}."


def _line(row: Row, found: Mapping[str, Any]) -> str:
    phases = found["phases"]
    parts = f"{phases.get('solve', 0) + phases.get('search', 0):.0f}, {phases.get('recover', 0):.0f}"
    cells = [
        row.model,
        str(row.images),
        f"{found['cpu_seconds']:.0f}",
        f"{found['seconds']:.0f}",
        parts,
        f"{found['peak_mib']:.0f}",
    ]
    return f"| {' | '.join(cells)} |"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output", type=Path, default=Path("scale.md"), help="the page; finished rows go beside it")
    parser.add_argument("--rows", default="", metavar="REGEX", help="run only rows whose name it matches")
    parser.add_argument("--list", action="store_true", help="print the names of the rows and stop")
    parser.add_argument("--only", help=argparse.SUPPRESS)  # the row that this process runs
    args = parser.parse_args()
    if args.only:
        print(json.dumps(run(Row(**json.loads(args.only)))))
        return 0
    every = {row.name: row for section in sections().values() for row in section}
    rows = [row for name, row in every.items() if re.search(args.rows, name)]
    if args.list:
        print("\n".join(row.name for row in rows))
        return 0
    kept = args.output.with_suffix(".jsonl")
    lines = [json.loads(line) for line in kept.read_text(encoding="utf-8").splitlines()] if kept.exists() else []
    finished = {line["row"]: line for line in lines}
    failed = 0
    for row in rows:
        if row.name not in finished:
            found = run_apart(row)
            if found is None:
                failed += 1
                continue
            finished[row.name] = {"row": row.name, **found}
            with kept.open("a", encoding="utf-8") as stream:
                stream.write(json.dumps(finished[row.name]) + "\n")
            print(_line(row, found), flush=True)
        args.output.write_text(HEAD + "\n".join(page(finished)) + "\n", encoding="utf-8")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
