"""Where weights are fitted and to what; and the walk through the graph that gets there."""

import math
from collections import Counter
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from fitting import Normal, outputs
from numpy.typing import ArrayLike
from tiny import from_text, residual_net

from onnx_gconv.model.constants import Constants
from onnx_gconv.model.network import read
from onnx_gconv.recover.activation import input_strengths
from onnx_gconv.recover.fitting import FitOptions, fit_sites
from onnx_gconv.recover.flow import Flow
from onnx_gconv.recover.site import Site, find_sites
from onnx_gconv.recover.store import ActivationStore
from onnx_gconv.recover.walk import Walk, put_inputs
from onnx_gconv.rewrite.match import Matched

IMAGES = np.random.default_rng(0).standard_normal((6, 4, 5, 5)).astype(np.float32)


def net(body: str, *, outputs: str = "float[N,C,H,W] y", inputs: str = "float[N,4,H,W] x", **tensors: ArrayLike) -> onnx.ModelProto:
    """Return a model on 4-channel images; w1, w2, w3 are 1x1 kernels 4->4 and b1, b2, b3 biases unless told otherwise."""
    rng = np.random.default_rng(2)

    def draw(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape) / 4

    defaults: dict[str, ArrayLike] = {}
    for number in "123":
        defaults |= {f"w{number}": draw(4, 4, 1, 1), f"b{number}": draw(4)}
        defaults |= {f"mean{number}": draw(4), f"gamma{number}": 1 + draw(4), f"beta{number}": draw(4)}
        defaults[f"var{number}"] = 1 + np.square(draw(4))
    words = set(body.replace("(", " ").replace(")", " ").replace(",", " ").split())
    used = {name: value for name, value in (defaults | tensors).items() if name in words}
    return from_text(f"m ({inputs}) => ({outputs}) {{ {body} }}", **used)


def sites_of(model: onnx.ModelProto) -> dict[str, Site]:
    return {site.name: site for site in find_sites(Flow(model), Constants(model), Matched())}


def aims(model: onnx.ModelProto) -> dict[str, tuple[str, str]]:
    """Return the target and the shortcut of each site."""
    return {name: (site.target, site.shortcut) for name, site in sites_of(model).items()}


# --- sites: where a sum closes --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("operands", ["b, r", "r, b"])
def test_the_last_conv_of_a_block_aims_at_the_sum(operands: str) -> None:
    model = net(f"a = Conv (x, w1, b1) r = Relu (a) b = Conv (r, w2, b2) s = Add ({operands}) y = Relu (s)")
    assert aims(model) == {"a": ("a", ""), "b": ("s", "r")}


@pytest.mark.parametrize("operands", ["b, c", "c, b"])
@pytest.mark.parametrize("is_first", [True, False])
def test_of_two_convs_that_meet_in_a_sum_the_later_one_closes_it(operands: str, *, is_first: bool) -> None:
    main, shortcut = "a = Conv (x, w1, b1) r = Relu (a) b = Conv (r, w2, b2)", "c = Conv (x, w3, b3)"
    body = f"{shortcut} {main}" if is_first else f"{main} {shortcut}"
    found = aims(net(f"{body} s = Add ({operands}) y = Relu (s)"))
    expected = {"a": ("a", ""), "b": ("s", "c"), "c": ("c", "")} if is_first else {"a": ("a", ""), "b": ("b", ""), "c": ("s", "b")}
    assert found == expected


def test_a_shortcut_with_a_conv_further_up_that_comes_later_is_not_closed_by_the_earlier_one() -> None:
    found = aims(net("a = Conv (x, w1, b1) b = Conv (x, w2, b2) r = Relu (b) y = Add (a, r)"))
    assert found == {"a": ("a", ""), "b": ("b", "")}


def test_a_sum_is_closed_through_a_batch_normalization() -> None:
    model = net("a = Conv (x, w1) n = BatchNormalization (a, gamma1, beta1, mean1, var1) s = Add (x, n) y = Relu (s)")
    site = sites_of(model)["a"]
    assert (site.target, site.shortcut, site.has_intercept) == ("s", "x", True)
    assert site.after is not None
    assert (site.after.output, site.after.mean) == ("n", "mean1")


