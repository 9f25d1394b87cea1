"""What a training is made of: losses, learning rates, augmentation, the split, spooled data, checkpoints."""

from pathlib import Path

import numpy as np
import pytest
from tiny import conv_net, from_text, save

torch = pytest.importorskip("torch", reason="PyTorch is not installed: pip install 'onnx-gconv[torch]'")

from onnx_gconv.data.open import open_data  # noqa: E402
from onnx_gconv.data.preprocessing import Preprocessing  # noqa: E402
from onnx_gconv.errors import DataError, TrainingError  # noqa: E402
from onnx_gconv.torch import checkpoint, load  # noqa: E402
from onnx_gconv.torch.augment import Draw, augmented, draw  # noqa: E402
from onnx_gconv.torch.checkpoint import Checkpoint  # noqa: E402
from onnx_gconv.torch.landmarks import WithLandmarks, block_ends, landmarks  # noqa: E402
from onnx_gconv.torch.loss import TEMPERATURE, Landmark, Loss  # noqa: E402
from onnx_gconv.torch.schedule import factor  # noqa: E402
from onnx_gconv.torch.spool import Samples, Spool, spooled  # noqa: E402
from onnx_gconv.torch.team import Team, assembled  # noqa: E402
from onnx_gconv.torch.training import LANDMARKS, Training, TrainingSettings, _laid_out, split  # noqa: E402

pytestmark = pytest.mark.torch

ALONE = Team(0, 1, 0, torch.device("cpu"))
SETTINGS = TrainingSettings(
    epochs=2,
    lr=0.05,
    batch_size=8,
    schedule="cosine",
    distill=0.0,
    crop=False,
    flip=False,
    amp=False,
    seed=0,
    freeze_bn=False,
    val_split=0.25,
)


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max(1, keepdims=True))
    return e / e.sum(1, keepdims=True)


STUDENT, TEACHER = np.random.default_rng(0).standard_normal((2, 6, 4))
LABELS = np.array([0, 1, 2, 3, 0, 1])
CROSS_ENTROPY = -np.log(softmax(STUDENT)[np.arange(6), LABELS]).mean()
DIVERGENCE = TEMPERATURE**2 * (
    (softmax(TEACHER / TEMPERATURE) * np.log(softmax(TEACHER / TEMPERATURE) / softmax(STUDENT / TEMPERATURE))).sum(1).mean()
)


def tensors(*arrays: np.ndarray) -> tuple[torch.Tensor, ...]:
    return tuple(torch.from_numpy(array).float() for array in arrays)


@pytest.mark.parametrize("distill", [0.0, 0.3, 1.0])
def test_the_loss_mixes_cross_entropy_and_divergence(distill: float) -> None:
    found = Loss(distill, ("Gemm",))(tensors(STUDENT), tensors(TEACHER), torch.from_numpy(LABELS))
    assert float(found) == pytest.approx(distill * DIVERGENCE + (1 - distill) * CROSS_ENTROPY, rel=1e-5)


@pytest.mark.parametrize(
    ("maker", "given"),
    [("Softmax", softmax), ("LogSoftmax", lambda x: np.log(softmax(x))), ("Gemm", lambda x: x[:, :, None, None])],
)
def test_probabilities_and_maps_of_one_pixel_count_as_the_classes_they_are(maker: str, given: object) -> None:
    student, teacher = given(STUDENT), given(TEACHER)  # type: ignore[operator]
    found = Loss(0.5, (maker,))(tensors(student), tensors(teacher), torch.from_numpy(LABELS))
    assert float(found) == pytest.approx(0.5 * DIVERGENCE + 0.5 * CROSS_ENTROPY, rel=1e-4)


def test_an_output_that_is_no_class_is_compared_by_its_squared_error_as_a_share_of_its_variance(rng: np.random.Generator) -> None:
    map_of_student, map_of_teacher = rng.standard_normal((2, 3, 1, 5, 5)) * 7
    loss = Loss(1.0, ("Conv",))
    found = loss(tensors(map_of_student), tensors(map_of_teacher), None)
    assert float(found) == pytest.approx(((map_of_student - map_of_teacher) ** 2).mean() / map_of_teacher.var(), rel=1e-5)
    assert loss.right(tensors(map_of_student), tensors(map_of_teacher)) is None
    with pytest.raises(DataError, match="does not classify"):
        Loss(0.5, ("Conv",))(tensors(map_of_student), tensors(map_of_teacher), torch.zeros(3, dtype=torch.int64))


