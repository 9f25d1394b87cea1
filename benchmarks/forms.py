"""Widths, dropped branches and groups at one budget, one-shot: what each form leaves of a model, and what simpler rules leave.

    python benchmarks/forms.py -o benchmarks/forms.md [--rows REGEX] [--list]

Needs ../shared and Pillow. CIFAR-10: calibrated on the first 1,000 training images without labels, judged on all 10,000 test
images. MobileNet-v2: calibrated on 250 photographs of ImageNet's classes, judged on 250 others (`../shared/data/photos.py`). Other
models: calibrated on 64 of these photographs, judged by their outputs on 64 others. Every row runs in a process of its own and is
kept in OUTPUT.jsonl: a row that is there is not run again. Seed 0.

All rows have the same fit of the weights that are left, Convs in a row included. The rivals narrow every inner space by one share:
"L2" keeps the filters of largest norm, "eliminated" those that elimination keeps. What is left is the search.
"""

import resource
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rows import Benchmark

SHARED = Path(__file__).resolve().parent.parent.parent / "shared"
CIFAR = (("cifar10_resnet56", "47.1%"), ("cifar10_resnet20", "49.8%"), ("cifar10_resnet20", "72%"))
PHOTOS = (("imagenet_mobilenet_v2_bn", "76.9%"), ("imagenet_mobilenet_v2_bn", "87%"))
OTHERS = ("nudenet_yolov8n", "u2netp", "ppocrv4_det")
OTHER_SAMPLES = 64
Method = Literal["search", "L2 widths", "eliminated widths"]
HEAD = """\
# One search over widths, dropped branches and groups, against each of them alone

Made by `python benchmarks/forms.py -o benchmarks/forms.md`; what the rows are, it says at its top. Top-1 in % (for other models
the relative error of the outputs), MACs that are left, CPU seconds and peak memory of `compress --calib` as a whole, and what the
search chose: spaces narrowed, branches dropped, layers grouped, layers of low rank. Time: ONNX Runtime on this CPU, one thread,
compressed over dense, interleaved.
"""


@dataclass(frozen=True)
class Row:
    """One run."""

    model: str
    budget: str  # --max-macs
    method: Method = "search"
    forms: str = "width,drop"
    width_step: int | None = None

    @property
    def name(self) -> str:
        """What --rows is matched with, and what a finished row is known by."""
        step = "" if self.width_step is None else f" step {self.width_step}"
        return f"{self.model} {self.budget} {self.method if self.method != 'search' else self.forms}{step}"


def sections() -> dict[str, list[Row]]:
    """Return the rows under their headings."""
    folded = [(f"{model}_folded", budget) for model, budget in CIFAR]
    return {
        "CIFAR-10, batch normalization folded": [
            row
            for asked in folded
            for row in (
                Row(*asked, "L2 widths"),
                Row(*asked, "eliminated widths"),
                Row(*asked, forms="group"),
                Row(*asked, width_step=1),
                Row(*asked),
                Row(*asked, forms="width,drop,lowrank", width_step=1),
                Row(*asked, forms="all", width_step=1),
            )
        ],
        "CIFAR-10, batch normalization in the graph": [Row(f"{model}_bn", budget, width_step=1) for model, budget in CIFAR],
        "MobileNet-v2 on photographs": [
            row
            for asked in PHOTOS
            for row in (
                Row(*asked, forms="group"),
                Row(*asked, width_step=16),
                Row(*asked),
                Row(*asked, forms="width,drop,lowrank"),
                Row(*asked, forms="all"),
            )
        ],
        "Other models, relative error of the outputs": [
            row for model in OTHERS for row in (Row(model, "70%", forms="group"), Row(model, "70%"), Row(model, "70%", forms="all"))
        ],
    }


