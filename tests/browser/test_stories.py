"""What people live through with the panel, on real ranks: each story on every frontend with every renderer.

They go in this order on one server: the first has seen no group yet.
"""

from __future__ import annotations

import io
import json
import os
import random
import re
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from typing import Any

import numpy
import pytest
from PIL import Image
from playwright.sync_api import Page, Route, expect

from tests.browser.panel import TAB_BUTTON, Panel
from tests.browser.stage import Stage
from tests.support.browser import OUR_FILES, executable, load_workflow, queued_prompt, saved_workflow
from tests.support.processes import wait_until
from tests.support.workflows import saved_demo
from tools import page_parts
from tools.client import ComfyClient

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(executable() is None, reason="no Chromium here: install chromium to run the stories"),
]

QUIET_SECONDS = 30  # in which a closed panel asks nothing
POLL_SECONDS = 2  # between two requests of an open one
A_RUN, A_LONG_RUN = 300, 3000  # steps; one is some 20 ms on two cores
SOON = 5.0  # seconds after which a person must have been told
# Milliseconds, for `expect`.
AT_ONCE, SOON_MS = 1000, SOON * 1000
THREE_LINES = 3
FOREIGN_TAB = """() => app.extensionManager.registerSidebarTab({
    id: 'foreign', title: 'Foreign', icon: 'pi pi-box', type: 'custom',
    render: element => {
        const own = document.createElement('p')
        own.id = 'foreign-panel'
        own.textContent = 'Another pack'
        element.append(own)
    },
})"""
COUNT_PANELS = """() => {
    window.mostPanels = 0
    const count = () => {
        window.mostPanels = Math.max(
            window.mostPanels, document.querySelectorAll('[data-testid=sharded-panel]').length)
    }
    new MutationObserver(count).observe(document.body, {subtree: true, childList: true})
}"""
# Whose code writes which key: the stack tells.
WATCH_STORAGE = f"""() => {{
    const write = Storage.prototype.setItem
    window.writtenByUs = []
    Storage.prototype.setItem = function (key, value) {{
        if (new Error().stack.includes('{OUR_FILES}')) window.writtenByUs.push(key)
        return write.call(this, key, value)
    }}
}}"""
MODE = "() => app.extensionManager.workflow.activeWorkflow.activeMode"
EXECUTE = "id => app.extensionManager.command.execute(id)"
# Keys of ComfyUI's own settings begin so.
COMFYUIS_OWN = re.compile(r"^(Comfy|LiteGraph|pysssss)\b")


@pytest.fixture
def client(stage: Stage) -> Iterator[ComfyClient]:
    with ComfyClient(stage.server.url) as client:
        yield client


# ---- 1


def test_newcomer_first_look_without_a_group(stage: Stage) -> None:
    stage.end_groups()
    panel = stage.open()
    with panel.requests(QUIET_SECONDS) as asked:
        pass
    assert asked == [], "the panel is closed"
    panel.tab_button.click()
    expect(panel.state).to_have_text("No group is running.", timeout=AT_ONCE)
    expect(panel.root.locator("[data-testid^='sharded-gpu-']")).to_have_count(len(stage.state()["devices"]))
    assert stage.state()["devices"], "the server names no device"
    panel.part("examples").click()
    expect(panel.editor.dialog).to_be_visible()
    panel.editor.close_dialogs()
    panel.editor.screenshot(f"newcomer-{stage.setting}")


# ---- 2


def test_first_run_shows_what_it_is_doing(stage: Stage) -> None:
    stage.end_groups()
    panel = stage.open()
    panel.open()
    expect(panel.card("none")).to_be_visible()
    panel.forget_results()
    panel.follow()
    record = panel.run(saved_demo(steps=A_RUN, seed=_seed()))
    assert record["outputs"]
    panel.page.wait_for_function("window.shownByPanel.endedAt")
    expect(panel.card("idle")).to_be_visible()
    shown = panel.shown()
    phases = [one["text"] for one in shown["phases"]]
    assert _in_order(["starting", "loading", "sampling", "idle"], phases), phases
    idle_at = max(one["at"] for one in shown["phases"] if one["text"] == "idle")
    assert idle_at - shown["endedAt"] < 2000, "it is idle, and does not say so"
    for phase, entries in groupby(shown["progress"], key=lambda one: one["text"]):
        parts = [one["done"] for one in entries]
        assert parts == sorted(parts), f"progress of {phase} fell: {parts}"
    assert any(one["text"] == "sampling" for one in shown["progress"]), "no progress while sampling"
    said = [one["text"] for one in shown["said"]]
    assert said and len(said) <= len(phases), f"said {said} in the phases {phases}"
    assert not any(re.search(r"\d\s?%|step \d", one) for one in said), said
    assert re.search(r"loaded in \d", panel.editor.said_on("ShardedLoadPipeline")[-1])
    assert re.search(rf"{A_RUN} steps in \d", panel.editor.said_on("ShardedSample")[-1])
    panel.editor.screenshot(f"first-run-{stage.setting}")


