"""What a real server tells of its groups: the state that the panel asks for, and the events that wake it up."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.support.group_routes import post, raw_state, state, the_group
from tests.support.processes import wait_until
from tests.support.servers import serving
from tests.support.workflows import pipeline_prompt
from tools.base_directory import BaseDirectory
from tools.client import ComfyClient, Event, NodeFailed, Workflow
from tools.comfy import Server

TOP = {
    "api",
    "version",
    "comfyui",
    "server",
    "seq",
    "time",
    "devices",
    "cpu_ranks",
    "auto_ranks",
    "groups",
    "incidents",
    "last_run",
}
TEXT = "a green square on white"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server of its own: here groups are stopped and ranks killed."""
    with serving(BaseDirectory.create(tmp_path_factory.mktemp("state"))) as server:
        yield server


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[ComfyClient]:
    with ComfyClient(server.url) as client:
        yield client


def told(client: ComfyClient, kind: str, since: float) -> list[Event]:
    return [event for event in client.events if event.kind == kind and event.at >= since]


def stages(client: ComfyClient, since: float) -> list[str]:
    """What the events say that the group was doing, without repeats."""
    found: list[str] = []
    for event in told(client, "sharded.state", since):
        (one,) = event.data["groups"]
        if found[-1:] != [one["stage"]]:
            found.append(one["stage"])
    return found


def in_order(wanted: list[str], found: list[str]) -> bool:
    rest = iter(found)
    return all(one in rest for one in wanted)


class Watcher:
    """Asks for the state all the time, as an open panel does but faster."""

    def __init__(self, client: ComfyClient):
        self._client, self._over = client, threading.Event()
        self.answers: list[dict[str, Any]] = []
        self.largest = 0
        self._thread = threading.Thread(target=self._watch)

    def __enter__(self) -> Watcher:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join(20)

    def _watch(self) -> None:
        while not self._over.wait(0.1):
            raw = raw_state(self._client)
            self.largest = max(self.largest, len(raw))
            self.answers.append(json.loads(raw))

    def groups(self) -> list[dict[str, Any]]:
        return [one["groups"][0] for one in self.answers if one["groups"]]


def begin_sampling(client: ComfyClient, **inputs: Any) -> str:
    """Queue a long run, and wait until it samples."""
    prompt = client.queue(pipeline_prompt(tensor=2, text=TEXT, steps=3000, **inputs))
    client.wait_for(prompt, lambda event: event.kind == "progress" and event.data["node"] == "sample")
    return prompt


# ---- the state


def test_before_any_group_the_machine_is_told(client: ComfyClient) -> None:
    answer = state(client)
    assert set(answer) == TOP
    assert (answer["groups"], answer["incidents"], answer["last_run"]) == ([], [], None)
    assert answer["devices"]
    for device in answer["devices"]:
        assert device["label"] and (device["total"] is None or device["total"] > 0)
        assert (device["weights"], device["group"]) == (0, None)
    assert abs(answer["time"] - time.time()) < 5
    assert answer["version"] and answer["comfyui"]


def test_a_run_is_told_from_its_start_to_its_end(client: ComfyClient) -> None:
    since = time.monotonic()
    with Watcher(client) as watcher:
        client.run(pipeline_prompt(tensor=2, text=TEXT, steps=400))
        ended = time.monotonic()
        wait_until(lambda: stages(client, since)[-1:] == ["ready"], 3, "the pages to hear of its end")
    assert time.monotonic() - ended < 2
    assert in_order(["starting", "loading", "sampling", "ready"], stages(client, since)), stages(
        client, since
    )
    times = [event.at for event in told(client, "sharded.state", since)]
    # All together: two may come closer to each other than they were sent, by what the way takes.
    assert len(times) <= 2 * (times[-1] - times[0]) + 2
    assert watcher.largest <= 8192
    numbers = [one["seq"] for one in watcher.answers]
    assert numbers == sorted(numbers) and numbers[-1] > numbers[0]
    made = [
        (one["progress"]["done"], one["progress"]["total"])
        for one in watcher.groups()
        if one["stage"] == "sampling" and one["progress"]
    ]
    assert made == sorted(made) and {total for _, total in made} == {400}
    assert any(one["step_seconds"] for one in watcher.groups())
    last = state(client)["last_run"]
    assert (last["steps"], last["unit"], last["running"]) == (400, "steps", False)
    assert last["load"] > 0 and last["sampling"] > 0 and last["decode"] > 0
    assert len(last["step_seconds"]) == 48
    rows = {one["key"]: one for one in state(client)["devices"]}
    assert rows["cpu:0"]["weights"] > 0 and rows["cpu:1"]["weights"] > 0
    assert the_group(client)["degrees"]["tensor"] == 2 and the_group(client)["start_seconds"] > 0


def test_nothing_is_sent_while_nothing_changes(client: ComfyClient) -> None:
    client.run(pipeline_prompt(tensor=2, text=TEXT, seed=11))
    wait_until(lambda: the_group(client)["stage"] == "ready", 5, "the run to be over")
    time.sleep(1.5)
    since, before = time.monotonic(), state(client)["seq"]
    time.sleep(4)
    assert not told(client, "sharded.state", since)
    assert state(client)["seq"] == before


