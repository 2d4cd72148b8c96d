"""Wan 2.1 and 2.2: text to video, image to video, first and last frame, and both in one (TI2V)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tests.parity_native.cases import Case, Family
from tests.parity_native.graphs import (
    Link,
    Setup,
    Step,
    basic_guider,
    cfg_guider,
    dual_cfg_guider,
    empty_latent,
    guided,
    image,
    in_time,
    ksampler,
    ksampler_advanced,
    latent,
    mask,
    masked,
    node,
    sampler_custom,
    step,
    vae,
)
from tests.parity_native.variants import TEXT, WAN_22_I2V, WAN_22_TI2V, WAN_FLF2V, WAN_I2V, WAN_T2V

# 3 latent frames of 6x8 latent pixels: 9 frames of 48x64 pixels, 36 tokens.
FRAMES, HEIGHT, WIDTH = 3, 6, 8
SIZE = {"width": WIDTH * 8, "height": HEIGHT * 8, "length": 9, "batch_size": 1}
UMT5 = 512  # tokens: ComfyUI fills every prompt up to these


def text(length: int = UMT5, seed: int = 1) -> Link:
    return node("ParityText", length=length, width=TEXT, pooled=0, seed=seed)


def seen(tokens: int = 257, seed: int = 66) -> Link:
    return node("ParityVision", tokens=tokens, seed=seed)


def from_image(frames: int = 1, batch: int = 1, **vision: Link) -> Step:
    """`frames` are given; `clip_vision_output` is what CLIP saw."""
    start = image(HEIGHT * 8, WIDTH * 8, frames)
    size = SIZE | {"batch_size": batch}
    return step("WanImageToVideo", 2, vae=vae("video"), start_image=start, **size, **vision)


def from_two_images() -> Step:
    return step(
        "WanFirstLastFrameToVideo",
        2,
        vae=vae("video"),
        start_image=image(HEIGHT * 8, WIDTH * 8),
        end_image=image(HEIGHT * 8, WIDTH * 8, seed=71),
        clip_vision_start_image=seen(),
        clip_vision_end_image=seen(seed=67),
        **SIZE,
    )


def first_frame(batch: int = 1, **more: Any) -> Link:
    """A LATENT whose first frame is given: TI2V then sees a timestep for each frame. 6x8 latent pixels of 16."""
    return node(
        "Wan22ImageToVideoLatent",
        vae=vae("video", 48, 16),
        width=WIDTH * 16,
        height=HEIGHT * 16,
        length=9,
        batch_size=batch,
        **more,
    )


T2V = Setup(
    latent=empty_latent(1, 16, FRAMES, HEIGHT, WIDTH),
    positive=text(seed=1),
    negative=text(seed=2),
    run=ksampler(cfg=5.0),
)
OTHER = text(seed=9)
SHORT = replace(T2V, positive=text(20), negative=text(18, seed=2))
UNI_PC = replace(T2V, run=ksampler(6, cfg=5.0, sampler="uni_pc"))
TWENTY = replace(T2V, run=ksampler(20, cfg=5.0))
ODD = replace(T2V, latent=empty_latent(1, 16, FRAMES, 9, 7))
ODD_TOKENS = replace(T2V, latent=empty_latent(1, 16, FRAMES, 6, 10))
EDITED = replace(T2V, latent=latent(1, 16, FRAMES, HEIGHT, WIDTH), run=ksampler(cfg=5.0, denoise=0.6))
LONG = replace(T2V, latent=empty_latent(1, 16, 12, HEIGHT, WIDTH))
WINDOWS = step(
    "WanContextWindowsManual",
    context_length=21,
    context_overlap=9,
    context_schedule="standard_static",
    context_stride=1,
    closed_loop=False,
    fuse_method="pyramid",
)
SHIFT = step("ModelSamplingSD3", shift=3.0)
EASY_CACHE = step("EasyCache", reuse_threshold=1.0, start_percent=0.15, end_percent=0.95, verbose=False)
ROPE = step("ScaleROPE", scale_x=1.5, shift_x=2.0, scale_y=0.7, shift_y=-1.0, scale_t=1.2, shift_t=1.0)
SKIPPING = step(
    "SkipLayerGuidanceDiT",
    double_layers="1",
    single_layers="",
    scale=3.0,
    start_percent=0.0,
    end_percent=1.0,
    rescaling_scale=0.0,
)
ADVANCED = replace(T2V, run=guided(basic_guider))
I2V = replace(T2V, both=(from_image(clip_vision_output=seen()),))
I2V_UNSEEN = replace(T2V, both=(from_image(),))
TI2V = replace(T2V, latent=first_frame(start_image=image(HEIGHT * 16, WIDTH * 16)))
TI2V_PLAIN = replace(T2V, latent=first_frame())
PAIR = replace(T2V, latent=empty_latent(2, 16, FRAMES, HEIGHT, WIDTH), run=ksampler(12))


def t2v(name: str, setup: Setup, without: Setup | None, **more: object) -> Case:
    return Case(WAN_T2V, name, setup, without, **more)  # type: ignore[arg-type]


def other_text(setup: Setup) -> Setup:
    return replace(setup, positive=OTHER)


WAN = Family(
    "Wan 2.1 / 2.2",
    5e-6,
    (
        t2v("t2v one forward", replace(T2V, run=ksampler(1)), replace(T2V, run=ksampler(1), positive=OTHER)),
        t2v("t2v euler 4 steps, cfg 5", T2V, replace(T2V, run=ksampler())),
        t2v("t2v uni_pc 6 steps, cfg 5", UNI_PC, replace(T2V, run=ksampler(6, cfg=5.0)), core=True),
        t2v("t2v euler 20 steps, cfg 5", TWENTY, other_text(TWENTY)),
        t2v("t2v 20 and 18 text tokens", SHORT, T2V),
        t2v("t2v batch of 3", replace(T2V, latent=empty_latent(3, 16, FRAMES, HEIGHT, WIDTH)), None),
        t2v("t2v odd latent 9x7", ODD, other_text(ODD)),
        t2v("t2v 45 tokens", ODD_TOKENS, other_text(ODD_TOKENS), core=True),
        t2v("t2v video to video 0.6", EDITED, replace(EDITED, latent=T2V.latent)),
        t2v(
            "t2v inpaint mask",
            replace(EDITED, latent=masked(EDITED.latent, mask(HEIGHT * 8, WIDTH * 8))),
            EDITED,
        ),
        t2v("t2v context windows", replace(LONG, model=(WINDOWS,)), LONG),
        # Before any node that replaces the MODEL's sampling: EasyCache reads what the last run left there.
        t2v(
            "t2v EasyCache",
            replace(T2V, run=ksampler(10, cfg=2.0), model=(EASY_CACHE,)),
            replace(T2V, run=ksampler(10, cfg=2.0)),
        ),
        t2v("t2v ModelSamplingSD3", replace(T2V, model=(SHIFT,)), T2V),
        t2v("t2v SkipLayerGuidanceDiT", replace(T2V, model=(SKIPPING,)), T2V),
        t2v("t2v ScaleROPE", replace(T2V, model=(ROPE,)), T2V),
        t2v("t2v timestep range", replace(T2V, positive=in_time(T2V.positive, 0.0, 0.4)), T2V),
        t2v("t2v KSamplerAdvanced 2-6 of 8", replace(EDITED, run=ksampler_advanced(8, 2, 6, 5.0)), EDITED),
        t2v(
            "t2v SamplerCustom", replace(T2V, run=sampler_custom()), replace(T2V, run=sampler_custom(cfg=1.0))
        ),
        t2v("t2v BasicGuider", ADVANCED, other_text(ADVANCED)),
        t2v("t2v CFGGuider", replace(T2V, run=guided(cfg_guider())), ADVANCED),
        t2v("t2v DualCFGGuider", replace(T2V, run=guided(dual_cfg_guider(text(20, seed=5)))), ADVANCED),
        Case(WAN_I2V, "i2v", I2V, I2V_UNSEEN, core=True),
        Case(WAN_I2V, "i2v without clip vision", I2V_UNSEEN, T2V),
        Case(
            WAN_I2V,
            "i2v, five frames given",
            replace(T2V, both=(from_image(5, clip_vision_output=seen()),)),
            I2V,
        ),
        Case(
            WAN_I2V,
            "i2v, 514 of clip vision",
            replace(T2V, both=(from_image(clip_vision_output=seen(514)),)),
            I2V,
        ),
        # ComfyUI's own text encoder never gives fewer than 512 tokens.
        Case(WAN_I2V, "i2v, 20 and 18 text tokens", replace(SHORT, both=I2V.both), I2V, refusable=True),
        Case(WAN_I2V, "i2v, 520 text tokens", replace(I2V, positive=text(520)), I2V, refusable=True),
        Case(WAN_I2V, "i2v, 256 text tokens", replace(I2V, positive=text(256)), I2V),
        Case(WAN_I2V, "i2v uni_pc", replace(I2V, run=UNI_PC.run), replace(UNI_PC, both=I2V_UNSEEN.both)),
        Case(WAN_FLF2V, "first and last frame", replace(T2V, both=(from_two_images(),)), I2V),
        Case(WAN_22_I2V, "2.2 i2v", I2V_UNSEEN, T2V),
        Case(WAN_22_TI2V, "2.2 TI2V, a timestep per frame", TI2V, TI2V_PLAIN, core=True),
        Case(WAN_22_TI2V, "2.2 TI2V uni_pc", replace(TI2V, run=UNI_PC.run), TI2V),
        Case(WAN_22_TI2V, "2.2 TI2V, text only", TI2V_PLAIN, other_text(TI2V_PLAIN)),
        # bf16: two at a time, for nothing but another picture moves a result a hundred times bf16's rounding.
        t2v("bf16, t2v 20 steps", replace(PAIR, run=ksampler(20)), None, dtype="bfloat16"),
        Case(
            WAN_I2V,
            "bf16, i2v",
            replace(PAIR, both=(from_image(batch=2, clip_vision_output=seen()),)),
            None,
            dtype="bfloat16",
        ),
        Case(
            WAN_22_TI2V,
            "bf16, 2.2 TI2V",
            replace(PAIR, latent=first_frame(2, start_image=image(HEIGHT * 16, WIDTH * 16))),
            None,
            dtype="bfloat16",
            core=True,
        ),
    ),
)
