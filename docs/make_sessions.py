"""Run the commands of a page and put what they print under them: `python docs/make_sessions.py docs/tutorial.md`.

Blocks are read as `tests/session.py` reads them. A command whose shown lines are as printed keeps them, so that times and rounding
errors do not change with every run. Where a cut output (…) no longer fits, it is named: that one is for people. What a
page says about the figures in its text is for people, too. The folder that the commands ran in is kept, for its pictures.
"""

import argparse
import os
import shutil
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from session import SavedFile, Step, difference, run, session  # noqa: E402


def refreshed(step: Step, page: str) -> str:
    """Return the page with what this step prints now."""
    done = run(step.command)
    if (found := difference(step, done)) is None:
        return page
    old = "".join(f"{line}\n" for line in step.shown)
    if any(line.rstrip().endswith("…") for line in step.shown) or page.count(old) != 1:
        print(f"by hand: `{step.command}`: {found}\n{done.out}{done.err}", file=sys.stderr)
        return page
    print(f"changed: `{step.command}`", file=sys.stderr)
    return page.replace(old, "".join(f"{line.rstrip()}\n" for line in (done.out + done.err).splitlines() if line.strip()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("page", type=Path)
    path: Path = parser.parse_args().page.resolve()
    folder = Path(tempfile.mkdtemp(prefix="onnx-gconv-session-"))
    shutil.copytree(ROOT / "models", folder / "models", ignore=shutil.ignore_patterns("*.py", "*.md"))
    os.chdir(folder)
    os.environ["PYTHONPATH"] = str(ROOT)
    page = path.read_text(encoding="utf-8")
    for step in session(page):
        if isinstance(step, SavedFile):
            Path(step.name).write_text(step.text, encoding="utf-8")
        elif step.can_run:
            page = refreshed(step, page)
    path.write_text(page, encoding="utf-8")
    print(f"ran in {folder}", file=sys.stderr)


if __name__ == "__main__":
    main()
