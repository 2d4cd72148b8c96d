"""Loads a transformer on the ranks of a torchrun and emits what each of them needed.

Arguments: a single file or a folder, the dtype to hold it in.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from runtime.engine.backend import Backend
from runtime.engine.checkpoints.folder import open_folder
from runtime.engine.checkpoints.single_file import open_single_file
from runtime.engine.loading import SliceRead
from runtime.engine.mesh import build_mesh
from runtime.engine.transformer import load_transformer, plan_transformer
from runtime.environment import rank_environment
from runtime.spec import ParallelSpec
from tests.support.load_probe import Peak
from tests.support.torchrun import emit


def main() -> None:
    source, dtype = Path(sys.argv[1]), getattr(torch, sys.argv[2])
    place = rank_environment()
    torch.set_grad_enabled(False)
    torch.set_num_threads(1)
    dist.init_process_group("cpu:gloo")
    backend = Backend(torch.device("cpu"), place)
    mesh = build_mesh(ParallelSpec(tensor=place.world_size), "cpu")
    slices: list[SliceRead] = []
    with Peak(backend) as memory:
        start = time.perf_counter()
        checkpoint = open_folder(source) if source.is_dir() else open_single_file(source)
        planned = plan_transformer(checkpoint, ParallelSpec(tensor=place.world_size), mesh)
        model = load_transformer(
            planned,
            backend,
            dtype,
            on_bytes=lambda _: None,
            cancelled=lambda: False,
            on_slice=slices.append,
        )
        seconds = time.perf_counter() - start
        time.sleep(0.05)
    report = {
        "rank": place.rank,
        "grown_at_peak": memory.peak - memory.start,
        "held": sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers())),
        "largest_slice": max(one.read for one in slices) * dtype.itemsize,
        "stored": sum(one.stored for one in slices) * dtype.itemsize,
        "seconds": seconds,
    }
    emit(report)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
