"""Writes diffusers transformers in the layouts of their authors: video families and the newer ones.

The tables go from diffusers' names to the authors', the direction that diffusers' converters do not go, so that a
converter is checked against something that is not itself. `original_layout_cases` has the models.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import diffusers
import torch

Weights = dict[str, torch.Tensor]

# diffusers' module (or parameter) -> the authors' module (or parameter). `N` is a number and `*` the rest of a key.
# `#1` is the second of parts joined along dim 0; `~` at the end swaps a weight's halves.
Names = Mapping[str, str]
_NUMBER = re.compile(r"(?<![A-Z])N(?![A-Za-z])")  # not that of "adaLN"


@dataclass(frozen=True)
class Case:
    """One variant: a diffusers class, its constructor's arguments, and its authors' names."""

    name: str
    model_class: str
    config: Mapping[str, Any]
    names: Names
    prefix: str = "model.diffusion_model."
    finish: Callable[[Weights], Weights] | None = None  # what renaming and joining cannot do
    extra: Weights = field(default_factory=dict)  # weights under the prefix that the model does without
    beside: Weights = field(default_factory=dict)  # weights outside the prefix, of other parts

    def model(self) -> torch.nn.Module:
        """With random weights."""
        model: torch.nn.Module = getattr(diffusers, self.model_class)(**self.config)
        generator = torch.Generator().manual_seed(0)
        for tensor in model.state_dict().values():
            tensor.copy_(torch.randn(tensor.shape, generator=generator))
        return model

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Of the weights under their authors' names; nothing is allocated, whatever the model's size."""
        idle = patch.object(torch.nn.Linear, "reset_parameters", lambda _: None)  # half of the time on "meta"
        with torch.device("meta"), idle:
            model: torch.nn.Module = getattr(diffusers, self.model_class)(**self.config)
        return {key: tuple(tensor.shape) for key, tensor in self.original(model).items()}

    def original(self, model: torch.nn.Module) -> Weights:
        """The model's weights under its authors' names, without prefix."""
        weights = in_original_layout(model.state_dict(), self.names)
        return {**(self.finish(weights) if self.finish else weights), **self.extra}


def in_original_layout(weights: Mapping[str, torch.Tensor], names: Names) -> Weights:
    """`weights` renamed, joined and swapped by `names`; what the table does not name keeps its name."""
    rules = [(_pattern(old), new) for old, new in names.items()]
    parts: dict[str, dict[int, torch.Tensor]] = {}
    for key, tensor in weights.items():
        new = next((_renamed(match, target) for rule, target in rules if (match := rule.fullmatch(key))), key)
        if new.endswith("~"):
            new, tensor = new[:-1], torch.cat(tensor.chunk(2)[::-1])
        new, _, place = new.partition("#")
        parts.setdefault(new, {})[int(place or 0)] = tensor
    return {
        key: torch.cat([found[place] for place in sorted(found)]) if len(found) > 1 else found[0]
        for key, found in parts.items()
    }


def _pattern(old: str) -> re.Pattern[str]:
    """Groups: the numbers, the rest (of `*`), and the parameter's own name if `old` names a module."""
    escaped = _NUMBER.sub(r"(?P<number>\\d+)", re.escape(old)).replace(r"\*", r"(?P<rest>.+)")
    return re.compile(escaped + r"(?P<kind>\.(weight|bias))?")


def _renamed(match: re.Match[str], target: str) -> str:
    groups = match.groupdict()
    name, mark = re.fullmatch(r"([^#~]*)([#~].*)?", target).groups()  # type: ignore[union-attr]
    name = _NUMBER.sub(groups.get("number") or "N", name).replace("*", groups.get("rest") or "*")
    return name + (groups["kind"] or "") + (mark or "")


# ---- Wan

_WAN_ATTENTION = {"to_q": "q", "to_k": "k", "to_v": "v", "to_out.0": "o"}
_WAN_IMAGE = {"add_k_proj": "k_img", "add_v_proj": "v_img", "norm_added_k": "norm_k_img"}


