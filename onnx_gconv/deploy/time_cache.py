"""Where times that were measured on this machine are kept for the next run."""

import os
import platform
import re
from pathlib import Path

from onnx_gconv.deploy.time_table import Bench, read_table
from onnx_gconv.errors import DeployError

SWITCH = "ONNX_GCONV_CACHE"  # off: nothing is kept
OFF = ("0", "off", "no", "false")


def cache_file(bench: Bench) -> Path | None:
    """Return the file for the times of this bench, ready to be read or written; None where nothing can or shall be kept.

    What a cache cannot use it does without: a file that is broken, or of another machine that shares the home folder, goes.
    """
    if os.environ.get(SWITCH, "").lower() in OFF:
        return None
    path = cache_folder() / f"{_name(bench)}.json"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if not os.access(path.parent, os.W_OK | os.X_OK):
            return None
        if path.exists() and not _is_of(path, bench):
            path.unlink()
    except (OSError, RuntimeError):  # no space, no home
        return None
    return path


def cache_folder() -> Path:
    """Return the folder of all such files."""
    home = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(home) if Path(home).is_absolute() else Path.home() / ".cache") / "onnx-gconv" / "times"


def _is_of(path: Path, bench: Bench) -> bool:
    try:
        return read_table(path).bench == bench
    except DeployError:
        return False


def _name(bench: Bench) -> str:
    parts = (bench.runner, bench.runtime, bench.instructions, platform.node(), bench.precision, f"{bench.threads}-threads")
    return "_".join(re.sub(r"[^a-z0-9.]+", "-", str(part).lower()).strip("-") for part in parts)
