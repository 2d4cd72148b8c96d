"""A real Chromium on ComfyUI's real frontend, through Playwright; the system's browser, since its own is a download.

Errors of the page in which a pack's files take part are collected, so that a test can say: it shows, and nothing broke.
So are requests to other hosts; none of them gets anywhere.
"""

from __future__ import annotations

import json
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

from playwright.sync_api import ConsoleMessage, Page, sync_playwright

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
READY = "window.app?.extensionManager?.workflow?.activeWorkflow"
# The page is 10 MB of JavaScript: seconds on an idle machine, more than a minute on a busy one.
READY_MILLISECONDS = 240_000
# What belongs to a pack: its web folder, and the workflows it ships with their pictures.
PACK_FILES = ("/extensions/", "/workflow_templates/")
# ComfyUI asks for a node's help in the user's language first, and takes the general page where there is none.
HELP_IN_A_LANGUAGE = re.compile(r"/extensions/[^/]+/docs/\w+/[\w-]+\.md\b")
REFUSED_BY_POLICY = re.compile(r"(?:https?|wss?)://[^\s'\"]+")


def executable() -> str | None:
    """The browser of this machine, None where there is none."""
    names = ("chromium", "chromium-browser", "google-chrome")
    return next((path for name in names if (path := shutil.which(name))), None)


@contextmanager
def frontend(url: str, errors: list[str] | None = None, foreign: list[str] | None = None) -> Iterator[Page]:
    """ComfyUI's page at `url` with the graph editor up, in a browser with an empty profile of its own.

    What the page throws or logs as an error about a pack's files is appended to `errors`, and to `foreign` the address
    of every request that does not go to the server.
    """
    collected = errors if errors is not None else []
    elsewhere = foreign if foreign is not None else []
    host = urlsplit(url).netloc

    def note(address: str) -> None:
        if urlsplit(address).scheme in ("http", "https", "ws", "wss") and urlsplit(address).netloc != host:
            elsewhere.append(address)

    def hear(line: ConsoleMessage) -> None:
        if line.type != "error":
            return
        _collect(collected, _described(line))
        if "Content Security Policy" in line.text:
            # The server's policy stops some requests before they are one, and the page only says so.
            for address in REFUSED_BY_POLICY.findall(line.text):
                note(address)

    with tempfile.TemporaryDirectory(prefix="comfyui-profile-") as profile, sync_playwright() as playwright:
        context = playwright.chromium.launch_persistent_context(
            profile,
            executable_path=executable(),
            headless=True,
            args=list(FLAGS),
            viewport={"width": 1600, "height": 900},
        )
        try:
            page = context.pages[0]
            page.on("pageerror", lambda error: _collect(collected, f"{error}\n{error.stack}"))
            page.on("console", hear)
            page.on("request", lambda request: note(request.url))
            page.on("websocket", lambda opened: note(opened.url))
            page.goto(url, wait_until="commit", timeout=READY_MILLISECONDS)
            page.wait_for_function(READY, timeout=READY_MILLISECONDS)
            yield page
        finally:
            context.close()


def _described(line: ConsoleMessage) -> str:
    return f"{line.text} ({line.location['url']})"


def _collect(errors: list[str], text: str) -> None:
    """Keep what a pack's file takes part in: ComfyUI's own page is not free of errors either."""
    if "/extensions/core/" in text or HELP_IN_A_LANGUAGE.search(text):
        return
    if any(folder in text for folder in PACK_FILES):
        errors.append(text)


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
