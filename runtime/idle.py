"""When a group that nobody uses gives its devices back by itself: first it parks, later it stops.

Both times count from the group's last use, on the monotonic clock: setting the system's clock changes nothing, and the
time that a machine sleeps does not count. Nothing here waits for a running call, and nothing starts a process.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from .spec import RankError

if TYPE_CHECKING:
    from .group import WorkerGroup
    from .registry import Registry

log = logging.getLogger("comfyui-sharded")

LOOK_SECONDS = 5.0  # between two looks at the groups
# What the settings offer in minutes, 0 for never; the first is the default.
PARK_MINUTES = (10, 0, 5, 15, 60)
STOP_MINUTES = (0, 30, 60, 240)


@dataclass(frozen=True)
class IdleTimes:
    """After how many seconds without use a group parks, and stops; None is never."""

    park_after: float | None = None
    stop_after: float | None = None

    @classmethod
    def of_settings(cls, park: Iterable[object], stop: Iterable[object]) -> IdleTimes:
        """From what each user has set. They share the groups: who wants to keep them longest decides.

        The values come from files that a route writes: what is not on offer counts as never set.
        """
        return cls(_seconds(park, PARK_MINUTES), _seconds(stop, STOP_MINUTES))


def _seconds(found: Iterable[object], offered: tuple[int, ...]) -> float | None:
    minutes = [one for one in found if type(one) is int and one in offered] or [offered[0]]
    return None if 0 in minutes else 60.0 * max(minutes)


def due(idle: float, holds_weights: bool, times: IdleTimes) -> Literal["park", "stop", ""]:
    """What a running group has to do that was last used `idle` seconds ago."""
    if times.stop_after is not None and idle >= times.stop_after:
        return "stop"
    if times.park_after is not None and idle >= times.park_after and holds_weights:
        return "park"
    return ""


class IdleWatch:
    """Looks at the groups of a registry every few seconds, in a thread that ends with the host."""

    def __init__(
        self,
        groups: Registry,
        times: Callable[[], IdleTimes],
        clock: Callable[[], float] = time.monotonic,
    ):
        """`times` is asked at every look at a running group: a changed setting counts at once."""
        self._groups, self._times, self._clock = groups, times, clock

    def start(self) -> None:
        threading.Thread(target=self._run, name="sharded-idle", daemon=True).start()

    def _run(self) -> None:
        said = ""
        while True:
            time.sleep(LOOK_SECONDS)
            try:
                self.look()
            except Exception as error:  # of reading the settings: it must not end the watch, nor fill the log
                if said != (said := repr(error)):
                    log.exception("Looking for idle groups failed.")

    def look(self) -> None:
        """Park and stop what is due now. A group that is working is left alone."""
        running = [group for group in self._groups.groups() if group.alive]
        times = self._times() if running else IdleTimes()
        for group in running:
            with group.unless_busy() as free:
                if free and group.alive:
                    self._act(group, times)

    def _act(self, group: WorkerGroup, times: IdleTimes) -> None:
        idle = self._clock() - group.used_at
        minutes = f"{idle / 60:.0f} min"
        match due(idle, bool(group.slots), times):
            case "stop":
                log.info("Stopping the ranks on %s: not used for %s.", group.where, minutes)
                group.close(f"Stopped by itself: it was not used for {minutes}.")
            case "park":
                log.info("Parking what is on %s: not used for %s.", group.where, minutes)
                try:
                    self._groups.park(group, by="idle")
                except RankError as error:  # it has ended the group; the next use starts it again
                    log.warning("Parking failed: %s", error.what)
