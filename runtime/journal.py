"""What has happened to the groups of this host: a number that rises with every change, and the last incidents.

    a group's state changes ──> touch ──┐
    something goes wrong    ──> note  ──┴──> who listens (nodes/events.py tells the pages)

Thread-safe; nobody waits for who listens.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec

from .incidents import Incident

if TYPE_CHECKING:
    from .spec import RankError

log = logging.getLogger("comfyui-sharded")

INCIDENTS_KEPT = 3


class Journal:
    """The changes and incidents since the host started; `server` tells this run of the host from others."""

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self.server = secrets.token_hex(4)
        self.seq = 0
        self.incidents: tuple[Incident, ...] = ()  # the newest first
        self._clock = clock
        self._lock = threading.Lock()
        self._count = 0
        self._on_change: list[Callable[[], None]] = []
        self._on_incident: list[Callable[[Incident], None]] = []

    def listen(self, on_change: Callable[[], None], on_incident: Callable[[Incident], None]) -> None:
        """Call them with each change and each incident, in the thread it comes from; they must return at once."""
        self._on_change.append(on_change)
        self._on_incident.append(on_incident)

    def touch(self) -> None:
        """Something is otherwise than it was."""
        with self._lock:
            self.seq += 1
        for listener in self._on_change:
            try:
                listener()
            except Exception:  # whoever listens must not change what becomes of a group
                log.exception("A listener of the journal failed.")

    def note(self, incident: Incident) -> None:
        """Something has gone wrong, and is told now."""
        with self._lock:
            self._count += 1
            incident = msgspec.structs.replace(
                incident, id=f"{self.server}-{self._count}", when=self._clock()
            )
            self.incidents = (incident, *self.incidents)[:INCIDENTS_KEPT]
        self.touch()
        for listener in self._on_incident:
            try:
                listener(incident)
            except Exception:
                log.exception("A listener of the journal failed.")

    def publish(self, error: RankError) -> None:
        """An error has come to the user that could have been mended on the way: tell what it is about, once."""
        incident, error.incident = error.incident, None
        if isinstance(incident, Incident):
            self.note(incident)
