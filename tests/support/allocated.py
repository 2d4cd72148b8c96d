"""What a computation allocates, by the profile of torch's allocator: exact, and the same on every run."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch.profiler import ProfilerActivity, profile


def peak_bytes(compute: Callable[[], Any]) -> int:
    """The most bytes of host memory that `compute` holds at a time beyond what its caller holds already."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        compute()
    results: Any = found.profiler.kineto_results
    events = [one for one in results.events() if one.name() == "[memory]"]
    cpu = [one for one in events if one.device_type() == torch.autograd.DeviceType.CPU]
    return max(accumulate(one.nbytes() for one in sorted(cpu, key=lambda one: one.start_ns())), default=0)


@contextlib.contextmanager
def unfilled() -> Iterator[None]:
    """All-to-alls and upstream's gathers make their buffers and leave them as they are, on every rank.

    gloo gathers into a copy of its own, which NCCL does not, and a worker of it may be the last to let a buffer go:
    the profile does not see that, and the buffer would count on to the end.
    """

    def exchange(sent: torch.Tensor, received: Sequence[int] | None, *_: Any) -> torch.Tensor:
        return sent.new_empty(sum(received) if received else sent.shape[0], *sent.shape[1:])

    def gather(part: torch.Tensor, gather_dim: int, group: dist.ProcessGroup) -> torch.Tensor:
        lengths = list(part.shape)
        lengths[gather_dim] *= dist.get_world_size(group)
        return part.new_empty(lengths)

    with (
        mock.patch.object(dist, "all_to_all_single", lambda *_, **__: None),
        mock.patch.object(functional, "all_to_all_single", exchange),
        mock.patch.object(functional, "all_gather_tensor", gather),
    ):
        yield
