"""The processes that train together: one, or those that torchrun has started."""

import os
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from onnx_gconv.errors import TrainingError


@dataclass(frozen=True)
class Team:
    """This process among all: its number, how many there are, and the device it works on."""

    rank: int
    world: int
    local_rank: int
    device: torch.device

    @property
    def is_first(self) -> bool:
        """Whether this process writes and talks."""
        return self.rank == 0

    @property
    def is_first_here(self) -> bool:
        """Whether this is the first process on its machine."""
        return self.local_rank == 0

    def share(self, numbers: Tensor) -> Tensor:
        """Return this process's part: all parts together are `numbers`."""
        return numbers[self.rank :: self.world]

    def total(self, values: Tensor) -> Tensor:
        """Return the sum over all processes."""
        if self.world > 1:
            dist.all_reduce(values)
        return values

    def agreed(self, values: Sequence[float]) -> list[float]:
        """Return the values of the first process: what they decide, all decide alike."""
        shared: list[float] = list(values)
        if self.world > 1:
            dist.broadcast_object_list(shared)
        return shared

    def wait(self) -> None:
        """Return when all processes have come here."""
        if self.world > 1:
            dist.barrier()

    def from_first_here(self, folder: Path | None) -> Path:
        """Return the folder that the first process on this machine names."""
        if self.world == 1:
            assert folder is not None
            return folder
        named: list[tuple[str, Path | None] | None] = [None] * self.world
        dist.all_gather_object(named, (socket.gethostname(), folder))
        return next(path for host, path in filter(None, named) if host == socket.gethostname() and path is not None)


@contextmanager
def assembled(device: str) -> Iterator[Team]:
    """Yield the team: of one, unless torchrun has set the environment. `device` may be auto, cpu, cuda or cuda:N."""
    rank, world, local = (
        int(os.environ.get(name, default)) for name, default in (("RANK", 0), ("WORLD_SIZE", 1), ("LOCAL_RANK", 0))
    )
    chosen = _device(device, local)
    if world == 1:
        yield Team(0, 1, 0, chosen)
        return
    if chosen.type == "cuda":
        torch.cuda.set_device(chosen)
    dist.init_process_group("nccl" if chosen.type == "cuda" else "gloo")
    try:
        yield Team(rank, world, local, chosen)
    finally:
        dist.destroy_process_group()


def _device(name: str, local_rank: int) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise TrainingError(f"--device {name!r} is not a device.", hint="write auto, cpu, cuda or cuda:1") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise TrainingError("--device cuda: PyTorch finds no CUDA device here.", hint="--device cpu, or a CUDA build of PyTorch")
    return torch.device("cuda", local_rank) if name == "cuda" else device
