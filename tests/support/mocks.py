"""Mocks of what a machine without GPUs lacks: cards as plain data, and NVIDIA's management library as a module.

And of what a model of any size would say of itself.
"""

from __future__ import annotations

import types
from collections.abc import Mapping, Sequence

import msgspec

from runtime.spec import Device, ModelFacts

GIB = 1 << 30


def mock_facts(
    gib: float = 10,
    heads: int = 24,
    transformer_class: str = "FluxTransformer2DModel",
    stored: str = "bfloat16",
    split: float = 1.0,
    head_groups: int = 0,
    tokens: int = 4096 + 512,
) -> ModelFacts:
    """A model whose transformer has so many GiB, of which the tensor axis divides the part `split`."""
    return ModelFacts(
        path="/models/diffusers/a",
        pipeline_class="FluxPipeline",
        transformer_class=transformer_class,
        heads=heads,
        head_groups=head_groups,
        tokens=tokens,
        transformer_bytes=int(gib * GIB),
        split_bytes=int(gib * GIB * split),
        encoder_bytes=GIB,
        vae_bytes=GIB,
        stored_dtype=stored,
        version="v1",
    )


def mock_cards(*free_gib: float, linked: bool | None = None) -> tuple[Device, ...]:
    """Mock cards in PCI order with so much memory, all of it free; do they reach each other (None: unknown)?"""
    everyone = tuple(range(len(free_gib)))
    cards = tuple(
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
    if linked is None:
        return cards
    peers = [tuple(n for n in everyone if linked and n != card.index) for card in cards]
    return tuple(msgspec.structs.replace(card, peers=p) for card, p in zip(cards, peers, strict=True))


class MockNVMLError(Exception):
    """Stands for pynvml.NVMLError."""


class MockNVML(types.ModuleType):
    """Stands for the module pynvml: some cards, and calls that fail for chosen cards (or at all, as card None).

    `unlinked` are the pairs (reader, other) whose memory the first cannot read; `computing` and `drawing` the bytes of
    processes by pid, on every card, and `names` what they are called.
    """

    NVMLError = MockNVMLError
    NVML_P2P_CAPS_INDEX_READ = (0,)  # a tuple in the real library too, which its own call then refuses
    NVML_P2P_STATUS_OK = 0

    def __init__(
        self,
        cards: Sequence[tuple[str | bytes, str | bytes]] = (),
        failing: Mapping[str, Sequence[int | None]] | None = None,
        unlinked: Sequence[tuple[int, int]] = (),
        computing: Mapping[int, int | None] | None = None,
        drawing: Mapping[int, int | None] | None = None,
        names: Mapping[int, str | bytes] | None = None,
    ):
        super().__init__("pynvml")
        self._cards, self._failing, self._unlinked = cards, failing or {}, unlinked
        self._computing, self._drawing, self._names = computing or {}, drawing or {}, names or {}
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

    def nvmlDeviceGetP2PStatus(self, reader: int, other: int, capability: int) -> int:
        self._enter("nvmlDeviceGetP2PStatus", reader)
        if capability != 0:
            raise TypeError(f"mock: {capability} is not the number of the capability to read")
        return 5 if (reader, other) in self._unlinked else self.NVML_P2P_STATUS_OK

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> int:
        for index, (one, _) in enumerate(self._cards):
            if one == uuid:
                return index
        raise MockNVMLError(f"mock: there is no card {uuid}")

    def nvmlDeviceGetComputeRunningProcesses(self, handle: int) -> list[types.SimpleNamespace]:
        self._enter("nvmlDeviceGetComputeRunningProcesses", handle)
        return _processes(self._computing)

    def nvmlDeviceGetGraphicsRunningProcesses(self, handle: int) -> list[types.SimpleNamespace]:
        self._enter("nvmlDeviceGetGraphicsRunningProcesses", handle)
        return _processes(self._drawing)

    def nvmlSystemGetProcessName(self, pid: int) -> str | bytes:
        if pid not in self._names:
            raise MockNVMLError(f"mock: process {pid} is not found")
        return self._names[pid]


def _processes(sizes: Mapping[int, int | None]) -> list[types.SimpleNamespace]:
    return [types.SimpleNamespace(pid=pid, usedGpuMemory=nbytes) for pid, nbytes in sizes.items()]
