"""What a sharded MODEL cannot do, in a real ComfyUI: one clear error on the right node each, and nothing is lost."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from safetensors.torch import save_file

from tests.parity_native import cases_flux as flux
from tests.parity_native import cases_qwen as qwen
from tests.parity_native import cases_wan as wan
from tests.parity_native.graphs import Link, Node, Setup, Step, empty_latent, ksampler, node, step
from tests.parity_native.variants import FLUX_DEV, WAN_T2V
from tests.support.models import randomise
from tests.support.native_checkpoints import NARROW, REPLACED
from tests.support.native_server import Graphs, fresh, sharded
from tests.support.original_layout_images import CHROMA, SD3
from tests.support.original_layouts import write_single_file
from tests.support.processes import wait_until
from tools.client import NodeFailed, PromptRejected
from tools.comfy import Server
from tools.latents import max_rel

LOADER = "ShardedLoadDiffusionModel"
MODEL = sharded(FLUX_DEV.name, tensor=2)
LONG = 3000  # steps of a run in which something happens
STYLE = "style.safetensors"  # a LoRA


def refused(graphs: Graphs, last: Node, where: str, *parts: str) -> None:
    """A node of the type `where` must refuse in three lines that hold every one of `parts`, and the ranks live on."""
    ranks = graphs.ranks()
    with pytest.raises(NodeFailed) as caught:
        graphs.client.run(graphs.workflow(last))
    assert not ranks or graphs.ranks() == ranks
    text = caught.value.message
    assert caught.value.node_type == where, text
    assert caught.value.exception_type.rpartition(".")[2] == "Refusal", caught.value.exception_type
    assert not [part for part in parts if part not in text], text
    lines = text.splitlines()
    assert len(lines) == 3 and all(line.strip() for line in lines), (
        "it says what, why, and what works instead"
    )


def saved(latent: Link) -> Node:
    return node("SaveLatent", samples=latent, filename_prefix="latents/0")


def good(graphs: Graphs) -> Any:
    """The latent of a plain run with MODEL, which must be the one of ComfyUI's own."""
    base = fresh(flux.BASE)
    ours, native = graphs.run(base.graph(MODEL), base.graph(FLUX_DEV.name)).latents
    assert max_rel(ours, native) <= 2e-6
    return ours


# ---- files that are no model for this loader


def _transformer(path: Path, class_name: str, config: dict[str, Any]) -> None:
    model = getattr(diffusers, class_name)(**config)
    randomise(model)
    write_single_file(path, class_name, model.state_dict())


def _tensors(path: Path, *names: str) -> None:
    save_file({name: torch.zeros(4, 4) for name in names}, path)


def _lora(path: Path) -> None:
    width = FLUX_DEV.config["num_attention_heads"] * FLUX_DEV.config["attention_head_dim"]
    part = "diffusion_model.double_blocks.0.img_attn.proj"
    save_file(
        {f"{part}.lora_A.weight": torch.ones(2, width), f"{part}.lora_B.weight": torch.ones(width, 2)}, path
    )


STRANGERS: dict[str, tuple[Callable[[Path], None], str]] = {
    "text encoder": (
        lambda path: _tensors(path, "shared.weight", "encoder.block.0.layer.0.SelfAttention.q.weight"),
        "is a T5 or UMT5 text encoder, not a diffusion transformer",
    ),
    "CLIP": (
        lambda path: _tensors(path, "text_model.encoder.layers.0.self_attn.q_proj.weight"),
        "is a CLIP text encoder",
    ),
    "VAE": (lambda path: _tensors(path, "encoder.conv_in.weight", "decoder.conv_in.weight"), "is a VAE"),
    "LoRA": (_lora, "is a LoRA"),
    "GGUF": (lambda path: path.write_bytes(b"GGUF" + bytes(64)) and None, "is a GGUF file"),
    "SDXL": (
        lambda path: _tensors(path, "input_blocks.1.0.in_layers.0.weight", "input_blocks.4.1.norm.weight"),
        "is an SD1, SD2 or SDXL UNet",
    ),
    "SD3": (lambda path: _transformer(path, "SD3Transformer2DModel", SD3), "is a Stable Diffusion 3"),
    "Chroma": (lambda path: _transformer(path, "ChromaTransformer2DModel", CHROMA), "is a Chroma"),
}
KNOWN_ELSEWHERE = ("SD3", "Chroma")  # families that both programs know, but this pack not yet as a MODEL


@pytest.fixture(scope="module", autouse=True)
def strangers(native_server: Server) -> None:
    """Files that somebody has chosen by mistake, in ComfyUI's folders."""
    models = native_server.base.path / "models"
    for name, (write, _) in STRANGERS.items():
        write(models / "diffusion_models" / f"{name}.safetensors")
    (models / "loras").mkdir(exist_ok=True)
    _lora(models / "loras" / STYLE)


@pytest.mark.parametrize("name", STRANGERS)
def test_a_file_that_cannot_be_loaded_is_named(graphs: Graphs, name: str) -> None:
    parts = [f"'{name}.safetensors'", STRANGERS[name][1]]
    if name in KNOWN_ELSEWHERE:
        parts += ["FLUX.1", "Qwen-Image", "Wan 2.1 / 2.2", "the stock Load Diffusion Model"]
    refused(graphs, saved(flux.BASE.graph(sharded(name, tensor=2))), LOADER, *parts)