def _wan_blocks(stem: str) -> Names:
    block = f"{stem}.N"
    return {
        f"{block}.scale_shift_table": f"{block}.modulation",
        f"{block}.norm2": f"{block}.norm3",
        f"{block}.ffn.net.0.proj": f"{block}.ffn.0",
        f"{block}.ffn.net.2": f"{block}.ffn.2",
        f"{block}.proj_in": f"{block}.before_proj",
        f"{block}.proj_out": f"{block}.after_proj",
        **{f"{block}.attn1.{old}": f"{block}.self_attn.{new}" for old, new in _WAN_ATTENTION.items()},
        **{f"{block}.attn2.{old}": f"{block}.cross_attn.{new}" for old, new in _WAN_ATTENTION.items()},
        **{f"{block}.attn2.{old}": f"{block}.cross_attn.{new}" for old, new in _WAN_IMAGE.items()},
        f"{block}.attn1.*": f"{block}.self_attn.*",
        f"{block}.attn2.*": f"{block}.cross_attn.*",
    }


WAN: Names = {
    "condition_embedder.time_embedder.linear_1": "time_embedding.0",
    "condition_embedder.time_embedder.linear_2": "time_embedding.2",
    "condition_embedder.time_proj": "time_projection.1",
    "condition_embedder.text_embedder.linear_1": "text_embedding.0",
    "condition_embedder.text_embedder.linear_2": "text_embedding.2",
    "condition_embedder.image_embedder.pos_embed": "img_emb.emb_pos",
    "condition_embedder.image_embedder.norm1": "img_emb.proj.0",
    "condition_embedder.image_embedder.ff.net.0.proj": "img_emb.proj.1",
    "condition_embedder.image_embedder.ff.net.2": "img_emb.proj.3",
    "condition_embedder.image_embedder.norm2": "img_emb.proj.4",
    "scale_shift_table": "head.modulation",
    "proj_out": "head.head",
    "fps_projection.net.0.proj": "fps_projection.0",
    "fps_projection.net.2": "fps_projection.2",
    **_wan_blocks("blocks"),
    **_wan_blocks("vace_blocks"),
}
WAN_ANIMATE: Names = {
    **WAN,
    "motion_encoder.motion_synthesis_weight": "motion_encoder.dec.direction.weight",
    "motion_encoder.motion_network.*": "motion_encoder.enc.fc.*",
    "motion_encoder.conv_in.weight": "motion_encoder.enc.net_app.convs.0.0.weight",
    "motion_encoder.conv_in.act_fn.bias": "motion_encoder.enc.net_app.convs.0.1.bias",
    "motion_encoder.conv_out.weight": "motion_encoder.enc.net_app.convs.8.weight",
    **{
        f"motion_encoder.res_blocks.{block}.{old}": f"motion_encoder.enc.net_app.convs.{block + 1}.{new}"
        for block in range(7)
        for old, new in {
            "conv1.weight": "conv1.0.weight",
            "conv1.act_fn.bias": "conv1.1.bias",
            "conv2.weight": "conv2.1.weight",
            "conv2.act_fn.bias": "conv2.2.bias",
            "conv_skip.weight": "skip.1.weight",
        }.items()
    },
    "face_encoder.conv1_local": "face_encoder.conv1_local.conv",
    "face_encoder.conv2": "face_encoder.conv2.conv",
    "face_encoder.conv3": "face_encoder.conv3.conv",
    "face_adapter.N.to_q": "face_adapter.fuser_blocks.N.linear1_q",
    "face_adapter.N.to_k": "face_adapter.fuser_blocks.N.linear1_kv#0",
    "face_adapter.N.to_v": "face_adapter.fuser_blocks.N.linear1_kv#1",
    "face_adapter.N.to_out": "face_adapter.fuser_blocks.N.linear2",
    "face_adapter.N.norm_q": "face_adapter.fuser_blocks.N.q_norm",
    "face_adapter.N.norm_k": "face_adapter.fuser_blocks.N.k_norm",
}
WAN_ANIMATE_2: Names = {
    **{f"blocks.N.self_attn.{old}": f"blocks.N.block.self_attn.{new}" for old, new in _WAN_ATTENTION.items()},
    **{
        f"blocks.N.cross_attn.{old}": f"blocks.N.block.cross_attn.{new}"
        for old, new in {**_WAN_ATTENTION, **_WAN_IMAGE}.items()
    },
    "blocks.N.*": "blocks.N.block.*",
}


