"""A stand-in for NVIDIA's trtexec, for tests: its banner, flags, log lines and JSON files, by version, without any GPU.

Put it on a PATH as `trtexec`. STANDIN_VERSION is the number in the banner, 8201 (TensorRT 8.2.1, as on a Jetson TX2) by default.
An engine's time is 5 ms and 1 ms more for each Gather in the model. The model's name decides what goes wrong: a name with
`unsupported` cannot be parsed, one with `lost` cuts the ssh connection that it is run over.
"""

import json
import os
import signal
import sys

VERSION = int(os.environ.get("STANDIN_VERSION", "8201"))
IS_OLD = VERSION < 100000
MAJOR, MINOR = (VERSION // 1000, VERSION % 1000 // 100) if IS_OLD else (VERSION // 10000, VERSION % 10000 // 100)
CAPABILITY = os.environ.get("STANDIN_CAPABILITY", "6.2")
EVERYWHERE = {
    *("help", "onnx", "saveEngine", "loadEngine", "shapes", "minShapes", "optShapes", "maxShapes", "exportTimes", "exportProfile"),
    *("exportLayerInfo", "profilingVerbosity", "warmUp", "duration", "iterations", "avgRuns", "percentile", "timingCacheFile"),
}


def known_flags():
    flags = set(EVERYWHERE)
    if (MAJOR, MINOR) <= (8, 6):
        flags |= {"workspace", "buildOnly"}
    if (MAJOR, MINOR) >= (8, 4):
        flags.add("memPoolSize")
    if (MAJOR, MINOR) >= (8, 6):
        flags.add("skipInference")
    if MAJOR < 11:
        flags |= {"fp16", "int8", "best"}
    if MAJOR >= 10:
        flags.add("stronglyTyped")
    if MAJOR >= 11:
        flags |= {"noCudaGraph", "noSpinWait", "includeDataTransfers"}
    return flags


def say(text, level="I"):
    print(f"[11/16/2026-12:00:00] [{level}] {text}", flush=True)


def end(word, code):
    print(f"&&&& {word} TensorRT.trtexec [TensorRT v{VERSION}] # {' '.join(sys.argv)}", flush=True)
    sys.exit(code)


def cut_connection():
    """Kill the ssh session that this runs in: its nearest ancestor that is an sshd."""
    pid = os.getpid()
    while pid > 1:
        with open(f"/proc/{pid}/stat") as file:
            text = file.read()
        name, pid = text[text.index("(") + 1 : text.rindex(")")], int(text.rpartition(")")[2].split()[1])
        if name.startswith("sshd"):
            os.kill(int(text.split()[0]), signal.SIGKILL)
            return


def build(flags):
    say("=== Device Information ===")
    say("Selected Device: NVIDIA Tegra X2")
    say(f"Compute Capability: {CAPABILITY}")
    if MAJOR == 8 and MINOR < 4 and "workspace" not in flags:
        say("[TRT] Some tactics do not have sufficient workspace memory to run.", "W")
    with open(flags["onnx"], "rb") as file:
        data = file.read()
    if "unsupported" in flags["onnx"]:
        say('[TRT] ModelImporter.cpp:780: While parsing node number 7 [Sharpen -> "y"]:', "E")
        say("[TRT] No importer registered for op: Sharpen", "E")
        say("Failed to parse onnx file", "E")
        end("FAILED", 1)
    if "shapes" in flags and b"\x12\x01N" not in data:  # no axis is called N, as in all models of our tests
        say("Static model does not take explicit shapes since the shape of inference tensors will be determined by the model", "E")
        end("FAILED", 1)
    if "lost" in flags["onnx"]:
        cut_connection()
    with open(flags["saveEngine"], "w") as file:
        json.dump({"gathers": data.count(b"Gather"), "convs": data.count(b"Conv")}, file)
    say("Engine built in 1.5 sec.")


def infer(flags):
    with open(flags["loadEngine"]) as file:
        engine = json.load(file)
    compute = 5.0 + engine["gathers"]
    if IS_OLD and MINOR < 5:
        say("Created input binding for image with dimensions 1x3x8x8")
    else:
        say("Input binding for image with dimensions 1x3x8x8 is created.")
    rows, start = [], 0.0
    warm_up = float(flags["warmUp"])
    while start < warm_up + 40 * compute:
        is_warm_up = start < warm_up
        if not is_warm_up or (MAJOR, MINOR) < (8, 4):
            spent = compute * (3 if is_warm_up else 1)  # a cold GPU is slow
            row = {"startEnqMs": start, "startComputeMs": start, "endComputeMs": start + spent, "h2dMs": 0.25}
            row.update(computeMs=spent, d2hMs=0.25, latencyMs=spent + 0.5)
            if (MAJOR, MINOR) < (8, 4):
                row["endToEndMs"] = spent + 0.6
            rows.append(row)
        start += compute
    if "exportTimes" in flags:
        with open(flags["exportTimes"], "w") as file:
            json.dump(rows, file)
    if "exportProfile" in flags:
        write_profile(flags["exportProfile"], engine)
    say("=== Performance summary ===")
    say(f"Throughput: {1000 / compute:g} qps")
    shares = ("99",) if (MAJOR, MINOR) < (8, 5) else ("90", "95", "99")
    for name, value in (("Latency", compute + 0.5), ("GPU Compute Time", compute)):
        percentiles = "".join(f", percentile({share}%) = {value:g} ms" for share in shares)
        say(f"{name}: min = {value:g} ms, max = {value:g} ms, mean = {value:g} ms, median = {value:g} ms{percentiles}")


def write_profile(path, engine):
    layers = [("Reformatting CopyNode for Input Tensor 0 to Conv_0 + Relu_1", 0.5)]
    layers += [(f"Conv_{number} + Relu_{number}", 1.0) for number in range(engine["convs"])]
    layers += [(f'/a "quoted" name/Conv_{number}_in_gather', 1.0) for number in range(engine["gathers"])]
    layers += [("MaxPool_2", 0.25)]
    with open(path, "w") as file:
        file.write('[\n  { "count" : 10 }\n')
        for name, spent in layers:  # names are not escaped, as in the real one
            median = "" if (MAJOR, MINOR) < (8, 4) else f' "medianMs" : {spent},'
            file.write(f', {{ "name" : "{name}", "timeMs" : {10 * spent}, "averageMs" : {spent},{median} "percentage" : 1 }}\n')
        file.write("]\n")


def main():
    print(f"&&&& RUNNING TensorRT.trtexec [TensorRT v{VERSION}] # {' '.join(sys.argv)}", flush=True)
    flags = dict([*argument[2:].split("=", 1), ""][:2] for argument in sys.argv[1:])
    unknown = sorted(flags.keys() - known_flags())
    if unknown:
        print("=== Model Options ===\n  --onnx=<file>               ONNX model", flush=True)
        say(f"Unknown option: --{unknown[0]} {flags[unknown[0]]}", "E")
        end("FAILED", 1)
    if "help" in flags:
        sys.exit(0)
    if "onnx" in flags:
        build(flags)
    if "loadEngine" in flags:
        infer(flags)
    end("PASSED", 0)


if __name__ == "__main__":
    main()
