"""Convs in the bodies of If, Loop and Scan nodes: found, grouped in place, and verified on inputs that run them."""

from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from numpy.typing import NDArray
from onnx import numpy_helper
from tiny import from_text, gconv, save

import onnx_gconv
from onnx_gconv.errors import ModelError, VerifyError
from onnx_gconv.model.bodies import bodies, with_own_weights
from onnx_gconv.model.constants import stored
from onnx_gconv.model.network import read
from onnx_gconv.plans import Plan

# One weight of each kind: outer initializer, body initializer (made by `own`), Constant node of the body (by `as_node`).
FORK = """
fork (float[1,8,6] x, int64 rate) => (float[1,8,6] y) {
    fast = Equal (rate, limit)
    y = If (fast) <
        then_branch = then () => (float[1,8,6] t3) {
            t1 = Conv <pads = [1, 1]> (x, tw1, tb1)
            t2 = Relu (t1)
            t3 = Conv <pads = [1, 1]> (t2, tw2)
        },
        else_branch = otherwise () => (float[1,8,6] e3) {
            e1 = Conv <pads = [1, 1]> (x, ew1, eb1)
            e2 = Relu (e1)
            e3 = ConvTranspose <pads = [1, 1]> (e2, ew2)
        }
    >
}
"""
LOOP = """
loop (float[1,8,6] x, int64 trips) => (float[1,8,6] y) {
    go = Constant <value = bool {1}> ()
    y = Loop (trips, go, x) <
        body = step (int64 i, bool on, float[1,8,6] a) => (bool still, float[1,8,6] b) {
            still = Identity (on)
            c = Conv <pads = [1, 1]> (a, lw, lb)
            b = Tanh (c)
        }
    >
}
"""
NESTED = """
nested (float[1,8,6] x, bool outer, bool inner) => (float[1,8,6] y) {
    y = If (outer) <
        then_branch = then () => (float[1,8,6] n3) {
            n1 = Conv <pads = [1, 1]> (x, nw1)
            n3 = If (inner) <
                then_branch = deep () => (float[1,8,6] d) { d = Conv <pads = [1, 1]> (n1, nw2) },
                else_branch = flat () => (float[1,8,6] f) { f = Relu (n1) }
            >
        },
        else_branch = otherwise () => (float[1,8,6] o) { o = Relu (x) }
    >
}
"""


def normal(*shape: int, seed: int) -> NDArray[np.float32]:
    return (np.random.default_rng(seed).standard_normal(shape) / np.sqrt(np.prod(shape[1:]) or 1)).astype(np.float32)


def parsed(text: str, names: str, **tensors: NDArray[np.generic]) -> onnx.ModelProto:
    """Return a model with 8x8x3 weights, and biases of 8 for names with a b in second place, under these names."""
    made = {name: normal(*((8,) if name[1] == "b" else (8, 8, 3)), seed=seed) for seed, name in enumerate(names.split())}
    return from_text(text, **made, **tensors)


def fork() -> onnx.ModelProto:
    model = parsed(FORK, "tw1 tb1 tw2 ew1 eb1 ew2", limit=np.array(16000))
    found = {body.graph.name: body.graph for body in bodies(model)}
    tensors = {tensor.name: tensor for tensor in model.graph.initializer}
    found["then"].initializer.append(tensors["tw1"])
    found["otherwise"].node.insert(0, onnx.helper.make_node("Constant", [], ["ew1"], value=tensors["ew1"]))
    for name in ("tw1", "ew1"):
        model.graph.initializer.remove(tensors[name])
    return model


def loop() -> onnx.ModelProto:
    return parsed(LOOP, "lw lb")


def nested() -> onnx.ModelProto:
    return parsed(NESTED, "nw1 nw2")


def run(model: onnx.ModelProto, **feeds: object) -> NDArray[np.float32]:
    data = {"x": normal(1, 8, 6, seed=99), **{name: np.asarray(value) for name, value in feeds.items()}}
    (result,) = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"]).run(None, data)
    return np.asarray(result)


