"""The video and sound transformers of diffusers at a tiny size, each with one forward's inputs."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from diffusers.models.embeddings import (
    get_1d_rotary_pos_embed,
    get_2d_rotary_pos_embed_lumina,
    get_3d_rotary_pos_embed,
    get_3d_rotary_pos_embed_allegro,
)
from diffusers.models.transformers.transformer_wan_animate_2 import WanAnimate2KVCache

from tests.parity.model_case import Draw, ModelCase

BATCH = 2
Size = tuple[int, int, int]


def grid(draw: Draw) -> Size:
    """Patches along frames, height and width: odd, so that there is an odd number of tokens."""
    return draw.choice(1, 3), draw.odd(3, 5), draw.odd(3, 5)


def video(draw: Draw, channels: int, patch: Size = (1, 1, 1), patches: Size | None = None) -> torch.Tensor:
    """Latents [batch, channels, frames, height, width] of that many patches."""
    sides = (count * size for count, size in zip(patches or grid(draw), patch, strict=True))
    return draw.normal(BATCH, channels, *sides)


def spatial(config: Any) -> Size:
    """The patch of the families that name its two sizes apart."""
    return config.patch_size_t, config.patch_size, config.patch_size


def text(draw: Draw, width: int) -> torch.Tensor:
    return draw.normal(BATCH, draw.odd(7, 13), width)


def mask_of(draw: Draw, tokens: torch.Tensor) -> torch.Tensor:
    """A key mask for [batch, length, width], as a tokenizer gives it."""
    return draw.key_mask(BATCH, tokens.shape[1]).long()


def rope_axes(head_dim: int) -> Size:
    """Even rotary widths for frames, height and width that sum to the head."""
    side = head_dim // 6 * 2
    return head_dim - 2 * side, side, side


# Wan and the models built on it


WAN_TEXT = 512  # the processor takes the last 512 tokens for text, whatever the length
WAN_IMAGE = 257


def wan_config(draw: Draw, kind: str = "t2v") -> dict[str, Any]:
    channels = draw.choice(4, 6)
    config: dict[str, Any] = {
        "num_attention_heads": draw.heads(),
        "attention_head_dim": draw.choice(12, 14),
        "in_channels": channels,
        "out_channels": channels,
        "text_dim": draw.choice(16, 20),
        "freq_dim": 32,
        "ffn_dim": draw.integer(33, 70),
        "num_layers": 2,
        "rope_max_seq_len": 32,
    }
    if kind != "t2v":
        config |= {"in_channels": 2 * channels + 4, "image_dim": draw.choice(8, 12)}
        config |= {"added_kv_proj_dim": config["num_attention_heads"] * config["attention_head_dim"]}
    if kind == "flf2v":
        config |= {"pos_embed_seq_len": 2 * WAN_IMAGE}
    return config


def wan_text(draw: Draw, config: Any) -> dict[str, Any]:
    """Text embeddings and, for a model with an image branch, image embeddings."""
    if config.image_dim is None:
        return {"encoder_hidden_states": text(draw, config.text_dim)}
    images = 2 if config.pos_embed_seq_len else 1  # a first and a last frame, stacked along the batch
    return {
        "encoder_hidden_states": draw.normal(BATCH, WAN_TEXT, config.text_dim),
        "encoder_hidden_states_image": draw.normal(BATCH * images, WAN_IMAGE, config.image_dim),
    }


def wan_inputs(draw: Draw, config: Any) -> dict[str, Any]:
    return {
        "hidden_states": video(draw, config.in_channels, config.patch_size),
        "timestep": draw.timestep(BATCH),
        **wan_text(draw, config),
        "return_dict": False,
    }


def wan_ti2v_inputs(draw: Draw, config: Any) -> dict[str, Any]:
    """Of Wan 2.2's 5B model: a timestep for every token."""
    inputs = wan_inputs(draw, config)
    tokens = inputs["hidden_states"][0, 0].numel() // (config.patch_size[1] * config.patch_size[2])
    return inputs | {"timestep": draw.timestep(BATCH * tokens).view(BATCH, tokens)}


def wan_any_inputs(draw: Draw, config: Any) -> dict[str, Any]:
    if config.image_dim is None and draw.choice(True, False):
        return wan_ti2v_inputs(draw, config)
    return wan_inputs(draw, config)


def wan_vace_config(draw: Draw) -> dict[str, Any]:
    config = wan_config(draw)
    return config | {"num_layers": 3, "vace_layers": (0, 2), "vace_in_channels": draw.choice(8, 10)}


def wan_vace_inputs(draw: Draw, config: Any) -> dict[str, Any]:
    inputs = wan_inputs(draw, config)
    control = draw.normal(BATCH, config.vace_in_channels, *inputs["hidden_states"].shape[2:])
    scale = torch.tensor([1.0, 0.5])
    return inputs | {"control_hidden_states": control, "control_hidden_states_scale": scale}


def wan_animate_config(draw: Draw) -> dict[str, Any]:
    channels = draw.choice(4, 6)
    return wan_config(draw, "i2v") | {
        "in_channels": 2 * channels + 4,
        "latent_channels": channels,
        "out_channels": channels,
        "motion_encoder_channel_sizes": {"4": 8, "8": 8, "16": 8},
        "motion_encoder_size": 16,
        "motion_style_dim": 8,
        "motion_dim": 4,
        "motion_encoder_dim": 12,
        "face_encoder_hidden_dim": 12,
        "face_encoder_num_heads": draw.choice(2, 3),
        "inject_face_latents_blocks": draw.choice(1, 2),
        "motion_encoder_batch_size": 3,
    }


def wan_animate_inputs(draw: Draw, config: Any) -> dict[str, Any]:
    frames = draw.choice(3, 5)
    height, width = draw.odd(3, 5), draw.odd(3, 5)
    latents = video(draw, config.in_channels, config.patch_size, (frames, height, width))
    size = config.motion_encoder_size
    return {
        "hidden_states": latents,
        "timestep": draw.timestep(BATCH),
        **wan_text(draw, config),
        "pose_hidden_states": draw.normal(
            BATCH, config.latent_channels, frames - 1, *latents.shape[3:]
        ),  # the first latent frame is the reference picture
        "face_pixel_values": draw.normal(BATCH, 3, 4 * (frames - 2) + 1, size, size),
        "return_dict": False,
    }


def wan_animate_2_config(draw: Draw) -> dict[str, Any]:
    heads = draw.heads()
    return {
        "text_len": 16,
        "in_dim": 10,
        "dim": heads * draw.choice(12, 14),
        "ffn_dim": draw.integer(33, 70),
        "freq_dim": 32,
        "text_dim": draw.choice(16, 20),
        "out_dim": 4,
        "num_heads": heads,
        "num_layers": 2,
        "use_img_emb": draw.choice(True, False),
    }


def wan_animate_2_inputs(draw: Draw, config: Any) -> dict[str, Any]:
    """The pass over the reference. The passes that read its cache need flex attention, compiled."""
    patches = grid(draw)
    latents = video(draw, config.in_dim, config.patch_size, patches)
    image = {"encoder_hidden_states_image": draw.normal(BATCH, 9, 1280)} if config.use_img_emb else {}
    return {
        "hidden_states": list(latents[:, : config.out_dim]),
        "timestep": draw.timestep(BATCH),
        "encoder_hidden_states": [draw.normal(length, config.text_dim) for length in (9, 13)],
        "condition_latents": list(latents[:, config.out_dim :]),
        "kv_cache": WanAnimate2KVCache(config.num_layers),
        "kv_cache_mode": "extract",
        "seq_len": math.prod(patches),
        **image,
        "offset_grid_sizes": torch.tensor([patches] * BATCH),
        "return_dict": False,
    }


