"""Export the paper's architectures to ONNX with seeded random weights, for counting and timing.

Run `python models/export_architectures.py --list` to see them, and
`python models/export_architectures.py resnet164 resnet50 -o /tmp/arch` to write two of them.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path

try:
    import numpy as np
    import onnx
    import onnxruntime
    import torch
    from torch import nn
except ModuleNotFoundError as missing:
    sys.exit(f"error: {missing.name!r} is not installed.\nhint: pip install torch onnx onnxruntime numpy")

from architectures import ARCHITECTURES

OPSET = 17
LISTED_GROUPS = (2, 4, 8)


class ExportError(Exception):
    """An architecture could not be written, with what to do about it in `hint`."""

    def __init__(self, message: str, *, hint: str) -> None:
        super().__init__(message)
        self.hint = hint


def main(argv: Sequence[str] | None = None) -> int:
    """Return the exit code: 0 done, 1 a failure the user can act on; wrong usage exits with 2."""
    parser = _parser()
    args = parser.parse_args(argv)
    names = args.names or list(ARCHITECTURES)
    for name in names:
        if name not in ARCHITECTURES:
            parser.error(f"no architecture is called {name!r}; choose from {', '.join(ARCHITECTURES)}")
    if args.list:
        list_architectures(names, classes=args.classes)
        return 0
    if args.output is None:
        parser.error("-o FOLDER is needed, except with --list")
    for name in names:
        path = args.output / f"{name}.onnx"
        try:
            args.output.mkdir(parents=True, exist_ok=True)
            export_architecture(name, path, classes=args.classes, seed=args.seed)
        except ExportError as error:
            print(f"error: {error}\nhint: {error.hint}", file=sys.stderr)
            return 1
        except OSError as error:
            print(f"error: cannot write {str(path)!r}: {error}\nhint: give -o a writable folder", file=sys.stderr)
            return 1
        print(f"{path}  {path.stat().st_size / 1e6:.1f} MB")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Export the paper's architectures to ONNX with random weights.")
    parser.add_argument("names", nargs="*", metavar="NAME", help="architectures to export (default: all)")
    parser.add_argument("-o", "--output", type=Path, metavar="FOLDER", help="where to write NAME.onnx")
    parser.add_argument("--classes", type=int, help="outputs of the classifier (default: 100 CIFAR, 1000 ImageNet)")
    parser.add_argument("--seed", type=int, default=0, help="of the random weights (default: 0)")
    parser.add_argument("--list", action="store_true", help="print names and parameter counts, write nothing")
    return parser


def list_architectures(names: Sequence[str], *, classes: int | None) -> None:
    """Print one line per architecture: its input and its parameters, dense and with uniform groups."""
    groups = "".join(f"{f'G={count}':>12}" for count in LISTED_GROUPS)
    print(f"{'name':14}{'input':20}{'dense':>12}{groups}   (parameters)")
    for name in names:
        try:
            with torch.device("meta"):  # shapes without memory: listing costs nothing
                model = build(name, classes=classes)
            counts = "".join(f"{count_parameters(model, groups=count):12,}" for count in (1, *LISTED_GROUPS))
        except ExportError:
            counts = "   needs torchvision"
        size = ARCHITECTURES[name].image_size
        print(f"{name:14}{f'[N, 3, {size}, {size}]':20}{counts}")


def count_parameters(model: nn.Module, *, groups: int) -> int:
    """Return the trainable parameters `model` would have with every Conv but the first in `groups` groups.

    A Conv whose channels `groups` does not divide, or that is grouped already, stays as it is; so does the classifier.
    """
    count = sum(parameter.numel() for parameter in model.parameters())
    convs = [module for module in model.modules() if isinstance(module, nn.Conv2d)]
    for conv in convs[1:]:
        if conv.groups == 1 and conv.in_channels % groups == 0 and conv.out_channels % groups == 0:
            count -= conv.weight.numel() - conv.weight.numel() // groups
    return count


def export_architecture(name: str, path: Path, *, classes: int | None, seed: int) -> None:
    """Write the architecture `name` to `path` with random weights that depend on `seed` alone."""
    torch.manual_seed(seed)
    model = build(name, classes=classes)
    size = ARCHITECTURES[name].image_size
    randomize(model, torch.randn(8, 3, size, size))
    export_onnx(model.eval(), torch.randn(2, 3, size, size), path)


def build(name: str, *, classes: int | None) -> nn.Module:
    """Return the untrained network called `name`."""
    architecture = ARCHITECTURES[name]
    try:
        return architecture.build(architecture.default_classes if classes is None else classes)
    except ImportError as error:
        raise ExportError(
            f"cannot build {name!r}: {error}.",
            hint="pip install torch torchvision, both from the same index, in a fresh environment",
        ) from error


@torch.no_grad()
def randomize(model: nn.Module, images: torch.Tensor) -> None:
    """Give `model` random weights, and every BatchNorm the statistics it sees on `images`.

    Without measured statistics each residual block doubles the variance of the stream: 54 blocks reach 1e8.
    """
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
    norms = [module for module in model.modules() if isinstance(module, nn.BatchNorm2d)]
    for norm in norms:
        # All ones and all zeros would be equal tensors, which the exporter merges into one, losing their names.
        nn.init.uniform_(norm.weight, 0.5, 1.5)
        nn.init.normal_(norm.bias, std=0.5)
    for block in model.modules():
        if hasattr(block, "downsample"):
            # Branches as strong as the stream amplify rounding: ResNet-101 in float32 was off by 1e-4 of its output.
            last = [child for child in block.children() if isinstance(child, nn.BatchNorm2d)][-1]
            last.weight.mul_(0.3)
    momenta = [norm.momentum for norm in norms]
    for norm in norms:
        norm.momentum = 1.0  # forget the initial statistics at once
    model.train()(images)
    for norm, momentum in zip(norms, momenta, strict=True):
        norm.momentum = momentum  # it is written to the ONNX node


def export_onnx(model: nn.Module, images: torch.Tensor, path: Path) -> None:
    """Write `model` to `path` as it stands: parameter names kept, BatchNorm kept, batch axis dynamic.

    Only a file that the ONNX checker accepts, and on which ONNX Runtime agrees with torch for `images`, is written.
    """
    partial = path.with_name(f"{path.name}.partial")
    try:
        _export_unchecked(model, images, partial)
        onnx.checker.check_model(str(partial), full_check=True)
        session = onnxruntime.InferenceSession(str(partial), providers=["CPUExecutionProvider"])
        (logits,) = session.run(None, {"input": images.numpy()})
        with torch.no_grad():
            expected = model(images).numpy()
        np.testing.assert_allclose(logits, expected, rtol=0, atol=2e-5 * np.abs(expected).max(), equal_nan=False)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def _export_unchecked(model: nn.Module, images: torch.Tensor, path: Path) -> None:
    with warnings.catch_warnings():
        # The newer exporter needs onnxscript and writes a newer IR; the older one warns on every call.
        warnings.simplefilter("ignore", DeprecationWarning)
        torch.onnx.export(
            model,
            (images,),
            path,
            dynamo=False,
            opset_version=OPSET,
            # Not EVAL, which folds BatchNorm and renames the weights to onnx::Conv_123.
            training=torch.onnx.TrainingMode.PRESERVE,
            do_constant_folding=False,
            input_names=["input"],
            output_names=["logits"],
            dynamic_axes={"input": {0: "N"}, "logits": {0: "N"}},
        )


if __name__ == "__main__":
    sys.exit(main())
