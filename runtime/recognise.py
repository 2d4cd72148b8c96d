"""Tells from keys and shapes alone what a single file in an original layout holds; no torch, nothing is read.

keys and shapes of the file -> which family's transformer, behind which prefix -> its diffusers config
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from .families.family import Family, Shapes
from .families.table import FAMILIES
from .foreign import adapter_kind, other_kind
from .safetensors_header import printable
from .spec import Refusal

# Where trainers and ComfyUI put a diffusion transformer inside a file; compare `unet_prefix_from_state_dict` in
# ComfyUI's model_detection. The longest comes first, the bare layout last.
PREFIXES = (
    "model.diffusion_model.",
    "diffusion_model.",
    "model.model.",
    "transformer.",
    "model.",
    "net.",
    "",
)
# The other parts of an all-in-one checkpoint, which are left aside.
_OTHER_PARTS = (
    "first_stage_model.",
    "vae.",
    "audio_vae.",
    "vocoder.",
    "text_encoders.",
    "text_encoder.",
    "text_embedding_projection.",
    "cond_stage_model.",
    "conditioner.",
    "model_ema.",
)


class Recognised(NamedTuple):
    """A diffusion transformer in a file: its family, and the prefix of its keys."""

    family: Family
    prefix: str


def is_other_part(key: str) -> bool:
    """Whether a key is of another part of an all-in-one checkpoint."""
    return key.startswith(_OTHER_PARTS)


def recognise(path: Path, shapes: Shapes, working: str = "") -> Recognised:
    """What a file of these keys and shapes holds. Raises Refusal for anything but a transformer that is known.

    `working` are the families that the asker can use, for the message; all of them if it is empty.
    """
    own = {key: shape for key, shape in shapes.items() if not is_other_part(key)}
    if adapter_kind(shapes) is None:
        for prefix in PREFIXES:
            inside = {key[len(prefix) :]: shape for key, shape in own.items() if key.startswith(prefix)}
            for family in FAMILIES if inside else ():
                if family.recognises(inside):
                    return Recognised(family, prefix)
    raise _unknown(path, shapes, working)


def config_of(path: Path, family: Family, shapes: Shapes) -> dict[str, Any]:
    """The constructor's arguments of a family's class, from shapes without the prefix. Raises Refusal."""
    try:
        return family.config(shapes)
    except (ValueError, KeyError, IndexError, ZeroDivisionError) as error:
        raise Refusal(
            f"'{printable(path.name)}' is a {family.name} model of a kind that cannot be loaded.",
            f"The reason: {printable(error)}.",
            "Use the model as its authors published it, or as a diffusers folder.",
        ) from error


def _unknown(path: Path, shapes: Shapes, working: str) -> Refusal:
    known = working or ", ".join(dict.fromkeys(family.name for family in FAMILIES))
    name = printable(path.name)
    if what := adapter_kind(shapes) or other_kind(shapes):
        return Refusal(
            f"'{name}' is {what}, not a diffusion transformer.",
            "Its keys show it; this loader takes the diffusion model only.",
            f"Choose a file of one of these: {known}.",
        )
    return Refusal(
        f"'{name}' is of no architecture that is known here.",
        f"It has keys such as {_some(shapes)}.",
        f"Works here: {known}.",
    )


def _some(shapes: Mapping[str, object]) -> str:
    keys = list(shapes)
    return ", ".join(f"'{printable(key)}'" for key in keys[:: max(1, len(keys) // 4)][:4]) or "none at all"
