"""Do the ranks reach each other? Every kind of collective once with a small and a large message, when a group starts.

A link that loses bytes, or on which a collective never ends, would show later as a wrong picture or a hang.
"""

from __future__ import annotations

import faulthandler
import sys
import threading
from collections.abc import Callable

import torch

from ..spec import EXCHANGES
from .backend import Backend
from .doctor import PREPARED, pattern_of

LIMIT_SECONDS = 20.0  # for all of it, with the connections that the first collective makes
SIZES = (4 << 10, 1 << 20)  # bytes: NCCL uses other protocols for small messages than for large ones


class BrokenCollectives(RuntimeError):
    """Collectives between these ranks fail, or bring wrong numbers."""


def check(backend: Backend, late: Callable[[str], None]) -> None:
    """Run all kinds on the group's own devices. A collective itself. Raises BrokenCollectives.

    A collective that hangs cannot be interrupted: then `late` is called after LIMIT_SECONDS, from another thread,
    with what this rank waited for; the stacks of all threads go to standard error, which is the rank's log.
    """
    if backend.world_size == 1:
        return
    doing = ["connecting"]

    def on_late() -> None:
        faulthandler.dump_traceback(sys.stderr, all_threads=True)
        late(f"{doing[0]} did not end within {LIMIT_SECONDS:.0f} s")

    timer = threading.Timer(LIMIT_SECONDS, on_late)
    timer.daemon = True
    timer.start()
    try:
        for kind in EXCHANGES:
            for nbytes in SIZES:
                doing[0] = f"{kind} of {nbytes} bytes"
                _run(backend, kind, nbytes)
    except BrokenCollectives:
        raise
    except Exception as error:  # NCCL has many of its own
        if "out of memory" in str(error).lower():
            raise  # no other setting would mend that
        raise BrokenCollectives(f"{doing[0]} failed: {type(error).__name__}: {error}") from error
    finally:
        timer.cancel()


def _run(backend: Backend, kind: str, nbytes: int) -> None:
    received, call, expected = PREPARED[kind](backend.rank, backend.world_size, pattern_of(backend, nbytes))
    call()
    backend.wait(received)
    # Asked of all, in host memory: the ranks to which all came right must not go on alone.
    if backend.any_rank(not torch.equal(received, expected)):
        raise BrokenCollectives(f"{kind} of {nbytes} bytes brought wrong numbers")
