"""Build TensorRT engines of ONNX models with TensorRT's Python API and time them: MODEL.onnx in, timing.json out.

    python tensorrt_api.py MODEL.onnx [MODEL2.onnx ...] -o timing.json [--precision fp32|fp16|int8]

One self-contained file for the machine that is measured; it needs the tensorrt package, 8.5 to 11, and an NVIDIA driver: device
memory, streams and events are the driver's own, by ctypes. TensorRT runs in a child process, for it crashes where there is no
driver. Several models take turns.
"""

import argparse
import array
import ctypes
import hashlib
import io
import json
import math
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import time

FORMAT = 1
WARM_UP = 10
LEAST_RUNS = 10
PROFILED_RUNS = 21
CAPABILITY = (75, 76)  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR and _MINOR
NO_DRIVER, NO_DEVICE = 35, 100  # what cuInit answers


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


def kind_of(name):
    """Return the kind of an engine's layer. Fused layers are `A + B`; our Gathers are named after the Conv they serve."""
    if re.search(r"reformat|copynode", name, re.I):
        return "reformat"
    parts = [part.rpartition("/")[2].lower() for part in name.split(" + ")]
    if any("conv" in part and "gather" not in part for part in parts):
        return "conv"
    return "gather" if any("gather" in part for part in parts) else "other"


def has_int8(major, minor):
    """Return whether a GPU multiplies int8: from 6.1 on, but not 6.2, the Jetson TX2."""
    return (major, minor) >= (6, 1) and (major, minor) != (6, 2)


def logger_of(trt):
    """Return a logger that keeps TensorRT's errors for our own message and prints nothing."""

    class Logger(trt.ILogger):
        def __init__(self):
            trt.ILogger.__init__(self)
            self.errors = []

        def log(self, severity, message):
            if severity in (trt.ILogger.ERROR, trt.ILogger.INTERNAL_ERROR):
                self.errors.append(message)

    return Logger()


def parse(trt, network, path, logger):
    """Read the model into the network, or say which node NVIDIA's parser refuses, and why."""
    parser = trt.OnnxParser(network, logger)
    if parser.parse_from_file(str(path)):
        return
    problems = [parser.get_error(number) for number in range(parser.num_errors)]
    if not problems:
        raise RunnerError(f"TensorRT cannot read '{path}': {(logger.errors or ['no reason is given'])[0]}")
    first = problems[0]
    # Before 8.6 an error knows only the number of its node.
    node = f"{first.node_operator()} node '{first.node_name()}'" if hasattr(first, "node_name") else f"node {first.node()}"
    raise RunnerError(f"TensorRT cannot read '{path}', {node}: {' '.join(first.desc().split())[:300]}")


def build(trt, path, args, logger, make_config):
    """Return the network as parsed, and the serialised engine."""
    builder = trt.Builder(logger)
    flags = trt.NetworkDefinitionCreationFlag
    # EXPLICIT_BATCH must be asked for up to 9 and is gone in 11; typed graphs are to be taken as they are typed.
    wanted = [getattr(flags, "EXPLICIT_BATCH", None), getattr(flags, "STRONGLY_TYPED", None) if args.typed else None]
    network = builder.create_network(sum(1 << int(flag) for flag in wanted if flag is not None))
    parse(trt, network, path, logger)
    config = make_config(builder)
    shapes, profile = parse_shapes(args.shapes), builder.create_optimization_profile()
    for number in range(network.num_inputs):
        tensor = network.get_input(number)
        if -1 in tuple(tensor.shape):
            if tensor.name not in shapes:
                raise RunnerError(
                    f"input '{tensor.name}' of '{path}' has dynamic axes: {tuple(tensor.shape)}.",
                    f"give its shape with --shapes {tensor.name}:1x3x224x224",
                )
            profile.set_shape(tensor.name, *[shapes[tensor.name]] * 3)
    config.add_optimization_profile(profile)
    plan = builder.build_serialized_network(network, config)
    if plan is None:
        reason = " ".join((logger.errors or ["no reason is given"])[0].split())[:300]
        raise RunnerError(f"TensorRT cannot build an engine of '{path}': {reason}")
    return network, plan


def in_child(arguments, what):
    """Run this file again in a process of its own, since TensorRT can crash without a driver; a crash becomes an error."""
    code = subprocess.call([sys.executable, os.path.abspath(__file__), *arguments, "--in-child"])
    if code < 0 or code > 2:
        name = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        raise RunnerError(f"{what} crashed ({name}).", "check that its version fits the driver: nvidia-smi shows the latter")
    return code


