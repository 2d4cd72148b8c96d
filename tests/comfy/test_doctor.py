"""The node Doctor (Sharded) in a real ComfyUI: beside a loaded model, and cancelled."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.support.group_routes import pids
from tools.client import ComfyClient, NodeFailed, PromptInterrupted, Workflow
from tools.comfy import Server

DOCTOR: Workflow = {
    "1": {"class_type": "ShardedDoctor", "inputs": {"devices": "cpu"}},
    "2": {"class_type": "PreviewAny", "inputs": {"source": ["1", 0]}},
}


@pytest.mark.slow
def test_the_report_is_text_and_a_loaded_model_stays(
    client: ComfyClient, shipped_workflow: Callable[..., Workflow]
) -> None:
    client.run(shipped_workflow(client, "flux_prefer_tensor", ShardedSample={"steps": 1}))
    before = pids(client)
    run = client.run(DOCTOR)
    (text,) = run.outputs["2"]["text"]
    assert run.outputs["1"]["text"] == [text]
    assert text.startswith("```text\nComfyUI-Sharded doctor") and text.endswith("\n```")
    assert "Everything that was tried works: 2 CPU ranks" in " ".join(text.split())
    assert "ComfyUI unknown" not in text
    assert before and pids(client) == before
    said = [event.data for event in client.events if event.kind == "text"]
    assert any(one["node"] == "1" and "Everything that was tried works" in one["text"] for one in said)


def test_it_can_be_cancelled_and_leaves_nothing(client: ComfyClient, comfy_server: Server) -> None:
    before = {one.pid for one in comfy_server.offspring()}
    prompt = client.queue(DOCTOR)
    client.wait_for(prompt, lambda event: event.kind == "progress" and event.data["value"] > 0)
    client.interrupt()
    with pytest.raises(PromptInterrupted):
        client.wait(prompt, 30)
    assert {one.pid for one in comfy_server.offspring()} <= before


def test_devices_that_do_not_exist_are_refused(client: ComfyClient) -> None:
    workflow = {"1": {"class_type": "ShardedDoctor", "inputs": {"devices": "55"}}}
    with pytest.raises(NodeFailed, match="no GPU 55"):
        client.run(workflow)
