"""Where results go: what they are called, and what must not be written over."""

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from onnx_gconv.errors import OutputError
from onnx_gconv.staging import require_replaceable, staged


def make_folder(folder: Path) -> None:
    """Make a folder, and those above it, unless it is there."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OutputError(f"cannot make the folder '{folder}': {error.strerror}.", hint="choose another one") from error


def require_writable(path: Path) -> None:
    """Refuse a file that could not be written: whoever is to write it will have worked for long by then."""
    folder = path.parent
    require_replaceable(path)
    if not folder.is_dir():
        raise OutputError(f"cannot write into '{folder}': there is no such folder.", hint="create it, or choose another one")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise OutputError(f"cannot write into '{folder}': permission denied.", hint="choose another folder")


def require_output(*outputs: Path, made_from: Iterable[Path]) -> None:
    """Refuse files that could not be written, and those that would replace what they are made from."""
    sources = tuple(made_from)
    for output in outputs:
        if replaced(output, sources) is not None:
            raise OutputError(f"'{output}' is a file that the result is made from.", hint="choose another name")
        require_writable(output)


def replaced(output: Path, sources: Iterable[Path]) -> Path | None:
    """Return which of these files would be written over, None for none: the file counts, whatever names and links it has."""
    for source in sources:
        if os.path.realpath(output) == os.path.realpath(source):
            return source
        with suppress(OSError):  # one of them is not there
            if output.samefile(source):
                return source
    return None


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Have the folder for this process alone until the end, its own death included; refuse while another one has it."""
    try:
        import fcntl
    except ImportError:  # not on Windows
        yield
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):  # file systems that know no locks
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise OutputError(
                    f"another process is writing into '{folder}'.", hint="wait for it to end, or choose another folder with -o"
                ) from error
        yield
    finally:
        os.close(handle)


def write_text(path: Path, text: str) -> None:
    """Write `text` to `path` atomically."""
    with staged(path.parent) as staging:
        (staging / path.name).write_text(text, encoding="utf-8")


def result_files(model: Path) -> tuple[Path, Path, Path]:
    """Return where a compressed model, its plan and its report go."""
    return model, model.with_name(f"{model.stem}.plan.json"), model.with_name(f"{model.stem}.report.json")


def precision_file(model: Path, precision: str) -> Path:
    """Return where a compressed model goes in another precision."""
    return model.with_name(f"{model.stem}.{precision}.onnx")


def data_file(model: Path) -> Path:
    """Return where the weights of a model go that do not fit into its file."""
    return model.with_name(f"{model.name}.data")


def training_files(model: Path) -> tuple[Path, Path]:
    """Return where a training whose result goes here keeps its checkpoint and its history."""
    return model.with_name(f"{model.stem}.checkpoint.pt"), model.with_name(f"{model.stem}.metrics.jsonl")
