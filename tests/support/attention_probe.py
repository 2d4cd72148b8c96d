"""Attention over divided sequences on the ranks of a torchrun, against PyTorch's on the whole tensors of one process.

Argument: the seed that shapes, masks and tensors are drawn from. Started with four ranks, of which two layouts make two
groups of two each. Emits a row for every case, for every join and for every call that must raise.
"""

from __future__ import annotations

import datetime
import math
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch.nn.functional import scaled_dot_product_attention

from runtime.engine.attention import ContextAxes, Tokens, context_attention, cut_lengths, join_parts
from runtime.engine.mesh import build_mesh
from runtime.spec import ParallelSpec
from tests.support.torchrun import emit

# Where fewer than all ranks divide the sequence, every replica does the same.
LAYOUTS = (
    ParallelSpec(replica=2, ulysses=2),
    ParallelSpec(replica=2, ring=2),
    ParallelSpec(ulysses=4),
    ParallelSpec(ring=4),
    ParallelSpec(ulysses=2, ring=2),
)
CASES_PER_LAYOUT = 60
MASKS = (
    *("none", "keys bool", "keys additive", "keys -inf", "a few keys", "a few keys additive"),
    *("heads bool", "heads additive", "queries bool", "queries -inf", "two-dimensional", "all", "all bool"),
)
TOLERANCE = 5e-6  # of max_rel in fp32
BFLOAT16 = (
    2 * 2**-8
)  # in bf16, above the error of one process: partial results and the merged one are rounded too


@dataclass(frozen=True)
class Case:
    """One attention: the lengths of the sequences that its queries and keys are joined of, in their order."""

    queries: tuple[int, ...]
    keys: tuple[int, ...]
    heads: int
    groups: int  # of heads that share keys
    mask: str = "none"
    scale: float | None = None
    bfloat16: bool = False
    batch: int = 2
    width: int = 8


@dataclass(frozen=True)
class Whole:
    """The tensors as one process has them: [B, S, H, D], and a mask in the shape that the model hands over."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    mask: torch.Tensor | None


def drawn_case(draw: random.Random, ulysses: int) -> Case:
    sequences = tuple(draw.choice((1, 2, 3, 5, 8, 13, 27)) for _ in range(draw.choice((1, 2, 2, 3))))
    groups = draw.choice((1, 2, 3, 4, 5, 7, 9))
    per_group = draw.choice((1, 1, 2, 3))
    if groups * per_group < ulysses:
        groups = ulysses
    return Case(
        # Joint attention, or some of the sequences to all of them.
        queries=sequences if draw.random() < 0.6 else sequences[: draw.randint(1, len(sequences))],
        keys=sequences,
        heads=groups * per_group,
        groups=groups,
        mask=draw.choice(MASKS),
        scale=draw.choice((None, None, 0.2)),
        bfloat16=draw.random() < 0.2,
    )


def named_cases() -> Iterator[Case]:
    """What must be among those drawn."""
    for mask in MASKS:  # text, a picture, and something of a single token
        yield Case((3, 29, 1), (3, 29, 1), heads=5, groups=5, mask=mask)
    yield Case((1,), (1,), heads=4, groups=4)  # three ranks have nothing
    yield Case((3,), (3,), heads=4, groups=4, mask="keys bool")
    yield Case((2,), (2, 21), heads=4, groups=4, mask="queries bool")
    yield Case((21,), (2,), heads=4, groups=4, mask="keys -inf")
    yield Case((3, 29), (3, 29), heads=6, groups=2, mask="heads additive")  # fewer groups than four ranks
    yield Case((3, 29), (3, 29), heads=15, groups=5, mask="heads bool")  # groups that no degree divides
    yield Case((3, 29), (3, 29), heads=15, groups=5, mask="all", bfloat16=True)


def tensors(case: Case, seed: int) -> Whole:
    generator = torch.Generator().manual_seed(seed)
    dtype = torch.bfloat16 if case.bfloat16 else torch.float32

    def normal(tokens: int, heads: int) -> torch.Tensor:
        drawn = torch.randn(case.batch, tokens, heads, case.width, generator=generator)
        return (1.5 * drawn).to(dtype)

    queries, keys = sum(case.queries), sum(case.keys)
    return Whole(
        normal(queries, case.heads),
        normal(keys, case.groups),
        normal(keys, case.groups),
        drawn_mask(case, queries, keys, generator, dtype),
    )


def drawn_mask(
    case: Case, queries: int, keys: int, generator: torch.Generator, dtype: torch.dtype
) -> torch.Tensor | None:
    """Every row leaves at least one key."""
    if case.mask == "none":
        return None
    shape = {
        "keys": (case.batch, 1, 1, keys),
        "a": (case.batch, 1, 1, keys),
        "heads": (1, case.heads, 1, keys),
        "queries": (case.batch, 1, queries, keys),
        "two-dimensional": (case.batch, keys),
        "all": (case.batch, case.heads, queries, keys),
    }[case.mask.split()[0]]
    noise = torch.rand(shape, generator=generator)
    kept = noise < 0.5
    if case.mask.startswith("a few"):  # of the parts of most ranks nothing is left
        kept &= torch.arange(keys) < 2
    kept |= noise == noise.amin(-1, keepdim=True)
    if case.mask.endswith("-inf"):
        return torch.zeros(shape, dtype=dtype).masked_fill_(~kept, float("-inf"))
    if case.mask in ("a few keys additive", "heads additive", "keys additive", "all"):
        bias = torch.randn(shape, generator=generator)
        return torch.where(kept, bias, torch.finfo(dtype).min).to(dtype)
    return kept


def one_process(case: Case, whole: Whole) -> torch.Tensor:
    """[B, Sq, H, D]."""
    mask = whole.mask
    if mask is not None and mask.ndim == 2:
        mask = mask[:, None, None]
    query, key, value = (one.transpose(1, 2) for one in (whole.query, whole.key, whole.value))
    key, value = (one.repeat_interleave(case.heads // case.groups, dim=1) for one in (key, value))
    return scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=case.scale).transpose(1, 2)


def part(tensor: torch.Tensor, dim: int, lengths: Sequence[int], axes: ContextAxes) -> torch.Tensor:
    """This rank's tokens of sequences that are joined along `dim`."""
    of_rank = [one.tensor_split(axes.size, dim)[axes.rank] for one in tensor.split(list(lengths), dim)]
    return torch.cat(of_rank, dim)


