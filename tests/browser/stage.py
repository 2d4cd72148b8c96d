"""Where the stories play: a ComfyUI server with one of the frontends and renderers, and pages of it in one profile.

One stage serves all stories of its setting; each gets a page of its own, and finds no run going on.
"""

from __future__ import annotations

import itertools
import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from playwright.sync_api import Browser, BrowserContext, Page

from tests.browser.editor import Editor
from tests.browser.panel import Answer, Panel, Stand
from tests.support.browser import Heard, new_context, open_editor
from tests.support.processes import wait_until
from tests.support.servers import serving
from tests.support.workflows import pipeline_prompt
from tools import loopback, page_parts
from tools.base_directory import BaseDirectory
from tools.client import ComfyClient
from tools.comfy import Server

PACK_FOLDER = "comfyui-sharded"
SERVER_ARGUMENTS = ("--preview-method", "latent2rgb")
# A tab begins without what others left in the profile, and keeps its own over a reload.
FORGET = """() => {
    if (sessionStorage.getItem('begun')) return
    localStorage.clear()
    sessionStorage.setItem('begun', 'yes')
}"""
END_SECONDS = 60.0


@dataclass(frozen=True)
class Setting:
    """A frontend's version, and which of its two renderers draws the nodes, "classic" or "nodes2"."""

    frontend: str
    renderer: str

    def __str__(self) -> str:
        return f"{self.frontend}-{self.renderer}"

    @property
    def settings(self) -> dict[str, object]:
        """ComfyUI's, as its dialog would save them."""
        return {"Comfy.VueNodes.Enabled": self.renderer == "nodes2", "Comfy.UseNewMenu": "Top"}


SETTINGS = tuple(
    Setting(frontend, renderer)
    for frontend in (page_parts.OLDEST_FRONTEND, page_parts.NEWEST_FRONTEND)
    for renderer in ("classic", "nodes2")
)


@dataclass
class Stage:
    """`open` gives a panel in a page of its own; the rest looks after the group, from outside the page."""

    setting: Setting
    server: Server
    browser: Browser
    context: BrowserContext
    panels: list[Panel] = field(default_factory=list)
    """Of the pages that are open."""
    _numbers: Iterator[int] = field(default_factory=lambda: itertools.count(1))

    # ---- pages

    def blank(self, *, forget: bool = True) -> tuple[Page, Heard]:
        """A page that has not been anywhere, for a test that has to be first with something."""
        page = self.context.new_page()
        if forget:
            page.add_init_script(f"({FORGET})()")
        heard = Heard(host=self.server.url.removeprefix("http://"))
        heard.listen(page)
        return page, heard

    def open(self, page: Page | None = None, heard: Heard | None = None, *, forget: bool = True) -> Panel:
        """The editor in `page` (by default a new one), with the panel closed."""
        if page is None or heard is None:
            page, heard = self.blank(forget=forget)
        open_editor(page, self.server.url)
        panel = Panel(Editor(page, PACK_FOLDER, heard.errors, heard.foreign), heard)
        self.panels.append(panel)
        return panel

    def open_with_stand(self, answer: Answer) -> tuple[Panel, Stand]:
        """A page in which the server's answers about groups are made up; it starts with this one."""
        page, heard = self.blank()
        stand = Stand(page, answer)
        return self.open(page, heard), stand

    def close_pages(self) -> None:
        self.panels.clear()
        for page in list(self.context.pages):
            page.unroute_all(behavior="ignoreErrors")  # a request on its way finds nobody any more
            page.close()

    def choose(self, **settings: object) -> None:
        """Set Comfy.<name> for each keyword; pages that are opened afterwards have it."""
        chosen = {f"Comfy.{name}": value for name, value in settings.items()}
        loopback.request(f"{self.server.url}/settings", chosen)

    # ---- the group

    def state(self) -> dict[str, Any]:
        return dict(json.loads(loopback.request(f"{self.server.url}/sharded/state")))

    def groups(self) -> list[dict[str, Any]]:
        """Those that run."""
        return [one for one in self.state()["groups"] if one["state"] not in ("stopped", "broken")]

    def act(self, action: str) -> None:
        for group in self.groups():
            loopback.request(f"{self.server.url}/sharded/group", {"action": action, "group": group["id"]})

    def end_groups(self) -> None:
        self.act("stop")
        wait_until(lambda: not self.groups(), END_SECONDS, "the groups' end")

    def begin_group(self, client: ComfyClient, **inputs: Any) -> None:
        """A group that is ready and has the demo model loaded, as after a short run."""
        number = next(self._numbers)
        prompt = pipeline_prompt(**{"tensor": 2, "steps": 2, "seed": 90_000 + number, **inputs})
        client.run(prompt, timeout=END_SECONDS * 4)
        wait_until(lambda: [one["state"] for one in self.groups()] == ["ready"], END_SECONDS, "an idle group")

    def rank(self, number: int) -> dict[str, Any]:
        """A rank of the one group that runs."""
        (group,) = self.groups()
        return dict(group["ranks"][number])

    def settle(self) -> None:
        """Cancel what still runs; a server that a failed test left dead is started again."""
        if not self.server.running:
            self.server.start(self.server.port)
        with ComfyClient(self.server.url) as client:
            queue = client.queue_state()
            if queue["queue_running"] or queue["queue_pending"]:
                client.clear_queue()
                client.interrupt()
                wait_until(
                    lambda: not client.queue_state()["queue_running"],
                    END_SECONDS,
                    "the server to become idle",
                )


@contextmanager
def staged(setting: Setting, browser: Browser) -> Iterator[Stage]:
    """A server of its own for the setting."""
    root = page_parts.frontend(setting.frontend)
    with tempfile.TemporaryDirectory(prefix="comfyui-base-") as folder:
        base = BaseDirectory.create(Path(folder), settings=setting.settings)
        arguments = (*SERVER_ARGUMENTS, "--front-end-root", str(root))
        with serving(base, arguments) as server:
            context = new_context(browser, server.url)
            try:
                yield Stage(setting, server, browser, context)
            finally:
                context.close()
