"""docs/paper.md and its pictures, made of the lines of benchmarks/paper.jsonl and of what the paper says; nothing is run."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

Finished = Mapping[str, Mapping[str, Any]]

MODEL = "cifar10_resnet20_bn"  # of Figure 6 and Table 3
EPOCHS = 1
RATE = 0.05
TRAINING_IMAGES = 5_000
GROUPS = (2, 4, 8, 16)  # of Figure 5, right
# Of Tables 1 and 2 and the supplement's Table 4: parameters in millions, FLOPs in billions, by G.
UNIFORM: dict[str, dict[int, tuple[float, float]]] = {
    "resnet164": {1: (1.73, 0.504), 2: (0.91, 0.257)},
    "densenet86": {1: (2.03, 0.5061), 4: (0.59, 0.1327)},
    "resnet18": {1: (11.69, 3.64), 8: (1.91, 0.20)},
    "resnet34": {1: (21.80, 7.34)},
    "resnet50": {1: (25.56, 8.21), 2: (13.82, 3.77)},
    "resnet101": {1: (44.55, 15.7), 2: (23.34, 7.50)},
}
STEM_WEIGHTS = 7 * 7 * 3 * 64  # the first Conv of an ImageNet ResNet
SOLVERS = ("N_S=0", "N_S=1", "N_S=2", "N_S=5", "N_S=10", "ours, effort 0", "ours, effort 1")
EXACT = 1 - 1e-9


def page(finished: Finished, expected: Sequence[str]) -> str:
    """Return the page: one section for each part of the evaluation, and which steps have not been run."""
    parts = [HEAD, *counts(finished), *matrices(finished), *weights(finished)]
    parts += [*configurations(finished), *heuristic(finished), *left_out(finished, expected)]
    return "\n".join(parts).rstrip() + "\n"


def table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> Iterator[str]:
    yield f"| {' | '.join(header)} |"
    yield "|---" * len(header) + "|"
    for row in rows:
        yield f"| {' | '.join(map(str, row))} |"
    yield ""


def steps(finished: Finished, section: str) -> dict[str, Mapping[str, Any]]:
    """Return the finished steps of a section, by the rest of their names."""
    return {name.removeprefix(f"{section} "): found for name, found in finished.items() if name.startswith(f"{section} ")}


HEAD = """\
# The paper's evaluation, run again

What Zhao and Luk (2019), "the paper", measured, beside what comes out here, as far as it can be run without their training
budget (60 to 100 epochs on CIFAR, 30 on ImageNet, for each model) and without ImageNet. Made by

    OPENBLAS_NUM_THREADS=1 OMP_NUM_THREADS=1 python benchmarks/paper.py

from [benchmarks/paper.jsonl](../benchmarks/paper.jsonl): the script appends each finished step, does not run it again, and
`paper.py page` writes this page. All figures under "paper" are quoted from its text and supplement; its plots were not
measured with a ruler. One machine, one thread, seed 0 wherever there is a seed.
"""


def counts(finished: Finished) -> Iterator[str]:
    found = steps(finished, "counts")
    yield COUNTS
    rows = []
    for name, said in UNIFORM.items():
        for groups, (params, flops) in said.items():
            ours = found.get(f"{name} G={groups}")
            if ours:
                our_params, our_flops = ours["params"] / 1e6, ours["flops"] / 1e9
                sizes = f"{params:.2f} M", f"{our_params:.3f} M", f"{our_params / params - 1:+.1%}"
                rows.append((name, groups, *sizes, f"{flops:.4g} G", f"{our_flops:.4g} G", f"{our_flops / flops - 1:+.1%}"))
    yield from table(("model", "G", "params, paper", "ours", "", "FLOPs, paper", "ours", ""), rows)
    yield COUNTS_DIFFER
    rows = []
    for name in ("resnet18 G=8", "resnet50 G=2", "resnet101 G=2"):
        if name in found:
            params, stem = found[name]["params"], found[name]["stem_flops"]
            less = f"{(params - 2 * STEM_WEIGHTS) / 1e6:.2f} M", f"{(found[name]['flops'] - 2 * stem) / 1e9:.2f} G"
            said_params, said_flops = UNIFORM[name.split()[0]][int(name.split("=")[1])]
            rows.append((name, f"{said_params:.2f} M", less[0], f"{said_flops:.2f} G", less[1]))
    yield from table(("model", "params, paper", "ours − 2 stems", "FLOPs, paper", "ours − 2 stems"), rows)
    yield BUDGETS
    rows = []
    for name, said in (
        ("resnet164 1.46M 333M", ("1.46 M", "462 M", "1.46 M, 333 M")),
        ("resnet164 1.21M 247M", ("1.21 M", "430 M", "1.21 M, 247 M")),
        ("densenet86 50% 50%", ("1.00 M", "256.5 M", "50 %, 50 %")),
    ):
        if name in found:
            ours = found[name]
            rows.append((name.split()[0], *said, f"{ours['params'] / 1e6:.2f} M", f"{ours['flops'] / 1e6:.1f} M"))
    yield from table(("model", "params, paper", "FLOPs, paper", "limits here", "params, ours", "FLOPs, ours"), rows)


COUNTS = """\
## Parameters and FLOPs (its Tables 1 and 2)

