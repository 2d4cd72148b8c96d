"""ComfyUI's graph editor as a person works in it: open a template, change a value, run, cancel, read what is shown.

Nodes are named by their type. The workflows here are those of the pack, in which every type stands once.
"""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from typing import Any

from playwright.sync_api import Locator, Page, expect

from tests.support.browser import saved_workflow
from tools import ROOT
from tools.client import ComfyClient
from tools.processes import wait_until

SHOTS = ROOT / "test_output" / "browser"
# Waits end as soon as what they wait for is there. On a machine that is busy otherwise, the page gets few frames.
PATIENCE = 90_000
# The first run starts the group.
RUN_PATIENCE = 400_000
RECORD = "async id => (await (await app.api.fetchApi(`/history/${id}`)).json())[id]"
expect.set_options(timeout=PATIENCE)

# Where a value or a title is drawn on the canvas. A widget has no place before it was drawn for the first time.
PLACE_OF_WIDGET = """([type, name]) => {
    const [node] = app.graph.findNodesByType(type), canvas = app.canvas
    const widget = node.widgets.find(one => one.name === name)
    if (!widget.y) return null
    const corner = canvas.canvas.getBoundingClientRect()
    const [x, y] = canvas.ds.convertOffsetToCanvas([node.pos[0] + node.size[0] / 2, node.pos[1] + widget.y + 10])
    return {x: corner.left + x, y: corner.top + y, type: widget.type}
}"""
PLACE_OF_TITLE = """type => {
    const [node] = app.graph.findNodesByType(type), canvas = app.canvas
    const corner = canvas.canvas.getBoundingClientRect()
    const [x, y] = canvas.ds.convertOffsetToCanvas([node.pos[0] + node.size[0] / 2, node.pos[1] - 15])
    return {x: corner.left + x, y: corner.top + y}
}"""
# The editor puts the progress of a message on its nodes right after its own listeners have seen the message.
# Newer frontends take the texts away again when a run has ended.
FOLLOW = """() => {
    window.shownProgress = []
    window.saidOnNodes = []
    window.failures = []
    app.api.addEventListener('progress_text',
        event => window.saidOnNodes.push([String(event.detail.nodeId), event.detail.text]))
    app.api.addEventListener('execution_error', event => window.failures.push(event.detail))
    app.api.addEventListener('progress_state', () => setTimeout(() => {
        for (const node of app.graph.nodes) {
            if (node.progress !== undefined) window.shownProgress.push([node.type, node.progress])
        }
    }, 0))
}"""
# What only shows something, a line of text or of layout, is not saved and is no value.
VALUES = """() => Object.fromEntries(app.graph.nodes.map(node => [
    node.type, Object.fromEntries((node.widgets ?? []).filter(widget => widget.serialize !== false)
        .map(widget => [widget.name, widget.value]))
]))"""
# Types of nodes of which a part is outside the window.
OUT_OF_VIEW = """() => app.graph.nodes.filter(node => {
    const canvas = app.canvas, corner = canvas.canvas.getBoundingClientRect()
    const [left, top, width, height] = node.getBounding()
    const inside = ([x, y]) => corner.left + x >= 0 && corner.left + x <= innerWidth
        && corner.top + y >= 0 && corner.top + y <= innerHeight
    const corners = [[left, top], [left + width, top + height]]
    return !corners.map(point => canvas.ds.convertOffsetToCanvas(point)).every(inside)
}).map(node => node.type)"""
ADD_NODE = """([type, below]) => {
    const [above] = app.graph.findNodesByType(below), node = LiteGraph.createNode(type)
    node.pos = [above.pos[0], above.pos[1] + above.size[1] + 200]
    app.graph.add(node)
}"""
# Newer frontends show a node's help on the right, in a panel whose state is a setting.
CLOSE_SIDEBAR = """async () => {
    const {sidebarTab: tabs, setting} = app.extensionManager, panel = 'Comfy.RightSidePanel.IsOpen'
    if (tabs.activeSidebarTabId) tabs.toggleSidebarTab(tabs.activeSidebarTabId)
    if (setting.get(panel)) await setting.set(panel, false)
}"""


