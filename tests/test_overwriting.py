"""Nothing that a command reads is ever replaced by what it writes, whatever it is called and however it is linked."""

import os
from pathlib import Path

import numpy as np
import onnx
import pytest
from tiny import conv_net, gconv, listing, save, save_external, write_module

from onnx_gconv.cli import options
from onnx_gconv.data.folder import SUFFIXES


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Be in a folder with models, one of them with its weights elsewhere, a plan, and samples."""
    monkeypatch.chdir(tmp_path)
    save(conv_net(), Path("good.onnx"))
    Path("sub").mkdir()
    assert gconv("plan", "good.onnx", "--groups", "2", "-o", "plan.json").code == 0
    np.savez("data.npz", image=np.ones((2, 3, 8, 8), np.float32))
    return tmp_path


def refuse(command: str, *words: str) -> None:
    before = listing(Path())
    done = gconv(*command.split())
    assert done.code == 2, done
    for word in ("would overwrite", *words):
        assert word in done.err, done.err
    assert listing(Path()) == before


@pytest.mark.parametrize(
    ("data", "command"),
    [
        ("o.onnx.data", "compress m.onnx --groups 2 -o o.onnx"),
        ("o.onnx", "compress m.onnx --groups 2 -o o.onnx"),
        ("m.gconv.onnx.data", "compress m.onnx --groups 2"),
        ("o.plan.json", "compress m.onnx --groups 2 -o o.onnx"),
        ("o.report.json", "compress m.onnx --groups 2 -o o.onnx"),
        ("o.int8.onnx", "compress m.onnx --groups 2 --calib data.npz --precision int8 -o o.onnx"),
        ("o.int8.onnx.data", "compress m.onnx --groups 2 --calib data.npz --precision int8 -o o.onnx"),
        ("w.data", "plan m.onnx --groups 2 -o w.data"),
        ("m.onnx.data", "apply m.onnx plan.json -o m.onnx.data"),
        ("o.onnx.data", "apply m.onnx plan.json -o o.onnx"),
        ("o.onnx.data", "mask m.onnx plan.json -o o.onnx"),
        ("o.onnx.data", "export m.onnx -o o.onnx"),
        ("o.onnx.data", "plan m.onnx --groups 2 -o p.json --refine-steps 1 --refine-data data.npz --refined o.onnx"),
        ("o.onnx.data", "finetune m.onnx plan.json --data data.npz -o o.onnx"),
        ("o.checkpoint.pt", "finetune m.onnx plan.json --data data.npz -o o.onnx"),
        ("o.metrics.jsonl", "finetune m.onnx plan.json --data data.npz -o o.onnx"),
        ("o.onnx.data", "finetune good.onnx plan.json --teacher m.onnx --data data.npz -o o.onnx"),
        ("t.json", "bench m.onnx --runner ort-cpu --timing-out t.json"),
        ("t.2.json", "bench good.onnx m.onnx --runner ort-cpu --timing-out t.json"),
        ("t.json", "bench m.onnx --runner ort-cpu --sweep --timing-out t.json"),
    ],
)
@pytest.mark.parametrize("where", ["here", "from another folder"])
def test_the_weights_of_a_model_are_not_replaced(
    data: str, command: str, where: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_external(conv_net(), Path("m.onnx"), data=data)
    before = listing(folder)
    if where != "here":
        monkeypatch.chdir("sub")
        named = ("m.onnx", "good.onnx", "plan.json", "data.npz", "p.json", data, "o.onnx", "t.json")
        command = " ".join(f"../{word}" if word in named else word for word in command.split())
    refuse(command, "the weights of")
    assert listing(folder) == before


@pytest.mark.parametrize("link", [os.symlink, os.link], ids=["symbolic", "hard"])
def test_links_are_seen_through(link: object) -> None:
    assert callable(link)
    save_external(conv_net(), Path("m.onnx"), data="w.data")
    link(Path("w.data").absolute(), Path("sub/o.onnx.data").absolute())
    refuse("compress m.onnx --groups 2 -o sub/o.onnx", "sub/o.onnx.data", "the weights of m.onnx")
    link(Path("plan.json").absolute(), Path("sub/p.onnx").absolute())
    refuse("apply good.onnx plan.json -o sub/p.onnx", "the plan")
    link(Path("good.onnx").absolute(), Path("sub/good.onnx").absolute())
    refuse("compress sub/good.onnx --groups 2 -o good.onnx", "the model itself")


@pytest.mark.parametrize(
    ("command", "what"),
    [
        ("compress good.onnx --groups 2 --calib images -o images/a.png", "an image of the data"),
        ("compress good.onnx --groups 2 --eval images -o images/class/b.JPG", "an image of the data"),
        ("compress good.onnx --groups 2 --calib mine:batches -o mine.py", "the code that gives the data"),
    ],
)
def test_data_is_not_replaced(command: str, what: str) -> None:
    Path("images/class").mkdir(parents=True)
    for name in ("images/a.png", "images/class/b.JPG"):
        Path(name).write_text("an image")
    write_module("mine", "def batches(): return []")
    refuse(command, what)


@pytest.mark.parametrize("data", [".", "..", ":", "data.npz", "no.such:thing", "a:b:c"])
def test_names_of_data_are_no_stumbling_block(data: str) -> None:
    for _ in range(2):
        done = gconv("compress", "good.onnx", "--groups", "2", "--calib", data, "-o", "o.onnx")
        assert "unexpectedly" not in done.err
        assert done.code != 2, done.err


def test_a_link_to_itself_is_no_stumbling_block() -> None:
    Path("loop.onnx").symlink_to("loop.onnx")
    done = gconv("compress", "good.onnx", "--groups", "2", "-o", "loop.onnx")
    assert "unexpectedly" not in done.err


def test_the_images_that_are_protected_are_those_that_are_read() -> None:
    assert options.IMAGES == SUFFIXES


def test_one_file_is_not_written_twice() -> None:
    done = gconv("plan", "good.onnx", "-o", "p.json", "--refine-steps", "1", "--refine-data", "data.npz", "--refined", "p.json")
    assert (done.code, "p.json would be written twice" in done.err) == (2, True)


@pytest.mark.parametrize("source", ["sweep/point-01.onnx", "elsewhere.onnx"])
def test_an_exploration_does_not_replace_what_it_is_made_from(source: str) -> None:
    Path("sweep").mkdir()
    save_external(conv_net(), Path(source), data="w.data" if "/" in source else "sweep/point-00.onnx.data")
    before = listing(Path())
    done = gconv("explore", source, "-o", "sweep", "--points", "3")
    assert done.code == 1
    assert "is a file that this exploration is made from" in done.err
    assert listing(Path()) == before


def test_a_model_with_external_data_is_written_as_onnx_reads_it() -> None:
    save_external(conv_net(), Path("m.onnx"))
    for source, output in (("m.onnx", "o.onnx"), ("good.onnx", "p.onnx")):
        assert gconv("compress", source, "--groups", "2", "-o", output).code == 0
    apart, whole = (
        {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in onnx.load(name).graph.initializer}
        for name in ("o.onnx", "p.onnx")
    )
    np.testing.assert_equal(apart, whole)
    stored = onnx.load("o.onnx", load_external_data=False).graph.initializer
    assert {tensor.data_location for tensor in stored} == {onnx.TensorProto.EXTERNAL, onnx.TensorProto.DEFAULT}
