"""Whom a long job tells what it does: how far it is, what it found, what went wrong. Nobody, by default."""

from collections.abc import Callable
from dataclasses import dataclass

OnProgress = Callable[[int, int | None, str], None]  # done, of how many if that is known, the item at hand


def ignore(*_: object) -> None:
    """Take anything and do nothing."""


@dataclass(frozen=True)
class Listener:
    """Functions to call while a job runs; any that is left out hears nothing.

    They are called often and from any thread, so they should return soon. An exception that one raises ends the job and reaches
    the caller: that is the way to cancel.

        Listener(progress=lambda phase, done, total, item: print(phase, done, total, item))
    """

    progress: Callable[[str, int, int | None, str], None] = ignore  # phase, done, of how many if known, the item at hand
    note: Callable[[str], None] = ignore  # what everybody wants to know
    detail: Callable[[str], None] = ignore  # what the curious want to know
    warn: Callable[[str], None] = ignore  # what may be wrong with the result

    def phase(self, name: str) -> OnProgress:
        """Return what a part of the job calls to tell how far it is."""
        return lambda done, total, item: self.progress(name, done, total, item)


SILENT = Listener()
