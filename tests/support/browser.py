"""A real Chromium on ComfyUI's real frontend, through Playwright; the system's browser, since its own is a download.

Errors of the page in which a pack's files take part are collected, so that a test can say: it shows, and nothing broke.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from playwright.sync_api import ConsoleMessage, Page, sync_playwright

# The first group makes Chromium run as root and without a GPU, the second keeps it from calling home.
FLAGS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
READY = "window.app?.extensionManager?.workflow?.activeWorkflow"
READY_MILLISECONDS = 60_000


def executable() -> str | None:
    """The browser of this machine, None where there is none."""
    names = ("chromium", "chromium-browser", "google-chrome")
    return next((path for name in names if (path := shutil.which(name))), None)


@contextmanager
def frontend(url: str, errors: list[str] | None = None) -> Iterator[Page]:
    """ComfyUI's page at `url` with the graph editor up, in a browser with an empty profile of its own.

    What the page throws or logs as an error about a pack's files is appended to `errors`.
    """
    collected = errors if errors is not None else []
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
            page.on(
                "console",
                lambda line: _collect(collected, _described(line)) if line.type == "error" else None,
            )
            page.goto(url)
            page.wait_for_function(READY, timeout=READY_MILLISECONDS)
            yield page
        finally:
            context.close()


def _described(line: ConsoleMessage) -> str:
    return f"{line.text} ({line.location['url']})"


def _collect(errors: list[str], text: str) -> None:
    """Keep what a pack's file takes part in: ComfyUI's own page is not free of errors either."""
    if "/extensions/" in text and "/extensions/core/" not in text:
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
