"""The compact model to train: every number of it has its place in the masked model, and goes back there exactly."""

from dataclasses import dataclass

import numpy as np
import onnx
import pytest
from random_cnn import RandomCnn
from tiny import get_tensor
from widths import Odds, Subject, graph, plan_of, random_plan, subject

from onnx_gconv.model.constants import Constants
from onnx_gconv.model.shapes import Shape
from onnx_gconv.plans import Plan, PlannedLayer, PlannedSpace
from onnx_gconv.rewrite.compact import Compact, compact
from onnx_gconv.rewrite.dropped import settle
from onnx_gconv.rewrite.group import group, placement_of
from onnx_gconv.rewrite.mask import dropped_share, mask
from onnx_gconv.rewrite.match import Matched, match
from onnx_gconv.rewrite.placement import Placement
from onnx_gconv.rewrite.taken import Taken, take_along, take_blocks
from onnx_gconv.verification import verify

TOLERANCE = 2e-5  # float32 rounding through a dozen layers, where outputs may cancel
ODDS = {
    "groups": Odds(group=0.7),
    "widths": Odds(narrow=0.7),
    "branches": Odds(drop=0.8),
    "everything": Odds(narrow=0.6, drop=0.3, group=0.6),
}


@dataclass(frozen=True, eq=False)
class Both:
    """The masked and the compact model of a plan."""

    masked: onnx.ModelProto
    compact: Compact
    matched: Matched
    placement: Placement
    shapes: dict[str, Shape]

    def same(self, masked: onnx.ModelProto, written: onnx.ModelProto) -> bool:
        inner = {name: self.placement.read.get(name) for name in self.matched.changed_in(written)}
        return verify(masked, written, tolerance=TOLERANCE, seed=0, inner=inner).passed


def both(it: Subject, plan: Plan) -> Both:
    matched = match(it.model, plan, shapes=it.shapes)
    masked = settle(mask(it.model, matched), matched.dropped)
    again = match(masked, plan, shapes=it.shapes)
    placement = placement_of(masked, again, shapes=it.shapes)
    return Both(masked, compact(masked, again, placement), again, placement, it.shapes)


def example(seed: int, odds: Odds) -> Both:
    it = subject(RandomCnn(seed).model())
    return both(it, random_plan(it, np.random.default_rng([seed, 1]), odds))


def floats(model: onnx.ModelProto) -> dict[str, np.ndarray]:
    arrays = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    return {name: value for name, value in arrays.items() if value.dtype.kind == "f"}


def trained_in(model: onnx.ModelProto) -> set[str]:
    """Return the initializers that a training may change: not limits, and not scales of sizes."""
    read = {name for node in model.graph.node if node.op_type not in ("Resize", "Clip", "Pad") for name in node.input}
    return read & floats(model).keys()


def put(model: onnx.ModelProto, values: dict[str, np.ndarray]) -> onnx.ModelProto:
    """Return the model with other values of some initializers."""
    result = onnx.ModelProto()
    result.CopyFrom(model)
    for tensor in result.graph.initializer:
        if tensor.name in values:
            tensor.CopyFrom(onnx.numpy_helper.from_array(values[tensor.name], tensor.name))
    return result


def check(it: Both, rng: np.random.Generator) -> str:
    """Train by chance and go there and back; or return why that cannot be done."""
    assert it.same(it.masked, it.compact.model)
    before, constants = floats(it.compact.model), Constants(it.masked)
    trained = [name for name in before if it.compact.source(name) in trained_in(it.masked)]
    why = it.compact.obstacle(trained_in(it.masked), constants)
    if why:
        return why
    # Close enough to what they were: a variance must stay above zero.
    values = {name: (before[name] * rng.uniform(0.5, 1.5, before[name].shape)).astype(np.float32) for name in trained}
    written = put(it.compact.model, values)
    returned = it.compact.returned(values, constants)
    masked = put(it.masked, returned)
    assert {name: value.shape for name, value in returned.items()} == {name: floats(it.masked)[name].shape for name in returned}
    assert dropped_share(masked, it.matched) == 0.0
    assert compact(masked, it.matched, it.placement).model == written
    assert it.same(masked, written)
    assert it.same(masked, group(masked, it.matched, shapes=it.shapes))
    return ""