def test_landmarks_are_where_branches_join_behind_the_activation(rng: np.random.Generator) -> None:
    model = from_text(
        """r (float[N, 2, 4, 4] x) => (float[N, 2, 4, 4] y)
        {
            a = Conv<pads = [1, 1, 1, 1]>(x, w)
            s = Add(a, x)
            r = Relu(s)
            b = Add(r, shift)
            c = Conv<pads = [1, 1, 1, 1]>(b, w)
            t = Add(c, r)
            n = Neg(t)
            k = Relu(t)
            q = Concat<axis = 1>(n, k)
            y = Slice(q, zero, two, one)
        }""",
        w=rng.standard_normal((2, 2, 3, 3)).astype(np.float32),
        shift=np.ones(1, np.float32),
        zero=np.array([0]),
        one=np.array([1]),
        two=np.array([2]),
    )
    program = load(model).program
    # `b` adds a constant; `t` has other readers besides its Relu.
    assert block_ends(program) == landmarks(block_ends(program), program, program) == ("r", "t", "q")
    straight = load(conv_net()).program
    relus = tuple(node.outputs[0] for node in straight.nodes if node.op == "Relu")
    assert block_ends(straight) == landmarks(relus, straight, straight) == relus != ()
    assert landmarks(block_ends(program), program, straight) == ()


def test_landmarks_count_as_much_as_they_are_told_and_only_as_far_as_the_teacher_does(rng: np.random.Generator) -> None:
    inside, wanted = tensors(*rng.standard_normal((2, 6, 3, 2, 2)))
    error = float(((inside - wanted) ** 2).mean())
    marks = [Landmark(inside, wanted, 7.0), Landmark(wanted, wanted, 5.0)]
    found = Loss(0.5, ("Gemm",))(tensors(STUDENT), tensors(TEACHER), torch.from_numpy(LABELS), marks)
    assert float(found) == pytest.approx(0.5 * (DIVERGENCE + 7.0 * error) + 0.5 * CROSS_ENTROPY, rel=1e-5)


def test_a_label_beyond_the_classes_is_refused() -> None:
    with pytest.raises(DataError, match=r"a label is 4, but the model has 4 classes"):
        Loss(0.0, ("Gemm",))(tensors(STUDENT), None, torch.full((6,), 4))


def test_right_counts_labels_and_without_them_the_teachers_classes() -> None:
    loss = Loss(0.0, ("Gemm",))
    assert loss.right(tensors(STUDENT), torch.from_numpy(LABELS)) == (STUDENT.argmax(1) == LABELS).sum()
    assert loss.right(tensors(STUDENT), tensors(TEACHER)) == (STUDENT.argmax(1) == TEACHER.argmax(1)).sum()


def test_the_learning_rate_falls_by_ten_after_each_third_or_along_a_cosine() -> None:
    assert [factor("multistep", step / 9) for step in range(9)] == pytest.approx([1, 1, 1, 0.1, 0.1, 0.1, 0.01, 0.01, 0.01])
    assert [factor("cosine", progress) for progress in (0, 1 / 3, 0.5, 1)] == pytest.approx([1, 0.75, 0.5, 0])


def test_a_crop_is_a_window_of_the_image_with_a_border_of_zeros_and_a_flip_its_mirror_image(rng: np.random.Generator) -> None:
    images = torch.from_numpy(rng.standard_normal((3, 2, 16, 8))).float()
    bordered = np.zeros((3, 2, 20, 10), np.float32)
    bordered[:, :, 2:-2, 1:-1] = images.numpy()
    fixed = Draw(torch.tensor([0.0, 0.5, 0.99]), torch.tensor([0.99, 0.5, 0.0]), torch.tensor([False, True, False]))
    corners = [(0, 2), (2, 1), (4, 0)]
    windows = [bordered[n, :, top : top + 16, left : left + 8] for n, (top, left) in enumerate(corners)]
    assert np.array_equal(augmented(images, fixed, crop=True, flip=False).numpy(), np.stack(windows))
    windows[1] = windows[1][:, :, ::-1]
    assert np.array_equal(augmented(images, fixed, crop=True, flip=True).numpy(), np.stack(windows))
    vector = torch.ones(3, 5)
    assert augmented(vector, fixed, crop=True, flip=True) is vector


def test_all_corners_of_a_crop_are_drawn_and_half_of_the_flips() -> None:
    drawn = draw(3000, torch.Generator().manual_seed(0))
    assert set((drawn.down * 9).long().tolist()) == set(range(9))
    assert 1400 < int(drawn.flipped.sum()) < 1600


