"""Which numbers of groups each layer may have, and choosing one: by rule, or by a search under a budget.

`skipped` collects, by Conv, why one is skipped: every Conv of the model ends in the plan or there.
"""

import math
import re
from collections.abc import Mapping, Sequence

from onnx_gconv.model.network import Layer, Network
from onnx_gconv.pipeline.facts import Facts
from onnx_gconv.pipeline.group_config import read_group_config
from onnx_gconv.pipeline.settings import CostName, Settings, as_path
from onnx_gconv.pipeline.solving import Groupings
from onnx_gconv.search.latency import LayerTimes
from onnx_gconv.search.menu import GroupCount, Menu, Product, Side
from onnx_gconv.search.rules import by_group_channels, uniform
from onnx_gconv.search.table import Option, Row, Table
from onnx_gconv.search.target import is_aligned

Reasons = dict[str, str]  # by Conv, why it is skipped
Candidates = dict[str, tuple[int, ...]]  # by layer name: the present number of groups first

# What a layer of which nothing is kept costs at most, so that costs stay finite.
LEAST_KEPT = 1e-9


def candidates(layers: Sequence[Layer], settings: Settings, facts: Facts, skipped: Reasons) -> Candidates:
    """Return the numbers of groups that each layer may have."""
    allowed: Candidates = {}
    block = facts.channel_block
    for layer in layers:
        names = (layer.name, layer.label)
        if settings.include is not None and not any(re.search(settings.include, name) for name in names):
            skipped[layer.name] = "not named by --include"
        elif settings.exclude is not None and any(re.search(settings.exclude, name) for name in names):
            skipped[layer.name] = "named by --exclude"
        else:
            smallest = min(layer.in_channels, layer.out_channels)
            enough = [g for g in layer.legal_groups[1:] if smallest // g >= settings.min_group_channels]
            aligned = [g for g in enough if is_aligned(g, block, in_channels=layer.in_channels, out_channels=layer.out_channels)]
            timed = [g for g in aligned if facts.times is None or facts.times.covers(layer.name)]
            if timed:
                allowed[layer.name] = (layer.groups, *timed)
            elif aligned:
                skipped[layer.name] = "no number of groups of it has been timed"
            elif enough:
                skipped[layer.name] = f"no number of groups leaves a multiple of {block} channels per group (target {facts.target})"
            else:
                skipped[layer.name] = (
                    f"every legal number of groups leaves fewer than {settings.min_group_channels} channels per group"
                )
    return allowed


def by_rule(layers: Sequence[Layer], allowed: Candidates, settings: Settings, skipped: Reasons) -> dict[str, int] | None:
    """Return the groups by rule, or None when a search is to choose them."""
    if settings.rule is None:
        return None
    config = read_group_config(as_path(settings.group_config), layers) if settings.group_config is not None else {}
    chosen: dict[str, int] = {}
    for layer in layers:
        if layer.name not in allowed:
            continue
        answer = _answer(layer, allowed[layer.name], settings, config)
        if isinstance(answer, int) and answer > layer.groups:
            chosen[layer.name] = answer
        else:
            skipped[layer.name] = answer if isinstance(answer, str) else f"it has {layer.groups} groups already"
    return chosen


def _answer(layer: Layer, legal: tuple[int, ...], settings: Settings, config: Mapping[str, int]) -> int | str:
    if settings.groups is not None:
        return uniform(legal, settings.groups)
    if settings.max_group_channels is not None:
        return by_group_channels(legal, settings.max_group_channels, in_channels=layer.in_channels, out_channels=layer.out_channels)
    return uniform(legal, config[layer.name]) if layer.name in config else "not in the group configuration"


def option_table(
    network: Network, allowed: Candidates, groupings: Groupings, settings: Settings, facts: Facts, skipped: Reasons
) -> Table:
    """Return what every number of groups of every layer costs and saves."""
    rows = _rows(network, allowed, groupings, settings.cost_name, facts, skipped)
    dense = [row.options[0] for row in rows]
    return Table(
        tuple(rows),
        network.count.params - sum(option.params for option in dense) + _most_bias_copies(network.layers),
        (network.count.macs or 0) - sum(option.macs for option in dense),  # 0 throughout where MACs are not known
        round(facts.times.dense_ms * 1e6) - sum(option.latency_ns for option in dense) if facts.times is not None else 0,
    )


def table_menu(table: Table, layers: Sequence[Layer]) -> Menu:
    """Return a table as a menu in which no space has a choice."""
    named = {layer.name: layer for layer in layers}

    def product(row: Row) -> Product:
        layer, first = named[row.names[0]], row.options[0]
        pairs, times = layer.in_channels * layer.out_channels, {option.groups: option.latency_ns for option in row.options}
        return Product(
            row.names,
            Side(layer.in_channels),
            Side(layer.out_channels),
            first.params * first.groups // pairs,
            first.macs * first.groups // pairs,
            tuple(GroupCount(option.groups, option.cost) for option in row.options),
            lambda ins, outs, groups: times[groups],
        )

    fixed = table.fixed_params, table.fixed_macs, table.fixed_latency_ns
    return Menu((), tuple(map(product, table.rows)), (), *fixed)


def layer_ns(times: LayerTimes, layer: Layer, groups: int) -> int:
    """Return what a layer takes with so many groups and all its channels, in nanoseconds."""
    return times.layer_ns(layer.name, layer.in_channels, layer.out_channels, groups)


def pruning_cost(kept: float, cost: CostName) -> float:
    """Return what a layer that keeps this share of its importance costs.

    `share` is the paper's: 1 - kept. It calls a layer that lost everything only twice as bad as one that lost half, so a
    search likes to wipe out a few layers. `log` is -log(kept): the signal passes the layers one after the other, shares
    multiply, and no layer can be wiped out cheaply. Costs that are measured take the place of these once there are groupings
    to measure.
    """
    return 1.0 - kept if cost == "share" else -math.log(max(kept, LEAST_KEPT))


def _rows(network: Network, allowed: Candidates, groupings: Groupings, cost: CostName, facts: Facts, skipped: Reasons) -> list[Row]:
    """Return the decisions of a search. Layers that share a weight are one: the weight shrinks once, if all agree."""
    by_weight: dict[str, list[Layer]] = {}
    for layer in network.layers:
        by_weight.setdefault(layer.weight, []).append(layer)
    rows = []
    for sharing in by_weight.values():
        free = [layer for layer in sharing if layer.name in allowed]
        if not free:
            continue
        if len(free) < len(sharing) or len({layer.groups for layer in sharing}) > 1:
            skipped.update({layer.name: "it shares its weight with a Conv that cannot be grouped alike" for layer in free})
            continue
        first = sharing[0]
        options = []
        for groups in allowed[first.name]:
            price = 0.0 if groups == first.groups else pruning_cost(groupings[first.name, groups].kept, cost)
            macs = sum(layer.macs or 0 for layer in sharing) * first.groups // groups if network.count.macs is not None else 0
            params = first.weights * first.groups // groups
            options.append(Option(groups, price * len(sharing), params, macs, _latency_ns(sharing, groups, facts)))
        rows.append(Row(tuple(layer.name for layer in sharing), tuple(options)))
    return rows


def _latency_ns(sharing: Sequence[Layer], groups: int, facts: Facts) -> int:
    return 0 if facts.times is None else sum(layer_ns(facts.times, layer, groups) for layer in sharing)


def _most_bias_copies(layers: Sequence[Layer]) -> int:
    """Return how many parameters shared biases can add at most, when every reader wants its own order."""
    copies = sum(layer.out_channels for layer in layers if layer.bias)
    stored = {layer.bias: layer.out_channels for layer in layers if layer.bias and not layer.bias_elsewhere}
    return copies - sum(stored.values())
