"""The time that a job is said to take, before it begins."""

import numpy as np
import onnx
import pytest
from tiny import conv_net, from_text

import onnx_gconv
from onnx_gconv.data.open import open_data
from onnx_gconv.listener import Listener
from onnx_gconv.pipeline import forecasting
from onnx_gconv.pipeline.forecasting import about, expected_seconds
from onnx_gconv.pipeline.job import Job
from onnx_gconv.pipeline.original import open_original
from onnx_gconv.pipeline.recovering import open_samples
from onnx_gconv.pipeline.settings import Settings
from onnx_gconv.recover import forecast
from onnx_gconv.recover.calibration import Calibration

IMAGES = np.random.default_rng(0).standard_normal((120, 3, 8, 8)).astype(np.float32)


@pytest.fixture(autouse=True)
def _the_machine_of_the_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forecast, "_product_seconds", lambda: forecast.REFERENCE)


def seconds(model: onnx.ModelProto, *, images: int = 120, is_fitted: bool = True, **wishes: object) -> float:
    settings = Settings(max_macs=0.5, calib={"image": IMAGES[:images]}, jobs=1, **wishes)  # type: ignore[arg-type]
    original = open_original(model)
    samples = open_samples(original, settings)
    assert samples is not None
    found = expected_seconds(Job(original, settings), samples, is_fitted=is_fitted)
    assert found is not None
    return found


def test_more_samples_wider_layers_more_effort_and_more_forms_take_longer() -> None:
    small = seconds(conv_net(channels=8))
    assert seconds(conv_net(channels=8), images=30) < small < seconds(conv_net(channels=64))
    assert seconds(conv_net(channels=8), is_fitted=False) < small
    assert small < seconds(conv_net(channels=8), effort=2)
    assert small < seconds(conv_net(channels=8), forms="all") < seconds(conv_net(channels=8), forms="all", effort=3)


def test_what_a_rule_decides_is_not_tried() -> None:
    assert seconds(conv_net(channels=8), groups=2) < seconds(conv_net(channels=8), forms="group")


def test_work_grows_no_faster_than_samples_and_layers_do() -> None:
    """The forecast has the exponents of the work itself: positions are bounded by what the unknowns need."""
    one, four = (seconds(conv_net(channels=32), images=count) for count in (30, 120))
    assert four < 4 * one


def test_two_threads_take_less_than_one_and_more_than_half() -> None:
    assert 5.0 < forecast.here(10.0, 2) < 10.0
    assert forecast.here(10.0, 1) == pytest.approx(10.0)


def test_a_long_job_says_how_long_it_will_take_before_it_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    listener = Listener(note=told.append, progress=lambda phase, *_: told.append(phase))
    wishes = {"max_macs": 0.7, "calib": {"image": IMAGES}, "width_step": 1}
    onnx_gconv.compress(conv_net(channels=8), listener=listener, **wishes)  # type: ignore[arg-type]
    assert not any("will take" in line for line in told)  # it is over in no time
    told.clear()
    monkeypatch.setattr(forecasting, "WORTH_TELLING", 0.0)
    onnx_gconv.compress(conv_net(channels=8), listener=listener, **wishes)  # type: ignore[arg-type]
    assert told.index("measuring, choosing and fitting on 120 samples will take about 10 seconds") < told.index("measuring")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (3, "about 10 seconds"),
        (44, "about 40 seconds"),
        (100, "about 2 minutes"),
        (260, "about 4 minutes"),
        (7300, "about 2 hours"),
    ],
)
def test_a_time_is_told_as_one_would_say_it(given: float, said: str) -> None:
    assert about(given) == said


def test_a_model_may_have_a_number_for_its_first_input() -> None:
    text = "m (float scale, float[N,4,6,6] x) => (y) { a = Mul (x, scale) b = Conv (a, w) r = Relu (b) y = Conv (r, w) }"
    original = open_original(from_text(text, w=np.ones((4, 4, 1, 1), np.float32)))
    settings = Settings(max_macs=0.5, jobs=1)
    samples = Calibration(open_data({"image": IMAGES}, conv_net(), preprocessing=settings.preprocessing), 10, 5, is_fixed=False)
    assert (expected_seconds(Job(original, settings), samples, is_fitted=True) or 0) > 0
