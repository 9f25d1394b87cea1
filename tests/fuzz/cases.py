"""One case: a folder with a file that is wrong, commands on it, and what must hold of each."""

import contextlib
import io
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import numpy as np
import onnx
from tiny import gconv, listing, residual_net

from .corpus import MAKERS, sound
from .mutators import changed_bytes, mutated_arrays, mutated_json, mutated_model
from .oracle import differs

SAMPLES = 12
OUT = {"out.onnx", "out.plan.json", "out.report.json"}


@dataclass
class Outcome:
    """What came of a case: how its commands ended, and what was wrong with that."""

    case: str
    what: str = ""
    codes: list[int] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    compared: int = 0  # results that ONNX Runtime compared with their masked models
    said: list[str] = field(default_factory=list)


class Bench:
    """The commands of one case, run in its folder, which is the current one."""

    def __init__(self, case: str) -> None:
        self.outcome = Outcome(case)

    def run(self, command: str, *, writes: Sequence[str] | set[str] = ()) -> bool:
        """Run a command and hold it to the rules; return whether it did its job."""
        before = listing(Path())
        done = gconv(*command.split())
        after = listing(Path())
        outcome = self.outcome
        outcome.codes.append(done.code)
        outcome.said.append(f"$ {command}\n{done.err}[{done.code}]")
        errors = [line for line in done.err.splitlines() if line.startswith("error: ")]
        if "Traceback" in done.err + done.out or "unexpectedly" in done.err:
            outcome.wrong.append(f"failed unexpectedly: {command}: {' '.join(errors)[:300]}")
        elif done.code not in (0, 1):
            outcome.wrong.append(f"exit code {done.code}: {command}")
        elif done.code == 1 and (len(errors) != 1 or "hint: " not in done.err) and not command.startswith("verify"):
            outcome.wrong.append(f"no clear refusal: {command}: {done.err[:300]}")
        if "bug of onnx-gconv" in done.err:
            outcome.wrong.append(f"calls itself a bug: {command}: {' '.join(errors)[:300]}")
        new = {name for name in after if name not in before}
        changed = {name for name in before if after.get(name) != before[name]}
        # A model with external data has a file more.
        wanted = set(writes) if done.code == 0 else set()
        if {name for name in new if not name.endswith(".onnx.data")} != wanted or changed:
            outcome.wrong.append(f"files after code {done.code}: {command}: new {sorted(new)}, changed {sorted(changed)}")
        return done.code == 0

    def judge(self, result: str, plan: str) -> None:
        """Compare an accepted result with its masked model, and that with the file it was made from."""
        if not self.run(f"mask bad.onnx {plan} --no-verify -o masked.onnx", writes=["masked.onnx"]):
            self.outcome.wrong.append(f"a plan that compress wrote cannot be masked: {self.outcome.said[-1][-300:]}")
            return
        found = differs("bad.onnx", "masked.onnx", result)
        if found is None:
            return
        self.outcome.compared += 1
        if found:
            self.outcome.wrong.append(f"wrong output: {found}")


def run_case(case: str, seed: int) -> Outcome:
    """Run a case in the current folder, which is empty."""
    kind, number = case.split(":")
    rng = np.random.default_rng([seed, len(kind), int(number)])
    bench = Bench(case)
    if kind == "models":
        _model_case(bench, rng)
    else:
        (_plan_case, _data_case, _report_case, _plan_case, _data_case)[int(number) % 5](bench, rng)
    return bench.outcome


# --- models ---------------------------------------------------------------------------------------------------------------


def _model_case(bench: Bench, rng: np.random.Generator) -> None:
    number = len(MAKERS) - 1 if rng.random() < 0.01 else int(rng.integers(len(MAKERS) - 1))
    good = sound(number)
    Path("bad.onnx").write_bytes(mutated_model(good, rng))
    way = str(
        rng.choice(["groups", "budget", "unverified", "calib", "given", "none", "export"], p=[0.3, 0.15, 0.2, 0.1, 0.1, 0.1, 0.05])
    )
    bench.outcome.what = f"{way} of {number}"
    bench.run("inspect bad.onnx --json")
    flags = {
        "groups": "--groups 2",
        "budget": "--max-params 75% --jobs 1",
        "unverified": "--groups 2 --no-verify",
        "none": "--max-params 80% --gathers none --jobs 1",
    }
    if way in flags:
        if bench.run(f"compress bad.onnx {flags[way]} -o out.onnx", writes=OUT):
            bench.judge("out.onnx", "out.plan.json")
    elif way == "calib":
        np.savez("data.npz", allow_pickle=False, **_samples(number))
        bench.run("compress bad.onnx --max-params 70% --calib data.npz --jobs 1 -o out.onnx", writes=OUT)
        bench.run("evaluate bad.onnx --data data.npz --reference bad.onnx")
    elif way == "given":
        plan = _plan_of(number)
        if plan:
            Path("plan.json").write_bytes(plan)
            bench.run("mask bad.onnx plan.json -o masked_given.onnx", writes=["masked_given.onnx"])
            if bench.run("apply bad.onnx plan.json --allow-drop -o out.onnx", writes=["out.onnx"]):
                bench.judge("out.onnx", "plan.json")
        Path("good.onnx").write_bytes(good)
        bench.run("verify good.onnx bad.onnx")
    else:
        bench.run("export bad.onnx --target tx2 -o out.onnx", writes=["out.onnx"])


