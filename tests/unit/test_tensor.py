"""Every rank holds whole units of a weight, all ranks together all of it, and their parts compute the whole's result.

The ranks are threads of this process here: what they send each other meets in a `Meeting`.
"""

from __future__ import annotations

import copy
import functools
import json
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
from diffusers.models.normalization import RMSNorm as DiffusersRMSNorm
from safetensors.torch import save_file
from torch import nn

from runtime.engine import loading, tensor
from runtime.engine.checkpoints.files import open_files
from runtime.engine.checkpoints.source import Index
from runtime.engine.loading import read_part, shard_loaded
from runtime.engine.plans import apply_plan, tensor_plan
from runtime.engine.tensor import (
    AcrossHeadsNorm,
    Block,
    Ranks,
    RowSplitLinear,
    Shard,
    gather_output,
    hold_part,
    shard_indices,
    slice_heads,
    slice_input,
)
from runtime.spec import ParallelSpec, divide
from tests.parity.matrix import CASES, difference, drawn, outputs
from tests.support.threads import one_torch_thread

CPU = torch.device("cpu")
SHARES = ((1,), (1, 1), (1, 1, 1), (1, 1, 1, 1), (2, 1), (1, 3), (24, 16), (5, 3, 2), (7, 1, 1), (100, 1))
BLOCKS = (Block(12, 12), Block(24, 6), Block(38 * 4, 38), Block(7, 7), Block(640, 10), Block(100, 25))
PACKED = (
    (Block(12, 6), Block(12, 6)),
    (Block(20, 5), Block(20, 5), Block(20, 5), Block(66, 33), Block(66, 33)),
)
Result = TypeVar("Result")


@pytest.fixture(scope="module", autouse=True)
def polite() -> Iterator[None]:
    with one_torch_thread():
        yield


# ---- whole units for each rank


@pytest.mark.parametrize(
    ("units", "shares", "counts"),
    [
        (38, (1, 1, 1, 1), (10, 10, 9, 9)),
        (24, (1, 1, 1, 1, 1), (5, 5, 5, 5, 4)),
        (24, (24, 16), (14, 10)),
        (30, (2, 1), (20, 10)),
        (10, (2, 1), (7, 3)),
        (3, (100, 1, 1), (1, 1, 1)),
        (8, (100, 1, 1), (6, 1, 1)),
        (1, (5,), (1,)),
    ],
)
def test_units_are_divided_as_the_shares_say(
    units: int, shares: tuple[int, ...], counts: tuple[int, ...]
) -> None:
    assert divide(units, shares) == counts


@pytest.mark.parametrize("shares", SHARES, ids=str)
def test_every_rank_gets_what_is_nearest_to_its_share(shares: tuple[int, ...]) -> None:
    for units in range(len(shares), 80):
        counts = divide(units, shares)
        exact = [units * share / sum(shares) for share in shares]
        assert sum(counts) == units
        assert min(counts) >= 1
        if min(exact) >= 1:
            assert all(abs(count - part) < 1 for count, part in zip(counts, exact, strict=True))
        # Who has the larger share never gets less; of equal shares the first rank has the odd unit.
        assert list(counts) == sorted(counts, reverse=shares[0] >= shares[-1])
        assert divide(units, [3 * share for share in shares]) == counts
        if len(set(shares)) == 1:
            assert max(counts) - min(counts) <= 1


@pytest.mark.parametrize("shares", [shares for shares in SHARES if len(shares) > 1], ids=str)
def test_fewer_units_than_ranks_are_an_error(shares: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=f"cannot be divided over {len(shares)} ranks"):
        divide(len(shares) - 1, shares)
    with pytest.raises(ValueError):
        Block(4 * (len(shares) - 1), len(shares) - 1).ranges(shares)


def test_a_layout_without_shares_has_equal_ones() -> None:
    assert ParallelSpec(tensor=3).shares == (1, 1, 1)
    assert ParallelSpec(tensor=2, tensor_shares=(24, 16)).shares == (24, 16)
    assert ParallelSpec().shares == (1,)


@pytest.mark.parametrize("shares", SHARES, ids=str)
@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_a_block_is_cut_in_whole_units_one_rank_behind_the_other(
    block: Block, shares: tuple[int, ...]
) -> None:
    ranges, width = block.ranges(shares), block.size // block.units
    assert [start for start, _ in ranges] == [0, *(stop for _, stop in ranges[:-1])]
    assert ranges[-1][1] == block.size
    assert all(stop - start >= width and (stop - start) % width == 0 for start, stop in ranges)


