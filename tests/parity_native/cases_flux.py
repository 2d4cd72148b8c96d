"""FLUX.1: dev, schnell, Fill, Canny and Kontext."""

from __future__ import annotations

from dataclasses import replace

from tests.parity_native.cases import Case, Family
from tests.parity_native.graphs import (
    Link,
    Setup,
    Step,
    basic_guider,
    cfg_guider,
    combined,
    dual_cfg_guider,
    empty_latent,
    guided,
    image,
    in_area,
    in_mask,
    in_time,
    ksampler,
    ksampler_advanced,
    latent,
    mask,
    masked,
    node,
    referring,
    sampler_custom,
    step,
    vae,
)
from tests.parity_native.variants import FLUX_CANNY, FLUX_DEV, FLUX_FILL, FLUX_SCHNELL, POOLED, TEXT

# 8x12 latent pixels are 24 tokens.
HEIGHT, WIDTH = 8, 12


def text(length: int = 12, seed: int = 1, pooled: int = POOLED) -> Link:
    return node("ParityText", length=length, width=TEXT, pooled=pooled, seed=seed)


def guidance(conditioning: Link, value: float) -> Link:
    return node("FluxGuidance", conditioning=conditioning, guidance=value)


def method(conditioning: Link, name: str) -> Link:
    return node(
        "FluxKontextMultiReferenceLatentMethod", conditioning=conditioning, reference_latents_method=name
    )


def control(lists: tuple[int, int] = (2, 3), missing: int = 0, union: int = 0) -> Step:
    net: Link = node(
        "ParityControlNet", source=FLUX_DEV.name, lists=list(lists), missing=missing, union=union, seed=90
    )
    if union:
        net = node("SetUnionControlNetType", control_net=net, type="depth")
    return step(
        "ControlNetApplyAdvanced",
        control_net=net,
        image=image(HEIGHT * 8, WIDTH * 8),
        strength=0.7,
        start_percent=0.0,
        end_percent=1.0,
        vae=vae(),
    )


BASE = Setup(
    latent=empty_latent(1, 16, HEIGHT, WIDTH),
    positive=text(seed=1),
    negative=text(seed=2),
    run=ksampler(),
)
OTHER_TEXT = replace(BASE, positive=text(seed=9))
CFG = replace(BASE, run=ksampler(cfg=4.0))
PAIR = replace(BASE, latent=empty_latent(2, 16, HEIGHT, WIDTH), run=ksampler(12))
TWO_LENGTHS = replace(CFG, negative=text(10, seed=2))
EDITED = replace(BASE, latent=latent(1, 16, HEIGHT, WIDTH), run=ksampler(denoise=0.6))
HALF = masked(EDITED.latent, mask(HEIGHT * 8, WIDTH * 8))
RAMP = masked(EDITED.latent, mask(HEIGHT * 8, WIDTH * 8, "ramp"))
ODD = replace(BASE, latent=empty_latent(1, 16, 9, 7))
ODD_TOKENS = replace(BASE, latent=empty_latent(1, 16, 6, 10), positive=text(11))
REFERENCE = latent(1, 16, 6, 8, seed=61)
SECOND = latent(1, 16, 4, 10, seed=62)
REFERRING = replace(BASE, positive=referring(BASE.positive, REFERENCE))
TWO_REFERENCES = referring(BASE.positive, REFERENCE, SECOND)
OFFSET = replace(BASE, positive=method(TWO_REFERENCES, "offset"))
CONTROLLED = replace(BASE, both=(control(),))
ADVANCED = replace(BASE, run=guided(basic_guider))
SKIPPING = step(
    "SkipLayerGuidanceDiT",
    double_layers="1",
    single_layers="0, 2",
    scale=3.0,
    start_percent=0.0,
    end_percent=1.0,
    rescaling_scale=0.0,
)
EASY_CACHE = step("EasyCache", reuse_threshold=1.0, start_percent=0.15, end_percent=0.95, verbose=False)
ROPE = step("ScaleROPE", scale_x=1.5, shift_x=2.0, scale_y=0.7, shift_y=-1.0, scale_t=1.0, shift_t=0.0)
SHIFT = step("ModelSamplingFlux", max_shift=1.6, base_shift=0.3, width=512, height=768)
REDUX = node(
    "StyleModelApply",
    conditioning=text(8, seed=1),
    style_model=node("ParityStyleModel", tokens=4, width=TEXT, seed=63),
    clip_vision_output=node("ParityVision", tokens=4, seed=64),
    strength=0.3,
    strength_type="attn_bias",
)
REDUX_PLAIN = node("StyleModelApply", **{**REDUX.inputs, "strength": 1.0, "strength_type": "multiply"})
PIXELS = image(HEIGHT * 8, WIDTH * 8)
FILL = step(
    "InpaintModelConditioning",
    2,
    vae=vae(),
    pixels=PIXELS,
    mask=mask(HEIGHT * 8, WIDTH * 8),
    noise_mask=True,
)
CANNY = step("InstructPixToPixConditioning", 2, vae=vae(), pixels=PIXELS)

