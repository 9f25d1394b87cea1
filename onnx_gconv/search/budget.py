"""Budgets: what the compressed model may cost at most, in parameters, MACs, FLOPs or milliseconds."""

import math
import re
from dataclasses import dataclass
from numbers import Integral, Real

from onnx_gconv.errors import BudgetError

SUFFIXES = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}


@dataclass(frozen=True)
class Limit:
    """A budget as the user wrote it: a share of the whole model (`50%`) or a number (`1.9G`)."""

    text: str
    value: float
    is_share: bool

    def of(self, whole: int) -> int:
        """Return the largest whole number that is within the limit."""
        # 70 % of 10 is 7, though 0.7 * 10 is 6.999…: give floats the benefit of one part in 1e12.
        amount = self.value * whole if self.is_share else self.value
        return math.floor(amount * (1 + 1e-12))


def limit_of(amount: float | str) -> Limit:
    """Return the limit that `50%`, `300M`, `1.9G` or `5k` stands for; of numbers, 0.5 is a share and 300_000_000 an amount."""
    if isinstance(amount, str):
        return parse_limit(amount)
    if not isinstance(amount, Real) or isinstance(amount, bool) or not 0 < amount < math.inf:
        raise BudgetError(f"{amount!r} is not a budget.", hint="give a share like 0.5 or '50%', or an amount like 300e6 or '300M'")
    value = float(amount)
    if value <= 1 and not isinstance(amount, Integral):
        return Limit(str(value), value, is_share=True)
    if value <= 100:
        raise BudgetError(f"a budget of {value:g} is smaller than any model.", hint=f"a share is {value / 100:g} or '{value:g}%'")
    return Limit(str(amount), value, is_share=False)


def latency_limit_of(amount: float | str) -> Limit:
    """Return the limit that `60%`, `3.5ms` or the share 0.6 stands for, in milliseconds."""
    if isinstance(amount, str):
        return parse_latency(amount)
    if not isinstance(amount, Real) or isinstance(amount, bool) or not 0 < amount <= 1:
        raise BudgetError(f"{amount!r} is not a latency.", hint="give a share like 0.6 or '60%', or a time like '3.5ms'")
    return Limit(str(amount), float(amount), is_share=True)


def parse_limit(text: str) -> Limit:
    """Return the limit that `50%`, `300M`, `1.9G` or `5k` stands for."""
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]*)?|\.[0-9]+)\s*([%kKmMgGtT]?)\s*", text)
    if match is None or float(match[1]) == 0 or len(match[1]) > 30:
        raise BudgetError(f"{text!r} is not a budget.", hint="write a share like 50% or a number like 300M, 1.9G, 5k")
    number, unit = float(match[1]), match[2].lower()
    if unit == "%":
        return Limit(text.strip(), number / 100, is_share=True)
    if not unit and number <= 100:
        raise BudgetError(
            f"a budget of {text.strip()} is smaller than any model.", hint=f"a share has a percent sign: {_share(number)}"
        )
    return Limit(text.strip(), number * SUFFIXES[unit], is_share=False)


def _share(number: float) -> str:
    """Return what a number without a unit was probably meant to be."""
    return f"{100 * number if number <= 1 else number:g}%"


def parse_latency(text: str) -> Limit:
    """Return the limit that `60%` or `3.5ms` stands for, in milliseconds."""
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]*)?|\.[0-9]+)\s*(%|ms)\s*", text)
    if match is None or float(match[1]) == 0 or len(match[1]) > 30:
        raise BudgetError(f"{text!r} is not a latency.", hint="write a share like 60% or a time like 3.5ms")
    is_share = match[2] == "%"
    return Limit(text.strip(), float(match[1]) / (100 if is_share else 1), is_share)


FEASIBLE = "feasible:"  # begins the hint of a budget that cannot be met: from where on one can


@dataclass(frozen=True)
class Budget:
    """The most a model may have of each quantity; None where there is no limit."""

    max_params: int | None = None
    max_macs: int | None = None
    max_flops: int | None = None
    max_latency_ms: float | None = None
    before_ms: float | None = None  # no limit, but what the model takes as it was given, where another precision was timed

    @property
    def macs(self) -> int | None:
        """The tighter of the MAC and FLOP limits, in MACs (one is two FLOPs)."""
        limits = [limit for limit in (self.max_macs, None if self.max_flops is None else self.max_flops // 2) if limit is not None]
        return min(limits, default=None)

    @property
    def latency_ns(self) -> int | None:
        """The latency in whole nanoseconds, for a search in whole numbers."""
        return None if self.max_latency_ms is None else math.floor(self.max_latency_ms * 1e6 * (1 + 1e-12))

    @property
    def amounts(self) -> tuple[int | None, int | None, int | None]:
        """The most parameters, MACs and nanoseconds."""
        return self.max_params, self.macs, self.latency_ns

    def as_dict(self) -> dict[str, int | float]:
        """Return the limits that are set, by the names the plan file uses."""
        return {name: value for name, value in vars(self).items() if value is not None and name.startswith("max_")}

    def time_share(self, part_ns: int, dense_ns: int) -> str:
        """Return the share of the time that a budget is of, in percent; `dense_ns` is that of the model as it was timed."""
        return share(part_ns, dense_ns if self.before_ms is None else round(self.before_ms * 1e6))

    def allows(self, params: int, macs: int | None) -> bool:
        """Return whether a model of this cost is within every limit; unknown MACs are within no limit."""
        if self.max_params is not None and params > self.max_params:
            return False
        return self.macs is None or (macs is not None and macs <= self.macs)


def share(part: int, whole: int) -> str:
    """Return the share in percent, rounded up, so that asking for what is printed is enough."""
    return f"{-(-part * 10000 // whole) / 100 if whole else 100:.2f}%"
