"""report.json: what `compress` did, for programs."""

import json
from collections.abc import Mapping
from dataclasses import dataclass

from onnx_gconv.evaluation import Evaluation
from onnx_gconv.model.network import Network
from onnx_gconv.plans import Plan
from onnx_gconv.recover.recovery import Recovery
from onnx_gconv.search.latency import Prediction
from onnx_gconv.timing import Latency
from onnx_gconv.verification import Verification


@dataclass(frozen=True)
class Cost:
    """What one model costs, everything counted on the model itself."""

    params: int
    macs: int | None
    bytes: int
    nodes: int

    def as_dict(self) -> dict[str, int | None]:
        flops = None if self.macs is None else 2 * self.macs
        return {"params": self.params, "macs": self.macs, "flops": flops, "bytes": self.bytes, "nodes": self.nodes}


@dataclass(frozen=True)
class Outcome:
    """Everything a finished `compress` knows."""

    model: str
    output: str
    before: Cost
    after: Cost
    gathers: tuple[int, int]  # naive, written
    gather_reasons: tuple[dict[str, str], ...]
    latency: Latency | None
    predicted: Prediction | None  # by the times of its layers, where they are known
    search: dict[str, float | None] | None  # cost, proven bound and gap of the search; None where a rule chose
    verification: Verification | None
    recovery: Recovery | None  # None without calibration data
    evaluation: Evaluation | None  # None without data to evaluate on
    seconds: Mapping[str, float]


def to_json(outcome: Outcome, plan: Plan, network: Network) -> str:
    """Return the text of report.json."""
    layers = {layer.name: layer for layer in network.layers}
    checked = outcome.verification
    data = {
        "format": 1,
        "model": outcome.model,
        "output": outcome.output,
        "before": outcome.before.as_dict(),
        "after": outcome.after.as_dict(),
        "budget": dict(plan.budget),
        "budget_met": True,  # a plan over its budget is refused, never written
        "search": outcome.search,
        "layers": [
            {
                "name": planned.name,
                "label": planned.label,
                "groups": planned.groups,
                "kept": planned.kept,
                "macs_before": layers[planned.name].macs,
                "macs_after": _grouped_macs(layers[planned.name].macs, layers[planned.name].groups, planned.groups),
            }
            for planned in plan.layers
        ],
        "skipped": [vars(conv) for conv in plan.skipped],
        "gathers": {
            "naive": outcome.gathers[0],
            "written": outcome.gathers[1],
            "remaining": list(outcome.gather_reasons),
        },
        "verify": None if checked is None else checked.as_dict(),
        "recovery": None if outcome.recovery is None else outcome.recovery.as_dict(),
        "evaluation": None if outcome.evaluation is None else outcome.evaluation.as_dict(),
        "latency": None if outcome.latency is None else outcome.latency.as_dict(),
        "predicted_latency": None if outcome.predicted is None else outcome.predicted.as_dict(),
        "seconds": {name: round(value, 3) for name, value in outcome.seconds.items()},
    }
    return json.dumps(data, indent=1, ensure_ascii=False) + "\n"


def _grouped_macs(macs: int | None, existing: int, groups: int) -> int | None:
    return None if macs is None else macs * existing // groups
