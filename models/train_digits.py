"""Train a small residual CNN on scikit-learn's digits.

`python models/train_digits.py` writes digits.onnx, digits_test.npz and digits_calib.npz beside itself.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

try:
    import numpy as np
    import numpy.typing as npt
    import onnxruntime
    import torch
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split
    from torch import Tensor, nn
    from torch.nn.utils.fusion import fuse_conv_bn_eval
except ModuleNotFoundError as missing:
    sys.exit(f"error: {missing.name!r} is not installed.\nhint: pip install torch scikit-learn onnx onnxruntime numpy")

from architectures import ResNet
from export_architectures import export_onnx

TEST_IMAGES = 360
CALIBRATION_IMAGES = 500
EPOCHS = 40
BATCH = 64
PEAK_LEARNING_RATE = 0.05


@dataclass(frozen=True)
class Images:
    """Preprocessed images [count, 1, 8, 8] in 0..1 and their digits."""

    input: npt.NDArray[np.float32]
    labels: npt.NDArray[np.int64]


def main(argv: Sequence[str] | None = None) -> int:
    """Return 0 once model and data are written."""
    parser = argparse.ArgumentParser(description=__doc__)
    here = Path(__file__).parent
    parser.add_argument("-o", "--output", type=Path, default=here, metavar="FOLDER", help="default: beside this script")
    parser.add_argument("--seed", type=int, default=0, help="of the split, the weights and the batches (default: 0)")
    args = parser.parse_args(argv)

    torch.use_deterministic_algorithms(True)
    torch.set_num_threads(1)  # a sum split over threads rounds differently on every machine
    torch.manual_seed(args.seed)
    train_set, test_set = split_digits(seed=args.seed)
    model = ResNet(1, (32, 64, 128), blocks=2, classes=10)
    train(model, train_set)
    fold_batch_norms(model.eval())

    args.output.mkdir(parents=True, exist_ok=True)
    path = args.output / "digits.onnx"
    export_onnx(model, torch.from_numpy(test_set.input), path)
    np.savez_compressed(args.output / "digits_test.npz", input=test_set.input, labels=test_set.labels)
    np.savez_compressed(args.output / "digits_calib.npz", input=train_set.input[:CALIBRATION_IMAGES])
    print(f"{path}: {accuracy(path, test_set):.2%} of {len(test_set.labels)} test images right (ONNX Runtime)")
    return 0


def split_digits(*, seed: int) -> tuple[Images, Images]:
    """Return the train and the test images: disjoint, shuffled, with every digit at its share in both."""
    digits = load_digits()
    pixels = (digits.images / 16).astype(np.float32)[:, np.newaxis]  # grey levels are 0..16
    train_input, test_input, train_labels, test_labels = train_test_split(
        pixels, digits.target.astype(np.int64), test_size=TEST_IMAGES, stratify=digits.target, random_state=seed
    )
    return Images(train_input, train_labels), Images(test_input, test_labels)


def train(model: nn.Module, images: Images) -> None:
    """Train `model` in place: SGD, one cycle of learning rates, images shifted by up to one pixel."""
    inputs, labels = torch.from_numpy(images.input), torch.from_numpy(images.labels)
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9, nesterov=True, weight_decay=5e-4)
    steps_per_epoch = len(labels) // BATCH
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, PEAK_LEARNING_RATE, epochs=EPOCHS, steps_per_epoch=steps_per_epoch)
    model.train()
    for epoch in range(1, EPOCHS + 1):
        losses = []
        # The incomplete last batch is left out: a handful of images makes poor BatchNorm statistics.
        for batch in torch.randperm(len(labels))[: steps_per_epoch * BATCH].view(-1, BATCH):
            loss = nn.functional.cross_entropy(model(shifted(inputs[batch])), labels[batch], label_smoothing=0.1)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            losses.append(loss.item())
        print(f"epoch {epoch:2}/{EPOCHS}  loss {np.mean(losses):.4f}", file=sys.stderr)


def shifted(images: Tensor) -> Tensor:
    """Return `images` moved together by a random -1, 0 or 1 pixel each way, zeros shifted in."""
    down, right = torch.randint(0, 3, (2,)).tolist()
    height, width = images.shape[-2:]
    return nn.functional.pad(images, (1, 1, 1, 1))[..., down : down + height, right : right + width]


def fold_batch_norms(model: nn.Module) -> None:
    """Merge in place every BatchNorm into the Conv registered just before it; the function stays the same.

    Folding here and not in the exporter keeps names: `layer1.0.conv1.weight`, not `onnx::Conv_123`.
    """
    for module in list(model.modules()):
        for (conv_name, conv), (norm_name, norm) in pairwise(list(module.named_children())):
            if isinstance(conv, nn.Conv2d) and isinstance(norm, nn.BatchNorm2d):
                setattr(module, conv_name, fuse_conv_bn_eval(conv, norm))
                setattr(module, norm_name, nn.Identity())


def accuracy(path: Path, images: Images) -> float:
    """Return the share of `images` whose digit the ONNX file at `path` gets right."""
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    (logits,) = session.run(None, {"input": images.input})
    return float(np.mean(logits.argmax(axis=1) == images.labels))


if __name__ == "__main__":
    sys.exit(main())
