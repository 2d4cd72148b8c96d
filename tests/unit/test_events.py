"""What the pages are told without asking: at most twice a second, the last of it always, and only what is new."""

from __future__ import annotations

import asyncio
import importlib
import itertools
import json
import random
import sys
import time
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest

from tools import ROOT


def _pack(*names: str) -> list[Any]:
    """Modules of the pack under a package of their own: nothing of ComfyUI is needed."""
    for name, folder in {"pack_of_events": ROOT, "pack_of_events.nodes": ROOT / "nodes"}.items():
        package = sys.modules[name] = ModuleType(name)
        package.__path__ = [str(folder)]
    return [importlib.import_module(f"pack_of_events.{name}") for name in names]


events, group_module, devices, incidents = _pack(
    "nodes.events", "runtime.group", "runtime.devices", "runtime.incidents"
)
GROUPS = group_module.GROUPS


class FakeLoop:
    """A clock, and what is to be called later: it goes on only when it is told to."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.waiting: list[tuple[float, Callable[[], None]]] = []

    def clock(self) -> float:
        return self.now

    def later(self, seconds: float, function: Callable[[], None]) -> None:
        assert seconds >= 0
        self.waiting.append((self.now + seconds, function))

    def run(self, seconds: float = 0.0) -> None:
        until = self.now + seconds
        while due := sorted((one for one in self.waiting if one[0] <= until), key=lambda one: one[0]):
            self.waiting.remove(due[0])
            self.now = max(self.now, due[0][0])
            due[0][1]()
        self.now = until


class Desk:
    """An announcer of one word, on a fake loop."""

    def __init__(self) -> None:
        self.loop = FakeLoop()
        self.word, self.progress, self.stays_for = "idle", 0, 0.0
        self.sent: list[tuple[float, str]] = []
        self.composed = 0
        self.announcer = events.Announcer(self._compose, self._send, self.loop.later, self.loop.clock)

    def _compose(self) -> tuple[dict[str, Any], float]:
        self.composed += 1
        group = {"stage": self.word, "progress": self.progress}
        return {"seq": self.composed, "groups": [group]}, self.stays_for

    def _send(self, data: dict[str, Any]) -> None:
        self.sent.append((self.loop.now, data["groups"][0]["stage"]))

    def say(self, word: str) -> None:
        self.word = word
        self.announcer.poke()

    @property
    def words(self) -> list[str]:
        return [word for _, word in self.sent]


@pytest.fixture
def desk() -> Desk:
    return Desk()


def test_the_first_change_is_told_at_once(desk: Desk) -> None:
    desk.say("starting")
    desk.loop.run()
    assert desk.sent == [(1000.0, "starting")]


def test_a_burst_is_told_by_its_first_and_its_last(desk: Desk) -> None:
    desk.say("starting")
    desk.loop.run()
    for word in ("loading", "sampling", "decoding"):
        desk.say(word)
        desk.loop.run(0.01)
    desk.loop.run(10)
    assert desk.words == ["starting", "decoding"]
    assert desk.sent[1][0] == pytest.approx(1000.5)


def test_at_most_twice_a_second_and_never_without_the_last(desk: Desk) -> None:
    dice = random.Random(7)
    for number in range(2000):
        desk.say(f"phase {number}")
        desk.loop.run(dice.choice((0.0, 0.001, 0.02, 0.3, 0.7)))
    desk.loop.run(1)
    times = [when for when, _ in desk.sent]
    assert min(later - earlier for earlier, later in zip(times, times[1:], strict=False)) >= 0.5 - 1e-9
    assert desk.words[-1] == "phase 1999"
    assert len(desk.sent) > 100


def test_nothing_is_sent_and_nothing_waits_while_nothing_changes(desk: Desk) -> None:
    desk.say("idle")
    desk.loop.run(1)
    desk.loop.run(3600)
    assert (desk.words, desk.composed, desk.loop.waiting) == (["idle"], 1, [])


def test_what_is_not_new_is_not_sent(desk: Desk) -> None:
    """A stock sampler: between two steps the group is ready for a moment, and it comes on all the time."""
    desk.say("sampling")
    for _ in range(200):
        desk.progress += 1
        desk.announcer.poke()
        desk.loop.run(0.05)
    desk.loop.run(1)
    assert desk.words == ["sampling"]
    assert desk.composed <= 2 * (200 * 0.05 + 1) + 2


def test_what_ends_by_itself_is_looked_at_again(desk: Desk) -> None:
    """The end of a sampling: nothing else happens, and the pages have to know."""
    desk.stays_for = 1.0
    desk.say("sampling")
    desk.loop.run(0.9)
    assert desk.words == ["sampling"]
    desk.word, desk.stays_for = "ready", 0.0
    desk.loop.run(0.2)
    assert desk.words == ["sampling", "ready"]
    desk.loop.run(60)
    assert desk.loop.waiting == []


def test_a_change_comes_before_a_later_look(desk: Desk) -> None:
    desk.stays_for = 30.0
    desk.say("sampling")
    desk.loop.run(2)
    desk.stays_for = 0.0
    desk.say("decoding")
    desk.loop.run(0.01)
    assert desk.words == ["sampling", "decoding"]
    desk.loop.run(60)
    assert desk.words == ["sampling", "decoding"]
    assert desk.composed == 2  # the later look has become needless


def test_on_a_real_loop_threads_that_poke_lose_nothing() -> None:
    async def run() -> None:
        loop, sent, number = asyncio.get_running_loop(), list[tuple[float, int]](), itertools.count(1)
        newest = 0

        def compose() -> tuple[dict[str, Any], float]:
            return {"seq": 0, "groups": [{"stage": newest}]}, 0.0

        def send(data: dict[str, Any]) -> None:
            sent.append((time.monotonic(), data["groups"][0]["stage"]))

        def later(seconds: float, function: Callable[[], None]) -> None:
            loop.call_soon_threadsafe(loop.call_later, seconds, function)

        announcer = events.Announcer(compose, send, later)

        def work() -> None:
            nonlocal newest
            for _ in range(300):
                newest = next(number)
                announcer.poke()
                time.sleep(0.002)

        await asyncio.gather(*(asyncio.to_thread(work) for _ in range(4)))
        last = newest
        await asyncio.sleep(0.7)
        assert sent[-1][1] == last
        times = [when for when, _ in sent]
        assert all(later - earlier > 0.49 for earlier, later in itertools.pairwise(times))

    asyncio.run(run())


# ---- the pack's own


class Wire:
    """What was sent, as the pages get it: through JSON."""

    def __init__(self) -> None:
        self.loop = FakeLoop()
        self.sent: list[tuple[str, dict[str, Any]]] = []
        events.start(self._send, self.loop.later)

    def _send(self, event: str, data: dict[str, Any]) -> None:
        self.sent.append((event, json.loads(json.dumps(data))))


def test_the_pages_hear_of_phases_and_of_incidents_once() -> None:
    wire = Wire()
    group = GROUPS.group(devices.cpu_devices(2))
    try:
        group.state.starting()
        wire.loop.run(1)
        event, data = wire.sent.pop()
        assert event == "sharded.state" and not wire.sent
        assert set(data) == {"api", "version", "server", "seq", "groups"}
        assert data["seq"] == GROUPS.journal.seq
        (told,) = data["groups"]
        assert set(told) == {
            "id",
            "state",
            "stage",
            "doing",
            "warming",
            "cancelling",
            "stalled",
            "stopping",
            "progress",
        }
        assert (told["id"], told["stage"]) == ("cpu:0,cpu:1", "starting")
        GROUPS.journal.note(incidents.lost(group.id, "died", 1, "CPU 1"))
        event, data = wire.sent.pop()
        assert event == "sharded.incident" and not wire.sent
        assert (data["id"], data["api"]) == (f"{data['server']}-1", 1)
        assert data["seq"] == GROUPS.journal.seq and data["time"] > 1.7e9
        wire.loop.run(5)
        assert not wire.sent  # the state is as it was
    finally:
        GROUPS.close_all()
