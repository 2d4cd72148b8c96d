"""Transformers for the tests of single files: tiny ones of every variant, and the published ones as shapes only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from tests.support import original_layouts_video as layout
from tests.support.original_layouts_video import Case

Config = Mapping[str, Any]


def _vary(case: Case, name: str, config: Config | None = None, **changes: Any) -> Case:
    """`case` under another name, with other entries in its config and other fields."""
    return replace(case, name=name, config={**case.config, **(config or {})}, **changes)


_WAN = Case(
    "wan t2v",
    "WanTransformer3DModel",
    {
        "num_attention_heads": 4,
        "attention_head_dim": 12,
        "in_channels": 4,
        "out_channels": 4,
        "text_dim": 20,
        "freq_dim": 16,
        "ffn_dim": 40,
        "num_layers": 2,
    },
    layout.WAN,
)
_WAN_I2V = _vary(_WAN, "wan i2v", {"in_channels": 12, "image_dim": 24, "added_kv_proj_dim": 48})
_ANIMATE: Config = {
    "latent_channels": 4,
    "num_layers": 4,
    "motion_encoder_channel_sizes": {
        "4": 8,
        "8": 8,
        "16": 8,
        "32": 8,
        "64": 6,
        "128": 6,
        "256": 4,
        "512": 4,
    },
    "motion_style_dim": 10,
    "motion_dim": 5,
    "motion_encoder_dim": 14,
    "face_encoder_hidden_dim": 16,
    "face_encoder_num_heads": 2,
    "inject_face_latents_blocks": 2,
}
_WAN_ANIMATE_2 = Case(
    "wan animate 2",
    "WanAnimate2Transformer3DModel",
    {
        "in_dim": 12,
        "dim": 48,
        "ffn_dim": 40,
        "freq_dim": 16,
        "text_dim": 20,
        "out_dim": 4,
        "num_heads": 4,
        "num_layers": 2,
    },
    layout.WAN_ANIMATE_2,
)
_TINY_WAN = (
    _WAN,
    _vary(_WAN, "wan t2v, 9 heads of 32", {"num_attention_heads": 9, "attention_head_dim": 32}, prefix=""),
    _WAN_I2V,
    _vary(_WAN, "wan 2.2 i2v", {"in_channels": 12}),
    _vary(_WAN_I2V, "wan flf2v", {"pos_embed_seq_len": 6}),
    _vary(
        _WAN,
        "wan vace",
        {"num_layers": 4, "vace_layers": (0, 2), "vace_in_channels": 10},
        model_class="WanVACETransformer3DModel",
    ),
    _vary(
        _WAN,
        "skyreels v2",
        {"inject_sample_info": True},
        model_class="SkyReelsV2Transformer3DModel",
        prefix="model.",
    ),
    _vary(
        _WAN_I2V,
        "wan animate",
        _ANIMATE,
        model_class="WanAnimateTransformer3DModel",
        names=layout.WAN_ANIMATE,
        finish=layout.with_image_shaped_biases,
        extra={"motion_encoder.enc.net_app.convs.1.conv2.0.kernel": torch.ones(4, 4)},
    ),
    _WAN_ANIMATE_2,
)

_FLUX2 = Case(
    "flux.2 dev",
    "Flux2Transformer2DModel",
    {
        "in_channels": 8,
        "num_layers": 1,
        "num_single_layers": 2,
        "attention_head_dim": 16,
        "num_attention_heads": 3,
        "joint_attention_dim": 20,
        "timestep_guidance_channels": 16,
        "axes_dims_rope": (4, 4, 4, 4),
    },
    layout.FLUX2,
)
_FLUX3 = Case(
    "flux.3",
    "Flux3Transformer2DModel",
    {
        "in_channels": 8,
        "cond_in_channels": 6,
        "num_layers": 1,
        "num_single_layers": 2,
        "attention_head_dim": 16,
        "num_attention_heads": 3,
        "joint_attention_dim": 20,
        "timestep_channels": 16,
        "axes_dims_rope": (4, 4, 4, 4),
    },
    layout.FLUX3,
    prefix="",
    extra={"repa_projectors.0.weight": torch.ones(2, 2)},
)
_TINY_FLUX = (
    _FLUX2,
    _vary(_FLUX2, "flux.2 klein", {"guidance_embeds": False}, prefix=""),
    _FLUX3,
    _vary(_FLUX3, "flux.3 distilled", {"flow_map": True}, prefix="model.diffusion_model."),
)

_LTX_SIZES: Config = {
    "in_channels": 8,
    "out_channels": 8,
    "num_attention_heads": 4,
    "attention_head_dim": 12,
    "cross_attention_dim": 48,
    "num_layers": 2,
    "caption_channels": 20,
}
_LTX = Case("ltx", "LTXVideoTransformer3DModel", _LTX_SIZES, layout.LTX)
_LTX2 = Case(
    "ltx-2.0",
    "LTX2VideoTransformer3DModel",
    {
        **_LTX_SIZES,
        "audio_in_channels": 6,
        "audio_out_channels": 6,
        "audio_num_attention_heads": 4,
        "audio_attention_head_dim": 8,
        "audio_cross_attention_dim": 32,
        "rope_type": "split",
    },
    layout.LTX2,
    extra={"video_embeddings_connector.learnable_registers": torch.ones(2, 2)},
    beside={"text_embedding_projection.aggregate_embed.weight": torch.ones(2, 2), "vae.a": torch.ones(1)},
)
_LTX23: Config = {
    "gated_attn": True,
    "audio_gated_attn": True,
    "cross_attn_mod": True,
    "audio_cross_attn_mod": True,
    "use_prompt_embeddings": False,
    "perturbed_attn": True,
    "caption_channels": 3840,
}
_LTX25: Config = {**_LTX23, "ff_bias": False, "use_keyframes_abs_pos_embedding": True}
_TINY_LTX = (
    _LTX,
    _LTX2,
    _vary(_LTX2, "ltx-2.3", {**_LTX23, "num_attention_heads": 3, "attention_head_dim": 16}),
    _vary(_LTX2, "ltx-2.5", _LTX25),
)

_HUNYUAN = Case(
    "hunyuan t2v",
    "HunyuanVideoTransformer3DModel",
    {
        "in_channels": 4,
        "out_channels": 4,
        "num_attention_heads": 3,
        "attention_head_dim": 16,
        "num_layers": 1,
        "num_single_layers": 2,
        "num_refiner_layers": 1,
        "text_embed_dim": 20,
        "pooled_projection_dim": 12,
        "rope_axes_dim": (4, 6, 6),
    },
    layout.HUNYUAN_VIDEO,
)
_HUNYUAN_I2V: Config = {"guidance_embeds": False, "image_condition_type": "latent_concat"}
_TINY_HUNYUAN = (
    _HUNYUAN,
    _vary(_HUNYUAN, "hunyuan i2v", {"in_channels": 9, **_HUNYUAN_I2V}, prefix=""),
    _vary(_HUNYUAN, "skyreels v1 i2v", {"in_channels": 8}),
    _vary(_HUNYUAN, "hunyuan by comfy", names=layout.HUNYUAN_VIDEO_COMFY, prefix="model.model."),
)

_COSMOS_SIZES: Config = {
    "in_channels": 4,
    "out_channels": 4,
    "num_attention_heads": 3,
    "attention_head_dim": 16,
    "num_layers": 2,
    "text_embed_dim": 20,
    "adaln_lora_dim": 6,
}
_COSMOS_1 = Case(
    "cosmos 1.0",
    "CosmosTransformer3DModel",
    {**_COSMOS_SIZES, "max_size": (6, 8, 10)},
    layout.COSMOS_1,
    prefix="net.",
    extra={"logvar.0.freqs": torch.ones(2), "pos_embedder.seq": torch.ones(3)},
)
_COSMOS_2 = Case(
    "cosmos predict 2",
    "CosmosTransformer3DModel",
    {**_COSMOS_SIZES, "rope_scale": (1.0, 4.0, 4.0), "extra_pos_embed_type": None},
    layout.COSMOS_2,
    prefix="net.",
    extra={"accum_iteration": torch.ones(1), "pos_embedder.dim_spatial_range": torch.ones(3)},
)
_PREDICT_25: Config = {
    "rope_scale": (1.0, 3.0, 3.0),
    "use_crossattn_projection": True,
    "crossattn_proj_in_channels": 30,
    "encoder_hidden_states_channels": 20,
}
_TINY_COSMOS = (
    _COSMOS_1,
    _vary(_COSMOS_1, "cosmos 1.0 v2w", {"in_channels": 5}, prefix="model.diffusion_model."),
    _COSMOS_2,
    _vary(_COSMOS_2, "cosmos predict 2 v2w", {"in_channels": 5, "rope_scale": (1.0, 3.0, 3.0)}),
    _vary(_COSMOS_2, "cosmos predict 2.5", {"in_channels": 5, **_PREDICT_25}),
    _vary(_COSMOS_2, "anima", extra={"llm_adapter.embed.weight": torch.ones(2, 2)}),
)

_AURA_FLOW = Case(
    "auraflow",
    "AuraFlowTransformer2DModel",
    {
        "num_mmdit_layers": 1,
        "num_single_dit_layers": 2,
        "attention_head_dim": 12,
        "num_attention_heads": 4,
        "joint_attention_dim": 20,
        "caption_projection_dim": 48,
        "pos_embed_max_size": 16,
    },
    layout.AURA_FLOW,
)
_MOCHI = Case(
    "mochi",
    "MochiTransformer3DModel",
    {
        "num_attention_heads": 2,
        "attention_head_dim": 8,
        "pooled_projection_dim": 6,
        "in_channels": 4,
        "text_embed_dim": 8,
        "time_embed_dim": 10,
    },
    layout.MOCHI,
)
_HIDREAM = Case(
    "hidream",
    "HiDreamImageTransformer2DModel",
    {
        "patch_size": 2,
        "in_channels": 4,
        "out_channels": 4,
        "num_layers": 1,
        "num_single_layers": 2,
        "attention_head_dim": 12,
        "num_attention_heads": 4,
        "caption_channels": (20, 24),
        "text_emb_dim": 14,
        "axes_dims_rope": (6, 3, 3),
        "llama_layers": (0, 1, 2),
    },
    {},
)
_SANA = Case(
    "sana",
    "SanaTransformer2DModel",
    {
        "in_channels": 4,
        "out_channels": 4,
        "num_attention_heads": 4,
        "attention_head_dim": 12,
        "num_layers": 2,
        "num_cross_attention_heads": 4,
        "cross_attention_head_dim": 12,
        "cross_attention_dim": 48,
        "caption_channels": 20,
    },
    layout.SANA,
    prefix="",
    extra={"pos_embed": torch.ones(1, 1024, 48), "y_embedder.y_embedding": torch.ones(3, 20)},
)
_QWEN_IMAGE_21 = Case(
    "qwen-image 2.1",
    "QwenImage21Transformer2DModel",
    {
        "in_channels": 8,
        "out_channels": 8,
        "num_layers": 2,
        "attention_head_dim": 16,
        "num_attention_heads": 3,
        "context_in_dim": 20,
        "axes_dims_rope": (4, 6, 6),
    },
    {},
)
_KREA_2 = Case(
    "krea 2",
    "Krea2Transformer2DModel",
    {
        "in_channels": 8,
        "num_layers": 2,
        "attention_head_dim": 16,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 40,
        "timestep_embed_dim": 10,
        "text_hidden_dim": 24,
        "num_text_layers": 3,
        "text_num_attention_heads": 3,
        "text_num_key_value_heads": 3,
        "text_intermediate_size": 20,
        "num_layerwise_text_blocks": 1,
        "num_refiner_text_blocks": 2,
        "axes_dims_rope": (4, 6, 6),
    },
    layout.KREA_2,
    finish=layout.with_flat_modulations,
)
_ERNIE_IMAGE = Case(
    "ernie-image",
    "ErnieImageTransformer2DModel",
    {
        "hidden_size": 48,
        "num_attention_heads": 3,
        "num_layers": 2,
        "ffn_hidden_size": 40,
        "in_channels": 8,
        "out_channels": 8,
        "text_in_dim": 20,
        "rope_axes_dim": (4, 6, 6),
    },
    {},
)
_MINIMAX_H3 = Case(
    "minimax-h3",
    "MiniMaxH3Transformer3DModel",
    {
        "num_attention_heads": 3,
        "attention_head_dim": 16,
        "hidden_size": 40,
        "num_layers": 2,
        "num_refiner_layers": 1,
        "ffn_dim": 28,
        "in_channels": 4,
        "audio_in_channels": 6,
        "text_dim": 20,
        "freq_dim": 10,
        "time_embed_hidden_dim": 12,
        "time_embed_dim": 14,
        "rope_freq_dim": 2,
    },
    layout.MINIMAX_H3,
    extra={"rope.inv_freq": torch.ones(2)},
)

TINY = (
    *_TINY_WAN,
    *_TINY_FLUX,
    *_TINY_LTX,
    *_TINY_HUNYUAN,
    *_TINY_COSMOS,
    _AURA_FLOW,
    _MOCHI,
    _HIDREAM,
    _SANA,
    _QWEN_IMAGE_21,
    _vary(_QWEN_IMAGE_21, "qwen-image 2.1 by comfy", names=layout.QWEN_IMAGE_21_COMFY),
    _KREA_2,
    _ERNIE_IMAGE,
    _MINIMAX_H3,
)

# ---- what was published: the config.json of the diffusers folders, or the authors' conversion script


def _published(case: Case, name: str, config: Config | None = None) -> Case:
    """`config` and the class's defaults in place of the tiny sizes."""
    return replace(case, name=name, config=config or {}, extra={}, beside={})


