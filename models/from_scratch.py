"""Pruning against training from scratch: the paper's ablation (its Table 4), on one plan.

    python models/from_scratch.py                                    # digits.onnx, G=4 where legal; minutes on one core
    python models/from_scratch.py --cifar --images 5000              # CIFAR ResNet-20 of ../shared
    python models/from_scratch.py --model net.onnx --plan plan.json --data train.npz --test test.npz

Every row trains the dense graph with a plan's masks held, which computes what the grouped graph computes:

  pruned    the plan and the given weights that it keeps, fine-tuned
  learnt    the plan's own permutations, random weights
  shuffle   the same numbers of groups, ShuffleNet's channel shuffle behind every group convolution, random weights
  none      the same numbers of groups, no permutation at all, random weights

Training from scratch takes --epochs, fine-tuning a third of that: the paper's rule. Labels are those of the data, or where it has
none the classes that the given model names. Random weights: He et al. 2015, for the inputs that a group has; BatchNormalization
starts at 1 and 0. A layer keeps everything else that training from scratch would choose too: sizes, strides, the graph.
"""

import argparse
import sys
import tempfile
from collections.abc import Iterator
from contextlib import redirect_stdout
from dataclasses import dataclass, replace
from pathlib import Path

try:
    import numpy as np
    import onnx
    import torch
    from onnx import numpy_helper
except ModuleNotFoundError as missing:
    sys.exit(f"error: {missing.name!r} is not installed.\nhint: pip install 'onnx-gconv[torch]'")

from onnx_gconv.cli.main import main as gconv
from onnx_gconv.data.batch import Data
from onnx_gconv.data.open import open_data
from onnx_gconv.data.preprocessing import Preprocessing
from onnx_gconv.evaluation import evaluate
from onnx_gconv.plans import Plan, PlannedLayer, read_plan
from onnx_gconv.rewrite.mask import mask
from onnx_gconv.rewrite.match import match
from onnx_gconv.torch import OnnxModule, load, save_back
from onnx_gconv.torch.spool import Spool, spooled
from onnx_gconv.torch.team import Team, assembled
from onnx_gconv.torch.training import Training, TrainingSettings

HERE = Path(__file__).resolve().parent
SHARED = HERE.parent.parent / "shared"


@dataclass(frozen=True)
class Row:
    """One training: the plan whose masks are held, and whether its weights are the given ones or random."""

    name: str
    plan: Plan
    from_scratch: bool


def rows(plan: Plan) -> Iterator[Row]:
    yield Row("pruned", plan, from_scratch=False)
    yield Row("learnt", plan, from_scratch=True)
    yield Row("shuffle", replace(plan, layers=tuple(map(shuffled, plan.layers))), from_scratch=True)
    yield Row("none", replace(plan, layers=tuple(map(plain, plan.layers))), from_scratch=True)


def plain(layer: PlannedLayer) -> PlannedLayer:
    """Return the layer with its channels in the model's order."""
    return replace(layer, in_order=tuple(range(layer.in_channels)), out_order=tuple(range(layer.out_channels)))


def shuffled(layer: PlannedLayer) -> PlannedLayer:
    """Return the layer with neighbouring inputs in a group, and its outputs dealt out in turn: channel j*G + g is group g's."""
    order = np.arange(layer.out_channels).reshape(-1, layer.groups).T.reshape(-1)
    return replace(plain(layer), out_order=tuple(order.tolist()))


def randomise(module: OnnxModule, generator: torch.Generator) -> None:
    """Set every weight anew as if the model had never been trained; the zeros of the masks stay."""
    weights, masks = dict(module.named_parameters()), module.masks()
    buffers = dict(module.named_buffers())
    with torch.no_grad():
        for weight in weights.values():
            if weight.ndim < 2:
                weight.zero_()  # a bias
        for name, weight in weights.items():
            if weight.ndim >= 2:
                keep = masks.get(name, torch.ones_like(weight, dtype=torch.bool))
                inputs = keep.flatten(1).sum(1).clamp_min(1).reshape(-1, *[1] * (weight.ndim - 1))
                # A classifier is no Conv before a Relu, but a little more or less there does not matter.
                weight.copy_(torch.randn(weight.shape, generator=generator) * (2.0 / inputs).sqrt() * keep)
        for node in module.program.nodes:
            if node.op == "BatchNormalization":
                scale, bias, mean, variance = node.inputs[1:5]
                weights[scale].fill_(1.0)
                weights[bias].zero_()
                buffers[mean].zero_()
                buffers[variance].fill_(1.0)


def train(row: Row, model: onnx.ModelProto, spool: Spool, settings: TrainingSettings, team: Team) -> onnx.ModelProto:
    """Return the trained model, with its zeros."""
    module = load(model, row.plan)
    if row.from_scratch:
        randomise(module, torch.Generator().manual_seed(settings.seed))
    training = Training(module, None, spool, settings, team)
    for epoch in range(1, settings.epochs + 1):
        record = training.train_epoch(epoch, lambda done, total, text: None)
        print(f"{row.name} epoch {epoch}/{settings.epochs}: loss {record.train_loss:.4f}", file=sys.stderr)
    tuned = save_back(module.cpu(), model)
    assert same_weights(mask(tuned, match(tuned, row.plan)), tuned), "a mask did not hold"
    return tuned


