"""Make trained CNNs smaller and faster, straight on the ONNX file.

    import onnx_gconv

    result = onnx_gconv.compress("model.onnx", max_flops=0.5, calib="images.npz")
    result.save("small.onnx")

Every command of `onnx-gconv` but `report` is a function here, with the same words. Nothing is printed; progress goes to a
`Listener`, and what goes wrong is raised as one of `onnx_gconv.errors`. docs/api.md has all of it.
"""

from importlib import import_module
from typing import TYPE_CHECKING

__version__ = "0.1.0"

# By public name, the module that it is in. It is imported when the name is first used, so that `import onnx_gconv` is cheap.
_HOMES = {
    "compress": "pipeline.compressing",
    "plan": "pipeline.compressing",
    "inspect": "pipeline.looking",
    "verify": "pipeline.looking",
    "evaluate": "pipeline.looking",
    "mask": "pipeline.applying",
    "apply": "pipeline.applying",
    "finetune": "pipeline.finetuning",
    "explore": "exploration.exploring",
    "bench": "pipeline.benching",
    "sweep": "pipeline.benching",
    "export": "pipeline.exporting",
    "read_plan": "plans",
    "Device": "pipeline.benching",
    "Evaluation": "evaluation",
    "Exploration": "exploration.exploring",
    "Exported": "pipeline.exporting",
    "Finetuned": "pipeline.finetuning",
    "Listener": "listener",
    "Network": "model.network",
    "Plan": "plans",
    "Planned": "pipeline.planning",
    "Result": "pipeline.result",
    "Rewritten": "pipeline.rewriting",
    "Settings": "pipeline.settings",
    "TimeTable": "deploy.time_table",
    "Timing": "deploy.timing_file",
    "Verification": "verification",
}
__all__ = [
    "Device",
    "Evaluation",
    "Exploration",
    "Exported",
    "Finetuned",
    "Listener",
    "Network",
    "Plan",
    "Planned",
    "Result",
    "Rewritten",
    "Settings",
    "TimeTable",
    "Timing",
    "Verification",
    "__version__",
    "apply",
    "bench",
    "compress",
    "errors",
    "evaluate",
    "explore",
    "export",
    "finetune",
    "inspect",
    "mask",
    "plan",
    "read_plan",
    "sweep",
    "verify",
]

if TYPE_CHECKING:
    from onnx_gconv import errors
    from onnx_gconv.deploy.time_table import TimeTable
    from onnx_gconv.deploy.timing_file import Timing
    from onnx_gconv.evaluation import Evaluation
    from onnx_gconv.exploration.exploring import Exploration, explore
    from onnx_gconv.listener import Listener
    from onnx_gconv.model.network import Network
    from onnx_gconv.pipeline.applying import apply, mask
    from onnx_gconv.pipeline.benching import Device, bench, sweep
    from onnx_gconv.pipeline.compressing import compress, plan
    from onnx_gconv.pipeline.exporting import Exported, export
    from onnx_gconv.pipeline.finetuning import Finetuned, finetune
    from onnx_gconv.pipeline.looking import evaluate, inspect, verify
    from onnx_gconv.pipeline.planned import Planned
    from onnx_gconv.pipeline.result import Result
    from onnx_gconv.pipeline.rewriting import Rewritten
    from onnx_gconv.pipeline.settings import Settings
    from onnx_gconv.plans import Plan, read_plan
    from onnx_gconv.verification import Verification


def __getattr__(name: str) -> object:
    if name == "errors":
        return import_module("onnx_gconv.errors")
    if name not in _HOMES:
        raise AttributeError(f"module 'onnx_gconv' has no attribute {name!r}")
    value = getattr(import_module(f"onnx_gconv.{_HOMES[name]}"), name)
    globals()[name] = value  # asked for once
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