**Paper.** Table 1 (CIFAR-100) and Table 2 (ImageNet) list parameters and FLOPs, one multiply-add counted as two; ResNet-164 with
G=2 is in the supplement's Table 4.

**Here.** `paper.py counts`: the architectures of [models/](../models/README.md), counted as every model is counted: weights,
biases and BatchNormalization of all layers, 2 × MACs of Conv and Gemm. Every Conv but the first is grouped, projections
included; the classifier stays.
"""

COUNTS_DIFFER = """\
**Where we differ.** Dense parameters agree to the last digit given. Dense FLOPs are up to 2 % lower here: something besides
Conv and Gemm, perhaps normalisation and pooling, is counted there. ResNet-164 with G=2 has 0.021 M parameters less here; that is
half of its three projections on the shortcuts (41,984 weights), so the paper seems to have left those dense.

The grouped ImageNet rows cannot be right as printed: the first Conv of ResNet-18 alone takes 0.236 GFLOPs, more than the
0.20 G given for the whole network with G=8. All three come out, in both columns, when the first Conv (9,408 weights) is
subtracted *twice* from our count (FLOPs to what the dense rows differ by). Presumably a slip in the counting.
"""

BUDGETS = """\
The paper's explored rows (ResNet-164 "40 %" and "60 % pruned", DenseNet-86 "for 50 % budget") come from trained weights that we do
not have, and the configurations of ResNet-34/A and /B are not in it; these rows cannot be repeated. What can: its ResNet-164 rows
hold the parameters of network slimming (1.46 M with 333 MFLOPs, 1.21 M with 247 M) but not its FLOPs, which the paper names
as its drawback, and its DenseNet-86 is over half of the FLOPs. Here both limits hold at once (`--max-params`, `--max-flops`). The
weights are random, so this shows that such configurations exist and are found, and nothing about accuracy:
"""


def matrices(finished: Finished) -> Iterator[str]:
    ratios = matrix_ratios(finished)
    yield MATRICES
    if not ratios:
        yield "Not run yet.\n"
        return
    rows = []
    for name, column in ratios.items():
        rows.append((name, f"{np.mean(column > EXACT):.1%}", f"{column.mean():.4f}", f"{column.min():.4f}"))
    yield from table((f"{len(ratios['N_S=0']):,} matrices", "recovered exactly", "mean ratio", "worst ratio"), rows)
    yield "![Share of random matrices recovered exactly, by solver](images/paper-matrices.svg)\n"
    exact = {name: f"{np.mean(column > EXACT):.1%}" for name, column in ratios.items()}
    yield MATRICES_DIFFER.format(sort=exact["N_S=10"], best=exact["ours, effort 1"])


def matrix_ratios(finished: Finished) -> dict[str, np.ndarray]:
    """Return the recovery ratio of each matrix, by solver; empty if none was run."""
    blocks = list(steps(finished, "matrices").values())
    return {name: np.concatenate([block["ratios"][name] for block in blocks]) for name in SOLVERS} if blocks else {}


MATRICES = """\
## Recovery ratio of random matrices (its Figure 5, left)

**Paper.** A block-diagonal matrix is permuted at random and sorted back; the recovery ratio is the share of the importance that
ends up in the diagonal blocks. "[T]he recovery ratio becomes higher for more samples when N_S increases, and when N_S=10, most
samples can achieve 100% recovery ratio"; 10,000 cases (supplement). Sizes and distribution are not given.

