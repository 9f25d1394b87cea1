"""Ctrl-C and SIGTERM at any moment, start and end included: the documented code, one true sentence, no traceback."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tiny import conv_net, save

from onnx_gconv import stopping

if sys.platform == "win32":
    pytest.skip("POSIX signals", allow_module_level=True)

STOPS = {signal.SIGINT: (130, "interrupted"), signal.SIGTERM: (143, "terminated")}
# As the installed `onnx-gconv` begins, with a signal to itself at the moment that a module is run, or that Python ends.
PROGRAM = """
import atexit, os, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # a test run in the background ignores it, and so would we
number, moment = int(sys.argv.pop(1)), sys.argv.pop(1)
def hook(event, arguments):
    if event == "exec" and getattr(arguments[0], "co_filename", "").endswith(moment) and not sent:
        sent.append(moment)
        os.kill(os.getpid(), number)
sent = []
sys.addaudithook(hook)
if moment == "end":
    atexit.register(os.kill, os.getpid(), number)
from onnx_gconv.cli.main import main
sys.exit(main())
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    save(conv_net(), Path("good.onnx"))


def stopped(number: int, moment: str, *command: str) -> "subprocess.CompletedProcess[str]":
    argv = [sys.executable, "-c", PROGRAM, str(int(number)), moment, *command]
    environment = os.environ | {"PYTHONPATH": str(Path(stopping.__file__).parents[1])}
    return subprocess.run(argv, capture_output=True, text=True, timeout=60, env=environment)


@pytest.mark.parametrize("number", STOPS, ids=["SIGINT", "SIGTERM"])
@pytest.mark.parametrize(
    "moment",
    [
        *("/argparse.py", "/cli/compress.py", "/pipeline/compressing.py", "/numpy/__init__.py", "/numpy/linalg/__init__.py"),
        *("/onnx/__init__.py", "/onnxruntime/__init__.py"),
    ],
)
def test_a_signal_while_a_command_starts(number: int, moment: str) -> None:
    code, how = STOPS[number]
    done = stopped(number, moment, "compress", "good.onnx", "--groups", "2")
    assert (done.returncode, done.stdout, done.stderr) == (code, "", f"error: {how}; no result was written.\n")
    assert [path.name for path in Path().iterdir()] == ["good.onnx"]


@pytest.mark.parametrize("number", STOPS, ids=["SIGINT", "SIGTERM"])
def test_a_signal_when_all_is_written_does_not_deny_it(number: int) -> None:
    code, how = STOPS[number]
    done = stopped(number, "/report/tables.py", "compress", "good.onnx", "--groups", "2", "-q")
    written = ", ".join(f"'good.gconv.{end}'" for end in ("onnx", "plan.json", "report.json"))
    assert (done.returncode, done.stderr) == (code, f"error: {how}; written: {written}.\n")
    assert Path("good.gconv.report.json").exists()


@pytest.mark.parametrize("number", STOPS, ids=["SIGINT", "SIGTERM"])
def test_a_signal_while_python_ends_changes_nothing(number: int) -> None:
    done = stopped(number, "end", "inspect", "good.onnx", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("{")
    failed = stopped(number, "end", "inspect", "missing.onnx")
    assert failed.returncode == 1
    assert failed.stderr.startswith("error: there is no file 'missing.onnx'.")


def test_what_is_held_is_not_torn_apart_and_the_signal_comes_after() -> None:
    program = (
        "import os, signal; from onnx_gconv import stopping\n"
        "stopping.in_order()\n"
        "try:\n"
        "    with stopping.held():\n"
        "        with stopping.held():\n"
        "            os.kill(os.getpid(), signal.SIGTERM); print('inner')\n"
        "        print('outer')\n"
        "    print('never')\n"
        "except stopping.Terminated: print('stopped')\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == ["inner", "outer", "stopped"]


def test_a_second_sigterm_ends_at_once_and_says_so() -> None:
    program = (
        "import os, signal; from onnx_gconv import stopping\n"
        "stopping.in_order()\n"
        "try: os.kill(os.getpid(), signal.SIGTERM)\n"
        "finally: os.kill(os.getpid(), signal.SIGTERM); print('never')\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (143, "")
    assert done.stderr.startswith("error: terminated at once; ")
