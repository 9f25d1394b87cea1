"""The documentation is true: README's commands print what it shows, the reference is current, links lead somewhere."""

import importlib.util
import json
import re
import runpy
import shlex
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from tiny import conv_net, gconv, save

from onnx_gconv.cli.main import COMMANDS
from onnx_gconv.solve.layer import Solver

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", ROOT / "models" / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
HAS_TORCH = importlib.util.find_spec("torch") is not None  # without it nothing can be tuned
HAS_MATPLOTLIB = importlib.util.find_spec("matplotlib") is not None
INSTALL = "python3 -m venv .venv && .venv/bin/pip install -q . && .venv/bin/onnx-gconv compress models/digits.onnx --max-flops 50%"


def code_blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)


def session() -> Iterator[tuple[str, list[str]]]:
    """Yield each command of README's session with the lines shown under it."""
    for block in code_blocks(README, "console"):
        for command, shown in re.findall(r"^\$ (onnx-gconv .*)\n((?:(?!\$ ).*\n)*)", block, flags=re.MULTILINE):
            yield command, shown.splitlines()


def comparable(line: str) -> str:
    """Return the line without padding, and with # for rounding errors, which depend on the processor."""
    return re.sub(r"\d\.\d+e[+-]\d+", "#", " ".join(line.split()))


def is_printed(shown: str, printed: list[str]) -> bool:
    """Return whether a shown line was printed; one that ends in … may go on."""
    if shown.endswith("…"):
        return any(line.startswith(shown.removesuffix("…").rstrip()) for line in printed)
    return shown in printed


def test_readme_has_exactly_two_set_up_commands_and_the_second_is_what_ci_runs() -> None:
    commands = code_blocks(README, "sh")
    assert len(commands) == 2
    assert commands[0] == f"{INSTALL}\n"
    assert commands[1] in (ROOT / ".ci" / "run").read_text(encoding="utf-8").splitlines(keepends=True)
    assert README.count("python3 -m venv") == 2


def test_every_command_is_in_the_readmes_session() -> None:
    assert {command.split()[1] for command, _ in session()} == {module.__name__.split(".")[-1] for module in COMMANDS}


def test_the_commands_of_the_readme_print_what_it_shows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("FORCE_COLOR", "COLUMNS"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "models").mkdir()
    for name in ("digits.onnx", "digits_calib.npz", "digits_test.npz"):
        shutil.copy(ROOT / "models" / name, tmp_path / "models")
    monkeypatch.chdir(tmp_path)
    assert INSTALL.split(" && ")[2].removeprefix(".venv/bin/") in [command for command, _ in session()]
    for command, shown in session():
        if ("tuned.onnx" in command and not HAS_TORCH) or (" report " in command and not HAS_MATPLOTLIB):
            continue
        with monkeypatch.context() as without:
            if " report " not in command:  # which is nothing without pictures; elsewhere they take longer than all the rest
                without.setitem(sys.modules, "matplotlib", None)
            done = gconv(*shlex.split(command)[1:])
        refused = any(line.startswith("error: ") for line in shown)
        assert done.code == (1 if refused else 0), f"{command}: {done.err}"
        printed = [comparable(line) for line in (done.out + done.err).splitlines()]
        for line in map(comparable, shown):
            assert is_printed(line, printed), f"README shows under `{command}`:\n{line}\nbut it prints:\n{done.out}{done.err}"


def test_the_reference_is_current() -> None:
    made = runpy.run_path(str(ROOT / "docs" / "make_reference.py"))
    page: Path = made["PAGE"]
    assert page.read_text(encoding="utf-8") == made["reference"](), "docs/reference.md is stale: python docs/make_reference.py"


