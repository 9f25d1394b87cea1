"""The better solver against the paper's sort, brute force and SciPy, as Markdown tables.

    OPENBLAS_NUM_THREADS=1 python benchmarks/solver.py [SECTION ...] [--matrices 10000] [--cases 1000] [--jobs 2]

Needs ../shared/zoo, and resnet50.onnx in --arch (`python models/export_architectures.py resnet50 -o /tmp/arch`). Seconds
are CPU time of one thread, both sides in turn in one process: on a busy machine only their ratio means much.
"""

import argparse
import itertools
import signal
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np
from rows import need
from scipy.optimize import linear_sum_assignment

from onnx_gconv.model.constants import Constants
from onnx_gconv.model.file import load
from onnx_gconv.model.network import Layer, find_convs, layer_weight
from onnx_gconv.solve.grouping import block_diagonal_sum, kept_share
from onnx_gconv.solve.importance import Matrix, importance
from onnx_gconv.solve.layer import Solver
from onnx_gconv.solve.partition import exchange_cycles
from onnx_gconv.solve.sort import sort_channels

ZOO = Path(__file__).resolve().parent.parent.parent / "shared" / "zoo"
BEST = Solver("best")
# Added up in float64 in another sequence, the same grouping may keep this much more or less.
ROUNDING = 1e-12


def row(*cells: object) -> None:
    """Print a row of a Markdown table."""
    print(f"| {' | '.join(map(str, cells))} |", flush=True)


def header(*names: str) -> None:
    row(*names)
    row(*("---" for _ in names))


def layers(path: Path) -> Iterator[tuple[Layer, Matrix]]:
    """Yield every groupable layer of a model with its importance."""
    model = load(path)
    constants = Constants(model)
    for layer in find_convs(model, constants, {})[0]:
        yield layer, importance(layer_weight(constants, layer), "l2")


def both_kept(layer: Layer, matrix: Matrix, effort: int = 1) -> tuple[dict[int, float], dict[int, float]]:
    """Return what the better solver and the paper's sort keep for each legal number of groups."""
    solvers = Solver("best", effort=effort), Solver("paper")
    best, paper = (solver.solve_each(matrix, layer.legal_groups[1:], existing=layer.groups) for solver in solvers)
    return {g: found.kept for g, found in best.items()}, {g: found.kept for g, found in paper.items()}


def kept(args: argparse.Namespace, pool: ProcessPoolExecutor) -> None:
    need(args.zoo)
    found = list(layers(args.zoo / "cifar10_resnet56_bn.onnx"))
    whole = sum(matrix.sum() for _, matrix in found)
    solvers = {"paper": Solver("paper")} | {f"best, effort {effort}": Solver("best", effort=effort) for effort in range(4)}
    header(f"cifar10_resnet56_bn, {len(found)} Convs", "G=2", "G=4", "G=8")
    for name, solver in solvers.items():
        solved = list(pool.map(partial(solver.solve_each, numbers=(2, 4, 8)), [matrix for _, matrix in found]))
        sums = [sum(one[g].kept * matrix.sum() for one, (_, matrix) in zip(solved, found, strict=True)) for g in (2, 4, 8)]
        row(name, *(f"{part / whole:.4f}" for part in sums))


def zoo(args: argparse.Namespace, pool: ProcessPoolExecutor) -> None:
    header("model", "effort", "groupable layers", "(layer, G) pairs", "pairs below the paper's sort", "least gain", "mean gain")
    need(args.zoo)
    for path, effort in itertools.product(sorted(args.zoo.glob("*.onnx")), (1, 2) if args.effort_2 else (1,)):
        found = list(layers(path))
        pairs = list(pool.map(partial(both_kept, effort=effort), *zip(*found, strict=True))) if found else []
        gains = np.array([best[g] - paper[g] for best, paper in pairs for g in best] or [0.0])
        counts = len(found), sum(len(best) for best, _ in pairs), (gains < -ROUNDING).sum()
        row(path.stem, effort, *counts, f"{gains.min():+.1e}", f"{gains.mean():+.4f}")