@pytest.mark.parametrize("kind", ODDS)
def test_compact_to_masked_and_back_gives_the_same_bytes(kind: str) -> None:
    reasons = [check(example(seed, ODDS[kind]), np.random.default_rng(seed)) for seed in range(20)]
    refused = [reason for reason in reasons if reason]
    assert len(refused) < 2
    assert all(reason.startswith("several nodes read the weight") for reason in refused)


@pytest.mark.slow
@pytest.mark.parametrize("start", range(100, 300, 50))
def test_there_and_back_on_many_graphs(start: int) -> None:
    kinds = list(ODDS.values())
    refused = [check(example(seed, kinds[seed % 4]), np.random.default_rng(seed)) for seed in range(start, start + 50)]
    assert sum(map(bool, refused)) < 5


def test_what_is_put_back_leaves_the_rest_as_it_was(rng: np.random.Generator) -> None:
    source = rng.standard_normal((4, 6, 3))
    orders = np.array([5, 0, 2, 3]), np.array([3, 1])
    for taken in (
        take_blocks("w", source.shape, 1, 2, orders),
        take_along("w", source.shape, [(0, orders[1], 1), (1, np.array([2, 0]), 2)]),
        Taken("w", (orders[1],), (2, 1, 6, 3)),
    ):
        value = taken.of(source)
        assert value.shape == taken.shape
        changed = taken.put(source, value + 1)
        assert np.array_equal(taken.of(changed), value + 1)
        assert (changed != source).sum() == value.size
        assert not taken.is_all_of(source)
    assert take_along("w", source.shape, [(1, np.arange(3), 2)]).is_all_of(source)


# ---- the constant of a dropped branch

STEM = "a = Conv (x, w_8_4_1_1, b_8) s = Relu (a) i = Conv (s, w_6_8_1_1) r = Relu (i) "
NORM = "e = Conv (r, w_8_6_1_1, c_8) n = BatchNormalization <epsilon = 0.01> (e, s_8, t_8, m_8, v_8) t = Add (s, n)"
ENDS = {
    "its bias": ("e = Conv (r, w_8_6_1_1, c_8) t = Add (s, e)", "c_8"),
    "nothing, for there is none": ("e = Conv (r, w_8_6_1_1) t = Add (s, e)", None),
    "the shift of its normalization": (NORM, "t_8"),
    "the shift, without a bias": (NORM.replace(", c_8", ""), "t_8"),
}


@pytest.mark.parametrize("case", ENDS)
def test_the_constant_of_a_dropped_branch_returns_into(case: str) -> None:
    end, source = ENDS[case]
    it = subject(graph(f"{STEM} {end} y = Conv (t, w_3_8_1_1)"))
    made = both(it, plan_of(spaces=(PlannedSpace("a", 8, (1, 3, 5, 6)),), dropped=("e",)))
    assert verify(mask(it.model, made.matched), made.masked, tolerance=TOLERANCE, seed=0).passed
    sources = [taken.source for name, taken in made.compact.written.taken.items() if name.endswith("_mean")]
    assert sources == ([source] if source else [])
    assert check(made, np.random.default_rng(0)) == ""


def test_a_dropped_branch_that_shares_its_shift_is_an_obstacle() -> None:
    """It would not move with the other reader's."""
    end = "q = Add (s, n) h = Conv (s, w_8_8_1_1, t_8) t = Add (q, h)"
    made = both(subject(graph(f"{STEM} {NORM.replace('t = Add (s, n)', end)} y = Conv (t, w_3_8_1_1)")), plan_of(dropped=("e",)))
    assert check(made, np.random.default_rng(0)) == "the weight 't_8' is computed with before it is used"


