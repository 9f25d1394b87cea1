"""`export`: a model as a target reads it, found to be the same function."""

from dataclasses import dataclass
from pathlib import Path

import onnx

from onnx_gconv import verification
from onnx_gconv.deploy import exporting
from onnx_gconv.deploy.exporting import ExportTarget, batch_shapes
from onnx_gconv.deploy.opset import standard_opset
from onnx_gconv.errors import UsageError, VerifyError
from onnx_gconv.listener import SILENT, Listener
from onnx_gconv.model.file import save_model
from onnx_gconv.model.shapes import ShapeLike
from onnx_gconv.pipeline.original import ModelLike, open_original
from onnx_gconv.pipeline.settings import PathLike, as_path
from onnx_gconv.verification import Verification, default_tolerance


@dataclass(frozen=True, eq=False)
class Exported:
    """A model for a target, what was changed in it, and how far it is from the model it was made from."""

    model: onnx.ModelProto
    changes: tuple[str, ...]
    verification: Verification | None  # None only where none was asked for
    made_from: tuple[Path, ...]

    def as_dict(self) -> dict[str, object]:
        """Return what is known of it, for JSON."""
        checked = None if self.verification is None else self.verification.as_dict()
        facts = {"opset": standard_opset(self.model), "ir_version": self.model.ir_version}
        return {**facts, "changes": list(self.changes), "verify": checked}

    def save(self, path: PathLike) -> list[Path]:
        """Write the model, whole or not at all, and return its files."""
        return save_model(self.model, as_path(path), self.made_from)


def export(
    model: ModelLike,
    target: ExportTarget,
    *,
    batch: int | None = None,
    input_shape: ShapeLike = (),
    verify: bool = True,
    seed: int = 0,
    listener: Listener = SILENT,
) -> Exported:
    """Return the model as a target reads it: "tx2" (opset 13, IR 7, int32 indices), "tensorrt" (int32 indices) or "ort-cpu"."""
    if target not in exporting.TARGETS:
        raise UsageError(f"--target {target!r} is not known: choose from {', '.join(exporting.TARGETS)}")
    if batch is not None and input_shape:
        raise UsageError("--input-shape gives the batch, too: leave out --batch")
    original = open_original(model, input_shape)
    shapes = original.given_shapes if batch is None else batch_shapes(original.model, batch)
    made = exporting.convert(original.model, target, shapes=shapes)
    checked = None
    if verify:
        checked = verification.verify(
            original.model, made.model, tolerance=default_tolerance(original.model), seed=seed, shapes=shapes
        )
        if not checked.passed:
            raise VerifyError(
                f"the converted model differs by {checked.max_rel_error:.1e} of the largest value; nothing was written.",
                hint="export the model from its framework with the opset that the target reads",
            )
    else:
        listener.warn("not verified: --no-verify was given")
    return Exported(made.model, made.remarks, checked, original.files)
