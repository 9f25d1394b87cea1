"""The HTML page: it says what the files say, needs nothing but itself, and refuses files that are not sound."""

import html.parser
import json
import re
import shutil
import sys
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import onnx
import pytest
from tiny import conv_net, from_text, gconv, get_tensor, listing, residual_net, save, set_tensor

pytest.importorskip("matplotlib")

from onnx_gconv.plans import read_plan
from onnx_gconv.report.page.collection import collect
from onnx_gconv.report.page.exploration_file import read_exploration
from onnx_gconv.report.page.other_sections import exploration_section, telling_names
from onnx_gconv.report.page.palette import DARK, LIGHT, Palette
from onnx_gconv.report.page.source import PlannedModel, find_source
from onnx_gconv.solve.grouping import kept_share

MODELS = Path(__file__).parents[1] / "models"
EPOCHS = [  # by the names of the fields in docs/contracts.md
    (0, None, None, 2.9, 0.125, 0.1),
    (1, 0.05, 1.4, 1.1, 0.875, 3.25),
]
FIELDS = ("epoch", "learning_rate", "train_loss", "validation_loss", "validation_accuracy", "seconds")
METRICS = "".join(json.dumps(dict(zip(FIELDS, epoch, strict=True))) + "\n" for epoch in EPOCHS)


class Page(html.parser.HTMLParser):
    """What a page holds: its tables by title, its text, its links, its ids, and the titles of its charts."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tables: dict[str, list[list[str]]] = {}
        self.text, self.tags, self.charts = "", [], []
        self.ids: list[str] = []
        self.links: list[str] = []
        self._rows: list[list[str]] | None = None
        self._in_style = False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = {name: value or "" for name, value in attrs}
        self.tags.append(tag)
        self._in_style = tag == "style"
        self.ids += [found["id"]] if "id" in found else []
        self.links += [found[name] for name in ("href", "xlink:href", "src") if name in found]
        if found.get("class") == "scroll":
            self._rows = self.tables[found["aria-label"]] = []
        if found.get("role") == "img":
            self.charts.append(found["aria-label"])
        if self._rows is not None and tag == "tr":
            self._rows.append([])
        if self._rows is not None and tag in ("td", "th"):
            self._rows[-1].append("")

    def handle_endtag(self, tag: str) -> None:
        if tag == "table":
            self._rows = None

    def handle_data(self, data: str) -> None:
        if self._rows:
            self._rows[-1][-1] += data
        if not self._in_style:
            self.text += data


def report(*argv: str | Path) -> Page:
    """Make a page that must come out well, and return it."""
    done = gconv("report", *argv, "-o", "page.html")
    assert done.code == 0, done.err
    return Page(Path("page.html").read_text(encoding="utf-8"))


def run(*argv: str | Path) -> None:
    done = gconv(*argv)
    assert done.code == 0, done.err


@pytest.fixture(scope="session")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with everything that the commands write of the sample model."""
    folder = tmp_path_factory.mktemp("digits")
    for name in ("digits.onnx", "digits_calib.npz", "digits_test.npz"):
        shutil.copy(MODELS / name, folder)
    model = folder / "digits.onnx"
    quick = ("--effort", "0", "--jobs", "1")
    run("compress", model, "--max-flops", "50%", *quick, "-o", folder / "small.onnx")
    calib = ("--calib", folder / "digits_calib.npz", "--calib-samples", "50", "--cost", "log")
    run(
        "compress",
        model,
        "--max-flops",
        "60%",
        *quick,
        *calib,
        "--eval",
        folder / "digits_test.npz",
        "-o",
        folder / "recovered.onnx",
    )
    run("explore", model, "-o", folder, "--points", "4", *quick)
    limit = json.loads((folder / "explore.json").read_text())["points"][2]["budget"]["max_macs"]
    run("compress", model, "--max-macs", str(limit), *quick, "-o", folder / "chosen.onnx")
    timing = ("--runner", "ort-cpu", "--seconds", "0.2", "--timing-out", folder / "timing.json")
    run("bench", model, folder / "small.onnx", *timing)
    (folder / "tuned.metrics.jsonl").write_text(METRICS)
    return folder


