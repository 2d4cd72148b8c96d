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

from torch import nn

from ..plan_text import read_plan_text
from ..spec import Refusal
from .plan_entries import check_partners, follow, is_read, pattern, upstream_entries
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
)
from .tensor import (
    AcrossHeadsNorm,
    Block,
    Ranks,
    Shard,
    gather_output,
    hold_part,
    slice_heads,
    slice_input,
)

# What is worth a collective: layers of one kind that hold this part of the model's parameters. Outside the blocks it
# takes more: such a layer saves little, and may see every token (Wan 2.2's time_proj: a gigabyte for one gather).
LARGE_IN_BLOCKS, LARGE = 0.004, 0.03


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
        splits = follow(model, read_plan_text(text), structure)
        check_partners(splits, structure)
    else:
        splits = follow(model, upstream_entries(model, own), structure) if own else {}
        splits = {**structure.splits, **splits}
        splits |= _large_rest(model, splits, len(shares))
    plan = _with_repairs(splits, structure)
    _check_degree(plan, len(shares))
    return plan


def apply_plan(model: nn.Module, plan: TensorPlan, ranks: Ranks) -> None:
    """Make `model`, whose planned parameters are this rank's parts, compute with the other ranks."""
    for path, split in plan.splits.items():
        shard = Shard(split.dim, split.blocks)
        _tell_sizes(model.get_submodule(path))
        hold_part(model, path, ranks if split.style in (ROWWISE, SPLIT_INPUT) else None)
        if split.style == SPLIT_INPUT:
            slice_input(model.get_submodule(path), shard, ranks)
        if split.style == GATHERED:
            gather_output(model.get_submodule(path), shard, ranks)
    for path, blocks in plan.depthwise.items():
        module = model.get_submodule(path)
        _tell_sizes(module)
        module.groups = Shard(0, blocks).length(ranks.rank, ranks.shares)
    for path in plan.experts:
        hold_part(model, path, ranks)
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


def _large_rest(model: nn.Module, splits: Mapping[str, Split], degree: int) -> dict[str, Split]:
    """Layers that are left and large, those of one kind taken together: modulation, mostly.

    Their output is gathered, so whatever the model does with it stays right.
    """
    total = sum(parameter.numel() for parameter in model.parameters())
    kinds: dict[str, list[str]] = defaultdict(list)
    for path, module in model.named_modules():
        is_dense = isinstance(module, nn.Linear) or (isinstance(module, nn.Conv2d) and module.groups == 1)
        if is_dense and path not in splits and not is_read(model, path):
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
            f"Works here: the same styles for the layers of '{pattern(whole[0])}' as for '{split[0]}'.",
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
