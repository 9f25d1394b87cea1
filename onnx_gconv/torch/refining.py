"""A model fine-tuned a little between the steps of a search, so that the next step judges it by weights that have adapted."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import onnx

from onnx_gconv.data.batch import Data
from onnx_gconv.errors import TrainingError
from onnx_gconv.listener import OnProgress
from onnx_gconv.model.shapes import Shape
from onnx_gconv.plans import Plan
from onnx_gconv.torch import load, save_back
from onnx_gconv.torch.spool import Spool, spooled
from onnx_gconv.torch.team import Team, assembled
from onnx_gconv.torch.training import Record, Training, TrainingSettings


class Tuner:
    """Fine-tunes models on the same data by the same settings, and from the same teacher if the settings want one."""

    def __init__(
        self, dense: onnx.ModelProto, spool: Spool, settings: TrainingSettings, team: Team, shapes: Mapping[str, Shape]
    ) -> None:
        self._spool, self._settings, self._team, self._shapes = spool, settings, team, shapes
        self._teacher = load(dense, shapes=shapes, seed=settings.seed) if settings.distill > 0 else None

    def tune(self, model: onnx.ModelProto, plan: Plan, on_step: OnProgress) -> tuple[onnx.ModelProto, Record]:
        """Return the model as the plan masks it, tuned, under the same names; and what the last epoch came to."""
        module = load(model, plan, shapes=self._shapes, seed=self._settings.seed)
        training = Training(module, self._teacher, self._spool, self._settings, self._team)
        records = [training.train_epoch(epoch, on_step) for epoch in range(1, self._settings.epochs + 1)]
        return save_back(module.cpu(), model), records[-1]


@contextmanager
def tuner(dense: onnx.ModelProto, data: Data, settings: TrainingSettings, shapes: Mapping[str, Shape]) -> Iterator[Tuner]:
    """Yield what tunes; the data is read once for all steps."""
    with assembled("auto") as team:
        if team.world > 1:
            raise TrainingError(
                "the search between the trainings runs in one process.", hint="leave out torchrun; `finetune` runs under it"
            )
        with spooled(data, team) as spool:
            yield Tuner(dense, spool, settings, team, shapes)
