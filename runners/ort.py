"""Time ONNX models with ONNX Runtime, on CPU, CUDA or TensorRT: MODEL.onnx in, timing.json out.

    python ort.py MODEL.onnx [MODEL2.onnx ...] -o timing.json [--provider cpu|cuda|tensorrt]

One self-contained file for the machine that is measured; it needs onnxruntime and numpy there. Several models take turns in one
process, so that whatever disturbs one disturbs all. On the CPU one thread works and its CPU time is counted: a wall clock gave
impossible ratios under load. A provider that fell back to another one is an error, not a number.
"""

import argparse
import hashlib
import io
import json
import math
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import time

FORMAT = 1
PROVIDERS = {"cpu": "CPUExecutionProvider", "cuda": "CUDAExecutionProvider", "tensorrt": "TensorrtExecutionProvider"}
DTYPES = {
    "float": "float32", "float16": "float16", "double": "float64", "bool": "bool", "uint8": "uint8", "int8": "int8",
    "uint16": "uint16", "int16": "int16", "int32": "int32", "int64": "int64", "uint32": "uint32", "uint64": "uint64",
}  # fmt: skip
WARM_UP = 3
LEAST_RUNS = 7
PROFILED_RUNS = 21
QUIET = 4


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


def open_session(ort, path, args, profile_prefix=None):
    """Return a session on the asked provider, and only there."""
    wanted = PROVIDERS[args.provider]
    if wanted not in ort.get_available_providers():
        raise RunnerError(
            f"this onnxruntime {ort.__version__} has no {wanted}.",
            "it offers {}; GPUs need the package onnxruntime-gpu".format(", ".join(ort.get_available_providers())),
        )
    options = ort.SessionOptions()
    options.intra_op_num_threads = args.threads
    options.log_severity_level = QUIET
    if profile_prefix is not None:
        options.enable_profiling = True
        options.profile_file_prefix = profile_prefix
    # TensorRT leaves what it cannot do to CUDA; the CPU comes last in any case.
    chain = [wanted, "CUDAExecutionProvider"] if args.provider == "tensorrt" else [wanted]
    try:
        session = ort.InferenceSession(path, options, providers=chain)
    except Exception as error:  # ONNX Runtime's exceptions share no base class but Exception
        raise RunnerError(f"ONNX Runtime cannot load '{path}': {' '.join(str(error).split())[:300]}") from error
    if session.get_providers()[0] != wanted:
        raise RunnerError(
            f"{wanted} could not start; ONNX Runtime fell back to {session.get_providers()[0]}, whose time would mean nothing.",
            "check the driver (nvidia-smi) and the versions of CUDA, cuDNN and TensorRT that onnxruntime wants",
        )
    session.disable_fallback()
    return session


def random_feeds(session, shapes, path):
    """Return seeded inputs; a dynamic axis that --shapes does not settle is refused, a dynamic batch is 1."""
    import numpy

    rng = numpy.random.default_rng(0)
    feeds = {}
    for value in session.get_inputs():
        shape = shapes.get(value.name) or [1 if axis == 0 and not isinstance(d, int) else d for axis, d in enumerate(value.shape)]
        if not all(isinstance(dim, int) and dim > 0 for dim in shape):
            raise RunnerError(
                f"input '{value.name}' of '{path}' has dynamic axes: {value.shape}.",
                f"give its shape with --shapes {value.name}:1x3x224x224",
            )
        dtype = DTYPES.get(value.type[len("tensor(") : -1])
        if dtype is None:
            raise RunnerError(f"input '{value.name}' of '{path}' has type {value.type}.")
        if dtype.startswith("float"):
            feeds[value.name] = rng.standard_normal(shape).astype(dtype)
        else:  # whole numbers may be indices or lengths: 0 and 1 are legal nearly everywhere
            feeds[value.name] = rng.integers(0, 2, shape).astype(dtype)
    return feeds


