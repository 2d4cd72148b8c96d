"""How many bytes each rank of a layout holds, and which cards have room for them.

Pure functions over a `Situation`: a model, and the devices it is to run on.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from .spec import Device, ModelFacts, ParallelSpec, divide

_ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float8": 1}


class Situation(msgspec.Struct, frozen=True, kw_only=True):
    """A model that is to run on some of these devices, in their order, held in `dtype` ("auto": as stored)."""

    facts: ModelFacts
    devices: tuple[Device, ...]
    dtype: str = "auto"
    tensor_plan: str = ""

    @property
    def on_cpu(self) -> bool:
        return self.devices[0].kind == "cpu"


class Placement(msgspec.Struct, frozen=True, kw_only=True):
    """A layout on its devices: rank r owns `devices[r]`, and has share r where shares are weighted."""

    spec: ParallelSpec
    devices: tuple[Device, ...]
    fits: bool
    shares_in: str = ""  # what weighted shares count

    @property
    def words(self) -> str:
        """The weighted shares as the end of a sentence, "" for equal ones."""
        if not self.shares_in:
            return ""
        shares = list(map(str, self.spec.tensor_shares))
        return f", in shares of {', '.join(shares[:-1])} and {shares[-1]} {self.shares_in}"


def rank_bytes(facts: ModelFacts, dtype: str, spec: ParallelSpec, rank: int | None = None) -> int:
    """Bytes of the transformer on one rank, by default the fullest: its share of what is divided, all of the rest.

    Raises ValueError when there are fewer heads than ranks of the tensor axis.
    """
    whole, divided = _whole_and_divided(facts, dtype)
    counts = divide(facts.units, spec.shares)
    count = max(counts) if rank is None else counts[rank % spec.tensor]  # tensor is the innermost axis
    return whole + divided * count // facts.units


def _whole_and_divided(facts: ModelFacts, dtype: str) -> tuple[int, int]:
    """Bytes that every rank holds, and bytes that the tensor axis divides."""
    wanted, stored = _ITEM_BYTES[held_dtype(facts, dtype)], _ITEM_BYTES[facts.stored_dtype]
    whole = facts.transformer_bytes - facts.split_bytes
    return whole * wanted // stored, facts.split_bytes * wanted // stored


def held_dtype(facts: ModelFacts, dtype: str) -> str:
    """The dtype a rank holds the weights in: fp8 ones are turned into the numbers they stand for."""
    if dtype != "auto":
        return dtype
    return "bfloat16" if facts.stored_dtype == "float8" else facts.stored_dtype


def usable(device: Device) -> int:
    """What weights may take of a card: the rest is for activations, the driver and a display. 0 is unknown."""
    return int(available(device) * 0.85)


def available(device: Device) -> int:
    """Bytes of a card that are not other programs'. 0 is unknown.

    Not what is free now: ComfyUI and the groups make room for a load. And other programs count in whole GB, for a
    choice that followed every change of theirs would load the model anew each time.
    """
    return max(0, device.total_bytes - device.taken_bytes // 2**30 * 2**30)


def holds(device: Device, need: int) -> bool:
    """Whether `need` bytes of weights are known to fit."""
    return device.kind == "cpu" or usable(device) >= need


def largest(devices: Sequence[Device], count: int) -> tuple[Device, ...]:
    """The `count` devices with the most memory for us, in their given order."""
    chosen = sorted(devices, key=lambda device: -available(device))[:count]
    return tuple(device for device in devices if device in chosen)


def too_small(
    situation: Situation, spec: ParallelSpec, devices: Sequence[Device]
) -> list[tuple[Device, int]]:
    """The cards known to have too little room for their rank, and the bytes it needs, smallest card first.

    A card that does not tell its memory is not called too small.
    """
    needs = [(card, rank_bytes(situation.facts, situation.dtype, spec, r)) for r, card in enumerate(devices)]
    small = [(card, need) for card, need in needs if card.total_bytes and not holds(card, need)]
    return sorted(small, key=lambda pair: available(pair[0]))


def place(situation: Situation, spec: ParallelSpec) -> Placement:
    """`spec` on the largest devices. Equal shares where they fit, for then all ranks take equally long; else weighted.

    If no shares fit, the spec comes back as it is. Needs as many devices as ranks, and heads for all of them.
    """
    devices = largest(situation.devices, spec.world_size)
    equal = Placement(spec=spec, devices=devices, fits=not too_small(situation, spec, devices))
    if equal.fits or spec.tensor_shares or spec.tensor != spec.world_size:
        return equal
    for shares, unit in _weighted(situation, devices):
        weighted = msgspec.structs.replace(spec, tensor_shares=shares)
        if not too_small(situation, weighted, devices):
            return Placement(spec=weighted, devices=devices, fits=True, shares_in=unit)
    return equal


def _weighted(situation: Situation, devices: Sequence[Device]) -> Iterator[tuple[tuple[int, ...], str]]:
    """Shares that suit unequal cards, and what they count: first by memory, then the heads each has room for.

    The second finds shares whenever there are any: what every rank holds whole may leave a small card much less than
    its part of the memory.
    """
    facts = situation.facts
    whole, divided = _whole_and_divided(facts, situation.dtype)
    if len(devices) == 1 or not divided or not all(card.total_bytes for card in devices):
        return
    yield tuple(max(1, round(available(card) / 2**30)) for card in devices), "GB"
    heads = [(usable(card) - whole) * facts.units // divided for card in devices]
    if min(heads) >= 1 and sum(heads) >= facts.units:
        yield divide(facts.units, heads), "key/value heads" if facts.head_groups else "heads"
