"""Results appear together: they are written into a hidden folder, and move where they belong when all of them are there.

In the folder that they belong into,

1. `.onnx-gconv-XXXXXXXX/new` is filled, and what is in it brought to the disk. A process that dies until here has changed
   nothing; the next one removes the folder.
2. It is renamed `.onnx-gconv-ready`. This is the moment: before it there is no result, after it there is all of it.
3. The files move out of it one by one. Then it gets another name, which says that it is done, and is removed.

A process that dies in step 3 leaves a folder that is ready. Whoever reads or writes there next moves the rest first (`settle`);
how far the other came does not matter. A folder cannot be renamed to one that is there and not empty, and ours never are: there
is one at a time that is ready, and of two processes that write the same files, one comes wholly after the other. Whoever has a
folder has it locked, and the kernel takes the lock away when he dies: that is how the living are told from the dead.
"""

import errno
import os
import re
import secrets
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from onnx_gconv.errors import OutputError
from onnx_gconv.stopping import WRITTEN, held

try:
    import fcntl
except ImportError:  # not on Windows
    fcntl = None  # type: ignore[assignment]

PREFIX = ".onnx-gconv-"
READY = f"{PREFIX}ready"
SCRATCH = "onnx-gconv-scratch-"
MADE = re.compile("[a-z0-9_]{8}")  # what mkdtemp adds
NEW, OLD = "new", "old"  # in such a folder: what is to be moved, and what stood in its place until then


@contextmanager
def staged(folder: Path) -> Iterator[Path]:
    """Yield an empty folder; what is in it at the end moves into `folder`, on an error nothing does.

    It lies inside `folder`, so that every move is a rename within one file system: a full disk or Ctrl-C is met while there is
    still nothing to see.
    """
    try:
        with _staging(folder) as staging:
            yield staging / NEW
            _commit(staging, folder)
    except OSError as error:
        raise OutputError(
            f"cannot write into '{folder}': {error.strerror or error}; nothing was written.",
            hint="free some space, or choose another folder",
        ) from error


def settle(folder: Path) -> None:
    """Move what a process that was killed had ready; wait for one that is moving just now."""
    ready = folder / READY
    # A folder that nobody may look into has none, it seems; those who read there will tell. We make no links: one is not ours.
    while os.path.isdir(ready) and not os.path.islink(ready):
        with _locked(ready, wait=True) as is_ours, held():
            if not is_ours:
                continue  # it was done when we had the lock
            try:
                _move_all(ready, folder)
                _remove_done(ready)
            except OSError as error:
                raise OutputError(
                    f"'{folder}' has results of a command that was killed, which cannot be moved to where they belong: "
                    f"{error.strerror or error}.",
                    hint=f"make the folder writable, or delete '{ready}' and what is old",
                ) from error


def require_replaceable(path: Path) -> None:
    """Refuse a name at which there is something else than a file: a device, say, which a rename would do away with."""
    if path.exists() and not path.is_file():
        what = "a folder" if path.is_dir() else "a device or pipe"
        raise OutputError(f"cannot write '{path}': it is {what}.", hint="choose another name")


@contextmanager
def scratch() -> Iterator[Path]:
    """Yield a temporary folder for what nobody needs afterwards; it goes, and so does what killed processes have left of theirs."""
    with _own_folder(Path(tempfile.gettempdir()), SCRATCH) as folder:
        yield folder


@contextmanager
def _staging(folder: Path) -> Iterator[Path]:
    """Yield a folder of our own with both of its parts."""
    with _own_folder(folder, PREFIX) as staging:
        (staging / NEW).mkdir()
        (staging / OLD).mkdir()
        yield staging


@contextmanager
def _own_folder(parent: Path, prefix: str) -> Iterator[Path]:
    """Yield a new folder, locked; it is gone at the end, and those of the dead are already."""
    for path in parent.glob(f"{prefix}*"):
        if MADE.fullmatch(path.name.removeprefix(prefix)):
            with _locked(path, wait=False) as is_ours:
                if is_ours:
                    shutil.rmtree(path, ignore_errors=True)
    with ExitStack() as stack:
        with held():
            is_ours = False
            while not is_ours:  # somebody may have taken it for one of the dead, before we had it locked
                folder = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
                is_ours = stack.enter_context(_locked(folder, wait=True))
            stack.callback(_remove, folder)
        yield folder


