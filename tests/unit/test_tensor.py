"""Every rank reads its own part of a weight and no other; all parts together are the weight."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from runtime.engine.tensor import Shard, read_shard, row_split_modules
from tests.support.threads import one_torch_thread

DEGREES = (1, 2, 3, 4, 6)


@pytest.fixture(scope="module", autouse=True)
def polite() -> Iterator[None]:
    with one_torch_thread():
        yield


class Recorder:
    """A tensor behind the interface of a safetensors slice; remembers how many elements were read."""

    def __init__(self, tensor: torch.Tensor):
        self.tensor, self.read = tensor, 0

    def get_shape(self) -> list[int]:
        return list(self.tensor.shape)

    def __getitem__(self, index: tuple[slice, ...]) -> torch.Tensor:
        part = self.tensor[index]
        self.read += part.numel()
        return part


def distinct(*shape: int) -> torch.Tensor:
    """Every element with a value of its own."""
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float32).reshape(shape)


def parts(whole: torch.Tensor, shard: Shard, degree: int) -> list[torch.Tensor]:
    return [read_shard(Recorder(whole), shard, rank, degree) for rank in range(degree)]


@pytest.mark.parametrize("degree", DEGREES)
@pytest.mark.parametrize(
    ("shape", "dim"),
    [((12,), 0), ((12, 5), 0), ((5, 12), 1), ((12, 3, 2), 0), ((3, 12, 2), 1), ((2, 3, 12), 2)],
)
def test_one_block_is_split_as_torch_chunks_it(shape: tuple[int, ...], dim: int, degree: int) -> None:
    whole = distinct(*shape)
    expected = whole.chunk(degree, dim=dim)
    got = parts(whole, Shard(dim, (12,)), degree)
    assert all(torch.equal(one, other) for one, other in zip(got, expected, strict=True))
    assert torch.equal(torch.cat(got, dim=dim), whole)


@pytest.mark.parametrize("degree", (1, 2, 3))
@pytest.mark.parametrize("blocks", [(6, 6), (12, 6), (6, 12, 18), (6, 6, 6, 24)], ids=str)
@pytest.mark.parametrize("dim", [0, 1])
def test_every_block_of_a_fused_weight_is_split_on_its_own(
    dim: int, blocks: tuple[int, ...], degree: int
) -> None:
    shape = (sum(blocks), 5) if dim == 0 else (5, sum(blocks))
    whole = distinct(*shape)
    chunks = [block.chunk(degree, dim=dim) for block in whole.split(blocks, dim=dim)]
    got = parts(whole, Shard(dim, blocks), degree)
    for rank, part in enumerate(got):
        assert torch.equal(part, torch.cat([chunk[rank] for chunk in chunks], dim=dim))


@pytest.mark.parametrize("degree", (1, 2, 3))
@pytest.mark.parametrize("blocks", [(12,), (12, 6), (6, 12, 18)], ids=str)
@pytest.mark.parametrize("dim", [0, 1])
def test_all_ranks_together_hold_every_element_once(dim: int, blocks: tuple[int, ...], degree: int) -> None:
    whole = distinct(sum(blocks), 4) if dim == 0 else distinct(4, sum(blocks))
    together = torch.cat([part.flatten() for part in parts(whole, Shard(dim, blocks), degree)])
    assert torch.equal(together.sort().values, whole.flatten())


@pytest.mark.parametrize("degree", (2, 4))
@pytest.mark.parametrize(("dim", "blocks"), [(0, (8,)), (1, (8,)), (0, (8, 16)), (1, (8, 16))])
def test_a_rank_reads_no_more_than_it_holds(dim: int, blocks: tuple[int, ...], degree: int) -> None:
    whole = distinct(sum(blocks), 3) if dim == 0 else distinct(3, sum(blocks))
    source = Recorder(whole)
    part = read_shard(source, Shard(dim, blocks), degree - 1, degree)
    assert source.read == part.numel() == whole.numel() // degree


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shard", [Shard(0, (8,)), Shard(1, (4, 8)), Shard(0, (4, 4))], ids=str)
def test_slices_of_a_real_file_are_the_same(tmp_path: Path, dtype: torch.dtype, shard: Shard) -> None:
    whole = distinct(8, 12).to(dtype)
    file = tmp_path / "weights.safetensors"
    save_file({"weight": whole}, file)
    with safe_open(file, framework="pt") as opened:
        for rank in range(2):
            part = read_shard(opened.get_slice("weight"), shard, rank, 2)
            assert part.dtype == dtype
            assert torch.equal(part, read_shard(Recorder(whole), shard, rank, 2))


def test_a_row_split_linear_sums_to_the_whole() -> None:
    """What the hooks of the tensor axis rely on: column parts side by side, row parts added up."""
    torch.manual_seed(0)
    up, down = torch.randn(24, 10), torch.randn(10, 24)
    x = torch.randn(3, 10)
    whole = torch.nn.functional.gelu(x @ up.T) @ down.T
    ups, downs = parts(up, Shard(0, (24,)), 4), parts(down, Shard(1, (24,)), 4)
    partial = [torch.nn.functional.gelu(x @ u.T) @ d.T for u, d in zip(ups, downs, strict=True)]
    torch.testing.assert_close(sum(partial), whole)


# ---- which Linears close a block


def block() -> torch.nn.Module:
    return torch.nn.ModuleDict(
        {"up": torch.nn.Linear(4, 8), "down": torch.nn.Linear(8, 4), "other": torch.nn.Linear(4, 4)}
    )


def test_row_split_modules_are_the_linears_split_along_their_inputs() -> None:
    model = torch.nn.ModuleDict({"first": block(), "second": block()})
    plan = {
        "first.up.weight": Shard(0, (8,)),
        "first.up.bias": Shard(0, (8,)),
        "first.down.weight": Shard(1, (8,)),
        "second.down.weight": Shard(1, (4, 4)),
    }
    found = row_split_modules(model, plan)
    assert found == {
        "first.down": model.get_submodule("first.down"),
        "second.down": model.get_submodule("second.down"),
    }


def test_without_a_plan_no_linear_is_split() -> None:
    assert row_split_modules(block(), {}) == {}