@pytest.mark.parametrize("shares", SHARES, ids=str)
@pytest.mark.parametrize("blocks", [*((block,) for block in BLOCKS), *PACKED], ids=str)
@pytest.mark.parametrize("dim", [0, 1])
def test_all_ranks_together_hold_every_element_once(
    dim: int, blocks: tuple[Block, ...], shares: tuple[int, ...]
) -> None:
    size = sum(block.size for block in blocks)
    shape = (size, 3) if dim == 0 else (3, size)
    held, shard = torch.zeros(shape, dtype=torch.int64), Shard(dim, blocks)
    for rank in range(len(shares)):
        mine = torch.zeros_like(held)
        for index in shard_indices(shape, shard, rank, shares):
            mine[index] += 1
        assert mine.sum().item() == 3 * shard.length(rank, shares)
        # Of every packed part each rank has its own stretch.
        assert all(part.any() for part in mine.split([block.size for block in blocks], dim=dim))
        held += mine
    assert torch.equal(held, torch.ones_like(held))


# ---- reading


class Recorder:
    """A tensor as a weight source; remembers every part that was read of it."""

    item_bytes, where = 4, "'weight' in 'file'"

    def __init__(self, whole: torch.Tensor):
        self.whole, self.reads = whole, list[Index]()

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.whole.shape)

    def read(self, index: Index) -> torch.Tensor:
        assert all(type(one.start) is type(one.stop) is int for one in index)
        self.reads.append(index)
        return self.whole[index]

    @property
    def elements(self) -> int:
        return sum(self.whole[index].numel() for index in self.reads)


def distinct(*shape: int) -> torch.Tensor:
    """Every element with a value of its own."""
    return torch.arange(math.prod(shape), dtype=torch.float32).reshape(shape)


def parts(whole: torch.Tensor, shard: Shard | None, shares: Sequence[int]) -> list[torch.Tensor]:
    return [
        read_part(Recorder(whole), shard, rank, shares, torch.float32, CPU) for rank in range(len(shares))
    ]


def expected_part(whole: torch.Tensor, shard: Shard, rank: int, shares: Sequence[int]) -> torch.Tensor:
    """By torch's own split: of each block, the stretch behind those of the ranks before."""
    pieces = []
    for block, piece in zip(
        shard.blocks, whole.split([b.size for b in shard.blocks], dim=shard.dim), strict=True
    ):
        width = block.size // block.units
        sizes = [width * count for count in divide(block.units, shares)]
        pieces.append(piece.split(sizes, dim=shard.dim)[rank])
    return torch.cat(pieces, dim=shard.dim)


CUTS = [
    ((12,), Shard(0, (Block(12, 6),))),
    ((12, 5), Shard(0, (Block(12, 12),))),
    ((5, 12), Shard(1, (Block(12, 4),))),
    ((24, 5), Shard(0, (Block(12, 6), Block(12, 6)))),
    ((30,), Shard(0, (Block(12, 6), Block(18, 9)))),
    ((5, 30), Shard(1, (Block(12, 6), Block(18, 9)))),
    ((16, 3, 1, 1), Shard(0, (Block(8, 8), Block(8, 8)))),
    ((3, 12, 4), Shard(1, (Block(12, 12),))),
    ((3, 4, 24), Shard(2, (Block(12, 12), Block(12, 12)))),
]


@pytest.mark.parametrize("strip", [loading.STRIP, 7, 1])
@pytest.mark.parametrize("shares", [(1,), (1, 1), (2, 1), (1, 1, 1), (1, 3)], ids=str)
@pytest.mark.parametrize(("shape", "shard"), CUTS, ids=str)
def test_a_rank_reads_its_own_part_and_no_other(
    shape: tuple[int, ...], shard: Shard, shares: tuple[int, ...], strip: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loading, "STRIP", strip)
    whole = distinct(*shape)
    for rank in range(len(shares)):
        source = Recorder(whole)
        part = read_part(source, shard, rank, shares, torch.float32, CPU)
        assert torch.equal(part, expected_part(whole, shard, rank, shares))
        assert source.elements == part.numel()
        assert part.shape[shard.dim] == shard.length(rank, shares)
        row = math.prod(shape[1:])
        assert all(whole[index].numel() <= max(strip, row) for index in source.reads)


