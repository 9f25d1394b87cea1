"""What our work does with the cores and processes of a program that calls us."""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from types import ModuleType
from typing import ParamSpec, TypeVar

from threadpoolctl import threadpool_limits

# The environment of our workers. NumPy's BLAS reads the first when it is imported, Python the other when it starts.
WORKERS = {"OPENBLAS_NUM_THREADS": "1", "PYTHONSAFEPATH": "1"}

P = ParamSpec("P")
R = TypeVar("R")


def one_blas_thread(function: Callable[P, R]) -> Callable[P, R]:
    """Return the function, during which a product of matrices takes one thread.

    Our matrices are small. More threads, waiting for a core that somebody else uses, made a solve fifteen times slower, and
    they add up in another order: the same call would not give the same bytes everywhere.
    """

    @wraps(function)
    def limited(*args: P.args, **kwargs: P.kwargs) -> R:
        with threadpool_limits(1, user_api="blas"):
            return function(*args, **kwargs)

    return limited


@contextmanager
def starting_workers() -> Iterator[None]:
    """Start processes meanwhile that leave the caller's script and folder alone, and take one thread for a product of matrices.

    A spawned process begins with `python -c`, which looks for modules in the current folder first, Python's own included: a
    `multiprocessing.py` that lies there would be run.
    A spawned process imports `__main__` anew. A script that calls us at its top level would start over in every worker, and
    its author should not have to know that we use any. What we send to workers is never defined there.
    """
    main, before = sys.modules["__main__"], {name: os.environ.get(name) for name in WORKERS}
    sys.modules["__main__"] = ModuleType("__main__")
    os.environ.update(WORKERS)
    try:
        yield
    finally:
        sys.modules["__main__"] = main
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
