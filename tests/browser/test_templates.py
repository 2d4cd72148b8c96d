"""What a person experiences with the shipped workflows: ComfyUI's own page, a real browser, a real server and group."""

from __future__ import annotations

import json
import random
import re
from typing import Any

import pytest
from playwright.sync_api import expect

from tests.browser.editor import Editor
from tests.support import group_routes
from tests.support.browser import executable
from tools import ROOT
from tools.client import ComfyClient

pytestmark = pytest.mark.skipif(
    executable() is None, reason="no Chromium here: install chromium to run the tests of the page"
)

WORKFLOWS = sorted(file.stem for file in (ROOT / "workflows").glob("*.json"))
NODES = sorted(json.loads((ROOT / "locales" / "en" / "nodeDefs.json").read_text(encoding="utf-8")))
A_WORKFLOW = "flux_prefer_tensor"
A_LONG_RUN = 3000
NO_SUCH_DEVICE = "77"
# What nodes say while they work; it must not stay on them.
STILL_WORKING = re.compile(r"^(Starting \d+ ranks|Reading weights|Encoding|Sampling|Decoding)$")
# ComfyUI asks its registry about every pack that a workflow names, and for the size of the models that its own first
# workflow misses; the pack has no part in it.
COMFYUI_ASKS = ("https://api.comfy.org/nodes?", "https://huggingface.co/Comfy-Org/")


def recorded(name: str) -> dict[str, Any]:
    return dict(json.loads((ROOT / "workflows" / f"{name}.json").read_text(encoding="utf-8")))


def title_of_note(name: str) -> str:
    """The heading that the note of a workflow opens with."""
    (note,) = (node for node in recorded(name)["nodes"] if node["type"] == "MarkdownNote")
    return str(note["widgets_values"][0]).splitlines()[0].lstrip("# ")


def after_loading(fractions: list[float]) -> list[float]:
    """What a bar showed of the steps: a stock MODEL is loaded on the node that samples, with the same bar before."""
    falls = [n for n in range(1, len(fractions)) if fractions[n] < fractions[n - 1]]
    return fractions[falls[-1] :] if falls else fractions


def heading(node_type: str) -> str:
    first_line = (ROOT / "web" / "docs" / f"{node_type}.md").read_text(encoding="utf-8").splitlines()[0]
    return first_line.removeprefix("# ")


def translations() -> dict[str, Any]:
    return dict(json.loads((ROOT / "locales" / "en" / "nodeDefs.json").read_text(encoding="utf-8")))


# ---- templates


@pytest.mark.parametrize("name", WORKFLOWS)
def test_a_template_opens_with_every_node_and_every_value_as_it_was_recorded(
    editor: Editor, name: str
) -> None:
    editor.open_template(name)
    file = recorded(name)
    saved = editor.saved_nodes()
    values = editor.values()
    assert sorted(saved) == sorted(node["type"] for node in file["nodes"])
    for node in file["nodes"]:
        node_type, expected = node["type"], node.get("widgets_values") or []
        assert list(values[node_type].values()) == expected, f"{node_type} shows something else"
        assert (saved[node_type].get("widgets_values") or []) == expected, f"{node_type} is saved differently"
        for part in ("id", "title", "mode"):
            assert saved[node_type].get(part) == node.get(part) or part not in node, (node_type, part)
    links = editor.page.evaluate("() => JSON.parse(JSON.stringify(app.graph.serialize().links))")
    assert sorted(links) == sorted(file["links"])
    prompt = values["ShardedEncodePrompt"]["text"]
    expect(editor.page.get_by_role("textbox", name="text", exact=True)).to_have_value(prompt)
    expect(editor.page.get_by_role("heading", name=title_of_note(name), exact=True)).to_be_visible()
    expect(editor.dialog).to_have_count(0)
    editor.screenshot(f"opened-{name}")