class Editor:
    """The editor in `page`; what the page complained about and where else it wanted to go is in the two lists."""

    def __init__(self, page: Page, pack_folder: str, errors: list[str], foreign: list[str]) -> None:
        self.page = page
        self.pack_folder = pack_folder
        self.errors = errors
        self.foreign = foreign
        page.set_default_timeout(PATIENCE)
        page.evaluate(FOLLOW)

    # ---- what is on the screen

    @property
    def dialog(self) -> Locator:
        """Any dialog: templates, missing nodes, missing models, an error."""
        return self.page.get_by_role("dialog")

    def open_error(self) -> Locator:
        """What the page tells about an error: a dialog, in newer frontends a panel behind a short message."""
        details = self.page.get_by_role("button", name="View details", exact=True)
        expect(self.dialog.or_(details).first).to_be_visible()
        if not details.count():
            return self.dialog
        details.click()
        panel = self.page.get_by_test_id("error-group-execution")
        expect(panel).to_be_visible()
        # Folded in for a rejected value, and later also for what a node has raised.
        reason = panel.get_by_role("button", name=re.compile("^(Info for .*|Details)$"))
        if reason.count() and reason.first.get_attribute("aria-expanded") != "true":
            reason.first.click()
        return panel

    def close_error(self) -> None:
        if self.dialog.count():
            self.dialog.get_by_role("button", name="Close", exact=True).click()
        self.close_sidebar()
        expect(self.dialog).to_have_count(0)

    def close_dialogs(self) -> None:
        """With Escape, or its cross: the templates of 1.32.9 do not hear Escape, and no name is on that button."""
        cross = self.dialog.locator("button:has(> .pi-times)")
        for _ in range(10):
            if not self.dialog.count():
                break
            if cross.count() == 1:
                cross.click()
            else:
                self.page.keyboard.press("Escape")
            self.page.wait_for_timeout(300)
        expect(self.dialog).to_have_count(0)

    @property
    def run_button(self) -> Locator:
        # In newer frontends the menu beside it has the same name.
        return self.page.get_by_role("button", name="Run", exact=True).first

    @property
    def cancel_button(self) -> Locator:
        """It can be pressed as long as something runs or waits."""
        return self.page.get_by_role("button", name="Cancel current run")

    def text(self, content: str | re.Pattern[str]) -> Locator:
        return self.page.get_by_text(content)

    def screenshot(self, name: str) -> Path:
        path = SHOTS / f"{name}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        self.page.screenshot(path=path, timeout=RUN_PATIENCE, animations="disabled")
        return path

    def close_sidebar(self) -> None:
        self.page.evaluate(CLOSE_SIDEBAR)

    # ---- workflows

    def open_templates(self) -> Locator:
        """The template browser with the cards of the pack."""
        self.page.get_by_role("button", name="Templates", exact=True).click()
        self.dialog.get_by_role("button", name=self.pack_folder, exact=True).click()
        return self.dialog

    def open_template(self, title: str) -> None:
        """Click the card and wait until its workflow is open and no dialog stands in the way."""
        before = self.page.evaluate("app.extensionManager.workflow.activeWorkflow.path")
        self.open_templates().get_by_role("heading", name=title, exact=True).click()
        # The path is set last of all, after missing nodes and models have been complained about.
        self.page.wait_for_function(
            """([title, before]) => {
                const open = app.extensionManager.workflow.activeWorkflow
                return open.path !== before && open.filename.startsWith(title)
            }""",
            arg=[title, before],
        )
        expect(self.dialog).to_have_count(0)

    def saved_nodes(self) -> dict[str, dict[str, Any]]:
        """The nodes by type, as the editor would save them."""
        return {node["type"]: node for node in saved_workflow(self.page)["nodes"]}

    def values(self) -> dict[str, dict[str, Any]]:
        """What the widgets show, by node type and name."""
        return dict(self.page.evaluate(VALUES))

    def out_of_view(self) -> list[str]:
        return list(self.page.evaluate(OUT_OF_VIEW))

    def set_value(self, node_type: str, name: str, value: str) -> None:
        """Click the value on the canvas and choose or type another one."""
        place = self._place(PLACE_OF_WIDGET, [node_type, name])
        self.page.mouse.click(place["x"], place["y"])
        if place["type"] == "combo":
            menu = self.page.locator(".litecontextmenu")
            menu.get_by_text(value, exact=True).click()
            expect(menu).to_have_count(0)
        else:
            box = self.page.locator(".graphdialog .value")
            box.fill(value)
            box.press("Enter")
            expect(box).to_have_count(0)
        shown = self.values()[node_type][name]
        assert str(shown) == value, f"{name} of {node_type} shows {shown!r} after {value!r} was entered"

    def add_node(self, node_type: str, below: str) -> None:
        """A new node, as from the menu, in the free room under another one."""
        self.page.evaluate(ADD_NODE, [node_type, below])

    def select(self, node_type: str) -> None:
        place = self._place(PLACE_OF_TITLE, node_type)
        self.page.mouse.click(place["x"], place["y"])

    def bring_into_view(self, node_type: str) -> None:
        """Move the canvas until the node is in its middle."""
        self.page.evaluate("type => app.canvas.centerOnNode(app.graph.findNodesByType(type)[0])", node_type)

    def point_at(self, node_type: str, name: str) -> None:
        """Rest the mouse on a value, as one does to read its tooltip."""
        place = self._place(PLACE_OF_WIDGET, [node_type, name])
        self.page.mouse.move(place["x"], place["y"] + 2)
        self.page.mouse.move(place["x"], place["y"])

    # ---- runs

    def press_run(self) -> dict[str, Any]:
        """Press Run and return what the server answered to the prompt."""
        with self.page.expect_response(re.compile(r"/prompt$")) as answer:
            self.run_button.click()
        return dict(answer.value.json())

    def queue(self) -> str:
        """Press Run on a workflow that is accepted; its prompt id."""
        answer = self.press_run()
        assert not answer.get("node_errors") and "prompt_id" in answer, answer
        return str(answer["prompt_id"])

    def ended(self, prompt_id: str, client: ComfyClient) -> dict[str, Any]:
        """Wait for the end of a prompt, on the screen and in the server's history; the record."""
        self.record(prompt_id)
        # A busy page is a while behind the server.
        expect(self.cancel_button).to_be_disabled(timeout=RUN_PATIENCE)
        return client.history(prompt_id)

    def record(self, prompt_id: str) -> dict[str, Any]:
        """Wait for the end of a prompt; the server's record, asked for from the page, whose events go on meanwhile."""
        end = time.monotonic() + RUN_PATIENCE / 1000
        while not (record := self.page.evaluate(RECORD, prompt_id)):
            assert time.monotonic() < end, f"prompt {prompt_id} has not ended"
            self.page.wait_for_timeout(250)
        return dict(record)

    def run(self, client: ComfyClient) -> dict[str, Any]:
        """Run to a success; the server's record."""
        record = self.ended(self.queue(), client)
        assert record["status"]["status_str"] == "success", json.dumps(record["status"], indent=1)
        expect(self.dialog).to_have_count(0)
        return record

    def forget_progress(self) -> None:
        self.page.evaluate("for (const one of [shownProgress, saidOnNodes, failures]) one.length = 0")

    def said_on(self, node_type: str) -> list[str]:
        """The texts that were sent to the node, in order."""
        (node,) = self.page.evaluate(
            "type => app.graph.findNodesByType(type).map(node => String(node.id))", node_type
        )
        return [text for number, text in self.page.evaluate("window.saidOnNodes") if number == node]

    def failures(self) -> list[dict[str, Any]]:
        """What the page was told of runs that failed, in order."""
        return list(self.page.evaluate("window.failures"))

    def shown_progress(self, node_type: str) -> list[float]:
        """The fractions that the node's bar has shown."""
        return [value for kind, value in self.page.evaluate("window.shownProgress") if kind == node_type]

    def wait_for_progress(self, node_type: str) -> None:
        self.page.wait_for_function(
            "type => window.shownProgress.some(([kind, value]) => kind === type && value > 0)",
            arg=node_type,
            timeout=RUN_PATIENCE,
        )

    def shown_picture(self, node_type: str) -> dict[str, Any]:
        """Address and width of the picture that the node shows, once it does."""
        shown = self.page.wait_for_function(
            """type => {
                const [picture] = app.graph.findNodesByType(type)[0].imgs ?? []
                return picture?.naturalWidth ? {address: picture.src, width: picture.naturalWidth} : null
            }""",
            arg=node_type,
        )
        return dict(shown.json_value())

    def settle(self, client: ComfyClient) -> None:
        """As a test wants to find the editor, whatever the one before left open."""
        wait_until(lambda: not client.queue_state()["queue_running"], 60, "the server to become idle")
        self.close_dialogs()
        self.close_sidebar()
        self.forget_progress()

    def _place(self, script: str, argument: Any) -> dict[str, Any]:
        return dict(self.page.wait_for_function(script, arg=argument).json_value())
