"""What nodes say on a real server: what is done, then what was done, where and how long; and errors of three lines."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable

import pytest

from tests.comfy.test_pipeline import STEPS_OF_A_LONG_RUN
from tests.support.group_routes import pids, post, the_group
from tests.support.processes import wait_until
from tests.support.workflows import pipeline_prompt
from tools.client import ComfyClient, NodeFailed, Workflow

STOCK = "flux_stock_ksampler"


def said(client: ComfyClient, since: float) -> dict[str, list[str]]:
    """What each node has said since that moment, in the order of arrival."""
    texts: dict[str, list[str]] = {}
    for event in list(client.events):
        if event.kind == "text" and event.at >= since:
            texts.setdefault(event.data["node"], []).append(event.data["text"])
    return texts


def test_every_node_of_a_pipeline_says_what_it_does_and_ends_with_what_it_did(client: ComfyClient) -> None:
    client.free()
    start = time.monotonic()
    client.run(pipeline_prompt(tensor=2, seed=901, text="a yellow star on black"))
    texts = said(client, start)
    first_line = texts["load"][-1].splitlines()[0]
    assert re.fullmatch(
        r"2 ranks, tensor 2 on the CPU, [\d.]+ MB each, (loaded in [\d.]+ s|already loaded)", first_line
    )
    assert texts["encode"][0] == "Encoding" and re.fullmatch(r"Encoded in [\d.]+ s", texts["encode"][-1])
    assert "Sampling" in texts["sample"] and re.fullmatch(r"8 steps in [\d.]+ s", texts["sample"][-1])
    assert texts["decode"][0] == "Decoding"
    assert re.fullmatch(r"1 of 96 x 96 pixels in [\d.]+ s", texts["decode"][-1])


def test_the_words_about_a_stock_model_are_on_its_loader(
    client: ComfyClient, shipped_workflow: Callable[..., Workflow]
) -> None:
    """A stock node would save them with the workflow: the page keeps texts out of the pack's own nodes only."""
    client.free()
    prompt = shipped_workflow(client, STOCK, KSampler={"seed": 902})
    names = {one["class_type"]: node for node, one in prompt.items()}
    start = time.monotonic()
    client.run(prompt)
    texts = said(client, start)
    assert names["KSampler"] not in texts
    loader = texts[names["ShardedLoadDiffusionModel"]]
    assert any(" loads when a sampler needs it" in text for text in loader)
    assert "Reading weights" in loader
    assert re.search(r"each, loaded in [\d.]+ s$", loader[-1].splitlines()[0]), loader
    assert {prompt[node]["class_type"].startswith("Sharded") for node in texts} == {True}


def test_a_model_that_comes_back_from_host_memory_says_so(client: ComfyClient) -> None:
    client.run(pipeline_prompt(tensor=2, seed=903))
    # Not by the node in a prompt of its own: ComfyUI would drop what only the prompt before needs, the pipeline too.
    wait_until(lambda: post(client, "park")[0] == 202, 10, "the workflow to be over")
    wait_until(lambda: the_group(client)["phase"] == "parked", 10, "the group to park")
    start = time.monotonic()
    client.run(pipeline_prompt(tensor=2, seed=904))
    texts = [text for one in said(client, start).values() for text in one]
    assert "Restoring from RAM" in texts and "Reading weights" not in texts


def test_a_killed_rank_is_told_in_three_lines_and_the_rest_is_in_the_log(client: ComfyClient) -> None:
    prompt_id = client.queue(pipeline_prompt(tensor=2, seed=905, steps=STEPS_OF_A_LONG_RUN))
    client.wait_for(prompt_id, lambda e: e.kind == "progress" and e.data["max"] == STEPS_OF_A_LONG_RUN, 60)
    os.kill(pids(client)[1], signal.SIGKILL)
    with pytest.raises(NodeFailed) as caught:
        client.wait(prompt_id, 10)
    what, why, instead = caught.value.message.splitlines()
    assert re.match(r"Rank 1 \(CPU 1, pid \d+\) died while sampling, [\d.]+ s after that began\.$", what)
    assert why.startswith("Its process ended without an error of its own")
    assert instead == "Queue the prompt again: the group starts anew by itself."
