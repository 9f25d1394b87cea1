"""Plans with widths and dropped branches: their file, edited by hand, and what the commands make of them."""

import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from tiny import gconv, get_tensor, save, set_tensor
from widths import graph, plan_of

import onnx_gconv
from onnx_gconv.errors import BudgetError, ModelError, PlanError
from onnx_gconv.model.network import read
from onnx_gconv.model.shapes import input_shapes
from onnx_gconv.pipeline.result import footprints
from onnx_gconv.plans import Plan, PlannedLayer, PlannedSpace, read_plan
from onnx_gconv.rewrite.group import placement_of
from onnx_gconv.rewrite.match import match

# A stream (a) with two branches (e1, e2), and a grouped Conv (g, which pins i3) in front of a third one.
BODY = (
    "a = Conv (x, w_8_4_1_1, b_8) s = Relu (a) "
    "i1 = Conv (s, w_6_8_1_1) r1 = Relu (i1) e1 = Conv (r1, w_8_6_1_1, c_8) t1 = Add (s, e1) "
    "i2 = Conv (t1, w_6_8_1_1_b) r2 = Relu (i2) e2 = Conv (r2, w_8_6_1_1_b) t2 = Add (e2, t1) "
    "u = Conv (t2, w_4_8_1_1, b_4) v = Conv <group = 2> (u, w_6_2_1_1) y = Conv (v, w_3_6_1_1)"
)
SPACE = {"name": "i1", "channels": 6, "keep": [0, 2, 5]}
LAYER = vars(PlannedLayer("u", "u", 4, 8, 2, 0.5, (0, 1, 2, 3, 4, 5, 6, 7), (0, 1, 2, 3)))
RANK = {"name": "i1", "rank": 3, "groups": 1}
STREAM = {"name": "a", "channels": 8, "keep": [0, 1, 4, 7]}


@pytest.fixture
def model() -> onnx.ModelProto:
    return graph(BODY)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: onnx.ModelProto) -> Path:
    monkeypatch.chdir(tmp_path)
    save(model, Path("net.onnx"))
    return tmp_path


def write_plan(**lists: list[object]) -> Path:
    """Write a plan file with these lists."""
    path = Path("edited.plan.json")
    path.write_text(json.dumps({**json.loads(plan_of().to_json()), **lists}), encoding="utf-8")
    return path


MALFORMED: dict[str, tuple[dict[str, list[object]], tuple[str, ...]]] = {
    "no list of spaces": ({"spaces": {}}, ("'spaces'", "a list")),
    "a space without a name": ({"spaces": [{"channels": 6, "keep": [1]}]}, ("spaces[0]", "'name'")),
    "a space without channels": ({"spaces": [{"name": "i1", "keep": [1]}]}, ("spaces[0] 'i1'", "'channels'")),
    "nothing kept": ({"spaces": [{**SPACE, "keep": []}]}, ("spaces[0] 'i1'", "'keep'")),
    "descending": ({"spaces": [{**SPACE, "keep": [2, 0]}]}, ("spaces[0] 'i1'", "'keep'")),
    "one channel twice": ({"spaces": [{**SPACE, "keep": [2, 2]}]}, ("spaces[0] 'i1'", "'keep'")),
    "a channel too far": ({"spaces": [{**SPACE, "keep": [2, 6]}]}, ("spaces[0] 'i1'", "'keep'")),
    "a channel below": ({"spaces": [{**SPACE, "keep": [-1, 2]}]}, ("spaces[0] 'i1'", "'keep'")),
    "a channel and a half": ({"spaces": [{**SPACE, "keep": [1.5]}]}, ("spaces[0] 'i1'", "'keep'")),
    "one space twice": ({"spaces": [SPACE, SPACE]}, ("space 'i1'", "twice")),
    "one branch twice": ({"dropped": [{"name": "e1"}, {"name": "e1"}]}, ("dropped branch 'e1'", "twice")),
    "a branch without a name": ({"dropped": [{}]}, ("dropped[0]", "'name'")),
    "forms that are a number": ({"forms": [1]}, ("'forms'", "strings")),
    "low rank without a rank": ({"low_rank": [{"name": "i1", "groups": 1}]}, ("low_rank[0] 'i1'", "'rank'")),
    "no rank at all": ({"low_rank": [{"name": "i1", "rank": 0, "groups": 1}]}, ("low_rank[0] 'i1'", "rank of 0")),
    "low rank with groups": ({"low_rank": [{"name": "i1", "rank": 2, "groups": 2}]}, ("low_rank[0] 'i1'", "2 groups")),
    "one rank twice": ({"low_rank": [{"name": "i1", "rank": 2, "groups": 1}] * 2}, ("low rank 'i1'", "twice")),
    "an order of too few": ({"layers": [{**LAYER, "in_order": [0, 1]}]}, ("layers[0] 'u'", "'in_order'")),
    "groups that do not divide what stays": (
        {"layers": [{**LAYER, "in_order": [0, 1, 4]}], "spaces": [{**STREAM, "keep": [0, 1, 4]}]},
        ("layers[0] 'u'", "2 groups"),
    ),
}


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize("case", MALFORMED)
def test_a_malformed_plan_is_refused_with_file_and_place(case: str) -> None:
    lists, words = MALFORMED[case]
    path = write_plan(**lists)
    with pytest.raises(PlanError) as refused:
        read_plan(path)
    for word in (str(path), *words):
        assert word in str(refused.value)
    finished = gconv("apply", "net.onnx", path, "-o", "out.onnx")
    assert (finished.code, Path("out.onnx").exists()) == (1, False)


