"""The search over all forms: widths of spaces, dropped branches, groups and ranks of layers, in one menu."""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import onnx

from onnx_gconv.errors import ModelError
from onnx_gconv.model.constants import Constants
from onnx_gconv.model.network import Layer, Network
from onnx_gconv.model.spaces import find_spaces
from onnx_gconv.model.widths import Space, Widths, find_widths
from onnx_gconv.pipeline.choosing import Candidates, Reasons
from onnx_gconv.pipeline.facts import Facts
from onnx_gconv.pipeline.importances import layer_importance
from onnx_gconv.pipeline.job import Job
from onnx_gconv.pipeline.menus import Offer, Watch, menu_of, ranks_of, widths_of
from onnx_gconv.pipeline.settings import Settings
from onnx_gconv.pipeline.solving import Groupings
from onnx_gconv.pipeline.trial import Costs, Eliminations, Guide, Keeps, Narrowed, Ranked, RankErrors, WidthCosts
from onnx_gconv.plans import DroppedBranch, LowRank, PlannedSpace
from onnx_gconv.search.joint import JointResult
from onnx_gconv.search.menu import GroupCount, Menu
from onnx_gconv.search.target import width_step
from onnx_gconv.solve.grouping import Grouping, Order, canonical

GROUP_FACTORS = (1.0, 3.0)  # by which groups are dearer than they measure, to be tried
MEASURED_SHARES = (0.15, 0.4, 0.8)  # of the error without the space: the widths that are measured have about these


@dataclass(frozen=True, eq=False)
class Forms:
    """What spaces may become, and how: all that a search for any budget needs beside groups."""

    offer: Offer
    menu: Menu
    eliminations: Eliminations
    following: Mapping[str, float]  # by space: which share of all that recovery fits comes after its reader
    costs: tuple[Costs, ...]  # of widths, groups and ranks, by several measures of them
    rank_errors: RankErrors = field(default_factory=dict)

    def priced(self, costs: Costs) -> Menu:
        """Return the menu at these costs. Groups and ranks that were not measured, or should not be chosen, are not on it."""

        def numbers(layer: str, options: Sequence[GroupCount]) -> Iterator[GroupCount]:
            yield options[0]  # as it is
            for option in options[1:]:
                cost = costs.get(Ranked(layer, option.rank) if option.rank else (layer, option.groups), math.inf)
                if math.isfinite(cost):
                    yield replace(option, cost=cost)

        spaces = tuple(
            replace(row, options=tuple(replace(each, cost=costs[Narrowed(row.name, each.channels)]) for each in row.options))
            for row in self.menu.spaces
        )
        products = tuple(
            replace(product, options=tuple(numbers(product.names[0], product.options))) if product.names else product
            for product in self.menu.products
        )
        return replace(self.menu, spaces=spaces, products=products)

    def narrowed(self, menu: Menu, found: JointResult) -> tuple[tuple[PlannedSpace, ...], tuple[DroppedBranch, ...]]:
        """Return the spaces that a choice from the menu narrows, and the branches that it drops."""
        chosen = {row.name: row.options[index].channels for row, index in zip(menu.spaces, found.widths, strict=True)}
        spaces = [
            PlannedSpace(space.name, space.channels, tuple(self.eliminations[space.name].keep(chosen[space.name]).tolist()))
            for space in self.offer.spaces
            if 0 < chosen[space.name] < space.channels
        ]
        dropped = [branch for branch in self.offer.branches if all(chosen[name] == 0 for name in branch.spaces)]
        return tuple(spaces), tuple(DroppedBranch(branch.name) for branch in dropped)


def grouped(menu: Menu, found: JointResult) -> dict[str, int]:
    """Return the groups of every layer that gets more of them by a choice from the menu."""
    return {
        product.names[0]: product.options[index].groups
        for product, index in zip(menu.products, found.groups, strict=True)
        if product.names and index > 0 and not product.options[index].rank
    }


def ranked(menu: Menu, found: JointResult) -> tuple[LowRank, ...]:
    """Return the layers that get a low rank by a choice from the menu."""
    chosen = ((product, product.options[index]) for product, index in zip(menu.products, found.groups, strict=True))
    return tuple(LowRank(product.names[0], option.rank) for product, option in chosen if option.rank)


