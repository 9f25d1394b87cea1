"""JSON objects read field by field, with every wrong type named: the file, the place in it, the field."""

import json
import math
from dataclasses import dataclass
from pathlib import Path

from onnx_gconv.errors import GconvError
from onnx_gconv.staging import settle

LARGEST = 2**63


@dataclass(frozen=True)
class Complaint:
    """What a malformed file raises, and how the user gets a sound one."""

    error: type[GconvError]
    remedy: str
    absent: str = "check the path"  # the hint where there is no file


class Fields:
    """A JSON object whose fields are read with their type checked; `where` begins every message."""

    def __init__(self, data: object, where: str, complaint: Complaint) -> None:
        if not isinstance(data, dict):
            raise complaint.error(f"{where}: expected an object, found {kind(data)}.", hint=complaint.remedy)
        self._data = data
        self._complaint = complaint
        self.where = where

    def named(self, name: str) -> "Fields":
        return Fields(self._data, f"{self.where} {name!r}", self._complaint)

    def names(self) -> list[str]:
        return list(self._data)

    def any(self, field: str) -> object:
        if field not in self._data:
            raise self.wrong(f"the field {field!r} is missing", self._complaint.remedy)
        return self._data[field]

    def inner(self, field: str) -> "Fields":
        return Fields(self.any(field), f"{self.where}: {field}", self._complaint)

    def rows(self, field: str) -> "list[Fields]":
        return [Fields(item, f"{self.where}: {field}[{i}]", self._complaint) for i, item in enumerate(self.items(field))]

    def string(self, field: str) -> str:
        value = self.any(field)
        if not isinstance(value, str):
            raise self._mistyped(field, "a string", value)
        return value

    def integer(self, field: str) -> int:
        value = self.any(field)
        if not _is_whole(value):
            raise self._mistyped(field, "a whole number", value)
        assert isinstance(value, int)
        return value

    def number(self, field: str) -> float:
        value = self.any(field)
        if not _is_whole(value) and not (isinstance(value, float) and math.isfinite(value)):
            raise self._mistyped(field, "a number", value)
        assert isinstance(value, int | float)
        return float(value)

    def maybe_number(self, field: str) -> float | None:
        return None if self.any(field) is None else self.number(field)

    def optional_inner(self, field: str) -> "Fields | None":
        """Return the object, or None where the field is null or missing."""
        return None if self._data.get(field) is None else self.inner(field)

    def optional_number(self, field: str) -> float | None:
        """Return the number, or None where the field is null or missing."""
        return None if self._data.get(field) is None else self.number(field)

    def items(self, field: str) -> list[object]:
        value = self.any(field)
        if not isinstance(value, list):
            raise self._mistyped(field, "a list", value)
        return value

    def strings(self, field: str) -> tuple[str, ...]:
        values = self.items(field)
        if not all(isinstance(value, str) for value in values):
            raise self._mistyped(field, "a list of strings", values)
        return tuple(str(value) for value in values)

    def integers(self, field: str) -> tuple[int, ...]:
        values = self.items(field)
        if not all(map(_is_whole, values)):
            raise self._mistyped(field, "a list of whole numbers", values)
        return tuple(value for value in values if isinstance(value, int))

    def wrong(self, what: str, hint: str) -> GconvError:
        """Return the error that something is wrong here."""
        return self._complaint.error(f"{self.where}: {what}.", hint=hint)

    def _mistyped(self, field: str, wanted: str, value: object) -> GconvError:
        return self.wrong(f"{field!r} must be {wanted}, not {kind(value)}", f"{self._complaint.remedy} or correct the field")


def _is_whole(value: object) -> bool:
    """Return whether it is a whole number that anybody can count to: what is larger, NumPy does not take."""
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) < LARGEST


def read_text(path: Path, complaint: Complaint) -> str:
    """Return the text of the file, or complain about it in the user's words."""
    settle(path.parent)
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise complaint.error(f"there is no file '{path}'.", hint=complaint.absent) from error
    except OSError as error:
        raise complaint.error(f"cannot read '{path}': {error.strerror}.", hint="name a file that you may read") from error
    except ValueError as error:
        raise complaint.error(f"'{path}' is not UTF-8 text.", hint=complaint.remedy) from error


def read_json(path: Path, complaint: Complaint) -> object:
    """Return what the JSON file holds."""
    return parse_json(read_text(path, complaint), f"'{path}'", complaint)


def parse_json(text: str, where: str, complaint: Complaint) -> object:
    """Return what the JSON text stands for; `where` begins the message if it stands for nothing."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:  # not JSON, a number of 5,000 digits, a thousand brackets
        raise complaint.error(f"{where} is not JSON: {error}.", hint=complaint.remedy) from error


def kind(value: object) -> str:
    """Return the type and the beginning of a value, for a message."""
    return "null" if value is None else f"{type(value).__name__} {str(value)[:40]!r}"
