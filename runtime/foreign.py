"""What a file is that holds no diffusion transformer, told from its first bytes or its keys, for the refusal."""

from __future__ import annotations

import re
from pathlib import Path

from .families.family import Shapes
from .safetensors_header import printable
from .spec import Refusal

_INSTEAD = "Use the safetensors file of the model, in bf16, fp16, fp32 or fp8."
# The first bytes of formats that people have in the same folders.
_MAGIC = (
    (b"GGUF", "a GGUF file", "Its weights are packed in blocks that cannot be divided over ranks."),
    (b"PK\x03\x04", "a PyTorch pickle", "Reading a pickle can run code, so it is never opened."),
    (b"\x80\x02", "a PyTorch pickle", "Reading a pickle can run code, so it is never opened."),
)
_SUFFIXES = {
    ".gguf": _MAGIC[0],
    **dict.fromkeys((".ckpt", ".pt", ".pth", ".bin"), _MAGIC[1]),
    ".flashpack": (
        b"",
        "a FlashPack file",
        "It is one flat buffer, of which a rank could not read its part only.",
    ),
}
# Keys that only one kind of file has; the first that matches names it. Adapters repeat keys of the model they are for.
_ADAPTERS = (
    (r"\.lora_(up|down|A|B|mid)(\.|$)|^lora_(unet|te\d?|transformer)_|\.(lokr|loha|hada|oft)_", "a LoRA"),
    (r"^(controlnet_|control_model\.|zero_convs\.|input_hint_block\.|control_layers\.)", "a ControlNet"),
)
_KINDS = (
    (r"^(model\.diffusion_model\.|diffusion_model\.)?input_blocks\.\d+\.\d+\.", "an SD1, SD2 or SDXL UNet"),
    (r"^(down_blocks|mid_block)\..*\.(attn1|attn2|time_emb_proj)\.", "an SD1, SD2 or SDXL UNet"),
    (r"^shared\.weight$|^encoder\.block\.\d+\.layer\.\d+\.SelfAttention", "a T5 or UMT5 text encoder"),
    (r"^(vision_model\.|visual_projection)", "a CLIP vision encoder"),
    (r"^(transformer\.)?(text_model\.|resblocks\.|text_projection)", "a CLIP text encoder"),
    (r"^(model\.)?visual\.(blocks|patch_embed|merger)", "a Qwen-VL text encoder"),
    (r"^(model\.|language_model\.)*layers\.\d+\.self_attn\.q_proj", "a Llama-like text encoder"),
    (r"^(first_stage_model\.|vae\.)?(encoder|decoder)\.(conv_in|conv1|mid|middle|down|up)", "a VAE"),
    (r"^(taesd_)?(encoder|decoder)\.(layers\.)?\d+\.(conv|weight)", "a VAE"),
    (r"^(model\.\d+\.(sub|weight)|conv_first\.|body\.\d+\.rdb|RRDB_trunk|conv_body\.)", "an upscaler"),
)


def refuse_other_formats(path: Path) -> None:
    """Raise Refusal for a file that its first bytes or its suffix show to be no safetensors file."""
    try:
        with path.open("rb") as opened:
            start = opened.read(8)
    except OSError as error:
        raise Refusal(
            f"'{printable(path.name)}' cannot be read.",
            f"The system says: {printable(error)}.",
            "Choose a file that exists and that ComfyUI may read.",
        ) from error
    found = next((one for one in _MAGIC if start.startswith(one[0])), _SUFFIXES.get(path.suffix.lower()))
    if found is not None:
        raise Refusal(f"'{printable(path.name)}' is {found[1]}.", found[2], _INSTEAD)


def adapter_kind(shapes: Shapes) -> str | None:
    """A LoRA's or ControlNet's kind in words; these may look like the model that they adapt."""
    return _first(_ADAPTERS, shapes)


def other_kind(shapes: Shapes) -> str | None:
    """The kind in words, such as "a VAE", of a file that no family recognises; None if its keys do not tell."""
    return _first(_KINDS, shapes)


def _first(kinds: tuple[tuple[str, str], ...], shapes: Shapes) -> str | None:
    return next((kind for pattern, kind in kinds if any(re.search(pattern, key) for key in shapes)), None)
