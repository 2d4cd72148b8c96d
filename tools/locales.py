"""`python -m tools.locales`: writes the English texts of the nodes from their schemas, as ComfyUI serves them.

The schema is the one place where a text is written; other languages translate this file.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from tools import ROOT
from tools.base_directory import BaseDirectory
from tools.client import ComfyClient
from tools.comfy import Server

ENGLISH = ROOT / "locales" / "en" / "nodeDefs.json"
NODE_SCHEMAS = ROOT / "tests" / "unit" / "node_schema.json"


def node_ids() -> list[str]:
    """The pack's nodes, by the recorded schema."""
    return sorted(json.loads(NODE_SCHEMAS.read_text()))


def node_texts(infos: Iterable[tuple[str, Mapping[str, Any]]]) -> dict[str, Any]:
    """The content of nodeDefs.json for (node id, object info) pairs."""
    return {node_id: _texts(info) for node_id, info in infos}


def _texts(info: Mapping[str, Any]) -> dict[str, Any]:
    inputs = {**info["input"].get("required", {}), **info["input"].get("optional", {})}
    return {
        "display_name": info["display_name"],
        "description": info["description"],
        "inputs": {
            name: {"name": spec[1].get("display_name") or name, "tooltip": spec[1]["tooltip"]}
            for name, spec in inputs.items()
        },
        "outputs": {
            str(index): {"name": name, "tooltip": tooltip}
            for index, (name, tooltip) in enumerate(
                zip(info["output_name"], info["output_tooltips"], strict=True)
            )
        },
    }


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="comfyui-base-") as folder:
        server = Server(BaseDirectory.create(Path(folder)))
        with server, ComfyClient(server.url) as client:
            texts = node_texts((node_id, client.object_info(node_id)) for node_id in node_ids())
    ENGLISH.write_text(json.dumps(texts, indent=2, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
