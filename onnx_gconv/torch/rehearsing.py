"""How long a step of each of several trainings takes, found by doing a few."""

from collections.abc import Sequence

from onnx_gconv.torch.training import Training

WARM_UP, STEPS = 1, 3


def rehearsed(trainings: Sequence[Training]) -> list[float]:
    """Return the seconds of a step of each, the shortest of a few; the modules are as they were afterwards, the trainings not.

    The trainings take turns, so that whatever else the machine does slows all of them down. Of several processes, the first one's
    times are everybody's.
    """
    states = [training.state() for training in trainings]
    times = [[training.rehearse() for training in trainings] for _ in range(WARM_UP + STEPS)][WARM_UP:]
    for training, state in zip(trainings, states, strict=True):
        training.module.load_state_dict(state)
    return trainings[0].team.agreed([min(own) for own in zip(*times, strict=True)])
