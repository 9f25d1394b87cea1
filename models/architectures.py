"""The paper's architectures as plain torch modules, and a catalogue of them by name.

Module names follow the code the paper's baselines were trained with (bearpaw/pytorch-classification,
ShichenLiu/CondenseNet, torchvision), so that a group configuration published for those fits these files.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn


def conv(in_channels: int, out_channels: int, kernel: int, *, stride: int = 1, groups: int = 1) -> nn.Conv2d:
    """Return a Conv without bias whose padding keeps the image size at stride 1."""
    return nn.Conv2d(in_channels, out_channels, kernel, stride, padding=kernel // 2, groups=groups, bias=False)


class BasicBlock(nn.Module):
    """The block of He 2015: relu(shortcut + bn(conv3x3(relu(bn(conv3x3(x))))))."""

    def __init__(self, in_channels: int, channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = conv(in_channels, channels, 3, stride=stride)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = conv(channels, channels, 3)
        self.bn2 = nn.BatchNorm2d(channels)
        self.relu = nn.ReLU()
        self.downsample: nn.Module = nn.Identity()
        if stride != 1 or in_channels != channels:
            self.downsample = nn.Sequential(conv(in_channels, channels, 1, stride=stride), nn.BatchNorm2d(channels))

    def forward(self, x: Tensor) -> Tensor:
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        result: Tensor = self.relu(out + self.downsample(x))
        return result


class ResNet(nn.Module):
    """A three-stage ResNet of basic blocks for small images; 6 * blocks + 2 layers deep."""

    def __init__(self, in_channels: int, widths: tuple[int, int, int], *, blocks: int, classes: int) -> None:
        super().__init__()
        self.conv1 = conv(in_channels, widths[0], 3)
        self.bn1 = nn.BatchNorm2d(widths[0])
        self.relu = nn.ReLU()
        self.layer1 = _stage(BasicBlock, widths[0], widths[0], blocks=blocks, stride=1)
        self.layer2 = _stage(BasicBlock, widths[0], widths[1], blocks=blocks, stride=2)
        self.layer3 = _stage(BasicBlock, widths[1], widths[2], blocks=blocks, stride=2)
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(widths[2], classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu(self.bn1(self.conv1(x)))
        x = self.layer3(self.layer2(self.layer1(x)))
        logits: Tensor = self.fc(self.avgpool(x).flatten(1))
        return logits


class Bottleneck(nn.Module):
    """The other block of He 2015: 1x1, 3x3, 1x1. The stride is in the 3x3 Conv, as torchvision has it."""

    EXPANSION = 4

    def __init__(self, in_channels: int, out_channels: int, stride: int) -> None:
        super().__init__()
        channels = out_channels // self.EXPANSION
        self.conv1 = conv(in_channels, channels, 1)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = conv(channels, channels, 3, stride=stride)
        self.bn2 = nn.BatchNorm2d(channels)
        self.conv3 = conv(channels, out_channels, 1)
        self.bn3 = nn.BatchNorm2d(out_channels)
        self.relu = nn.ReLU()
        self.downsample: nn.Module = nn.Identity()
        if stride != 1 or in_channels != out_channels:
            self.downsample = nn.Sequential(conv(in_channels, out_channels, 1, stride=stride), nn.BatchNorm2d(out_channels))

    def forward(self, x: Tensor) -> Tensor:
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.relu(self.bn2(self.conv2(out)))
        result: Tensor = self.relu(self.bn3(self.conv3(out)) + self.downsample(x))
        return result


class ImageNetResNet(nn.Module):
    """torchvision's ResNet: a 7x7 stem, pooling, and four stages of 64, 128, 256 and 512 channels, times four in bottlenecks."""

    def __init__(self, block: type[BasicBlock | Bottleneck], blocks: tuple[int, int, int, int], *, classes: int) -> None:
        super().__init__()
        expansion = Bottleneck.EXPANSION if block is Bottleneck else 1
        widths = [64 * expansion * 2**stage for stage in range(4)]
        self.conv1 = conv(3, 64, 7, stride=2)
        self.bn1 = nn.BatchNorm2d(64)
        self.relu = nn.ReLU()
        self.maxpool = nn.MaxPool2d(3, stride=2, padding=1)
        self.layer1 = _stage(block, 64, widths[0], blocks=blocks[0], stride=1)
        self.layer2 = _stage(block, widths[0], widths[1], blocks=blocks[1], stride=2)
        self.layer3 = _stage(block, widths[1], widths[2], blocks=blocks[2], stride=2)
        self.layer4 = _stage(block, widths[2], widths[3], blocks=blocks[3], stride=2)
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(widths[3], classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        logits: Tensor = self.fc(self.avgpool(x).flatten(1))
        return logits


class PreActBottleneck(nn.Module):
    """The block of He 2016: BatchNorm and Relu before each Conv, nothing after the addition."""

    def __init__(self, in_channels: int, out_channels: int, stride: int) -> None:
        super().__init__()
        channels = out_channels // 4
        self.bn1 = nn.BatchNorm2d(in_channels)
        self.conv1 = conv(in_channels, channels, 1)
        self.bn2 = nn.BatchNorm2d(channels)
        self.conv2 = conv(channels, channels, 3, stride=stride)
        self.bn3 = nn.BatchNorm2d(channels)
        self.conv3 = conv(channels, out_channels, 1)
        self.relu = nn.ReLU()
        self.downsample: nn.Module = nn.Identity()
        if stride != 1 or in_channels != out_channels:
            # bearpaw's choice: the projection reads the raw stream, not the pre-activated one.
            self.downsample = nn.Sequential(conv(in_channels, out_channels, 1, stride=stride))

    def forward(self, x: Tensor) -> Tensor:
        out = self.conv1(self.relu(self.bn1(x)))
        out = self.conv2(self.relu(self.bn2(out)))
        out = self.conv3(self.relu(self.bn3(out)))
        result: Tensor = out + self.downsample(x)
        return result


class PreResNet(nn.Module):
    """The pre-activation CIFAR ResNet of bottlenecks; 9 * blocks + 2 layers deep."""

    def __init__(self, *, blocks: int, classes: int) -> None:
        super().__init__()
        self.conv1 = conv(3, 16, 3)
        self.layer1 = _stage(PreActBottleneck, 16, 64, blocks=blocks, stride=1)
        self.layer2 = _stage(PreActBottleneck, 64, 128, blocks=blocks, stride=2)
        self.layer3 = _stage(PreActBottleneck, 128, 256, blocks=blocks, stride=2)
        self.bn = nn.BatchNorm2d(256)
        self.relu = nn.ReLU()
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(256, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer3(self.layer2(self.layer1(self.conv1(x))))
        x = self.avgpool(self.relu(self.bn(x)))
        logits: Tensor = self.fc(x.flatten(1))
        return logits


def _stage(
    block: Callable[[int, int, int], nn.Module], in_channels: int, out_channels: int, *, blocks: int, stride: int
) -> nn.Sequential:
    """Return `blocks` blocks in a row; the first one changes the width and the image size."""
    first = block(in_channels, out_channels, stride)
    return nn.Sequential(first, *(block(out_channels, out_channels, 1) for _ in range(blocks - 1)))


class PreActConv(nn.Sequential):
    """BatchNorm, Relu, Conv: the unit DenseNets are made of."""

    def __init__(self, in_channels: int, out_channels: int, kernel: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(in_channels)
        self.relu = nn.ReLU()
        self.conv = conv(in_channels, out_channels, kernel)


class DenseLayer(nn.Module):
    """One layer of a dense block: returns its input with `growth` new channels appended."""

    def __init__(self, in_channels: int, growth: int) -> None:
        super().__init__()
        self.conv_1 = PreActConv(in_channels, 4 * growth, 1)
        self.conv_2 = PreActConv(4 * growth, growth, 3)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x, self.conv_2(self.conv_1(x))], dim=1)


class DenseNet86(nn.Module):
    """CondenseNet-86 of Huang 2017 with every group convolution dense, the paper's baseline.

    Three blocks of 14 layers with growth 8, 16, 32. Unlike the DenseNets of torchvision, a transition is only a
    pooling: no Conv, no halving of the channels.
    """

    def __init__(self, *, classes: int) -> None:
        super().__init__()
        self.features = nn.Sequential()
        channels = 16
        self.features.add_module("init_conv", conv(3, channels, 3))
        for block, growth in enumerate((8, 16, 32), start=1):
            if block > 1:
                self.features.add_module(f"transition_{block - 1}", nn.AvgPool2d(2))
            dense_block = nn.Sequential()
            for layer in range(1, 15):
                dense_block.add_module(f"denselayer_{layer}", DenseLayer(channels, growth))
                channels += growth
            self.features.add_module(f"denseblock_{block}", dense_block)
        self.features.add_module("norm_last", nn.BatchNorm2d(channels))
        self.features.add_module("relu_last", nn.ReLU())
        self.features.add_module("pool_last", nn.AdaptiveAvgPool2d(1))
        self.classifier = nn.Linear(channels, classes)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.classifier(self.features(x).flatten(1))
        return logits


class MobileNetV1(nn.Module):
    """MobileNet-224 of Howard 2017 at width 1: depthwise 3x3 and pointwise 1x1 Convs in turn."""

    # (out_channels, stride) of each separable convolution.
    SEPARABLE = ((64, 1), (128, 2), (128, 1), (256, 2), (256, 1), (512, 2), *[(512, 1)] * 5, (1024, 2), (1024, 1))

    def __init__(self, *, classes: int) -> None:
        super().__init__()
        channels = 32
        separable = [nn.Sequential(*_normalized(conv(3, channels, 3, stride=2)))]
        for out_channels, stride in self.SEPARABLE:
            depthwise = conv(channels, channels, 3, stride=stride, groups=channels)
            pointwise = conv(channels, out_channels, 1)
            separable += [nn.Sequential(*_normalized(depthwise), *_normalized(pointwise))]
            channels = out_channels
        self.model = nn.Sequential(*separable, nn.AdaptiveAvgPool2d(1))
        self.fc = nn.Linear(channels, classes)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.fc(self.model(x).flatten(1))
        return logits


def _normalized(layer: nn.Conv2d) -> tuple[nn.Conv2d, nn.BatchNorm2d, nn.ReLU]:
    return layer, nn.BatchNorm2d(layer.out_channels), nn.ReLU()


@dataclass(frozen=True)
class Architecture:
    """A named network: `build(classes)` returns it untrained, reading square RGB images of `image_size`."""

    build: Callable[[int], nn.Module]
    image_size: int
    default_classes: int


def _cifar(build: Callable[[int], nn.Module]) -> Architecture:
    return Architecture(build, image_size=32, default_classes=100)


def _imagenet(build: Callable[[int], nn.Module]) -> Architecture:
    return Architecture(build, image_size=224, default_classes=1000)


def _torchvision(name: str) -> Architecture:
    """Return the architecture torchvision calls `name`; torchvision is imported only when it is built."""

    def build(classes: int) -> nn.Module:
        try:
            import torchvision.models
        except (ImportError, RuntimeError) as error:  # RuntimeError: torchvision's wheel is for another torch
            raise ImportError(f"torchvision cannot be imported ({error})") from error
        model: nn.Module = torchvision.models.get_model(name, weights=None, num_classes=classes)
        return model

    return _imagenet(build)


ARCHITECTURES: dict[str, Architecture] = {
    "resnet110": _cifar(lambda classes: ResNet(3, (16, 32, 64), blocks=18, classes=classes)),
    "resnet164": _cifar(lambda classes: PreResNet(blocks=18, classes=classes)),
    "densenet86": _cifar(lambda classes: DenseNet86(classes=classes)),
    "resnet18": _imagenet(lambda classes: ImageNetResNet(BasicBlock, (2, 2, 2, 2), classes=classes)),
    "resnet34": _imagenet(lambda classes: ImageNetResNet(BasicBlock, (3, 4, 6, 3), classes=classes)),
    "resnet50": _imagenet(lambda classes: ImageNetResNet(Bottleneck, (3, 4, 6, 3), classes=classes)),
    "resnet101": _imagenet(lambda classes: ImageNetResNet(Bottleneck, (3, 4, 23, 3), classes=classes)),
    "mobilenet_v1": _imagenet(lambda classes: MobileNetV1(classes=classes)),
    "mobilenet_v2": _torchvision("mobilenet_v2"),
}