def with_image_shaped_biases(weights: Weights) -> Weights:
    """The motion encoder's convolutions keep their biases as [1, C, 1, 1]."""
    return {
        key: tensor.reshape(1, -1, 1, 1) if ".net_app.convs." in key and key.endswith(".bias") else tensor
        for key, tensor in weights.items()
    }


# ---- FLUX.2

FLUX2: Names = {
    "x_embedder": "img_in",
    "context_embedder": "txt_in",
    "time_guidance_embed.timestep_embedder.linear_1": "time_in.in_layer",
    "time_guidance_embed.timestep_embedder.linear_2": "time_in.out_layer",
    "time_guidance_embed.guidance_embedder.linear_1": "guidance_in.in_layer",
    "time_guidance_embed.guidance_embedder.linear_2": "guidance_in.out_layer",
    "double_stream_modulation_img.linear": "double_stream_modulation_img.lin",
    "double_stream_modulation_txt.linear": "double_stream_modulation_txt.lin",
    "single_stream_modulation.linear": "single_stream_modulation.lin",
    "norm_out.linear": "final_layer.adaLN_modulation.1~",
    "proj_out": "final_layer.linear",
    **{
        f"transformer_blocks.N.{old}": f"double_blocks.N.{new}"
        for old, new in {
            "attn.to_q": "img_attn.qkv#0",
            "attn.to_k": "img_attn.qkv#1",
            "attn.to_v": "img_attn.qkv#2",
            "attn.add_q_proj": "txt_attn.qkv#0",
            "attn.add_k_proj": "txt_attn.qkv#1",
            "attn.add_v_proj": "txt_attn.qkv#2",
            "attn.norm_q.weight": "img_attn.norm.query_norm.scale",
            "attn.norm_k.weight": "img_attn.norm.key_norm.scale",
            "attn.norm_added_q.weight": "txt_attn.norm.query_norm.scale",
            "attn.norm_added_k.weight": "txt_attn.norm.key_norm.scale",
            "attn.to_out.0": "img_attn.proj",
            "attn.to_add_out": "txt_attn.proj",
            "ff.linear_in": "img_mlp.0",
            "ff.linear_out": "img_mlp.2",
            "ff_context.linear_in": "txt_mlp.0",
            "ff_context.linear_out": "txt_mlp.2",
        }.items()
    },
    "single_transformer_blocks.N.attn.to_qkv_mlp_proj": "single_blocks.N.linear1",
    "single_transformer_blocks.N.attn.to_out": "single_blocks.N.linear2",
    "single_transformer_blocks.N.attn.norm_q.weight": "single_blocks.N.norm.query_norm.scale",
    "single_transformer_blocks.N.attn.norm_k.weight": "single_blocks.N.norm.key_norm.scale",
}

# ---- LTX

LTX: Names = {
    "proj_in": "patchify_proj",
    "time_embed.*": "adaln_single.*",
    "transformer_blocks.N.attn1.norm_q": "transformer_blocks.N.attn1.q_norm",
    "transformer_blocks.N.attn1.norm_k": "transformer_blocks.N.attn1.k_norm",
    "transformer_blocks.N.attn2.norm_q": "transformer_blocks.N.attn2.q_norm",
    "transformer_blocks.N.attn2.norm_k": "transformer_blocks.N.attn2.k_norm",
}
LTX2: Names = {
    **LTX,
    "audio_proj_in": "audio_patchify_proj",
    "audio_time_embed.*": "audio_adaln_single.*",
    "prompt_adaln.*": "prompt_adaln_single.*",
    "audio_prompt_adaln.*": "audio_prompt_adaln_single.*",
    "av_cross_attn_video_scale_shift.*": "av_ca_video_scale_shift_adaln_single.*",
    "av_cross_attn_audio_scale_shift.*": "av_ca_audio_scale_shift_adaln_single.*",
    "av_cross_attn_video_a2v_gate.*": "av_ca_a2v_gate_adaln_single.*",
    "av_cross_attn_audio_v2a_gate.*": "av_ca_v2a_gate_adaln_single.*",
    "transformer_blocks.N.video_a2v_cross_attn_scale_shift_table": (
        "transformer_blocks.N.scale_shift_table_a2v_ca_video"
    ),
    "transformer_blocks.N.audio_a2v_cross_attn_scale_shift_table": (
        "transformer_blocks.N.scale_shift_table_a2v_ca_audio"
    ),
    **{
        f"transformer_blocks.N.{attention}.norm_{side}": f"transformer_blocks.N.{attention}.{side}_norm"
        for attention in ("audio_attn1", "audio_attn2", "audio_to_video_attn", "video_to_audio_attn")
        for side in "qk"
    },
}

