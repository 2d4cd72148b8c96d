"""What the two routes answer and refuse, on a real aiohttp server: other origins, other bodies, other moments."""

from __future__ import annotations

import ast
import asyncio
import importlib
import json
import sys
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from aiohttp import ClientResponse, web
from aiohttp.test_utils import TestClient, TestServer

from tests.support.processes import wait_until
from tests.support.source import sources
from tools import ROOT


def _pack(*names: str) -> list[Any]:
    """Modules of the pack under a package of their own: nothing of ComfyUI is needed."""
    for name, folder in {"pack_of_routes": ROOT, "pack_of_routes.nodes": ROOT / "nodes"}.items():
        package = sys.modules[name] = ModuleType(name)
        package.__path__ = [str(folder)]
    return [importlib.import_module(f"pack_of_routes.{name}") for name in names]


routes, group_module, spec, devices, incidents = _pack(
    "nodes.routes", "runtime.group", "runtime.spec", "runtime.devices", "runtime.incidents"
)
GROUPS = group_module.GROUPS
INFO = spec.SlotInfo(weight_bytes=1 << 30, seconds=0.1)
JSON = {"Content-Type": "application/json"}


class MockSession(SimpleNamespace):
    """Mock of a life of a group: alive until it is closed, and no processes."""

    def __init__(self) -> None:
        super().__init__(dead=None, closed=False, stopped=False, processes=SimpleNamespace(agent_pid=1))

    def stop(self) -> None:
        self.stopped, self.dead = True, 0

    def close(self) -> None:
        self.closed = True


class Desk:
    """The routes, a group with a model on it, and what ComfyUI would say."""

    def __init__(self) -> None:
        self.workflow_runs = False
        self.listed = True
        GROUPS.journal.incidents = ()
        self.group = GROUPS.group(devices.cpu_devices(2))
        self.session = MockSession()
        layout = spec.Layout(spec=spec.ParallelSpec(tensor=2), devices=self.group.devices, reason="")
        self.slot = GROUPS.slot(layout, spec.ModelSpec(path="/models/a", pipeline_class="", dtype="float32"))
        self.group.layouts[self.slot.name] = layout
        self.group.slots[self.slot.name] = INFO
        self.revive()
        self.group.used_at -= 1000
        self.asked: list[str] = []
        self.group.call = self._answer

    def revive(self) -> None:
        self.session.closed, self.session.stopped, self.session.dead = False, False, None
        self.group._session = self.session
        self.group.state.starting()
        self.group.settle()

    def fill(self, rank: int) -> None:
        """The rank says that its device has hardly any room."""
        full = spec.Memory(device_used=15 << 30, device_total=16 << 30)
        heartbeat = spec.Heartbeat(memory=full, beat=1, doing="", progress=0, collectives=0, slowest=1.0)
        self.group.state.rank_heard(rank, heartbeat, 0.0)

    def _answer(self, request: Any, **how: Any) -> dict[int, Any]:
        assert how.get("start") is False, "a route could start processes"
        self.asked.append(type(request).__name__)
        body = INFO if isinstance(request, spec.Load) else spec.Parked(in_host_memory=True)
        return {rank: SimpleNamespace(body=body) for rank in (0, 1)}

    @property
    def id(self) -> str:
        return str(GROUPS.snapshot()[0]["id"])

    @property
    def phase(self) -> str:
        return str(self.group.state.current.phase)

    def application(self) -> web.Application:
        table = web.RouteTableDef()
        routes.add_to(table, lambda: self.workflow_runs, lambda _: self.listed, "0.3.75")
        application = web.Application(client_max_size=100 << 20)
        application.add_routes(table)
        return application


Asks = Callable[[Desk, TestClient], Awaitable[None]]


@pytest.fixture
def desk() -> Any:
    desk = Desk()
    yield desk
    GROUPS.close_all()


def talk(desk: Desk, asks: Asks) -> None:
    """Run `asks` with a client of a server that has the routes."""

    async def run() -> None:
        async with TestClient(TestServer(desk.application())) as client:
            await asks(desk, client)

    asyncio.run(run())


