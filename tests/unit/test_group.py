"""A group whose ranks are threads of the test: starts, calls, cancels, and what becomes of ranks that go wrong.

The sockets and frames are real; the processes are mocked, so that each way of failing is exact and quick.
"""

from __future__ import annotations

import contextlib
import re
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

import pytest

from runtime import group as groups
from runtime import launch, session, supervision, wire
from runtime.devices import cpu_devices
from runtime.engine.pulse import Pulse
from runtime.group import WorkerGroup
from runtime.incidents import Incident
from runtime.spec import Cancel, Cancelled, Device, Done, Failure, Memory, Ping, RankError, Ready, Stats
from tests.support.processes import wait_until


class MockRank:
    """Mock of a rank: threads that dial, say what they do ten times a second, and answer.

    A Stats is answered at once, a Ping when it is cancelled. `fault` is what goes wrong: "late" is never ready,
    "cannot start" says why, "silent" says nothing any more, "hangs" begins and does not end, "fails" reports an error,
    "full" that it has no room.
    """

    def __init__(self, directory: Path, address: str, token: str, rank: int, fault: str):
        self.rank, self.fault = rank, fault
        self.log = launch.rank_log(directory, rank)
        self.log.write_text("a line of its log\n")
        self.pulse = Pulse()
        self.pulse.memory = Memory(host=3 << 29)
        self.pulse.begin("starting" if fault == "late" else "joining")
        self.calls = 0
        self._cancelled = threading.Event()
        self.connection = wire.dial(address, token, rank)
        for target in (self._beat, self._serve):
            threading.Thread(target=target, daemon=True).start()

    def _beat(self) -> None:
        try:
            while True:
                if self.fault != "silent":
                    self.connection.send(0, self.pulse.heartbeat())
                time.sleep(0.1)
        except wire.ConnectionLost:
            return

    def _serve(self) -> None:
        try:
            if self.fault == "cannot start":
                self.connection.send(0, Failure(kind="failed", message="ValueError: no card"))
            elif self.fault != "late":
                self.pulse.end()
                self.connection.send(0, Ready(pid=1, device="CPU", versions={}))
            while True:
                message = self.connection.receive()
                if isinstance(message.body, Cancel):
                    self._cancelled.set()
                elif message.body is not None:
                    self._cancelled.clear()
                    threading.Thread(target=self._answer, args=message[:2], daemon=True).start()
        except wire.ConnectionLost:
            return

    def _answer(self, call: int, request: Any) -> None:
        self.calls += 1
        self.pulse.begin("answering")
        self.pulse.warmed_up()
        reply: Any = Done()
        if self.fault == "hangs":
            return
        if self.fault == "full":
            reply = Failure(kind="memory", message="CUDA out of memory. Tried to allocate 2.00 GiB.")
        elif self.fault == "fails":
            reply = Failure(kind="failed", message="ValueError: no", traceback="where it was")
        elif isinstance(request, Ping):
            self.pulse.agreed()  # the others are in a collective; one that hangs has not come there
            while not self._cancelled.wait(0.02):
                self.pulse.advance()
            reply = Failure(kind="cancelled", message="")
        with contextlib.suppress(wire.ConnectionLost):  # the group was ended meanwhile
            self.connection.send(call, reply)
        self.pulse.end()


