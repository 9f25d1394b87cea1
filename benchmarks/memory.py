"""Peak memory and seconds of `compress` on a large model, against the size of its file.

    OPENBLAS_NUM_THREADS=1 python benchmarks/memory.py [MODEL] [--max-macs 50%] [--jobs 2 1]

The command runs in a process of its own, of which all is counted: interpreter, libraries, mapped files. The workers that
solve layers are its children; the largest of them, and the most that all had together, are told beside it. Needs
`python models/export_architectures.py resnet101 -o /tmp/arch`. Linux only.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from rows import need


@dataclass(frozen=True)
class Measured:
    """One run of a command: peaks are resident bytes."""

    code: int
    seconds: float
    peak: int
    largest_child: int
    together: int  # pages that processes share count for each of them
    stdout: str


def measured(arguments: list[str]) -> Measured:
    """Return what one command took."""
    started, child_peaks, together = time.perf_counter(), [0], 0
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen([sys.executable, "-m", "onnx_gconv", *arguments], stdout=output)
        while True:
            pid, status, usage = os.wait4(process.pid, os.WNOHANG)
            if pid:
                break
            own = status_bytes(process.pid)
            others = [status_bytes(child) for child in descendants(process.pid)]
            together = max(together, own["VmRSS"] + sum(one["VmRSS"] for one in others))
            # Of children not ru_maxrss, in which a process that was forked has its parent's size.
            child_peaks += [one["VmHWM"] for one in others]
            time.sleep(0.02)
        seconds = time.perf_counter() - started
        process.returncode = os.waitstatus_to_exitcode(status)
        output.seek(0)
        return Measured(process.returncode, seconds, usage.ru_maxrss * 1024, max(child_peaks), together, output.read())


def status_bytes(pid: int) -> dict[str, int]:
    """Return the resident size of a process, now and at its peak; 0 when it has ended."""
    found = {"VmRSS": 0, "VmHWM": 0}
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return found
    return found | {name: int(rest.split()[0]) * 1024 for name, _, rest in (line.partition(":") for line in lines) if name in found}


def descendants(pid: int) -> list[int]:
    """Return the children of a process, and theirs."""
    try:
        children = " ".join(task.read_text() for task in Path(f"/proc/{pid}/task").glob("*/children")).split()
    except OSError:  # it has ended
        return []
    return [one for child in map(int, children) for one in (child, *descendants(child))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", type=Path, default=Path("/tmp/arch/resnet101.onnx"))
    parser.add_argument("--max-macs", default="50%")
    parser.add_argument("--jobs", nargs="+", default=["2", "1"])
    args = parser.parse_args()
    need(args.model)
    size = args.model.stat().st_size

    def of_file(peak: int) -> str:
        return f"{peak / 1e6:.0f} MB, {peak / size:.2f}"

    print(f"{args.model.stem}, {size / 1e6:.0f} MB, --max-macs {args.max_macs}; peaks in MB and in file sizes\n")
    print("| --jobs | exit | seconds | MACs left | peak | largest child | all together | seconds of |\n" + "| --- " * 8 + "|")
    for jobs in args.jobs:
        with tempfile.TemporaryDirectory() as folder:
            flags = ["--max-macs", args.max_macs, "--jobs", jobs, "-o", f"{folder}/out.onnx", "--json"]
            run = measured(["compress", str(args.model), *flags])
        report = json.loads(run.stdout)
        left = f"{report['after']['macs'] / report['before']['macs']:.3%}"
        peaks = " | ".join(map(of_file, (run.peak, run.largest_child, run.together)))
        parts = ", ".join(f"{name} {value:.1f}" for name, value in report["seconds"].items())
        print(f"| {jobs} | {run.code} | {run.seconds:.1f} | {left} | {peaks} | {parts} |", flush=True)


if __name__ == "__main__":
    main()