@pytest.mark.parametrize("name", WORKFLOWS)
def test_a_template_runs_with_progress_on_its_nodes_and_a_picture_at_the_end(
    editor: Editor, client: ComfyClient, name: str
) -> None:
    # What an earlier run left in ComfyUI's cache would not be run again, and show no progress.
    client.free(unload_models=False, free_memory=True)
    editor.open_template(name)
    values, saved = editor.values(), editor.saved_nodes()
    stock = "KSampler" in values
    sampler, sized = ("KSampler", "EmptySD3LatentImage") if stock else ("ShardedSample", "ShardedSample")
    steps = values[sampler]["steps"]
    record = editor.run(client)
    (image,) = record["outputs"][str(saved["SaveImage"]["id"])]["images"]
    shown = editor.shown_picture("SaveImage")
    assert f"filename={image['filename']}&" in shown["address"]
    assert shown["width"] == values[sized]["width"]
    fractions = editor.shown_progress(sampler)
    if stock:
        fractions = after_loading(fractions)
    assert fractions == sorted(fractions) and len(set(fractions)) >= 2, fractions
    assert set(fractions) <= {step / steps for step in range(steps + 1)}
    assert editor.shown_picture(sampler)["width"] > 0, "no preview"
    # Each loader says it; that of a stock MODEL when the sampler needs the model.
    loaded = editor.text(re.compile("loaded in|already loaded"))
    expect(loaded).to_have_count(2 if stock else 1)
    expect(loaded.first).to_be_visible()
    if not stock:
        expect(editor.text(re.compile(rf"^{steps} steps in \d"))).to_be_visible()
    expect(editor.text(STILL_WORKING)).to_have_count(0)
    assert "SaveImage" not in editor.out_of_view(), "the picture is there, and one has to look for it"
    editor.screenshot(f"ran-{name}")


def test_a_workflow_saved_after_a_run_opens_again_with_the_same_values(
    editor: Editor, client: ComfyClient
) -> None:
    """What was said on the nodes must not come back as a value."""
    editor.open_template(A_WORKFLOW)
    before = editor.values()
    editor.run(client)
    content = editor.page.evaluate("() => JSON.stringify(app.graph.serialize())")
    ours = [node for node in json.loads(content)["nodes"] if node["type"].startswith("Sharded")]
    recorded_values = {node["id"]: node.get("widgets_values") for node in recorded(A_WORKFLOW)["nodes"]}
    for node in ours:
        assert (node.get("widgets_values") or []) == (recorded_values[node["id"]] or []), node["type"]
    editor.page.evaluate("content => app.loadGraphData(JSON.parse(content))", content)
    expect(editor.dialog).to_have_count(0)
    assert editor.values() == before


# ---- mistakes


def recorded_config() -> dict[str, Any]:
    (config,) = (node for node in recorded(A_WORKFLOW)["nodes"] if node["type"] == "ShardedParallelConfig")
    names = [one["name"] for one in config["inputs"] if "widget" in one]
    return dict(zip(names, config["widgets_values"], strict=True))


def mend_and_run(editor: Editor, client: ComfyClient) -> None:
    """Close the message, put the recorded values back, and see everything work."""
    editor.close_error()
    for name, value in recorded_config().items():
        if editor.values()["ShardedParallelConfig"][name] != value:
            editor.set_value("ShardedParallelConfig", name, str(value))
    # Another seed, so that the run is not taken from the cache.
    editor.set_value("ShardedSample", "seed", str(random.randrange(2**32)))
    editor.run(client)
    assert editor.page.evaluate("[app.lastNodeErrors, app.lastExecutionError]") in ([None, None], [{}, None])
    editor.shown_picture("SaveImage")


def test_a_device_that_does_not_exist_is_told_on_the_node_before_anything_runs(
    editor: Editor, client: ComfyClient
) -> None:
    editor.open_template(A_WORKFLOW)
    editor.set_value("ShardedParallelConfig", "devices", NO_SUCH_DEVICE)
    answer = editor.press_run()
    assert "prompt_id" not in answer
    (report,) = answer["node_errors"].values()
    (error,) = report["errors"]
    lines = error["details"].splitlines()
    assert len(lines) == 3 and f"There is no GPU {NO_SUCH_DEVICE}" in lines[0], lines
    message = editor.open_error()
    for line in lines:
        expect(message).to_contain_text(line)
    marked = editor.page.evaluate(
        "() => app.graph.findNodesByType('ShardedParallelConfig')[0].inputs"
        ".filter(input => input.hasErrors).map(input => input.name)"
    )
    assert marked == ["devices"]
    editor.screenshot("no-such-device")
    mend_and_run(editor, client)


def test_a_degree_that_is_not_built_is_told_on_the_node_in_three_lines(
    editor: Editor, client: ComfyClient
) -> None:
    editor.open_template(A_WORKFLOW)
    editor.set_value("ShardedParallelConfig", "strategy", "manual")
    editor.set_value("ShardedParallelConfig", "stage", "2")
    record = editor.ended(editor.queue(), client)
    assert record["status"]["status_str"] == "error"
    (details,) = (data for kind, data in record["status"]["messages"] if kind == "execution_error")
    lines = details["exception_message"].strip().splitlines()
    assert len(lines) == 3 and lines[0].startswith("stage 2 "), lines
    message = editor.open_error()
    for line in lines:
        expect(message).to_contain_text(line)
    failed = editor.page.evaluate("app.lastExecutionError.node_id")
    assert str(failed) == str(editor.saved_nodes()["ShardedParallelConfig"]["id"])
    editor.screenshot("stage-is-not-built")
    mend_and_run(editor, client)


