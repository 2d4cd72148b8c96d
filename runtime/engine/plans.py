"""Which parameter of a transformer is split how under the tensor axis, for the model at hand.

    upstream's plan (diffusers `_tp_plan`) or a user's own       which Linears, in which style
      else the model's structure (`structure.py`)
    + the structure                                              in which units: whole heads, hidden features
    + what is left in the blocks and large (modulation)          split by columns, its output gathered

A plan is for one config: which modules exist, and how wide they are, is read from the model itself, which needs no
weights for it.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from diffusers.hooks import tensor_parallel as upstream
from torch import nn

from ..plan_text import PlanEntry, read_plan_text
from ..spec import Refusal
from .structure import (
    COLWISE,
    GATHERED,
    ROWWISE,
    SPLIT_INPUT,
    Attention,
    Split,
    Structure,
    hidden,
    read_structure,
    submodule,
)
from .tensor import (
    AcrossHeadsNorm,
    Block,
    Ranks,
    Shard,
    gather_output,
    slice_heads,
    slice_input,
    sum_output,
)

# What is worth a collective: layers of one kind that hold this part of the model's parameters. Outside the blocks it
# takes more: such a layer saves little, and may see every token (Wan 2.2's time_proj: a gigabyte for one gather).
LARGE_IN_BLOCKS, LARGE = 0.004, 0.03
# They hand their Linears' weights to torch's multi-head attention; a subclass of Linear may be one of those too.
_READERS = ("HunyuanDiTAttentionPool", "MultiheadAttention")


@dataclass(frozen=True)
class TensorPlan:
    """What of a model is split, by module path; everything not named here is whole on every rank."""

    splits: Mapping[str, Split]
    norms: Mapping[str, Block]
    per_head: Mapping[str, Block]
    attentions: Mapping[str, Attention]
    rotary: Mapping[str, tuple[int, int | None]]
    counts: Mapping[str, Mapping[str, Block]]
    depthwise: Mapping[str, tuple[Block, ...]]
    experts: Mapping[str, Block]

    def shards(self, model: nn.Module) -> dict[str, Shard]:
        """Parameter name -> how it is split. A row-split module's bias is whole: the first rank adds it."""
        found: dict[str, Shard] = {}
        for path, split in self.splits.items():
            found[f"{path}.weight"] = Shard(split.dim, split.blocks)
            if split.dim == 0 and getattr(model.get_submodule(path), "bias", None) is not None:
                found[f"{path}.bias"] = Shard(0, split.blocks)
        for path, blocks in (*((p, (b,)) for p, b in self.norms.items()), *self.depthwise.items()):
            for name, _ in model.get_submodule(path).named_parameters():
                found[f"{path}.{name}"] = Shard(0, blocks)
        found |= {name: Shard(0, (block,)) for name, block in self.per_head.items()}
        for path, block in self.experts.items():
            found[f"{path}.gate_up_proj"] = Shard(2, (block, block))
            found[f"{path}.down_proj"] = Shard(1, (block,))
        return found

    def blocks(self) -> Iterable[tuple[str, Block]]:
        """Every block of every split, with the module it belongs to."""
        for path, split in self.splits.items():
            for block in split.blocks:
                yield path, block
        yield from self.experts.items()


def tensor_plan(model: nn.Module, shares: Sequence[int], text: str = "") -> TensorPlan:
    """The plan for `model` over ranks of these shares. `text` is a user's own plan, "" for the one that fits.

    Raises Refusal for a plan that the model or the number of ranks cannot follow. Works without weights.
    """
    structure = read_structure(model)
    own = getattr(model, "_tp_plan", None)
    if text:
        splits = _follow(model, read_plan_text(text), structure)
        _check_partners(splits, structure)
    else:
        splits = _follow(model, _upstream_entries(model, own), structure) if own else {}
        splits = {**structure.splits, **splits}
        splits |= _large_rest(model, splits, len(shares))
    plan = _with_repairs(splits, structure)
    _check_degree(plan, len(shares))
    return plan


