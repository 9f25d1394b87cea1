"""Torch-Pruning's choice of channels, as the rows of `pareto.py` want it: in time by the clock, the best by calibration samples.

Runs in an environment with torch-pruning and onnx_gconv: `pareto.py --torch PYTHON`. The pruner ranks by L1 or L2 norm of all
that a channel's group has, within each layer or over all layers; in MobileNet-v2 residual streams are pruned too, or not. Each of
these is pruned as little as its measured time allows, widths in steps of 16. Then the calibration samples choose the best.
"""

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import onnx
import torch
import torch_pruning
from oneshot_alternatives import with_fresh_statistics
from oneshot_torch_pruning import Block, ResNet, imported
from pareto_rivals import Keeps, narrowest_needed, plan_of
from torch import Tensor, nn

import onnx_gconv
from onnx_gconv.data.open import open_data
from onnx_gconv.data.preprocessing import Preprocessing
from onnx_gconv.errors import BudgetError
from onnx_gconv.pipeline.original import open_original
from onnx_gconv.recover.calibration import calibration

FITTED = 4  # choices that a quick fit is tried on, the best without a fit first
HELD_BACK = 4  # of so many samples, one is in the quick fit, and the others judge it
# Of MobileNet-v2: expansion, channels, blocks, stride of the first.
STAGES = ((1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1))
Choice = dict[str, Any]  # norm, scope, streams, and then share, step, error


