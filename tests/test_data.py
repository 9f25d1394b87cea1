"""Data from npz files, folders of images and functions: the same batches, streamed, checked, and every refusal in words."""

import importlib.util
import sys
import tracemalloc
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from tiny import conv_net, write_module

from onnx_gconv.data.batch import Batch, Data, fixed_batch, rebatch
from onnx_gconv.data.inputs import model_inputs
from onnx_gconv.data.open import open_data
from onnx_gconv.data.preprocessing import Preprocessing
from onnx_gconv.errors import DataError

HEAD = '<ir_version: 8, opset_import: ["" : 17]> '
IMAGES = np.random.default_rng(0).standard_normal((7, 3, 8, 8)).astype(np.float32)
LABELS = np.array([3, 0, 1, 2, 1, 0, 3])
needs_pillow = pytest.mark.skipif(importlib.util.find_spec("PIL") is None, reason="Pillow is not installed")


def model(text: str) -> onnx.ModelProto:
    return onnx.parser.parse_model(HEAD + text)


def relu(inputs: str) -> onnx.ModelProto:
    """Return a model with these inputs; what it computes does not matter here."""
    return model(f"m ({inputs}) => (float[N] y) {{ y = Relu (x) }}")


TWO_INPUTS = relu("float[N,2] x, int64[N] ids")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Every test works in a folder of its own, and leaves the import path as it was."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
    return tmp_path


def opened(text: str, of: onnx.ModelProto | None = None, **preprocessing: Any) -> Data:
    return open_data(text, of or conv_net(), preprocessing=Preprocessing(**preprocessing))


def saved(**arrays: Any) -> str:
    np.savez("data.npz", **arrays)
    return "data.npz"


def consume(data: Data) -> None:
    for _ in data.batches(2):
        pass


def hint_of(error: pytest.ExceptionInfo[DataError]) -> str:
    return error.value.hint


# --- batches --------------------------------------------------------------------------------------------------------------


def write_function(text: str, *, module: str) -> str:
    write_module(module, text)
    return f"{module}:batches"


def as_npz() -> str:
    return saved(image=IMAGES, labels=LABELS)


def as_compressed_npz() -> str:
    np.savez_compressed("data.npz", image=IMAGES, labels=LABELS)
    return "data.npz"


def as_function() -> str:
    saved(image=IMAGES, labels=LABELS)
    return write_function(
        "def batches():\n"
        "    stored = np.load('data.npz')\n"
        "    for start, stop in ((0, 1), (1, 1), (1, 6), (6, 7)):\n"
        "        yield stored['image'][start:stop], stored['labels'][start:stop]\n",
        module="uneven",
    )


each_source = pytest.mark.parametrize("write", [as_npz, as_compressed_npz, as_function])