def test_a_settled_branch_gives_its_shift_whatever_the_statistics() -> None:
    it = subject(graph(f"{STEM} {NORM} y = Conv (t, w_3_8_1_1)"))
    made = both(it, plan_of(dropped=("e",)))
    (norm,) = (node for node in made.masked.graph.node if node.op_type == "BatchNormalization")
    scale, shift, mean = (get_tensor(made.masked, name) for name in norm.input[1:4])
    assert not scale.any()
    assert np.array_equal(mean, get_tensor(it.model, "c_8"))
    assert np.array_equal(get_tensor(made.compact.model, "n_mean").reshape(-1), shift)


# ---- what several nodes read, and what is computed


def test_a_constant_that_others_read_becomes_its_own_where_channels_go() -> None:
    """Or a training would make it one that cannot follow its channels."""
    model = graph(
        "a = Conv (x, w_8_4_1_1, z) r = Relu (a) e = Conv (r, w_8_8_1_1, z) q = Relu (e) y = Conv (q, w_3_8_1_1)",
        z=np.zeros(8, np.float32),
    )
    it = subject(model)
    made = both(it, plan_of(spaces=(PlannedSpace("a", 8, (1, 6)),)))
    biases = [node.input[2] for node in made.masked.graph.node if len(node.input) > 2]
    assert len(set(biases)) == 2
    assert check(made, np.random.default_rng(0)) == ""
    trained = put(made.masked, {name: np.random.default_rng(0).standard_normal(8).astype(np.float32) for name in biases})
    assert made.same(trained, group(trained, match(trained, plan_of(spaces=(PlannedSpace("a", 8, (1, 6)),)))))
    assert mask(made.masked, match(made.masked, plan_of(spaces=(PlannedSpace("a", 8, (1, 6)),)))) == made.masked


def test_a_weight_in_two_orders_is_an_obstacle() -> None:
    model = graph(
        "a = Conv (x, w_8_4_1_1, z) r = Relu (a) e = Conv (r, w_8_8_1_1, z) q = Relu (e) y = Conv (q, w_3_8_1_1)",
        z=np.zeros(8, np.float32),
    )
    layer = PlannedLayer("e", "e", 8, 8, 2, 0.5, (7, 1, 2, 3, 4, 5, 6, 0), (5, 1, 2, 3, 4, 0, 6, 7))
    made = both(subject(model), plan_of((layer,)))
    assert made.compact.obstacle({"z"}, Constants(made.masked)) == "several nodes read the weight 'z', each in an order of its own"
    assert made.compact.obstacle({"w_8_8_1_1"}, Constants(made.masked)) == ""


def test_a_weight_that_is_computed_with_is_an_obstacle() -> None:
    model = graph(
        "c = Reshape (b, eight) a = Conv (x, w_8_4_1_1, c) y = Conv (a, w_3_8_1_1)",
        b=np.arange(8, dtype=np.float32).reshape(2, 4),
        eight=np.array([8]),
    )
    made = both(subject(model), plan_of(spaces=(PlannedSpace("a", 8, (1, 6)),)))
    assert made.compact.obstacle({"b"}, Constants(made.masked)) == "the weight 'b' is computed with before it is used"
    assert made.compact.obstacle({"w_8_4_1_1"}, Constants(made.masked)) == ""


def test_channels_say_where_those_of_the_compact_model_are_in_the_masked_one() -> None:
    """Flattened pixels, too."""
    body = "a = Conv (x, w_8_4_1_1) f = Flatten (a) y = Gemm (f, w_288_6)"
    made = both(subject(graph(body, result="float[1,6] y")), plan_of(spaces=(PlannedSpace("a", 8, (1, 6)),)))
    assert made.compact.channels["a"].tolist() == [1, 6]
    assert made.compact.channels["f"].tolist() == [*range(36, 72), *range(216, 252)]
    assert made.compact.narrowed == {"a", "f"}
