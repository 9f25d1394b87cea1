"""Accuracy and distance, against figures worked out here; and the contract of the command."""

import importlib.util
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from tiny import Finished, conv_net, gconv, listing, save, write_module

from onnx_gconv.cli.main import build_parser
from onnx_gconv.cli.options import wishes
from onnx_gconv.data.batch import Batch
from onnx_gconv.data.open import open_data
from onnx_gconv.data.preprocessing import Preprocessing
from onnx_gconv.errors import DataError, GconvError, ModelError, VerifyError
from onnx_gconv.evaluation import Distance, Evaluation, evaluate
from onnx_gconv.pipeline.settings import Settings

MODELS = Path(__file__).parents[1] / "models"
HEAD = '<ir_version: 8, opset_import: ["" : 17]> '
SAMPLES, CLASSES = 120, 8  # more than two batches
LOGITS = np.random.default_rng(0).standard_normal((SAMPLES, CLASSES)).astype(np.float32)
LABELS = np.random.default_rng(1).integers(0, CLASSES, SAMPLES)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
    return tmp_path


def net(body: str = "y = Identity (x)", *, inputs: str = "float[N,C] x", outputs: str = "float[N,C] y") -> onnx.ModelProto:
    """Return a model whose logits are, unless told otherwise, its input."""
    return onnx.parser.parse_model(f"{HEAD} m ({inputs}) => ({outputs}) {{ {body} }}")


SHIFTED = "two = Constant <value = float[2] {0.5, 0.0}> () z = Concat <axis = 0> (two, two, two, two) y = Add (x, z)"


def evaluated(
    model: onnx.ModelProto, *, reference: onnx.ModelProto | None = None, limit: int | None = None, **arrays: Any
) -> Evaluation:
    np.savez("data.npz", **arrays)
    data = open_data("data.npz", model, preprocessing=Preprocessing())
    return evaluate(model, data, reference=reference, limit=limit)


def share_among_first(logits: np.ndarray, labels: np.ndarray, places: int) -> float:
    """Return the share of rows that have their label among the largest; of equal numbers the first class is larger."""
    hits = 0
    for row, label in zip(logits.tolist(), labels.tolist(), strict=True):
        hits += label in sorted(range(len(row)), key=lambda index: (-row[index], index))[:places]
    return hits / len(labels)


# --- accuracy -------------------------------------------------------------------------------------------------------------


def test_the_sample_model_gets_all_360_test_images_right() -> None:
    model = onnx.load(MODELS / "digits.onnx")
    data = open_data(str(MODELS / "digits_test.npz"), model, preprocessing=Preprocessing())
    result = evaluate(model, data)
    assert (result.samples, result.top1, result.top5) == (360, 1.0, 1.0)
    assert (result.agreement, result.outputs, result.reference_top1) == (None, {}, None)


def test_top_1_and_top_5_are_those_of_a_plain_sort() -> None:
    result = evaluated(net(), x=LOGITS, labels=LABELS)
    assert result.samples == SAMPLES
    assert result.top1 == share_among_first(LOGITS, LABELS, 1)
    assert result.top5 == share_among_first(LOGITS, LABELS, 5)
    assert 0 < result.top1 < result.top5 < 1


def test_of_equal_outputs_the_first_class_counts_as_larger() -> None:
    flat = evaluated(net(), x=np.zeros((CLASSES, CLASSES), np.float32), labels=np.arange(CLASSES))
    assert (flat.top1, flat.top5) == (1 / CLASSES, 5 / CLASSES)
    coarse = np.round(LOGITS)
    result = evaluated(net(), x=coarse, labels=LABELS)
    assert (result.top1, result.top5) == (share_among_first(coarse, LABELS, 1), share_among_first(coarse, LABELS, 5))


@pytest.mark.parametrize(("classes", "has_top5"), [(2, False), (5, False), (6, True)])
def test_top_5_needs_six_classes(classes: int, has_top5: bool) -> None:
    result = evaluated(net(), x=LOGITS[:, :classes], labels=LABELS % classes)
    assert (result.top5 is not None) == has_top5
    assert result.top1 == share_among_first(LOGITS[:, :classes], LABELS % classes, 1)