@pytest.mark.parametrize(
    "body",
    [
        "a = Conv (x, w1, b1) r = Relu (a) y = Add (r, x)",  # Relu between
        "a = Conv (x, w1, b1) s = Add (a, x) y = Mul (s, a)",  # the Conv is read twice
        "a = Conv (x, w1, b1) y = Add (a, a)",
        "a = Conv (x, w1, b1) r = Sigmoid (a) y = Add (a, r)",  # a sum with what it makes itself
        "k = Constant <value = float[1] {1.0}> () a = Conv (x, w1, b1) y = Add (a, k)",  # no stream: a constant
        "a = Conv (x, w1, b1) y = Mul (a, x)",
        "a = Conv (x, w1) n = BatchNormalization (a, gamma1, beta1, mean1, var1) r = Relu (n) y = Add (r, x)",
        # One channel is switched off: no weight of the Conv brings its share of the sum about.
        "a = Conv (x, w1) n = BatchNormalization (a, off, beta1, mean1, var1) y = Add (n, x)",
    ],
)
def test_everything_else_aims_at_the_convs_own_output(body: str) -> None:
    assert aims(net(body, off=np.array([1.0, 0, 1, 1]))) == {"a": ("a", "")}


def test_a_conv_that_is_an_output_itself_does_not_close_a_sum() -> None:
    model = net("a = Conv (x, w1, b1) y = Add (a, x)", outputs="float[N,C,H,W] a, float[N,C,H,W] y")
    assert aims(model) == {"a": ("a", "")}


def test_a_conv_that_an_inner_graph_reads_does_not_close_a_sum() -> None:
    body = """
        a = Conv (x, w1, b1) s = Add (a, x)
        y = If (flag) <then_branch = t () => (float[N,C,H,W] p) { p = Mul (s, a) },
                       else_branch = e () => (float[N,C,H,W] q) { q = Relu (s) }>
    """
    assert aims(net(body, inputs="float[N,4,H,W] x, bool flag")) == {"a": ("a", "")}


# --- sites: which weights, which constant ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "body",
    [
        "a = Conv (x, w1, b1) y = Conv (a, w1, b2)",  # shared weight
        "v = Identity (w1) a = Conv (x, w1, b1) y = Conv (a, v, b2)",
        "v = Mul (w1, w2) y = Conv (x, v, b1)",  # a computed one
        "y = Conv (x, x)",
        'y = ConvTranspose <auto_pad = "SAME_UPPER"> (x, w1, b1)',  # whose size is not said by its pads
        "k = Constant <value = float[1,4,1,1] {1.0, 2.0, 3.0, 4.0}> () c = Conv (k, w1, b1) y = Add (x, c)",  # never moves
    ],
)
def test_weights_that_are_not_a_convs_own_are_no_site(body: str) -> None:
    assert sites_of(net(body)) == {}


@pytest.mark.parametrize(
    ("body", "bias", "has_intercept"),
    [
        ("y = Conv (x, w1, b1)", "b1", True),
        ("y = Conv (x, w1)", "", False),
        ("a = Conv (x, w1, b1) r = Relu (a) y = Conv (r, w2, b1)", "", False),  # shared
        ("c = Mul (b1, b2) y = Conv (x, w1, c)", "", False),  # computed
        ("a = Conv (x, w1) y = BatchNormalization (a, gamma1, beta1, mean1, var1)", "", True),
        ("a = Conv (x, w1, b1) y = BatchNormalization (a, gamma1, beta1, mean1, var1)", "b1", True),
        # The mean is somebody else's too: as bias, or in another normalization.
        ("a = Conv (x, w1) y = BatchNormalization (a, gamma1, mean1, mean1, var1)", "", False),
        (
            "a = Conv (x, w1) n = BatchNormalization (a, gamma1, beta1, mean1, var1)"
            " r = Relu (n) y = BatchNormalization (r, gamma2, beta2, mean1, var2)",
            "",
            False,
        ),
    ],
)
def test_a_constant_goes_where_nobody_else_reads_it(body: str, bias: str, *, has_intercept: bool) -> None:
    first = next(iter(sites_of(net(body)).values()))
    assert (first.bias, first.has_intercept) == (bias, has_intercept)