**Here.** `paper.py matrices`: 128×128, G=16, entries of the blocks uniform in (0, 1), seeds 0, 1, 2 …; N_S=0 leaves the channels in
place; "ours" is `--solver best`.
"""

MATRICES_DIFFER = """\
**Where we differ.** The paper's claim holds as far as its sort goes: N_S=10 recovers {sort}. What is left is no property of the
matrices: `--solver best` recovers {best} at its default effort. (Of [10,000 matrices](../benchmarks/solver.md), run
earlier, the sort recovered 73.0 % and the default all.)
"""


def weights(finished: Finished) -> Iterator[str]:
    found = steps(finished, "weights")
    yield WEIGHTS
    for name in weight_models(finished):
        solvers = [solver for solver in (*SOLVERS, "bound") if f"{name} {solver}" in found]
        rows: list[tuple[object, ...]] = []
        for solver in solvers:
            kept = found[f"{name} {solver}"]["kept"]
            label = "no grouping keeps more than" if solver == "bound" else solver
            rows.append((label, *(f"{100 * kept[str(g)]:.2f}" for g in GROUPS)))
        layers = found[f"{name} {solvers[0]}"]["layers"]
        yield from table((f"{name}, kept in %", *(f"G={g} ({layers[str(g)]} layers)" for g in GROUPS)), rows)
    if found:
        yield "![Importance kept beyond no sorting, by G](images/paper-weights.svg)\n"
        yield WEIGHTS_DIFFER.format(paper=gains(finished, "N_S=10"), ours=gains(finished, "ours, effort 1"))


def gains(finished: Finished, solver: str) -> str:
    """Return from where to where a solver is above no sorting, in points, over the CIFAR ResNets and all G."""
    found = steps(finished, "weights")
    names = [name for name in weight_models(finished) if name.startswith("cifar10") and f"{name} {solver}" in found]
    kept = [(found[f"{name} {solver}"]["kept"], found[f"{name} N_S=0"]["kept"]) for name in names]
    points = [100 * (one[str(g)] - base[str(g)]) for one, base in kept for g in GROUPS]
    return f"{min(points):.1f} to {max(points):.1f} points" if points else "(not run)"


def weight_models(finished: Finished) -> list[str]:
    """Return the models of Figure 5, right, for which no sorting and something else were run."""
    names = dict.fromkeys(name.split()[0] for name in steps(finished, "weights"))
    return [name for name in names if f"weights {name} N_S=0" in finished]


WEIGHTS = """\
## Recovery ratio of trained weights (its Figure 5, right)

**Paper.** torchvision's trained ResNet-50: "compared with the baseline that does no sorting (N_S=0), our method can recover about
3% more for different numbers of groups".

**Here.** `paper.py weights`: the trained models at hand, CIFAR-10 ResNets and an ImageNet MobileNet-v2 (ResNet-50's weights were
not). Share of the summed L2 norms that stays in the blocks, over all layers that can have G groups; the last row is an upper
bound for any permutation ([how](algorithm.md)).
"""

WEIGHTS_DIFFER = """\
**Where we differ.** Without sorting a share of very nearly 1/G stays: the channels of a trained layer stand in no order. On the
ResNets the paper's sort with N_S=10 is {paper} above that (its "about 3%", if points are meant); N_S=5 keeps the same to
0.01 points. Our solver is {ours} above. The bound says how little any permutation could do: most of the
importance goes, whatever the order, and has to be recovered or trained back.
"""


def configurations(finished: Finished) -> Iterator[str]:
    found = steps(finished, "configurations")
    yield CONFIGURATIONS
    if not found:
        yield "Not run yet.\n"
        return
    first = next(iter(found.values()))
    rows: list[tuple[object, ...]] = [("dense", f"{first['dense_params']:,}", "100 %", "", "", "", f"{100 * first['dense']:.2f}")]
    for name, one in sorted(found.items(), key=lambda item: -item[1]["params"]):
        share = one["params"] / one["dense_params"]
        numbers = " ".join(f"{g}:{one['groups'].count(g)}" for g in sorted(set(one["groups"])))
        cells = f"{one['params']:,}", f"{share:.1%}", f"{one['flops'] / 1e6:.1f} M", numbers, f"{one['cost']:.2f}"
        rows.append((name, *cells, f"{100 * one['top1']:.2f}"))
    yield from table(("configuration", "params", "left", "FLOPs", "G:layers", "Σ (1 − kept)", "top-1"), rows)
    yield "![Accuracy against parameters](images/paper-configurations.svg)\n"
    yield CONFIGURATIONS_DIFFER
    for groups, budget in ((2, "136090"), (4, "69274"), (8, "35866")):
        if (by_hand := found.get(f"uniform G={groups}")) and (explored := found.get(f"explored {budget}")):
            gain = 100 * (explored["top1"] - by_hand["top1"])
            sentence = f"- At the parameters of uniform G={groups}: explored {gain:+.2f} points against uniform"
            if searched := found.get(f"paper's search {budget}"):
                sentence += f"; the paper's search {100 * (searched['top1'] - by_hand['top1']):+.2f}"
            yield f"{sentence}."
    yield ""


CONFIGURATIONS = f"""\
## Explored configurations (its Figure 6)