def run(row: Row) -> dict[str, Any]:
    """Return what one row measures, in this process: the peak memory is that of compression."""
    import onnx_gconv

    calib, samples = calibration(row.model)
    model = SHARED / "zoo" / f"{row.model}.onnx"
    started, cpu_started = time.perf_counter(), time.process_time()
    if row.method == "search":
        step: Any = {} if row.width_step is None else {"width_step": row.width_step}
        result = onnx_gconv.compress(model, max_macs=row.budget, forms=row.forms, calib=calib, calib_samples=samples, **step)
    else:
        plan = uniform_plan(row, model, calib)
        result = onnx_gconv.apply(model, plan, calib=calib, calib_samples=samples)
    cost = {
        "seconds": time.perf_counter() - started,
        "cpu_seconds": time.process_time() - cpu_started,
        "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }
    test = judging(row.model)  # not before: the peak is that of compression
    plan = result.plan if row.method == "search" else plan
    before, after = onnx_gconv.inspect(model).count.macs, onnx_gconv.inspect(result.model).count.macs
    chosen = {"spaces": len(plan.spaces), "dropped": len(plan.dropped), "layers": len(plan.layers), "ranks": len(plan.low_rank)}
    found = onnx_gconv.evaluate(result.model, test, reference=model)
    judged = {"top1": found.top1, "dense_top1": found.reference_top1}
    judged |= {"error": max((gap.relative_l2 for gap in found.outputs.values()), default=None)}
    return {"macs": after / before, **cost, **chosen, **judged, "time": time_ratio(model, result.model)}


def uniform_plan(row: Row, model: Path, calib: Any) -> Any:
    """Return the plan that narrows every inner space by one share, as little as the budget allows."""
    import numpy as np

    from onnx_gconv.listener import SILENT
    from onnx_gconv.pipeline.facts import Facts
    from onnx_gconv.pipeline.forms import find_forms
    from onnx_gconv.pipeline.job import Job
    from onnx_gconv.pipeline.original import open_original
    from onnx_gconv.pipeline.planning import make_plan, resolve_budget
    from onnx_gconv.pipeline.recovering import guide_of, open_samples
    from onnx_gconv.pipeline.settings import Settings

    settings = Settings(max_macs=row.budget, calib=calib, forms="width", width_step=1)
    original = open_original(model)
    job = Job(original, settings, Facts(), SILENT)
    guide = guide_of(job, open_samples(original, settings))
    assert guide is not None
    forms, limit = find_forms(job, guide, {}, {}), resolve_budget(job).macs or 0
    none = [0] * len(forms.menu.products)

    def indices(share: float) -> list[int]:
        return [
            max(
                range(len(space.options)),
                key=lambda i, s=space: (s.options[i].channels <= max(1, share * s.full), s.options[i].channels),
            )
            for space in forms.menu.spaces
        ]

    shares = [step / 1000 for step in range(1000, 0, -1)]
    widths = next(indices(share) for share in shares if forms.menu.totals(indices(share), none)[1] <= limit)
    planned = make_plan(job, "none", guide=guide, least_groups={}).plan
    weights = {t.name: t for t in original.model.graph.initializer}
    chosen = []
    for space, option in zip(forms.offer.spaces, widths, strict=True):
        count = forms.menu.spaces[forms.offer.spaces.index(space)].options[option].channels
        if row.method == "eliminated widths":
            keep = forms.eliminations[space.name].keep(count)
        else:
            keep = np.sort(np.argsort(-norms(original.model, space.writers[0], weights), kind="stable")[:count])
        if count < space.channels:
            chosen.append((space, tuple(int(channel) for channel in keep)))
    from dataclasses import replace

    from onnx_gconv.plans import PlannedSpace, Totals

    spaces = tuple(PlannedSpace(space.name, space.channels, keep) for space, keep in chosen)
    return replace(planned, spaces=spaces, dropped=(), layers=(), after=Totals(*forms.menu.totals(widths, none)[:2]))


def norms(model: Any, writer: str, weights: Mapping[str, Any]) -> Any:
    import numpy as np
    from onnx import numpy_helper

    node = next(node for node in model.graph.node if node.output[0] == writer)
    weight = numpy_helper.to_array(weights[node.input[1]])
    return np.linalg.norm(weight.reshape(len(weight), -1), axis=1)


def calibration(model: str) -> tuple[Any, int]:
    """Return the samples to calibrate on, and how many they are."""
    sys.path.insert(0, str(SHARED / "data"))
    if model.startswith("cifar10"):
        import cifar10

        return {_input(model): cifar10.normalise(cifar10.load("train", 1000)[0])}, 1000
    import photos

    images, _ = photos.load("calib")
    if model.startswith("imagenet"):
        return {_input(model): photos.normalise(images)}, len(images)
    return {_input(model): _resized(images[:OTHER_SAMPLES], _side(model))}, OTHER_SAMPLES


def judging(model: str) -> Any:
    """Return the samples to judge by, with labels where there are some."""
    if model.startswith("cifar10"):
        import cifar10

        images, labels = cifar10.load("test")
        return {_input(model): cifar10.normalise(images), "labels": labels}
    import photos

    images, labels = photos.load("dev")
    if model.startswith("imagenet"):
        return {_input(model): photos.normalise(images), "labels": labels}
    return {_input(model): _resized(images[:OTHER_SAMPLES], _side(model))}


def _input(model: str) -> str:
    import onnx

    return str(onnx.load(SHARED / "zoo" / f"{model}.onnx", load_external_data=False).graph.input[0].name)


def _side(model: str) -> int:
    return 320 if model == "u2netp" else 224


def _resized(images: Any, side: int) -> Any:
    import numpy as np
    from PIL import Image

    sized = np.stack([np.asarray(Image.fromarray(image).resize((side, side))) for image in images])
    return np.ascontiguousarray(sized.transpose(0, 3, 1, 2), dtype=np.float32) / np.float32(255)


def time_ratio(model: Path, compressed: Any) -> float:
    import numpy as np

    from onnx_gconv.pipeline.original import open_original
    from onnx_gconv.runtime import random_feeds
    from onnx_gconv.timing import compare_latency

    original = open_original(model)
    feeds = random_feeds(original.model, original.network.input_shapes, np.random.default_rng(0))
    return compare_latency(original.model, compressed, feeds, seconds=6.0).ratio


def page(finished: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """Yield the lines of the result page: the rows that are there."""
    for heading, rows in sections().items():
        there = [row for row in rows if row.name in finished]
        if there:
            judged = "error" if heading.startswith("Other") else "top-1"
            yield f"\n## {heading}\n"
            chosen = "spaces, branches, groups, ranks"
            yield f"| model | MACs left | forms | step | {judged} | time / dense | {chosen} | CPU s | peak MiB |"
            yield "|---" * 9 + "|"
            yield from (_line(row, finished[row.name]) for row in there)


def _line(row: Row, found: Mapping[str, Any]) -> str:
    judged = f"{found['error']:.4f}" if found["top1"] is None else f"{100 * found['top1']:.2f}"
    step = "1" if row.method != "search" else "" if row.forms == "group" else str(row.width_step or "default")
    cells = [
        row.model,
        f"{found['macs']:.2%}",
        row.forms if row.method == "search" else f"{row.method}, uniform",
        step,
        judged,
        f"{found['time']:.2f}",
        f"{found['spaces']}, {found['dropped']}, {found['layers']}, {found.get('ranks', 0)}",
        f"{found['cpu_seconds']:.0f}",
        f"{found['peak_mib']:.0f}",
    ]
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    every = [row for section in sections().values() for row in section]
    sys.exit(Benchmark(__file__, __doc__, HEAD, Row, every, run, _line, page, needs=SHARED).main())
