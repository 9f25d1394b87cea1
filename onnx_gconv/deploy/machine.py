"""This machine as the runner for ONNX Runtime sees it, known before anything is measured."""

import platform
from importlib import metadata
from pathlib import Path

from onnx_gconv.deploy.time_table import Bench
from onnx_gconv.deploy.timing_file import Precision

CPUINFO = Path("/proc/cpuinfo")
# As in runners/ort.py, which has to do without this package.
INSTRUCTIONS = (("avx512f", "avx512"), ("avx2", "avx2"), ("avx", "avx"), ("asimd", "neon"), ("neon", "neon"))


def bench_here(precision: Precision, threads: int) -> Bench:
    """Return what a table of times measured with ONNX Runtime on this CPU has to name."""
    text = _cpuinfo()
    names = (line.split(":", 1)[1].strip() for line in text.splitlines() if line.startswith("model name"))
    return Bench("ort-cpu", None, precision, next(names, "None"), threads, None, f"onnxruntime {_version()}", instructions(text))


def instructions(cpuinfo: str) -> str:
    """Return the widest vectors that the CPU has, by the text of /proc/cpuinfo."""
    flags = set(cpuinfo.split())
    return next((name for flag, name in INSTRUCTIONS if flag in flags), platform.machine().lower() or "unknown")


def _cpuinfo() -> str:
    try:
        return CPUINFO.read_text(encoding="utf-8")
    except OSError:
        return ""


def _version() -> str:
    for package in ("onnxruntime", "onnxruntime-gpu"):
        try:
            return metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    import onnxruntime  # built from source, under another name

    return str(onnxruntime.__version__)
