"""Processes of our own that leave the caller's script alone."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType


@contextmanager
def main_module_hidden() -> Iterator[None]:
    """Start processes meanwhile that do not import the caller's script.

    A spawned process imports `__main__` anew. A script that calls us at its top level would start over in every worker, and
    its author should not have to know that we use any. What we send to workers is never defined there.
    """
    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main
