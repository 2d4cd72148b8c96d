"""Reads a transformer from safetensors files, each rank its own slices only, straight to its device.

No rank ever holds a full planned weight: a slice is read through the page cache, copied once to the device in the
dtype asked for, and forgotten. Between slices a load can be cancelled.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from accelerate import init_empty_weights
from safetensors import safe_open

from ..spec import Cancelled
from .tensor import Shard, read_shard

WEIGHTS = "diffusion_pytorch_model"
_ITEM_BYTES = {
    "F64": 8,
    "I64": 8,
    "F32": 4,
    "I32": 4,
    "F16": 2,
    "BF16": 2,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "BOOL": 1,
}


class SliceRead(NamedTuple):
    """One tensor as this rank read it: elements in the file, elements read."""

    name: str
    stored: int
    read: int


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a component, one or many."""
    index = folder / f"{WEIGHTS}.safetensors.index.json"
    if index.exists():
        return [folder / name for name in sorted(set(json.loads(index.read_text())["weight_map"].values()))]
    return [folder / f"{WEIGHTS}.safetensors"]


def empty_model(model_class: type, folder: Path) -> torch.nn.Module:
    """The model of `folder`'s config without memory for its weights; computed buffers are real."""
    with init_empty_weights(include_buffers=False):
        model = model_class.from_config(model_class.load_config(folder))  # type: ignore[attr-defined]
    return model.eval().requires_grad_(False)


def bytes_to_read(files: list[Path], plan: Mapping[str, Shard], degree: int) -> int:
    """Bytes that one of `degree` ranks reads from `files`, from their headers."""
    total = 0
    for name, source in _tensors(files):
        nbytes = torch.Size(source.get_shape()).numel() * _ITEM_BYTES.get(source.get_dtype(), 4)
        total += nbytes // degree if name in plan else nbytes
    return total


def read_weights(
    model: torch.nn.Module,
    files: list[Path],
    plan: Mapping[str, Shard],
    *,
    rank: int,
    degree: int,
    dtype: torch.dtype,
    device: torch.device,
    on_bytes: Callable[[int], None],
    cancelled: Callable[[], bool],
    on_slice: Callable[[SliceRead], None] | None = None,
) -> None:
    """Fill `model` from `files`: planned parameters with this rank's part, all others whole.

    `on_bytes` gets the bytes read after each tensor. Raises KeyError for parameters the files lack, Cancelled.
    """
    parameters = dict(model.named_parameters())
    buffers = dict(model.named_buffers())
    keep = tuple(getattr(model, "_keep_in_fp32_modules", None) or ())
    missing = set(parameters)
    for name, source in _tensors(files):
        if cancelled():
            raise Cancelled("Cancelled while reading weights.")
        if name not in parameters and name not in buffers:
            continue
        part = read_shard(source, plan[name], rank, degree) if name in plan else source[:]
        if on_slice is not None:
            on_slice(SliceRead(name, torch.Size(source.get_shape()).numel(), part.numel()))
        on_bytes(part.nbytes)
        target = torch.float32 if any(word in name.split(".") for word in keep) else dtype
        # A copy even where nothing changes: the slice is a view of the mapped file.
        owned = torch.empty(
            part.shape, dtype=target if part.is_floating_point() else part.dtype, device=device
        )
        owned.copy_(part)
        _place(model, name, owned, name in parameters)
        missing.discard(name)
    if missing:
        raise KeyError(f"the weight files lack {len(missing)} parameters, such as '{min(missing)}'")


def _tensors(files: list[Path]) -> Iterator[tuple[str, Any]]:
    for file in files:
        with safe_open(file, framework="pt", device="cpu") as opened:
            for name in opened.keys():  # noqa: SIM118 - not a mapping
                yield name, opened.get_slice(name)


def _place(model: torch.nn.Module, name: str, tensor: torch.Tensor, is_parameter: bool) -> None:
    owner_name, _, leaf = name.rpartition(".")
    owner = model.get_submodule(owner_name)
    if is_parameter:
        owner._parameters[leaf] = torch.nn.Parameter(tensor, requires_grad=False)
    else:
        owner._buffers[leaf] = tensor
