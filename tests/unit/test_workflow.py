"""The conversion of saved workflows into what the server queues, on small graphs with made-up nodes."""

from __future__ import annotations

import json
from typing import Any

import pytest

from runtime import planner
from runtime.devices import default_cpu_ranks
from runtime.spec import ParallelConfig
from tests.support.mocks import mock_cards
from tools import ROOT, workflow
from tools.workflow import WorkflowError, to_api

NODES: dict[str, dict[str, Any]] = {
    "Make": {
        "display_name": "Make It",
        "input": {
            "required": {
                "seed": ["INT", {"control_after_generate": True}],
                "mode": [["a", "b"], {}],
                "kind": ["COMBO", {"options": ["x"]}],
            },
            "optional": {
                "source": ["IMAGE", {}],
                "size": ["FLOAT", {}],
                "fed": ["INT", {"forceInput": True}],
            },
        },
        "input_order": {"required": ["seed", "mode", "kind"], "optional": ["source", "size", "fed"]},
    },
    "Show": {"input": {"required": {"image": ["IMAGE", {}]}}, "output_node": True},
}


def info(node_type: str) -> dict[str, Any]:
    return NODES.get(node_type, {})


def make(node_id: int, values: list[Any], **more: Any) -> dict[str, Any]:
    return {"id": node_id, "type": "Make", "widgets_values": values, "inputs": [], **more}


def show(node_id: int, link: int | None) -> dict[str, Any]:
    return {"id": node_id, "type": "Show", "inputs": [{"name": "image", "type": "IMAGE", "link": link}]}


def graph(*nodes: dict[str, Any], links: list[list[Any]]) -> dict[str, Any]:
    return {"nodes": list(nodes), "links": links, "version": 0.4}


def test_values_and_links_find_their_inputs() -> None:
    api = to_api(
        graph(make(1, [7, "fixed", "b", "x", 0.5]), show(2, 9), links=[[9, 1, 0, 2, 0, "IMAGE"]]), info
    )
    assert api["1"]["inputs"] == {"seed": 7, "mode": "b", "kind": "x", "size": 0.5}
    assert api["2"] == {"class_type": "Show", "inputs": {"image": ["1", 0]}, "_meta": {"title": "Show"}}
    assert workflow.titles(api) == {"1": "Make It", "2": "Show"}


def test_a_seed_without_its_control_value_is_read_too() -> None:
    api = to_api(graph(make(1, [7, "b", "x", 0.5]), show(2, 9), links=[[9, 1, 0, 2, 0, "IMAGE"]]), info)
    assert api["1"]["inputs"] == {"seed": 7, "mode": "b", "kind": "x", "size": 0.5}


def test_a_link_wins_over_the_widget_it_is_plugged_into() -> None:
    plugged = make(2, [7, "fixed", "b", "x"])
    plugged["inputs"] = [{"name": "seed", "type": "INT", "widget": {"name": "seed"}, "link": 4}]
    links = [[4, 1, 1, 2, 0, "INT"], [9, 2, 0, 3, 0, "IMAGE"]]
    api = to_api(graph(make(1, [1, "fixed", "a", "x"]), plugged, show(3, 9), links=links), info)
    assert api["2"]["inputs"]["seed"] == ["1", 1]


def test_notes_muted_nodes_and_reroutes_are_not_queued() -> None:
    nodes = [
        make(1, [7, "fixed", "b", "x"]),
        {"id": 2, "type": "Reroute", "inputs": [{"name": "", "link": 1}]},
        show(3, 2),
        {"id": 4, "type": "MarkdownNote", "widgets_values": ["hello"]},
        make(5, [7, "fixed", "b", "x"], mode=workflow.MUTED),
    ]
    api = to_api(graph(*nodes, links=[[1, 1, 0, 2, 0, "*"], [2, 2, 0, 3, 0, "IMAGE"]]), info)
    assert sorted(api) == ["1", "3"]
    assert api["3"]["inputs"] == {"image": ["1", 0]}


@pytest.mark.parametrize(
    ("nodes", "message"),
    [
        ([make(1, [7, "fixed", "b", "x"])], "no node of the workflow is an output"),
        ([show(1, None)], r"node 1 \(Show\) has no value for image"),
        ([{"id": 1, "type": "Gone"}], r"node 1 \(Gone\): the server has no node of this type"),
        ([make(1, [7, "fixed", "b", "x", 0.5, "more"])], "more than its widgets"),
        ([make(1, [7], mode=workflow.BYPASSED)], "bypassed"),
    ],
)
def test_what_cannot_be_converted_is_named(nodes: list[dict[str, Any]], message: str) -> None:
    with pytest.raises(WorkflowError, match=message):
        to_api(graph(*nodes, links=[]), info)


@pytest.mark.parametrize("path", sorted((ROOT / "workflows").glob("*.json")), ids=lambda path: path.stem)
def test_shipped_workflows_suit_any_machine(path: Any) -> None:
    """Explicit degrees would tie them to a number of devices."""
    saved = json.loads(path.read_text(encoding="utf-8"))
    configs = [node for node in saved["nodes"] if node["type"] == "ShardedParallelConfig"]
    assert configs
    for node in configs:
        strategy, *degrees = node["widgets_values"][:6]
        assert strategy in ("auto", "prefer tensor", "prefer context")
        assert degrees == [1] * 5
        assert node["widgets_values"][6] == "auto"


@pytest.mark.parametrize("cards", [1, 2, 4, 0], ids=["1 GPU", "2 GPUs", "4 GPUs", "no GPU"])
@pytest.mark.parametrize("path", sorted((ROOT / "workflows").glob("*.json")), ids=lambda path: path.stem)
def test_the_loaders_of_shipped_workflows_refuse_nothing(path: Any, cards: int) -> None:
    """With what stands in them, on machines of every size; as many ranks as there are devices."""
    nodes = {node["type"]: node["widgets_values"] for node in json.loads(path.read_text("utf-8"))["nodes"]}
    (plan,) = nodes.get("ShardedTensorPlan", [""])
    config = ParallelConfig(strategy=nodes["ShardedParallelConfig"][0], tensor_plan=plan)
    model = ROOT / "demo_model"
    facts = [planner.check_pipeline(model / nodes["ShardedLoadPipeline"][0], config)]
    if "ShardedLoadDiffusionModel" in nodes:
        name = nodes["ShardedLoadDiffusionModel"][0]
        facts.append(planner.check_transformer(model / name, config, "").facts)
    for one in facts:
        layout = planner.plan(one, config, dtype="float32", cards=mock_cards(*[24] * cards))
        assert layout.spec.world_size == (cards or default_cpu_ranks())


@pytest.mark.parametrize("path", sorted((ROOT / "workflows").glob("*.json")), ids=lambda path: path.stem)
def test_shipped_workflows_name_their_pictures_after_themselves(path: Any) -> None:
    nodes = {node["type"]: node["widgets_values"] for node in json.loads(path.read_text("utf-8"))["nodes"]}
    assert nodes["SaveImage"] == [path.stem]
