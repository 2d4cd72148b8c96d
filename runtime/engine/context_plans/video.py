"""Context plans of the video families: upstream's where they are right, ours elsewhere."""

from __future__ import annotations

from collections.abc import Mapping

from .plan import Attends, ContextPlan, Count, Cut, Whole, joint

# Text may be shorter than the ranks are many; models infer sizes from the others.
_PICTURE, _SOUND = Cut(1, "picture", everywhere=True), Cut(1, "sound", everywhere=True)
_TEXT = Cut(1, "text")
_ROPE = {0: Cut(0, "picture"), 1: Cut(0, "picture")}  # of a module that answers cos and sin, [tokens, width]
_JOINS = {"proj_out": {0: _PICTURE}}


# Wan and the models built on it. Cross attention to text and image stays whole, as upstream has it.

_WAN = ContextPlan(
    inputs={
        # Of Wan 2.2's 5B model, one for each token.
        "": {"timestep": Cut(1, "picture", ndim=2, spreads=True)},
        "blocks.0": {"hidden_states": _PICTURE},
    },
    outputs={"rope": {0: _PICTURE, 1: _PICTURE}},
    joins=_JOINS,
    attentions={"blocks.*.attn1": joint("picture")},
    whole=("blocks.*.attn2",),
)
# Upstream has none. The control branch is as long as the picture: the model fills it up before its blocks.
_WAN_VACE = ContextPlan(
    inputs={
        "vace_blocks.0": {"hidden_states": _PICTURE, "control_hidden_states": _PICTURE},
        "blocks.0": {"hidden_states": _PICTURE},
    },
    outputs=_WAN.outputs,
    joins=_JOINS,
    attentions={"blocks.*.attn1": joint("picture"), "vace_blocks.*.attn1": joint("picture")},
    whole=("blocks.*.attn2", "vace_blocks.*.attn2"),
)
# The face adapter goes by frames, which the cuts do not respect: after every fifth block it gets the whole picture.
_WAN_ANIMATE = ContextPlan(
    inputs={
        "blocks.0": {"hidden_states": _PICTURE},
        "face_adapter.*": {"hidden_states": Whole(_PICTURE)},
    },
    outputs={**_WAN.outputs, "face_adapter.*": {0: _PICTURE}},
    joins=_JOINS,
    attentions=_WAN.attentions,
    whole=(*_WAN.whole, "face_adapter.*"),
)
# Diffusion forcing modulates every token after the last block, from whole tensors: the join comes before that. The
# mask between frames is [1, 1, tokens, tokens]; upstream has no plan.
_SKYREELS = ContextPlan(
    inputs={
        "blocks.0": {"hidden_states": _PICTURE},
        "blocks.*": {"temb": Cut(2, "picture", ndim=4)},
    },
    outputs=_WAN.outputs,
    joins={"blocks.-1": {0: _PICTURE}},
    attentions=_WAN.attentions,
    whole=_WAN.whole,
)
# One sequence of history and picture. Upstream cuts and joins around each of 40 attentions and feed-forwards, by
# number. A rank may have nothing of the picture, which the last norm would take for everything: it gets the whole.
_HELIOS = ContextPlan(
    inputs={
        "blocks.0": {"hidden_states": _PICTURE},
        "blocks.*": {
            "temb": Cut(1, "picture", ndim=4),
            "rotary_emb": _PICTURE,
            "original_context_length": Count("picture", last=True),
        },
    },
    joins={"blocks.-1": {0: _PICTURE}},
    attentions=_WAN.attentions,
    whole=_WAN.whole,
)
_ANYFLOW = ContextPlan(
    inputs={
        "blocks.0": {"hidden_states": _PICTURE},
        "blocks.*": {"temb": _PICTURE},
    },
    outputs={"rope": {0: Cut(2, "picture")}},
    joins={"blocks.-1": {0: _PICTURE}},  # then it modulates every token from a whole tensor
    attentions=_WAN.attentions,
    whole=_WAN.whole,
)


# LTX. Upstream cuts the text and its mask too: under ulysses that is an error, in a ring it is silently wrong
# (facts/parallel.md 3.5). Cross attention to whole text needs nobody else's.

