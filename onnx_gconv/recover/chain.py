"""Convs in a row fitted together, through the activations between them, so that what the last gives is best.

Fitted one by one, each gives what it gave in the dense model, though half of its channels may be gone. Fitted together, the
channels that are left take over from the others.
"""

import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import numpy as np

from onnx_gconv.model.patches import Window, window_of
from onnx_gconv.recover.fit import Array, Fit
from onnx_gconv.recover.flow import Flow
from onnx_gconv.recover.newton import Chain, Channels, Link, Seen
from onnx_gconv.recover.normal import Coefficients
from onnx_gconv.recover.site import Site

LONGEST = 3  # Convs in a chain
ROUNDS = 4
WORTHWHILE = 0.015  # of the loss: a round that brings less is the last
STEPS = 4
UNFOLDED_BYTES = 2**28  # patches of all Convs in all the samples that are looked at
POSITIONS = 60_000  # behind the first that are looked at, at most
LEAST_SAMPLES = 48  # that these are to come from: of images too large for that, a crop each is looked at
PARTS = 8  # that the samples are shared out in: not as many as threads, so that sums have the same bits with any number of these


def find_chains(flow: Flow, sites: Sequence[Site]) -> dict[str, tuple[Site, ...]]:
    """Return the Convs that are fitted once more together with a site, by its name: those before it, in their order.

    Each of them is read by the next one alone, through an activation or none. A depthwise Conv has no channels of its own: where
    a Conv behind it is the end of a chain with it, it is not fitted with those before it.
    """
    ends = {_end(site, flow): site for site in sites if _can_lead(site)}
    before = {site.name: ends[site.source] for site in sites if site.source in ends and _can_follow(site)}
    followed = {site.name for site in before.values()}

    def chain(site: Site) -> tuple[Site, ...]:
        found: list[Site] = []
        while site.name in before and len(found) < LONGEST - 1:
            site = before[site.name]
            found.insert(0, site)
        return tuple(found)

    return {site.name: chain(site) for site in sites if site.name in before and not (_is_depthwise(site) and site.name in followed)}


def _can_lead(site: Site) -> bool:
    return _can_follow(site) and not site.shortcut


def _can_follow(site: Site) -> bool:
    # Steps of Gauss-Newton would not keep a rank.
    return site.node.op_type == "Conv" and site.has_intercept and site.inputs.size > 0 and not site.rank


def _is_depthwise(site: Site) -> bool:
    return len(site.inputs) > 1 and site.inputs.shape[1] == 1


def _end(site: Site, flow: Flow) -> str:
    """Return the tensor that the next Conv of a chain would read: behind the normalization and the activation."""
    end = site.after.output if site.after is not None else site.name
    if site.clamp is not None:
        end = flow.nodes[flow.readers[end][0]].output[0]
    readers = flow.readers.get(end, [])
    return end if len(readers) == 1 and end not in flow.outputs else ""


def linked(links: Sequence[Link]) -> list[Link]:
    """Return the Convs of a chain with those of their outputs only that the next one reads."""
    found = [links[-1]]
    for link in reversed(links[:-1]):
        found.insert(0, _of_outputs(link, found[0].fit.site.inputs))
    return found


def _of_outputs(link: Link, left: Channels) -> Link:
    site, at = link.fit.site, link.at
    if site.outputs.size == left.size:
        return link
    if len(site.outputs) == 1:
        places = np.isin(site.outputs[0], left)
        fewer = replace(site, outputs=site.outputs[:, places])
        return replace(link, fit=replace(link.fit, site=fewer), at=Coefficients(at.weight[:, :, places], at.intercept[:, places]))
    assert site.outputs.shape[1] == 1, "of what has groups, only depthwise Convs lose single channels"
    blocks = np.isin(site.outputs[:, 0], left)
    total = replace(link.total, **{name: getattr(link.total, name)[blocks] for name in ("u", "t", "uu", "ut", "tt")})
    fewer = replace(site, outputs=site.outputs[blocks], inputs=site.inputs[blocks])
    return Link(replace(link.fit, site=fewer), Coefficients(at.weight[blocks], at.intercept[blocks]), total)


