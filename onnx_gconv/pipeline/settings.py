"""What the user wants of a job: wishes only, nothing that was measured."""

import math
import os
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from numbers import Integral
from pathlib import Path
from typing import Any, Literal, TypedDict, get_args

from onnx_gconv.data.open import DataLike
from onnx_gconv.data.preprocessing import Preprocessing, Size
from onnx_gconv.deploy.here import target_here
from onnx_gconv.deploy.timing_file import Precision
from onnx_gconv.errors import UsageError
from onnx_gconv.model.shapes import ShapeLike
from onnx_gconv.rewrite.lowering import LoweringName
from onnx_gconv.search.budget import Limit, latency_limit_of, limit_of
from onnx_gconv.search.target import TargetName
from onnx_gconv.solve.importance import Criterion
from onnx_gconv.solve.layer import Solver, SolverName

SearchName = Literal["exact", "local"]
CostName = Literal["log", "share", "sensitivity", "trial"]
TrainGraph = Literal["auto", "compact", "masked"]
TargetWish = Literal["auto", "generic", "ort-cpu", "tensorrt"]
GathersName = Literal["free", "shared", "none"]
FormName = Literal["group", "width", "drop", "lowrank"]
FormsLike = str | Sequence[str]  # "width,drop", or one name after the other, or "all"
PathLike = str | os.PathLike[str]

CHOICES: Mapping[str, Collection[object]] = {
    "target": get_args(TargetWish),  # auto is told apart before
    "criterion": get_args(Criterion),
    "solver": get_args(SolverName),
    "effort": range(4),
    "search": get_args(SearchName),
    "cost": get_args(CostName),
    "gathers": get_args(GathersName),
    "precision": get_args(Precision),
    "lowering": get_args(LoweringName),
    "channel_order": ("rgb", "bgr"),
}
# Whole numbers, and the least that each may be.
WHOLE = {
    **dict.fromkeys(("groups", "max_group_channels", "min_group_channels", "calib_samples", "jobs", "width_step", "threads"), 1),
    **dict.fromkeys(("refine_steps", "refine_epochs", "refine_batch_size"), 1),
    **dict.fromkeys(("seed", "sort_rounds"), 0),
}
RULES = ("groups", "max_group_channels", "group_config")
MEASURED = {"cost": ("sensitivity", "trial"), "criterion": ("taylor", "activation")}  # on data


class ImageWishes(TypedDict, total=False):
    """How the images of a folder become the model's input."""

    resize: Size | None
    crop: Size | None
    scale: float | None
    mean: float | Sequence[float]
    std: float | Sequence[float]
    channel_order: Literal["rgb", "bgr"]


class RecoverWishes(ImageWishes, total=False):
    """What weights are fitted to, and how the work is done: all that `finetune` can be asked for beside its training."""

    calib: DataLike | None
    calib_samples: int
    input_shape: ShapeLike
    seed: int
    jobs: int


class ApplyWishes(RecoverWishes, total=False):
    """What `apply` can be asked for."""

    lowering: LoweringName
    verify: bool


class MethodWishes(RecoverWishes, total=False):
    """Which layers may be grouped, and how groupings and numbers of groups are found."""

    include: str | None
    exclude: str | None
    min_group_channels: int
    target: TargetWish | None
    criterion: Criterion
    solver: SolverName
    effort: int
    sort_rounds: int
    search: SearchName
    cost: CostName | None
    gathers: GathersName | None
    forms: FormsLike | None
    width_step: int | None


class GoalWishes(MethodWishes, total=False):
    """How much to compress, by a budget or by a rule, and the method."""

    max_flops: float | str | None
    max_macs: float | str | None
    max_params: float | str | None
    max_latency: float | str | None
    timing: PathLike | None
    threads: int
    groups: int | None
    max_group_channels: int | None
    group_config: PathLike | None


class ExploreWishes(MethodWishes, total=False):
    """What `explore` can be asked for: the method, and how points are judged."""

    eval: DataLike | None


class Learning(TypedDict, total=False):
    """How to train: the flags of `finetune`, by name."""

    distill: float | None
    epochs: int
    lr: float
    batch_size: int
    schedule: Literal["cosine", "multistep"]
    augment: Collection[str]
    freeze_bn: bool
    val_split: float
    amp: bool
    train_graph: TrainGraph


class PlanWishes(GoalWishes, total=False):
    """What `plan` can be asked for: a search, perhaps with fine-tuning inside."""

    refine_steps: int | None
    refine_data: DataLike | None
    refine_epochs: int
    refine_lr: float
    refine_batch_size: int


