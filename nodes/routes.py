"""The pack's routes: one tells the state, one parks, restores or stops a group that exists.

None starts a process, and none takes a path, a name of a model, a URL or a program: a group is named by its id.
What changes something is asked for by ComfyUI's own page, or by a program that is no browser: see `is_same_origin`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, Literal
from urllib.parse import urlsplit

import msgspec
from aiohttp import web

from ..runtime.group import (
    GROUPS,
    IN_USE_SECONDS,
    PACK_VERSION,
    Hindrance,
    Incident,
    WorkerGroup,
    fitted,
    incident_as_data,
)
from ..runtime.spec import RankError

log = logging.getLogger("comfyui-sharded")

API = 1  # of what is told; another number is another form of it
BODY_BYTES = 1024  # of a request: ten times what it needs
LOOK_SECONDS = 1.0  # the longest that an answer waits for the driver to tell of the cards
FIRST_LOOK_SECONDS = 4.0  # while nothing is known of them yet: an idle driver wakes each card first

_PORTS = {"http": 80, "https": 443}

Action = Literal["park", "restore", "stop"]


class Wanted(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The body of POST /sharded/group; `group` is an "id" of GET /sharded/state."""

    action: Action
    group: str


def add_to(
    routes: web.RouteTableDef,
    workflow_runs: Callable[[], bool],
    is_listed: Callable[[str], bool],
    comfyui: str = "",
) -> None:
    """`is_listed` says whether ComfyUI would count the memory of a slot of that name if it came back.

    `comfyui` is ComfyUI's version.
    """
    cards = Looks()

    @routes.get("/sharded/state")
    async def state(_request: web.Request) -> web.Response:
        """Devices, groups, incidents and the last run, from what is known. Read-only; takes no parameters."""
        await cards.be_fresh()
        told = {"api": API, "version": PACK_VERSION, "comfyui": comfyui, "time": round(time.time(), 3)}
        text = fitted({**told, **GROUPS.state(_wall())})
        return web.Response(body=text, content_type="application/json", headers={"Cache-Control": "no-store"})

    @routes.post("/sharded/group")
    async def change_group(request: web.Request) -> web.Response:
        """202 when it has begun: the result comes with the state. 409 says why it cannot be now."""
        wanted = await _read(request)
        if isinstance(wanted, web.Response):
            return wanted
        group = GROUPS.with_id(wanted.group)
        if group is None:
            return _refused(404, "no_group", "There is no such group. GET /sharded/state has their ids.")
        if (reason := _in_the_way(group, wanted.action, workflow_runs, is_listed)) is not None:
            return _refused(409, *reason)
        # A daemon, or a server that ends would wait for it.
        threading.Thread(target=_act, args=(group, wanted.action), name="sharded-act", daemon=True).start()
        return web.json_response({"action": wanted.action, "group": group.id}, status=202)


# --------------------------------------------------------------------------------------------------------------
# What is told


class Looks:
    """Looks at the cards when somebody asks: the driver may take its time, and the server's loop must not wait."""

    def __init__(self) -> None:
        self._look: asyncio.Future[None] | None = None

    async def be_fresh(self) -> None:
        """Return when the cards were looked at in the last two seconds, or after a second with what was known."""
        if self._look is None or self._look.done():
            if not GROUPS.cards.stale:
                return
            loop = asyncio.get_running_loop()
            self._look = loop.create_future()
            # A daemon: a server that ends would wait for any other thread, and a driver that hangs does not end.
            threading.Thread(
                target=_look_at_cards, args=(loop, self._look), name="sharded-cards", daemon=True
            ).start()
        await asyncio.wait({self._look}, timeout=LOOK_SECONDS if GROUPS.cards.known else FIRST_LOOK_SECONDS)


def _look_at_cards(loop: asyncio.AbstractEventLoop, done: asyncio.Future[None]) -> None:
    try:
        GROUPS.look_at_cards()
    except Exception:  # of a driver: what is known stays
        log.exception("Looking at the cards failed.")
    with contextlib.suppress(RuntimeError):  # the server has ended meanwhile
        loop.call_soon_threadsafe(done.set_result, None)


def incident_data(incident: Incident) -> dict[str, Any]:
    """An incident as plain data, with the time of day."""
    return incident_as_data(incident, _wall())


def _wall() -> float:
    """What makes unix time of a reading of the monotonic clock: only people read it."""
    return time.time() - time.monotonic()


# --------------------------------------------------------------------------------------------------------------
# Who asks, and for what


async def _read(request: web.Request) -> Wanted | web.Response:
    """What is asked for, or the refusal of the request."""
    if not is_same_origin(request.headers):
        return _refused(403, "other_page", "Only ComfyUI's own page may ask for this.")
    if request.content_type != "application/json":
        return _refused(415, "no_json", "The body has to be application/json.")
    body = b""
    async for part in request.content.iter_any():
        body += part
        if len(body) > BODY_BYTES:
            return _refused(413, "too_large", f"The body has more than {BODY_BYTES} bytes.")
    try:
        return msgspec.json.decode(body, type=Wanted)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        words = 'The body has to be {"action": "park", "restore" or "stop", "group": an id}.'
        return _refused(400, "bad_body", words)


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


def _refused(status: int, code: str, reason: str, device: str = "") -> web.Response:
    """`reason` in a sentence; `code` says the same in a word, for a page in another language."""
    return web.json_response({"error": reason, "code": code, "device": device}, status=status)


# --------------------------------------------------------------------------------------------------------------
# What is done


def _in_the_way(
    group: WorkerGroup, action: Action, workflow_runs: Callable[[], bool], is_listed: Callable[[str], bool]
) -> Hindrance | None:
    """Why it cannot be done now. A stop can be while a run is on: that ends with it."""
    if group.state.current.phase == "stopped":
        return Hindrance("not_running", "The group does not run.")
    if action == "stop":
        return None
    with group.unless_busy() as free:
        if not free:
            doing = group.state.current.doing or "used"
            return Hindrance(
                "busy", f"The group is busy ({doing}). Cancel the workflow first, or wait for its end."
            )
        if workflow_runs() and time.monotonic() - group.used_at < IN_USE_SECONDS:
            return Hindrance("in_use", "A workflow is using the group. Cancel it first, or wait for its end.")
        if action == "restore":
            if reason := GROUPS.cannot_restore(group):
                return reason
            if not all(map(is_listed, group.parked)):
                return Hindrance(
                    "taken", "ComfyUI has taken its place. The next workflow that needs it brings it back."
                )
    return None


def _act(group: WorkerGroup, action: Action) -> None:
    if action == "stop":
        GROUPS.retries.forget()
        group.stop("Stopped by request.")
        return
    with group.unless_busy() as free:
        told = GROUPS.journal.incidents  # others as soon as the group itself says what went wrong
        if not free:  # a workflow was quicker
            _say_failed(group, action, "The group is busy: a workflow was quicker.")
            return
        try:
            if action == "restore":
                GROUPS.restore(group)
                return
            kept = GROUPS.park(group)
            if group.alive and GROUPS.journal.incidents is told:
                GROUPS.note_not_kept(group, [name for name, in_ram in kept.items() if not in_ram])
        except RankError as error:
            if error.kind != "stopped" and GROUPS.journal.incidents is told:
                _say_failed(group, action, str(error))


def _say_failed(group: WorkerGroup, action: Action, reason: str) -> None:
    log.warning("Cannot %s the group on %s: %s", action, group.where, reason.partition("\n")[0])
    GROUPS.note_failed(group, action, reason)
