"""Host half of "sent once": which tensors the ranks keep for a slot, found again by their content.

By content and not by identity: ComfyUI casts and batches conditioning anew in every step. Comparing reads each tensor
once, where it lies, which is less than sending it.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

MOST, MOST_BYTES = 64, 512 << 20  # of tensors that no longer are in use
_numbers = itertools.count(1)  # of all slots: a number never means two tensors


def new_number() -> int:
    """The number of a tensor that crosses once and is forgotten."""
    return next(_numbers)


class KeptTensors:
    """The tensors that the ranks keep for one slot, and clones of them to compare with."""

    def __init__(self) -> None:
        self._held: object = None
        self._clones: dict[int, torch.Tensor] = {}  # the most recently used last

    def belong_to(self, held: object) -> None:
        """Forget everything if `held`, what a load of the slot gave, is another than before."""
        if held is not self._held:
            self._held = held
            self._clones.clear()

    def number(self, tensor: torch.Tensor) -> tuple[int, bool]:
        """The number under which the ranks keep `tensor`, and whether it is new to them."""
        import torch

        for number, clone in self._clones.items():
            if (
                clone.shape == tensor.shape
                and clone.dtype == tensor.dtype
                and clone.device == tensor.device
                and torch.equal(clone, tensor)
            ):
                self._clones[number] = self._clones.pop(number)
                return number, False
        number = new_number()
        self._clones[number] = tensor.clone()
        return number, True

    def dropped(self, in_use: Collection[int]) -> tuple[int, ...]:
        """Forget the longest unused tensors beyond the limits; their numbers, for the ranks to do so too."""
        gone = []
        total = sum(clone.nbytes for clone in self._clones.values())
        for number in [n for n in self._clones if n not in in_use]:
            if len(self._clones) <= MOST and total <= MOST_BYTES:
                break
            total -= self._clones.pop(number).nbytes
            gone.append(number)
        return tuple(gone)
