"""One rank of the matrix: loads every model folder divided, runs one forward, compares. Run by torchrun.

Arguments: the file of the jobs, beside the folders, and the seed. The first rank emits a row for each job. A rank on
which one fails emits the error; if not all of them fail, it ends, for the others would wait for it.
"""

from __future__ import annotations

import datetime
import math
import os
import sys
import time
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from runtime.engine import attention, dispatch
from runtime.engine.backend import Backend
from runtime.engine.checkpoints.folder import open_folder
from runtime.engine.context import divide_sequence
from runtime.engine.mesh import build_mesh
from runtime.engine.transformer import load_transformer, plan_transformer
from runtime.environment import rank_environment
from runtime.spec import ParallelSpec
from tests.parity.matrix import ALL, Job, difference, inputs_of, outputs
from tests.parity.model_case import ModelCase
from tests.support.torchrun import emit


def main() -> None:
    asked, seed = Path(sys.argv[1]), int(sys.argv[2])
    jobs = msgspec.json.decode(asked.read_bytes(), type=list[Job])
    torch.set_grad_enabled(False)
    torch.set_num_threads(1)
    place = rank_environment()
    dist.init_process_group("cpu:gloo", timeout=datetime.timedelta(seconds=60))
    backend = Backend(torch.device("cpu"), place)
    failures = dist.FileStore(f"{asked}.failures.{os.getppid()}", place.world_size)  # of this start
    for number, job in enumerate(jobs):
        try:
            found = _compare(asked.parent, ALL[job.case], seed, job.layout, backend)
        except Exception as error:
            emit({"job": number, "error": f"{type(error).__name__} on rank {place.rank}: {error}"[:300]})
            if not _all_failed(failures, number, place.world_size):
                raise
            continue
        if place.rank == 0:
            emit({"job": number, **found})
    dist.destroy_process_group()


def _all_failed(failures: dist.Store, number: int, ranks: int) -> bool:
    """Whether a job failed on every rank, or will in a moment."""
    failures.add(str(number), 1)
    until = time.monotonic() + 5
    while failures.add(str(number), 0) < ranks and time.monotonic() < until:
        time.sleep(0.1)
    return failures.add(str(number), 0) == ranks


def _compare(
    directory: Path, case: ModelCase, seed: int, parallel: ParallelSpec, backend: Backend
) -> dict[str, Any]:
    mesh = build_mesh(parallel, "cpu")
    start = backend.memory().host or 0
    planned = plan_transformer(open_folder(directory / case.label), parallel, mesh)
    model: Any = load_transformer(
        planned, backend, torch.float32, on_bytes=lambda _: None, cancelled=lambda: False
    )
    if parallel.context > 1:
        divide_sequence(model, mesh)
    grown = (backend.memory().host or 0) - start
    inputs = inputs_of(case, seed, model.config)
    stored = load_file(directory / case.label / "expected.st")
    expected = [stored[str(number)] for number in range(len(stored))]
    rel, absolute = difference(outputs(case.run(model, inputs)), expected)
    found = {"max_rel": rel, "max_abs": absolute, "peak_mb": grown / 2**20}
    if parallel.context > 1:
        with mock.patch.object(dispatch, "context_attention", _local_attention):
            found["local"] = difference(outputs(case.run(model, inputs)), expected)[0]
    figures = torch.tensor(list(found.values())).nan_to_num(nan=math.inf)  # which a maximum could lose
    dist.all_reduce(figures, op=dist.ReduceOp.MAX)
    return dict(zip(found, figures.tolist(), strict=True)) | {"peak_mb": round(figures[2].item(), 1)}


def _local_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float | None,
    *,
    queries: attention.Tokens,
    keys: attention.Tokens,
    axes: attention.ContextAxes,
    kernel: attention.Kernel,
) -> torch.Tensor:
    """Instead of `context_attention`: this rank's queries attend to its own keys only, under their part of the mask."""
    here = range(axes.rank, axes.rank + 1)
    mask = attention._four_dims(mask, query, queries.total, keys.total)
    if mask is not None and mask.shape[2] > 1:
        mask = attention._take(mask, 2, queries, here)
    key, value = (attention._every_query_head(one, query.shape[2]) for one in (key, value))
    out: Any = attention.native_kernel(query, key, value, attention._take(mask, 3, keys, here), scale, False)
    return out.nan_to_num()  # of rows without a key that counts


if __name__ == "__main__":
    main()
