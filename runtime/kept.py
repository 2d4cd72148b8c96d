"""Host half of "sent once": which tensors the ranks keep for a slot, found again by their content.

By content and not by identity: ComfyUI casts and batches conditioning anew in every step. Comparing reads each tensor
once, where it lies, which is less than sending it. Bytes are compared, not numbers: what is not a number is found
again too, and no zero stands for the other.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import torch

MOST, MOST_BYTES = 64, 512 << 20  # of tensors that no longer are in use
_numbers = itertools.count(1)  # of all slots: a number never means two tensors


class _Copy(NamedTuple):
    """A kept tensor as it was when it was sent."""

    kind: tuple[Any, ...]
    content: bytearray | torch.Tensor
    nbytes: int


class KeptTensors:
    """The tensors that the ranks keep for one slot, and copies of them to compare with."""

    def __init__(self) -> None:
        self._held: object = None
        self._copies: dict[int, _Copy] = {}  # the most recently used last

    def belong_to(self, held: object) -> None:
        """Forget everything if `held`, what a load of the slot gave, is another than before."""
        if held is not self._held:
            self._held = held
            self._copies.clear()

    @property
    def is_empty(self) -> bool:
        """Whether the ranks keep nothing that is known here."""
        return not self._copies

    @staticmethod
    def passing() -> int:
        """A number for a tensor that crosses once and is not kept."""
        return next(_numbers)

    def number(self, tensor: torch.Tensor) -> tuple[int, bool]:
        """The number under which the ranks keep `tensor`, and whether it is new to them."""
        kind, content = (tensor.dtype, tensor.shape, tensor.device), _content(tensor)
        for number, copy in self._copies.items():
            if copy.kind == kind and _alike(copy.content, content):
                self._copies[number] = self._copies.pop(number)
                return number, False
        number = self.passing()
        own = bytearray(content) if isinstance(content, memoryview) else content.clone()
        self._copies[number] = _Copy(kind, own, tensor.nbytes)
        return number, True

    def dropped(self, in_use: Collection[int]) -> tuple[int, ...]:
        """Forget the longest unused tensors beyond the limits; their numbers, for the ranks to do so too."""
        gone = []
        total = sum(copy.nbytes for copy in self._copies.values())
        for number in [n for n in self._copies if n not in in_use]:
            if len(self._copies) <= MOST and total <= MOST_BYTES:
                break
            total -= self._copies.pop(number).nbytes
            gone.append(number)
        return tuple(gone)


def _content(tensor: torch.Tensor) -> memoryview | torch.Tensor:
    """The bytes of `tensor`: where they lie on a CPU, else as integers on its device."""
    import torch

    tensor = tensor.detach().resolve_conj().resolve_neg().contiguous().view(-1)
    if tensor.device.type == "cpu":
        return memoryview(tensor.view(torch.uint8).numpy())
    return _integers(tensor)


def _integers(tensor: torch.Tensor) -> torch.Tensor:
    import torch

    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    return tensor.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.itemsize])


def _alike(own: bytearray | torch.Tensor, content: memoryview | torch.Tensor) -> bool:
    if isinstance(own, bytearray):
        # At the speed of memory, which is twice that of torch and many times a memoryview's.
        return own == content
    import torch

    return torch.equal(own, content)
