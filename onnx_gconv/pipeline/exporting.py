"""`export`: a model as a target reads it, found to be the same function."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Unpack, get_args

import onnx

from onnx_gconv import verification
from onnx_gconv.data.open import DataLike, open_data
from onnx_gconv.deploy import exporting
from onnx_gconv.deploy.exporting import ExportTarget, batch_shapes
from onnx_gconv.deploy.opset import standard_opset
from onnx_gconv.deploy.precision import half, quantised
from onnx_gconv.deploy.quantising import QuantisedFor
from onnx_gconv.deploy.timing_file import Precision
from onnx_gconv.errors import UsageError, VerifyError
from onnx_gconv.evaluation import Evaluation, evaluate
from onnx_gconv.listener import SILENT, Listener
from onnx_gconv.model.file import save_model
from onnx_gconv.model.shapes import ShapeLike
from onnx_gconv.pipeline.original import ModelLike, open_original
from onnx_gconv.pipeline.settings import ImageWishes, PathLike, as_path, settings_of
from onnx_gconv.recover.calibration import SAMPLES, Calibration, calibration
from onnx_gconv.verification import Verification, default_tolerance


@dataclass(frozen=True, eq=False)
class Exported:
    """A model for a target, what was changed in it, and how far it is from the model it was made from."""

    model: onnx.ModelProto
    changes: tuple[str, ...]
    verification: Verification | None  # None where none was asked for, and for int8, which is no longer the same function
    made_from: tuple[Path, ...]
    precision: Precision = "fp32"
    evaluation: Evaluation | None = None  # of an int8 model, against the float one on the calibration samples

    def as_dict(self) -> dict[str, object]:
        """Return what is known of it, for JSON."""
        checked = None if self.verification is None else self.verification.as_dict()
        judged = None if self.evaluation is None else self.evaluation.as_dict()
        facts: dict[str, object] = {
            "precision": self.precision,
            "opset": standard_opset(self.model),
            "ir_version": self.model.ir_version,
        }
        return {**facts, "changes": list(self.changes), "verify": checked, "evaluation": judged}

    def save(self, path: PathLike) -> list[Path]:
        """Write the model, whole or not at all, and return its files."""
        return save_model(self.model, as_path(path), self.made_from)


def export(
    model: ModelLike,
    target: ExportTarget = "ort-cpu",
    *,
    precision: Precision = "fp32",
    calib: DataLike | None = None,
    calib_samples: int = SAMPLES,
    batch: int | None = None,
    input_shape: ShapeLike = (),
    verify: bool = True,
    seed: int = 0,
    listener: Listener = SILENT,
    **images: Unpack[ImageWishes],
) -> Exported:
    """Return the model as a target reads it: "tx2" (opset 13, IR 7, int32 indices), "tensorrt" (int32 indices) or "ort-cpu".

    With `precision` "fp16" its weights are halved; with "int8" it is quantised, scales from the samples of `calib`.
    """
    if target not in exporting.TARGETS:
        raise UsageError(f"--target {target!r} is not known: choose from {', '.join(exporting.TARGETS)}")
    _require_precision(precision, target, has_samples=calib is not None)
    if batch is not None and input_shape:
        raise UsageError("--input-shape gives the batch, too: leave out --batch")
    original = open_original(model, input_shape)
    shapes = original.given_shapes if batch is None else batch_shapes(original.model, batch)
    made = exporting.convert(original.model, target, shapes=shapes)
    if precision == "int8":
        assert calib is not None
        settings = settings_of("export", images, ImageWishes)
        data = open_data(calib, original.model, preprocessing=settings.preprocessing)
        samples = calibration(data, made.model, calib_samples)
        quantised, evaluation = in_int8(made.model, samples, "tensorrt" if target == "tensorrt" else "ort-cpu", listener)
        raised = standard_opset(quantised) > standard_opset(made.model)
        words = [f"opset {standard_opset(made.model)} to {standard_opset(quantised)}"] if raised else []
        remarks = (*made.remarks, *words, f"int8, scales from {evaluation.samples} samples")
        return Exported(quantised, remarks, None, original.files, precision, evaluation)
    result, remarks = made.model, made.remarks
    if precision == "fp16":
        result, remarks = half(made.model), (*made.remarks, "fp16, inputs and outputs as they were")
    checked = None
    if verify:
        tolerance = max(default_tolerance(original.model), default_tolerance(result))
        checked = verification.verify(original.model, result, tolerance=tolerance, seed=seed, shapes=shapes)
        if not checked.passed:
            raise VerifyError(
                f"the converted model differs by {checked.max_rel_error:.1e} of the largest value; nothing was written.",
                hint="export the model from its framework with the opset that the target reads",
            )
    else:
        listener.warn("not verified: --no-verify was given")
    return Exported(result, remarks, checked, original.files, precision)


def in_int8(
    model: onnx.ModelProto, samples: Calibration, made_for: QuantisedFor, listener: Listener
) -> tuple[onnx.ModelProto, Evaluation]:
    """Return the model in int8, and how close it is to the float one on the samples; refuse outputs that are no numbers."""
    made = quantised(model, samples.feeds, made_for, on_progress=listener.phase("quantising"))
    found = evaluate(made, samples.data, reference=model, limit=samples.samples, on_progress=listener.phase("comparing"))
    broken = [name for name, distance in found.outputs.items() if not math.isfinite(distance.relative_l2)]
    if broken:
        raise VerifyError(
            f"in int8 the output {broken[0]!r} cannot be compared with the float model's: it is not finite, or of another shape; "
            "nothing was written.",
            hint="check the samples of --calib; leave out --precision int8",
        )
    return made, found


def _require_precision(precision: Precision, target: ExportTarget, *, has_samples: bool) -> None:
    if precision not in get_args(Precision):
        raise UsageError(f"--precision {precision!r} is not known: choose from {', '.join(get_args(Precision))}")
    if precision == "int8" and not has_samples:
        raise UsageError("--precision int8 takes its scales from data: give --calib DATA, a few hundred samples without labels")
    if precision != "int8" and has_samples:
        raise UsageError("--calib is for --precision int8")
    if precision == "int8" and target == "tx2":
        raise UsageError("--precision int8 is not for the tx2, which has no int8 arithmetic: use fp16 there")
