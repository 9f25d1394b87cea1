"""The page in a real browser: nothing to complain about, everything drawn, reachable by keyboard, readable when narrow."""

import base64
import json
from collections.abc import Iterator
from pathlib import Path

import chromium
import numpy as np
import pytest
from tiny import conv_net, gconv, residual_net, save

pytest.importorskip("matplotlib")
if chromium.PROGRAM is None:
    pytest.skip("there is no chromium here: apt-get install chromium", allow_module_level=True)

pytestmark = pytest.mark.slow  # a browser takes its time

LARGE = Path(__file__).parents[2] / "shared" / "zoo" / "cifar10_resnet56_folded.onnx"

OPEN_ALL = "document.querySelectorAll('details').forEach(one => { one.open = true })"
VISIBLE = "one => one.checkVisibility() && one.getBoundingClientRect().width > 0"
CHARTS = """[...document.querySelectorAll('.chart')].map(chart =>
    [...chart.querySelectorAll('svg')].map(one => one.getBoundingClientRect()).filter(box => box.width > 0)
    .map(box => [box.width, box.height]))"""
# Every size that text is shown at, with a sample of it; the text of a chart is scaled with it.
TEXT_SIZES = """(() => {
    const found = {};
    const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
    while (walker.nextNode()) {
        const text = walker.currentNode.textContent.trim(), parent = walker.currentNode.parentElement;
        if (!text || !parent.checkVisibility() || !parent.getBoundingClientRect().width) continue;
        const matrix = parent.getScreenCTM ? parent.getScreenCTM() : {a: 1, b: 0};
        const size = parseFloat(getComputedStyle(parent).fontSize) * Math.hypot(matrix.a, matrix.b);
        found[size.toFixed(2)] = text;
    }
    return found;
})()"""
# Pairs of texts of one chart that cover each other by more than a pixel.
OVERLAPS = """[...document.querySelectorAll('.chart svg')].filter(one => one.getBoundingClientRect().width > 0).flatMap(chart => {
    const texts = [...chart.querySelectorAll('text')].map(one => [one.textContent.trim(), one.getBoundingClientRect()]);
    return texts.flatMap(([a, p], i) => texts.slice(i + 1).filter(([b, q]) =>
        Math.min(p.right, q.right) - Math.max(p.left, q.left) > 1 && Math.min(p.bottom, q.bottom) - Math.max(p.top, q.top) > 1)
        .map(([b, q]) => a + ' | ' + b));
})"""


@pytest.fixture(scope="module")
def browser() -> Iterator[chromium.Browser]:
    with chromium.Browser() as started:
        yield started


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of a folder that has every kind of result."""
    folder = tmp_path_factory.mktemp("results")
    model = save(conv_net(channels=16), folder / "net.onnx")
    for command in (
        ("compress", model, "--max-flops", "50%", "-o", folder / "a_model_with_a_rather_long_name_that_has_no_blank.onnx"),
        ("explore", model, "-o", folder, "--points", "4"),
        ("bench", model, "--runner", "ort-cpu", "--seconds", "0.05", "--timing-out", folder / "timing.json"),
    ):
        done = gconv(*command)
        assert done.code == 0, done.err
    epoch = {"learning_rate": 0.1, "train_loss": 1.5, "validation_accuracy": 0.5, "seconds": 1.0}
    lines = [json.dumps({"epoch": number, "validation_loss": 1 / (1 + number), **epoch}) for number in range(4)]
    (folder / "tuned.metrics.jsonl").write_text("\n".join(lines))
    return _page(folder, "--point", "1")


@pytest.fixture(scope="module")
def forms_page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of a model that was narrowed, grouped and lost a branch, at several budgets."""
    folder = tmp_path_factory.mktemp("forms")
    model = save(residual_net(), folder / "net.onnx")
    data = folder / "calib.npz"
    np.savez(data, image=np.random.default_rng(0).standard_normal((120, 4, 6, 6)).astype(np.float32))
    for command in (
        ("compress", model, "--max-macs", "60%", "--calib", data, "--forms", "width", "-o", folder / "narrow.onnx"),
        ("compress", model, "--max-macs", "60%", "--calib", data, "--forms", "drop", "-o", folder / "short.onnx"),
        ("explore", model, "-o", folder, "--points", "5", "--calib", data, "--forms", "all", "--effort", "0"),
    ):
        done = gconv(*command)
        assert done.code == 0, done.err
    return _page(folder, "--point", "4")