def test_only_the_first_samples_count_under_a_limit() -> None:
    result = evaluated(net(), limit=70, x=LOGITS, labels=LABELS)
    assert result.samples == 70
    assert result.top1 == share_among_first(LOGITS[:70], LABELS[:70], 1)


@pytest.mark.parametrize("size", [1, 7, 50, 500])
def test_a_fixed_batch_is_filled_up_and_the_filling_does_not_count(size: int) -> None:
    fixed = net(inputs=f"float[{size},C] x", outputs=f"float[{size},C] y")
    shifted = net(SHIFTED, inputs=f"float[{size},C] x", outputs=f"float[{size},C] y")
    expected = evaluated(net(), reference=net(SHIFTED), x=LOGITS, labels=LABELS)
    found = evaluated(fixed, reference=shifted, x=LOGITS, labels=LABELS)
    assert (found.samples, found.top1, found.top5) == (expected.samples, expected.top1, expected.top5)
    assert (found.reference_top1, found.agreement) == (expected.reference_top1, expected.agreement)
    assert found.outputs["y"].max_abs == expected.outputs["y"].max_abs
    # Sums of 960 float64 squares in another order.
    assert found.outputs["y"].relative_l2 == pytest.approx(expected.outputs["y"].relative_l2, rel=1e-12)


def test_logits_may_have_two_axes_of_size_one() -> None:
    model = net(inputs="float[N,C,1,1] x", outputs="float[N,C,1,1] y")
    result = evaluated(model, x=LOGITS[:, :, None, None], labels=LABELS)
    assert result.top1 == share_among_first(LOGITS, LABELS, 1)


def test_the_first_output_that_looks_like_classes_holds_them() -> None:
    body = "ids = ArgMax <axis = 1> (x) cube = Unsqueeze (x, three) y = Neg (x) z = Identity (x)"
    model = net(body, outputs="int64[N,K] ids, float[N,C,A] cube, float[N,C] y, float[N,C] z")
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.array([2]), "three"))
    assert evaluated(model, x=LOGITS, labels=LABELS).top1 == share_among_first(-LOGITS, LABELS, 1)


# --- distance to a reference ----------------------------------------------------------------------------------------------


