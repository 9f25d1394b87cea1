"""Print the paper's parameter and FLOP figures beside ours, for its uniform configurations.

    python models/export_architectures.py -o /tmp/arch && python benchmarks/paper_counts.py /tmp/arch

Every Conv but the first is grouped, the classifier stays dense. Where the paper's FLOPs differ from counted ones both are
shown: the counter is 2 x MACs of Conv and Gemm, nothing is bent to fit.
"""

import argparse
from pathlib import Path

from onnx_gconv.model.file import load
from onnx_gconv.model.network import Network, read
from onnx_gconv.model.shapes import input_shapes
from onnx_gconv.planning.planner import make_plan
from onnx_gconv.planning.request import Request
from onnx_gconv.solve.layer import Solver

# architecture, G, parameters in M, FLOPs in G; the paper's Tables 1 and 2, its supplement's Table 4, and the issue.
PAPER: tuple[tuple[str, int, float, float | None], ...] = (
    ("resnet18", 1, 11.69, 3.64),
    ("resnet18", 8, 1.91, 0.20),
    ("resnet34", 1, 21.80, 7.34),
    ("resnet50", 1, 25.56, 8.21),
    ("resnet50", 2, 13.82, 3.77),
    ("resnet101", 1, 44.55, 15.7),
    ("resnet101", 2, 23.34, 7.50),
    ("densenet86", 1, 2.03, 0.5061),
    ("densenet86", 4, 0.59, 0.1327),
    ("resnet164", 1, 1.73, 0.504),
    ("resnet164", 2, 0.91, 0.257),
    ("resnet164", 4, 0.49, None),
    ("resnet164", 8, 0.26, None),
)


def counted(network: Network, path: Path, groups: int) -> tuple[float, float]:
    """Return parameters in millions and FLOPs in billions with uniform groups."""
    params, macs = network.count.params, network.count.macs
    if groups > 1:
        request = Request(groups=groups, solver=Solver("plain"))  # counts do not depend on the permutation
        after = make_plan(load(path), network, request, sha256="", progress=lambda *_: None).plan.after
        params, macs = after.params, after.macs
    assert macs is not None
    return params / 1e6, 2 * macs / 1e9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where models/export_architectures.py wrote to")
    folder = parser.parse_args().folder
    print("| model | G | params, paper | ours | difference | GFLOPs, paper | ours |\n|---|---|---|---|---|---|---|")
    for name, groups, params, flops in PAPER:
        path = folder / f"{name}.onnx"
        model = load(path)
        our_params, our_flops = counted(read(model, input_shapes(model, {})), path, groups)
        paper_flops = "" if flops is None else f"{flops:.4g}"
        print(
            f"| {name} | {groups} | {params:.2f} M | {our_params:.3f} M | {our_params / params - 1:+.1%} "
            f"| {paper_flops} | {our_flops:.4g} |"
        )


if __name__ == "__main__":
    main()
