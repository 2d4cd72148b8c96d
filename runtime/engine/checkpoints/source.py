"""What a checkpoint offers for one parameter: a shape, a size, and a read of just the part that is indexed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch

Index = tuple[slice, ...]  # one slice per dim, each with explicit start and stop


class WeightSource(Protocol):
    """One parameter in a checkpoint. Nothing is read until `read`, and then only what is asked for."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def item_bytes(self) -> int:
        """Bytes that one element takes in the file."""
        ...

    @property
    def where(self) -> str:
        """Where it lies, for messages: the key (as the file has it) and the file's name."""
        ...

    def read(self, index: Index) -> torch.Tensor:
        """The part at `index`, dequantised if need be; it may be a view of the mapped file, so copy it to keep it."""
        ...


Sources = Mapping[str, WeightSource]  # parameter name in the diffusers model -> where to read it


@dataclass(frozen=True)
class Checkpoint:
    """A transformer as it lies on disk: its diffusers class, the constructor's arguments, and where each weight is."""

    model_class: str
    config: Mapping[str, Any]
    sources: Sources
    family: str = ""
