"""Two Convs fitted together, through the activation between them, so that what the second gives is best.

Fitted one by one, the first gives what it gave in the dense model, though half of its channels may be gone. Fitted together, the
channels that are left take over from the others.
"""

import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import numpy as np

from onnx_gconv.recover.fit import Array, Fit
from onnx_gconv.recover.flow import Flow
from onnx_gconv.recover.newton import Channels, Half, Pair, Seen
from onnx_gconv.recover.normal import Coefficients
from onnx_gconv.recover.patches import Window, window_of
from onnx_gconv.recover.site import Site

ROUNDS = 2
STEPS = 4
UNFOLDED_BYTES = 2**28  # patches of both Convs in all the samples that are looked at
POSITIONS = 60_000  # behind the first that are looked at, at most
LEAST_SAMPLES = 48  # that these are to come from: of images too large for that, a crop each is looked at
PARTS = 8  # that the samples are shared out in: not as many as threads, so that sums have the same bits with any number of these


def find_pairs(flow: Flow, sites: Sequence[Site]) -> dict[str, Site]:
    """Return, by the second's name, the first Conv of every pair: one that only the other reads, through an activation or none."""
    ends = {_end(site, flow): site for site in sites if _can_lead(site)}
    return {site.name: ends[site.source] for site in sites if site.source in ends and _can_follow(site)}


def _can_lead(site: Site) -> bool:
    return _can_follow(site) and not site.shortcut


def _can_follow(site: Site) -> bool:
    return not site.is_gemm and site.has_intercept and site.inputs.size > 0


def _end(site: Site, flow: Flow) -> str:
    """Return the tensor that the second Conv of a pair would read: behind the normalization and the activation."""
    end = site.after.output if site.after is not None else site.name
    if site.clamp is not None:
        end = flow.nodes[flow.readers[end][0]].output[0]
    readers = flow.readers.get(end, [])
    return end if len(readers) == 1 and end not in flow.outputs else ""


def of_outputs(half: Half, left: Channels) -> Half:
    """Return the first Conv of a pair with those of its outputs only that the second reads."""
    site, at = half.fit.site, half.at
    if site.outputs.size == left.size:
        return half
    if len(site.outputs) == 1:
        places = np.isin(site.outputs[0], left)
        fewer = replace(site, outputs=site.outputs[:, places])
        return replace(half, fit=replace(half.fit, site=fewer), at=Coefficients(at.weight[:, :, places], at.intercept[:, places]))
    assert site.outputs.shape[1] == 1, "of what has groups, only depthwise Convs lose single channels"
    blocks = np.isin(site.outputs[:, 0], left)
    total = replace(half.total, **{name: getattr(half.total, name)[blocks] for name in ("u", "t", "uu", "ut", "tt")})
    fewer = replace(site, outputs=site.outputs[blocks], inputs=site.inputs[blocks])
    return Half(replace(half.fit, site=fewer), Coefficients(at.weight[blocks], at.intercept[blocks]), total)


@dataclass(frozen=True)
class Scene:
    """How much a pair looks at: so many samples, and of each all places or a box of those that no padding reaches."""

    samples: int
    windows: tuple[Window, Window]  # as they move over what is looked at
    outer: tuple[int, ...]  # places of the second in a whole image
    box: tuple["_Range", ...] | None

    @classmethod
    def of(cls, first: Fit, second: Fit, size: tuple[int, ...]) -> "Scene | None":
        """Return the scene for images of this size; None if even one would take too much memory."""
        window1 = window_of(first.site.node, first.kernel, size)
        window2 = window_of(second.site.node, second.kernel, window1.places(size))
        inner, outer = window1.places(size), window2.places(window1.places(size))
        windows, box = (window1, window2), None
        if math.prod(inner) > POSITIONS // LEAST_SAMPLES:
            side = int((POSITIONS // LEAST_SAMPLES) ** (1 / len(size)))
            ranges = [_Range.of(window1, window2, length, axis, side) for axis, length in enumerate(size)]
            if all(each.count > 0 for each in ranges):
                windows, box = (window1.unpadded(), window2.unpadded()), tuple(ranges)
                inner = tuple(each.inner for each in ranges)
        seen = outer if box is None else tuple(each.count for each in box)
        numbers = math.prod(inner) * _numbers(first, 2) + math.prod(seen) * _numbers(second, 3)
        samples = min(UNFOLDED_BYTES // (4 * numbers), max(1, POSITIONS // math.prod(inner)))
        return cls(samples, windows, outer, box) if samples else None

    def seen(
        self, second: Fit, images: Array, dense: Array, shortcut: Array | None, *, samples: int, rng: np.random.Generator
    ) -> Seen:
        """Return what is looked at in the first samples of a batch."""
        shape = (len(images), second.site.channels, *self.outer)
        goal, added = second.goal(dense, shortcut, shape), second.added(dense, shortcut, shape)
        some = (slice(samples), slice(None))
        spans = [] if self.box is None else [each.draw(rng) for each in self.box]
        pixels, places = (*some, *(pixels for pixels, _ in spans)), (*some, *(places for _, places in spans))
        # Copies: a view would keep the whole batch.
        return Seen(images[pixels].copy(), goal[places].copy(), None if added is None else added[places].copy())


@dataclass(frozen=True)
class _Range:
    """On one axis: which places of the second can begin a box, how many it has, and what these see of the image."""

    begin: int
    end: int  # the last that can begin it, and one
    count: int
    inner: int  # places of the first that the box sees
    length: int  # pixels of the image
    stride: int  # of the image's pixels, from one place of the second to the next
    padding: int  # before the pixels that the second's first place sees

    @classmethod
    def of(cls, window1: Window, window2: Window, length: int, axis: int, side: int) -> "_Range":
        """Return the range with `side` places of the first at most, but one of the second at least."""
        (b1, s1, e1), (b2, s2, e2) = ((each.begins[axis], each.strides[axis], each.extents[axis]) for each in (window1, window2))
        # The first and the last place of the first that see no padding, and those of the second that see only such.
        inner_begin, inner_end = -(-b1 // s1), (length + b1 - e1) // s1
        begin, end = -(-(inner_begin + b2) // s2), (inner_end + b2 - e2 + 1) // s2
        count = min(max(1, (side - e2) // s2 + 1), end - begin + 1)
        inner = (count - 1) * s2 + e2
        return cls(begin, end - count + 2, count, inner, (inner - 1) * s1 + e1, s1 * s2, b1 + b2 * s1)

    def draw(self, rng: np.random.Generator) -> tuple[slice, slice]:
        """Return some pixels of the image, and the places of the second that see them."""
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


def fit_pair(
    first: Half, second: Half, windows: tuple[Window, Window], seen: Sequence[Seen], pool: ThreadPoolExecutor
) -> tuple[Coefficients, Coefficients] | None:
    """Return better coefficients of both, as found on these samples; None if there are none.

    The last samples are held back: weights that are no better on them were learnt by heart.
    """
    if len(seen) < 2:
        return None
    pair = Pair(first, second, windows, seen[:-1], pool)
    held = pair.part(seen[-1])
    found, least = None, pair.loss_on(held)
    for _ in range(ROUNDS):
        if not pair.improve(STEPS) or not (loss := pair.loss_on(held)) < least:
            break
        found, least = pair.coefficients(), loss
    return found