**Paper.** ResNet-164 on CIFAR-100: the bound on the parameters is lowered in steps of 0.1 M, each configuration that the search
finds is fine-tuned, and compared with uniform G and with G_M (as many groups as bring every layer to at most G_M channels a
group): "explored models can perform on par with manually selected configurations". The plot's numbers are not in the text.

**Here.** `paper.py configurations`: {MODEL}, no training: closed-form recovery on 1,000 unlabelled training images instead
([how](recovery.md)), judged on all 10,000 test images. "explored" is `compress --max-params B --calib …`; "paper's
search" is the same with `--solver paper --search local --cost share`; uniform and G_M are `--groups` and
`--max-group-channels`, with our solver. Three of the budgets are exactly what uniform G = 2, 4 and 8 leave.
"""

CONFIGURATIONS_DIFFER = """\
**Where we differ.** A smaller network on an easier task, and least squares in place of training: the paper's accuracies cannot be
compared with these, only the order of the configurations. Every point is one run, and 0.3 points are one standard error of 10,000
images at 90 %. With `--effort 0`, which measures no costs, explored plans were behind uniform ones of the same size (79.97 and
61.84 at the parameters of G = 2 and 4): what is kept of a layer says little about what it costs.
"""


def heuristic(finished: Finished) -> Iterator[str]:
    found = steps(finished, "heuristic")
    yield HEURISTIC
    if not found:
        yield "Not run yet.\n"
        return
    rows = []
    for groups in (2, 8):
        for solver, label in (("plain", "plain (N_S=0)"), ("paper", "the paper's sort (N_S=10)"), ("best", "ours")):
            runs = [one for name, one in found.items() if name.startswith(f"G={groups} {solver} ")]
            if runs:
                errors = [100 * (1 - run["top1"]) for run in runs]
                kept = f"{100 * runs[0]['kept']:.2f}"
                rows.append((groups, label, kept, f"{np.mean(errors):.2f}", len(errors)))
    yield from table(("G", "channels", "mean kept in %", "test error in %", "trainings"), rows)
    yield HEURISTIC_DIFFER


HEURISTIC = f"""\
## Heuristic against plain (its Table 3)

**Paper.** Test error in % after the same fine-tuning (60 epochs on CIFAR, 30 on ImageNet):

| model | heuristic, C10 | C100 | plain, C10 | C100 |
|---|---|---|---|---|
| ResNet-110, G=2 | 6.69 | 27.63 | 7.13 | 28.08 |
| ResNet-110, G=8 | 9.39 | 33.28 | 11.17 | 37.29 |
| ResNet-50, G=2 (ImageNet) | 25.90 | | 28.04 | |

