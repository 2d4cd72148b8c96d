"""From a plan's entries, upstream's or a user's own, to the modules of the model at hand, and what is wrong with them.

Errors name the key, the reason and the mend; all come before a weight is read.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping

from diffusers.hooks import tensor_parallel as upstream
from torch import nn

from ..plan_text import PlanEntry
from ..spec import Refusal
from .structure import COLWISE, GATHERED, ROWWISE, SPLIT_INPUT, Split, Structure, hidden, submodule

# They hand their Linears' weights to torch's multi-head attention; a subclass of Linear may be one of those too.
_READERS = ("HunyuanDiTAttentionPool", "MultiheadAttention")


def upstream_entries(model: nn.Module, plan: Mapping[str, object]) -> list[PlanEntry]:
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
    keys = sorted({pattern(path) for path, module in model.named_modules() if isinstance(module, nn.Linear)})
    return ", ".join(difflib.get_close_matches(key, keys, n=3, cutoff=0.3) or keys[:3])


def pattern(path: str) -> str:
    """A module path with its first number as *, as a plan names it."""
    return re.sub(r"\.\d+(\.|$)", r".*\1", path, count=1)


def follow(model: nn.Module, entries: Iterable[PlanEntry], structure: Structure) -> dict[str, Split]:
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
    if is_read(model, path):
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


def is_read(model: nn.Module, path: str) -> bool:
    """Whether the weight at `path` is used without a call of its module: no hook would run."""
    owner = model.get_submodule(path.rpartition(".")[0])
    return type(owner).__name__ in _READERS or type(model.get_submodule(path)) not in (nn.Linear, nn.Conv2d)


def check_partners(splits: Mapping[str, Split], structure: Structure) -> None:
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
                f'Works here: "{pattern(path)}": '
                + (f'"{style}".' if len(sizes) == 1 else f'{{"packed_{expected.style}": {sizes}}}.'),
            )
    for path, split in splits.items():
        if path not in known and split.style not in alone:
            raise Refusal(
                f"The plan's '{path}' cannot be {split.style}.",
                "No layer is known that works with the other side of it, so its result could not be verified.",
                f'Works here: "colwise_gathered" or "rowwise_split_input" for "{pattern(path)}".',
            )
