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
from rows import Benchmark, Found, need

SHARED = Path(__file__).resolve().parent.parent.parent / "shared"
BEFORE = os.environ.get("BEFORE")
DEPTHS = (20, 56, 110)
EFFORT = "What `--effort` costs and brings"
HELD_BACK = slice(40_000, 50_000)  # training images that no row is calibrated on
HEAD = """\
# Work and memory of `compress --calib`, against images, depth, width and pixels

Made by `python benchmarks/scale.py -o benchmarks/scale.md`; what the rows are, it says at its top. All at 70 % of the MACs. CPU
seconds are those of all threads, user and system. "Before" is commit 61e0fae, in front of the work on speed. An exponent of 1 is
linear growth: it is the slope of the logarithm of the CPU seconds against that of the images, the depth or the pixels. "Told" is
what the tool says beforehand, in CPU seconds of this machine. Wall seconds are of a busy machine but for ResNet-50 with 250 images
and ResNet-101. Earlier still, ResNet-50 with 250 images had not ended after 24 minutes and 33 CPU minutes,
and groups took 344 CPU seconds on MobileNet-v2 and 131 on ResNet-56. Efforts: ResNet-20 at half of its MACs.
"""
HEAD_OF_ROWS = "| model | images | pixels | forms | CPU s before | now | wall s before | now | peak MiB before | now | told / now |"
EFFORT_HEAD = "| forms | effort | CPU s | top-1 on 10,000 training images held back | told / CPU s |"


@dataclass(frozen=True)
class Row:
    """One run."""

    model: str  # resnetN with random weights, or a trained one
    images: int
    side: int = 32
    forms: str = "width,drop"
    effort: int = 1
    budget: str = "70%"  # of the MACs
    before: bool = False

    @property
    def name(self) -> str:
        """What --rows is matched with, and what a finished row is known by."""
        effort = "" if self.effort == 1 and self.budget == "70%" else f" {self.budget} effort {self.effort}"
        return f"{self.model} {self.images} {self.side} {self.forms}{effort}{' before' if self.before else ''}"


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
        EFFORT: [
            Row("cifar10_resnet20_folded", 1000, 32, forms, effort, "50%")
            for forms in ("width,drop", "group", "all")
            for effort in range(4)
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
    wishes: dict[str, Any] = {"max_macs": row.budget, "forms": row.forms, "effort": row.effort, "calib_samples": row.images}
    wishes["calib"] = {model.graph.input[0].name: images}
    started, cpu_started = time.perf_counter(), time.process_time()
    result = onnx_gconv.compress(model, **wishes)
    found = {
        "seconds": time.perf_counter() - started,
        "cpu_seconds": time.process_time() - cpu_started,
        "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "phases": {name: round(seconds, 2) for name, seconds in result.seconds.items()},
    }
    if not row.before:
        found["forecast"] = forecast(model, wishes)
    if row.model.startswith("cifar10"):
        import cifar10

        held, labels = (values[HELD_BACK] for values in cifar10.load("train", HELD_BACK.stop))
        data = {model.graph.input[0].name: cifar10.normalise(held), "labels": labels}
        found["top1"] = onnx_gconv.evaluate(result.model, data).top1
    return found


def forecast(model: onnx.ModelProto, wishes: Mapping[str, Any]) -> float:
    """Return the CPU seconds that the tool would tell."""
    from onnx_gconv.pipeline.forecasting import expected_seconds
    from onnx_gconv.pipeline.job import Job
    from onnx_gconv.pipeline.original import open_original
    from onnx_gconv.pipeline.recovering import open_samples
    from onnx_gconv.pipeline.settings import Settings

    original, settings = open_original(model), Settings(jobs=1, **wishes)
    samples = open_samples(original, settings)
    assert samples is not None
    found = expected_seconds(Job(original, settings), samples, is_fitted=True)
    assert found is not None
    return found


def model_of(row: Row) -> onnx.ModelProto:
    """Return the model of the row."""
    if not row.model.startswith("resnet"):
        need(SHARED)
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
            is_effort = heading == EFFORT
            yield EFFORT_HEAD if is_effort else HEAD_OF_ROWS
            yield "|---" * (5 if is_effort else 11) + "|"
            yield from ((_effort_line if is_effort else _line)(row, finished) for row in there)
        if heading != EFFORT and len({size(heading, row) for row in there}) > 2:
            sizes = np.log([size(heading, row) for row in there])
            slope = np.polyfit(sizes, np.log([finished[row.name]["cpu_seconds"] for row in there]), 1)[0]
            yield f"\nExponent: {slope:.2f}."


def _line(row: Row, finished: Mapping[str, Found]) -> str:
    runs = [finished.get(replace(row, before=before).name) for before in (True, False)]
    measured = [f"{run[key]:.0f}" if run else "" for key in ("cpu_seconds", "seconds", "peak_mib") for run in runs]
    told = finished[row.name]["forecast"] / finished[row.name]["cpu_seconds"]
    return f"| {' | '.join([row.model, str(row.images), str(row.side), row.forms, *measured, f'{told:.2f}'])} |"


def _effort_line(row: Row, finished: Mapping[str, Found]) -> str:
    found = finished[row.name]
    told = found["forecast"] / found["cpu_seconds"]
    return f"| {row.forms} | {row.effort} | {found['cpu_seconds']:.0f} | {100 * found['top1']:.2f} | {told:.2f} |"


if __name__ == "__main__":
    now = list({row.name: row for section in sections().values() for row in section}.values())
    every = [*now, *(replace(row, before=True) for row in now if BEFORE)]
    sys.exit(Benchmark(__file__, __doc__, HEAD, Row, every, run, lambda row, found: f"{row.name}: {found}", page).main())
