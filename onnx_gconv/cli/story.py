"""What a command tells on stderr while it works; stdout is for its result."""

import argparse
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path


class Story:
    """Remarks and progress bars on stderr, as loud as -v and -q ask; bars only on a terminal."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._quiet: bool = args.quiet
        self._verbose: bool = args.verbose
        self._warned: set[str] = set()

    def tell(self, text: str) -> None:
        if not self._quiet:
            print(text, file=sys.stderr)

    def wrote(self, files: Iterable[Path], what: str = "") -> None:
        """Tell which files were written: all of them, so that who moves a model moves its weights too."""
        self.tell(f"wrote {', '.join(map(str, files))}{what and ': ' + what}")

    def detail(self, text: str) -> None:
        if self._verbose:
            print(text, file=sys.stderr)

    def warn(self, text: str) -> None:
        """Tell a warning, the first time only: a model may be rewritten several times until it is good."""
        if not self._quiet and text not in self._warned:
            self._warned.add(text)
            print(f"warning: {text}", file=sys.stderr)

    @contextmanager
    def progress(self, what: str) -> Iterator[Callable[[int, int | None, str], None]]:
        """Yield a function that moves the bar: (done, of how many if that is known, the item at hand)."""
        if self._quiet or not sys.stderr.isatty():
            yield lambda done, total, item: None
            return
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        columns = (
            TextColumn(what),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.description}", markup=False),
        )
        with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task("", total=None)
            yield lambda done, total, item: bar.update(task, completed=done, total=total, description=item[-40:])