_LTX = ContextPlan(
    inputs={
        "": {
            "hidden_states": _PICTURE,
            "timestep": Cut(1, "picture", ndim=2, spreads=True),
        }
    },
    outputs={"rope": {0: _PICTURE, 1: _PICTURE}},
    joins=_JOINS,
    attentions={"transformer_blocks.*.attn1": joint("picture")},
    whole=("transformer_blocks.*.attn2",),
)
# Picture and sound are sequences of their own, which attend to themselves and to each other. Upstream's plan is LTX's
# (diffusers #14316). The rotary tables are cut by their coordinates: their tokens lie elsewhere for each `rope_type`.
_LTX2 = ContextPlan(
    inputs={
        "": {
            "hidden_states": _PICTURE,
            "audio_hidden_states": _SOUND,
            "timestep": Cut(1, "picture", ndim=2, spreads=True),
            "audio_timestep": Cut(1, "sound", ndim=2, spreads=True),
            "video_keyframes_mask": _PICTURE,
        },
        "rope": {"coords": Cut(2, "picture")},
        "cross_attn_rope": {"coords": Cut(2, "picture")},
        "audio_rope": {"coords": Cut(2, "sound")},
        "cross_attn_audio_rope": {"coords": Cut(2, "sound")},
    },
    joins={"proj_out": {0: _PICTURE}, "audio_proj_out": {0: _SOUND}},
    attentions={
        "transformer_blocks.*.attn1": Attends(("picture",), ("picture",), mask="attention_mask"),
        "transformer_blocks.*.audio_attn1": joint("sound"),
        "transformer_blocks.*.audio_to_video_attn": Attends(("picture",), ("sound",)),
        "transformer_blocks.*.video_to_audio_attn": Attends(("sound",), ("picture",)),
    },
    whole=("transformer_blocks.*.attn2", "transformer_blocks.*.audio_attn2"),
)


# HunyuanVideo. Upstream has no plans: the token refiner would attend locally, and the mask is as long as everything.

_SOME_TEXT = Cut(1, "text", everywhere=True)  # it counts text tokens from the end
_HUNYUAN_VIDEO = ContextPlan(
    inputs={
        "transformer_blocks.0": {"hidden_states": _PICTURE, "encoder_hidden_states": _SOME_TEXT},
        # The tokens of the first frame, where it is given (image_condition_type "token_replace").
        "transformer_blocks.*": {"num_tokens": Count("picture")},
        "single_transformer_blocks.*": {"num_tokens": Count("picture")},
    },
    outputs={"rope": _ROPE},
    joins=_JOINS,
    attentions={
        "transformer_blocks.*.attn": joint("picture", "text"),
        "single_transformer_blocks.*.attn": joint("picture", "text"),
    },
    whole=("context_embedder.**.attn",),
)
# Its attention makes a mask of queries x keys of the text's padding. Padding that attends to everything is as good:
# nothing attends to it.
_HUNYUAN_VIDEO_15 = ContextPlan(
    inputs={
        "transformer_blocks.0": {"hidden_states": _PICTURE, "encoder_hidden_states": _SOME_TEXT},
        "transformer_blocks.*": {"attention_mask": Cut(1, "text", pads=True)},
    },
    outputs={"rope": _ROPE},
    joins=_JOINS,
    attentions={"transformer_blocks.*.attn": joint("picture", "text")},
    whole=("context_embedder.**.attn",),
)
# History and picture are one sequence, of which the model takes the end before its last norm.
_FRAMEPACK = ContextPlan(
    inputs={
        "transformer_blocks.0": {"hidden_states": _PICTURE, "encoder_hidden_states": _SOME_TEXT},
        "transformer_blocks.*": {"freqs_cis": Cut(0, "picture")},
        "single_transformer_blocks.*": {"image_rotary_emb": Cut(0, "picture")},
    },
    joins={"single_transformer_blocks.-1": {0: _PICTURE}},
    attentions=_HUNYUAN_VIDEO.attentions,
    whole=_HUNYUAN_VIDEO.whole,
)


# Others

