"""One browser for the session, one editor for a module of the default frontend, one stage for each setting."""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Error

from tests.browser.editor import Editor
from tests.browser.stage import PACK_FOLDER, SETTINGS, Setting, Stage, staged
from tests.support.browser import Heard, chromium, frontend, new_context
from tools import page_parts
from tools.client import ComfyClient
from tools.comfy import Server

PICTURES = (".jpg", ".png", ".webp")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """These go last: while the browser is there, Playwright's event loop runs in this thread, and allows no other."""
    here = Path(__file__).parent
    items.sort(key=lambda item: item.path.is_relative_to(here))


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    with chromium() as browser:
        yield browser


# ---- ComfyUI's page as it is installed


@pytest.fixture(scope="module")
def opened_editor(comfy_server: Server, browser: Browser) -> Iterator[Editor]:
    """Loading ComfyUI's page is the slow part, and people keep it open too."""
    heard = Heard(host=comfy_server.url.removeprefix("http://"))
    with frontend(comfy_server.url, heard, browser) as page:
        yield Editor(page, PACK_FOLDER, heard.errors, heard.foreign)


@pytest.fixture
def editor(opened_editor: Editor, client: ComfyClient) -> Iterator[Editor]:
    """The editor with nothing in the way. A test in which a file of the pack broke something fails at its end."""
    opened_editor.settle(client)
    opened_editor.errors.clear()
    yield opened_editor
    _nothing_broke(opened_editor.errors)


@pytest.fixture
def default_stage(comfy_server: Server, browser: Browser) -> Iterator[Stage]:
    """Pages of the session's own server."""
    context = new_context(browser, comfy_server.url)
    try:
        setting = Setting(page_parts.installed_frontend(), "classic")
        yield from _played(Stage(setting, comfy_server, browser, context))
    finally:
        context.close()


# ---- every frontend with every renderer


@pytest.fixture(scope="session", params=SETTINGS, ids=str)
def built_stage(request: pytest.FixtureRequest, browser: Browser) -> Iterator[Stage]:
    setting = request.param
    assert isinstance(setting, Setting)
    with staged(setting, browser) as stage:
        yield stage


@pytest.fixture
def stage(built_stage: Stage) -> Iterator[Stage]:
    """The stage with no page open and nothing running; judged at the end, as the editor is."""
    yield from _played(built_stage)


def _played(stage: Stage) -> Iterator[Stage]:
    stage.close_pages()
    stage.settle()
    yield stage
    heard = [panel.heard for panel in stage.panels]
    stage.close_pages()
    _nothing_broke([error for one in heard for error in one.errors])
    abroad = [address for one in heard for address in one.ours_abroad]
    assert not abroad, "files of the pack asked other hosts:\n" + "\n".join(abroad)


def _nothing_broke(errors: list[str]) -> None:
    # A picture that is missing is one test's business, not that of every test that passes it.
    broken = [error for error in errors if not any(kind in error for kind in PICTURES)]
    assert not broken, "errors in the page:\n" + "\n".join(broken)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Keep the screens of a failed test, and what the stage's server said."""
    report = yield
    if report.when == "call" and report.failed:
        for stage in _stages(item):
            report.sections.append(("ComfyUI server log (tail)", stage.server.log_tail(40)))
        for number, editor in enumerate(_editors(item)):
            with contextlib.suppress(Error):
                path = editor.screenshot(f"failed-{item.name}-{number}")
                report.sections.append(("Screen", str(path)))
    return report


def _stages(item: pytest.Item) -> list[Stage]:
    used = getattr(item, "funcargs", {})
    return [one for name in ("stage", "default_stage") if isinstance(one := used.get(name), Stage)]


def _editors(item: pytest.Item) -> list[Editor]:
    editor = getattr(item, "funcargs", {}).get("editor")
    panels = [panel for stage in _stages(item) for panel in stage.panels]
    return [*([editor] if isinstance(editor, Editor) else []), *(panel.editor for panel in panels)]
