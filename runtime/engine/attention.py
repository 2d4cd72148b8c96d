"""Attention over a sequence that is divided over ranks: Ulysses, ring, and both at once (unified).

Every rank has the queries, keys and values of its own tokens, for any number of tokens and heads. Ulysses exchanges
tokens for heads (all-to-all), so that a rank attends to all tokens with some of the heads (DeepSpeed-Ulysses, Jacobs
et al. 2023). A ring passes keys and values on from rank to rank while each attends to what it has, and merges the
partial results by their log-sum-exp (Ring Attention, Liu et al. 2023). Unified is the one inside the other (USP, Fang
and Zhao 2024): the ulysses group first makes one longer part of the sequence, which then goes round the ring.

Masks are whole on every rank, in the order in which the model joins its sequences, and are never exchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from itertools import accumulate, pairwise

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from .backend import all_gather, attention_with_lse

# (query, key, value, mask, scale, with_lse) -> out, or (out, lse). All as the functions below say.
Kernel = Callable[..., torch.Tensor | tuple[torch.Tensor, torch.Tensor]]


@dataclass(frozen=True)
class ContextAxes:
    """The two axes that the sequence is divided over, and this rank's place on each.

    A rank's part of the sequence is number ring_rank * ulysses + ulysses_rank: a ulysses group is one stretch of it.
    """

    ring: int
    ulysses: int
    ring_rank: int
    ulysses_rank: int
    ring_group: dist.ProcessGroup | None = None
    ulysses_group: dist.ProcessGroup | None = None
    entered: Callable[[], None] = field(default=lambda: None, compare=False)  # called before each collective

    @classmethod
    def of_mesh(cls, mesh: DeviceMesh) -> ContextAxes:
        ring, ulysses = mesh["ring"], mesh["ulysses"]
        return cls(
            *(ring.size(), ulysses.size(), ring.get_local_rank(), ulysses.get_local_rank()),
            *(ring.get_group(), ulysses.get_group()),
        )

    @property
    def size(self) -> int:
        return self.ring * self.ulysses

    @property
    def rank(self) -> int:
        return self.ring_rank * self.ulysses + self.ulysses_rank


@dataclass(frozen=True)
class Tokens:
    """How many tokens of each sequence that a module joins, in its order, every rank has: [sequence][rank]."""

    lengths: tuple[tuple[int, ...], ...]

    @cached_property
    def per_rank(self) -> list[int]:
        return [sum(of_rank) for of_rank in zip(*self.lengths, strict=True)]

    @cached_property
    def total(self) -> int:
        return sum(self.per_rank)


@lru_cache(maxsize=64)  # a forward asks for the same ones in every block
def _places(tokens: Tokens, ranks: range, device: torch.device) -> torch.Tensor:
    """Where the tokens of `ranks`, rank by rank, lie in the sequences as one process would join them."""
    starts = list(accumulate((sum(one) for one in tokens.lengths), initial=0))
    found = []
    for rank in ranks:
        for start, one in zip(starts, tokens.lengths, strict=False):
            first = start + sum(one[:rank])
            found.append(torch.arange(first, first + one[rank]))
    return torch.cat(found).to(device)


def native_kernel(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float | None,
    with_lse: bool,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """PyTorch's own attention on [B, S, H, D]; with `with_lse` also the log-sum-exp [B, S, H] of every row."""
    q, k, v = (one.transpose(1, 2) for one in (query, key, value))
    if with_lse:
        out, lse = attention_with_lse(q, k, v, mask, scale)
        return out.transpose(1, 2), lse.transpose(1, 2)
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
    return out.transpose(1, 2)