UNFIT: dict[str, tuple[dict[str, list[object]], str]] = {
    "a low rank that is not there": ({"low_rank": [{**RANK, "name": "nobody"}]}, "no layer of this model goes by that name"),
    "a low rank of a Conv with groups": (
        {"low_rank": [{**RANK, "name": "u"}], "layers": [LAYER]},
        "'u' a low rank, but it is grouped as well",
    ),
    "a rank that is not low": (
        {"low_rank": [{**RANK, "rank": 6}]},
        "a rank of 6, but with 8 input and 6 output channels only a smaller one",
    ),
    "a rank that is not low any more": (
        {"low_rank": [RANK], "spaces": [SPACE]},
        "with 8 input and 3 output channels only a smaller one",
    ),
    "a low rank in a dropped branch": ({"low_rank": [RANK], "dropped": [{"name": "e1"}]}, "and with it that"),
    "a space that is not there": ({"spaces": [{**SPACE, "name": "nobody"}]}, "space 'nobody' is not in this model"),
    "by another tensor": ({"spaces": [{**SPACE, "name": "r1"}]}, "space 'r1' goes by another name in this model: 'i1'"),
    "that cannot be narrowed": (
        {"spaces": [{"name": "u", "channels": 4, "keep": [1, 2]}]},
        "space 'u' cannot be narrowed in this model: a Conv with groups of its own",
    ),
    "the output": (
        {"spaces": [{"name": "y", "channels": 3, "keep": [1, 2]}]},
        "space 'y' cannot be narrowed in this model: a graph",
    ),
    "with other channels": ({"spaces": [{**SPACE, "channels": 7}]}, "space 'i1' has 7 channels, the model's has 6"),
    "a branch that is none": ({"dropped": [{"name": "u"}]}, "the branch of 'u', but no residual branch of this model ends there"),
    "a space in a dropped branch": (
        {"spaces": [SPACE], "dropped": [{"name": "e1"}]},
        "narrows the space 'i1', but also drops the branch of 'e1'",
    ),
    "a layer in a dropped branch": (
        {
            "layers": [{**LAYER, "name": "i1", "out_channels": 6, "out_order": [0, 1, 2, 3, 4, 5]}],
            "dropped": [{"name": "e1"}],
        },
        "groups the layer 'i1', but also drops the branch of 'e1'",
    ),
    "an order of channels that go": (
        {"layers": [{**LAYER, "in_order": [0, 1, 4, 6]}], "spaces": [STREAM]},
        "'in_order' of the plan's layer 'u' does not have exactly the 4 channels that stay",
    ),
    "an order of all, though some go": (
        {"layers": [LAYER], "spaces": [STREAM]},
        "'in_order' of the plan's layer 'u' does not have exactly the 4 channels that stay",
    ),
}


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize("case", UNFIT)
def test_a_plan_that_does_not_fit_is_refused_with_the_reason(case: str, model: onnx.ModelProto) -> None:
    lists, words = UNFIT[case]
    plan = read_plan(write_plan(**lists))
    with pytest.raises(PlanError, match=re.escape(words)) as refused:
        match(model, plan)
    assert refused.value.hint


def test_groups_divide_what_stays(model: onnx.ModelProto) -> None:
    """8 and 6 channels allow 2 groups only; 6 and 6 also allow 3."""
    layer = PlannedLayer("i1", "i1", 6, 8, 3, 0.5, (0, 1, 2, 3, 4, 5), (0, 1, 2, 3, 4, 5))
    plan = plan_of((layer,), (PlannedSpace("a", 8, (0, 1, 2, 3, 4, 5)),))
    assert match(model, plan).layers[0].groups == 3
    everybody = replace(layer, in_order=tuple(range(8)))
    with pytest.raises(PlanError, match="asks for 3 groups, but 8 input and 6 output channels allow only 1, 2"):
        match(model, replace(plan, layers=(everybody,), spaces=()))


def test_two_branches_of_one_add_do_not_go_together() -> None:
    model = graph(
        "a = Conv (x, w_8_4_1_1) i = Conv (a, w_6_8_1_1) e = Conv (i, w_8_6_1_1) j = Conv (a, w_5_8_1_1) f = Conv (j, w_8_5_1_1) "
        "t = Add (e, f) y = Conv (t, w_3_8_1_1)"
    )
    with pytest.raises(PlanError, match="drops the branch of 'f', but also drops the branch of 'e'"):
        match(model, plan_of(dropped=("e", "f")))
    assert [branch.name for branch in match(model, plan_of(dropped=("f",))).dropped] == ["f"]