@each_source
@pytest.mark.parametrize("limit", [None, 1, 4, 6, 7, 100])
@pytest.mark.parametrize("size", [1, 2, 3, 7, 10])
def test_batches_hold_all_samples_in_order_at_every_pass(write: Callable[[], str], size: int, limit: int | None) -> None:
    data = opened(write())
    for _ in range(2):
        batches = list(data.batches(size, limit=limit))
        count = min(limit or 7, 7)
        assert [len(batch) for batch in batches] == [size] * (count // size) + [count % size] * (count % size > 0)
        np.testing.assert_array_equal(np.concatenate([batch.inputs["image"] for batch in batches]), IMAGES[:count])
        np.testing.assert_array_equal(
            np.concatenate([batch.labels for batch in batches if batch.labels is not None]), LABELS[:count]
        )
        for batch in batches:
            assert batch.inputs["image"].dtype == np.float32
            assert batch.inputs["image"].flags.c_contiguous
            assert batch.labels is not None
            assert batch.labels.dtype == np.int64


def test_an_npz_file_knows_its_name_its_samples_and_its_labels() -> None:
    data = opened(as_npz())
    assert (data.name, data.samples, data.has_labels) == ("data.npz", 7, True)
    data = opened(saved(image=IMAGES))
    assert not data.has_labels
    assert all(batch.labels is None for batch in data.batches(3))


def test_a_limit_of_nothing_gives_nothing() -> None:
    assert list(opened(as_npz()).batches(3, limit=0)) == []
    assert list(opened(as_function()).batches(3, limit=0)) == []


def test_rebatching_asks_for_no_more_batches_than_the_limit_needs() -> None:
    asked = []

    def given() -> Iterator[Batch]:
        for start in range(0, 7, 2):
            asked.append(start)
            yield Batch({"image": IMAGES[start : start + 2]}, None)

    assert [len(batch) for batch in rebatch(given(), 3, limit=4)] == [3, 1]
    assert asked == [0, 2]


@pytest.mark.parametrize(
    ("inputs", "size"),
    [
        ("float[N,2] x", None),
        ("float[4,2] x", 4),
        ("float[1,2] x", 1),
        ("float[N,2] x, float[4] z", 4),
        ("float[4,2] x, float[4] z", 4),
    ],
)
def test_the_fixed_batch_is_the_first_axis_of_the_inputs(inputs: str, size: int | None) -> None:
    assert fixed_batch(relu(inputs)) == size


def test_inputs_with_different_first_axes_have_no_samples() -> None:
    with pytest.raises(DataError, match=r"different first axes \(x 4, z 3\)"):
        fixed_batch(relu("float[4,2] x, float[3] z"))


def test_samples_on_a_later_axis_are_refused_and_one_sample_is_not() -> None:
    with pytest.raises(DataError, match=r"input 'state' of the model has the samples \('N'\) on axis 1"):
        model_inputs(relu("float[N,2] x, float[2,N,8] state"))
    for inputs in ("float[N,2] x, float[1,N,8] state", "float[N,N] x", "float[N,2] x, float[N,M] z", "float[N,2] x, float[4,M] z"):
        assert model_inputs(relu(inputs))


@pytest.mark.parametrize(
    ("inputs", "words"),
    [("string[N] x", "input 'x' of the model is string"), ("float x", "single number"), ("seq(float) x", "is no tensor")],
)
def test_a_model_input_that_no_data_fits_is_refused(inputs: str, words: str) -> None:
    with pytest.raises(DataError, match=words):
        opened(as_npz(), relu(inputs))


# --- npz files ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_an_npz_file_is_streamed_within_a_small_part_of_its_size(save: Any, rng: np.random.Generator) -> None:
    # 24 MB of samples, of which a batch of 4 is 96 kB. The budget is twenty batches: zip and zlib have buffers, too.
    images = np.tile(rng.standard_normal((1, 3, 8, 250)).astype(np.float32), (1000, 1, 1, 1))
    save("data.npz", image=images)
    wide = relu("float[N,3,8,250] x")
    wide.graph.input[0].name = "image"
    batch_bytes, all_bytes = images[:4].nbytes, images.nbytes
    del images
    tracemalloc.start()
    count = sum(len(batch) for batch in opened("data.npz", wide).batches(4))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert count == 1000
    assert peak < 20 * batch_bytes < all_bytes / 10


def test_a_limited_pass_reads_only_the_samples_it_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    data = opened(as_npz())
    lengths = []
    real = zipfile.ZipExtFile.read

    def read(stream: zipfile.ZipExtFile, n: int | None = -1) -> bytes:
        content = real(stream, n)
        lengths.append(len(content))
        return content

    monkeypatch.setattr(zipfile.ZipExtFile, "read", read)
    assert sum(len(batch) for batch in data.batches(2, limit=4)) == 4
    header = 128  # of an .npy file; two of them
    assert sum(lengths) == 2 * header + IMAGES[:4].nbytes + LABELS[:4].nbytes


@pytest.mark.parametrize("dtype", ["f2", "f4", "f8", ">f4"])
def test_floats_of_any_width_become_the_models(dtype: str) -> None:
    (batch,) = opened(saved(image=IMAGES.astype(dtype))).batches(10)
    assert batch.inputs["image"].dtype == np.dtype("f4")
    np.testing.assert_array_equal(batch.inputs["image"], IMAGES.astype(dtype).astype("f4"))


def test_whole_numbers_become_the_models_if_they_fit() -> None:
    pixels = np.array([[0, 255], [1, 2]])
    (batch,) = opened(saved(x=pixels), relu("uint8[N,2] x")).batches(10)
    assert batch.inputs["x"].dtype == np.uint8
    np.testing.assert_array_equal(batch.inputs["x"], pixels)
    for number in (256, -1):
        with pytest.raises(DataError, match=r"sample 1 \(from 0\) of 'x' holds a number that does not fit as uint8"):
            consume(opened(saved(x=np.array([[0, 1], [number, 2]])), relu("uint8[N,2] x")))


def test_several_inputs_go_by_name(rng: np.random.Generator) -> None:
    xs, ids = rng.standard_normal((5, 2)).astype(np.float32), np.arange(5, dtype=np.int32)
    (batch,) = opened(saved(ids=ids, x=xs), TWO_INPUTS).batches(10)
    np.testing.assert_array_equal(batch.inputs["x"], xs)
    np.testing.assert_array_equal(batch.inputs["ids"], ids)
    assert batch.inputs["ids"].dtype == np.int64


def test_dynamic_axes_take_any_size_and_a_fixed_batch_does_not_bind_the_file() -> None:
    assert opened(saved(image=np.ones((2, 3, 5, 9), np.float32)), conv_net(size="S")).samples == 2
    assert opened(saved(x=np.ones((5, 2), np.float32)), relu("float[4,2] x")).samples == 5


def test_an_input_named_labels_is_an_input() -> None:
    data = opened(saved(labels=np.ones((2, 2), np.float32)), relu("float[N,2] labels"))
    assert not data.has_labels


@pytest.mark.parametrize(
    ("arrays", "words"),
    [
        ({"images": IMAGES}, "no array for the input 'image': it holds 'images'"),
        ({"labels": LABELS}, "no array for the input 'image': it holds 'labels'"),
        ({"image": IMAGES, "label": LABELS}, "holds 'label', which is not an input"),
        ({"image": IMAGES[0]}, "'image' has 3 axes, but the model's input has 4"),
        ({"image": IMAGES[:, :1]}, "axis 1 of 'image' is 1, but the model's input wants 3"),
        ({"image": IMAGES[:, :, :, :7]}, "axis 3 of 'image' is 7, but the model's input wants 8"),
        ({"image": IMAGES[:0]}, "holds no samples"),
        ({"image": np.float32(1)}, "'image' is a single number"),
        ({"image": np.zeros((7, 3, 8, 8), np.uint8)}, "'image' is uint8, but the model's input takes float32"),
        ({"image": np.zeros((7, 3, 8, 8), np.int64)}, "'image' is int64, but the model's input takes float32"),
        ({"image": np.zeros((7, 3, 8, 8), np.complex64)}, "'image' is complex64"),
        ({"image": np.array([None, 1], object)}, "'image' holds Python objects, which are never unpickled"),
        ({"image": IMAGES, "labels": np.array([None] * 7)}, "'labels' holds Python objects"),
        ({"image": IMAGES, "labels": LABELS[:6]}, "numbers of samples differ: image 7, labels 6"),
        ({"image": IMAGES, "labels": LABELS[:, None]}, "labels are int64 with 2 axes, not one whole number"),
        ({"image": IMAGES, "labels": LABELS.astype(float)}, "labels are float64 with 1 axes, not one whole number"),
        ({"image": IMAGES, "labels": LABELS > 1}, "labels are bool"),
        ({"image": np.asfortranarray(IMAGES)}, "'image' is stored in Fortran order"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_arrays_that_do_not_fit_are_refused_before_anything_is_read(arrays: dict[str, Any], words: str) -> None:
    with pytest.raises(DataError, match=words) as error:
        opened(saved(**arrays))
    assert str(error.value).startswith("'data.npz'")
    assert hint_of(error)


def test_raw_pixels_for_a_float_input_get_a_hint_how_to_normalise() -> None:
    with pytest.raises(DataError) as error:
        opened(saved(image=np.zeros((2, 3, 8, 8), np.uint8)))
    assert "(x / 255 - mean) / std" in hint_of(error)


def test_wrong_names_get_the_models_inputs_as_a_hint() -> None:
    with pytest.raises(DataError) as error:
        opened(saved(a=np.ones(2)), TWO_INPUTS)
    assert "x (samplesx2, float32), ids (samples, int64)" in hint_of(error)


def test_an_axis_of_size_zero_is_refused_where_the_model_takes_any() -> None:
    with pytest.raises(DataError, match="'image' has an axis of size 0"):
        opened(saved(image=np.ones((2, 3, 0, 4), np.float32)), conv_net(size="S"))


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 1e300])
def test_a_sample_that_is_not_finite_is_named_when_it_is_reached(value: float) -> None:
    images = IMAGES.astype(np.float64)
    images[5, 0, 0, 0] = value
    data = opened(saved(image=images))
    assert len(list(data.batches(5, limit=5))) == 1
    with pytest.raises(DataError, match=r"sample 5 \(from 0\) of 'image' holds NaN or infinity as float32"):
        consume(data)


def test_a_negative_label_is_named() -> None:
    with pytest.raises(DataError, match=r"label of sample 4 \(from 0\) is -1"):
        consume(opened(saved(image=IMAGES, labels=[0, 0, 0, 0, -1, 0, 0])))


@pytest.mark.parametrize("content", [b"", b"# text", b"PK\x03\x04 and so on", bytes(5000)])
def test_a_file_that_is_no_npz_is_refused(content: bytes) -> None:
    Path("data.npz").write_bytes(content)
    with pytest.raises(DataError, match=r"'data.npz' is not an .npz file, or it is damaged: File is not a zip file"):
        opened("data.npz")


def test_a_member_that_is_no_array_or_of_another_length_is_refused() -> None:
    def write(content: bytes) -> None:
        with zipfile.ZipFile("data.npz", "w") as archive:
            archive.writestr("image.npy", content)

    np.save("image.npy", IMAGES)
    good = Path("image.npy").read_bytes()
    write(b"no array at all")
    with pytest.raises(DataError, match="damaged: 'image' is not a NumPy array"):
        opened("data.npz")
    for content in (good[:-1], good + b"0"):
        write(content)
        with pytest.raises(DataError, match="damaged: 'image' does not have the size that its header says"):
            opened("data.npz")


@pytest.mark.slow
@pytest.mark.parametrize("write", [as_npz, as_compressed_npz])
def test_a_file_cut_or_changed_anywhere_is_refused_in_words_or_harmless(write: Callable[[], str]) -> None:
    content = Path(write()).read_bytes()
    for length in range(0, len(content), 97):
        Path("data.npz").write_bytes(content[:length])
        with pytest.raises(DataError, match=r"'data.npz'"):
            consume(opened("data.npz"))
    refused = 0
    for position in range(0, len(content), 7):
        Path("data.npz").write_bytes(content[:position] + bytes([content[position] ^ 0xFF]) + content[position + 1 :])
        try:
            consume(opened("data.npz"))
        except DataError:
            refused += 1
    # Only bytes that say nothing about the samples may change: dates, versions, rights.
    assert refused > 0.9 * len(range(0, len(content), 7))


def test_a_missing_file_and_one_that_may_not_be_read_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DataError, match=r"there is no file 'data.npz'"):
        opened("data.npz")

    def forbid(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    saved(image=IMAGES)
    monkeypatch.setattr(zipfile, "ZipFile", forbid)
    with pytest.raises(DataError, match=r"cannot read 'data.npz': Permission denied"):
        opened("data.npz")


def test_a_file_that_is_replaced_after_it_was_opened_is_refused() -> None:
    data = opened(saved(image=IMAGES))
    saved(other=IMAGES)
    with pytest.raises(DataError, match=r"damaged: .*no item named 'image.npy'"):
        consume(data)


# --- what the text names --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "words"), [("data.txt", "is not an .npz file"), ("nowhere", "is not there"), ("a b:c", "is not there")]
)
def test_text_that_names_no_data_is_refused_with_the_three_forms(text: str, words: str) -> None:
    Path("data.txt").write_text("0 1 2")
    with pytest.raises(DataError, match=f"'{text}' {words}") as error:
        opened(text)
    assert hint_of(error) == "data is an .npz file, a folder of images, or package.module:function"


@each_source
@pytest.mark.parametrize("flag", [{"resize": 8}, {"crop": 8}, {"scale": 1.0}, {"mean": (0.5,)}, {"channel_order": "bgr"}])
def test_preprocessing_is_refused_for_data_that_comes_preprocessed(write: Callable[[], str], flag: dict[str, Any]) -> None:
    with pytest.raises(DataError, match="not a folder of images, so there is nothing to resize"):
        opened(write(), **flag)


# --- folders of images ----------------------------------------------------------------------------------------------------


def picture(path: str, *, size: tuple[int, int] = (8, 8), seed: int = 0, mode: str = "RGB") -> np.ndarray:
    """Write a picture of random pixels, without loss, and return them: height, width, channels."""
    from PIL import Image

    shape = (size[1], size[0], *([3] if mode == "RGB" else []))
    pixels = np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path)
    return pixels.reshape(size[1], size[0], -1)


