"""Parking, stopping and coming back in a real ComfyUI: by node, by route and by itself."""

from __future__ import annotations

import io
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from PIL import Image

from tests.support.group_routes import pids, post, raw_post, slots, the_group
from tests.support.processes import wait_until
from tests.support.servers import serving
from tests.support.workflows import pipeline_prompt
from tools import ROOT
from tools.base_directory import BaseDirectory
from tools.client import ComfyClient, Run, Workflow
from tools.comfy import Server

PARK, STOP = "ShardedParkGroup", "ShardedStopGroup"
TEXT = "a red star on white"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server of its own: what is parked and stopped here would disturb the tests that share one."""
    with serving(BaseDirectory.create(tmp_path_factory.mktemp("control"))) as server:
        yield server


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[ComfyClient]:
    with ComfyClient(server.url) as client:
        yield client


def slot_states(client: ComfyClient) -> list[str]:
    return [slot["state"] for slot in slots(client)]


def with_node(workflow: Workflow, kind: str, source: str, *, target: str = "") -> Workflow:
    """The workflow with a node behind `source`, in front of `target` or at the end."""
    changed = {name: {**one, "inputs": dict(one["inputs"])} for name, one in workflow.items()}
    changed["control"] = {"class_type": kind, "inputs": {"anything": [source, 0]}}
    if target:
        inputs = changed[target]["inputs"]
        inputs.update({name: ["control", 0] for name, value in inputs.items() if value == [source, 0]})
    return changed


def wait_idle(client: ComfyClient) -> None:
    """ComfyUI frees between prompts only: until the slots are empty it has not."""
    wait_until(lambda: not slot_states(client), 10, "ComfyUI to free its memory")
    time.sleep(1)


def run_and_hear(client: ComfyClient, workflow: Workflow) -> tuple[Run, list[str]]:
    """The run, and what the node "control" has said."""
    since = time.monotonic()
    run = client.run(workflow)
    texts = [event for event in client.events if event.kind == "text" and event.at >= since]
    return run, [event.data["text"] for event in texts if event.data["node"] == "control"]


def pixels(client: ComfyClient, run: Run) -> bytes:
    (saved,) = run.images
    return Image.open(io.BytesIO(client.get_image(saved.filename, saved.subfolder, saved.type))).tobytes()


# ---- nodes


def test_a_pipeline_parked_behind_the_sampler_decodes_and_comes_back(client: ComfyClient) -> None:
    workflow = pipeline_prompt(tensor=2, seed=1, text=TEXT)
    before = pixels(client, client.run(workflow))
    ranks = pids(client)
    assert len(ranks) == 2
    _, said = run_and_hear(client, with_node(workflow, PARK, "decode"))
    assert said == ["shapes-flux: parked in host RAM"]
    assert the_group(client)["phase"] == "parked"
    assert slot_states(client) == ["parked"]
    # Between sampler and decoder: decoding brings the pipeline back, and the picture is the same.
    run = client.run(with_node(workflow, PARK, "sample", target="decode"))
    assert pixels(client, run) == before
    assert slot_states(client) == ["loaded"]
    assert pids(client) == ranks


def test_the_nodes_act_in_every_run(client: ComfyClient) -> None:
    workflow = with_node(pipeline_prompt(tensor=2, seed=1, text=TEXT), PARK, "load")
    client.run(workflow)
    assert slot_states(client)
    # Everything else is the same and not computed again: what the node has parked stays so.
    run_and_hear(client, workflow)
    assert slot_states(client) == ["parked"]
    assert run_and_hear(client, workflow)[1] == ["Nothing is loaded on the CPU."]


def test_stop_ends_the_ranks_and_the_next_prompt_starts_others(client: ComfyClient) -> None:
    workflow = pipeline_prompt(tensor=2, seed=1, text=TEXT)
    before = pixels(client, client.run(workflow))
    ranks = pids(client)
    _, said = run_and_hear(client, with_node(workflow, STOP, "decode"))
    assert said == ["Stopped 2 ranks on the CPU."]
    assert the_group(client)["phase"] == "stopped"
    assert "Stop Group" in the_group(client)["reason"]
    wait_until(lambda: not any(map(psutil.pid_exists, ranks)), 5, "the ranks to end")
    _, said = run_and_hear(client, {"control": {"class_type": STOP, "inputs": {}}})
    assert said == ["No group is running."]  # and none is started for it
    assert not pids(client)
    client.free()  # ComfyUI forgets its results, and computes them again
    wait_idle(client)
    assert pixels(client, client.run(workflow)) == before
    assert len(pids(client)) == 2


def test_the_nodes_act_on_the_group_of_what_is_connected(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.support.control_probe", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stderr[-3000:]
    one, both = "on-1: parked in host RAM", "on-2: parked in host RAM\non-1: parked in host RAM"
    assert json.loads(done.stdout.splitlines()[-1]) == {
        "Pipeline": [one, "ready", "parked"],
        "Model": [one, "ready", "parked"],
        "Guider": [one, "ready", "parked"],
        "StockModel": [both, "parked", "parked"],
        "latent": [both, "parked", "parked"],
        "again": [
            "Nothing is loaded on the CPU.\nNothing is loaded on the CPU.",
            "parked",
            "parked",
        ],
        "stop": ["Stopped 2 ranks on the CPU.\nStopped 1 rank on the CPU.", "stopped", "stopped"],
        "nothing": ["No group is running.", "stopped", "stopped"],
    }


# ---- the route


def test_the_route_parks_and_restores_between_workflows(client: ComfyClient) -> None:
    workflow = pipeline_prompt(tensor=2, seed=2, text=TEXT)
    before = pixels(client, client.run(workflow))
    ranks = pids(client)
    for path in ("/sharded/group", "/api/sharded/group"):
        body = json.dumps({"action": "park", "group": the_group(client)["id"]}).encode()
        assert raw_post(client, body, path=path)[0] == 202
        wait_until(lambda: the_group(client)["phase"] == "parked", 10, "the group to park")
        assert post(client, "restore") == (202, "")
        wait_until(lambda: slot_states(client) == ["loaded"], 10, "the pipeline to be back")
    assert post(client, "park")[0] == 202
    wait_until(lambda: the_group(client)["phase"] == "parked", 10, "the group to park")
    client.free()
    wait_until(lambda: slot_states(client) == [], 10, "the slot to be empty")
    wait_until(lambda: the_group(client)["phase"] == "ready", 10, "the ranks to be through with it")
    assert post(client, "restore") == (409, "Nothing is parked there.")
    assert pixels(client, client.run(workflow)) == before
    assert pids(client) == ranks


def test_a_working_group_refuses(client: ComfyClient) -> None:
    prompt = client.queue(pipeline_prompt(tensor=2, seed=3, text=TEXT, steps=3000))
    client.wait_for(prompt, lambda event: event.kind == "progress" and event.data["node"] == "sample")
    ranks = pids(client)
    for action in ("park", "restore"):
        status, reason = post(client, action)
        assert status == 409
        assert "Cancel" in reason
    client.interrupt()
    with pytest.raises(Exception, match="interrupted"):
        client.wait(prompt)
    assert pids(client) == ranks
    assert post(client, "stop") == (202, "")
    wait_until(lambda: the_group(client)["phase"] == "stopped", 10, "the group to stop")
    wait_until(lambda: not any(map(psutil.pid_exists, ranks)), 5, "the ranks to end")


def test_other_pages_cannot_ask_whatever_comfyui_allows(client: ComfyClient) -> None:
    client.run(pipeline_prompt(tensor=2, seed=4, text=TEXT))
    ranks = pids(client)
    for headers in (
        {"Origin": "http://evil.example"},
        {"Origin": "null"},
        {"Sec-Fetch-Site": "cross-site"},
        {"Sec-Fetch-Site": "same-site"},
    ):
        assert post(client, "stop", headers)[0] == 403, headers
    assert post(client, "stop", {"Content-Type": "text/plain"})[0] == 415
    body = json.dumps({"action": "stop", "group": "x" * 2000}).encode()
    assert raw_post(client, body)[0] == 413
    assert raw_post(client, b'{"action": "stop", "group": "cuda:GPU-1"}')[0] == 404
    assert raw_post(client, b'{"action": "start", "group": "cpu:0,cpu:1"}')[0] == 400
    assert pids(client) == ranks


@pytest.mark.slow
def test_a_cors_header_does_not_open_the_route(start_server: Any) -> None:
    """ComfyUI compares no origins then, and answers every preflight."""
    server = start_server(arguments=("--enable-cors-header", "*"))
    with ComfyClient(server.url) as client:
        body = b'{"action": "stop", "group": "cpu:0,cpu:1"}'
        assert raw_post(client, body, {"Origin": "http://evil.example"})[0] == 403
        assert raw_post(client, body, {"Origin": server.url})[0] == 404  # no group runs


# ---- by itself


def set_setting(server: Server, client: ComfyClient, name: str, value: object) -> None:
    status, _ = raw_post(client, json.dumps(value).encode(), path=f"/settings/{name}")
    assert status == 200
    saved = json.loads(Path(server.base.path, "user", "default", "comfy.settings.json").read_text())
    assert saved[name] == value


def test_settings_that_the_page_does_not_offer_change_nothing(server: Server, client: ComfyClient) -> None:
    """Or any website could have a group parked again and again, where ComfyUI lets it write settings."""
    client.run(pipeline_prompt(tensor=2, seed=5, text=TEXT))
    set_setting(server, client, "Sharded.Group.ParkAfter", 0.001)
    set_setting(server, client, "Sharded.Group.StopAfter", -1)
    time.sleep(6)  # more than a look of the watch
    assert the_group(client)["phase"] == "ready"
    assert slot_states(client) == ["loaded"]
    assert "Looking for idle groups failed" not in server.log_tail(200)
