"""The panel as a person uses it: its tab, its lines, its buttons; and what a test sends it in the server's stead."""

from __future__ import annotations

import itertools
import json
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from playwright.sync_api import Locator, Page, Response, Route, WebSocketRoute, expect

from tests.browser.editor import PATIENCE, SHOTS, Editor
from tests.browser.states import HEAD, event
from tests.support.browser import Heard, load_workflow, wait_for_editor

TAB = "sharded"
# By class until 1.48, by test id from 1.52 on.
TAB_BUTTON = ".sharded-tab-button, [data-testid='sharded-tab-button']"
# PrimeVue's until 1.55, ComfyUI's own from 1.57 on.
TOAST = ".p-toast-message, [data-testid='toast']"
ACTIVE_TAB = "() => app.extensionManager.sidebarTab.activeSidebarTabId"
TOGGLE = "id => app.extensionManager.sidebarTab.toggleSidebarTab(id)"
# Both frontends keep the sidebar in a panel of this class; its splitter sets sizes on the element itself.
SET_WIDTH = """width => {
    const id = 'width-of-the-test', style = document.getElementById(id) ?? document.createElement('style')
    style.id = id
    style.textContent = width ? `.side-bar-panel { flex: 0 0 ${width}px !important; width: ${width}px !important;
        min-width: ${width}px !important; max-width: ${width}px !important }` : ''
    document.head.append(style)
}"""
# Pixels that a frontend may keep between the sidebar's edge and the panel's, for a bar to scroll with.
EDGE = 16
# What the panel has shown since, one entry for each change; times are those of the page.
FOLLOW = """root => {
    const find = name => root.querySelector(`[data-testid=sharded-${name}]`)
    const shown = window.shownByPanel = {phases: [], lines: [], said: [], progress: [], endedAt: null}
    const note = (list, text, more) => {
        const last = list.at(-1)
        const same = last?.text === text && last?.done === more?.done
        if (text && !same) list.push({text, at: performance.now(), ...more})
    }
    const look = () => {
        const phase = root.querySelector('[data-phase]')?.dataset.phase, bar = root.querySelector('progress')
        note(shown.phases, phase)
        note(shown.lines, find('state')?.textContent)
        note(shown.said, find('live')?.textContent)
        if (bar?.checkVisibility() && bar.hasAttribute('value')) note(shown.progress, phase, {done: bar.position})
    }
    new MutationObserver(look).observe(
        root, {subtree: true, childList: true, characterData: true, attributes: true})
    app.api.addEventListener('execution_success', () => { shown.endedAt = performance.now() })
    look()
}"""
# Nodes that come into the panel, texts too, and whether the focus goes away, while the server's news arrive.
WATCH_NODES = """root => {
    window.addedToPanel = []
    window.focusedInPanel = document.activeElement
    new MutationObserver(changes => {
        for (const change of changes) for (const node of change.addedNodes) {
            window.addedToPanel.push(node.outerHTML ?? node.data)
        }
    }).observe(root, {subtree: true, childList: true})
}"""

# ComfyUI unloads models too when it forgets.
FORGET = """async () => {
    const headers = {'Content-Type': 'application/json'}, body = JSON.stringify({free_memory: true})
    await app.api.fetchApi('/free', {method: 'POST', headers, body})
}"""

Answer = dict[str, Any] | int | None
"""To GET /sharded/state: a state, the status of an answer without one, or no answer at all."""


