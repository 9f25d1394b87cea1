"""The package as its index shows it: what is imported is declared, and the lower bounds are the versions that CI tries."""

import ast
import re
import sys
import tomllib
from collections.abc import Iterable
from pathlib import Path

import pytest

import onnx_gconv

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
EXTRAS: dict[str, list[str]] = PROJECT["optional-dependencies"]
# Where what is imported is not called as what is installed.
DISTRIBUTIONS = {"PIL": "pillow", "google": "protobuf", "tensorrt_rtx": "tensorrt-rtx-cu12"}


def names(requirements: Iterable[str]) -> set[str]:
    """Return what is required, as pip spells it."""
    return {normal(re.split(r"[\[<>=!~; ]", requirement, maxsplit=1)[0]) for requirement in requirements}


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def imported(folder: str) -> set[str]:
    """Return the distributions that the modules of a folder import, without Python's and the folder's own."""
    files = sorted((ROOT / folder).rglob("*.py"))
    # A package of the tests goes by its folder's name.
    own = {"onnx_gconv"} | ({path.stem for path in files} | {path.parent.name for path in files} if folder == "tests" else set())
    found: set[str] = set()
    for path in files:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                found |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                found.add(node.module.split(".")[0])
    return {normal(DISTRIBUTIONS.get(name, name)) for name in found - own - sys.stdlib_module_names}


def test_what_the_package_imports_is_declared() -> None:
    assert imported("onnx_gconv") <= names([*PROJECT["dependencies"], *(name for extra in EXTRAS.values() for name in extra)])
    assert names(PROJECT["dependencies"]) <= imported("onnx_gconv")


def test_what_the_tests_import_is_declared() -> None:
    named = [*PROJECT["dependencies"], *EXTRAS["dev"], *EXTRAS["plot"], *EXTRAS["images"]]
    assert imported("tests") - {"torch", "ray", "fuzz"} <= names(named)  # skipped without the first two; the last is ours


def test_the_lower_bounds_are_the_versions_that_the_smoke_test_tries() -> None:
    requirements = [*PROJECT["dependencies"], *EXTRAS["plot"], *EXTRAS["images"], *(r for r in EXTRAS["dev"] if "ml_dtypes" in r)]
    lines = (ROOT / ".ci" / "lowest.txt").read_text(encoding="utf-8").splitlines()
    tried = dict(line.split("==") for line in lines if line and not line.startswith("#"))
    assert {normal(name) for name in tried} == names(requirements)
    bounds = dict(re.fullmatch(r"([\w-]+)>=([\d.]+)", requirement).groups() for requirement in requirements)  # type: ignore[union-attr]
    for name, version in tried.items():
        assert re.fullmatch(rf"{re.escape(bounds[name])}(\.0)*", version), name


def test_the_citation_names_the_version_that_there_is() -> None:
    assert f"\nversion: {onnx_gconv.__version__}\n" in (ROOT / "CITATION.cff").read_text(encoding="utf-8")


@pytest.mark.parametrize("key", ["authors", "classifiers", "urls", "readme", "license"])
def test_what_the_index_shows_is_given(key: str) -> None:
    assert PROJECT[key]
