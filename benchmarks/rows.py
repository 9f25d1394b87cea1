"""The rows of a benchmark: every one runs in a process of its own and is kept beside the page, so that it is not run again."""

import argparse
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

Found = Mapping[str, Any]  # what a row measured


def need(*paths: Path) -> None:
    """Stop with a sentence where one of these is not there."""
    for path in paths:
        if not path.exists():
            sys.exit(f"there is no {path}, which this benchmark needs: its --help says what that is")


@dataclass(frozen=True)
class Benchmark:
    """A program that makes a page of rows."""

    file: str  # its __file__
    about: str | None  # its __doc__
    head: str  # of the page
    row: Callable[..., Any]  # one run, a dataclass of plain values; `name` is what --rows is matched with
    rows: Sequence[Any]
    run: Callable[[Any], dict[str, Any]]  # what a row measures, in this process
    line: Callable[[Any, Found], str]  # a finished row, as it is printed
    page: Callable[[Mapping[str, Found]], Iterator[str]]  # the page's lines, of the finished rows by name
    needs: Path | None = None  # a folder without which there is nothing to run
    prepare: Callable[[], None] | None = None  # called once before the rows

    def main(self) -> int:
        """Run what the command line asks for; return the exit code."""
        parser = argparse.ArgumentParser(description=self.about, formatter_class=argparse.RawDescriptionHelpFormatter)
        output = Path(self.file).with_suffix(".md").name
        parser.add_argument("-o", "--output", type=Path, default=Path(output), help="the page; finished rows go beside it")
        parser.add_argument("--rows", default="", metavar="REGEX", help="run only rows whose name it matches")
        parser.add_argument("--list", action="store_true", help="print the names of the rows and stop")
        parser.add_argument("--only", help=argparse.SUPPRESS)  # the row that this process runs
        args = parser.parse_args()
        if args.only:
            print(json.dumps(self.run(self.row(**json.loads(args.only)))))
            return 0
        rows = [row for row in self.rows if re.search(args.rows, row.name)]
        if args.list:
            print("\n".join(row.name for row in rows))
            return 0
        if self.needs is not None:
            need(self.needs)
        if self.prepare is not None:
            self.prepare()
        return self._make(args.output, rows)

    def _make(self, output: Path, rows: Sequence[Any]) -> int:
        kept = output.with_suffix(".jsonl")
        lines = [json.loads(line) for line in kept.read_text(encoding="utf-8").splitlines()] if kept.exists() else []
        finished = {line["row"]: line for line in lines}
        failed = 0
        for row in rows:
            if row.name not in finished:
                found = self._apart(row)
                if found is None:
                    failed += 1
                    continue
                finished[row.name] = {"row": row.name, **found}
                with kept.open("a", encoding="utf-8") as stream:
                    stream.write(json.dumps(finished[row.name]) + "\n")
                print(self.line(row, found), flush=True)
            output.write_text(self.head + "\n".join(self.page(finished)) + "\n", encoding="utf-8")
        return 1 if failed else 0

    def _apart(self, row: Any) -> dict[str, Any] | None:
        command = [sys.executable, self.file, "--only", json.dumps(asdict(row))]
        environment = {"OPENBLAS_NUM_THREADS": "1", **os.environ}
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False, env=environment)
        if done.returncode:
            print(f"failed: {row.name}", file=sys.stderr, flush=True)
            return None
        found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return found