# ---- 5


def test_rank_dies_and_the_next_run_works(stage: Stage, client: ComfyClient) -> None:
    stage.begin_group(client)
    panel = stage.open()
    prompt_id = panel.queue(saved_demo(steps=A_LONG_RUN, seed=_seed()))
    _wait_for_steps(stage)
    os.kill(stage.rank(1)["pid"], signal.SIGKILL)
    killed = time.monotonic()
    expect(panel.toasts.filter(has_text="Rank 1")).to_have_count(1, timeout=SOON_MS)
    expect(panel.badge).to_be_visible(timeout=SOON_MS)
    wait_until(lambda: "rank 1" in json.dumps(stage.state()["incidents"]).lower(), SOON, "the incident")
    assert time.monotonic() - killed < SOON
    _error_in_three_lines(panel, "rank 1")
    assert panel.ended(prompt_id)["status"]["status_str"] == "error"
    # It may have had its 15 s by now; a second one must not have come.
    assert panel.toasts.filter(has_text=re.compile("rank", re.IGNORECASE)).count() <= 1
    panel.editor.screenshot(f"rank-died-{stage.setting}")
    panel.editor.close_error()

    panel.open()
    expect(panel.state).to_have_text(re.compile(r"^Stopped: rank 1 "), timeout=SOON_MS)
    details, told = panel.part("incident"), stage.state()["incidents"][0]["detail"]
    expect(details).to_have_attribute("open", "")
    assert told.strip(), "nothing is told of what the rank said last"
    last_line = [line for line in told.splitlines() if line.strip()][-1]
    expect(details).to_contain_text(last_line)
    panel.part("copy-incident").click()
    expect(panel.part("copy-incident")).to_have_text("Copied")
    assert last_line in panel.clipboard()
    panel.editor.screenshot(f"rank-died-panel-{stage.setting}")
    expect(panel.badge).to_have_count(0)
    panel.close()
    expect(panel.badge).to_have_count(0)

    record = panel.run(saved_demo(steps=4, seed=_seed()))
    assert [one for output in record["outputs"].values() for one in output.get("images", [])]


# ---- 6


def test_park_and_come_back(stage: Stage, client: ComfyClient) -> None:
    panel = stage.open()
    panel.open()
    seed = _seed()
    before = _picture(client, panel.run(saved_demo(seed=seed)))
    expect(panel.card("idle")).to_be_visible()

    panel.part("park").click()
    expect(panel.state).to_have_text(re.compile("^Parked in RAM"), timeout=SOON_MS)
    _holds_nothing(stage)
    panel.part("restore").click()
    expect(panel.card("idle")).to_be_visible(timeout=60_000)

    prompt_id = panel.queue(saved_demo(steps=A_LONG_RUN, seed=_seed()))
    expect(panel.card("sampling")).to_be_visible(timeout=60_000)
    park, posts = panel.part("park"), len(panel.heard.routes)
    expect(park).to_have_attribute("aria-disabled", "true")
    assert "run" in (park.get_attribute("title") or ""), "no reason why not"
    park.focus()
    expect(park).to_be_focused()
    panel.page.keyboard.press("Enter")
    panel.page.wait_for_timeout(POLL_SECONDS * 1000)
    assert not [one for one in panel.heard.routes[posts:] if one.startswith("POST")]
    expect(panel.card("sampling")).to_be_visible()
    client.interrupt()
    panel.ended(prompt_id)
    expect(panel.card("idle")).to_be_visible()

    panel.page.evaluate(EXECUTE, "Comfy.Memory.UnloadModels")
    expect(panel.state).to_have_text("Parked by ComfyUI's Unload models.")
    _holds_nothing(stage)
    # The next prompt alone brings it back.
    assert _picture(client, panel.run(saved_demo(seed=seed))) == before
    expect(panel.card("idle")).to_be_visible()


# ---- 7


