"""What `compress` made: the model, its plan, and its report."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx

from onnx_gconv.errors import BudgetError
from onnx_gconv.evaluation import Evaluation
from onnx_gconv.files import data_file, precision_file, require_output, result_files
from onnx_gconv.model.file import save
from onnx_gconv.model.network import read
from onnx_gconv.model.shapes import input_shapes
from onnx_gconv.observing import observe
from onnx_gconv.pipeline.changes import ChangedNode
from onnx_gconv.pipeline.in_time import Clocked
from onnx_gconv.pipeline.original import Original
from onnx_gconv.pipeline.quantised import Quantised
from onnx_gconv.pipeline.rewriting import Rewritten
from onnx_gconv.pipeline.settings import PathLike, as_path
from onnx_gconv.plans import Plan
from onnx_gconv.recover.recovery import Recovery
from onnx_gconv.search.budget import Budget
from onnx_gconv.search.latency import Prediction
from onnx_gconv.staging import staged
from onnx_gconv.timing import Latency


@dataclass(frozen=True)
class Footprint:
    """How large a model is, everything counted on the model itself."""

    params: int
    macs: int | None
    bytes: int
    nodes: int

    def as_dict(self) -> dict[str, int | None]:
        flops = None if self.macs is None else 2 * self.macs
        return {"params": self.params, "macs": self.macs, "flops": flops, "bytes": self.bytes, "nodes": self.nodes}


@dataclass(frozen=True, eq=False)
class Result:
    """A compressed model, and how it came about.

    `model` is the compressed model, `plan` the decision behind it, `report` all figures as report.json has them; `save` writes
    the three. `evaluation` has the accuracy before and after, `recovery` what fitting the weights brought, `latency` the time
    before and after where it was measured.
    """

    original: Original
    clocked: Clocked
    rewritten: Rewritten
    changes: tuple[ChangedNode, ...]
    evaluation: Evaluation | None
    before: Footprint
    after: Footprint
    seconds: Mapping[str, float]
    quantised: Quantised | None = None  # the same once more, with `precision` "int8" or "fp16"

    @property
    def model(self) -> onnx.ModelProto:
        return self.rewritten.model

    @property
    def plan(self) -> Plan:
        return self.clocked.plan

    @property
    def recovery(self) -> Recovery | None:
        return self.rewritten.recovery

    @property
    def latency(self) -> Latency | None:
        """What the model takes; one in int8 beside it has a time of its own."""
        return self.clocked.latency if self.clocked.precision == "fp32" else None

    @property
    def prediction(self) -> Prediction | None:
        return self.clocked.planned.prediction

    @property
    def search(self) -> Mapping[str, float | None] | None:
        """Cost of the choice, proven bound, and the gap between them; None where a rule chose."""
        found = self.clocked.planned.search
        return None if found is None else found.as_dict()

    @property
    def budget_met(self) -> bool:
        """Whether the model keeps every limit of its budget; only `force` writes one that does not keep its time."""
        is_in_time = "max_latency_ms" not in self.plan.budget or self.clocked.is_in_time
        return is_in_time and _counted(self.plan).allows(self.after.params, self.after.macs)

    @property
    def report(self) -> dict[str, Any]:
        """The report as a dictionary. Only the file that `save` writes says where the model is: `output` is None here."""
        return self._report(None, self.after)

    def save(self, path: PathLike) -> list[Path]:
        """Write the model, OUT.plan.json and OUT.report.json beside it, all or nothing, and return the files.

        With a precision other than fp32 also OUT.int8.onnx or OUT.fp16.onnx.
        """
        output = as_path(path)
        files, lower = result_files(output), None if self.quantised is None else precision_file(output, self.quantised.precision)
        lower_files = [] if lower is None else [lower, data_file(lower)]
        require_output(*files, data_file(output), *lower_files, made_from=self.original.files)
        plan_file, report_file = (file.name for file in files[1:])
        with staged(output.parent) as staging:
            size = save(self.model, staging / output.name, external_data=len(self.original.files) > 1)
            after = Footprint(self.after.params, self.after.macs, size, self.after.nodes)
            if self.quantised is not None and lower is not None:
                save(self.quantised.model, staging / lower.name, external_data=len(self.original.files) > 1)
            report = json.dumps(self._report(output, after), indent=1, ensure_ascii=False) + "\n"
            (staging / plan_file).write_text(self.plan.to_json(), encoding="utf-8")
            (staging / report_file).write_text(report, encoding="utf-8")
            names = (output.name, data_file(output).name, *(file.name for file in lower_files), plan_file, report_file)
            return [output.parent / name for name in names if (staging / name).exists()]  # most models have no data file

    def _report(self, output: Path | None, after: Footprint) -> dict[str, Any]:
        macs_before = self.original.network.count.node_macs
        macs_after = dict(macs_before) | {change.name: change.macs_after for change in self.changes}
        rewritten, labels = self.rewritten, self.clocked.planned.labels
        naive, written = rewritten.gathers
        parts = {
            "verify": rewritten.verification,
            "recovery": self.recovery,
            "evaluation": self.evaluation,
            "latency": self.latency,
            "predicted_latency": self.prediction,
            "quantised": self.quantised,
        }
        return {
            "format": 1,
            "model": None if self.original.path is None else str(self.original.path),
            "output": None if output is None else str(output),
            "before": self.before.as_dict(),
            "after": after.as_dict(),
            "budget": dict(self.plan.budget),
            "budget_met": self.budget_met,
            "search": self.search,
            "forms": list(self.plan.forms),
            "layers": [
                {
                    "name": planned.name,
                    "label": planned.label,
                    "groups": planned.groups,
                    "kept": planned.kept,
                    "macs_before": macs_before[planned.name],
                    "macs_after": macs_after[planned.name],
                }
                for planned in self.plan.layers
            ],
            "spaces": [
                {"name": space.name, "label": labels[space.name], "channels": space.channels, "kept": len(space.keep)}
                for space in self.plan.spaces
            ],
            "dropped": [{"name": branch.name, "label": labels[branch.name]} for branch in self.plan.dropped],
            "low_rank": [{"name": each.name, "label": labels[each.name], "rank": each.rank} for each in self.plan.low_rank],
            "changed": [change.as_dict() for change in self.changes],
            "skipped": [vars(conv) for conv in self.plan.skipped],
            "gathers": {"naive": naive, "written": written, "remaining": list(rewritten.reasons)},
            **{name: None if part is None else part.as_dict() for name, part in parts.items()},
            "seconds": {name: round(value, 3) for name, value in self.seconds.items()},
        }


def _counted(plan: Plan) -> Budget:
    """Return the limits of what is counted: all but those of time."""
    return Budget(**{name: int(value) for name, value in plan.budget.items() if name != "max_latency_ms"})


def footprints(original: Original, rewritten: Rewritten, plan: Plan) -> tuple[Footprint, Footprint]:
    """Return what the models take before and after; refuse a result that counts more than the plan promised, or the budget allows.

    It may count a little less: a bias of equal numbers that several Convs share is not written anew for each.
    """
    before, model = original.network.count, rewritten.model
    after = read(model, input_shapes(model, original.given_shapes), observe=observe).count
    # MACs that nobody knew before may be known now: a constant that is stored has a shape. Fewer are left where a Conv of
    # constants has become one of them.
    if after.params > plan.after.params or (plan.after.macs is not None and not (after.macs or 0) <= plan.after.macs):
        raise BudgetError(
            f"the model that was made has {after.params:,} parameters and {after.macs or 0:,} MACs, but {plan.after.params:,} and "
            f"{plan.after.macs or 0:,} were planned; nothing was written.",
            hint="this is a bug of onnx-gconv: please report it with the model",
        )
    if not _counted(plan).allows(after.params, after.macs):
        raise BudgetError(
            f"the model that was made has {after.params:,} parameters and {after.macs or 0:,} MACs, which is over the budget; "
            "nothing was written.",
            hint="this is a bug of onnx-gconv: please report it with the model",
        )
    return (
        Footprint(before.params, before.macs, original.bytes_on_disk, len(original.model.graph.node)),
        Footprint(after.params, after.macs, model.ByteSize(), len(model.graph.node)),
    )
