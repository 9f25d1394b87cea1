"""The documentation is true: commands print what the pages show, the reference is current, links lead somewhere."""

import json
import re
import runpy
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from session import SavedFile, Step, difference, run, session
from tiny import Finished, conv_net, gconv, save

from onnx_gconv.cli.main import COMMANDS
from onnx_gconv.solve.layer import Solver

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", ROOT / "models" / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
SESSIONS = ["README.md", "docs/tutorial.md", "docs/how-to.md"]
INSTALL = (
    "python3 -m venv .venv && .venv/bin/pip install -q . && .venv/bin/onnx-gconv compress models/digits.onnx --max-flops 50% "
    "--calib models/digits_calib.npz --eval models/digits_test.npz"
)


def code_blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)


def commands_of(page: str) -> list[str]:
    return [step.command for step in session(page) if isinstance(step, Step)]


def test_readme_has_exactly_two_set_up_commands_and_the_second_is_what_ci_runs() -> None:
    commands = code_blocks(README, "sh")
    assert len(commands) == 2
    assert commands[0] == f"{INSTALL}\n"
    assert commands[1] in (ROOT / ".ci" / "run").read_text(encoding="utf-8").splitlines(keepends=True)
    assert README.count("python3 -m venv") == 2


def test_every_command_is_in_a_session() -> None:
    pages = [(ROOT / page).read_text(encoding="utf-8") for page in SESSIONS]
    commands = [command.split() for page in pages for command in commands_of(page) if command.startswith("onnx-gconv ")]
    assert {command[1] for command in commands} == set(COMMANDS)


def test_the_readme_leads_with_results_and_its_first_session_stays_short() -> None:
    first_screen = README[: README.index("## Set-up")]
    assert "| top-1 |" in first_screen.replace("  ", " ")
    assert len(first_screen.splitlines()) <= 40
    assert len(README.split()) < 2000


def test_the_install_command_of_the_readme_runs_a_command_of_its_session() -> None:
    assert INSTALL.split(" && ")[2].removeprefix(".venv/bin/") in commands_of(README)


@pytest.mark.slow
@pytest.mark.torch  # some of the commands need it
@pytest.mark.parametrize("page", SESSIONS)
def test_the_commands_of_the_page_print_what_it_shows(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("FORCE_COLOR", "COLUMNS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    (tmp_path / "models").mkdir()
    for name in ("digits.onnx", "digits_calib.npz", "digits_test.npz"):
        shutil.copy(ROOT / "models" / name, tmp_path / "models")
    monkeypatch.chdir(tmp_path)
    for step in session((ROOT / page).read_text(encoding="utf-8")):
        if isinstance(step, SavedFile):
            Path(step.name).write_text(step.text, encoding="utf-8")
            continue
        if not step.can_run:
            continue
        with monkeypatch.context() as without:
            if "matplotlib" not in step.needs:  # pictures that no page shows take longer than all the rest
                without.setitem(sys.modules, "matplotlib", None)
            done = run(step.command)
        refused = any(line.startswith("error: ") for line in step.shown)
        assert done.code == (1 if refused else 0), f"{step.command}: {done.err}"
        assert difference(step, done) is None, f"`{step.command}` prints:\n{done.out}{done.err}\n{difference(step, done)}"


@pytest.mark.parametrize(
    ("info", "printed", "same"),
    [
        ("console", "error 5.5e-07 of 10 ms", True),
        ("console", "error 5.4e-07 of 11 ms", False),
        ("console near", "error 5.4e-07 of 10.1 ms", True),
        ("console near", "error 5.4e-07 of 11 ms", False),
        ("console varies", "error 5.4e-07 of 11 ms", True),
        ("console varies", "error 5.4e-07 of 11 s", False),
        ("console varies", "error 5.4e-07 of 11 ms\nand more", False),
        ("console varies", "", False),
        ("console near", "error 5.4e-07 of 10 ms\nerror 5.4e-07 of 10 ms", False),
    ],
)
def test_what_a_page_shows_is_compared_with_what_is_printed(info: str, printed: str, same: bool) -> None:
    (step,) = session(f"```{info}\n$ command\nerror 5.4e-07 of 10 ms\n```\n")
    assert isinstance(step, Step)
    assert (difference(step, Finished(0, printed, "")) is None) is same


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
    for name in COMMANDS:
        section = text.split(f"\n## {name}\n")[1].split("\n## ")[0]
        flags = set(re.findall(r"--[a-z][a-z-]+", gconv(name, "--help").out.split("options:")[1]))
        assert flags - {"--help", "--verbose", "--quiet"} <= set(re.findall(r"--[a-z][a-z-]+", section))


def headings(page: Path) -> set[str]:
    """Return the headings of a page as GitHub writes them into links."""
    lines = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.M)
    return {re.sub(r"[^\w\- ]", "", line).strip().lower().replace(" ", "-") for line in lines}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_relative_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        if "://" not in target:
            name, _, heading = target.partition("#")
            path = page.parent / name if name else page
            assert path.exists(), target
            assert not heading or heading in headings(path), target


def keys(data: object) -> Iterator[str]:
    """Yield every key of a JSON file that the format names; names of layers, inputs and outputs are the model's own."""
    if isinstance(data, dict):
        yield from (key for key in data if key not in ("c1", "c2", "c3", "image", "scores") and not key.isdigit())
    for item in data.values() if isinstance(data, dict) else data if isinstance(data, list) else ():
        yield from keys(item)


@pytest.mark.slow
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
    flags = ("--calib", "unlabelled.npz", "--eval", "data.npz", "--forms", "all")
    assert gconv("explore", "net.onnx", "-o", "made", "--points", "2", *flags).code == 0
    assert gconv("compress", "net.onnx", "--max-macs", "60%", *flags, "-o", "fitted.onnx").code == 0
    files = ("made/explore.json", "made/point-01.result.json", "made/costs.json", "made/eliminations.json")
    files += ("made/width_costs.json", "fitted.plan.json", "fitted.report.json")
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
