"""Write docs/api.md: the public functions and values, as their docstrings have them, and the settings with their flags' help.

python docs/make_api.py
"""

import argparse
import dataclasses
import inspect
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, get_args

import onnx_gconv
from onnx_gconv.cli.main import build_parser
from onnx_gconv.pipeline.settings import Settings, wish_names

PAGE = Path(__file__).with_name("api.md")
HEAD = """\
# Python

Made by `python docs/make_api.py` from the docstrings; do not edit. Every command of `onnx-gconv` but `report` is a
function of the same name, with its flags as keywords. Nothing is printed and nothing exits. What goes wrong is raised as one of
[`onnx_gconv.errors`](#onnx_gconverrors). `import onnx_gconv` is cheap: a function imports what it needs when it is first used.

```python
import numpy as np
import onnx_gconv

images = np.load("models/digits_calib.npz")["input"]
listener = onnx_gconv.Listener(progress=lambda phase, done, total, item: print(f"{phase}: {done} of {total}"))
try:
    result = onnx_gconv.compress("models/digits.onnx", max_flops=0.5, calib=images, listener=listener)
except onnx_gconv.errors.BudgetError as error:
    raise SystemExit(f"{error} {error.hint}")
print(result.report["after"]["macs"], result.recovery.output_error_after)
result.save("small.onnx")  # and small.plan.json, small.report.json
```

A function makes the very bytes that its command does. While it runs, NumPy multiplies matrices with one thread, in the whole
process; `jobs` processes and threads of its own keep the cores busy.
"""
FUNCTIONS = (
    *("compress", "plan", "mask", "apply", "inspect", "verify", "evaluate", "explore", "finetune", "bench", "sweep", "export"),
    "read_plan",
)


def api_page() -> str:
    """Return the text of docs/api.md."""
    values = sorted(name for name in onnx_gconv.__all__ if name[0].isupper())
    parts = [HEAD, "\n## Functions\n"]
    for name in FUNCTIONS:
        parts += [f"\n### {name}\n", *_function(getattr(onnx_gconv, name))]
    parts += ["\n## Settings\n", *_settings()]
    parts.append("\n## Values\n")
    for name in values:
        if name != "Settings":
            parts += [f"\n### {name}\n", *_value(getattr(onnx_gconv, name))]
    parts += ["\n## onnx_gconv.errors\n", *_errors()]
    return "\n".join(parts)


def _function(function: Any) -> Iterator[str]:
    parameters = inspect.signature(function).parameters.values()
    yield f"```python\n{function.__name__}({', '.join(_parameters(parameters))})\n```\n"
    yield from _prose(function)
    for parameter in parameters:
        if parameter.kind is parameter.VAR_KEYWORD:
            names = ", ".join(f"`{name}`" for name in wish_names(get_args(parameter.annotation)[0]))
            yield f"[Settings](#settings): {names}.\n"


def _parameters(parameters: Iterable[inspect.Parameter]) -> Iterator[str]:
    is_keyword = False
    for parameter in parameters:
        name = parameter.name
        if parameter.kind is parameter.KEYWORD_ONLY and not is_keyword:
            is_keyword = True
            yield "*"
        if parameter.kind is parameter.VAR_KEYWORD:
            yield "**settings"
        elif name == "listener":
            yield "listener=…"
        else:
            yield name if parameter.default is parameter.empty else f"{name}={parameter.default!r}"


def _prose(documented: Any) -> Iterator[str]:
    """Yield the docstring, its indented parts as code."""
    for paragraph in re.split(r"\n{2,}", inspect.getdoc(documented) or ""):
        if paragraph.startswith("    "):
            yield f"```python\n{inspect.cleandoc(paragraph)}\n```\n"
        else:
            yield paragraph + "\n"


def _settings() -> Iterator[str]:
    yield (
        "The keywords that `compress`, `plan`, `apply`, `explore`, `evaluate` and `finetune` share, each with its flag's help. "
        "What is not given has its default; `None` leaves the choice to us.\n"
    )
    helps = _helps()
    rows = ["| keyword | default | |", "|---|---|---|"]
    for field in dataclasses.fields(Settings):
        default = "number of cores" if field.name == "jobs" else f"`{field.default!r}`"
        rows.append(f"| `{field.name}` | {default} | {helps.get(field.name, '')} |")
    yield "\n".join([*rows, ""])


def _helps() -> dict[str, str]:
    commands = next(action for action in build_parser()._actions if isinstance(action, argparse._SubParsersAction))
    found: dict[str, str] = {}
    for name in ("compress", "plan", "explore"):
        for action in commands.choices[name]._actions:
            found.setdefault(action.dest, ((action.help or "") % vars(action)).replace("<", "&lt;").replace("|", "\\|"))
    found["verify"] = "`False` writes without running the model first; for models that ONNX Runtime cannot run"
    return found


def _value(value: Any) -> Iterator[str]:
    yield from _prose(value)
    fields = [field.name for field in dataclasses.fields(value)]
    methods = [
        (name, member)
        for name, member in vars(value).items()
        if not name.startswith("_") and name not in fields and (inspect.isfunction(member) or isinstance(member, property))
    ]
    if fields:
        yield f"Fields: {', '.join(f'`{name}`' for name in fields)}.\n"
    for name, member in methods:
        call = "" if isinstance(member, property) else "(…)" if len(inspect.signature(member).parameters) > 1 else "()"
        about = (inspect.getdoc(member) or "").partition("\n")[0]
        yield f"- `{name}{call}`{about and ': ' + about}"
    if methods:
        yield ""


def _errors() -> Iterator[str]:
    yield (
        "Each is a `GconvError`: `str(error)` is a sentence for the user, `error.hint` what to do about it, where the sentence "
        "does not say. A keyword that a function does not know is a `TypeError`, as everywhere in Python.\n"
    )
    for name, error in vars(onnx_gconv.errors).items():
        if inspect.isclass(error):
            yield f"- `{name}`: {(error.__doc__ or '').splitlines()[0]}"
    yield ""


if __name__ == "__main__":
    PAGE.write_text(api_page(), encoding="utf-8")