@pytest.fixture(scope="module")
def large_page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of a model with more than fifty layers."""
    if not LARGE.exists():
        pytest.skip("../shared/zoo is not here")
    folder = tmp_path_factory.mktemp("large")
    done = gconv("compress", LARGE, "--max-flops", "50%", "--effort", "0", "-o", folder / "small.onnx")
    assert done.code == 0, done.err
    return _page(folder)


def _page(folder: Path, *flags: str) -> Path:
    done = gconv("report", folder, "-o", folder / "page.html", *flags)
    assert done.code == 0, done.err
    return folder / "page.html"


@pytest.mark.parametrize("width", [1280, 400])
@pytest.mark.parametrize("which", ["page", "forms_page", "large_page"])
def test_everything_is_drawn_and_readable(
    browser: chromium.Browser, which: str, width: int, request: pytest.FixtureRequest
) -> None:
    path: Path = request.getfixturevalue(which)
    browser.open(path, width=width)
    browser.run(OPEN_ALL)
    charts = browser.run(CHARTS)
    assert len(charts) >= 5
    assert all(len(shown) == 1 for shown in charts), "each chart is there for wide and for narrow screens, one of them shown"
    assert all(box_width > 250 and height > 100 for ((box_width, height),) in charts)
    assert browser.run("document.documentElement.scrollWidth") <= width
    sizes = {float(size): text for size, text in browser.run(TEXT_SIZES).items()}
    assert min(sizes) >= 12, sizes
    assert browser.run(OVERLAPS) == []
    assert browser.complaints() == []
    assert browser.requests() == [path.as_uri()]


def test_the_keyboard_reaches_every_link_every_fold_and_every_table(browser: chromium.Browser, page: Path) -> None:
    browser.open(page, width=400)
    browser.run(OPEN_ALL)
    wanted = browser.run(f"[...document.querySelectorAll('a, summary, .scroll')].filter({VISIBLE}).length")
    assert wanted > 15
    for _ in range(wanted):
        browser.press("Tab")
        browser.run("document.activeElement.dataset.reached = 'yes'")
    assert (
        browser.run("document.querySelectorAll('a[data-reached], summary[data-reached], .scroll[data-reached]').length") == wanted
    )


def test_the_keyboard_opens_a_fold_and_scrolls_a_table(browser: chromium.Browser, page: Path) -> None:
    browser.open(page, width=400)
    browser.run("[...document.querySelectorAll('summary')].find(one => !one.parentElement.open).focus()")
    browser.press("Enter", text="\r")
    assert browser.run("document.activeElement.parentElement.open") is True
    browser.run(OPEN_ALL)
    browser.run("[...document.querySelectorAll('.scroll')].find(one => one.scrollWidth > one.clientWidth + 20).focus()")
    browser.press("ArrowRight")
    assert browser.wait("document.activeElement.scrollLeft > 0")


def test_dark_and_light_are_two_grounds_with_readable_ink(browser: chromium.Browser, page: Path) -> None:
    colours = "['backgroundColor', 'color'].map(name => getComputedStyle(document.body)[name])"
    label = "getComputedStyle(document.querySelector('.wide text')).fill"
    seen = []
    for dark in (False, True):
        browser.open(page, width=1280, dark=dark)
        ground, ink = browser.run(colours)
        assert browser.run(label) == ink  # charts follow the page
        assert browser.complaints() == []
        seen.append((ground, ink))
    assert seen[0][0] == "rgb(255, 255, 255)"
    assert len({*seen[0], *seen[1]}) == 4


def test_on_paper_it_is_light_wide_and_unfolded(browser: chromium.Browser, page: Path) -> None:
    browser.open(page, width=400, dark=True)
    closed = "[...document.querySelectorAll('details:not([open]) table')].map(one => one.checkVisibility())"
    folded = browser.run(closed)
    assert folded
    assert not any(folded)
    browser.call("Emulation.setEmulatedMedia", media="print", features=[{"name": "prefers-color-scheme", "value": "dark"}])
    assert browser.run("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert all(len(shown) == 1 for shown in browser.run(CHARTS))
    assert browser.run("[...document.querySelectorAll('.narrow')].every(one => !one.checkVisibility())")
    assert all(browser.run(closed))
    assert base64.b64decode(browser.call("Page.printToPDF", printBackground=False)["data"]).startswith(b"%PDF")