def only_sample(data: Data) -> np.ndarray:
    (batch,) = data.batches(10)
    (values,) = batch.inputs.values()
    assert values.flags.c_contiguous
    (sample,) = values
    return np.asarray(sample)


@needs_pillow
def test_plain_images_become_one_over_255_without_labels() -> None:
    pixels = [picture(f"data/{name}", seed=seed) for seed, name in enumerate(["a.png", "b.bmp", "c.PNG"])]
    Path("data/.hidden.png").write_bytes(b"not an image")
    Path("data/notes.txt").write_text("not an image")
    data = opened("data")
    assert (data.name, data.samples, data.has_labels) == ("data", 3, False)
    (batch,) = data.batches(5)
    assert batch.labels is None
    assert batch.inputs["image"].dtype == np.float32
    expected = (np.stack(pixels).transpose(0, 3, 1, 2) / 255.0).astype(np.float32)
    np.testing.assert_array_equal(batch.inputs["image"], expected)


@needs_pillow
def test_sub_folders_are_classes_in_alphabetical_order_and_a_limit_sees_them_all() -> None:
    # All names differ, so that the order is told by the first pixel.
    names = ["cat/1.png", "cat/2.png", "cat/3.png", "ant/9.png", "dog/0.png", "dog/5.png"]
    pixels = {name: picture(f"data/{name}", seed=seed) for seed, name in enumerate(names)}
    data = opened("data")
    order = ["ant/9.png", "cat/1.png", "dog/0.png", "cat/2.png", "dog/5.png", "cat/3.png"]
    for limit in (3, 6):
        batches = list(data.batches(4, limit=limit))
        labels = [label for batch in batches if batch.labels is not None for label in batch.labels.tolist()]
        assert labels == [0, 1, 2, 1, 2, 1][:limit]
        found = np.concatenate([batch.inputs["image"] for batch in batches])
        expected = np.stack([pixels[name] for name in order[:limit]]).transpose(0, 3, 1, 2) / 255.0
        np.testing.assert_array_equal(found, expected.astype(np.float32))


