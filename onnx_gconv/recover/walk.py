"""A walk through a model with all calibration batches at once, each node run once."""

from collections.abc import Callable, Collection, Iterable, Sequence

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from onnx_gconv.errors import ModelError
from onnx_gconv.recover.flow import Flow
from onnx_gconv.recover.store import ActivationStore
from onnx_gconv.runtime import Feeds, Output, run, session

Arrays = dict[str, NDArray[np.generic]]
Stop = Callable[[int], Arrays]  # what a stop of a walk asks for, by the number of the batch


SAMPLES_A_SHARE = 16


def put_inputs(feeds: Iterable[Feeds], names: Sequence[str], stores: Sequence[ActivationStore]) -> list[range]:
    """Keep the model's inputs as the first tensors of these stores, and return the batches in runs of some samples each.

    A run is a piece of work for a thread: single samples would be too small to multiply matrices of.
    """
    samples = []
    for number, batch in enumerate(feeds):
        samples.append(len(batch[names[0]]))
        for store in stores:
            for name in names:
                store.put(name, number, batch[name])
    run = -(-SAMPLES_A_SHARE // max(1, samples[0]))
    return [range(start, min(start + run, len(samples))) for start in range(0, len(samples), run)]


class Walk:
    """How far a model has been run: the store holds every tensor that a node still to run, or somebody later, reads."""

    def __init__(self, flow: Flow, store: ActivationStore, *, later: Iterable[Collection[str]]) -> None:
        self.flow = flow
        self.constants: dict[str, NDArray[np.generic]] = {}  # new weights, by name
        self._store = store
        self._done: set[int] = set()
        self.stops = 0
        self._later = [set(names) for names in later]  # what each stop of the walk will ask for, in order
        self._needed = set(flow.places_before(set().union(*self._later), ()))

    def next_stop(self) -> Stop:
        """Return how to compute what the next stop asks for, batch by batch (in any order, on any thread)."""
        self.stops += 1
        wanted = self._later.pop(0)
        known = self._store.names()
        places = self.flow.places_before(wanted, known)
        self._done.update(places)
        given = {name: self._store.get(name, 0) for name in known}
        produced = {name for place in places for name in self.flow.nodes[place].output if name}
        outputs = sorted({name for name in produced if self._is_live(name)} | (wanted - known))
        active = session(self.flow.piece(places, given, outputs, self.constants), threads=1) if outputs else None
        inputs = [] if active is None else [value.name for value in active.get_inputs()]

        def compute(batch: int) -> Arrays:
            if active is not None and not self._store.has(outputs[0], batch):
                feeds: Feeds = {name: self._store.get(name, batch) for name in inputs}
                for name, value in _run(active, feeds).items():
                    self._store.put(name, batch, _array(name, value))
            return {name: self._store.get(name, batch) for name in wanted}

        return compute

    def again(self, tensor: str, *, given: str) -> Callable[[int], None]:
        """Return how to compute a tensor once more in a batch, out of another one: weights between them have changed."""
        places = self.flow.places_before([tensor], [given])
        example = {given: self._store.get(given, 0)}
        active = session(self.flow.piece(places, example, [tensor], self.constants), threads=1)

        def compute(batch: int) -> None:
            found = _run(active, {given: self._store.get(given, batch)})
            self._store.replace(tensor, batch, _array(tensor, found[tensor]))

        return compute

    def tidy(self) -> None:
        """Forget what nobody will read again. Call it when every batch of a stop is done."""
        for name in self._store.names():
            if not self._is_live(name):
                self._store.drop(name)

    def _is_live(self, name: str) -> bool:
        if not self.flow.is_moving(name):
            return False  # a constant: computed anew wherever it is read
        unread = (place for place in self.flow.readers.get(name, ()) if place in self._needed)
        return any(place not in self._done for place in unread) or any(name in names for names in self._later)


def _run(active: ort.InferenceSession, feeds: Feeds) -> dict[str, Output]:
    """Run a piece of the model. Its inputs are tensors that the user has never heard of: what is wrong are the samples."""
    try:
        return run(active, feeds)
    except ModelError as error:
        raise ModelError(
            f"the model does not run on the calibration samples: {error.__cause__}".splitlines()[0],
            hint="give samples in a shape that the model accepts, for all of its inputs",
        ) from error


def _array(name: str, value: object) -> NDArray[np.generic]:
    if not isinstance(value, np.ndarray):
        raise ModelError(f"the tensor {name!r} is a sequence or a map, which recovery cannot carry.", hint="leave out --calib")
    return value
