"""Widths and dropped branches, written: random CNNs stay the same function as their masked models, and cost what they should."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from random_cnn import RandomCnn
from tiny import conv_net, get_tensor, set_tensor
from widths import Done, Expected, Odds, Subject, done, plan_of, random_plan, subject

from onnx_gconv.errors import ModelError, VerifyError
from onnx_gconv.model.check import check as check_model
from onnx_gconv.model.network import read
from onnx_gconv.model.shapes import input_shapes
from onnx_gconv.model.spaces import Tie
from onnx_gconv.pipeline.original import open_original
from onnx_gconv.plans import LowRank, Plan
from onnx_gconv.rewrite.group import carry_out
from onnx_gconv.rewrite.mask import dropped_share
from onnx_gconv.runtime import observe_shapes
from onnx_gconv.verification import default_tolerance

ZOO = Path(__file__).parents[2] / "shared" / "zoo"
TOLERANCE = 2e-5  # float32 rounding through a dozen layers, where outputs may cancel
ODDS = {
    "widths": Odds(narrow=0.7),
    "branches": Odds(drop=0.7),
    "widths and groups": Odds(narrow=0.6, group=0.6),
    "everything": Odds(narrow=0.6, drop=0.3, group=0.6),
    "low rank": Odds(rank=0.7),
    "low rank and everything": Odds(narrow=0.5, drop=0.6, group=0.4, rank=0.7),
}


def example(seed: int, odds: Odds) -> tuple[Subject, Plan, Done]:
    it = subject(RandomCnn(seed).model())
    plan = random_plan(it, np.random.default_rng([seed, 1]), odds)
    return it, plan, done(it, plan)


def check(seed: int, odds: Odds) -> tuple[int, int, int, int]:
    """Check one graph, and return how many spaces, branches and layers its plan changes, and to how many it gives a low rank."""
    it, plan, made = example(seed, odds)
    model, written = it.model, made.written
    onnx.checker.check_model(written, full_check=True)
    found = made.verified(tolerance=TOLERANCE)
    assert found.passed, (seed, found)
    expected, counted = Expected(it, plan), read(written, input_shapes(written, {}), observe=observe_shapes).count
    assert (counted.params, counted.macs) == (sum(expected.params.values()), expected.macs), (
        seed,
        counted.params,
        sum(expected.params.values()),
        counted.macs,
        expected.macs,
    )
    assert list(written.graph.input) == list(model.graph.input)
    assert list(written.graph.output) == list(model.graph.output)
    assert written.metadata_props == model.metadata_props
    labels = {node.name for node in written.graph.node if "gather" not in node.name}
    seconds = {f"{node.name}_second" for node in model.graph.node if node.output[0] in made.matched.ranks}
    assert labels <= {node.name for node in model.graph.node} | seconds
    assert seconds <= labels
    assert dropped_share(made.masked, made.matched) == 0.0
    return len(plan.spaces), len(plan.dropped), len(plan.layers), len(plan.low_rank)


@pytest.mark.parametrize("kind", ODDS)
def test_masked_and_written_are_the_same_function(kind: str) -> None:
    """150 of 500 graphs; each kind of plan on 25."""
    start = 25 * list(ODDS).index(kind)
    changed = np.sum([check(seed, ODDS[kind]) for seed in range(start, start + 25)], axis=0)
    odds = ODDS[kind]
    assert all(count > 8 for count, chance in zip(changed, (odds.narrow, odds.drop, odds.group, odds.rank), strict=True) if chance)


@pytest.mark.slow
@pytest.mark.parametrize("start", range(100, 500, 100))
def test_masked_and_written_are_the_same_function_on_many_graphs(start: int) -> None:
    for seed in range(start, start + 100):
        check(seed, list(ODDS.values())[seed % len(ODDS)])


@pytest.mark.parametrize("form", ["split", "matmul"])
def test_other_lowerings_are_the_same_function(form: str) -> None:
    for seed in range(20):
        it, plan, _ = example(seed, ODDS["everything"])
        made = done(it, plan, lowering=form)
        onnx.checker.check_model(made.written, full_check=True)
        assert made.verified(tolerance=TOLERANCE).passed, seed


def test_what_was_written_from_the_masked_model_is_the_same() -> None:
    """`apply` takes the original, or the masked model after a training elsewhere."""
    for seed in range(20):
        _, _, made = example(seed, ODDS["everything"])
        again = carry_out(made.masked, made.matched, made.placement)
        assert made.verified(tolerance=TOLERANCE, written=again).max_abs_error == made.verified(tolerance=TOLERANCE).max_abs_error


# ---- what is left out must be seen


def is_caught(made: Done, wrong: onnx.ModelProto) -> bool:
    """Return whether ONNX's checker, ONNX Runtime or the comparison rejects a model."""
    try:
        onnx.checker.check_model(wrong, full_check=True)
        return not made.verified(tolerance=TOLERANCE, written=wrong).passed
    except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError, ModelError, VerifyError):
        return True


def following(it: Subject, made: Done) -> list[Tie]:
    """Return the ties that slice something in what was written; grouped Convs are sliced by their orders."""
    done_already = {placed.conv.name for placed in made.placement.convs}.union(*(branch.nodes for branch in made.matched.dropped))
    return [tie for tie in it.spaces.ties if tie.tensor in made.placement.narrowed and tie.node not in done_already]