def find_forms(job: Job, guide: Guide, candidates: Candidates, groupings: Groupings) -> Forms:
    """Return what can be narrowed, dropped and grouped, with its costs by the calibration samples."""
    original, settings = job.original, job.settings
    constants, shapes = Constants(original.model), original.network.shapes
    spaces = find_spaces(original.model, constants, shapes)
    widths = find_widths(original.model, constants, spaces, shapes)
    open_spaces = [space for space in widths.spaces if _is_asked_for(space, original.model, settings)]
    eliminations, rank_errors = guide.errors(open_spaces, spaces, _ranked_layers(job, constants))
    offer = _offer(widths, [space for space in open_spaces if space.name in eliminations], job, candidates)
    offer = replace(offer, ranks={name: _ranks(job, name) for name in rank_errors})
    if not offer.spaces and not offer.groups and not offer.ranks:
        raise ModelError(
            "nothing in this model can be narrowed, dropped or grouped within these wishes.",
            hint="`onnx-gconv inspect` lists every Conv; --forms, --include and --width-step say what may change",
        )
    watch = None if job.facts.times is None else Watch(job.facts.times, job.facts.channel_block)
    menu = menu_of(original.model, original.network, spaces, offer, watch)
    readers = guide.following({space.readers[0] for space in offer.spaces})
    following = {space.name: readers.get(space.readers[0], 0.0) for space in offer.spaces}
    forms = Forms(offer, menu, eliminations, following, (), rank_errors)
    return replace(forms, costs=_families(forms, guide, groupings, settings))


def _ranked_layers(job: Job, constants: Constants) -> list[str]:
    """Return the layers that may have a low rank."""
    if "lowrank" not in job.settings.form_names:
        return []
    asked = [layer for layer in job.original.network.layers if is_asked_for([(layer.name, layer.label)], job.settings)]
    own = [layer.name for layer in asked if constants.readers(layer.weight) == {(layer.name, 1)} and _ranks(job, layer.name)]
    times = job.facts.times
    return [name for name in own if times is None or times.covers_ranks(name)]


def _ranks(job: Job, name: str) -> tuple[int, ...]:
    layer = next(layer for layer in job.original.network.layers if layer.name == name)
    step = job.settings.width_step or width_step(job.facts.target, layer.out_channels, block=job.facts.block)
    return ranks_of(layer, step)


def _offer(widths: Widths, spaces: list[Space], job: Job, candidates: Candidates) -> Offer:
    settings, target = job.settings, job.facts.target
    names = {space.name for space in spaces}
    branches = [branch for branch in widths.branches if "drop" in settings.form_names and {*branch.spaces} <= names]
    dropped = {name for branch in branches for name in branch.spaces}
    found = {
        space.name: widths_of(
            space,
            settings.width_step or width_step(target, space.channels, block=job.facts.block),
            is_narrowed="width" in settings.form_names,
            is_dropped=space.name in dropped,
        )
        for space in spaces
    }
    offered = tuple(space for space in spaces if len(found[space.name]) > 1)
    return Offer(offered, {space.name: found[space.name] for space in offered}, tuple(branches), candidates)


def _is_asked_for(space: Space, model: onnx.ModelProto, settings: Settings) -> bool:
    """Return whether every node that would change is named by --include, and none by --exclude."""
    labels = {node.output[0]: (node.output[0], node.name) for node in model.graph.node if node.output}
    return is_asked_for([labels[name] for name in (*space.writers, *space.readers, *space.passing)], settings)


def is_asked_for(touched: Sequence[tuple[str, str]], settings: Settings) -> bool:
    """Return whether each of these nodes, by name and label, is named by --include, and none by --exclude."""
    included, excluded = settings.include, settings.exclude
    if included is not None and not all(any(re.search(included, name) for name in names) for names in touched):
        return False
    return excluded is None or not any(re.search(excluded, name) for names in touched for name in names)