def apply_plan(model: nn.Module, plan: TensorPlan, ranks: Ranks) -> None:
    """Make `model`, whose planned parameters are this rank's parts, compute with the other ranks."""
    for path, split in plan.splits.items():
        module, shard = model.get_submodule(path), Shard(split.dim, split.blocks)
        _tell_sizes(module)
        if split.style in (ROWWISE, SPLIT_INPUT):
            sum_output(model, path, ranks)
        if split.style == SPLIT_INPUT:
            slice_input(model.get_submodule(path), shard, ranks)
        if split.style == GATHERED:
            gather_output(module, shard, ranks)
    for path, blocks in plan.depthwise.items():
        module = model.get_submodule(path)
        _tell_sizes(module)
        module.groups = Shard(0, blocks).length(ranks.rank, ranks.shares)
    for path in plan.experts:
        sum_output(model, path, ranks)
    for path, block in plan.norms.items():
        owner, _, name = path.rpartition(".")
        norm = model.get_submodule(path)
        setattr(model.get_submodule(owner), name, AcrossHeadsNorm(norm, block.size, ranks))
    for path, attention in plan.attentions.items():
        _cut_counts(model.get_submodule(path), attention.counts, ranks)
    for path, counts in plan.counts.items():
        _cut_counts(model.get_submodule(path), counts, ranks)
    for path, (heads, dim) in plan.rotary.items():
        slice_heads(model.get_submodule(path), heads, dim, ranks)


def _cut_counts(module: nn.Module, counts: Mapping[str, Block], ranks: Ranks) -> None:
    for name, block in counts.items():
        start, stop = block.ranges(ranks.shares)[ranks.rank]
        setattr(module, name, stop - start)


def _tell_sizes(module: nn.Module) -> None:
    """Sizes that a module tells of itself, after its weight was cut."""
    if isinstance(module, nn.Linear):
        module.out_features, module.in_features = module.weight.shape
    elif isinstance(module, nn.Conv2d):
        module.out_channels = module.weight.shape[0]
        module.in_channels = module.weight.shape[1] * (1 if module.groups == 1 else module.weight.shape[0])


# ---- from entries to splits


def _upstream_entries(model: nn.Module, plan: Mapping[str, object]) -> list[PlanEntry]:
    """diffusers' `_tp_plan` in our terms; packed blocks that a Linear carries itself are looked up there."""
    entries = []
    for key, style in plan.items():
        if isinstance(style, str):
            # A config may have none of a kind of block: no layer of it, no key.
            entries += [PlanEntry(key, style)] if _found(model, key) else []
            continue
        is_column = isinstance(style, upstream.PackedColwiseParallel)
        name = "_tp_packed_col_blocks" if is_column else "_tp_packed_row_blocks"
        for path in _found(model, key):
            blocks = getattr(style, "blocks", None) or getattr(model.get_submodule(path), name)
            entries.append(PlanEntry(path, COLWISE if is_column else ROWWISE, tuple(blocks)))
    return entries


def _matches(model: nn.Module, key: str) -> list[str]:
    """The module paths a plan's key stands for. Raises Refusal when it matches nothing, or a `*` is misplaced."""
    owner = key.partition("*")[0].removesuffix(".")
    if "*" in key and _has(model, owner):
        elements = model.get_submodule(owner)
        if not isinstance(elements, nn.ModuleList):
            raise Refusal(
                f"The plan's key '{key}' has its * in the wrong place.",
                f"'{owner}' is a {type(elements).__name__}, and a * stands for the elements of a ModuleList.",
                f"Works here: {_nearest(model, key)}.",
            )
    return _found(model, key) or _no_match(model, key)


def _found(model: nn.Module, key: str) -> list[str]:
    before, star, after = key.partition("*")
    if not star:
        return [key] if _has(model, key) else []
    owner = before.removesuffix(".")
    count = len(model.get_submodule(owner)) if _has(model, owner) else 0
    return [path for number in range(count) if _has(model, path := f"{owner}.{number}{after}")]