@pytest.mark.parametrize(
    ("body", "names"),
    [
        ("y = Gemm (x, w, b)", ["y"]),
        ("y = Gemm <transB = 1> (x, w, b)", ["y"]),
        ("y = Gemm <alpha = 2.0> (x, w, b)", []),
        ("y = Gemm <beta = 0.5> (x, w, b)", []),
        ("y = Gemm <transA = 1> (x, w, b)", []),
        ("y = MatMul (x, w)", []),
    ],
)
def test_a_gemm_is_a_site_if_it_is_plain(body: str, names: list[str], normal: Normal) -> None:
    model = net(body, inputs="float[4,4] x", outputs="float[4,4] y", w=normal(4, 4), b=normal(4))
    assert list(sites_of(model)) == names


@pytest.mark.parametrize("transposed", [0, 1])
def test_a_gemms_blocks_are_all_its_channels(transposed: int, normal: Normal) -> None:
    weight = normal(3, 5) if transposed else normal(5, 3)
    model = net(f"y = Gemm <transB = {transposed}> (x, w)", inputs="float[N,5] x", outputs="float[N,3] y", w=weight)
    site = sites_of(model)["y"]
    assert (site.outputs.tolist(), site.inputs.tolist()) == ([[0, 1, 2]], [[0, 1, 2, 3, 4]])


def test_blocks_are_the_groups_that_a_conv_has(normal: Normal) -> None:
    model = net("d = Conv <group = 4> (x, w) y = Conv <group = 2> (d, v)", w=normal(8, 1, 3, 3), v=normal(6, 4, 1, 1))
    depthwise, grouped = sites_of(model).values()
    assert depthwise.outputs.tolist() == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert depthwise.inputs.tolist() == [[0], [1], [2], [3]]
    assert grouped.outputs.tolist() == [[0, 1, 2], [3, 4, 5]]
    assert grouped.inputs.tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]


@pytest.mark.parametrize(
    ("body", "clamp"),
    [
        ("a = Conv (x, w1, b1) y = Relu (a)", (0.0, math.inf)),
        ("a = Conv (x, w1, b1) y = Clip (a, low, high)", (-1.0, 6.0)),
        ("a = Conv (x, w1, b1) y = Clip (a, , high)", (-math.inf, 6.0)),
        ("a = Conv (x, w1) n = BatchNormalization (a, gamma1, beta1, mean1, var1) y = Relu (n)", (0.0, math.inf)),
        ("a = Conv (x, w1, b1) s = Add (a, x) y = Relu (s)", (0.0, math.inf)),
        ("a = Conv (x, w1, b1) y = LeakyRelu (a)", None),
        ("a = Conv (x, w1, b1) r = Relu (a) y = Mul (r, a)", None),  # who else reads it sees what the Relu cuts off
        ("a = Conv (x, w1, b1) s = Add (a, x) r = Relu (s) y = Mul (s, r)", None),
        ("top = ReduceMax <keepdims = 0> (x) a = Conv (x, w1, b1) y = Clip (a, low, top)", None),  # moves with the input
        ("a = Conv (x, w1, b1) r = MaxPool <kernel_shape = [2, 2]> (a) y = Relu (r)", None),
        # Not the last of the two that meet: what it should give is its own output, which no Relu reads.
        ("a = Conv (x, w1, b1) b = Conv (x, w2, b2) r = Sigmoid (b) s = Add (a, r) y = Relu (s)", None),
    ],
)
def test_an_activation_behind_is_seen_where_nothing_else_reads_what_it_cuts_off(
    body: str, clamp: tuple[float, float] | None
) -> None:
    assert sites_of(net(body, low=np.float32(-1), high=np.float32(6)))["a"].clamp == clamp


def test_sites_come_in_graph_order() -> None:
    assert list(sites_of(residual_net())) == ["stem", "first", "last"]