@pytest.mark.parametrize(("shape", "shard"), [*CUTS, ((4, 6), None), ((), None)], ids=str)
def test_a_part_has_memory_of_its_own(shape: tuple[int, ...], shard: Shard | None) -> None:
    whole = distinct(*shape)
    before = whole.clone()
    for part in parts(whole, shard, (1, 1)):
        assert part.is_contiguous()
        assert part.untyped_storage().nbytes() == part.numel() * part.element_size()
        part.fill_(-1)
    assert torch.equal(whole, before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shard", [None, CUTS[1][1], Shard(0, (Block(6, 6), Block(6, 6)))], ids=str)
def test_numbers_are_cast_once(shard: Shard | None, stored: torch.dtype, dtype: torch.dtype) -> None:
    whole = (distinct(12, 5) / 7).to(stored)
    for rank in range(2):
        part = read_part(Recorder(whole), shard, rank, (2, 1), dtype, CPU)
        kept = whole if shard is None else expected_part(whole, shard, rank, (2, 1))
        assert part.dtype == dtype
        assert torch.equal(part, kept.to(dtype))


def test_whole_numbers_are_not_cast() -> None:
    whole = torch.arange(12)
    assert read_part(Recorder(whole), None, 0, (1,), torch.bfloat16, CPU).dtype == torch.int64
    packed = Shard(0, (Block(6, 6), Block(6, 6)))
    part = read_part(Recorder(whole), packed, 1, (1, 1), torch.bfloat16, CPU)
    assert part.tolist() == [3, 4, 5, 9, 10, 11]


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("shape", "shard"), CUTS, ids=str)
def test_parts_of_a_real_file_are_the_same(
    tmp_path: Path, shape: tuple[int, ...], shard: Shard, stored: torch.dtype
) -> None:
    whole = distinct(*shape).to(stored)
    save_file({"weight": whole}, tmp_path / "weights.safetensors")
    source = open_files([tmp_path / "weights.safetensors"]).tensors["weight"]
    for rank in range(2):
        part = read_part(source, shard, rank, (2, 1), stored, CPU)
        assert torch.equal(part, expected_part(whole, shard, rank, (2, 1)))


@pytest.mark.parametrize("shares", [(1, 1), (2, 1), (1, 1, 1)], ids=str)
@pytest.mark.parametrize(("shape", "shard"), CUTS, ids=str)
def test_cutting_what_is_loaded_gives_the_same(
    shape: tuple[int, ...], shard: Shard, shares: tuple[int, ...]
) -> None:
    whole = distinct(*shape)
    for rank in range(len(shares)):
        inner = nn.Module()
        inner.register_parameter("weight", nn.Parameter(whole.clone(), requires_grad=False))
        inner.register_parameter("other", nn.Parameter(torch.ones(2), requires_grad=False))
        model = nn.ModuleDict({"inner": inner})
        shard_loaded(model, {"inner.weight": shard}, rank, shares)
        part = model.get_parameter("inner.weight")
        assert torch.equal(part, read_part(Recorder(whole), shard, rank, shares, torch.float32, CPU))
        assert part.is_contiguous() and not part.requires_grad
        assert part.untyped_storage().nbytes() == 4 * part.numel()
        assert model.get_parameter("inner.other").shape == (2,)


@pytest.mark.parametrize("shares", [(1, 1, 1, 1), (3, 2)], ids=str)
def test_a_row_split_linear_sums_to_the_whole(shares: tuple[int, ...]) -> None:
    """What the tensor axis rests on: column parts side by side, row parts added up."""
    torch.manual_seed(0)
    up, down, x = torch.randn(24, 10), torch.randn(10, 24), torch.randn(3, 10)
    whole = nn.functional.gelu(x @ up.T) @ down.T
    block = Block(24, 12)
    ups, downs = parts(up, Shard(0, (block,)), shares), parts(down, Shard(1, (block,)), shares)
    partial = [nn.functional.gelu(x @ u.T) @ d.T for u, d in zip(ups, downs, strict=True)]
    torch.testing.assert_close(sum(partial), whole)


# ---- ranks as threads