def test_distance_and_agreement_are_taken_over_all_samples() -> None:
    reference = net(SHIFTED)
    result = evaluated(net(), reference=reference, x=LOGITS)
    expected = LOGITS + np.tile(np.float32([0.5, 0.0]), CLASSES // 2)
    gap = expected.astype(np.float64) - LOGITS
    assert result.outputs["y"].max_abs == np.abs(gap).max()
    assert result.outputs["y"].relative_l2 == pytest.approx(
        np.linalg.norm(gap) / np.linalg.norm(expected.astype(np.float64)), rel=1e-12
    )
    assert result.agreement == np.mean(LOGITS.argmax(axis=1) == expected.argmax(axis=1))
    assert result.agreement < 1
    assert (result.top1, result.top5, result.reference_top1) == (None, None, None)


def test_with_labels_the_accuracy_of_the_reference_stands_beside() -> None:
    result = evaluated(net("y = Neg (x)"), reference=net(), x=LOGITS, labels=LABELS)
    assert (result.top1, result.top5) == (share_among_first(-LOGITS, LABELS, 1), share_among_first(-LOGITS, LABELS, 5))
    assert (result.reference_top1, result.reference_top5) == (
        share_among_first(LOGITS, LABELS, 1),
        share_among_first(LOGITS, LABELS, 5),
    )


def test_a_model_is_no_distance_from_itself(rng: np.random.Generator) -> None:
    result = evaluated(conv_net(), reference=conv_net(), image=rng.standard_normal((9, 3, 8, 8)))
    assert result.agreement == 1
    assert result.outputs == {"scores": Distance(0, 0)}


def test_a_real_model_is_judged_by_what_onnx_runtime_gives(rng: np.random.Generator) -> None:
    images, labels = rng.standard_normal((60, 3, 8, 8)).astype(np.float32), rng.integers(0, 4, 60)
    one, two = conv_net(seed=0), conv_net(seed=1)
    found, expected = (ort.InferenceSession(m.SerializeToString()).run(None, {"image": images})[0] for m in (one, two))
    result = evaluated(one, reference=two, image=images, labels=labels)
    assert result.top1 == np.mean(found.argmax(axis=1) == labels)
    assert result.agreement == np.mean(found.argmax(axis=1) == expected.argmax(axis=1))
    # Batches of 50 or of 60 may add up in another order: a few float32 roundings of numbers near 1.
    assert result.outputs["scores"].max_abs == pytest.approx(np.abs(found - expected).max(), abs=1e-6)


def test_a_model_that_does_not_classify_has_a_distance_only(rng: np.random.Generator) -> None:
    model = net(inputs="float[N,C,4] x", outputs="float[N,C,4] y")
    reference = net("y = Add (x, x)", inputs="float[N,C,4] x", outputs="float[N,C,4] y")
    boxes = rng.standard_normal((6, 5, 4)).astype(np.float32)
    for arrays in ({"x": boxes}, {"x": boxes, "labels": np.zeros(6, int)}):
        result = evaluated(model, reference=reference, **arrays)
        assert (result.samples, result.top1, result.agreement) == (6, None, None)
        assert result.outputs["y"].relative_l2 == pytest.approx(0.5)
    with pytest.raises(ModelError, match="the model does not classify: none of 'y' has one number for each class") as error:
        evaluated(model, x=boxes, labels=np.zeros(6, int))
    assert "--reference" in error.value.hint


def test_one_number_for_each_sample_is_no_class() -> None:
    with pytest.raises(ModelError, match="does not classify"):
        evaluated(net(), x=LOGITS[:, :1], labels=LABELS)


def test_outputs_that_are_not_floating_point_have_no_distance() -> None:
    model = net("ids = ArgMax <axis = 1> (x) y = Identity (x)", outputs="int64[N,K] ids, float[N,C] y")
    assert set(evaluated(model, reference=model, x=LOGITS).outputs) == {"y"}


@pytest.mark.parametrize(
    ("model", "reference"),
    [
        ("y = Transpose <perm = [0, 2, 1]> (x)", "y = Identity (x)"),
        ("y = Log (x)", "y = Identity (x)"),
        ("y = Identity (x)", "y = Log (x)"),
    ],
    ids=["shapes", "NaN", "NaN in the reference"],
)
def test_what_cannot_be_compared_is_infinitely_far_and_null_in_json(model: str, reference: str) -> None:
    models = [net(body, inputs="float[N,2,3] x", outputs="float[N,A,B] y") for body in (model, reference)]
    result = evaluated(models[0], reference=models[1], x=-np.ones((60, 2, 3), np.float32))
    assert result.outputs["y"].max_abs == float("inf")
    assert result.as_dict()["outputs"] == {"y": {"max_abs": None, "relative_l2": None}}


def test_a_reference_of_zeros_has_no_relative_error_unless_the_model_is_zero_too() -> None:
    zero = net("y = Sub (x, x)")
    assert evaluated(zero, reference=zero, x=LOGITS).outputs["y"] == Distance(0, 0)
    assert evaluated(net(), reference=zero, x=LOGITS).as_dict()["outputs"] == {
        "y": {"max_abs": float(np.abs(LOGITS).max()), "relative_l2": None}
    }


def test_a_half_precision_model_is_compared_with_its_float32_original() -> None:
    half = net(inputs="float16[N,C] x", outputs="float16[N,C] y")
    result = evaluated(half, reference=net(), x=LOGITS, labels=LABELS)
    # The reference sees the numbers that the half-precision input holds.
    assert result.outputs["y"] == Distance(0, 0)
    assert result.top1 == share_among_first(LOGITS.astype(np.float16), LABELS, 1)


# --- refusals -------------------------------------------------------------------------------------------------------------


def test_without_labels_and_reference_there_is_nothing_to_say() -> None:
    with pytest.raises(DataError, match=r"'data.npz' has no labels, and there is no reference") as error:
        evaluated(net(), x=LOGITS)
    assert error.value.hint.startswith("give --reference DENSE.onnx, or labels: ")


def test_a_label_that_the_model_has_no_class_for_is_named() -> None:
    labels = LABELS.copy()
    labels[77] = CLASSES
    with pytest.raises(DataError, match=r"label of sample 77 \(from 0\) is 8, but the model has 8 classes"):
        evaluated(net(), x=LOGITS, labels=labels)


def test_a_sample_on_which_the_model_gives_nan_is_named() -> None:
    numbers = np.abs(LOGITS)
    numbers[63, 2] = -1
    with pytest.raises(ModelError, match=r"output 'y' is NaN on sample 63 \(from 0\)"):
        evaluated(net("y = Log (x)"), x=numbers, labels=LABELS)


@pytest.mark.parametrize(
    ("reference", "error", "words"),
    [
        (net("z = Identity (x)", outputs="float[N,C] z"), VerifyError, "different outputs: y and z"),
        (net("y = Identity (z)", inputs="float[N,C] z"), VerifyError, "different inputs: x and z"),
        (net("y = Concat <axis = 1> (x, x)"), ModelError, "'y' does not always have one number for each of the same classes"),
        (net(inputs="float[3,C] x"), ModelError, "the two models take 2 and 3 samples at once"),
    ],
)
def test_a_reference_that_is_another_kind_of_model_is_refused(
    reference: onnx.ModelProto, error: type[GconvError], words: str
) -> None:
    model = net(inputs="float[2,C] x", outputs="float[M,C] y") if "samples" in words else net()
    with pytest.raises(error, match=words):
        evaluated(model, reference=reference, x=LOGITS)


def test_maps_are_compared_by_their_numbers() -> None:
    def zipped(scale: float) -> onnx.ModelProto:
        text = f"""<ir_version: 8, opset_import: ["": 17, "ai.onnx.ml": 3]> g (float[N,C] x) => (float[N,C] s) {{
          k = Constant <value = float {{{scale}}}> () s = Mul (x, k)
          z = ai.onnx.ml.ZipMap <classlabels_strings = {list("abcdefgh")}> (s) }}"""
        model = onnx.parser.parse_model(text.replace("'", '"'))
        numbers = onnx.helper.make_map_type_proto(onnx.TensorProto.STRING, onnx.helper.make_tensor_type_proto(1, ()))
        model.graph.output[0].CopyFrom(onnx.helper.make_value_info("z", onnx.helper.make_sequence_type_proto(numbers)))
        return model

    found = evaluated(zipped(1.5), reference=zipped(1.0), x=LOGITS)
    assert found.outputs["z"].relative_l2 == pytest.approx(0.5)
    assert found.top1 is None  # the keys of a map are in no sequence of classes


def test_models_without_floating_point_outputs_cannot_be_compared() -> None:
    model = net("ids = ArgMax <axis = 1> (x)", outputs="int64[N,K] ids")
    with pytest.raises(ModelError, match="no output of floating-point numbers in common"):
        evaluated(model, reference=model, x=LOGITS)


def test_a_shape_that_only_onnx_runtime_refuses_gets_a_hint_about_the_data() -> None:
    model = net("w = Constant <value = float[3] {1.0, 2.0, 3.0}> () y = Add (x, w)")
    with pytest.raises(ModelError, match="cannot run the model on inputs x 50x8") as error:
        evaluated(model, x=LOGITS, labels=LABELS)
    assert error.value.hint == "give data in a shape that the model accepts"


def test_data_that_gives_nothing_at_the_second_call_is_refused() -> None:
    write_module("used_up", "once = iter([(np.ones((1, 8)), [0])])\ndef batches():\n    return once\n")
    data = open_data("used_up:batches", net(), preprocessing=Preprocessing())
    with pytest.raises(DataError, match="'used_up:batches' gave no samples"):
        evaluate(net(), data)


def test_progress_counts_samples_and_knows_the_total_where_there_is_one() -> None:
    np.savez("data.npz", x=LOGITS, labels=LABELS)
    write_module("endless", "def batches():\n    while True:\n        yield np.ones((30, 8)), np.zeros(30, int)\n")
    write_module("short", "def batches():\n    yield np.ones((30, 8)), np.zeros(30, int)\n")
    for text, limit, expected in (
        ("data.npz", None, [(50, 120), (100, 120), (120, 120)]),
        ("data.npz", 70, [(50, 70), (70, 70)]),
        ("data.npz", 1000, [(50, 120), (100, 120), (120, 120)]),
        ("endless:batches", 60, [(50, 60), (60, 60)]),
        ("short:batches", None, [(30, None)]),
    ):
        calls: list[tuple[int, int | None]] = []
        data = open_data(text, net(), preprocessing=Preprocessing())
        evaluate(net(), data, limit=limit, on_progress=lambda done, total, what, calls=calls: calls.append((done, total)))
        assert calls == expected


# --- the command ----------------------------------------------------------------------------------------------------------


def command(*more: str) -> Finished:
    save(net(), Path("net.onnx"))
    save(net("y = Neg (x)"), Path("other.onnx"))
    np.savez("data.npz", x=LOGITS, labels=LABELS)
    before = listing(Path())
    finished = gconv("evaluate", "net.onnx", *more)
    assert listing(Path()) == before
    return finished


def test_the_command_prints_a_table_and_nothing_else() -> None:
    finished = command("--data", "data.npz")
    hits = round(share_among_first(LOGITS, LABELS, 1) * SAMPLES)
    assert (finished.code, finished.err) == (0, "")
    assert "120 samples" in finished.out
    assert f"{hits / SAMPLES:.2%} ({hits})" in finished.out
    assert "reference" not in finished.out
    finished = command("--data", "data.npz", "--reference", "other.onnx")
    assert "same class as the reference" in finished.out
    assert "relative L2 error" in finished.out


def test_the_command_prints_json_that_holds_the_evaluation() -> None:
    finished = command("--data", "data.npz", "--reference", "other.onnx", "--limit", "100", "--json")
    assert (finished.code, finished.err) == (0, "")
    assert json.loads(finished.out) == {
        "format": 1,
        "model": "net.onnx",
        "data": "data.npz",
        "reference": "other.onnx",
        **evaluated(net(), reference=net("y = Neg (x)"), limit=100, x=LOGITS, labels=LABELS).as_dict(),
    }
    without = json.loads(command("--data", "data.npz", "--json").out)
    assert (without["reference"], without["agreement"], without["outputs"]) == (None, None, {})


def test_a_model_that_does_not_classify_gets_a_table_of_distances_alone() -> None:
    save(net(inputs="float[N,2,4] x", outputs="float[N,2,4] y"), Path("boxes.onnx"))
    np.savez("boxes.npz", x=np.ones((3, 2, 4), np.float32))
    finished = gconv("evaluate", "boxes.onnx", "--data", "boxes.npz", "--reference", "boxes.onnx")
    assert finished.code == 0
    assert "distance to the reference, 3 samples" in finished.out
    assert "top-1" not in finished.out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--data", "missing.npz"], "there is no file 'missing.npz'"),
        (["--data", "net.onnx"], "the data 'net.onnx' is not an .npz file"),
        (["--data", "nowhere:f"], "there is no module 'nowhere'"),
        (["--data", "data.npz", "--resize", "8"], "not a folder of images"),
        (["--data", "data.npz", "--reference", "missing.onnx"], "there is no file 'missing.onnx'"),
    ],
)
def test_what_the_user_can_mend_is_one_error_one_hint_and_exit_code_1(arguments: list[str], words: str) -> None:
    finished = command(*arguments)
    assert finished.code == 1
    assert finished.out == ""
    assert [line.partition(": ")[0] for line in finished.err.splitlines()] == ["error", "hint"]
    assert words in finished.err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "--data"),
        (["--limit", "0"], "not a whole number of at least 1"),
        (["--resize", "big"], "'big' is not a whole number"),
        (["--resize", "1x2x3"], "'1x2x3' is not a size like 224 or 320x240"),
        (["--crop", "0"], "'0' is not a whole number of at least 1"),
        (["--scale", "1/0"], "'1/0' is not a number like 0.5 or 1/255"),
        (["--scale", "inf"], "'inf' is not a finite number"),
        (["--mean", "0.5;0.5"], "'0.5;0.5' is not a number"),
        (["--std", "1,0,1"], "--std: 1,0,1 is not above 0"),
        (["--channel-order", "gbr"], "invalid choice"),
    ],
)
def test_wrong_usage_is_exit_code_2(arguments: list[str], words: str) -> None:
    finished = command(*(["--data", "data.npz", *arguments] if arguments else []))
    assert finished.code == 2
    assert finished.out == ""
    assert words in finished.err


