"""Which layers share partitions, for --gathers shared and none, and their groupings."""

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from onnx_gconv.model.constants import Constants
from onnx_gconv.model.network import Layer
from onnx_gconv.model.spaces import Spaces, find_spaces
from onnx_gconv.model.transposed import CONVOLVING
from onnx_gconv.pipeline.choosing import Candidates, Reasons
from onnx_gconv.pipeline.gathers import SIDES, SharedSides
from onnx_gconv.pipeline.importances import layer_importance
from onnx_gconv.pipeline.job import Job
from onnx_gconv.pipeline.settings import GathersName
from onnx_gconv.pipeline.solving import Groupings
from onnx_gconv.rewrite.placement import only_atom
from onnx_gconv.search.orders import SideName
from onnx_gconv.solve.coupled import Level, SharedAxis, Term, solve_coupled
from onnx_gconv.solve.grouping import Grouping, canonical, kept_share

JOINED = "it joins channels of several tensors, which cannot be grouped without a Gather"  # unless all of them stay in place


class _SharedAxes:
    """The channel axes of a model: who shares a partition with whom."""

    def __init__(
        self, spaces: Spaces, layers: Sequence[Layer], sources: Mapping[str, str], *, share_all: bool, joins: bool
    ) -> None:
        self.sites: list[SharedAxis] = []
        self.common: set[int] = set()  # sites of atoms: all that read or write one have the same
        self._spaces = spaces
        self._share_all = share_all
        self._by_key: dict[tuple[object, ...], int] = {}
        self._sources = sources
        users: dict[int, int] = {}
        for layer in layers:
            for tensor in (sources[layer.name], layer.name):
                atom = only_atom(spaces, tensor)
                if atom is not None:
                    users[atom] = users.get(atom, 0) + 1
        # A Conv that has groups already and keeps them has them as they are: what it reads and writes stays in place.
        self._in_place = spaces.pinned | {
            atom for name in spaces.blocked for tensor in (sources[name], name) if (atom := only_atom(spaces, tensor)) is not None
        }
        # Groups of what a Concat joins lie side by side only if all that it joins stays in place.
        self._joined = {
            source for layer in layers if joins and (source := sources[layer.name]) in spaces.axes and _is_joined(spaces, source)
        }
        joined = {atom for tensor in self._joined for atom in spaces.axes[tensor].atoms}
        self._in_place |= joined if share_all else set()
        # A space that one Conv writes and one reads lies inside a block; a residual stream has more of them.
        self._streams = {atom for atom, count in users.items() if count > 2}

    def of(self, layer: Layer, side: SideName) -> int | None:
        """Return the site of one side of a layer; None where no partition can do without a Gather, and none is allowed."""
        tensor = self._sources[layer.name] if side == "in" else layer.name
        channels = layer.in_channels if side == "in" else layer.out_channels
        atom = only_atom(self._spaces, tensor)
        if atom is None and self._share_all:
            return self._common(tensor, SharedAxis(channels, fixed=True)) if tensor in self._joined else None
        if atom is None:
            return self._site((layer.name, side), SharedAxis(channels))
        if atom in self._in_place and self._share_all:
            return self._common(atom, SharedAxis(channels, fixed=True))
        if self._share_all or (atom in self._streams and atom not in self._in_place):
            return self._common(atom, SharedAxis(channels))
        return self._site((layer.name, side), SharedAxis(channels))

    def _common(self, atom: int | str, site: SharedAxis) -> int:
        number = self._site((atom,), site)
        self.common.add(number)
        return number

    def _site(self, key: tuple[object, ...], site: SharedAxis) -> int:
        if key not in self._by_key:
            self._by_key[key] = len(self.sites)
            self.sites.append(site)
        return self._by_key[key]


def _is_joined(spaces: Spaces, tensor: str) -> bool:
    """Return whether a tensor has the channels of several others, each channel once."""
    axis = spaces.axes[tensor]
    return axis.repeat == 1 and len(axis.atoms) > 1


def solve_jointly(
    job: Job, allowed: Candidates, gathers: GathersName, skipped: Reasons, *, joins: bool
) -> tuple[Candidates, Groupings, SharedSides]:
    """Return the candidates that a joint solution has, their groupings, and which sides of them have a partition in common.

    Note in `skipped` who has none.
    """
    model, network, settings = job.original.model, job.original.network, job.settings
    progress = job.listener.phase("solving")
    constants = Constants(model)
    spaces = find_spaces(model, constants, network.shapes)
    sources = {node.output[0]: node.input[0] for node in model.graph.node if node.op_type in CONVOLVING}
    layers = [layer for layer in network.layers if layer.name in allowed and layer.groups == 1]
    grouped = (layer for layer in network.layers if layer.name in allowed and layer.groups > 1)
    skipped.update({layer.name: "its groups cannot be coupled with others'" for layer in grouped})
    sites = _SharedAxes(spaces, layers, sources, share_all=gathers == "none", joins=joins)
    terms: dict[str, Term] = {}
    for layer in layers:
        out_site, in_site = sites.of(layer, "out"), sites.of(layer, "in")
        if out_site is None or in_site is None:
            skipped[layer.name] = JOINED
        else:
            matrix = layer_importance(constants, layer, settings.criterion, job.facts)
            terms[layer.name] = Term(matrix, out_site, in_site)
    progress(0, 1, "all layers together")
    most = settings.groups or max((max(allowed[name]) for name in terms), default=1)
    starts = 2 ** (2 + settings.effort)

    levels = solve_coupled(
        sites.sites, list(terms.values()), most_groups=most, seed=settings.seed, only=settings.groups, starts=starts
    )
    progress(1, 1, "all layers together")
    groupings: Groupings = {}
    candidates: Candidates = {}
    for layer in layers:
        if layer.name in terms:
            found = _groupings(terms[layer.name], levels, allowed[layer.name])
            groupings |= {(layer.name, grouping.groups): grouping for grouping in found}
            if found:
                candidates[layer.name] = (layer.groups, *(grouping.groups for grouping in found))
            else:
                skipped.setdefault(layer.name, "no number of groups fits all the Convs that share its channels")
    both = {(name, side): term.in_site if side == "in" else term.out_site for name, term in terms.items() for side in SIDES}
    return candidates, groupings, {key: site for key, site in both.items() if site in sites.common}


def _groupings(term: Term, levels: Iterable[Level], numbers: tuple[int, ...]) -> list[Grouping]:
    result = []
    for level in levels:
        if level.groups in numbers[1:] and {term.out_site, term.in_site} <= level.labels.keys():
            ins, outs = (np.argsort(level.labels[site], kind="stable") for site in (term.in_site, term.out_site))
            orders = canonical(level.groups, ins, outs)
            result.append(Grouping(level.groups, *orders, kept_share(term.matrix, level.groups, *orders)))
    return result
