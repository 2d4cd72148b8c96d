"""Which rank has gone silent or is stuck, decided from their heartbeats alone; the caller has the clock.

Two clocks run for each rank. One since it was last heard of: a rank that is silent is stopped or dead, whatever it was
doing. One since its progress last grew: it is stuck when that takes longer than anything it has done so far explains.
Ranks that wait in a collective make no progress either, so only the rank that is behind is judged: the one that has
entered the fewest collectives of the call, and among equals the one whose progress is the oldest.
"""

from __future__ import annotations

import threading
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from .spec import Heartbeat

SILENT_SECONDS = 10.0
LATE_SECONDS = 3.0  # without a sign of life: three heartbeats
STUCK_SECONDS = 10.0
STUCK_FACTOR = 5.0  # times the slowest block
WARM_UP_SECONDS = 120.0
ASLEEP_SECONDS = 2.0  # between two looks: then the host itself did not run, and its ranks are not to blame


class Verdict(NamedTuple):
    """What is wrong with `rank`, for `seconds` now."""

    kind: Literal["silent", "stuck"]
    rank: int
    seconds: float
    why: str


class Suspicion(NamedTuple):
    """`rank` is late, for `seconds` now; after `limit` seconds there is a verdict."""

    kind: Literal["silent", "stuck"]
    rank: int
    seconds: float
    limit: float


@dataclass(frozen=True)
class _Rank:
    """What is known of one rank. Times are readings of the caller's clock."""

    heard: float
    moved: float
    last: Heartbeat | None

    @property
    def count(self) -> tuple[str, int]:
        return (self.last.doing, self.last.progress) if self.last else ("", -1)

    @property
    def collectives(self) -> int:
        """Those of the running call: who has not begun with it has entered none."""
        return self.last.collectives if self.last and self.last.doing else -1


def patience(slowest: float) -> float:
    """How many seconds a rank may make no progress whose slowest block took `slowest`; 0.0 is while it warms up."""
    return max(STUCK_SECONDS, STUCK_FACTOR * slowest) if slowest else WARM_UP_SECONDS


class Supervision:
    """The heartbeats of one group. Thread-safe. All times are seconds of one monotonic clock that the caller reads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ranks: dict[int, _Rank] = {}
        self._looked: float | None = None

    def heard(self, rank: int, heartbeat: Heartbeat | None, now: float) -> None:
        """A heartbeat has come, or (None) the rank has just connected."""
        with self._lock:
            before = self._ranks.get(rank)
            new = _Rank(now, now, heartbeat or (before.last if before else None))
            if before is not None and before.count == new.count:
                new = replace(new, moved=before.moved)
            self._ranks[rank] = new

    def begin(self, now: float) -> None:
        """A call begins: nobody's progress is older than it."""
        with self._lock:
            self._ranks = {rank: replace(one, moved=now) for rank, one in self._ranks.items()}

    def verdict(self, now: float, working: Collection[int]) -> Verdict | None:
        """What is wrong, if anything. `working` are the ranks that owe an answer to the running call.

        To be asked about once a second or more often: after a longer pause the host itself has been asleep, and all
        clocks stand still for that time.
        """
        with self._lock:
            self._forgive(now)
            return self._silent(now) or self._stuck(now, working)

    def _forgive(self, now: float) -> None:
        asleep = now - self._looked if self._looked is not None else 0.0
        self._looked = now
        if asleep > ASLEEP_SECONDS:
            self._ranks = {
                rank: replace(one, heard=min(now, one.heard + asleep), moved=min(now, one.moved + asleep))
                for rank, one in self._ranks.items()
            }

    def suspicion(self, now: float, working: Collection[int]) -> Suspicion | None:
        """Who is late, if anybody, long before there is a verdict; asked like `verdict`, and after it."""
        with self._lock:
            if (late := self._least_heard(now)) is not None and late[1] > LATE_SECONDS:
                return Suspicion("silent", *late, SILENT_SECONDS)
            rank = self._behind(working)
            if rank is None:
                return None
            seconds, allowed = now - self._ranks[rank].moved, self._allowed(rank)
            return Suspicion("stuck", rank, seconds, allowed) if seconds > allowed / 2 else None

    def _silent(self, now: float) -> Verdict | None:
        late = self._least_heard(now)
        if late is None or late[1] <= SILENT_SECONDS:
            return None
        rank, seconds = late
        return Verdict("silent", rank, seconds, f"it has sent no sign of life for {seconds:.0f} s")

    def _least_heard(self, now: float) -> tuple[int, float] | None:
        """The rank that has been silent the longest, and for how many seconds."""
        if not self._ranks:
            return None
        rank = min(self._ranks, key=lambda r: (self._ranks[r].heard, r))
        return rank, now - self._ranks[rank].heard

    def _behind(self, working: Collection[int]) -> int | None:
        """The rank to judge if none makes progress: see the top of this file."""
        ranks = {rank: self._ranks[rank] for rank in working if rank in self._ranks}
        return min(ranks, key=lambda r: (ranks[r].collectives, ranks[r].moved, r)) if ranks else None

    def _allowed(self, rank: int) -> float:
        last = self._ranks[rank].last
        return patience(last.slowest if last else 0.0)

    def _stuck(self, now: float, working: Collection[int]) -> Verdict | None:
        rank = self._behind(working)
        if rank is None:
            return None
        one = self._ranks[rank]
        seconds = now - one.moved
        if seconds <= self._allowed(rank):
            return None
        why = f"it has made no progress for {seconds:.0f} s"
        ahead = max(
            (self._ranks[r] for r in working if r in self._ranks), key=lambda other: other.collectives
        )
        if ahead.collectives > one.collectives:
            # One that has not begun has entered none.
            entered, others = max(0, one.collectives), ahead.collectives
            why += f"; the others wait for it in their collective {others}, it has entered {entered}"
        return Verdict("stuck", rank, seconds, why)