def groups_of(model: onnx.ModelProto) -> dict[str, int]:
    """Return the groups of every Conv in bodies, by the name of its node or weight."""
    return {
        node.input[1]: next((each.i for each in node.attribute if each.name == "group"), 1)
        for body in bodies(model)
        for node in body.graph.node
        if "Conv" in node.op_type
    }


FEEDS = {
    "fork": (fork, [{"rate": 16000}, {"rate": 8000}], 4),
    "loop": (loop, [{"trips": 1}, {"trips": 3}], 1),
    "nested": (nested, [{"outer": a, "inner": b} for a in (False, True) for b in (False, True)], 2),
}


@pytest.mark.parametrize("name", FEEDS)
def test_convs_in_bodies_are_grouped_and_masked_is_grouped_whatever_body_runs(name: str) -> None:
    make, feeds, convs = FEEDS[name]
    planned = onnx_gconv.plan(make(), groups=2)
    assert len(planned.plan.layers) == convs
    masked, grouped = onnx_gconv.mask(make(), planned), onnx_gconv.apply(make(), planned)
    assert grouped.verification is not None
    assert grouped.verification.passed
    assert set(groups_of(grouped.model).values()) == {2}
    onnx.checker.check_model(grouped.model, full_check=True)
    for each in feeds:
        expected = run(masked.model, **each)
        np.testing.assert_allclose(run(grouped.model, **each), expected, atol=2e-6 * np.abs(expected).max())
    changed = [np.abs(run(make(), **each) - run(masked.model, **each)).max() for each in feeds]
    assert sum(change > 1e-3 for change in changed) >= min(len(feeds), 2)


def test_a_masked_model_is_applied_without_loss_and_all_is_the_same_twice() -> None:
    planned = onnx_gconv.plan(fork(), groups=2).plan
    assert onnx_gconv.plan(fork(), groups=2).plan.to_json() == planned.to_json()
    masked = onnx_gconv.mask(fork(), planned)
    assert masked.dropped
    again = onnx_gconv.apply(masked.model, planned)
    assert again.dropped == 0
    direct, twice = (onnx_gconv.apply(fork(), planned).model.SerializeToString(deterministic=True) for _ in "12")
    assert direct == twice
    for rate in (16000, 8000):
        np.testing.assert_allclose(run(again.model, rate=rate), run(masked.model, rate=rate), atol=1e-6)


def test_between_two_convs_of_a_body_no_gather_is_left_and_an_identity_gives_none() -> None:
    planned = onnx_gconv.plan(fork(), groups=2).plan
    grouped = onnx_gconv.apply(fork(), planned)
    assert grouped.gathers[0] == 8
    assert grouped.gathers[1] < 8
    rows = [{**vars(layer), "in_order": tuple(range(8)), "out_order": tuple(range(8))} for layer in planned.layers]
    straight = Plan(**{**vars(planned), "layers": tuple(type(planned.layers[0])(**row) for row in rows)})
    assert onnx_gconv.apply(fork(), straight).gathers[1] == 0


def test_no_weight_stays_behind_outside_or_inside() -> None:
    grouped = onnx_gconv.compress(fork(), groups=4)
    weights = [
        tensor
        for graph in (grouped.model.graph, *(body.graph for body in bodies(grouped.model)))
        for tensor in stored(graph).values()
        if len(tensor.dims) == 3
    ]
    assert [np.prod(tensor.dims) for tensor in weights] == [8 * 8 * 3 / 4] * 4
    assert grouped.report["before"]["params"] == 4 * 192 + 16
    assert grouped.report["after"]["params"] == 4 * 48 + 16
    assert grouped.report["before"]["macs"] == 4 * 6 * 192
    assert grouped.report["after"]["macs"] == 6 * 192


