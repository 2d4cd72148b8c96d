"""The pack's settings in ComfyUI's own dialog: what is chosen there is what the server reads."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from playwright.sync_api import expect

from tests.browser.editor import Editor
from tests.support.browser import executable
from tests.support.processes import wait_until
from tools.comfy import Server

pytestmark = pytest.mark.skipif(
    executable() is None, reason="no Chromium here: install chromium to run the tests of the settings"
)

GET = "name => app.extensionManager.setting.get(name)"
PARK, STOP = "Sharded.Group.ParkAfter", "Sharded.Group.StopAfter"
# As the dialog shows them.
NAMES = (
    "Park when idle for",
    "Stop when idle for",
    "Show a message when a rank stops or the layout was changed",
    "Show status text on nodes",
    "Open the panel when a rank stops",
)


def test_there_are_five_settings(editor: Editor) -> None:
    page = editor.page
    page.evaluate("() => app.extensionManager.command.execute('Comfy.ShowSettingsDialog')")
    dialog = page.get_by_role("dialog").last
    dialog.get_by_text("Sharded", exact=True).first.click()
    for name in NAMES:
        expect(dialog.get_by_text(name, exact=True)).to_be_visible()
    editor.screenshot("settings-all")
    page.keyboard.press("Escape")


def test_the_idle_times_are_chosen_in_the_dialog(editor: Editor, comfy_server: Server) -> None:
    page = editor.page
    assert [page.evaluate(GET, name) for name in (PARK, STOP)] == [10, 0]
    page.evaluate("() => app.extensionManager.command.execute('Comfy.ShowSettingsDialog')")
    dialog = page.get_by_role("dialog").last
    dialog.get_by_text("Sharded", exact=True).first.click()
    expect(dialog.get_by_text("Park when idle for")).to_be_visible()
    expect(dialog.get_by_text("Stop when idle for")).to_be_visible()
    park = dialog.get_by_role("combobox").filter(has_text="10 minutes")
    park.click()
    offered = page.get_by_role("listbox").last.get_by_role("option")  # the dialog's pages are a list, too
    expect(offered).to_have_text(["Never", "5 minutes", "10 minutes", "15 minutes", "60 minutes"])
    offered.filter(has_text=re.compile("^15 minutes$")).click()
    file = Path(comfy_server.base.path, "user", "default", "comfy.settings.json")
    wait_until(lambda: json.loads(file.read_text()).get(PARK) == 15, 10, "the setting to be saved")
    editor.screenshot("settings")
    page.keyboard.press("Escape")
    page.evaluate("([name, value]) => app.extensionManager.setting.set(name, value)", [PARK, 10])
