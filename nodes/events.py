"""What the pages are told without asking: that the state is another, and what has gone wrong.

    a group changes ──> poke ──> compose, at most twice a second ──> "sharded.state", if it says something new
    an incident     ─────────────────────────────────────────────> "sharded.incident", once

Nothing runs while nothing changes, and nothing is sent for progress alone: an open panel asks for that.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from ..runtime.group import GROUPS, PACK_VERSION, Incident
from .routes import API, incident_data

STATE, INCIDENT = "sharded.state", "sharded.incident"
SECONDS_BETWEEN = 0.5

Data = dict[str, Any]
Send = Callable[[str, Data], None]
Later = Callable[[float, Callable[[], None]], None]


class Announcer:
    """Sends what `compose` gives when it is new: at once, then at most twice a second, and the last of it always.

    `compose` answers with the data, and for how many seconds they stay so by themselves (0.0: until the next poke).
    `later` calls a function after so many seconds. Both are called in the threads that poke, or that `later` has.
    """

    def __init__(
        self,
        compose: Callable[[], tuple[Data, float]],
        send: Callable[[Data], None],
        later: Later,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._compose, self._send, self._later, self._clock = compose, send, later, clock
        self._lock = threading.Lock()
        self._looked: float | None = None
        self._due: float | None = None  # when the next look is
        self._sent: object = None

    def poke(self) -> None:
        """Something may be new. Returns at once, from any thread."""
        self._look_at(self._clock())

    def _look_at(self, wanted: float) -> None:
        """See to it that there is a look at that time, or as soon after it as may be."""
        with self._lock:
            now = self._clock()
            soonest = now if self._looked is None else max(now, self._looked + SECONDS_BETWEEN)
            due = max(wanted, soonest)
            if self._due is not None and self._due <= due:
                return
            self._due = due
        self._later(max(0.0, due - now), partial(self._look, due))

    def _look(self, due: float) -> None:
        with self._lock:
            if self._due != due:
                return  # an earlier one has taken its place
            self._due, self._looked = None, self._clock()
        data, stays_for = self._compose()
        told = _without_progress(data)
        if told != self._sent:
            self._sent = told
            self._send(data)
        if stays_for:
            self._look_at(self._clock() + stays_for)


def _without_progress(data: Data) -> object:
    """What counts as new: neither how far it is, nor the number that rises with each change."""
    groups = [{name: value for name, value in one.items() if name != "progress"} for one in data["groups"]]
    return {**data, "seq": 0, "groups": groups}


def start(send: Send, later: Later) -> None:
    """Tell all pages from now on. `send` takes the event's name and data, in any thread."""
    about = {"api": API, "version": PACK_VERSION}

    def compose() -> tuple[Data, float]:
        news, stays_for = GROUPS.news()
        return {**about, **news}, stays_for

    def on_incident(incident: Incident) -> None:
        now = {"server": GROUPS.journal.server, "seq": GROUPS.journal.seq}
        send(INCIDENT, {**about, **now, **incident_data(incident)})

    announcer = Announcer(compose, lambda data: send(STATE, data), later)
    GROUPS.journal.listen(announcer.poke, on_incident)
