"""Compress every real model for ONNX Runtime on CPU and say what it gained: `--target ort-cpu --max-macs 60%`.

    python benchmarks/zoo_ort.py [-o benchmarks/zoo_ort.md] [--budget 60%]

Each run is the command itself: verified, timed against the dense model (interleaved, thread CPU time), refused if slower.
"""

import argparse
import json
import tempfile
from pathlib import Path

from rows import need
from zoo import ZOO, run


def row(path: Path, budget: str, output: Path) -> str:
    code, text, error, seconds, _ = run(
        ["compress", str(path), "--target", "ort-cpu", "--max-macs", budget, "-o", str(output), "--json"]
    )
    if code:
        return f"| {path.stem} | | | | | {seconds:.0f} | refused: {error} |"
    report = json.loads(text)
    macs = report["after"]["macs"] / report["before"]["macs"]
    plan = json.loads(output.with_suffix(".plan.json").read_text())
    gathers = f"{report['gathers']['naive']} / {report['gathers']['written']}"
    return (
        f"| {path.stem} | {plan['gathers']} | {macs:.1%} | {gathers} | {report['latency']['ratio']:.3f} | {seconds:.0f} "
        f"| verified, {report['verify']['max_rel_error']:.0e} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output", type=Path, help="also write the table to this file")
    parser.add_argument("--budget", default="60%")
    args = parser.parse_args()
    need(ZOO)
    lines = [
        "| model | gathers | MACs left | Gathers naive / written | time / dense | CPU s | outcome |",
        "|---|---|---|---|---|---|---|",
    ]
    print("\n".join(lines), flush=True)
    with tempfile.TemporaryDirectory() as folder:
        for path in sorted(ZOO.glob("*.onnx")):
            lines.append(row(path, args.budget, Path(folder) / "out.onnx"))
            print(lines[-1], flush=True)
    if args.output:
        head = f"# Compressed for ONNX Runtime on CPU\n\nMade by `python benchmarks/zoo_ort.py -o {args.output}`.\n\n"
        args.output.write_text(head + "\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
