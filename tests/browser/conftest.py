"""One browser for a whole module: loading ComfyUI's page is the slow part, and people keep it open too."""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Iterator

import pytest
from playwright.sync_api import Error

from tests.browser.editor import Editor
from tests.support.browser import frontend
from tools.client import ComfyClient
from tools.comfy import Server

PACK_FOLDER = "comfyui-sharded"
PICTURES = (".jpg", ".png", ".webp")


@pytest.fixture(scope="module")
def opened_editor(comfy_server: Server) -> Iterator[Editor]:
    errors: list[str] = []
    foreign: list[str] = []
    with frontend(comfy_server.url, errors, foreign) as page:
        yield Editor(page, PACK_FOLDER, errors, foreign)


@pytest.fixture
def editor(opened_editor: Editor, client: ComfyClient) -> Iterator[Editor]:
    """The editor with nothing in the way. A test in which a file of the pack broke something fails at its end."""
    opened_editor.settle(client)
    opened_editor.errors.clear()
    yield opened_editor
    # A picture that is missing is one test's business, not that of every test that passes it.
    broken = [error for error in opened_editor.errors if not any(kind in error for kind in PICTURES)]
    assert not broken, "errors in the page:\n" + "\n".join(broken)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Keep the screen of a failed test."""
    report = yield
    editor = getattr(item, "funcargs", {}).get("editor")
    if report.when == "call" and report.failed and isinstance(editor, Editor):
        with contextlib.suppress(Error):
            path = editor.screenshot(f"failed-{item.name}")
            report.sections.append(("Screen", str(path)))
    return report