# ---- HunyuanVideo


def _hunyuan(refiner: Names, double: Names, single: Names, others: Names) -> Names:
    blocks = "context_embedder.token_refiner.refiner_blocks.N."
    return {
        "x_embedder.*": "img_in.*",
        "context_embedder.proj_in": "txt_in.input_embedder",
        **{blocks + old: f"txt_in.individual_token_refiner.blocks.N.{new}" for old, new in refiner.items()},
        blocks + "norm_out.linear": "txt_in.individual_token_refiner.blocks.N.adaLN_modulation.1",
        blocks + "*": "txt_in.individual_token_refiner.blocks.N.*",
        **{f"transformer_blocks.N.{old}": f"double_blocks.N.{new}" for old, new in double.items()},
        **{f"single_transformer_blocks.N.{old}": f"single_blocks.N.{new}" for old, new in single.items()},
        "single_transformer_blocks.N.attn.to_q": "single_blocks.N.linear1#0",
        "single_transformer_blocks.N.attn.to_k": "single_blocks.N.linear1#1",
        "single_transformer_blocks.N.attn.to_v": "single_blocks.N.linear1#2",
        "single_transformer_blocks.N.proj_mlp": "single_blocks.N.linear1#3",
        "single_transformer_blocks.N.proj_out": "single_blocks.N.linear2",
        "time_text_embed.text_embedder.linear_1": "vector_in.in_layer",
        "time_text_embed.text_embedder.linear_2": "vector_in.out_layer",
        "norm_out.linear": "final_layer.adaLN_modulation.1~",
        "proj_out": "final_layer.linear",
        **others,
    }


