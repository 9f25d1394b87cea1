"""What every rank of a layer would cost: reduced-rank regression.

Patches u of a layer have the second moments H = LL'. Of all weights of rank r, those that give nearest to what W gives are W V V',
with V the first r right singular vectors of L'W. They leave the squares of the other singular values: eigenvalues of W'HW.
"""

import numpy as np

from onnx_gconv.recover.normal import Doubles


def left_by_rank(gram: Doubles, weight: Doubles) -> Doubles:
    """Return what the best weights of rank 0, 1, ... leave of what these (inputs, outputs) give."""
    squares = np.maximum(np.linalg.eigvalsh(weight.T @ gram @ weight), 0.0)  # ascending
    return np.concatenate([np.cumsum(squares)[::-1], [0.0]])
