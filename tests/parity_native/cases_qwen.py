"""Qwen-Image, and its Edit models' reference pictures."""

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
from tests.parity_native.variants import QWEN, TEXT

# 8x12 latent pixels are 4x6 tokens: even on both sides, where diffusers' own positions are right.
HEIGHT, WIDTH = 8, 12


def text(length: int = 12, seed: int = 1) -> Link:
    return node("ParityText", length=length, width=TEXT, pooled=0, seed=seed)


def method(conditioning: Link, name: str) -> Link:
    return node(
        "FluxKontextMultiReferenceLatentMethod", conditioning=conditioning, reference_latents_method=name
    )


def control(lists: int = 3, missing: int = 0) -> Step:
    net = node("ParityControlNet", source=QWEN.name, lists=[lists], missing=missing, union=0, seed=90)
    return step(
        "ControlNetApplyAdvanced",
        control_net=net,
        image=image(HEIGHT * 8, WIDTH * 8),
        strength=0.7,
        start_percent=0.0,
        end_percent=1.0,
        vae=vae("frame"),
    )


def sized(height: int, width: int, batch: int = 1) -> Link:
    return empty_latent(batch, 16, 1, height, width)


BASE = Setup(latent=sized(HEIGHT, WIDTH), positive=text(seed=1), negative=text(seed=2), run=ksampler())
OTHER = text(seed=9)
CFG = replace(BASE, run=ksampler(cfg=4.0))
PAIR = replace(BASE, latent=sized(HEIGHT, WIDTH, 2), run=ksampler(12))
TWO_LENGTHS = replace(CFG, negative=text(10, seed=2))
TWENTY = replace(TWO_LENGTHS, run=ksampler(20, cfg=4.0))
EDITED = replace(BASE, latent=latent(1, 16, 1, HEIGHT, WIDTH), run=ksampler(denoise=0.6))
HALF = masked(EDITED.latent, mask(HEIGHT * 8, WIDTH * 8))
# Tokens: 5x3 and, padded, 5x4; and an odd side each in a number of tokens that two ranks share.
ODD = replace(BASE, latent=sized(10, 6), positive=text(11))
ODD_PADDED = replace(BASE, latent=sized(9, 7))
ODD_SIDE = replace(BASE, latent=sized(12, 10))
REFERENCE = latent(1, 16, 1, 6, 8, seed=61)
SECOND = latent(1, 16, 1, 4, 10, seed=62)
LARGE = latent(1, 16, 1, 14, 20, seed=63)
REFERRING = replace(BASE, positive=referring(BASE.positive, REFERENCE))
TWO_REFERENCES = referring(BASE.positive, REFERENCE, SECOND)
INDEX = replace(BASE, positive=TWO_REFERENCES)
CONTROLLED = replace(BASE, both=(control(),))
ADVANCED = replace(BASE, run=guided(basic_guider))
SKIPPING = step(
    "SkipLayerGuidanceDiT",
    double_layers="0, 2",
    single_layers="",
    scale=3.0,
    start_percent=0.0,
    end_percent=1.0,
    rescaling_scale=0.0,
)
EASY_CACHE = step("EasyCache", reuse_threshold=1.0, start_percent=0.15, end_percent=0.95, verbose=False)
SHIFT = step("ModelSamplingAuraFlow", shift=3.1)
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


def qwen(name: str, setup: Setup, without: Setup | None, **more: object) -> Case:
    return Case(QWEN, name, setup, without, **more)  # type: ignore[arg-type]


def other_text(setup: Setup) -> Setup:
    return replace(setup, positive=OTHER)


QWEN_IMAGE = Family(
    "Qwen-Image",
    2e-6,
    (
        qwen("one forward", replace(BASE, run=ksampler(1)), replace(BASE, run=ksampler(1), positive=OTHER)),
        qwen("euler 4 steps", BASE, other_text(BASE)),
        qwen("cfg 4 batched", CFG, BASE),
        qwen("cfg 4, two text lengths", TWO_LENGTHS, CFG, core=True),
        qwen("20 steps, cfg 4, two text lengths", TWENTY, other_text(TWENTY)),
        qwen("dpmpp_2m", replace(CFG, run=ksampler(6, 2.0, "dpmpp_2m")), replace(CFG, run=ksampler(6, 2.0))),
        qwen("img2img 0.6", EDITED, replace(EDITED, latent=BASE.latent)),
        qwen("inpaint mask", replace(EDITED, latent=HALF, run=ksampler()), replace(EDITED, run=ksampler())),
        qwen("batch of 3", replace(TWO_LENGTHS, latent=sized(HEIGHT, WIDTH, 3)), None),
        # positions
        qwen("odd grid 5x3, 11 text tokens", ODD, other_text(ODD), core=True),
        qwen("odd latent 9x7", ODD_PADDED, other_text(ODD_PADDED)),
        qwen("odd side 6x5", ODD_SIDE, other_text(ODD_SIDE)),
        qwen("reference", REFERRING, BASE, core=True),
        qwen("larger reference", replace(BASE, positive=referring(BASE.positive, LARGE)), BASE),
        qwen("two references, index", INDEX, REFERRING),
        qwen("two references, offset", replace(BASE, positive=method(TWO_REFERENCES, "offset")), INDEX),
        qwen("reference, odd grids", replace(ODD_PADDED, positive=REFERRING.positive), ODD_PADDED),
        qwen("reference, cfg 4", replace(REFERRING, run=ksampler(cfg=4.0)), REFERRING),
        # conditioning
        qwen("areas", AREAS, BASE),
        qwen("mask and timestep range", MASK_AND_RANGE, BASE),
        qwen("controlnet", CONTROLLED, BASE),
        qwen("controlnet, residuals left out", replace(BASE, both=(control(missing=2),)), CONTROLLED),
        qwen("controlnet, full-size lists", replace(BASE, both=(control(60),)), CONTROLLED),
        qwen("controlnet and reference", replace(REFERRING, both=(control(),)), REFERRING),
        # nodes
        # Before any node that replaces the MODEL's sampling: EasyCache reads what the last run left there.
        qwen(
            "EasyCache",
            replace(BASE, run=ksampler(10, cfg=2.0), model=(EASY_CACHE,)),
            replace(BASE, run=ksampler(10, cfg=2.0)),
        ),
        qwen("ModelSamplingAuraFlow", replace(BASE, model=(SHIFT,)), BASE),
        qwen("SkipLayerGuidanceDiT", replace(BASE, model=(SKIPPING,)), BASE),
        qwen("KSamplerAdvanced 2-6 of 8", replace(EDITED, run=ksampler_advanced(8, 2, 6)), EDITED),
        qwen(
            "SamplerCustom", replace(BASE, run=sampler_custom()), replace(BASE, run=sampler_custom(cfg=1.0))
        ),
        qwen("BasicGuider", ADVANCED, other_text(ADVANCED)),
        qwen("CFGGuider", replace(BASE, run=guided(cfg_guider())), ADVANCED),
        qwen("DualCFGGuider", replace(BASE, run=guided(dual_cfg_guider(text(10, seed=5)))), ADVANCED),
        # bf16: two at a time, for nothing but another picture moves a result a hundred times bf16's rounding.
        qwen("bf16, 20 steps", replace(PAIR, run=ksampler(20)), None, dtype="bfloat16", core=True),
        qwen("bf16, reference", replace(PAIR, positive=REFERRING.positive), None, dtype="bfloat16"),
    ),
)
