"""Turns a workflow as the frontend saves it (nodes, links, widgets_values) into the API format that the server queues.

Does what the frontend's graphToPrompt does, for the graphs this project ships. What it does not know (subgraphs,
primitives, bypassed nodes) it refuses by name instead of queueing something else.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

NOTES = ("Note", "MarkdownNote")
REROUTE = "Reroute"
MUTED, BYPASSED = 2, 4
WIDGET_TYPES = ("INT", "FLOAT", "STRING", "BOOLEAN", "COMBO")
# The frontend puts one more widget behind a seed, and saves its value among the others.
CONTROL_VALUES = ("fixed", "increment", "decrement", "randomize", "increment-wrap")

ObjectInfo = Callable[[str], dict[str, Any]]


class WorkflowError(ValueError):
    """The workflow cannot be converted; the message names the node."""


def load(path: Path) -> dict[str, Any]:
    return dict(json.loads(path.read_text(encoding="utf-8")))


def to_api(workflow: dict[str, Any], object_info: ObjectInfo) -> dict[str, dict[str, Any]]:
    """Convert; `object_info` gives a node's description by its type, {} for an unknown one. Raises WorkflowError."""
    nodes = {node["id"]: node for node in workflow["nodes"]}
    links = {link[0]: (link[1], link[2]) for link in workflow["links"]}
    api = {}
    has_output = False
    for node in nodes.values():
        if node["type"] in NOTES or node["type"] == REROUTE or node.get("mode") == MUTED:
            continue
        if node.get("mode") == BYPASSED:
            raise WorkflowError(f"{_name(node)} is bypassed, which is not supported here")
        info = object_info(node["type"])
        if not info:
            raise WorkflowError(f"{_name(node)}: the server has no node of this type")
        inputs = _widget_values(node, info) | _linked_inputs(node, nodes, links)
        _check_required(node, info, inputs)
        api[str(node["id"])] = {
            "class_type": node["type"],
            "inputs": inputs,
            "_meta": {"title": node.get("title") or info.get("display_name") or node["type"]},
        }
        has_output = has_output or bool(info.get("output_node"))
    if not has_output:
        raise WorkflowError("no node of the workflow is an output")
    return api


def titles(api: dict[str, dict[str, Any]]) -> dict[str, str]:
    """What each node is called on screen, by node id."""
    return {node_id: node["_meta"]["title"] for node_id, node in api.items()}


def _widget_values(node: dict[str, Any], info: dict[str, Any]) -> dict[str, Any]:
    """Give each value to its widget, in the order in which the server lists the inputs."""
    saved = node.get("widgets_values") or []
    names = [name for name, spec in _inputs(info) if _is_widget(spec)]
    if isinstance(saved, dict):
        return {name: saved[name] for name in names if name in saved}
    result: dict[str, Any] = {}
    remaining = list(saved)
    for name in names:
        if not remaining:
            break  # a widget newer than the file: the default applies, or _check_required complains
        result[name] = remaining.pop(0)
        if remaining and _has_control(name, info) and remaining[0] in CONTROL_VALUES:
            remaining.pop(0)
    if remaining:
        raise WorkflowError(f"{_name(node)} saves {len(saved)} values, more than its widgets {names}")
    return result


def _linked_inputs(
    node: dict[str, Any], nodes: dict[int, dict[str, Any]], links: dict[int, tuple[int, int]]
) -> dict[str, list[Any]]:
    """Inputs that come from another node, as [node id, output index]; a muted source leaves the input open."""
    result = {}
    for slot in node.get("inputs") or []:
        if slot.get("link") is None:
            continue
        origin, output = _source(links[slot["link"]], nodes, links)
        if nodes[origin].get("mode") != MUTED:
            result[slot["name"]] = [str(origin), output]
    return result


def _source(
    link: tuple[int, int], nodes: dict[int, dict[str, Any]], links: dict[int, tuple[int, int]]
) -> tuple[int, int]:
    """Follow reroutes back to the node that makes the value."""
    while nodes[link[0]]["type"] == REROUTE:
        behind = nodes[link[0]]["inputs"][0].get("link")
        if behind is None:
            raise WorkflowError(f"{_name(nodes[link[0]])} leads nowhere")
        link = links[behind]
    return link


def _inputs(info: dict[str, Any]) -> Iterator[tuple[str, list[Any]]]:
    for group in ("required", "optional"):
        described = info["input"].get(group) or {}
        for name in (info.get("input_order") or {}).get(group) or described:
            yield name, described[name]


def _is_widget(spec: list[Any]) -> bool:
    options = spec[1] if len(spec) > 1 and isinstance(spec[1], dict) else {}
    if options.get("forceInput"):
        return False
    # An old-style combo has its list of choices where others have a type.
    return isinstance(spec[0], list) or spec[0] in WIDGET_TYPES


def _has_control(name: str, info: dict[str, Any]) -> bool:
    spec = dict(_inputs(info))[name]
    options = spec[1] if len(spec) > 1 and isinstance(spec[1], dict) else {}
    return bool(options.get("control_after_generate", name in ("seed", "noise_seed")))


def _check_required(node: dict[str, Any], info: dict[str, Any], inputs: dict[str, Any]) -> None:
    missing = [name for name in info["input"].get("required") or {} if name not in inputs]
    if missing:
        raise WorkflowError(f"{_name(node)} has no value for {', '.join(missing)}")


def _name(node: dict[str, Any]) -> str:
    return f"node {node['id']} ({node.get('title') or node['type']})"
