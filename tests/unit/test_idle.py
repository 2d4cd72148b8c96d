"""A group that nobody uses parks and then stops by itself, and one that works is left alone."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from runtime.devices import cpu_devices
from runtime.group import WorkerGroup
from runtime.idle import PARK_MINUTES, STOP_MINUTES, IdleTimes, IdleWatch, due
from runtime.registry import Registry
from runtime.spec import Layout, ModelSpec, ParallelSpec, Parked, RankError, SlotInfo
from tools import ROOT

TEN = IdleTimes(park_after=600)
BOTH = IdleTimes(park_after=600, stop_after=3600)
DEVICES = cpu_devices(2)


@pytest.mark.parametrize(
    ("idle", "holds", "times", "action"),
    [
        (0, True, BOTH, ""),
        (599, True, BOTH, ""),
        (600, True, BOTH, "park"),
        (3599, True, BOTH, "park"),
        (600, False, BOTH, ""),
        (3600, False, BOTH, "stop"),
        (3600, True, BOTH, "stop"),
        (1e9, True, TEN, "park"),
        (1e9, False, TEN, ""),
        (1e9, True, IdleTimes(), ""),
        (60, True, IdleTimes(park_after=600, stop_after=60), "stop"),
    ],
)
def test_what_is_due(idle: float, holds: bool, times: IdleTimes, action: str) -> None:
    assert due(idle, holds, times) == action


# ---- the watch


class MockSession(SimpleNamespace):
    """Mock of a life of a group: alive until it is closed, and no processes."""

    def __init__(self) -> None:
        super().__init__(dead=None, closed=False)

    def close(self) -> None:
        self.closed = True


class Office:
    """A group with a model on it, its watch, and a fake clock."""

    def __init__(self) -> None:
        self.groups = Registry(WorkerGroup)
        self.group = self.groups.group(DEVICES)
        self.session = self.group._session = MockSession()  # type: ignore[assignment]
        self.group.state.starting()
        layout = Layout(spec=ParallelSpec(tensor=2), devices=DEVICES, reason="")
        self.slot = self.groups.slot(layout, ModelSpec(path="/models/a", pipeline_class="", dtype="float32"))
        self.name = self.slot.name
        self.group.layouts[self.name] = layout
        self.group.slots[self.name] = SlotInfo(weight_bytes=1, seconds=0.1)
        self.group.settle()
        self.in_ram, self.asked = True, list[str]()
        self.group.call = self._answer  # type: ignore[method-assign]
        self.now = self.group.used_at = 1000.0
        self.times = BOTH
        self.watch = IdleWatch(self.groups, lambda: self.times, lambda: self.now)

    def _answer(self, request: Any, **how: Any) -> dict[int, Any]:
        assert how == {"start": False}, "an idle group was asked in a way that could start one"
        self.asked.append(type(request).__name__)
        if not self.in_ram and self.asked == ["Park"]:
            raise RankError("Rank 1 failed")
        return {rank: SimpleNamespace(body=Parked(in_host_memory=True)) for rank in (0, 1)}

    def after(self, seconds: float) -> str:
        """The group's phase after a look at that time."""
        self.now = 1000.0 + seconds
        self.watch.look()
        return self.group.state.current.phase


@pytest.fixture
def office() -> Iterator[Office]:
    office = Office()
    yield office
    office.groups.close_all()


def test_it_parks_once_and_stops_later(office: Office) -> None:
    assert office.after(599) == "ready"
    assert office.after(600) == "parked"
    assert set(office.group.parked) == {office.name}
    assert office.after(3000) == "parked"
    assert office.asked == ["Park"]
    assert office.after(3600) == "stopped"
    assert office.session.closed
    assert office.group.reason == "Stopped by itself: it was not used for 60 min."
    assert office.after(9999) == "stopped"


def test_the_times_count_from_the_last_use(office: Office) -> None:
    """Also of a use that failed; parking itself is none."""
    assert office.after(500) == "ready"
    office.group.used_at = office.now
    assert office.after(1099) == "ready"
    assert office.after(1100) == "parked"
    assert office.after(4100) == "stopped"


def test_a_use_is_noted_when_it_ends(office: Office) -> None:
    before = office.group.used_at
    office.group.start = lambda *_: None  # type: ignore[method-assign]
    with pytest.raises(ZeroDivisionError), office.slot.held():
        raise ZeroDivisionError
    assert office.group.used_at != before


def test_a_changed_setting_counts_at_once(office: Office) -> None:
    office.times = IdleTimes()
    assert office.after(1e6) == "ready"
    office.times = TEN
    assert office.after(1e6) == "parked"


def test_a_group_that_works_is_left_alone(office: Office) -> None:
    """However long its call takes: the watch does not even wait for it."""
    inside, done = threading.Event(), threading.Event()

    def work() -> None:
        with office.group.unless_busy() as free:
            assert free
            inside.set()
            done.wait(10)

    worker = threading.Thread(target=work)
    worker.start()
    assert inside.wait(10)
    assert office.after(1e6) == "ready"
    done.set()
    worker.join()
    assert office.after(1e6) == "stopped"


def test_a_group_whose_rank_died_is_not_touched(office: Office) -> None:
    office.session.dead = 1
    office.after(1e6)
    assert not office.asked
    assert not office.session.closed


def test_no_settings_are_read_while_no_group_runs(office: Office) -> None:
    office.group.close()
    office.times = None  # type: ignore[assignment]
    office.watch._times = lambda: pytest.fail("settings were read")
    office.watch.look()


def test_what_cannot_be_parked_is_dropped(office: Office) -> None:
    office.in_ram = False
    assert office.after(600) == "ready"
    assert office.asked == ["Park", "Unload"]
    assert not office.group.slots and not office.group.parked


def test_what_nobody_holds_is_unloaded_instead(office: Office) -> None:
    office.groups._slots.pop(office.name)
    office.after(600)
    assert office.asked == ["Unload"]
    assert not office.group.slots


# ---- its settings


@pytest.mark.parametrize(
    ("park", "stop", "times"),
    [
        ([], [], TEN),
        ([None], [None], TEN),
        ([5], [60], IdleTimes(300, 3600)),
        ([0], [0], IdleTimes()),
        ([5, 60, None], [30, 240], IdleTimes(3600, 14400)),
        ([5, 0], [30, 0], IdleTimes()),
        # What only somebody who goes past the page can write
        ([0.001, -5, 1, 10**30], [1, 1e-9], TEN),
        (["5", True, False, [5], {"minutes": 5}, float("nan")], ["0", False, {}], TEN),
    ],
)
def test_what_the_settings_mean(park: list[object], stop: list[object], times: IdleTimes) -> None:
    assert IdleTimes.of_settings(park, stop) == times


def test_the_page_and_the_server_know_the_same_choices() -> None:
    page = json.loads((ROOT / "web" / "declared.json").read_text(encoding="utf-8"))
    declared = {one["id"]: one for one in page["settings"]}
    texts = json.loads((ROOT / "locales" / "en" / "settings.json").read_text(encoding="utf-8"))
    for name, offered in {"ParkAfter": PARK_MINUTES, "StopAfter": STOP_MINUTES}.items():
        setting, told = declared[f"Sharded.Group.{name}"], texts[f"Sharded_Group_{name}"]
        choices = {one["text"]: one["value"] for one in setting["options"]}
        assert sorted(choices.values()) == sorted(offered)
        assert setting["defaultValue"] == offered[0]
        assert (setting["name"], setting["tooltip"]) == (told["name"], told["tooltip"])
        assert set(told["options"]) == set(choices)