def chronoedit_inputs(draw: Draw, config: Any) -> dict[str, Any]:
    """Two frames are the picture before and after: the rotary table then skips the frames between."""
    inputs = wan_inputs(draw, config)
    if draw.choice(True, False):
        _, height, width = grid(draw)
        inputs["hidden_states"] = video(draw, config.in_channels, config.patch_size, (2, height, width))
    return inputs


def skyreels_config(draw: Draw) -> dict[str, Any]:
    config = wan_config(draw, draw.choice("t2v", "i2v"))
    return config | {"inject_sample_info": draw.choice(True, False), "num_frame_per_block": draw.choice(1, 3)}


def skyreels_inputs(draw: Draw, config: Any) -> dict[str, Any]:
    """By diffusion forcing, with a timestep for every frame, or as Wan."""
    _, height, width = grid(draw)
    frames = 3 * config.num_frame_per_block
    forced = not config.inject_sample_info and draw.choice(True, False)  # with both, only a batch of one runs
    return wan_inputs(draw, config) | {
        "hidden_states": video(draw, config.in_channels, config.patch_size, (frames, height, width)),
        "timestep": draw.timestep(BATCH * frames).view(BATCH, frames) if forced else draw.timestep(BATCH),
        "enable_diffusion_forcing": forced,
        "fps": [0, 1] if config.inject_sample_info else None,
    }


def helios_config(draw: Draw) -> dict[str, Any]:
    config = wan_config(draw)
    del config["rope_max_seq_len"]
    return config | {
        "rope_dim": rope_axes(config["attention_head_dim"]),
        "guidance_cross_attn": draw.choice(True, False),
        "zero_history_timestep": draw.choice(True, False),
        "is_amplify_history": draw.choice(True, False),
        "history_scale_mode": draw.choice("per_head", "scalar"),
    }


def helios_inputs(draw: Draw, config: Any) -> dict[str, Any]:
    frames, height, width = grid(draw)
    counts = {"long": 4, "mid": 2, "short": 1, "": frames}
    places = torch.arange(sum(counts.values())).expand(BATCH, -1).split(list(counts.values()), dim=1)
    inputs: dict[str, Any] = {}
    for (term, count), indices in zip(counts.items(), places, strict=True):
        latents = video(draw, config.in_channels, config.patch_size, (count, height, width))
        inputs[f"latents_history_{term}" if term else "hidden_states"] = latents
        inputs[f"indices_latents_history_{term}" if term else "indices_hidden_states"] = indices
    return {
        **inputs,
        "timestep": draw.timestep(BATCH),
        "encoder_hidden_states": text(draw, config.text_dim),
        "return_dict": False,
    }


def anyflow_config(draw: Draw) -> dict[str, Any]:
    return wan_config(draw) | {"deltatime_type": draw.choice("r", "t-r")}


def anyflow_inputs(draw: Draw, config: Any) -> dict[str, Any]:
    frames, height, width = grid(draw)
    latents = video(draw, config.in_channels, config.patch_size, (frames, height, width))
    return {
        "hidden_states": latents.transpose(1, 2),
        "timestep": draw.timestep(BATCH * frames).view(BATCH, frames),
        "r_timestep": draw.timestep(BATCH * frames).view(BATCH, frames),
        "encoder_hidden_states": text(draw, config.text_dim),
        "return_dict": False,
    }


def anyflow_far_inputs(draw: Draw, config: Any) -> dict[str, Any]:
    """The causal pass over all chunks, the first of which are compressed."""
    chunks = [1, 2, 1, 1]
    frames = sum(chunks)
    side = math.lcm(config.patch_size[1], config.compressed_patch_size[1])
    latents = draw.normal(
        BATCH, frames, config.in_channels, side * draw.choice(1, 3), side * draw.choice(1, 3)
    )
    return {
        "hidden_states": latents,
        "timestep": draw.timestep(BATCH * frames).view(BATCH, frames),
        "r_timestep": draw.timestep(BATCH * frames).view(BATCH, frames),
        "encoder_hidden_states": text(draw, config.text_dim),
        "chunk_partition": chunks,
        "return_dict": False,
    }


# LTX


def ltx_config(draw: Draw) -> dict[str, Any]:
    heads, head_dim = draw.heads(), draw.choice(8, 10, 16)
    return {
        "in_channels": 6,
        "out_channels": 6,
        "num_attention_heads": heads,
        "attention_head_dim": head_dim,
        "cross_attention_dim": heads * head_dim,
        "num_layers": 2,
        "caption_channels": draw.choice(12, 20),
    }


def ltx_inputs(draw: Draw, config: Any, every_token: bool | None = None) -> dict[str, Any]:
    """The image-conditioned pipeline gives every token a timestep of its own."""
    frames, height, width = grid(draw)
    tokens = frames * height * width
    words = text(draw, config.caption_channels)
    if every_token is None:
        every_token = draw.choice(True, False)
    times = tokens if every_token else 1
    return {
        "hidden_states": draw.normal(BATCH, tokens, config.in_channels),
        "encoder_hidden_states": words,
        "timestep": draw.timestep(BATCH * times).view(BATCH, times),
        "encoder_attention_mask": mask_of(draw, words),
        "num_frames": frames,
        "height": height,
        "width": width,
        "rope_interpolation_scale": (8 / 25, 32, 32),
        "return_dict": False,
    }


def ltx2_config(draw: Draw, newer: bool | None = None) -> dict[str, Any]:
    """LTX-2, or the newer LTX-2.3."""
    heads, audio_head_dim = draw.heads(), draw.choice(4, 6)
    head_dim = 2 * audio_head_dim
    if newer is None:
        newer = draw.choice(True, False)
    rope = draw.choice("split", "interleaved")
    audio_heads = heads if rope == "split" else draw.heads()
    return {
        "in_channels": 6,
        "out_channels": 6,
        "num_attention_heads": heads,
        "attention_head_dim": head_dim,
        "cross_attention_dim": heads * head_dim,
        "audio_in_channels": 8,
        "audio_out_channels": 8,
        "audio_num_attention_heads": audio_heads,
        "audio_attention_head_dim": audio_head_dim,
        "audio_cross_attention_dim": audio_heads * audio_head_dim,
        "num_layers": 2,
        "caption_channels": draw.choice(12, 20),
        "rope_type": rope,
        "gated_attn": newer,
        "audio_gated_attn": newer,
        "cross_attn_mod": newer,
        "audio_cross_attn_mod": newer,
        "use_prompt_embeddings": not newer,
        "perturbed_attn": newer,
    }


def ltx2_inputs(draw: Draw, config: Any) -> dict[str, Any]:
    frames, height, width = grid(draw)
    sounds = draw.odd(5, 11)
    shared = config.use_prompt_embeddings
    words = text(draw, config.caption_channels if shared else config.cross_attention_dim)
    audio_width = config.caption_channels if shared else config.audio_cross_attention_dim
    mask = mask_of(draw, words)
    timestep = draw.timestep(BATCH)
    return {
        "hidden_states": draw.normal(BATCH, frames * height * width, config.in_channels),
        "audio_hidden_states": draw.normal(BATCH, sounds, config.audio_in_channels),
        "encoder_hidden_states": words,
        "audio_encoder_hidden_states": draw.normal(BATCH, words.shape[1], audio_width),
        "timestep": timestep,
        "sigma": timestep,
        "encoder_attention_mask": mask,
        "audio_encoder_attention_mask": mask,
        "num_frames": frames,
        "height": height,
        "width": width,
        "audio_num_frames": sounds,
        "use_cross_timestep": config.gated_attn,
        "return_dict": False,
    }


