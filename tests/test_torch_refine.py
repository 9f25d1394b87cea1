"""`plan --refine-steps`: prune and fine-tune inside the search; and what training from scratch starts from."""

import runpy
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from tiny import conv_net, gconv, get_tensor, save

torch = pytest.importorskip("torch", reason="PyTorch is not installed: pip install 'onnx-gconv[torch]'")

from onnx_gconv.plans import read_plan  # noqa: E402
from onnx_gconv.rewrite.mask import dropped_share  # noqa: E402
from onnx_gconv.rewrite.match import match  # noqa: E402
from onnx_gconv.search.table import Option, Row, Table  # noqa: E402
from onnx_gconv.torch import load  # noqa: E402
from onnx_gconv.torch.refining import Tuner  # noqa: E402

pytestmark = pytest.mark.torch

MODELS = Path(__file__).parents[1] / "models"
DIGITS, IMAGES = MODELS / "digits.onnx", MODELS / "digits_calib.npz"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.set_num_threads(1)
    monkeypatch.chdir(tmp_path)
    save(conv_net(), Path("net.onnx"))
    np.savez("images.npz", image=np.random.default_rng(0).standard_normal((16, 3, 8, 8)).astype(np.float32))
    with np.load(IMAGES) as images:
        np.savez("few.npz", input=images["input"][:100])


TUNING = "--refine-batch-size 10 --refine-lr 0.02 --jobs 1"
SMALL = f"plan net.onnx --max-macs 50% --refine-steps 2 --refine-data images.npz {TUNING}"


def run(command: str) -> str:
    finished = gconv(*command.split())
    assert finished.code == 0, finished
    return finished.err


@pytest.mark.slow
def test_a_refined_plan_is_within_the_budget_fits_the_given_model_and_its_start_is_masked(monkeypatch: pytest.MonkeyPatch) -> None:
    steps, tune = [], Tuner.tune

    def watching(self: Tuner, model: onnx.ModelProto, plan: object, on_step: object) -> object:
        result = tune(self, model, plan, on_step)  # type: ignore[arg-type]
        steps.append((plan, result[0]))
        return result

    monkeypatch.setattr(Tuner, "tune", watching)
    run(f"plan {DIGITS} --max-macs 30% --refine-steps 2 --refine-data few.npz {TUNING} -o plan.json --refined start.onnx")
    plan, given, start = read_plan(Path("plan.json")), onnx.load(DIGITS), onnx.load("start.onnx")
    assert plan.after.macs is not None
    assert plan.before.macs is not None
    assert plan.after.macs <= 0.3 * plan.before.macs
    # Budgets fall by equal factors: 0.3^(1/3), 0.3^(2/3), 0.3.
    shares = [step.budget["max_macs"] / plan.before.macs for step, _ in steps]
    assert shares == pytest.approx([0.3 ** (1 / 3), 0.3 ** (2 / 3)], rel=1e-6)
    for (earlier, _), (later, _) in zip(steps, [*steps[1:], (plan, None)], strict=True):
        groups = {layer.name: layer.groups for layer in later.layers}
        assert all(groups[layer.name] >= layer.groups for layer in earlier.layers)
    assert dropped_share(start, match(start, plan)) == 0
    assert "dropped 0%" in run("apply start.onnx plan.json -o grouped.onnx")
    run(f"apply {DIGITS} plan.json -o grouped.onnx")
    # The start has the weights of the last tuning where the plan keeps them.
    name = plan.layers[0].label.strip("/").replace("/Conv", "").split("/")[-1]
    weight = next(tensor.name for tensor in given.graph.initializer if name in tensor.name and tensor.dims[2:] == [3, 3])
    kept = get_tensor(start, weight) != 0
    np.testing.assert_array_equal(get_tensor(start, weight)[kept], get_tensor(steps[-1][1], weight)[kept])
    assert (get_tensor(start, weight)[kept] != get_tensor(given, weight)[kept]).mean() > 0.9


def test_kept_is_of_the_given_model_and_not_of_the_tuned_one() -> None:
    run(f"{SMALL} -o plan.json")
    plan, model = read_plan(Path("plan.json")), onnx.load("net.onnx")
    masked = Path("masked.onnx")
    run(f"mask net.onnx plan.json -o {masked}")
    names = [tensor.name for tensor in model.graph.initializer]
    changed = [name for name in names if not np.array_equal(get_tensor(model, name), _of(masked, name))]
    assert len(changed) == len(plan.layers)
    for layer, name in zip(plan.layers, changed, strict=True):
        before, after = (np.sqrt(np.square(w).sum((2, 3))).sum() for w in (get_tensor(model, name), _of(masked, name)))
        assert layer.kept == pytest.approx(after / before, abs=1e-5)


