"""Where a training stands, in a file to go on from."""

import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from onnx_gconv.errors import TrainingError
from onnx_gconv.files import training_files
from onnx_gconv.staging import staged


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """The state after an epoch. `purpose` is what the training was started with: it must not change on the way."""

    purpose: Mapping[str, str]
    weights: Mapping[str, Tensor]
    optimizer: Mapping[str, Any]
    best: Mapping[str, Tensor]
    history: list[dict[str, Any]]  # one record for each epoch, with the start as epoch 0


def write(checkpoint: Checkpoint, path: Path) -> None:
    """Write the file so that a crash leaves the one before."""
    with staged(path.parent) as staging:
        torch.save(vars(checkpoint), staging / path.name)


def read(path: Path) -> Checkpoint:
    """Return the state in the file."""
    if not path.exists():
        raise TrainingError(f"there is no checkpoint '{path}' to resume.", hint="leave out --resume to start afresh")
    try:
        return Checkpoint(**torch.load(path, map_location="cpu", weights_only=True))
    except (OSError, RuntimeError, TypeError, ValueError, EOFError, pickle.UnpicklingError) as error:
        raise TrainingError(
            f"the checkpoint '{path}' cannot be read: {str(error).splitlines()[0] if str(error) else type(error).__name__}.",
            hint="delete it and leave out --resume to start afresh",
        ) from error


def require_same(checkpoint: Checkpoint, purpose: Mapping[str, str], path: Path) -> None:
    """Refuse the checkpoint in this file if it is of another training."""
    changed = sorted(
        name for name in purpose.keys() | checkpoint.purpose.keys() if purpose.get(name) != checkpoint.purpose.get(name)
    )
    if changed:
        name = changed[0]
        raise TrainingError(
            f"the checkpoint '{path}' is of another training: its {name} was {checkpoint.purpose.get(name)!r}, "
            f"now it is {purpose.get(name)!r}.",
            hint="use the same model, plan, data and flags, or leave out --resume to start afresh",
        )


def path_beside(output: Path) -> Path:
    """Return where the checkpoint of a training with this result lies."""
    return training_files(output)[0]
