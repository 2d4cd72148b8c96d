"""A step under each layout of diffusers' guide to distributed inference, and those that only we have.

On CPU ranks of one thread, ours and upstream's in turns on the same ranks, in fp32: attention alone, and one forward of
a small FLUX.1. `ms_per_step` is the median, `x_upstream` that as a multiple of upstream's. `cpu_ms` is what a rank
computes in a step, which says more than the time where ranks, or other programs, share the cores. `peak_mb` is the
most that a step allocates at a time, weights and inputs apart. Odd lengths are upstream's modes "anything"; both axes
over odd lengths and the tensor axis beside the others are ours only.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

from tests.bench.flux import write_flux
from tests.support.torchrun import torchrun

STEPS = 9


def rows(steps: int = STEPS) -> Iterator[dict[str, object]]:
    with tempfile.TemporaryDirectory(prefix="sharded-layouts-") as directory:
        folder = Path(directory) / "transformer"
        write_flux(folder, 1, 2)
        for ranks in (2, 4):
            module = "tests.bench.layouts_rank"
            for row in torchrun(Path(directory), ranks, module, str(folder), str(steps)):
                yield {name: row.pop(name) for name in ("path", "layout", "shape")} | row
