"""Fixtures for tests on a real server: servers of a test's own, and the shipped workflows in API format."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

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