class Meeting:
    """Where the ranks of one axis exchange tensors; whoever waits for a rank that failed is told so."""

    def __init__(self, count: int):
        self.parts: list[torch.Tensor | None] = [None] * count
        self.barrier = threading.Barrier(count, timeout=30)

    def exchange(self, rank: int, part: torch.Tensor) -> list[torch.Tensor]:
        self.parts[rank] = part
        self.barrier.wait()
        every = [one.clone() for one in self.parts if one is not None]
        self.barrier.wait()
        return every


class Group:
    """A process group as one rank sees it, with the two things that the tensor axis asks of it."""

    def __init__(self, meeting: Meeting, rank: int):
        self.meeting, self.rank = meeting, rank

    def allreduce(self, tensors: list[torch.Tensor], _options: object) -> Group:
        (one,) = tensors
        one.copy_(functools.reduce(torch.add, self.meeting.exchange(self.rank, one)))
        return self

    def wait(self) -> None:
        """What was asked for is done already."""


@pytest.fixture(autouse=True)
def gathering(monkeypatch: pytest.MonkeyPatch) -> None:
    def gather(gathered: torch.Tensor, part: torch.Tensor, group: Any) -> None:
        assert part.is_contiguous()
        gathered.copy_(torch.cat(group.meeting.exchange(group.rank, part)))

    monkeypatch.setattr(tensor, "all_gather", gather)


def on_ranks(work: Callable[[Ranks], Result], shares: Sequence[int]) -> list[Result]:
    """What `work` returns on every rank."""
    meeting = Meeting(len(shares))

    def on(rank: int) -> Result:
        try:
            with torch.no_grad():
                return work(Ranks(Group(meeting, rank), rank, tuple(shares)))
        except threading.BrokenBarrierError:
            raise
        except BaseException:
            meeting.barrier.abort()
            raise

    with ThreadPoolExecutor(len(shares)) as threads:
        running = [threads.submit(on, rank) for rank in range(len(shares))]
    errors = [error for one in running if (error := one.exception())]
    for error in sorted(errors, key=lambda error: isinstance(error, threading.BrokenBarrierError)):
        raise error
    return [one.result() for one in running]


def own(whole: torch.Tensor, sizes: Sequence[int], rank: int, dim: int = -1) -> torch.Tensor:
    return whole.split(list(sizes), dim=dim)[rank]


UNEVEN = [(1, 1), (2, 1), (1, 1, 1), (1, 3)]


def test_the_sum_is_every_ranks() -> None:
    torch.manual_seed(0)
    each = [torch.randn(2, 5) for _ in range(3)]
    for result in on_ranks(lambda ranks: ranks.sum(each[ranks.rank].clone()), (1, 1, 1)):
        torch.testing.assert_close(result, sum(each))


def test_a_strided_tensor_is_summed_too() -> None:
    whole = distinct(4, 6)
    for result in on_ranks(lambda ranks: ranks.sum(whole.clone().T), (1, 1)):
        assert torch.equal(result, 2 * whole.T)


@pytest.mark.parametrize("sizes", [(4, 4), (5, 2), (1, 6, 3), (2, 2, 2)], ids=str)
@pytest.mark.parametrize("lead", [(3,), (2, 3), (1, 2, 3)], ids=str)
def test_gathering_puts_the_parts_side_by_side(lead: tuple[int, ...], sizes: tuple[int, ...]) -> None:
    whole = distinct(*lead, sum(sizes))
    results = on_ranks(lambda ranks: ranks.gather(own(whole, sizes, ranks.rank), sizes), (1,) * len(sizes))
    assert all(torch.equal(result, whole) for result in results)


# ---- what the modules do


def cut_linear(linear: nn.Linear, shard: Shard, ranks: Ranks) -> nn.ModuleDict:
    model = nn.ModuleDict({"linear": copy.deepcopy(linear)})
    shards = {"linear.weight": shard}
    if shard.dim == 0 and linear.bias is not None:
        shards["linear.bias"] = Shard(0, shard.blocks)
    shard_loaded(model, shards, ranks.rank, ranks.shares)
    return model


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shares", UNEVEN, ids=str)
def test_a_row_split_linear_adds_its_bias_once(shares: tuple[int, ...], bias: bool) -> None:
    torch.manual_seed(1)
    linear, x = nn.Linear(20, 6, bias=bias), torch.randn(2, 3, 20)
    shard = Shard(1, (Block(20, 10),))

    def work(ranks: Ranks) -> torch.Tensor:
        model = cut_linear(linear, shard, ranks)
        hold_part(model, "linear", ranks)
        replaced = model["linear"]
        assert isinstance(replaced, RowSplitLinear)
        assert (replaced.bias is not None) == (bias and ranks.rank == 0)
        assert (replaced.in_features, replaced.out_features) == (shard.length(ranks.rank, shares), 6)
        ((start, stop),) = shard.ranges(ranks.rank, shares)
        return replaced(x[..., start:stop])

    with torch.no_grad():
        expected = linear(x)
    for result in on_ranks(work, shares):
        torch.testing.assert_close(result, expected)


