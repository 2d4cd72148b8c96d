"""A ComfyUI client as the browser is one: queues workflows over HTTP and follows them on the websocket.

A reader thread collects every event with its arrival time; `wait` looks at the collection, so that nothing that arrived
between two calls is lost. Errors name the node and carry its message.
"""

from __future__ import annotations

import json
import struct
import threading
import time
import urllib.parse
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import websocket

from tools import loopback

Workflow = dict[str, dict[str, Any]]
"""A workflow in API format: node id -> {class_type, inputs}."""

ENDINGS = ("execution_success", "execution_error", "execution_interrupted")
# protocol.py of ComfyUI
PREVIEW, TEXT, PREVIEW_WITH_METADATA = 1, 3, 4
MIME_TYPES = {1: "image/jpeg", 2: "image/png"}


class PromptError(RuntimeError):
    """Something went wrong with a prompt."""


class PromptRejected(PromptError):
    """The server refused to queue the workflow; `node_errors` is its report by node id."""

    def __init__(self, message: str, node_errors: dict[str, Any]) -> None:
        super().__init__(message)
        self.node_errors = node_errors


class NodeFailed(PromptError):
    """A node raised; `details` is the whole execution_error event."""

    def __init__(self, details: dict[str, Any]) -> None:
        self.node_id = str(details.get("node_id"))
        self.node_type = str(details.get("node_type"))
        self.exception_type = str(details.get("exception_type"))
        self.message = str(details.get("exception_message", "")).strip()
        self.details = details
        super().__init__(f"node {self.node_id} ({self.node_type}): {self.exception_type}: {self.message}")


class PromptInterrupted(PromptError):
    """The prompt was cancelled."""

    def __init__(self, details: dict[str, Any]) -> None:
        self.node_id = str(details.get("node_id"))
        super().__init__(f"interrupted in node {self.node_id} ({details.get('node_type')})")


class ServerGone(PromptError):
    """The websocket closed before the prompt ended."""


@dataclass(frozen=True)
class Event:
    kind: str
    """The server's event name; "preview" and "text" for the binary ones."""
    data: dict[str, Any]
    at: float
    """time.monotonic() of its arrival."""
    blob: bytes = b""
    """The encoded picture of a preview."""


@dataclass(frozen=True)
class Image:
    filename: str
    subfolder: str
    type: str


@dataclass(frozen=True)
class Run:
    """A prompt that succeeded."""

    prompt_id: str
    events: list[Event]
    outputs: dict[str, Any]
    """What the output nodes reported, by node id."""
    images: list[Image] = field(default_factory=list)

    def of(self, kind: str) -> list[Event]:
        return [event for event in self.events if event.kind == kind]


