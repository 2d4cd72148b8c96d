"""Fixtures for every suite: the real ComfyUI server, its client, private folders, and the guard against leftovers."""

from __future__ import annotations

import os
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.processes import MARK, command_line, descendants, kill, marked, wait_gone, wait_until
from tests.support.servers import serving
from tools.base_directory import BaseDirectory
from tools.client import ComfyClient
from tools.comfy import Server

# Nothing may wait for a model hub, in this process or in one it starts.
os.environ["HF_HUB_OFFLINE"] = "1"
SESSION = uuid.uuid4().hex
os.environ[MARK] = SESSION

SUITES = ("group", "comfy", "browser")
SERVER_ARGUMENTS = ("--preview-method", "latent2rgb")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A test in tests/group is marked `group`, and so on: the folder says it once for all."""
    here = Path(__file__).parent
    for item in items:
        suite = item.path.relative_to(here).parts[0] if item.path.is_relative_to(here) else ""
        if suite in SUITES:
            item.add_marker(suite)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    """Show what the server said under a failed test."""
    report = yield
    for server in getattr(item, "funcargs", {}).values() if report.failed else ():
        if isinstance(server, Server):
            report.sections.append(("ComfyUI server log (tail)", server.log_tail(40)))
    return report


@pytest.fixture(scope="session", autouse=True)
def nothing_left_running() -> Iterator[None]:
    """The first fixture to begin and the last to end: whatever the tests started must be gone by then."""
    yield
    # Python's own tracker of shared memory ends with the interpreter.
    ours = [
        one
        for one in {*descendants(os.getpid()), *marked(SESSION)}
        if "resource_tracker" not in command_line(one)
    ]
    left = wait_gone(ours, 10)
    names = [f"{one.pid}: {command_line(one)}" for one in left]
    kill(left)
    assert not names, "processes outlived the tests:\n" + "\n".join(names)


@pytest.fixture(scope="session")
def comfy_server() -> Iterator[Server]:
    """One ComfyUI with the pack and the demo model for the whole session. Tests that kill a server make their own."""
    with (
        tempfile.TemporaryDirectory(prefix="comfyui-base-") as folder,
        serving(BaseDirectory.create(Path(folder)), SERVER_ARGUMENTS) as server,
    ):
        yield server


@pytest.fixture
def client(comfy_server: Server) -> Iterator[ComfyClient]:
    """A fresh client; what its test leaves running is cancelled, so that the next test starts from an idle server."""
    assert comfy_server.running, f"the session's server is dead\n{comfy_server.log_tail()}"
    with ComfyClient(comfy_server.url) as client:
        yield client
        if comfy_server.running:
            _settle(client)


def _settle(client: ComfyClient) -> None:
    state = client.queue_state()
    if not state["queue_running"] and not state["queue_pending"]:
        return
    client.clear_queue()
    client.interrupt()
    wait_until(lambda: not client.queue_state()["queue_running"], 60, "the server to become idle")


@pytest.fixture
def base_directory() -> Iterator[BaseDirectory]:
    """A private ComfyUI tree with the pack and the demo model, removed afterwards."""
    with tempfile.TemporaryDirectory(prefix="comfyui-base-") as folder:
        yield BaseDirectory.create(Path(folder))