@needs_pillow
def test_images_are_decoded_only_when_their_batch_is_due() -> None:
    picture("data/a.png")
    Path("data/b.png").write_bytes(b"not an image")
    batches = opened("data").batches(1)
    assert len(next(batches)) == 1
    with pytest.raises(DataError, match=r"the image 'data/b.png' cannot be read"):
        next(batches)


@needs_pillow
def test_scale_mean_and_std_are_applied_to_each_channel() -> None:
    pixels = picture("data/a.png").astype(np.float64)
    mean, std = (0.1, 0.2, 0.3), (0.5, 1.0, 2.0)
    expected = np.stack([(pixels[:, :, c] * 0.25 - mean[c]) / std[c] for c in range(3)]).astype(np.float32)
    np.testing.assert_array_equal(only_sample(opened("data", scale=0.25, mean=mean, std=std)), expected)
    backwards = np.stack([(pixels[:, :, 2 - c] * 0.25 - mean[c]) / std[c] for c in range(3)]).astype(np.float32)
    found = only_sample(opened("data", scale=0.25, mean=mean, std=std, channel_order="bgr"))
    np.testing.assert_array_equal(found, backwards)
    one_for_all = ((pixels / 255 - 0.5) / 0.25).transpose(2, 0, 1).astype(np.float32)
    np.testing.assert_allclose(only_sample(opened("data", mean=(0.5,), std=(0.25,))), one_for_all, rtol=1e-6)