@pytest.mark.parametrize("shares", UNEVEN, ids=str)
def test_a_row_split_convolution_adds_its_bias_once(shares: tuple[int, ...]) -> None:
    torch.manual_seed(2)
    convolution, x = nn.Conv2d(8, 3, 1), torch.randn(2, 8, 4, 5)
    shard = Shard(1, (Block(8, 8),))

    def work(ranks: Ranks) -> torch.Tensor:
        model = nn.ModuleDict({"conv": copy.deepcopy(convolution)})
        shard_loaded(model, {"conv.weight": shard}, ranks.rank, shares)
        hold_part(model, "conv", ranks)
        ((start, stop),) = shard.ranges(ranks.rank, shares)
        return model["conv"](x[:, start:stop])

    with torch.no_grad():
        expected = convolution(x)
    for result in on_ranks(work, shares):
        torch.testing.assert_close(result, expected)


@pytest.mark.parametrize("blocks", [(Block(20, 10),), (Block(8, 4), Block(12, 6))], ids=str)
@pytest.mark.parametrize("shares", UNEVEN, ids=str)
def test_a_whole_input_is_sliced_for_the_rows_of_a_rank(
    shares: tuple[int, ...], blocks: tuple[Block, ...]
) -> None:
    torch.manual_seed(3)
    linear, x = nn.Linear(20, 6), torch.randn(2, 3, 20)
    shard = Shard(1, blocks)

    def work(ranks: Ranks) -> torch.Tensor:
        model = cut_linear(linear, shard, ranks)
        hold_part(model, "linear", ranks)
        slice_input(model["linear"], shard, ranks)
        return model["linear"](x)

    with torch.no_grad():
        expected = linear(x)
    for result in on_ranks(work, shares):
        torch.testing.assert_close(result, expected)


@pytest.mark.parametrize("shares", UNEVEN, ids=str)
def test_gathered_columns_are_the_whole_output(shares: tuple[int, ...]) -> None:
    torch.manual_seed(4)
    linear, x = nn.Linear(5, 14), torch.randn(2, 3, 5)
    shard = Shard(0, (Block(14, 7),))

    def work(ranks: Ranks) -> torch.Tensor:
        model = cut_linear(linear, shard, ranks)
        gather_output(model["linear"], shard, ranks)
        return model["linear"](x)

    with torch.no_grad():
        expected = linear(x)
    for result in on_ranks(work, shares):
        torch.testing.assert_close(result, expected)


@pytest.mark.parametrize("shares", UNEVEN, ids=str)
def test_gathered_channels_of_a_convolution_lie_in_dim_one(shares: tuple[int, ...]) -> None:
    torch.manual_seed(5)
    convolution, x = nn.Conv2d(3, 10, 3, padding=1), torch.randn(2, 3, 4, 6)
    shard = Shard(0, (Block(10, 5),))

    def work(ranks: Ranks) -> torch.Tensor:
        model = nn.ModuleDict({"conv": copy.deepcopy(convolution)})
        shard_loaded(model, {"conv.weight": shard, "conv.bias": shard}, ranks.rank, shares)
        gather_output(model["conv"], shard, ranks)
        return model["conv"](x)

    with torch.no_grad():
        expected = convolution(x)
    for result in on_ranks(work, shares):
        torch.testing.assert_close(result, expected)


class Table(nn.Module):
    """A module that returns what it was given, as a rotary embedding returns its tables."""

    def forward(self, table: Any) -> Any:
        return table