_MINIMAX_H3 = ContextPlan(  # upstream's; text, sound and picture are one packed sequence
    inputs={
        "transformer_blocks.0": {"hidden_states": _PICTURE},
        "transformer_blocks.*": {"adaln_indices": Cut(0, "picture")},
        "norm_out": {"timestep_indices": Cut(0, "picture")},
    },
    outputs={"rope": _ROPE},
    joins={"proj_out": {0: _PICTURE}, "audio_proj_out": {0: _PICTURE}},
    attentions={"transformer_blocks.*.attn": joint("picture")},
    whole=("token_refiner.refiner_blocks.*.attn",),
)
_COGVIDEOX = ContextPlan(
    inputs={
        "": {"image_rotary_emb": Cut(0, "picture")},
        "transformer_blocks.0": {"hidden_states": _PICTURE, "encoder_hidden_states": _TEXT},
    },
    joins=_JOINS,
    attentions={"transformer_blocks.*.attn1": joint("text", "picture")},
)
# Faces are attended to between the blocks, by this rank's tokens. Then the model takes the end of text and picture.
_CONSISID = ContextPlan(
    inputs=_COGVIDEOX.inputs,
    joins={"transformer_blocks.-1": {0: _PICTURE, 1: _TEXT}},
    attentions=_COGVIDEOX.attentions,
)
_EASYANIMATE = ContextPlan(
    inputs={"transformer_blocks.0": {"hidden_states": _PICTURE, "encoder_hidden_states": _TEXT}},
    outputs={"rope_embedding": _ROPE},
    joins=_JOINS,
    attentions={"transformer_blocks.*.attn1": joint("text", "picture")},
)
# The last layer needs the grid. Sparse attention makes a block mask of the tokens that it sees.
_KANDINSKY5 = ContextPlan(
    inputs={
        "visual_transformer_blocks.0": {"visual_embed": _PICTURE},
        "visual_transformer_blocks.*": {"rope": _PICTURE},
    },
    joins={"visual_transformer_blocks.-1": {0: _PICTURE}},
    attentions={"visual_transformer_blocks.*.self_attention": joint("picture")},
    whole=("visual_transformer_blocks.*.cross_attention", "text_transformer_blocks.*.self_attention"),
    refuses={"": ("sparse_params",)},
)
_KANDINSKY6 = ContextPlan(
    inputs={
        "visual_transformer_blocks.0": {"vis": _PICTURE, "aud": _SOUND},
        "visual_transformer_blocks.*": {"vis_rope": Cut(0, "picture"), "aud_rope": Cut(0, "sound")},
    },
    joins={"visual_transformer_blocks.-1": {0: _PICTURE, 1: _SOUND}},
    attentions={
        "visual_transformer_blocks.*.video_dec_block.self_attention": joint("picture"),
        "visual_transformer_blocks.*.audio_dec_block.self_attention": joint("sound"),
        "visual_transformer_blocks.*.va_cross_attention": Attends(("picture",), ("sound",)),
        "visual_transformer_blocks.*.av_cross_attention": Attends(("sound",), ("picture",)),
    },
    whole=(
        "visual_transformer_blocks.*.video_dec_block.cross_attention",
        "visual_transformer_blocks.*.audio_dec_block.cross_attention",
        "video_text_transformer_blocks.*.attn",
        "audio_text_transformer_blocks.*.attn",
    ),
)
# Its attention picks the words that count out of each sample and leaves the others at zero. Here they attend too,
# which is as good: nothing attends to them.
_MOCHI = ContextPlan(
    inputs={
        "transformer_blocks.0": {"hidden_states": _PICTURE, "encoder_hidden_states": _TEXT},
        "transformer_blocks.*": {"encoder_attention_mask": Cut(1, "text", pads=True)},
    },
    outputs={"rope": _ROPE},
    joins=_JOINS,
    attentions={
        "transformer_blocks.*.attn1": Attends(("picture", "text"), ("picture", "text"), by_sample=True)
    },
)
# The rotary tables are by position, of which every token has three.
_ALLEGRO = ContextPlan(
    inputs={
        "": {"image_rotary_emb": (None, _PICTURE)},
        "transformer_blocks.0": {"hidden_states": _PICTURE},
    },
    joins=_JOINS,
    attentions={"transformer_blocks.*.attn1": Attends(("picture",), ("picture",), mask="attention_mask")},
    whole=("transformer_blocks.*.attn2",),
)
_COSMOS = ContextPlan(
    inputs={
        "transformer_blocks.0": {"hidden_states": _PICTURE},
        # Where frames have times of their own, the modulation is [batch, tokens, width].
        "transformer_blocks.*": {
            "embedded_timestep": Cut(1, "picture", ndim=3),
            "temb": Cut(1, "picture", ndim=3),
            "controlnet_residual": _PICTURE,
        },
        "norm_out": {
            "embedded_timestep": Cut(1, "picture", ndim=3),
            "temb": Cut(1, "picture", ndim=3),
        },
    },
    outputs={"rope": _ROPE, "learnable_pos_embed": {0: _PICTURE}},
    joins=_JOINS,
    attentions={"transformer_blocks.*.attn1": joint("picture")},
    whole=("transformer_blocks.*.attn2",),
)


