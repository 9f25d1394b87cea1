"""Being told to stop: a command leaves in order, whoever asks."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class Terminated(BaseException):
    """SIGTERM. Like Ctrl-C it is no Exception, so that nobody on the way takes it for a failure."""


STOPS = (KeyboardInterrupt, Terminated)


@contextmanager
def terminated_in_order() -> Iterator[None]:
    """Have SIGTERM raise `Terminated`, so that temporary folders and child processes go; a second one ends at once.

    Where the parent process has it ignored, it stays ignored.
    """
    if signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, _terminate)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _terminate(number: int, frame: FrameType | None) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    raise Terminated
