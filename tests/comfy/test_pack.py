"""What the pack is to ComfyUI: its schema, its import, its route, its files."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.support.group_routes import raw_state, state
from tools import ROOT, comfy_source, locales
from tools.client import ComfyClient
from tools.comfy import Server

SCHEMA = ROOT / "tests" / "unit" / "node_schema.json"
OPTIONS = ("default", "min", "max", "step", "options")
LISTS_OF_MODELS = ("A folder with", "A safetensors file")  # begin the tooltips of inputs that choose a model
KEPT = ("input", "input_order", "output", "output_name", "display_name", "category", "output_node")


def schema_of(client: ComfyClient) -> dict[str, Any]:
    """The public format of the nodes: ids, inputs and their order, types, defaults, ranges, options."""
    recorded = json.loads(SCHEMA.read_text()) if SCHEMA.exists() else {}
    found = {}
    for node_id in recorded or ("ShardedParallelConfig",):
        info = client.object_info(node_id)
        found[node_id] = {name: _plain(info[name]) for name in KEPT}
    return found


def _plain(value: Any) -> Any:
    """What a saved workflow depends on: no tooltips, no display hints, no list of this machine's models."""
    if isinstance(value, dict):
        if "tooltip" in value:
            models = {"options"} if value["tooltip"].startswith(LISTS_OF_MODELS) else set()
            return {name: value[name] for name in OPTIONS if name in value and name not in models}
        return {name: _plain(one) for name, one in value.items()}
    if isinstance(value, list):
        return [_plain(one) for one in value]
    return value


def test_saved_workflows_keep_opening(client: ComfyClient) -> None:
    """Node ids, inputs and their order are a public format: add, never rename."""
    assert schema_of(client) == json.loads(SCHEMA.read_text())


def test_the_recorded_schema_names_every_node_of_the_pack(client: ComfyClient) -> None:
    nodes = json.loads(client.get("/object_info"))
    ours = {name for name, info in nodes.items() if info.get("python_module", "").endswith("comfyui-sharded")}
    assert ours == set(json.loads(SCHEMA.read_text()))


def test_every_cable_and_value_has_a_tooltip_and_every_node_a_help_page(
    client: ComfyClient, comfy_server: Server
) -> None:
    for node_id in json.loads(SCHEMA.read_text()):
        info = client.object_info(node_id)
        assert info["description"]
        for group in ("required", "optional"):
            for name, spec in info["input"].get(group, {}).items():
                assert spec[1].get("tooltip"), f"{node_id}.{name}"
        assert all(info["output_tooltips"]), node_id
        page = client.get(f"/extensions/comfyui-sharded/docs/{node_id}.md").decode()
        assert page.startswith("# ")


def test_the_english_texts_are_the_schemas_own(client: ComfyClient) -> None:
    """After a change of a schema: `python -m tools.locales`."""
    served = locales.node_texts((node_id, client.object_info(node_id)) for node_id in locales.node_ids())
    assert json.loads(locales.ENGLISH.read_text()) == served


def test_the_state_route_is_read_only_and_small(client: ComfyClient) -> None:
    answer = state(client)
    assert answer["api"] == 1
    assert {"api", "time", "version", "devices", "groups"} <= set(answer)
    assert len(raw_state(client)) <= 8192


def test_importing_the_pack_is_quick_and_brings_no_heavy_library(tmp_path: Path) -> None:
    """In a process that has ComfyUI's own modules loaded: seconds, and the modules added during the import."""
    probe = ROOT / "tests" / "support" / "import_probe.py"
    command = [sys.executable, str(probe), str(comfy_source.obtain()), str(ROOT), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads(done.stdout.strip().splitlines()[-1])
    print(f"import: {result['seconds']:.3f} s, {len(result['modules'])} new modules")
    heavy = [
        name
        for name in result["modules"]
        if re.match(r"(diffusers|transformers|torch\.distributed)(\.|$)", name)
    ]
    assert not heavy
    assert result["seconds"] <= 0.2