def test_a_stock_sampler_is_told_in_steps_and_as_one_sampling(
    client: ComfyClient, shipped_workflow: Callable[..., Workflow]
) -> None:
    prompt = shipped_workflow(client, "flux_stock_ksampler", KSampler={"steps": 60})
    client.run(prompt)  # loads
    prompt = shipped_workflow(client, "flux_stock_ksampler", KSampler={"steps": 60, "seed": 99})
    since = time.monotonic()
    with Watcher(client) as watcher:
        client.run(prompt)
        wait_until(lambda: stages(client, since)[-1:] == ["ready"], 3, "the pages to hear of its end")
    made = [
        (one["progress"]["done"], one["progress"]["total"])
        for one in watcher.groups()
        if one["stage"] == "sampling" and one["progress"]
    ]
    assert made == sorted(made) and {total for _, total in made} == {60}
    assert {one["progress"]["unit"] for one in watcher.groups() if one["progress"]} <= {"steps"}
    assert stages(client, since).count("sampling") == 1, "between two steps it is no other phase"
    assert len(told(client, "sharded.state", since)) <= 6
    assert state(client)["last_run"]["steps"] == 60


# ---- a stop


def test_a_stop_ends_the_run_with_an_error_that_says_so(client: ComfyClient) -> None:
    incidents = state(client)["incidents"]
    prompt = begin_sampling(client, seed=3)
    for action in ("park", "restore"):
        assert post(client, action)[0] == 409
    assert post(client, "stop") == (202, "")
    with pytest.raises(NodeFailed) as caught:
        client.wait(prompt, 20)
    assert caught.value.message.startswith("Stopped by request while sampling, ")
    assert len(caught.value.message.splitlines()) == 3
    wait_until(lambda: the_group(client)["state"] == "stopped", 10, "the group to stop")
    assert (the_group(client)["reason"], the_group(client)["stopping"]) == ("Stopped by request.", False)
    assert state(client)["incidents"] == incidents
    client.run(pipeline_prompt(tensor=2, text=TEXT, seed=4))


@pytest.mark.slow
def test_a_stop_ends_a_stock_sampler_wherever_it_is(
    client: ComfyClient, shipped_workflow: Callable[..., Workflow]
) -> None:
    """In a step, or on the host between two: it must not start the group again for the rest of its steps."""
    for seed in range(3):
        prompt = client.queue(
            shipped_workflow(client, "flux_stock_ksampler", KSampler={"steps": 3000, "seed": 1000 + seed})
        )
        client.wait_for(prompt, lambda event: event.kind == "progress" and event.data["max"] == 3000, 120)
        assert post(client, "stop") == (202, "")
        with pytest.raises(NodeFailed) as caught:
            client.wait(prompt, 20)
        assert caught.value.message.startswith("Stopped by request ")
        wait_until(lambda: the_group(client)["state"] == "stopped", 10, "the group to stop")
        time.sleep(1)
        assert the_group(client)["state"] == "stopped"


# ---- incidents


@pytest.mark.slow
def test_a_rank_that_dies_is_told_once_and_the_next_run_says_nothing(client: ComfyClient) -> None:
    client.run(pipeline_prompt(tensor=2, text=TEXT, seed=5))
    since = time.monotonic()
    prompt = begin_sampling(client, seed=6)
    os.kill(the_group(client)["ranks"][1]["pid"], signal.SIGKILL)
    with pytest.raises(NodeFailed):
        client.wait(prompt, 30)
    wait_until(lambda: bool(told(client, "sharded.incident", since)), 5, "the pages to hear of it")
    (event,) = told(client, "sharded.incident", since)
    newest = state(client)["incidents"][0]
    assert newest["id"] == event.data["id"]
    assert (newest["kind"], newest["rank"], newest["device"]) == ("died", 1, "CPU 1")
    assert newest["title"] == "Rank 1 stopped"
    assert newest["text"].startswith("CPU 1 died while sampling, at step ")
    assert newest["params"]["steps"] == 3000
    assert len(newest["detail"]) <= 1500 and os.path.expanduser("~/") not in newest["detail"]
    assert the_group(client)["state"] == "broken"
    client.run(pipeline_prompt(tensor=2, text=TEXT, seed=7))
    time.sleep(1)
    assert len(told(client, "sharded.incident", since)) == 1
    assert the_group(client)["state"] == "ready"


def test_a_rank_that_dies_while_idle_is_told_at_once(client: ComfyClient) -> None:
    client.run(pipeline_prompt(tensor=2, text=TEXT, seed=8))
    since = time.monotonic()
    os.kill(the_group(client)["ranks"][0]["pid"], signal.SIGKILL)
    wait_until(lambda: bool(told(client, "sharded.incident", since)), 5, "the pages to hear of it")
    assert state(client)["incidents"][0]["text"] == "CPU 0 died while the group was idle."


# ---- who took the models away


@pytest.mark.slow
def test_who_parked_a_group_is_told(client: ComfyClient) -> None:
    client.run(pipeline_prompt(tensor=2, text=TEXT, seed=9))
    wait_until(lambda: post(client, "park")[0] == 202, 10, "the workflow to be over")
    wait_until(lambda: the_group(client)["stage"] == "parked", 10, "the group to park")
    assert the_group(client)["parked_by"] == "user"
    assert [one["weights"] for one in state(client)["devices"]] == [0, 0]
    assert the_group(client)["slots"][0]["total_bytes"] > the_group(client)["slots"][0]["weight_bytes"]
    client.run(pipeline_prompt(tensor=2, text=TEXT, seed=10))
    assert the_group(client)["parked_by"] == ""
    assert the_group(client)["slots"][0]["restore_seconds"] is not None
    client.free()
    wait_until(lambda: not the_group(client)["slots"], 10, "ComfyUI to free its memory")
    assert the_group(client)["parked_by"] == "comfyui"