def test_the_flags_of_images_become_the_preprocessing() -> None:
    def parsed(*flags: str) -> Preprocessing:
        return Settings(**wishes(build_parser().parse_args(["evaluate", "net.onnx", "--data", "images", *flags]))).preprocessing

    assert parsed() == Preprocessing()
    flags = (
        "--resize",
        "256",
        "--crop",
        "320x240",
        "--scale",
        "1/128",
        "--mean",
        "0.5",
        "--std",
        "1,2,3",
        "--channel-order",
        "bgr",
    )
    assert parsed(*flags) == Preprocessing(256, (320, 240), 1 / 128, (0.5,), (1.0, 2.0, 3.0), "bgr")


@pytest.mark.skipif(importlib.util.find_spec("PIL") is None, reason="Pillow is not installed")
def test_a_folder_of_images_is_evaluated_as_the_same_pixels_in_a_file() -> None:
    from PIL import Image

    stored = np.load(MODELS / "digits_test.npz")
    for index, (image, label) in enumerate(zip(stored["input"][:40], stored["labels"][:40], strict=True)):
        folder = Path("digits", str(label))
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.round(image[0] * 16).astype(np.uint8)).save(folder / f"{index}.png")
    finished = gconv("evaluate", MODELS / "digits.onnx", "--data", "digits", "--scale", "1/16", "--json")
    assert finished.code == 0, finished.err
    assert (json.loads(finished.out)["samples"], json.loads(finished.out)["top1"]) == (40, 1.0)


@pytest.mark.parametrize(
    ("shape", "most"),
    [
        ("N, 3, 32, 32", 50),
        ("N, 3, 224, 224", 6),  # a million numbers; what the layers make of fifty such images would fill gigabytes
        ("N, 3, H, W", 6),  # open axes are taken to be of the usual size
        ("N, 3, 2000, 2000", 1),
        ("4, 3, 224, 224", 4),
    ],
)
def test_few_large_samples_are_run_at_once(shape: str, most: int) -> None:
    model = net("y = ReduceMean <axes = [2, 3]> (x)", inputs=f"float[{shape}] x", outputs="float[N,3,1,1] y")
    asked = []

    class Watched:
        """Data that tells how much of it is asked for at once."""

        name, samples, has_labels = "watched", 1, False

        def batches(self, size: int, *, limit: int | None = None) -> Iterator[Batch]:
            asked.append(size)
            height, width = (int(axis) if axis.strip().isdigit() else 8 for axis in shape.split(",")[2:])
            yield Batch({"x": np.ones((1, 3, height, width), np.float32)}, None)

    evaluate(model, Watched(), reference=model)
    assert asked == [most]
