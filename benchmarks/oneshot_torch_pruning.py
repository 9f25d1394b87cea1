"""One-shot magnitude pruning by Torch-Pruning of a CIFAR-10 ResNet of ../shared/zoo, with BatchNormalization measured anew.

    python benchmarks/oneshot_torch_pruning.py --budget 47.16% [--scope local|global] [--samples 1000] [--images 10000]

Wants an environment with torch, torch-pruning, onnx, onnxruntime and Pillow, but not onnx_gconv; `oneshot.py --torch PYTHON`
runs it there. Prints one line of JSON. The weights come from the ONNX file; the torch model must give the same numbers first.
"""

import argparse
import copy
import json
import resource
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import torch
import torch_pruning
from rows import need
from torch import Tensor, nn
from torch.nn import functional

SHARED = Path(__file__).resolve().parent.parent.parent / "shared"
BATCH = 100
BISECTIONS = 10  # of the pruning ratio
TOLERANCE = 1e-4  # of the largest logit, between the torch model and the ONNX one


class Block(nn.Module):
    """Two Convs and a shortcut without weights: every other pixel, and channels of zeros on both sides (option A)."""

    def __init__(self, in_channels: int, out_channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, out_channels, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(out_channels)
        self.conv2 = nn.Conv2d(out_channels, out_channels, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(out_channels)
        self.stride, self.missing = stride, (out_channels - in_channels) // 2

    def forward(self, x: Tensor) -> Tensor:
        inner = functional.relu(self.bn1(self.conv1(x)))
        if self.missing:
            x = functional.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, self.missing, self.missing))
        return functional.relu(self.bn2(self.conv2(inner)) + x)


class ResNet(nn.Module):
    """The ResNet for CIFAR-10 with 6n+2 layers; parameters are named as in the published weights."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16)
        blocks = (depth - 2) // 6
        self.layer1 = nn.Sequential(*(Block(16, 16, 1) for _ in range(blocks)))
        self.layer2 = nn.Sequential(Block(16, 32, 2), *(Block(32, 32, 1) for _ in range(blocks - 1)))
        self.layer3 = nn.Sequential(Block(32, 64, 2), *(Block(64, 64, 1) for _ in range(blocks - 1)))
        self.linear = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = functional.relu(self.bn1(self.conv1(x)))
        x = self.layer3(self.layer2(self.layer1(x)))
        return self.linear(x.mean(dim=(2, 3)))


def imported(path: Path, model: Any, images: Tensor) -> Any:
    """Return the torch model with the weights of the ONNX file, after both have given the same logits."""
    model.eval()
    stored = {
        tensor.name: torch.from_numpy(onnx.numpy_helper.to_array(tensor).copy()) for tensor in onnx.load(path).graph.initializer
    }
    wanted = {name for name in model.state_dict() if not name.endswith("num_batches_tracked")}
    model.load_state_dict({name: stored[name] for name in wanted}, strict=False)
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    expected = session.run(None, {session.get_inputs()[0].name: images.numpy()})[0]
    with torch.no_grad():
        found = model(images).numpy()
    gap = np.abs(found - expected).max() / np.abs(expected).max()
    assert gap <= TOLERANCE, f"the torch model is {gap:.1e} off the ONNX one"
    return model


def macs(model: nn.Module, image: Tensor) -> int:
    """Return the multiply-accumulates of Convs and the classifier."""
    total = 0

    def add(module: nn.Module, _: Any, output: Tensor) -> None:
        nonlocal total
        assert isinstance(module, (nn.Conv2d, nn.Linear))
        total += output.numel() * module.weight[0].numel()

    hooks = [m.register_forward_hook(add) for m in model.modules() if isinstance(m, (nn.Conv2d, nn.Linear))]
    with torch.no_grad():
        model(image)
    for hook in hooks:
        hook.remove()
    return total


def pruned(model: ResNet, image: Tensor, *, most: int, is_global: bool) -> ResNet:
    """Return the model without channels of least L1 magnitude: in one step, of the smallest ratio that is within the limit.

    The channels of the residual streams stay: Torch-Pruning cannot follow them through the shortcuts' padding.
    """
    low, high, found = 0.0, 1.0, None
    for _ in range(BISECTIONS):
        ratio, candidate = (low + high) / 2, copy.deepcopy(model)
        inner = [block.conv1 for block in candidate.modules() if isinstance(block, Block)]
        pruner = torch_pruning.pruner.MagnitudePruner(
            candidate,
            image,
            importance=torch_pruning.importance.MagnitudeImportance(p=1),
            global_pruning=is_global,
            pruning_ratio=ratio,
            ignored_layers=[m for m in candidate.modules() if isinstance(m, (nn.Conv2d, nn.Linear)) and m not in inner],
        )
        pruner.step()
        if macs(candidate, image) <= most:
            high, found = ratio, candidate
        else:
            low = ratio
    assert found is not None, "Torch-Pruning cannot meet the budget"
    return found


def measure_statistics(model: nn.Module, images: Tensor) -> None:
    """Set every BatchNormalization's statistics to those of the images."""
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.reset_running_stats()
            module.momentum = None  # the plain average over batches
    model.train()
    with torch.no_grad():
        for batch in images.split(BATCH):
            model(batch)
    model.eval()


def accuracy(model: nn.Module, images: Tensor, labels: Tensor) -> float:
    with torch.no_grad():
        hits = [(model(x).argmax(dim=1) == y).sum() for x, y in zip(images.split(BATCH), labels.split(BATCH), strict=True)]
    return int(sum(hits)) / len(labels)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--depth", type=int, default=56, choices=(20, 56))
    parser.add_argument("--budget", default="47.16%", help="share of the MACs (default 47.16%%)")
    parser.add_argument("--scope", choices=("local", "global"), default="local", help="one share for all layers, or one ranking")
    parser.add_argument("--samples", type=int, default=1000, help="images that statistics are measured on; 0: they stay")
    parser.add_argument("--images", type=int, default=10_000, help="test images")
    args = parser.parse_args()
    need(SHARED)
    sys.path.insert(0, str(SHARED / "data"))
    import cifar10

    torch.manual_seed(0)
    torch.set_num_threads(2)
    test, labels = cifar10.load("test", args.images)
    train = torch.from_numpy(cifar10.normalise(cifar10.load("train", max(1, args.samples))[0]))
    test = torch.from_numpy(cifar10.normalise(test))
    model = imported(SHARED / "zoo" / f"cifar10_resnet{args.depth}_bn.onnx", ResNet(args.depth), test[:8])
    whole = macs(model, test[:1])
    started, cpu_started = time.perf_counter(), time.process_time()
    model = pruned(model, test[:1], most=int(float(args.budget.rstrip("%")) / 100 * whole), is_global=args.scope == "global")
    if args.samples:
        measure_statistics(model, train)
    cost = {
        "macs": macs(model, test[:1]) / whole,
        "seconds": time.perf_counter() - started,
        "cpu_seconds": time.process_time() - cpu_started,
        "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }
    print(json.dumps(cost | {"top1": accuracy(model, test, torch.from_numpy(labels))}))


if __name__ == "__main__":
    main()
