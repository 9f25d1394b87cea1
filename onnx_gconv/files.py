"""Writing results: all files of a command appear together, or none does."""

import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from onnx_gconv.errors import OutputError

STAGING = ".onnx-gconv-"  # what a folder begins with that files are written into before they move where they belong


def make_folder(folder: Path) -> None:
    """Make a folder, and those above it, unless it is there."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OutputError(f"cannot make the folder '{folder}': {error.strerror}.", hint="choose another one") from error


def require_writable(path: Path) -> None:
    """Refuse a file that could not be written: whoever is to write it will have worked for long by then."""
    folder = path.parent
    _require_replaceable(path)
    if not folder.is_dir():
        raise OutputError(f"cannot write into '{folder}': there is no such folder.", hint="create it, or choose another one")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise OutputError(f"cannot write into '{folder}': permission denied.", hint="choose another folder")


def require_output(*outputs: Path, made_from: Iterable[Path]) -> None:
    """Refuse files that could not be written, and those that would replace what they are made from."""
    sources = {path.resolve() for path in made_from}
    for output in outputs:
        if output.resolve() in sources:
            raise OutputError(f"'{output}' is a file that the result is made from.", hint="choose another name")
        require_writable(output)


def _require_replaceable(path: Path) -> None:
    """Refuse a name at which there is something else than a file: a device, say, which a rename would do away with."""
    if path.exists() and not path.is_file():
        what = "a folder" if path.is_dir() else "a device or pipe"
        raise OutputError(f"cannot write '{path}': it is {what}.", hint="choose another name")


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


@contextmanager
def staged(folder: Path) -> Iterator[Path]:
    """Yield an empty folder; what is in it at the end moves into `folder`, on an error nothing does.

    The staging folder lies inside `folder`, so that every move is a rename within one file system: a full
    disk or Ctrl-C is met while staging, when there is still nothing to see.
    """
    try:
        staging = Path(tempfile.mkdtemp(prefix=STAGING, dir=folder))
    except OSError as error:
        raise OutputError(
            f"cannot write into '{folder}': {error.strerror or error}.",
            hint="choose another folder",
        ) from error
    try:
        yield staging
        _move_all(staging, folder)
    except OSError as error:
        raise OutputError(
            f"cannot write into '{folder}': {error.strerror or error}; nothing was written.",
            hint="free some space, or choose another folder",
        ) from error
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _move_all(staging: Path, folder: Path) -> None:
    """Move every file of `staging` into `folder`, or put everything back as it was."""
    names = sorted(path.name for path in staging.iterdir())
    for name in names:
        _require_replaceable(folder / name)
    replaced = staging / "replaced"
    replaced.mkdir()
    moved: list[str] = []
    try:
        for name in names:
            if (folder / name).exists():
                os.link(folder / name, replaced / name)
            moved.append(name)
            os.replace(staging / name, folder / name)
    except BaseException:  # Ctrl-C between two renames, too
        for name in moved:
            if (replaced / name).exists():
                os.replace(replaced / name, folder / name)
            elif not (staging / name).exists():
                (folder / name).unlink()
        raise


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
