"""The tensor axis: each rank holds a plain local part of every planned weight.

A column-split Linear (dim 0) needs nothing: its output stays split by heads or hidden units. The row-split Linear
(dim 1) that follows consumes it, and one all-reduce after it closes the block; its bias lives on the first rank only,
so that the sum adds it once. Plain tensors and not DTensors: DTensor's dispatch costs about 90 microseconds a Linear
on the host (torch 2.14, measured), some 38 ms for one FLUX.1 forward; and it cannot split unevenly.

A compiled model needs functional collectives, which eager calls would pay three times the block for: each hook asks
which of the two it is in.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional

from ..spec import divide
from .backend import all_gather


class Block(NamedTuple):
    """A stretch of a dim that is split on its own, in whole units (heads, or a few hidden features each)."""

    size: int
    units: int

    def ranges(self, shares: Sequence[int]) -> list[tuple[int, int]]:
        """First and last + 1 element of each rank. Raises ValueError when there are fewer units than ranks."""
        width, start, found = self.size // self.units, 0, []
        for count in divide(self.units, shares):
            found.append((start, start + count * width))
            start += count * width
        return found


class Shard(NamedTuple):
    """A parameter split along `dim`; a fused projection has one block per part, so every rank gets some of each."""

    dim: int
    blocks: tuple[Block, ...]

    def ranges(self, rank: int, shares: Sequence[int]) -> list[tuple[int, int]]:
        """The stretches of the whole parameter that `rank` holds, in order."""
        found, offset = [], 0
        for block in self.blocks:
            start, stop = block.ranges(shares)[rank]
            found.append((offset + start, offset + stop))
            offset += block.size
        return found

    def length(self, rank: int, shares: Sequence[int]) -> int:
        """How many of the elements along `dim` `rank` holds."""
        return sum(stop - start for start, stop in self.ranges(rank, shares))


def shard_indices(
    shape: Sequence[int], shard: Shard, rank: int, shares: Sequence[int]
) -> list[tuple[slice, ...]]:
    """Where in a parameter of `shape` the pieces of `rank` lie; side by side along the split dim they are its part."""
    indices = []
    for start, stop in shard.ranges(rank, shares):
        index = [slice(0, size) for size in shape]
        index[shard.dim] = slice(start, stop)
        indices.append(tuple(index))
    return indices


_SUM = dist.AllreduceOptions()
_SUM.reduceOp = dist.ReduceOp.SUM
_SUM.asyncOp = False  # NCCL then works on the current stream, as dist.all_reduce has it
_is_compiling = torch.compiler.is_compiling


def _nobody_counts() -> None: ...


class Ranks(NamedTuple):
    """The ranks of the tensor axis as one of them sees them. A rank that computes alone has no group."""

    group: dist.ProcessGroup
    rank: int
    shares: tuple[int, ...]
    entered: Callable[[], None] = _nobody_counts  # called before each collective

    @classmethod
    def alone(cls) -> Ranks:
        """One rank that holds everything and never asks its group."""
        return cls(None, 0, (1,))

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sum over all ranks; eager calls do it in place."""
        if _is_compiling():
            return functional.all_reduce(tensor, "sum", self.group)
        tensor = tensor.contiguous()
        self.entered()
        # The group's own method: what dist.all_reduce checks and logs takes longer than the call itself.
        self.group.allreduce([tensor], _SUM).wait()
        return tensor

    def gather(self, tensor: torch.Tensor, lengths: Sequence[int]) -> torch.Tensor:
        """Every rank's part side by side along the last dim; `lengths` are their sizes, on every rank the same."""
        longest = max(lengths)
        if tensor.shape[-1] < longest:  # gloo and NCCL gather equal parts only
            tensor = torch.nn.functional.pad(tensor, (0, longest - tensor.shape[-1]))
        parts = self._gather_equal(tensor.contiguous())
        if min(lengths) == longest:
            return parts.movedim(0, -2).flatten(-2)
        return torch.cat([part[..., :length] for part, length in zip(parts, lengths, strict=True)], dim=-1)

    def _gather_equal(self, tensor: torch.Tensor) -> torch.Tensor:
        """[...] on each rank -> [ranks, ...]."""
        if _is_compiling():
            gathered = functional.wait_tensor(functional.all_gather_tensor(tensor, 0, self.group))
        else:
            # One behind the other along dim 0: what gloo takes as well as NCCL.
            gathered = tensor.new_empty((len(self.shares) * tensor.shape[0], *tensor.shape[1:]))
            self.entered()
            all_gather(gathered, tensor, group=self.group)
        return gathered.view(len(self.shares), *tensor.shape)


# ---- what closes a block


