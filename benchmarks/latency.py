"""What grouping really saves: ONNX Runtime on CPU, one thread, batch 1, against the dense model, for each way of Gathers.

    python models/export_architectures.py -o /tmp/arch && python benchmarks/latency.py /tmp/arch [--seconds 8]

Models take turns in one process, thread CPU time, medians, all optimisations on; figures are time divided by dense time.
Set OPENBLAS_NUM_THREADS=1, as the command line does for itself.
"""

import argparse
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from rows import need

import onnx_gconv
from onnx_gconv.runtime import random_feeds
from onnx_gconv.timing import time_models

ZOO = Path(__file__).resolve().parent.parent.parent / "shared" / "zoo"
# model, flags, limits for shared and none as the issue asks
CASES: tuple[tuple[str, dict[str, Any], float | None, float | None], ...] = (
    ("resnet50", {"groups": 2}, 0.60, 0.55),
    ("resnet50", {"groups": 4}, 0.37, 0.33),
    ("resnet18", {"groups": 2}, 0.58, 0.56),
    ("resnet18", {"groups": 4}, 0.39, 0.36),
    ("mobilenet_v2", {"groups": 2, "target": "ort-cpu"}, 0.92, 0.82),
    ("cifar10_resnet56_folded", {"groups": 2, "target": "ort-cpu"}, 0.85, 0.80),
)


def measure(path: Path, flags: dict[str, Any], ways: tuple[str, ...], seconds: float) -> tuple[float, list[tuple[int, float]]]:
    """Return the MACs left, and for each way the Gathers written and the ratio to dense."""
    model = onnx.load(path)
    models, gathers, macs = [model], [], 1.0
    for way in ways:
        plan = onnx_gconv.plan(model, gathers=way, **flags).plan
        grouped = onnx_gconv.apply(model, plan)
        models.append(grouped.model)
        gathers.append(grouped.gathers[1])
        macs = (plan.after.macs or 0) / (plan.before.macs or 1)
    feeds = random_feeds(model, onnx_gconv.inspect(model).input_shapes, np.random.default_rng(0))
    dense, *others = time_models(models, feeds, seconds=seconds)
    return macs, list(zip(gathers, [other / dense for other in others], strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seconds", type=float, default=8.0, help="for each row")
    args = parser.parse_args()
    need(args.folder, ZOO)
    print("| model | asked | MACs | free: Gathers, time | shared | asked | none | asked |\n|---|---|---|---|---|---|---|---|")
    for name, flags, shared, none in CASES:
        path = args.folder / f"{name}.onnx"
        macs, rows = measure(path if path.exists() else ZOO / f"{name}.onnx", flags, ("free", "shared", "none"), args.seconds)
        text = [f"{gathers}, {ratio:.3f}" for gathers, ratio in rows]
        asked = " ".join(f"{key}={value}" for key, value in flags.items())
        print(f"| {name} | {asked} | {macs:.3f} | {text[0]} | {text[1]} | {shared} | {text[2]} | {none} |", flush=True)
    macs, rows = measure(args.folder / "resnet50.onnx", {"groups": 2, "include": r"conv2"}, ("free",), args.seconds)
    print(f"| resnet50, 3×3 only | groups=2 | {macs:.3f} | {rows[0][0]}, {rows[0][1]:.3f} (asked 0, 0.80) | | | | |")


if __name__ == "__main__":
    main()
