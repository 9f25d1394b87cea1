"""What a command tells on stderr while it works; stdout is for its result."""

import argparse
import sys
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from onnx_gconv import Listener

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID


class Story:
    """Remarks and a progress bar on stderr, as loud as -v and -q ask; a bar only on a terminal."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._quiet: bool = args.quiet
        self._verbose: bool = args.verbose
        self._warned: set[str] = set()
        self._bar: Progress | None = None
        self._task: TaskID | None = None
        self._phase = ""

    def __enter__(self) -> "Story":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    @property
    def listener(self) -> Listener:
        return Listener(self._progress, self.tell, self.detail, self.warn)

    def tell(self, text: str) -> None:
        if not self._quiet:
            self._print(text)

    def wrote(self, files: Iterable[Path], what: str = "") -> None:
        """Tell which files were written: all of them, so that who moves a model moves its weights too."""
        self.tell(f"wrote {', '.join(map(str, files))}{what and ': ' + what}")

    def detail(self, text: str) -> None:
        if self._verbose and text:
            self._print(text)

    def warn(self, text: str) -> None:
        """Tell a warning, the first time only."""
        if not self._quiet and text not in self._warned:
            self._warned.add(text)
            self._print(f"warning: {text}")

    def _print(self, text: str) -> None:
        if self._bar is None:
            print(text, file=sys.stderr)
        else:
            self._bar.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def _progress(self, phase: str, done: int, total: int | None, item: str) -> None:
        if self._quiet or not sys.stderr.isatty():
            return
        if self._bar is None:
            self._bar = _bar()
            self._bar.start()
        if phase != self._phase or self._task is None:
            if self._task is not None:
                self._bar.remove_task(self._task)
            self._phase, self._task = phase, self._bar.add_task("", total=None, phase=phase)
        self._bar.update(self._task, completed=done, total=total, description=item[-40:])


def _bar() -> "Progress":
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    return Progress(
        TextColumn("{task.fields[phase]}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.description}", markup=False),
        console=Console(stderr=True),
        transient=True,
    )
