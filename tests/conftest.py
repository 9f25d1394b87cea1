"""Before any test imports NumPy: one thread for each product of matrices, as the command sets it for itself.

With more, sums are added in another order, and what a test runs in this process would differ in its last bits from what the
command makes in one of its own.
"""

import os
import zlib
from collections.abc import Callable

import pytest

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import numpy as np


@pytest.fixture(scope="session", autouse=True)
def cache_of_its_own(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Keep times that tests measure out of the real cache; what the tests start inherits it."""
    os.environ["XDG_CACHE_HOME"] = str(tmp_path_factory.mktemp("cache"))


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> np.random.Generator:
    """Return a generator of the test's own, seeded by its name: what it draws depends neither on the order nor on `-k`."""
    return np.random.default_rng(zlib.crc32(request.node.name.encode()))


@pytest.fixture
def normal(rng: np.random.Generator) -> Callable[..., np.ndarray]:
    """Return a function that draws an array of the shape given."""
    return lambda *shape: rng.standard_normal(shape)