def divided(case: Case, whole: Whole, axes: ContextAxes) -> torch.Tensor:
    return context_attention(
        part(whole.query, 1, case.queries, axes),
        part(whole.key, 1, case.keys, axes),
        part(whole.value, 1, case.keys, axes),
        whole.mask,
        case.scale,
        queries=Tokens(tuple(cut_lengths(length, axes) for length in case.queries)),
        keys=Tokens(tuple(cut_lengths(length, axes) for length in case.keys)),
        axes=axes,
    )


def local(case: Case, whole: Whole, axes: ContextAxes) -> torch.Tensor:
    """What this rank's queries would get from its own keys alone."""
    mask = whole.mask
    if mask is not None:
        mask = mask[:, None, None] if mask.ndim == 2 else mask
        mask = part(mask, 3, case.keys, axes)
        mask = part(mask, 2, case.queries, axes) if mask.shape[2] > 1 else mask
    own = Whole(
        part(whole.query, 1, case.queries, axes),
        *(part(one, 1, case.keys, axes) for one in (whole.key, whole.value)),
        mask,
    )
    return one_process(case, own).nan_to_num()


def compare(case: Case, seed: int, axes: ContextAxes) -> dict[str, float]:
    whole = tensors(case, seed)
    # In bf16 too the reference is in fp32, from which one process is some way off.
    exact = replace(
        whole,
        **{name: getattr(whole, name).float() for name in ("query", "key", "value")},
        mask=whole.mask if whole.mask is None or whole.mask.dtype == torch.bool else whole.mask.float(),
    )
    expected = one_process(case, exact)
    most = expected.abs().max()

    def off(found: torch.Tensor) -> float:
        wanted = part(expected, 1, case.queries, axes)
        assert found.shape == wanted.shape
        return ((found.float() - wanted).abs().max() / most).item() if wanted.numel() else 0.0

    of_one = ((one_process(case, whole).float() - expected).abs().max() / most).item()
    unmasked = (one_process(case, replace(exact, mask=None)) - expected).abs().max() / most
    figures = torch.tensor([off(divided(case, whole, axes)), off(local(case, exact, axes))])
    figures = figures.nan_to_num(nan=math.inf)  # which a maximum could lose
    dist.all_reduce(figures, op=dist.ReduceOp.MAX)
    max_rel, of_local = figures.tolist()
    return {
        "max_rel": max_rel,
        "allowed": of_one + BFLOAT16 if case.bfloat16 else TOLERANCE,
        "no_mask": unmasked.item(),
        "local": of_local,
    }


