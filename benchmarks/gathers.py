"""What shared partitions cost: share of the importance kept at G=2 and 4 with --gathers free, shared and none.

python benchmarks/gathers.py [MODEL ...]      (default: the CIFAR-10 ResNets of ../shared/zoo)
"""

import argparse
from pathlib import Path

import onnx
from rows import need

import onnx_gconv
from onnx_gconv.model.constants import Constants
from onnx_gconv.model.network import layer_weight
from onnx_gconv.solve.importance import importance

ZOO = Path(__file__).resolve().parent.parent.parent / "shared" / "zoo"
MODELS = [ZOO / f"cifar10_resnet{depth}_{kind}.onnx" for depth in (20, 56) for kind in ("bn", "folded")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", type=Path, default=MODELS)
    models = parser.parse_args().models
    need(*models)
    print("| model | G | free: kept, Gathers | shared | none |\n|---|---|---|---|---|")
    for path in models:
        model = onnx.load(path)
        network, constants = onnx_gconv.inspect(model), Constants(model)
        weights = {layer.name: importance(layer_weight(constants, layer), "l2").sum() for layer in network.layers}
        for groups in (2, 4):
            cells = []
            for gathers in ("free", "shared", "none"):
                plan = onnx_gconv.plan(model, groups=groups, gathers=gathers).plan
                kept = sum(layer.kept * weights[layer.name] for layer in plan.layers) / sum(
                    weights[layer.name] for layer in plan.layers
                )
                cells.append(f"{kept:.4f}, {onnx_gconv.apply(model, plan).gathers[1]}")
            print(f"| {path.stem} | {groups} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
