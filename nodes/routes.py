"""The pack's routes: one tells the state, one parks, restores or stops a group that exists.

None starts a process, and none takes a path, a name of a model, a URL or a program: a group is named by its devices.
What changes something is asked for by ComfyUI's own page, or by a program that is no browser: see `is_same_origin`.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from typing import Literal
from urllib.parse import urlsplit

import msgspec
from aiohttp import web

from ..runtime.group import GROUPS, WorkerGroup
from ..runtime.spec import RankError

log = logging.getLogger("comfyui-sharded")

BODY_BYTES = 1024  # of a request: the ids of eight cards take a third of it
IN_USE_SECONDS = 30.0  # while a workflow runs: between two steps a group is idle for a moment only

_PORTS = {"http": 80, "https": 443}

Action = Literal["park", "restore", "stop"]


class Wanted(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The body of POST /sharded/group; `group` is an "id" of GET /sharded/state."""

    action: Action
    group: str


def add_to(
    routes: web.RouteTableDef, workflow_runs: Callable[[], bool], is_listed: Callable[[str], bool]
) -> None:
    """`is_listed` says whether ComfyUI would count the memory of a slot of that name if it came back."""

    @routes.get("/sharded/state")
    async def state(_request: web.Request) -> web.Response:
        """Groups, ranks, slots and memory, from what is known already. Read-only; takes no parameters."""
        return web.json_response({"api": 1, "time": round(time.time(), 3), "groups": GROUPS.snapshot()})

    @routes.post("/sharded/group")
    async def change_group(request: web.Request) -> web.Response:
        """202 when it has begun: the result comes with the state. 409 says why it cannot be now."""
        wanted = await _read(request)
        if isinstance(wanted, web.Response):
            return wanted
        group = GROUPS.with_id(wanted.group)
        if group is None:
            return _refused(404, "There is no such group. GET /sharded/state has their ids.")
        if reason := _in_the_way(group, wanted.action, workflow_runs, is_listed):
            return _refused(409, reason)
        # A daemon, or a server that ends would wait for it.
        threading.Thread(target=_act, args=(group, wanted.action), name="sharded-act", daemon=True).start()
        return web.json_response({"action": wanted.action, "group": group.id}, status=202)


# --------------------------------------------------------------------------------------------------------------
# Who asks, and for what


async def _read(request: web.Request) -> Wanted | web.Response:
    """What is asked for, or the refusal of the request."""
    if not is_same_origin(request.headers):
        return _refused(403, "Only ComfyUI's own page may ask for this.")
    if request.content_type != "application/json":
        return _refused(415, "The body has to be application/json.")
    body = b""
    async for part in request.content.iter_any():
        body += part
        if len(body) > BODY_BYTES:
            return _refused(413, f"The body has more than {BODY_BYTES} bytes.")
    try:
        return msgspec.json.decode(body, type=Wanted)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return _refused(400, 'The body has to be {"action": "park", "restore" or "stop", "group": an id}.')


def is_same_origin(headers: Mapping[str, str]) -> bool:
    """Whether a request came from a page of this server, or from a program that is no browser.

    Browsers tell in `Sec-Fetch-Site`, which no page can set, and over plain HTTP from elsewhere than this machine in
    `Origin` only (https://www.w3.org/TR/fetch-metadata/, RFC 6454). ComfyUI compares `Origin` too, but only where the
    server is called by a loopback name, and not at all under --enable-cors-header.
    """
    site = headers.get("Sec-Fetch-Site")
    if site is not None:
        return site == "same-origin"
    origin = headers.get("Origin")
    if origin is None:
        return True
    scheme, _, asks = origin.partition("://")
    asked = headers.get("Host", "")
    return scheme in _PORTS and _place(asks, scheme) == _place(asked, scheme)


def _place(authority: str, scheme: str) -> tuple[str | None, int | str]:
    """Host and port of "host:port", in which the scheme's own port may be left out."""
    try:
        parts = urlsplit(f"//{authority}")
        return parts.hostname, parts.port or _PORTS[scheme]
    except ValueError:
        return None, authority


def _refused(status: int, reason: str) -> web.Response:
    return web.json_response({"error": reason}, status=status)


# --------------------------------------------------------------------------------------------------------------
# What is done


def _in_the_way(
    group: WorkerGroup, action: Action, workflow_runs: Callable[[], bool], is_listed: Callable[[str], bool]
) -> str:
    """Why it cannot be done now, or ""."""
    with group.unless_busy() as free:
        if not free:
            doing = group.state.current.doing or "used"
            return f"The group is busy ({doing}). Cancel the workflow first, or wait for its end."
        if group.state.current.phase == "stopped":
            return "The group does not run."
        if workflow_runs() and time.monotonic() - group.used_at < IN_USE_SECONDS:
            return "A workflow is using the group. Cancel it first, or wait for its end."
        if action == "restore":
            if reason := GROUPS.cannot_restore(group):
                return reason
            if not all(map(is_listed, group.parked)):
                return "ComfyUI has taken its place. The next workflow that needs it brings it back."
    return ""


def _act(group: WorkerGroup, action: Action) -> None:
    with group.unless_busy() as free:
        if not free:  # a workflow was quicker
            log.warning("Cannot %s the group on %s: it is busy.", action, group.where)
            return
        try:
            if action == "park":
                GROUPS.park(group)
            elif action == "restore":
                GROUPS.restore(group)
            else:
                GROUPS.retries.forget()
                group.close("Stopped by request.")
        except RankError as error:
            log.warning("Cannot %s the group on %s: %s", action, group.where, str(error).partition("\n")[0])