# --- the walk -------------------------------------------------------------------------------------------------------------


class Executions:
    """How often each node has been run, whatever session it was in."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count: Counter[str] = Counter()
        executions = self

        class Counting(ort.InferenceSession):
            def __init__(self, source: bytes, *args: Any, **flags: Any) -> None:
                super().__init__(source, *args, **flags)
                self.nodes = [node.output[0] for node in onnx.load_from_string(source).graph.node]

            def run(self, *args: Any) -> Any:
                executions.count.update(self.nodes)
                return super().run(*args)

        monkeypatch.setattr(ort, "InferenceSession", Counting)


def refit(model: onnx.ModelProto, feeds: list[dict[str, np.ndarray]]) -> onnx.ModelProto:
    sites = find_sites(Flow(model), Constants(model), Matched())
    return fit_sites(model, model, sites, feeds, options=FitOptions(), progress=lambda *_: None).model


# Branches that meet in a Concat, an If that reads from outside, constants, a second input, a dead end and two outputs.
BRANCHES = """
    a = Conv (x, w1, b1) ra = Relu (a)
    left, right = Split <axis = 1> (ra, halves)
    b = Conv (ra, w2, b2)
    k = Constant <value = float[1,4,1,1] {1.0, 2.0, 3.0, 4.0}> () kk = Neg (k)
    scaled = Mul (b, kk)
    chosen = If (flag) <then_branch = t () => (float[N,C,H,W] p) { p = Add (scaled, z) },
                        else_branch = e () => (float[N,C,H,W] q) { q = Sub (scaled, ra) }>
    joined = Concat <axis = 1> (right, chosen, left)
    c = Conv (joined, w, b3)
    dead = Exp (joined)
    s = Add (c, z)
    y = Relu (s)
    early = GlobalAveragePool (ra)