class Cuda:
    """The CUDA driver: what is needed of it to run and time an engine."""

    def __init__(self):
        try:
            self._library = ctypes.CDLL("libcuda.so.1")
        except OSError:
            raise RunnerError(
                "there is no NVIDIA driver on this machine (libcuda.so.1 is missing), so TensorRT cannot run here.",
                "measure on the target: `onnx-gconv bench --host ssh://user@host`; --runner tensorrt-rtx checks without a GPU",
            ) from None
        code = self._library.cuInit(0)
        if code == NO_DRIVER:
            raise RunnerError("the NVIDIA driver is missing or older than its library.", "update the driver")
        count = ctypes.c_int()
        if code == NO_DEVICE or (not code and (self._library.cuDeviceGetCount(ctypes.byref(count)) or not count.value)):
            raise RunnerError("the NVIDIA driver finds no GPU.", "check `nvidia-smi` and CUDA_VISIBLE_DEVICES")
        if code:
            raise RunnerError(f"the NVIDIA driver does not start (cuInit: error {code}).", "check `nvidia-smi`")

    def call(self, name, *arguments):
        code = getattr(self._library, name)(*arguments)
        if code:
            raise RunnerError(f"{name} failed with CUDA error {code}.", "check `nvidia-smi`; is the GPU's memory full?")

    def open(self):
        """Make the context current that TensorRT uses, too, and return the GPU's name and compute capability."""
        context = ctypes.c_void_p()
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), 0)
        self.call("cuCtxSetCurrent", context)
        name, numbers = ctypes.create_string_buffer(256), []
        self.call("cuDeviceGetName", name, 256, 0)
        for attribute in CAPABILITY:
            value = ctypes.c_int()
            self.call("cuDeviceGetAttribute", ctypes.byref(value), attribute, 0)
            numbers.append(value.value)
        return name.value.decode(), f"{numbers[0]}.{numbers[1]}"

    def allocate(self, data):
        """Return the address of a copy of these bytes on the GPU."""
        address = ctypes.c_void_p()
        self.call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(max(1, len(data))))
        self.call("cuMemcpyHtoD_v2", address, data, ctypes.c_size_t(len(data)))
        return address.value

    def stream(self):
        stream = ctypes.c_void_p()
        self.call("cuStreamCreate", ctypes.byref(stream), 0)
        return stream

    def event(self):
        event = ctypes.c_void_p()
        self.call("cuEventCreate", ctypes.byref(event), 0)
        return event

    def elapsed_ms(self, start, end):
        value = ctypes.c_float()
        self.call("cuEventElapsedTime", ctypes.byref(value), start, end)
        return value.value


class Engine:
    """An engine ready to run: its context with every input and output on the GPU."""

    def __init__(self, trt, cuda, path, args, logger):
        _, plan = build(trt, path, args, logger, lambda builder: self._config(trt, builder, args))
        self._runtime = trt.Runtime(logger)
        self._engine = self._runtime.deserialize_cuda_engine(plan)
        self.context = self._engine.create_execution_context()
        self._cuda, self._stream = cuda, cuda.stream()
        self._start, self._end = cuda.event(), cuda.event()
        names = [self._engine.get_tensor_name(number) for number in range(self._engine.num_io_tensors)]
        inputs = [name for name in names if self._engine.get_tensor_mode(name) == trt.TensorIOMode.INPUT]
        given = parse_shapes(args.shapes)
        for name in inputs:
            if -1 in tuple(self._engine.get_tensor_shape(name)):
                self.context.set_input_shape(name, given[name])
        for name in names:
            count = math.prod(self.context.get_tensor_shape(name))
            kind = self._engine.get_tensor_dtype(name)
            self.context.set_tensor_address(name, cuda.allocate(content(trt, kind, count, name in inputs)))
        self.shapes = {name: list(self.context.get_tensor_shape(name)) for name in inputs}

    @staticmethod
    def _config(trt, builder, args):
        config = builder.create_builder_config()
        config.set_memory_pool_limit(trt.MemoryPoolType.WORKSPACE, args.workspace << 20)
        if args.precision != "fp32" and not args.typed:
            flag = getattr(trt.BuilderFlag, args.precision.upper(), None)
            if flag is None:
                raise RunnerError(
                    f"TensorRT {trt.__version__} takes the precision from the model's own types.",
                    f"`onnx-gconv bench --precision {args.precision}` writes such models; then --typed",
                )
            config.set_flag(flag)
        elif (
            args.precision == "int8"
            and hasattr(trt.BuilderFlag, "INT8")
            and not hasattr(trt.NetworkDefinitionCreationFlag, "STRONGLY_TYPED")
        ):
            config.set_flag(trt.BuilderFlag.INT8)  # up to 8.6 Q/DQ graphs want the flag as well
        return config

    def run(self):
        """Run once and return the milliseconds on the host's clock and on the GPU's."""
        started = time.perf_counter()
        self._cuda.call("cuEventRecord", self._start, self._stream)
        if not self.context.execute_async_v3(self._stream.value):
            raise RunnerError("TensorRT could not run its engine.", "run again with a smaller batch")
        self._cuda.call("cuEventRecord", self._end, self._stream)
        self._cuda.call("cuEventSynchronize", self._end)
        return (time.perf_counter() - started) * 1000, self._cuda.elapsed_ms(self._start, self._end)