@pytest.fixture(scope="session")
def digits_page(digits: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("page") / "page.html"
    run("report", digits, "-o", path)
    return path


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with a tiny model and its compressed form."""
    monkeypatch.chdir(tmp_path)
    save(conv_net(), Path("net.onnx"))
    run("compress", "net.onnx", "--groups", "2", "-o", "small.onnx")
    return tmp_path


# --- what the page says ---------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_measured_models_of_one_name_are_told_apart_by_their_folders(folder: Path) -> None:
    for name in ("old/model/net.onnx", "new/model/net.onnx"):
        Path(name).parent.mkdir(parents=True)
        shutil.copy("net.onnx", name)
    models = ("small.onnx", "old/model/net.onnx", "new/model/net.onnx", "net.onnx")
    run("bench", *models, "--runner", "ort-cpu", "--seconds", "0.05", "--timing-out", "timing.json")
    page = report(".")
    slowest = [title.removeprefix("The slowest layers of ") for title in page.tables if title.startswith("The slowest")]
    assert slowest == list(models)
    assert re.search(r"Gathers: small\.onnx: .*; old/model/net\.onnx: .*; new/model/net\.onnx: .*; net\.onnx: ", page.text)


@pytest.mark.parametrize(
    ("paths", "names"),
    [
        (["a/net.onnx", "a/small.onnx"], ["net.onnx", "small.onnx"]),
        (["/x/a/net.onnx", "/x/b/net.onnx"], ["a/net.onnx", "b/net.onnx"]),
        (["/x/a/net.onnx", "/y/a/net.onnx", "/x/b/net.onnx"], ["x/a/net.onnx", "y/a/net.onnx", "b/net.onnx"]),
        (["net.onnx", "a/net.onnx"], ["net.onnx", "a/net.onnx"]),
        (["a/net.onnx", "a/net.onnx"], ["net.onnx", "net.onnx"]),  # one model, measured twice
    ],
)
def test_a_name_has_as_many_folders_as_tell_it_from_the_others(paths: list[str], names: list[str]) -> None:
    assert [telling_names(paths)[path] for path in paths] == names


@pytest.mark.slow
def test_the_page_says_what_the_report_says(digits: Path, digits_page: Path) -> None:
    page = Page(digits_page.read_text(encoding="utf-8"))
    told = json.loads((digits / "recovered.report.json").read_text())
    rows = {row[0]: row[1:] for row in page.tables["Before and after, recovered"]}
    assert rows["parameters"][0] == f"{told['before']['params'] / 1000:.4g}k"
    assert rows["MACs"] == ["6.573M", f"{told['after']['macs'] / 1e6:.4g}M", f"{told['after']['macs'] / 6573312:.1%}"]
    assert rows["Gathers"][1:] == [str(told["gathers"]["written"]), f"of {told['gathers']['naive']} naive"]
    assert rows["top-1"][:2] == ["100.00%", f"{told['evaluation']['top1']:.2%}"]
    assert rows["output error"][:2] == [
        f"{told['recovery']['output_error_before']:.3f} masked",
        f"{told['recovery']['output_error_after']:.3f}",
    ]
    assert rows["verification"][2] == "passed, limit 0.0001"
    assert page.tables["Gathers left, recovered"][1:] == [[g["layer"], g["reason"]] for g in told["gathers"]["remaining"]]
    assert page.tables["Skipped Convs, recovered"][1:] == [[c["name"], c["reason"]] for c in told["skipped"]]


@pytest.mark.slow
def test_every_layer_is_in_its_place_along_the_depth(digits: Path, digits_page: Path) -> None:
    page = Page(digits_page.read_text(encoding="utf-8"))
    rows = page.tables["Layers, small"][1:]
    convs = [node for node in onnx.load(digits / "digits.onnx").graph.node if node.op_type == "Conv"]
    assert [row[1] for row in rows] == [node.name for node in convs[1:]]  # the first one cannot be grouped
    told = {layer["label"]: layer for layer in json.loads((digits / "small.report.json").read_text())["layers"]}
    for row in rows:
        layer = told.get(row[1], {"groups": 1})
        assert row[2:4] == [str(layer["groups"]), f"{layer['kept']:.1%}" if "kept" in layer else ""]


@pytest.mark.slow
def test_time_exploration_and_training_are_shown(digits: Path, digits_page: Path) -> None:
    page = Page(digits_page.read_text(encoding="utf-8"))
    timing = json.loads((digits / "timing.2.json").read_text())
    times = next(rows for title, rows in page.tables.items() if title.startswith("Time, ort-cpu fp32"))
    assert [row[0] for row in times[1:]] == [str(digits / "digits.onnx"), str(digits / "small.onnx")]
    assert times[2][1] == f"{timing['latency_ms']['median']:.4g} ms"
    assert times[2][5] == f"{timing['summary']['gather_ms']:.4g} ms"
    points = page.tables["Points of the exploration"][1:]
    told = json.loads((digits / "explore.json").read_text())["points"]
    assert [row[4] for row in points] == [f"{point['cost']:.4f}" for point in told]
    assert [row[-1] for row in points] == ["", "", "chosen", ""]
    assert "Chosen, with a ring: chosen is point-02." in page.text
    assert page.tables["Epochs, tuned.metrics.jsonl"][1:] == [
        ["start", "", "", "2.9", "12.50%", "0.1"],
        ["1", "0.05", "1.4", "1.1", "87.50%", "3.2"],
    ]
    # Three runs with their layers and three matrices each, and those of time, cost, groups and training.
    assert len(page.charts) == 3 * (3 + 3) + 4
    assert page.tags.count("svg") == 2 * len(page.charts)


@pytest.mark.slow
def test_a_plan_without_a_report_is_shown_too(folder: Path) -> None:
    run("plan", "net.onnx", "--groups", "4", "-o", "only.plan.json")
    page = report(folder)
    assert page.tables["Before and after, only"][1][0] == "parameters"
    assert [row[0] for row in page.tables["All models, and what is left of each"]] == ["model", "only", "small"]


def test_a_report_brings_its_siblings_and_no_others(folder: Path) -> None:
    Path("small.metrics.jsonl").write_text(METRICS)
    Path("other.metrics.jsonl").write_text(METRICS)
    run("bench", "net.onnx", "--runner", "ort-cpu", "--seconds", "0.05", "--timing-out", "small.timing.json")
    shutil.copy("small.timing.json", "timing.json")
    results = collect(Path("small.report.json"))
    assert [one.name for one in results.runs] == ["small"]
    assert results.runs[0].plan is not None
    assert [name for name, _ in results.timings] == ["small.timing.json"]
    assert [name for name, _ in results.trainings] == ["small.metrics.jsonl"]
    everything = collect(Path())
    assert [name for name, _ in everything.timings] == ["timing.json", "small.timing.json"]
    assert [name for name, _ in everything.trainings] == ["other.metrics.jsonl", "small.metrics.jsonl"]


@pytest.mark.slow
def test_a_point_of_an_exploration_is_shown_and_marked(folder: Path) -> None:
    run("explore", "net.onnx", "-o", "sweep", "--points", "4")
    page = report("sweep", "--point", "2")
    plan = json.loads(Path("sweep/point-02.plan.json").read_text())
    assert {row[1]: row[2] for row in page.tables["Layers, point-02"][1:] if row[3]} == {
        layer["label"]: str(layer["groups"]) for layer in plan["layers"]
    }
    assert "Chosen, with a ring: point-02." in page.text
    refused = gconv("report", "sweep", "--point", "9", "-o", "page.html")
    assert refused.code == 1
    assert "has no point 9: there are points 0 to 3" in refused.err


def evaluated(folder: Path, *figures: dict[str, float] | None) -> Path:
    """Write what points of an exploration have beside their costs, one for each."""
    path = folder / "sweep" / "explore.json"
    data = json.loads(path.read_text())
    for point, found in zip(data["points"], figures, strict=True):
        point |= {"evaluation": found, "recovery": None}
    data["points"][1]["finetuned"] = {"model": "a.onnx", "evaluation": {"top1": 0.75, "agreement": 0.5}}
    path.write_text(json.dumps(data))
    return path


@pytest.mark.slow
def test_accuracy_is_drawn_where_every_evaluated_point_has_it(folder: Path) -> None:
    run("explore", "net.onnx", "-o", "sweep", "--points", "3")
    evaluated(folder, {"top1": 0.875, "agreement": 1.0}, {"top1": 0.5, "agreement": 0.25}, None)
    page = report("sweep")
    assert any("top-1" in chart for chart in page.charts)
    rows = page.tables["Points of the exploration"]
    assert rows[0][6:8] == ["top-1, without training", "top-1, fine-tuned"]
    assert [row[6:8] for row in rows[1:]] == [["87.50%", ""], ["50.00%", "75.00%"], ["", ""]]


@pytest.mark.slow
def test_agreement_is_drawn_without_labels_and_nothing_where_a_point_lacks_both(folder: Path) -> None:
    run("explore", "net.onnx", "-o", "sweep", "--points", "3")
    path = evaluated(folder, {"agreement": 1.0}, {"top1": 0.5, "agreement": 0.25}, {"agreement": 0.1})
    results = collect(Path("sweep"))
    names = [picture.name for picture in exploration_section(read_exploration(path), results).pictures()]
    assert names == ["exploration-cost", "exploration-accuracy", "exploration-groups"]
    assert "same class as the dense model, fine-tuned" in report("sweep").tables["Points of the exploration"][0]
    evaluated(folder, {"top1": 1.0}, {"agreement": 0.25}, {"agreement": 0.1})
    assert len(report("sweep").charts) == 2


# --- widths and dropped branches ------------------------------------------------------------------------------------------


@pytest.fixture
def forms(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with a residual network narrowed, without its branch, and grouped: by plans that are edited by hand."""
    monkeypatch.chdir(tmp_path)
    save(residual_net(), Path("net.onnx"))
    np.savez("calib.npz", image=np.random.default_rng(0).standard_normal((120, 4, 6, 6)).astype(np.float32))
    run("compress", "net.onnx", "--max-macs", "70%", "--calib", "calib.npz", "--forms", "width", "-o", "narrow.onnx")
    run("compress", "net.onnx", "--max-macs", "60%", "--calib", "calib.npz", "--forms", "drop", "-o", "short.onnx")
    return tmp_path


def test_the_page_shows_widths_and_dropped_branches(forms: Path) -> None:
    page = report(".")
    told = json.loads(Path("narrow.report.json").read_text())
    assert page.tables["Narrowed spaces, narrow"][1:] == [
        [str(place), space["label"], str(space["channels"]), str(space["kept"]), f"{space['kept'] / space['channels']:.1%}"]
        for place, space in enumerate(told["spaces"], start=1)
    ]
    assert [row[2] for row in page.tables["Layers, narrow"][1:]] == ["", "width", "width"]
    assert page.tables["Dropped branches, short"] == [["last Conv"], ["last"]]
    assert [row[2] for row in page.tables["Layers, short"][1:]] == ["", "drop", "drop"]
    assert "narrowed 1 space." in page.text
    assert "dropped 1 branch." in page.text
    assert "Gathers left" not in page.text
    assert "Which channels go together" not in page.text
    rows = page.tables["All models, and what is left of each"]
    assert [row[:3] for row in rows] == [["model", "narrowed", "dropped"], ["narrow", "1", ""], ["short", "", "1"]]
    assert [chart.split(",")[0] for chart in page.charts[:2]] == [
        "What is left of the MACs of each Conv",
        "Channels of 1 narrowed space before and after. A table below has the numbers.",
    ]
    Path("net.onnx").unlink()
    assert [row[2] for row in report("short.report.json").tables["Layers, short"][1:]] == ["drop", "drop"]


def test_a_plan_with_widths_is_shown_without_a_report(forms: Path) -> None:
    for path in {*forms.glob("short.*"), *forms.glob("*.report.json")}:
        path.unlink()
    page = report(".")
    assert "A plan: 1 space to narrow." in page.text
    assert page.tables["Narrowed spaces, narrow"][1][1] == "first"


def test_an_exploration_of_widths_is_drawn_and_its_points_are_known_again(forms: Path) -> None:
    run("explore", "net.onnx", "-o", "sweep", "--points", "3", "--calib", "calib.npz", "--effort", "0")
    page = report("sweep", "--point", "1")
    told = json.loads(Path("sweep/explore.json").read_text())["points"]
    rows = page.tables["Points of the exploration"]
    assert rows[0][5:8] == ["narrowed", "dropped", "grouped"]
    narrowed = [[str(sum(map(bool, point["widths"].values()))), str(len(point["dropped"])), "0"] for point in told]
    assert [row[5:8] for row in rows[1:]] == narrowed
    assert [row[-1] for row in rows[1:]] == ["", "point-01", ""]
    assert any(chart.startswith("What is left of the MACs of the model at every budget") for chart in page.charts)
    assert any(chart.startswith("Share of its channels that every space keeps at every budget") for chart in page.charts)
    assert not any(chart.startswith("Number of groups of every Conv") for chart in page.charts)


def test_reports_of_versions_that_knew_groups_only_are_still_read(folder: Path) -> None:
    run("explore", "net.onnx", "-o", ".", "--points", "3")
    new = Path(_page_of(folder)).read_text()
    report_file, explore_file = Path("small.report.json"), Path("explore.json")
    data, told = json.loads(report_file.read_text()), json.loads(explore_file.read_text())
    for key in ("forms", "spaces", "dropped", "changed"):
        del data[key]
    del told["spaces"]
    for point in told["points"]:
        for key in ("widths", "dropped", "saved"):
            del point[key]
    report_file.write_text(json.dumps(data))
    explore_file.write_text(json.dumps(told))
    assert Path(_page_of(folder)).read_text() == new


def _page_of(folder: Path) -> Path:
    run("report", folder, "-o", "page.html")
    return Path("page.html")


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("spaces", [{"name": "first", "label": "first", "channels": 8, "kept": 9}], "'kept' is 9 of 8 channels"),
        ("spaces", {}, "'spaces' must be a list"),
        ("forms", "width", "'forms' must be a list"),
        ("changed", [{"name": "first"}], "the field 'macs_before' is missing"),
    ],
)
def test_what_is_wrong_with_forms_in_a_report_is_named(key: str, value: object, words: str, forms: Path) -> None:
    path = Path("narrow.report.json")
    path.write_text(json.dumps(json.loads(path.read_text()) | {key: value}))
    refused = gconv("report", "narrow.report.json", "-o", "page.html")
    assert refused.code == 1
    assert words in refused.err