def test_a_file_that_is_not_in_the_list_does_not_enter_the_queue(graphs: Graphs) -> None:
    for name in ("model.gguf", "../flux-dev.safetensors", "flux-dev"):
        with pytest.raises(PromptRejected, match="not in"):
            graphs.queue(flux.BASE.graph(sharded("", name, tensor=2)))


# ---- layouts that this machine or the model cannot have


@pytest.mark.parametrize(
    ("config", "where", "said"),
    [
        ({"tensor": 16}, LOADER, "needs 16 devices; here are 8"),
        ({"tensor": 7}, LOADER, "tensor 7 is more than the 6 attention heads"),
        ({"ulysses": 7}, LOADER, "ulysses 7 is more than the 6 attention heads"),
        ({"tensor": 2, "ulysses": 4}, LOADER, "more than the 3 attention heads that tensor 2 leaves a rank"),
        ({"ring": 4, "ulysses": 4}, LOADER, "ulysses 4 x ring 4 needs 16 devices; here are 8"),
    ],
)
def test_a_layout_from_another_machine_is_refused(
    graphs: Graphs, config: dict[str, int], where: str, said: str
) -> None:
    refused(graphs, saved(flux.BASE.graph(sharded(FLUX_DEV.name, **config))), where, said)


def test_a_card_that_does_not_exist_is_refused_before_the_queue(graphs: Graphs) -> None:
    with pytest.raises(PromptRejected, match="There is no GPU 7"):
        graphs.queue(flux.BASE.graph(sharded(FLUX_DEV.name, devices="7")))


# ---- what ComfyUI does with weights


def _sampled(model: Link) -> Node:
    return saved(flux.BASE.graph(model))


def _hooked() -> Node:
    hooks = node("CreateHookLora", lora_name=STYLE, strength_model=1.0, strength_clip=1.0)
    positive = node(
        "ConditioningSetProperties",
        cond_NEW=flux.BASE.positive,
        strength=1.0,
        set_cond_area="default",
        hooks=hooks,
    )
    return saved(replace(flux.BASE, positive=positive).graph(MODEL))


OF_WEIGHTS: dict[str, tuple[Node, str, str]] = {
    "LoRA": (
        _sampled(node("LoraLoaderModelOnly", model=MODEL, lora_name=STYLE, strength_model=1.0)),
        "LoraLoaderModelOnly",
        "A LoRA cannot be used",
    ),
    "LoRA on a conditioning": (_hooked(), "KSampler", "A LoRA on a conditioning cannot be used"),
    "merge": (
        _sampled(
            node(
                "ModelMergeSimple", model1=node("ParityModel", source=FLUX_DEV.name), model2=MODEL, ratio=0.5
            )
        ),
        "ModelMergeSimple",
        "Merging or extracting cannot be used",
    ),
    "merge into it": (
        _sampled(
            node(
                "ModelMergeSimple", model1=MODEL, model2=node("ParityModel", source=FLUX_DEV.name), ratio=0.5
            )
        ),
        "ModelMergeSimple",
        "merge cannot be used",
    ),
    "save": (
        node("ModelSave", model=MODEL, filename_prefix="diffusion_models/never"),
        "ModelSave",
        "Saving cannot be used",
    ),
    "compute dtype": (
        _sampled(node("ModelComputeDtype", model=MODEL, dtype="bf16")),
        "ModelComputeDtype",
        "Another compute dtype cannot be used",
    ),
}


@pytest.mark.parametrize("name", OF_WEIGHTS)
def test_what_needs_the_weights_is_refused(graphs: Graphs, name: str) -> None:
    last, where, said = OF_WEIGHTS[name]
    refused(graphs, last, where, said, "The weights lie in parts on the ranks", "Works instead")
    assert not list((graphs.server.base.output / "diffusion_models").glob("*.safetensors"))


def test_the_default_compute_dtype_changes_nothing(graphs: Graphs) -> None:
    expected = good(graphs)
    model = node("ModelComputeDtype", model=MODEL, dtype="default")
    (same,) = graphs.run(fresh(flux.BASE).graph(model)).latents
    assert (same == expected).all()


# ---- functions inside the blocks

PATCHES: dict[str, tuple[Step, str]] = {
    "perturbed attention": (
        step("PerturbedAttentionGuidance", scale=3.0),
        "A block replacement (attn1 middle 0)",
    ),
    "self-attention": (
        step("SelfAttentionGuidance", scale=0.5, blur_sigma=2.0),
        "A block replacement (attn1",
    ),
    "a UNet's own": (
        step(
            "PatchModelAddDownscale",
            block_number=1,
            downscale_factor=2.0,
            start_percent=0.0,
            end_percent=0.5,
            downscale_after_skip=True,
            downscale_method="bicubic",
            upscale_method="bicubic",
        ),
        "A block patch (",
    ),
    **{
        kind: (step("ParityPatched", kind=kind), said)
        for kind, said in {
            "optimized_attention_override": "An attention override (optimized_attention_override)",
            "set_model_attn1_patch": "A block patch (attn1_patch)",
            "set_model_double_block_patch": "A block patch (double_block)",
            "set_model_post_input_patch": "A block patch (post_input)",
            "set_model_patch_replace": "A block replacement (dit double_block 0)",
        }.items()
    },
}