def joins(draw: random.Random, axes: ContextAxes) -> list[str]:
    """Joins that are not what was cut, bit by bit."""
    wrong = []
    for length in (1, 2, 3, 4, 11, 16, 29):
        dim, dtype = draw.choice((0, 1, 2, -1)), draw.choice((torch.float32, torch.bfloat16, torch.int64))
        shape = [2, 3, 4]
        shape[dim] = length
        whole = torch.arange(math.prod(shape)).view(shape).to(dtype)
        mine = whole.tensor_split(axes.size, dim)[axes.rank]
        joined = join_parts(mine, dim, cut_lengths(length, axes), axes)
        if joined.dtype != dtype or not torch.equal(joined, whole):
            wrong.append(f"{length} along {dim} of {dtype}")
    return wrong


def faulty_calls(axes: ContextAxes) -> dict[str, Callable[[], torch.Tensor]]:
    good = Case((3, 29), (3, 29), heads=4, groups=4, mask="keys bool")
    whole = tensors(good, 0)
    assert whole.mask is not None
    longer = Case((3, 29), (3, 30), heads=4, groups=4)
    few = Case((3, 29), (3, 29), heads=axes.ulysses - 1, groups=axes.ulysses - 1)
    calls: dict[str, Callable[[], torch.Tensor]] = {
        "a mask for other keys": lambda: divided(good, replace(whole, mask=whole.mask[..., 1:]), axes),
        "a mask for other queries": lambda: divided(
            good, replace(whole, mask=whole.mask.expand(-1, -1, 7, -1)), axes
        ),
        "a mask for other heads": lambda: divided(
            good, replace(whole, mask=whole.mask.expand(-1, 3, -1, -1)), axes
        ),
        "a mask for another batch": lambda: divided(
            good, replace(whole, mask=whole.mask.repeat(2, 1, 1, 1)), axes
        ),
        "a mask of five dimensions": lambda: divided(good, replace(whole, mask=whole.mask[None]), axes),
        "more keys than were said": lambda: _said(good, longer, axes, keys=True),
        "fewer queries than were said": lambda: _said(good, longer, axes, keys=False),
    }
    if axes.ulysses > 1:
        calls["fewer heads than ulysses ranks"] = lambda: divided(few, tensors(few, 0), axes)
    return calls


def _said(given: Case, longer: Case, axes: ContextAxes, keys: bool) -> torch.Tensor:
    """Every rank has a token more of its keys, or one less of its queries, than it says."""
    whole = tensors(given, 0)
    query, key = part(whole.query, 1, given.queries, axes), part(whole.key, 1, given.keys, axes)
    if keys:
        key = torch.cat([key, key[:, :1]], dim=1)
    else:
        query = query[:, 1:]
    tokens = Tokens(tuple(cut_lengths(length, axes) for length in given.queries))
    return context_attention(query, key, key, None, None, queries=tokens, keys=tokens, axes=axes)


def main() -> None:
    torch.set_grad_enabled(False)
    torch.set_num_threads(1)
    dist.init_process_group("cpu:gloo", timeout=datetime.timedelta(seconds=60))
    seed = int(sys.argv[1])
    for layout in LAYOUTS:
        draw = random.Random(seed)  # the same cases in every layout
        axes = ContextAxes.of_mesh(build_mesh(layout, "cpu"))
        name = f"ulysses {axes.ulysses} x ring {axes.ring}"
        cases = [*named_cases(), *(drawn_case(draw, axes.ulysses) for _ in range(CASES_PER_LAYOUT))]
        for number, case in enumerate(cases):
            if case.heads < axes.ulysses:
                continue
            found = compare(case, seed + number, axes)
            _row("attention", name, case=repr(case), mask=case.mask, keys=sum(case.keys), **found)
        _row("join", name, wrong=joins(draw, axes))
        for what, call in faulty_calls(axes).items():
            _row("fault", name, what=what, **_raised(call))
        again = compare(cases[0], seed, axes)
        _row("afterwards", name, **again)
    dist.destroy_process_group()


def _raised(call: Callable[[], torch.Tensor]) -> dict[str, object]:
    """On how many ranks the call raised ValueError, and what it said on the first."""
    said = ""
    try:
        call()
    except ValueError as error:
        said = str(error)
    count = torch.tensor(int(bool(said)))
    dist.all_reduce(count)
    return {"ranks": int(count), "said": said}


def _row(kind: str, layout: str, **values: object) -> None:
    if dist.get_rank() == 0:
        emit({"kind": kind, "layout": layout, **values})


if __name__ == "__main__":
    main()
