"""HunyuanVideo 1.0: text to video, image to video (33 channels), and SkyReels V1 (32 channels), in two dialects.

The layout is that of github.com/Tencent/HunyuanVideo (`hyvideo/modules/models.py`). ComfyUI renames its modules after
FLUX.1's while loading, and what ComfyUI saves has those names; both are read. Heads' width stands in the norms.
Constant in every published model: rotary theta 256, rotary axes (16, 56, 56).

HunyuanVideo 1.5 and HunyuanImage have no `vector_in` and are not recognised: diffusers has no converter for them.
Not told apart: the 16-channel image-to-video model ("token_replace") has the keys and shapes of the text-to-video
model, and is read as that.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from .family import Converter, Family, Shapes, Tensors
from .reading import count, rotary_16_56_56, shape

T = TypeVar("T")

# ComfyUI's name -> Tencent's, of parts of keys; nothing in Tencent's names holds one of ComfyUI's.
_COMFY_NAMES = {
    "txt_in.t_embedder.in_layer.": "txt_in.t_embedder.mlp.0.",
    "txt_in.t_embedder.out_layer.": "txt_in.t_embedder.mlp.2.",
    "txt_in.c_embedder.in_layer.": "txt_in.c_embedder.linear_1.",
    "txt_in.c_embedder.out_layer.": "txt_in.c_embedder.linear_2.",
    "time_in.in_layer.": "time_in.mlp.0.",
    "time_in.out_layer.": "time_in.mlp.2.",
    "guidance_in.in_layer.": "guidance_in.mlp.0.",
    "guidance_in.out_layer.": "guidance_in.mlp.2.",
    "_attn.qkv.": "_attn_qkv.",
    "_attn.proj.": "_attn_proj.",
    "_attn.norm.query_norm.scale": "_attn_q_norm.weight",
    "_attn.norm.key_norm.scale": "_attn_k_norm.weight",
    ".norm.query_norm.scale": ".q_norm.weight",
    ".norm.key_norm.scale": ".k_norm.weight",
    "_mod.lin.": "_mod.linear.",
    ".modulation.lin.": ".modulation.linear.",
}
_COMFY_NAMES_IN_BLOCKS = {"mlp.0.": "mlp.fc1.", "mlp.2.": "mlp.fc2."}

# What a single block's `linear1` joins, as diffusers calls it.
_FUSED = ("attn.to_q", "attn.to_k", "attn.to_v", "proj_mlp")

# What HunyuanVideo 1.5, HunyuanImage and their relatives have in place of `vector_in`.
_LATER = (
    "vision_in.proj.0.weight",
    "cond_type_embedding.weight",
    "byt5_in.fc1.weight",
    "time_r_in.mlp.0.weight",
)


def _in_tencents_names(named: Mapping[str, T]) -> dict[str, T]:
    return {_tencents_name(key): value for key, value in named.items()}


def _tencents_name(key: str) -> str:
    names = _COMFY_NAMES | (_COMFY_NAMES_IN_BLOCKS if "blocks." in key else {})
    for comfy, tencent in names.items():
        key = key.replace(comfy, tencent)
    return key


def _recognises(shapes: Shapes) -> bool:
    own = ("txt_in.individual_token_refiner.blocks.0.norm1.weight", "vector_in.in_layer.weight")
    patches = shapes.get("img_in.proj.weight", ())
    return (
        len(patches) == 5 and all(key in shapes for key in own) and not any(key in shapes for key in _LATER)
    )


def _config(shapes: Shapes) -> dict[str, Any]:
    """An image of as many channels as the latents, and a mask, among the input are "latent_concat"."""
    shapes = _in_tencents_names(shapes)
    width, in_channels, frames, patch, _ = shape(shapes, "img_in.proj.weight")
    out_channels = shape(shapes, "final_layer.linear.weight")[0] // (frames * patch**2)
    head = shape(shapes, "double_blocks.0.img_attn_q_norm.weight")[0]
    return {
        "in_channels": in_channels,
        "out_channels": out_channels,
        "num_attention_heads": width // head,
        "attention_head_dim": head,
        "num_layers": count(shapes, "double_blocks."),
        "num_single_layers": count(shapes, "single_blocks."),
        "num_refiner_layers": count(shapes, "txt_in.individual_token_refiner.blocks."),
        "mlp_ratio": shape(shapes, "double_blocks.0.img_mlp.fc1.weight")[0] / width,
        "patch_size": patch,
        "patch_size_t": frames,
        "qk_norm": "rms_norm",
        "guidance_embeds": "guidance_in.mlp.0.weight" in shapes,
        "text_embed_dim": shape(shapes, "txt_in.input_embedder.weight")[1],
        "pooled_projection_dim": shape(shapes, "vector_in.in_layer.weight")[1],
        "rope_theta": 256.0,
        "rope_axes_dim": rotary_16_56_56(head),
        "image_condition_type": "latent_concat" if in_channels == 2 * out_channels + 1 else None,
    }


def _convert(upstream: Converter, tensors: Tensors) -> Tensors:
    """diffusers' converter, which knows Tencent's names only, after splitting the single blocks' fused Linear.

    Upstream takes 3072 rows, the published width, for each of q, k and v. Under their own names it renames them.
    """
    tensors = _in_tencents_names(tensors)
    width = tensors["img_in.proj.weight"].shape[0]
    edges = (0, width, 2 * width, 3 * width)
    for key in [key for key in tensors if key.startswith("single_blocks.") and ".linear1." in key]:
        fused = tensors.pop(key)
        for start, stop, name in zip(edges, (*edges[1:], fused.shape[0]), _FUSED, strict=True):
            tensors[key.replace("linear1", name)] = fused[start:stop]
    return upstream(tensors)


HUNYUAN_VIDEO = Family("HunyuanVideo", "HunyuanVideoTransformer3DModel", _recognises, _config, _convert)

FAMILIES = (HUNYUAN_VIDEO,)
