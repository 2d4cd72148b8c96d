"""Bad input in a real ComfyUI: one clear error each, and the group is unharmed."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.group_routes import pids
from tests.support.models import make_flux
from tests.support.workflows import add_tensor_plan, pipeline_prompt
from tools.base_directory import BaseDirectory
from tools.client import ComfyClient, NodeFailed, PromptRejected
from tools.comfy import Server

Prompt = dict[str, dict[str, Any]]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server whose models folder holds one good pipeline and many damaged ones."""
    place = tmp_path_factory.mktemp("refusals")
    good = make_flux(place / "good", seed=1)
    broken = {name: _damaged(good, place / name, damage) for name, damage in DAMAGES.items()}
    base = BaseDirectory.create(place / "comfy", pipelines={"good": good, **broken})
    with Server(base) as server:
        yield server


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[ComfyClient]:
    with ComfyClient(server.url) as client:
        yield client


def _damaged(good: Path, target: Path, damage: Callable[[Path], None]) -> Path:
    shutil.copytree(good, target)
    damage(target)
    return target


def _edit(file: Path, **changes: object) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def _truncate(file: Path) -> None:
    with file.open("r+b") as opened:
        opened.truncate(file.stat().st_size // 2)


WEIGHTS = "transformer/diffusion_pytorch_model.safetensors"
DAMAGES: dict[str, Callable[[Path], None]] = {
    "foreign-pipeline": lambda f: _edit(f / "model_index.json", _class_name="EvilPipeline"),
    "foreign-component": lambda f: _edit(f / "model_index.json", vae=["os", "system"]),
    "truncated": lambda f: _truncate(f / WEIGHTS),
    "renamed": lambda f: (f / WEIGHTS).rename(f / "transformer" / "weights.safetensors") and None,
    "pickled": lambda f: (f / WEIGHTS).rename(f / "transformer" / "diffusion_pytorch_model.bin") and None,
    "disguised": lambda f: (f / WEIGHTS).write_bytes(b"PK\x03\x04" + bytes(4096)) and None,
    "incomplete": lambda f: shutil.rmtree(f / "transformer"),
}
DAMAGED = {
    "foreign-pipeline": "EvilPipeline, which this pack cannot run yet",
    "foreign-component": "wants os.system as its vae",
    "truncated": "is cut short",
    "renamed": "has no file diffusion_pytorch_model.safetensors",
    "pickled": "there is only diffusion_pytorch_model.bin",
    "disguised": "is not a safetensors file",
    "incomplete": "has no transformer",
}


def _with(node: str, **inputs: object) -> Callable[[Prompt], None]:
    return lambda prompt: prompt[node]["inputs"].update(inputs)


def _masked(prompt: Prompt) -> None:
    prompt["mask"] = {"class_type": "SolidMask", "inputs": {"value": 1.0, "width": 64, "height": 64}}
    prompt["empty"] = {
        "class_type": "EmptyLatentImage",
        "inputs": {"width": 64, "height": 64, "batch_size": 1},
    }
    prompt["masked"] = {
        "class_type": "SetLatentNoiseMask",
        "inputs": {"samples": ["empty", 0], "mask": ["mask", 0]},
    }
    prompt["sample"]["inputs"]["latent_image"] = ["masked", 0]


def _combined(prompt: Prompt) -> None:
    prompt["both"] = {
        "class_type": "ConditioningCombine",
        "inputs": {"conditioning_1": ["encode", 0], "conditioning_2": ["encode", 0]},
    }
    prompt["sample"]["inputs"]["positive"] = ["both", 0]


def _area(prompt: Prompt) -> None:
    prompt["area"] = {
        "class_type": "ConditioningSetArea",
        "inputs": {"conditioning": ["encode", 0], "width": 64, "height": 64, "x": 0, "y": 0, "strength": 1.0},
    }
    prompt["sample"]["inputs"]["positive"] = ["area", 0]


def _video(prompt: Prompt) -> None:
    prompt["empty"] = {
        "class_type": "EmptyHunyuanLatentVideo",
        "inputs": {"width": 64, "height": 64, "length": 5, "batch_size": 1},
    }
    prompt["sample"]["inputs"]["latent_image"] = ["empty", 0]


WISHES: dict[str, tuple[Callable[[Prompt], None], str, str]] = {
    "fewer heads": (_with("config", tensor=5), "load", "tensor 5 is more than the 4 attention heads"),
    "ulysses beyond the heads": (
        _with("config", tensor=1, ulysses=5),
        "load",
        "ulysses 5 is more than the 4 attention heads",
    ),
    "ulysses beyond a rank's heads": (
        _with("config", tensor=2, ulysses=3),
        "load",
        "ulysses 3 is more than the 2 attention heads that tensor 2 leaves a rank",
    ),
    "more ranks than devices": (_with("config", tensor=16), "load", "needs 16 devices; here are 8"),
    "ring": (_with("config", ring=5), "load", "tensor 2 x ring 5 needs 10 devices; here are 8"),
    "stage": (_with("config", stage=2), "config", "stage 2 cannot be used"),
    "replica": (_with("config", tensor=1, replica=2), "load", "replica 2 cannot be used with a pipeline"),
    "no degree": (_with("config", tensor=0), "config", "tensor 0 is no degree"),
    "strategy": (_with("config", strategy="fast"), "config", "There is no strategy 'fast'"),
    "attention": (_with("config", attention="sage"), "config", "The attention backend 'sage'"),
    "width": (_with("sample", width=100), "sample", "width 100 cannot be used"),
    "height": (_with("sample", height=0), "sample", "height 0 cannot be used"),
    "denoise without latent": (_with("sample", denoise=0.5), "sample", "nothing to keep"),
    "mask": (_masked, "sample", "The latent carries a mask"),
    "combined": (_combined, "sample", "The conditioning has 2 parts"),
    "area": (_area, "sample", "The conditioning carries"),
    "video latent": (_video, "sample", "3 dimensions"),
}


def _prompt(
    change: Callable[[Prompt], None] | None = None, pipeline: str = "good", **settings: Any
) -> Prompt:
    prompt = pipeline_prompt(pipeline, **{"tensor": 2, "steps": 2, "width": 64, "height": 64, **settings})
    if change is not None:
        change(prompt)
    return prompt


@pytest.mark.parametrize("name", sorted(DAMAGED))
def test_a_damaged_folder_is_refused_by_name(client: ComfyClient, name: str) -> None:
    with pytest.raises(NodeFailed) as caught:
        client.run(_prompt(pipeline=name))
    assert DAMAGED[name] in str(caught.value)


@pytest.mark.parametrize("name", sorted(WISHES))
def test_a_wish_that_cannot_be_met_is_refused_on_its_node(client: ComfyClient, name: str) -> None:
    """Either before the queue, by ComfyUI's own range checks, or as one error on the node."""
    change, node, message = WISHES[name]
    with pytest.raises((NodeFailed, PromptRejected)) as caught:
        client.run(_prompt(change))
    text = str(caught.value)
    if isinstance(caught.value, PromptRejected):
        assert name in ("no degree", "height", "strategy", "attention"), text
        assert f"node {node}" in text
    else:
        assert message in text
        lines = caught.value.message.strip().splitlines()
        assert len(lines) == 3 and all(lines), "an error says what, why, and what works instead"


@pytest.mark.parametrize(
    ("devices", "message"),
    [("7", "There is no GPU 7"), ("0,0", "There is no GPU 0"), ("gpu", "cannot be read")],
)
def test_devices_that_do_not_exist_are_refused_before_the_queue(
    client: ComfyClient, devices: str, message: str
) -> None:
    with pytest.raises(PromptRejected, match=message):
        client.run(_prompt(devices=devices))


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        ("", "holds no keys"),
        ("{", "is not valid JSON"),
        ('{"transformer_blocks.*.ff.net.2": "row"}', 'is "row"'),
        ('{"transformer_blocks.*.ff.net.*": "colwise"}', "has more than one *"),
    ],
)
def test_a_malformed_tensor_plan_is_refused_before_the_queue(
    client: ComfyClient, plan: str, message: str
) -> None:
    with pytest.raises(PromptRejected) as caught:
        client.run(_prompt(lambda prompt: add_tensor_plan(prompt, plan)))
    (report,) = caught.value.node_errors.values()
    (error,) = report["errors"]
    assert report["class_type"] == "ShardedTensorPlan"
    assert error["extra_info"]["input_name"] == "plan"
    lines = error["details"].removeprefix("plan - ").splitlines()
    assert len(lines) == 3 and message in lines[0], lines