def _families(forms: Forms, guide: Guide, groupings: Groupings, settings: Settings) -> tuple[Costs, ...]:
    """Return the costs to try: the errors of elimination; where groups are beside the widths, also both as measured at the outputs.

    What a layer's groups cost alone says too little of what many grouped layers cost together, so they are tried dearer as well.
    Ranks are not measured at the outputs: they are on the menu by errors only.
    """
    curves: Costs = {
        Narrowed(space.name, width): forms.eliminations[space.name].error(width)
        for space in forms.offer.spaces
        for width in forms.offer.widths[space.name]
    }
    ranks = [Ranked(name, rank) for name, ranks in forms.offer.ranks.items() for rank in ranks]
    curves = {**curves, **{each: forms.rank_errors[each.layer][each.rank] for each in ranks}}
    # A branch is dropped once, though it has several spaces: the last one, which its last Conv reads, pays.
    free = {name for branch in forms.offer.branches for name in branch.spaces if not _is_last(forms, branch.name, name)}
    curves = {key: 0.0 if isinstance(key, Narrowed) and not key.channels and key.space in free else c for key, c in curves.items()}
    if not forms.offer.groups:
        return (curves,)
    groups, some_widths = guide.costs(groupings, _keeps(forms, curves))
    widths = _between_measured(forms, curves, some_widths)
    never = {**curves, **dict.fromkeys(groups, math.inf)}
    return (never, *({**widths, **{key: factor * cost for key, cost in groups.items()}} for factor in GROUP_FACTORS))


def _is_last(forms: Forms, branch: str, space: str) -> bool:
    return any(each.name == space and branch in each.readers for each in forms.offer.spaces)


def _keeps(forms: Forms, curves: Costs) -> Keeps:
    """Return the channels that are left at a few widths of each space, which are to be measured."""
    keeps: dict[str, dict[tuple[str, int], Order]] = {}
    for space in forms.offer.spaces:
        if len(space.readers) == 1 and space.is_alone:
            errors = {width: curves[Narrowed(space.name, width)] for width in forms.offer.widths[space.name]}
            near = {min(errors, key=lambda width: abs(errors[width] - share * max(errors.values()))) for share in MEASURED_SHARES}
            chosen = sorted(width for width in near if 0 < width < space.channels)
            elimination = forms.eliminations[space.name]
            keeps.setdefault(space.readers[0], {}).update({(space.name, width): elimination.keep(width) for width in chosen})
    return keeps


def _between_measured(forms: Forms, curves: Costs, measured: WidthCosts) -> Costs:
    """Return what all widths cost at the outputs: between the few that were measured, as the errors of each space go."""
    ratios = [cost / curves[Narrowed(*key)] for key, cost in measured.items() if curves[Narrowed(*key)] > 0]
    usual = float(np.median(ratios)) if ratios else 1.0
    found: dict[tuple[str, int] | Narrowed, float] = {}
    for space in forms.offer.spaces:
        known = sorted((curves[Narrowed(*key)], cost) for key, cost in measured.items() if key[0] == space.name)
        errors_known, costs_known = (
            [0.0, *(error for error, _ in known)],
            np.maximum.accumulate([0.0, *(cost for _, cost in known)]),
        )
        for width in forms.offer.widths[space.name]:
            error = curves[Narrowed(space.name, width)]
            slope = costs_known[-1] / errors_known[-1] if errors_known[-1] > 0 else usual
            inside = error <= errors_known[-1]
            found[Narrowed(space.name, width)] = float(np.interp(error, errors_known, costs_known)) if inside else slope * error
    return found


def grouping_of(
    layer: Layer,
    groups: int,
    sides: tuple[Order, Order],
    groupings: Groupings,
    model: onnx.ModelProto,
    facts: Facts,
    settings: Settings,
) -> Grouping:
    """Return a layer's grouping among the inputs and outputs that are left of it; solved anew where some are gone."""
    ins, outs = sides
    if len(ins) == layer.in_channels and len(outs) == layer.out_channels:
        return groupings[layer.name, groups]
    matrix = layer_importance(Constants(model), layer, settings.criterion, facts)
    found = settings.how_to_solve.solve_each(np.ascontiguousarray(matrix[np.ix_(outs, ins)]), (groups,), existing=1)[groups]
    in_order, out_order = canonical(groups, ins[found.in_order], outs[found.out_order])
    return Grouping(groups, in_order, out_order, found.kept)


def untouched(network: Network, touched: set[str], skipped: Reasons) -> Reasons:
    """Return why each Conv that no form changes is as it is."""
    reasons = {layer.name: "the budget is met without it" for layer in network.layers}
    return {name: reason for name, reason in (reasons | skipped).items() if name not in touched}
