"""Which search cost predicts accuracy: masked CIFAR-10 accuracy at equal MACs, for each cost and search.

    python benchmarks/costs.py [--images 2000] [--budgets 95 90 80 70]

Needs ../shared (CIFAR-10 and the ResNets) and Pillow. Nothing is recovered or tuned: the masked model as it is, and, where
a model keeps its BatchNormalization, with its statistics measured anew on 500 unlabelled training images, which is the
least that any use of a pruned model would do.
"""

import argparse
import sys
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
from oneshot_alternatives import with_fresh_statistics
from rows import need

import onnx_gconv

SHARED = Path(__file__).resolve().parent.parent.parent / "shared"
WAYS = {
    "paper: local, 1 - kept": {"search": "local", "cost": "share"},
    "exact, 1 - kept": {"search": "exact", "cost": "share"},
    "exact, -log kept": {"search": "exact", "cost": "log"},
}


def run(model: onnx.ModelProto, images: np.ndarray, output: str) -> np.ndarray:
    """Return one tensor for all images."""
    extended = onnx.ModelProto()
    extended.CopyFrom(model)
    del extended.graph.output[:]
    extended.graph.output.extend([onnx.helper.make_empty_tensor_value_info(output)])
    session = ort.InferenceSession(extended.SerializeToString(), providers=["CPUExecutionProvider"])
    name = session.get_inputs()[0].name
    return np.concatenate([session.run([output], {name: batch})[0] for batch in np.array_split(images, max(1, len(images) // 250))])


def accuracy(model: onnx.ModelProto, images: np.ndarray, labels: np.ndarray) -> float:
    return float((run(model, images, model.graph.output[0].name).argmax(axis=1) == labels).mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=2000)
    parser.add_argument("--budgets", type=int, nargs="+", default=[95, 90, 80, 70])
    parser.add_argument("--models", nargs="+", default=["cifar10_resnet20_bn", "cifar10_resnet56_bn"])
    args = parser.parse_args()
    need(SHARED)
    sys.path.insert(0, str(SHARED / "data"))
    import cifar10

    test, labels = cifar10.load("test", limit=args.images)
    train, _ = cifar10.load("train", limit=500)
    test, train = cifar10.normalise(test), cifar10.normalise(train)
    print("| model | MACs | search | layers grouped | largest G | accuracy | with fresh BN statistics |")
    print("|---|---|---|---|---|---|---|")
    for name in args.models:
        model = onnx.load(SHARED / "zoo" / f"{name}.onnx")
        print(f"| {name} | 100 % | | 0 | 1 | {accuracy(model, test, labels):.1%} | |", flush=True)
        for percent in args.budgets:
            for way, flags in WAYS.items():
                plan = onnx_gconv.plan(model, max_macs=f"{percent}%", jobs=2, **flags).plan
                masked = onnx_gconv.mask(model, plan, verify=False).model
                feeds = ({model.graph.input[0].name: batch} for batch in np.array_split(train, 10))
                fresh = accuracy(with_fresh_statistics(masked, feeds), test, labels)
                groups = max(layer.groups for layer in plan.layers)
                plain = accuracy(masked, test, labels)
                print(f"| {name} | {percent} % | {way} | {len(plan.layers)} | {groups} | {plain:.1%} | {fresh:.1%} |", flush=True)


if __name__ == "__main__":
    main()
