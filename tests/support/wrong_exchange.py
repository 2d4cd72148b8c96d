"""A rank whose links lose data: on the last rank, one number of every large all-to-all is another than was sent.

Run by torchrun in the place of `runtime.worker`. Small messages arrive as they are, so that the group starts.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from runtime import worker

LARGE = 1 << 20  # numbers

_all_to_all: Any = dist.all_to_all_single


def losing(received: Any, sent: Any, *others: Any, **named: Any) -> Any:
    work = _all_to_all(received, sent, *others, **named)
    if received.numel() >= LARGE and dist.get_rank() == dist.get_world_size() - 1:
        received[-1] += 1
    return work


if __name__ == "__main__":
    dist.all_to_all_single = losing
    worker.main()