@dataclass(frozen=True)
class Scene:
    """How much a chain looks at: so many samples, and of each all places or a box of those that no padding reaches."""

    samples: int
    windows: tuple[Window, ...]  # as they move over what is looked at
    outer: tuple[int, ...]  # places of the last in a whole image
    box: tuple["_Range", ...] | None

    @classmethod
    def of(cls, fits: Sequence[Fit], size: tuple[int, ...]) -> "Scene | None":
        """Return the scene for images of this size; None if even one would take too much memory."""
        windows: list[Window] = []
        sizes = [size]
        for fit in fits:
            windows.append(window_of(fit.site.node, fit.kernel, sizes[-1]))
            sizes.append(windows[-1].places(sizes[-1]))
        box = None
        seen = sizes[1:]
        if math.prod(sizes[1]) > POSITIONS // LEAST_SAMPLES:
            side = int((POSITIONS // LEAST_SAMPLES) ** (1 / len(size)))
            ranges = tuple(_Range.of(windows, length, axis, side) for axis, length in enumerate(size))
            if all(each.count > 0 for each in ranges):
                windows, box = [window.unpadded() for window in windows], ranges
                seen = list(zip(*(each.spans for each in ranges), strict=True))
        # Of what the last gives, its goal is held as well.
        more = [2] * (len(fits) - 1) + [3]
        numbers = sum(math.prod(places) * _numbers(fit, held) for places, fit, held in zip(seen, fits, more, strict=True))
        samples = min(UNFOLDED_BYTES // (4 * numbers), max(1, POSITIONS // math.prod(seen[0])))
        return cls(samples, tuple(windows), sizes[-1], box) if samples else None

    def seen(
        self, last: Fit, images: Array, dense: Array, shortcut: Array | None, *, samples: int, rng: np.random.Generator
    ) -> Seen:
        """Return what is looked at in the first samples of a batch."""
        shape = (len(images), last.site.channels, *self.outer)
        some = (slice(samples), slice(None))
        spans = [] if self.box is None else [each.draw(rng) for each in self.box]
        pixels, places = (*some, *(pixels for pixels, _ in spans)), (*some, *(places for _, places in spans))
        if dense.shape == shape and (shortcut is None or shortcut.shape == shape):  # most of it may not be looked at
            dense, shortcut, shape = dense[places], None if shortcut is None else shortcut[places], dense[places].shape
            places = ()
        goal, added = last.goal(dense, shortcut, shape), last.added(dense, shortcut, shape)
        # Copies: a view would keep the whole batch.
        return Seen(images[pixels].copy(), goal[places].copy(), None if added is None else added[places].copy())


@dataclass(frozen=True)
class _Range:
    """On one axis: which places of the last can begin a box, how many it has, and what these see of the image."""

    begin: int
    end: int  # the last that can begin it, and one
    spans: tuple[int, ...]  # places of each Conv that the box has
    length: int  # pixels of the image
    stride: int  # of the image's pixels, from one place of the last to the next
    padding: int  # before the pixels that its first place sees

    @property
    def count(self) -> int:
        return self.spans[-1]

    @classmethod
    def of(cls, windows: Sequence[Window], length: int, axis: int, side: int) -> "_Range":
        """Return the range with `side` places of the first at most, but one of the last at least."""
        each = [(window.begins[axis], window.strides[axis], window.extents[axis]) for window in windows]
        # The first and the last place of each Conv that see no padding, and nothing that sees some.
        begin, end = 0, length - 1
        for padding, stride, extent in each:
            begin, end = -(-(begin + padding) // stride), (end + padding - extent + 1) // stride

        def spans(count: int) -> list[int]:
            """Return how many pixels, and places of each Conv, so many places of the last see."""
            found = [count]
            for _, stride, extent in reversed(each):
                found.insert(0, (found[0] - 1) * stride + extent)
            return found

        strides = math.prod(stride for _, stride, _ in each[1:])
        count = min(max(1, (side - spans(1)[1]) // strides + 1), end - begin + 1)
        first = 0  # pixel that place 0 of the last sees first
        for padding, stride, _ in reversed(each):
            first = first * stride - padding
        pixels, *places = spans(count)
        return cls(begin, end - count + 2, tuple(places), pixels, strides * each[0][1], -first)

    def draw(self, rng: np.random.Generator) -> tuple[slice, slice]:
        """Return some pixels of the image, and the places of the last that see them."""
        place = int(rng.integers(self.begin, self.end))
        pixel = place * self.stride - self.padding
        return slice(pixel, pixel + self.length), slice(place, place + self.count)


def _numbers(fit: Fit, more: int) -> int:
    """Return how many numbers are held for each place: patches, and `more` of each output."""
    return len(fit.site.inputs) * (fit.unknowns + 1) + more * fit.site.outputs.size


def shared_out(total: int, count: int) -> list[int]:
    """Return `count` numbers that are as even as can be and add up to the total."""
    return [total * (each + 1) // count - total * each // count for each in range(count)]


def in_parts(seen: Sequence[Seen]) -> list[Seen]:
    """Return what is seen in some batches as a few parts of about as many samples."""
    images, goal = (np.concatenate([getattr(each, name) for each in seen]) for name in ("images", "goal"))
    added = [each.added for each in seen if each.added is not None]
    together = np.concatenate(added) if added else None
    count = min(PARTS, len(images))
    ends = np.cumsum(shared_out(len(images), count))
    spans = [slice(start, end) for start, end in zip([0, *ends[:-1]], ends, strict=True)]
    return [Seen(images[span], goal[span], None if together is None else together[span]) for span in spans]


def fit_chain(
    links: Sequence[Link], windows: Sequence[Window], seen: Sequence[Seen], pool: ThreadPoolExecutor
) -> list[Coefficients] | None:
    """Return better coefficients of all Convs, as found on these samples; None if there are none.

    The last samples are held back: weights that are no better on them were learnt by heart.
    """
    if len(seen) < 2:
        return None
    chain = Chain(links, windows, seen[:-1], pool)
    held = chain.part(seen[-1])
    found, least = None, chain.loss_on(held)
    for _ in range(ROUNDS):
        if not chain.improve(STEPS) or not (loss := chain.loss_on(held)) < least:
            break
        before, least = least, loss
        found = chain.coefficients()
        if loss > (1 - WORTHWHILE) * before:
            break
    return found
