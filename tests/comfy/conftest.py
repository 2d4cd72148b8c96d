"""Fixtures for tests on a real server: servers of a test's own, and the shipped workflows in API format."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.support.native_checkpoints import write_checkpoints
from tests.support.native_server import Graphs
from tests.support.processes import wait_until
from tests.support.servers import serving
from tools import ROOT, workflow
from tools.base_directory import BaseDirectory
from tools.client import ComfyClient, Workflow
from tools.comfy import Server


@pytest.fixture
def start_server() -> Iterator[Callable[..., Server]]:
    """`start_server(arguments=(), environment=None, **BaseDirectory.create's)`: a server of the test's own, already up.

    Stopped and removed at the end. The test may stop or kill it before; what outlives the server fails the test.
    """
    with ExitStack() as stack:
        servers: list[Server] = []

        def start(
            arguments: tuple[str, ...] = (), environment: dict[str, str] | None = None, **layout: Any
        ) -> Server:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="comfyui-base-"))
            base = BaseDirectory.create(Path(folder), **layout)
            server = stack.enter_context(Server(base, arguments=arguments, environment=environment))
            servers.append(server)
            return server

        yield start
    left = [name for server in servers for name in server.left_behind]
    assert not left, "processes outlived their server:\n" + "\n".join(left)


@pytest.fixture(scope="session")
def shipped_workflow() -> Callable[..., Workflow]:
    """`shipped_workflow(client, "flux_prefer_tensor", ShardedSample={"steps": 2})`: a file of workflows/ in API format.

    The keywords replace inputs of the nodes of that type.
    """

    def load(client: ComfyClient, stem: str, **changes: dict[str, Any]) -> Workflow:
        api = workflow.to_api(workflow.load(ROOT / "workflows" / f"{stem}.json"), client.object_info)
        for node_type, inputs in changes.items():
            nodes = [node for node in api.values() if node["class_type"] == node_type]
            assert nodes, f"{stem} has no {node_type}"
            for node in nodes:
                node["inputs"].update(inputs)
        return api

    return load


@pytest.fixture(scope="session")
def native_server() -> Iterator[Server]:
    """A ComfyUI with the tiny checkpoints of the native MODEL's tests and the nodes that make their inputs."""
    with tempfile.TemporaryDirectory(prefix="comfyui-base-") as folder:
        packs = {"parity": ROOT / "tests" / "support" / "native_pack"}
        base = BaseDirectory.create(Path(folder), packs=packs, pipelines={})
        write_checkpoints(base.path / "models")
        arguments = ("--preview-method", "latent2rgb", "--use-pytorch-cross-attention")
        with serving(base, arguments) as server:
            yield server


@pytest.fixture(scope="session")
def native_client(native_server: Server) -> Iterator[ComfyClient]:
    with ComfyClient(native_server.url) as client:
        yield client


@pytest.fixture
def graphs(native_server: Server, native_client: ComfyClient) -> Iterator[Graphs]:
    """What a test leaves running is cancelled."""
    yield Graphs(native_server, native_client)
    state = native_client.queue_state()
    if state["queue_running"] or state["queue_pending"]:
        native_client.clear_queue()
        native_client.interrupt()
        wait_until(lambda: not native_client.queue_state()["queue_running"], 60, "the server to become idle")
