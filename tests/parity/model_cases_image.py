"""Model cases of the image families."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from diffusers.models.embeddings import get_2d_rotary_pos_embed
from diffusers.models.transformers.transformer_ideogram4 import (
    IMAGE_POSITION_OFFSET,
    LLM_TOKEN_INDICATOR,
    OUTPUT_IMAGE_INDICATOR,
    SEQUENCE_PADDING_INDICATOR,
)

from tests.parity.model_case import Draw, ModelCase

BATCH = 2
Kwargs = dict[str, Any]


def _axes(width: int, count: int) -> tuple[int, ...]:
    """`count` even rotary widths that sum to a head's."""
    pairs = width // 2
    return tuple(2 * (pairs // count + (i >= count - pairs % count)) for i in range(count))


def _side(draw: Draw) -> int:
    """Patches along one edge of a picture."""
    return draw.odd(3, 7)


def _grouped(draw: Draw) -> tuple[int, int]:
    """Query heads and key-value heads of grouped-query attention."""
    shared = draw.heads()
    return shared * (3 if shared < 6 else 2), shared


def _image_ids(height: int, width: int, axes: int = 3, first: int = 0, start: int = 0) -> torch.Tensor:
    """[height * width, axes]: `first`, the row and the column, both counted from `start`, then zeros."""
    ids = torch.zeros(height, width, axes)
    ids[..., 0] = first
    ids[..., 1] = start + torch.arange(height)[:, None]
    ids[..., 2] = start + torch.arange(width)
    return ids.flatten(0, 1)


def _text_ids(length: int, axes: int = 3, counting: tuple[int, ...] = ()) -> torch.Tensor:
    """[length, axes]: the token's place on the axes in `counting`, zeros on the others."""
    ids = torch.zeros(length, axes)
    ids[:, counting] = torch.arange(length, dtype=ids.dtype)[:, None]
    return ids


def _joint_mask(draw: Draw, text: int, picture: int) -> torch.Tensor:
    """[BATCH, text + picture] bool: padding at each text's end, all of the picture."""
    return torch.cat([draw.key_mask(BATCH, text), torch.ones(BATCH, picture, dtype=torch.bool)], dim=1)


def _flux_config(draw: Draw) -> Kwargs:
    heads, head = draw.heads(), draw.choice(8, 12)
    return {
        "in_channels": draw.choice(8, 12, 16),
        "num_layers": 1,
        "num_single_layers": 2,
        "num_attention_heads": heads,
        "attention_head_dim": head,
        "axes_dims_rope": _axes(head, 3),
        "joint_attention_dim": draw.integer(18, 30),
        "pooled_projection_dim": draw.integer(10, 20),
        "guidance_embeds": draw.choice(True, False),
    }


def _flux_inputs(draw: Draw, config: Any) -> Kwargs:
    height, width, text = _side(draw), _side(draw), draw.odd(5, 13)
    return {
        "hidden_states": draw.normal(BATCH, height * width, config.in_channels),
        "encoder_hidden_states": draw.normal(BATCH, text, config.joint_attention_dim),
        "pooled_projections": draw.normal(BATCH, config.pooled_projection_dim),
        "timestep": draw.timestep(BATCH, 1.0),
        "guidance": draw.timestep(BATCH, 5.0) if config.guidance_embeds else None,
        "img_ids": _image_ids(height, width),
        "txt_ids": _text_ids(text),
        "return_dict": False,
    }


def _flux2_config(draw: Draw) -> Kwargs:
    heads, head = draw.heads(), draw.choice(8, 12)
    return {
        "in_channels": draw.choice(8, 12, 16),
        "num_layers": 1,
        "num_single_layers": 2,
        "num_attention_heads": heads,
        "attention_head_dim": head,
        "axes_dims_rope": _axes(head, 4),
        "joint_attention_dim": draw.integer(18, 30),
        "timestep_guidance_channels": 32,
        "mlp_ratio": draw.choice(2.0, 3.0),
        "guidance_embeds": draw.choice(True, False),
    }


def _flux2_inputs(draw: Draw, config: Any) -> Kwargs:
    height, width, text = _side(draw), _side(draw), draw.odd(5, 13)
    return {
        "hidden_states": draw.normal(BATCH, height * width, config.in_channels),
        "encoder_hidden_states": draw.normal(BATCH, text, config.joint_attention_dim),
        "timestep": draw.timestep(BATCH, 1.0),
        "guidance": draw.timestep(BATCH, 5.0) if config.guidance_embeds else None,
        "img_ids": _image_ids(height, width, 4).expand(BATCH, -1, -1),
        "txt_ids": _text_ids(text, 4, (3,)).expand(BATCH, -1, -1),
        "return_dict": False,
    }


def _flux3_config(draw: Draw) -> Kwargs:
    heads, head = draw.heads(), draw.choice(8, 12)
    return {
        "in_channels": draw.choice(8, 12, 16),
        "cond_in_channels": draw.choice(8, 12, 16),
        "num_layers": 1,
        "num_single_layers": 2,
        "num_attention_heads": heads,
        "attention_head_dim": head,
        "axes_dims_rope": _axes(head, 4),
        "joint_attention_dim": draw.integer(18, 30),
        "timestep_channels": 32,
        "flow_map": draw.choice(True, False),
    }


def _flux3_inputs(draw: Draw, config: Any) -> Kwargs:
    height, width, text, reference = _side(draw), _side(draw), draw.odd(5, 13), _side(draw)
    return {
        "hidden_states": draw.normal(BATCH, height * width, config.in_channels),
        "encoder_hidden_states": draw.normal(BATCH, text, config.joint_attention_dim),
        "timestep": draw.timestep(BATCH, 1.0),
        "target_timestep": draw.timestep(BATCH, 1.0) if config.flow_map else None,
        "img_ids": _image_ids(height, width, 4),
        "txt_ids": _text_ids(text, 4, (3,)),
        "image_cond_hidden_states": draw.normal(BATCH, reference * width, config.cond_in_channels),
        "image_cond_ids": _image_ids(reference, width, 4, first=10),
        "return_dict": False,
    }


def _qwen_config(draw: Draw) -> Kwargs:
    """Qwen-Image, its editing model, or the layered one."""
    heads = draw.heads()
    variant = draw.choice(
        {}, {"zero_cond_t": True}, {"use_additional_t_cond": True, "use_layer3d_rope": True}
    )
    head = draw.choice(8, 12)
    return {
        "in_channels": draw.choice(8, 12, 16),
        "out_channels": draw.integer(2, 4),
        "num_layers": 2,
        "num_attention_heads": heads,
        "attention_head_dim": head,
        "axes_dims_rope": _axes(head, 3),
        "joint_attention_dim": draw.integer(18, 30),
        **variant,
    }


def _qwen_inputs(draw: Draw, config: Any) -> Kwargs:
    text = draw.odd(7, 13)
    pictures = 2 if config.zero_cond_t or config.use_layer3d_rope else 1
    shapes = [(1, _side(draw), _side(draw)) for _ in range(pictures)]
    return {
        "hidden_states": draw.normal(BATCH, sum(h * w for _, h, w in shapes), config.in_channels),
        "encoder_hidden_states": draw.normal(BATCH, text, config.joint_attention_dim),
        "encoder_hidden_states_mask": draw.key_mask(BATCH, text).long(),
        "timestep": draw.timestep(BATCH, 1.0),
        "img_shapes": [shapes] * BATCH,
        "additional_t_cond": torch.tensor([0, 1]) if config.use_additional_t_cond else None,
        "return_dict": False,
    }


def _qwen21_config(draw: Draw) -> Kwargs:
    heads, head = draw.heads(), draw.choice(8, 12)
    channels = draw.integer(4, 8)
    return {
        "in_channels": channels,
        "out_channels": channels,
        "num_layers": 2,
        "num_attention_heads": heads,
        "attention_head_dim": head,
        "axes_dims_rope": _axes(head, 3),
        "context_in_dim": draw.integer(18, 30),
        "causal_condition": draw.choice(True, False),
    }


def _qwen21_inputs(draw: Draw, config: Any) -> Kwargs:
    """Text, a picture to go by, text, and the picture to make; one slot of a picture stands for four tokens."""
    shapes = [(1, 2 * draw.odd(1, 3), 2 * draw.odd(1, 3)) for _ in range(2)]
    slots = [h * w // 4 for _, h, w in shapes]
    before, after = draw.odd(2, 4), draw.integer(6, 10)
    text = before + slots[0] + after
    is_image = torch.tensor([False] * before + [True] * slots[0] + [False] * after + [True] * slots[1])
    mask = torch.cat([torch.ones(BATCH, text - after, dtype=torch.bool), draw.key_mask(BATCH, after)], dim=1)
    return {
        "hidden_states": draw.normal(BATCH, 4 * sum(slots), config.in_channels),
        "encoder_hidden_states": draw.normal(BATCH, text, config.context_in_dim),
        "encoder_hidden_states_mask": mask,
        "timestep": draw.timestep(BATCH, 1.0),
        "img_shapes": [shapes] * BATCH,
        "img_mask": is_image.expand(BATCH, -1),
        "return_dict": False,
    }


def _sd3_config(draw: Draw) -> Kwargs:
    """SD3.5 large, 3.5 medium (its first blocks have a second attention, of the picture alone), or SD3 medium."""
    heads = draw.heads()
    dual_layers, qk_norm = draw.choice(((), "rms_norm"), ((0,), "rms_norm"), ((), None))
    head, channels = draw.choice(8, 12), draw.integer(2, 4)
    return {
        "sample_size": 16,
        "in_channels": channels,
        "out_channels": channels,
        "num_layers": 2,
        "num_attention_heads": heads,
        "attention_head_dim": head,
        "caption_projection_dim": heads * head,
        "joint_attention_dim": draw.integer(18, 30),
        "pooled_projection_dim": draw.integer(10, 20),
        "pos_embed_max_size": 12,
        "dual_attention_layers": dual_layers,
        "qk_norm": qk_norm,
    }


def _sd3_inputs(draw: Draw, config: Any) -> Kwargs:
    return {
        "hidden_states": draw.normal(BATCH, config.in_channels, 2 * _side(draw), 2 * _side(draw)),
        "encoder_hidden_states": draw.normal(BATCH, draw.odd(5, 13), config.joint_attention_dim),
        "pooled_projections": draw.normal(BATCH, config.pooled_projection_dim),
        "timestep": draw.timestep(BATCH),
        "return_dict": False,
    }


def _z_image_config(draw: Draw) -> Kwargs:
    heads, head = draw.heads(), draw.choice(8, 12)
    return {
        "in_channels": draw.integer(2, 4),
        "dim": heads * head,
        "n_layers": 1,
        "n_refiner_layers": 1,
        "n_heads": heads,
        "n_kv_heads": heads,
        "cap_feat_dim": draw.integer(18, 30),
        "axes_dims": _axes(head, 3),
        "axes_lens": (128, 32, 32),
    }


def _z_image_inputs(draw: Draw, config: Any) -> Kwargs:
    """Every sample has its own size; pictures and texts are padded to 32 tokens by the model."""
    sides = [(2 * draw.odd(3, 5), 2 * draw.odd(3, 5)), (2 * draw.odd(7, 9), 2 * draw.odd(5, 7))]
    return {
        "x": [draw.normal(config.in_channels, 1, *side) for side in sides],
        "t": draw.timestep(BATCH, 1.0),
        "cap_feats": [
            draw.normal(length, config.cap_feat_dim) for length in (draw.odd(5, 31), draw.odd(33, 63))
        ],
        "return_dict": False,
    }


def _chroma_config(draw: Draw) -> Kwargs:
    heads, head = draw.heads(), draw.choice(8, 12)
    return {
        "in_channels": draw.choice(8, 12, 16),
        "num_layers": 1,
        "num_single_layers": 2,
        "num_attention_heads": heads,
        "attention_head_dim": head,
        "axes_dims_rope": _axes(head, 3),
        "joint_attention_dim": draw.integer(18, 30),
        "approximator_num_channels": 16,
        "approximator_hidden_dim": 24,
        "approximator_layers": 2,
    }


def _chroma_inputs(draw: Draw, config: Any) -> Kwargs:
    height, width, text = _side(draw), _side(draw), draw.odd(7, 13)
    return {
        "hidden_states": draw.normal(BATCH, height * width, config.in_channels),
        "encoder_hidden_states": draw.normal(BATCH, text, config.joint_attention_dim),
        "timestep": draw.timestep(BATCH, 1.0),
        "img_ids": _image_ids(height, width),
        "txt_ids": _text_ids(text),
        "attention_mask": _joint_mask(draw, text, height * width),
        "return_dict": False,
    }


def _lumina2_config(draw: Draw) -> Kwargs:
    heads, shared = _grouped(draw)
    return {
        "in_channels": draw.integer(2, 4),
        "hidden_size": heads * 8,
        "num_layers": 1,
        "num_refiner_layers": 1,
        "num_attention_heads": heads,
        "num_kv_heads": shared,
        "multiple_of": draw.choice(4, 8, 20),
        "axes_dim_rope": _axes(8, 3),
        "axes_lens": (32, 16, 16),
        "cap_feat_dim": draw.integer(18, 30),
    }


def _lumina2_inputs(draw: Draw, config: Any) -> Kwargs:
    text = draw.odd(7, 13)
    return {
        "hidden_states": draw.normal(BATCH, config.in_channels, 2 * _side(draw), 2 * _side(draw)),
        "timestep": draw.timestep(BATCH, 1.0),
        "encoder_hidden_states": draw.normal(BATCH, text, config.cap_feat_dim),
        "encoder_attention_mask": draw.key_mask(BATCH, text).long(),
        "return_dict": False,
    }


def _hidream_config(draw: Draw) -> Kwargs:
    heads = draw.heads()
    return {
        "patch_size": 2,
        "in_channels": draw.integer(2, 4),
        "num_layers": 1,
        "num_single_layers": 2,
        "num_attention_heads": heads,
        "attention_head_dim": 8,
        "caption_channels": [draw.integer(18, 24), draw.integer(18, 24)],
        "text_emb_dim": draw.integer(10, 20),
        "num_routed_experts": draw.choice(2, 3),
        "num_activated_experts": draw.choice(1, 2),
        "axes_dims_rope": (4, 2, 2),
        "max_resolution": (16, 16),
        "llama_layers": [0, 1, 1],
    }


def _hidream_inputs(draw: Draw, config: Any) -> Kwargs:
    """A picture that is no square is padded to the largest resolution by the model."""
    t5, llama = config.caption_channels
    return {
        "hidden_states": draw.normal(BATCH, config.in_channels, 2 * _side(draw), 2 * _side(draw)),
        "timesteps": draw.timestep(BATCH),
        "encoder_hidden_states_t5": draw.normal(BATCH, draw.odd(5, 9), t5),
        "encoder_hidden_states_llama3": draw.normal(2, BATCH, draw.odd(5, 9), llama),
        "pooled_embeds": draw.normal(BATCH, config.text_emb_dim),
        "return_dict": False,
    }


def _auraflow_config(draw: Draw) -> Kwargs:
    heads, channels = draw.heads(), draw.integer(2, 4)
    return {
        "sample_size": 16,
        "in_channels": channels,
        "out_channels": channels,
        "num_mmdit_layers": 1,
        "num_single_dit_layers": 2,
        "num_attention_heads": heads,
        "attention_head_dim": 8,
        "joint_attention_dim": draw.integer(18, 30),
        "caption_projection_dim": heads * 8,
        "pos_embed_max_size": 100,
    }


def _auraflow_inputs(draw: Draw, config: Any) -> Kwargs:
    return {
        "hidden_states": draw.normal(BATCH, config.in_channels, 2 * _side(draw), 2 * _side(draw)),
        "encoder_hidden_states": draw.normal(BATCH, draw.odd(5, 13), config.joint_attention_dim),
        "timestep": draw.timestep(BATCH, 1.0),
        "return_dict": False,
    }


def _bria_config(draw: Draw) -> Kwargs:
    heads, head = draw.heads(), draw.choice(8, 12)
    return {
        "in_channels": draw.choice(4, 8, 12),
        "num_layers": 1,
        "num_single_layers": 2,
        "num_attention_heads": heads,
        "attention_head_dim": head,
        "joint_attention_dim": draw.integer(18, 30),
        "axes_dims_rope": _axes(head, 3),
    }


def _bria_inputs(draw: Draw, config: Any) -> Kwargs:
    height, width, text = _side(draw), _side(draw), draw.odd(5, 13)
    return {
        "hidden_states": draw.normal(BATCH, height * width, config.in_channels),
        "encoder_hidden_states": draw.normal(BATCH, text, config.joint_attention_dim),
        "timestep": draw.timestep(BATCH),
        "img_ids": _image_ids(height, width),
        "txt_ids": _text_ids(text),
        "return_dict": False,
    }


def _bria_fibo_config(draw: Draw) -> Kwargs:
    return _bria_config(draw) | {
        "text_encoder_dim": draw.integer(10, 20),
        "guidance_embeds": draw.choice(True, False),
    }


def _bria_fibo_inputs(draw: Draw, config: Any) -> Kwargs:
    inputs = _bria_inputs(draw, config)
    picture, text = inputs["hidden_states"].shape[1], inputs["encoder_hidden_states"].shape[1]
    layers = config.num_layers + config.num_single_layers
    return inputs | {
        "text_encoder_layers": [draw.normal(BATCH, text, config.text_encoder_dim) for _ in range(layers)],
        "guidance": draw.timestep(BATCH, 5.0) if config.guidance_embeds else None,
        "joint_attention_kwargs": {"attention_mask": _joint_mask(draw, text, picture)[:, None, None]},
    }


def _bria_fibo2_config(draw: Draw) -> Kwargs:
    heads = draw.heads()
    return {
        "in_channels": draw.integer(2, 4),
        "dim": heads * 8,
        "n_layers": 2,
        "n_refiner_layers": 1,
        "n_heads": heads,
        "cap_feat_dim": draw.integer(18, 30),
        "injection_layer_ids": (1,),
        "perceiver_num_layers": 1,
        "min_num_gist_tokens": 5,
        "max_num_gist_tokens": 17,
        "gist_step": 1,
        "gist_min_text_len": 4,
        "gist_max_text_len": 16,
        "axes_dims": _axes(8, 3),
        "axes_lens": (32, 16, 16),
    }


def _bria_fibo2_inputs(draw: Draw, config: Any) -> Kwargs:
    """A prompt for each sample, of its own length, and one picture to edit, of a size unlike the result's."""
    text, bundles = draw.odd(9, 15), 1 + len(config.injection_layer_ids)
    sides = [(2 * _side(draw), 2 * _side(draw)) for _ in range(2)]
    return {
        "hidden_states": draw.normal(BATCH, config.in_channels, *sides[0]),
        "timestep": draw.timestep(BATCH, 1.0),
        "encoder_hidden_states": draw.normal(BATCH, bundles, text, config.cap_feat_dim),
        "encoder_attention_mask": draw.key_mask(BATCH, text),
        "context_latents": [draw.normal(BATCH, config.in_channels, *sides[1])]
        if draw.choice(True, False)
        else None,
        "return_dict": False,
    }


def _cogview_config(draw: Draw) -> Kwargs:
    heads, channels = draw.heads(), draw.integer(2, 4)
    return {
        "in_channels": channels,
        "out_channels": channels,
        "num_layers": 2,
        "num_attention_heads": heads,
        "attention_head_dim": 8,
        "text_embed_dim": draw.integer(18, 30),
        "time_embed_dim": 24,
        "condition_dim": 8,
    }


def _cogview_inputs(draw: Draw, config: Any) -> Kwargs:
    height, width = 2 * _side(draw), 2 * _side(draw)
    return {
        "hidden_states": draw.normal(BATCH, config.in_channels, height, width),
        "encoder_hidden_states": draw.normal(BATCH, draw.odd(5, 13), config.text_embed_dim),
        "timestep": draw.timestep(BATCH),
        "original_size": torch.tensor([[8.0 * height, 8.0 * width], [512.0, 768.0]]),
        "target_size": torch.tensor([[8.0 * height, 8.0 * width]] * BATCH),
        "crop_coords": torch.tensor([[0.0, 0.0], [8.0, 24.0]]),
        "return_dict": False,
    }


def _glm_image_config(draw: Draw) -> Kwargs:
    return _cogview_config(draw) | {"prior_vq_quantizer_codebook_size": 32}


def _glm_image_inputs(draw: Draw, config: Any) -> Kwargs:
    """The second sample goes without the prior, as the pipeline's unconditional pass does."""
    inputs = _cogview_inputs(draw, config)
    del inputs["original_size"]
    height, width = inputs["hidden_states"].shape[-2:]
    tokens = height // 2 * width // 2
    return inputs | {
        "prior_token_id": draw.timestep(BATCH * tokens, config.prior_vq_quantizer_codebook_size)
        .long()
        .view(BATCH, tokens),
        "prior_token_drop": torch.tensor([[False], [True]]).expand(BATCH, tokens),
    }


def _ernie_config(draw: Draw) -> Kwargs:
    heads, head, channels = draw.heads(), draw.choice(8, 12), draw.integer(4, 8)
    return {
        "hidden_size": heads * head,
        "num_attention_heads": heads,
        "num_layers": 2,
        "ffn_hidden_size": draw.integer(90, 110),
        "in_channels": channels,
        "out_channels": channels,
        "text_in_dim": draw.integer(18, 30),
        "rope_axes_dim": _axes(head, 3),
    }


def _ernie_inputs(draw: Draw, config: Any) -> Kwargs:
    text = draw.odd(7, 13)
    return {
        "hidden_states": draw.normal(BATCH, config.in_channels, _side(draw), _side(draw)),
        "timestep": draw.timestep(BATCH),
        "text_bth": draw.normal(BATCH, text, config.text_in_dim),
        "text_lens": draw.key_mask(BATCH, text).sum(dim=1),
        "return_dict": False,
    }


def _hunyuan_dit_config(draw: Draw) -> Kwargs:
    heads = draw.heads()
    return {
        "in_channels": draw.integer(2, 4),
        "patch_size": 2,
        "sample_size": 16,
        "num_layers": 4,
        "num_attention_heads": heads,
        "attention_head_dim": 8,
        "hidden_size": heads * 8,
        "mlp_ratio": draw.choice(2.0, 4.3637),
        "learn_sigma": draw.choice(True, False),
        "cross_attention_dim": draw.integer(18, 30),
        "cross_attention_dim_t5": 8 * draw.integer(2, 4),
        "pooled_projection_dim": draw.integer(10, 20),
        "text_len": draw.odd(5, 9),
        "text_len_t5": draw.odd(7, 13),
        "use_style_cond_and_image_meta_size": draw.choice(True, False),
    }


def _hunyuan_dit_inputs(draw: Draw, config: Any) -> Kwargs:
    """The texts have the lengths that the model's padding has."""
    height, width, clip, t5 = _side(draw), _side(draw), config.text_len, config.text_len_t5
    rotary = get_2d_rotary_pos_embed(
        config.attention_head_dim, ((0, 0), (height, width)), (height, width), output_type="pt"
    )
    return {
        "hidden_states": draw.normal(BATCH, config.in_channels, 2 * height, 2 * width),
        "timestep": draw.timestep(BATCH),
        "encoder_hidden_states": draw.normal(BATCH, clip, config.cross_attention_dim),
        "text_embedding_mask": draw.key_mask(BATCH, clip).long(),
        "encoder_hidden_states_t5": draw.normal(BATCH, t5, config.cross_attention_dim_t5),
        "text_embedding_mask_t5": draw.key_mask(BATCH, t5).long(),
        "image_meta_size": torch.tensor([[512.0, 768.0, 16.0 * height, 16.0 * width, 0.0, 0.0]] * BATCH),
        "style": torch.zeros(BATCH, dtype=torch.long),
        "image_rotary_emb": rotary,
        "return_dict": False,
    }


def _hunyuan_image_config(draw: Draw) -> Kwargs:
    heads, head, channels = draw.heads(), draw.choice(8, 12), draw.integer(4, 8)
    return {
        "in_channels": channels,
        "out_channels": channels,
        "num_attention_heads": heads,
        "attention_head_dim": head,
        "num_layers": 1,
        "num_single_layers": 2,
        "num_refiner_layers": 1,
        "mlp_ratio": draw.choice(2.0, 4.0),
        "guidance_embeds": draw.choice(True, False),
        "use_meanflow": draw.choice(True, False),
        "text_embed_dim": draw.integer(18, 30),
        "text_embed_2_dim": draw.choice(None, 14),
        "rope_axes_dim": _axes(head, 2),
    }


def _hunyuan_image_inputs(draw: Draw, config: Any) -> Kwargs:
    text, glyphs = draw.odd(7, 13), draw.odd(5, 9)
    inputs = {
        "hidden_states": draw.normal(BATCH, config.in_channels, _side(draw), _side(draw)),
        "timestep": draw.timestep(BATCH),
        "timestep_r": draw.timestep(BATCH) if config.use_meanflow else None,
        "guidance": draw.timestep(BATCH, 5000.0) if config.guidance_embeds else None,
        "encoder_hidden_states": draw.normal(BATCH, text, config.text_embed_dim),
        "encoder_attention_mask": draw.key_mask(BATCH, text).long(),
        "return_dict": False,
    }
    if config.text_embed_2_dim is not None:
        inputs["encoder_hidden_states_2"] = draw.normal(BATCH, glyphs, config.text_embed_2_dim)
        inputs["encoder_attention_mask_2"] = draw.key_mask(BATCH, glyphs).long()
    return inputs


def _ideogram4_config(draw: Draw) -> Kwargs:
    heads, head = draw.heads(), draw.choice(8, 12)
    return {
        "in_channels": draw.integer(4, 8),
        "num_layers": 2,
        "num_attention_heads": heads,
        "attention_head_dim": head,
        "intermediate_size": draw.integer(90, 110),
        "adaln_dim": draw.integer(18, 30),
        "llm_features_dim": draw.integer(30, 40),
        "mrope_section": (head // 2 - 2 * (head // 6), head // 6, head // 6),
    }


def _ideogram4_inputs(draw: Draw, config: Any) -> Kwargs:
    """Texts padded at their start, then the picture; the padding is a segment of its own."""
    height, width, text = _side(draw), _side(draw), draw.odd(7, 13)
    length = text + height * width
    is_text = draw.key_mask(BATCH, text).flip(1)
    is_picture = torch.ones(BATCH, height * width, dtype=torch.bool)
    positions = torch.zeros(BATCH, length, 3, dtype=torch.long)
    positions[:, :text] = (is_text.cumsum(1) - 1).clamp(min=0)[..., None]
    positions[:, text:] = IMAGE_POSITION_OFFSET + _image_ids(height, width).long()
    return {
        "hidden_states": draw.normal(BATCH, length, config.in_channels),
        "timestep": draw.timestep(BATCH, 1.0),
        "encoder_hidden_states": draw.normal(BATCH, length, config.llm_features_dim),
        "position_ids": positions,
        "segment_ids": torch.cat(
            [torch.where(is_text, 1, SEQUENCE_PADDING_INDICATOR), is_picture.long()], dim=1
        ),
        "indicator": torch.cat([is_text * LLM_TOKEN_INDICATOR, is_picture * OUTPUT_IMAGE_INDICATOR], dim=1),
        "return_dict": False,
    }


def _joy_image_config(draw: Draw) -> Kwargs:
    heads, head = draw.heads(), draw.choice(8, 12)
    return {
        "in_channels": draw.integer(2, 4),
        "hidden_size": heads * head,
        "num_attention_heads": heads,
        "text_dim": draw.integer(18, 30),
        "mlp_width_ratio": draw.choice(2.0, 4.0),
        "num_layers": 2,
        "rope_dim_list": list(_axes(head, 3)),
        "rope_type": draw.choice("rope", "mrope"),
    }


def _joy_image_inputs(draw: Draw, config: Any) -> Kwargs:
    """A picture to go by and the picture to make, of one size."""
    return {
        "hidden_states": draw.normal(BATCH, 2, config.in_channels, 1, 2 * _side(draw), 2 * _side(draw)),
        "timestep": draw.timestep(BATCH),
        "encoder_hidden_states": draw.normal(BATCH, draw.odd(5, 13), config.text_dim),
        "return_dict": False,
    }


def _joy_image_plus_inputs(draw: Draw, config: Any) -> Kwargs:
    """Patches of pictures of several sizes; the sample with fewer pictures is padded."""
    text = draw.odd(7, 13)
    shapes = [[(1, _side(draw), _side(draw)) for _ in range(count)] for count in (2, 3)]
    patches = max(sum(h * w for _, h, w in pictures) for pictures in shapes)
    return {
        "hidden_states": draw.normal(BATCH, patches, config.in_channels, *config.patch_size),
        "timestep": draw.timestep(BATCH),
        "encoder_hidden_states": draw.normal(BATCH, text, config.text_dim),
        "encoder_hidden_states_mask": draw.key_mask(BATCH, text).long(),
        "shape_list": shapes,
        "return_dict": False,
    }


def _krea2_config(draw: Draw) -> Kwargs:
    heads, shared = _grouped(draw)
    text_heads = draw.heads()
    return {
        "in_channels": draw.integer(4, 8),
        "num_layers": 2,
        "attention_head_dim": 8,
        "num_attention_heads": heads,
        "num_key_value_heads": shared,
        "intermediate_size": draw.integer(90, 110),
        "timestep_embed_dim": 32,
        "text_hidden_dim": text_heads * 8,
        "num_text_layers": draw.integer(2, 4),
        "text_num_attention_heads": text_heads,
        "text_num_key_value_heads": text_heads,
        "text_intermediate_size": draw.integer(40, 60),
        "num_layerwise_text_blocks": 1,
        "num_refiner_text_blocks": 1,
        "axes_dims_rope": _axes(8, 3),
    }


def _krea2_inputs(draw: Draw, config: Any) -> Kwargs:
    height, width, text = _side(draw), _side(draw), draw.odd(7, 13)
    return {
        "hidden_states": draw.normal(BATCH, height * width, config.in_channels),
        "encoder_hidden_states": draw.normal(BATCH, text, config.num_text_layers, config.text_hidden_dim),
        "timestep": draw.timestep(BATCH, 1.0),
        "position_ids": torch.cat([_text_ids(text), _image_ids(height, width)]),
        "encoder_attention_mask": draw.key_mask(BATCH, text),
        "return_dict": False,
    }


def _longcat_config(draw: Draw) -> Kwargs:
    return _bria_config(draw) | {"pooled_projection_dim": 20}


def _longcat_inputs(draw: Draw, config: Any) -> Kwargs:
    height, width, text = _side(draw), _side(draw), draw.odd(5, 13)
    return {
        "hidden_states": draw.normal(BATCH, height * width, config.in_channels),
        "encoder_hidden_states": draw.normal(BATCH, text, config.joint_attention_dim),
        "timestep": draw.timestep(BATCH, 1.0),
        "img_ids": _image_ids(height, width, first=1, start=text),
        "txt_ids": _text_ids(text, counting=(1, 2)),
        "return_dict": False,
    }


def _ovis_config(draw: Draw) -> Kwargs:
    config = _bria_config(draw)
    return config | {"out_channels": config["in_channels"]}


def _ovis_inputs(draw: Draw, config: Any) -> Kwargs:
    height, width, text = _side(draw), _side(draw), draw.odd(5, 13)
    return {
        "hidden_states": draw.normal(BATCH, height * width, config.in_channels),
        "encoder_hidden_states": draw.normal(BATCH, text, config.joint_attention_dim),
        "timestep": draw.timestep(BATCH, 1.0),
        "img_ids": _image_ids(height, width),
        "txt_ids": _text_ids(text, counting=(1, 2)),
        "return_dict": False,
    }


def _nucleus_config(draw: Draw) -> Kwargs:
    """One dense block, one with experts."""
    heads, shared = _grouped(draw)
    return {
        "in_channels": draw.choice(4, 8),
        "out_channels": draw.integer(1, 3),
        "num_layers": 2,
        "attention_head_dim": 8,
        "num_attention_heads": heads,
        "num_key_value_heads": shared,
        "joint_attention_dim": draw.integer(18, 30),
        "axes_dims_rope": _axes(8, 3),
        "dense_moe_strategy": "leave_first_block_dense",
        "num_experts": draw.integer(3, 5),
        "moe_intermediate_dim": draw.integer(18, 30),
        "capacity_factors": draw.choice(1.0, 2.0),
        "use_sigmoid": draw.choice(True, False),
    }


def _nucleus_inputs(draw: Draw, config: Any) -> Kwargs:
    height, width, text = _side(draw), _side(draw), draw.odd(7, 13)
    return {
        "hidden_states": draw.normal(BATCH, height * width, config.in_channels),
        "img_shapes": [(1, height, width)] * BATCH,
        "encoder_hidden_states": draw.normal(BATCH, text, config.joint_attention_dim),
        "encoder_hidden_states_mask": draw.key_mask(BATCH, text).long(),
        "timestep": draw.timestep(BATCH, 1.0),
        "return_dict": False,
    }


def _pixart_config(draw: Draw) -> Kwargs:
    """PixArt-alpha, which is told the picture's size, or PixArt-sigma."""
    heads, channels = draw.heads(), draw.integer(2, 4)
    return {
        "num_attention_heads": heads,
        "attention_head_dim": 12,
        "in_channels": channels,
        "out_channels": 2 * channels,
        "num_layers": 2,
        "cross_attention_dim": heads * 12,
        "sample_size": 16,
        "use_additional_conditions": draw.choice(True, False),
        "caption_channels": draw.integer(18, 30),
    }


def _pixart_inputs(draw: Draw, config: Any) -> Kwargs:
    height, width, text = _side(draw), _side(draw), draw.odd(7, 13)
    size = {
        "resolution": torch.tensor([[16.0 * height, 16.0 * width], [512.0, 768.0]]),
        "aspect_ratio": torch.tensor([[height / width], [512 / 768]]),
    }
    return {
        "hidden_states": draw.normal(BATCH, config.in_channels, 2 * height, 2 * width),
        "encoder_hidden_states": draw.normal(BATCH, text, config.caption_channels),
        "encoder_attention_mask": draw.key_mask(BATCH, text).long(),
        "timestep": draw.timestep(BATCH),
        "added_cond_kwargs": size if config.use_additional_conditions else dict.fromkeys(size),
        "return_dict": False,
    }


def _prx_config(draw: Draw) -> Kwargs:
    heads, head = draw.heads(), draw.choice(8, 12)
    return {
        "in_channels": draw.integer(2, 4),
        "context_in_dim": draw.integer(18, 30),
        "hidden_size": heads * head,
        "mlp_ratio": draw.choice(2.0, 3.5),
        "num_heads": heads,
        "depth": 2,
        "axes_dim": list(_axes(head, 2)),
        "bottleneck_size": draw.choice(None, 10),
        "resolution_embeds": draw.choice(True, False),
    }


def _prx_inputs(draw: Draw, config: Any) -> Kwargs:
    text = draw.odd(7, 13)
    return {
        "hidden_states": draw.normal(BATCH, config.in_channels, 2 * _side(draw), 2 * _side(draw)),
        "timestep": draw.timestep(BATCH, 1.0),
        "encoder_hidden_states": draw.normal(BATCH, text, config.context_in_dim),
        "attention_mask": draw.key_mask(BATCH, text),
        "return_dict": False,
    }


def _sana_config(draw: Draw) -> Kwargs:
    """Sana, or Sana-Sprint with its norms across the heads."""
    heads, sprint, channels = draw.heads(), draw.choice(True, False), draw.integer(4, 8)
    return {
        "in_channels": channels,
        "out_channels": channels,
        "num_attention_heads": heads,
        "attention_head_dim": 8,
        "num_layers": 2,
        "num_cross_attention_heads": draw.heads(),
        "cross_attention_head_dim": 12,
        "cross_attention_dim": heads * 8,
        "caption_channels": draw.integer(18, 30),
        "mlp_ratio": draw.choice(2.0, 2.5),
        "sample_size": 8,
        "interpolation_scale": draw.choice(None, 1),
        "guidance_embeds": sprint,
        "qk_norm": "rms_norm_across_heads" if sprint else None,
    }


def _sana_inputs(draw: Draw, config: Any) -> Kwargs:
    text = draw.odd(7, 13)
    return {
        "hidden_states": draw.normal(BATCH, config.in_channels, _side(draw), _side(draw)),
        "encoder_hidden_states": draw.normal(BATCH, text, config.caption_channels),
        "encoder_attention_mask": draw.key_mask(BATCH, text).long(),
        "timestep": draw.timestep(BATCH),
        "guidance": draw.timestep(BATCH, 0.5) if config.guidance_embeds else None,
        "return_dict": False,
    }


SD35_LARGE: Kwargs = {
    "sample_size": 128,
    "in_channels": 16,
    "num_layers": 38,
    "num_attention_heads": 38,
    "attention_head_dim": 64,
    "joint_attention_dim": 4096,
    "caption_projection_dim": 2432,
    "pooled_projection_dim": 2048,
    "pos_embed_max_size": 192,
    "qk_norm": "rms_norm",
}

HIDREAM: Kwargs = {
    "patch_size": 2,
    "in_channels": 16,
    "caption_channels": [4096, 4096],
    "axes_dims_rope": (64, 32, 32),
    "llama_layers": [*range(32), *[31] * 16],
}

HUNYUAN_DIT: Kwargs = {
    "in_channels": 4,
    "patch_size": 2,
    "sample_size": 128,
    "num_layers": 40,
    "hidden_size": 1408,
    "mlp_ratio": 4.3637,
    "use_style_cond_and_image_meta_size": False,
}

COGVIEW4: Kwargs = {"num_layers": 28, "num_attention_heads": 32, "attention_head_dim": 128}
GLM_IMAGE: Kwargs = {"num_attention_heads": 32, "attention_head_dim": 128}
BRIA_FIBO: Kwargs = {"in_channels": 48, "num_layers": 8}
LONGCAT: Kwargs = {"num_layers": 10, "num_single_layers": 20}
JOY_IMAGE: Kwargs = {"hidden_size": 4096, "num_attention_heads": 32, "num_layers": 40}
ERNIE: Kwargs = {
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_layers": 36,
    "ffn_hidden_size": 12288,
    "text_in_dim": 3072,
}

IMAGE_CASES: tuple[ModelCase, ...] = (
    ModelCase("FluxTransformer2DModel", _flux_config, _flux_inputs, {"guidance_embeds": True}),
    ModelCase("Flux2Transformer2DModel", _flux2_config, _flux2_inputs),
    ModelCase("Flux3Transformer2DModel", _flux3_config, _flux3_inputs),
    ModelCase("QwenImageTransformer2DModel", _qwen_config, _qwen_inputs),
    ModelCase("QwenImage21Transformer2DModel", _qwen21_config, _qwen21_inputs),
    ModelCase("SD3Transformer2DModel", _sd3_config, _sd3_inputs, SD35_LARGE),
    ModelCase("ZImageTransformer2DModel", _z_image_config, _z_image_inputs),
    ModelCase("ChromaTransformer2DModel", _chroma_config, _chroma_inputs),
    ModelCase("Lumina2Transformer2DModel", _lumina2_config, _lumina2_inputs),
    ModelCase("HiDreamImageTransformer2DModel", _hidream_config, _hidream_inputs, HIDREAM),
    ModelCase("AuraFlowTransformer2DModel", _auraflow_config, _auraflow_inputs),
    ModelCase("BriaTransformer2DModel", _bria_config, _bria_inputs),
    ModelCase("BriaFiboTransformer2DModel", _bria_fibo_config, _bria_fibo_inputs, BRIA_FIBO),
    ModelCase("BriaFibo2Transformer2DModel", _bria_fibo2_config, _bria_fibo2_inputs),
    ModelCase("CogView3PlusTransformer2DModel", _cogview_config, _cogview_inputs),
    ModelCase("CogView4Transformer2DModel", _cogview_config, _cogview_inputs, COGVIEW4),
    ModelCase("GlmImageTransformer2DModel", _glm_image_config, _glm_image_inputs, GLM_IMAGE),
    ModelCase("ErnieImageTransformer2DModel", _ernie_config, _ernie_inputs, ERNIE),
    ModelCase("HunyuanDiT2DModel", _hunyuan_dit_config, _hunyuan_dit_inputs, HUNYUAN_DIT),
    ModelCase(
        "HunyuanImageTransformer2DModel",
        _hunyuan_image_config,
        _hunyuan_image_inputs,
        {"text_embed_2_dim": 1472},
    ),
    ModelCase("Ideogram4Transformer2DModel", _ideogram4_config, _ideogram4_inputs),
    ModelCase("JoyImageEditTransformer3DModel", _joy_image_config, _joy_image_inputs, JOY_IMAGE),
    ModelCase("JoyImageEditPlusTransformer3DModel", _joy_image_config, _joy_image_plus_inputs, JOY_IMAGE),
    ModelCase("Krea2Transformer2DModel", _krea2_config, _krea2_inputs),
    ModelCase("LongCatImageTransformer2DModel", _longcat_config, _longcat_inputs, LONGCAT),
    ModelCase("NucleusMoEImageTransformer2DModel", _nucleus_config, _nucleus_inputs),
    ModelCase("OvisImageTransformer2DModel", _ovis_config, _ovis_inputs),
    ModelCase("PixArtTransformer2DModel", _pixart_config, _pixart_inputs, {"caption_channels": 4096}),
    ModelCase("PRXTransformer2DModel", _prx_config, _prx_inputs),
    ModelCase("SanaTransformer2DModel", _sana_config, _sana_inputs),
)


# Variants for the context axes


def _fixed(config: Callable[[Draw], Kwargs], **values: Any) -> Callable[[Draw], Kwargs]:
    """A config of which `values` are not drawn."""
    return lambda draw: config(draw) | values


def _three_words(inputs: Callable[[Draw, Any], Kwargs]) -> Callable[[Draw, Any], Kwargs]:
    """A prompt with fewer tokens than four ranks."""

    def shortened(draw: Draw, config: Any) -> Kwargs:
        found = inputs(draw, config)
        found["encoder_hidden_states"] = found["encoder_hidden_states"][:, :3]
        if "txt_ids" in found:
            found["txt_ids"] = found["txt_ids"][..., :3, :]
        for name in found.keys() & {"encoder_hidden_states_mask", "encoder_attention_mask"}:
            found[name] = draw.key_mask(BATCH, 3).long()
        return found

    return shortened


def _unmasked(inputs: Callable[[Draw, Any], Kwargs], name: str) -> Callable[[Draw, Any], Kwargs]:
    return lambda draw, config: inputs(draw, config) | {name: None}


def _flux_controlnet_inputs(draw: Draw, config: Any) -> Kwargs:
    """Residuals of a ControlNet, of which the first holds for all tokens."""
    inputs = _flux_inputs(draw, config)
    tokens, width = inputs["hidden_states"].shape[1], config.num_attention_heads * config.attention_head_dim
    return inputs | {
        "controlnet_block_samples": [draw.normal(BATCH, 1, width)],
        "controlnet_single_block_samples": [draw.normal(BATCH, tokens, width) for _ in range(2)],
    }


def _qwen_controlnet_inputs(draw: Draw, config: Any) -> Kwargs:
    inputs = _qwen_inputs(draw, config)
    tokens, width = inputs["hidden_states"].shape[1], config.num_attention_heads * config.attention_head_dim
    return inputs | {"controlnet_block_samples": [draw.normal(BATCH, tokens, width) for _ in range(2)]}


def _sd3_controlnet_inputs(draw: Draw, config: Any) -> Kwargs:
    inputs = _sd3_inputs(draw, config)
    height, width = (side // 2 for side in inputs["hidden_states"].shape[2:])
    of_picture = (height * width, config.num_attention_heads * config.attention_head_dim)
    return inputs | {"block_controlnet_hidden_states": [draw.normal(BATCH, *of_picture) for _ in range(2)]}


def _z_image_one_size_inputs(draw: Draw, config: Any) -> Kwargs:
    """Samples of one size: the model then pads and masks nothing but what is short of 32 tokens."""
    height, width, text = 2 * draw.odd(5, 7), 2 * draw.odd(5, 7), draw.odd(5, 31)
    return {
        "x": [draw.normal(config.in_channels, 1, height, width) for _ in range(BATCH)],
        "t": draw.timestep(BATCH, 1.0),
        "cap_feats": [draw.normal(text, config.cap_feat_dim) for _ in range(BATCH)],
        "return_dict": False,
    }


def _z_image_omni_inputs(draw: Draw, config: Any) -> Kwargs:
    """Omni: a picture to go by, whose tokens are not noisy, its SigLIP features, and the picture to make."""

    def pictures() -> list[torch.Tensor]:
        return [draw.normal(config.in_channels, 1, 2 * draw.odd(3, 7), 2 * draw.odd(3, 7)) for _ in range(2)]

    return {
        "x": [pictures() for _ in range(BATCH)],
        "t": draw.timestep(BATCH, 1.0),
        "cap_feats": [
            [draw.normal(draw.odd(5, 31), config.cap_feat_dim) for _ in range(2)] for _ in range(BATCH)
        ],
        "siglip_feats": [
            [draw.normal(draw.odd(3, 5), draw.odd(3, 5), config.siglip_feat_dim), None] for _ in range(BATCH)
        ],
        "image_noise_mask": [[0, 1]] * BATCH,
        "return_dict": False,
    }


_QWEN_KINDS: Kwargs = {"zero_cond_t": False, "use_additional_t_cond": False, "use_layer3d_rope": False}
_QWEN = "QwenImageTransformer2DModel"
_SD3 = "SD3Transformer2DModel"
_base = _fixed(_qwen_config, **_QWEN_KINDS)
_edit = _fixed(_qwen_config, **_QWEN_KINDS | {"zero_cond_t": True})
_layered = _fixed(_qwen_config, zero_cond_t=False, use_additional_t_cond=True, use_layer3d_rope=True)
_large = _fixed(_sd3_config, dual_attention_layers=(), qk_norm="rms_norm")
_medium = _fixed(_sd3_config, dual_attention_layers=(0,), qk_norm="rms_norm")

IMAGE_VARIANTS: tuple[ModelCase, ...] = (
    ModelCase("FluxTransformer2DModel", _flux_config, _three_words(_flux_inputs), variant="three words"),
    ModelCase("FluxTransformer2DModel", _flux_config, _flux_controlnet_inputs, variant="ControlNet"),
    ModelCase("Flux2Transformer2DModel", _flux2_config, _three_words(_flux2_inputs), variant="three words"),
    ModelCase(_QWEN, _base, _qwen_inputs, variant="picture"),
    ModelCase(_QWEN, _base, _unmasked(_qwen_inputs, "encoder_hidden_states_mask"), variant="no mask"),
    ModelCase(_QWEN, _base, _three_words(_qwen_inputs), variant="three words"),
    ModelCase(_QWEN, _base, _qwen_controlnet_inputs, variant="ControlNet"),
    ModelCase(_QWEN, _edit, _qwen_inputs, variant="edit"),
    ModelCase(_QWEN, _layered, _qwen_inputs, variant="layered"),
    ModelCase(_SD3, _large, _sd3_inputs, variant="3.5 large"),
    ModelCase(_SD3, _medium, _sd3_inputs, variant="3.5 medium"),
    ModelCase(_SD3, _large, _sd3_controlnet_inputs, variant="ControlNet"),
    ModelCase("ZImageTransformer2DModel", _z_image_config, _z_image_one_size_inputs, variant="one size"),
    ModelCase(
        "ZImageTransformer2DModel",
        _fixed(_z_image_config, siglip_feat_dim=14),
        _z_image_omni_inputs,
        variant="omni",
    ),
    ModelCase(
        "ChromaTransformer2DModel",
        _chroma_config,
        _unmasked(_chroma_inputs, "attention_mask"),
        variant="no mask",
    ),
    ModelCase(
        "Lumina2Transformer2DModel", _lumina2_config, _three_words(_lumina2_inputs), variant="three words"
    ),
)
