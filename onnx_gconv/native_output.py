"""What compiled libraries print on their own."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def native_stdout_silenced() -> Iterator[None]:
    """Send what compiled code prints to stdout to nowhere meanwhile: stdout carries our result."""
    sys.stdout.flush()
    kept = os.dup(1)
    with open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), 1)
        try:
            yield
        finally:
            os.dup2(kept, 1)
            os.close(kept)
