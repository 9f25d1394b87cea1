"""JSON files: whatever a file is for, what is wrong with it is said in the same words."""

from collections.abc import Callable
from pathlib import Path

import pytest

from onnx_gconv.deploy.time_table import read_table
from onnx_gconv.deploy.timing_file import read_timing
from onnx_gconv.errors import GconvError, ReportError
from onnx_gconv.fields import Fields
from onnx_gconv.plans import read_plan
from onnx_gconv.report.page.exploration_file import read_exploration
from onnx_gconv.report.page.report_file import MALFORMED, read_report


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("folder").mkdir()
    Path("bytes").write_bytes(b"\xff")
    Path("text").write_text("G = 2")
    Path("deep").write_text("[" * 100_000)
    Path("long").write_text("1" * 5_000)
    Path("list").write_text("[]")


@pytest.mark.parametrize("read", [read_plan, read_timing, read_table, read_report, read_exploration])
@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("gone", "there is no file 'gone'."),
        ("folder", "cannot read 'folder': Is a directory."),
        ("bytes", "'bytes' is not UTF-8 text."),
        ("text", "'text' is not JSON: Expecting value"),
        ("deep", "'deep' is not JSON: "),
        ("long", "'long' is not JSON: "),
        ("list", "list: expected an object, found list '[]'."),
    ],
)
def test_every_reader_says_the_same(read: Callable[[Path], object], name: str, sentence: str) -> None:
    with pytest.raises(GconvError) as caught:
        read(Path(name))
    assert str(caught.value).startswith(sentence)
    assert caught.value.hint


@pytest.mark.parametrize("value", [2**63, -(2**63), 10**400])
def test_a_number_that_nothing_takes_is_named(value: int) -> None:
    fields = Fields({"one": value, "some": [1, value]}, "file", MALFORMED)
    for read, field in ((fields.integer, "one"), (fields.number, "one"), (fields.integers, "some")):
        with pytest.raises(ReportError, match=f"'{field}' must be"):
            read(field)
    assert Fields({"one": 2**63 - 1}, "file", MALFORMED).integer("one") == 2**63 - 1
