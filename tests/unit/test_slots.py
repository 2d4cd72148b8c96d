"""What the host says of slots when their ranks are gone: nothing is held, and asking starts nothing."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from runtime.devices import cpu_devices
from runtime.group import GROUPS, Slot, WorkerGroup
from runtime.spec import Layout, ModelSpec, ParallelSpec, Parked, RankError, SlotInfo

DEVICES = cpu_devices(2)
INFO = SlotInfo(weight_bytes=1, seconds=0.1)


class MockSession(SimpleNamespace):
    """Mock of a life of a group: which rank is dead, and the pid of an agent."""

    def __init__(self) -> None:
        super().__init__(dead=None, ready={0: None, 1: None}, processes=SimpleNamespace(agent_pid=1))

    def find_lost(self) -> None: ...

    def close(self) -> None: ...


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch) -> Iterator[WorkerGroup]:
    """A group that says it runs, and fails the test when it is made to start or called."""
    group = GROUPS.group(DEVICES)
    group._session = MockSession()  # type: ignore[assignment]

    def fails(*_: Any, **__: Any) -> None:
        raise AssertionError("the group was called")

    monkeypatch.setattr(group, "call", fails)
    yield group
    GROUPS.close_all()


@pytest.fixture
def slot(group: WorkerGroup) -> Slot:
    layout = Layout(spec=ParallelSpec(tensor=2), devices=DEVICES, reason="")
    slot = GROUPS.slot(layout, ModelSpec(path="/models/a", pipeline_class="", dtype="float32"))
    group.layouts[slot.name], group.slots[slot.name] = layout, INFO
    return slot


def test_a_slot_of_dead_ranks_is_not_loaded(group: WorkerGroup, slot: Slot) -> None:
    """Or ComfyUI would make no room before it is loaded again."""
    assert slot.loaded
    assert [one["state"] for one in group.snapshot()["slots"]] == ["loaded"]
    group._session.dead = 1  # type: ignore[union-attr]
    assert not slot.loaded
    assert not group.snapshot()["slots"]


@pytest.mark.parametrize("give_back", [Slot.park, Slot.unload])
def test_giving_back_what_dead_ranks_held_starts_no_others(
    group: WorkerGroup, slot: Slot, give_back: Any
) -> None:
    group._session.dead = 0  # type: ignore[union-attr]
    give_back(slot)
    assert not group.slots and not group.parked


def test_a_park_that_fails_leaves_nothing_behind(
    group: WorkerGroup, slot: Slot, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def fails(request: Any, **_: Any) -> None:
        asked.append(type(request).__name__)
        raise RankError("Rank 1 failed")

    monkeypatch.setattr(group, "call", fails)
    slot.park()
    assert asked == ["Park", "Unload"]
    assert not group.slots and not group.parked


def test_what_nobody_holds_any_more_has_not_missed_room_in_ram(
    group: WorkerGroup, slot: Slot, monkeypatch: pytest.MonkeyPatch
) -> None:
    group.slots["an old model-01234567"] = INFO
    answers = {rank: SimpleNamespace(body=Parked(in_host_memory=True)) for rank in range(2)}
    monkeypatch.setattr(group, "call", lambda *_, **__: answers)
    assert GROUPS.park(group) == {slot.name: True}
    assert not group.slots and set(group.parked) == {slot.name}


def test_a_model_that_comes_back_from_host_memory_is_not_called_read(
    group: WorkerGroup, slot: Slot, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ranks themselves report nothing of it: a copy over the bus has no pieces."""
    group.parked[slot.name] = group.slots.pop(slot.name)
    answers = {rank: SimpleNamespace(body=INFO) for rank in range(2)}
    monkeypatch.setattr(group, "call", lambda *_, **__: answers)
    told: list[str] = []
    for _ in range(2):
        slot._load_on(group, lambda progress, _: told.append(progress.phase), None)
        assert told == ["restoring"], "and once it is there, no more"
    assert slot.loaded and not group.parked


def test_what_the_ranks_do_not_tell_of_their_memory_is_unknown(group: WorkerGroup, slot: Slot) -> None:
    assert slot.peak is None
    assert not slot.warming
