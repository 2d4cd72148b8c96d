"""Weights stored in fp8 with scales: read as fp32, exactly the part that is asked for, whatever wrote the file.

What in a file is a weight and what its scale, `runtime/quantisation.py` tells.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ...quantisation import find_weights
from .files import Stored, StoredTensor
from .source import Index, WeightSource


@dataclass(frozen=True, eq=False)
class ScaledTensor:
    """An fp8 weight [out, ...] and its scale, one for all of it or one per output channel.

    Values and scale are multiplied in fp32: fp8 is exact there, so a weight is rounded once when multiplied and once
    when the loader casts it, whatever is read with it. In bf16 the scale itself would be rounded first.
    """

    weight: StoredTensor
    scale: StoredTensor
    per_channel: bool

    @property
    def shape(self) -> tuple[int, ...]:
        return self.weight.shape

    @property
    def item_bytes(self) -> int:
        return self.weight.item_bytes

    @property
    def where(self) -> str:
        return self.weight.where

    def read(self, index: Index) -> torch.Tensor:
        """The part at `index` in fp32; the only temporary is what is returned."""
        values = self.weight.read(index).to(torch.float32)
        whole = tuple(slice(0, size) for size in self.scale.shape)
        rows = (index[0], *whole[1:]) if self.per_channel else whole
        scale = self.scale.read(rows).to(torch.float32)
        return values.mul_(
            scale.reshape(-1, *[1] * (values.ndim - 1)) if self.per_channel else scale.reshape(())
        )


def dequantised(stored: Stored) -> dict[str, WeightSource]:
    """The weights of files, fp8 ones with their scales applied; keys that only describe storage are gone.

    Raises Refusal for any other quantised storage before a weight is read.
    """
    weights = find_weights(stored.tensors, stored.metadata, _bytes)
    return {
        key: one.tensor if one.scale is None else ScaledTensor(one.tensor, one.scale, one.per_channel)
        for key, one in weights.items()
    }


def _bytes(note: StoredTensor) -> bytes:
    return bytes(note.read((slice(0, note.shape[0]),)).tolist())