TWENTY = replace(CFG, run=ksampler(20, cfg=4.0))
SAMPLERS = ("dpmpp_2m", "euler_ancestral", "heun", "uni_pc_bh2", "dpmpp_2m_sde", "res_multistep", "lcm")


def dev(name: str, setup: Setup, without: Setup | None, **more: object) -> Case:
    return Case(FLUX_DEV, name, setup, without, **more)  # type: ignore[arg-type]


def in_bf16(setup: Setup, value: float = 4.0) -> Setup:
    """With a guidance that bf16 holds exactly once it is multiplied by 1000; 3.5 is not."""
    return replace(setup, positive=guidance(setup.positive, value), negative=guidance(setup.negative, value))


AREAS = replace(
    BASE,
    positive=combined(in_area(text(seed=3), 8, 6, 0, 6), in_area(text(10, seed=4), 4, 12, 0, 0)),
)
MASK_AND_RANGE = replace(
    BASE,
    positive=combined(
        in_mask(in_time(text(seed=3), 0.0, 0.5), mask(HEIGHT * 8, WIDTH * 8)), in_time(text(10), 0.2, 1.0)
    ),
)

FLUX = Family(
    "FLUX.1",
    2e-6,
    (
        dev("one forward", replace(BASE, run=ksampler(1)), replace(OTHER_TEXT, run=ksampler(1))),
        dev("euler 4 steps", BASE, OTHER_TEXT),
        dev("cfg 4 batched", CFG, BASE),
        dev("cfg 4, two text lengths", TWO_LENGTHS, CFG, core=True),
        dev("20 steps, cfg 4", TWENTY, replace(TWENTY, positive=text(seed=9))),
        *(
            dev(
                name, replace(CFG, run=ksampler(6, cfg=2.0, sampler=name)), replace(CFG, run=ksampler(6, 2.0))
            )
            for name in SAMPLERS
        ),
        dev("img2img 0.6", EDITED, replace(EDITED, latent=BASE.latent)),
        dev("inpaint mask", replace(EDITED, latent=HALF, run=ksampler()), replace(EDITED, run=ksampler())),
        dev("batch of 3", replace(CFG, latent=empty_latent(3, 16, HEIGHT, WIDTH)), None),
        dev("odd latent 9x7", ODD, replace(ODD, positive=text(seed=9))),
        dev(
            "odd lengths: 15 and 11 tokens",
            ODD_TOKENS,
            replace(ODD_TOKENS, positive=text(11, seed=9)),
            core=True,
        ),
        # Kontext
        dev("reference", REFERRING, BASE, core=True),
        dev("two references, offset", OFFSET, REFERRING),
        dev("two references, index", replace(BASE, positive=method(TWO_REFERENCES, "index")), OFFSET),
        dev("two references, uxo", replace(BASE, positive=method(TWO_REFERENCES, "uxo/uno")), OFFSET),
        dev("reference, cfg 4", replace(REFERRING, run=ksampler(cfg=4.0)), REFERRING),
        # conditioning
        dev(
            "attention mask",
            replace(BASE, positive=REDUX),
            replace(BASE, positive=REDUX_PLAIN),
            core=True,
        ),
        dev("pooled text none", replace(BASE, positive=text(pooled=0)), BASE),
        dev("guidance 1", replace(BASE, positive=guidance(BASE.positive, 1.0)), BASE),
        dev(
            "guidance none",
            replace(BASE, positive=node("FluxDisableGuidance", conditioning=BASE.positive)),
            BASE,
        ),
        dev("areas", AREAS, BASE),
        dev("mask and timestep range", MASK_AND_RANGE, BASE),
        # ControlNet
        dev("controlnet", CONTROLLED, BASE),
        dev("controlnet, residuals left out", replace(BASE, both=(control(missing=2),)), CONTROLLED),
        dev("controlnet, full-size lists", replace(BASE, both=(control((19, 38)),)), CONTROLLED),
        dev("controlnet, fewer than blocks", replace(BASE, both=(control((1, 1)),)), CONTROLLED),
        dev("controlnet union", replace(BASE, both=(control(union=8),)), BASE),
        dev("controlnet, cfg 4", replace(CFG, both=(control(missing=2),)), CFG),
        dev("controlnet and reference", replace(REFERRING, both=(control(),)), REFERRING),
        dev("two controlnets", replace(BASE, both=(control(), control(missing=2))), CONTROLLED),
        # nodes on the MODEL
        # Before any node that replaces the MODEL's sampling: EasyCache reads what the last run left there.
        dev(
            "EasyCache",
            replace(BASE, run=ksampler(10, cfg=2.0), model=(EASY_CACHE,)),
            replace(BASE, run=ksampler(10, cfg=2.0)),
        ),
        dev("ScaleROPE", replace(BASE, model=(ROPE,)), BASE),
        dev("ModelSamplingFlux", replace(BASE, model=(SHIFT,)), BASE),
        dev(
            "DifferentialDiffusion",
            replace(EDITED, latent=RAMP, model=(step("DifferentialDiffusion", strength=1.0),)),
            replace(EDITED, latent=RAMP),
        ),
        dev("SkipLayerGuidanceDiT", replace(BASE, model=(SKIPPING,)), BASE),
        # sampler nodes
        dev("KSamplerAdvanced 2-6 of 8", replace(EDITED, run=ksampler_advanced(8, 2, 6)), EDITED),
        dev("SamplerCustom", replace(BASE, run=sampler_custom()), replace(BASE, run=sampler_custom(cfg=1.0))),
        dev("BasicGuider", ADVANCED, replace(ADVANCED, positive=text(seed=9))),
        dev("CFGGuider", replace(BASE, run=guided(cfg_guider())), ADVANCED),
        dev("DualCFGGuider", replace(BASE, run=guided(dual_cfg_guider(text(seed=5)))), ADVANCED),
        dev(
            "DualCFGGuider nested",
            replace(BASE, run=guided(dual_cfg_guider(text(10, seed=5), "nested"))),
            ADVANCED,
        ),
        # the other checkpoints
        Case(FLUX_SCHNELL, "schnell", BASE, OTHER_TEXT),
        Case(FLUX_SCHNELL, "schnell, cfg 4", TWO_LENGTHS, BASE),
        Case(FLUX_FILL, "Fill", replace(BASE, both=(FILL,)), BASE),
        Case(FLUX_FILL, "Fill, cfg 4", replace(TWO_LENGTHS, both=(FILL,)), TWO_LENGTHS),
        Case(FLUX_FILL, "Fill without a picture", BASE, OTHER_TEXT),
        Case(FLUX_CANNY, "Canny", replace(BASE, both=(CANNY,)), BASE),
        # bf16: two at a time, for nothing but another picture moves a result a hundred times bf16's rounding.
        dev("bf16, 20 steps", in_bf16(replace(PAIR, run=ksampler(20))), None, dtype="bfloat16", core=True),
        dev("bf16, reference", in_bf16(replace(PAIR, positive=REFERRING.positive)), None, dtype="bfloat16"),
        Case(FLUX_SCHNELL, "bf16, schnell", PAIR, None, dtype="bfloat16"),
    ),
)
