"""Borrowed group configurations: the numbers of groups of one of our plans, or of the paper's authors' JSON."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from onnx_gconv.errors import PlanError
from onnx_gconv.model.network import Layer
from onnx_gconv.plans import from_json, read_json


def read_group_config(path: Path, layers: Sequence[Layer]) -> dict[str, int]:
    """Return the number of groups by layer name; only the numbers are borrowed, the channels are ordered anew.

    The authors' file is `{"module.layer1.0.conv1": {"G": 8, "F": 64, "C": 64}}`: modules of a PyTorch model. They are
    matched by the weight's name (`layer1.0.conv1.weight`), else by the exporter's node name (`/layer1/layer1.0/conv1/Conv`).
    """
    data = read_json(path)
    if isinstance(data, dict) and "format" in data:
        wanted = {layer.name: layer.groups for layer in from_json(data, str(path)).layers}
        return {_require(name, layers, {layer.name: layer for layer in layers}, path).name: g for name, g in wanted.items()}
    if not isinstance(data, dict) or not all(
        isinstance(entry, dict) and isinstance(entry.get("G"), int) for entry in data.values()
    ):
        raise PlanError(
            f"'{path}' is neither a plan nor a group configuration.",
            hint='a configuration looks like {"module.layer1.0.conv1": {"G": 8, "F": 64, "C": 64}}',
        )
    by_module = {module: layer for layer in layers for module in module_names(layer)}
    result = {}
    for module, entry in data.items():
        if entry["G"] == 1:
            continue
        layer = _require(module.removeprefix("module."), layers, by_module, path)
        for key, channels in (("F", layer.out_channels), ("C", layer.in_channels)):
            if entry.get(key, channels) != channels:
                raise PlanError(
                    f"'{path}': {module!r} has {key}={entry[key]}, but {layer.label!r} of the model has {channels}.",
                    hint="the configuration is for another model",
                )
        if entry["G"] not in layer.legal_groups:
            raise PlanError(
                f"'{path}': {module!r} asks for {entry['G']} groups, but {layer.label!r} allows only "
                f"{', '.join(map(str, layer.legal_groups))}.",
                hint="edit the configuration",
            )
        result[layer.name] = int(entry["G"])
    return result


def module_names(layer: Layer) -> list[str]:
    """Return what the layer's PyTorch module may be called, by its weight and by its node."""
    names = [layer.weight.removesuffix(".weight").removeprefix("module.")]
    scopes = [scope for scope in layer.label.split("/")[:-1] if scope]
    if not scopes:
        return names
    # The exporter writes /layer1/layer1.0/conv1/Conv: a scope that the next one repeats says nothing new.
    parts = [scope for scope, following in zip(scopes, [*scopes[1:], ""], strict=True) if not following.startswith(f"{scope}.")]
    return [*names, ".".join(parts)]


def _require(name: str, layers: Sequence[Layer], found: Mapping[str, Layer], path: Path) -> Layer:
    if name not in found:
        example = module_names(layers[0])[0] if layers else "none"
        raise PlanError(
            f"'{path}': the model has no layer {name!r} that can be grouped.",
            hint=f"this model's layers are called like {example!r}; see `onnx-gconv inspect`",
        )
    return found[name]
