"""Where runners run: on this machine, or on another one over the system's own ssh."""

import re
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from onnx_gconv.deploy.program import RunnerCall, program_file
from onnx_gconv.deploy.timing_file import RunnerName, Timing, read_timing
from onnx_gconv.errors import DeployError
from onnx_gconv.model.file import load_with_data_files, save

# No password is ever asked for: a key, an agent or ~/.ssh/config has to do. A dead connection is noticed within 20 seconds.
CONNECT_SECONDS = 10
SSH_OPTIONS = ("BatchMode=yes", f"ConnectTimeout={CONNECT_SECONDS}", "ServerAliveInterval=5", "ServerAliveCountMax=4")
SSH_FAILED = 255  # ssh's own failures; any other exit code is the remote program's
LARGEST_PORT = 65535
REPORT = "timing.json"


class Host(Protocol):
    """A machine that can run runners."""

    @property
    def address(self) -> str | None:
        """Return how --host names it; None for this machine."""

    def measure(self, job: RunnerCall) -> list[Timing]:
        """Return what the runner measured of each model."""

    def versions(self, runner: RunnerName, extra: Sequence[str]) -> dict[str, str]:
        """Return the versions that a TensorRT runner finds there."""

    def session(self) -> "AbstractContextManager[Host]":
        """Return the same for several calls, which share one login."""


@dataclass(frozen=True)
class ThisMachine:
    """Runners as child processes of this Python."""

    timeout_seconds: float

    @property
    def address(self) -> str | None:
        return None

    def session(self) -> "AbstractContextManager[Host]":
        return nullcontext(self)

    def measure(self, job: RunnerCall) -> list[Timing]:
        with tempfile.TemporaryDirectory() as folder:
            report = Path(folder) / REPORT
            models = [str(model.absolute()) for model in job.models]  # one called -o.onnx would be taken for a flag
            self._run(job.runner, [*models, "-o", str(report), *job.flags()])
            return _read_reports(job, Path(folder))

    def versions(self, runner: RunnerName, extra: Sequence[str]) -> dict[str, str]:
        return _versions(self._run(runner, ["--versions", *extra]))

    def _run(self, runner: RunnerName, arguments: Sequence[str]) -> str:
        command = [sys.executable, str(program_file(runner)), *arguments]
        done = _start(command, self.timeout_seconds, f"the runner {runner}")
        if done.returncode:
            raise _runner_failure(done, f"the runner {runner}")
        return done.stdout


@dataclass(frozen=True)
class SshHost:
    """Runners on another machine: program and models are copied there, the report back, and nothing is left."""

    user_at_host: str
    port: int | None
    python: str
    timeout_seconds: float
    control: Path | None = None  # the socket of a connection that is open already

    @property
    def address(self) -> str | None:
        return f"ssh://{self._name}"

    @contextmanager
    def session(self) -> "Iterator[Host]":
        """Yield the host behind one open connection; where none can be had, each call connects by itself and says what is wrong."""
        with tempfile.TemporaryDirectory(prefix="gconv-") as folder:
            control = Path(folder) / "ssh"
            command = ["ssh", "-M", "-N", "-S", str(control), *self._options("-p"), self.user_at_host]
            try:
                # All of its outputs go nowhere: it lives longer than the command that waits for them.
                master = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            except FileNotFoundError:
                yield self
                return
            try:
                until = time.monotonic() + CONNECT_SECONDS
                while not control.exists() and master.poll() is None and time.monotonic() < until:
                    time.sleep(0.02)
                yield replace(self, control=control) if control.exists() else self
            finally:
                master.terminate()
                master.wait()

    def measure(self, job: RunnerCall) -> list[Timing]:
        with tempfile.TemporaryDirectory() as folder, self._folder() as there:
            local = Path(folder)
            names = _stage(job, local / "job")
            self._copy(["-r", local / "job"], f"{self.user_at_host}:{there}/", "copy runner and models")
            self._python(f"{there}/job", job.runner, [*names, "-o", REPORT, *job.flags()])
            reports = [f"{self.user_at_host}:{there}/job/{_report_name(number)}" for number in range(len(job.models))]
            self._copy(reports, local, "fetch the report")
            return _read_reports(job, local)

    def versions(self, runner: RunnerName, extra: Sequence[str]) -> dict[str, str]:
        with self._folder() as there:
            self._copy([program_file(runner)], f"{self.user_at_host}:{there}/", "copy the runner")
            return _versions(self._python(there, runner, ["--versions", *extra]))

    @contextmanager
    def _folder(self) -> Iterator[str]:
        """Yield a new folder there, and remove it, whatever happens in between."""
        there = self._ssh("mktemp -d /tmp/onnx-gconv.XXXXXX", "make a folder there").strip()
        try:
            yield there
        finally:
            self._start(["ssh", *self._options("-p"), self.user_at_host, f"rm -rf {shlex.quote(there)}"], 30, "clean up")

    def _python(self, folder: str, runner: RunnerName, arguments: Sequence[str]) -> str:
        command = shlex.join([self.python, program_file(runner).name, *arguments])
        return self._ssh(f"cd {shlex.quote(folder)} && exec {command}", f"run the runner {runner}", is_runner=True)

    def _ssh(self, remote: str, what: str, *, is_runner: bool = False) -> str:
        done = self._start(["ssh", *self._options("-p"), self.user_at_host, remote], self.timeout_seconds, what)
        if done.returncode == SSH_FAILED:
            raise self._lost(done, what)
        if done.returncode == 127 and is_runner:
            raise DeployError(f"{self._name} has no {self.python!r}.", hint="name its Python 3 with --python")
        if done.returncode:
            raise _runner_failure(done, f"{self._name}, asked to {what},")
        return done.stdout

    def _copy(self, sources: Sequence[Path | str], target: Path | str, what: str) -> None:
        command = ["scp", "-q", *self._options("-P"), *map(str, sources), str(target)]
        done = self._start(command, self.timeout_seconds, what)
        if done.returncode:
            raise self._lost(done, what)

    def _start(self, command: list[str], timeout_seconds: float, what: str) -> "subprocess.CompletedProcess[str]":
        return _start(command, timeout_seconds, f"{self._name}, asked to {what},")

    def _options(self, port_flag: str) -> list[str]:
        port = [port_flag, str(self.port)] if self.port is not None else []
        options = SSH_OPTIONS if self.control is None else (*SSH_OPTIONS, f"ControlPath={self.control}")
        return [*port, *(part for option in options for part in ("-o", option))]

    def _lost(self, done: "subprocess.CompletedProcess[str]", what: str) -> DeployError:
        lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
        reason = lines[-1].rstrip(".") if lines else "the connection was lost"
        port = f" -p {self.port}" if self.port is not None else ""
        return DeployError(
            f"cannot {what} on {self._name}: {reason}.",
            hint=f"`ssh{port} -o BatchMode=yes {self.user_at_host} true` must work without a password; then run again",
        )

    @property
    def _name(self) -> str:
        return self.user_at_host + (f":{self.port}" if self.port is not None else "")