def runner_of(session, feeds, on_cpu):
    """Return a function that runs the model once; on a GPU the inputs and outputs stay there."""
    if on_cpu:
        return lambda: session.run(None, feeds)
    import onnxruntime as ort

    binding = session.io_binding()
    for name, value in feeds.items():
        binding.bind_ortvalue_input(name, ort.OrtValue.ortvalue_from_numpy(value, "cuda", 0))
    for output in session.get_outputs():
        binding.bind_output(output.name, "cuda", 0)

    def run():
        session.run_with_iobinding(binding)
        binding.synchronize_outputs()

    return run


def time_each(runs, seconds, clock):
    """Return the milliseconds of every run of each model; they take turns for about this many seconds each, by this clock."""
    for run in runs:
        for _ in range(WARM_UP):
            run()
    seen = [[] for _ in runs]
    turns = list(zip(runs, seen))
    rng = random.Random(0)
    until = clock() + seconds * len(runs) * 1e9
    while clock() < until or len(seen[0]) < LEAST_RUNS:
        rng.shuffle(turns)  # who runs behind a large model finds the caches cold: that must not always be the same one
        for run, times in turns:
            started = clock()
            run()
            times.append((clock() - started) / 1e6)
    return seen


def kind_of(op_type):
    """Return the kind of a node of ONNX Runtime's optimised graph."""
    if "Conv" in op_type:
        return "conv"
    if op_type == "Gather":
        return "gather"
    return "reformat" if op_type.startswith(("Reorder", "Memcpy")) else "other"


def profile(ort, path, shapes, args):
    """Return (name, kind, median milliseconds) of each node in a run of its own, and the nodes of each provider."""
    with tempfile.TemporaryDirectory() as folder:
        session = open_session(ort, path, args, profile_prefix=os.path.join(folder, "profile"))
        run = runner_of(session, random_feeds(session, shapes, path), args.provider == "cpu")
        for _ in range(WARM_UP + PROFILED_RUNS):
            run()
        with open(session.end_profiling()) as file:
            return read_profile(json.load(file))


def read_profile(events):
    """Return the nodes of ONNX Runtime's profile, in the sequence in which they ran, and how many each provider had."""
    times, kinds, providers = {}, {}, {}
    for event in events:
        if event.get("cat") == "Node" and event["name"].endswith("_kernel_time"):
            name = event["name"][: -len("_kernel_time")]
            times.setdefault(name, []).append(event["dur"] / 1000)
            kinds[name] = kind_of(event["args"]["op_name"])
            providers.setdefault(event["args"].get("provider", ""), set()).add(name)
    layers = [(name, kinds[name], statistics.median(values[WARM_UP:] or values)) for name, values in times.items()]
    return layers, {provider: len(names) for provider, names in providers.items()}


def fitted(nodes, total_ms):
    """Return the nodes with times that add up to the time of the whole: the profiler knows the wall clock only, which under
    load runs several times as fast as the model's own time, for all nodes alike."""
    seen_ms = sum(median_ms for _, _, median_ms in nodes)
    return [(name, kind, median_ms * total_ms / seen_ms if seen_ms else 0.0) for name, kind, median_ms in nodes]


def instructions():
    """Return the widest vectors of this CPU that ONNX Runtime has kernels for: what channels are blocked by depends on them."""
    try:
        with open("/proc/cpuinfo") as file:
            flags = set(file.read().split())
    except OSError:
        flags = set()
    known = (("avx512f", "avx512"), ("avx2", "avx2"), ("avx", "avx"), ("asimd", "neon"), ("neon", "neon"))
    return next((name for flag, name in known if flag in flags), platform.machine().lower() or "unknown")