def context_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float | None,
    *,
    queries: Tokens,
    keys: Tokens,
    axes: ContextAxes,
    kernel: Kernel = native_kernel,
) -> torch.Tensor:
    """What attention over the whole sequence gives for this rank's queries: [B, Sq, H, D].

    `query` [B, Sq, H, D], `key` and `value` [B, Sk, Hk, D] of this rank's tokens; H is a multiple of Hk (grouped
    queries). `mask`, additive or boolean (True takes part), is that of all tokens: [B, Sk], or broadcastable to
    [B, H, Sq, Sk]. Raises ValueError for lengths or a mask that do not fit.
    """
    _check_lengths(query, key, queries, keys, axes)
    mask = _four_dims(mask, query, queries.total, keys.total)
    heads = query.shape[2]
    if key.shape[2] < axes.ulysses:
        key, value = (_every_query_head(one, heads) for one in (key, value))
    groups = key.shape[2]
    if axes.ulysses > 1:
        if groups < axes.ulysses:
            raise ValueError(f"ulysses {axes.ulysses} cannot divide {groups} attention heads")
        mask = _heads_of_rank(mask, groups, heads // groups, axes)
        query, key, value = _tokens_for_heads(query, key, value, queries, keys, axes)
    stretch = range(axes.ring_rank * axes.ulysses, (axes.ring_rank + 1) * axes.ulysses)
    if mask is not None and mask.shape[2] > 1:
        mask = _take(mask, 2, queries, stretch)
    if axes.ring > 1:
        out = _ring(query, key, value, mask, scale, keys, axes, kernel)
    else:
        key, value = (_every_query_head(one, query.shape[2]) for one in (key, value))
        out = kernel(query, key, value, _take(mask, 3, keys, range(axes.size)), scale, False)
    assert isinstance(out, torch.Tensor)
    if axes.ulysses > 1:
        out = _heads_for_tokens(out, heads, groups, queries, axes)
    return out


# ---- checks, masks and heads


def _check_lengths(
    query: torch.Tensor, key: torch.Tensor, queries: Tokens, keys: Tokens, axes: ContextAxes
) -> None:
    for name, tensor, tokens in (("queries", query, queries), ("keys", key, keys)):
        expected = tokens.per_rank[axes.rank]
        if tensor.shape[1] != expected:
            raise ValueError(
                f"{tensor.shape[1]} {name} on rank {axes.rank} of the context axes instead of {expected}"
            )


def _four_dims(
    mask: torch.Tensor | None, query: torch.Tensor, queries: int, keys: int
) -> torch.Tensor | None:
    """The mask as [B or 1, H or 1, Sq or 1, Sk]."""
    if mask is None:
        return None
    given = tuple(mask.shape)
    batch, heads = query.shape[0], query.shape[2]
    if given == (batch, keys):  # as diffusers' native backend takes it; all others as PyTorch does
        mask = mask[:, None, None]
    mask = mask[(None,) * (4 - mask.ndim)]
    allowed = ((1, batch), (1, heads), (1, queries), (keys,))
    if mask.ndim != 4 or any(size not in one for size, one in zip(mask.shape, allowed, strict=True)):
        raise ValueError(
            f"an attention mask of the shape {given} does not fit {batch} x {heads} heads with {queries} queries "
            f"and {keys} keys"
        )
    return mask


def _take(mask: torch.Tensor | None, dim: int, tokens: Tokens, ranks: range) -> torch.Tensor | None:
    """The part of `mask` along `dim` that belongs to the tokens of `ranks`, in their order."""
    if mask is None:
        return None
    if len(tokens.lengths) == 1:  # one sequence: their tokens lie side by side
        (lengths,) = tokens.lengths
        return mask.narrow(dim, sum(lengths[: ranks.start]), sum(lengths[ranks.start : ranks.stop]))
    return mask.index_select(dim, _places(tokens, ranks, mask.device))


def _every_query_head(tensor: torch.Tensor, heads: int) -> torch.Tensor:
    """Grouped keys or values, repeated for each of their query heads."""
    per_group = heads // tensor.shape[2]
    return tensor if per_group == 1 else tensor.repeat_interleave(per_group, dim=2)


def _parts(count: int, ranks: int) -> list[int]:
    """`count` over `ranks` as evenly as whole numbers go, as torch.tensor_split divides."""
    return [count // ranks + (rank < count % ranks) for rank in range(ranks)]


def _heads_of_rank(
    mask: torch.Tensor | None, groups: int, per_group: int, axes: ContextAxes
) -> torch.Tensor | None:
    if mask is None or mask.shape[1] == 1:
        return mask
    counts = [count * per_group for count in _parts(groups, axes.ulysses)]
    return mask.narrow(1, sum(counts[: axes.ulysses_rank]), counts[axes.ulysses_rank])


# ---- ulysses


def _stretch(tokens: Tokens, axes: ContextAxes) -> list[int]:
    """Tokens of each rank of this rank's ulysses group."""
    first = axes.ring_rank * axes.ulysses
    return tokens.per_rank[first : first + axes.ulysses]


def _tokens_for_heads(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    queries: Tokens,
    keys: Tokens,
    axes: ContextAxes,
) -> list[torch.Tensor]:
    """Each rank's tokens of all heads become all tokens of each rank's heads: [B, S, h, D] for each of the three.

    In one exchange where queries and keys have the same lengths, else in two.
    """
    groups = key.shape[2]
    if _stretch(queries, axes) == _stretch(keys, axes):
        return _exchange([query, key, value], groups, _stretch(queries, axes), axes)
    return [
        *_exchange([query], groups, _stretch(queries, axes), axes),
        *_exchange([key, value], groups, _stretch(keys, axes), axes),
    ]


def _exchange(
    tensors: list[torch.Tensor], groups: int, lengths: list[int], axes: ContextAxes
) -> list[torch.Tensor]:
    batch, tokens, _, width = tensors[0].shape
    ranks = axes.ulysses
    # Whole groups of query heads go with their keys.
    heads = [[n * tensor.shape[2] // groups for n in _parts(groups, ranks)] for tensor in tensors]
    together = [sum(of_rank) for of_rank in zip(*heads, strict=True)]
    sent = tensors[0].new_empty(tokens * batch * sum(together) * width)
    sizes = [tokens * batch * count * width for count in together]
    # For every receiver a block [tokens, batch, its heads of all tensors, width]: what arrives is in order at once.
    if len(set(together)) == 1:
        blocks = sent.view(ranks, tokens, batch, together[0], width)
        offset = 0
        for tensor, counts in zip(tensors, heads, strict=True):
            part = tensor.unflatten(2, (ranks, counts[0])).permute(2, 1, 0, 3, 4)
            blocks[:, :, :, offset : offset + counts[0]].copy_(part)
            offset += counts[0]
    else:
        for receiver, block in enumerate(sent.split(sizes)):
            parts = [
                tensor.narrow(2, sum(counts[:receiver]), counts[receiver]).transpose(0, 1)
                for tensor, counts in zip(tensors, heads, strict=True)
            ]
            torch.cat(parts, dim=2, out=block.view(tokens, batch, together[receiver], width))
    own = together[axes.ulysses_rank]
    received = sent.new_empty(sum(lengths) * batch * own * width)
    axes.entered()
    dist.all_to_all_single(
        received, sent, [length * batch * own * width for length in lengths], sizes, group=axes.ulysses_group
    )
    by_token = received.view(sum(lengths), batch, own, width)
    split = by_token.split([counts[axes.ulysses_rank] for counts in heads], dim=2)
    return [one.transpose(0, 1) for one in split]


def _heads_for_tokens(
    out: torch.Tensor, heads: int, groups: int, queries: Tokens, axes: ContextAxes
) -> torch.Tensor:
    """The way back: all tokens of each rank's heads become each rank's tokens of all heads."""
    batch, _, own, width = out.shape
    lengths = _stretch(queries, axes)
    tokens = lengths[axes.ulysses_rank]
    counts = [count * (heads // groups) for count in _parts(groups, axes.ulysses)]
    sent = out.transpose(0, 1).contiguous()
    received = out.new_empty(tokens * batch * heads * width)
    sizes = [tokens * batch * count * width for count in counts]
    axes.entered()
    dist.all_to_all_single(
        received,
        sent.view(-1),
        sizes,
        [length * batch * own * width for length in lengths],
        group=axes.ulysses_group,
    )
    blocks = [
        block.view(tokens, batch, count, width)
        for block, count in zip(received.split(sizes), counts, strict=True)
    ]
    return torch.cat(blocks, dim=2).transpose(0, 1)


# ---- ring


def _ring(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float | None,
    keys: Tokens,
    axes: ContextAxes,
    kernel: Kernel,
) -> torch.Tensor:
    """Attention of `query` to the keys of every rank of the ring, which come by one after the other.

    Two parts are live at a time, whatever the degree: the one attended to, and the one on its way here.
    """
    per_rank = keys.per_rank
    chunks = [range(n * axes.ulysses, (n + 1) * axes.ulysses) for n in range(axes.ring)]
    lengths = [sum(per_rank[rank] for rank in chunk) for chunk in chunks]
    batch, _, heads, width = key.shape
    row = 2 * batch * heads * width
    here, coming = (key.new_empty(max(lengths) * row) for _ in range(2))
    own = here[: lengths[axes.ring_rank] * row].view(2, batch, key.shape[1], heads, width)
    own[0].copy_(key)
    own[1].copy_(value)
    mask = _finite(mask, query.dtype)
    merged = Merged()
    for step in range(axes.ring):
        number = (axes.ring_rank + step) % axes.ring
        following = (number + 1) % axes.ring
        under_way = []
        if step < axes.ring - 1:
            under_way = _pass_on(here[: lengths[number] * row], coming[: lengths[following] * row], axes)
        if lengths[number] and query.shape[1]:
            k, v = here[: lengths[number] * row].view(2, batch, lengths[number], heads, width)
            k, v = (_every_query_head(one, query.shape[2]) for one in (k, v))
            merged.add(*kernel(query, k, v, _take(mask, 3, keys, chunks[number]), scale, True))
        for work in under_way:
            work.wait()
        here, coming = coming, here
    return merged.result(query)


def _pass_on(here: torch.Tensor, coming: torch.Tensor, axes: ContextAxes) -> list[dist.Work]:
    """Send to the rank before, receive from the rank after. Nothing is sent where there is nothing to send."""
    group = axes.ring_group
    before, after = (axes.ring_rank - 1) % axes.ring, (axes.ring_rank + 1) % axes.ring
    operations = []
    if len(here):
        operations.append(dist.P2POp(dist.isend, here, group=group, group_peer=before))
    if len(coming):
        operations.append(dist.P2POp(dist.irecv, coming, group=group, group_peer=after))
    axes.entered()
    return dist.batch_isend_irecv(operations) if operations else []


def _finite(mask: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor | None:
    """An additive mask without infinities: a part masked as a whole then has weight zero, and is not NaN."""
    if mask is None:
        return None
    least = torch.finfo(dtype).min / 2
    if mask.dtype == torch.bool:
        return torch.zeros_like(mask, dtype=dtype).masked_fill_(~mask, least)
    return mask.to(dtype).clamp(min=least)


class Merged:
    """Partial attention over disjoint keys, merged in float32: out [B, S, H, D] weighted by lse [B, S, H].

    With w = sigmoid(l - lse) = exp(l) / (exp(l) + exp(lse)): out <- out + w * (o - out), lse <- log(exp(lse) + exp(l)).
    """

    def __init__(self) -> None:
        self.out: torch.Tensor | None = None

    def add(self, out: torch.Tensor, lse: torch.Tensor) -> None:
        lse = lse.float()
        if self.out is None:
            self.out, self.lse = out.float(), lse
            return
        weight = torch.sigmoid(lse - self.lse)[..., None]
        # In stretches of the batch and of tokens: the copy in float32 stays small.
        for mine, other, share in zip(
            self.out.split(_ROWS, dim=1), out.split(_ROWS, dim=1), weight.split(_ROWS, dim=1), strict=True
        ):
            mine.lerp_(other.float(), share)
        self.lse = torch.logaddexp(self.lse, lse)

    def result(self, query: torch.Tensor) -> torch.Tensor:
        if self.out is None:
            return torch.zeros_like(query)
        return self.out.to(query.dtype)


_ROWS = 1024


def cut_lengths(tokens: int, axes: ContextAxes) -> tuple[int, ...]:
    """Tokens of a sequence on every rank."""
    return tuple(_parts(tokens, axes.size))


def join_parts(part: torch.Tensor, dim: int, lengths: Sequence[int], axes: ContextAxes) -> torch.Tensor:
    """The whole of a tensor of which every rank has a part along `dim`: within the ulysses group, then the ring."""
    first = axes.ring_rank * axes.ulysses
    part = _gather(part, dim, lengths[first : first + axes.ulysses], axes.ulysses_group, axes.entered)
    bounds = range(0, axes.size + 1, axes.ulysses)
    stretches = [sum(lengths[start:stop]) for start, stop in pairwise(bounds)]
    return _gather(part, dim, stretches, axes.ring_group, axes.entered)


def _gather(
    part: torch.Tensor,
    dim: int,
    lengths: Sequence[int],
    group: dist.ProcessGroup | None,
    entered: Callable[[], None],
) -> torch.Tensor:
    if len(lengths) == 1:
        return part
    most = max(lengths)
    first = part.movedim(dim, 0)
    sent = first.new_zeros(most, *first.shape[1:])
    sent[: len(first)].copy_(first)
    received = sent.new_empty(len(lengths) * most, *first.shape[1:])
    entered()
    all_gather(received, sent, group=group)
    if min(lengths) == most:
        whole = received
    else:
        whole = torch.cat([one[:n] for one, n in zip(received.split(most), lengths, strict=True)])
    return whole.movedim(0, dim)