def test_tabs_reloads_restarts(stage: Stage) -> None:
    with ComfyClient(stage.server.url) as client:
        stage.begin_group(client)
    panel = stage.open()
    page = panel.page
    page.evaluate(FOREIGN_TAB)
    page.evaluate(COUNT_PANELS)
    panel.open()
    for _ in range(20):
        panel.switch_to("foreign")
        expect(panel.root).to_have_count(0, timeout=AT_ONCE)
        # The other pack appends as often as ComfyUI calls it.
        expect(page.locator("#foreign-panel").first).to_be_visible()
        panel.switch_to("sharded")
        expect(panel.root).to_be_visible()
        expect(page.locator("#foreign-panel")).to_have_count(0)
    assert page.evaluate("window.mostPanels") == 1
    with panel.requests(10) as asked:
        pass
    assert set(asked) == {"GET /sharded/state"} and 4 <= len(asked) <= 6, asked
    panel.switch_to("workflows")
    expect(panel.root).to_have_count(0)
    with panel.requests(3 * POLL_SECONDS) as asked:
        pass
    assert asked == [], "it asks on behind another tab"

    panel.switch_to("sharded")
    expect(panel.card("idle")).to_be_visible()
    other = stage.open(forget=False)
    other.open()
    expect(other.state).to_have_text(panel.state.inner_text())

    page.evaluate("() => { window.sameDocument = true }")
    port = stage.server.port
    stage.server.kill9()
    for one in (panel, other):
        expect(one.state).to_have_text(re.compile(r"^ComfyUI does not answer\."), timeout=3000)
    panel.editor.screenshot(f"offline-{stage.setting}")
    stage.server.start(port)
    for one in (panel, other):
        expect(one.state).to_have_text("No group is running.", timeout=SOON_MS)
    assert page.evaluate("window.sameDocument"), "the page was loaded again"
    panel.reload()
    panel.open()
    expect(panel.state).to_have_text("No group is running.")


# ---- 8 (its other half, and 9, need no ranks: test_panel.py)


def test_keyboard_alone_opens_parks_and_copies(stage: Stage, client: ComfyClient) -> None:
    stage.begin_group(client)
    panel = stage.open()
    page = panel.page
    _tab_to(page, TAB_BUTTON)
    page.keyboard.press("Enter")
    expect(panel.card("idle")).to_be_visible()
    _tab_to(page, "[data-testid=sharded-park]")
    page.keyboard.press("Enter")
    expect(panel.state).to_have_text(re.compile("^Parked in RAM"), timeout=SOON_MS)
    _tab_to(page, "[data-testid=sharded-copy]")
    page.keyboard.press("Enter")
    expect(panel.part("copy")).to_have_text("Copied")
    assert "ComfyUI-Sharded" in panel.clipboard()


# ---- 10


def test_leaves_no_trace_and_works_without_the_panel(stage: Stage, client: ComfyClient) -> None:
    page, heard = stage.blank()
    page.add_init_script(f"({WATCH_STORAGE})()")
    panel = stage.open(page, heard)
    demo = saved_demo(steps=4, seed=_seed())
    load_workflow(panel.page, demo)
    prompt = queued_prompt(panel.page)
    panel.open()
    assert queued_prompt(panel.page) == prompt
    panel.run(demo)
    saved = saved_workflow(panel.page)
    # Sections are folded and unfolded; which ones are open is kept.
    panel.root.evaluate("root => root.querySelectorAll('summary').forEach(one => one.click())")
    panel.page.wait_for_timeout(500)
    written = panel.page.evaluate("window.writtenByUs")
    assert written and all(key.startswith("sharded.") for key in written), written
    strange = [key for key in json.loads(client.get("/settings")) if not COMFYUIS_OWN.search(key)]
    assert all(key.startswith("Sharded.") for key in strange), strange

    bare = _open_without_the_packs_web(stage)
    load_workflow(bare.page, saved)
    expect(bare.editor.dialog).to_have_count(0)
    assert queued_prompt(bare.page) == prompt
    _runs_and_tells(bare)
    # Nobody listens to the pack's events there, and ComfyUI's page says so.
    bare.heard.errors.clear()


def test_everything_is_told_with_the_legacy_menu(stage: Stage) -> None:
    stage.choose(UseNewMenu="Disabled")
    try:
        panel = stage.open()
        expect(panel.tab_button).to_have_count(0)
        _runs_and_tells(panel)
        panel.editor.screenshot(f"legacy-menu-{stage.setting}")
    finally:
        stage.choose(UseNewMenu="Top")


def test_everything_is_told_in_focus_mode(stage: Stage) -> None:
    panel = stage.open()
    panel.page.evaluate(EXECUTE, "Workspace.ToggleFocusMode")
    expect(panel.tab_button).to_be_hidden()
    _runs_and_tells(panel)
    panel.editor.screenshot(f"focus-mode-{stage.setting}")