# --- the matrices ---------------------------------------------------------------------------------------------------------


def source_of(plan_file: str, *named: str, given: str | None = None) -> PlannedModel | str:
    return find_source(read_plan(Path(plan_file)), named, Path(), given=None if given is None else Path(given))


@pytest.mark.parametrize("criterion", ["l2", "l1"])
def test_the_blocks_of_the_drawn_matrix_hold_the_kept_share(folder: Path, criterion: str) -> None:
    run("compress", "net.onnx", "--groups", "4", "--criterion", criterion, "-o", "other.onnx")
    source, plan = source_of("other.plan.json", "net.onnx"), read_plan(Path("other.plan.json"))
    assert isinstance(source, PlannedModel)
    for layer in plan.layers:
        matrix = source.importance(layer, plan.criterion)
        assert matrix is not None
        share = kept_share(matrix, layer.groups, np.array(layer.in_order), np.array(layer.out_order))
        assert share == pytest.approx(layer.kept, abs=5e-7)  # the plan has six digits
    weight = get_tensor(onnx.load("net.onnx"), "w2").astype(np.float64)
    norm = np.abs(weight).sum(axis=(2, 3)) if criterion == "l1" else np.sqrt((weight**2).sum(axis=(2, 3)))
    np.testing.assert_allclose(source.importance(plan.layers[0], criterion), norm, rtol=1e-12)