class MockProcesses:
    """Mock of the processes of a group."""

    made: ClassVar[list[MockProcesses]] = []
    faults: ClassVar[dict[int, str]] = {}  # of the next start, by rank

    def __init__(
        self,
        directory: Path,
        address: str,
        token: str,
        devices: tuple[Device, ...],
        variables: Mapping[str, str],
    ):
        self.agent_pid, self.killed = 1, False
        self.ranks = [
            MockRank(directory, address, token, rank, self.faults.pop(rank, ""))
            for rank in range(len(devices))
        ]
        self.made.append(self)

    def watch(self, pid: int) -> None: ...

    def agent_ended(self) -> None: ...

    def signal_ranks(self, *numbers: int) -> None:
        for one in self.ranks:
            with one.log.open("a") as log:
                log.write(f"the stack of rank {one.rank}\n")

    def kill(self) -> None:
        self.killed = True
        for one in self.ranks:
            one.connection.close()


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch) -> Iterator[WorkerGroup]:
    """A group of three that waits one second where the real one waits ten, and two in the place of sixty."""
    monkeypatch.setattr(launch, "Processes", MockProcesses)
    monkeypatch.setattr(MockProcesses, "made", [])
    monkeypatch.setattr(MockProcesses, "faults", {})
    for name in ("SILENT_SECONDS", "STUCK_SECONDS"):
        monkeypatch.setattr(supervision, name, 1.0)
    monkeypatch.setattr(session, "WATCH_SECONDS", 0.05)
    monkeypatch.setattr(groups, "START_SECONDS", 2.0)
    monkeypatch.setattr(groups, "GRACE_SECONDS", 0.3)
    group = WorkerGroup(cpu_devices(3))
    yield group
    group.close()


def ranks() -> list[MockRank]:
    return MockProcesses.made[-1].ranks


def incidents(group: WorkerGroup) -> list[Incident]:
    """What the journal tells, the oldest first."""
    return list(reversed(group.journal.incidents))


def stats(group: WorkerGroup) -> int:
    """How many ranks answer."""
    return len(group.call(Stats()))


def later(seconds: float, change: Any) -> None:
    threading.Timer(seconds, change).start()


# ---- start


def test_a_group_starts_once_and_answers(group: WorkerGroup) -> None:
    phases: list[str] = []
    group.state.listen(lambda state: phases.append(state.phase))
    assert stats(group) == stats(group) == 3
    assert len(MockProcesses.made) == 1
    assert phases == ["starting", "ready", "busy", "ready", "busy", "ready"]
    data = group.snapshot()
    assert (data["phase"], data["state"], data["reason"]) == ("ready", "ready", "")
    assert [one["state"] for one in data["ranks"]] == ["ready"] * 3


def test_the_rank_that_holds_up_the_start_is_named_and_not_those_that_wait_for_it(
    group: WorkerGroup,
) -> None:
    MockProcesses.faults[1] = "late"
    with pytest.raises(RankError, match=r"Rank 1 \(CPU 1.*\) was not ready after 2 s") as caught:
        group.start()
    assert (caught.value.rank, caught.value.kind) == (1, "start")
    detail = caught.value.detail
    assert len(str(caught.value).splitlines()) == 3
    assert "the stack of rank 1" in detail and "the stack of rank 0" not in detail
    assert group.snapshot()["state"] == "broken"
    assert stats(group) == 3


def test_a_rank_that_dies_while_the_group_starts_is_named(group: WorkerGroup) -> None:
    MockProcesses.faults[2] = "late"
    later(0.3, lambda: ranks()[2].connection.close())
    with pytest.raises(RankError, match=r"Rank 2 \(CPU 2, pid \d+\) died while starting"):
        group.start()


def test_a_rank_that_fails_while_the_group_starts_is_named_with_its_own_words(group: WorkerGroup) -> None:
    MockProcesses.faults[1] = "cannot start"
    with pytest.raises(RankError, match="Rank 1 .* failed while starting.*ValueError: no card") as caught:
        group.start()
    assert (caught.value.rank, caught.value.kind) == (1, "start")


def test_a_rank_that_only_lost_its_connection_to_a_dead_one_is_not_blamed(group: WorkerGroup) -> None:
    MockProcesses.faults |= {0: "cannot start", 2: "late"}
    later(0.4, lambda: ranks()[2].connection.close())
    with pytest.raises(RankError, match="Rank 2 .* died while starting"):
        group.start()