def test_everything_is_told_in_app_mode(stage: Stage) -> None:
    if stage.setting.frontend == page_parts.OLDEST_FRONTEND:
        pytest.skip("App Mode came later than this frontend")
    panel = stage.open()
    _runs_and_tells(panel, enter=_enter_app_mode)
    panel.editor.screenshot(f"app-mode-{stage.setting}")


# ---- helpers


def _seed() -> int:
    """Another each time, so that nothing is taken from ComfyUI's cache."""
    return random.randrange(2**32)


def _in_order(wanted: Sequence[str], seen: Sequence[str]) -> bool:
    """Whether all of `wanted` were seen, each after the one before; others may lie between."""
    rest = iter(seen)
    return all(one in rest for one in wanted)


def _wait_for_steps(stage: Stage) -> None:
    """Until the run that was queued has made some steps."""

    def made() -> bool:
        return any(
            one["stage"] == "sampling" and (one["progress"] or {}).get("done", 0) > 3
            for one in stage.groups()
        )

    wait_until(made, 240, "the run to sample")


def _picture(client: ComfyClient, record: dict[str, Any]) -> bytes:
    """The pixels of what a run has saved."""
    (saved,) = (one for output in record["outputs"].values() for one in output.get("images", []))
    data = client.get_image(saved["filename"], saved["subfolder"], saved["type"])
    return numpy.asarray(Image.open(io.BytesIO(data)).convert("RGB")).tobytes()


def _holds_nothing(stage: Stage) -> None:
    """No device has weights of ours, as far as it tells; CPU ranks do not."""
    state = stage.state()
    assert all(slot["state"] != "loaded" for group in state["groups"] for slot in group["slots"])
    assert not any(device["weights"] for device in state["devices"])


def _error_in_three_lines(panel: Panel, names: str) -> None:
    """The last run has failed; the page was told what, why and what works instead, and shows it."""
    panel.page.wait_for_function("window.failures.length")
    lines = panel.editor.failures()[-1]["exception_message"].strip().splitlines()
    assert len(lines) <= THREE_LINES and names in lines[0].lower(), lines
    expect(panel.editor.open_error()).to_contain_text(lines[0])


def _enter_app_mode(panel: Panel) -> None:
    """A workflow brings its own mode along, so this is for the one that is open."""
    if panel.page.evaluate(MODE) != "app":
        panel.page.evaluate(EXECUTE, "Comfy.ToggleLinear")
    assert panel.page.evaluate(MODE) == "app"
    expect(panel.tab_button).to_be_hidden()


def _runs_and_tells(panel: Panel, enter: Callable[[Panel], None] = lambda _panel: None) -> None:
    """A run that succeeds says so on its nodes; one that is refused says why in three lines."""
    panel.editor.forget_progress()
    panel.forget_results()
    for outcome, demo in (("success", saved_demo(4, _seed())), ("error", saved_demo(4, _seed(), stage=2))):
        load_workflow(panel.page, demo)
        enter(panel)
        status = panel.ended(panel.queue())["status"]
        assert status["status_str"] == outcome, json.dumps(status, indent=1)
    assert re.search(r"loaded in \d|already loaded", panel.editor.said_on("ShardedLoadPipeline")[-1])
    assert re.search(r"4 steps in \d", panel.editor.said_on("ShardedSample")[-1])
    panel.page.wait_for_function("window.failures.length")
    lines = panel.editor.failures()[-1]["exception_message"].strip().splitlines()
    assert len(lines) == THREE_LINES and lines[0].startswith("stage 2 "), lines


def _open_without_the_packs_web(stage: Stage) -> Panel:
    """As if the pack had no files for the page: its nodes are there, its script is not."""

    def leave_out(route: Route) -> None:
        answer = route.fetch()
        route.fulfill(response=answer, json=[one for one in answer.json() if OUR_FILES not in one])

    page, heard = stage.blank()
    page.route(re.compile(r"/extensions$"), leave_out)
    panel = stage.open(page, heard)
    assert not panel.tab_button.count()
    return panel


def _tab_to(page: Page, selector: str, presses: int = 150) -> None:
    """Press Tab until what matches has the focus."""
    for _ in range(presses):
        page.keyboard.press("Tab")
        if page.evaluate("selector => document.activeElement?.matches(selector) ?? false", selector):
            return
    raise AssertionError(f"{selector} was not reached with {presses} presses of Tab")