class CompressWishes(GoalWishes, total=False):
    """What `compress` can be asked for: a plan, and how it is written and judged."""

    eval: DataLike | None
    precision: Precision
    lowering: LoweringName
    verify: bool
    force: bool


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The wishes with their defaults, each by the name of its flag. What is None or empty is left to us."""

    # The budget: a share (0.5, "50%") of the whole model before, or an amount (300e6, "300M"). Several hold at once.
    max_flops: float | str | None = None
    max_macs: float | str | None = None
    max_params: float | str | None = None
    max_latency: float | str | None = None
    timing: PathLike | None = None
    threads: int = 1
    # Or a rule, at most one.
    groups: int | None = None
    max_group_channels: int | None = None
    group_config: PathLike | None = None
    # Which layers, as regular expressions on layer and node names, and for which device.
    include: str | None = None
    exclude: str | None = None
    min_group_channels: int = 1
    target: TargetName | None = None
    # The method.
    criterion: Criterion = "l2"
    solver: SolverName = "best"
    effort: int = 1
    sort_rounds: int = 10
    search: SearchName = "exact"
    cost: CostName | None = None
    gathers: GathersName | None = None
    forms: FormsLike | None = None
    width_step: int | None = None
    # The data, and how images are read.
    calib: DataLike | None = None
    calib_samples: int = 1000
    eval: DataLike | None = None
    resize: Size | None = None
    crop: Size | None = None
    scale: float | None = None
    mean: float | Sequence[float] = ()
    std: float | Sequence[float] = ()
    channel_order: Literal["rgb", "bgr"] = "rgb"
    # Fine-tuning inside the search.
    refine_steps: int | None = None
    refine_data: DataLike | None = None
    refine_epochs: int = 1
    refine_lr: float = 0.01
    refine_batch_size: int = 128
    # How the result is written.
    precision: Precision = "fp32"
    lowering: LoweringName = "group"
    verify: bool = True
    force: bool = False
    # How the work is done.
    input_shape: ShapeLike = ()
    seed: int = 0
    jobs: int = os.cpu_count() or 1

    def __post_init__(self) -> None:
        for name, known in CHOICES.items():
            value = getattr(self, name)
            if value is not None and value not in known:
                raise UsageError(f"{_flag(name)} {value!r} is not known: choose from {', '.join(map(str, known))}")
        for name, least in WHOLE.items():
            value = getattr(self, name)
            if value is not None and (not isinstance(value, Integral) or isinstance(value, bool) or value < least):
                raise UsageError(f"{_flag(name)}: {value!r} is not a whole number of at least {least}")
        for name in ("include", "exclude"):
            try:
                re.compile(getattr(self, name) or "")
            except re.error as error:
                raise UsageError(f"{_flag(name)}: {getattr(self, name)!r} is not a regular expression: {error}") from error
        for name in ("mean", "std"):
            numbers = _numbers(getattr(self, name))
            if not all(map(math.isfinite, numbers)) or (name == "std" and min(numbers, default=1.0) <= 0):
                listed = ",".join(f"{number:g}" for number in numbers)
                raise UsageError(f"{_flag(name)}: {listed} is not {'above 0' if name == 'std' else 'finite'} throughout")
        self._require_sense()

    def _require_sense(self) -> None:
        """Refuse wishes that do not go together."""
        _ = self.limits, self.form_names  # malformed ones are refused
        if sum(getattr(self, name) is not None for name in RULES) > 1:
            raise UsageError(f"{', '.join(map(_flag, RULES))}: at most one of them can choose the groups")
        if self.max_latency is not None and self.timing is None and self.target not in (None, "ort-cpu"):
            raise UsageError(
                f"--max-latency for --target {self.target} needs times: --timing FILE from `bench --sweep`; only those of ort-cpu, "
                "this CPU, are measured now"
            )
        if self.precision != "fp32" and self.calib is None:
            raise UsageError(f"--precision {self.precision} takes scales from data, or is judged by it: give --calib DATA")
        if self.calib is None:
            for name, needing in MEASURED.items():
                if getattr(self, name) in needing:
                    raise UsageError(f"{_flag(name)} {getattr(self, name)} is measured on data: give --calib DATA")
            if self.form_names != ("group",):
                raise UsageError(f"--forms {','.join(self.form_names)} is measured on data: give --calib DATA, or --forms group")
        if self.form_names != ("group",):
            self._require_countable()
        if self.width_step is not None and not {"width", "lowrank"} & {*self.form_names}:
            raise UsageError("--width-step is for widths and ranks: give --calib DATA, and --forms width, lowrank or all")
        if self.refine_steps is not None:
            self._require_refinable()

    def _require_countable(self) -> None:
        """Refuse what only groups can do."""
        forms = ",".join(self.form_names)
        if self.rule is not None:
            raise UsageError(f"--forms {forms} is for a search: leave out --groups, --max-group-channels and --group-config")
        if self.search != "exact":
            raise UsageError(f"--search local is the paper's, for groups only: leave it out, or give --forms group, not {forms}")

    def _require_refinable(self) -> None:
        if self.refine_data is None:
            raise UsageError("--refine-steps fine-tunes: give --refine-data DATA")
        if self.rule is not None or self.max_latency is not None:
            raise UsageError("--refine-steps is for a search under --max-macs, --max-flops or --max-params")
        if self.calib is not None:
            raise UsageError(
                "--refine-steps takes its costs from the tuned weights: leave out --calib (`finetune` has it for the start)"
            )

    def require_goal(self) -> None:
        """Refuse wishes that do not say how much to compress."""
        if not self.limits and all(getattr(self, name) is None for name in RULES):
            raise UsageError("say how much: for example --max-flops 50%, --max-params 1.2M, or --groups 2")

    @property
    def limits(self) -> dict[str, Limit]:
        """The budget, by the names of the plan file."""
        counted = {name: getattr(self, name) for name in ("max_params", "max_macs", "max_flops")}
        limits = {name: limit_of(amount) for name, amount in counted.items() if amount is not None}
        return limits | ({} if self.max_latency is None else {"max_latency_ms": latency_limit_of(self.max_latency)})

    @property
    def rule(self) -> str | None:
        """How the groups are chosen without a search, as the plan file says it."""
        names = {"groups": "uniform", "max_group_channels": "max-group-channels", "group_config": "group-config"}
        return next((text for name, text in names.items() if getattr(self, name) is not None), None)

    @property
    def form_names(self) -> tuple[FormName, ...]:
        """The forms that a search chooses from, in one order; by default what measures best, see docs/forms.md."""
        if self.forms is None:
            by_groups = self.rule is not None or self.search != "exact"
            asks_groups = self.gathers is not None or self.cost is not None or self.criterion != "l2" or self.min_group_channels > 1
            asks_groups = asks_groups or self.solver != "best"
            return ("group",) if self.calib is None or by_groups or asks_groups else ("width", "drop")
        asked = [name.strip() for name in self.forms.split(",")] if isinstance(self.forms, str) else list(self.forms)
        known = get_args(FormName)
        for name in asked:
            if name not in (*known, "all"):
                raise UsageError(f"--forms {name!r} is not known: choose from {', '.join(known)}, all, or several with commas")
        return tuple(name for name in known if name in asked or "all" in asked)

    @property
    def timed_precision(self) -> Precision:
        """The precision whose time a budget is of: int8 where layers are timed here, for what is written in int8."""
        is_timed_here = self.max_latency is not None and self.timing is None
        return "int8" if self.precision == "int8" and is_timed_here else "fp32"

    @property
    def cost_name(self) -> CostName:
        return self.cost or ("log" if self.calib is None else "trial")

    @property
    def how_to_solve(self) -> Solver:
        return Solver(self.solver, self.sort_rounds, self.effort, self.seed)

    @property
    def preprocessing(self) -> Preprocessing:
        return Preprocessing(self.resize, self.crop, self.scale, _numbers(self.mean), _numbers(self.std), self.channel_order)


def settings_of(function: str, wishes: Mapping[str, Any], allowed: type) -> Settings:
    """Return the wishes of a call with their defaults; one that the function does not know is refused as Python does it."""
    for name in wishes:
        if name not in allowed.__annotations__:
            raise TypeError(f"{function}() got an unexpected keyword argument {name!r}")
    return Settings(**{**wishes, "target": _target(wishes)})


def _target(wishes: Mapping[str, Any]) -> Any:
    """Return the target that is asked for, or meant: this machine, and this CPU where times are wanted and none are given."""
    asked = wishes.get("target")
    if asked == "auto":
        return target_here() if wishes.get("timing") is None else None  # a table is for the device that was measured
    is_timed_here = wishes.get("max_latency") is not None and wishes.get("timing") is None
    return "ort-cpu" if asked is None and is_timed_here else asked


def wish_names(allowed: type) -> list[str]:
    """Return the wishes that a function knows, in the order of the settings."""
    return [field.name for field in fields(Settings) if field.name in allowed.__annotations__]


def _numbers(given: float | Sequence[float]) -> tuple[float, ...]:
    return tuple(map(float, given)) if isinstance(given, Iterable) else (float(given),)


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def as_path(given: PathLike) -> Path:
    """Return a path that the user gave in any form."""
    return Path(os.fspath(given))
