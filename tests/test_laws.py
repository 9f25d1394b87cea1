"""The laws that our own imports keep (design, section 7), and what starting up may load."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import onnx_gconv

PACKAGE = Path(__file__).parent.parent / "onnx_gconv"
HEAVY = {"onnx", "onnx_graphsurgeon", "onnxruntime", "torch", "numpy", "scipy", "rich", "PIL", "matplotlib"}
# What each part may import of the package itself; the flow of the design's table.
FLOW = {
    "errors": set(),
    "listener": set(),
    "native_output": set(),
    "cores": set(),
    "stopping": set(),
    "staging": {"errors", "stopping"},
    "files": {"errors", "staging"},
    "fields": {"errors", "staging"},
    "plans": {"errors", "fields"},
    "solve": {"solve", "errors"},
    "search": {"search", "errors", "native_output"},
    "model": {"model", "errors", "files", "native_output", "staging"},
    "rewrite": {"rewrite", "model", "solve", "plans", "errors"},
    "runtime": {"errors", "model"},
    "data": {"data", "errors", "model", "runtime"},
    "steering": {"errors", "model", "runtime"},
    "observing": {"errors", "model", "runtime", "steering"},
    "verification": {"errors", "model", "runtime", "steering"},
    "evaluation": {"data", "errors", "listener", "runtime", "verification"},
    "recover": {
        *("recover", "data", "errors", "evaluation", "listener", "model", "plans", "rewrite", "runtime", "solve"),
        *("staging", "verification"),
    },
    "timing": {"model", "runtime"},
    "torch": {"torch", "data", "errors", "files", "listener", "model", "plans", "rewrite", "runtime", "staging", "verification"},
    "deploy": {"deploy", "errors", "fields", "files", "listener", "model", "runtime", "search", "staging"},
}
FLOW["pipeline"] = set(FLOW) - {"fields", "native_output"} | {"pipeline"}
FLOW["exploration"] = FLOW["pipeline"] | {"exploration"}
UNSEEN = {"torch", "data", "rewrite", "runtime", "steering", "observing", "listener", "files", "cores"}
FLOW["report"] = FLOW["exploration"] - UNSEEN | {"report", "fields"}


def imports(path: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
    return names


FILES = sorted(PACKAGE.rglob("*.py"))


def part(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


@pytest.mark.parametrize("path", [p for p in FILES if part(p) in FLOW], ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_follow_the_flow(path: Path) -> None:
    own = {name.split(".")[1] for name in imports(path) if name.startswith("onnx_gconv.")}
    assert own <= FLOW[part(path)]


@pytest.mark.parametrize("path", [p for p in FILES if part(p) in ("solve", "search")], ids=lambda p: str(p.relative_to(PACKAGE)))
def test_solve_and_search_know_no_onnx(path: Path) -> None:
    outside = {name.split(".")[0] for name in imports(path)} & HEAVY
    assert outside <= {"numpy", "scipy"}


@pytest.mark.parametrize(
    "path", [p for p in FILES if p != PACKAGE / "exploration/ray.py"], ids=lambda p: str(p.relative_to(PACKAGE))
)
def test_ray_is_imported_by_its_own_module_only(path: Path) -> None:
    assert "ray" not in {name.split(".")[0] for name in imports(path)}


@pytest.mark.parametrize("path", [p for p in FILES if part(p) != "torch"], ids=lambda p: str(p.relative_to(PACKAGE)))
def test_torch_is_imported_by_its_own_package_only(path: Path) -> None:
    assert not {name.split(".")[0] for name in imports(path)} & {"torch", "onnx2torch", "torchvision"}


@pytest.mark.parametrize("path", [p for p in FILES if part(p) == "cli"], ids=lambda p: str(p.relative_to(PACKAGE)))
def test_the_command_line_imports_the_public_functions_reports_and_files_only(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module == "onnx_gconv":
            assert {alias.name for alias in node.names} <= {*onnx_gconv.__all__, "stopping"}
    deeper = {name.split(".")[1] for name in imports(path) if name.startswith("onnx_gconv.")}
    # One thing is not theirs to decide: which files a model reads besides its own.
    own = {"model"} if path.name == "options.py" else set()
    assert deeper <= {"cli", "report", "files", "staging", "stopping", "errors"} | own


@pytest.mark.parametrize("path", [p for p in FILES if part(p) != "cli"], ids=lambda p: str(p.relative_to(PACKAGE)))
def test_nothing_but_the_command_line_knows_argparse(path: Path) -> None:
    assert "argparse" not in imports(path)
    assert "Namespace" not in path.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    "path", [p for p in FILES if part(p) not in ("cli", "__main__")], ids=lambda p: str(p.relative_to(PACKAGE))
)
def test_nothing_but_the_command_line_and_its_tables_prints_or_exits(path: Path) -> None:
    if path == PACKAGE / "report/tables.py":
        return
    called = {node.func for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(node, ast.Call)}
    names = {ast.unparse(function) for function in called}
    assert not names & {"print", "sys.exit", "exit"}


def test_every_part_is_named_in_the_flow() -> None:
    assert {part(path) for path in FILES} - FLOW.keys() == {"__init__", "__main__", "cli"}


def test_building_the_parser_loads_nothing_heavy() -> None:
    code = "import sys; from onnx_gconv.cli.main import build_parser; build_parser().format_help(); print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not HEAVY & set(loaded)


def loaded_by(code: str) -> set[str]:
    """Return the modules that a fresh interpreter has loaded after this code."""
    code = f"import sys; {code}; print(*sys.modules)"
    return set(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split())


def test_importing_the_package_loads_nothing_heavy() -> None:
    assert not HEAVY & loaded_by("import onnx_gconv; onnx_gconv.errors; onnx_gconv.Listener; dir(onnx_gconv)")


def test_a_command_loads_no_other_command() -> None:
    loaded = loaded_by("from onnx_gconv.cli.main import main; main(['inspect', 'missing.onnx'])")
    assert "onnx_gconv.cli.inspect" in loaded
    assert not {f"onnx_gconv.cli.{name}" for name in ("compress", "explore", "finetune", "report")} & loaded
