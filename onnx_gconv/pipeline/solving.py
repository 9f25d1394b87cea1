"""Solving every layer of a model, on all cores where that pays."""

import multiprocessing
import signal
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass
from itertools import islice

import onnx

from onnx_gconv.cores import starting_workers
from onnx_gconv.listener import OnProgress
from onnx_gconv.model.constants import Constants
from onnx_gconv.model.network import Layer
from onnx_gconv.pipeline.facts import Facts
from onnx_gconv.pipeline.importances import layer_importance
from onnx_gconv.pipeline.settings import Settings
from onnx_gconv.solve.grouping import Grouping
from onnx_gconv.solve.importance import Matrix
from onnx_gconv.solve.layer import Solver

Groupings = dict[tuple[str, int], Grouping]  # by layer name and number of groups
Solutions = dict[int, Grouping]

# Starting worker processes takes about half a second, so less than this is solved right here.
SECONDS_WORTH_PROCESSES = 1.5


@dataclass(frozen=True)
class Problem:
    """One weight to be solved, for all layers that share it."""

    layers: tuple[Layer, ...]
    numbers: tuple[int, ...]

    @property
    def rough_seconds(self) -> float:
        """How long it takes to solve, to the nearest order of magnitude: an overhead, and so much for each entry."""
        first = self.layers[0]
        return len(self.numbers) * (0.01 + 7e-8 * first.out_channels * first.in_channels / first.groups)


def solve_all(
    model: onnx.ModelProto,
    layers: Sequence[Layer],
    wanted: Mapping[str, Iterable[int]],
    settings: Settings,
    facts: Facts,
    *,
    progress: OnProgress,
) -> Groupings:
    """Return the grouping of each layer for each wanted number of groups."""
    groupings: Groupings = {}
    for problem, solutions in solve_each(model, problems(layers, wanted), settings, facts, progress=progress):
        groupings |= {(layer.name, g): grouping for layer in problem.layers for g, grouping in solutions.items()}
    return groupings


def problems(layers: Sequence[Layer], wanted: Mapping[str, Iterable[int]]) -> list[Problem]:
    """Return what there is to solve; layers that share a weight are one problem."""
    sharing: dict[tuple[str, int], list[Layer]] = {}
    for layer in layers:
        sharing.setdefault((layer.weight, layer.groups), []).append(layer)
    return [Problem(tuple(group), tuple(sorted({g for layer in group for g in wanted[layer.name]}))) for group in sharing.values()]


def solve_each(
    model: onnx.ModelProto, todo: Sequence[Problem], settings: Settings, facts: Facts, *, progress: OnProgress
) -> Iterator[tuple[Problem, Solutions]]:
    """Yield the solutions of each problem as they are found, in any order; what they are does not depend on it."""
    constants, solver = Constants(model), settings.how_to_solve
    progress(0, len(todo), "solving")

    def matrix(problem: Problem) -> Matrix:
        return layer_importance(constants, problem.layers[0], settings.criterion, facts)

    if settings.jobs == 1 or len(todo) == 1 or sum(problem.rough_seconds for problem in todo) < SECONDS_WORTH_PROCESSES:
        for done, problem in enumerate(todo, start=1):
            yield problem, _solve(solver, matrix(problem), problem.numbers, problem.layers[0].groups)
            progress(done, len(todo), problem.layers[0].label)
        return
    # Spawned, not forked: ONNX Runtime's threads may be running. Threads would not do: much of the work holds the GIL.
    with starting_workers():  # it starts one at once, which watches over the others
        pool = ProcessPoolExecutor(settings.jobs, mp_context=multiprocessing.get_context("spawn"), initializer=_ignore_ctrl_c)
    try:
        queue = iter(sorted(todo, key=lambda problem: -problem.rough_seconds))  # the longest first: cores finish together
        running: dict[Future[Solutions], Problem] = {}
        done = 0
        while True:
            # Only as many matrices in flight as keep the cores busy: all of them together are larger than the model.
            for problem in islice(queue, settings.jobs + 1 - len(running)):
                given = matrix(problem)
                with starting_workers():
                    future = pool.submit(_solve, solver, given, problem.numbers, problem.layers[0].groups)
                running[future] = problem
            if not running:
                return
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                problem = running.pop(future)
                done += 1
                yield problem, future.result()
                progress(done, len(todo), problem.layers[0].label)
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def _solve(solver: Solver, matrix: Matrix, numbers: tuple[int, ...], existing: int) -> Solutions:
    return solver.solve_each(matrix, numbers, existing=existing)


def _ignore_ctrl_c() -> None:
    """Leave Ctrl-C to the main process, which tells its workers to stop."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