class ComfyClient:
    """Talks to the server at `base_url`. A context manager; `close` ends the websocket."""

    def __init__(self, base_url: str) -> None:
        self.base_url = base_url.rstrip("/")
        self.client_id = uuid.uuid4().hex
        self.events: list[Event] = []
        self._arrived = threading.Condition()
        self._gone = ""
        self._node_info: dict[str, dict[str, Any]] = {}
        address = self.base_url.replace("http", "ws", 1) + f"/ws?clientId={self.client_id}"
        self._socket = websocket.create_connection(address, timeout=30, enable_multithread=True)
        self._socket.settimeout(None)
        # Previews then say which node they belong to, as they do for the browser.
        features = {"type": "feature_flags", "data": {"supports_preview_metadata": True}}
        self._socket.send(json.dumps(features))
        self._reader = threading.Thread(target=self._read, name="comfy-client", daemon=True)
        self._reader.start()

    def __enter__(self) -> ComfyClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._socket.abort()  # wakes the reader, which a plain close would leave waiting
        self._reader.join(5)
        self._socket.shutdown()

    # ---- prompts

    def queue(self, workflow: Workflow, *, extra_data: dict[str, Any] | None = None) -> str:
        """Queue a workflow and return its prompt id. Raises PromptRejected."""
        body = {"prompt": workflow, "client_id": self.client_id, "extra_data": extra_data or {}}
        try:
            answer = self._json("/prompt", body)
        except loopback.HttpError as error:
            raise _rejection(error, workflow) from None
        if answer.get("node_errors"):
            # Some outputs were accepted: a partly run workflow is no result here.
            raise PromptRejected(_node_messages(answer["node_errors"], workflow), answer["node_errors"])
        return str(answer["prompt_id"])

    def wait(
        self, prompt_id: str, timeout: float = 120.0, on_event: Callable[[Event], None] | None = None
    ) -> Run:
        """Follow a prompt to its end. Raises NodeFailed, PromptInterrupted, ServerGone or TimeoutError."""
        deadline = time.monotonic() + timeout
        position = 0
        while True:
            fresh, gone = self._next_events(position, deadline)
            position += len(fresh)
            for event in fresh:
                # Status and texts say nothing about the prompt: they are shown with the one being followed.
                if event.data.get("prompt_id", prompt_id) != prompt_id:
                    continue
                if on_event:
                    on_event(event)
                if event.kind in ENDINGS:
                    return self._conclude(prompt_id, event)
            if not fresh and gone:
                raise ServerGone(f"the server closed the connection during prompt {prompt_id}: {gone}")
            if time.monotonic() > deadline:
                raise TimeoutError(f"prompt {prompt_id} did not end within {timeout:g} s")

    def run(
        self, workflow: Workflow, timeout: float = 120.0, on_event: Callable[[Event], None] | None = None
    ) -> Run:
        """Queue and wait."""
        return self.wait(self.queue(workflow), timeout, on_event)

    def wait_for(
        self, prompt_id: str, matches: Callable[[Event], bool], timeout: float = 60.0, what: str = "an event"
    ) -> Event:
        """The first event of the prompt that matches, past ones included; for tests that act in the middle of a run."""
        deadline = time.monotonic() + timeout
        position = 0
        while True:
            fresh, gone = self._next_events(position, deadline)
            position += len(fresh)
            for event in fresh:
                if event.data.get("prompt_id") == prompt_id and matches(event):
                    return event
            ended = [event.kind for event in fresh if _ends(event, prompt_id)]
            if ended or (gone and not fresh):
                raise PromptError(f"{ended[0] if ended else gone} while waiting for {what}")
            if time.monotonic() > deadline:
                raise TimeoutError(f"waited {timeout:g} s for {what}")

    def interrupt(self, prompt_id: str | None = None) -> None:
        """Cancel the running prompt; with an id, only if that is the one running."""
        loopback.request(f"{self.base_url}/interrupt", {"prompt_id": prompt_id} if prompt_id else {})

    def clear_queue(self) -> None:
        """Drop what waits; the running prompt goes on."""
        loopback.request(f"{self.base_url}/queue", {"clear": True})

    def free(self, unload_models: bool = True, free_memory: bool = True) -> None:
        """Ask for memory back; the server acts once no prompt runs."""
        body = {"unload_models": unload_models, "free_memory": free_memory}
        loopback.request(f"{self.base_url}/free", body)

    # ---- what the server knows

    def history(self, prompt_id: str) -> dict[str, Any]:
        """The record of an ended prompt; {} where there is none (yet)."""
        return dict(self._json(f"/history/{prompt_id}").get(prompt_id, {}))

    def object_info(self, node_id: str) -> dict[str, Any]:
        """A node's description; {} where the server has no such node."""
        if node_id not in self._node_info:
            answer = self._json(f"/object_info/{urllib.parse.quote(node_id)}")
            self._node_info[node_id] = answer.get(node_id, {})
        return self._node_info[node_id]

    def system_stats(self) -> dict[str, Any]:
        return dict(self._json("/system_stats"))

    def queue_state(self) -> dict[str, Any]:
        """{queue_running: [...], queue_pending: [...]}"""
        return dict(self._json("/queue"))

    def get(self, path: str) -> bytes:
        return loopback.request(self.base_url + path)

    def get_image(self, filename: str, subfolder: str = "", type: str = "output") -> bytes:
        """The file of a saved picture."""
        query = urllib.parse.urlencode({"filename": filename, "subfolder": subfolder, "type": type})
        return self.get(f"/view?{query}")

    # ---- inside

    def _json(self, path: str, body: object = None) -> Any:
        return json.loads(loopback.request(self.base_url + path, body))

    def _next_events(self, position: int, deadline: float) -> tuple[list[Event], str]:
        """Events from `position` on, waiting for one until the deadline; and why the connection ended, if it did."""
        with self._arrived:
            self._arrived.wait_for(
                lambda: len(self.events) > position or self._gone, max(0.0, deadline - time.monotonic())
            )
            return self.events[position:], self._gone

    def _read(self) -> None:
        gone = "closed"
        try:
            while True:
                opcode, message = self._socket.recv_data()
                if opcode == websocket.ABNF.OPCODE_CLOSE:
                    break
                event = _decode(opcode, message)
                if event:
                    self._append(event)
        except (websocket.WebSocketException, OSError) as error:
            gone = str(error) or type(error).__name__
        finally:
            with self._arrived:
                self._gone = gone
                self._arrived.notify_all()

    def _append(self, event: Event) -> None:
        with self._arrived:
            self.events.append(event)
            self._arrived.notify_all()

    def _conclude(self, prompt_id: str, ending: Event) -> Run:
        if ending.kind == "execution_error":
            raise NodeFailed(ending.data)
        if ending.kind == "execution_interrupted":
            raise PromptInterrupted(ending.data)
        outputs = self._recorded_outputs(prompt_id)
        images = [
            Image(str(one["filename"]), str(one.get("subfolder", "")), str(one.get("type", "output")))
            for output in outputs.values()
            for one in output.get("images", [])
        ]
        with self._arrived:
            events = [event for event in self.events if event.data.get("prompt_id") == prompt_id]
        return Run(prompt_id, events, outputs, images)

    def _recorded_outputs(self, prompt_id: str) -> dict[str, Any]:
        """From the history, which is written a moment after the success event is sent."""
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline:
            record = self.history(prompt_id)
            if record:
                return dict(record["outputs"])
            time.sleep(0.02)
        raise PromptError(f"prompt {prompt_id} succeeded, but the server's history does not have it")