@pytest.mark.parametrize("name", PATCHES)
def test_a_function_inside_the_blocks_is_refused_by_name(graphs: Graphs, name: str) -> None:
    patch, said = PATCHES[name]
    setup = replace(flux.CFG, model=(patch,))
    refused(graphs, saved(setup.graph(MODEL)), "KSampler", said, "run in other processes", "Works instead")


# ---- inputs that the model or the layout cannot take


def _with_control_of(setup: Setup, source: str, lists: list[int]) -> Setup:
    net = node("ParityControlNet", source=source, lists=lists, missing=0, union=0, seed=90)
    (control,) = flux.CONTROLLED.both
    return replace(setup, both=(Step(control.kind, {**control.inputs, "control_net": net}),))


CONTROL_OF_ANOTHER_MODEL = "This ControlNet is not for this model."
INPUTS: dict[str, tuple[Setup, Link, str]] = {
    "a ControlNet of another width": (
        _with_control_of(flux.BASE, NARROW.name, [2, 3]),
        MODEL,
        CONTROL_OF_ANOTHER_MODEL,
    ),
    "a ControlNet on Wan": (
        # One frame, for it is one of pictures; of a video it fails by itself.
        replace(wan.SHORT, latent=empty_latent(1, 16, 1, qwen.HEIGHT, qwen.WIDTH), both=qwen.CONTROLLED.both),
        sharded(WAN_T2V.name, tensor=2),
        "A ControlNet cannot be used with a sharded Wan",
    ),
    "fewer tokens than ranks": (
        replace(flux.BASE, latent=empty_latent(1, 16, 2, 2)),
        sharded(FLUX_DEV.name, ring=2),
        "ring 2 needs 2 picture tokens; this run has 1",
    ),
}


@pytest.mark.parametrize("name", INPUTS)
def test_an_input_that_does_not_fit_is_refused_while_sampling(graphs: Graphs, name: str) -> None:
    setup, model, said = INPUTS[name]
    refused(graphs, saved(setup.graph(model)), "KSampler", said)


def test_after_all_of_it_a_good_prompt_is_exact_in_the_same_group(graphs: Graphs) -> None:
    before = graphs.ranks()
    good(graphs)
    assert graphs.ranks() == before


# ---- death, and files that change


@pytest.mark.slow
@pytest.mark.parametrize("victims", [slice(1, 2), slice(0, 2)], ids=["one rank", "all ranks"])
def test_a_rank_killed_between_prompts_costs_nothing_but_a_load(graphs: Graphs, victims: slice) -> None:
    expected = good(graphs)
    before = graphs.ranks()
    for pid in before[victims]:
        os.kill(pid, signal.SIGKILL)
    # A large process takes its time to end, and a prompt that comes before is told that the rank died under it.
    wait_until(lambda: "dead" in graphs.rank_states(), 20, "the host to see it")
    assert (good(graphs) == expected).all()
    assert not set(graphs.ranks()) & set(before)


@pytest.mark.slow
def test_a_rank_killed_while_sampling_is_named_and_the_next_prompt_is_exact(graphs: Graphs) -> None:
    expected = good(graphs)
    prompt = graphs.prompt(replace(flux.BASE, run=ksampler(LONG)).graph(MODEL))
    prompt_id = graphs.client.queue(prompt)
    graphs.client.wait_for(
        prompt_id, lambda event: event.kind == "progress" and event.data["max"] == LONG, 60
    )
    os.kill(graphs.ranks()[1], signal.SIGKILL)
    with pytest.raises(NodeFailed, match=r"Rank 1 \(CPU 1, pid \d+\) died while sampling") as caught:
        graphs.wait(prompt_id, 20)
    assert caught.value.node_type == "KSampler"
    assert (good(graphs) == expected).all()


@pytest.mark.parametrize("way", ["renamed", pytest.param("overwritten", marks=pytest.mark.slow)])
def test_a_file_replaced_on_disk_is_loaded_again(graphs: Graphs, tmp_path: Path, way: str) -> None:
    model = sharded(REPLACED.name, tensor=2)
    before, native_before = graphs.run(flux.BASE.graph(model), flux.BASE.graph(REPLACED.name)).latents
    assert max_rel(before, native_before) <= 2e-6
    other = REPLACED.write(tmp_path, seed=1 + len(way))
    file = graphs.server.base.path / "models" / "diffusion_models" / other.name
    if way == "renamed":
        shutil.move(other, file.with_suffix(".new"))
        file.with_suffix(".new").rename(file)
    else:
        shutil.copyfile(other, file)
    after, native_after = graphs.run(flux.BASE.graph(model), flux.BASE.graph(REPLACED.name)).latents
    assert max_rel(after, native_after) <= 2e-6
    assert max_rel(after, before) >= 1e-2
