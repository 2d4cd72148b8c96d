"""The devices of this machine as people see them: how much is in use, by whom, and what is ours.

The driver is asked at most once in two seconds, in whatever thread calls `look`; everybody else reads what it found.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping

import msgspec

from . import nvml
from .devices import physical_cards
from .holders import Card, Holder, card_memory
from .leftovers import sees_all_processes
from .spec import Device

FRESH_SECONDS = 2.0
LIST_SECONDS = 60.0  # after which cards may have come or gone
OTHERS_TOLD = 4
HOST = "ComfyUI"


class Seen(msgspec.Struct, frozen=True, kw_only=True):
    """A card as it was at `when` by the monotonic clock. None is unknown; `others` are programs that are no ranks."""

    device: Device
    when: float
    total: int | None = None
    used: int | None = None
    display: bool | None = None
    others: tuple[Holder, ...] = ()


class Cards:
    """What is known of this machine's cards."""

    def __init__(
        self,
        cards: Callable[[], tuple[Device, ...]] = physical_cards,
        memory: Callable[[Device, Mapping[int, str]], Card | None] = card_memory,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._cards, self._memory, self._clock = cards, memory, clock
        self._listed: tuple[Device, ...] = ()
        self._listed_at: float | None = None
        self._looked_at: float | None = None
        self.seen: tuple[Seen, ...] = ()

    @property
    def known(self) -> bool:
        """Whether the driver has ever answered, if only that there are none."""
        return self._looked_at is not None

    @property
    def stale(self) -> bool:
        """Whether it is time to look again."""
        return self._looked_at is None or self._clock() - self._looked_at >= FRESH_SECONDS

    def look(self, ranks: frozenset[int]) -> None:
        """Ask the driver; may take as long as it likes. `ranks` are the pids of ours. One thread at a time."""
        with nvml.opened():  # over all questions: opening it is most of their price
            now = self._clock()
            if self._listed_at is None or now - self._listed_at >= LIST_SECONDS:
                self._listed, self._listed_at = self._cards(), now
            own = {os.getpid(): HOST, **dict.fromkeys(ranks, "rank")}
            self.seen = tuple(self._see(device, own, ranks) for device in self._listed)
            if any(one.used is None and one.device.total_bytes for one in self.seen):
                self._listed_at = None  # one that told its memory does so no more: is it still there?
        self._looked_at = self._clock()

    def _see(self, device: Device, own: Mapping[int, str], ranks: frozenset[int]) -> Seen:
        card = self._memory(device, own)
        if card is None or not card.total_bytes:
            return Seen(device=device, when=self._clock())
        # In a container the driver may tell pids of the machine outside: then nobody can say which are ours.
        told = not ranks or sees_all_processes() or any(one.pid in own for one in card.holders)
        others = [one for one in card.holders if one.pid not in ranks] if told else []
        return Seen(
            device=device,
            when=self._clock(),
            total=card.total_bytes,
            used=card.total_bytes - card.free_bytes,
            display=card.display,
            others=tuple(others[:OTHERS_TOLD]),
        )
