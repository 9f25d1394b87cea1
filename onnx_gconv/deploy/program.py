"""The runners: the program behind each runner name, and what is asked of it."""

from dataclasses import dataclass
from importlib import resources
from pathlib import Path

import onnx_gconv
from onnx_gconv.deploy.timing_file import Precision, RunnerName

# By runner name: the file, and the flags that make it this runner.
PROGRAMS: dict[RunnerName, tuple[str, tuple[str, ...]]] = {
    "ort-cpu": ("ort.py", ("--provider", "cpu")),
    "ort-cuda": ("ort.py", ("--provider", "cuda")),
    "ort-tensorrt": ("ort.py", ("--provider", "tensorrt")),
    "trtexec": ("trtexec.py", ()),
    "tensorrt": ("tensorrt_api.py", ()),
    "tensorrt-rtx": ("tensorrt_rtx.py", ()),
}
# TensorRT up to 10 is told the precision by a flag; from 11 on, and elsewhere, the model's own types say it.
ASKS_FOR_PRECISION = ("trtexec", "tensorrt")
FIRST_TYPED_TENSORRT = 11


@dataclass(frozen=True)
class RunnerCall:
    """Models for one runner, measured in turns, and how."""

    runner: RunnerName
    models: tuple[Path, ...]
    shapes: tuple[str, ...] = ()  # NAME:1x3x224x224, for inputs with dynamic axes
    precision: Precision = "fp32"
    typed: bool = False  # whether the models carry this precision in their own types
    seconds: float = 3.0  # for each model
    threads: int | None = None  # on a CPU
    profile: bool = True
    extra: tuple[str, ...] = ()  # flags that only this runner knows

    def flags(self) -> list[str]:
        """Return the runner's flags, all but the models and -o."""
        flags = [*PROGRAMS[self.runner][1], "--precision", self.precision]
        for shape in self.shapes:
            flags += ["--shapes", shape]
        if self.typed and self.runner in ASKS_FOR_PRECISION:
            flags.append("--typed")
        if self.runner != "tensorrt-rtx":
            flags += ["--seconds", f"{self.seconds:g}", *([] if self.profile else ["--no-profile"])]
        if self.threads is not None and self.runner == "ort-cpu":
            flags += ["--threads", str(self.threads)]
        return [*flags, *self.extra]


def program_file(runner: RunnerName) -> Path:
    """Return where the runner's program lies: inside the installed package, or beside it in a checkout."""
    name = PROGRAMS[runner][0]
    installed = Path(str(resources.files("onnx_gconv.deploy"))) / "runners" / name
    return installed if installed.exists() else Path(onnx_gconv.__file__).parents[1] / "runners" / name
