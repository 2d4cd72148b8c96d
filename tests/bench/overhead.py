"""What ComfyUI and the group add to a step: the same pipeline through both, against a bare torchrun script.

The model is random and large enough that a step takes at least half a second. Both sides run the same layout with
one thread per rank; their runs are interleaved and compared by medians. ComfyUI's side is timed by the progress
events that its websocket client receives, the bare side by the pipeline's own step callback.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tests.support.models import FluxSize, make_flux
from tests.support.workflows import pipeline_prompt
from tools.base_directory import BaseDirectory
from tools.client import ComfyClient
from tools.comfy import Server

RANKS = 2
ROUNDS = 3
STEPS = 6
SIDE = 512
SIZE = FluxSize(heads=8, head_width=64, axes=(16, 24, 24), double_blocks=4, single_blocks=8)
REPOSITORY = Path(__file__).resolve().parents[2]


def rows() -> Iterator[dict[str, object]]:
    with tempfile.TemporaryDirectory(prefix="sharded-bench-") as directory:
        folder = make_flux(Path(directory) / "bench-flux", size=SIZE)
        base = BaseDirectory.create(Path(directory) / "comfy", pipelines={folder.name: folder})
        ours: list[float] = []
        bare: list[float] = []
        with Server(base) as server, ComfyClient(server.url) as client:
            _through_comfy(client, seed=0)  # starts the group and loads
            for number in range(ROUNDS):
                ours += _through_comfy(client, seed=number + 1)
                bare += _bare(folder)
        yield {
            "layout": f"tensor={RANKS}",
            "step_ms": round(statistics.median(ours) * 1e3, 1),
            "bare_step_ms": round(statistics.median(bare) * 1e3, 1),
            "ratio": round(statistics.median(ours) / statistics.median(bare), 4),
            "steps": len(ours),
        }


def _through_comfy(client: ComfyClient, seed: int) -> list[float]:
    """Seconds between the progress events of one sampling run, the first step left out."""
    prompt = pipeline_prompt("bench-flux", tensor=RANKS, seed=seed, steps=STEPS, width=SIDE, height=SIDE)
    run = client.run(prompt, timeout=600)
    steps = [
        event.at for event in run.of("progress") if event.data["node"] == "sample" and event.data["value"] > 0
    ]
    return [after - before for before, after in zip(steps, steps[1:], strict=False)]


def _bare(folder: Path) -> list[float]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}"]
    command += ["-m", "tests.bench.bare", str(folder), str(STEPS), str(SIDE)]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=True, timeout=600)
    line = next(line for line in done.stdout.splitlines() if line.startswith("["))
    return json.loads(line)
