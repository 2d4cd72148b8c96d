"""The pack's two routes, asked through a client: what the state says of the groups, and what asks for a change.

GET /sharded/state is in the form of runtime/shown.py; POST /sharded/group is in nodes/routes.py.
"""

from __future__ import annotations

import http.client
import json
from typing import Any
from urllib.parse import urlsplit

from tools.client import ComfyClient

ASK_SECONDS = 20.0


def raw_state(client: ComfyClient) -> bytes:
    """As it was sent, for a test of its size."""
    return client.get("/sharded/state")


def state(client: ComfyClient) -> dict[str, Any]:
    return dict(json.loads(raw_state(client)))


def groups(client: ComfyClient) -> list[dict[str, Any]]:
    return list(state(client)["groups"])


def the_group(client: ComfyClient) -> dict[str, Any]:
    """The only one; ValueError where there is none, or another."""
    (one,) = groups(client)
    return one


def ranks(client: ComfyClient) -> list[dict[str, Any]]:
    """Those of all groups."""
    return [rank for group in groups(client) for rank in group["ranks"]]


def pids(client: ComfyClient) -> list[int]:
    """Of the ranks that have a process."""
    return [rank["pid"] for rank in ranks(client) if rank["pid"]]


def slots(client: ComfyClient) -> list[dict[str, Any]]:
    """Those of all groups."""
    return [slot for group in groups(client) for slot in group["slots"]]


def post(client: ComfyClient, action: str, headers: dict[str, str] | None = None) -> tuple[int, str]:
    """Ask for "park", "restore" or "stop" of the only group: the status, and the reason of a refusal."""
    body = json.dumps({"action": action, "group": the_group(client)["id"]})
    return raw_post(client, body.encode(), headers)


def raw_post(
    client: ComfyClient, body: bytes, headers: dict[str, str] | None = None, path: str = "/sharded/group"
) -> tuple[int, str]:
    """Any body and any headers, which the client's own requests do not have: the status, and the reason."""
    address = urlsplit(client.base_url)
    connection = http.client.HTTPConnection(address.hostname or "", address.port, timeout=ASK_SECONDS)
    try:
        connection.request("POST", path, body, {"Content-Type": "application/json", **(headers or {})})
        answer = connection.getresponse()
        text = answer.read()
    finally:
        connection.close()
    return answer.status, json.loads(text).get("error", "") if text.startswith(b"{") else ""
