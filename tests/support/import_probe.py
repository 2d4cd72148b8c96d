"""Loads ComfyUI's node machinery, then the pack, and prints what the pack's own import took and added.

Run as a script in a process of its own: `python import_probe.py <ComfyUI tree> <pack> <base directory>`.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time


def main() -> None:
    tree, pack, base = sys.argv[1:4]
    os.chdir(tree)
    sys.path.insert(0, tree)
    sys.argv = ["main.py", "--cpu", "--base-directory", base]
    import comfy.options

    comfy.options.enable_args_parsing()
    # First, as main.py does: another `utils` would take its place.
    import utils.extra_config  # noqa: F401

    asyncio.run(_measure(pack))


async def _measure(pack: str) -> None:
    import server

    import nodes

    server.PromptServer(asyncio.get_running_loop())
    await nodes.init_builtin_extra_nodes()
    before = set(sys.modules)
    start = time.process_time()  # not the wall clock: tests run on busy machines
    assert await nodes.load_custom_node(pack), "ComfyUI could not load the pack"
    seconds = time.process_time() - start
    print(json.dumps({"seconds": seconds, "modules": sorted(set(sys.modules) - before)}))


if __name__ == "__main__":
    main()
