"""Which rank is called silent or stuck: decisions from heartbeats, on a fake clock that only the test moves."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Iterator

import pytest

from runtime.session import _is_ending, _process_state
from runtime.spec import Heartbeat, Memory
from runtime.supervision import (
    ASLEEP_SECONDS,
    LATE_SECONDS,
    SILENT_SECONDS,
    STUCK_SECONDS,
    WARM_UP_SECONDS,
    Supervision,
    Suspicion,
    Verdict,
    patience,
)
from tests.support.processes import wait_until


class FakeTime:
    """A group of ranks on a fake clock: each says every second what it was last set to, unless it is silent."""

    def __init__(self, ranks: int):
        self.now, self.supervision = 1000.0, Supervision()
        self.doing = [""] * ranks
        self.progress, self.collectives, self.slowest = [0] * ranks, [0] * ranks, [0.1] * ranks
        self.silent: set[int] = set()
        self.beat = 0
        for rank in range(ranks):
            self.supervision.heard(rank, None, self.now)

    def begin(self, *working: int, doing: str = "sampling") -> None:
        for rank in working:
            self.doing[rank] = doing
            self.progress[rank] += 1
            self.collectives[rank] = 0
        self.supervision.begin(self.now)

    def pass_seconds(self, seconds: int, working: set[int], moving: set[int] = frozenset()) -> Verdict | None:  # type: ignore[assignment]
        """The first verdict in so many seconds, in which the ranks of `moving` finish a block each second."""
        for _ in range(seconds):
            self.now += 1
            self.beat += 1
            for rank in range(len(self.doing)):
                self.progress[rank] += rank in moving
                if rank not in self.silent:
                    self.supervision.heard(rank, self.heartbeat(rank), self.now)
            if verdict := self.supervision.verdict(self.now, working):
                return verdict
        return None

    def heartbeat(self, rank: int) -> Heartbeat:
        return Heartbeat(
            memory=Memory(),
            beat=self.beat,
            doing=self.doing[rank],
            progress=self.progress[rank],
            collectives=self.collectives[rank],
            slowest=self.slowest[rank],
        )

    def suspicion(self, working: set[int]) -> Suspicion | None:
        return self.supervision.suspicion(self.now, working)


@pytest.fixture
def group() -> FakeTime:
    return FakeTime(3)


ALL = {0, 1, 2}


def test_idle_ranks_that_say_so_are_well(group: FakeTime) -> None:
    assert group.pass_seconds(600, set()) is None


@pytest.mark.parametrize("working", [set(), ALL])
def test_a_silent_rank_is_found_after_ten_seconds_whatever_it_was_doing(
    group: FakeTime, working: set[int]
) -> None:
    group.begin(*working)
    group.pass_seconds(5, working, moving=ALL)
    group.silent = {1}
    since = group.now
    verdict = group.pass_seconds(60, working, moving={0, 2})
    assert verdict is not None
    assert (verdict.kind, verdict.rank) == ("silent", 1)
    assert SILENT_SECONDS < group.now - since <= SILENT_SECONDS + 1


def test_of_two_silent_ranks_the_one_that_fell_silent_first_is_named(group: FakeTime) -> None:
    group.pass_seconds(3, set())
    group.silent = {2}
    group.pass_seconds(2, set())
    group.silent = {1, 2}
    verdict = group.pass_seconds(60, set())
    assert verdict is not None and verdict.rank == 2


def test_ranks_that_wait_in_a_collective_are_not_stuck_while_one_works(group: FakeTime) -> None:
    """Rank 0 reads text encoders for minutes; the others are through and wait for it to agree."""
    group.begin(*ALL, doing="loading")
    group.collectives = [0, 1, 1]
    assert group.pass_seconds(300, ALL, moving={0}) is None


def test_the_rank_that_lags_behind_in_collectives_is_the_stuck_one(group: FakeTime) -> None:
    group.begin(*ALL)
    group.collectives = [38, 37, 38]
    verdict = group.pass_seconds(60, ALL)
    assert verdict is not None
    assert (verdict.kind, verdict.rank) == ("stuck", 1)
    assert "collective 38, it has entered 37" in verdict.why


def test_among_equals_it_is_the_one_whose_progress_is_the_oldest(group: FakeTime) -> None:
    group.begin(*ALL)
    group.pass_seconds(4, ALL, moving={0, 1})
    verdict = group.pass_seconds(60, ALL, moving={0, 1})
    assert verdict is not None and verdict.rank == 2


def test_a_rank_that_never_began_with_the_call_is_behind_those_that_did(group: FakeTime) -> None:
    group.begin(0, 2)
    verdict = group.pass_seconds(60, ALL, moving={0, 2})
    assert verdict is not None and verdict.rank == 1


def test_a_rank_that_has_answered_owes_nothing(group: FakeTime) -> None:
    """Rank 0 decodes alone."""
    group.begin(*ALL, doing="decoding")
    assert group.pass_seconds(300, {0}, moving={0}) is None


def test_what_was_slow_before_the_call_does_not_count_in_it(group: FakeTime) -> None:
    group.pass_seconds(500, set())
    group.begin(*ALL)
    assert group.pass_seconds(9, ALL) is None


@pytest.mark.parametrize(
    ("slowest", "seconds"), [(0.1, 10.0), (2.0, 10.0), (2.5, 12.5), (30.0, 150.0), (0.0, WARM_UP_SECONDS)]
)
def test_patience_is_five_slow_blocks_ten_seconds_or_two_minutes_of_warming_up(
    group: FakeTime, slowest: float, seconds: float
) -> None:
    assert patience(slowest) == seconds
    group.slowest = [slowest] * 3
    group.begin(*ALL)
    since = group.now
    assert group.pass_seconds(1000, ALL) is not None
    assert seconds < group.now - since <= seconds + 2


def test_a_host_that_was_asleep_blames_nobody(group: FakeTime) -> None:
    """It was stopped (Ctrl-Z), or the machine slept: the heartbeats of that time are still in the sockets."""
    group.begin(*ALL)
    group.pass_seconds(3, ALL, moving=ALL)
    group.now += 3600
    assert group.supervision.verdict(group.now, ALL) is None
    assert group.pass_seconds(SILENT_SECONDS.__int__() - 4, ALL, moving=ALL) is None


def test_a_rank_that_was_silent_before_the_host_fell_asleep_is_found_after(group: FakeTime) -> None:
    group.pass_seconds(1, set())
    group.silent = {2}
    group.pass_seconds(6, set())
    group.now += 3600
    verdict = group.pass_seconds(6, set())
    assert verdict is not None and verdict.rank == 2


def test_a_slow_look_is_no_sleep(group: FakeTime) -> None:
    group.silent = {0}
    for _ in range(20):
        group.now += ASLEEP_SECONDS
        if group.supervision.verdict(group.now, set()):
            return
    pytest.fail("a silent rank was forgiven at every look")


# ---- what the kernel says of a process


@pytest.fixture
def child() -> Iterator[subprocess.Popen]:
    process = subprocess.Popen(["sleep", "60"])
    yield process
    process.kill()
    process.wait()


def test_a_stopped_process_is_told_from_a_dead_one(child: subprocess.Popen) -> None:
    assert not _is_ending(child.pid)
    child.send_signal(signal.SIGSTOP)
    wait_until(lambda: _process_state(child.pid) == "T", 5, "the process to stop")
    assert not _is_ending(child.pid)
    child.kill()
    wait_until(lambda: _process_state(child.pid) in "ZX", 5, "the process to end")
    assert _is_ending(child.pid)
    child.wait()
    assert _is_ending(child.pid)


def test_a_killed_process_is_ending_at_once(child: subprocess.Popen) -> None:
    """Not only when it is gone: one with gigabytes to give back takes a while."""
    child.kill()
    assert _is_ending(child.pid)


# ---- who is late, long before there is a verdict


def test_nobody_is_late_who_says_so_and_comes_on(group: FakeTime) -> None:
    for working in (set(), ALL):
        group.begin(*working)
        for _ in range(60):
            assert group.pass_seconds(1, working, moving=ALL) is None
            assert group.suspicion(working) is None


@pytest.mark.parametrize("working", [set(), ALL])
def test_a_silent_rank_is_late_after_three_heartbeats(group: FakeTime, working: set[int]) -> None:
    group.begin(*working)
    group.silent = {1}
    group.pass_seconds(int(LATE_SECONDS), working, moving={0, 2})
    assert group.suspicion(working) is None
    group.pass_seconds(1, working, moving={0, 2})
    assert group.suspicion(working) == ("silent", 1, LATE_SECONDS + 1, SILENT_SECONDS)
    group.silent = set()
    group.pass_seconds(1, working, moving=ALL)
    assert group.suspicion(working) is None


def test_a_rank_that_makes_no_progress_is_late_half_way_to_the_verdict(group: FakeTime) -> None:
    group.begin(*ALL)
    group.collectives = [3, 2, 3]
    group.pass_seconds(1 + int(STUCK_SECONDS / 2), ALL)  # the first of them says that it has begun
    assert group.suspicion(ALL) is None
    group.pass_seconds(1, ALL)
    late = group.suspicion(ALL)
    assert late is not None
    assert (late.kind, late.rank, late.limit) == ("stuck", 1, STUCK_SECONDS)


def test_a_first_step_is_given_its_time(group: FakeTime) -> None:
    group.slowest = [0.0] * 3
    group.begin(*ALL)
    group.pass_seconds(int(WARM_UP_SECONDS / 2) - 1, ALL)
    assert group.suspicion(ALL) is None


def test_of_no_ranks_none_is_late() -> None:
    assert Supervision().suspicion(5.0, {0}) is None
