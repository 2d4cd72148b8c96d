"""How long a sharded load takes, and how much memory it needs: ours, upstream's shard-on-read, and load-then-shard.

A FLUX-shaped transformer of at least 3 GB in bf16, in several files that lie in the page cache. All paths run in the
same ranks, interleaved; seconds are the slowest rank's, memory is what a rank's own (anonymous) memory grows by.
"""

from __future__ import annotations

import statistics
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.support.models import large_flux
from tests.support.torchrun import torchrun

RUNS = 5
PATHS = ("ours", "upstream", "load_then_shard")


def rows() -> Iterator[dict[str, object]]:
    with tempfile.TemporaryDirectory(prefix="sharded-load-") as directory:
        folder = Path(directory) / "transformer"
        large_flux(double_blocks=6, single_blocks=11).save_pretrained(folder, max_shard_size="1GB")
        size = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
        assert size >= 3e9, f"the checkpoint has {size} bytes"
        for tensor in (2, 4):
            yield from _rows(folder, Path(directory), tensor, size)


def _rows(folder: Path, directory: Path, tensor: int, size: int) -> Iterator[dict[str, object]]:
    found: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for run in torchrun(directory, tensor, "tests.bench.load_rank", str(folder), str(RUNS), *PATHS):
        found[run.pop("path")].append(run)
    for path in PATHS:
        runs = found[path]
        yield {
            "path": path,
            "tensor": tensor,
            "seconds": round(statistics.median(run["seconds"] for run in runs), 2),
            "peak_own_gb": round(statistics.median(run["peak"] for run in runs) / 1e9, 3),
            "final_own_gb": round(statistics.median(run["final"] for run in runs) / 1e9, 3),
            "checkpoint_gb": round(size / 1e9, 2),
        }
