"""Every real model within a share of its time: what is predicted, what is measured, how long that takes.

    python benchmarks/in_time.py -o benchmarks/in_time.md [--budget 75%] [--rows REGEX] [--list]

Needs ../shared and Pillow. Each row is `compress --max-latency 75% --calib DATA` on ONNX Runtime, one thread, with an empty cache
of times, in a process of its own. It is kept in OUTPUT.jsonl: a row that is there is not run again. Calibrated on 32 photographs,
or on noise where a model does not take images; this page is about time, not accuracy. Seed 0.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SHARED = Path(__file__).resolve().parent.parent.parent / "shared"
NOT_FLOAT = ("neg_superres_customops", "qdq_mobilenetv2_imagenet")
SAMPLES = 32
HEAD = """\
# Every real model within a share of its time

Made by `python benchmarks/in_time.py -o benchmarks/in_time.md`; what the rows are, it says at its top. Predicted and measured are
shares of the dense time, of the model that is written; off is the one over the other. Chosen: spaces narrowed, branches dropped,
layers grouped; tries: how many plans were timed until one kept its time.

| model | asked | dense ms | predicted | measured | off | table s | all s | tries | chosen, or why not |
|---|---|---|---|---|---|---|---|---|---|
"""


def names() -> list[str]:
    """Return the models of the zoo that have float weights."""
    found = sorted(path.stem for path in (SHARED / "zoo").glob("*.onnx"))
    return [name for name in found if name not in NOT_FLOAT]


def run(name: str, budget: str) -> dict[str, Any]:
    """Return what one model needs, in this process."""
    import onnx_gconv
    from onnx_gconv.errors import GconvError

    model = SHARED / "zoo" / f"{name}.onnx"
    calib, heard, started = data(model), _Heard(), time.perf_counter()
    try:
        result = onnx_gconv.compress(model, max_latency=budget, calib=calib, calib_samples=SAMPLES, listener=heard.listener)
    except GconvError as error:
        return {"refused": str(error), "seconds": time.perf_counter() - started, "table_seconds": heard.table_seconds}
    latency, prediction, plan = result.latency, result.prediction, result.plan
    assert latency is not None
    assert prediction is not None
    assert result.rewritten.verification is not None
    return {
        "dense_ms": latency.before_ms,
        "predicted": prediction.ratio,
        "measured": latency.ratio,
        "table_seconds": heard.table_seconds,
        "seconds": time.perf_counter() - started,
        "tries": heard.tries,
        "verified": result.rewritten.verification.passed,
        "met": result.budget_met,
        "chosen": [len(plan.spaces), len(plan.dropped), len(plan.layers)],
        "parts": dict(result.seconds),
    }


@dataclass
class _Heard:
    """How long the table took, and how many plans were timed: what a job tells on its way."""

    table_seconds: float = 0.0
    tries: int = 1
    since: float = 0.0

    @property
    def listener(self) -> Any:
        from onnx_gconv.listener import Listener

        def progress(phase: str, done: int, total: int | None, item: str) -> None:
            if phase == "timing layers":
                self.since = time.perf_counter() if done == 0 else self.since
                self.table_seconds = time.perf_counter() - self.since

        def note(text: str) -> None:
            self.tries += "trying again" in text
            print(text, file=sys.stderr, flush=True)

        def detail(text: str) -> None:
            print(text, file=sys.stderr, flush=True)

        return Listener(progress=progress, note=note, detail=detail)


def data(path: Path) -> dict[str, Any]:
    """Return samples for every input of a model: photographs of the right size, or noise."""
    import numpy as np

    from onnx_gconv.pipeline.original import open_original

    original, rng = open_original(path), np.random.default_rng(0)
    kinds = {value.name: value.type.tensor_type.elem_type for value in original.model.graph.input}
    return {name: _samples(shape, kinds[name], rng) for name, shape in original.network.input_shapes.items()}


def _samples(shape: tuple[int, ...], kind: int, rng: Any) -> Any:
    import numpy as np
    import onnx

    dtype = onnx.helper.tensor_dtype_to_np_dtype(kind)
    if len(shape) == 4 and 3 in (shape[1], shape[3]):
        is_last = shape[3] == 3
        images = _photos(shape[1:3] if is_last else shape[2:])
        return images if is_last else np.ascontiguousarray(images.transpose(0, 3, 1, 2))
    return np.ascontiguousarray(rng.standard_normal((SAMPLES, *shape[1:])), dtype)


def _photos(size: tuple[int, ...]) -> Any:
    import numpy as np
    from PIL import Image

    sys.path.insert(0, str(SHARED / "data"))
    import photos

    images = photos.load("calib")[0][:SAMPLES]
    sized = [np.asarray(Image.fromarray(image).resize((size[1], size[0]))) for image in images]
    return np.stack(sized).astype(np.float32) / np.float32(255)


def run_apart(name: str, budget: str) -> dict[str, Any]:
    """Return what the row measures in a process of its own, without any time from before."""
    with tempfile.TemporaryDirectory() as cache:
        environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1", "XDG_CACHE_HOME": cache}
        command = [sys.executable, __file__, "--only", name, "--budget", budget]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False, env=environment)
    if done.returncode:
        return {"refused": f"failed with exit code {done.returncode}", "seconds": 0.0, "table_seconds": 0.0}
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def line(found: Mapping[str, Any]) -> str:
    """Return a row of the page."""
    seconds = [f"{found['table_seconds']:.0f}", f"{found['seconds']:.0f}"]
    if "refused" in found:
        cells = [found["row"], found["budget"], "", "", "", "", *seconds, "", f"refused: {found['refused']}"]
    else:
        spaces, branches, layers = found["chosen"]
        off = f"{found['predicted'] / found['measured'] - 1:+.1%}"
        shares = [f"{found['dense_ms']:.2f}", f"{found['predicted']:.3f}", f"{found['measured']:.3f}", off]
        kept = "" if found["met"] and found["verified"] else " **not kept**"
        cells = [found["row"], found["budget"], *shares, *seconds, str(found["tries"]), f"{spaces}, {branches}, {layers}{kept}"]
    return f"| {' | '.join(cells)} |"


def summary(rows: list[Mapping[str, Any]]) -> Iterator[str]:
    """Yield how many rows kept their time, and how good the predictions were."""
    made = [row for row in rows if "refused" not in row]
    near = [row for row in made if abs(row["predicted"] / row["measured"] - 1) <= 0.05]
    yield f"\n{len(made)} of {len(rows)} kept their time; predicted within 5 % of measured: {len(near)} of {len(made)}."


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output", type=Path, default=Path("in_time.md"), help="the page; finished rows go beside it")
    parser.add_argument("--budget", default="75%", help="--max-latency")
    parser.add_argument("--rows", default="", metavar="REGEX", help="run only models whose name it matches")
    parser.add_argument("--list", action="store_true", help="print the names of the rows and stop")
    parser.add_argument("--only", help=argparse.SUPPRESS)  # the row that this process runs
    args = parser.parse_args()
    if args.only:
        print(json.dumps(run(args.only, args.budget)))
        return 0
    asked = [name for name in names() if re.search(args.rows, name)]
    if args.list or not asked:
        print("\n".join(asked) or f"no model of {SHARED / 'zoo'} matches")
        return 0 if asked else 1
    kept = args.output.with_suffix(".jsonl")
    lines = [json.loads(text) for text in kept.read_text(encoding="utf-8").splitlines()] if kept.exists() else []
    finished = {(row["row"], row["budget"]): row for row in lines}
    for name in asked:
        if (name, args.budget) not in finished:
            finished[name, args.budget] = {"row": name, "budget": args.budget, **run_apart(name, args.budget)}
            with kept.open("a", encoding="utf-8") as stream:
                stream.write(json.dumps(finished[name, args.budget]) + "\n")
            print(line(finished[name, args.budget]), flush=True)
        rows = [finished[key] for key in sorted(finished)]
        args.output.write_text(HEAD + "\n".join([*map(line, rows), *summary(rows)]) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