# Hunyuan


def hunyuan_config(draw: Draw) -> dict[str, Any]:
    head_dim = draw.choice(8, 12)
    return {
        "num_attention_heads": draw.heads(),
        "attention_head_dim": head_dim,
        "num_layers": 1,
        "num_refiner_layers": 1,
        "mlp_ratio": draw.choice(2.0, 3.0),
        "text_embed_dim": draw.choice(12, 20),
        "rope_axes_dim": rope_axes(head_dim),
    }


def hunyuan_video_config(draw: Draw, condition: str | None) -> dict[str, Any]:
    return {
        **hunyuan_config(draw),
        "in_channels": 9 if condition == "latent_concat" else 4,
        "out_channels": 4,
        "num_single_layers": 1,
        "patch_size": draw.choice(1, 2),
        "guidance_embeds": condition != "latent_concat",
        "pooled_projection_dim": 8,
        "image_condition_type": condition,
    }


def hunyuan_video_inputs(draw: Draw, config: Any) -> dict[str, Any]:
    _, height, width = grid(draw)
    words = text(draw, config.text_embed_dim)
    guidance = {"guidance": draw.timestep(BATCH, 6000.0)} if config.guidance_embeds else {}
    return {
        "hidden_states": video(draw, config.in_channels, spatial(config), (3, height, width)),
        "timestep": draw.timestep(BATCH),
        "encoder_hidden_states": words,
        "encoder_attention_mask": mask_of(draw, words),
        "pooled_projections": draw.normal(BATCH, config.pooled_projection_dim),
        **guidance,
        "return_dict": False,
    }


def hunyuan_video15_config(draw: Draw) -> dict[str, Any]:
    return {
        **hunyuan_config(draw),
        "in_channels": 9,
        "out_channels": 4,
        "text_embed_2_dim": 8,
        "image_embed_dim": 8,
        "use_meanflow": draw.choice(True, False),
    }


def hunyuan_texts(draw: Draw, config: Any) -> dict[str, Any]:
    """The embeddings of the language model and, where the model reads them, of the glyph encoder."""
    words = text(draw, config.text_embed_dim)
    inputs = {"encoder_hidden_states": words, "encoder_attention_mask": mask_of(draw, words)}
    if config.text_embed_2_dim:
        glyphs = text(draw, config.text_embed_2_dim)
        inputs |= {"encoder_hidden_states_2": glyphs, "encoder_attention_mask_2": mask_of(draw, glyphs)}
    return inputs


def hunyuan_video15_inputs(draw: Draw, config: Any, image_to_video: bool | None = None) -> dict[str, Any]:
    image = draw.normal(BATCH, 5, config.image_embed_dim)
    if image_to_video is None:
        image_to_video = draw.choice(False, True)
    return {
        "hidden_states": video(draw, config.in_channels, spatial(config)),
        "timestep": draw.timestep(BATCH),
        **hunyuan_texts(draw, config),
        **({"timestep_r": draw.timestep(BATCH)} if config.use_meanflow else {}),
        "image_embeds": image * image_to_video,  # all zero for text to video
        "return_dict": False,
    }