def test_a_conv_that_has_groups_already_is_drawn_with_its_empty_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    weight = np.random.default_rng(0).standard_normal((8, 4, 3, 3))
    text = "grouped (float[1,8,6,6] x) => (float[1,8,4,4] y) { y = Conv <group = 2> (x, w) }"
    save(from_text(text, w=weight), Path("net.onnx"))
    run("compress", "net.onnx", "--groups", "4", "-o", "small.onnx")
    source, plan = source_of("small.plan.json", "net.onnx"), read_plan(Path("small.plan.json"))
    assert isinstance(source, PlannedModel)
    layer = plan.layers[0]
    matrix = source.importance(layer, "l2")
    assert matrix is not None
    assert not matrix[:4, 4:].any()
    assert not matrix[4:, :4].any()
    np.testing.assert_allclose(matrix[4:, 4:], np.sqrt((weight.astype(np.float32)[4:].astype(float) ** 2).sum(axis=(2, 3))))
    share = kept_share(matrix, layer.groups, np.array(layer.in_order), np.array(layer.out_order))
    assert share == pytest.approx(layer.kept, abs=5e-7)


def test_without_the_model_the_page_says_so(folder: Path) -> None:
    Path("net.onnx").rename("moved.onnx")
    done = gconv("report", "small.report.json", "-o", "page.html")
    assert done.code == 0
    assert "warning: small: no importance matrices: the model that was planned was not found." in done.err
    page = Page(Path("page.html").read_text(encoding="utf-8"))
    assert "Name the model with --model." in page.text
    assert len(page.charts) == 3
    assert len(report("small.report.json", "--model", "moved.onnx").charts) == 5