def same_weights(one: onnx.ModelProto, other: onnx.ModelProto) -> bool:
    named = {tensor.name: numpy_helper.to_array(tensor) for tensor in other.graph.initializer}
    return all(np.array_equal(numpy_helper.to_array(tensor), named[tensor.name]) for tensor in one.graph.initializer)


def labelled(data: Data, model: onnx.ModelProto, folder: Path) -> Data:
    """Return the data with labels; where it has none, with the classes that the given model names."""
    if data.has_labels:
        return data
    module = load(model).eval()
    inputs: dict[str, list[np.ndarray]] = {}
    labels = []
    for batch in data.batches(256):
        with torch.no_grad():
            scores = module(**{name: torch.from_numpy(np.asarray(values)) for name, values in batch.inputs.items()})
        labels.append(scores.flatten(1).argmax(1).numpy())
        for name, values in batch.inputs.items():
            inputs.setdefault(name, []).append(np.asarray(values))
    np.savez(
        folder / "labelled.npz", labels=np.concatenate(labels), **{name: np.concatenate(parts) for name, parts in inputs.items()}
    )
    return opened(folder / "labelled.npz", model)


def opened(path: Path, model: onnx.ModelProto) -> Data:
    return open_data(str(path), model, preprocessing=Preprocessing())


def cifar(folder: Path, split: str, images: int) -> Path:
    """Return an .npz file of CIFAR-10, normalised as the ResNets of ../shared want it."""
    sys.path.insert(0, str(SHARED / "data"))
    import cifar10

    pixels, labels = cifar10.load(split, images)
    np.savez(folder / f"{split}.npz", input=cifar10.normalise(pixels), labels=labels)
    return folder / f"{split}.npz"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=HERE / "digits.onnx")
    parser.add_argument("--plan", type=Path, help="default: --groups everywhere")
    parser.add_argument("--groups", type=int, default=4)
    parser.add_argument("--data", type=Path, default=HERE / "digits_calib.npz")
    parser.add_argument("--test", type=Path, default=HERE / "digits_test.npz")
    parser.add_argument("--cifar", action="store_true", help="ResNet-20 and images of ../shared instead")
    parser.add_argument("--images", type=int, default=50_000, help="training images of --cifar")
    parser.add_argument("--epochs", type=int, default=30, help="of training from scratch; a third of it for fine-tuning")
    parser.add_argument("--lr", type=float, default=0.05, help="of training from scratch")
    parser.add_argument("--tune-lr", type=float, default=0.05, help="of fine-tuning")
    parser.add_argument("--batch-size", type=int, default=25)
    parser.add_argument("--augment", action="store_true", help="crop and flip (digits do not survive a flip)")
    parser.add_argument("--seeds", type=int, default=1, metavar="N", help="train each row N times")
    parser.add_argument("--rows", nargs="+", default=["pruned", "learnt", "shuffle", "none"])
    args = parser.parse_args()
    print("| start | permutations | epochs | training error | test error |\n|---|---|---|---|---|", flush=True)
    torch.set_num_threads(1 if not args.cifar else torch.get_num_threads())  # tiny batches gain nothing from threads
    with tempfile.TemporaryDirectory() as temporary, assembled("auto") as team:
        folder = Path(temporary)
        if args.cifar:
            args.model = SHARED / "zoo" / "cifar10_resnet20_bn.onnx"
            args.data, args.test = cifar(folder, "train", args.images), cifar(folder, "test", 10_000)
        model = onnx.load(args.model)
        if args.plan is None:
            args.plan = folder / "plan.json"
            with redirect_stdout(sys.stderr):
                code = gconv(["plan", str(args.model), "--groups", str(args.groups), "-o", str(args.plan), "-q"])
            if code:
                sys.exit(code)
        data, test = labelled(opened(args.data, model), model, folder), opened(args.test, model)
        with spooled(data, team) as spool:
            for row in rows(read_plan(args.plan)):
                if row.name not in args.rows:
                    continue
                errors = []
                epochs = args.epochs if row.from_scratch else -(-args.epochs // 3)
                for seed in range(args.seeds):
                    settings = TrainingSettings(
                        epochs=epochs,
                        lr=args.lr if row.from_scratch else args.tune_lr,
                        batch_size=args.batch_size,
                        schedule="cosine",
                        distill=0.0,
                        crop=args.augment,
                        flip=args.augment,
                        amp=False,
                        seed=seed,
                        freeze_bn=False,
                        val_split=0.0,
                    )
                    trained = train(row, model, spool, settings, team)
                    errors.append([1 - (evaluate(trained, part).top1 or 0.0) for part in (data, test)])
                on_training, on_test = (" ".join(f"{100 * error:.2f}" for error in part) for part in zip(*errors, strict=True))
                start = "random" if row.from_scratch else "the model's, pruned"
                kind = "the plan's" if row.name in ("pruned", "learnt") else row.name
                print(f"| {start} | {kind} | {epochs} | {on_training} | {on_test} |", flush=True)


if __name__ == "__main__":
    main()