@pytest.mark.parametrize("shares", UNEVEN, ids=str)
@pytest.mark.parametrize(
    ("shape", "dim", "where"),
    [((2, 6, 4, 3), None, 1), ((2, 4, 18), None, 2), ((4, 6, 3), 1, 1)],
    ids=["heads in dim 1", "heads in the last dim", "as told"],
)
def test_a_rotary_table_keeps_the_heads_of_the_rank(
    shape: tuple[int, ...], dim: int | None, where: int, shares: tuple[int, ...]
) -> None:
    whole = distinct(*shape)
    each = shape[where] // 6
    sizes = [each * count for count in divide(6, shares)]

    def work(ranks: Ranks) -> None:
        module = Table()
        slice_heads(module, 6, dim, ranks)
        expected = own(whole, sizes, ranks.rank, where)
        assert torch.equal(module(whole), expected)
        cosine, sine, other = module((whole, whole + 1, None))
        assert torch.equal(cosine, expected) and torch.equal(sine, expected + 1) and other is None
        assert isinstance(module([whole]), list)

    on_ranks(work, shares)


def norms(features: int, dtype: torch.dtype) -> dict[str, nn.Module]:
    made = {
        "torch RMSNorm": nn.RMSNorm(features, eps=1e-6),
        "torch RMSNorm without eps": nn.RMSNorm(features),
        "diffusers RMSNorm": DiffusersRMSNorm(features, eps=1e-5),
        "LayerNorm": nn.LayerNorm(features, eps=1e-6),
        "LayerNorm without bias": nn.LayerNorm(features, bias=False),
    }
    for norm in made.values():
        for parameter in norm.parameters():
            nn.init.uniform_(parameter, 0.5, 1.5)
    return {name: norm.to(dtype) for name, norm in made.items()}


@pytest.mark.parametrize("shares", UNEVEN, ids=str)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-6), (torch.bfloat16, 2**-7)], ids=str)
@pytest.mark.parametrize("name", norms(2, torch.float32))
def test_a_norm_across_heads_is_the_whole_models(
    name: str, dtype: torch.dtype, tolerance: float, shares: tuple[int, ...]
) -> None:
    torch.manual_seed(6)
    norm = norms(40, dtype)[name]
    # Features far from zero mean and unit variance, differently for each rank.
    x = (torch.randn(2, 5, 40) * torch.linspace(0.1, 9, 40) + torch.linspace(-3, 5, 40)).to(dtype)
    block = Block(40, 10)
    sizes = [4 * count for count in divide(10, shares)]

    def work(ranks: Ranks) -> torch.Tensor:
        model = nn.ModuleDict({"norm": copy.deepcopy(norm)})
        shards = {f"norm.{leaf}": Shard(0, (block,)) for leaf, _ in norm.named_parameters()}
        shard_loaded(model, shards, ranks.rank, shares)
        mine = AcrossHeadsNorm(model["norm"], 40, ranks)
        given = own(x, sizes, ranks.rank)
        before = given.clone()
        result = mine(given)
        assert torch.equal(given, before)
        return result

    with torch.no_grad():
        expected = norm(x)
    got = torch.cat(on_ranks(work, shares), dim=-1)
    assert got.dtype == expected.dtype == dtype
    torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance)


def test_diffusers_rmsnorm_across_heads_rounds_as_diffusers_does() -> None:
    torch.manual_seed(7)
    norm = norms(64, torch.bfloat16)["diffusers RMSNorm"]
    x = torch.randn(3, 50, 64).bfloat16()
    (got,) = on_ranks(lambda ranks: AcrossHeadsNorm(norm, 64, ranks)(x), (1,))
    with torch.no_grad():
        assert torch.equal(got, norm(x))


# ---- whole models


@functools.cache
def tiny(name: str) -> tuple[nn.Module, dict[str, Any], list[torch.Tensor]]:
    """A model, its inputs and one process's result."""
    model, inputs = drawn(CASES[name], 0)
    with torch.no_grad():
        return model, inputs, outputs(CASES[name].run(model, inputs))


def check_model(name: str, shares: Sequence[int], plan_text: str = "") -> None:
    model, inputs, expected = tiny(name)
    plan = tensor_plan(model, shares, plan_text)

    def work(ranks: Ranks) -> list[torch.Tensor]:
        mine = copy.deepcopy(model)
        shard_loaded(mine, plan.shards(mine), ranks.rank, shares)
        apply_plan(mine, plan, ranks)
        return outputs(CASES[name].run(mine, copy.deepcopy(inputs)))

    for result in on_ranks(work, shares):
        assert difference(result, expected)[0] < 5e-6