def _ends(event: Event, prompt_id: str) -> bool:
    return event.kind in ENDINGS and event.data.get("prompt_id") == prompt_id


def _decode(opcode: int, message: bytes) -> Event | None:
    now = time.monotonic()
    if opcode == websocket.ABNF.OPCODE_TEXT:
        content = json.loads(message)
        return Event(content["type"], content.get("data") or {}, now)
    if opcode != websocket.ABNF.OPCODE_BINARY:
        return None
    kind, first = struct.unpack_from(">II", message)
    if kind == PREVIEW:
        return Event("preview", {"image_type": MIME_TYPES.get(first, "")}, now, message[8:])
    if kind == PREVIEW_WITH_METADATA:
        return Event("preview", json.loads(message[8 : 8 + first]), now, message[8 + first :])
    if kind == TEXT:
        node_id, text = message[8 : 8 + first].decode(), message[8 + first :].decode()
        return Event("text", {"node": node_id, "text": text}, now)
    return None


def _rejection(error: loopback.HttpError, workflow: Workflow) -> PromptError:
    try:
        report = json.loads(error.body)
    except ValueError:
        return PromptError(str(error))
    overall = report.get("error") or {}
    lines = [f"{overall.get('message', '')} {overall.get('details', '')}".strip()]
    node_errors = report.get("node_errors") or {}
    lines.append(_node_messages(node_errors, workflow))
    return PromptRejected("\n".join(filter(None, lines)), node_errors)


def _node_messages(node_errors: dict[str, Any], workflow: Workflow) -> str:
    return "\n".join(
        f"node {node_id} ({workflow.get(node_id, {}).get('class_type')}): {one['message']}: {one['details']}"
        for node_id, report in node_errors.items()
        for one in report["errors"]
    )