async def post(
    desk: Desk,
    client: TestClient,
    action: object = "stop",
    headers: dict[str, str] | None = None,
    **more: Any,
) -> ClientResponse:
    body = json.dumps({"action": action, "group": desk.id, **more})
    return await client.post("/sharded/group", data=body, headers={**JSON, **(headers or {})})


async def refusal(answer: ClientResponse) -> tuple[int, str]:
    return answer.status, str((await answer.json())["error"])


async def code(answer: ClientResponse) -> str:
    return str((await answer.json())["code"])


async def eventually(desk: Desk, phase: str) -> None:
    await asyncio.to_thread(wait_until, lambda: desk.phase == phase, 10, f"the group to be {phase}")


# ---- what it does


def test_park_restore_and_stop(desk: Desk) -> None:
    async def asks(desk: Desk, client: TestClient) -> None:
        answer = await post(desk, client, "park")
        assert answer.status == 202
        assert await answer.json() == {"action": "park", "group": "cpu:0,cpu:1"}
        await eventually(desk, "parked")
        desk.group.used_at -= 1000
        assert (await post(desk, client, "restore")).status == 202
        await eventually(desk, "ready")
        assert desk.asked == ["Park", "Load"]
        assert (await post(desk, client, "stop")).status == 202
        await eventually(desk, "stopped")
        assert desk.session.closed
        state = await (await client.get("/sharded/state")).json()
        assert state["groups"][0]["reason"] == "Stopped by request."
        for action in ("park", "restore", "stop"):
            assert await refusal(await post(desk, client, action)) == (409, "The group does not run.")

    talk(desk, asks)


# ---- what it tells


def test_the_state_tells_the_machine_and_the_group(desk: Desk) -> None:
    async def asks(desk: Desk, client: TestClient) -> None:
        answer = await client.get("/sharded/state")
        assert answer.headers["Cache-Control"] == "no-store"
        state = await answer.json()
        assert (state["api"], state["comfyui"]) == (1, "0.3.75")
        assert state["version"] == group_module.PACK_VERSION != ""
        assert (state["server"], state["seq"]) == (GROUPS.journal.server, GROUPS.journal.seq)
        assert {one["key"] for one in state["devices"]} >= {"cpu:0", "cpu:1"}
        (group,) = state["groups"]
        assert (group["id"], group["state"], group["stage"]) == ("cpu:0,cpu:1", "ready", "ready")
        assert group["degrees"]["tensor"] == 2 and group["idle"] >= 1000
        seq = state["seq"]
        await post(desk, client, "park")
        await eventually(desk, "parked")
        state = await (await client.get("/sharded/state")).json()
        assert state["seq"] > seq
        assert state["groups"][0]["parked_by"] == "user"

    talk(desk, asks)


@pytest.mark.parametrize("looked_at", [None, 0.0])
def test_a_driver_that_hangs_holds_up_nobody(
    desk: Desk, monkeypatch: pytest.MonkeyPatch, looked_at: float | None
) -> None:
    """An answer waits a moment for it, and one thread at most is lost in it."""
    inside, over, looks, took = threading.Event(), threading.Event(), [], list[float]()

    def hang() -> None:
        looks.append(1)
        inside.set()
        over.wait(10)

    monkeypatch.setattr(routes, "LOOK_SECONDS", 0.05)
    monkeypatch.setattr(routes, "FIRST_LOOK_SECONDS", 0.5)
    monkeypatch.setattr(GROUPS, "look_at_cards", hang)
    monkeypatch.setattr(GROUPS.cards, "_looked_at", looked_at)

    async def asks(desk: Desk, client: TestClient) -> None:
        for _ in range(3):
            start = time.monotonic()
            assert (await asyncio.wait_for(client.get("/sharded/state"), 5)).status == 200
            took.append(time.monotonic() - start)
        over.set()

    talk(desk, asks)
    assert inside.is_set() and looks == [1]
    assert (min(took) >= 0.5) == (looked_at is None), "until anything is known of them they are worth a wait"


