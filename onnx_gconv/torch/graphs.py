"""The two graphs that a plan can be trained in, masked and compact: the same function, but not equally fast."""

from collections.abc import Mapping
from dataclasses import dataclass

import onnx
import torch

from onnx_gconv.errors import TrainingError, VerifyError
from onnx_gconv.model.constants import Constants
from onnx_gconv.model.network import settle_shapes
from onnx_gconv.model.shapes import Shape, input_shapes
from onnx_gconv.plans import Plan
from onnx_gconv.rewrite.compact import compact
from onnx_gconv.rewrite.dropped import settle
from onnx_gconv.rewrite.group import placement_of
from onnx_gconv.rewrite.match import match
from onnx_gconv.runtime import observe_shapes
from onnx_gconv.torch.comparing import require_equal
from onnx_gconv.torch.importing import Trained, build, find_trained, stored_tensors
from onnx_gconv.torch.landmarks import Sight, block_ends
from onnx_gconv.torch.masks import hold_masks, require_trainable
from onnx_gconv.torch.module import OnnxModule
from onnx_gconv.torch.training import GraphName
from onnx_gconv.torch.write_back import write_back
from onnx_gconv.verification import default_tolerance, verify


@dataclass(frozen=True, eq=False)
class Student:
    """A module to train, and where it is compared with a teacher."""

    graph: GraphName
    module: OnnxModule
    sight: Sight


class Graphs:
    """A masked model to start from, the compact one of its plan, and what leads from one to the other."""

    def __init__(self, start: onnx.ModelProto, plan: Plan, shapes: Mapping[str, Shape], *, seed: int) -> None:
        self._shapes, self._seed = shapes, seed
        tensors = settle_shapes(start, input_shapes(start, shapes), observe=observe_shapes)
        self._matched = match(start, plan, shapes=tensors)
        require_trainable(self._matched)
        self._start = settle(start, self._matched.dropped)
        self._constants, self._trained = Constants(self._start), find_trained(self._start)
        self._placement = placement_of(self._start, self._matched, shapes=tensors)
        self._compact = compact(self._start, self._matched, self._placement)
        module = build(self._start)
        if not any(True for _ in module.parameters()):
            raise TrainingError("the model has no weights that can be trained.", hint="only weights in its main graph can")
        made = {name for node in self._compact.model.graph.node for name in node.output}
        self._ends = tuple(name for name in block_ends(module.program) if name in made)
        self._channels = {
            name: torch.from_numpy(self._compact.channels[name]) for name in self._ends if name in self._compact.channels
        }

    @property
    def differ(self) -> bool:
        """Whether there are two: a plan may change nothing."""
        return bool(self._matched)

    def masked(self) -> Student:
        """Return the student in the masked graph."""
        module = build(self._start)
        self._require_equal(module, self._start)
        hold_masks(module, self._start, self._matched)
        # Channels that go are not compared: nobody reads them.
        kept = {name: channels for name, channels in self._channels.items() if name in self._compact.narrowed}
        return Student("masked", module, Sight(self._ends, kept, kept))

    def obstacle(self) -> str:
        """Return why the compact graph cannot be trained in the place of the masked one, "" if it can."""
        return self._compact.obstacle(self._trained.all, self._constants) or self._difference()

    def compact(self) -> Student:
        """Return the student in the compact graph, unless there is an obstacle."""
        sources = {name: self._compact.source(name) for name in stored_tensors(self._compact.model)}
        trained = Trained(
            frozenset(name for name in sources if sources[name] in self._trained.learned),
            frozenset(name for name in sources if sources[name] in self._trained.statistics),
        )
        module = build(self._compact.model, trained)
        self._require_equal(module, self._compact.model)
        return Student("compact", module, Sight(self._ends, teacher=self._channels))

    def returned(self, student: Student) -> onnx.ModelProto:
        """Return the masked model with what the student has learned, after ONNX Runtime has found it to do the same."""
        values = {name: value.detach().cpu().numpy() for name, value in student.module.trained().items()}
        if student.graph == "masked":
            tuned = write_back(values, self._start)
            self._require_equal(student.module, tuned)
        else:
            tuned = write_back(self._compact.returned(values, self._constants), self._start)
            self._require_equal(student.module, compact(tuned, self._matched, self._placement).model)
        return tuned

    def _require_equal(self, module: OnnxModule, model: onnx.ModelProto) -> None:
        require_equal(module, model, shapes=self._shapes, seed=self._seed)

    def _difference(self) -> str:
        """Return how the compact model differs from the masked one, "" if it does not: models may amplify rounding."""
        changed, tolerance = self._matched.changed_in(self._compact.model), default_tolerance(self._start)
        inner = {name: self._placement.read.get(name) for name in changed}
        try:
            found = verify(self._start, self._compact.model, tolerance=tolerance, seed=self._seed, shapes=self._shapes, inner=inner)
        except VerifyError as error:
            return str(error).rstrip(".")
        return "" if found.passed else f"it differs from the masked one by {found.max_rel_error:.1e} of the largest value"
