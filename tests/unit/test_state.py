"""The state of a group: one value that changes in one place, and what is told of it."""

from __future__ import annotations

import pytest

from runtime.devices import cpu_devices
from runtime.spec import Heartbeat, Memory
from runtime.state import PHASES, GroupState, StateMachine, as_data, memory_lines


@pytest.fixture
def machine() -> StateMachine:
    """A group of two ranks that is ready."""
    machine = StateMachine(cpu_devices(2))
    machine.starting()
    for rank in (0, 1):
        machine.rank_joined(rank, 100 + rank)
        machine.rank_ready(rank)
    machine.ready()
    return machine


def beat(doing: str = "", host: int | None = None) -> Heartbeat:
    memory = Memory(host=host)
    return Heartbeat(memory=memory, beat=1, doing=doing, progress=0, collectives=0, slowest=0.0)


def test_a_group_goes_through_its_phases_and_every_listener_hears_them() -> None:
    machine, heard = StateMachine(cpu_devices(1)), []
    machine.listen(lambda state: heard.append((state.phase, state.legacy_phase)))
    machine.starting()
    machine.ready()
    machine.busy("sample", "sampling", "a model")
    machine.ready(parked=True)
    machine.broken("Rank 0 died.")
    machine.ended("Stopped by hand.")
    assert heard == [
        ("starting", "starting"),
        ("ready", "ready"),
        ("busy", "sample"),
        ("parked", "parked"),
        ("broken", "stopped"),
        ("stopped", "stopped"),
    ]
    assert {phase for phase, _ in heard} == set(PHASES)


def test_what_was_lost_is_ready_only_after_another_start(machine: StateMachine) -> None:
    machine.broken("Rank 0 died.")
    machine.ready()
    assert (machine.current.phase, machine.current.reason) == ("broken", "Rank 0 died.")
    machine.starting()
    machine.ready()
    assert (machine.current.phase, machine.current.reason) == ("ready", "")


def test_a_rank_lost_while_idle_breaks_the_group_and_is_named(machine: StateMachine) -> None:
    machine.rank_lost(1, "died")
    assert machine.current.phase == "broken"
    assert machine.current.reason == "Rank 1 (CPU 1, pid 101) died while the group was idle."
    assert [one["state"] for one in as_data(machine.current)["ranks"]] == ["ready", "dead"]


def test_a_rank_lost_in_a_call_is_told_by_who_runs_the_call(machine: StateMachine) -> None:
    machine.busy("load", "loading", "a model")
    machine.rank_lost(1, "died")
    assert machine.current.phase == "busy"


def test_a_listener_that_fails_stops_neither_the_change_nor_the_others(machine: StateMachine) -> None:
    def fails(_: GroupState) -> None:
        raise ValueError

    heard: list[str] = []
    machine.listen(fails)
    machine.listen(lambda state: heard.append(state.phase))
    machine.busy("ping", "answering")
    assert heard == [machine.current.phase] == ["busy"]


def test_a_state_is_not_changed_by_what_comes_after(machine: StateMachine) -> None:
    before = machine.current
    machine.rank_heard(0, beat("sampling"), 5.0)
    machine.busy("sample", "sampling", "a model")
    assert before.ranks[0].heartbeat is None and before.phase == "ready"


def test_the_route_says_what_it_always_said_and_more(machine: StateMachine) -> None:
    machine.rank_heard(0, beat("sampling", host=3 << 30), machine.current.since)
    machine.busy("forward", "sampling", "a model")
    data = as_data(machine.current)
    assert (data["phase"], data["state"], data["doing"], data["slot"]) == (
        "forward",
        "busy",
        "sampling",
        "a model",
    )
    first, second = data["ranks"]
    assert (first["pid"], first["device"], first["label"], first["state"]) == (100, "cpu:0", "CPU 0", "ready")
    assert first["memory"]["host"] == 3 << 30 and first["memory_age"] is not None
    assert second["memory_age"] is None


def test_errors_tell_the_memory_of_every_device_that_is_known(machine: StateMachine) -> None:
    assert memory_lines(machine.current) == ""
    machine.rank_heard(1, beat(host=3 << 29), 5.0)
    assert memory_lines(machine.current) == "Rank 1 (CPU 1, pid 101): 1.5 GB of host RAM"
