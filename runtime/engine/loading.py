"""Fills a transformer from a checkpoint's sources, each rank its own slices only, straight to its device.

No rank ever holds a full planned weight: a slice is read through the page cache, copied once to the device in the
dtype asked for, and forgotten. Everything that can be wrong with a checkpoint is refused before the first byte is
read; between tensors a load can be cancelled.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from math import prod
from typing import Any, NamedTuple

import diffusers.models.transformers
import torch
from accelerate import init_empty_weights
from diffusers import ModelMixin

from ..safetensors_header import printable
from ..spec import Cancelled, Refusal
from .checkpoints.source import Sources, WeightSource
from .pulse import Pulse
from .tensor import Shard, shard_indices

STRIP = 1 << 25


class SliceRead(NamedTuple):
    """One tensor as this rank read it: elements in the file, elements read."""

    name: str
    stored: int
    read: int


def transformer_class(name: str) -> type:
    """The diffusers transformer called `name`; nothing else is ever instantiated. Raises Refusal."""
    found = getattr(diffusers.models.transformers, name, None) if isinstance(name, str) else None
    if isinstance(found, type) and issubclass(found, ModelMixin):
        return found
    raise Refusal(
        f"There is no transformer called '{printable(name)}'.",
        "Only diffusers' own transformer classes are ever loaded.",
        "Works here: the model as it was published.",
    )


def empty_model(class_name: str, config: Mapping[str, Any]) -> torch.nn.Module:
    """The model of `config` without memory for its weights; computed buffers are real."""
    with init_empty_weights(include_buffers=False):
        model = transformer_class(class_name).from_config(dict(config))  # type: ignore[attr-defined]
    return model.eval().requires_grad_(False)


def check_sources(model: torch.nn.Module, sources: Sources) -> None:
    """Refuse a checkpoint that lacks a parameter, has one too many, or one of another shape. Reads nothing."""
    expected = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    for name, source in sources.items():
        if name in expected and source.shape != expected[name]:
            raise Refusal(
                f"{source.where} has the shape {_size(source.shape)}.",
                f"'{name}' of this {type(model).__name__} has the shape {_size(expected[name])}.",
                "Download the file again, with the config that was published beside it.",
            )
    missing = sorted(set(expected) - set(sources))
    if missing:
        raise Refusal(
            f"The weight files lack {_count(missing).rstrip(',')}.",
            f"{type(model).__name__} needs every one of its {len(expected)} tensors.",
            "Download the model's files again; all parts of a model in several files are needed.",
        )
    ignored = getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()
    extra = sorted(
        name for name in set(sources) - set(expected) if not any(re.search(word, name) for word in ignored)
    )
    if extra:
        raise Refusal(
            f"The weight files hold {_count(extra)} too many: {sources[extra[0]].where}.",
            f"This {type(model).__name__} has no place for it, and leaving it out could change the picture.",
            "Use the file as it was published; extensions such as LoRA or IP-Adapter are files of their own.",
        )


def _size(shape: Sequence[int]) -> str:
    return " x ".join(map(str, shape)) or "of one number"


def _count(names: Sequence[str]) -> str:
    first = printable(names[0])
    return f"'{first}'" if len(names) == 1 else f"{len(names)} tensors, such as '{first}',"


def bytes_to_read(sources: Sources, shards: Mapping[str, Shard], rank: int, shares: Sequence[int]) -> int:
    """Bytes of the files that `rank` reads."""
    total = 0
    for name, source in sources.items():
        elements = prod(source.shape)
        if name in shards:
            dim = shards[name].dim
            elements = elements // source.shape[dim] * shards[name].length(rank, shares)
        total += elements * source.item_bytes
    return total


def read_weights(
    model: torch.nn.Module,
    sources: Sources,
    shards: Mapping[str, Shard],
    *,
    rank: int,
    shares: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
    on_bytes: Callable[[int], None],
    cancelled: Callable[[], bool],
    on_slice: Callable[[SliceRead], None] | None = None,
    pulse: Pulse | None = None,
) -> None:
    """Fill `model` from `sources`: planned parameters with this rank's part, all others whole.

    `on_bytes` gets the bytes of the file read after each tensor. Tables that the model computes itself go to `device`
    as they are. Raises Cancelled.
    """
    parameters = {name for name, _ in model.named_parameters()}
    buffers = dict(model.named_buffers())
    keep = tuple(getattr(model, "_keep_in_fp32_modules", None) or ())

    def read(nbytes: int) -> None:
        if pulse is not None:
            pulse.advance(nbytes)
            pulse.warmed_up()
        if cancelled():
            raise Cancelled("Cancelled while reading weights.")

    for name, source in sources.items():
        if cancelled():
            raise Cancelled("Cancelled while reading weights.")
        if name not in parameters and name not in buffers:
            continue
        is_kept = any(word in name.split(".") for word in keep)
        wanted = torch.float32 if is_kept else dtype
        part = read_part(source, shards.get(name), rank, shares, wanted, device, read)
        if on_slice is not None:
            on_slice(SliceRead(name, prod(source.shape), part.numel()))
        on_bytes(part.numel() * source.item_bytes)
        place(model, name, part, name in parameters)
    if pulse is not None:
        pulse.unmeasured()
    for name in buffers.keys() - set(sources):
        place(model, name, buffers[name].to(device), is_parameter=False)


def read_part(
    source: WeightSource,
    shard: Shard | None,
    rank: int,
    shares: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
    on_strip: Callable[[int], None] = lambda nbytes: None,
) -> torch.Tensor:
    """This rank's part of `source` (all of it without a shard) in memory of its own; nothing else is read.

    `on_strip` gets the bytes of each piece on its way. Floating numbers come in `dtype`, all others as they are stored.
    """
    shape, dim = list(source.shape), shard.dim if shard else 0
    indices = [tuple(slice(0, size) for size in shape)]
    if shard is not None:
        indices = shard_indices(shape, shard, rank, shares)
        shape[dim] = shard.length(rank, shares)
    target, offset = None, 0
    for index in indices:
        for strip in _strips(index):
            piece = source.read(strip)
            if target is None:
                wanted = dtype if piece.is_floating_point() else piece.dtype
                target = torch.empty(shape, dtype=wanted, device=device)
            start = [one.start - all_of_it.start for one, all_of_it in zip(strip, index, strict=True)]
            if start:
                start[dim] += offset
            target[tuple(slice(s, s + n) for s, n in zip(start, piece.shape, strict=True))].copy_(piece)
            on_strip(piece.nbytes)
        offset += index[dim].stop - index[dim].start if index else 0
    assert target is not None
    return target


def _strips(index: tuple[slice, ...]) -> Iterator[tuple[slice, ...]]:
    """`index` in parts of some 32 million elements along dim 0: what a source computes on the way stays small."""
    if not index:
        yield index
        return
    first, *others = index
    rows = max(1, STRIP // max(1, prod(one.stop - one.start for one in others)))
    for start in range(first.start, max(first.stop, first.start + 1), rows):
        yield (slice(start, min(start + rows, first.stop)), *others)


def shard_loaded(
    model: torch.nn.Module, shards: Mapping[str, Shard], rank: int, shares: Sequence[int]
) -> None:
    """Cut a model that is loaded whole to this rank's part: for comparison, it needs memory for all of it first."""
    for name, parameter in list(model.named_parameters()):
        if name not in shards:
            continue
        pieces = [parameter[index] for index in shard_indices(parameter.shape, shards[name], rank, shares)]
        part = torch.cat(pieces, dim=shards[name].dim) if len(pieces) > 1 else pieces[0].clone()
        place(model, name, part.contiguous(), is_parameter=True)


def place(model: torch.nn.Module, name: str, tensor: torch.Tensor, is_parameter: bool) -> None:
    """Put `tensor` where `name` of `model` is."""
    owner_name, _, leaf = name.rpartition(".")
    owner = model.get_submodule(owner_name)
    if is_parameter:
        owner._parameters[leaf] = torch.nn.Parameter(tensor, requires_grad=False)
    else:
        owner._buffers[leaf] = tensor
