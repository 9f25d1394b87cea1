"""Write docs/reference.md: every command and flag, as the parser has them.

    python docs/make_reference.py

The tables are made from the parser's own actions, not from its printed help: that differs with the terminal's width and
with the version of Python.
"""

import argparse
from collections.abc import Iterator
from pathlib import Path

from onnx_gconv.cli.main import build_parser

PAGE = Path(__file__).with_name("reference.md")
HEAD = """\
# Commands and flags

Made by `python docs/make_reference.py` from the program's own parser; do not edit. `onnx-gconv COMMAND --help` says the
same. Every command also has `-h`, `-v` (tell more on stderr) and `-q` (only errors on stderr); `python -m onnx_gconv` is
`onnx-gconv`. Exit codes and files are in [contracts.md](contracts.md).
"""
EVERYWHERE = {"help", "verbose", "quiet"}  # told once, in the head


def reference() -> str:
    """Return the text of docs/reference.md."""
    commands = next(action for action in build_parser()._actions if isinstance(action, argparse._SubParsersAction))
    parts = [HEAD]
    for name, parser in commands.choices.items():
        parts += [f"\n## {name}\n", *_description(parser), *_groups(parser)]
    return "\n".join(parts)


def _description(parser: argparse.ArgumentParser) -> Iterator[str]:
    """Yield the prose as paragraphs, and the indented examples as a code block."""
    for paragraph in (parser.description or "").strip().split("\n\n"):
        if paragraph.startswith("  "):
            lines = [line.removeprefix("  ") for line in paragraph.split("\n")]
            yield "\n".join(["```sh", *lines, "```", ""])
        else:
            yield paragraph + "\n"


def _groups(parser: argparse.ArgumentParser) -> Iterator[str]:
    for group in parser._action_groups:
        rows = [_row(action) for action in group._group_actions if action.dest not in EVERYWHERE]
        if rows:
            # Group descriptions are printed as they are, help texts with their percent signs doubled.
            about = [group.description.replace("%%", "%")] if group.description else []
            if any(group._group_actions == choice._group_actions for choice in parser._mutually_exclusive_groups):
                about.append("at most one of them")
            yield f"**{group.title}**{': ' if about else ''}{'; '.join(about)}\n"
            yield "\n".join(["| | |", "|---|---|", *rows, ""])


def _row(action: argparse.Action) -> str:
    value = action.metavar or ("{" + ",".join(map(str, action.choices)) + "}" if action.choices else "")
    names = [f"{option} {value}".strip() for option in action.option_strings] or [str(value)]
    text = (action.help or "") % vars(action) + (" (required)" if action.required and action.option_strings else "")
    if isinstance(action, argparse._AppendAction):
        text += "; may be given several times"
    return f"| {', '.join(f'`{name}`' for name in names)} | {text} |".replace("<", "&lt;")


if __name__ == "__main__":
    PAGE.write_text(reference(), encoding="utf-8")
