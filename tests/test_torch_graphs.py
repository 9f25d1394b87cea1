"""A plan trained in its masked and in its compact graph: the same steps, the same result, and the choice of the faster one."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from tiny import Finished, gconv, get_tensor, save
from widths import Odds, graph, plan_of, random_plan, subject

torch = pytest.importorskip("torch", reason="PyTorch is not installed: pip install 'onnx-gconv[torch]'")

import onnx_gconv  # noqa: E402
from onnx_gconv.errors import UsageError  # noqa: E402
from onnx_gconv.plans import Plan, PlannedSpace  # noqa: E402
from onnx_gconv.rewrite.compact import compact  # noqa: E402
from onnx_gconv.rewrite.dropped import empty  # noqa: E402
from onnx_gconv.rewrite.group import group, placement_of  # noqa: E402
from onnx_gconv.rewrite.mask import dropped_share, mask  # noqa: E402
from onnx_gconv.rewrite.match import match  # noqa: E402
from onnx_gconv.torch import finetuning, load  # noqa: E402
from onnx_gconv.torch.graphs import Graphs, Student  # noqa: E402
from onnx_gconv.torch.rehearsing import rehearsed  # noqa: E402
from onnx_gconv.torch.spool import Spool  # noqa: E402
from onnx_gconv.torch.team import Team  # noqa: E402
from onnx_gconv.torch.training import Training, TrainingSettings  # noqa: E402

pytestmark = pytest.mark.torch

ROOT = Path(__file__).parents[1]
DIGITS, IMAGES = ROOT / "models" / "digits.onnx", ROOT / "models" / "digits_calib.npz"
ALONE = Team(0, 1, 0, torch.device("cpu"))
SETTINGS = TrainingSettings(
    epochs=2,
    lr=0.02,
    batch_size=25,
    schedule="cosine",
    distill=1.0,
    crop=False,
    flip=False,
    amp=False,
    seed=0,
    freeze_bn=False,
    val_split=0.2,
)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    torch.set_num_threads(1)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def narrowed_digits() -> Plan:
    """Return a plan of the digits with streams and branches narrowed to half, one branch dropped, and groups."""
    it = subject(onnx.load(DIGITS), shapes=None)
    plan = random_plan(it, np.random.default_rng(4), Odds(narrow=0.7, drop=0.2, group=0.3, share=0.5))
    assert plan.dropped
    assert plan.layers
    assert any(len(space.writers) > 1 for space in it.widths.spaces if space.name in {each.name for each in plan.spaces})
    return plan


# BatchNormalization everywhere, also behind the branch that is dropped; and the constant of that is not zero.
NORMALIZED = (
    "a = Conv (x, w_8_4_1_1, b_8) n = BatchNormalization (a, s_8, t_8, m_8, v_8) s = Relu (n) "
    "i = Conv (s, w_6_8_1_1) r = Relu (i) e = Conv (r, w_8_6_1_1, c_8) o = BatchNormalization (e, s_8_o, t_8_o, m_8_o, v_8_o) "
    "t = Add (s, o) j = Conv (t, w_6_8_1_1_j) k = BatchNormalization (j, s_6, t_6, m_6, v_6) f = Relu (k) "
    "h = Conv (f, w_8_6_1_1_h, d_8) u = Add (h, t) p = GlobalAveragePool (u) y = Conv (p, w_5_8_1_1)"
)
NORMALIZED_PLAN = plan_of(spaces=(PlannedSpace("a", 8, (1, 3, 5, 6)), PlannedSpace("j", 6, (0, 2, 5))), dropped=("e",))


def case(name: str) -> tuple[onnx.ModelProto, Plan, Spool]:
    if name == "digits":
        return onnx.load(DIGITS), narrowed_digits(), Spool(dict(np.load(IMAGES)), None)
    images = np.random.default_rng(0).standard_normal((100, 4, 6, 6)).astype(np.float32)
    model = graph(NORMALIZED)
    if name == "emptied":
        model, _ = empty(model, match(model, NORMALIZED_PLAN).dropped)
    model.graph.input[0].type.tensor_type.shape.dim[0].dim_param = "N"
    return model, NORMALIZED_PLAN, Spool({"x": images}, None)


def graphs_of(model: onnx.ModelProto, plan: Plan) -> Graphs:
    return Graphs(mask(model, match(model, plan)), plan, {}, seed=0)


def training(student: Student, model: onnx.ModelProto, spool: Spool, settings: TrainingSettings = SETTINGS) -> Training:
    return Training(student.module, load(model), spool, settings, ALONE, student.sight)


def written(model: onnx.ModelProto, plan: Plan) -> dict[str, np.ndarray]:
    """Return the weights that are left of a masked model."""
    matched = match(model, plan)
    tensors = compact(model, matched, placement_of(model, matched)).model.graph.initializer
    arrays = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in tensors}
    return {name: value for name, value in arrays.items() if value.dtype == np.float32}


def no_progress(*_: object) -> None: ...


@pytest.mark.parametrize("name", ["digits", "normalized"])
def test_a_step_is_the_same_in_both_graphs(name: str) -> None:
    """Gradients are equal up to rounding, so weights are, too; landmarks, decay, momentum and statistics included."""
    model, plan, spool = case(name)
    graphs = graphs_of(model, plan)
    assert graphs.obstacle() == ""
    tuned, losses = [], []
    for student in (graphs.compact(), graphs.masked()):
        run = training(student, model, spool)
        run._weigh_landmarks(1)
        run.module.train()
        losses.append([run._step(samples, 0.02)[0] for samples, _ in zip(run._batches(1), range(2), strict=False)])
        assert len(run.landmarks) > 1
        assert sum(run.landmarks.values()) > 0
        tuned.append(graphs.returned(student))
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
    compact_ones = [written(each, plan) for each in (*tuned, mask(model, match(model, plan)))]
    assert compact_ones[0].keys() == compact_ones[1].keys() == compact_ones[2].keys()
    for tensor in compact_ones[0]:
        one, other, _ = (values[tensor] for values in compact_ones)
        assert np.abs(one - other).max() < 1e-5, tensor
    moved = [name for name, value in compact_ones[0].items() if np.abs(value - compact_ones[2][name]).max() > 1e-4]
    assert len(moved) > 0.8 * len(compact_ones[0])
    assert [name for name in moved if name.endswith("_mean")]  # what is left of the dropped branch


def test_of_a_branch_that_left_nothing_nothing_comes_back() -> None:
    """Else the Add would be written again, and the model would take longer than planned."""
    model, plan, spool = case("emptied")
    graphs = graphs_of(model, plan)
    assert graphs.obstacle() == ""
    tuned = []
    for student in (graphs.compact(), graphs.masked()):
        training(student, model, spool).train_epoch(1, no_progress)
        tuned.append(graphs.returned(student))
        assert not get_tensor(tuned[-1], "t_8_o").any()
        assert sum(node.op_type == "Add" for node in group(tuned[-1], match(tuned[-1], plan)).graph.node) == 1
    assert np.abs(get_tensor(tuned[0], "d_8") - get_tensor(model, "d_8")).max() > 1e-4  # another branch's was trained


@pytest.mark.parametrize("name", ["digits", "normalized"])
def test_a_short_training_goes_the_same_way_in_both_graphs(name: str) -> None:
    model, plan, spool = case(name)
    graphs = graphs_of(model, plan)
    records = []
    for student in (graphs.compact(), graphs.masked()):
        run = training(student, model, spool)
        records.append([run.train_epoch(epoch, no_progress) for epoch in (1, 2)])
    for one, other in zip(*records, strict=True):
        assert one.train_loss == pytest.approx(other.train_loss, rel=1e-3)
        assert one.validation_loss == pytest.approx(other.validation_loss, rel=1e-3)


@pytest.mark.parametrize("name", ["digits", "normalized"])
def test_what_the_compact_module_gives_the_tuned_model_gives_masked_and_written(name: str) -> None:
    model, plan, spool = case(name)
    graphs = graphs_of(model, plan)
    student = graphs.compact()
    training(student, model, spool).train_epoch(1, no_progress)
    tuned = graphs.returned(student)
    matched = match(tuned, plan)
    assert dropped_share(tuned, matched) == 0.0
    feeds = {name: values[:20] for name, values in spool.inputs.items()}
    with torch.no_grad():
        expected = student.module.eval()(*map(torch.from_numpy, feeds.values())).numpy()
    for each in (tuned, group(tuned, matched)):
        (found,) = onnxruntime.InferenceSession(each.SerializeToString()).run(None, feeds)
        assert np.abs(found - expected).max() < 1e-5 * np.abs(expected).max()


def test_landmarks_are_compared_by_the_channels_that_stay() -> None:
    model, plan, spool = case("normalized")
    graphs = graphs_of(model, plan)
    (inside, wanted), (whole, all_wanted) = (
        [run._student()(**run._first_samples().inputs)[1], run._teach(run._first_samples(), tuple(run.landmarks))[1]]
        for run in (training(student, model, spool) for student in (graphs.compact(), graphs.masked()))
    )
    assert [tuple(value.shape) for value in inside] == [(25, 4, 6, 6)] * 2
    for one, other, teacher, same_teacher in zip(inside, whole, wanted, all_wanted, strict=True):
        torch.testing.assert_close(one, other)
        assert torch.equal(teacher, same_teacher)


def test_a_rehearsal_leaves_the_modules_as_they_were() -> None:
    model, plan, spool = case("normalized")
    graphs = graphs_of(model, plan)
    students = [graphs.compact(), graphs.masked()]
    before = [{name: value.clone() for name, value in student.module.state_dict().items()} for student in students]
    times = rehearsed([training(student, model, spool) for student in students])
    assert all(0 < seconds < 60 for seconds in times)
    for student, state in zip(students, before, strict=True):
        assert all(torch.equal(value, state[name]) for name, value in student.module.state_dict().items())


# ---- the command

TUNE = "finetune model.onnx plan.json --data images.npz -o tuned.onnx --epochs 2 --batch-size 16 --lr 0.02"


def prepared(model: onnx.ModelProto, plan: Plan) -> None:
    """Write the files that a command reads; of the images only some, the tests need no good model."""
    save(model, Path("model.onnx"))
    Path("plan.json").write_text(plan.to_json(), encoding="utf-8")
    name = model.graph.input[0].name
    sizes = [dim.dim_value for dim in model.graph.input[0].type.tensor_type.shape.dim[1:]]
    np.savez("images.npz", **{name: np.random.default_rng(0).standard_normal((64, *sizes)).astype(np.float32)})


def run(command: str, code: int = 0) -> str:
    finished: Finished = gconv(*command.split())
    assert finished.code == code, finished
    return finished.err


def timed(monkeypatch: pytest.MonkeyPatch, compact: float, masked: float) -> None:
    """Let steps take so long."""
    monkeypatch.setattr(finetuning, "rehearsed", lambda trainings: [compact, masked])


@pytest.mark.parametrize(
    ("seconds", "told"),
    [
        ((0.214, 0.367), "training the compact model: 0.21 s a step, masked 0.37 s"),
        ((0.314, 0.173), "training the masked model: 0.17 s a step, compact 0.31 s"),
    ],
)
def test_the_faster_graph_is_trained_and_that_is_told(
    seconds: tuple[float, float], told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, plan, _ = case("normalized")
    prepared(model, plan)
    timed(monkeypatch, *seconds)
    assert told in run(TUNE).splitlines()
    found = Path("tuned.onnx").read_bytes()
    graph_name = told.split()[2]
    assert "training the" not in run(f"{TUNE} --train-graph {graph_name}")
    assert Path("tuned.onnx").read_bytes() == found
    assert "dropped 0%" in run("apply tuned.onnx plan.json -o written.onnx")


def test_the_choice_is_made_by_trying() -> None:
    model, plan, _ = case("normalized")
    prepared(model, plan)
    (line,) = (line for line in run(TUNE).splitlines() if line.startswith("training the"))
    words = line.replace(":", "").split()
    assert {words[2], words[8]} == {"compact", "masked"}
    assert 0 < float(words[4]) <= float(words[9])


def test_a_training_goes_on_in_the_graph_that_it_was_begun_with(monkeypatch: pytest.MonkeyPatch) -> None:
    model, plan, _ = case("normalized")
    prepared(model, plan)
    timed(monkeypatch, 0.1, 0.2)
    run(TUNE)
    whole = Path("tuned.onnx").read_bytes()
    epochs = Training.train_epoch

    def stopped(self: Training, epoch: int, on_step: object) -> object:
        if epoch == 2:
            raise KeyboardInterrupt
        return epochs(self, epoch, on_step)  # type: ignore[arg-type]

    with monkeypatch.context() as patch:
        patch.setattr(Training, "train_epoch", stopped)
        run(TUNE, code=130)
    timed(monkeypatch, 0.2, 0.1)
    assert "its --train-graph was 'compact', now it is 'masked'" in run(f"{TUNE} --train-graph masked --resume", code=1)
    assert "training the" not in run(f"{TUNE} --resume")
    assert Path("tuned.onnx").read_bytes() == whole


def test_where_the_compact_graph_cannot_be_trained_the_masked_one_is(monkeypatch: pytest.MonkeyPatch) -> None:
    model = graph(
        "c = Reshape (b, eight) a = Conv (x, w_8_4_1_1, c) r = Relu (a) p = GlobalAveragePool (r) y = Conv (p, w_3_8_1_1)",
        b=np.arange(8, dtype=np.float32).reshape(2, 4),
        eight=np.array([8]),
    )
    model.graph.input[0].type.tensor_type.shape.dim[0].dim_param = "N"
    model.graph.output[0].type.tensor_type.shape.dim[0].dim_param = "N"
    prepared(model, plan_of(spaces=(PlannedSpace("a", 8, (1, 6)),)))
    why = "cannot be trained: the weight 'b' is computed with before it is used"
    assert f"training the masked model, for the compact one {why}" in run(TUNE)
    assert f"error: the compact model {why}." in run(f"{TUNE} --train-graph compact", code=1)


def test_a_plan_that_changes_nothing_has_one_graph() -> None:
    model, _, _ = case("normalized")
    prepared(model, plan_of())
    assert "training the" not in run(TUNE)


def test_a_graph_nobody_knows_is_wrong_usage() -> None:
    model, plan, _ = case("normalized")
    prepared(model, plan)
    with pytest.raises(UsageError, match="--train-graph 'dense' is not known: choose from auto, compact, masked"):
        onnx_gconv.finetune("model.onnx", "plan.json", "images.npz", "tuned.onnx", learning={"train_graph": "dense"})


@pytest.mark.slow
def test_several_processes_agree_on_the_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of two processes finds another graph faster; trained is what the first one finds."""
    model, plan, _ = case("normalized")
    prepared(model, plan)
    run(f"{TUNE} --train-graph compact --device cpu".replace("tuned.onnx", "alone.onnx"))
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    shared = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    slow_compact = (
        "import sys; from onnx_gconv.torch.training import Training; from onnx_gconv.cli.main import main\n"
        "step = Training.rehearse\n"
        "Training.rehearse = lambda self: step(self) + (0 if self.module.masks() else 9)\n"
        "sys.exit(main(sys.argv[1:]))"
    )
    environment = {**os.environ, **shared, "RANK": "1", "LOCAL_RANK": "1", "PYTHONPATH": str(ROOT)}
    argv = [sys.executable, "-c", slow_compact, *f"{TUNE} --device cpu".split()]
    rehearse = Training.rehearse
    monkeypatch.setattr(Training, "rehearse", lambda self: rehearse(self) + (9 if self.module.masks() else 0))
    with subprocess.Popen(argv, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as second:
        try:
            for name, value in {**shared, "RANK": "0", "LOCAL_RANK": "0"}.items():
                monkeypatch.setenv(name, value)
            assert "training the compact model" in run(f"{TUNE} --device cpu")
            assert second.communicate() == ("", "")  # one process talks for all
        finally:
            second.kill()
    assert second.returncode == 0
    alone, together = (
        [json.loads(line) for line in Path(f"{stem}.metrics.jsonl").read_text(encoding="utf-8").splitlines()]
        for stem in ("alone", "tuned")
    )
    assert [record["validation_loss"] for record in together] == pytest.approx(
        [record["validation_loss"] for record in alone], rel=1e-4
    )