FLUX, MOTIF, LTX = "FluxTransformer2DModel", "MotifVideoTransformer3DModel", "LTXVideoTransformer3DModel"


@pytest.mark.parametrize(
    ("name", "shares"),
    [(FLUX, (1, 1)), (FLUX, (2, 1)), (FLUX, (1, 1, 1)), (MOTIF, (1, 1)), (MOTIF, (2, 1)), (LTX, (2, 1))],
)
def test_a_model_of_parts_computes_what_the_whole_does(name: str, shares: tuple[int, ...]) -> None:
    """All classes under real ranks: `make matrix`."""
    check_model(name, shares)


def test_motif_video_hands_heads_to_another_attention_here() -> None:
    """What the case above is for: it was a crash once."""
    assert tiny(MOTIF)[0].config.enable_text_cross_attention_single


ATTENTION = {
    **{f"transformer_blocks.*.attn.{name}": "colwise" for name in ("to_q", "to_k", "to_v")},
    **{f"transformer_blocks.*.attn.add_{name}_proj": "colwise" for name in "qkv"},
    **dict.fromkeys(
        ["transformer_blocks.*.attn.to_out.0", "transformer_blocks.*.attn.to_add_out"], "rowwise"
    ),
}
FEED_FORWARD = {
    "transformer_blocks.*.ff.net.0.proj": "colwise",
    "transformer_blocks.*.ff.net.2": "rowwise",
}
MODULATION = {
    "transformer_blocks.*.norm1.linear": "rowwise_split_input",
    "transformer_blocks.*.norm1_context.linear": "colwise_gathered",
    "single_transformer_blocks.*.norm.linear": "colwise_gathered",
    "norm_out.linear": "rowwise_split_input",
}
SINGLE = {
    "single_transformer_blocks.*.proj_mlp": "colwise_gathered",
    "single_transformer_blocks.*.proj_out": "rowwise_split_input",
    "single_transformer_blocks.*.attn.to_k": "colwise_gathered",
}
OWN_PLANS: dict[str, dict[str, object]] = {
    "attention": {**ATTENTION},
    "feed-forward of one stream": {**FEED_FORWARD},
    "modulation": {**MODULATION},
    "single blocks gathered": {**SINGLE},
    "all of them": {**ATTENTION, **FEED_FORWARD, **MODULATION, **SINGLE},
}


@pytest.mark.parametrize("shares", [(1, 1), (2, 1)], ids=str)
@pytest.mark.parametrize("name", OWN_PLANS)
def test_a_users_own_plan_gives_the_same_picture(name: str, shares: tuple[int, ...]) -> None:
    check_model(FLUX, shares, json.dumps(OWN_PLANS[name]))


@pytest.mark.parametrize("name", ["Flux2Transformer2DModel", "OvisImageTransformer2DModel"])
def test_packed_projections_may_be_gathered_whole(name: str) -> None:
    """Their blocks keep counts of what comes out of them, which then stay those of the whole."""
    model = tiny(name)[0]
    packed = [path for path, _ in model.named_modules() if path.endswith(("to_qkv_mlp_proj", "proj_mlp"))]
    assert packed
    check_model(name, (2, 1), json.dumps(dict.fromkeys(packed, "colwise_gathered")))


def test_cross_attention_alone_leaves_the_rotary_table_whole() -> None:
    plan = {f"transformer_blocks.*.attn2.{name}": "colwise" for name in ("to_q", "to_k", "to_v")}
    check_model(LTX, (2, 1), json.dumps(plan | {"transformer_blocks.*.attn2.to_out.0": "rowwise"}))


def test_a_wrong_split_would_be_noticed() -> None:
    """The comparison above sees two ranks that have changed places."""
    model, inputs, expected = tiny(FLUX)
    plan = tensor_plan(model, (1, 1))
    path = next(path for path, split in plan.splits.items() if split.style == "rowwise")
    wrong = copy.deepcopy(model)
    weight = wrong.get_parameter(f"{path}.weight")
    with torch.no_grad():
        weight.copy_(weight.roll(weight.shape[1] // 2, dims=1))
        assert difference(outputs(CASES[FLUX].run(wrong, inputs)), expected)[0] > 1e-3
