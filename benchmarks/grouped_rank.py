"""Whether a search would choose groups in the first Conv of a low rank: k x k in G groups to r channels, then a dense 1x1.

    python benchmarks/grouped_rank.py [--rows REGEX]

Needs ../shared and Pillow. The product has no such form: here it is put on the menu of `--forms width,drop,lowrank` in memory, for
every Conv that may have a rank, and the search is asked with and without it, at 70, 50 and 30 % of the MACs. All is in its favour:
Gathers are free, and inputs are grouped as they are stored or as `solve` groups them by L2 norm, whichever leaves less. A cell is
what the best choice costs with it over without it, how many layers get it, and plain ranks without and with it.
"""

import argparse
import math
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import forms as benchmark
import in_time
import numpy as np
import scipy.linalg
from rows import need

from onnx_gconv.errors import BudgetError
from onnx_gconv.listener import SILENT
from onnx_gconv.pipeline.facts import Facts
from onnx_gconv.pipeline.forms import find_forms, ranked
from onnx_gconv.pipeline.job import Job
from onnx_gconv.pipeline.original import open_original
from onnx_gconv.pipeline.recovering import guide_of, open_samples
from onnx_gconv.pipeline.settings import Settings
from onnx_gconv.pipeline.trial import DISCOUNTS, FIRST, Narrowed
from onnx_gconv.recover import emptying, spectra
from onnx_gconv.recover.normal import Doubles
from onnx_gconv.search.budget import Budget
from onnx_gconv.search.joint import search_joint
from onnx_gconv.search.menu import GroupCount, Menu, Product
from onnx_gconv.search.target import width_step
from onnx_gconv.solve.grouping import Order
from onnx_gconv.solve.layer import Solver

MODELS = ("cifar10_resnet20_folded", "cifar10_resnet56_folded", "imagenet_mobilenet_v2_bn", "linknet_methane_dyn")
MODELS += ("squeezenet_winml_op7", "nudenet_yolov8n", "opennsfw_resnet50thin")
RANKS, SWEEPS = 8, 2  # ranks of each number of groups, at most
CODE = 1 << 12  # the menu has a rank r in G groups as the "rank" -(r * CODE + G), which its legality lets pass
PLAIN = Product.amounts


def grouped(gram: Doubles, weight: Doubles, parts: list[tuple[Order, Doubles]], rank: int) -> Doubles:
    """Return weights that give near to what these (inputs, outputs) give, each part of the inputs through rank / G channels.

    Every part starts from its own weights, cut off by reduced-rank regression. Then each in turn gets the best weights of its rank
    that there are beside the others', a few times; at last the 1x1 Conv is fitted to all of them by least squares.
    """
    found, first, each = np.zeros_like(weight), np.zeros((len(weight), rank)), rank // len(parts)
    for sweep in range(1 + SWEEPS):
        for number, (rows, root) in enumerate(parts):
            best = weight[rows]
            if sweep:
                best = found[rows] + scipy.linalg.cho_solve((root, True), gram[rows] @ (weight - found))
            seen = root.T @ best
            if len(seen) < seen.shape[1]:
                right = np.linalg.svd(seen, full_matrices=False)[2][:each].T
            else:
                right = np.linalg.eigh(seen.T @ seen)[1][:, -each:]
            found[rows] = (best @ right) @ right.T
            first[rows, number * each : number * each + right.shape[1]] = best @ right
    seen = first.T @ gram
    return np.asarray(first @ np.linalg.lstsq(seen @ first, seen @ weight, rcond=1e-12)[0])


def partitions(gram: Doubles, weight: Doubles, channels: int, groups: int) -> Iterator[list[tuple[Order, Doubles]]]:
    """Yield the rows of each group, and the root of their second moments: inputs as they are stored, and as `solve` groups them."""
    rows, orders = np.arange(len(weight)).reshape(channels, -1), [np.arange(channels)]
    if weight.shape[1] % groups == 0 and groups < channels:
        norms = np.linalg.norm(weight.reshape(channels, -1, weight.shape[1]), axis=1).T
        orders.append(Solver().solve(np.ascontiguousarray(norms), groups).in_order)
    for order in orders:
        yield [(part, np.linalg.cholesky(gram[np.ix_(part, part)])) for part in rows[order].reshape(groups, -1)]


