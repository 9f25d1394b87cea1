"""`finetune`: from a model and a plan to tuned weights that `apply` groups without loss; interrupted, resumed, distributed."""

import json
import os
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from tiny import Finished, conv_net, gconv, get_tensor, save, set_tensor

torch = pytest.importorskip("torch", reason="PyTorch is not installed: pip install 'onnx-gconv[torch]'")

from onnx_gconv.errors import TrainingError  # noqa: E402
from onnx_gconv.torch import load  # noqa: E402
from onnx_gconv.torch.finetuning import _require_masks  # noqa: E402
from onnx_gconv.torch.training import Training  # noqa: E402

pytestmark = pytest.mark.torch

ROOT = Path(__file__).parents[1]
MODELS = ROOT / "models"
SAMPLES = 96
METRICS = {"epoch", "learning_rate", "train_loss", "validation_loss", "validation_accuracy", "seconds"}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Every test works in a folder of its own: net.onnx, its plan, and data with and without labels."""
    torch.set_num_threads(1)
    monkeypatch.chdir(tmp_path)
    save(conv_net(), Path("net.onnx"))
    images = np.random.default_rng(0).standard_normal((SAMPLES, 3, 8, 8)).astype(np.float32)
    (scores,) = onnx.reference.ReferenceEvaluator(conv_net()).run(None, {"image": images})
    np.savez("unlabelled.npz", image=images)
    np.savez("labelled.npz", image=images, labels=scores.argmax(1))
    run("plan net.onnx --groups 4 -o plan.json")
    return tmp_path


def run(command: str) -> str:
    """Run a command that must work; return its stderr."""
    finished = gconv(*command.split())
    assert finished.code == 0, finished
    return finished.err


def refused(command: str) -> str:
    """Run a command that must fail for a reason; return its stderr."""
    finished = gconv(*command.split())
    assert finished.code == 1, finished
    assert not Path("tuned.onnx").exists()
    return finished.err


def history(path: str = "tuned.metrics.jsonl") -> list[dict[str, float]]:
    return [json.loads(line) for line in Path(path).read_text(encoding="utf-8").splitlines()]


TUNE = "finetune net.onnx plan.json -o tuned.onnx --train-graph masked --epochs 4 --batch-size 16 --lr 0.1 --val-split 0.25 --data"


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags", ["labelled.npz", "unlabelled.npz", "labelled.npz --distill 0.5 --schedule multistep --augment crop,flip"]
)
def test_a_tuned_model_is_better_keeps_its_graph_and_loses_nothing_when_it_is_grouped(flags: str) -> None:
    told = run(f"{TUNE} {flags}")
    run("mask net.onnx plan.json -o masked.onnx")
    tuned, masked = onnx.load("tuned.onnx"), onnx.load("masked.onnx")
    assert all(not np.array_equal(get_tensor(tuned, name), get_tensor(masked, name)) for name in ("w1", "b1", "w2", "b3", "w4"))
    for tensor in masked.graph.initializer:
        set_tensor(tuned, tensor.name, get_tensor(masked, tensor.name))
    set_tensor(masked, "w1", get_tensor(masked, "w1"))  # the same sequence of initializers as in `tuned`
    assert tuned.graph.node == masked.graph.node
    assert tuned.graph.input == masked.graph.input
    assert {t.name: t.dims for t in tuned.graph.initializer} == {t.name: t.dims for t in masked.graph.initializer}
    assert "dropped 0% of their weight" in run("apply tuned.onnx plan.json -o grouped.onnx")
    records = history()
    assert [record["epoch"] for record in records] == [0, 1, 2, 3, 4]
    assert all(record.keys() == METRICS for record in records)
    assert min(record["validation_loss"] for record in records[1:]) < records[0]["validation_loss"]
    assert told.splitlines()[-1].startswith("wrote tuned.onnx: the weights of epoch ")


def test_the_weights_written_are_those_of_the_best_epoch_by_the_part_held_back() -> None:
    told = run(f"{TUNE} labelled.npz --lr 1.5 --epochs 6")
    records = history()
    best = max(records, key=lambda record: (record["validation_accuracy"], -record["validation_loss"]))
    assert f"the weights of epoch {best['epoch']}, " in told
    result = json.loads(gconv("evaluate", "tuned.onnx", "--data", "labelled.npz", "--json").out)
    assert abs(result["top1"] - best["validation_accuracy"]) < 0.25


def test_the_same_command_gives_the_same_bytes_and_another_seed_others() -> None:
    run(f"{TUNE} unlabelled.npz --augment crop")
    first = Path("tuned.onnx").read_bytes()
    run(f"{TUNE} unlabelled.npz --augment crop")
    assert Path("tuned.onnx").read_bytes() == first
    run(f"{TUNE} unlabelled.npz --augment crop --seed 1")
    assert Path("tuned.onnx").read_bytes() != first


def interrupted_after(
    steps: int, command: str, monkeypatch: pytest.MonkeyPatch, by: type[BaseException] = KeyboardInterrupt
) -> Finished:
    """Run a command and press Ctrl-C, or worse, in the middle of an epoch."""
    done, step = 0, Training._step

    def pressing(self: Training, *args: object) -> object:
        nonlocal done
        done += 1
        if done > steps:
            raise by
        return step(self, *args)  # type: ignore[arg-type]

    with monkeypatch.context() as patch:
        patch.setattr(Training, "_step", pressing)
        return gconv(*command.split())


def test_ctrl_c_keeps_the_best_so_far_and_resuming_ends_where_the_uninterrupted_run_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    run(f"{TUNE} unlabelled.npz".replace("tuned.onnx", "whole.onnx"))
    steps = (SAMPLES - 24) // 16
    stopped = interrupted_after(2 * steps + 1, f"{TUNE} unlabelled.npz", monkeypatch)
    assert stopped.code == 130
    assert "interrupted; --resume continues.\nwrote tuned.onnx" in stopped.err
    assert [record["epoch"] for record in history()] == [0, 1, 2]
    assert "dropped 0%" in run("apply tuned.onnx plan.json -o grouped.onnx")
    run(f"{TUNE} unlabelled.npz --resume")
    assert Path("tuned.onnx").read_bytes() == Path("whole.onnx").read_bytes()
    for one, other in zip(history(), history("whole.metrics.jsonl"), strict=True):
        assert {**one, "seconds": 0} == {**other, "seconds": 0}


class Killed(BaseException):
    """The end of a process that gets no chance to save anything."""


def test_killed_in_the_middle_of_an_epoch_it_resumes_and_ends_where_the_uninterrupted_run_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run(f"{TUNE} labelled.npz".replace("tuned.onnx", "whole.onnx"))
    steps = (SAMPLES - 24) // 16
    with pytest.raises(Killed):
        interrupted_after(2 * steps + 2, f"{TUNE} labelled.npz", monkeypatch, by=Killed)
    assert [record["epoch"] for record in history()] == [0, 1, 2]
    assert not Path("tuned.onnx").exists()
    run(f"{TUNE} labelled.npz --resume")
    assert Path("tuned.onnx").read_bytes() == Path("whole.onnx").read_bytes()
    assert [{**record, "seconds": 0} for record in history()] == [
        {**record, "seconds": 0} for record in history("whole.metrics.jsonl")
    ]


def test_ctrl_c_in_the_first_epoch_writes_no_model(monkeypatch: pytest.MonkeyPatch) -> None:
    stopped = interrupted_after(1, f"{TUNE} unlabelled.npz", monkeypatch)
    assert stopped.code == 130
    assert "interrupted; written: 'tuned.checkpoint.pt', 'tuned.metrics.jsonl'.\n" in stopped.err
    assert not Path("tuned.onnx").exists()


def test_resuming_with_another_learning_rate_is_refused() -> None:
    assert "there is no checkpoint" in refused(f"{TUNE} labelled.npz --resume")
    run(f"{TUNE} labelled.npz --epochs 1")
    Path("tuned.onnx").unlink()
    assert "its --lr was '0.1', now it is '0.2'" in refused(f"{TUNE} labelled.npz --epochs 1 --lr 0.2 --resume")
    assert "its --distill was '0.0', now it is '1.0'" in refused(f"{TUNE} unlabelled.npz --epochs 1 --resume")


def test_a_masked_model_needs_a_teacher_unless_it_learns_from_labels() -> None:
    run("mask net.onnx plan.json -o masked.onnx")
    tune = TUNE.replace("net.onnx", "masked.onnx")
    complaint = refused(f"{tune} unlabelled.npz")
    assert "'masked.onnx' is masked already" in complaint
    assert "--teacher" in complaint
    run(f"{tune} unlabelled.npz --teacher net.onnx")
    from_masked = Path("tuned.onnx").read_bytes()
    run(f"{TUNE} unlabelled.npz")
    assert Path("tuned.onnx").read_bytes() == from_masked
    run(f"{tune} labelled.npz")


def test_recovered_weights_are_a_better_start_and_need_the_dense_model() -> None:
    run(f"{TUNE} unlabelled.npz --epochs 1")
    masked = history()[0]["validation_loss"]
    told = run(f"{TUNE} unlabelled.npz --epochs 1 --calib unlabelled.npz --jobs 1")
    assert "recovered on 96 samples: output error" in told
    assert history()[0]["validation_loss"] < 0.5 * masked
    Path("tuned.onnx").unlink()
    run("mask net.onnx plan.json -o masked.onnx")
    tune = TUNE.replace("net.onnx", "masked.onnx")
    assert "is masked already, so --calib cannot" in refused(f"{tune} unlabelled.npz --teacher net.onnx --calib unlabelled.npz")


def test_what_cannot_be_trained_is_refused_before_it_starts() -> None:
    assert "has no labels, so --distill 0.5" in refused(f"{TUNE} unlabelled.npz --distill 0.5")
    np.savez("wrong.npz", image=np.zeros((8, 3, 8, 8), np.float32), labels=np.full(8, 7))
    assert "a label is 7, but the model has 4 classes" in refused(f"{TUNE} wrong.npz")
    other = onnx.parser.parse_model('<ir_version: 8, opset_import: ["" : 17]> g (float[N,2] a) => (float[N,2] b) { b = Relu (a) }')
    save(other, Path("other.onnx"))
    assert "different inputs" in refused(f"{TUNE} unlabelled.npz --teacher other.onnx")


def test_a_loss_that_is_no_number_ends_the_training() -> None:
    complaint = refused(f"{TUNE} labelled.npz --lr 1e30")
    assert "the training has diverged" in complaint
    assert "a lower --lr than 1e+30" in complaint


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        ("--distill 1.5", "'1.5' is not a share from 0 to 1"),
        ("--val-split 1", "'1' is not a share from 0 to below 1"),
        ("--lr 0", "'0' is not a number above 0"),
        ("--augment blur", "'blur' is not a list of crop and flip"),
        ("-o net.onnx", "would overwrite the model itself"),
    ],
)
def test_flags_out_of_range_are_wrong_usage(flags: str, complaint: str) -> None:
    finished = gconv(*f"{TUNE} labelled.npz {flags}".split())
    assert finished.code == 2
    assert complaint in finished.err


def batch_norm_net() -> onnx.ModelProto:
    """Return the tiny net with a BatchNormalization behind its first Conv."""
    model = conv_net()
    model.graph.node[1].input[0] = "n1"
    model.graph.node.insert(1, onnx.helper.make_node("BatchNormalization", ["c1", "scale", "shift", "mean", "var"], ["n1"]))
    for name, value in (("scale", 1.0), ("shift", 0.1), ("mean", 0.0), ("var", 1.0)):
        set_tensor(model, name, np.full(8, value))
    return model


@pytest.mark.slow
def test_two_processes_train_as_one_with_the_same_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """BatchNormalization included: its statistics are those of the whole batch, over all processes.

    torchrun starts processes with these variables. Here the first one is this one: PyTorch takes seconds to import.
    """
    save(batch_norm_net(), Path("net.onnx"))
    flags = "labelled.npz --distill 0.5 --augment crop --epochs 2 --val-split 0 --device cpu"
    run(f"{TUNE} {flags}".replace("tuned.onnx", "alone.onnx"))
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    shared = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    environment = {**os.environ, **shared, "RANK": "1", "LOCAL_RANK": "1", "PYTHONPATH": str(ROOT)}
    argv = [sys.executable, "-m", "onnx_gconv", *f"{TUNE} {flags}".split()]
    with subprocess.Popen(argv, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as second:
        try:
            for name, value in {**shared, "RANK": "0", "LOCAL_RANK": "0"}.items():
                monkeypatch.setenv(name, value)
            assert "wrote tuned.onnx" in run(f"{TUNE} {flags}")
            assert second.communicate() == ("", "")  # one process talks for all
        finally:
            second.kill()
    assert second.returncode == 0
    alone, together = onnx.load("alone.onnx"), onnx.load("tuned.onnx")
    for tensor in alone.graph.initializer:
        start, expected, found = (get_tensor(model, tensor.name) for model in (batch_norm_net(), alone, together))
        # Rounding, against what the training did. A bias ahead of a BatchNormalization has no gradient but rounding, in each step.
        rounding = 2 * (SAMPLES // 16) * np.finfo(np.float32).eps * np.abs(expected).max()
        assert np.abs(found - expected).max() <= 1e-3 * np.abs(expected - start).max() + rounding, tensor.name


@pytest.mark.slow
def test_the_python_of_the_page_tunes_the_digits() -> None:
    page = (ROOT / "docs" / "finetuning.md").read_text(encoding="utf-8")
    (program,) = re.findall(r"^```python\n(.*?)^```$", page, re.M | re.S)
    shutil.copytree(MODELS, "models", ignore=lambda folder, names: [name for name in names if not name.startswith("digits")])
    run("plan models/digits.onnx --max-flops 50% -o plan.json")
    run("mask models/digits.onnx plan.json -o masked.onnx")
    exec(program, {})
    assert "dropped 0%" in run("apply tuned.onnx plan.json -o grouped.onnx")
    distances = []
    for model in ("masked.onnx", "tuned.onnx"):
        evaluation = gconv("evaluate", model, "--data", "models/digits_test.npz", "--reference", "models/digits.onnx", "--json")
        distances.append(json.loads(evaluation.out)["outputs"]["logits"]["relative_l2"])
    assert distances[1] < distances[0]


def digits_right(flags: str) -> int:
    """Return how many of the 360 test images are right after tuning at 40 % of the MACs on 500 images without any label."""
    digits, images = MODELS / "digits.onnx", MODELS / "digits_calib.npz"
    run(f"plan {digits} --max-macs 40% -o digits.json")
    run(f"finetune {digits} digits.json --data {images} --batch-size 25 --val-split 0 -o tuned.onnx {flags}")
    assert "dropped 0%" in run("apply tuned.onnx digits.json -o grouped.onnx")
    evaluation = json.loads(gconv("evaluate", "grouped.onnx", "--data", MODELS / "digits_test.npz", "--json").out)
    assert evaluation["samples"] == 360
    return round(360 * evaluation["top1"])


@pytest.mark.slow
def test_the_digits_come_back_within_one_point_of_dense() -> None:
    """Dense, all 360 are right."""
    assert digits_right(f"--calib {MODELS / 'digits_calib.npz'} --jobs 1 --epochs 3 --lr 0.01 --augment crop") >= 357


@pytest.mark.slow
def test_training_alone_brings_the_digits_back_from_chance() -> None:
    """Masked, 35 are right. 3.2 standard deviations of chance are 54."""
    assert digits_right("--epochs 3 --lr 0.1") >= 300


def test_weights_that_have_left_their_mask_are_refused() -> None:
    module = load("net.onnx", "plan.json")
    _require_masks(module)
    (name, keep), *_ = module.masks().items()
    with torch.no_grad():
        dict(module.named_parameters())[name][~keep] = 1.0
    with pytest.raises(TrainingError, match=f"{name!r} that the plan drops are no longer zero"):
        _require_masks(module)
