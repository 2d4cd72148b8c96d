"""What a rank does for the doctor: times every kind of collective that the engine uses, checks what arrives, computes.

Rates are not made here: the host has the times of all ranks, and the slowest one counts.
"""

from __future__ import annotations

import contextlib
import faulthandler
import sys
import time
from collections.abc import Callable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch.nn.functional import scaled_dot_product_attention

from ..spec import EXCHANGES, Cancelled, Exchange, Measure, Measured, Progress
from .backend import Backend, all_gather

LIMIT_SECONDS = (
    20.0  # for one kind with one size; a rank that takes longer ends itself, with its stacks in its log
)
_REPEATS = ((1 << 16, 30), (4 << 20, 10))  # up to so many bytes so many times
_FEWEST = 3
_PERIOD = 251  # of the pattern that is sent: whole numbers, so that sums are exact, and no power of two

# What is received, the call, and what must have come.
Prepared = tuple[torch.Tensor, Callable[[], object], torch.Tensor]


def measured(
    request: Measure, backend: Backend, report: Callable[[Progress], None], cancelled: Callable[[], bool]
) -> Measured:
    """Everything the doctor asks of this rank. Raises Cancelled on all ranks together."""
    total = len(EXCHANGES) * len(request.sizes)

    def row_ended(rows: int) -> None:
        report(Progress(phase="measuring", done=rows, total=total))
        if backend.any_rank(cancelled()):
            raise Cancelled("Cancelled while measuring.")

    row_ended(0)
    exchanges = timed_collectives(backend, request.sizes, row_ended) if backend.world_size > 1 else ()
    return Measured(exchanges=exchanges, arithmetic=_arithmetic(backend), libraries=_libraries(backend))


def timed_collectives(
    backend: Backend, sizes: Sequence[int], row_ended: Callable[[int], None] = lambda rows: None
) -> tuple[Exchange, ...]:
    """Each kind of EXCHANGES with messages of `sizes` bytes on the group's own devices. A collective itself."""
    rows: list[Exchange] = []
    for kind in EXCHANGES:
        for nbytes in sizes:
            print(f"measuring {kind} of {nbytes} bytes", file=sys.stderr, flush=True)
            with _limited():
                rows.append(_timed(backend, kind, nbytes))
            row_ended(len(rows))
    return tuple(rows)


@contextlib.contextmanager
def _limited() -> Iterator[None]:
    """A broken link can keep a collective waiting for ever, in a call that no signal handler interrupts."""
    faulthandler.dump_traceback_later(LIMIT_SECONDS, exit=True)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


def _timed(backend: Backend, kind: str, nbytes: int) -> Exchange:
    pattern = pattern_of(backend, nbytes)
    received, call, expected = PREPARED[kind](backend.rank, backend.world_size, pattern)
    call()  # the first of its kind also makes the connections
    backend.wait(received)
    right = torch.equal(received, expected)
    received.zero_()  # sums of sums would grow
    repeats = next((number for most, number in _REPEATS if nbytes <= most), _FEWEST)
    call()
    backend.wait(received)
    backend.any_rank(False)  # begin together
    start = time.perf_counter()
    for _ in range(repeats):
        call()
    backend.wait(received)
    seconds = (time.perf_counter() - start) / repeats
    return Exchange(kind=kind, nbytes=pattern.nbytes, seconds=seconds, right=right)


def pattern_of(backend: Backend, nbytes: int) -> torch.Tensor:
    """About `nbytes` of whole numbers on the device, which all ranks can divide."""
    count = max(1, nbytes // 4 // backend.world_size) * backend.world_size
    return torch.arange(count, device=backend.device).remainder_(_PERIOD).float()


def _all_reduce(rank: int, ranks: int, pattern: torch.Tensor) -> Prepared:
    received = pattern + rank
    return received, lambda: dist.all_reduce(received), pattern * ranks + ranks * (ranks - 1) // 2


def _all_gather(rank: int, ranks: int, pattern: torch.Tensor) -> Prepared:
    part = pattern[: len(pattern) // ranks]
    sent, received = part + rank, torch.zeros_like(pattern)
    return received, lambda: all_gather(received, sent), torch.cat([part + other for other in range(ranks)])


def _all_to_all(rank: int, ranks: int, pattern: torch.Tensor) -> Prepared:
    sent, received = pattern + rank, torch.zeros_like(pattern)
    mine = pattern.chunk(ranks)[rank]
    expected = torch.cat([mine + other for other in range(ranks)])
    return received, lambda: dist.all_to_all_single(received, sent), expected


def _ring(rank: int, ranks: int, pattern: torch.Tensor) -> Prepared:
    """Every rank passes its message on to the next one, as a ring of keys and values does."""
    before, behind = (rank - 1) % ranks, (rank + 1) % ranks
    sent, received = pattern + rank, torch.zeros_like(pattern)

    def call() -> None:
        operations = [dist.P2POp(dist.isend, sent, behind), dist.P2POp(dist.irecv, received, before)]
        for work in dist.batch_isend_irecv(operations):
            work.wait()

    return received, call, pattern + before


PREPARED: dict[str, Callable[[int, int, torch.Tensor], Prepared]] = {
    "all_reduce": _all_reduce,
    "all_gather": _all_gather,
    "all_to_all": _all_to_all,
    "ring": _ring,
}


def _arithmetic(backend: Backend) -> float:
    """How far a product and an attention on this device are from double precision on the CPU, as max_rel."""
    generator = torch.Generator().manual_seed(0)
    matrices = torch.randn(2, 512, 512, generator=generator)
    heads = torch.randn(3, 1, 4, 256, 64, generator=generator)
    pairs = (
        (torch.matmul(*matrices.to(backend.device)), torch.matmul(*matrices.double())),
        (
            scaled_dot_product_attention(*heads.to(backend.device)),
            scaled_dot_product_attention(*heads.double()),
        ),
    )
    apart = ((one.cpu().double() - exact).abs().max() / exact.abs().max() for one, exact in pairs)
    return max(value.nan_to_num(nan=torch.inf).item() for value in apart)


def _libraries(backend: Backend) -> dict[str, str]:
    """Versions that only a process which uses the device can tell."""
    if not backend.is_cuda:
        return {}
    found = {"CUDA": torch.version.cuda or "", "cuDNN": str(torch.backends.cudnn.version() or "")}
    with contextlib.suppress(RuntimeError, AttributeError):
        found["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))
    return {name: version for name, version in found.items() if version}
