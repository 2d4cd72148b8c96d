"""Writes a diffusers transformer in its original layout, by tables of their own: what the converters must undo.

A table maps a name in the original layout to the diffusers names whose tensors it joins along dim 0, in order; "{}"
is a block's number, and "swap " marks a tensor whose halves trade places (shift and scale). Names without an ending
stand for their weight and their bias. The knowledge is that of ComfyUI's `flux_to_diffusers`, `mmdit_to_diffusers`
and `z_image_to_diffusers`, and of the authors' own code.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file

State = Mapping[str, torch.Tensor]
Table = dict[str, tuple[str, ...]]


def original_layout(class_name: str, state: State) -> dict[str, torch.Tensor]:
    """`state` of a model of `class_name` under its original names."""
    found: dict[str, torch.Tensor] = {}
    used: set[str] = set()
    for name, parts in TABLES[class_name].items():
        for block in range(_blocks(state, parts[0])):
            for ending in ("", ".weight", ".bias"):
                sources = [part.removeprefix("swap ").format(block) + ending for part in parts]
                if sources[0] not in state:
                    continue
                joined = (
                    torch.cat([state[source] for source in sources])
                    if len(sources) > 1
                    else state[sources[0]]
                )
                if parts[0].startswith("swap "):
                    joined = torch.cat(joined.chunk(2)[::-1])
                found[name.format(block) + ending] = joined.clone()
                used |= set(sources)
    rest = {name: state[name] for name in state.keys() - used}
    assert not rest or class_name in SAME_NAMES, f"no table entry for {sorted(rest)[:5]}"
    if class_name == "SD3Transformer2DModel":
        _swap_last_context(found)
    if class_name == "Lumina2Transformer2DModel":
        found["norm_final.weight"] = torch.ones(4)  # unused by the model, and in every published file
    return {**found, **rest}


def write_single_file(
    path: Path, class_name: str, state: State, prefix: str = "", **extra: torch.Tensor
) -> Path:
    """The model as one file, its keys behind `prefix`; `extra` tensors are added as they are named."""
    tensors = {f"{prefix}{name}": tensor for name, tensor in original_layout(class_name, state).items()}
    save_file({**{name: tensor.contiguous() for name, tensor in tensors.items()}, **extra}, path)
    return path


def _blocks(state: State, part: str) -> int:
    """How many blocks a numbered name may have; 1 for any other."""
    if "{}" not in part:
        return 1
    stem = part.removeprefix("swap ").split("{}")[0]
    return 1 + max(
        (int(name[len(stem) :].split(".")[0]) for name in state if name.startswith(stem)), default=-1
    )


def _swap_last_context(found: dict[str, torch.Tensor]) -> None:
    """The last block of SD3 gives its prompt a scale and a shift only, the other way round in the original."""
    last = max(int(name.split(".")[1]) for name in found if name.startswith("joint_blocks."))
    for ending in ("weight", "bias"):
        key = f"joint_blocks.{last}.context_block.adaLN_modulation.1.{ending}"
        found[key] = torch.cat(found[key].chunk(2)[::-1])


def _named(pairs: Mapping[str, str]) -> Table:
    return {name: (part,) for name, part in pairs.items()}


def _qkv(name: str, block: str, *parts: str) -> Table:
    return {name: tuple(f"{block}.{part}" for part in parts)}


_DOUBLE = "transformer_blocks.{}"
_SINGLE = "single_transformer_blocks.{}"

_FLUX_STREAMS: Table = {
    **_qkv("double_blocks.{}.img_attn.qkv", _DOUBLE, "attn.to_q", "attn.to_k", "attn.to_v"),
    **_qkv("double_blocks.{}.txt_attn.qkv", _DOUBLE, "attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj"),
    **_qkv("single_blocks.{}.linear1", _SINGLE, "attn.to_q", "attn.to_k", "attn.to_v", "proj_mlp"),
    **_named(
        {
            "img_in": "x_embedder",
            "txt_in": "context_embedder",
            "double_blocks.{}.img_attn.norm.query_norm.scale": f"{_DOUBLE}.attn.norm_q.weight",
            "double_blocks.{}.img_attn.norm.key_norm.scale": f"{_DOUBLE}.attn.norm_k.weight",
            "double_blocks.{}.txt_attn.norm.query_norm.scale": f"{_DOUBLE}.attn.norm_added_q.weight",
            "double_blocks.{}.txt_attn.norm.key_norm.scale": f"{_DOUBLE}.attn.norm_added_k.weight",
            "double_blocks.{}.img_attn.proj": f"{_DOUBLE}.attn.to_out.0",
            "double_blocks.{}.txt_attn.proj": f"{_DOUBLE}.attn.to_add_out",
            "double_blocks.{}.img_mlp.0": f"{_DOUBLE}.ff.net.0.proj",
            "double_blocks.{}.img_mlp.2": f"{_DOUBLE}.ff.net.2",
            "double_blocks.{}.txt_mlp.0": f"{_DOUBLE}.ff_context.net.0.proj",
            "double_blocks.{}.txt_mlp.2": f"{_DOUBLE}.ff_context.net.2",
            "single_blocks.{}.norm.query_norm.scale": f"{_SINGLE}.attn.norm_q.weight",
            "single_blocks.{}.norm.key_norm.scale": f"{_SINGLE}.attn.norm_k.weight",
            "single_blocks.{}.linear2": f"{_SINGLE}.proj_out",
            "final_layer.linear": "proj_out",
        }
    ),
}

_FLUX: Table = {
    **_FLUX_STREAMS,
    "final_layer.adaLN_modulation.1": ("swap norm_out.linear",),
    **_named(
        {
            "double_blocks.{}.img_mod.lin": f"{_DOUBLE}.norm1.linear",
            "double_blocks.{}.txt_mod.lin": f"{_DOUBLE}.norm1_context.linear",
            "single_blocks.{}.modulation.lin": f"{_SINGLE}.norm.linear",
            "time_in.in_layer": "time_text_embed.timestep_embedder.linear_1",
            "time_in.out_layer": "time_text_embed.timestep_embedder.linear_2",
            "vector_in.in_layer": "time_text_embed.text_embedder.linear_1",
            "vector_in.out_layer": "time_text_embed.text_embedder.linear_2",
            "guidance_in.in_layer": "time_text_embed.guidance_embedder.linear_1",
            "guidance_in.out_layer": "time_text_embed.guidance_embedder.linear_2",
        }
    ),
}

_GUIDANCE = "distilled_guidance_layer"
_CHROMA: Table = {
    **_FLUX_STREAMS,
    **_named(
        {
            f"{_GUIDANCE}.in_proj": f"{_GUIDANCE}.in_proj",
            f"{_GUIDANCE}.out_proj": f"{_GUIDANCE}.out_proj",
            f"{_GUIDANCE}.norms.{{}}.scale": f"{_GUIDANCE}.norms.{{}}.weight",
            f"{_GUIDANCE}.layers.{{}}.in_layer": f"{_GUIDANCE}.layers.{{}}.linear_1",
            f"{_GUIDANCE}.layers.{{}}.out_layer": f"{_GUIDANCE}.layers.{{}}.linear_2",
        }
    ),
}


def _sd3_stream(
    original: str, qkv: tuple[str, str, str], norms: tuple[str, str], rest: dict[str, str]
) -> Table:
    return {
        **_qkv(f"joint_blocks.{{}}.{original}.attn.qkv", _DOUBLE, *qkv),
        f"joint_blocks.{{}}.{original}.attn.ln_q": (f"{_DOUBLE}.{norms[0]}",),
        f"joint_blocks.{{}}.{original}.attn.ln_k": (f"{_DOUBLE}.{norms[1]}",),
        **{f"joint_blocks.{{}}.{original}.{name}": (f"{_DOUBLE}.{part}",) for name, part in rest.items()},
    }


_SD3: Table = {
    **_sd3_stream(
        "x_block",
        ("attn.to_q", "attn.to_k", "attn.to_v"),
        ("attn.norm_q", "attn.norm_k"),
        {
            "attn.proj": "attn.to_out.0",
            "mlp.fc1": "ff.net.0.proj",
            "mlp.fc2": "ff.net.2",
            "adaLN_modulation.1": "norm1.linear",
            "attn2.proj": "attn2.to_out.0",
            "attn2.ln_q": "attn2.norm_q",
            "attn2.ln_k": "attn2.norm_k",
        },
    ),
    **_qkv("joint_blocks.{}.x_block.attn2.qkv", _DOUBLE, "attn2.to_q", "attn2.to_k", "attn2.to_v"),
    **_sd3_stream(
        "context_block",
        ("attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj"),
        ("attn.norm_added_q", "attn.norm_added_k"),
        {
            "attn.proj": "attn.to_add_out",
            "mlp.fc1": "ff_context.net.0.proj",
            "mlp.fc2": "ff_context.net.2",
            "adaLN_modulation.1": "norm1_context.linear",
        },
    ),
    "final_layer.adaLN_modulation.1": ("swap norm_out.linear",),
    **_named(
        {
            "final_layer.linear": "proj_out",
            "pos_embed": "pos_embed.pos_embed",
            "x_embedder.proj": "pos_embed.proj",
            "context_embedder": "context_embedder",
            "t_embedder.mlp.0": "time_text_embed.timestep_embedder.linear_1",
            "t_embedder.mlp.2": "time_text_embed.timestep_embedder.linear_2",
            "y_embedder.mlp.0": "time_text_embed.text_embedder.linear_1",
            "y_embedder.mlp.2": "time_text_embed.text_embedder.linear_2",
        }
    ),
}


def _next_dit_blocks(blocks: str, attention: str) -> Table:
    """Blocks of Lumina's line: the attention's names differ, and Lumina 2 renames more."""
    of = f"{blocks}.{{}}"
    return {
        **_qkv(f"{of}.attention.qkv", f"{of}.{attention}", "to_q", "to_k", "to_v"),
        f"{of}.attention.out": (f"{of}.{attention}.to_out.0",),
        f"{of}.attention.q_norm": (f"{of}.{attention}.norm_q",),
        f"{of}.attention.k_norm": (f"{of}.{attention}.norm_k",),
    }


def _lumina_blocks(blocks: str, modulated: bool) -> Table:
    of = f"{blocks}.{{}}"
    return {
        **_next_dit_blocks(blocks, "attn"),
        f"{of}.attention_norm1": (f"{of}.norm1.norm" if modulated else f"{of}.norm1",),
        f"{of}.attention_norm2": (f"{of}.norm2",),
        f"{of}.adaLN_modulation.1": (f"{of}.norm1.linear",),
        **{f"{of}.feed_forward.w{i}": (f"{of}.feed_forward.linear_{i}",) for i in (1, 2, 3)},
        **{f"{of}.ffn_norm{i}": (f"{of}.ffn_norm{i}",) for i in (1, 2)},
    }


_LUMINA_2: Table = {
    **_lumina_blocks("layers", modulated=True),
    **_lumina_blocks("noise_refiner", modulated=True),
    **_lumina_blocks("context_refiner", modulated=False),
    **_named(
        {
            "x_embedder": "x_embedder",
            "cap_embedder.0": "time_caption_embed.caption_embedder.0",
            "cap_embedder.1": "time_caption_embed.caption_embedder.1",
            "t_embedder.mlp.0": "time_caption_embed.timestep_embedder.linear_1",
            "t_embedder.mlp.2": "time_caption_embed.timestep_embedder.linear_2",
            "final_layer.adaLN_modulation.1": "norm_out.linear_1",
            "final_layer.linear": "norm_out.linear_2",
        }
    ),
}

_Z_IMAGE: Table = {
    **_next_dit_blocks("layers", "attention"),
    **_next_dit_blocks("noise_refiner", "attention"),
    **_next_dit_blocks("context_refiner", "attention"),
    **_next_dit_blocks("siglip_refiner", "attention"),
    "x_embedder": ("all_x_embedder.2-1",),
    "final_layer.linear": ("all_final_layer.2-1.linear",),
    "final_layer.adaLN_modulation.1": ("all_final_layer.2-1.adaLN_modulation.1",),
}

TABLES: dict[str, Table] = {
    "FluxTransformer2DModel": _FLUX,
    "ChromaTransformer2DModel": _CHROMA,
    "SD3Transformer2DModel": _SD3,
    "QwenImageTransformer2DModel": {},
    "ZImageTransformer2DModel": _Z_IMAGE,
    "Lumina2Transformer2DModel": _LUMINA_2,
}
# Classes whose other names are the same in both layouts.
SAME_NAMES = {"QwenImageTransformer2DModel", "ZImageTransformer2DModel"}
