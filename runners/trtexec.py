"""Build TensorRT engines of ONNX models with NVIDIA's trtexec and time them: MODEL.onnx in, timing.json out.

    python3 trtexec.py MODEL.onnx [MODEL2.onnx ...] -o timing.json [--precision fp32|fp16|int8]

One self-contained file for the machine that is measured, a server or a Jetson. It needs trtexec of TensorRT 8.2 to 11 and
nothing else: Python 3.6 as a Jetson TX2 has it, standard library only. Several models take turns, round by round, so that a
GPU that grows warm does so for all of them.
"""

import argparse
import glob
import hashlib
import io
import json
import math
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading

FORMAT = 1
PLACES = ("/usr/src/tensorrt/bin/trtexec", "/usr/local/tensorrt/bin/trtexec", "/opt/tensorrt/bin/trtexec")
WARM_UP_MS = 200
ROUNDS = 3  # when several models take turns
NUMBER = r"([0-9.eE+-]+)"


class RunnerError(Exception):
    """A failure with a sentence for the user and a hint what to do about it."""

    def __init__(self, message, hint=""):
        super().__init__(message)
        self.hint = hint


def varint(file):
    """Return the next protobuf varint of the file, or None at its end."""
    value = shift = 0
    while True:
        byte = file.read(1)
        if not byte:
            return None
        value |= (byte[0] & 127) << shift
        if byte[0] < 128:
            return value
        shift += 7


def fields(file, wanted):
    """Yield (field number, value) of the wanted fields of a protobuf message: numbers, or bytes; others are skipped unread."""
    while True:
        tag = varint(file)
        if tag is None:
            return
        number, wire = tag >> 3, tag & 7
        if wire == 0:
            value = varint(file)
        elif wire == 2:
            size = varint(file)
            if number not in wanted:
                file.seek(size, 1)
                continue
            value = file.read(size)
        elif wire in (1, 5):
            value = file.read(8 if wire == 1 else 4)
        else:
            raise RunnerError("this is not an ONNX model.", "export or download it again")
        if number in wanted:
            yield number, value


def model_facts(path):
    """Return the `model` of timing.json. The target need not have the onnx package, so the file's head is read by hand."""
    opset, ir_version = None, None
    try:
        with open(path, "rb") as file:
            for number, value in fields(file, {1, 8}):  # ModelProto: ir_version, opset_import
                if number == 1:
                    ir_version = value
                else:
                    entry = dict(fields(io.BytesIO(value), {1, 2}))  # OperatorSetIdProto: domain, version
                    if entry.get(1, b"") in (b"", b"ai.onnx"):
                        opset = entry.get(2)
        digest = hashlib.sha256()
        with open(path, "rb") as file:
            for block in iter(lambda: file.read(1 << 20), b""):
                digest.update(block)
    except OSError as error:
        raise RunnerError(f"cannot read '{path}': {error.strerror}.", "check the path") from error
    return {"path": str(path), "sha256": digest.hexdigest(), "opset": opset, "ir_version": ir_version}


def spread(samples_ms):
    """Return min to max of the samples; pNN is the smallest sample that NN % of them do not exceed."""
    ordered = sorted(samples_ms)

    def percentile(share):
        return ordered[max(0, math.ceil(share * len(ordered) / 100) - 1)]

    return {
        "min": ordered[0],
        "mean": sum(ordered) / len(ordered),
        "median": statistics.median(ordered),
        "p90": percentile(90),
        "p95": percentile(95),
        "p99": percentile(99),
        "max": ordered[-1],
    }


def layer_rows(layers):
    """Return `layers` of timing.json from (name, kind, milliseconds), with each one's share of their sum."""
    total = sum(median_ms for _, _, median_ms in layers)
    return [
        {"name": name, "kind": kind, "median_ms": median_ms, "share": median_ms / total if total else 0.0}
        for name, kind, median_ms in layers
    ]


def summary_of(layers):
    """Return the milliseconds of each kind of layer."""
    return {
        f"{kind}_ms": sum(layer["median_ms"] for layer in layers if layer["kind"] == kind)
        for kind in ("conv", "gather", "reformat", "other")
    }


