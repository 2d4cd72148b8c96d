"""LTX-Video (0.9.0 to 0.9.8, 2B and 13B) and LTX-2 (2.0, 2.3, 2.5), in Lightricks' layout.

The layout is that of github.com/Lightricks/LTX-Video (`ltx_video/models/transformers/transformer3d.py`) and
github.com/Lightricks/LTX-2, which ComfyUI keeps. LTX-2 is told by its audio stream. Constant in every published
model: latents are patches of one, norms have no weights and eps 1e-6, q and k are normalised across heads, and
LTX-2's rotary embedding is "split" in double precision (diffusers' class defaults to "interleaved").

The heads: LTX-Video has 32 of them in both sizes (64 or 128 wide); LTX-2's stand in the gates since 2.3, and are 128
wide for video and 64 for audio in 2.0. Other widths follow `reading.head_width`.
"""

from __future__ import annotations

from typing import Any

from .family import Converter, Family, Shapes, Tensors
from .reading import count, head_width, shape

_BLOCK = "transformer_blocks.0."


def _is_ltx(shapes: Shapes) -> bool:
    return _has_latent_stream(shapes) and "audio_patchify_proj.weight" not in shapes


def _is_ltx_2(shapes: Shapes) -> bool:
    return _has_latent_stream(shapes) and "audio_patchify_proj.weight" in shapes


def _has_latent_stream(shapes: Shapes) -> bool:
    return "patchify_proj.weight" in shapes and "adaln_single.emb.timestep_embedder.linear_1.weight" in shapes


def _ltx_config(shapes: Shapes) -> dict[str, Any]:
    width, in_channels = shape(shapes, "patchify_proj.weight")
    heads = 32 if width in (2048, 4096) else width // head_width(width, published=128)
    return {
        "in_channels": in_channels,
        "out_channels": shape(shapes, "proj_out.weight")[0],
        "patch_size": 1,
        "patch_size_t": 1,
        "num_attention_heads": heads,
        "attention_head_dim": width // heads,
        "cross_attention_dim": shape(shapes, _BLOCK + "attn2.to_k.weight")[1],
        "num_layers": count(shapes, "transformer_blocks."),
        "qk_norm": "rms_norm_across_heads",
        "norm_elementwise_affine": False,
        "norm_eps": 1e-6,
        "caption_channels": shape(shapes, "caption_projection.linear_1.weight")[1],
        "attention_bias": _BLOCK + "attn1.to_q.bias" in shapes,
        "attention_out_bias": _BLOCK + "attn1.to_out.0.bias" in shapes,
    }


def _stream(shapes: Shapes, prefix: str, published_head: int) -> dict[str, Any]:
    """One of the two streams, video (no prefix) or audio ("audio_"), with the names of its entries in the config."""
    width, in_channels = shape(shapes, f"{prefix}patchify_proj.weight")
    gates = shapes.get(f"{_BLOCK}{prefix}attn1.to_gate_logits.weight")
    heads = gates[0] if gates else width // head_width(width, published_head)
    entries = {
        "in_channels": in_channels,
        "out_channels": shape(shapes, f"{prefix}proj_out.weight")[0],
        "patch_size": 1,
        "patch_size_t": 1,
        "num_attention_heads": heads,
        "attention_head_dim": width // heads,
        "cross_attention_dim": shape(shapes, f"{_BLOCK}{prefix}attn2.to_k.weight")[1],
        "gated_attn": gates is not None,
        "cross_attn_mod": shape(shapes, f"{_BLOCK}{prefix}scale_shift_table")[0] == 9,
        "ff_bias": f"{_BLOCK}{prefix}ff.net.0.proj.bias" in shapes,
    }
    return {prefix + name: value for name, value in entries.items()}


def _ltx_2_config(shapes: Shapes) -> dict[str, Any]:
    """Texts are projected inside the model in 2.0 only; all later models may be run with perturbed attention."""
    video = _stream(shapes, "", 128)
    caption = shapes.get("caption_projection.linear_1.weight")
    return {
        **video,
        **_stream(shapes, "audio_", 64),
        "num_layers": count(shapes, "transformer_blocks."),
        "qk_norm": "rms_norm_across_heads",
        "norm_elementwise_affine": False,
        "norm_eps": 1e-6,
        "caption_channels": caption[1] if caption else 3840,
        "attention_bias": _BLOCK + "attn1.to_q.bias" in shapes,
        "attention_out_bias": _BLOCK + "attn1.to_out.0.bias" in shapes,
        "rope_double_precision": True,
        "rope_type": "split",
        "use_prompt_embeddings": caption is not None,
        "perturbed_attn": video["gated_attn"],
        "use_prompt_adaln_single": not video["cross_attn_mod"]
        or "prompt_adaln_single.linear.weight" in shapes,
        "use_keyframes_abs_pos_embedding": "keyframes_abs_pos_embedding" in shapes,
    }


def _convert_ltx_2(upstream: Converter, tensors: Tensors) -> Tensors:
    """diffusers' converter, and then the prompt's modulation of 2.3 and later, which it leaves under its old name."""
    return {
        key.replace("prompt_adaln_single.", "prompt_adaln."): tensor
        for key, tensor in upstream(tensors).items()
    }


LTX = Family("LTX-Video", "LTXVideoTransformer3DModel", _is_ltx, _ltx_config)
LTX_2 = Family(
    "LTX-2",
    "LTX2VideoTransformer3DModel",
    _is_ltx_2,
    _ltx_2_config,
    _convert_ltx_2,
    unused=("video_embeddings_connector.", "audio_embeddings_connector."),  # the text encoder's side
)

FAMILIES = (LTX, LTX_2)