@needs_pillow
def test_the_layout_and_the_channels_are_the_models() -> None:
    pixels = picture("data/a.png").astype(np.float64) / 255
    last = only_sample(opened("data", relu("float[N,8,8,3] x"), mean=(0.0, 0.5, 1.0)))
    np.testing.assert_allclose(last, pixels - [0.0, 0.5, 1.0], atol=1e-7)
    grey = only_sample(opened("data", relu("float[N,1,8,8] x")))
    # ITU-R 601-2, which Pillow rounds to whole numbers.
    np.testing.assert_allclose(grey[0], pixels @ [0.299, 0.587, 0.114], atol=1 / 255)
    assert only_sample(opened("data", relu("float[N,8,8,1] x"))).shape == (8, 8, 1)
    assert only_sample(opened("data", relu("double[N,3,8,8] x"))).dtype == np.float64


@needs_pillow
def test_a_grey_image_has_three_equal_channels_for_a_colour_model() -> None:
    pixels = picture("data/a.png", mode="L")
    expected = np.repeat(pixels.transpose(2, 0, 1) / 255.0, 3, axis=0).astype(np.float32)
    np.testing.assert_array_equal(only_sample(opened("data")), expected)


@needs_pillow
def test_a_model_of_bytes_gets_the_pixels_as_they_are() -> None:
    pixels = picture("data/a.png")
    found = only_sample(opened("data", relu("uint8[N,8,8,3] x")))
    assert found.dtype == np.uint8
    np.testing.assert_array_equal(found, pixels)
    with pytest.raises(DataError, match="takes pixels as they are"):
        opened("data", relu("uint8[N,8,8,3] x"), scale=0.5)


