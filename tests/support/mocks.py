"""Mocks of what a machine without GPUs lacks: cards as plain data, and NVIDIA's management library as a module."""

from __future__ import annotations

import types
from collections.abc import Mapping, Sequence

from runtime.spec import Device

GIB = 1 << 30


def mock_cards(*free_gib: float) -> tuple[Device, ...]:
    """Mock cards in PCI order with so much memory, all of it free."""
    return tuple(
        Device(
            kind="cuda",
            index=index,
            uuid=f"GPU-{index:04d}",
            name="Mock",
            total_bytes=int(gib * GIB),
            free_bytes=int(gib * GIB),
        )
        for index, gib in enumerate(free_gib)
    )


class MockNVMLError(Exception):
    """Stands for pynvml.NVMLError."""


class MockNVML(types.ModuleType):
    """Stands for the module pynvml: some cards, and calls that fail for chosen cards (or at all, as card None)."""

    NVMLError = MockNVMLError

    def __init__(
        self,
        cards: Sequence[tuple[str | bytes, str | bytes]] = (),
        failing: Mapping[str, Sequence[int | None]] | None = None,
    ):
        super().__init__("pynvml")
        self._cards, self._failing = cards, failing or {}
        self.open = 0  # nvmlInit less nvmlShutdown

    def _enter(self, call: str, card: int | None = None) -> None:
        if card in self._failing.get(call, ()):
            raise MockNVMLError(f"mock: {call} fails for {card}")

    def nvmlInit(self) -> None:
        self._enter("nvmlInit")
        self.open += 1

    def nvmlShutdown(self) -> None:
        self.open -= 1
        self._enter("nvmlShutdown")

    def nvmlDeviceGetCount(self) -> int:
        self._enter("nvmlDeviceGetCount")
        return len(self._cards)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        self._enter("nvmlDeviceGetHandleByIndex", index)
        return index

    def nvmlDeviceGetUUID(self, handle: int) -> str | bytes:
        self._enter("nvmlDeviceGetUUID", handle)
        return self._cards[handle][0]

    def nvmlDeviceGetName(self, handle: int) -> str | bytes:
        self._enter("nvmlDeviceGetName", handle)
        return self._cards[handle][1]

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> types.SimpleNamespace:
        self._enter("nvmlDeviceGetMemoryInfo", handle)
        return types.SimpleNamespace(total=(handle + 1) * GIB, free=handle * GIB, used=GIB)
