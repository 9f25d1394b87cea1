"""`inspect`, `verify` and `evaluate`: what a model is, whether two are the same function, and how well one does."""

from typing import Unpack

from onnx_gconv import evaluation, verification
from onnx_gconv.data.open import DataLike, open_data
from onnx_gconv.errors import UsageError
from onnx_gconv.evaluation import Evaluation
from onnx_gconv.listener import SILENT, Listener
from onnx_gconv.model.network import Network
from onnx_gconv.model.shapes import ShapeLike
from onnx_gconv.pipeline.original import ModelLike, open_original, tell_counts
from onnx_gconv.pipeline.settings import ImageWishes, settings_of
from onnx_gconv.verification import SAMPLES, Verification, default_tolerance


def inspect(model: ModelLike, *, input_shape: ShapeLike = (), listener: Listener = SILENT) -> Network:
    """Return the Convs of a model: layers that can be grouped, skipped ones with the reason, and what it all counts.

        network = onnx_gconv.inspect("model.onnx")
        print(network.count.macs, [layer.legal_groups for layer in network.layers])

    MACs are counted at the shape that the model declares, or at `input_shape` where axes are dynamic.
    """
    original = open_original(model, input_shape)
    tell_counts(original, listener)
    return original.network


def verify(
    model: ModelLike,
    other: ModelLike,
    *,
    tolerance: float | None = None,
    samples: int = SAMPLES,
    seed: int = 0,
    input_shape: ShapeLike = (),
) -> Verification:
    """Return how far two models are from each other on seeded inputs; `passed` says whether within the tolerance.

    Differences are relative to the largest value of each output. The default tolerance depends on the type: 1e-4 for float32.
    """
    if samples < 1:
        raise UsageError(f"--samples {samples} compares nothing: ask for at least 1")
    if tolerance is not None and not tolerance >= 0:
        raise UsageError(f"--tolerance {tolerance} is not a number of at least 0: leave it out for the default of the model's type")
    one, two = open_original(model, input_shape), open_original(other)
    limit = default_tolerance(one.model) if tolerance is None else tolerance
    return verification.verify(one.model, two.model, tolerance=limit, seed=seed, samples=samples, shapes=one.given_shapes)


def evaluate(
    model: ModelLike,
    data: DataLike,
    *,
    reference: ModelLike | None = None,
    limit: int | None = None,
    listener: Listener = SILENT,
    **images: Unpack[ImageWishes],
) -> Evaluation:
    """Return how often the model is right, where there are labels, and how close it is to a reference, where there is one.

        onnx_gconv.evaluate("small.onnx", "test.npz", reference="model.onnx").top1

    Data without labels needs a reference, and so does a model that does not classify.
    """
    settings = settings_of("evaluate", images, ImageWishes)
    opened = open_original(model).model
    other = None if reference is None else open_original(reference).model
    samples = open_data(data, opened, preprocessing=settings.preprocessing)
    return evaluation.evaluate(opened, samples, reference=other, limit=limit, on_progress=listener.phase("evaluating"))