"""


def branches() -> onnx.ModelProto:
    return net(
        BRANCHES,
        inputs="float[N,4,H,W] x, float[N,4,H,W] z, bool[1] flag",
        outputs="float[N,C,H,W] y, float[N,C,H,W] early",
        w=np.random.default_rng(3).standard_normal((4, 8, 1, 1)) / 4,
        halves=np.array([2, 2]),
    )


def branch_feeds(batches: int) -> list[dict[str, np.ndarray]]:
    rng = np.random.default_rng(1)
    return [
        {name: rng.standard_normal((3, 4, 5, 5)).astype(np.float32) for name in "xz"} | {"flag": np.array([batch % 2 == 0])}
        for batch in range(batches)
    ]


def test_a_reconstruction_runs_no_node_twice_in_either_model(monkeypatch: pytest.MonkeyPatch) -> None:
    executions = Executions(monkeypatch)
    refit(branches(), branch_feeds(5))
    found = {name: count / 5 for name, count in executions.count.items() if name not in ("k", "kk")}
    # The dense model up to the last target, s; the other one up to the last input, joined. Of k and kk, which do not depend
    # on the input, nothing is kept: they may be computed wherever they are read.
    both = dict.fromkeys(["a", "ra", "left", "b", "scaled", "chosen", "joined"], 2.0)
    assert found == both | {"c": 1.0, "s": 1.0}


@pytest.mark.parametrize(("has_chains", "again"), [(True, 1.0), (False, 0.0)])
def test_only_what_lies_between_two_convs_that_are_fitted_together_is_run_again(
    again: float, monkeypatch: pytest.MonkeyPatch, *, has_chains: bool
) -> None:
    executions = Executions(monkeypatch)
    body = "a = Conv (x, w1, b1) r = Relu (a) b = Conv (r, w2, b2) s = Relu (b) d = Sigmoid (s) y = Conv (d, w3, b3)"
    model, feeds = net(body), [{"x": IMAGES}, {"x": IMAGES + 1}]
    # Of a model with nothing masked there would be nothing to improve, and the weights would stay as they were.
    other = net(body, w1=np.ones((4, 4, 1, 1)) / 4, w2=np.eye(4)[:, :, None, None])
    sites = find_sites(Flow(other), Constants(other), Matched())
    fit_sites(model, other, sites, feeds, options=FitOptions(has_chains=has_chains), progress=lambda *_: None)
    found = {name: executions.count[name] / 2 for name in "arbsdy"}
    # y, the two Convs of a pair run by themselves, and the pair's transposed Conv have that name, too.
    assert found | {"y": 1.0} == {"a": 2 + again, "r": 2 + again, "b": 2.0, "s": 2.0, "d": 2.0, "y": 1.0}


def test_a_walk_gives_what_the_whole_model_gives() -> None:
    model, feeds = branches(), branch_feeds(3)
    stops = [{"x"}, {"ra"}, {"right", "b"}, {"joined", "z"}, {"y", "early", "kk"}]
    copy = onnx.ModelProto.FromString(model.SerializeToString())
    names = sorted(set().union(*stops))
    del copy.graph.output[:]
    copy.graph.output.extend(onnx.helper.make_empty_tensor_value_info(name) for name in names)
    whole = ort.InferenceSession(copy.SerializeToString(), providers=["CPUExecutionProvider"])
    expected = [dict(zip(names, whole.run(names, feed), strict=True)) for feed in feeds]
    flow = Flow(model)
    with ActivationStore(memory_bytes=0) as store:
        put_inputs(feeds, flow.inputs, [store])
        walk = Walk(flow, store, later=stops)
        for wanted in stops:
            compute = walk.next_stop()
            for batch in (2, 0, 1):
                found = compute(batch)
                assert found.keys() == wanted
                for name in wanted:
                    np.testing.assert_allclose(found[name], expected[batch][name], rtol=1e-5, atol=1e-6)
            walk.tidy()
        assert store.names() == set()


def test_only_tensors_that_will_be_read_are_kept(monkeypatch: pytest.MonkeyPatch, normal: Normal) -> None:
    """In a chain, a walk needs the tensor that it has reached and the one that it comes from: two for each model.

    Where three Convs are fitted together, what the first reads is kept until the third is fitted: one more.
    """
    held: dict[tuple[int, str, int], int] = {}
    peaks = []
    put, drop = ActivationStore.put, ActivationStore.drop

    def counting_put(store: ActivationStore, name: str, batch: int, value: np.ndarray) -> None:
        put(store, name, batch, value)
        held[id(store), name, batch] = value.nbytes
        peaks.append(sum(held.values()))

    def counting_drop(store: ActivationStore, name: str) -> None:
        drop(store, name)
        for key in [key for key in held if key[:2] == (id(store), name)]:
            del held[key]

    monkeypatch.setattr(ActivationStore, "put", counting_put)
    monkeypatch.setattr(ActivationStore, "drop", counting_drop)
    depth = 12
    convs = [f"c{i} = Conv ({f'r{i - 1}' if i else 'x'}, k{i}, h{i}) r{i} = Relu (c{i})" for i in range(depth)]
    tensors = {f"k{i}": normal(4, 4, 1, 1) / 4 for i in range(depth)} | {f"h{i}": normal(4) for i in range(depth)}
    model = net(" ".join(convs), outputs=f"float[N,C,H,W] r{depth - 1}", **tensors)
    refit(model, [{"x": IMAGES}, {"x": IMAGES + 1}])
    assert 2 * 2 * IMAGES.nbytes <= max(peaks) <= 5 * 2 * IMAGES.nbytes


def test_the_strength_of_an_input_is_the_root_of_its_mean_square() -> None:
    model = net("a = Conv (x, w1, b1) r = Relu (a) y = Conv (r, w2, b2)")
    layers = read(model, {"x": (1, 4, 5, 5)}).layers
    feeds = [{"x": IMAGES}, {"x": 3 * IMAGES + 1}]
    found = input_strengths(model, layers, feeds, jobs=2)
    inputs = np.concatenate([feed["x"] for feed in feeds])
    inner = np.concatenate([outputs(model, feed, "r")[0] for feed in feeds])
    for name, values in (("a", inputs), ("y", inner)):
        np.testing.assert_allclose(found[name], np.sqrt(np.square(values.astype(np.float64)).mean(axis=(0, 2, 3))), rtol=1e-6)
