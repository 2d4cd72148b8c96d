"""What the planner reads from a transformer's config: its constructor's arguments in full, heads, sequence length."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .component import one_line
from .spec import Refusal

# The defaults of diffusers' constructors, which published configs rely on, for the classes whose arguments are read
# here and by the nodes. A test compares them with diffusers' own.
DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "FluxTransformer2DModel": {
        "patch_size": 1,
        "in_channels": 64,
        "out_channels": None,
        "num_layers": 19,
        "num_single_layers": 38,
        "attention_head_dim": 128,
        "num_attention_heads": 24,
        "joint_attention_dim": 4096,
        "pooled_projection_dim": 768,
        "guidance_embeds": False,
        "axes_dims_rope": (16, 56, 56),
    },
    "QwenImageTransformer2DModel": {
        "patch_size": 2,
        "in_channels": 64,
        "out_channels": 16,
        "num_layers": 60,
        "attention_head_dim": 128,
        "num_attention_heads": 24,
        "joint_attention_dim": 3584,
        "guidance_embeds": False,
        "axes_dims_rope": (16, 56, 56),
        "zero_cond_t": False,
        "use_additional_t_cond": False,
        "use_layer3d_rope": False,
    },
    "WanTransformer3DModel": {
        "patch_size": (1, 2, 2),
        "num_attention_heads": 40,
        "attention_head_dim": 128,
        "in_channels": 16,
        "out_channels": 16,
        "text_dim": 4096,
        "freq_dim": 256,
        "ffn_dim": 13824,
        "num_layers": 40,
        "cross_attn_norm": True,
        "qk_norm": "rms_norm_across_heads",
        "eps": 1e-6,
        "image_dim": None,
        "added_kv_proj_dim": None,
        "rope_max_seq_len": 1024,
        "pos_embed_seq_len": None,
    },
}
# Tokens of a usual run, for the planner chooses a layout before it knows the size: a picture of 1024x1024 and 512 of
# text, a video of 832x480 and 81 frames (its text is attended to, not part of the sequence).
TOKENS = {
    "FluxTransformer2DModel": 64 * 64 + 512,
    "QwenImageTransformer2DModel": 64 * 64 + 512,
    "WanTransformer3DModel": 21 * 30 * 52,
}
_MOST_HEADS = 4096  # far beyond any model: a number from a file must not keep the planner counting
_HEADS = ("num_attention_heads", "num_heads", "n_heads", "dit_heads")
_GROUPS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads", "num_key_value_attention_heads")


def constructor_arguments(what: str, class_name: str, config: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments that a config.json gives the class, with its defaults for the others where they are known.

    Lists become tuples. Raises Refusal, which calls the model `what`, for a value of another kind than the default.
    """
    given = {
        key: tuple(value) if isinstance(value, list) else value
        for key, value in config.items()
        if not key.startswith("_")
    }
    defaults = DEFAULTS.get(class_name, {})
    for key in defaults.keys() & given.keys():
        if not _is_like(given[key], defaults[key]) and not (key == "out_channels" and given[key] is None):
            raise Refusal(
                f"{what} has no usable {key}.",
                f"Its config.json says {one_line(given[key])}, where such a model has {one_line(defaults[key])}.",
                "Download that file of the model again.",
            )
    return {**defaults, **given}


def _is_like(value: object, default: object) -> bool:
    """Whether `value` can stand in the place of `default`; sizes that may be left out are None by default."""
    match default:
        case None:
            return value is None or _is_size(value)
        case tuple():
            return (
                isinstance(value, tuple)
                and len(value) == len(default)
                and all(_is_size(one) for one in value)
            )
        case bool() | str():
            return type(value) is type(default)
        case float():
            return type(value) in (int, float)
        case _:
            return _is_size(value)


def _is_size(value: object) -> bool:
    return type(value) is int and 0 <= value < 1 << 31


def count_heads(what: str, class_name: str, config: Mapping[str, Any]) -> tuple[int, int]:
    """Attention heads, and the groups of them that share keys and values (0: each has its own).

    Raises Refusal, which calls the model `what`, if the config does not say, or says what cannot be.
    """
    config = {**DEFAULTS.get(class_name, {}), **config}
    heads_key = next((key for key in _HEADS if key in config), _HEADS[0])
    heads: Any = config.get(heads_key, _from_widths(config))
    groups_key = next((key for key in _GROUPS if config.get(key) is not None), "")
    groups = config[groups_key] if groups_key else heads
    for key, count in ((heads_key, heads), (groups_key, groups)):
        if type(count) is not int or not 1 <= count <= _MOST_HEADS or heads % count:
            raise Refusal(
                f"{what} has no usable number of attention heads.",
                f"Its config says {key} {one_line(count)}.",
                "Download that file of the model again.",
            )
    return heads, groups if groups != heads else 0


def _from_widths(config: Mapping[str, Any]) -> int | None:
    """For classes that count no heads (Kandinsky): the rotary axes fill a head's width."""
    match config:
        case {"model_dim": int(width), "axes_dims": [*axes]} if all(type(one) is int for one in axes):
            head = sum(axes)
            return width // head if head > 0 and width % head == 0 else None
    return None