def test_a_slice_left_out_is_caught() -> None:
    kinds = set()
    for seed in range(25):
        it, _, made = example(seed, ODDS["everything"])
        for tie in following(it, made):
            others = replace(it.spaces, ties=tuple(other for other in it.spaces.ties if other != tie))
            wrong = carry_out(it.model, made.matched, replace(made.placement, spaces=others))
            assert is_caught(made, wrong), (seed, tie)
            kinds.add((next(node.op_type for node in it.model.graph.node if node.output[0] == tie.node), tie.slot))
    assert {("BatchNormalization", slot) for slot in (1, 2, 3, 4)} | {("Conv", 1), ("Conv", 2), ("Gemm", 1), ("MatMul", 1)} <= kinds


@pytest.mark.parametrize("slot", [0, 1], ids=["first", "second"])
@pytest.mark.parametrize("name", ["c2", "c3"])
def test_a_wrong_factor_is_caught(name: str, slot: int) -> None:
    it = subject(conv_net(channels=8))
    made = done(it, plan_of(ranks=(LowRank("c2", 3), LowRank("c3", 2))))
    assert made.verified(tolerance=TOLERANCE).passed
    second = next(node for node in made.written.graph.node if node.output[0] == name)
    first = next(node for node in made.written.graph.node if node.output[0] == second.input[0])
    weight = (first, second)[slot].input[1]
    wrong = onnx.ModelProto.FromString(made.written.SerializeToString())
    value = get_tensor(wrong, weight).copy()
    value.flat[np.abs(value).argmax()] *= 1.01
    assert is_caught(made, set_tensor(wrong, weight, value))


def test_a_number_left_out_is_caught() -> None:
    kinds = set()
    for seed in range(80):
        it, _, made = example(seed, ODDS["widths"])
        for measure in it.spaces.measures:
            if measure.tensor in made.placement.narrowed:
                others = replace(it.spaces, measures=tuple(other for other in it.spaces.measures if other != measure))
                wrong = carry_out(it.model, made.matched, replace(made.placement, spaces=others))
                assert is_caught(made, wrong), (seed, measure)
                kinds.add(next(node.op_type for node in it.model.graph.node if node.output[0] == measure.node))
    assert kinds == {"Reshape", "Resize", "Split"}


def test_wrong_channels_are_caught() -> None:
    """Slices of the right length, but back to front: only the comparison can see that."""
    caught = tried = 0
    for seed in range(25):
        it, _, made = example(seed, ODDS["everything"])
        for tie in following(it, made):
            node = next(node for node in made.written.graph.node if node.output[0] == tie.node)
            value = get_tensor(made.written, node.input[tie.slot])
            if not np.array_equal(np.flip(value, tie.dim), value):
                wrong = set_tensor(copy_of(made.written), node.input[tie.slot], np.flip(value, tie.dim))
                tried += 1
                caught += is_caught(made, wrong)
    assert tried > 100
    assert caught >= 0.97 * tried  # a Relu or Clip that is shut may hide what comes before it


def test_a_branch_whose_constant_is_left_out_is_caught() -> None:
    tried = 0
    for seed in range(40):
        _, _, made = example(seed, ODDS["branches"])
        for tensor in made.written.graph.initializer:
            if tensor.name.endswith("_mean") and np.any(get_tensor(made.written, tensor.name)):
                tried += 1
                wrong = set_tensor(copy_of(made.written), tensor.name, np.zeros(tensor.dims))
                assert is_caught(made, wrong), (seed, tensor.name)
    assert tried > 10


def copy_of(model: onnx.ModelProto) -> onnx.ModelProto:
    return onnx.ModelProto.FromString(model.SerializeToString())


# ---- real models


@pytest.mark.parametrize(
    "name",
    [
        *("cifar10_resnet20_bn", "centerface", "imagenet_mobilenet_v2_bn", "linknet_methane_dyn", "nudenet_yolov8n"),
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in (
                *("cifar10_resnet20_folded", "cifar10_resnet56_bn", "cifar10_resnet56_folded", "clp_det", "fns_candy_op7"),
                *("opennsfw_resnet50thin", "ppocr_cls_mobile", "ppocrv4_det", "ppocrv6_tiny_det", "spindle_unet1d"),
                *("squeezenet_winml_op7", "u2netp"),
            )
        ),
    ],
)
def test_half_of_every_space_of_a_real_model(name: str) -> None:
    path = ZOO / f"{name}.onnx"
    if not path.exists():
        pytest.skip("../shared/zoo is not here")
    original = open_original(str(path), ())
    it = subject(original.model, dict(original.network.shapes))
    plan = random_plan(it, np.random.default_rng(1), Odds(narrow=1.0, drop=0.3, group=0.5, share=0.5))
    assert plan.spaces
    made = done(it, plan)
    assert not check_model(made.written, it.model) or name == "squeezenet_winml_op7"  # ONNX's checker objects to that one as it is
    found = made.verified(tolerance=default_tolerance(it.model), shapes=original.given_shapes)
    assert found.passed, found
    expected = Expected(it, plan)
    counted = read(made.written, original.network.input_shapes, observe=observe_shapes).count
    assert counted.macs == expected.macs
    assert counted.params == sum(expected.params.values())