@pytest.mark.parametrize("branch", ["then", "otherwise"])
def test_verify_sees_a_fault_in_either_branch(branch: str) -> None:
    planned = onnx_gconv.plan(fork(), groups=2)
    masked, wrong = onnx_gconv.mask(fork(), planned).model, onnx_gconv.apply(fork(), planned).model
    graph = next(body.graph for body in bodies(wrong) if body.graph.name == branch)
    tensor = next(tensor for tensor in graph.initializer if len(tensor.dims) == 3)
    tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor)[::-1].copy(), tensor.name))
    assert onnx_gconv.verify(masked, onnx_gconv.apply(fork(), planned).model).passed
    assert not onnx_gconv.verify(masked, wrong).passed


def reasons(model: onnx.ModelProto) -> dict[str, str]:
    network = onnx_gconv.inspect(model)
    assert not network.all_layers
    return {conv.name: conv.reason for conv in network.skipped}


def test_a_branch_that_no_input_runs_stays_as_it_is() -> None:
    model = fork()
    model.graph.node.insert(1, onnx.helper.make_node("Not", ["fast"], ["slow"]))
    model.graph.node.insert(2, onnx.helper.make_node("And", ["fast", "slow"], ["never"]))
    model.graph.node[3].input[0] = "never"
    network = onnx_gconv.inspect(model)
    assert [layer.name for layer in network.all_layers] == ["e1", "e3"]
    assert {conv.name: conv.reason for conv in network.skipped} == dict.fromkeys(
        ("t1", "t3"),
        "no input was found that runs this branch of the If node 'y' with an effect on the outputs, so it could not be verified",
    )
    plan = onnx_gconv.plan(fork(), groups=2).plan  # of a model in which all are reached
    with pytest.raises(VerifyError, match="'t1' cannot be grouped: no input was found"):
        onnx_gconv.apply(model, plan, allow_drop=True)


PAIR = """
pair (float[1,8,6] x, bool c) => (float[1,8,6] y) {{
    y = If (c) <
        then_branch = then () => (float[1,8,6] {one}) {{ {before} {one} = Conv <pads = [1, 1]> (x, {w}) }},
        else_branch = otherwise () => (float[1,8,6] {two}) {{ {before} {two} = Conv <pads = [1, 1]> (x, {w}) }}
    >
}}
"""


CONSTANT = "Constant <value = {}> ()"
LISTED = {
    "and its weight or bias is read outside it as well": {"one": "t", "two": "e", "w": "vw", "before": ""},
    "another graph of the model has a tensor 'same', too": {
        "one": "same",
        "two": "same",
        "w": "k",
        "before": f"k = {CONSTANT}",
    },
    "its weight is computed at run time": {"one": "t", "two": "e", "w": "k", "before": "k = Abs (vw)"},
    "and its weight is computed from constants": {"one": "t", "two": "e", "w": "k", "before": f"a = {CONSTANT} k = Abs (a)"},
}


@pytest.mark.parametrize("reason", LISTED)
def test_a_conv_in_a_body_that_cannot_be_grouped_is_listed_with_the_reason(reason: str) -> None:
    words = LISTED[reason]
    numbers = f"float[8,8,3] {{{', '.join(map(str, normal(8, 8, 3, seed=3).flat))}}}"
    found = reasons(parsed(PAIR.format(**{**words, "before": words["before"].format(numbers)}), "vw"))
    assert found.keys() == {words["one"], words["two"]}
    assert all(reason in told for told in found.values())


SCAN = """
scan (float[3,1,8,6] x) => (float[3,1,8,6] y) {
    y = Scan (x) <num_scan_inputs = 1, body = one (float[1,8,6] a) => (float[1,8,6] b) { b = Conv <pads = [1, 1]> (a, sw) }>
}
"""


def test_a_scan_body_is_grouped_too() -> None:
    model = parsed(SCAN, "sw")
    result = onnx_gconv.compress(model, groups=4)
    assert groups_of(result.model) == {"sw_g4": 4}
    x = normal(3, 1, 8, 6, seed=5)
    np.testing.assert_allclose(run(result.model, x=x), run(onnx_gconv.mask(model, result).model, x=x), atol=1e-6)


