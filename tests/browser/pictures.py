"""`python -m tests.browser.pictures`: photographs the shipped workflows after a real run in the real frontend.

Writes workflows/<stem>.jpg, which ComfyUI shows in its template browser, and pictures in web/docs for the help pages:
workflow.jpg, stock_sampler.jpg and park_group.jpg; tensor_plan.jpg, in which a Tensor Plan was added to the first
workflow; doctor.jpg; panel.jpg and panel_failed.jpg, the panel on a machine with four GPUs that is made up.
"""

from __future__ import annotations

import io
import tempfile
from pathlib import Path
from typing import Any

from PIL import Image
from playwright.sync_api import Browser, Page

from tests.browser.editor import Editor
from tests.browser.panel import Panel, Stand
from tests.browser.stage import PACK_FOLDER
from tests.browser.states import PHASES
from tests.support.browser import Heard, chromium, frontend, load_workflow, new_context, open_editor
from tools import ROOT, workflow
from tools.base_directory import BaseDirectory
from tools.comfy import Server

PIPELINE = "flux_prefer_tensor"
STEMS = sorted(file.stem for file in (ROOT / "workflows").glob("*.json"))
IN_HELP = {PIPELINE: "workflow", "flux_stock_ksampler": "stock_sampler", "flux_free_the_cards": "park_group"}
WIDTH = 1200
MARGIN = 24
# The rectangle around all nodes in pixels of the page: left, top, right, bottom.
NODES_ON_SCREEN = f"""() => {{
    const {{scale, offset}} = window.app.canvas.ds;
    const canvas = window.app.canvas.canvas.getBoundingClientRect();
    const boxes = window.app.graph.nodes.map(node => node.getBounding());
    const edge = (pick, values, axis) =>
        (pick(...values) + offset[axis]) * scale + [canvas.x, canvas.y][axis];
    return [
        edge(Math.min, boxes.map(b => b[0]), 0) - {MARGIN},
        edge(Math.min, boxes.map(b => b[1]), 1) - {MARGIN},
        edge(Math.max, boxes.map(b => b[0] + b[2]), 0) + {MARGIN},
        edge(Math.max, boxes.map(b => b[1] + b[3]), 1) + {MARGIN},
    ].map(Math.round);
}}"""
# A Tensor Plan between the config and the loader; what stands right of it makes room.
ADD_PLAN = """() => {
    const graph = window.app.graph, plan = LiteGraph.createNode("ShardedTensorPlan");
    const [config, load] = ["ShardedParallelConfig", "ShardedLoadPipeline"].map(
        type => graph.findNodesByType(type)[0]);
    plan.pos = [load.pos[0], load.pos[1]];
    plan.size = [460, 330];
    load.size = [340, load.size[1]];
    for (const node of graph.nodes) {
        if (node.pos[0] >= load.pos[0]) node.pos = [node.pos[0] + 500, node.pos[1]];
    }
    graph.add(plan);
    config.connect(0, plan, "parallel_config");
    plan.connect(0, load, "parallel_config");
}"""
KEEP_THE_PLAN = """() => {
    const kept = ["ShardedParallelConfig", "ShardedTensorPlan", "ShardedLoadPipeline"];
    for (const node of [...window.app.graph.nodes]) {
        if (!kept.includes(node.type)) window.app.graph.remove(node);
    }
}"""
EMPTY = {
    "last_node_id": 0,
    "last_link_id": 0,
    "nodes": [],
    "links": [],
    "groups": [],
    "config": {},
    "version": 0.4,
}
ADD_DOCTOR = """() => {
    const doctor = LiteGraph.createNode("ShardedDoctor"), text = LiteGraph.createNode("PreviewAny");
    doctor.pos = [40, 120];
    text.pos = [420, 120];
    text.size = [720, 460];
    for (const node of [doctor, text]) window.app.graph.add(node);
    doctor.connect(0, text, 0);
}"""
PICTURE_IS_THERE = "() => window.app.graph.findNodesByType('SaveImage')[0].imgs?.[0]?.complete"
REPORT_IS_THERE = """() => window.app.graph.findNodesByType('PreviewAny')[0].widgets
    ?.some(widget => String(widget.value).length > 200)"""
# No map in a corner, and text also where it is small.
TAKE_ALL_IN = """async () => {
    const {setting} = window.app.extensionManager
    await setting.set('Comfy.Minimap.Visible', false)
    await setting.set('LiteGraph.Canvas.MinFontSizeForLOD', 0)
}"""
RUN_SECONDS = 240
PANELS = {"sampling": "panel", "failed": "panel_failed"}
PANEL_WIDTH = 360


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="comfyui-base-") as folder:
        server = Server(BaseDirectory.create(Path(folder)))
        with server, chromium() as browser, frontend(server.url, browser=browser) as page:
            page.evaluate(TAKE_ALL_IN)
            for stem in STEMS:
                picture = _photograph(page, _shipped(stem))
                picture.save(ROOT / "workflows" / f"{stem}.jpg", quality=88)
                if stem in IN_HELP:
                    picture.save(ROOT / "web" / "docs" / f"{IN_HELP[stem]}.jpg", quality=85)
            picture = _photograph(page, _shipped(PIPELINE), before=ADD_PLAN, after=KEEP_THE_PLAN)
            picture.save(ROOT / "web" / "docs" / "tensor_plan.jpg", quality=85)
            picture = _photograph(page, EMPTY, before=ADD_DOCTOR, done=REPORT_IS_THERE)
            picture.save(ROOT / "web" / "docs" / "doctor.jpg", quality=85)
            _photograph_panel(browser, server.url)


def _photograph_panel(browser: Browser, url: str) -> None:
    """The panel alone, as wide as people have it."""
    page = new_context(browser, url).new_page()
    stand = Stand(page, PHASES["idle"].answer)
    open_editor(page, url)
    panel = Panel(Editor(page, PACK_FOLDER, [], []), Heard(host=""))
    panel.open()
    panel.make_room()
    panel.set_width(PANEL_WIDTH)
    for phase, name in PANELS.items():
        stand.bring(PHASES[phase].answer)
        panel.card(PHASES[phase].phase).wait_for()
        panel.unfold()
        shot = Image.open(io.BytesIO(panel.root.screenshot(animations="disabled"))).convert("RGB")
        shot.save(ROOT / "web" / "docs" / f"{name}.jpg", quality=88)


def _shipped(stem: str) -> dict[str, Any]:
    return workflow.load(ROOT / "workflows" / f"{stem}.json")


def _photograph(
    page: Page, saved: dict[str, Any], *, before: str = "", after: str = "", done: str = PICTURE_IS_THERE
) -> Image.Image:
    """The canvas with a workflow on it, once `done` says that it has run; `before` and `after` the run change it."""
    load_workflow(page, saved)
    if before:
        page.evaluate(before)
    page.evaluate("() => window.app.extensionManager.command.execute('Comfy.QueuePrompt')")
    page.wait_for_function(done, timeout=RUN_SECONDS * 1000)
    if after:
        page.evaluate(after)
    page.evaluate("() => window.app.extensionManager.command.execute('Comfy.Canvas.FitView')")
    page.wait_for_timeout(1500)  # the view glides there
    shot = Image.open(io.BytesIO(page.screenshot())).convert("RGB").crop(page.evaluate(NODES_ON_SCREEN))
    return shot.resize((WIDTH, round(shot.height * WIDTH / shot.width)), Image.Resampling.LANCZOS)


if __name__ == "__main__":
    main()
