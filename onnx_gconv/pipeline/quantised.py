"""The compressed model once more in fp16 or int8, and what that costs: a further file beside the float one."""

from dataclasses import dataclass

import numpy as np
import onnx

from onnx_gconv.data.batch import Data
from onnx_gconv.deploy.precision import half
from onnx_gconv.deploy.quantising import QuantisedFor
from onnx_gconv.deploy.timing_file import Precision
from onnx_gconv.evaluation import Evaluation, evaluate
from onnx_gconv.pipeline.exporting import in_int8
from onnx_gconv.pipeline.in_time import Clocked
from onnx_gconv.pipeline.job import Job
from onnx_gconv.recover.calibration import Calibration
from onnx_gconv.runtime import random_feeds
from onnx_gconv.timing import Latency, compare_latency


@dataclass(frozen=True, eq=False)
class Quantised:
    """A model in fewer bits, beside the float model it was made from and the original."""

    model: onnx.ModelProto
    precision: Precision
    closeness: Evaluation  # to the float model, on the calibration samples
    evaluation: Evaluation | None  # as the float model's: on --eval, against the original
    latency: Latency | None  # against the original

    def as_dict(self) -> dict[str, object]:
        """Return it as report.json has it."""
        parts = {"closeness": self.closeness, "evaluation": self.evaluation, "latency": self.latency}
        told = {name: None if part is None else part.as_dict() for name, part in parts.items()}
        return {"precision": self.precision, "bytes": self.model.ByteSize(), **told}


def quantised_of(
    job: Job, model: onnx.ModelProto, samples: Calibration, judging: Data | None, clocked: Clocked
) -> Quantised | None:
    """Return the model in the precision that is asked for, compared, judged and timed, unless it is `clocked`; None for fp32."""
    settings, original, facts = job.settings, job.original, job.facts
    if settings.precision == "fp32":
        return None
    with job.watch("quantise"):
        if settings.precision == "int8":
            made_for: QuantisedFor = "tensorrt" if facts.target == "tensorrt" else "ort-cpu"
            made, closeness = in_int8(model, samples, made_for, job.listener)
        else:
            made = half(model)
            closeness = evaluate(made, samples.data, reference=model, limit=samples.samples)
    evaluation, latency = None, clocked.latency if clocked.precision == settings.precision else None
    if judging is not None:
        with job.watch("evaluate"):
            progress = job.listener.phase("evaluating")
            evaluation = evaluate(made, judging, reference=original.model, on_progress=progress)
    if latency is None and facts.target == "ort-cpu" and (facts.times is None or facts.times.host is None):
        with job.watch("measure"):
            feeds = random_feeds(original.model, original.network.input_shapes, np.random.default_rng(settings.seed))
            latency = compare_latency(original.model, made, feeds, threads=settings.threads)
    return Quantised(made, settings.precision, closeness, evaluation, latency)