def _has(model: nn.Module, path: str) -> bool:
    return submodule(model, path) is not None


def _no_match(model: nn.Module, key: str) -> list[str]:
    raise Refusal(
        f"The plan's key '{key}' matches nothing in {type(model).__name__}.",
        "Every key must name modules of the model, or a part of it would stay whole without a word.",
        f"Works here: {_nearest(model, key)}.",
    )


def _nearest(model: nn.Module, key: str) -> str:
    """Keys of this model that look like `key`."""
    import difflib

    keys = sorted({_pattern(path) for path, module in model.named_modules() if isinstance(module, nn.Linear)})
    return ", ".join(difflib.get_close_matches(key, keys, n=3, cutoff=0.3) or keys[:3])


def _pattern(path: str) -> str:
    """A module path with its first number as *, as a plan names it."""
    return re.sub(r"\.\d+(\.|$)", r".*\1", path, count=1)


def _follow(model: nn.Module, entries: Iterable[PlanEntry], structure: Structure) -> dict[str, Split]:
    splits: dict[str, Split] = {}
    for entry in entries:
        for path in _matches(model, entry.key):
            if path in splits:
                raise Refusal(
                    f"The plan names '{path}' twice.",
                    f"The key '{entry.key}' and another both match it.",
                    "Works here: one key for each module.",
                )
            splits[path] = _split(model, path, entry, structure)
    return splits