_SIZE_1B: Config = {"num_attention_heads": 12, "ffn_dim": 8960, "num_layers": 30}
_I2V_14B: Config = {"in_channels": 36, "image_dim": 1280, "added_kv_proj_dim": 5120}
_VACE, _SKY_REELS, _WAN_ANIMATE = _TINY_WAN[5:8]
_LTX_13B: Config = {
    "num_layers": 48,
    "num_attention_heads": 32,
    "attention_head_dim": 128,
    "cross_attention_dim": 4096,
}
_COSMOS_14B: Config = {"num_attention_heads": 40, "num_layers": 36}
_COSMOS_2B: Config = {"num_attention_heads": 16, "num_layers": 28, "extra_pos_embed_type": None}

PUBLISHED = (
    _published(_WAN, "Wan 2.1 T2V 14B"),
    _published(_WAN, "Wan 2.1 T2V 1.3B", _SIZE_1B),
    _published(_WAN, "Wan 2.1 I2V 14B", _I2V_14B),
    _published(_WAN, "Wan 2.1 FLF2V 14B", {**_I2V_14B, "pos_embed_seq_len": 514}),
    _published(_WAN, "Wan 2.2 I2V A14B", {"in_channels": 36}),
    _published(
        _WAN,
        "Wan 2.2 TI2V 5B",
        {
            "num_attention_heads": 24,
            "ffn_dim": 14336,
            "num_layers": 30,
            "in_channels": 48,
            "out_channels": 48,
        },
    ),
    _published(_VACE, "Wan 2.1 VACE 14B"),
    _published(_VACE, "Wan 2.1 VACE 1.3B", {**_SIZE_1B, "vace_layers": tuple(range(0, 30, 2))}),
    _published(_SKY_REELS, "SkyReels V2 DF 1.3B 540P", {**_SIZE_1B, "inject_sample_info": True}),
    _published(_WAN_ANIMATE, "Wan 2.2 Animate 14B", {"image_dim": 1280, "added_kv_proj_dim": 5120}),
    _published(_FLUX2, "FLUX.2 dev"),
    _published(
        _FLUX2,
        "FLUX.2 klein 4B",
        {
            "num_layers": 5,
            "num_single_layers": 20,
            "num_attention_heads": 24,
            "joint_attention_dim": 7680,
            "guidance_embeds": False,
        },
    ),
    _published(
        _FLUX2,
        "FLUX.2 klein 9B",
        {
            "num_single_layers": 24,
            "num_attention_heads": 32,
            "joint_attention_dim": 12288,
            "guidance_embeds": False,
        },
    ),
    _published(_LTX, "LTX-Video 2B"),
    _published(_LTX, "LTX-Video 0.9.7 13B", _LTX_13B),
    _published(_LTX2, "LTX-2", {"rope_type": "split"}),
    _published(_LTX2, "LTX-2.3", {**_LTX23, "rope_type": "split"}),
    _published(_LTX2, "LTX-2.5", {**_LTX25, "rope_type": "split"}),
    _published(_HUNYUAN, "HunyuanVideo"),
    _published(_HUNYUAN, "HunyuanVideo I2V 33 channels", {"in_channels": 33, **_HUNYUAN_I2V}),
    _published(_COSMOS_1, "Cosmos 1.0 7B Text2World"),
    _published(
        _COSMOS_1,
        "Cosmos 1.0 14B Video2World",
        {**_COSMOS_14B, "in_channels": 17, "rope_scale": (2.0, 2.0, 2.0)},
    ),
    _published(_COSMOS_2, "Cosmos Predict 2 2B Text2Image", {**_COSMOS_2B, "rope_scale": (1.0, 4.0, 4.0)}),
    _published(
        _COSMOS_2,
        "Cosmos Predict 2 14B Video2World",
        {
            **_COSMOS_14B,
            "in_channels": 17,
            "rope_scale": (20 / 24, 2.0, 2.0),
            "extra_pos_embed_type": None,
        },
    ),
    _published(
        _COSMOS_2,
        "Cosmos Predict 2.5 2B",
        {
            **_COSMOS_2B,
            **_PREDICT_25,
            "in_channels": 17,
            "crossattn_proj_in_channels": 100352,
            "encoder_hidden_states_channels": 1024,
        },
    ),
    _published(_AURA_FLOW, "AuraFlow"),
    _published(_MOCHI, "Mochi 1 preview"),
    _published(
        _HIDREAM,
        "HiDream-I1",
        {
            "patch_size": 2,
            "in_channels": 16,
            "out_channels": 16,
            "caption_channels": (4096, 4096),
            "axes_dims_rope": (64, 32, 32),
            "llama_layers": (*range(32), *(31,) * 16),
        },
    ),
    _published(_SANA, "Sana 1.6B"),
    _published(
        _SANA,
        "Sana 600M",
        {
            "num_attention_heads": 36,
            "num_layers": 28,
            "num_cross_attention_heads": 16,
            "cross_attention_head_dim": 72,
            "cross_attention_dim": 1152,
        },
    ),
    _published(_QWEN_IMAGE_21, "Qwen-Image 2.1"),
    _published(_KREA_2, "Krea 2"),
    _published(_ERNIE_IMAGE, "ERNIE-Image"),
    _published(_MINIMAX_H3, "MiniMax-H3"),
    _published(_FLUX3, "FLUX.3 image klein"),
)