class PartLinear(torch.nn.Linear):
    """A Linear that holds this rank's part of its weight.

    It finds its parameters without a module's attribute lookup, which costs the host about a fifth of the call
    (measured): a divided model has hundreds of these, and each is short.
    """

    def __init__(self, linear: torch.nn.Linear):
        torch.nn.Module.__init__(self)
        self.weight = linear.weight
        self.register_parameter("bias", linear.bias)
        self.out_features, self.in_features = linear.weight.shape

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        own = self._parameters
        return torch.nn.functional.linear(input, own["weight"], own["bias"])


class RowSplitLinear(PartLinear):
    """One that is split along its inputs: its output is the sum over ranks, and the first rank adds the bias.

    Not a hook: torch's way to one takes as long as the collective's own call on the host (measured), and this is the
    one that every block pays for.
    """

    def __init__(self, linear: torch.nn.Linear, ranks: Ranks):
        super().__init__(linear)
        if ranks.rank:
            self.bias = None
        self.ranks = ranks
        self._all_reduce, self._entered = ranks.group.allreduce, ranks.entered

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        own = self._parameters
        output = torch.nn.functional.linear(input, own["weight"], own["bias"])
        if _is_compiling():
            return self.ranks.sum(output)
        self._entered()
        self._all_reduce([output], _SUM).wait()
        return output


def hold_part(model: torch.nn.Module, path: str, ranks: Ranks | None) -> None:
    """Let the module at `path` compute with its part; with `ranks`, close a block: sum its output over them."""
    module = model.get_submodule(path)
    if type(module) is torch.nn.Linear:
        model.set_submodule(path, PartLinear(module) if ranks is None else RowSplitLinear(module, ranks))
        return
    if ranks is None:
        return
    if ranks.rank and getattr(module, "bias", None) is not None:
        module.bias = None

    def hook(_module: torch.nn.Module, _inputs: object, output: torch.Tensor) -> torch.Tensor:
        return ranks.sum(output)

    module.register_forward_hook(hook)


def gather_output(module: torch.nn.Module, shard: Shard, ranks: Ranks) -> None:
    """`module` computes some of its outputs on each rank; afterwards every rank has all of them."""
    lengths = [shard.length(rank, ranks.shares) for rank in range(len(ranks.shares))]
    dim = 1 if isinstance(module, torch.nn.Conv2d) else -1  # where its outputs lie

    def hook(_module: torch.nn.Module, _inputs: object, output: torch.Tensor) -> torch.Tensor:
        return ranks.gather(output.movedim(dim, -1), lengths).movedim(-1, dim)

    module.register_forward_hook(hook)


def slice_input(module: torch.nn.Module, shard: Shard, ranks: Ranks) -> None:
    """`module` is split along its inputs, and its whole input is on every rank: take this rank's part of it."""
    ranges = shard.ranges(ranks.rank, ranks.shares)

    def hook(_module: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        pieces = [inputs[0][..., start:stop] for start, stop in ranges]
        return (pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=-1), *inputs[1:])

    module.register_forward_pre_hook(hook)


def slice_heads(module: torch.nn.Module, heads: int, dim: int | None, ranks: Ranks) -> None:
    """A rotary table over all `heads`: keep this rank's.

    `dim` is where the heads lie; None: [B, heads, S, d] has them in dim 1, [B, S, heads * d] in the last.
    """
    first, last = Block(heads, heads).ranges(ranks.shares)[ranks.rank]

    def local(table: Any) -> Any:
        if not isinstance(table, torch.Tensor):
            return table
        where = dim if dim is not None else (1 if table.ndim == 4 else table.ndim - 1)
        each = table.shape[where] // heads
        return table.narrow(where, first * each, (last - first) * each)

    def hook(_module: torch.nn.Module, _inputs: object, output: Any) -> Any:
        return type(output)(map(local, output)) if isinstance(output, tuple | list) else local(output)

    module.register_forward_hook(hook)


class AcrossHeadsNorm(torch.nn.Module):
    """RMSNorm or LayerNorm over all heads when each rank has some of them.

    Input [..., this rank's features]. RMSNorm: x / sqrt(mean(x^2) + eps) * weight with the mean over every rank's
    features, in fp32; LayerNorm subtracts the mean of all features first. One number per token crosses.
    """

    def __init__(self, norm: torch.nn.Module, features: int, ranks: Ranks):
        super().__init__()
        self.weight, self.bias = norm.weight, getattr(norm, "bias", None)
        self.features, self.ranks = features, ranks
        self.centred = isinstance(norm, torch.nn.LayerNorm)
        self.eps: float | None = norm.eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        if self.centred:
            wide = wide - self.ranks.sum(wide.sum(-1, keepdim=True)) / self.features
        variance = self.ranks.sum(wide.square().sum(-1, keepdim=True)) / self.features
        eps = torch.finfo(x.dtype).eps if self.eps is None else self.eps
        # Rounded before the weight comes, as diffusers' own RMSNorm does it.
        result = (wide * torch.rsqrt(variance + eps)).to(x.dtype)
        if self.weight is not None:
            result = result * self.weight
        return (result if self.bias is None else result + self.bias).to(x.dtype)
