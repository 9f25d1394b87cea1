"""What tells one data set from another, without opening it."""

import hashlib
from pathlib import Path


def data_identity(text: str) -> dict[str, object]:
    """Return, for JSON, what changes when the data that the user named does.

    That is the content of a file; the names, sizes and times of the files in a folder. Of a function only its name is known.
    """
    path = Path(text)
    if path.is_dir():
        files = sorted(file for file in path.rglob("*") if file.is_file())
        listed = [(str(file.relative_to(path)), file.stat().st_size, file.stat().st_mtime_ns) for file in files]
        return {"folder": hashlib.sha256(repr(listed).encode()).hexdigest()}
    if path.is_file():
        with path.open("rb") as file:
            return {"sha256": hashlib.file_digest(file, "sha256").hexdigest()}
    return {"function": text}
