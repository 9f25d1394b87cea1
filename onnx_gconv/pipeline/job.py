"""One call of the pipeline: what it works on, what is wanted, what is known, and whom to tell."""

from dataclasses import dataclass, field

from onnx_gconv.listener import SILENT, Listener
from onnx_gconv.pipeline.facts import Facts
from onnx_gconv.pipeline.original import Original
from onnx_gconv.pipeline.settings import Settings
from onnx_gconv.pipeline.stopwatch import Stopwatch


@dataclass(frozen=True, eq=False)
class Job:
    """All that the steps of one call have in common."""

    original: Original
    settings: Settings
    facts: Facts = field(default_factory=Facts)
    listener: Listener = SILENT
    watch: Stopwatch = field(default_factory=Stopwatch)