def permuted_blocks(seed: int, *, channels: int, groups: int) -> Matrix:
    """Return a block-diagonal matrix, uniform in (0, 1) within the blocks, with its rows and columns permuted."""
    rng = np.random.default_rng(seed)
    blocks = np.kron(np.eye(groups), np.ones((channels // groups,) * 2)) * rng.random((channels, channels))
    return np.asarray(blocks[rng.permutation(channels)][:, rng.permutation(channels)])


def recovered(seed: int, *, channels: int = 128, groups: int = 16) -> list[float]:
    """Return the recovery ratio of the paper's sort and of the better solver on one matrix."""
    matrix = permuted_blocks(seed, channels=channels, groups=groups)
    return [solver.solve(matrix, groups).kept for solver in (Solver("paper"), Solver("best", effort=0), BEST)]


def recovery(args: argparse.Namespace, pool: ProcessPoolExecutor) -> None:
    found: list[list[float]] = []
    try:
        for ratio in pool.map(recovered, range(args.matrices), chunksize=50):
            found.append(ratio)
            if len(found) % 500 == 0:
                print(f"{len(found):,} of {args.matrices:,} matrices", file=sys.stderr, flush=True)
    except KeyboardInterrupt:  # minutes of work are worth a table of what is done
        print(f"stopped after {len(found):,} of {args.matrices:,} matrices", file=sys.stderr, flush=True)
        if not found:
            raise
    ratios = np.array(found)
    header(f"{len(found):,} permuted block-diagonal 128x128, G=16", "recovered exactly", "mean ratio", "worst ratio")
    for name, column in zip(("paper, N_S=10", "best, effort 0", "best, effort 1"), ratios.T, strict=True):
        exact = column > 1 - ROUNDING
        row(name, f"{exact.sum():,} ({exact.mean():.2%})", f"{column.mean():.4f}", f"{column.min():.4f}")
    worst = np.array([[8.0, 7.0, 0.0, 0.0], [0.0, 0.0, 8.0, 7.0], [8.0, 9.0, 0.0, 0.0], [0.0, 0.0, 8.0, 10.0]])
    shares = [solver.solve(worst, 2).kept for solver in (Solver("paper"), BEST)]
    print(f"\nThe supplement's worst case (4x4, G=2; optimum 1): paper {shares[0]:.4f}, best {shares[1]:.4f}.")


def memberships(channels: int, groups: int) -> np.ndarray:
    """Return every partition into labelled groups as a 0/1 array: (partitions, channels, groups)."""
    labels = set(itertools.permutations(np.repeat(np.arange(groups), channels // groups).tolist()))
    return np.eye(groups)[np.array(sorted(labels))]


def optimum(matrix: Matrix, groups: int) -> float:
    """Return the most that any grouping keeps: every partition of the outputs with every one of the inputs."""
    outs, ins = (memberships(channels, groups) for channels in matrix.shape)
    return float(np.einsum("pog,oi,qig->pq", outs, matrix, ins, optimize=True).max())


DISTRIBUTIONS: dict[str, Callable[[np.random.Generator, tuple[int, int]], Matrix]] = {
    "uniform": lambda rng, shape: rng.random(shape),
    "exponential": lambda rng, shape: rng.exponential(size=shape),
    "half zeros": lambda rng, shape: rng.random(shape) * (rng.random(shape) < 0.5),
    "whole numbers 0 to 3": lambda rng, shape: rng.integers(0, 4, shape).astype(float),
}
SHAPES = [(g * o, g * i, g) for g in range(2, 7) for o in range(1, 6 // g + 1) for i in range(1, 6 // g + 1)]


def small(args: argparse.Namespace, pool: ProcessPoolExecutor) -> None:
    names = "optimum found", "worst gap", "mean gap of the rest", "found by the paper's sort"
    header(f"{args.cases:,} random matrices up to 6x6", "effort", *names)
    for name, effort in itertools.product(DISTRIBUTIONS, (0, 1, 2)):
        gaps = np.array(list(pool.map(partial(gap_of, distribution=name, effort=effort), range(args.cases), chunksize=50)))
        found = (gaps <= ROUNDING).mean(axis=0)
        rest = gaps[gaps[:, 0] > ROUNDING, 0]
        worst = f"{gaps[:, 0].max():.2%}", f"{rest.mean() if len(rest) else 0:.2%}"
        row(name, effort, f"{found[0]:.2%}", *worst, f"{found[1]:.2%}")


def gap_of(seed: int, *, distribution: str, effort: int) -> tuple[float, float]:
    """Return by what share of the optimum the better solver and the paper's sort miss it on one small matrix."""
    rng = np.random.default_rng(seed)
    outs, ins, groups = SHAPES[rng.integers(len(SHAPES))]
    matrix = DISTRIBUTIONS[distribution](rng, (outs, ins))
    most = optimum(matrix, groups)
    if most == 0:
        return 0.0, 0.0
    found = Solver("best", effort=effort, seed=seed).solve(matrix, groups), Solver("paper").solve(matrix, groups)
    sums = [block_diagonal_sum(matrix, groups, one.in_order, one.out_order) for one in found]
    return 1 - sums[0] / most, 1 - sums[1] / most


def assignment(args: argparse.Namespace, pool: ProcessPoolExecutor) -> None:
    rng = np.random.default_rng(0)
    header("balanced assignment", "cases", "equal to SciPy's", "worst difference", "cycles s", "SciPy s")
    for channels, groups in itertools.product((24, 96, 480), (2, 3, 8, 24)):
        worst, took = 0.0, np.zeros(2)
        for case in range(args.assignments):
            profit = rng.random((groups, channels)).astype(np.float32 if case % 2 else np.float64)
            start = rng.permutation(channels).reshape(groups, -1)
            started = time.thread_time()
            parts, proven = exchange_cycles(profit, start, rounds=10**6)
            between = time.thread_time()
            expanded = np.repeat(profit, channels // groups, axis=0)
            exact = float(expanded[linear_sum_assignment(expanded, maximize=True)].sum(dtype=np.float64))
            took += between - started, time.thread_time() - between
            found = float(np.take_along_axis(profit, parts, axis=1).sum(dtype=np.float64))
            worst = max(worst, abs(found / exact - 1) if proven else np.inf)
        equal = "all" if worst < 1e-6 else "NOT ALL"
        row(f"{channels} channels, G={groups}", args.assignments, equal, f"{worst:.1e}", f"{took[0]:.2f}", f"{took[1]:.2f}")


def algorithm_1(matrix: Matrix, groups: int, rounds: int = 10) -> tuple[np.ndarray, np.ndarray]:
    """Return the orders of the supplement's Algorithm 1 with section 3.2's N_S rounds, in plain NumPy."""
    outs, ins = matrix.shape
    in_order, out_order = np.arange(ins), np.arange(outs)
    for g in range(groups, 0, -1):
        in_start, in_end = (g - 1) * ins // groups, g * ins // groups
        out_start, out_end = (g - 1) * outs // groups, g * outs // groups
        for _ in range(rounds):
            sigma_c = matrix[np.ix_(out_order[out_start:out_end], in_order[:in_end])].sum(axis=0)
            in_order[:in_end] = in_order[:in_end][np.argsort(sigma_c, kind="stable")]
            sigma_f = matrix[np.ix_(out_order[:out_end], in_order[in_start:in_end])].sum(axis=1)
            out_order[:out_end] = out_order[:out_end][np.argsort(sigma_f, kind="stable")]
    return in_order, out_order


Timed = tuple[np.ndarray, np.ndarray]  # seconds of the three, and (kept by best, kept by the paper) for each G


def timed(matrix: Matrix, numbers: tuple[int, ...]) -> Timed:
    """Return the seconds of the better solver, the plain Algorithm 1 and our version of it, and each G's kept shares."""
    times = [time.thread_time()]
    best = BEST.solve_each(matrix, numbers)
    times.append(time.thread_time())
    plain = {g: algorithm_1(matrix, g) for g in numbers}
    times.append(time.thread_time())
    for g in numbers:
        sort_channels(matrix, g, rounds=10)
    times.append(time.thread_time())
    return np.diff(times), np.array([(best[g].kept, kept_share(matrix, g, *plain[g])) for g in numbers])


def seconds(args: argparse.Namespace, pool: ProcessPoolExecutor) -> None:
    took = "best s", "Algorithm 1 s", "best / Algorithm 1", "early-exit sort s"
    header("problem", "layers", *took, "mean kept, best", "mean kept, paper", "least gain of a layer", "(layer, G) pairs not above")
    shapes: dict[str, list[Timed]] = {}
    need(args.arch / "resnet50.onnx")
    for layer, matrix in layers(args.arch / "resnet50.onnx"):
        name = f"{layer.out_channels}x{layer.in_channels}, all {len(layer.legal_groups) - 1} G"
        shapes.setdefault(name, []).append(timed(matrix, layer.legal_groups[1:]))
    for name, found in shapes.items():
        timing_row(name, found)
    timing_row("**ResNet-50, every layer and G**", list(itertools.chain(*shapes.values())))
    rng = np.random.default_rng(0)
    for outs, ins, groups in ((2048, 1024, 32), (4096, 4096, 2), (4096, 4096, 32)):
        timing_row(f"{outs}x{ins}, G={groups}", [timed(np.abs(rng.normal(size=(outs, ins))), (groups,))])


def timing_row(name: str, found: list[Timed]) -> None:
    best, plain, early = sum(times for times, _ in found)
    shares = np.concatenate([shares for _, shares in found])
    least = min((one[:, 0] - one[:, 1]).mean() for _, one in found)
    not_above = f"{(shares[:, 0] <= shares[:, 1]).sum()} of {len(shares)}"
    kept = (f"{share:.4f}" for share in shares.mean(axis=0))
    row(name, len(found), f"{best:.2f}", f"{plain:.2f}", f"{best / plain:.2f}", f"{early:.2f}", *kept, f"{least:+.1e}", not_above)


SECTIONS = {"kept": kept, "zoo": zoo, "recovery": recovery, "small": small, "assignment": assignment, "time": seconds}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sections", nargs="*", help="what to measure (default: all)", metavar="SECTION")
    parser.add_argument("--matrices", type=int, default=10_000, help="permuted block-diagonal matrices to recover")
    parser.add_argument("--cases", type=int, default=1000, help="small matrices to solve by brute force, of each distribution")
    parser.add_argument("--assignments", type=int, default=20, help="balanced assignments of each size")
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    parser.add_argument("--effort-2", action="store_true", help="try effort 2 on the zoo as well")
    parser.add_argument("--zoo", type=Path, default=ZOO)
    parser.add_argument("--arch", type=Path, default=Path("/tmp/arch"))
    args = parser.parse_args()
    # Not `choices`: Python 3.11 holds the empty list that stands for "all" against them.
    if unknown := set(args.sections) - SECTIONS.keys():
        parser.error(f"no section is called {sorted(unknown)[0]!r}; choose from {', '.join(SECTIONS)}")
    with ProcessPoolExecutor(args.jobs, initializer=signal.signal, initargs=(signal.SIGINT, signal.SIG_IGN)) as pool:
        for name in args.sections or SECTIONS:
            print(f"\n## {name}\n", flush=True)
            started = time.perf_counter()
            SECTIONS[name](args, pool)
            print(f"\n({time.perf_counter() - started:.0f} s)", flush=True)


if __name__ == "__main__":
    main()