def device(args):
    """Return what is measured: the CPU's name, or the GPU's."""
    name, capability = None, None
    if args.provider == "cpu":
        try:
            with open("/proc/cpuinfo") as file:
                name = next((line.split(":", 1)[1].strip() for line in file if line.startswith("model name")), None)
        except OSError:
            pass
    else:
        try:
            query = ["nvidia-smi", "--query-gpu=name,compute_cap", "--format=csv,noheader", "--id=0"]
            text = subprocess.run(query, stdout=subprocess.PIPE, check=True, timeout=20).stdout.decode()
            name, capability = (part.strip() for part in text.split(",", 1))
        except (OSError, ValueError, subprocess.SubprocessError):
            pass
    found = {
        "name": name,
        "compute_capability": capability,
        "power_mode": None,
        "clocks_locked": None,
        "threads": args.threads if args.provider == "cpu" else None,
    }
    if args.provider == "cpu":
        found["instructions"] = instructions()
    return found


def measure(args):
    """Return one timing for each model."""
    try:
        import numpy
        import onnxruntime as ort
    except ImportError as error:
        raise RunnerError(f"{error.name} is not installed for {sys.executable}.", "pip install onnxruntime") from None
    shapes = parse_shapes(args.shapes)
    facts = [model_facts(path) for path in args.models]
    sessions = [open_session(ort, path, args) for path in args.models]
    feeds = [random_feeds(session, shapes, path) for session, path in zip(sessions, args.models)]
    on_cpu = args.provider == "cpu"
    runs = [runner_of(session, feed, on_cpu) for session, feed in zip(sessions, feeds)]
    by_cpu_time = on_cpu and args.threads == 1
    samples = time_each(runs, args.seconds, time.thread_time_ns if by_cpu_time else time.perf_counter_ns)
    timings = []
    for path, fact, feed, times in zip(args.models, facts, feeds, samples):
        nodes, providers = profile(ort, path, shapes, args) if args.profile else ([], {})
        warnings = [] if by_cpu_time else ["measured with the wall clock: other load on this machine counts"]
        if args.profile and PROVIDERS[args.provider] not in providers:
            raise RunnerError(f"no node of '{path}' ran on {PROVIDERS[args.provider]}.", "its operators are not supported")
        for provider, count in providers.items():
            if provider != PROVIDERS[args.provider]:
                warnings.append(f"{count} nodes ran on {provider}")
        latency = spread(times)
        layers = layer_rows(fitted(nodes, latency["median"]) if by_cpu_time else nodes)
        timings.append(
            {
                "format": FORMAT,
                "runner": f"ort-{args.provider}",
                "versions": {
                    "onnxruntime": ort.__version__,
                    "numpy": numpy.__version__,
                    "python": ".".join(map(str, sys.version_info[:3])),
                },
                "device": device(args),
                "model": fact,
                "precision": args.precision,
                "shapes": {name: list(value.shape) for name, value in feed.items()},
                "run": {
                    "warmup": WARM_UP,
                    "iterations": len(times),
                    "cuda_graph": False,
                    "spin_wait": False,
                    "data_transfers": False,
                },
                "latency_ms": latency,
                "gpu_compute_ms": None,
                "throughput_qps": 1000 / latency["mean"],
                "layers": layers,
                "summary": summary_of(layers),
                "warnings": warnings,
                "command": sys.argv,
            }
        )
    return timings


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", metavar="MODEL")
    parser.add_argument("-o", "--output", required=True, help="timing.json; with more models also timing.2.json and so on")
    parser.add_argument("--provider", choices=sorted(PROVIDERS), default="cpu")
    parser.add_argument(
        "--precision", choices=("fp32", "fp16", "int8"), default="fp32", help="what the models are in, for the record"
    )
    parser.add_argument("--shapes", action="append", default=[], metavar="NAME:1x3x224x224", help="the shape of an input")
    parser.add_argument("--threads", type=int, default=1, help="on the CPU (default 1)")
    parser.add_argument("--seconds", type=float, default=3.0, help="for each model (default 3)")
    parser.add_argument("--no-profile", dest="profile", action="store_false", help="leave out the times of the nodes")
    args = parser.parse_args()
    try:
        write_timings(args.output, measure(args))
    except RunnerError as error:
        return complain(error)
    return 0


if __name__ == "__main__":
    sys.exit(main())