def parse_shapes(texts):
    """Return the shapes by input name that `--shapes NAME:1x3x224x224` gives."""
    shapes = {}
    for text in texts:
        name, _, dims = text.rpartition(":")
        try:
            shapes[name] = [int(dim) for dim in dims.split("x")]
        except ValueError:
            raise RunnerError(f"--shapes '{text}' is not a shape.", "write it like input:1x3x224x224") from None
    return shapes


def write_timings(output, timings):
    """Write one timing.json for each model: OUT.json for the first, OUT.2.json for the second, and so on."""
    stem, extension = os.path.splitext(output)
    for number, timing in enumerate(timings, start=1):
        path = output if number == 1 else f"{stem}.{number}{extension}"
        try:
            with open(path + ".part", "w") as file:
                json.dump(timing, file, indent=1)
                file.write("\n")
            os.replace(path + ".part", path)
        except OSError as error:
            raise RunnerError(f"cannot write '{path}': {error.strerror}.", "choose another place with -o") from error


def complain(error):
    """Print a failure as `error: ...` and `hint: ...`, and return the exit code for it."""
    print(f"error: {error}", file=sys.stderr)
    if error.hint:
        print(f"hint: {error.hint}", file=sys.stderr)
    return 1


class Trtexec:
    """The trtexec of this machine: its version, the flags that it knows, and runs of it."""

    def __init__(self, path, timeout):
        self.path = path
        self.timeout = timeout
        text, _ = self.start(["--help"])
        self.version = parse_version(text)

    def start(self, flags, watch=None):
        """Return the output and exit code; `watch` sees every line, and what it raises stops the program."""
        try:
            process = subprocess.Popen(
                [self.path, *flags], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, universal_newlines=True, errors="replace"
            )
        except OSError as error:
            raise RunnerError(f"cannot start '{self.path}': {error.strerror}.", "name the right file with --trtexec") from error
        late = threading.Timer(self.timeout, process.kill)
        late.start()
        lines = []
        try:
            for line in process.stdout:
                lines.append(line)
                if watch is not None:
                    watch(line)
            code = process.wait()
        finally:
            running = late.is_alive()
            late.cancel()
            if process.poll() is None:
                process.kill()
                process.wait()
            process.stdout.close()
        if not running:
            raise RunnerError(f"trtexec was stopped after {self.timeout:.0f} seconds.", "give it longer with --timeout")
        return "".join(lines), code

    def run(self, flags, what, watch=None):
        """Return the output of a run that must succeed."""
        text, code = self.start(flags, watch)
        if code != 0 or "&&&& FAILED" in text:
            raise failure(text, code, what, [self.path, *flags])
        return text

    def build_flags(self, model, engine, precision, typed, workspace_mib, shapes):
        """Return the flags that build an engine. 8.2's default workspace is 16 MiB, so one is always given."""
        flags = [f"--onnx={model}", f"--saveEngine={engine}"]
        if self.version < (8, 4):
            flags.append(f"--workspace={workspace_mib}")
        else:
            flags.append(f"--memPoolSize=workspace:{workspace_mib}")
        flags.append("--buildOnly" if self.version < (8, 6) else "--skipInference")
        if precision != "fp32" and self.version < (11,):
            flags.append("--stronglyTyped" if typed and self.version >= (10,) else f"--{precision}")
        return flags + shape_flags(shapes)

    def run_flags(self, engine, seconds, shapes):
        """Return the flags that time an engine. From 11 on other defaults hold: set those of the versions before."""
        flags = [f"--loadEngine={engine}", f"--warmUp={WARM_UP_MS}", f"--duration={seconds}"]
        if self.version >= (11,):
            flags += ["--noCudaGraph", "--noSpinWait", "--includeDataTransfers"]
        return flags + shape_flags(shapes)


def find_trtexec(given):
    """Return the path of trtexec: as given, on the PATH, or where JetPack and NVIDIA's packages put it."""
    if given:
        return given
    for path in (shutil.which("trtexec"), *PLACES):
        if path and os.access(path, os.X_OK):
            return path
    raise RunnerError(
        "there is no trtexec on the PATH nor in {}.".format(", ".join(os.path.dirname(place) for place in PLACES)),
        "install TensorRT (on a Jetson: JetPack 4.6 or newer, package libnvinfer-bin), or name it with --trtexec",
    )