_REFINER = {"attn.to_q": "qkv#0", "attn.to_k": "qkv#1", "attn.to_v": "qkv#2", "attn.to_out.0": "proj"}
_DOUBLE = {
    "attn.to_q": "img_attn{}qkv#0",
    "attn.to_k": "img_attn{}qkv#1",
    "attn.to_v": "img_attn{}qkv#2",
    "attn.to_out.0": "img_attn{}proj",
    "attn.add_q_proj": "txt_attn{}qkv#0",
    "attn.add_k_proj": "txt_attn{}qkv#1",
    "attn.add_v_proj": "txt_attn{}qkv#2",
    "attn.to_add_out": "txt_attn{}proj",
}
HUNYUAN_VIDEO = _hunyuan(
    {
        **{old: f"self_attn_{new}" for old, new in _REFINER.items()},
        "ff.net.0.proj": "mlp.fc1",
        "ff.net.2": "mlp.fc2",
    },
    {
        **{old: new.format("_") for old, new in _DOUBLE.items()},
        "attn.norm_q": "img_attn_q_norm",
        "attn.norm_k": "img_attn_k_norm",
        "attn.norm_added_q": "txt_attn_q_norm",
        "attn.norm_added_k": "txt_attn_k_norm",
        "norm1.linear": "img_mod.linear",
        "norm1_context.linear": "txt_mod.linear",
        "ff.net.0.proj": "img_mlp.fc1",
        "ff.net.2": "img_mlp.fc2",
        "ff_context.net.0.proj": "txt_mlp.fc1",
        "ff_context.net.2": "txt_mlp.fc2",
    },
    {"attn.norm_q": "q_norm", "attn.norm_k": "k_norm", "norm.linear": "modulation.linear"},
    {
        "context_embedder.time_text_embed.timestep_embedder.linear_1": "txt_in.t_embedder.mlp.0",
        "context_embedder.time_text_embed.timestep_embedder.linear_2": "txt_in.t_embedder.mlp.2",
        "context_embedder.time_text_embed.text_embedder.*": "txt_in.c_embedder.*",
        "time_text_embed.timestep_embedder.linear_1": "time_in.mlp.0",
        "time_text_embed.timestep_embedder.linear_2": "time_in.mlp.2",
        "time_text_embed.guidance_embedder.linear_1": "guidance_in.mlp.0",
        "time_text_embed.guidance_embedder.linear_2": "guidance_in.mlp.2",
    },
)
HUNYUAN_VIDEO_COMFY = _hunyuan(
    {
        **{old: f"self_attn.{new}" for old, new in _REFINER.items()},
        "ff.net.0.proj": "mlp.0",
        "ff.net.2": "mlp.2",
    },
    {
        **{old: new.format(".") for old, new in _DOUBLE.items()},
        "attn.norm_q.weight": "img_attn.norm.query_norm.scale",
        "attn.norm_k.weight": "img_attn.norm.key_norm.scale",
        "attn.norm_added_q.weight": "txt_attn.norm.query_norm.scale",
        "attn.norm_added_k.weight": "txt_attn.norm.key_norm.scale",
        "norm1.linear": "img_mod.lin",
        "norm1_context.linear": "txt_mod.lin",
        "ff.net.0.proj": "img_mlp.0",
        "ff.net.2": "img_mlp.2",
        "ff_context.net.0.proj": "txt_mlp.0",
        "ff_context.net.2": "txt_mlp.2",
    },
    {
        "attn.norm_q.weight": "norm.query_norm.scale",
        "attn.norm_k.weight": "norm.key_norm.scale",
        "norm.linear": "modulation.lin",
    },
    {
        "context_embedder.time_text_embed.timestep_embedder.linear_1": "txt_in.t_embedder.in_layer",
        "context_embedder.time_text_embed.timestep_embedder.linear_2": "txt_in.t_embedder.out_layer",
        "context_embedder.time_text_embed.text_embedder.linear_1": "txt_in.c_embedder.in_layer",
        "context_embedder.time_text_embed.text_embedder.linear_2": "txt_in.c_embedder.out_layer",
        "time_text_embed.timestep_embedder.linear_1": "time_in.in_layer",
        "time_text_embed.timestep_embedder.linear_2": "time_in.out_layer",
        "time_text_embed.guidance_embedder.linear_1": "guidance_in.in_layer",
        "time_text_embed.guidance_embedder.linear_2": "guidance_in.out_layer",
    },
)


# ---- FLUX.3


def _flux3_block(diffusers_block: str, block: str) -> Names:
    return {
        f"{diffusers_block}.N.attn.to_q": f"{block}.N.q_proj",
        f"{diffusers_block}.N.attn.to_k": f"{block}.N.k_proj",
        f"{diffusers_block}.N.attn.to_v": f"{block}.N.v_proj",
        f"{diffusers_block}.N.attn.to_out.0": f"{block}.N.attn_out",
        f"{diffusers_block}.N.attn.norm_q.weight": f"{block}.N.norm.query_norm.scale",
        f"{diffusers_block}.N.attn.norm_k.weight": f"{block}.N.norm.key_norm.scale",
        f"{diffusers_block}.N.ff.linear_in": f"{block}.N.mlp_in",
        f"{diffusers_block}.N.ff.linear_out": f"{block}.N.mlp_out",
    }


