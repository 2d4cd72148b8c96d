"""`python -m tests.browser.pictures`: photographs the shipped workflows after a real run in the real frontend.

Writes workflows/<stem>.jpg, which ComfyUI shows in its template browser, and three pictures in web/docs for the help
pages: workflow.jpg and stock_sampler.jpg, and tensor_plan.jpg, in which a Tensor Plan was added to the first workflow.
"""

from __future__ import annotations

import io
import tempfile
from pathlib import Path

from PIL import Image
from playwright.sync_api import Page

from tests.support.browser import frontend, load_workflow
from tools import ROOT, workflow
from tools.base_directory import BaseDirectory
from tools.comfy import Server

PIPELINE = "flux_prefer_tensor"
STEMS = (PIPELINE, "flux_prefer_context", "flux_stock_ksampler")
IN_HELP = {PIPELINE: "workflow", "flux_stock_ksampler": "stock_sampler"}
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
HIDE_MINIMAP = "() => window.app.extensionManager.setting.set('Comfy.Minimap.Visible', false)"
RUN_SECONDS = 240


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="comfyui-base-") as folder:
        server = Server(BaseDirectory.create(Path(folder)))
        with server, frontend(server.url) as page:
            page.evaluate(HIDE_MINIMAP)
            for stem in STEMS:
                picture = _photograph(page, stem)
                picture.save(ROOT / "workflows" / f"{stem}.jpg", quality=88)
                if stem in IN_HELP:
                    picture.save(ROOT / "web" / "docs" / f"{IN_HELP[stem]}.jpg", quality=85)
            picture = _photograph(page, PIPELINE, before=ADD_PLAN, after=KEEP_THE_PLAN)
            picture.save(ROOT / "web" / "docs" / "tensor_plan.jpg", quality=85)


def _photograph(page: Page, stem: str, before: str = "", after: str = "") -> Image.Image:
    """The canvas with the workflow on it, once its picture has arrived; `before` and `after` the run change it."""
    load_workflow(page, workflow.load(ROOT / "workflows" / f"{stem}.json"))
    if before:
        page.evaluate(before)
    page.evaluate("() => window.app.extensionManager.command.execute('Comfy.QueuePrompt')")
    page.wait_for_function(
        "() => window.app.graph.findNodesByType('SaveImage')[0].imgs?.[0]?.complete",
        timeout=RUN_SECONDS * 1000,
    )
    if after:
        page.evaluate(after)
    page.evaluate("() => window.app.extensionManager.command.execute('Comfy.Canvas.FitView')")
    page.wait_for_timeout(1500)  # the view glides there
    shot = Image.open(io.BytesIO(page.screenshot())).convert("RGB").crop(page.evaluate(NODES_ON_SCREEN))
    return shot.resize((WIDTH, round(shot.height * WIDTH / shot.width)), Image.Resampling.LANCZOS)


if __name__ == "__main__":
    main()