@needs_pillow
def test_the_centre_is_cut_out_at_the_models_size_and_resizing_keeps_the_proportions() -> None:
    pixels = picture("data/a.png", size=(12, 10))
    expected = (pixels[1:9, 2:10].transpose(2, 0, 1) / 255.0).astype(np.float32)
    np.testing.assert_array_equal(only_sample(opened("data")), expected)
    dynamic = conv_net(size="S")
    assert only_sample(opened("data", dynamic)).shape == (3, 10, 12)
    assert only_sample(opened("data", dynamic, crop=(6, 4))).shape == (3, 4, 6)
    assert only_sample(opened("data", dynamic, resize=5)).shape == (3, 5, 6)
    assert only_sample(opened("data", dynamic, resize=(7, 9))).shape == (3, 9, 7)
    assert only_sample(opened("data", dynamic, resize=20, crop=16)).shape == (3, 16, 16)


@needs_pillow
def test_resizing_a_uniform_image_changes_no_pixel() -> None:
    from PIL import Image

    Path("data").mkdir()
    Image.new("RGB", (40, 30), (51, 102, 204)).save("data/a.png")
    found = only_sample(opened("data", resize=8))
    np.testing.assert_array_equal(found, np.broadcast_to(np.float32([[[0.2]], [[0.4]], [[0.8]]]), (3, 8, 8)))


@needs_pillow
@pytest.mark.parametrize(
    ("inputs", "preprocessing", "words"),
    [
        ("float[N,2] x, int64[N] ids", {}, r"the model has 2 inputs \(x, ids\)"),
        ("float[N,4,8,8] x", {}, "does not say where the channels"),
        ("float[N,A,B,C] x", {}, "does not say where the channels"),
        ("float[N,3] x", {}, "does not say where the channels"),
        ("int32[N,3,8,8] x", {}, "takes no pixels"),
        ("float[N,3,8,8] x", {"crop": 7}, "takes images of 8x8, not the crop of 7x7"),
        ("float[N,3,8,8] x", {"mean": (1.0, 2.0)}, "--mean has 2 numbers, but .* has 3 channels"),
        ("float[N,1,8,8] x", {"std": (1.0, 2.0, 3.0)}, "--std has 3 numbers, but .* has 1 channels"),
    ],
)
def test_a_model_that_takes_no_such_images_is_refused(inputs: str, preprocessing: dict[str, Any], words: str) -> None:
    picture("data/a.png")
    with pytest.raises(DataError, match=words):
        opened("data", relu(inputs), **preprocessing)