@pytest.mark.slow
def test_another_model_of_that_name_is_not_taken_for_it_unless_the_user_says_so(folder: Path) -> None:
    save(conv_net(seed=1), Path("net.onnx"))
    assert "its hash differs" in report("small.report.json").text
    page = report("small.report.json", "--model", "net.onnx")
    assert len(page.charts) == 5
    assert "its hash is not that of the model that was planned" in page.text
    save(conv_net(channels=16), Path("net.onnx"))
    page = report("small.report.json", "--model", "net.onnx")
    assert "does not fit the plan" in page.text
    assert len(page.charts) == 3


def test_the_model_is_found_beside_a_report_that_was_moved_with_it(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("away").mkdir()
    for path in folder.glob("*.*"):
        path.rename(folder / "away" / path.name)
    monkeypatch.chdir("/")
    assert len(Page(_made(folder / "away", folder / "page.html")).charts) == 5


def _made(source: Path, page: Path) -> str:
    run("report", source, "-o", page)
    return page.read_text(encoding="utf-8")


def test_the_user_chooses_the_layer(folder: Path) -> None:
    charts = report("small.report.json", "--layer", "c3").charts
    assert [chart.split(" as in")[0] for chart in charts[3:]] == ["Importance of the kernels of c3"]
    refused = gconv("report", "small.report.json", "--layer", "c9", "-o", "no.html")
    assert refused.code == 1
    assert "error: there is no grouped layer 'c9'.\nhint: there are 'c2', 'c3'" in refused.err
    assert not Path("no.html").exists()


def test_a_plan_by_activation_is_drawn_by_its_weights_and_that_is_said(folder: Path) -> None:
    text = Path("small.plan.json").read_text().replace('"criterion": "l2"', '"criterion": "activation"')
    Path("small.plan.json").write_text(text)
    assert "shown is the L2 norm" in report("small.report.json").text


# --- the file -------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_same_results_give_the_same_bytes(folder: Path) -> None:
    Path("small.metrics.jsonl").write_text(METRICS)
    for name in ("one", "two"):
        run("report", ".", "-o", f"{name}.html", "--figures", name)
    assert Path("one.html").read_bytes() == Path("two.html").read_bytes()
    assert listing(Path("one")) == listing(Path("two"))


def test_figures_are_the_charts_of_the_page_as_svg_and_png(folder: Path) -> None:
    page = report("small.report.json", "--figures", "figures")
    names = [path.name for path in sorted(Path("figures").iterdir())]
    assert len(names) == 2 * len(page.charts)
    assert {"small-groups.png", "small-groups.svg", "small-kept.svg", "small-macs.svg", "small-importance-c2.png"} <= set(names)
    for path in Path("figures").iterdir():
        if path.suffix == ".svg":
            root = ElementTree.fromstring(path.read_bytes())
            assert root.tag.endswith("svg")
            assert "#ffffff" in path.read_text()  # a ground of its own
        else:
            assert path.read_bytes().startswith(b"\x89PNG")
            assert len(path.read_bytes()) > 5000


@pytest.mark.slow
def test_the_page_is_whole_by_itself(digits_page: Path) -> None:
    text = digits_page.read_text(encoding="utf-8")
    page = Page(text)
    assert page.links
    assert all(link.startswith(("#", "data:image/png;base64,")) for link in page.links)
    assert {link[1:] for link in page.links if link.startswith("#")} <= set(page.ids)
    assert len(page.ids) == len(set(page.ids))
    assert "script" not in page.tags
    assert "url(http" not in text
    assert "#fe01" not in text  # every colour of a chart is one of the page's


@pytest.mark.slow
def test_names_are_text_and_never_markup(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    model = conv_net()
    name = '<img src=x onerror=alert(1)> & "c2" $x^2$ 畳み込み'
    for node in model.graph.node:
        for names in (node.input, node.output):
            for index, tensor in enumerate(names):
                names[index] = name if tensor == "c2" else tensor
    save(model, Path("net.onnx"))
    run("compress", "net.onnx", "--groups", "2", "-o", "<b>$small_.onnx")
    run("bench", "net.onnx", "<b>$small_.onnx", "--runner", "ort-cpu", "--seconds", "0.05", "--timing-out", "timing.json")
    page = report(".", "--figures", "figures")
    assert "img" not in page.tags
    assert "b" not in page.tags
    assert name in [row[1] for row in page.tables["Layers, <b>$small_"]]


def test_a_report_without_a_grouped_conv_or_macs_is_a_page_too(folder: Path) -> None:
    run("compress", "net.onnx", "--max-flops", "100%", "-o", "same.onnx")
    assert report("same.report.json").charts == []
    data = json.loads(Path("small.report.json").read_text())
    for total in (data["before"], data["after"]):
        total |= {"macs": None, "flops": None}
    for layer in (*data["layers"], *data["changed"]):
        layer |= {"macs_before": None, "macs_after": None}
    data |= {"verify": None, "search": None}
    Path("small.report.json").write_text(json.dumps(data))
    page = report("small.report.json")
    assert page.tables["Before and after, small"][2] == ["MACs", "?", "?", ""]
    assert len(page.charts) == 4


def test_layers_of_zeros_are_drawn(folder: Path) -> None:
    model = set_tensor(onnx.load("net.onnx"), "w2", np.zeros((8, 8, 3, 3)))
    save(model, Path("net.onnx"))
    run("compress", "net.onnx", "--groups", "2", "-o", "small.onnx", "--no-verify")
    assert len(report("small.report.json").charts) == 5


# --- what is refused ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "text", "complaint"),
    [
        ("bad.report.json", "{", "'bad.report.json' is not JSON"),
        ("bad.report.json", "[]", "expected an object"),
        ("bad.report.json", '{"format": 2}', "format 2 is not known"),
        ("bad.report.json", '{"format": 1}', "the field 'budget' is missing"),
        ("bad.report.json", "\udcff", "is not UTF-8"),
        ("bad.plan.json", '{"format": 7}', "format 7 is not known"),
        ("explore.json", '{"format": 0}', "format 0 is not known"),
        ("explore.json", "nonsense", "'explore.json' is not JSON"),
        ("timing.json", '{"format": 3}', "format 3 is not known"),
        ("timing.2.json", "", "is not JSON"),
        ("metrics.jsonl", "", "is empty"),
        ("x.metrics.jsonl", METRICS + '{"epoch": 2}\n', "x.metrics.jsonl: line 3: the field 'learning_rate' is missing"),
        ("x.metrics.jsonl", METRICS.replace("1.4", "NaN"), "line 2: 'train_loss' must be a number"),
    ],
)
def test_a_malformed_file_is_one_sentence_and_no_page(folder: Path, name: str, text: str, complaint: str) -> None:
    Path(name).write_bytes(text.encode(errors="surrogateescape"))
    before = listing(folder)
    done = gconv("report", ".", "-o", "page.html", "--figures", "figures")
    assert done.code == 1
    assert complaint in done.err
    assert "\nhint: " in done.err
    assert "Traceback" not in done.err
    assert listing(folder) == before


def change(path: str, **fields: object) -> None:
    Path(path).write_text(json.dumps(json.loads(Path(path).read_text()) | fields))


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ({"layers": [{"name": "c2", "label": "c2", "groups": 0, "kept": 1, "macs_before": 1, "macs_after": 1}]}, "'groups' is 0"),
        ({"layers": 3}, "'layers' must be a list"),
        ({"before": {"params": "many"}}, "'params' must be a whole number"),
        ({"verify": {"max_rel_error": 0, "tolerance": 1, "passed": "yes"}}, "'passed' must be true or false"),
        ({"gathers": {"naive": 1}}, "the field 'written' is missing"),
    ],
)
def test_a_malformed_field_is_named(folder: Path, fields: dict[str, object], complaint: str) -> None:
    change("small.report.json", **fields)
    done = gconv("report", "small.report.json", "-o", "page.html")
    assert done.code == 1
    assert f"small.report.json: {complaint}" in done.err or complaint in done.err
    assert not Path("page.html").exists()