def hunyuan_image_config(draw: Draw) -> dict[str, Any]:
    config = hunyuan_config(draw) | {"num_single_layers": 1, "guidance_embeds": draw.choice(True, False)}
    head_dim = config["attention_head_dim"]
    if draw.choice(True, False):  # the refiner: a frame axis, one text encoder
        return config | {"in_channels": 8, "out_channels": 4, "patch_size": (1, 1, 1)}
    return config | {
        "in_channels": 4,
        "out_channels": 4,
        "patch_size": draw.choice((1, 1), (2, 2)),
        "rope_axes_dim": (head_dim // 2, head_dim // 2),
        "text_embed_2_dim": draw.choice(8, None),
        "use_meanflow": draw.choice(True, False),
    }


def hunyuan_image_inputs(draw: Draw, config: Any) -> dict[str, Any]:
    sides = (patch * draw.odd(3, 5) for patch in config.patch_size[-2:])
    frames = (1,) * (len(config.patch_size) - 2)
    return {
        "hidden_states": draw.normal(BATCH, config.in_channels, *frames, *sides),
        "timestep": draw.timestep(BATCH),
        **hunyuan_texts(draw, config),
        **({"timestep_r": draw.timestep(BATCH)} if config.use_meanflow else {}),
        **({"guidance": draw.timestep(BATCH, 6000.0)} if config.guidance_embeds else {}),
        "return_dict": False,
    }


def framepack_config(draw: Draw) -> dict[str, Any]:
    return {
        **hunyuan_video_config(draw, None),
        "patch_size": 2,
        "has_image_proj": True,
        "image_proj_dim": 8,
        "has_clean_x_embedder": True,
    }


def framepack_inputs(draw: Draw, config: Any) -> dict[str, Any]:
    inputs = hunyuan_video_inputs(draw, config)
    frames, height, width = inputs["hidden_states"].shape[2:]
    counts = {"latents_clean": 2, "latents_history_2x": 2, "latents_history_4x": 4}
    places = torch.arange(sum(counts.values()) + frames).split([*counts.values(), frames])
    for (term, count), indices in zip(counts.items(), places, strict=False):
        inputs[term] = draw.normal(BATCH, config.in_channels, count, height, width)
        inputs[f"indices_{term}"] = indices
    return inputs | {
        "indices_latents": places[-1],
        "image_embeds": draw.normal(BATCH, 5, config.image_proj_dim),
    }


# Cosmos


def cosmos_config(draw: Draw) -> dict[str, Any]:
    heads, head_dim = draw.heads(), draw.choice(12, 14)
    kind = draw.choice("text to world", "video to world", "2.5")
    config = {
        "in_channels": 5 if kind == "video to world" else 4,
        "out_channels": 4,
        "num_attention_heads": heads,
        "attention_head_dim": head_dim,
        "num_layers": 2,
        "mlp_ratio": draw.choice(2.0, 3.0),
        "text_embed_dim": draw.choice(12, 20),
        "adaln_lora_dim": 8,
        "max_size": (8, 32, 32),
        "extra_pos_embed_type": draw.choice("learnable", None),
        "concat_padding_mask": draw.choice(True, False),
    }
    if kind != "2.5":
        return config
    return config | {
        "extra_pos_embed_type": None,
        "use_crossattn_projection": True,
        "crossattn_proj_in_channels": 24,
        "encoder_hidden_states_channels": config["text_embed_dim"],
        "img_context_dim_in": 10,
        "img_context_dim_out": heads * head_dim,
    }


def cosmos_inputs(draw: Draw, config: Any) -> dict[str, Any]:
    latents = video(draw, config.out_channels, config.patch_size)
    frames, height, width = latents.shape[2:]
    conditioned = config.in_channels > config.out_channels
    image = config.img_context_dim_in is not None
    words = text(
        draw, config.crossattn_proj_in_channels if config.use_crossattn_projection else config.text_embed_dim
    )
    mask = draw.key_mask(BATCH, words.shape[1])
    return {
        "hidden_states": latents,
        "timestep": draw.timestep(BATCH * frames).view(BATCH, 1, frames, 1, 1)
        if conditioned
        else draw.timestep(BATCH),
        "encoder_hidden_states": (words, draw.normal(BATCH, 7, config.img_context_dim_in))
        if image
        else words,
        **({} if image else {"attention_mask": mask}),
        **({"condition_mask": draw.normal(BATCH, 1, frames, height, width)} if conditioned else {}),
        "fps": draw.choice(None, 30),
        "padding_mask": draw.normal(1, 1, height, width),
        "return_dict": False,
    }


def cosmos3_config(draw: Draw) -> dict[str, Any]:
    kv_heads, head_dim = draw.choice(4, 5, 6), draw.choice(12, 16)
    side = head_dim // 6
    kind = draw.choice("silu", "relu2")
    return {
        "head_dim": head_dim,
        "hidden_size": draw.choice(40, 56),
        "intermediate_size": draw.integer(33, 70),
        "latent_channel": 4,
        "patch_latent_dim": 16,
        "num_attention_heads": kv_heads * draw.choice(1, 2),
        "num_hidden_layers": 2,
        "num_key_value_heads": kv_heads,
        "rope_axes_dim": (head_dim // 2 - 2 * side, side, side),
        "vocab_size": 32,
        "hidden_act": kind,
        "qk_norm_for_text": kind == "silu",
        "use_und_k_norm_for_gen": kind == "relu2",
        "sound_gen": draw.choice(True, False),
        "sound_dim": 6,
        "action_gen": draw.choice(True, False),
        "action_dim": 5,
        "num_embodiment_domains": 3,
    }


def cosmos3_inputs(draw: Draw, config: Any) -> dict[str, Any]:
    """One packed sequence: text, then the tokens of each stream that is generated, its first frame given."""
    words = draw.odd(5, 9)
    frames, height, width = patches = (3, *grid(draw)[1:])
    side = config.latent_patch_size
    streams = {"vision": patches}
    tokens = {"vision": draw.normal(1, config.latent_channel, frames, height * side, width * side)}
    if config.sound_gen:
        streams["sound"] = (draw.odd(5, 9), 1, 1)
        tokens["sound"] = draw.normal(config.sound_dim, streams["sound"][0])
    if config.action_gen:
        streams["action"] = (draw.odd(3, 5), 1, 1)
        tokens["action"] = draw.normal(streams["action"][0], config.action_dim)
    inputs: dict[str, Any] = {"action_domain_ids": [torch.tensor(1)]} if config.action_gen else {}
    positions = [torch.arange(words).expand(3, -1)]
    end = words
    for name, shape in streams.items():
        places = torch.arange(end, end + math.prod(shape))
        frame = math.prod(shape[1:])
        positions.append(end + torch.cartesian_prod(*(torch.arange(size) for size in shape)).T)
        end += len(places)
        inputs |= {
            f"{name}_tokens": [tokens[name]],
            f"{name}_token_shapes": [shape],
            f"{name}_sequence_indexes": places,
            f"{name}_mse_loss_indexes": places[frame:],
            f"{name}_timesteps": draw.timestep(1).expand(len(places) - frame),
            f"{name}_noisy_frame_indexes": [torch.arange(1, shape[0])],
        }
    return inputs | {
        "input_ids": torch.arange(words) * 7 % config.vocab_size,
        "text_indexes": torch.arange(words),
        "position_ids": torch.cat(positions, dim=1),
        "und_len": words,
        "sequence_length": end,
        "return_dict": False,
    }


# CogVideoX, Allegro, Latte, Mochi, EasyAnimate


def cogvideox_config(draw: Draw) -> dict[str, Any]:
    kind = draw.choice("2b", "5b", "5b-i2v", "1.5", "1.5-i2v")
    newer = kind.startswith("1.5")
    return {
        "num_attention_heads": draw.heads(),
        "attention_head_dim": 16,
        "in_channels": 8 if kind.endswith("i2v") else 4,
        "out_channels": 4,
        "time_embed_dim": 8,
        "text_embed_dim": draw.choice(12, 20),
        "num_layers": draw.choice(1, 2),
        "sample_width": 2 * draw.odd(3, 5),
        "sample_height": 2 * draw.odd(3, 5),
        "sample_frames": 9,
        "patch_size_t": 2 if newer else None,
        "patch_bias": not newer,
        "max_text_seq_length": draw.odd(7, 13),
        "use_rotary_positional_embeddings": kind != "2b",
        "use_learned_positional_embeddings": kind == "5b-i2v",
        "ofs_embed_dim": 8 if kind == "1.5-i2v" else None,
    }


def cogvideox_inputs(draw: Draw, config: Any) -> dict[str, Any]:
    size, height, width = config.patch_size, config.sample_height, config.sample_width
    sides = height // size, width // size
    rotary = {}
    if config.use_rotary_positional_embeddings:
        tables = get_3d_rotary_pos_embed(config.attention_head_dim, ((0, 0), sides), sides, 3)
        rotary = {"image_rotary_emb": tables}
    return {
        "hidden_states": draw.normal(
            BATCH, 3 * (config.get("patch_size_t") or 1), config.in_channels, height, width
        ),
        "encoder_hidden_states": draw.normal(BATCH, config.max_text_seq_length, config.text_embed_dim),
        "timestep": draw.timestep(BATCH),
        **({"ofs": torch.tensor([2.0])} if config.get("ofs_embed_dim") else {}),
        **rotary,
        "return_dict": False,
    }


def allegro_config(draw: Draw) -> dict[str, Any]:
    heads, head_dim = draw.heads(), draw.choice(12, 18)
    return {
        "num_attention_heads": heads,
        "attention_head_dim": head_dim,
        "num_layers": 2,
        "cross_attention_dim": heads * head_dim,
        "sample_height": 10,
        "sample_width": 10,
        "sample_frames": 4,
        "caption_channels": draw.choice(12, 20),
    }


def allegro_inputs(draw: Draw, config: Any) -> dict[str, Any]:
    patches = grid(draw)
    scales = config.interpolation_scale_t, config.interpolation_scale_h, config.interpolation_scale_w
    *freqs, grid_t, grid_h, grid_w = get_3d_rotary_pos_embed_allegro(
        config.attention_head_dim,
        ((0, 0), patches[1:]),
        patches[1:],
        patches[0],
        scales,
        device=torch.device("cpu"),
    )
    positions = torch.cartesian_prod(*(axis.long() for axis in (grid_t, grid_h, grid_w))).T[:, None]
    words = text(draw, config.caption_channels)
    return {
        "hidden_states": video(draw, config.in_channels, spatial(config), patches),
        "encoder_hidden_states": words,
        "encoder_attention_mask": mask_of(draw, words),
        "timestep": draw.timestep(BATCH),
        "image_rotary_emb": (tuple(freqs), tuple(positions.contiguous())),
        "return_dict": False,
    }


LATTE = {
    "in_channels": 4,
    "out_channels": 8,
    "patch_size": 2,
    "attention_bias": True,
    "activation_fn": "gelu-approximate",
    "num_embeds_ada_norm": 1000,
    "norm_type": "ada_norm_single",
    "norm_elementwise_affine": False,
    "norm_eps": 1e-6,
}


def latte_config(draw: Draw) -> dict[str, Any]:
    heads, head_dim = draw.heads(), draw.choice(8, 12)
    return LATTE | {
        "num_attention_heads": heads,
        "attention_head_dim": head_dim,
        "num_layers": 2,
        "cross_attention_dim": heads * head_dim,
        "sample_size": 8,
        "caption_channels": draw.choice(12, 20),
        "video_length": 3,
    }


def latte_inputs(draw: Draw, config: Any) -> dict[str, Any]:
    _, height, width = grid(draw)
    size = config.patch_size
    return {
        "hidden_states": draw.normal(
            BATCH, config.in_channels, config.video_length, height * size, width * size
        ),
        "timestep": draw.timestep(BATCH),
        "encoder_hidden_states": text(draw, config.caption_channels),
        "return_dict": False,
    }


def mochi_config(draw: Draw) -> dict[str, Any]:
    return {
        "num_attention_heads": draw.heads(),
        "attention_head_dim": draw.choice(8, 12),
        "num_layers": 2,  # the last one leaves the text out
        "pooled_projection_dim": 8,
        "in_channels": 4,
        "text_embed_dim": 16,
        "time_embed_dim": 8,
    }


def mochi_inputs(draw: Draw, config: Any) -> dict[str, Any]:
    words = text(draw, config.text_embed_dim)
    return {
        "hidden_states": video(draw, config.in_channels, (1, config.patch_size, config.patch_size)),
        "encoder_hidden_states": words,
        "timestep": draw.timestep(BATCH),
        "encoder_attention_mask": draw.key_mask(BATCH, words.shape[1]),
        "return_dict": False,
    }


def easyanimate_config(draw: Draw) -> dict[str, Any]:
    width = draw.choice(12, 20)
    return {
        "num_attention_heads": draw.heads(),
        "attention_head_dim": 16,
        "in_channels": draw.choice(4, 9),  # with the inpainting latents and their mask
        "out_channels": 4,
        "patch_size": 2,
        "num_layers": 2,
        "mmdit_layers": draw.choice(1, 2),
        "time_embed_dim": 8,
        "text_embed_dim": width,
        "text_embed_dim_t5": draw.choice(width, None),
        "add_norm_text_encoder": draw.choice(True, False),
        "after_norm": draw.choice(True, False),
    }


def easyanimate_inputs(draw: Draw, config: Any) -> dict[str, Any]:
    latents = video(draw, config.in_channels, (1, config.patch_size, config.patch_size))
    inpaint = config.in_channels > config.out_channels
    return {
        "hidden_states": latents[:, : config.out_channels],
        "timestep": draw.timestep(BATCH),
        "encoder_hidden_states": text(draw, config.text_embed_dim),
        "encoder_hidden_states_t5": text(draw, config.text_embed_dim_t5)
        if config.text_embed_dim_t5
        else None,
        "inpaint_latents": latents[:, config.out_channels :] if inpaint else None,
        "return_dict": False,
    }


# MiniMax-H3, Motif, Sana, Kandinsky


def minimax_h3_config(draw: Draw) -> dict[str, Any]:
    rotary = draw.choice(1, 2)
    return {
        "num_attention_heads": draw.heads(),
        "attention_head_dim": 6 * rotary + draw.choice(0, 4),
        "hidden_size": draw.choice(40, 52),
        "num_layers": 2,
        "num_refiner_layers": 1,
        "ffn_dim": draw.integer(33, 70),
        "in_channels": 4,
        "audio_in_channels": 6,
        "text_dim": draw.choice(12, 20),
        "freq_dim": 16,
        "time_embed_hidden_dim": 24,
        "time_embed_dim": 16,
        "rope_freq_dim": rotary,
    }


def minimax_h3_inputs(draw: Draw, config: Any) -> dict[str, Any]:
    """Text, sound and picture tokens in one sequence; sound and picture at noise levels of their own."""
    patches, sounds = grid(draw), draw.odd(5, 9)
    words = text(draw, config.text_dim)
    counts = words.shape[1], sounds, math.prod(patches)
    at_text, at_audio, at_video = torch.arange(sum(counts)).split(counts)
    positions = torch.arange(sum(counts)).float()[:, None].repeat(1, 3)
    positions[at_video, 1:] = torch.cartesian_prod(*(torch.arange(size) for size in patches))[:, 1:].float()
    kinds = torch.tensor((1, 2, 0)).repeat_interleave(torch.tensor(counts))
    return {
        "hidden_states": draw.normal(BATCH, counts[2], config.in_channels * math.prod(config.patch_size)),
        "audio_hidden_states": draw.normal(BATCH, sounds, config.audio_in_channels),
        "encoder_hidden_states": words,
        "timestep": draw.timestep(2, 1.0),
        "timestep_indices": (kinds == 2).long(),
        "token_tags": kinds,
        "position_ids": positions,
        "video_indices": at_video,
        "audio_indices": at_audio,
        "text_indices": at_text,
        "return_dict": False,
    }


def motif_config(draw: Draw) -> dict[str, Any]:
    head_dim = draw.choice(8, 12)
    return {
        "in_channels": 9,
        "out_channels": 4,
        "num_attention_heads": draw.heads(),
        "attention_head_dim": head_dim,
        "num_layers": 1,
        "num_single_layers": 2,
        "num_decoder_layers": draw.choice(0, 1),
        "mlp_ratio": draw.choice(2.0, 3.0),
        "patch_size": draw.choice(1, 2),
        "text_embed_dim": draw.choice(12, 20),
        "image_embed_dim": draw.choice(8, None),
        "rope_axes_dim": rope_axes(head_dim),
        "enable_text_cross_attention_dual": draw.choice(True, False),
        "enable_text_cross_attention_single": draw.choice(True, False),
    }


def motif_inputs(draw: Draw, config: Any) -> dict[str, Any]:
    words = text(draw, config.text_embed_dim)
    return {
        "hidden_states": video(draw, config.in_channels, spatial(config)),
        "timestep": draw.timestep(BATCH),
        "encoder_hidden_states": words,
        "encoder_attention_mask": mask_of(draw, words),
        "image_embeds": draw.normal(BATCH, 5, config.image_embed_dim) if config.image_embed_dim else None,
        "return_dict": False,
    }


def sana_video_config(draw: Draw) -> dict[str, Any]:
    heads, head_dim = draw.heads(), draw.choice(12, 14)
    return {
        "in_channels": 4,
        "out_channels": 4,
        "num_attention_heads": heads,
        "attention_head_dim": head_dim,
        "num_layers": 2,
        "num_cross_attention_heads": draw.heads(),
        "cross_attention_head_dim": draw.choice(8, 12),
        "cross_attention_dim": heads * head_dim,
        "caption_channels": draw.choice(12, 20),
        "mlp_ratio": draw.choice(2.0, 2.5),
        "guidance_embeds": draw.choice(True, False),
        "rope_max_seq_len": 32,
    }


def sana_video_inputs(draw: Draw, config: Any) -> dict[str, Any]:
    words = text(draw, config.caption_channels)
    return {
        "hidden_states": video(draw, config.in_channels, config.patch_size),
        "encoder_hidden_states": words,
        "encoder_attention_mask": mask_of(draw, words),
        "timestep": draw.timestep(BATCH),
        **({"guidance": draw.timestep(BATCH, 1.0)} if config.guidance_embeds else {}),
        "return_dict": False,
    }


def kandinsky5_config(draw: Draw) -> dict[str, Any]:
    axes = rope_axes(draw.choice(8, 12))
    return {
        "in_visual_dim": 4,
        "in_text_dim": draw.choice(12, 20),
        "in_text_dim2": 8,
        "time_dim": 16,
        "out_visual_dim": 4,
        "model_dim": draw.heads() * sum(axes),
        "ff_dim": draw.integer(33, 70),
        "num_text_blocks": 1,
        "num_visual_blocks": 2,
        "axes_dims": axes,
        "visual_cond": draw.choice(True, False),
    }


def kandinsky_latents(draw: Draw, config: Any, patches: Size) -> torch.Tensor:
    """[batch, frames, height, width, channels]"""
    channels = 2 * config.in_visual_dim + 1 if config.get("visual_cond", True) else config.in_visual_dim
    return video(draw, channels, config.patch_size, patches).movedim(1, -1).contiguous()


def kandinsky5_inputs(draw: Draw, config: Any) -> dict[str, Any]:
    patches = grid(draw)
    words = text(draw, config.in_text_dim)
    return {
        "hidden_states": kandinsky_latents(draw, config, patches),
        "encoder_hidden_states": words,
        "timestep": draw.timestep(BATCH),
        "pooled_projections": draw.normal(BATCH, config.in_text_dim2),
        "visual_rope_pos": [torch.arange(size) for size in patches],
        "text_rope_pos": torch.arange(words.shape[1]),
        "scale_factor": (1.0, 2.0, 2.0),
        "return_dict": False,
    }


def kandinsky6_config(draw: Draw) -> dict[str, Any]:
    config = kandinsky5_config(draw)
    head_dim = sum(config["axes_dims"])
    released = draw.choice(True, False)
    return config | {
        "in_audio_dim": 6,
        "out_audio_dim": 6,
        "model_dim_a": draw.heads() * head_dim,
        "ff_dim_a": draw.integer(33, 70),
        "ca_rope": released,
        "cross_gates": released,
        "fix_modulation": released,
        "visual_token_type_num_embeddings": draw.choice(0, 2),
    }


def kandinsky6_inputs(draw: Draw, config: Any) -> dict[str, Any]:
    patches = grid(draw)
    words = text(draw, config.in_text_dim)
    kinds = torch.arange(BATCH * patches[0]).view(BATCH, -1) % 2
    return {
        "hidden_states": kandinsky_latents(draw, config, patches),
        "encoder_hidden_states": words,
        "pooled_projections": draw.normal(BATCH, config.in_text_dim2),
        "timestep": draw.timestep(BATCH),
        "audio_hidden_states": draw.normal(BATCH, draw.odd(5, 9), config.in_audio_dim),
        "encoder_attention_mask": draw.key_mask(BATCH, words.shape[1]),
        "visual_token_type_ids": kinds if config.visual_token_type_num_embeddings else None,
        "return_dict": False,
    }


def kandinsky6_sr_config(draw: Draw) -> dict[str, Any]:
    axes = rope_axes(draw.choice(8, 12))
    return {
        "in_visual_dim": 4,
        "out_visual_dim": 8,
        "time_dim": 16,
        "model_dim": draw.heads() * sum(axes),
        "ff_dim": draw.integer(33, 70),
        "num_visual_blocks": 2,
        "axes_dims": axes,
        "nabla_window": (1, 1, 1),
    }


def kandinsky6_sr_inputs(draw: Draw, config: Any) -> dict[str, Any]:
    """Whole blocks of eight by eight tokens, as its sparse attention takes them."""
    return {
        "hidden_states": kandinsky_latents(draw, config, (3, 8, 8)),
        "timestep": draw.timestep(BATCH),
        "return_dict": False,
    }


# Sound


def ace_step_config(draw: Draw) -> dict[str, Any]:
    kv_heads = draw.choice(4, 5, 6)
    return {
        "hidden_size": draw.choice(40, 52),
        "intermediate_size": draw.integer(33, 70),
        "num_hidden_layers": 2,  # one that sees a window, one that sees all
        "num_attention_heads": kv_heads * draw.choice(1, 2),
        "num_key_value_heads": kv_heads,
        "head_dim": 8,
        "in_channels": 18,
        "audio_acoustic_hidden_dim": 6,
        "sliding_window": 3,
        "encoder_hidden_size": draw.choice(12, 20),
    }


def ace_step_inputs(draw: Draw, config: Any) -> dict[str, Any]:
    length = config.patch_size * draw.odd(7, 13)
    width = config.audio_acoustic_hidden_dim
    return {
        "hidden_states": draw.normal(BATCH, length, width),
        "timestep": draw.timestep(BATCH, 1.0),
        "timestep_r": draw.timestep(BATCH, 1.0),
        "encoder_hidden_states": text(draw, config.encoder_hidden_size),
        "context_latents": draw.normal(BATCH, length, config.in_channels - width),
        "return_dict": False,
    }


def longcat_audio_config(draw: Draw) -> dict[str, Any]:
    heads = draw.heads()
    return {
        "dit_dim": heads * draw.choice(8, 12),
        "dit_depth": 2,
        "dit_heads": heads,
        "dit_text_dim": draw.choice(12, 20),
        "latent_dim": 6,
        "text_conv": draw.choice(True, False),
        "adaln_type": draw.choice("global", "local"),
        "adaln_use_text_cond": draw.choice(True, False),
        "ff_mult": draw.choice(2.0, 3.0),
    }


def longcat_audio_inputs(draw: Draw, config: Any) -> dict[str, Any]:
    length = draw.odd(9, 15)
    words = text(draw, config.dit_text_dim)
    return {
        "hidden_states": draw.normal(BATCH, length, config.latent_dim),
        "encoder_hidden_states": words,
        "encoder_attention_mask": draw.key_mask(BATCH, words.shape[1]),
        "timestep": draw.timestep(BATCH, 1.0),
        "attention_mask": draw.key_mask(BATCH, length),
        "latent_cond": draw.normal(BATCH, length, config.latent_dim),
        "return_dict": False,
    }


def stable_audio_config(draw: Draw) -> dict[str, Any]:
    kv_heads, head_dim = draw.choice(4, 5), 8
    return {
        "in_channels": 6,
        "out_channels": 6,
        "num_layers": 2,
        "attention_head_dim": head_dim,
        "num_attention_heads": 2 * kv_heads,
        "num_key_value_attention_heads": kv_heads,
        "cross_attention_dim": kv_heads * head_dim,
        "time_proj_dim": 16,
        "global_states_input_dim": 12,
        "cross_attention_input_dim": draw.choice(12, 20),
    }


def stable_audio_inputs(draw: Draw, config: Any) -> dict[str, Any]:
    length = 2 * draw.integer(4, 6)  # the token of the global condition makes it odd
    rotary = get_1d_rotary_pos_embed(
        config.attention_head_dim // 2, length + 1, use_real=True, repeat_interleave_real=False
    )
    return {
        "hidden_states": draw.normal(BATCH, config.in_channels, length),
        "timestep": draw.timestep(BATCH, 1.0),
        "encoder_hidden_states": text(draw, config.cross_attention_input_dim),
        "global_hidden_states": draw.normal(BATCH, 1, config.global_states_input_dim),
        "rotary_embedding": rotary,
        "return_dict": False,
    }


def stable_audio3_config(draw: Draw) -> dict[str, Any]:
    heads = draw.heads()
    return {
        "io_channels": 6,
        "embed_dim": heads * draw.choice(8, 12),
        "depth": 2,
        "num_heads": heads,
        "cond_token_dim": draw.choice(12, 20),
        "global_cond_dim": 8,
        "local_add_cond_dim": 7,
        "timestep_features_dim": 16,
        "ff_mult": 2.0,
        "num_memory_tokens": draw.choice(0, 4),
        "use_differential_attention": draw.choice(True, False),
    }


def stable_audio3_inputs(draw: Draw, config: Any) -> dict[str, Any]:
    length = draw.odd(9, 15)
    words = text(draw, config.cond_token_dim)
    return {
        "hidden_states": draw.normal(BATCH, config.io_channels, length),
        "timestep": draw.timestep(BATCH, 1.0),
        "encoder_hidden_states": words,
        "global_hidden_states": draw.normal(BATCH, config.global_cond_dim),
        "encoder_attention_mask": mask_of(draw, words),
        "local_add_cond": draw.normal(BATCH, config.local_add_cond_dim, length),
        "return_dict": False,
    }


def minimax_music3_config(draw: Draw) -> dict[str, Any]:
    return {
        "in_channels": 6,
        "condition_dim": draw.choice(12, 20),
        "num_layers": 2,
        "num_attention_heads": draw.heads(),
        "attention_head_dim": draw.choice(8, 12),
        "ff_inner_dim": draw.integer(33, 70),
        "rotary_dim": 4,
        "fourier_embedding_dim": 16,
    }


def minimax_music3_inputs(draw: Draw, config: Any) -> dict[str, Any]:
    length = 2 * draw.integer(4, 6)  # the token of the timestep makes it odd
    return {
        "hidden_states": draw.normal(BATCH, config.in_channels, length),
        "timestep": draw.timestep(BATCH, 1.0),
        "encoder_hidden_states": draw.normal(BATCH, length, config.condition_dim),
        "return_dict": False,
    }


def rvq_decoder_config(draw: Draw) -> dict[str, Any]:
    heads = draw.heads()
    return {
        "hidden_size": heads * draw.choice(8, 12),
        "num_layers": 2,
        "num_attention_heads": heads,
        "intermediate_size": draw.integer(33, 70),
        "audio_vocab_size": 16,
        "num_codebooks": 3,
    }


def rvq_decoder_inputs(draw: Draw, config: Any) -> dict[str, Any]:
    return {"inputs_embeds": draw.normal(BATCH, draw.odd(5, 9), config.hidden_size)}


# Older models


def consisid_config(draw: Draw) -> dict[str, Any]:
    heads = draw.choice(6, 9)  # the face is projected to two thirds of the width
    return {
        "num_attention_heads": heads,
        "attention_head_dim": 16,
        "in_channels": 4,
        "out_channels": 4,
        "time_embed_dim": 8,
        "text_embed_dim": draw.choice(12, 20),
        "num_layers": 2,
        "sample_width": 6,
        "sample_height": 10,
        "sample_frames": 9,
        "max_text_seq_length": draw.odd(7, 13),
        "use_rotary_positional_embeddings": draw.choice(True, False),
        "is_train_face": True,
        "cross_attn_interval": draw.choice(1, 2),
        "cross_attn_dim_head": 8,
        "cross_attn_num_heads": draw.heads(),
        "LFE_id_dim": 8,
        "LFE_vit_dim": 12,
        "LFE_depth": 2,
        "LFE_dim_head": 8,
        "LFE_num_heads": draw.heads(),
        "LFE_num_id_token": 3,
        "LFE_num_querie": 4,
        "LFE_output_dim": heads * 16 // 3 * 2,
        "LFE_num_scale": 2,
    }


def consisid_inputs(draw: Draw, config: Any) -> dict[str, Any]:
    return cogvideox_inputs(draw, config) | {
        "id_cond": draw.normal(BATCH, config.LFE_id_dim),
        "id_vit_hidden": [draw.normal(BATCH, 5, config.LFE_vit_dim) for _ in range(config.LFE_num_scale)],
    }


def omnigen_config(draw: Draw) -> dict[str, Any]:
    heads, head_dim = draw.heads(), 8  # key heads of their own are in its config, but its attention cannot
    factors = [1.0 + step / 8 for step in range(head_dim // 2)]
    return {
        "hidden_size": heads * head_dim,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "intermediate_size": draw.integer(33, 70),
        "num_layers": 2,
        "pad_token_id": 0,
        "vocab_size": 64,
        "rope_scaling": {"long_factor": factors, "short_factor": factors},
        "pos_embed_max_size": 8,
        "time_step_dim": 16,
    }


def omnigen_inputs(draw: Draw, config: Any) -> dict[str, Any]:
    """Two prompts, the first with a picture in it, padded on the left and followed by the tokens of the result."""
    height, width, size = draw.odd(3, 5), draw.odd(3, 5), config.patch_size
    sides = height * size, width * size
    words = 12
    total = words + 1 + height * width
    mask = torch.ones(BATCH, total, total).tril()
    mask[:, words:, words:] = 1
    mask[1, :, :3] = 0
    return {
        "hidden_states": draw.normal(BATCH, config.in_channels, *sides),
        "timestep": draw.timestep(BATCH, 1.0),
        "input_ids": torch.arange(BATCH * words).view(BATCH, words) % config.vocab_size,
        "input_img_latents": [draw.normal(1, config.in_channels, 3 * size, 3 * size)],
        "input_image_sizes": {0: [[2, 11]]},
        "attention_mask": mask,
        "position_ids": torch.arange(total).expand(BATCH, -1),
        "return_dict": False,
    }


def lumina_next_config(draw: Draw) -> dict[str, Any]:
    kv_heads = draw.choice(4, 5)
    heads = kv_heads * draw.choice(1, 2)
    return {
        "sample_size": 10,
        "hidden_size": heads * draw.choice(8, 12),
        "num_layers": 2,
        "num_attention_heads": heads,
        "num_kv_heads": kv_heads,
        "multiple_of": 8,
        "cross_attention_dim": draw.choice(12, 20),
    }


def lumina_next_inputs(draw: Draw, config: Any) -> dict[str, Any]:
    words = text(draw, config.cross_attention_dim)
    sides = (config.patch_size * draw.odd(3, 5) for _ in range(2))
    head_dim = config.hidden_size // config.num_attention_heads
    return {
        "hidden_states": draw.normal(BATCH, config.in_channels, *sides),
        "timestep": draw.timestep(BATCH, 1.0),
        "encoder_hidden_states": words,
        "encoder_mask": mask_of(draw, words),
        "image_rotary_emb": get_2d_rotary_pos_embed_lumina(head_dim, 16, 16),
        "cross_attention_kwargs": {},
        "return_dict": False,
    }


def dit_config(draw: Draw) -> dict[str, Any]:
    return {
        "in_channels": 4,
        "out_channels": 8,
        "num_attention_heads": draw.heads(),
        "attention_head_dim": draw.choice(8, 12),
        "num_layers": 2,
        "num_embeds_ada_norm": 8,
        "sample_size": 6,
    }


def dit_inputs(draw: Draw, config: Any) -> dict[str, Any]:
    side = config.patch_size * draw.odd(3, 5)
    return {
        "hidden_states": draw.normal(BATCH, config.in_channels, side, side),
        "timestep": draw.timestep(BATCH),
        "class_labels": torch.tensor([draw.integer(0, 3), draw.integer(4, 7)]),
        "return_dict": False,
    }


VIDEO_CASES: tuple[ModelCase, ...] = (
    ModelCase(
        "WanTransformer3DModel",
        lambda draw: wan_config(draw, draw.choice("t2v", "i2v", "flf2v")),
        wan_any_inputs,
    ),
    ModelCase("WanVACETransformer3DModel", wan_vace_config, wan_vace_inputs),
    ModelCase(
        "WanAnimateTransformer3DModel", wan_animate_config, wan_animate_inputs, {"added_kv_proj_dim": 5120}
    ),
    ModelCase("WanAnimate2Transformer3DModel", wan_animate_2_config, wan_animate_2_inputs),
    ModelCase(
        "ChronoEditTransformer3DModel",
        lambda draw: wan_config(draw, "i2v"),
        chronoedit_inputs,
        {"in_channels": 36, "image_dim": 1280, "added_kv_proj_dim": 5120},
    ),
    ModelCase(
        "SkyReelsV2Transformer3DModel",
        skyreels_config,
        skyreels_inputs,
        {"num_attention_heads": 40, "ffn_dim": 13824, "num_layers": 40},
    ),
    ModelCase("HeliosTransformer3DModel", helios_config, helios_inputs),
    ModelCase("AnyFlowTransformer3DModel", anyflow_config, anyflow_inputs),
    ModelCase("AnyFlowFARTransformer3DModel", anyflow_config, anyflow_far_inputs),
    ModelCase("LTXVideoTransformer3DModel", ltx_config, ltx_inputs),
    ModelCase("LTX2VideoTransformer3DModel", ltx2_config, ltx2_inputs, {"rope_type": "split"}),
    ModelCase(
        "HunyuanVideoTransformer3DModel",
        lambda draw: hunyuan_video_config(draw, draw.choice(None, "latent_concat", "token_replace")),
        hunyuan_video_inputs,
    ),
    ModelCase("HunyuanVideo15Transformer3DModel", hunyuan_video15_config, hunyuan_video15_inputs),
    ModelCase(
        "HunyuanVideoFramepackTransformer3DModel",
        framepack_config,
        framepack_inputs,
        {"has_image_proj": True, "has_clean_x_embedder": True},
    ),
    ModelCase(
        "HunyuanImageTransformer2DModel",
        hunyuan_image_config,
        hunyuan_image_inputs,
        {"text_embed_2_dim": 1472},
    ),
    ModelCase("CosmosTransformer3DModel", cosmos_config, cosmos_inputs),
    ModelCase("Cosmos3OmniTransformer", cosmos3_config, cosmos3_inputs),
    ModelCase(
        "CogVideoXTransformer3DModel",
        cogvideox_config,
        cogvideox_inputs,
        {"num_attention_heads": 48, "num_layers": 42, "use_rotary_positional_embeddings": True},
    ),
    ModelCase("AllegroTransformer3DModel", allegro_config, allegro_inputs),
    ModelCase(
        "LatteTransformer3DModel",
        latte_config,
        latte_inputs,
        LATTE
        | {
            "attention_head_dim": 72,
            "num_layers": 28,
            "cross_attention_dim": 1152,
            "caption_channels": 4096,
        },
    ),
    ModelCase("MochiTransformer3DModel", mochi_config, mochi_inputs),
    ModelCase(
        "EasyAnimateTransformer3DModel",
        easyanimate_config,
        easyanimate_inputs,
        {"in_channels": 16, "out_channels": 16, "patch_size": 2, "add_norm_text_encoder": True},
    ),
    ModelCase("MiniMaxH3Transformer3DModel", minimax_h3_config, minimax_h3_inputs),
    ModelCase("MotifVideoTransformer3DModel", motif_config, motif_inputs),
    ModelCase("SanaVideoTransformer3DModel", sana_video_config, sana_video_inputs),
    ModelCase(
        "Kandinsky5Transformer3DModel",
        kandinsky5_config,
        kandinsky5_inputs,
        {
            "in_visual_dim": 16,
            "out_visual_dim": 16,
            "time_dim": 1024,
            "model_dim": 4096,
            "ff_dim": 16384,
            "num_text_blocks": 4,
            "num_visual_blocks": 60,
            "axes_dims": (32, 48, 48),
            "visual_cond": True,
        },
        rounds=True,
    ),
    ModelCase(
        "Kandinsky6Transformer3DModel",
        kandinsky6_config,
        kandinsky6_inputs,
        {"text_token_padding": True, "ca_rope": True, "cross_gates": True, "fix_modulation": True},
    ),
    ModelCase("Kandinsky6SRTransformer3DModel", kandinsky6_sr_config, kandinsky6_sr_inputs),
    ModelCase("AceStepTransformer1DModel", ace_step_config, ace_step_inputs),
    ModelCase("LongCatAudioDiTTransformer", longcat_audio_config, longcat_audio_inputs),
    ModelCase("StableAudioDiTModel", stable_audio_config, stable_audio_inputs),
    ModelCase("StableAudio3DiTModel", stable_audio3_config, stable_audio3_inputs),
    ModelCase("MiniMaxMusic3Transformer1DModel", minimax_music3_config, minimax_music3_inputs),
    ModelCase("MiniMaxMusic3RVQDepthDecoder", rvq_decoder_config, rvq_decoder_inputs),
    ModelCase(
        "ConsisIDTransformer3DModel",
        consisid_config,
        consisid_inputs,
        {
            "num_attention_heads": 48,
            "in_channels": 32,
            "num_layers": 42,
            "use_rotary_positional_embeddings": True,
            "is_train_face": True,
        },
    ),
    ModelCase(
        "OmniGenTransformer2DModel",
        omnigen_config,
        omnigen_inputs,
        {"rope_scaling": {"long_factor": [1.0] * 48, "short_factor": [1.0] * 48}},
    ),
    ModelCase(
        "LuminaNextDiT2DModel",
        lumina_next_config,
        lumina_next_inputs,
        {"num_layers": 24, "num_kv_heads": 8},
    ),
    ModelCase("DiTTransformer2DModel", dit_config, dit_inputs, {"out_channels": 8}),
)


# Variants for the context axes

_WAN = "WanTransformer3DModel"
_LTX = "LTXVideoTransformer3DModel"
_LTX2 = "LTX2VideoTransformer3DModel"
_HUNYUAN = "HunyuanVideoTransformer3DModel"
_HUNYUAN15 = "HunyuanVideo15Transformer3DModel"


def _hunyuan_video(condition: str | None) -> Callable[[Draw], dict[str, Any]]:
    return lambda draw: hunyuan_video_config(draw, condition)


VIDEO_VARIANTS: tuple[ModelCase, ...] = (
    ModelCase(_WAN, wan_config, wan_inputs, variant="T2V"),
    ModelCase(_WAN, lambda draw: wan_config(draw, "i2v"), wan_inputs, variant="I2V"),
    ModelCase(_WAN, lambda draw: wan_config(draw, "flf2v"), wan_inputs, variant="first and last frame"),
    ModelCase(_WAN, wan_config, wan_ti2v_inputs, variant="timestep for every token"),
    ModelCase(_LTX, ltx_config, partial(ltx_inputs, every_token=False), variant="one timestep"),
    ModelCase(_LTX, ltx_config, partial(ltx_inputs, every_token=True), variant="timestep for every token"),
    ModelCase(_LTX2, partial(ltx2_config, newer=False), ltx2_inputs, variant="2.0"),
    ModelCase(_LTX2, partial(ltx2_config, newer=True), ltx2_inputs, variant="2.3"),
    ModelCase(_HUNYUAN, _hunyuan_video(None), hunyuan_video_inputs, variant="text"),
    ModelCase(_HUNYUAN, _hunyuan_video("latent_concat"), hunyuan_video_inputs, variant="latent_concat"),
    ModelCase(_HUNYUAN, _hunyuan_video("token_replace"), hunyuan_video_inputs, variant="token_replace"),
    ModelCase(
        _HUNYUAN15,
        hunyuan_video15_config,
        partial(hunyuan_video15_inputs, image_to_video=False),
        variant="text",
    ),
    ModelCase(
        _HUNYUAN15,
        hunyuan_video15_config,
        partial(hunyuan_video15_inputs, image_to_video=True),
        variant="picture",
    ),
)