FLUX3: Names = {
    "x_embedders.*": "emb_in.*",
    "context_embedder": "txt_in",
    "timestep_embedder.linear_1": "time_in.in_layer",
    "timestep_embedder.linear_2": "time_in.out_layer",
    "target_timestep_embedder.linear_1": "ref_time_in.in_layer",
    "target_timestep_embedder.linear_2": "ref_time_in.out_layer",
    "norm_out.linear": "final_layer.image.adaLN_modulation.1~",
    "proj_out": "final_layer.image.linear",
    **{
        f"{stage}_stream_modulations.{mode}.linear": f"{stage}_stream_modulations.{mode}.lin"
        for stage in ("early", "single")
        for mode in ("image", "image_cond", "txt")
    },
    **_flux3_block("mode_blocks.image", "content_mode_blocks.image"),
    **_flux3_block("mode_blocks.image_cond", "content_mode_blocks.image_cond"),
    **_flux3_block("txt_mode_blocks", "txt_mode_blocks"),
    **_flux3_block("single_transformer_blocks", "single_blocks"),
}

# ---- AuraFlow

_AURA_FEED_FORWARD = {"linear_1": "c_fc1", "linear_2": "c_fc2", "out_projection": "c_proj"}
_AURA_IMAGE = {"to_q": "w2q", "to_k": "w2k", "to_v": "w2v", "to_out.0": "w2o"}
_AURA_TEXT = {"add_q_proj": "w1q", "add_k_proj": "w1k", "add_v_proj": "w1v", "to_add_out": "w1o"}
_AURA_SINGLE = {"to_q": "w1q", "to_k": "w1k", "to_v": "w1v", "to_out.0": "w1o"}
AURA_FLOW: Names = {
    "pos_embed.pos_embed": "positional_encoding",
    "pos_embed.proj": "init_x_linear",
    "context_embedder": "cond_seq_linear",
    "time_step_proj.linear_1": "t_embedder.mlp.0",
    "time_step_proj.linear_2": "t_embedder.mlp.2",
    "norm_out.linear": "modF.1~",
    "proj_out": "final_linear",
    "joint_transformer_blocks.N.norm1.linear": "double_layers.N.modX.1",
    "joint_transformer_blocks.N.norm1_context.linear": "double_layers.N.modC.1",
    "single_transformer_blocks.N.norm1.linear": "single_layers.N.modCX.1",
    **{
        f"{old_block}.{old}": f"{block}.{new}"
        for old_block, block, names in (
            ("joint_transformer_blocks.N.ff", "double_layers.N.mlpX", _AURA_FEED_FORWARD),
            ("joint_transformer_blocks.N.ff_context", "double_layers.N.mlpC", _AURA_FEED_FORWARD),
            ("joint_transformer_blocks.N.attn", "double_layers.N.attn", {**_AURA_IMAGE, **_AURA_TEXT}),
            ("single_transformer_blocks.N.ff", "single_layers.N.mlp", _AURA_FEED_FORWARD),
            ("single_transformer_blocks.N.attn", "single_layers.N.attn", _AURA_SINGLE),
        )
        for old, new in names.items()
    },
}

# ---- Mochi

MOCHI: Names = {
    "patch_embed.proj": "x_embedder.proj",
    "time_embed.timestep_embedder.linear_1": "t_embedder.mlp.0",
    "time_embed.timestep_embedder.linear_2": "t_embedder.mlp.2",
    "time_embed.pooler.*": "t5_y_embedder.*",
    "time_embed.caption_proj": "t5_yproj",
    "norm_out.linear": "final_layer.mod~",
    "proj_out": "final_layer.linear",
    **{
        f"transformer_blocks.N.{old}": f"blocks.N.{new}"
        for old, new in {
            "norm1.linear": "mod_x",
            "norm1_context.linear": "mod_y",
            "norm1_context.linear_1": "mod_y",
            "attn1.to_q": "attn.qkv_x#0",
            "attn1.to_k": "attn.qkv_x#1",
            "attn1.to_v": "attn.qkv_x#2",
            "attn1.add_q_proj": "attn.qkv_y#0",
            "attn1.add_k_proj": "attn.qkv_y#1",
            "attn1.add_v_proj": "attn.qkv_y#2",
            "attn1.norm_q": "attn.q_norm_x",
            "attn1.norm_k": "attn.k_norm_x",
            "attn1.norm_added_q": "attn.q_norm_y",
            "attn1.norm_added_k": "attn.k_norm_y",
            "attn1.to_out.0": "attn.proj_x",
            "attn1.to_add_out": "attn.proj_y",
            "ff.net.0.proj": "mlp_x.w1~",
            "ff.net.2": "mlp_x.w2",
            "ff_context.net.0.proj": "mlp_y.w1~",
            "ff_context.net.2": "mlp_y.w2",
        }.items()
    },
}

