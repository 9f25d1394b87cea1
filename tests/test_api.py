"""The public functions: what a program can do with them, and that they keep what the command line promises."""

import argparse
import ast
import inspect
import io
import os
import runpy
import subprocess
import sys
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from tiny import conv_net, gconv, listing, save, save_external

import onnx_gconv
from onnx_gconv.cli.main import COMMANDS, build_parser
from onnx_gconv.cli.options import WISHES
from onnx_gconv.pipeline import planning
from onnx_gconv.pipeline.settings import CHOICES, Settings

ROOT = Path(__file__).parents[1]

# What a user writes in ten lines; run as it stands, in a process of its own.
SCRIPT = """
import numpy as np, onnx_gconv
images = np.random.default_rng(0).standard_normal((120, 3, 8, 8)).astype(np.float32)
phases = []
listener = onnx_gconv.Listener(progress=lambda phase, done, total, item: phases.append(phase))
try:
    onnx_gconv.compress("net.onnx", max_flops=0.01)
except onnx_gconv.errors.BudgetError as error:
    refused = error.hint
result = onnx_gconv.compress("net.onnx", max_flops=0.7, calib={"image": images}, listener=listener)
files = result.save("small.onnx")
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    save(conv_net(), Path("net.onnx"))
    return tmp_path


def images(samples: int = 120) -> np.ndarray:
    return np.random.default_rng(0).standard_normal((samples, 3, 8, 8)).astype(np.float32)


def test_a_script_of_ten_lines() -> None:
    code = SCRIPT + "print(sorted(set(phases)), 'feasible' in refused, [f.name for f in files], result.report['budget_met'])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    phases = "['measuring', 'recovering']"
    assert done.stdout == f"{phases} True ['small.onnx', 'small.plan.json', 'small.report.json'] True\n"
    assert done.stderr == ""


@pytest.mark.slow
def test_workers_do_not_run_the_callers_script_again(tmp_path: Path) -> None:
    np.savez("calib.npz", image=images(40))
    script = tmp_path / "script.py"  # with nothing that guards its top level
    script.write_text(
        "import onnx_gconv\n"
        "from onnx_gconv.pipeline import solving\n"
        "solving.SECONDS_WORTH_PROCESSES = 0.0\n"
        "print('started', flush=True)\n"
        "print(len(onnx_gconv.plan('net.onnx', max_params=0.7, jobs=2).plan.layers))\n"
        "print(len(onnx_gconv.explore('net.onnx', 'sweep', points=2, calib='calib.npz', jobs=2).points))\n",
        encoding="utf-8",
    )
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "started\n1\n2\n"), done.stderr


@pytest.mark.slow
def test_the_bytes_do_not_depend_on_the_threads_that_the_caller_gives_numpy() -> None:
    code = (
        "import sys, numpy as np, onnx_gconv; rng = np.random.default_rng(0); from tiny import conv_net\n"
        "images = rng.standard_normal((60, 3, 24, 24)).astype(np.float32)\n"
        "onnx_gconv.compress(conv_net(channels=64, size=24), max_params=0.6, calib=images).save(sys.argv[1])"
    )
    for name, threads in (("one", "1"), ("two", "2")):
        env = {**os.environ, "OPENBLAS_NUM_THREADS": threads, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")])}
        subprocess.run([sys.executable, "-c", code, f"{name}.onnx"], env=env, check=True)
    assert Path("one.onnx").read_bytes() == Path("two.onnx").read_bytes()


def test_every_public_name_is_there_and_documented() -> None:
    for name in onnx_gconv.__all__:
        value = getattr(onnx_gconv, name)
        assert name == "__version__" or inspect.getdoc(value), name
    assert set(dir(onnx_gconv)) == set(onnx_gconv.__all__)
    with pytest.raises(AttributeError, match="no attribute 'squeeze'"):
        _ = onnx_gconv.squeeze


def test_without_pytorch_finetune_says_what_is_missing() -> None:
    code = (
        "import sys; sys.modules['torch'] = None; import onnx_gconv\n"
        "try: onnx_gconv.finetune('net.onnx', 'plan.json', 'data.npz', 'out.onnx')\n"
        "except onnx_gconv.errors.DependencyError as error: print(error, error.hint)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "finetune needs PyTorch, which is not installed. pip install 'torch>=2.4'\n"


def test_type_checkers_see_the_same_names() -> None:
    tree = ast.parse(Path(onnx_gconv.__file__).read_text(encoding="utf-8"))
    guarded = next(node for node in tree.body if isinstance(node, ast.If))
    seen = {alias.name for node in guarded.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert seen | {"__version__"} == set(onnx_gconv.__all__)


def test_function_and_command_make_the_same_bytes() -> None:
    np.savez("calib.npz", image=images())
    assert gconv("compress", "net.onnx", "--max-macs", "70%", "--calib", "calib.npz", "-o", "by_command.onnx").code == 0
    onnx_gconv.compress(Path("net.onnx"), max_macs=0.7, calib=images()).save("by_function.onnx")
    for end in ("onnx", "plan.json"):
        assert Path(f"by_command.{end}").read_bytes() == Path(f"by_function.{end}").read_bytes()


def generator(values: np.ndarray) -> Iterator[tuple[np.ndarray, None]]:
    for start in range(0, len(values), 32):
        yield values[start : start + 32], None


class Loader:
    """Iterable again and again, as a data loader is; labels beside the images."""

    def __init__(self, values: np.ndarray) -> None:
        self._values = values

    def __iter__(self) -> Iterator[list[np.ndarray]]:
        return iter([[self._values[:70], np.zeros(70, np.int64)], [self._values[70:], np.zeros(len(self._values) - 70, np.int64)]])


@pytest.mark.parametrize(
    "given",
    [
        lambda: images(),
        lambda: {"image": images()},
        lambda: [images()[:50], images()[50:]],
        lambda: [{"image": images()}],
        lambda: generator(images()),
        lambda: Loader(images()),
        lambda: (images(), np.zeros(120, np.int64)),
    ],
    ids=["array", "arrays", "list", "dicts", "generator", "loader", "pair"],
)
def test_calibration_data_comes_in_many_forms_and_gives_one_model(given: Any) -> None:
    model, expected = conv_net(), onnx_gconv.compress("net.onnx", max_params=0.7, calib=images(), cost="log").model
    before = model.SerializeToString(deterministic=True)
    found = onnx_gconv.compress(model, max_params=0.7, calib=given(), cost="log")
    assert found.model == expected
    assert model.SerializeToString(deterministic=True) == before  # the argument is left as it is
    assert found.report["model"] is None


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"picture": images(4)}, "the arrays gave the inputs 'picture'"),
        (images(4).astype(np.uint8), "is uint8, but the model's input takes float32"),
        (images(0), "hold no samples"),
        ([images(4)[:, :2]], "axis 1 of 'image' is 2"),
        ([], "gives no batches"),
        (5, "data cannot be int"),
        ([("a", "b", "c")], "gave an input 'image' that is no array|is <U1"),
        ({"image": images(4), "labels": np.zeros(3, np.int64)}, "numbers of samples in a batch differ"),
    ],
)
def test_bad_data_in_memory_is_refused_in_our_words(given: Any, words: str) -> None:
    with pytest.raises(onnx_gconv.errors.DataError, match=words):
        onnx_gconv.compress("net.onnx", max_params=0.7, calib=given)


def test_images_are_prepared_only_where_they_are_files() -> None:
    with pytest.raises(onnx_gconv.errors.DataError, match="only a folder of images"):
        onnx_gconv.evaluate("net.onnx", images(), reference="net.onnx", mean=(0.5,))


def test_nothing_is_printed_and_warnings_reach_the_listener() -> None:
    warnings: list[str] = []
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        onnx_gconv.compress("net.onnx", max_params=0.7, calib=images(20), listener=onnx_gconv.Listener(warn=warnings.append))
    assert (out.getvalue(), err.getvalue()) == ("", "")
    assert any("only 20 samples" in text for text in warnings)


def test_a_listener_that_raises_cancels_the_job() -> None:
    class CancelledError(Exception):
        pass

    def stop(phase: str, done: int, total: int | None, item: str) -> None:
        raise CancelledError

    before = listing(Path())
    with pytest.raises(CancelledError):
        onnx_gconv.compress("net.onnx", max_params=0.7, listener=onnx_gconv.Listener(progress=stop))
    assert listing(Path()) == before


def test_plan_mask_and_apply_are_compress_step_by_step() -> None:
    planned = onnx_gconv.plan("net.onnx", max_flops=0.6)
    assert planned.search is not None
    assert planned.search.gap == 0
    planned.save("plan.json")
    assert onnx_gconv.read_plan("plan.json") == planned.plan
    masked = onnx_gconv.mask("net.onnx", planned.plan)
    grouped = onnx_gconv.apply(masked.model, "plan.json")
    assert masked.dropped is not None
    assert masked.dropped > 0
    assert grouped.dropped == 0
    assert onnx_gconv.verify(masked.model, grouped.model).passed
    assert grouped.model == onnx_gconv.compress("net.onnx", max_flops=0.6).model


def test_inspect_evaluate_and_explore() -> None:
    network = onnx_gconv.inspect("net.onnx")
    assert [layer.name for layer in network.layers] == ["c2", "c3"]
    found = onnx_gconv.evaluate("net.onnx", {"image": images(), "labels": np.zeros(120, np.int64)}, reference="net.onnx")
    assert (found.samples, found.agreement) == (120, 1.0)
    explored = onnx_gconv.explore("net.onnx", "sweep", points=2)
    assert [point.name for point in explored.points] == ["point-00", "point-01"]
    with pytest.raises(onnx_gconv.errors.DataError, match="processes of their own"):
        onnx_gconv.explore("net.onnx", "sweep", calib=images())


@pytest.mark.parametrize(
    ("wishes", "words"),
    [
        ({}, "say how much"),
        ({"groups": 2, "max_group_channels": 4}, "at most one of them"),
        ({"groups": 0}, "--groups: 0 is not a whole number of at least 1"),
        ({"max_macs": 0.5, "solver": "magic"}, "--solver 'magic' is not known: choose from best, paper, plain"),
        ({"max_macs": 0.5, "cost": "trial"}, "--cost trial is measured on data"),
        ({"max_latency": 0.5, "target": "tensorrt"}, "--max-latency for --target tensorrt needs times"),
        ({"max_macs": 0.5, "include": "("}, "not a regular expression"),
        ({"max_macs": 0.5, "effort": 7}, "--effort 7 is not known"),
        ({"max_macs": 0.5, "seed": True}, "--seed: True is not a whole number"),
        ({"max_macs": 0.5, "std": 0}, "--std: .* is not above 0 throughout"),
        ({"max_macs": 0.5, "mean": (0.5, float("nan"))}, "--mean: .* is not finite throughout"),
    ],
)
def test_wishes_that_make_no_sense_are_refused_before_the_model_is_read(wishes: Any, words: str) -> None:
    with pytest.raises(onnx_gconv.errors.UsageError, match=words):
        onnx_gconv.compress("missing.onnx", **wishes)


def test_a_wish_that_a_function_does_not_know_is_a_type_error() -> None:
    with pytest.raises(TypeError, match=r"apply\(\) got an unexpected keyword argument 'max_flops'"):
        onnx_gconv.apply("net.onnx", "plan.json", max_flops=0.5)
    with pytest.raises(TypeError, match=r"compress\(\) got an unexpected keyword argument 'max_flop'"):
        onnx_gconv.compress("net.onnx", max_flop=0.5)


@pytest.mark.parametrize("amount", [0, -1, 50, 1.5, float("nan"), float("inf"), True, "half", [0.5], np.float32(0)])
def test_budgets_that_are_none(amount: Any) -> None:
    with pytest.raises(onnx_gconv.errors.BudgetError, match="budget"):
        onnx_gconv.compress("net.onnx", max_macs=amount)


@pytest.mark.parametrize(
    ("amount", "macs"),
    [
        (0.5, 0.5),
        ("50%", 0.5),
        (25_000, None),
        (25e3, None),
        ("25k", None),
        (1.0, 1.0),
        (np.float32(0.5), 0.5),
        (np.int64(25_000), None),
    ],
)
def test_budgets_are_shares_or_amounts(amount: Any, macs: float | None) -> None:
    before = onnx_gconv.inspect("net.onnx").count.macs
    assert before is not None
    plan = onnx_gconv.plan("net.onnx", max_macs=amount).plan
    assert plan.budget == {"max_macs": 25_000 if macs is None else int(macs * before)}


def test_every_wish_has_its_flag_and_every_choice_is_offered() -> None:
    assert set(WISHES) == {field.name for field in fields(Settings)}
    commands = next(action for action in build_parser()._actions if isinstance(action, argparse._SubParsersAction))
    actions = {action.dest: action for name in ("plan", "compress") for action in commands.choices[name]._actions}
    for field in fields(Settings):
        action = actions[field.name]
        assert action.default in (None, False), field.name  # defaults live in the settings
        if field.name in CHOICES:
            assert list(action.choices or ()) == list(CHOICES[field.name])
        told = str(action.help).partition("(default ")[2].split(",")[0].rstrip(")")
        if told.isdecimal() and isinstance(field.default, int):
            assert int(told) == field.default, field.name


def test_a_model_that_counts_more_than_was_planned_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    real = planning._after
    monkeypatch.setattr(planning, "_after", lambda *given: replace(real(*given), params=real(*given).params - 1))
    with pytest.raises(onnx_gconv.errors.BudgetError, match="were planned; nothing was written"):
        onnx_gconv.compress("net.onnx", max_params=0.7)


def made(name: str) -> dict[str, Any]:
    """Return all that the functions make of a model and that can be saved."""
    planned = onnx_gconv.plan(name, max_params=0.7)
    return {
        "compress": onnx_gconv.compress(name, max_params=0.7),
        "plan": planned,
        "mask": onnx_gconv.mask(name, planned),
        "apply": onnx_gconv.apply(name, planned),
        "export": onnx_gconv.export(name, "ort-cpu"),
    }


@pytest.mark.parametrize("function", ["compress", "plan", "mask", "apply", "export"])
def test_save_never_replaces_what_it_is_made_from(function: str) -> None:
    save_external(conv_net(), Path("apart.onnx"), data="out.onnx.data")
    for name, output in (("net.onnx", "net.onnx"), ("apart.onnx", "out.onnx"), ("apart.onnx", "out.onnx.data")):
        if (function, output) == ("plan", "out.onnx"):
            continue  # a plan has no data file
        result, before = made(name)[function], listing(Path())
        with pytest.raises(onnx_gconv.errors.OutputError, match="is a file that the result is made from"):
            result.save(output)
        with pytest.raises(onnx_gconv.errors.OutputError, match="there is no such folder"):
            result.save("nowhere/out.onnx")
        assert listing(Path()) == before


def test_results_are_models_and_plans_themselves() -> None:
    planned = onnx_gconv.plan("net.onnx", max_params=0.7)
    masked = onnx_gconv.mask("net.onnx", planned)
    assert onnx_gconv.verify(masked, onnx_gconv.apply(masked, planned)).passed
    result = onnx_gconv.compress("net.onnx", max_params=0.7)
    assert onnx_gconv.apply("net.onnx", result).model == result.model


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: onnx_gconv.inspect(None), "a model is a path, an onnx.ModelProto or a result of ours, not NoneType"),
        (lambda: onnx_gconv.mask("net.onnx", 5), "a plan is a path, a Plan or a result of ours, not int"),
        (lambda: onnx_gconv.export("net.onnx", "tx3"), "--target 'tx3' is not known: choose from tx2"),
        (lambda: onnx_gconv.Device(runner="ort-gpu"), "--runner 'ort-gpu' is not known: choose from ort-cpu"),
        (lambda: onnx_gconv.bench("net.onnx", "magic"), "--runner 'magic' is not known"),
        (lambda: onnx_gconv.explore(conv_net(), "sweep"), "name the model by its path, not ModelProto"),
        (lambda: onnx_gconv.explore("net.onnx", "sweep", points=0), "--points 0 explores nothing"),
        (lambda: onnx_gconv.explore("net.onnx", "sweep", by="size"), "--by 'size' is not known: choose from macs, params"),
        (lambda: onnx_gconv.explore("net.onnx", "sweep", engine="dask"), "--engine 'dask' is not known"),
        (lambda: onnx_gconv.verify("net.onnx", "net.onnx", samples=0), "--samples 0 compares nothing"),
    ],
)
def test_slips_are_named_in_our_words(call: Any, words: str) -> None:
    with pytest.raises(onnx_gconv.errors.UsageError, match=words):
        call()


def test_a_budget_that_is_met_already_is_told() -> None:
    warnings: list[str] = []
    result = onnx_gconv.compress("net.onnx", max_macs="120%", listener=onnx_gconv.Listener(warn=warnings.append))
    assert result.plan.layers == ()
    assert warnings == ["the model is within the budget as it is, so nothing was changed"]


def test_models_in_memory_are_checked_like_files() -> None:
    save_external(conv_net(), Path("apart.onnx"))
    with pytest.raises(onnx_gconv.errors.ModelError, match="weights are still in the file"):
        onnx_gconv.inspect(onnx.load("apart.onnx", load_external_data=False))
    with pytest.raises(onnx_gconv.errors.ModelError, match="no ONNX graph"):
        onnx_gconv.inspect(onnx.ModelProto())


@pytest.mark.parametrize("shape", ["1x3x16x16", (1, 3, 16, 16), ["image=1x3x16x16"], {"image": (1, 3, 16, 16)}])
def test_input_shapes_come_in_many_forms(shape: Any) -> None:
    assert onnx_gconv.inspect(conv_net(size="S"), input_shape=shape).input_shapes == {"image": (1, 3, 16, 16)}


def test_the_page_on_the_functions_is_current() -> None:
    made = runpy.run_path(str(ROOT / "docs" / "make_api.py"))
    page: Path = made["PAGE"]
    assert page.read_text(encoding="utf-8") == made["api_page"](), "docs/api.md is stale: python docs/make_api.py"
    functions = {name for name in onnx_gconv.__all__ if name[0].islower()} - {"errors"}
    assert functions - {"read_plan", "sweep"} == set(COMMANDS) - {"report"}
    assert functions == set(made["FUNCTIONS"])
