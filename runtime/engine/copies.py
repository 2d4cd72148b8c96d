"""Ranks that hold the same weights: while a model is parked one of them keeps these in host RAM, for all of them."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ..spec import ParallelSpec

_AXES = ("replica", "ring", "ulysses")  # along which nothing of a weight is divided


class Copies:
    """This rank's place among the ranks with the same weights."""

    def __init__(self, parallel: ParallelSpec, mesh: DeviceMesh):
        self._axes = [mesh[axis] for axis in _AXES if getattr(parallel, axis) > 1]
        self._shapes: list[torch.Size] = []
        self.keeps = not any(axis.get_local_rank() for axis in self._axes)

    def let_go(self, model: torch.nn.Module) -> None:
        """Free the weights of a rank that does not keep them."""
        self._shapes = [parameter.shape for parameter in model.parameters()]
        for parameter in model.parameters():
            parameter.data = parameter.data.new_empty(0)

    def make_room(self, model: torch.nn.Module, device: torch.device) -> None:
        """Take the memory for them again, without their values."""
        for parameter, shape in zip(model.parameters(), self._shapes, strict=True):
            parameter.data = torch.empty(shape, dtype=parameter.dtype, device=device)

    def hand_out(self, model: torch.nn.Module, entered: Callable[[], None] = lambda: None) -> None:
        """Give all ranks the values of the one that kept them. A collective, axis by axis; each calls `entered`."""
        for place, axis in enumerate(self._axes):
            if any(later.get_local_rank() for later in self._axes[place + 1 :]):
                continue  # it has its turn with a later axis
            group = axis.get_group()
            source = dist.get_global_rank(group, 0)
            for parameter in model.parameters():
                entered()
                # As bytes: not every backend sends every dtype.
                dist.broadcast(parameter.data.contiguous().view(-1).view(torch.uint8), source, group=group)