# ---- Cosmos

COSMOS_1: Names = {
    "patch_embed.proj": "x_embedder.proj.1",
    "learnable_pos_embed.*": "extra_pos_embedder.*",
    "time_embed.t_embedder.*": "t_embedder.1.*",
    "time_embed.norm": "affline_norm",
    "norm_out.linear_1": "final_layer.adaLN_modulation.1",
    "norm_out.linear_2": "final_layer.adaLN_modulation.2",
    "proj_out": "final_layer.linear",
    **{
        f"transformer_blocks.N.attn{part + 1}.{old}": f"blocks.blockN.blocks.{part}.block.attn.{new}"
        for part in (0, 1)
        for old, new in {
            "to_q": "to_q.0",
            "norm_q": "to_q.1",
            "to_k": "to_k.0",
            "norm_k": "to_k.1",
            "to_v": "to_v.0",
            "to_out.0": "to_out.0",
        }.items()
    },
    **{
        f"transformer_blocks.N.norm{part + 1}.linear_{place}": (
            f"blocks.blockN.blocks.{part}.adaLN_modulation.{place}"
        )
        for part in (0, 1, 2)
        for place in (1, 2)
    },
    "transformer_blocks.N.ff.net.0.proj": "blocks.blockN.blocks.2.block.layer1",
    "transformer_blocks.N.ff.net.2": "blocks.blockN.blocks.2.block.layer2",
}
COSMOS_2: Names = {
    "patch_embed.proj": "x_embedder.proj.1",
    "time_embed.t_embedder.*": "t_embedder.1.*",
    "time_embed.norm": "t_embedding_norm",
    "norm_out.linear_1": "final_layer.adaln_modulation.1",
    "norm_out.linear_2": "final_layer.adaln_modulation.2",
    "proj_out": "final_layer.linear",
    **{
        f"transformer_blocks.N.{old}.{old_part}": f"blocks.N.{new}.{part}"
        for old, new in {"attn1": "self_attn", "attn2": "cross_attn"}.items()
        for old_part, part in {
            "to_q": "q_proj",
            "to_k": "k_proj",
            "to_v": "v_proj",
            "to_out.0": "output_proj",
            "norm_q": "q_norm",
            "norm_k": "k_norm",
        }.items()
    },
    **{
        f"transformer_blocks.N.norm{number}.linear_{place}": f"blocks.N.adaln_modulation_{name}.{place}"
        for number, name in {1: "self_attn", 2: "cross_attn", 3: "mlp"}.items()
        for place in (1, 2)
    },
    "transformer_blocks.N.ff.net.0.proj": "blocks.N.mlp.layer1",
    "transformer_blocks.N.ff.net.2": "blocks.N.mlp.layer2",
}

# ---- Sana

SANA: Names = {
    "patch_embed.proj": "x_embedder.proj",
    "time_embed.emb.timestep_embedder.linear_1": "t_embedder.mlp.0",
    "time_embed.emb.timestep_embedder.linear_2": "t_embedder.mlp.2",
    "time_embed.linear": "t_block.1",
    "caption_projection.linear_1": "y_embedder.y_proj.fc1",
    "caption_projection.linear_2": "y_embedder.y_proj.fc2",
    "caption_norm": "attention_y_norm",
    "scale_shift_table": "final_layer.scale_shift_table",
    "proj_out": "final_layer.linear",
    **{
        f"transformer_blocks.N.{old}": f"blocks.N.{new}"
        for old, new in {
            "scale_shift_table": "scale_shift_table",
            "attn1.to_q": "attn.qkv#0",
            "attn1.to_k": "attn.qkv#1",
            "attn1.to_v": "attn.qkv#2",
            "attn1.to_out.0": "attn.proj",
            "attn2.to_q": "cross_attn.q_linear",
            "attn2.to_k": "cross_attn.kv_linear#0",
            "attn2.to_v": "cross_attn.kv_linear#1",
            "attn2.to_out.0": "cross_attn.proj",
            "ff.conv_inverted": "mlp.inverted_conv.conv",
            "ff.conv_depth": "mlp.depth_conv.conv",
            "ff.conv_point": "mlp.point_conv.conv",
        }.items()
    },
}