def test_a_start_is_cancelled_at_once(group: WorkerGroup) -> None:
    MockProcesses.faults[0] = "late"
    start = time.monotonic()
    with pytest.raises(Cancelled):
        group.start(cancelled=lambda: time.monotonic() > start + 0.2)
    assert time.monotonic() - start < 1
    assert MockProcesses.made[-1].killed
    assert group.snapshot()["state"] == "stopped"


# ---- calls


def test_a_cancel_ends_the_call_on_all_ranks_and_no_more(group: WorkerGroup) -> None:
    group.start()
    start = time.monotonic()
    with pytest.raises(Cancelled, match="Cancelled while answering"):
        group.call(Ping(), cancelled=lambda: time.monotonic() > start + 0.2)
    assert time.monotonic() - start < 1
    assert stats(group) == 3
    assert len(MockProcesses.made) == 1


def test_work_that_comes_on_is_left_alone_for_longer_than_a_stuck_rank(group: WorkerGroup) -> None:
    group.start()
    start = time.monotonic()
    with pytest.raises(Cancelled):
        group.call(Ping(), cancelled=lambda: time.monotonic() > start + 2)
    assert len(MockProcesses.made) == 1


@pytest.mark.parametrize(("fault", "kind"), [("silent", "silent"), ("hangs", "stuck")])
def test_a_rank_that_goes_wrong_is_named_with_all_that_is_known(
    group: WorkerGroup, fault: str, kind: str
) -> None:
    group.start()
    ranks()[1].fault = fault
    start = time.monotonic()
    with pytest.raises(RankError, match=rf"Rank 1 \(CPU 1, pid \d+\) was {kind} while answering") as caught:
        group.call(Ping())
    assert time.monotonic() - start < 4
    error = caught.value
    assert (error.rank, error.kind) == (1, kind)
    assert "s after that began" in str(error)
    assert len(str(error).splitlines()) == 3, "what, why, what to do: a node shows no more"
    assert error.detail.count("1.5 GB of host RAM") == 3
    assert "a line of its log\nthe stack of rank 1" in error.detail
    assert ("the others wait for it" in str(error)) == (fault == "hangs")
    assert MockProcesses.made[-1].killed
    assert group.snapshot()["state"] == "broken" and group.reason in str(error)
    assert stats(group) == 3
    assert group.snapshot()["state"] == "ready"


def test_a_rank_that_dies_in_a_call_is_named(group: WorkerGroup) -> None:
    group.start()
    later(0.2, lambda: ranks()[2].connection.close())
    with pytest.raises(RankError, match=r"Rank 2 \(CPU 2, pid \d+\) died while answering") as caught:
        group.call(Ping())
    assert (caught.value.rank, caught.value.kind) == (2, "died")
    assert stats(group) == 3


def test_an_error_of_one_rank_stops_the_others_and_keeps_the_group(group: WorkerGroup) -> None:
    group.start()
    ranks()[1].fault = "fails"
    with pytest.raises(RankError, match="Rank 1 .* failed while answering.*ValueError: no") as caught:
        group.call(Ping())
    assert caught.value.traceback == "where it was"
    ranks()[1].fault = ""
    assert stats(group) == 3
    assert len(MockProcesses.made) == 1


def test_who_does_not_stop_after_the_error_of_another_is_ended_with_the_group(group: WorkerGroup) -> None:
    group.start()
    ranks()[1].fault, ranks()[2].fault = "fails", "hangs"
    with pytest.raises(RankError, match="Rank 1 .* failed"):
        group.call(Ping())
    assert MockProcesses.made[-1].killed
    assert stats(group) == 3