def test_nothing_to_report_is_refused(folder: Path) -> None:
    Path("empty").mkdir()
    for argument, complaint in (("empty", "there are no results in 'empty'"), ("gone", "there is no file or folder 'gone'")):
        done = gconv("report", argument, "-o", "page.html")
        assert (done.code, done.err.startswith(f"error: {complaint}")) == (1, True)
    missing = gconv("report", "small.report.json", "-o", "page.html", "--model", "gone.onnx")
    assert (missing.code, Path("page.html").exists()) == (1, False)
    nowhere = gconv("report", "small.report.json", "-o", "no/folder/page.html")
    assert (nowhere.code, "cannot write into" in nowhere.err) == (1, True)
    assert gconv("report", "small.report.json").code == 2


@pytest.mark.slow
def test_the_table_of_a_sweep_is_left_out_and_that_is_said(folder: Path) -> None:
    run("bench", "net.onnx", "--runner", "ort-cpu", "--sweep", "--seconds", "0.05", "--timing-out", "timing.json")
    assert "timing.json is a table of `bench --sweep`" in report(".").text


def test_without_matplotlib_the_user_is_told_how_to_get_it(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    done = gconv("report", "small.report.json", "-o", "page.html")
    assert done.code == 1
    assert "hint: pip install 'onnx-gconv[plot]'" in done.err
    assert not Path("page.html").exists()


# --- colours --------------------------------------------------------------------------------------------------------------


def luminance(colour: str) -> float:
    """Relative luminance, as WCAG 2.2 defines it."""
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    return float(np.dot((0.2126, 0.7152, 0.0722), linear))


def contrast(one: str, two: str) -> float:
    low, high = sorted((luminance(one), luminance(two)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("palette", [LIGHT, DARK], ids=["light", "dark"])
def test_text_and_lines_stand_out_from_the_ground(palette: Palette) -> None:
    for text in (palette.ink, palette.muted, palette.after):
        assert contrast(text, palette.ground) >= 4.5
    for line in (palette.before, palette.third, palette.fourth):
        assert contrast(line, palette.ground) >= 3