@needs_pillow
@pytest.mark.parametrize(
    ("files", "words"),
    [
        ([], "the folder 'data' holds no images"),
        (["notes.txt"], "the folder 'data' holds no images"),
        (["a.png", "cat/b.png"], "holds images and sub-folders"),
        (["cat/b.png", "dog/notes.txt"], "the sub-folder 'data/dog' holds no images"),
        (["train/cat/b.png"], "the sub-folder 'data/train' holds no images"),
    ],
)
def test_a_folder_without_clear_samples_is_refused(files: list[str], words: str) -> None:
    Path("data").mkdir()
    for name in files:
        if name.endswith(".png"):
            picture(f"data/{name}")
        else:
            Path("data", name).parent.mkdir(exist_ok=True)
            Path("data", name).write_text("no image")
    with pytest.raises(DataError, match=words):
        opened("data")


@needs_pillow
def test_images_that_do_not_fit_are_named() -> None:
    from PIL import Image

    picture("data/a.png", size=(8, 7))
    with pytest.raises(DataError, match=r"'data/a.png' is 8x7 pixels, smaller than the 8x8 to cut out") as error:
        consume(opened("data"))
    assert "--resize 8" in hint_of(error)
    with pytest.raises(DataError, match=r"'data/a.png': axis 2 of 'x' is 7, but the model's input wants 8"):
        consume(opened("data", relu("float[N,3,8,W] x")))
    picture("data/b.png", size=(9, 7))
    with pytest.raises(DataError, match=r"'data/a.png' and 'data/b.png' have different sizes, 3x7x8 and 3x7x9"):
        consume(opened("data", conv_net(size="S")))
    Image.fromarray(np.full((8, 8), 60000, np.uint16)).save("data/a.png")
    with pytest.raises(DataError, match=r"'data/a.png' has more than 8 bits a channel"):
        consume(opened("data"))


@needs_pillow
@pytest.mark.parametrize("length", [0, 10, 60, 150])
def test_an_image_cut_short_is_named(length: int) -> None:
    picture("data/a.png")
    content = Path("data/a.png").read_bytes()
    assert length < len(content)
    Path("data/a.png").write_bytes(content[:length])
    with pytest.raises(DataError, match=r"the image 'data/a.png' cannot be read"):
        consume(opened("data"))


def test_without_pillow_the_command_that_installs_it_is_the_hint(monkeypatch: pytest.MonkeyPatch) -> None:
    Path("data").mkdir()
    monkeypatch.setattr("onnx_gconv.data.folder.find_spec", lambda name: None)
    with pytest.raises(DataError, match="needs Pillow, which is not installed") as error:
        opened("data")
    assert hint_of(error) == "pip install 'onnx-gconv[images]'"


# --- functions ------------------------------------------------------------------------------------------------------------


def test_a_function_is_called_anew_for_each_pass_and_may_give_what_arrays_are_made_of() -> None:
    text = (
        "calls = []\n"
        "def batches():\n"
        "    calls.append(1)\n"
        "    return [({'x': [[1.0, 2.0]], 'ids': [4]}, None), [{'x': np.ones((2, 2)), 'ids': np.arange(2)}, None]]\n"
    )
    data = opened(write_function(text, module="counting"), TWO_INPUTS)
    assert (data.name, data.samples, data.has_labels) == ("counting:batches", None, False)
    for _ in range(2):
        (batch,) = data.batches(5)
        np.testing.assert_array_equal(batch.inputs["x"], np.array([[1, 2], [1, 1], [1, 1]], np.float32))
        np.testing.assert_array_equal(batch.inputs["ids"], [4, 0, 1])
        assert batch.labels is None
    assert len(sys.modules["counting"].calls) == 3  # once when opened


def test_an_endless_function_ends_at_the_limit() -> None:
    text = "def batches():\n    while True:\n        yield np.ones((4, 3, 8, 8)), np.zeros(4, int)\n"
    data = opened(write_function(text, module="endless"))
    assert [len(batch) for batch in data.batches(5, limit=12)] == [5, 5, 2]


