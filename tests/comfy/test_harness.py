"""The harness on ComfyUI's own nodes: what it reports must be what the server did, before it judges the pack."""

from __future__ import annotations

import pytest

from tools.client import ComfyClient, PromptRejected, Workflow
from tools.comfy import Server


def picture(width: int = 64) -> Workflow:
    return {
        "1": {
            "class_type": "EmptyImage",
            "inputs": {"width": width, "height": 32, "batch_size": 1, "color": 255},
        },
        "2": {"class_type": "SaveImage", "inputs": {"images": ["1", 0], "filename_prefix": "harness"}},
    }


def test_a_workflow_runs_and_its_picture_can_be_fetched(client: ComfyClient) -> None:
    run = client.run(picture())
    assert {event.data.get("node") for event in run.of("executing")} >= {"1", "2"}
    assert len(run.images) == 1
    assert client.get_image(run.images[0].filename).startswith(b"\x89PNG")
    assert client.history(run.prompt_id)["status"]["status_str"] == "success"


def test_a_refused_workflow_names_node_and_reason(client: ComfyClient) -> None:
    with pytest.raises(PromptRejected, match=r"node 1 \(EmptyImage\).*width") as caught:
        client.run(picture(width=-1))
    assert list(caught.value.node_errors) == ["1"]


def test_everything_that_is_written_stays_in_the_base_directory(
    client: ComfyClient, comfy_server: Server
) -> None:
    run = client.run(picture(width=48))
    assert (comfy_server.base.output / run.images[0].filename).is_file()
    assert (comfy_server.base.path / "user" / "comfyui.db").is_file()


def test_the_pack_loads(client: ComfyClient, comfy_server: Server) -> None:
    assert client.object_info("ShardedParallelConfig"), comfy_server.log_tail()