def _remove(folder: Path) -> None:
    with held():
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _locked(folder: Path, *, wait: bool) -> Iterator[bool]:
    """Yield whether the folder is ours alone now: it is not where another process has it, unless we wait, or it is gone.

    Where there are no locks, who would wait goes ahead, and who would not leaves it alone.
    """
    try:
        handle = os.open(folder, os.O_RDONLY)
    except FileNotFoundError:
        yield False
        return
    except PermissionError:  # Windows opens no folders; elsewhere the folder of another user, who may be alive
        yield wait
        return
    try:
        yield _lock(handle, wait=wait) and _is_at(handle, folder)
    finally:
        os.close(handle)  # which ends the lock


def _lock(handle: int, *, wait: bool) -> bool:
    if fcntl is None:
        return wait
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks
        return wait
    return True


def _is_at(handle: int, folder: Path) -> bool:
    """Return whether the folder still has its name: whoever had the lock before us may have moved or removed it."""
    try:
        return os.path.samestat(os.fstat(handle), folder.stat())
    except FileNotFoundError:
        return False


def _commit(staging: Path, folder: Path) -> None:
    """Move all that is staged into the folder, or leave the folder as it was."""
    names = sorted(os.listdir(staging / NEW))
    for name in names:
        require_replaceable(folder / name)
        _bring_to_disk(staging / NEW / name)
    _bring_to_disk(staging / NEW)
    ready = folder / READY
    while True:
        settle(folder)
        with held():
            try:
                os.rename(staging, ready)
            except OSError as error:
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                    raise
                continue  # another process was faster: it goes first
            try:
                _bring_to_disk(folder)
                _move_all(ready, folder)
            except BaseException:
                _move_back(ready, folder, names, name_before=staging)
                raise
            WRITTEN.extend(folder / name for name in names)
            with suppress(OSError):  # all is where it belongs; what is left is removed by the next one
                _remove_done(ready)
            return


def _move_all(ready: Path, folder: Path) -> None:
    """Move every file that is still ready, and keep what it replaces."""
    for name in sorted(os.listdir(ready / NEW)):
        _keep(folder / name, ready / OLD / name)
        os.replace(ready / NEW / name, folder / name)
    _bring_to_disk(folder)


def _keep(path: Path, old: Path) -> None:
    """Have what is at the path at another one, too; only there, where a file cannot have two names."""
    with suppress(FileNotFoundError, FileExistsError):
        try:
            os.link(path, old, follow_symlinks=False)
        except (FileNotFoundError, FileExistsError):
            raise
        except (OSError, NotImplementedError):
            os.replace(path, old)


def _move_back(ready: Path, folder: Path, names: Iterable[str], *, name_before: Path) -> None:
    """Undo it all. A new file goes back before the old one takes its place: until the end, the rest can be moved instead."""
    try:
        for name in names:
            if not os.path.lexists(ready / NEW / name):
                os.replace(folder / name, ready / NEW / name)
            if os.path.lexists(ready / OLD / name):
                os.replace(ready / OLD / name, folder / name)
        os.rename(ready, name_before)
    except OSError as error:
        raise OutputError(
            f"cannot write into '{folder}', nor put it back as it was: {error.strerror or error}.",
            hint="the next command that reads or writes there writes the rest of these results",
        ) from error


def _remove_done(ready: Path) -> None:
    """Remove a folder whose files are where they belong. With another name, for it is ready as long as it has this one."""
    done = ready.with_name(PREFIX + secrets.token_hex(4))
    os.rename(ready, done)
    shutil.rmtree(done, ignore_errors=True)


def _bring_to_disk(path: Path) -> None:
    """Have the kernel write the file, or what a folder lists, before anything that comes after; where it can."""
    with suppress(PermissionError):  # Windows opens no folders
        handle = os.open(path, os.O_RDONLY)
        try:
            with suppress(OSError) if path.is_dir() else ExitStack():  # some file systems cannot do it for folders
                os.fsync(handle)
        finally:
            os.close(handle)