def test_what_a_function_prints_does_not_get_into_our_result(capsys: pytest.CaptureFixture[str]) -> None:
    text = "print('importing')\ndef batches():\n    print('working')\n    yield np.ones((1, 3, 8, 8)), None\n"
    consume(opened(write_function(text, module="talking")))
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.splitlines() == ["importing", "working", "working"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("x = 1", "the module 'broken' has no 'batches'"),
        ("batches = 1", "the module 'broken' has no function 'batches'"),
        ("def batches(:", r"broken:batches cannot be imported: SyntaxError"),
        ("import no_such_package", "broken:batches cannot be imported: ModuleNotFoundError: No module named 'no_such_package'"),
        ("1 / 0", r"cannot be imported: ZeroDivisionError: division by zero \(.*broken.py, line 2\)"),
        ("def batches(path): return []", "broken:batches failed: TypeError: batches.. missing 1 required"),
        ("def batches():\n  raise KeyError('cat')", r"broken:batches failed: KeyError: 'cat' \(.*broken.py, line 3\)"),
        ("def batches():\n  yield 1/0", r"broken:batches failed: ZeroDivisionError"),
        ("def batches(): return None", "broken:batches returned NoneType, not batches"),
        ("def batches(): return []", "broken:batches gives no batches"),
        ("def batches(): return [np.ones((1, 3, 8, 8))]", r"broken:batches gave ndarray, not \(inputs, labels\)"),
        ("def batches(): return [(1, 2, 3)]", r"broken:batches gave tuple of 3, not \(inputs, labels\)"),
        ("def batches(): return [({'x': 1}, None)]", "broken:batches gave the inputs 'x'"),
        ("def batches(): return [([[1], [2, 3]], None)]", "gave an input 'image' that is no array: ValueError"),
        ("def batches(): return [(None, None)]", "'image' holds Python objects"),
        ("def batches(): return [(np.ones((1, 3, 8, 9)), None)]", "broken:batches: axis 3 of 'image' is 9"),
        ("def batches(): return [(np.ones((1, 3, 8, 8), int), None)]", "'image' is int64, but the model's input takes float32"),
        ("def batches(): return [(np.ones((2, 3, 8, 8)), [1])]", "numbers of samples in a batch differ: image 2, labels 1"),
        ("def batches(): return [(np.ones((1, 3, 8, 8)), [0.5])]", "the labels are float64"),
        ("def batches(): return [(np.ones((1, 3, 8, 8)), [[1], [2, 3]])]", "gave labels that are no array"),
    ],
)
def test_a_function_that_breaks_the_contract_is_told_how(text: str, words: str) -> None:
    with pytest.raises(DataError, match=words) as error:
        opened(write_function(text, module="broken"))
    assert hint_of(error)


@pytest.mark.parametrize(
    ("later", "words"),
    [
        ("np.ones((1, 3, 8, 8)), None", "gives labels with some batches only"),
        ("np.full((1, 3, 8, 8), np.nan), [0]", r"sample 2 \(from 0\) of 'image' holds NaN"),
        ("np.ones((1, 3, 8, 8)), [-3]", r"label of sample 2 \(from 0\) is -3"),
        ("np.ones((1, 3, 9, 9)), [0]", "different shapes, 3x8x8 and 3x9x9"),
    ],
)
def test_later_batches_are_checked_too(later: str, words: str) -> None:
    text = f"def batches():\n    yield np.ones((2, 3, 8, 8)), [0, 1]\n    yield {later}\n"
    data = opened(write_function(text, module="later"), conv_net(size="S"))
    with pytest.raises(DataError, match=words):
        list(data.batches(3))


@pytest.mark.parametrize(
    ("text", "missing"), [("nowhere:f", "nowhere"), ("nowhere.at.all:f", "nowhere"), ("package.missing:f", "package.missing")]
)
def test_a_module_that_is_not_there_is_named(text: str, missing: str) -> None:
    Path("package").mkdir()
    Path("package/__init__.py").touch()
    with pytest.raises(DataError, match=f"there is no module '{missing}' for {text}") as error:
        opened(text)
    assert "current directory" in hint_of(error)


def test_several_inputs_need_a_dict() -> None:
    text = "def batches(): return [(np.ones((1, 2)), None)]"
    with pytest.raises(DataError, match="gave inputs as ndarray, but the model has 2 inputs"):
        opened(write_function(text, module="single"), TWO_INPUTS)