def test_the_driver_is_asked_once_in_two_seconds(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[frozenset[int]] = []
    real = GROUPS.cards.look

    def look(ranks: frozenset[int]) -> None:
        looks.append(ranks)
        real(ranks)

    monkeypatch.setattr(GROUPS.cards, "look", look)
    monkeypatch.setattr(GROUPS.cards, "_looked_at", None)

    async def asks(desk: Desk, client: TestClient) -> None:
        answers = await asyncio.gather(*(client.get("/sharded/state") for _ in range(5)))
        assert {one.status for one in answers} == {200}
        for _ in range(3):
            await client.get("/sharded/state")

    talk(desk, asks)
    assert len(looks) == 1


# ---- who may ask


def origins(host: str) -> list[tuple[dict[str, str], int]]:
    return [
        ({}, 202),  # a program, not a browser
        ({"Origin": f"http://{host}"}, 202),
        ({"Origin": f"http://{host}", "Sec-Fetch-Site": "same-origin"}, 202),
        ({"Origin": "https://sd.example", "Sec-Fetch-Site": "same-origin"}, 202),  # behind a proxy
        ({"Origin": f"http://{host}", "Sec-Fetch-Site": "cross-site"}, 403),
        ({"Sec-Fetch-Site": "same-site"}, 403),  # another port of this machine
        ({"Sec-Fetch-Site": "none"}, 403),
        ({"Sec-Fetch-Site": ""}, 403),
        ({"Origin": "http://evil.example"}, 403),
        ({"Origin": "null"}, 403),
        ({"Origin": ""}, 403),
        ({"Origin": f"http://{host}.evil.example"}, 403),
        ({"Origin": f"http://{host.split(':')[0]}"}, 403),  # another port
        ({"Origin": f"file://{host}"}, 403),
        ({"Origin": "http://[::1"}, 403),
        ({"Origin": f"http://user@{host}:99999"}, 403),
    ]


def test_other_origins_are_refused(desk: Desk) -> None:
    async def asks(desk: Desk, client: TestClient) -> None:
        for headers, status in origins(f"{client.host}:{client.port}"):
            desk.revive()
            answer = await post(desk, client, headers=headers)
            assert answer.status == status, headers
            if status == 202:
                await asyncio.to_thread(wait_until, lambda: desk.session.closed, 10, "the group to stop")
            else:
                assert not desk.session.closed

    talk(desk, asks)


@pytest.mark.parametrize(
    ("host", "origin", "same"),
    [
        ("sd.example", "https://sd.example", True),
        ("sd.example:443", "https://sd.example", True),
        ("sd.example", "https://sd.example:443", True),
        ("sd.example", "http://sd.example:80", True),
        ("SD.example:8188", "http://sd.EXAMPLE:8188", True),
        ("[::1]:8188", "http://[::1]:8188", True),
        ("sd.example:80", "https://sd.example", False),
        ("sd.example", "https://sd.example:8188", False),
        ("", "http://sd.example", False),
        ("", "null", False),
        ("a:x", "http://b:x", False),
    ],
)
def test_what_is_the_same_origin(host: str, origin: str, same: bool) -> None:
    assert routes.is_same_origin({"Host": host, "Origin": origin}) is same


# ---- what may be asked

JUNK = [
    b"",
    b"null",
    b"[]",
    b'"stop"',
    b"{",
    b"\xff\xfe",
    b"{}",
    b'{"action": "stop"}',
    b'{"group": "cpu:0,cpu:1"}',
    b'{"action": "start", "group": "cpu:0,cpu:1"}',
    b'{"action": "STOP", "group": "cpu:0,cpu:1"}',
    b'{"action": ["stop"], "group": "cpu:0,cpu:1"}',
    b'{"action": "stop", "group": ["cpu:0", "cpu:1"]}',
    b'{"action": "stop", "group": 0}',
    b'{"action": "stop", "group": null}',
    b'{"action": "stop", "group": "cpu:0,cpu:1", "path": "/etc/passwd"}',
    b'{"action": "stop", "group": "cpu:0,cpu:1"} {}',
    b"[" * 1000,
]


def test_other_bodies_are_refused(desk: Desk) -> None:
    async def asks(desk: Desk, client: TestClient) -> None:
        for body in JUNK:
            answer = await client.post("/sharded/group", data=body, headers=JSON)
            assert answer.status == 400, body
        for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data", "text/json"):
            answer = await post(desk, client, headers={"Content-Type": kind})
            assert answer.status == 415, kind

    talk(desk, asks)
    assert desk.phase == "ready"


def test_a_large_body_is_not_read(desk: Desk) -> None:
    sent = 0

    async def asks(desk: Desk, client: TestClient) -> None:
        async def endless() -> AsyncIterator[bytes]:
            nonlocal sent
            yield b'{"action": "stop", "group": "'
            while sent < 64 << 20:
                sent += 1 << 16
                yield b"x" * (1 << 16)

        assert (await post(desk, client, group="x" * 2000)).status == 413
        try:
            answer = await client.post("/sharded/group", data=endless(), headers=JSON)
            assert answer.status == 413
        except OSError:  # it hung up on us, as it may
            pass

    talk(desk, asks)
    assert sent < 64 << 20
    assert desk.phase == "ready"


@pytest.mark.parametrize("group", ["", "cpu:0", "cpu:1,cpu:0", "../../etc/passwd", "cuda:GPU-1"])
def test_unknown_groups_are_refused(desk: Desk, group: str) -> None:
    async def asks(desk: Desk, client: TestClient) -> None:
        assert (await post(desk, client, group=group)).status == 404

    talk(desk, asks)
    assert [one.id for one in GROUPS.groups()] == ["cpu:0,cpu:1"]


@pytest.mark.parametrize("method", ["GET", "PUT", "DELETE", "PATCH", "HEAD", "OPTIONS"])
def test_other_methods_are_refused(desk: Desk, method: str) -> None:
    async def asks(desk: Desk, client: TestClient) -> None:
        body = json.dumps({"action": "stop", "group": desk.id})
        answer = await client.request(method, "/sharded/group", data=body, headers=JSON)
        assert answer.status == 405
        assert (await client.post("/sharded/state", data=body, headers=JSON)).status == 405

    talk(desk, asks)
    assert desk.phase == "ready"


# ---- when it cannot be


@pytest.mark.parametrize("action", ["park", "restore"])
def test_a_busy_group_says_so(desk: Desk, action: str) -> None:
    inside, done = threading.Event(), threading.Event()

    def work() -> None:
        with desk.group._lock:
            desk.group.state.busy("sample", "sampling")
            inside.set()
            done.wait(10)

    async def asks(desk: Desk, client: TestClient) -> None:
        status, reason = await refusal(await post(desk, client, action))
        assert status == 409
        assert reason == "The group is busy (sampling). Cancel the workflow first, or wait for its end."

    worker = threading.Thread(target=work)
    worker.start()
    inside.wait(10)
    talk(desk, asks)
    done.set()
    worker.join()
    assert not desk.asked and not desk.session.closed


def test_a_stop_ends_the_run_that_is_on(desk: Desk) -> None:
    inside, done = threading.Event(), threading.Event()
    raised: list[Any] = []

    def work() -> None:
        with desk.group._lock:
            desk.group.state.busy("sample", "sampling")
            inside.set()
            done.wait(10)
            try:
                group_module.WorkerGroup.call(desk.group, spec.Ping())
            except spec.RankError as error:
                raised.append(error)

    async def asks(desk: Desk, client: TestClient) -> None:
        assert (await post(desk, client, "stop")).status == 202
        await asyncio.to_thread(wait_until, lambda: desk.session.stopped, 10, "the ranks to be ended")
        state = await (await client.get("/sharded/state")).json()
        assert state["groups"][0]["stopping"] is True
        done.set()
        await eventually(desk, "stopped")
        state = await (await client.get("/sharded/state")).json()
        assert (state["groups"][0]["stopping"], state["groups"][0]["reason"]) == (
            False,
            "Stopped by request.",
        )
        assert state["incidents"] == []  # whoever asked for it knows

    worker = threading.Thread(target=work)
    worker.start()
    inside.wait(10)
    talk(desk, asks)
    worker.join()
    (error,) = raised
    assert error.kind == "stopped"
    assert str(error).startswith("Stopped by request while sampling, ")


@pytest.mark.parametrize("action", ["park", "restore"])
def test_between_two_steps_a_group_is_busy_too(desk: Desk, action: str) -> None:
    desk.workflow_runs = True
    desk.group.used_at += 999

    async def asks(desk: Desk, client: TestClient) -> None:
        status, reason = await refusal(await post(desk, client, action))
        assert (status, reason) == (
            409,
            "A workflow is using the group. Cancel it first, or wait for its end.",
        )
        desk.group.used_at -= 1000  # the workflow is about something else
        assert (await post(desk, client, "park")).status == 202
        await eventually(desk, "parked")

    talk(desk, asks)


async def restore_that_fails(
    desk: Desk, client: TestClient, monkeypatch: pytest.MonkeyPatch, kind: str, *told: Any
) -> None:
    """Park, and ask for a restore that ends with an error of that kind, of which the group has told this."""

    def fails(*_: Any, **__: Any) -> None:
        for incident in told:
            GROUPS.journal.note(incident)
        raise spec.RankError("Rank 1 failed while loading.", kind=kind)

    await post(desk, client, "park")
    await eventually(desk, "parked")
    desk.group.used_at -= 1000
    monkeypatch.setattr(desk.group, "call", fails)
    assert (await post(desk, client, "restore")).status == 202


def test_what_fails_after_it_was_accepted_is_told(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    heard: list[Any] = []
    GROUPS.journal.listen(lambda: None, heard.append)

    async def asks(desk: Desk, client: TestClient) -> None:
        await restore_that_fails(desk, client, monkeypatch, "memory")
        await asyncio.to_thread(wait_until, lambda: bool(heard), 10, "the failure to be told")
        newest = (await (await client.get("/sharded/state")).json())["incidents"][0]
        assert (newest["kind"], newest["title"], newest["text"]) == (
            "action",
            "Restore failed",
            "Rank 1 failed while loading.",
        )

    talk(desk, asks)


DIED = incidents.lost("cpu:0,cpu:1", "died", 1, "CPU 1")


@pytest.mark.parametrize(("kind", "told"), [("stopped", ()), ("died", (DIED,))])
def test_what_a_person_has_stopped_and_what_the_group_has_told_is_not_told_again(
    desk: Desk, monkeypatch: pytest.MonkeyPatch, kind: str, told: tuple[Any, ...]
) -> None:
    async def asks(desk: Desk, client: TestClient) -> None:
        await restore_that_fails(desk, client, monkeypatch, kind, *told)

    def actions() -> list[str]:
        return [one.name for one in threading.enumerate() if one.name == "sharded-act"]

    talk(desk, asks)
    wait_until(lambda: not actions(), 10, "the restore to end")
    assert {one.kind for one in GROUPS.journal.incidents} == {one.kind for one in told}


def test_a_model_that_finds_no_room_in_ram_is_told(desk: Desk) -> None:
    heard: list[Any] = []
    GROUPS.journal.listen(lambda: None, heard.append)
    gone = {rank: SimpleNamespace(body=spec.Parked(in_host_memory=False)) for rank in (0, 1)}
    desk.group.call = lambda *_, **__: gone

    async def asks(desk: Desk, client: TestClient) -> None:
        await post(desk, client, "park")
        await asyncio.to_thread(wait_until, lambda: bool(heard), 10, "it to be told")

    talk(desk, asks)
    assert heard[0].title == "Not kept in RAM"
    assert heard[0].text == "Host RAM has no room for a: the next use reads it from disk again."


def test_what_cannot_be_restored(desk: Desk) -> None:
    async def asks(desk: Desk, client: TestClient) -> None:
        assert await refusal(await post(desk, client, "restore")) == (409, "Nothing is parked there.")
        await post(desk, client, "park")
        await eventually(desk, "parked")
        desk.group.used_at -= 1000
        desk.listed = False
        status, reason = await refusal(await post(desk, client, "restore"))
        assert status == 409 and "ComfyUI has taken its place" in reason
        desk.listed = True
        for rank in (0, 1):
            desk.fill(rank)
        status, reason = await refusal(await post(desk, client, "restore"))
        assert status == 409 and reason.startswith("CPU 0 has no room for it now.")
        assert desk.asked == ["Park"]
        desk.session.dead = 0
        assert (await refusal(await post(desk, client, "restore")))[0] == 409

    talk(desk, asks)
    assert desk.asked == ["Park"]


# ---- what a route or a workflow can carry at all


def test_there_are_no_other_routes() -> None:
    """Whoever adds one adds its tests here, and its line to the README."""
    found = {
        (node.func.attr, node.args[0].value)
        for source in sources("", "nodes", "runtime")
        for node in source.walk()
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.args
        and isinstance(node.args[0], ast.Constant)
        and str(node.args[0].value).startswith("/")
        and node.func.attr in ("get", "post", "put", "delete", "patch", "head", "options", "view", "static")
    }
    assert found == {("get", "/sharded/state"), ("post", "/sharded/group")}
    asked = [f"{s.file}:{n.lineno}" for s in sources("nodes") for n in s.walk() if _adds_route(n)]
    assert not asked


def _adds_route(node: ast.AST) -> bool:
    other = ("add_route", "add_get", "add_post", "add_static", "add_routes", "route")
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in other


def test_a_workflow_carries_three_texts_and_numbers_and_entries_of_lists() -> None:
    """Nothing else could be a path, a URL, a program or code; each of the three is read by a parser of its own."""
    schema = json.loads((ROOT / "tests" / "unit" / "node_schema.json").read_text())
    texts, kinds = set(), set()
    for node, described in schema.items():
        for inputs in described["input"].values():
            for name, (kind, *_) in inputs.items():
                kinds.add(str(kind))
                if kind == "STRING":
                    texts.add((node, name))
    assert {text for text in texts if text[1] != "devices"} == {
        ("ShardedEncodePrompt", "text"),
        ("ShardedTensorPlan", "plan"),
    }
    values = {"STRING", "INT", "FLOAT", "BOOLEAN", "COMBO"}
    cables = {"PARALLEL_CONFIG", "SHARDED_PIPELINE", "CONDITIONING", "LATENT", "*"}
    assert kinds <= values | cables | {"UNIQUE_ID", "PROMPT", "EXTRA_PNGINFO"}


def test_every_refusal_has_a_word_of_its_own_for_pages_in_other_languages(desk: Desk) -> None:
    async def asks(desk: Desk, client: TestClient) -> None:
        assert await code(await post(desk, client, "restore")) == "nothing_parked"
        desk.workflow_runs, desk.group.used_at = True, desk.group.used_at + 999
        assert await code(await post(desk, client, "park")) == "in_use"
        desk.workflow_runs, desk.group.used_at = False, desk.group.used_at - 999
        assert await code(await post(desk, client, group="cpu:7")) == "no_group"
        await post(desk, client, "park")
        await eventually(desk, "parked")
        desk.group.used_at -= 1000
        desk.listed = False
        assert await code(await post(desk, client, "restore")) == "taken"
        desk.fill(1)
        answer = await (await post(desk, client, "restore")).json()
        assert (answer["code"], answer["device"]) == ("no_room", "CPU 1")
        await post(desk, client, "stop")
        await eventually(desk, "stopped")
        assert await code(await post(desk, client, "stop")) == "not_running"

    talk(desk, asks)