def _split(model: nn.Module, path: str, entry: PlanEntry, structure: Structure) -> Split:
    module = model.get_submodule(path)
    if not isinstance(module, nn.Linear):
        raise Refusal(
            f"The plan splits '{path}', a {type(module).__name__}.",
            "Only Linear layers are split by a plan; norms and embeddings stay whole.",
            "Works here: leave that key out.",
        )
    if _is_read(model, path):
        raise Refusal(
            f"The plan splits '{path}'.",
            "The layer around it reads its weight without calling it, so no rank would get the others' part.",
            "Works here: leave that key out.",
        )
    bare = Split(entry.style, ())
    size = module.weight.shape[bare.dim]
    blocks = entry.blocks or (size,)
    total = sum(blocks)
    if size % total:
        raise Refusal(
            f"The plan cuts '{path}' into blocks {list(blocks)}, which do not divide its {size} "
            f"{'inputs' if bare.dim else 'outputs'}.",
            f"Blocks are sizes that sum to {size}, or proportions whose sum ({total}) divides it.",
            f"Works here: blocks that sum to {size}.",
        )
    sizes = [block * size // total for block in blocks]
    known = structure.splits.get(path)
    if known and known.dim == bare.dim and [block.size for block in known.blocks] == sizes:
        return Split(entry.style, known.blocks)
    return Split(entry.style, tuple(hidden(size) for size in sizes))


def _is_read(model: nn.Module, path: str) -> bool:
    """Whether the weight at `path` is used without a call of its module: no hook would run."""
    owner = model.get_submodule(path.rpartition(".")[0])
    return type(owner).__name__ in _READERS or type(model.get_submodule(path)) not in (nn.Linear, nn.Conv2d)


def _check_partners(splits: Mapping[str, Split], structure: Structure) -> None:
    """Refuse a user's plan that splits one end of a block and not the other: it would run, and be wrong."""
    alone = (SPLIT_INPUT, GATHERED)
    known = {path for group in structure.partners for path in group}
    for group in structure.partners:
        inside = [path for path in group if path in splits and splits[path].style not in alone]
        if not inside:
            continue
        for path in sorted(group, key=lambda path: path not in splits):
            expected, found = structure.splits[path], splits.get(path)
            sizes = [block.size for block in expected.blocks]
            if found and found.style == expected.style and [b.size for b in found.blocks] == sizes:
                continue
            other = next(one for one in (*inside, *group) if one != path)
            style = expected.style if len(sizes) == 1 else f"packed_{expected.style} {sizes}"
            raise Refusal(
                f"The plan's '{path}' must be {style}.",
                f"It works together with '{other}': one without the other gives wrong pictures.",
                f'Works here: "{_pattern(path)}": '
                + (f'"{style}".' if len(sizes) == 1 else f'{{"packed_{expected.style}": {sizes}}}.'),
            )
    for path, split in splits.items():
        if path not in known and split.style not in alone:
            raise Refusal(
                f"The plan's '{path}' cannot be {split.style}.",
                "No layer is known that works with the other side of it, so its result could not be verified.",
                f'Works here: "colwise_gathered" or "rowwise_split_input" for "{_pattern(path)}".',
            )


def _large_rest(model: nn.Module, splits: Mapping[str, Split], degree: int) -> dict[str, Split]:
    """Layers that are left and large, those of one kind taken together: modulation, mostly.

    Their output is gathered, so whatever the model does with it stays right.
    """
    total = sum(parameter.numel() for parameter in model.parameters())
    kinds: dict[str, list[str]] = defaultdict(list)
    for path, module in model.named_modules():
        is_dense = isinstance(module, nn.Linear) or (isinstance(module, nn.Conv2d) and module.groups == 1)
        if is_dense and path not in splits and not _is_read(model, path):
            kinds[re.sub(r"\.\d+(?=\.|$)", ".*", path)].append(path)
    found = {}
    for kind, paths in kinds.items():
        weights = [model.get_submodule(path).weight for path in paths]
        limit = LARGE_IN_BLOCKS if ".*" in kind else LARGE
        if sum(weight.numel() for weight in weights) < limit * total:
            continue
        for path, weight in zip(paths, weights, strict=True):
            block = hidden(weight.shape[0])
            if block.units >= degree:
                found[path] = Split(GATHERED, (block,))
    return found


def _with_repairs(splits: Mapping[str, Split], structure: Structure) -> TensorPlan:
    """Add what must change beside the weights: norms, head counts and tables of the modules that are split."""

    def is_split(path: str) -> bool:
        return any(
            s.startswith(f"{path}.") and split.style == COLWISE and s in structure.splits
            for s, split in splits.items()
        )

    attentions = {path: one for path, one in structure.attentions.items() if is_split(path)}
    return TensorPlan(
        splits=splits,
        norms={path: b for path, b in structure.norms.items() if path.rpartition(".")[0] in attentions},
        per_head={name: b for name, b in structure.per_head.items() if name.rpartition(".")[0] in attentions},
        attentions=attentions,
        rotary={
            path: table for path, table in structure.rotary.items() if _turns(path, structure, attentions)
        },
        counts={path: counts for path, counts in structure.counts.items() if is_split(path)},
        depthwise={p: b for p, b in structure.depthwise.items() if is_split(p.rpartition(".")[0])},
        experts=structure.experts,
    )


def _turns(rotary: str, structure: Structure, attentions: Mapping[str, Attention]) -> bool:
    """Whether the attentions that take this table are split: all of them, or none."""
    users = structure.turned[rotary]
    split = [path for path in users if path in attentions]
    whole = [path for path in users if path not in attentions]
    if split and whole:
        raise Refusal(
            f"The plan splits the heads of '{split[0]}' and not those of '{whole[0]}'.",
            f"Both take one table from '{rotary}', which has either all heads or this rank's.",
            f"Works here: the same styles for the layers of '{_pattern(whole[0])}' as for '{split[0]}'.",
        )
    return bool(split)


def _check_degree(plan: TensorPlan, degree: int) -> None:
    """Refuse more ranks than something to be split has units, before any weight is read."""
    fewest = min(plan.blocks(), key=lambda one: one[1].units, default=None)
    if fewest is None or fewest[1].units >= degree:
        return
    path, block = fewest
    raise Refusal(
        f"tensor {degree} cannot divide '{path}'.",
        f"It has {block.units} units that stay whole (attention heads, or features), and every rank needs one.",
        f"Works instead: tensor {block.units}.",
    )
