"""`finetune`: a pruned model trained in PyTorch, its masks held."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Unpack

import onnx

from onnx_gconv.data.open import DataLike
from onnx_gconv.listener import SILENT, Listener
from onnx_gconv.pipeline.applying import PlanLike
from onnx_gconv.pipeline.extras import require_torch
from onnx_gconv.pipeline.original import ModelLike
from onnx_gconv.pipeline.settings import Learning, PathLike, RecoverWishes, as_path, settings_of

if TYPE_CHECKING:  # PyTorch is an extra: this module is there without it
    from onnx_gconv.torch.finetuning import Tuned


@dataclass(frozen=True, eq=False)
class Finetuned:
    """The tuned model, masked still; its files, none in a process that is not the first of its team."""

    tuned: "Tuned"
    files: tuple[Path, ...]

    @property
    def model(self) -> onnx.ModelProto:
        return self.tuned.model


def finetune(
    model: ModelLike,
    plan: PlanLike,
    data: DataLike,
    output: PathLike,
    *,
    learning: Learning | None = None,
    teacher: ModelLike | None = None,
    device: str = "auto",
    resume: bool = False,
    listener: Listener = SILENT,
    **wishes: Unpack[RecoverWishes],
) -> Finetuned:
    """Train the pruned model while the weights that the plan drops stay zero; write it to `output`, ready for `apply`.

    `model` is the original (then its weights are masked, and with `calib` fitted first) or a masked one. With labels it learns
    from them, without from the outputs of the dense model. A checkpoint and metrics.jsonl lie beside `output` after every
    epoch; `resume` continues from there. Ctrl-C ends it early and keeps the best so far. Needs PyTorch.
    """
    settings = settings_of("finetune", wishes, RecoverWishes)
    require_torch("finetune")
    from onnx_gconv.pipeline.tuning import Lesson, tune

    lesson = Lesson(model, plan, data, as_path(output), learning or {}, teacher, device, resume)
    tuned, files = tune(lesson, settings, listener)
    return Finetuned(tuned, files)
