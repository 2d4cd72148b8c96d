"""A rank whose links get stuck: the last rank never sends on a large message of a ring.

Run by torchrun in the place of `runtime.worker`. The doctor's limit is shorter in it, so that a test need not wait.
"""

from __future__ import annotations

import time
from typing import Any

import torch.distributed as dist

from runtime import worker
from runtime.engine import doctor

LARGE = 1 << 20  # numbers

_exchange: Any = dist.batch_isend_irecv


def sticking(operations: Any) -> Any:
    if operations[0].tensor.numel() >= LARGE and dist.get_rank() == dist.get_world_size() - 1:
        time.sleep(3600)
    return _exchange(operations)


if __name__ == "__main__":
    doctor.LIMIT_SECONDS = 3.0
    dist.batch_isend_irecv = sticking
    worker.main()
