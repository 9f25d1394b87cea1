"""Tiny models, built without any framework, and the command line run on them.

Opset 17 and IR version 8 are set by hand: what onnx writes by default is newer than ONNX Runtime reads.
"""

import contextlib
import importlib
import io
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
from numpy.typing import ArrayLike

from onnx_gconv.cli.main import main

# Nodes have no names, as in many real models. c1 is skipped: 3 and C channels have no common divisor.
CONV_NET = """
<ir_version: 8, opset_import: ["" : 17]>
tiny (float[N,3,{size},{size}] image) => (float[N,4] scores) {{
    c1 = Conv <pads = [1, 1, 1, 1]> (image, w1, b1)
    r1 = Relu (c1)
    c2 = Conv <pads = [1, 1, 1, 1]> (r1, w2, b2)
    r2 = Relu (c2)
    c3 = Conv (r2, w3, b3)
    pooled = GlobalAveragePool (c3)
    flat = Flatten (pooled)
    scores = Gemm <transB = 1> (flat, w4, b4)
}}
"""


def conv_net(*, channels: int = 8, size: int | str = 8, seed: int = 0) -> onnx.ModelProto:
    """Return Conv 3->C 3x3, Conv C->C 3x3, Conv C->C 1x1, average pool, Gemm: [N,3,size,size] -> [N,4]."""
    model = onnx.parser.parse_model(CONV_NET.format(size=size))
    rng = np.random.default_rng(seed)
    c = channels
    for number, shape in enumerate([(c, 3, 3, 3), (c, c, 3, 3), (c, c, 1, 1), (4, c)], start=1):
        set_tensor(model, f"w{number}", rng.standard_normal(shape) / np.sqrt(np.prod(shape[1:])))
        set_tensor(model, f"b{number}", rng.standard_normal(shape[0]) / 4)
    return model


# A stem and a residual block on its output: everything that stream correction is about.
RESIDUAL_NET = """
residual (float[N,4,6,6] image) => (float[N,8,6,6] out) {
    stem = Conv <pads = [1, 1, 1, 1]> (image, w0, b0)
    stream = Relu (stem)
    first = Conv <pads = [1, 1, 1, 1]> (stream, w1, b1)
    inner = Relu (first)
    last = Conv <pads = [1, 1, 1, 1]> (inner, w2, b2)
    total = Add (last, stream)
    out = Relu (total)
}
"""


def residual_net(*, seed: int = 0) -> onnx.ModelProto:
    """Return Conv 4->8, then a block of two Convs 8->8 around an Add, all 3x3: [N,4,6,6] -> [N,8,6,6]."""
    rng = np.random.default_rng(seed)
    tensors = {}
    for number, shape in enumerate([(8, 4, 3, 3), (8, 8, 3, 3), (8, 8, 3, 3)]):
        tensors[f"w{number}"] = rng.standard_normal(shape) / np.sqrt(np.prod(shape[1:]))
        tensors[f"b{number}"] = rng.standard_normal(shape[0]) / 4
    return from_text(RESIDUAL_NET, **tensors)


def from_text(graph: str, **tensors: ArrayLike) -> onnx.ModelProto:
    """Return a graph written as ONNX text as a model with these initializers; float64 becomes float32."""
    model = onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["" : 17]> {graph}')
    for name, value in tensors.items():
        array = np.asarray(value)
        array = array.astype(np.float32) if array.dtype == np.float64 else array
        model.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    return model


def no_conv() -> onnx.ModelProto:
    """Return a model of one Relu."""
    return onnx.parser.parse_model('<ir_version: 8, opset_import: ["" : 17]> relu (float[2] x) => (float[2] y) { y = Relu (x) }')


def get_tensor(model: onnx.ModelProto, name: str) -> np.ndarray:
    """Return a copy of an initializer's value."""
    return onnx.numpy_helper.to_array(next(t for t in model.graph.initializer if t.name == name)).copy()


def set_tensor(model: onnx.ModelProto, name: str, value: ArrayLike) -> onnx.ModelProto:
    """Replace or add a float32 initializer, and return the same model."""
    kept = [tensor for tensor in model.graph.initializer if tensor.name != name]
    del model.graph.initializer[:]
    model.graph.initializer.extend([*kept, onnx.numpy_helper.from_array(np.asarray(value, np.float32), name)])
    return model


def with_custom_op(model: onnx.ModelProto, tensor: str) -> onnx.ModelProto:
    """Put `my.ops.Sharpen`, which nobody knows, behind the node that makes `tensor`, and return the same model."""
    index = next(i for i, node in enumerate(model.graph.node) if tensor in node.output)
    model.graph.node[index].output[0] = f"{tensor}_blunt"
    model.graph.node.insert(index + 1, onnx.helper.make_node("Sharpen", [f"{tensor}_blunt"], [tensor], domain="my.ops"))
    model.opset_import.append(onnx.helper.make_opsetid("my.ops", 1))
    return model


def save(model: onnx.ModelProto, path: Path) -> Path:
    """Write the model to one file and return its path."""
    path.write_bytes(model.SerializeToString(deterministic=True))
    return path


def save_external(model: onnx.ModelProto, path: Path, *, data: str = "weights.bin") -> Path:
    """Write the model with every weight in the file `data` beside it, and return its path."""
    copy = onnx.ModelProto.FromString(model.SerializeToString())
    onnx.save_model(copy, str(path), save_as_external_data=True, location=data, size_threshold=0)
    return path


def write_module(name: str, text: str) -> None:
    """Write a Python module into the current directory, to be imported afresh whatever an earlier test called so."""
    Path(f"{name}.py").write_text(f"import numpy as np\n{text}", encoding="utf-8")
    sys.modules.pop(name, None)
    importlib.invalidate_caches()


@dataclass(frozen=True)
class Finished:
    """What a command left behind besides files."""

    code: int
    out: str
    err: str


def gconv(*argv: str | Path) -> Finished:
    """Run one command in this process."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = main([str(argument) for argument in argv])
        except SystemExit as left:  # argparse leaves this way
            code = int(left.code or 0)
    return Finished(code, out.getvalue(), err.getvalue())


def listing(folder: Path) -> dict[str, bytes | None]:
    """Return every file under the folder with its bytes, folders with None."""
    return {str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None for path in sorted(folder.rglob("*"))}