@pytest.mark.parametrize("gathers", ["none", "shared"])
def test_where_gathers_are_not_free_bodies_stay_with_that_reason(gathers: str) -> None:
    with pytest.raises(ModelError, match=f"its channels need Gathers, which --gathers {gathers} does not leave free"):
        onnx_gconv.plan(fork(), groups=2, gathers=gathers)


def test_with_samples_bodies_stay_with_that_reason() -> None:
    calib = {"x": normal(8, 8, 6, seed=1), "rate": np.full(8, 16000)}
    model = fork()
    model.graph.input[0].type.tensor_type.shape.dim[0].dim_param = "N"
    model.graph.input[1].type.tensor_type.shape.dim.add().dim_param = "N"
    with pytest.raises(ModelError, match="its costs are not measured on samples"):
        onnx_gconv.plan(model, max_params=0.6, calib=calib, forms="group")


def test_a_budget_of_macs_holds_over_bodies_whose_shapes_are_known() -> None:
    result = onnx_gconv.compress(fork(), max_flops=0.5)
    assert result.report["after"]["macs"] <= result.report["before"]["macs"] // 2
    assert len(result.plan.layers) >= 2


HIDDEN = """
hidden (float[1,8,6] x, bool c) => (float[1,8,M] y) {
    wide = Cast <to = 1> (length)
    whole = Ceil (wide)
    size = Cast <to = 7> (whole)
    sized = Reshape (x, size)
    y = If (c) <
        then_branch = then () => (float[1,8,A] t) { t = Conv <pads = [1, 1]> (sized, tw) },
        else_branch = otherwise () => (float[1,8,B] e) { e = Conv (sized, ew) }
    >
}
"""


def test_macs_of_shapes_that_only_a_run_tells_are_counted_and_kept_to() -> None:
    model = parsed(HIDDEN, "tw ew", length=np.array([1, 8, 6]))
    assert [layer.macs for layer in read(with_own_weights(model), {"x": (1, 8, 6), "c": ()}).inside] == [None, None]
    network = onnx_gconv.inspect(model, input_shape={"x": (1, 8, 6)})
    assert {layer.name: layer.macs for layer in network.all_layers} == {"t": 6 * 192, "e": 4 * 192}
    result = onnx_gconv.compress(model, input_shape={"x": (1, 8, 6)}, max_flops=0.5)
    assert result.report["after"]["macs"] <= 5 * 192


def test_the_commands_do_it_all(tmp_path: Path) -> None:
    source, plan, masked, made = save(fork(), tmp_path / "m.onnx"), *(tmp_path / name for name in ("p.json", "k.onnx", "g.onnx"))
    assert "4 of 4 Convs can be grouped" in gconv("inspect", source).out
    for command in (
        ("plan", source, "--max-params", "60%", "-o", plan),
        ("mask", source, plan, "-o", masked),
        ("apply", masked, plan, "-o", made),
        ("verify", masked, made),
        ("compress", source, "--max-params", "60%", "-o", tmp_path / "c.onnx"),
        ("report", tmp_path / "c.report.json", "-o", tmp_path / "c.html"),
        ("explore", source, "-o", tmp_path / "sweep", "--points", "3"),
    ):
        done = gconv(*command)
        assert done.code == 0, (command, done.err)


def test_convs_of_every_kind_are_listed_at_any_depth_of_a_function() -> None:
    model = from_text("g (float[1,4,6] x) => (float[1,4,6] y) { y = local.twice (x) }")
    deep = onnx.helper.make_graph(
        [onnx.helper.make_node("ConvTranspose", ["a", "a"], ["deep"])],
        "b",
        [],
        [onnx.helper.make_tensor_value_info("deep", 1, None)],
    )
    nodes = [onnx.helper.make_node("If", ["a"], ["b"], then_branch=deep, else_branch=deep)]
    model.functions.append(onnx.helper.make_function("local", "twice", ["a"], ["b"], nodes, [onnx.helper.make_opsetid("", 17)]))
    model.opset_import.append(onnx.helper.make_opsetid("local", 1))
    assert {conv.name for conv in read(model, {"x": (1, 4, 6)}).skipped} == {"twice:deep"}
