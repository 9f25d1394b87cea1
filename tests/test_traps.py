"""No code of the current folder is run that nobody asked for: not by us, nor by any process that we start."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from tiny import conv_net, save

import onnx_gconv

SOURCE = Path(onnx_gconv.__file__).parents[1]
PACKAGES = {
    *("numpy", "scipy", "onnx", "onnxruntime", "onnx_graphsurgeon", "google", "rich", "threadpoolctl", "matplotlib", "PIL"),
    *("torch", "ray", "ml_dtypes", "sitecustomize", "usercustomize", "tensorrt", "typing_extensions"),
}
SPRUNG = "sprung.txt"
# What pip installs as `onnx-gconv`; pools of processes are used even for small models.
SCRIPT = """
import sys
from onnx_gconv.cli.main import main
if __name__ == "__main__":
    if sys.argv[1] in ("plan", "explore"):
        import onnx_gconv.pipeline.solving as solving
        solving.SECONDS_WORTH_PROCESSES = 0
    sys.exit(main())
"""


@pytest.fixture
def trapped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Be in a folder where every module that anybody imports lies as a trap; return where the program is."""
    here, there = tmp_path / "here", tmp_path / "bin"
    here.mkdir()
    there.mkdir()
    monkeypatch.chdir(here)
    set_traps(sys.stdlib_module_names | PACKAGES)
    save(conv_net(), Path("net.onnx"))
    np.savez("calib.npz", image=np.random.default_rng(0).standard_normal((4, 3, 8, 8)).astype(np.float32))
    script = there / "onnx-gconv"
    script.write_text(SCRIPT)
    return script


def set_traps(names: frozenset[str] | set[str]) -> None:
    for name in names:
        trap = f"open({SPRUNG!r}, 'a').write({name!r} + ' '); raise SystemExit('a trap: {name}')\n"
        Path(f"{name}.py").write_text(trap)


def run(*argv: str | Path) -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(SOURCE), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(argv, capture_output=True, text=True, timeout=120, env=environment)
    assert not Path(SPRUNG).exists(), Path(SPRUNG).read_text() + done.stderr
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "command",
    [
        "inspect net.onnx",
        "plan net.onnx --max-params 70% -o out.json --jobs 2",
        "compress net.onnx --max-macs 70% --calib calib.npz --eval calib.npz --precision int8 -o out.onnx",
        "explore net.onnx -o sweep --points 2 --jobs 2",
        "explore net.onnx -o sweep --points 2 --jobs 2 --calib calib.npz --eval calib.npz",
        "explore net.onnx -o sweep --points 2 --jobs 2 --forms group --calib calib.npz",
        "bench net.onnx --runner ort-cpu --seconds 0.1",
        "export net.onnx --target tensorrt -o out.onnx",
    ],
)
def test_what_lies_in_the_current_folder_is_not_run(command: str, trapped: Path) -> None:
    run(sys.executable, trapped, *command.split())


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.skipif(find_spec("ray") is None, reason="needs Ray")
def test_what_lies_in_the_current_folder_is_not_run_by_the_workers_of_ray(trapped: Path) -> None:
    Path("mine.py").write_text("def batches():\n    import numpy as np\n    return [(np.ones((4, 3, 8, 8), 'float32'), None)]\n")
    for data in ("calib.npz", "mine:batches"):
        flags = ("--points", "2", "--jobs", "1", "--engine", "ray", "--calib", data)
        run(sys.executable, trapped, "explore", "net.onnx", "-o", f"sweep-{data[:4]}", *flags)


def test_python_m_takes_packages_from_where_they_are_installed(trapped: Path) -> None:
    # Of Python's own modules it has imported some from here itself, before it comes to us.
    for name in sys.stdlib_module_names:
        Path(f"{name}.py").unlink()
    run(
        sys.executable,
        "-m",
        "onnx_gconv",
        "explore",
        "net.onnx",
        "-o",
        "sweep",
        "--points",
        "2",
        "--jobs",
        "2",
        "--calib",
        "calib.npz",
    )


def test_a_function_that_gives_data_brings_its_module_and_nothing_else(trapped: Path) -> None:
    Path("mine.py").write_text(
        "import helper\n"
        "def batches():\n"
        "    import late\n"
        "    return [(helper.np.ones((2, 3, 8, 8), 'float32'), None)] * late.TIMES\n"
    )
    Path("helper.py").write_text("np = __import__('sys').modules['numpy']\n")
    Path("late.py").write_text("TIMES = 2\n")
    run(sys.executable, trapped, *["explore", "net.onnx", "-o", "sweep", "--points", "2", "--jobs", "2", "--calib", "mine:batches"])
    run(sys.executable, trapped, *["compress", "net.onnx", "--max-macs", "70%", "--calib", "mine:batches", "-v"])
