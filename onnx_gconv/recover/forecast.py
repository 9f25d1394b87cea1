"""How long measuring and fitting on calibration samples will take, told from the shapes before it begins."""

import math
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import onnx

from onnx_gconv.model.constants import Constants
from onnx_gconv.model.shapes import Shape
from onnx_gconv.recover import chain, emptying, fitting, guide
from onnx_gconv.recover.fit import Fit
from onnx_gconv.recover.flow import Flow
from onnx_gconv.recover.site import find_sites
from onnx_gconv.rewrite.match import Matched

SIDE, PRODUCTS = 512, 8  # of the matrices that this machine's speed is measured by, and how many products
REFERENCE = 1.95e-3  # seconds of such a product where the seconds below were measured
ALONE = 0.25  # share of the work that one thread does while the others wait
TRIAL_SHARE = 0.5  # of what a fit takes: a trial looks at its rows once


@dataclass(frozen=True)
class _Layer:
    """A Conv or Gemm to be fitted, for one sample."""

    blocks: int
    unknowns: int  # of an output
    outputs: int  # of a block
    places: int

    def positions(self, samples: int, *, a_weight: float, least: int) -> float:
        return min(max(least, a_weight * self.unknowns), samples * self.places)


@dataclass(frozen=True)
class Work:
    """Counts of what takes time, by kind."""

    moments: float = 0.0  # products of the normal equations
    factors: float = 0.0  # of factorising them
    values: float = 0.0  # of activations that are made, stored and read
    macs: float = 0.0  # of running the model
    chained: float = 0.0  # products of a step for Convs in a row
    layers: float = 0.0

    def __add__(self, other: "Work") -> "Work":
        return Work(*(one + two for one, two in zip(vars(self).values(), vars(other).values(), strict=True)))

    def seconds(self, each: "Work") -> float:
        """Return what it takes at so many seconds for one of each kind."""
        return float(sum(one * two for one, two in zip(vars(self).values(), vars(each).values(), strict=True)))


# CPU seconds, fitted to the rows of benchmarks/scale.md: they were within 16 % of these. Products have the speed of the BLAS.
LOOKING = Work(moments=8e-12, factors=5.7e-11, values=4.8e-9, macs=2.2e-11, layers=0.013)
FITTING = Work(moments=8e-12, factors=6.2e-11, values=3.2e-8, macs=2e-11, chained=3.7e-10, layers=0.05)


class Forecast:
    """CPU seconds of each part of compressing a model on so many samples, on the machine that they were measured on."""

    def __init__(self, model: onnx.ModelProto, shapes: Mapping[str, Shape], *, macs: int, samples: int, fitted: int) -> None:
        flow, constants = Flow(model), Constants(model)
        sites = find_sites(flow, constants, Matched())
        self._layers = {site.name: _layer(Fit.of(site, constants, constants), shapes) for site in sites}
        self._chains = [(*(before.name for before in each), name) for name, each in chain.find_chains(flow, sites).items()]
        self._macs, self._samples, self._fitted = macs, samples, fitted

    def errors(self) -> float:
        """Return what it takes to see how each space would be emptied."""
        return self._walk(self._fitted, a_weight=emptying.POSITIONS_AN_INPUT, least=emptying.LEAST_POSITIONS).seconds(LOOKING)

    def trial(self) -> float:
        """Return what it takes to try a plan."""
        found = self._walk(self._fitted, a_weight=guide.TRIAL_POSITIONS_A_WEIGHT, least=guide.TRIAL_LEAST_POSITIONS)
        return TRIAL_SHARE * found.seconds(FITTING)

    def costs(self) -> float:
        """Return what it takes to measure groups and widths at the outputs: half of the model, for each layer, a few times."""
        probed = Work(macs=self._macs * min(guide.PROBES, self._fitted) * len(self._layers))
        return self.trial() + probed.seconds(FITTING)

    def recovery(self) -> float:
        """Return what it takes to fit all layers, and Convs in a row together."""
        walk = self._walk(self._samples, a_weight=fitting.POSITIONS_A_WEIGHT, least=fitting.LEAST_POSITIONS)
        both = Work(macs=self._macs * self._samples, chained=sum(map(self._chained, self._chains)))  # the dense model runs, too
        return (walk + both).seconds(FITTING)

    def _walk(self, samples: int, *, a_weight: float, least: int) -> Work:
        def work(layer: _Layer) -> Work:
            positions = layer.blocks * layer.positions(samples, a_weight=a_weight, least=least)
            return Work(
                moments=positions * layer.unknowns * (layer.unknowns + layer.outputs),
                factors=layer.blocks * layer.unknowns**3,
                values=samples * layer.places * layer.blocks * layer.outputs,
                layers=1,
            )

        return sum(map(work, self._layers.values()), Work(macs=self._macs * samples))

    def _chained(self, names: Iterable[str]) -> float:
        """Return the products of one step through a chain."""
        layers = [self._layers[name] for name in names]
        held = sum(layer.places * layer.blocks * (layer.unknowns + 3 * layer.outputs) for layer in layers)
        share = min(chain.POSITIONS, self._samples * layers[0].places, chain.UNFOLDED_BYTES / 4 / held * layers[0].places)
        places = [share * layer.places / layers[0].places for layer in layers]
        return sum(at * layer.blocks * layer.unknowns * layer.outputs for at, layer in zip(places, layers, strict=True))


def _layer(fit: Fit, shapes: Mapping[str, Shape]) -> _Layer:
    places = max(1, math.prod(shapes.get(fit.site.name, ())[2:]))
    return _Layer(len(fit.site.inputs), fit.unknowns, fit.site.outputs.shape[1], places)


def here(cpu_seconds: float, jobs: int) -> float:
    """Return how long such work takes on this machine with so many threads, if nothing else runs."""
    return cpu_seconds * (ALONE + (1 - ALONE) / jobs) * _product_seconds() / REFERENCE


def _product_seconds() -> float:
    values = np.random.default_rng(0).standard_normal((SIDE, SIDE), dtype=np.float32)
    times = []
    for _ in range(PRODUCTS):
        started = time.thread_time()
        values @ values
        times.append(time.thread_time() - started)
    return min(times)
