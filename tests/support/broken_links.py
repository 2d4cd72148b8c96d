"""A rank on a machine whose cards do not reach each other directly: collectives break until NCCL_P2P_DISABLE is set.

Run by torchrun in the place of `runtime.worker`. BROKEN_LINKS says how: "hang", "wrong" or "fail". The self-test's
limit is shorter in it, so that a test need not wait.
"""

from __future__ import annotations

import os
import time
from typing import Any

import torch.distributed as dist

from runtime import worker
from runtime.engine import selftest

_all_to_all: Any = dist.all_to_all_single


def broken(received: Any, sent: Any, *others: Any, **named: Any) -> Any:
    work = _all_to_all(received, sent, *others, **named)
    if dist.get_rank() == 1:
        how = os.environ["BROKEN_LINKS"]
        if how == "hang":
            time.sleep(3600)
        elif how == "fail":
            raise RuntimeError("NCCL error: unhandled system error")
        received[-1] += 1
    return work


if __name__ == "__main__":
    selftest.LIMIT_SECONDS = 3.0
    if os.environ.get("NCCL_P2P_DISABLE") != "1":
        dist.all_to_all_single = broken
    worker.main()
