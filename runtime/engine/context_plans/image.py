"""Context plans of the image families: upstream's where they are right, ours elsewhere.

Where a model runs several sequences side by side (text, picture), each is cut for itself; where it has already joined
them into one, padding included, that one is `all`. A text-only refiner is short and stays whole; a refiner of the
picture is cut and joined again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from .plan import Attends, ContextPlan, Cut, joint

_PICTURE, _TEXT, _ALL = Cut(1, "picture"), Cut(1, "text"), Cut(1, "all")
_TEXT_PICTURE, _PICTURE_TEXT = joint("text", "picture"), joint("picture", "text")
_RESIDUALS = Cut(1, "picture", spreads=True)  # of a ControlNet; upstream does not cut them
_ROTARY = Cut(0, "picture")
_PADDING = Cut(1, "text", pads=True)

# Everything at the root is token by token, so that all of it is cut. Ids are [tokens, axes], or [1, tokens, axes] as
# older pipelines give them.
_FLUX = ContextPlan(
    inputs={
        "": {
            "hidden_states": _PICTURE,
            "encoder_hidden_states": _TEXT,
            "img_ids": Cut(-2, "picture"),
            "txt_ids": Cut(-2, "text"),
            "controlnet_block_samples": _RESIDUALS,
            "controlnet_single_block_samples": _RESIDUALS,
            "text_encoder_layers": _TEXT,  # of Bria Fibo, one for each block
        }
    },
    joins={"proj_out": {0: _PICTURE}},
    attentions={
        "transformer_blocks.*.attn": _TEXT_PICTURE,
        "single_transformer_blocks.*.attn": _TEXT_PICTURE,
    },
)
_FLUX3 = ContextPlan(
    inputs={
        "": {
            "hidden_states": _PICTURE,
            "encoder_hidden_states": _TEXT,
            "image_cond_hidden_states": Cut(1, "reference"),
            "img_ids": Cut(0, "picture"),
            "txt_ids": Cut(0, "text"),
            "image_cond_ids": Cut(0, "reference"),
        }
    },
    joins={"proj_out": {0: _PICTURE}},
    attentions={
        "txt_mode_blocks.*.attn": joint("text"),
        "mode_blocks.image.*.attn": joint("picture"),
        "mode_blocks.image_cond.*.attn": joint("reference"),
        "single_transformer_blocks.*.attn": joint("text", "picture", "reference"),
    },
)
_QWEN = ContextPlan(
    inputs={
        "": {"controlnet_block_samples": _RESIDUALS},
        "transformer_blocks.0": {"hidden_states": _PICTURE, "encoder_hidden_states": _TEXT},
        "transformer_blocks.*": {"modulate_index": _PICTURE, "encoder_hidden_states_mask": _PADDING},
    },
    outputs={"pos_embed": {0: Cut(0, "picture"), 1: Cut(0, "text")}},
    joins={"proj_out": {0: _PICTURE}},
    attentions={"transformer_blocks.*.attn": _TEXT_PICTURE},
)
# At the embedders and not at the first block: a skip-layer guidance may leave that one out.
_SD3 = ContextPlan(
    inputs={"": {"block_controlnet_hidden_states": _RESIDUALS}},
    outputs={"pos_embed": {0: _PICTURE}, "context_embedder": {0: _TEXT}},
    joins={"proj_out": {0: _PICTURE}},
    attentions={"transformer_blocks.*.attn": _PICTURE_TEXT, "transformer_blocks.*.attn2": joint("picture")},
)
_AURA_FLOW = ContextPlan(
    inputs={"joint_transformer_blocks.0": {"encoder_hidden_states": _TEXT}},  # after the register tokens
    outputs={"pos_embed": {0: _PICTURE}},
    joins={"proj_out": {0: _PICTURE}},
    attentions={
        "joint_transformer_blocks.*.attn": _TEXT_PICTURE,
        "single_transformer_blocks.*.attn": _TEXT_PICTURE,
    },
)
# Every sample has its own lengths: picture and text are padded to one sequence, from which the last layer's tokens are
# taken by their places in the whole.
_Z_IMAGE = ContextPlan(
    inputs={
        "": {"controlnet_block_samples": Cut(1, "all", spreads=True)},
        "noise_refiner.0": {"x": _PICTURE},
        "noise_refiner.*": {"freqs_cis": _PICTURE, "noise_mask": _PICTURE},
        "layers.0": {"x": _ALL},
        "layers.*": {"freqs_cis": _ALL, "noise_mask": _ALL},
        "all_final_layer.*-*": {"noise_mask": _ALL},
    },
    joins={"noise_refiner.-1": {0: _PICTURE}, "all_final_layer.*-*": {0: _ALL}},
    attentions={"noise_refiner.*.attention": joint("picture"), "layers.*.attention": joint("all")},
    whole=("context_refiner.*.attention", "siglip_refiner.*.attention"),
)
_BRIA_FIBO_2 = ContextPlan(
    inputs={
        "noise_refiner.0": {"x": _PICTURE},
        "noise_refiner.*": {"freqs_cis": _PICTURE, "noise_mask": _PICTURE},
        "layers.0": {"x": _ALL},
        "layers.*": {"freqs_cis": _ALL, "noise_mask": _ALL},
    },
    joins={"noise_refiner.-1": {0: _PICTURE}, "layers.-1": {0: _ALL}},
    attentions={"noise_refiner.*.attention": joint("picture"), "layers.*.attention": joint("all")},
    whole=(
        "layers.*.cross_attention",
        "perceiver.layers.*.cross_attention",
        "perceiver.layers.*.self_attention",
    ),
)
_LUMINA_2 = ContextPlan(
    inputs={
        "noise_refiner.0": {"hidden_states": _PICTURE},
        "noise_refiner.*": {"image_rotary_emb": _PICTURE},
        "layers.0": {"hidden_states": _ALL},
        "layers.*": {"image_rotary_emb": _ALL},
    },
    joins={"noise_refiner.-1": {0: _PICTURE}, "norm_out": {0: _ALL}},
    attentions={"noise_refiner.*.attn": joint("picture"), "layers.*.attn": joint("all")},
    whole=("context_refiner.*.attn",),
)
# A picture that is no square is padded and its padding marked by a mask; the tables and masks of all tokens begin with
# the picture's, whole, and go on with those of the texts, which are cut by then. The blocks see the last layer of
# Llama and, after it, their own.
_HIDREAM = ContextPlan(
    inputs={
        "": {
            "encoder_hidden_states_t5": Cut(1, "t5", everywhere=True),
            "encoder_hidden_states_llama3": Cut(-2, "llama", everywhere=True),
        },
        "pe_embedder": {"ids": Cut(1, "picture", leads=True)},
        "double_stream_blocks.*": {"hidden_states_masks": _PICTURE},
        "single_stream_blocks.*": {"hidden_states_masks": Cut(1, "picture", leads=True)},
    },
    outputs={"x_embedder": {0: _PICTURE}},
    joins={"final_layer": {0: _PICTURE}},
    attentions={
        "double_stream_blocks.*.block.attn1": joint("picture", "t5", "llama", "llama"),
        "single_stream_blocks.*.block.attn1": joint("picture", "t5", "llama", "llama"),
    },
)
_COGVIEW_3 = ContextPlan(
    inputs={"transformer_blocks.0": {"hidden_states": _PICTURE, "encoder_hidden_states": _TEXT}},
    joins={"proj_out": {0: _PICTURE}},
    attentions={"transformer_blocks.*.attn1": _TEXT_PICTURE},
)
# Their mask of the text becomes one to add (0 and 1), made of the tokens at hand; no pipeline gives one.
_COGVIEW_4 = ContextPlan(
    inputs={"transformer_blocks.*": {"image_rotary_emb": _ROTARY}},
    outputs={"patch_embed": {0: _PICTURE, 1: _TEXT}},
    joins={"proj_out": {0: _PICTURE}},
    attentions={"transformer_blocks.*.attn1": _TEXT_PICTURE},
    refuses={"": ("attention_mask",)},
)
_GLM_IMAGE = ContextPlan(
    inputs={"transformer_blocks.*": {"image_rotary_emb": _ROTARY}},
    outputs={
        "image_projector": {0: _PICTURE},
        "prior_projector": {0: _PICTURE},
        "glyph_projector": {0: _TEXT},
    },
    joins={"proj_out": {0: _PICTURE}},
    attentions={"transformer_blocks.*.attn1": _TEXT_PICTURE},
    refuses={"": ("attention_mask",)},
)
# Its blocks count the text's tokens from the end, which fails where there are none; it is always given many.
_HUNYUAN_IMAGE = ContextPlan(
    inputs={
        "transformer_blocks.0": {
            "hidden_states": _PICTURE,
            "encoder_hidden_states": Cut(1, "text", everywhere=True),
        }
    },
    outputs={"rope": {0: _ROTARY, 1: _ROTARY}},
    joins={"proj_out": {0: _PICTURE}},
    attentions={
        "transformer_blocks.*.attn": _PICTURE_TEXT,
        "single_transformer_blocks.*.attn": _PICTURE_TEXT,
    },
    whole=("context_embedder.token_refiner.refiner_blocks.*.attn",),
)
_HUNYUAN_DIT = ContextPlan(
    inputs={
        "": {"controlnet_block_samples": _RESIDUALS, "image_rotary_emb": _ROTARY},
    },
    outputs={"pos_embed": {0: _PICTURE}},
    joins={"proj_out": {0: _PICTURE}},
    attentions={"blocks.*.attn1": joint("picture")},
    whole=("blocks.*.attn2",),
)
_PIXART = ContextPlan(
    inputs={"transformer_blocks.0": {"hidden_states": _PICTURE}},
    joins={"proj_out": {0: _PICTURE}},
    attentions={"transformer_blocks.*.attn1": joint("picture")},
    whole=("transformer_blocks.*.attn2",),
)
# The picture's tokens attend to the text and to themselves; the text, the same in every block, attends to nothing.
_PRX = ContextPlan(
    inputs={
        "blocks.0": {"hidden_states": _PICTURE},
        "blocks.*": {"encoder_hidden_states": _TEXT, "attention_mask": _PADDING},
    },
    outputs={"pe_embedder": {0: Cut(2, "picture")}},
    joins={"final_layer": {0: _PICTURE}},
    attentions={"blocks.*.attention": Attends(("picture",), ("text", "picture"))},
)
_KREA_2 = ContextPlan(
    inputs={"transformer_blocks.0": {"hidden_states": _ALL}},
    outputs={"rotary_emb": {0: Cut(0, "all"), 1: Cut(0, "all")}},
    joins={"transformer_blocks.-1": {0: _ALL}},
    attentions={"transformer_blocks.*.attn": joint("all")},
    whole=("text_fusion.layerwise_blocks.*.attn", "text_fusion.refiner_blocks.*.attn"),
)
# Tokens come first in its layers, the batch second.
_ERNIE = ContextPlan(
    inputs={
        "layers.0": {"x": Cut(0, "all")},
        "layers.*": {"rotary_pos_emb": _ALL, "temb": Cut(0, "all")},
    },
    joins={"final_linear": {0: Cut(0, "all")}},
    attentions={"layers.*.self_attention": joint("all")},
)
_IDEOGRAM_4 = ContextPlan(
    inputs={
        "layers.0": {"hidden_states": _ALL},
        "layers.*": {"image_rotary_emb": _ALL, "adaln_input": Cut(1, "all", spreads=True)},
        "final_layer": {"conditioning": Cut(1, "all", spreads=True)},
    },
    joins={"final_layer": {0: _ALL}},
    attentions={"layers.*.attention": joint("all")},
)
_JOY_IMAGE = ContextPlan(
    inputs={
        "double_blocks.0": {"hidden_states": _PICTURE, "encoder_hidden_states": _TEXT},
        "double_blocks.*": {"image_rotary_emb": (_ROTARY, Cut(0, "text"))},
    },
    joins={"proj_out": {0: _PICTURE}},
    attentions={"double_blocks.*.attn": _PICTURE_TEXT},
)
_JOY_IMAGE_PLUS = ContextPlan(
    inputs={
        "double_blocks.0": {"hidden_states": _PICTURE, "encoder_hidden_states": _TEXT},
        "double_blocks.*": {"image_rotary_emb": _PICTURE},
    },
    joins={"proj_out": {0: _PICTURE}},
    attentions={"double_blocks.*.attn": _PICTURE_TEXT},
)

# The prompt with its pictures, the time and the picture are one sequence, whose mask is queries x keys.
_OMNIGEN = ContextPlan(
    inputs={
        "layers.0": {"hidden_states": _ALL},
        "layers.*": {"image_rotary_emb": Cut(0, "all")},
    },
    joins={"layers.-1": {0: _ALL}},
    attentions={"layers.*.self_attn": joint("all")},
)
_DIT = ContextPlan(
    inputs={"transformer_blocks.0": {"hidden_states": _PICTURE}},
    joins={"proj_out_2": {0: _PICTURE}},
    attentions={"transformer_blocks.*.attn1": joint("picture")},
)

# Without a plan, hence refused: Sana (its linear attention sums over all tokens and its feed-forward convolves the
# picture), NucleusMoE (its experts choose among all tokens of the picture), QwenImage21 (attends to the whole sequence
# segment by segment), LuminaNext (scales its attention by the length it sees).
PLANS: Mapping[str, ContextPlan] = {
    "FluxTransformer2DModel": _FLUX,
    # The reference pictures that a KV cache holds are told from the others by their places in the whole picture.
    "Flux2Transformer2DModel": replace(_FLUX, refuses={"": ("kv_cache_mode",)}),
    "Flux3Transformer2DModel": _FLUX3,
    "ChromaTransformer2DModel": _FLUX,
    "OvisImageTransformer2DModel": _FLUX,
    "LongCatImageTransformer2DModel": _FLUX,
    "BriaTransformer2DModel": _FLUX,
    "BriaFiboTransformer2DModel": _FLUX,
    "BriaFibo2Transformer2DModel": _BRIA_FIBO_2,
    "QwenImageTransformer2DModel": _QWEN,
    "SD3Transformer2DModel": _SD3,
    "AuraFlowTransformer2DModel": _AURA_FLOW,
    "ZImageTransformer2DModel": _Z_IMAGE,
    "Lumina2Transformer2DModel": _LUMINA_2,
    "HiDreamImageTransformer2DModel": _HIDREAM,
    "CogView3PlusTransformer2DModel": _COGVIEW_3,
    "CogView4Transformer2DModel": _COGVIEW_4,
    "GlmImageTransformer2DModel": _GLM_IMAGE,
    "HunyuanImageTransformer2DModel": _HUNYUAN_IMAGE,
    "HunyuanDiT2DModel": _HUNYUAN_DIT,
    "PixArtTransformer2DModel": _PIXART,
    "PRXTransformer2DModel": _PRX,
    "Krea2Transformer2DModel": _KREA_2,
    "ErnieImageTransformer2DModel": _ERNIE,
    "Ideogram4Transformer2DModel": _IDEOGRAM_4,
    "JoyImageEditTransformer3DModel": _JOY_IMAGE,
    "JoyImageEditPlusTransformer3DModel": _JOY_IMAGE_PLUS,
    "OmniGenTransformer2DModel": _OMNIGEN,
    "DiTTransformer2DModel": _DIT,
}