def errors(gram: Doubles, weight: Doubles, channels: int, step: int) -> dict[tuple[int, int], float]:
    """Return what each rank r in G groups leaves, by (r, G), where it takes fewer MACs than the Conv."""
    inputs, outputs = weight.shape
    squares, vectors = np.linalg.eigh(weight.T @ gram @ weight)
    few = np.cumsum(squares) < 1e-4 * squares.sum()  # directions of the outputs that hardly count: left out, and as an error
    turned, rest = weight @ vectors[:, ~few], float(np.maximum(squares[few], 0).sum())
    found = {}
    for groups in sorted({g for g in (2, 4, 8, 16, 32, channels) if 1 < g <= channels and channels % g == 0}):
        top = min(inputs * outputs / (inputs / groups + outputs), inputs)
        ranks = np.arange(math.lcm(step, groups), top, math.lcm(step, groups), dtype=int)
        ways = list(partitions(gram, weight, channels, groups)) if len(ranks) else []
        some = np.unique(np.linspace(0, len(ranks) - 1, RANKS).round().astype(int)) if ways else []
        for rank in ranks[some].tolist():
            off = [turned - grouped(gram, turned, parts, rank) for parts in ways]
            found[rank, groups] = rest + min(float(np.sum(each * (gram @ each))) for each in off)
    return found


def amounts(self: Product, ins: int, outs: int, groups: int, rank: int = 0) -> tuple[int, int, int]:
    if rank >= 0:
        return PLAIN(self, ins, outs, groups, rank)
    rank, groups = divmod(-rank, CODE)
    first = ins * rank // math.gcd(ins, groups)  # fewer groups where those do not divide what is left of the inputs
    return self.params * first + rank * outs, self.macs * first + self.places * rank * outs, 0


def menus(model: str) -> tuple[Menu, Menu]:
    """Return the menu without the form and with it, priced as the product prices it."""
    in_time.SAMPLES = benchmark.OTHER_SAMPLES
    path = in_time.SHARED / "zoo" / f"{model}.onnx"
    has_own = model.startswith(("cifar10", "imagenet"))
    calib, samples = benchmark.calibration(model) if has_own else (in_time.data(path), in_time.SAMPLES)
    settings = Settings(max_macs="50%", calib=calib, calib_samples=samples, forms="width,drop,lowrank")
    job = Job(open_original(path), settings, Facts(), SILENT)
    guide = guide_of(job, open_samples(job.original, settings))
    assert guide is not None
    layers, new = {layer.name: layer for layer in job.original.network.layers}, dict[str, dict[tuple[int, int], float]]()

    def look(*asked: Any) -> emptying.Seen:
        seen = emptying.look(*asked)
        layer = layers[seen.site.name]
        new[layer.name] = errors(seen.gram, seen.weight, layer.in_channels, width_step("generic", layer.out_channels))
        return seen

    spectra.look = look
    found = find_forms(job, guide, {}, {})
    shares = {**found.following, **guide.following(found.offer.ranks)}
    factor = {name: math.exp(-DISCOUNTS[FIRST] * share) for name, share in shares.items()}
    costs = {key: cost * factor[key.space if isinstance(key, Narrowed) else key.layer] for key, cost in found.costs[0].items()}
    menu = found.priced(costs)

    def more(product: Product) -> Product:
        name = product.names[0] if product.names else ""
        options = [GroupCount(1, factor[name] * e, -(r * CODE + g)) for (r, g), e in new.get(name, {}).items()]
        return replace(product, options=(*product.options, *options))

    return menu, replace(menu, products=tuple(map(more, menu.products)))


def cell(menu: Menu, more: Menu, share: float) -> str:
    """Return what the search does with the form and without it."""
    budget = Budget(max_macs=round(share * menu.dense[1]))
    try:
        before, after = (search_joint(each, budget, time_limit_seconds=120) for each in (menu, more))
    except BudgetError:
        return "cannot be met"
    ranks = [product.options[index].rank for product, index in zip(more.products, after.groups, strict=True)]
    chosen = [divmod(-rank, CODE) for rank in ranks if rank < 0]
    print(f"{share:.0%}: gaps {before.gap:.1e}, {after.gap:.1e}; (r, G):", *chosen, flush=True)
    plain = len(ranked(menu, before)), sum(rank > 0 for rank in ranks)
    return f"{after.cost / before.cost - 1:+.1%}, {len(chosen)}, {plain}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default="", metavar="REGEX", help="only models whose name it matches")
    args = parser.parse_args()
    need(in_time.SHARED)
    Product.amounts = amounts  # type: ignore[method-assign]
    for model in (model for model in MODELS if re.search(args.rows, model)):
        both = menus(model)
        print(f"| {model} | {' | '.join(cell(*both, share) for share in (0.7, 0.5, 0.3))} |", flush=True)


if __name__ == "__main__":
    main()
