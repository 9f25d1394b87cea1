"""How long `compress --calib` takes, and how much memory, against images, depth, width and pixels.

    python benchmarks/scale.py -o benchmarks/scale.md [--rows REGEX] [--list]

Models have random weights and images are noise: work follows the shapes. Only "trained" rows are real: ResNet-56 on CIFAR-10's
first training images, MobileNet-v2 on photographs, both from ../shared. Seed 0, all cores. Every row runs in a process of its own
and is kept in OUTPUT.jsonl: a row that is there is not run again. Rows called "before" run the package of another checkout, given
by the environment variable BEFORE; without it they are left out.
"""

import os
import resource
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper
from resnet50 import BLOCKS, Drawing, resnet
from rows import Benchmark, Found

SHARED = Path(__file__).resolve().parent.parent.parent / "shared"
BEFORE = os.environ.get("BEFORE")
DEPTHS = (20, 56, 110)
HEAD = """\
# Work and memory of `compress --calib`, against images, depth, width and pixels

Made by `python benchmarks/scale.py -o benchmarks/scale.md`; what the rows are, it says at its top. All at 70 % of the MACs. CPU
seconds are those of all threads, user and system. "Before" is commit 61e0fae, in front of the work on speed. An exponent of 1 is
linear growth: it is the slope of the logarithm of the CPU seconds against that of the images, the depth or the pixels.
"""


@dataclass(frozen=True)
class Row:
    """One run."""

    model: str  # resnetN with random weights, or a trained one
    images: int
    side: int = 32
    forms: str = "width,drop"
    before: bool = False

    @property
    def name(self) -> str:
        """What --rows is matched with, and what a finished row is known by."""
        return f"{self.model} {self.images} {self.side} {self.forms}{' before' if self.before else ''}"


def sections() -> dict[str, list[Row]]:
    """Return the rows under their headings. A row may stand under several."""
    return {
        "Images": [Row("resnet20", images) for images in (64, 250, 1000)],
        "Depth": [Row(f"resnet{depth}", 250) for depth in DEPTHS],
        "Pixels": [Row("resnet20", 64, side) for side in (32, 64, 128)],
        "Images of 224 pixels": [Row("resnet50", images, 224) for images in (16, 64, 250)],
        "Wide and deep": [Row("resnet50", 64, 224), Row("resnet101", 64, 224)],
        "Trained models": [
            Row(*asked, forms)
            for asked in (("cifar10_resnet56_folded", 1000, 32), ("imagenet_mobilenet_v2_bn", 250, 224))
            for forms in ("width,drop", "group", "all")
        ],
    }


def cifar_resnet(depth: int, side: int) -> onnx.ModelProto:
    """Return a ResNet of basic blocks as for CIFAR-10, of this many layers, batch normalization folded."""
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
    shapes = {"input": [3, side, side], logits: [10]}
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", *shape]) for name, shape in shapes.items()]
    graph = helper.make_graph(drawing.nodes, f"resnet{depth}", ends[:1], ends[1:], drawing.weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def run(row: Row) -> dict[str, Any]:
    """Return what one row takes, in this process."""
    if row.before:
        sys.path.insert(0, str(BEFORE))
    import onnx_gconv

    model = model_of(row)
    images = images_of(row)
    calib = {model.graph.input[0].name: images}
    started, cpu_started = time.perf_counter(), time.process_time()
    result = onnx_gconv.compress(model, max_macs="70%", forms=row.forms, calib=calib, calib_samples=row.images)
    return {
        "seconds": time.perf_counter() - started,
        "cpu_seconds": time.process_time() - cpu_started,
        "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "phases": {name: round(seconds, 2) for name, seconds in result.seconds.items()},
    }


def model_of(row: Row) -> onnx.ModelProto:
    """Return the model of the row."""
    if not row.model.startswith("resnet"):
        return onnx.load(SHARED / "zoo" / f"{row.model}.onnx")
    depth = int(row.model.removeprefix("resnet"))
    return resnet(depth) if depth in BLOCKS else cifar_resnet(depth, row.side)


def images_of(row: Row) -> Any:
    """Return the images of the row: noise, or what the trained model knows."""
    sys.path.insert(0, str(SHARED / "data"))
    if row.model.startswith("cifar10"):
        import cifar10

        return cifar10.normalise(cifar10.load("train", row.images)[0])
    if row.model.startswith("imagenet"):
        import photos

        return photos.normalise(photos.load("calib")[0])[: row.images]
    return np.random.default_rng(0).standard_normal((row.images, 3, row.side, row.side), dtype=np.float32)


def size(heading: str, row: Row) -> int:
    """Return what the section's exponent is of."""
    return int(row.model.removeprefix("resnet")) if heading == "Depth" else row.side**2 if heading == "Pixels" else row.images


def page(finished: Mapping[str, Found]) -> Iterator[str]:
    """Yield the lines of the result page: the rows that are there."""
    for heading, rows in sections().items():
        there = [row for row in rows if row.name in finished]
        if there:
            yield f"\n## {heading}\n"
            yield "| model | images | pixels | forms | CPU s before | now | wall s before | now | peak MiB before | now |"
            yield "|---" * 10 + "|"
            yield from (_line(row, finished) for row in there)
        if len({size(heading, row) for row in there}) > 2:
            sizes = np.log([size(heading, row) for row in there])
            slope = np.polyfit(sizes, np.log([finished[row.name]["cpu_seconds"] for row in there]), 1)[0]
            yield f"\nExponent: {slope:.2f}."


def _line(row: Row, finished: Mapping[str, Found]) -> str:
    runs = [finished.get(replace(row, before=before).name) for before in (True, False)]
    measured = [f"{run[key]:.0f}" if run else "" for key in ("cpu_seconds", "seconds", "peak_mib") for run in runs]
    return f"| {' | '.join([row.model, str(row.images), str(row.side), row.forms, *measured])} |"


if __name__ == "__main__":
    now = list({row.name: row for section in sections().values() for row in section}.values())
    every = [*now, *(replace(row, before=True) for row in now if BEFORE)]
    sys.exit(Benchmark(__file__, __doc__, HEAD, Row, every, run, lambda row, found: f"{row.name}: {found}", page).main())