def test_the_split_is_a_partition_that_the_seed_decides() -> None:
    parts = split(50, 0.1, 0)
    assert len(parts.validation) == 5
    assert sorted([*parts.train.tolist(), *parts.validation.tolist()]) == list(range(50))
    assert torch.equal(parts.train, split(50, 0.1, 0).train)
    assert not torch.equal(parts.validation, split(50, 0.1, 1).validation)
    assert len(split(50, 0.0, 0).validation) == 0
    with pytest.raises(DataError, match="one sample cannot be split"):
        split(1, 0.1, 0)


def test_spooled_data_can_be_taken_in_any_order_and_is_gone_afterwards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator
) -> None:
    images, labels = rng.standard_normal((700, 3, 8, 8)).astype(np.float32), rng.integers(0, 4, 700)
    np.savez(tmp_path / "data.npz", image=images, labels=labels)
    (tmp_path / "spool").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "spool"))
    data = open_data(str(tmp_path / "data.npz"), conv_net(), preprocessing=Preprocessing())
    with spooled(data, ALONE) as spool:
        assert len(spool) == 700
        taken = spool.take(torch.tensor([699, 3, 3]))
        assert np.array_equal(taken.inputs["image"].numpy(), images[[699, 3, 3]])
        assert taken.labels is not None
        assert taken.labels.tolist() == labels[[699, 3, 3]].tolist()
        assert list((tmp_path / "spool").iterdir()) != []
    assert list((tmp_path / "spool").iterdir()) == []


def training(**changes: object) -> Training:
    """Return a training of the tiny net on 40 samples."""
    rng = np.random.default_rng(1)
    spool = Spool({"image": rng.standard_normal((40, 3, 8, 8)).astype(np.float32)}, rng.integers(0, 4, 40))
    teacher = load(conv_net()) if changes.get("distill") else None
    return Training(load(conv_net(seed=1)), teacher, spool, TrainingSettings(**{**vars(SETTINGS), **changes}), ALONE)  # type: ignore[arg-type]


def test_each_epoch_sees_every_training_sample_once_in_an_order_of_its_own() -> None:
    run = training(batch_size=10)
    orders = [torch.cat([samples.inputs["image"] for samples in run._batches(epoch)]) for epoch in (1, 2, 1)]
    assert all(len(order) == 30 for order in orders)
    assert torch.equal(orders[0], orders[2])
    assert not torch.equal(orders[0], orders[1])
    assert torch.equal(orders[0].sum(dim=(1, 2, 3)).sort().values, orders[1].sum(dim=(1, 2, 3)).sort().values)


def test_one_step_is_that_of_sgd_by_hand() -> None:
    """Nesterov, decay on weights only, the gradient's norm limited to one."""
    run = training(batch_size=30, epochs=1, val_split=0.25)
    (samples,) = run._batches(1)
    before = {name: value.detach().clone() for name, value in run.module.named_parameters()}
    loss = torch.nn.functional.cross_entropy(run.module(**samples.inputs), samples.labels)
    gradients = dict(zip(before, torch.autograd.grad(loss, list(run.module.parameters())), strict=True))
    norm = torch.cat([gradient.flatten() for gradient in gradients.values()]).norm()
    run.train_epoch(1, lambda done, total, text: None)
    for name, value in run.module.named_parameters():
        gradient = gradients[name] / max(1.0, float(norm)) + (1e-4 * before[name] if before[name].ndim > 1 else 0)
        # The first momentum is the gradient itself, and Nesterov looks ahead by 0.9 of it.
        assert torch.allclose(value, before[name] - 0.05 * 1.9 * gradient, rtol=1e-4, atol=1e-6), name


@pytest.mark.parametrize(("epoch", "left"), [(1, 1.0), (4, 0.5)])
def test_landmarks_are_weighed_against_the_distance_of_the_outputs_and_less_as_the_rate_falls(epoch: int, left: float) -> None:
    run = training(distill=1.0, epochs=6, lr=0.1)
    names = tuple(run.landmarks)
    first = run.spool.take(run.split.train[:8]).inputs  # a batch of them
    run._weigh_landmarks(epoch)
    with torch.no_grad():
        (ours, inside), (theirs, wanted) = (WithLandmarks(module.eval(), names)(**first) for module in (run.module, run.teacher))
        marks = [Landmark(*each) for each in zip(inside, wanted, run.landmarks.values(), strict=True)]
        outputs, all_of_it = (float(run.loss(ours, theirs, None, some)) for some in ([], marks))
    assert all_of_it == pytest.approx((1 + left * LANDMARKS) * outputs, rel=1e-4)
    # Each counts by its error relative to what it varies.
    relative = {
        name: weight * float(value.var(correction=0)) for (name, weight), value in zip(run.landmarks.items(), wanted, strict=True)
    }
    assert len(set(relative)) > 1
    assert list(relative.values()) == pytest.approx([next(iter(relative.values()))] * len(relative), rel=1e-4)


