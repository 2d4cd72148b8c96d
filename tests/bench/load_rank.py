"""One rank of the load benchmark, run by torchrun. Arguments: folder, runs, paths."""

from __future__ import annotations

import ctypes
import gc
import sys
import time
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import diffusers
import torch
import torch.distributed as dist
from diffusers import ParallelConfig, TensorParallelConfig
from diffusers.hooks import tensor_parallel as upstream

from runtime.engine.backend import Backend
from runtime.engine.checkpoints.folder import open_folder
from runtime.engine.loading import shard_loaded
from runtime.engine.mesh import build_mesh
from runtime.engine.plans import apply_plan, tensor_plan
from runtime.engine.tensor import Ranks
from runtime.engine.transformer import load_transformer, plan_transformer
from runtime.environment import rank_environment
from runtime.spec import ParallelSpec
from tests.support.load_probe import Peak
from tests.support.torchrun import emit


def main() -> None:
    folder, runs, paths = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]
    torch.set_grad_enabled(False)
    torch.set_num_threads(1)
    place = rank_environment()
    dist.init_process_group("cpu:gloo")
    backend = Backend(torch.device("cpu"), place)
    mesh = build_mesh(ParallelSpec(tensor=place.world_size), "cpu")
    loaders = {"ours": _ours, "upstream": _upstream, "load_then_shard": _load_then_shard}
    for run in range(runs + 1):
        for path in paths:
            figures = _measure(lambda path=path: loaders[path](folder, backend, mesh), backend)
            if run and place.rank == 0:  # the first round warms the page cache and the allocator
                emit({"path": path, **figures})
    dist.destroy_process_group()


def _measure(load: Callable[[], torch.nn.Module], backend: Backend) -> dict[str, float]:
    """Seconds and bytes, of the rank that needs most."""
    gc.collect()
    _trim()
    dist.barrier()
    with Peak(backend) as memory:
        start = time.perf_counter()
        model = load()
        seconds = time.perf_counter() - start
    gc.collect()
    _trim()
    final = (backend.memory().host or 0) - memory.start
    figures = torch.tensor([seconds, memory.peak - memory.start, final], dtype=torch.float64)
    dist.all_reduce(figures, op=dist.ReduceOp.MAX)
    del model
    return dict(zip(("seconds", "peak", "final"), figures.tolist(), strict=True))


def _trim() -> None:
    """Give freed heap back, or it would hide what a load needs, and count as what it holds."""
    ctypes.CDLL(None).malloc_trim(0)


def _ours(folder: Path, backend: Backend, mesh) -> torch.nn.Module:
    planned = plan_transformer(open_folder(folder), ParallelSpec(tensor=backend.world_size), mesh)
    return load_transformer(
        planned, backend, torch.bfloat16, on_bytes=lambda _: None, cancelled=lambda: False
    )


def _upstream(folder: Path, backend: Backend, mesh) -> torch.nn.Module:
    """diffusers' own shard-on-read. Its gates against the CPU are lifted; nothing else is touched."""
    devices = (*upstream._SUPPORTED_TP_DEVICES, "cpu")
    with (
        mock.patch.object(torch.accelerator, "device_count", lambda: 1),
        mock.patch.object(upstream, "_SUPPORTED_TP_DEVICES", devices),
    ):
        config = TensorParallelConfig(tp_degree=backend.world_size, mesh=mesh["tensor"])
        return diffusers.FluxTransformer2DModel.from_pretrained(
            folder, dtype=torch.bfloat16, parallel_config=ParallelConfig(tensor_parallel_config=config)
        )


def _load_then_shard(folder: Path, backend: Backend, mesh) -> torch.nn.Module:
    """Load all of the model on every rank, then cut it.

    On a CPU from_pretrained leaves the weights in the mapped file; the copy is what a GPU's memory would hold.
    """
    model = diffusers.FluxTransformer2DModel.from_pretrained(folder, dtype=torch.bfloat16)
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()
    shares = (1,) * backend.world_size
    plan = tensor_plan(model, shares)
    shard_loaded(model, plan.shards(model), backend.rank, shares)
    apply_plan(model, plan, Ranks(mesh["tensor"].get_group(), backend.rank, shares))
    return model


if __name__ == "__main__":
    main()
