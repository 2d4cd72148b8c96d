"""What a call costs: nothing, 1 MiB, 36 MiB and 896 MiB there and back.

The rank reads every byte and answers with every byte inverted. `x_copy` is the time as a multiple of a plain copy of
the same bytes from one resident tensor to another, measured in the same run, interleaved.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator

import torch

from runtime.devices import cpu_devices
from runtime.group import GROUPS

SIZES = ((0, 200), (1 << 20, 100), (36 << 20, 30), (896 << 20, 8))


def rows() -> Iterator[dict[str, object]]:
    torch.set_num_threads(1)  # the copy it is compared with has one core, as the rank has
    group = GROUPS.group(cpu_devices(1))
    try:
        group.start()
        for nbytes, repeats in SIZES:
            yield _row(group, nbytes, repeats)
    finally:
        GROUPS.close_all()


def _row(group, nbytes: int, repeats: int) -> dict[str, object]:  # type: ignore[no-untyped-def]
    source = torch.randint(0, 256, (nbytes,), dtype=torch.uint8)
    target = torch.empty_like(source)
    calls, copies = [], []
    for number in range(repeats + 2):
        start = time.perf_counter()
        answer = group.ping({"payload": source} if nbytes else {})
        middle = time.perf_counter()
        target.copy_(source)
        end = time.perf_counter()
        if number >= 2:  # the first calls touch fresh pages
            calls.append(middle - start)
            copies.append(end - middle)
        if nbytes and number % 4 == 0:
            assert torch.equal(answer["payload"], ~source), "the rank did not change every byte"
        del answer
    call, copy = statistics.median(calls), statistics.median(copies)
    return {
        "bytes": nbytes,
        "p50_ms": round(call * 1e3, 3),
        "x_copy": round(call / copy, 2) if nbytes else None,
        "copy_ms": round(copy * 1e3, 3),
    }
