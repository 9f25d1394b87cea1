"""How the learning rate falls."""

import math
from typing import Literal

Schedule = Literal["multistep", "cosine"]


def factor(schedule: Schedule, progress: float) -> float:
    """Return what the learning rate is multiplied with when this share of the training is done.

    multistep: by ten after each third (the paper's ImageNet setting). cosine: smoothly to zero.
    """
    if schedule == "cosine":
        return 0.5 * (1 + math.cos(math.pi * progress))
    # A third of the steps is not a binary fraction: do not let 0.33333333 miss it.
    return 0.1 ** math.floor(3 * progress + 1e-9)