def everything() -> Plan:
    layer = PlannedLayer("u", "u", 4, 8, 2, 0.5, (7, 1, 0, 4), (3, 1, 0, 2))
    return plan_of((layer,), (PlannedSpace("a", 8, (0, 1, 4, 7)), PlannedSpace("i1", 6, (0, 2, 5))), ("e2",))


@pytest.mark.usefixtures("folder")
def test_commands_mask_and_apply_know_widths_and_branches() -> None:
    Path("plan.json").write_text(everything().to_json(), encoding="utf-8")
    masked = gconv("mask", "net.onnx", "plan.json", "-o", "masked.onnx")
    assert masked.code == 0, masked.err
    applied = gconv("apply", "masked.onnx", "plan.json", "-o", "small.onnx")
    assert applied.code == 0, applied.err
    assert gconv("verify", "masked.onnx", "small.onnx").code == 0
    small = onnx.load("small.onnx")
    assert "e2" not in {name for node in small.graph.node for name in node.output}
    count = read(small, input_shapes(small, {})).count
    # a: 4x4+4, i1: 3x4, e1: 4x3+4, u: 4x4/2+4, v: 6x2, y: 3x6
    assert count.params == 20 + 12 + 16 + 12 + 12 + 18


def test_a_masked_model_loses_nothing_and_another_one_is_refused(model: onnx.ModelProto) -> None:
    plan = everything()
    masked = onnx_gconv.mask(model, plan)
    assert masked.dropped is not None
    assert masked.dropped > 0
    assert onnx_gconv.apply(masked.model, plan).dropped == 0.0
    rng = np.random.default_rng(0)
    with pytest.raises(PlanError, match="where the plan drops it"):
        onnx_gconv.apply(set_tensor(model, "w_8_6_1_1_b", rng.standard_normal((8, 6, 1, 1))), plan)


def test_what_a_tuned_model_shares_differently_is_told() -> None:
    """Zeros that two Convs share can be sliced for each; trained, they are a tensor of its own that both would change."""
    model = graph(
        "a = Conv (x, w_8_4_1_1, z) b = Conv (x, w_8_4_1_1_b, z) c = Concat <axis = 1> (a, b) y = Conv (c, w_3_16_1_1)",
        z=np.zeros(8),
    )
    plan = plan_of(spaces=(PlannedSpace("a", 8, (0, 1, 2)),))
    matched = match(model, plan)
    with pytest.raises(ModelError, match="'a' cannot be narrowed in this model any more"):
        placement_of(set_tensor(model, "z", np.arange(8)), matched)


@pytest.mark.torch
def test_training_holds_the_masks_of_all_forms(model: onnx.ModelProto) -> None:
    torch = pytest.importorskip("torch")
    from onnx_gconv.torch import load
    from onnx_gconv.torch.write_back import save_back

    plan = everything()
    module = load(model, plan)
    optimiser = torch.optim.SGD(module.parameters(), lr=0.01, momentum=0.9, weight_decay=0.1)
    for _ in range(3):
        optimiser.zero_grad()
        module(torch.randn(2, 4, 6, 6))[0].square().mean().backward()
        optimiser.step()
    tuned = save_back(module, model)
    assert not np.array_equal(get_tensor(tuned, "w_8_4_1_1"), get_tensor(model, "w_8_4_1_1"))
    assert onnx_gconv.apply(tuned, plan).dropped == 0.0


@pytest.mark.parametrize("share", [0.5, 0.7, 0.9])
def test_a_space_that_a_concat_has_twice_counts_twice(share: float) -> None:
    # As in a detector: the stream goes into the Concat before and after the branch that is added to it.
    body = (
        "a = Conv (x, w_16_4_1_1, b_16) s = Relu (a) i = Conv (s, w_16_16_1_1) r = Relu (i) e = Conv (r, w_16_16_1_1_b) "
        "t = Add (s, e) c = Concat <axis = 1> (s, t) f = Conv (c, w_16_32_1_1) g = Relu (f) y = Conv (g, w_3_16_1_1)"
    )
    samples = np.random.default_rng(0).standard_normal((40, 4, 6, 6)).astype(np.float32)
    result = onnx_gconv.compress(graph(body), max_macs=share, calib=samples, width_step=1)
    assert result.after.macs is not None
    assert result.before.macs is not None
    assert 0.9 * share < result.after.macs / result.before.macs <= share
    assert result.budget_met


def test_a_result_over_its_budget_is_refused(model: onnx.ModelProto) -> None:
    result = onnx_gconv.compress(model, groups=2)
    assert footprints(result.original, result.rewritten, result.plan) == (result.before, result.after)
    with pytest.raises(BudgetError, match="over the budget; nothing was written"):
        footprints(result.original, result.rewritten, replace(result.plan, budget={"max_macs": 1}))
