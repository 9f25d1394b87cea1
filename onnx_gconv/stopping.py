"""Being told to stop: a command leaves in order, whoever asks and whenever."""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path


class Terminated(BaseException):
    """SIGTERM. Like Ctrl-C it is no Exception, so that nobody on the way takes it for a failure."""


STOPS = (KeyboardInterrupt, Terminated)
RAISED: dict[int, type[BaseException]] = {signal.SIGINT: KeyboardInterrupt, signal.SIGTERM: Terminated}
NAMES: dict[type[BaseException], tuple[str, int]] = {KeyboardInterrupt: ("interrupted", 130), Terminated: ("terminated", 143)}
WRITTEN: "list[Path]" = []  # by this command so far: who is stopped has to tell


class _State:
    """What the handler of signals goes by. Signals are the process's, so there is one."""

    holds = 0  # how many that must not be torn apart are under way
    waiting: int | None = None  # the signal that came meanwhile
    asked: int | None = None  # the last one that came at all
    code: int | None = None  # with which the process ends, once that is settled


_lock = threading.Lock()  # of the count: threads hold, too


@contextmanager
def held() -> Iterator[None]:
    """Have signals wait until the end of this. It is for moments: who waits for somebody else must let himself be stopped.

    Only those of a command do, where `in_order` has the signals; a program that calls us has its own.
    """
    with _lock:
        _State.holds += 1
    try:
        yield
    finally:
        with _lock:
            _State.holds -= 1
        if _State.waiting is not None and not _State.holds:
            number, _State.waiting = _State.waiting, None
            if threading.current_thread() is threading.main_thread():
                raise RAISED[number]
            os.kill(os.getpid(), number)  # once more, for the main thread


def in_order() -> None:
    """From now on have Ctrl-C raise KeyboardInterrupt and SIGTERM raise `Terminated`, so that folders and child processes go.

    A second SIGTERM ends the process at once. What the parent process has ignored stays ignored.
    """
    for number in RAISED:
        if signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler):
            signal.signal(number, _stop)


def asked() -> type[BaseException] | None:
    """Return what was raised for the last signal; libraries in the middle of an import make other errors of it."""
    return None if _State.asked is None else RAISED[_State.asked]


def settled(code: int) -> None:
    """Let the process end with this code, and no signal change that: all is done, and only Python's own end is left."""
    _State.code = code


def _stop(number: int, frame: FrameType | None) -> None:
    if _State.code is not None:
        os._exit(_State.code)
    is_second = _State.asked == signal.SIGTERM == number
    _State.asked = number
    if is_second and not _State.holds:
        os.write(2, b"error: terminated at once; the next command there removes what is left of this one.\n")
        os._exit(NAMES[Terminated][1])
    if _State.holds:
        _State.waiting = number
    else:
        raise RAISED[number]
