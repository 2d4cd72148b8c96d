"""What the tensor axis costs the host in one block of four 64 x 64 Linears: nothing crosses, the process group is fake.

Query, key and value are split by columns, the output by rows, so the block has one collective. `unsharded` is the same
block with this rank's shapes and no hooks; `ours` are plain shards; `functional` what its sum would
cost with the collectives that a compiled model needs; `add` is an in-place addition in the collective's place: what
any call of torch costs on this machine; `dtensor` is torch's parallelize_module.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.testing._internal.distributed.fake_pg import FakeStore

from runtime.engine.loading import shard_loaded
from runtime.engine.plans import TensorPlan, apply_plan, tensor_plan
from runtime.engine.tensor import Ranks

RANKS, WIDTH, HEADS = 2, 64, 4
ROUNDS, CALLS = 41, 200


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.heads = HEADS
        self.to_q, self.to_k, self.to_v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.to_out = nn.ModuleList([nn.Linear(WIDTH, WIDTH)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.to_out[0](self.to_q(x) + self.to_k(x) + self.to_v(x))


def _cut() -> tuple[nn.Module, TensorPlan]:
    """The block with this rank's weights, nothing else done to it."""
    model = nn.ModuleDict({"attn": Attention()}).requires_grad_(False)
    plan = tensor_plan(model, (1,) * RANKS)
    shard_loaded(model, plan.shards(model), 0, (1,) * RANKS)
    return model, plan


def _ours() -> nn.Module:
    model, plan = _cut()
    apply_plan(model, plan, Ranks(dist.group.WORLD, 0, (1,) * RANKS))
    return model["attn"]


def _plain(change: Callable[[torch.Tensor], torch.Tensor] | None = None) -> nn.Module:
    """The block with this rank's shapes, whose output nothing sums; `change` is done to it instead."""
    block = _cut()[0]["attn"]
    if change is not None:
        block.to_out[0].register_forward_hook(lambda _module, _inputs, output: change(output))
    return block


def _functional_sum(output: torch.Tensor) -> torch.Tensor:
    return functional.wait_tensor(functional.all_reduce(output, "sum", dist.group.WORLD))


def _dtensor() -> nn.Module:
    mesh = init_device_mesh("cpu", (RANKS,))
    plan = {name: ColwiseParallel() for name in ("to_q", "to_k", "to_v")} | {"to_out.0": RowwiseParallel()}
    return parallelize_module(Attention().requires_grad_(False), mesh, plan)


PATHS: dict[str, Callable[[], nn.Module]] = {
    "unsharded": _plain,
    "ours": _ours,
    "add": lambda: _plain(lambda output: output.add_(1)),
    "functional": lambda: _plain(_functional_sum),
    "dtensor": _dtensor,
}


def rows() -> Iterator[dict[str, object]]:
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    try:
        yield from _rows()
    finally:
        dist.destroy_process_group()


def _rows() -> Iterator[dict[str, object]]:
    blocks = {path: make() for path, make in PATHS.items()}
    x = torch.randn(1, WIDTH)
    times: dict[str, list[float]] = {path: [] for path in blocks}
    for _ in range(ROUNDS):
        for path, block in blocks.items():
            start = time.perf_counter()
            for _ in range(CALLS):
                block(x)
            times[path].append((time.perf_counter() - start) / CALLS * 1e6)
    medians = {path: statistics.median(found) for path, found in times.items()}
    for path, median in medians.items():
        over = median - medians["unsharded"]
        yield {
            "path": path,
            "us_per_block": round(median, 1),
            "us_per_collective": round(over, 1),
            "x_ours": round(median / medians["ours"], 1),
        }
