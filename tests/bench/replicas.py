"""What two copies of a model bring to CFG: a step with unequal conditionings, on one rank and with replica 2.

Through ComfyUI's own KSampler in one process, with real ranks of one thread each. Both layouts run interleaved; the
ratio of the medians of a step counts. `overlap` is the part of the shorter call during which both ranks worked.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec
import torch

RUNS, STEPS = 3, 2


def rows() -> Iterator[dict[str, object]]:
    from tests.bench.flux import write_flux
    from tests.parity_native.host import Host

    with tempfile.TemporaryDirectory(prefix="sharded-replicas-") as directory:
        folder = Path(directory) / "transformer"
        write_flux(folder, 4, 4)
        host = Host(Path(directory) / "base")
        try:
            # Ranks share the cores that there are; here the rank alone gets one thread as well.
            with mock.patch("os.cpu_count", return_value=1):
                yield _row(host, folder)
        finally:
            host.pack("runtime.group").GROUPS.close_all()


def _row(host: Any, folder: Path) -> dict[str, object]:
    layouts = {"one rank": 1, "replica 2": 2}
    from tests.parity_native.models import sharded_model

    models = {name: sharded_model(host, folder, "float32", {"replica": n}) for name, n in layouts.items()}
    # On a CPU slot of its own: both would take the first, and each would close the other's group.
    remote = models["one rank"].model.sharded
    device = host.pack("runtime.spec").Device(kind="cpu", index=7, name="CPU")
    layout = msgspec.structs.replace(remote.slot.layout, devices=(device,))
    remote.slot = host.pack("runtime.group").GROUPS.slot(layout, remote.slot.model)
    for patcher in models.values():
        _sample(patcher, steps=1)  # the groups start and load
    seconds: dict[str, list[float]] = {name: [] for name in layouts}
    overlaps = []
    for run in range(RUNS + 1):
        for name, patcher in models.items():
            began = time.monotonic()
            _sample(patcher, steps=STEPS)
            if run:
                seconds[name].append((time.monotonic() - began) / STEPS)
                if name == "replica 2":
                    overlaps.append(_overlap(patcher.model.sharded.spans))
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    return {
        "one_rank_s_per_step": round(medians["one rank"], 3),
        "replica_2_s_per_step": round(medians["replica 2"], 3),
        "speedup": round(medians["one rank"] / medians["replica 2"], 2),
        "overlap": round(statistics.median(overlaps), 2),
    }


def _sample(patcher: Any, steps: int) -> None:
    import nodes

    generator = torch.Generator("cpu").manual_seed(0)
    positive, negative = (
        [
            [
                torch.randn(1, length, 256, generator=generator),
                {"pooled_output": torch.zeros(1, 64), "guidance": 4.0},
            ]
        ]
        for length in (96, 112)
    )
    latent = {"samples": torch.zeros(1, 16, 24, 24)}
    with torch.inference_mode():
        nodes.KSampler().sample(patcher, 0, steps, 4.0, "euler", "simple", positive, negative, latent)


def _overlap(spans: dict[int, tuple[tuple[int, float, float], ...]]) -> float:
    (one, begin, end), (other, start, stop) = spans[0][0], spans[1][0]
    assert one != other, "both ranks took part in the same call"
    return max(0.0, min(end, stop) - max(begin, start)) / min(end - begin, stop - start)
