"""A pack for the fault suite's ComfyUI: has the groups run another module on their ranks, on request."""

import sys

from aiohttp import web
from server import PromptServer

NODE_CLASS_MAPPINGS: dict[str, type] = {}


@PromptServer.instance.routes.post("/faults/worker/{module}")
async def _worker(request: web.Request) -> web.Response:
    changed = 0
    for module in list(sys.modules.values()):
        path = str(getattr(module, "__file__", None) or "").replace("\\", "/")
        if path.endswith("/runtime/launch.py"):
            module.WORKER = request.match_info["module"]  # type: ignore[attr-defined]
            changed += 1
    return web.json_response({"changed": changed})