def content(trt, kind, count, is_input):
    """Return the bytes of a tensor: random floats, for a GPU works less on zeros, or zeros."""
    if is_input and kind == trt.DataType.FLOAT:
        rng = random.Random(0)
        return array.array("f", (rng.gauss(0, 1) for _ in range(count))).tobytes()
    return bytes(count * kind.itemsize)


def time_each(engines, seconds):
    """Return (host milliseconds, GPU milliseconds) of every run of each engine; they take turns."""
    for engine in engines:
        for _ in range(WARM_UP):
            engine.run()
    seen = [[] for _ in engines]
    turns = list(zip(engines, seen))
    rng = random.Random(0)
    until = time.perf_counter() + seconds * len(engines)
    while time.perf_counter() < until or len(seen[0]) < LEAST_RUNS:
        rng.shuffle(turns)  # who runs behind a large model finds the caches cold: that must not always be the same one
        for engine, runs in turns:
            runs.append(engine.run())
    return seen


def profile(trt, engine):
    """Return (name, kind, median milliseconds) of each layer, in runs of their own."""
    times = {}

    class Profiler(trt.IProfiler):
        def __init__(self):
            trt.IProfiler.__init__(self)

        def report_layer_time(self, name, milliseconds):
            times.setdefault(name, []).append(milliseconds)

    engine.context.profiler = profiler = Profiler()
    for _ in range(PROFILED_RUNS):
        engine.run()
    del profiler
    return [(name, kind_of(name), statistics.median(values)) for name, values in times.items()]


def measure(args):
    """Return one timing for each model; this is the child's part."""
    try:
        import tensorrt as trt
    except ImportError:
        raise RunnerError(f"tensorrt is not installed for {sys.executable}.", "pip install tensorrt") from None
    version = tuple(int(part) for part in trt.__version__.split(".")[:2])
    if version < (8, 5):
        raise RunnerError(f"TensorRT {trt.__version__} is too old for this runner.", "--runner trtexec works from 8.2 on")
    facts = [model_facts(path) for path in args.models]
    cuda = Cuda()
    name, capability = cuda.open()
    if args.precision == "int8" and not has_int8(*map(int, capability.split("."))):
        raise RunnerError(f"{name} (compute capability {capability}) has no int8 arithmetic.", "use --precision fp16")
    logger = logger_of(trt)
    engines = [Engine(trt, cuda, path, args, logger) for path in args.models]
    device = {"name": name, "compute_capability": capability, "power_mode": None, "clocks_locked": None, "threads": None}
    seen = time_each(engines, args.seconds)
    return [timing(trt, args, device, fact, engine, runs) for fact, engine, runs in zip(facts, engines, seen)]


def timing(trt, args, device, fact, engine, runs):
    """Return timing.json of one model."""
    latency, compute = (spread(column) for column in zip(*runs))
    layers = layer_rows(profile(trt, engine) if args.profile else [])
    return {
        "format": FORMAT,
        "runner": "tensorrt",
        "versions": {"tensorrt": trt.__version__, "python": ".".join(map(str, sys.version_info[:3]))},
        "device": device,
        "model": fact,
        "precision": args.precision,
        "shapes": engine.shapes,
        "run": {"warmup": WARM_UP, "iterations": len(runs), "cuda_graph": False, "spin_wait": False, "data_transfers": False},
        "latency_ms": latency,
        "gpu_compute_ms": compute,
        "throughput_qps": 1000 / latency["mean"],
        "layers": layers,
        "summary": summary_of(layers),
        "warnings": [],
        "command": [argument for argument in sys.argv if argument != "--in-child"],
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", metavar="MODEL")
    parser.add_argument("-o", "--output", help="timing.json; with more models also timing.2.json and so on")
    parser.add_argument("--precision", choices=("fp32", "fp16", "int8"), default="fp32")
    parser.add_argument("--typed", action="store_true", help="the models carry this precision in their own types")
    parser.add_argument("--shapes", action="append", default=[], metavar="NAME:1x3x224x224", help="of an input with dynamic axes")
    parser.add_argument("--seconds", type=float, default=3.0, help="for each model (default 3)")
    parser.add_argument("--workspace", type=int, default=1024, metavar="MIB", help="for building (default 1024)")
    parser.add_argument("--no-profile", dest="profile", action="store_false", help="leave out the times of the layers")
    parser.add_argument("--versions", action="store_true", help="print the versions as JSON and do nothing else")
    parser.add_argument("--in-child", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if not args.versions and not (args.models and args.output):
        parser.error("name a MODEL and, with -o, the file to write")
    try:
        if not args.in_child:
            Cuda()  # a clear sentence, before TensorRT is even imported
            return in_child(sys.argv[1:], "TensorRT")
        if args.versions:
            import tensorrt

            print(json.dumps({"tensorrt": tensorrt.__version__}))
            return 0
        write_timings(args.output, measure(args))
    except RunnerError as error:
        return complain(error)
    return 0


if __name__ == "__main__":
    sys.exit(main())