# Sound

# The first token is the global condition.
_STABLE_AUDIO = ContextPlan(
    inputs={
        "": {"rotary_embedding": Cut(0, "sound")},
        "transformer_blocks.0": {"hidden_states": _SOUND},
    },
    joins={"proj_out": {0: _SOUND}},
    attentions={"transformer_blocks.*.attn1": Attends(("sound",), ("sound",), mask="attention_mask")},
    whole=("transformer_blocks.*.attn2",),
)
_LONGCAT_AUDIO = ContextPlan(
    inputs={
        "blocks.0": {"hidden_states": _SOUND},
        "blocks.*": {"mask": Cut(1, "sound", pads=True), "rope": Cut(0, "sound")},
    },
    joins={"blocks.-1": {0: _SOUND}},  # then it adds what came into the blocks
    attentions={"blocks.*.self_attn": joint("sound")},
    whole=("blocks.*.cross_attn",),
)
_MINIMAX_MUSIC3 = ContextPlan(
    inputs={
        "transformer_blocks.0": {"hidden_states": _SOUND},
        "transformer_blocks.*": {"rotary_emb": Cut(0, "sound")},
    },
    joins={"transformer_blocks.-1": {0: _SOUND}},  # then it leaves out the first token, of the timestep
    attentions={"transformer_blocks.*.attn": joint("sound")},
)

PLANS: Mapping[str, ContextPlan] = {
    "AllegroTransformer3DModel": _ALLEGRO,
    "AnyFlowTransformer3DModel": _ANYFLOW,
    "ChronoEditTransformer3DModel": _WAN,
    "CogVideoXTransformer3DModel": _COGVIDEOX,
    "ConsisIDTransformer3DModel": _CONSISID,
    "CosmosTransformer3DModel": _COSMOS,
    "EasyAnimateTransformer3DModel": _EASYANIMATE,
    "HeliosTransformer3DModel": _HELIOS,
    "HunyuanVideo15Transformer3DModel": _HUNYUAN_VIDEO_15,
    "HunyuanVideoFramepackTransformer3DModel": _FRAMEPACK,
    "HunyuanVideoTransformer3DModel": _HUNYUAN_VIDEO,
    "Kandinsky5Transformer3DModel": _KANDINSKY5,
    "Kandinsky6Transformer3DModel": _KANDINSKY6,
    "LTX2VideoTransformer3DModel": _LTX2,
    "LTXVideoTransformer3DModel": _LTX,
    "LongCatAudioDiTTransformer": _LONGCAT_AUDIO,
    "MiniMaxH3Transformer3DModel": _MINIMAX_H3,
    "MiniMaxMusic3Transformer1DModel": _MINIMAX_MUSIC3,
    "MochiTransformer3DModel": _MOCHI,
    "SkyReelsV2Transformer3DModel": _SKYREELS,
    "StableAudioDiTModel": _STABLE_AUDIO,
    "WanAnimateTransformer3DModel": _WAN_ANIMATE,
    "WanTransformer3DModel": _WAN,
    "WanVACETransformer3DModel": _WAN_VACE,
}