class Panel:
    """The panel in the page of `editor`. Closed at first."""

    def __init__(self, editor: Editor, heard: Heard) -> None:
        self.editor, self.heard = editor, heard
        self.page: Page = editor.page
        self.root = self.page.get_by_test_id("sharded-panel")
        self.tab_button = self.page.locator(TAB_BUTTON)
        self.toasts = self.page.locator(TOAST)

    # ---- the parts

    def part(self, name: str) -> Locator:
        """What has the test id sharded-<name> in the panel."""
        return self.root.get_by_test_id(f"sharded-{name}")

    @property
    def state(self) -> Locator:
        return self.part("state")

    def card(self, phase: str) -> Locator:
        """The group's card, if it shows that phase."""
        return self.root.locator(f"[data-phase='{phase}']")

    @property
    def badge(self) -> Locator:
        """The mark on the tab's button."""
        return self.tab_button.get_by_text("!", exact=True)

    # ---- open and close

    def open(self) -> None:
        if not self.root.count():
            self.tab_button.click()
        expect(self.root).to_be_visible()

    def close(self) -> None:
        if self.page.evaluate(ACTIVE_TAB) == TAB:
            self.tab_button.click()
        expect(self.root).to_have_count(0)

    def switch_to(self, tab: str) -> None:
        """Open another tab of the sidebar, by its id."""
        self.page.evaluate(TOGGLE, tab)
        assert self.page.evaluate(ACTIVE_TAB) == tab

    def reload(self) -> None:
        """As F5 does. What the page had in hand is gone, the panel is closed."""
        self.page.reload(wait_until="commit")
        wait_for_editor(self.page)

    def unfold(self) -> None:
        """Open every section."""
        self.root.evaluate("root => root.querySelectorAll('details').forEach(one => { one.open = true })")

    # ---- how it is looked at

    def set_width(self, pixels: int) -> None:
        self.page.evaluate(SET_WIDTH, pixels)
        width = self.root.evaluate("root => root.getBoundingClientRect().width")
        assert pixels - EDGE <= round(width) <= pixels, f"the panel is {width} px wide, not {pixels}"

    def make_room(self) -> None:
        """A window so tall that nothing of the panel is scrolled away: pictures show what is in view."""
        self.page.set_viewport_size({"width": 1600, "height": 2400})

    def set_palette(self, name: str) -> None:
        """One of ComfyUI's own."""
        self.page.evaluate("name => app.extensionManager.setting.set('Comfy.ColorPalette', name)", name)
        self.page.wait_for_timeout(200)  # its colours come a few frames later

    def shoot(self, folder: str, name: str) -> Path:
        """The panel alone, as a file among the artifacts."""
        path = SHOTS / folder / f"{name}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        self.root.screenshot(path=path, animations="disabled")
        return path

    # ---- what happens meanwhile

    def follow(self) -> None:
        """From now on note what the panel shows; see `shown`."""
        self.root.evaluate(FOLLOW)

    def shown(self) -> dict[str, Any]:
        return dict(self.page.evaluate("window.shownByPanel"))

    def watch_nodes(self) -> None:
        """From now on note the nodes that are added to the panel; see `added` and `keeps_focus`."""
        self.root.evaluate(WATCH_NODES)

    def added(self) -> list[str]:
        return list(self.page.evaluate("window.addedToPanel"))

    def keeps_focus(self) -> bool:
        return bool(
            self.page.evaluate(
                "document.activeElement === window.focusedInPanel && document.activeElement !== document.body"
            )
        )

    @contextmanager
    def requests(self, seconds: float) -> Iterator[list[str]]:
        """What the page asks of the pack's routes in the block and until `seconds` after it; filled at the end."""
        asked: list[str] = []
        before = len(self.heard.routes)
        yield asked
        self.page.wait_for_timeout(seconds * 1000)
        asked += self.heard.routes[before:]

    def queue(self, workflow: dict[str, Any] | None = None) -> str:
        """Open a workflow and queue it, whether or not there is a button for that; the prompt's id."""
        if workflow is not None:
            load_workflow(self.page, workflow)
        with self.page.expect_response(_takes_a_prompt) as answer:
            self.page.evaluate("() => app.queuePrompt(0)")
        accepted = dict(answer.value.json())
        assert not accepted.get("node_errors") and "prompt_id" in accepted, accepted
        return str(accepted["prompt_id"])

    def ended(self, prompt_id: str) -> dict[str, Any]:
        """Wait for the end of a prompt; the server's record of it."""
        return self.editor.record(prompt_id)

    def forget_results(self) -> None:
        """Have ComfyUI run every node anew: one whose result it still has is left out, and says nothing."""
        self.page.evaluate(FORGET)

    def run(self, workflow: dict[str, Any]) -> dict[str, Any]:
        """Queue it and wait for a success; the server's record."""
        record = self.ended(self.queue(workflow))
        assert record["status"]["status_str"] == "success", json.dumps(record["status"], indent=1)
        return record

    def clipboard(self) -> str:
        self.page.bring_to_front()
        return str(self.page.evaluate("() => navigator.clipboard.readText()"))


class Stand:
    """Stands in for the server towards one page: answers GET /sharded/state, and adds events to the websocket.

    Everything else flows through to the real server. Has to be set up before the page is loaded.
    """

    def __init__(self, page: Page, answer: Answer) -> None:
        self.page = page
        self.answer = answer
        self.posted: list[dict[str, Any]] = []
        """What was asked of POST /sharded/group."""
        self.refusal: dict[str, Any] | None = None
        """The body of a 409 to that, None to accept it."""
        self._given = False
        self._sockets: list[WebSocketRoute] = []
        self._numbers = itertools.count(1000)
        page.route(re.compile(r"/sharded/state$"), self._tell)
        page.route(re.compile(r"/sharded/group$"), self._take)
        page.route_web_socket(re.compile(r"/ws(\?|$)"), self._connect)

    def show(self, answer: Answer) -> None:
        """Answer so from now on; a state is also told of by an event, as the server does when it changes."""
        self.answer = {**answer, "seq": next(self._numbers)} if isinstance(answer, dict) else answer
        if isinstance(self.answer, dict):
            self.send("sharded.state", event(self.answer))

    def bring(self, answer: Answer) -> None:
        """`show`, and return once an open panel has the whole answer: an event tells less, and a poll comes late."""
        self.show(answer)
        self._given = False
        self.send("sharded.state", {"api": 0})  # at a word of another version the page asks at once
        deadline = time.monotonic() + PATIENCE / 1000
        while not self._given:
            assert time.monotonic() < deadline, "the panel did not ask for the state"
            self.page.wait_for_timeout(20)
        self.page.wait_for_timeout(100)  # for the page to read and draw it

    def tell(self, incident: dict[str, Any]) -> None:
        """An incident's own event."""
        known = self.answer if isinstance(self.answer, dict) else {}
        told: dict[str, Any] = {name: known[name] for name in HEAD if name in known}
        self.send("sharded.incident", {**incident, **told, "seq": next(self._numbers)})

    def send(self, kind: str, data: dict[str, Any]) -> None:
        assert self._sockets, "the page has no websocket yet"
        self._sockets[-1].send(json.dumps({"type": kind, "data": data}))

    def _tell(self, route: Route) -> None:
        if self.answer is None:
            route.abort("connectionrefused")
        elif isinstance(self.answer, int):
            route.fulfill(status=self.answer, body="")
        else:
            route.fulfill(json=self.answer)
        self._given = True

    def _take(self, route: Route) -> None:
        self.posted.append(dict(route.request.post_data_json or {}))
        if self.refusal is None:
            route.fulfill(status=202, json=self.posted[-1])
        else:
            route.fulfill(status=409, json=self.refusal)

    def _connect(self, socket: WebSocketRoute) -> None:
        socket.connect_to_server()
        self._sockets.append(socket)


def _takes_a_prompt(answer: Response) -> bool:
    return answer.request.method == "POST" and answer.url.endswith("/prompt")
