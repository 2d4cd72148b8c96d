"""A real Chromium on ComfyUI's real frontend, through Playwright; the system's browser, since its own is a download.

What the pack's files do wrong is collected, so that a test can say: it shows, and nothing broke. So is every request
to the pack's routes, and to other hosts; none of the latter gets anywhere.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from playwright.sync_api import Browser, BrowserContext, ConsoleMessage, Page, Request, sync_playwright

# The first group makes Chromium run as root and without a GPU, the second keeps it from calling home.
# The last one keeps every page from reaching another host, without the cost of looking at each request.
FLAGS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
)
VIEWPORT = {"width": 1600, "height": 900}
READY = "window.app?.extensionManager?.workflow?.activeWorkflow"
# The page is 10 MB of JavaScript: seconds on an idle machine, more than a minute on a busy one.
READY_MILLISECONDS = 240_000
# PrimeVue, where there still is one, blocks the page until everything is up.
UNBLOCKED = "() => ![...document.querySelectorAll('.p-blockui-mask')].some(mask => mask.checkVisibility())"
# What belongs to a pack: its web folder, and the workflows it ships with their pictures.
PACK_FILES = ("/extensions/", "/workflow_templates/")
OUR_FILES = "/extensions/comfyui-sharded/"
OUR_ROUTES = "/sharded/"
# ComfyUI's page complains about an event that nobody listens to.
OUR_EVENTS = re.compile(r"\bsharded\.(state|incident)\b")
# ComfyUI asks for a node's help in the user's language first, and takes the general page where there is none.
HELP_IN_A_LANGUAGE = re.compile(r"/extensions/[^/]+/docs/\w+/[\w-]+\.md\b")
REFUSED_BY_POLICY = re.compile(r"(?:https?|wss?)://[^\s'\"]+")


def executable() -> str | None:
    """The browser of this machine, None where there is none."""
    names = ("chromium", "chromium-browser", "google-chrome")
    return next((path for name in names if (path := shutil.which(name))), None)


@contextmanager
def chromium() -> Iterator[Browser]:
    """A browser of its own. Playwright allows one at a time in a thread."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=executable(), headless=True, args=list(FLAGS))
        try:
            yield browser
        finally:
            browser.close()


@dataclass
class Heard:
    """What the pages that it listens to complained about and asked for, in the order of arrival."""

    host: str
    errors: list[str] = field(default_factory=list)
    """What a page threw or logged as an error about any pack's files, and whatever our own files log."""
    foreign: list[str] = field(default_factory=list)
    """The address of every request that does not go to the server."""
    ours_abroad: list[str] = field(default_factory=list)
    """Those of them that one of our files made."""
    routes: list[str] = field(default_factory=list)
    """Requests to the pack's routes, as "GET /sharded/state"."""
    files: list[str] = field(default_factory=list)
    """The address of every file of the pack that was loaded."""

    def listen(self, page: Page) -> None:
        page.on("pageerror", lambda error: self._collect(f"{error}\n{error.stack}"))
        page.on("console", self._hear)
        page.on("request", self._note_request)
        page.on("websocket", lambda opened: self._note(opened.url))
        devtools = page.context.new_cdp_session(page)
        devtools.send("Network.enable")
        # Playwright does not say whose code a request is from.
        devtools.on("Network.requestWillBeSent", self._note_initiator)

    def _note_request(self, request: Request) -> None:
        self._note(request.url)
        path = urlsplit(request.url).path
        if OUR_ROUTES in path:
            self.routes.append(f"{request.method} {path[path.index(OUR_ROUTES) :]}")
        if OUR_FILES in path:
            self.files.append(request.url)

    def _note(self, address: str) -> None:
        if self._is_foreign(address):
            self.foreign.append(address)

    def _note_initiator(self, event: Mapping[str, Any]) -> None:
        if self._is_foreign(event["request"]["url"]) and OUR_FILES in json.dumps(event.get("initiator")):
            self.ours_abroad.append(event["request"]["url"])

    def _is_foreign(self, address: str) -> bool:
        parts = urlsplit(address)
        return parts.scheme in ("http", "https", "ws", "wss") and parts.netloc != self.host

    def _hear(self, line: ConsoleMessage) -> None:
        said = f"{line.text} ({line.location['url']})"
        if line.type != "error":
            if OUR_FILES in line.location["url"] or OUR_EVENTS.search(line.text):
                self.errors.append(f"{line.type}: {said}")
            return
        self._collect(said)
        if "Content Security Policy" in line.text:
            # The server's policy stops some requests before they are one, and the page only says so.
            for address in REFUSED_BY_POLICY.findall(line.text):
                self._note(address)

    def _collect(self, text: str) -> None:
        """Keep what a pack's file takes part in: ComfyUI's own page is not free of errors either."""
        if "/extensions/core/" in text or HELP_IN_A_LANGUAGE.search(text):
            return
        if any(folder in text for folder in PACK_FILES):
            self.errors.append(text)


def open_editor(page: Page, url: str) -> None:
    """Load ComfyUI's page and wait until the graph editor is up."""
    page.goto(url, wait_until="commit", timeout=READY_MILLISECONDS)
    wait_for_editor(page)


def wait_for_editor(page: Page) -> None:
    page.wait_for_function(READY, timeout=READY_MILLISECONDS)
    page.wait_for_function(UNBLOCKED, timeout=READY_MILLISECONDS)


def new_context(browser: Browser, url: str) -> BrowserContext:
    """A profile without a past, in which the clipboard may be read."""
    context = browser.new_context(viewport=VIEWPORT)  # type: ignore[arg-type]
    context.grant_permissions(["clipboard-read", "clipboard-write"], origin=url)
    return context


@contextmanager
def frontend(url: str, heard: Heard | None = None, browser: Browser | None = None) -> Iterator[Page]:
    """ComfyUI's page at `url` with the graph editor up, in a profile of its own; `heard` listens to it."""
    with ExitStack() as stack:
        browser = browser or stack.enter_context(chromium())
        context = new_context(browser, url)
        stack.callback(context.close)
        page = context.new_page()
        if heard is not None:
            heard.listen(page)
        open_editor(page, url)
        yield page


def load_workflow(page: Page, workflow: dict[str, Any]) -> None:
    """Open a workflow in the editor, as dropping its file there does."""
    page.evaluate("workflow => window.app.loadGraphData(workflow)", workflow)


def saved_workflow(page: Page) -> dict[str, Any]:
    """The open workflow as the frontend would save it."""
    # Through JSON, as the file is: a bare object would bring its undefined fields along as null.
    return dict(json.loads(page.evaluate("() => JSON.stringify(window.app.graph.serialize())")))


def queued_prompt(page: Page) -> dict[str, Any]:
    """The open workflow in API format, as the frontend would queue it."""
    return dict(page.evaluate("async () => (await window.app.graphToPrompt()).output"))