def test_a_failure_of_others_is_not_told_for_that_of_a_rank_on_its_way_out(
    group: WorkerGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A killed process with gigabytes to free keeps its socket for seconds; the others see its links break at once."""
    group.start()
    ranks()[0].fault, ranks()[2].fault = "fails", "hangs"

    def dying(this: Any) -> int | None:
        return 2 if this.working and this.lose(2) else None

    monkeypatch.setattr(session.Session, "find_lost", dying)
    with pytest.raises(RankError, match="Rank 2 .* died"):
        group.call(Ping())


# ---- idle


@pytest.mark.parametrize("fault", ["dies", "silent"])
def test_what_is_left_of_a_group_that_lost_a_rank_while_idle_is_cleared_away(
    group: WorkerGroup, fault: str
) -> None:
    stats(group)
    place = group._session.directory  # type: ignore[union-attr]
    if fault == "dies":
        ranks()[1].connection.close()
    else:
        ranks()[1].fault = fault
    wait_until(lambda: group.snapshot()["state"] == "broken", 3, "the loss to be seen")
    assert "Rank 1 (CPU 1" in group.reason and "while the group was idle" in group.reason
    wait_until(lambda: not place.exists(), 3, "the directory to be removed")
    assert MockProcesses.made[-1].killed and not group.alive
    assert stats(group) == 3
    assert (len(MockProcesses.made), group.reason) == (2, "")


def test_a_rank_whose_process_is_ending_is_not_called_any_more(
    group: WorkerGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its socket is open still."""
    stats(group)
    time.sleep(groups.PAUSE_SECONDS + 0.05)
    first = ranks()
    monkeypatch.setattr(session, "_is_ending", lambda pid: len(MockProcesses.made) == 1)
    assert stats(group) == 3
    assert len(MockProcesses.made) == 2 and [one.calls for one in first] == [1, 1, 1]


def test_a_call_that_finds_a_socket_closed_says_that_nothing_had_begun(group: WorkerGroup) -> None:
    """Whoever called may then try again without a word."""
    group.start()
    connection = group._session.connections[2]  # type: ignore[union-attr]

    def send(*_: Any) -> None:
        raise wire.ConnectionLost("closed")

    connection.send = send  # type: ignore[method-assign]
    with pytest.raises(RankError) as caught:
        group.call(Stats())
    assert (caught.value.rank, caught.value.kind) == (2, "gone")
    assert not incidents(group)
    assert stats(group) == 3
    assert [(one.kind, one.rank) for one in incidents(group)] == [("restarted", 2)]


# ---- stop


def test_a_stop_ends_the_running_call_with_an_error_that_says_so(group: WorkerGroup) -> None:
    group.start()
    later(0.2, lambda: group.stop("Stopped by request."))
    start = time.monotonic()
    with pytest.raises(RankError, match=r"^Stopped by request while answering, \d\.\d s after") as caught:
        group.call(Ping())
    assert time.monotonic() - start < 1
    assert caught.value.kind == "stopped"
    assert len(str(caught.value).splitlines()) == 3
    assert MockProcesses.made[-1].killed
    wait_until(lambda: not group.stopping, 3, "the stop to be through")
    assert (group.snapshot()["state"], group.reason) == ("stopped", "Stopped by request.")
    assert not incidents(group)
    assert stats(group) == 3


def test_a_stop_ends_a_start(group: WorkerGroup) -> None:
    MockProcesses.faults[0] = "late"
    later(0.2, lambda: group.stop("Stopped by request."))
    start = time.monotonic()
    with pytest.raises(RankError, match="^Stopped by request while starting") as caught:
        group.start()
    assert time.monotonic() - start < 1
    assert (caught.value.kind, group.snapshot()["state"]) == ("stopped", "stopped")
    assert not incidents(group)


def test_an_idle_group_is_stopped_at_once(group: WorkerGroup) -> None:
    stats(group)
    group.stop("Stopped by request.")
    assert (group.snapshot()["state"], group.reason, group.alive) == ("stopped", "Stopped by request.", False)
    time.sleep(0.2)
    assert (group.snapshot()["state"], incidents(group)) == ("stopped", [])


def test_what_is_left_of_a_stopped_run_does_not_start_the_group_again(group: WorkerGroup) -> None:
    """A stock sampler's next step would, or the next node; the next run may."""
    with group.working(None, "prompt 7"):
        stats(group)
    group.stop("Stopped by request.")
    with (
        pytest.raises(RankError, match="^Stopped by request between two steps") as caught,
        group.working(None, "prompt 7"),
    ):
        stats(group)
    assert caught.value.kind == "stopped"
    assert len(MockProcesses.made) == 1
    with group.working(None, "prompt 8"):
        assert stats(group) == 3


def test_a_run_that_has_not_used_the_group_for_a_while_starts_it_again(group: WorkerGroup) -> None:
    with group.working(None, "prompt 7"):
        stats(group)
    group.used_at -= groups.IN_USE_SECONDS
    group.stop("Stopped by request.")
    with group.working(None, "prompt 7"):
        assert stats(group) == 3


def test_outside_of_a_run_nothing_is_held_back(group: WorkerGroup) -> None:
    with group.working(None):
        stats(group)
    group.stop("Stopped by request.")
    with group.working(None):
        assert stats(group) == 3


def test_who_holds_a_stopped_group_between_two_calls_hears_of_it_at_the_next(group: WorkerGroup) -> None:
    stats(group)
    phases: list[str] = []
    group.state.listen(lambda state: phases.append(state.phase))
    with group._lock:
        stopper = threading.Thread(target=group.stop, args=("Stopped by request.",))
        stopper.start()
        wait_until(lambda: MockProcesses.made[-1].killed, 3, "the ranks to be ended")
        time.sleep(0.2)
        assert group.stopping and not group.alive
        with pytest.raises(RankError, match="^Stopped by request") as caught:
            group.call(Stats())
    stopper.join(5)
    assert not stopper.is_alive()
    assert (caught.value.kind, len(MockProcesses.made)) == ("stopped", 1)
    assert phases == ["stopped"]  # that ranks are gone is no loss
    assert stats(group) == 3


def test_a_stop_that_comes_with_the_last_answer_is_no_failure(group: WorkerGroup) -> None:
    """The others report what the end of the first does to them."""
    group.start()
    ranks()[1].fault = "fails"
    real, answered = session.Session.next_event, set[int]()

    def stops(one: session.Session) -> Any:
        rank, message = real(one)
        if message is not None:
            answered.add(rank)
        if len(answered) == 3:
            group._stop = "Stopped by request."
        return rank, message

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(session.Session, "next_event", stops)
        with pytest.raises(RankError, match="^Stopped by request") as caught:
            group.call(Ping())
    assert (caught.value.kind, incidents(group)) == ("stopped", [])


# ---- what the journal is told


@pytest.mark.parametrize(
    ("fault", "kind", "text"),
    [
        ("silent", "silent", r"^CPU 1 gave no sign of life for \d s while answering\.$"),
        ("hangs", "stuck", r"^CPU 1 made no progress for \d s while answering\.$"),
        ("fails", "failed", r"^Rank 1 \(CPU 1, pid \d+\) failed while answering, .*: ValueError: no$"),
    ],
)
def test_what_goes_wrong_in_a_call_is_told_once(group: WorkerGroup, fault: str, kind: str, text: str) -> None:
    group.start()
    ranks()[1].fault = fault
    with pytest.raises(RankError):
        group.call(Ping())
    (told,) = incidents(group)
    assert (told.kind, told.rank, told.device, told.group) == (kind, 1, "CPU 1", group.id)
    assert re.match(text, told.text), told.text
    assert "a line of its log" in told.detail
    if fault == "fails":
        ranks()[1].fault = ""
    stats(group)
    time.sleep(0.2)
    assert incidents(group) == [told]  # that it started again is no news


def test_a_rank_that_is_late_is_told_long_before_it_is_given_up(
    group: WorkerGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervision, "LATE_SECONDS", 0.3)
    group.start()
    ranks()[1].fault = "silent"
    heard: list[Any] = []
    group.state.listen(lambda state: heard.append(state.late))
    with pytest.raises(RankError):
        group.call(Ping())
    (late,) = {one[:2] for one in heard if one is not None}
    assert late == ("silent", 1)
    assert sum(one is not None for one in heard) == 1  # not with every second


def test_a_rank_lost_while_idle_is_told_at_once(group: WorkerGroup) -> None:
    stats(group)
    ranks()[2].connection.close()
    wait_until(lambda: bool(incidents(group)), 3, "it to be told")
    assert stats(group) == 3
    (told,) = incidents(group)
    assert (told.kind, told.title) == ("died", "Rank 2 stopped")
    assert told.text == "CPU 2 died while the group was idle."


def test_a_group_found_dead_by_the_next_run_says_that_it_was_started_again(
    group: WorkerGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    stats(group)
    time.sleep(groups.PAUSE_SECONDS + 0.05)
    monkeypatch.setattr(session, "_is_ending", lambda pid: len(MockProcesses.made) == 1)
    assert stats(group) == 3
    (told,) = incidents(group)
    assert (told.kind, told.title) == ("restarted", "The group was started again")


def test_a_start_that_fails_is_told(group: WorkerGroup) -> None:
    MockProcesses.faults[1] = "late"
    with pytest.raises(RankError):
        group.start()
    (told,) = incidents(group)
    assert (told.kind, told.title, told.rank) == ("start", "The group did not start", 1)
    assert re.fullmatch(r"Rank 1 \(CPU 1.*\) was not ready after 2 s\.", told.text)


def test_what_the_pages_are_told_names_no_card_and_no_folder(group: WorkerGroup) -> None:
    """Serial numbers and paths are for this machine only; people paste what they see."""
    cards = tuple(Device(kind="cuda", index=n, uuid=f"GPU-4f5e6d7c-{n}", name="A card") for n in range(2))
    for devices in (cards[:1], cards):
        assert "4f5e" not in WorkerGroup(devices).id
    assert WorkerGroup(cards[:1]).id != WorkerGroup(cards[1:]).id
    group._break("Rank 0 failed while loading: no file /home/somebody/models/a secret.safetensors\nMore.")
    assert group.reason.startswith("Rank 0 failed while loading: no file <")
    assert "somebody" not in group.reason and "secret" not in group.reason and "\n" not in group.reason


def test_an_out_of_memory_is_told_only_when_it_comes_to_the_user(group: WorkerGroup) -> None:
    """A smaller layout may mend it."""
    group.start()
    ranks()[1].fault = "full"
    with pytest.raises(RankError) as caught:
        group.call(Ping())
    assert (caught.value.kind, incidents(group)) == ("memory", [])
    for _ in range(2):
        group.journal.publish(caught.value)
    (told,) = incidents(group)
    assert (told.kind, told.title) == ("memory", "Rank 1 ran out of memory")
    assert told.text == "CPU 1 wanted 2.0 GB more while answering."
    assert told.params.wanted == 2 << 30


def test_a_cancel_is_seen_while_it_is_under_way(group: WorkerGroup) -> None:
    group.start()
    seen: list[bool] = []
    group.state.listen(lambda state: seen.append(state.cancelling))
    start = time.monotonic()
    with pytest.raises(Cancelled):
        group.call(Ping(), cancelled=lambda: time.monotonic() > start + 0.2)
    assert seen == [False, True, False]
    assert not incidents(group)


def test_every_change_raises_the_number(group: WorkerGroup) -> None:
    before = group.journal.seq
    group.start()
    started = group.journal.seq
    stats(group)
    assert before < started < group.journal.seq
    quiet = group.journal.seq
    time.sleep(0.4)  # heartbeats are no change
    assert group.journal.seq == quiet
