"""Every family of single files that is known, in the order in which they are asked whether a file is theirs."""

from __future__ import annotations

from . import (
    aura_flow,
    chroma,
    cosmos,
    ernie_image,
    flux,
    flux2,
    flux3,
    hidream,
    hunyuan_video,
    krea2,
    ltx,
    lumina2,
    minimax_h3,
    mochi,
    qwen_image,
    qwen_image_21,
    sana,
    sd3,
    wan,
    wan_animate,
    z_image,
)
from .family import Family

FAMILIES: tuple[Family, ...] = (
    *flux.FAMILIES,
    *flux2.FAMILIES,
    *chroma.FAMILIES,
    *sd3.FAMILIES,
    *qwen_image.FAMILIES,
    *z_image.FAMILIES,
    *lumina2.FAMILIES,
    *wan_animate.FAMILIES,
    *wan.FAMILIES,
    *ltx.FAMILIES,
    *hunyuan_video.FAMILIES,
    *flux3.FAMILIES,
    *qwen_image_21.FAMILIES,
    *hidream.FAMILIES,
    *aura_flow.FAMILIES,
    *krea2.FAMILIES,
    *ernie_image.FAMILIES,
    *sana.FAMILIES,
    *cosmos.FAMILIES,
    *mochi.FAMILIES,
    *minimax_h3.FAMILIES,
)