def test_the_page_on_the_paper_is_made_of_the_results(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    made = runpy.run_path(str(ROOT / "benchmarks" / "paper.py"))
    page = made["page_of"](made["read_results"](ROOT / "benchmarks" / "paper.jsonl"))
    assert (ROOT / "docs" / "paper.md").read_text(encoding="utf-8") == page, "stale: python benchmarks/paper.py page"


def test_every_flag_is_in_the_reference() -> None:
    text = (ROOT / "docs" / "reference.md").read_text(encoding="utf-8")
    for module in COMMANDS:
        name = module.__name__.split(".")[-1]
        section = text.split(f"\n## {name}\n")[1].split("\n## ")[0]
        flags = set(re.findall(r"--[a-z][a-z-]+", gconv(name, "--help").out.split("options:")[1]))
        assert flags - {"--help", "--verbose", "--quiet"} <= set(re.findall(r"--[a-z][a-z-]+", section))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_relative_links_lead_somewhere(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    headings = {re.sub(r"[^\w\- ]", "", line).strip().lower().replace(" ", "-") for line in re.findall(r"^#+ (.*)$", text, re.M)}
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if target.startswith("#"):
            assert target[1:] in headings, target
        elif "://" not in target:
            assert (page.parent / target.split("#")[0]).exists(), target


def keys(data: object) -> Iterator[str]:
    """Yield every key of a JSON file that the format names; names of layers, inputs and outputs are the model's own."""
    if isinstance(data, dict):
        yield from (key for key in data if key not in ("c2", "c3", "image", "scores") and not key.isdigit())
    for item in data.values() if isinstance(data, dict) else data if isinstance(data, list) else ():
        yield from keys(item)


def test_every_key_of_the_files_is_in_the_contracts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    save(conv_net(), Path("net.onnx"))
    assert gconv("compress", "net.onnx", "--max-flops", "50%", "--max-params", "80%", "-o", "small.onnx").code == 0
    assert gconv("explore", "net.onnx", "-o", "sweep", "--points", "2").code == 0
    lines = [*Path("sweep/solutions.jsonl").read_text(encoding="utf-8").splitlines()]
    files = ("small.plan.json", "small.report.json", "sweep/explore.json")
    lines += [Path(name).read_text(encoding="utf-8") for name in files]
    lines += [gconv("inspect", "net.onnx", "--json").out, gconv("verify", "small.onnx", "small.onnx", "--json").out]
    images = np.random.default_rng(0).standard_normal((20, 3, 8, 8)).astype(np.float32)
    np.savez("data.npz", image=images, labels=np.zeros(20, np.int64))
    np.savez("unlabelled.npz", image=images)
    assert gconv("explore", "net.onnx", "-o", "made", "--points", "2", "--calib", "unlabelled.npz", "--eval", "data.npz").code == 0
    files = ("made/explore.json", "made/point-01.result.json", "made/costs.json")
    lines += [Path(name).read_text(encoding="utf-8") for name in files]
    lines.append(gconv("evaluate", "net.onnx", "--data", "data.npz", "--reference", "small.onnx", "--json").out)
    quick = ("--runner", "ort-cpu", "--seconds", "0.05", "--json")
    lines += [
        gconv("bench", "net.onnx", *quick).out,
        gconv("bench", "net.onnx", *quick, "--sweep", "--timing-out", "table.json").out,
    ]
    lines += [gconv("export", "small.onnx", "--target", "tx2", "-o", "tx2.onnx", "--json").out]
    named = set(re.findall(r"`(\w+)`", (ROOT / "docs" / "contracts.md").read_text(encoding="utf-8")))
    assert {key for line in lines for key in keys(json.loads(line))} <= named


def test_the_worked_example_of_the_algorithm_is_in_the_docs_as_it_comes_out() -> None:
    text = (ROOT / "docs" / "algorithm.md").read_text(encoding="utf-8")
    rows = [re.search(rf"^(?:    M = |        ){row}    (\d)  (\d)  (\d)  (\d)", text, re.M) for row in range(4)]
    matrix = np.array([[float(number) for number in row.groups()] for row in rows if row])
    grouping = Solver("paper").solve(matrix, 2)
    assert f"in_order = {grouping.in_order.tolist()}     out_order = {grouping.out_order.tolist()}" in text
    assert f"{grouping.kept * matrix.sum():.0f} / {matrix.sum():.0f} = {100 * grouping.kept:.1f} %" in text
