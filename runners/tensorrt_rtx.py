"""Build engines of ONNX models ahead of time with TensorRT-RTX, GPU or not: MODEL.onnx in, timing.json and engine out.

    python tensorrt_rtx.py MODEL.onnx [MODEL2.onnx ...] -o timing.json [--engines FOLDER]

One self-contained file; it needs the package tensorrt-rtx-cu12. It says whether NVIDIA's parser and builder accept a model and
which layers they make of it. Nothing is run, so the times in timing.json are null. A pass is necessary, not sufficient, for
other TensorRT versions: this is today's parser, and its engines are for GPUs from compute capability 7.5 on.
"""

import argparse
import hashlib
import io
import json
import os
import signal
import subprocess
import sys
import time

FORMAT = 1


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


def kind_of_type(name):
    """Return the kind of a network layer, by the name of its type."""
    if name in ("CONVOLUTION", "DECONVOLUTION"):
        return "conv"
    if name == "GATHER":
        return "gather"
    return "reformat" if name in ("CAST", "SHUFFLE", "IDENTITY") else "other"


def layers_of(trt, network):
    """Return (name, kind) of each layer that the parser made; constants are no work and left out."""
    layers = [network.get_layer(number) for number in range(network.num_layers)]
    return [(layer.name, kind_of_type(layer.type.name)) for layer in layers if layer.type != trt.LayerType.CONSTANT]


def check(args):
    """Return one timing, without times, for each model; this is the child's part."""
    here = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [folder for folder in sys.path if os.path.abspath(folder or ".") != here]  # or this very file is imported
    try:
        import tensorrt_rtx as trt
    except ImportError:
        raise RunnerError(f"tensorrt_rtx is not installed for {sys.executable}.", "pip install tensorrt-rtx-cu12") from None
    timings = []
    for path in args.models:
        fact, logger, started = model_facts(path), logger_of(trt), time.perf_counter()
        network, plan = build(trt, path, args, logger, lambda builder: builder.create_builder_config())
        seconds, made = time.perf_counter() - started, bytes(plan)
        if args.engines:
            name = os.path.join(args.engines, os.path.basename(path) + ".engine")
            try:
                with open(name, "wb") as file:
                    file.write(made)
            except OSError as error:
                raise RunnerError(f"cannot write '{name}': {error.strerror}.", "choose another folder with --engines") from error
        layers = layers_of(trt, network)
        given = parse_shapes(args.shapes)
        inputs = [network.get_input(number) for number in range(network.num_inputs)]
        timings.append(
            {
                "format": FORMAT,
                "runner": "tensorrt-rtx",
                "versions": {"tensorrt_rtx": trt.__version__, "python": ".".join(map(str, sys.version_info[:3]))},
                "device": dict.fromkeys(("name", "compute_capability", "power_mode", "clocks_locked", "threads")),
                "model": fact,
                "precision": args.precision,
                "shapes": {tensor.name: given.get(tensor.name, list(tensor.shape)) for tensor in inputs},
                "run": dict.fromkeys(("warmup", "iterations", "cuda_graph", "spin_wait", "data_transfers")),
                "latency_ms": None,
                "gpu_compute_ms": None,
                "throughput_qps": None,
                "layers": [{"name": name, "kind": kind, "median_ms": None, "share": None} for name, kind in layers],
                "summary": dict.fromkeys(("conv_ms", "gather_ms", "reformat_ms", "other_ms")),
                "warnings": [f"built in {seconds:.1f} s, {len(made):,} bytes; not run: layers are the parser's, times are unknown"],
                "command": [argument for argument in sys.argv if argument != "--in-child"],
            }
        )
    return timings


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", metavar="MODEL")
    parser.add_argument("-o", "--output", required=True, help="timing.json; with more models also timing.2.json and so on")
    parser.add_argument(
        "--precision", choices=("fp32", "fp16", "int8"), default="fp32", help="what the models are in, for the record"
    )
    parser.add_argument("--shapes", action="append", default=[], metavar="NAME:1x3x224x224", help="of an input with dynamic axes")
    parser.add_argument("--engines", metavar="FOLDER", help="keep the engines there")
    parser.add_argument("--in-child", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.typed = True  # TensorRT-RTX knows nothing else
    try:
        if not args.in_child:
            return in_child(sys.argv[1:], "TensorRT-RTX")
        write_timings(args.output, check(args))
    except RunnerError as error:
        return complain(error)
    return 0


if __name__ == "__main__":
    sys.exit(main())