@pytest.mark.parametrize(
    ("plan", "message", "mend"),
    [
        (
            '{"transformer_blocks.*.attn.to_kq": "colwise"}',
            "'transformer_blocks.*.attn.to_kq' matches nothing in FluxTransformer2DModel",
            "transformer_blocks.*.attn.to_k",
        ),
        (
            '{"transformer_blocks.*.ff.net.0.proj": "colwise"}',
            "'transformer_blocks.0.ff.net.2' must be rowwise",
            '"transformer_blocks.*.ff.net.2": "rowwise"',
        ),
    ],
)
def test_a_tensor_plan_that_the_model_cannot_follow_is_refused_on_the_loader(
    client: ComfyClient, plan: str, message: str, mend: str
) -> None:
    with pytest.raises(NodeFailed) as caught:
        client.run(_prompt(lambda prompt: add_tensor_plan(prompt, plan)))
    assert caught.value.node_type == "ShardedLoadPipeline"
    what, why, instead = caught.value.message.splitlines()
    assert message in what and why and mend in instead


def test_a_missing_model_is_comfyuis_own_message(client: ComfyClient) -> None:
    with pytest.raises(PromptRejected, match="not in"):
        client.run(_prompt(pipeline="no-such-model"))


def test_a_path_is_no_model_name(client: ComfyClient, server: Server) -> None:
    for name in ("../good", str(server.base.path / "models" / "diffusers" / "good"), "good/../good"):
        with pytest.raises(PromptRejected):
            client.run(_prompt(pipeline=name))


def test_fewer_tokens_than_ranks_are_refused_before_the_first_step(client: ComfyClient) -> None:
    with pytest.raises(NodeFailed, match="ulysses 2 needs 2 picture tokens; this run has 1") as caught:
        client.run(_prompt(tensor=1, ulysses=2, width=16, height=16))
    assert "Works instead" in caught.value.message


def test_after_all_of_it_a_good_prompt_works_in_the_same_group(client: ComfyClient) -> None:
    client.run(_prompt())
    before = pids(client)
    client.run(_prompt(seed=99))
    assert before and pids(client) == before
