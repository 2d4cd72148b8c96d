"""What the families' configs read from key names and shapes alike: counts of blocks, heads, rotary axes.

Pure Python. `shapes` is a header with the prefix removed: key -> shape.
"""

from __future__ import annotations

from typing import Any

from .family import Shapes

# Head widths that tiny models (tests, toy trainings) use, widest first.
_SMALL_HEADS = (64, 32, 16, 12, 8, 4, 2)


def count(shapes: Shapes, stem: str) -> int:
    """How many numbered modules follow `stem`, which ends before the number: "blocks." for "blocks.39.ffn.0.weight".

    The numbers must run from 0 without a gap; ValueError otherwise, as a file with a hole is damaged or only a part.
    """
    numbers = {int(key[len(stem) :].split(".", 1)[0]) for key in shapes if _is_numbered(key, stem)}
    if numbers != set(range(len(numbers))):
        missing = sorted(set(range(max(numbers))) - numbers)
        raise ValueError(f"the file has no {stem}{missing[0]}, though it has {stem}{max(numbers)}")
    return len(numbers)


def _is_numbered(key: str, stem: str) -> bool:
    return key.startswith(stem) and key[len(stem) :].split(".", 1)[0].isdecimal()


def shape(shapes: Shapes, key: str) -> tuple[int, ...]:
    """The shape of `key`; ValueError names a key that the variant should have."""
    if key not in shapes:
        raise ValueError(f"the file has no {key}")
    return shapes[key]


def head_width(width: int, published: int) -> int:
    """The width of one attention head, where no shape tells it.

    All published models of a family share one head width, so that is the answer wherever it divides `width`. For
    other sizes (tiny models) it is the widest of 64, 32, 16, 12, 8, 4 and 2 that divides `width` and leaves at least
    four heads: 48 -> 12, 96 -> 16, 144 -> 16, 192 -> 32, 288 -> 32. ValueError when none does.
    """
    if width % published == 0:
        return published
    for small in _SMALL_HEADS:
        if small < published and width % small == 0 and width // small >= 4:
            return small
    raise ValueError(f"no width of attention heads fits a model of width {width}")


def rotary_16_56_56(head: int) -> tuple[int, int, int]:
    """Rotary widths per head of time, height and width: (16, 56, 56) for 128, in proportion (and even) otherwise."""
    side = head * 7 // 32 * 2
    return (head - 2 * side, side, side)


def rotary_quarters(head: int) -> tuple[int, int, int, int]:
    """Rotary widths per head of four equal axes: (32, 32, 32, 32) for 128; even, so the first may be wider."""
    side = head // 8 * 2
    return (head - 3 * side, side, side, side)


def rotary_32_48_48(head: int) -> tuple[int, int, int]:
    """Rotary widths per head of time, height and width: (32, 48, 48) for 128, in proportion (and even) otherwise."""
    side = head * 3 // 16 * 2
    return (head - 2 * side, side, side)


def double_and_single_blocks(shapes: Shapes) -> dict[str, Any]:
    """What FLUX.1's, FLUX.2's and Chroma's original layouts have in common."""
    width, in_channels = shape(shapes, "img_in.weight")
    head = shape(shapes, "double_blocks.0.img_attn.norm.key_norm.scale")[0]
    out_channels = shape(shapes, "final_layer.linear.weight")[0]
    return {
        "patch_size": 1,
        "in_channels": in_channels,
        "out_channels": None if out_channels == in_channels else out_channels,
        "num_layers": count(shapes, "double_blocks."),
        "num_single_layers": count(shapes, "single_blocks."),
        "attention_head_dim": head,
        "num_attention_heads": width // head,
        "joint_attention_dim": shape(shapes, "txt_in.weight")[1],
    }