def parse_version(text):
    """Return the version from the banner: v8201 is 8.2.1, v100900 is 10.9.0."""
    found = re.search(r"\[TensorRT v(\d+)\]", text)
    if found is None:
        raise RunnerError("this trtexec does not say its version.", "TensorRT 8.2 to 11 is supported")
    number = int(found.group(1))
    major = number // 10000 if number >= 100000 else number // 1000
    version = (major, number % (10000 if number >= 100000 else 1000) // 100, number % 100)
    if version < (8, 2):
        raise RunnerError("TensorRT {}.{}.{} is too old.".format(*version), "8.2 to 11 is supported: JetPack 4.6 or newer")
    return version


def shape_flags(shapes):
    """Return --shapes for the inputs with dynamic axes; trtexec refuses it for models without any."""
    texts = ["{}:{}".format(name, "x".join(map(str, dims))) for name, dims in shapes.items()]
    return ["--shapes={}".format(",".join(texts))] if texts else []


def failure(text, code, what, command):
    """Return the error for a run that failed, with trtexec's own first complaint."""
    complaints = re.findall(r"\[E\] (.*)", text) or [f"exit code {code}"]
    first = complaints[0].strip()
    hint = "`{}` prints the whole log".format(" ".join(command))
    if re.search(r"unknown option", first, re.I):
        hint = "this trtexec does not know a flag that its version should have; " + hint
    elif re.search(r"importer|unsupported|not supported|opset", " ".join(complaints), re.I):
        hint = "`onnx-gconv export --target tx2` (or tensorrt) writes what that version reads; " + hint
    elif re.search(r"static model does not take explicit shapes", " ".join(complaints), re.I):
        hint = "leave out --shapes"
    elif re.search(r"dynamic", " ".join(complaints), re.I):
        hint = "give the shapes of inputs with dynamic axes: --shapes NAME:1x3x224x224"
    return RunnerError(f"trtexec could not {what}: {first}", hint)


def parse_summary(text):
    """Return the performance summary: milliseconds by quantity and statistic, and the throughput."""
    part = text.rpartition("=== Performance summary ===")[2]
    summary = {}
    for name, values in re.findall(r"\] \[I\] ([A-Za-z0-9 -]+): (min = .*)", part):
        found = re.findall(r"(min|max|mean|median|percentile\((\d+)%\)) = " + NUMBER + " ms", values)
        summary[name] = {("p" + share if share else key): float(value) for key, share, value in found}
    throughput = re.search(r"Throughput: " + NUMBER + " qps", part)
    if throughput is None or "Latency" not in summary:
        raise RunnerError("trtexec printed no performance summary.", "run it by hand to see why")
    return summary, float(throughput.group(1)), [line.strip(" *") for line in re.findall(r"\] \[W\] (.*)", part)]


def parse_times(text, warm_up_ms):
    """Return the rows of --exportTimes. 8.2, known by its endToEndMs, includes the warm-up queries: they are dropped."""
    rows = json.loads(text)
    return [row for row in rows if "endToEndMs" not in row or row["startComputeMs"] >= warm_up_ms]


def parse_profile(text):
    """Return (name, kind, milliseconds) of each layer in --exportProfile.

    Not read as JSON: names are not escaped in it. 8.2 has no medianMs, there the average has to do.
    """
    pattern = rf'"name"\s*:\s*"(.*)",\s*"timeMs"\s*:\s*{NUMBER},\s*"averageMs"\s*:\s*{NUMBER}(?:,\s*"medianMs"\s*:\s*{NUMBER})?'
    return [(name, kind_of(name), float(median or average)) for name, _, average, median in re.findall(pattern, text)]


def kind_of(name):
    """Return the kind of an engine's layer. Fused layers are `A + B`; our Gathers are named after the Conv they serve."""
    if re.search(r"reformat|copynode", name, re.I):
        return "reformat"
    parts = [part.rpartition("/")[2].lower() for part in name.split(" + ")]
    if any("conv" in part and "gather" not in part for part in parts):
        return "conv"
    return "gather" if any("gather" in part for part in parts) else "other"


def parse_device(text):
    """Return the GPU's name and compute capability."""
    name, capability = (re.search(what + r": (.*)", text) for what in ("Selected Device", "Compute Capability"))
    return name and name.group(1).strip(), capability and capability.group(1).strip()


def refuse_int8_without_hardware(line):
    """Stop a build for int8 as soon as the log says that the GPU has no int8 arithmetic."""
    found = re.search(r"Compute Capability: (\d+)\.(\d+)", line)
    if found and not has_int8(int(found.group(1)), int(found.group(2))):
        raise RunnerError(
            "this GPU (compute capability {}.{}) has no int8 arithmetic, so int8 would gain nothing.".format(*found.groups()),
            "use --precision fp16; the Jetson TX2 (6.2) and Nano (5.3) have fp16, but not int8",
        )


def has_int8(major, minor):
    """Return whether a GPU multiplies int8: from 6.1 on, but not 6.2, the Jetson TX2."""
    return (major, minor) >= (6, 1) and (major, minor) != (6, 2)


def parse_shapes_made(text):
    """Return the input shapes that trtexec ran with: 8.2 to 8.4 say it one way, later ones another."""
    made = re.findall(r"Created input binding for (.*) with dimensions ([0-9x]+)", text)
    made += re.findall(r"Input binding for (.*) with dimensions ([0-9x]+) is created", text)
    return {name: [int(dim) for dim in dims.split("x")] for name, dims in made}


def output_of(command):
    """Return what a command prints, or None where there is no such command or it fails."""
    try:
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.decode("utf-8", "replace")


def first_line(path):
    """Return the first line of a file, or None where it cannot be read."""
    try:
        with open(path) as file:
            return file.readline().strip()
    except OSError:
        return None


def power_mode():
    """Return the Jetson's power mode, such as MAXN; None elsewhere."""
    text = output_of(["nvpmodel", "-q"])
    found = re.search(r"NV Power Mode: (.*)", text or "")
    return found.group(1).strip() if found else None


def clocks_locked():
    """Return whether the GPU's lowest clock is its highest, as jetson_clocks sets it; None where it cannot be read."""
    for folder in glob.glob("/sys/class/devfreq/*"):
        if re.search(r"gpu|g[mpva]\d+b", os.path.basename(folder)):
            low, high = (first_line(os.path.join(folder, name)) for name in ("min_freq", "max_freq"))
            return low == high if low and high else None
    return None


def measure(args):
    """Return one timing for each model."""
    tool = Trtexec(find_trtexec(args.trtexec), args.timeout)
    if tool.version >= (11,) and args.precision != "fp32" and not args.typed:
        raise RunnerError(
            "TensorRT {}.{} takes the precision from the model's own types, and these are not said to have any.".format(
                *tool.version
            ),
            f"`onnx-gconv bench --precision {args.precision}` writes such models; then --typed",
        )
    facts = [model_facts(path) for path in args.models]
    shapes = parse_shapes(args.shapes)
    watch = refuse_int8_without_hardware if args.precision == "int8" else None
    with tempfile.TemporaryDirectory() as folder:
        cache = "--timingCacheFile={}".format(os.path.join(folder, "timing.cache"))
        logs, engines = [], []
        for number, model in enumerate(args.models):
            engine = os.path.join(args.engines or folder, f"{os.path.basename(model)}.{number}.engine")
            flags = tool.build_flags(model, engine, args.precision, args.typed, args.workspace, shapes)
            logs.append(tool.run([*flags, cache], f"build an engine of '{model}'", watch))
            engines.append(engine)
        runs = time_engines(tool, engines, shapes, args, folder)
        profiles = [profile_engine(tool, engine, shapes, folder) if args.profile else [] for engine in engines]
    return [timing(tool, args, fact, log, run, profile) for fact, log, run, profile in zip(facts, logs, runs, profiles)]


def time_engines(tool, engines, shapes, args, folder):
    """Return of each engine: its rows, throughput, warnings, shapes, command, and the summary; all take turns."""
    rounds = max(1, min(ROUNDS, int(args.seconds))) if len(engines) > 1 else 1  # trtexec runs for a second at least
    results = [{"rows": [], "qps": [], "warnings": []} for _ in engines]
    times = os.path.join(folder, "times.json")
    for _ in range(rounds):
        for engine, result in zip(engines, results):
            flags = tool.run_flags(engine, max(1, round(args.seconds / rounds)), shapes)
            text = tool.run([*flags, f"--exportTimes={times}"], f"run '{engine}'")
            summary, qps, warnings = parse_summary(text)
            with open(times) as file:
                result["rows"] += parse_times(file.read(), WARM_UP_MS)
            os.remove(times)
            result["qps"].append(qps)
            result["warnings"] += [warning for warning in warnings if warning not in result["warnings"]]
            result.update(summary=summary, shapes=parse_shapes_made(text), command=[tool.path, *flags])
    return results


def profile_engine(tool, engine, shapes, folder):
    """Return the layers of an engine, in a run of its own: measuring each layer slows the whole."""
    path = os.path.join(folder, "profile.json")
    tool.run([*tool.run_flags(engine, 1, shapes), f"--exportProfile={path}"], f"profile '{engine}'")
    with open(path) as file:
        return parse_profile(file.read())


def timing(tool, args, fact, log, run, profile):
    """Return timing.json of one model."""
    name, capability = parse_device(log)
    mode, locked = power_mode(), clocks_locked()
    warnings = list(run["warnings"])
    if locked is False:
        warnings.append("the clocks are not locked: `sudo nvpmodel -m 0 && sudo jetson_clocks` makes times comparable")
    if run["rows"]:
        latency, compute = (spread([row[key] for row in run["rows"]]) for key in ("latencyMs", "computeMs"))
    else:  # every query was a warm-up query: the summary knows the others
        latency, compute = (summary_spread(run["summary"][key]) for key in ("Latency", "GPU Compute Time"))
        warnings.append("too few queries for percentiles: longer with --seconds")
    layers = layer_rows(profile)
    release = first_line("/etc/nv_tegra_release")
    versions = {"tensorrt": "{}.{}.{}".format(*tool.version), "python": ".".join(map(str, sys.version_info[:3]))}
    if release:
        versions["l4t"] = release
    return {
        "format": FORMAT,
        "runner": "trtexec",
        "versions": versions,
        "device": {"name": name, "compute_capability": capability, "power_mode": mode, "clocks_locked": locked, "threads": None},
        "model": fact,
        "precision": args.precision,
        "shapes": run["shapes"] or parse_shapes(args.shapes),
        "run": {
            "warmup": WARM_UP_MS,
            "iterations": len(run["rows"]),
            "cuda_graph": False,
            "spin_wait": False,
            "data_transfers": True,
        },
        "latency_ms": latency,
        "gpu_compute_ms": compute,
        "throughput_qps": statistics.mean(run["qps"]),
        "layers": layers,
        "summary": summary_of(layers),
        "warnings": warnings,
        "command": run["command"],
    }


def summary_spread(values):
    """Return min to max as trtexec's summary has them; 8.2 and 8.4 know no p90 and p95."""
    return {key: values.get(key) for key in ("min", "mean", "median", "p90", "p95", "p99", "max")}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", metavar="MODEL")
    parser.add_argument("-o", "--output", help="timing.json; with more models also timing.2.json and so on")
    parser.add_argument("--precision", choices=("fp32", "fp16", "int8"), default="fp32")
    parser.add_argument("--typed", action="store_true", help="the models carry this precision in their own types")
    parser.add_argument("--shapes", action="append", default=[], metavar="NAME:1x3x224x224", help="of an input with dynamic axes")
    parser.add_argument("--seconds", type=float, default=3.0, help="for each model (default 3)")
    parser.add_argument("--workspace", type=int, default=1024, metavar="MIB", help="for building (default 1024)")
    parser.add_argument("--engines", metavar="FOLDER", help="keep the engines there")
    parser.add_argument("--no-profile", dest="profile", action="store_false", help="leave out the times of the layers")
    parser.add_argument("--trtexec", metavar="FILE", help="where trtexec is, if not on the PATH nor in its usual places")
    parser.add_argument("--timeout", type=float, default=3600.0, metavar="SECONDS", help="for one run of trtexec (default 3600)")
    parser.add_argument("--versions", action="store_true", help="print the versions as JSON and do nothing else")
    args = parser.parse_args()
    if not args.versions and not (args.models and args.output):
        parser.error("name a MODEL and, with -o, the file to write")
    try:
        if args.versions:
            version = Trtexec(find_trtexec(args.trtexec), args.timeout).version
            print(json.dumps({"tensorrt": "{}.{}.{}".format(*version)}))
        else:
            write_timings(args.output, measure(args))
    except RunnerError as error:
        return complain(error)
    return 0


if __name__ == "__main__":
    sys.exit(main())
