"""What the user asks of the planner."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from onnx_gconv.search.budget import Limit
from onnx_gconv.search.latency import LayerLatencies
from onnx_gconv.search.target import TargetName
from onnx_gconv.solve.importance import Criterion
from onnx_gconv.solve.layer import Solver

SearchName = Literal["exact", "local"]
CostName = Literal["share", "log", "sensitivity", "trial"]
GathersName = Literal["free", "shared", "none"]


@dataclass(frozen=True)
class Request:
    """Limits, at most one rule, which layers, and how to solve and search."""

    limits: Mapping[str, Limit] = field(default_factory=dict)  # max_params, max_macs, max_flops, max_latency_ms
    groups: int | None = None
    max_group_channels: int | None = None
    group_config: Path | None = None
    include: str | None = None  # regular expressions on layer and node names
    exclude: str | None = None
    min_group_channels: int = 1
    target: TargetName = "generic"
    criterion: Criterion = "l2"
    # By layer, for the criteria that need data: activation, the strength of each input; taylor, the importance of each kernel.
    measured: Mapping[str, NDArray[np.float64]] = field(default_factory=dict)
    solver: Solver = field(default_factory=Solver)
    search: SearchName = "exact"
    cost: CostName = "log"
    gathers: GathersName = "free"
    seed: int = 0
    jobs: int = 1
    least_groups: Mapping[str, int] = field(default_factory=dict)  # by layer, where a search goes on from an earlier plan
    latencies: LayerLatencies | None = None  # measured times, for a budget in milliseconds

    @property
    def search_name(self) -> str:
        """How the groups are chosen, as the plan file says it."""
        if self.groups is not None:
            return "uniform"
        if self.max_group_channels is not None:
            return "max-group-channels"
        return "group-config" if self.group_config is not None else self.search