**Here.** `paper.py heuristic`: {MODEL}, uniform G, masked, then {EPOCHS} epoch over the first {TRAINING_IMAGES:,} training images
(`finetune --epochs {EPOCHS} --batch-size 64 --augment crop,flip --lr {RATE} --val-split 0`), all 10,000 test images.
"""

HEURISTIC_DIFFER = """\
**Where we differ.** One short epoch is no 60: the errors cannot be compared with the paper's, only the order of the rows can. With
one training a row, differences below a point say nothing.
"""


def left_out(finished: Finished, expected: Sequence[str]) -> Iterator[str]:
    yield "## What is missing\n"
    yield MISSING
    sections = Counter(name.split()[0] for name in expected)
    missing = Counter(name.split()[0] for name in expected if name not in finished)
    if missing:
        listed = "; ".join(f"{section}, {number} of {sections[section]}" for section, number in missing.items())
        yield f"Steps of the script that have not been run yet: {listed}. `python benchmarks/paper.py` goes on with them.\n"
    seconds = sum(one["cpu_seconds"] for one in finished.values())
    yield f"The {len(finished)} steps above took {seconds / 60:.1f} CPU minutes together."


MISSING = """\
Test errors of Tables 1 and 2 (they need the paper's training), CIFAR-100, CUB-200, ImageNet, ResNet-110, and the speed tables.
Table 4, training from scratch, is [elsewhere](finetuning.md#from-scratch), as is [speed](channel-orders.md).
"""


def figures(finished: Finished, folder: Path) -> None:
    """Draw the pictures that the page shows."""
    import matplotlib

    matplotlib.use("svg")
    # No date and no random ids: the same results give the same files.
    matplotlib.rcParams.update({"svg.hashsalt": "paper", "svg.fonttype": "none", "font.size": 9, "figure.facecolor": "white"})
    folder.mkdir(parents=True, exist_ok=True)
    for name, draw in (("matrices", draw_matrices), ("weights", draw_weights), ("configurations", draw_configurations)):
        figure = draw(finished)
        if figure is not None:
            figure.savefig(folder / f"paper-{name}.svg", metadata={"Date": None}, bbox_inches="tight")


BLUE, ORANGE, GREY, GREEN = "#1f6fb4", "#d9730d", "#8a8a8a", "#2b8a3e"


def draw_matrices(finished: Finished) -> Any:
    from matplotlib.figure import Figure

    ratios = matrix_ratios(finished)
    if not ratios:
        return None
    figure = Figure(figsize=(6, 2.8))
    axes = figure.subplots()
    exact = [100 * float(np.mean(column > EXACT)) for column in ratios.values()]
    bars = axes.bar(
        [name.replace(", ", "\n") for name in ratios], exact, color=[BLUE if name.startswith("ours") else ORANGE for name in ratios]
    )
    axes.bar_label(bars, fmt="%.1f")
    axes.set(ylabel="recovered exactly, %", ylim=(0, 112))
    plain(axes)
    return figure


def draw_weights(finished: Finished) -> Any:
    from matplotlib.figure import Figure

    names, found = weight_models(finished), steps(finished, "weights")
    if not names:
        return None
    figure = Figure(figsize=(3.2 * len(names), 2.8))
    for axes, name in zip(figure.subplots(1, len(names), squeeze=False, sharey=True)[0], names, strict=True):
        base = found[f"{name} N_S=0"]["kept"]
        for solver, colour, mark in (
            ("bound", GREY, ":"),
            ("ours, effort 1", BLUE, "o-"),
            ("N_S=10", ORANGE, "s-"),
            ("N_S=1", ORANGE, "--"),
        ):
            if f"{name} {solver}" in found:
                kept = found[f"{name} {solver}"]["kept"]
                gain = [100 * (kept[str(g)] - base[str(g)]) for g in GROUPS]
                axes.plot(range(len(GROUPS)), gain, mark, color=colour, label="upper bound" if solver == "bound" else solver)
        axes.set_title(name, fontsize=9)
        axes.set_xticks(range(len(GROUPS)), [f"G={g}" for g in GROUPS])
        axes.set_ylim(bottom=0)
        plain(axes)
        if name == names[0]:
            axes.set_ylabel("points kept beyond N_S=0")
            figure.legend(*axes.get_legend_handles_labels(), frameon=False, ncols=4, loc="upper center", bbox_to_anchor=(0.5, 0.02))
    figure.tight_layout()
    return figure


def draw_configurations(finished: Finished) -> Any:
    from matplotlib.figure import Figure

    found = steps(finished, "configurations")
    if not found:
        return None
    figure = Figure(figsize=(6, 3.6))
    axes = figure.subplots()
    kinds = (("explored", BLUE, "o-"), ("paper's search", ORANGE, "s-"), ("uniform", GREEN, "^"), ("G_M", GREY, "D"))
    for kind, colour, mark in kinds:
        points = sorted((one["params"] / 1e3, 100 * one["top1"], name) for name, one in found.items() if name.startswith(kind))
        if points:
            axes.plot([x for x, _, _ in points], [y for _, y, _ in points], mark, color=colour, label=kind)
        if mark in "^D":
            for x, y, name in points:
                axes.annotate(
                    name.removeprefix("uniform "), (x, y), xytext=(5, -9), textcoords="offset points", fontsize=8, color=colour
                )
    dense = next(iter(found.values()))
    axes.axhline(100 * dense["dense"], color="black", linewidth=0.8, linestyle=":", label="dense")
    axes.set(xlabel="parameters, thousands", ylabel="top-1 after recovery, %", ylim=(0, 100))
    axes.legend(frameon=False, fontsize=8, loc="lower right")
    plain(axes)
    return figure


def plain(axes: Any) -> None:
    """Leave out the frame, and draw a light grid."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#e4e4e4", linewidth=0.7)
    axes.set_axisbelow(True)
