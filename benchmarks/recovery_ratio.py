"""The paper's Figure 5, left: how much of a randomly permuted block-diagonal matrix each solver recovers.

    python benchmarks/recovery_ratio.py [--samples 1000] [--channels 128] [--groups 16]

Entries of the blocks are uniform in (0, 1); the paper does not say its distribution.
"""

import argparse
from concurrent.futures import ProcessPoolExecutor
from functools import partial

import numpy as np

from onnx_gconv.solve.layer import Solver

SOLVERS = (
    {"plain": Solver("plain")}
    | {f"paper, N_S={rounds}": Solver("paper", rounds) for rounds in (1, 2, 5, 10)}
    | {f"best, effort {effort}": Solver("best", effort=effort) for effort in (0, 1)}
)


def ratios(seed: int, *, channels: int, groups: int) -> list[float]:
    """Return the recovery ratio of every solver on one matrix."""
    rng = np.random.default_rng(seed)
    blocks = np.kron(np.eye(groups), np.ones((channels // groups,) * 2)) * rng.random((channels, channels))
    matrix = blocks[rng.permutation(channels)][:, rng.permutation(channels)]
    return [solver.solve(matrix, groups).kept for solver in SOLVERS.values()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=1000)
    parser.add_argument("--channels", type=int, default=128)
    parser.add_argument("--groups", type=int, default=16)
    args = parser.parse_args()
    with ProcessPoolExecutor() as pool:
        one = partial(ratios, channels=args.channels, groups=args.groups)
        table = np.array(list(pool.map(one, range(args.samples), chunksize=16)))
    print("| solver | recovered exactly | mean ratio | worst ratio |\n|---|---|---|---|")
    for name, column in zip(SOLVERS, table.T, strict=True):
        print(f"| {name} | {np.mean(column > 1 - 1e-9):.1%} | {column.mean():.4f} | {column.min():.4f} |")


if __name__ == "__main__":
    main()
