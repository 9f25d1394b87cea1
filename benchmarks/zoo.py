"""Run `inspect` and `compress` on every real model at hand, and print what came of it as a Markdown table.

    python benchmarks/zoo.py [-o benchmarks/zoo.md] [FOLDER ...]

Folders default to ../shared/zoo and the light_* models inside the onnx package. Every run is the command itself, in a
process of its own; a row ends in the verification error, or in the sentence with which the tool refused.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import onnx

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = (ROOT.parent / "shared" / "zoo", Path(onnx.__file__).parent / "backend" / "test" / "data" / "light")
RUNS = {"70 % MACs": ["--max-macs", "70%"], "G=2": ["--groups", "2"]}


def run(arguments: list[str]) -> tuple[int, str, str, float]:
    """Return exit code, stdout, the error sentence, and the seconds it took."""
    started = time.perf_counter()
    done = subprocess.run([sys.executable, "-m", "onnx_gconv", *arguments], capture_output=True, text=True, check=False)
    errors = [line.removeprefix("error: ") for line in done.stderr.splitlines() if line.startswith("error: ")]
    if "Traceback" in done.stderr:
        errors = ["TRACEBACK: " + done.stderr.splitlines()[-1]]
    return done.returncode, done.stdout, " ".join(errors), time.perf_counter() - started


def rows(path: Path, folder: Path) -> list[str]:
    """Return the table rows of one model: one for each way of compressing it."""
    code, text, error, _ = run(["inspect", str(path), "--json"])
    if code:
        return [f"| {path.stem} | inspect | | | | | | refused: {error} |"]
    seen = json.loads(text)
    convs = f"{len(seen['layers'])}/{len(seen['layers']) + len(seen['skipped'])}"
    result = []
    for name, flags in RUNS.items():
        code, text, error, seconds = run(["compress", str(path), *flags, "-o", str(folder / "out.onnx"), "--json"])
        if code:
            result.append(f"| {path.stem} | {name} | {convs} | | | | {seconds:.1f} | refused: {error} |")
            continue
        report = json.loads(text)
        macs, params = (report["after"][key] / report["before"][key] for key in ("macs", "params"))
        checked = report["verify"]
        result.append(
            f"| {path.stem} | {name} | {convs} | {len(report['layers'])} | {macs:.1%} | {params:.1%} | {seconds:.1f} "
            f"| verified, {checked['max_rel_error']:.1e} |"
        )
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="*", type=Path, default=FOLDERS)
    parser.add_argument("-o", "--output", type=Path, help="also write the table to this file")
    args = parser.parse_args()
    lines = [
        "| model | asked | groupable/Convs | grouped | MACs left | params left | seconds | outcome |",
        "|---|---|---|---|---|---|---|---|",
    ]
    print("\n".join(lines), flush=True)
    with tempfile.TemporaryDirectory() as folder:
        for path in sorted(model for source in args.folders for model in source.glob("*.onnx")):
            found = rows(path, Path(folder))
            print("\n".join(found), flush=True)
            lines += found
    if args.output:
        text = "Made by `python benchmarks/zoo.py -o benchmarks/zoo.md`; models as in ../shared/zoo and the onnx package.\n\n"
        args.output.write_text("# Every model at hand\n\n" + text + "\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
