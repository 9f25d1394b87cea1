"""Goals on a Ray cluster. Its machines need not share a disk: models and .npz files travel to them, results back."""

import os
import socket
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import chdir, contextmanager, redirect_stdout
from pathlib import Path
from typing import Any

from onnx_gconv.errors import ClusterError, DependencyError
from onnx_gconv.exploration.doing import make
from onnx_gconv.exploration.engine import TRIES, Lost, Parts
from onnx_gconv.exploration.goal import Brief, Goal
from onnx_gconv.staging import scratch

SECONDS_TO_ANSWER = 20
Files = Mapping[str, bytes]  # by path inside a folder


def run_on_ray(
    brief: Brief, goals: Sequence[Goal], parts: Parts, *, address: str | None, cores: int
) -> Iterator[tuple[Goal, Lost | None]]:
    """Yield each goal when it is done, or lost for good; without an address on a cluster of this machine, of so many cores.

    Ray itself does a goal again when its worker or machine dies. Results are written here, so that they outlive the cluster.
    """
    ray = require_ray()
    with _connected(ray, address, cores):
        threads = _threads(ray, len(goals))
        gpus = 1 if brief.tuning is not None and brief.tuning.device != "cpu" and ray.cluster_resources().get("GPU") else 0
        remote = ray.remote(num_cpus=threads, num_gpus=gpus, max_retries=TRIES - 1, retry_exceptions=False)(do_remotely)
        shared = ray.put(_visible(brief)), ray.put(_model_files(brief)), *(ray.put(part) for part in _data_files(brief))
        running = {remote.remote(goal, threads, os.getcwd(), *shared): goal for goal in goals}
        try:
            while running:
                done, _ = ray.wait(list(running), num_returns=1)
                goal = running.pop(done[0])
                try:
                    files: Files = ray.get(done[0])
                except ray.exceptions.RayTaskError as error:  # before `make`, which tells its failures itself
                    raise ClusterError(
                        f"{goal.name} cannot be done on the cluster: {error.cause}.",
                        hint="onnx-gconv must be installed in the same version on all machines, with room on their disks",
                    ) from error
                except ray.exceptions.RayError as error:
                    yield goal, Lost(type(error).__name__)
                    continue
                _write(files, parts(goal))
                yield goal, None
        finally:
            for task in running:
                ray.cancel(task, force=True)


def require_cluster(address: str | None) -> None:
    """Refuse, before any work, where Ray is not installed or nobody answers at the address."""
    require_ray()
    host, colon, port = (address or "").removeprefix("ray://").rpartition(":")
    if not colon or not port.isdecimal():
        return  # a name like `auto`, which Ray resolves
    # Ray itself goes on trying for minutes, and then ends the process.
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=SECONDS_TO_ANSWER).close()
    except OSError as error:
        raise _unreachable(address, error) from error


def _unreachable(address: str | None, error: Exception) -> ClusterError:
    return ClusterError(
        f"cannot connect to the Ray cluster {address or 'of this machine'}: {error}.",
        hint="--address host:port is what `ray start --head` prints; both sides need the same Ray and Python",
    )


def require_ray() -> Any:
    """Return the module, or say how to install it."""
    try:
        import ray
    except ModuleNotFoundError as error:
        if error.name != "ray":
            raise
        raise DependencyError("--engine ray needs Ray, which is not installed.", hint="pip install 'onnx-gconv[ray]'") from error
    return ray


@contextmanager
def _connected(ray: Any, address: str | None, cores: int) -> Iterator[None]:
    """Be connected to a cluster; one that was there already is left as it was."""
    if ray.is_initialized():
        yield
        return
    if address is None:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # a cluster that we start reports to nobody, unless told to
        os.environ.setdefault("RAY_worker_niceness", "0")  # Ray's 15 would give way to everything else on the machine
    where = {"num_cpus": cores, "include_dashboard": False} if address is None else {"address": address}
    with scratch() as empty:
        # Ray's workers look for modules where it was called, first of all: what lies in the current folder is not ours to run.
        with chdir(empty):
            try:
                ray.init(**where, log_to_driver=False, logging_level="error")
            except (ConnectionError, RuntimeError, ValueError) as error:
                raise _unreachable(address, error) from error
        try:
            # Ray prints what befalls its workers on stdout, which carries the result of the command.
            with redirect_stdout(sys.stderr):
                yield
        finally:
            ray.shutdown()


def _threads(ray: Any, goals: int) -> int:
    """Return how many cores each goal gets: all are busy, and no goal asks for more than the smallest machine has."""
    cores = [node["Resources"].get("CPU", 0) for node in ray.nodes() if node["Alive"]]
    smallest = min((count for count in cores if count >= 1), default=1)
    return max(1, int(min(smallest, sum(cores) // goals)))


def _visible(brief: Brief) -> Brief:
    """Return the brief with folders of images by their full path: they are read where they are, on every machine."""
    places = {text: str(Path(text).absolute()) if Path(text).is_dir() else text for text in brief.data}
    return brief.elsewhere(brief.model, places)


def _model_files(brief: Brief) -> Files:
    files = (brief.model, *brief.data_files)
    return {str(path.relative_to(brief.model.parent)): path.read_bytes() for path in files}


def _data_files(brief: Brief) -> list[tuple[str, bytes]]:
    return [(text, Path(text).read_bytes()) for text in dict.fromkeys(brief.data) if Path(text).is_file()]


def do_remotely(
    goal: Goal, threads: int, working_folder: str, brief: Brief, model_files: Files, *data_files: tuple[str, bytes]
) -> Files:
    """Do a goal on a worker, among files of its own, and return what it has left."""
    if Path(working_folder).is_dir():  # for functions that give data, which are looked for there
        os.chdir(working_folder)
    with tempfile.TemporaryDirectory(prefix="onnx-gconv-") as name:
        folder = Path(name)
        _write(model_files, folder / "model")
        places = {text: text for text in brief.data}
        for number, (text, content) in enumerate(data_files):
            places[text] = str(folder / f"data-{number}.npz")
            Path(places[text]).write_bytes(content)
        here = brief.elsewhere(folder / "model" / brief.model.name, places)
        part = folder / "part"
        part.mkdir()
        make(here, goal, part, threads=threads)
        return {path.name: path.read_bytes() for path in part.iterdir()}


def _write(files: Files, folder: Path) -> None:
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