def test_a_student_with_landmarks_comes_closer_to_its_teacher_inside() -> None:
    def error_inside(*, follows: bool) -> float:
        run = training(distill=1.0, epochs=6, lr=0.1)
        names, images = tuple(run.landmarks), run.spool.take(run.split.validation).inputs
        if not follows:
            run.landmarks, run.net = {}, WithLandmarks(run.module, ())
        for epoch in range(1, 7):
            run.train_epoch(epoch, lambda done, total, text: None)
        with torch.no_grad():
            ours, theirs = (WithLandmarks(module, names)(**images)[1] for module in (run.module, run.teacher))
        return sum(float((one - other).square().mean() / other.var()) for one, other in zip(ours, theirs, strict=True))

    assert error_inside(follows=True) < error_inside(follows=False)


def test_a_record_of_validation_is_what_the_model_does_on_the_part_held_back() -> None:
    run = training()
    record = run.validate(0)
    held = run.spool.take(run.split.validation)
    with torch.no_grad():
        scores = run.module.eval()(**held.inputs)
    assert record.validation_accuracy == pytest.approx(float((scores.argmax(1) == held.labels).float().mean()))
    assert record.validation_loss == pytest.approx(float(torch.nn.functional.cross_entropy(scores, held.labels)), rel=1e-6)
    assert record.train_loss is None


def test_images_go_in_with_their_channels_innermost_and_their_values_as_they_were() -> None:
    images, rows = torch.arange(2.0 * 3 * 4 * 5).reshape(2, 3, 4, 5), torch.arange(6.0).reshape(2, 3)
    laid_out = _laid_out(Samples({"images": images, "rows": rows}, torch.tensor([0, 1])))
    assert laid_out.inputs["images"].stride() == (60, 1, 15, 3)
    assert torch.equal(laid_out.inputs["images"], images)
    assert laid_out.inputs["rows"] is rows
    assert laid_out.labels is not None


def test_half_precision_on_the_cpu_learns_too() -> None:
    run = training(amp=True, epochs=8, distill=1.0, lr=0.1)
    before = run.validate(0).validation_loss
    for epoch in range(1, 9):
        record = run.train_epoch(epoch, lambda done, total, text: None)
    assert before is not None
    assert record.validation_loss is not None
    assert record.validation_loss < 0.7 * before
    assert all(parameter.dtype == torch.float32 for parameter in run.module.parameters())


def test_a_checkpoint_of_another_training_is_refused_with_what_differs(tmp_path: Path) -> None:
    path = checkpoint.path_beside(tmp_path / "tuned.onnx")
    with pytest.raises(TrainingError, match="there is no checkpoint"):
        checkpoint.read(path)
    checkpoint.write(Checkpoint({"--lr": "0.1", "data": "a"}, {"w": torch.ones(2)}, {}, {}, [{"epoch": 0}]), path)
    found = checkpoint.read(path)
    checkpoint.require_same(found, {"--lr": "0.1", "data": "a"}, path)
    assert torch.equal(found.weights["w"], torch.ones(2))
    with pytest.raises(TrainingError, match=r"its --lr was '0.1', now it is '0.2'"):
        checkpoint.require_same(found, {"--lr": "0.2", "data": "a"}, path)
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(TrainingError, match="cannot be read"):
        checkpoint.read(path)


def test_a_device_that_is_not_there_is_refused() -> None:
    with pytest.raises(TrainingError, match="is not a device"), assembled("warp"):
        pass
    if not torch.cuda.is_available():
        with pytest.raises(TrainingError, match="no CUDA device"), assembled("cuda"):
            pass


def test_too_few_samples_for_the_processes_are_refused(tmp_path: Path) -> None:
    save(conv_net(), tmp_path / "net.onnx")
    spool = Spool({"image": np.zeros((2, 3, 8, 8), np.float32)}, np.zeros(2, np.int64))
    with pytest.raises(DataError, match="too few for 4 processes"):
        Training(load(conv_net()), None, spool, SETTINGS, Team(0, 4, 0, torch.device("cpu")))