# ---- Qwen-Image 2.1, Krea 2, MiniMax-H3

QWEN_IMAGE_21_COMFY: Names = {
    "transformer_blocks.N.img_mlp.gate_layer": "transformer_blocks.N.img_mlp.gate_up#0",
    "transformer_blocks.N.img_mlp.proj": "transformer_blocks.N.img_mlp.gate_up#1",
}
KREA_2: Names = {
    "img_in": "first",
    "time_embed.linear_1": "tmlp.0",
    "time_embed.linear_2": "tmlp.2",
    "time_mod_proj": "tproj.1",
    "txt_in.norm.weight": "txtmlp.0.scale",
    "txt_in.linear_1": "txtmlp.1",
    "txt_in.linear_2": "txtmlp.3",
    "text_fusion.projector": "txtfusion.projector",
    "final_layer.linear": "last.linear",
    "final_layer.norm.weight": "last.norm.scale",
    "final_layer.scale_shift_table": "last.modulation.lin",
    **{
        f"{old_block}.N.{old}": f"{block}.N.{new}"
        for old_block, block in {
            "transformer_blocks": "blocks",
            "text_fusion.layerwise_blocks": "txtfusion.layerwise_blocks",
            "text_fusion.refiner_blocks": "txtfusion.refiner_blocks",
        }.items()
        for old, new in {
            "attn.to_q": "attn.wq",
            "attn.to_k": "attn.wk",
            "attn.to_v": "attn.wv",
            "attn.to_out.0": "attn.wo",
            "attn.to_gate": "attn.gate",
            "attn.norm_q.weight": "attn.qknorm.qnorm.scale",
            "attn.norm_k.weight": "attn.qknorm.knorm.scale",
            "ff.*": "mlp.*",
            "norm1.weight": "prenorm.scale",
            "norm2.weight": "postnorm.scale",
            "scale_shift_table": "mod.lin",
        }.items()
    },
}
MINIMAX_H3: Names = {
    "proj_in": "video_patch_proj",
    "audio_proj_in": "audio_patch_proj",
    "context_embedder": "condition_proj",
    "time_embedder.linear_1": "time_embedder.proj_in",
    "time_embedder.linear_2": "time_embedder.proj_out",
    "norm_out.norm": "final_layer.norm",
    "norm_out.linear": "final_layer.adaln_proj.linear",
    "proj_out": "final_layer.video_out",
    "audio_proj_out": "final_layer.audio_out",
    **{
        f"{old_block}.N.{old}": f"{block}.N.{new}"
        for old_block, block in {
            "transformer_blocks": "blocks",
            "token_refiner.refiner_blocks": "token_refiner.blocks",
        }.items()
        for old, new in {
            "attn.to_q": "attn.qkv_proj#0",
            "attn.to_k": "attn.qkv_proj#1",
            "attn.to_v": "attn.qkv_proj#2",
            "attn.norm_q": "attn.q_norm",
            "attn.norm_k": "attn.k_norm",
            "attn.to_out.0": "attn.out_proj",
            "ff.net.0.proj": "mlp.fc1~",
            "ff.net.2": "mlp.fc2",
            "*": "*",
        }.items()
    },
}


def with_flat_modulations(weights: Weights) -> Weights:
    """Krea 2's blocks keep their six modulation vectors as one."""
    return {
        key: tensor.reshape(-1) if key.startswith("blocks.") and key.endswith(".mod.lin") else tensor
        for key, tensor in weights.items()
    }