def _conv(channels: int, outputs: int, kernel: int = 1, stride: int = 1, groups: int = 1) -> nn.Sequential:
    conv = nn.Conv2d(channels, outputs, kernel, stride, padding=kernel // 2, groups=groups, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(outputs), nn.ReLU6())


class InvertedResidual(nn.Module):
    """Expansion, depthwise Conv, projection; parameters are named as torchvision does it."""

    def __init__(self, channels: int, outputs: int, stride: int, expansion: int) -> None:
        super().__init__()
        inner = channels * expansion
        first = [_conv(channels, inner)] if expansion > 1 else []
        last = (nn.Conv2d(inner, outputs, 1, bias=False), nn.BatchNorm2d(outputs))
        self.conv = nn.Sequential(*first, _conv(inner, inner, 3, stride, inner), *last)
        self.is_residual = stride == 1 and channels == outputs

    def forward(self, x: Tensor) -> Tensor:
        return x + self.conv(x) if self.is_residual else self.conv(x)


class MobileNetV2(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = [_conv(3, 32, 3, 2)]
        channels = 32
        for expansion, outputs, blocks, stride in STAGES:
            for number in range(blocks):
                layers.append(InvertedResidual(channels, outputs, 1 if number else stride, expansion))
                channels = outputs
        self.features = nn.Sequential(*layers, _conv(channels, 1280))
        self.classifier = nn.Sequential(nn.Dropout(0.2), nn.Linear(1280, 1000))

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.features(x).mean(dim=(2, 3)))


class Pruner(torch_pruning.pruner.MagnitudePruner):  # type: ignore[misc]
    """Torch-Pruning's own, but a layer whose width is rounded down to nothing keeps one step: it would stay whole."""

    def _round_to(self, n_pruned: int, current_channels: int, round_to: int) -> int:
        return max(0, min(super()._round_to(n_pruned, current_channels, round_to), current_channels - round_to))


class Rival:
    """A model of the zoo as a PyTorch module, with its normalization."""

    def __init__(self, name: str, zoo: Path, images: Any) -> None:
        self.path, self.with_norms = zoo / f"{name}.onnx", zoo / f"{name.replace('_folded', '_bn')}.onnx"
        is_resnet = name.startswith("cifar10_resnet")
        module = ResNet(int(name.removeprefix("cifar10_resnet").split("_")[0])) if is_resnet else MobileNetV2()
        self.sample = torch.from_numpy(images[:2])
        self.module = imported(self.with_norms, module, self.sample)
        # Conv and normalization have the names of the file's constants.
        graph = onnx.load(self.with_norms).graph
        readers = {name: node for node in graph.node for name in node.input}
        norms = {n.output[0]: readers[n.output[0]].input[1] for n in graph.node if n.op_type == "Conv"}
        self.norms = {conv: weight.removesuffix(".weight") for conv, weight in norms.items()}
        streams = (False,) if is_resnet else (False, True)
        self.choices: list[Choice] = [
            {"norm": norm, "scope": scope, "streams": stream}
            for norm in (1, 2)
            for scope in ("local", "global")
            for stream in streams
        ]

    def keeps(self, choice: Choice, share: float, step: int) -> Keeps:
        """Return the channels that the pruner keeps: a mark in each normalization goes where its channel goes."""
        candidate = copy.deepcopy(self.module)
        for module in candidate.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.running_mean = torch.arange(module.num_features, dtype=torch.float32)
        # The streams of the ResNets stay: Torch-Pruning cannot follow them through the shortcuts' padding.
        open_convs = [module.conv1 for module in candidate.modules() if isinstance(module, Block)]
        if not open_convs:
            closed = [m.conv[-2] for m in candidate.modules() if isinstance(m, InvertedResidual) and not choice["streams"]]
            open_convs = [m for m in candidate.modules() if isinstance(m, nn.Conv2d) and m not in closed]
        pruner = Pruner(
            candidate,
            self.sample,
            importance=torch_pruning.importance.MagnitudeImportance(p=choice["norm"]),
            global_pruning=choice["scope"] == "global",
            pruning_ratio=min(share, 0.999),
            round_to=step,
            ignored_layers=[m for m in candidate.modules() if isinstance(m, (nn.Conv2d, nn.Linear)) and m not in open_convs],
        )
        pruner.step()
        marks = {conv: candidate.get_submodule(norm).running_mean for conv, norm in self.norms.items()}
        kept = {conv: tuple(int(mark) for mark in found.tolist()) for conv, found in marks.items()}
        whole = {conv: self.module.get_submodule(norm).num_features for conv, norm in self.norms.items()}
        depthwise = {n.output[0] for n in onnx.load(self.with_norms).graph.node if n.op_type == "Conv" and _groups(n) > 1}
        return {conv: keep for conv, keep in kept.items() if len(keep) < whole[conv] and conv not in depthwise}

    def plain(self, keeps: Keeps, calib: Mapping[str, Any], samples: int) -> onnx.ModelProto:
        """Return the model without the other channels, statistics measured anew."""
        original = open_original(self.with_norms)
        made = onnx_gconv.apply(self.with_norms, plan_of(original, keeps)).model
        data = open_data(dict(calib), made, preprocessing=Preprocessing())
        return with_fresh_statistics(made, calibration(data, made, samples).feeds())

    def fitted(self, keeps: Keeps, calib: Mapping[str, Any], samples: int) -> onnx.ModelProto:
        """Return the model without the other channels, fitted as ours."""
        plan = plan_of(open_original(self.path), keeps)
        return onnx_gconv.apply(self.path, plan, calib=dict(calib), calib_samples=samples).model

    def error(self, model: onnx.ModelProto, samples: Mapping[str, Any]) -> float:
        found = onnx_gconv.evaluate(model, dict(samples), reference=self.path)
        return max(gap.relative_l2 for gap in found.outputs.values())

    def in_time(self, asked: str, calib: Mapping[str, Any], samples: int) -> list[Choice]:
        """Return the choices that can be in time, each with its error on the samples, the best first."""
        found = []
        for choice in self.choices:
            try:
                share, step = narrowest_needed(self.path, asked, lambda share, step, c=choice: self.keeps(c, share, step))  # type: ignore[misc]
            except BudgetError:
                continue
            error = self.error(self.plain(self.keeps(choice, share, step), calib, samples), calib)
            found.append({**choice, "share": share, "step": step, "error": error})
        if not found:
            raise BudgetError("no ratio of Torch-Pruning is in time")
        return sorted(found, key=lambda choice: choice["error"])


def _groups(node: onnx.NodeProto) -> int:
    return next((attribute.i for attribute in node.attribute if attribute.name == "group"), 1)


def torch_pruned(
    rival: Rival, asked: str, calib: Mapping[str, Any], samples: int, *, is_fitted: bool, known: Sequence[Choice] = ()
) -> tuple[onnx.ModelProto, list[Choice]]:
    """Return the model of the best choice, and all choices; those that are known are not looked for again."""
    choices = list(known) or rival.in_time(asked, calib, samples)

    def keeps(choice: Choice) -> Keeps:
        return rival.keeps(choice, choice["share"], choice["step"])

    if not is_fitted:
        return rival.plain(keeps(choices[0]), calib, samples), choices
    few, rest = ({name: values[part] for name, values in calib.items()} for part in _parts(samples))
    tried = [
        {**choice, "error": rival.error(rival.fitted(keeps(choice), few, samples // HELD_BACK), rest)}
        for choice in choices[:FITTED]
    ]
    tried.sort(key=lambda choice: choice["error"])
    return rival.fitted(keeps(tried[0]), calib, samples), tried


def _parts(samples: int) -> tuple[slice, slice]:
    return slice(samples // HELD_BACK), slice(samples // HELD_BACK, samples)
