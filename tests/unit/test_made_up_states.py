"""The states that tests of the page make up could have come from the server: the same names, and no more bytes."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest

from runtime import incidents, shown
from runtime.activity import Run
from runtime.devices import cpu_devices
from runtime.group import WorkerGroup
from runtime.journal import Journal
from runtime.spec import Layout, ParallelSpec
from tests.browser import states

# What the host alone knows, and adds.
BY_THE_HOST = {"api", "version", "comfyui", "time"}


@pytest.fixture
def group() -> WorkerGroup:
    """Two ranks on the CPU that were never started."""
    return WorkerGroup(cpu_devices(2))


def told(group: WorkerGroup) -> dict[str, Any]:
    no_cards: Any = SimpleNamespace(seen=())
    return shown.state(Journal(), [group], no_cards, wall=0.0)


def names(data: dict[str, Any]) -> set[str]:
    return set(data)


def test_the_answer_and_its_devices(group: WorkerGroup) -> None:
    real, made_up = told(group), states.state(states.group())
    assert names(made_up) == names(real) | BY_THE_HOST
    assert names(made_up["devices"][0]) == names(real["devices"][0])


def test_a_group_and_its_ranks(group: WorkerGroup) -> None:
    (real,), made_up = told(group)["groups"], states.group()
    assert names(made_up) == names(real)
    assert names(made_up["ranks"][0]) == names(real["ranks"][0])
    assert names(made_up["ranks"][0]["memory"]) == names(real["ranks"][0]["memory"])


def test_a_slot(group: WorkerGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    held: Any = SimpleNamespace(weight_bytes=1, seconds=1.0)
    monkeypatch.setattr(WorkerGroup, "alive", property(lambda _self: True))
    group.slots["a model"] = held
    group.layouts["a model"] = Layout(spec=ParallelSpec(tensor=2), devices=group.devices, reason="")
    assert names(states.slot()) == names(told(group)["groups"][0]["slots"][0])


def test_an_incident_and_a_run(group: WorkerGroup) -> None:
    real = shown.incident_as_data(incidents.restarted("a group", 1, "CPU 1"), wall=0.0)
    assert names(states.incident()) == names(real)
    assert names(states.incident()["params"]) == names(real["params"])
    group.activity.run = Run(slot="a model", began=1.0)
    assert names(states.last_run()) == names(told(group)["last_run"])


def test_an_event(group: WorkerGroup) -> None:
    real, _open_for = shown.news(Journal(), [group])
    made_up = states.event(states.state(states.group()))
    assert names(made_up) == names(real) | {"api", "version"}
    assert names(made_up["groups"][0]) == names(real["groups"][0])


def test_each_fits_into_an_answer() -> None:
    for name, phase in states.PHASES.items():
        if isinstance(phase.answer, dict):
            assert len(json.dumps(phase.answer, separators=(",", ":"))) <= shown.LIMIT_BYTES, name
