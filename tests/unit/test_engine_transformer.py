"""A divided transformer refuses the calls that would take this rank's part for the whole model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from runtime.engine.backend import Backend
from runtime.engine.checkpoints.folder import open_folder
from runtime.engine.mesh import build_mesh
from runtime.engine.transformer import load_transformer, plan_transformer
from runtime.environment import RankEnvironment
from runtime.spec import ParallelSpec
from tests.parity.matrix import CASES, drawn
from tests.support.refusals import refused


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Rank 0 of two; the process group is a fake one."""
    folder = tmp_path_factory.mktemp("denoiser")
    drawn(CASES["FluxTransformer2DModel"], 0)[0].save_pretrained(folder)  # type: ignore[operator]
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        parallel = ParallelSpec(tensor=2)
        planned = plan_transformer(open_folder(folder), parallel, build_mesh(parallel, "cpu"))
        backend = Backend(torch.device("cpu"), RankEnvironment(rank=0, local_rank=0, world_size=2))
        yield load_transformer(
            planned, backend, torch.float32, on_bytes=lambda _: None, cancelled=lambda: False
        )
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("save_pretrained", "cannot be saved"),
        ("load_lora_adapter", "cannot take a LoRA"),
        ("add_adapter", "cannot take an adapter"),
        ("fuse_qkv_projections", "cannot fuse its projections"),
        ("enable_layerwise_casting", "cannot be cast layer by layer"),
        ("enable_group_offload", "cannot be offloaded in groups"),
        ("enable_parallelism", "cannot be divided again"),
    ],
)
def test_calls_that_need_the_whole_model_are_refused(
    model: Any, tmp_path: Path, name: str, said: str
) -> None:
    with refused(
        f"A FluxTransformer2DModel that is divided over the tensor axis {said}", "part of each weight"
    ):
        getattr(model, name)(tmp_path)
    assert not list(tmp_path.iterdir())
