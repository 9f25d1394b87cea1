"""metrics.jsonl of a fine-tuning, read back."""

from dataclasses import dataclass
from pathlib import Path

from onnx_gconv.errors import ReportError
from onnx_gconv.fields import Complaint, Fields, parse_json, read_text

MALFORMED = Complaint(ReportError, "write it again with `onnx-gconv finetune`")


@dataclass(frozen=True)
class Epoch:
    """What an epoch came to; epoch 0 is the start. None for what was not measured."""

    epoch: int
    learning_rate: float | None
    train_loss: float | None
    validation_loss: float | None
    validation_accuracy: float | None  # share of the samples, from 0 to 1
    seconds: float


def read_metrics(path: Path) -> tuple[Epoch, ...]:
    """Return the epochs in the file; every malformed line is named."""
    lines = read_text(path, MALFORMED).splitlines()
    if not lines:
        raise ReportError(f"'{path}' is empty.", hint=MALFORMED.remedy)
    return tuple(_epoch(line, f"{path}: line {number}") for number, line in enumerate(lines, start=1))


def _epoch(line: str, where: str) -> Epoch:
    fields = Fields(parse_json(line, where, MALFORMED), where, MALFORMED)
    rate, train, validation, accuracy = (
        fields.maybe_number(name) for name in ("learning_rate", "train_loss", "validation_loss", "validation_accuracy")
    )
    return Epoch(fields.integer("epoch"), rate, train, validation, accuracy, fields.number("seconds"))