@cache
def _plan_of(number: int) -> bytes:
    """Return the plan of a sound model, b"" where none of it can be grouped; made beside the case's folder."""
    with _elsewhere() as folder:
        (folder / "good.onnx").write_bytes(sound(number))
        done = gconv("plan", folder / "good.onnx", "--groups", "2", "-o", folder / "plan.json")
        return (folder / "plan.json").read_bytes() if done.code == 0 else b""


@contextlib.contextmanager
def _elsewhere() -> Iterator[Path]:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


@cache
def _samples(number: int) -> dict[str, np.ndarray]:
    """Return data for a sound model."""
    model = onnx.load_from_string(sound(number))
    stored = {tensor.name for tensor in model.graph.initializer}
    rng = np.random.default_rng(number)
    result = {}
    for value in model.graph.input:
        if value.name not in stored:
            shape = [dim.dim_value or 8 for dim in value.type.tensor_type.shape.dim]
            kind = onnx.helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type)
            result[value.name] = rng.standard_normal((SAMPLES, *shape[1:])).astype(kind)
    return result


# --- plans, data, reports -------------------------------------------------------------------------------------------------


@cache
def _made() -> dict[str, bytes]:
    """Return the files of sound runs: the model, its plan with groups, one with widths, reports, an exploration, data."""
    with _elsewhere() as folder:
        (folder / "bad.onnx").write_bytes(residual_net().SerializeToString())
        np.savez(folder / "data.npz", image=np.random.default_rng(0).standard_normal((SAMPLES, 4, 6, 6)).astype(np.float32))
        with contextlib.chdir(folder):
            for command in (
                "compress bad.onnx --groups 2 -o groups.onnx",
                "compress bad.onnx --max-params 70% --calib data.npz --forms all --jobs 1 -o widths.onnx",
                "explore bad.onnx --points 2 -o sweep --jobs 1",
            ):
                done = gconv(*command.split())
                assert done.code == 0, done
            return {str(path): path.read_bytes() for path in sorted(Path().rglob("*")) if path.is_file()}


def _put(*names: str) -> None:
    for name in names:
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).write_bytes(_made()[name])


def _plan_case(bench: Bench, rng: np.random.Generator) -> None:
    _put("bad.onnx")
    name = str(rng.choice(["groups.plan.json", "widths.plan.json"]))
    Path("plan.json").write_bytes(mutated_json(_made()[name], rng))
    bench.outcome.what = f"plan {name}"
    if bench.run("apply bad.onnx plan.json --allow-drop -o out.onnx", writes=["out.onnx"]):
        bench.judge("out.onnx", "plan.json")
    else:
        bench.run("mask bad.onnx plan.json -o masked.onnx", writes=["masked.onnx"])
    bench.run(
        "compress bad.onnx --group-config plan.json -o other.onnx", writes=["other.onnx", "other.plan.json", "other.report.json"]
    )


def _data_case(bench: Bench, rng: np.random.Generator) -> None:
    _put("bad.onnx")
    arrays = {"image": np.load(io.BytesIO(_made()["data.npz"]))["image"]}
    if rng.random() < 0.4:
        arrays["labels"] = rng.integers(0, 3, SAMPLES)
    if rng.random() < 0.15:  # one array alone, which is no .npz
        file = io.BytesIO()
        np.save(file, arrays["image"])
        content = file.getvalue()
        Path("data.npy").write_bytes(changed_bytes(content, rng) if rng.random() < 0.7 else content)
        data = "data.npy"
    else:
        data = "data.npz"
        Path(data).write_bytes(mutated_arrays(arrays, rng))
    bench.outcome.what = f"data {data}"
    bench.run(f"evaluate bad.onnx --data {data} --reference bad.onnx")
    if rng.random() < 0.4:
        bench.run(f"compress bad.onnx --max-params 70% --calib {data} --jobs 1 -o out.onnx", writes=OUT)


def _report_case(bench: Bench, rng: np.random.Generator) -> None:
    names = [name for name in _made() if name.endswith((".report.json", "explore.json"))]
    name = str(rng.choice(names))
    bench.outcome.what = f"report {name}"
    folder = sorted(other for other in _made() if Path(other).parent == Path(name).parent and not other.endswith(".npz"))
    _put("bad.onnx", *folder)
    Path(name).write_bytes(mutated_json(json.dumps(json.loads(_made()[name])).encode(), rng))
    bench.run(f"report {name if name.endswith('.report.json') else 'sweep'} -o page.html", writes=["page.html"])