def parse_host(text: str, *, python: str, timeout_seconds: float) -> SshHost:
    """Return the host that `ssh://user@host:port` names; user and port may be left to ~/.ssh/config."""
    found = re.fullmatch(r"ssh://((?:\w[\w.-]*@)?\w[\w.-]*)(?::(\d{1,5}))?/?", text)  # nothing that ssh would take for a flag
    if found is None or not 1 <= int(found[2] or 22) <= LARGEST_PORT:
        raise DeployError(
            f"--host {text!r} is not an ssh address.", hint="write it like ssh://user@jetson or ssh://user@jetson:2222"
        )
    return SshHost(found[1], int(found[2]) if found[2] else None, python, timeout_seconds)


def _start(command: list[str], timeout_seconds: float, who: str) -> "subprocess.CompletedProcess[str]":
    try:
        return subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout_seconds,
            check=False,
        )
    except FileNotFoundError as error:
        raise DeployError(f"there is no program {command[0]!r} on this machine.", hint="install the OpenSSH client") from error
    except subprocess.TimeoutExpired as error:
        raise DeployError(
            f"{who} was not done within {timeout_seconds:g} seconds.", hint="give it longer with --timeout"
        ) from error


def _runner_failure(done: "subprocess.CompletedProcess[str]", who: str) -> DeployError:
    """Return the runner's own sentence and hint, or how it ended."""
    said = dict(re.findall(r"^(error|hint): (.*)$", done.stderr, flags=re.MULTILINE))
    if "error" in said:
        return DeployError(said["error"], hint=said.get("hint", ""))
    last = (done.stderr.strip() or done.stdout.strip() or "it said nothing").splitlines()[-1]
    return DeployError(
        f"{who} failed with exit code {done.returncode}: {last}", hint="is its Python 3.6 or newer, and the disk not full?"
    )


def _read_reports(job: RunnerCall, folder: Path) -> list[Timing]:
    """Return the reports, each with the model's path as it was given here."""
    timings = [read_timing(folder / _report_name(number)) for number in range(len(job.models))]
    return [
        replace(timing, model=replace(timing.model, path=str(model))) for timing, model in zip(timings, job.models, strict=True)
    ]


def _report_name(number: int) -> str:
    """Return the report of each model, as the runners name them: timing.json, timing.2.json, ..."""
    return REPORT if number == 0 else REPORT.replace(".json", f".{number + 1}.json")


def _versions(text: str) -> dict[str, str]:
    return dict(re.findall(r'"(\w+)": "([^"]*)"', text))


def _stage(job: RunnerCall, folder: Path) -> list[str]:
    """Put the runner and, each in a folder of its own, the models into a folder to be copied; return the models' names there.

    Links do: scp follows them. A model with external data is written anew, all of its data in one file beside it.
    """
    folder.mkdir()
    program = program_file(job.runner)
    (folder / program.name).symlink_to(program)
    names = []
    for number, model in enumerate(job.models):
        place = folder / str(number) / model.name
        place.parent.mkdir()
        loaded, data_files = load_with_data_files(model)
        if data_files:
            save(loaded, place, external_data=True)
        else:
            place.symlink_to(model.resolve())
        names.append(f"{number}/{model.name}")
    return names