# ---- cancel


def test_cancel_empties_the_queue_and_the_next_run_finds_the_same_ranks(
    editor: Editor, client: ComfyClient
) -> None:
    editor.open_template(A_WORKFLOW)
    steps = str(editor.values()["ShardedSample"]["steps"])
    editor.set_value("ShardedSample", "steps", str(A_LONG_RUN))
    prompt_id = editor.queue()
    editor.wait_for_progress("ShardedSample")
    before = group_routes.pids(client)
    assert before
    editor.cancel_button.click()
    record = editor.ended(prompt_id, client)
    kinds = [kind for kind, _data in record["status"]["messages"]]
    assert "execution_interrupted" in kinds and "execution_error" not in kinds
    assert client.queue_state() == {"queue_running": [], "queue_pending": []}
    expect(editor.dialog).to_have_count(0)
    assert max(editor.shown_progress("ShardedSample")) < 1
    editor.set_value("ShardedSample", "steps", steps)
    editor.run(client)
    editor.shown_picture("SaveImage")
    assert group_routes.pids(client) == before


# ---- help


def test_the_help_button_of_every_node_opens_its_page(editor: Editor) -> None:
    editor.open_template(A_WORKFLOW)
    there = [name for name in editor.saved_nodes() if name in NODES]
    for node_type in NODES:
        address = f"/extensions/{editor.pack_folder}/docs/{node_type}.md"
        assert editor.page.evaluate("async path => (await fetch(path)).ok", address), address
        if node_type not in there:
            editor.add_node(node_type, below="ShardedEncodePrompt")
        editor.bring_into_view(node_type)
        editor.select(node_type)
        editor.page.get_by_test_id("info-button").click()
        title = editor.page.get_by_role("heading", name=heading(node_type), exact=True, level=1)
        expect(title).to_be_visible()
        expect(editor.page.get_by_role("heading", name="Inputs", exact=True)).to_be_visible()
        if node_type == NODES[-1]:
            editor.screenshot("help")
        # The panel would lie over the next node.
        editor.close_sidebar()
        expect(title).to_be_hidden()
        if node_type not in there:  # its place is the next one's
            editor.page.evaluate("type => app.graph.remove(app.graph.findNodesByType(type)[0])", node_type)


def test_every_value_explains_itself_when_the_mouse_rests_on_it(editor: Editor, client: ComfyClient) -> None:
    served = editor.page.evaluate("async () => await (await app.api.fetchApi('/i18n')).json()")
    texts = served["en"]["nodeDefs"]
    for node_type, expected in translations().items():
        assert texts[node_type] == expected
        inputs = client.object_info(node_type)["input"]
        names = {*inputs.get("required", {}), *inputs.get("optional", {})}
        assert set(expected["inputs"]) == names, f"{node_type}: other inputs in locales/"
        assert all(one["tooltip"] for one in expected["inputs"].values())
    editor.open_template(A_WORKFLOW)
    for node_type, name in (
        ("ShardedParallelConfig", "strategy"),
        ("ShardedLoadPipeline", "dtype"),
        ("ShardedSample", "guidance"),
    ):
        editor.point_at(node_type, name)
        expect(editor.text(texts[node_type]["inputs"][name]["tooltip"])).to_be_visible()
    editor.screenshot("tooltip")


def test_every_picture_that_the_pack_shows_is_there(editor: Editor) -> None:
    """On the cards of the template browser, where ComfyUI looks for <workflow>.jpg, and in the help pages."""
    addresses = [f"/api/workflow_templates/{editor.pack_folder}/{name}.jpg" for name in WORKFLOWS]
    for file in (ROOT / "web" / "docs").rglob("*.md"):
        page = file.read_text(encoding="utf-8")
        addresses += [
            f"/extensions/{editor.pack_folder}/docs/{name}"
            for name in re.findall(r"!\[[^\]]*\]\(([^)]+)\)", page)
        ]
    missing = editor.page.evaluate(
        """async addresses => {
            const loads = address => new Promise(resolve => {
                const picture = new Image()
                picture.onload = () => resolve(true)
                picture.onerror = () => resolve(false)
                picture.src = address
            })
            const found = await Promise.all(addresses.map(loads))
            return addresses.filter((_, index) => !found[index])
        }""",
        sorted(set(addresses)),
    )
    assert missing == []


# ---- privacy, judged last: over everything above


def test_the_page_asked_no_other_host_for_anything_of_the_pack(editor: Editor) -> None:
    by_comfyui = {address for address in editor.foreign if address.startswith(COMFYUI_ASKS)}
    print("ComfyUI's own requests to other hosts, none of which got there:", sorted(by_comfyui) or "none")
    assert set(editor.foreign) - by_comfyui == set()