def _of(path: Path, name: str) -> np.ndarray:
    return get_tensor(onnx.load(path), name)


def test_the_same_seed_gives_the_same_plan_and_weights() -> None:
    written = []
    for _ in range(2):
        run(f"{SMALL} -o plan.json --refined start.onnx")
        written.append((Path("plan.json").read_bytes(), Path("start.onnx").read_bytes()))
    assert written[0] == written[1]


def test_a_search_that_goes_on_from_an_earlier_choice_offers_no_fewer_groups() -> None:
    options = tuple(Option(groups, float(groups), 8 // groups, 8 // groups) for groups in (1, 2, 4))
    table = Table((Row(("a",), options), Row(("b", "c"), options)), 5, 5).from_groups({"a": 2, "c": 4})
    assert [[option.groups for option in row.options] for row in table.rows] == [[2, 4], [4]]
    assert table.totals([0, 0]) == (5 + 4 + 2, 5 + 4 + 2)


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        ("--max-macs 50% --refine-steps 2", "give --refine-data DATA"),
        ("--max-macs 50% --refined start.onnx", "--refined needs --refine-steps N"),
        ("--groups 2 --refine-steps 2 --refine-data images.npz", "is for a search under --max-macs"),
        ("--max-macs 50% --refine-steps 2 --refine-data images.npz --calib images.npz", "leave out --calib"),
        ("--max-macs 50% --refine-steps 0 --refine-data images.npz", "'0' is not a whole number of at least 1"),
        ("--max-macs 50% --refine-steps 1 --refine-data images.npz --refined net.onnx", "would overwrite the model itself"),
    ],
)
def test_flags_that_make_no_sense_together_are_wrong_usage(flags: str, complaint: str) -> None:
    finished = gconv("plan", "net.onnx", "-o", "plan.json", *flags.split())
    assert finished.code == 2
    assert complaint in finished.err


def test_a_budget_that_cannot_be_met_fails_before_any_training(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Tuner, "tune", lambda *args: pytest.fail("it has trained"))
    finished = gconv(*f"{SMALL} -o plan.json".replace("50%", "1%").split())
    assert finished.code == 1
    assert "the budget cannot be met" in finished.err
    assert not Path("plan.json").exists()


@pytest.fixture
def from_scratch(monkeypatch: pytest.MonkeyPatch) -> dict[str, object]:
    monkeypatch.setattr(sys, "argv", ["from_scratch.py"])
    return runpy.run_path(str(MODELS / "from_scratch.py"))


def test_a_shuffle_deals_the_outputs_of_the_groups_out_in_turn(from_scratch: dict) -> None:  # type: ignore[type-arg]
    run("plan net.onnx --groups 4 -o plan.json")
    layer = read_plan(Path("plan.json")).layers[0]
    mixed, none = from_scratch["shuffled"](layer), from_scratch["plain"](layer)
    size = layer.out_channels // layer.groups
    assert [mixed.out_order[g * size : (g + 1) * size] for g in range(4)] == [
        tuple(range(g, layer.out_channels, layer.groups)) for g in range(4)
    ]
    assert mixed.in_order == none.in_order == tuple(range(layer.in_channels))
    assert none.out_order == tuple(range(layer.out_channels))


def test_random_weights_forget_the_given_ones_and_keep_the_masks(from_scratch: dict) -> None:  # type: ignore[type-arg]
    run("plan net.onnx --groups 2 -o plan.json")
    given = load("net.onnx", "plan.json")
    module = load("net.onnx", "plan.json")
    from_scratch["randomise"](module, torch.Generator().manual_seed(0))
    for name, keep in module.masks().items():
        weight, old = dict(module.named_parameters())[name], dict(given.named_parameters())[name]
        assert not weight[~keep].any()
        assert bool((weight[keep] != old[keep]).all())
        inputs = int(keep.flatten(1).sum(1)[0])
        # The standard deviation of n samples is off by 1/sqrt(2n) of itself; four times that.
        assert float(weight[keep].detach().std()) == pytest.approx((2 / inputs) ** 0.5, rel=4 / (2 * int(keep.sum())) ** 0.5)


def test_the_ablation_prints_a_row_for_each_start(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["from_scratch.py", "--data", "few.npz", "--epochs", "1", "--rows", "pruned", "shuffle"]
    monkeypatch.setattr(sys, "argv", argv)
    runpy.run_path(str(MODELS / "from_scratch.py"), run_name="__main__")
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in capsys.readouterr().out.splitlines()]
    assert [line[:3] for line in lines[2:]] == [["the model's, pruned", "the plan's", "1"], ["random", "shuffle", "1"]]
    assert all(0 <= float(error) <= 100 for line in lines[2:] for error in line[3:])
