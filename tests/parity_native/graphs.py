"""Workflows as nested nodes: written down from the result backwards, and laid flat for ComfyUI's executor.

Everything but the MODEL's source and a few `Parity*` nodes, which make random inputs, are ComfyUI's own nodes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, eq=False)
class Node:
    """One node. An input that is a Node or an Output is a link; a Node stands for its first output."""

    kind: str
    inputs: Mapping[str, Any]

    def output(self, number: int) -> Output:
        return Output(self, number)


@dataclass(frozen=True, eq=False)
class Output:
    """One output of a node."""

    node: Node
    number: int = 0


Link = Node | Output
SEEDS = ("seed", "noise_seed")


def node(kind: str, /, **inputs: Any) -> Node:
    return Node(kind, inputs)


def defaults(declared: Mapping[str, Any]) -> dict[str, Any]:
    """What a node's widgets say that a graph leaves alone, as in the browser; releases add some."""
    return {
        name: one[1]["default"]
        for name, one in declared.items()
        if len(one) > 1 and isinstance(one[1], dict) and "default" in one[1]
    }


def flat(*last: Node, seed: int = 0) -> dict[str, dict[str, Any]]:
    """The graph that ends in these nodes as the executor takes it, by ids. `seed` is added to every seed in it."""
    ids: dict[Node, str] = {}
    prompt: dict[str, dict[str, Any]] = {}

    def value_of(name: str, value: Any) -> Any:
        if isinstance(value, Node):
            return [visit(value), 0]
        if isinstance(value, Output):
            return [visit(value.node), value.number]
        return value + seed if name in SEEDS else value

    def visit(one: Node) -> str:
        if one not in ids:
            inputs = {name: value_of(name, value) for name, value in one.inputs.items()}
            ids[one] = str(len(ids))
            prompt[ids[one]] = {"class_type": one.kind, "inputs": inputs}
        return ids[one]

    for one in last:
        visit(one)
    return prompt


# ---- a sampling run


@dataclass(frozen=True)
class Step:
    """A node that the MODEL, or both conditionings, pass through on their way to the sampler.

    `latent` is the output that gives the LATENT to sample instead, if the node makes one.
    """

    kind: str
    inputs: Mapping[str, Any] = field(default_factory=dict)
    latent: int | None = None


def step(kind: str, /, latent: int | None = None, **inputs: Any) -> Step:
    return Step(kind, inputs, latent)


@dataclass(frozen=True)
class Inputs:
    """What a sampler node is connected to."""

    model: Link
    positive: Link
    negative: Link
    latent: Link


Run = Callable[[Inputs], Link]


@dataclass(frozen=True)
class Setup:
    """A whole sampling run but for the MODEL's source.

    `model` and `both` are the nodes that the MODEL and the two conditionings pass through, in this order.
    """

    latent: Link
    positive: Link
    negative: Link
    run: Run
    model: tuple[Step, ...] = ()
    both: tuple[Step, ...] = ()

    def graph(self, source: str | Link) -> Link:
        """The LATENT that comes out when the MODEL comes from `source`, one of ParityModel's or a node."""
        model = node("ParityModel", source=source) if isinstance(source, str) else source
        for one in self.model:
            model = node(one.kind, model=model, **one.inputs)
        positive, negative, latent = self.positive, self.negative, self.latent
        for one in self.both:
            pair = node(one.kind, positive=positive, negative=negative, **one.inputs)
            positive, negative = pair.output(0), pair.output(1)
            latent = latent if one.latent is None else pair.output(one.latent)
        return self.run(Inputs(model, positive, negative, latent))


# ---- sampler nodes

SEED = 40


def ksampler(
    steps: int = 4,
    cfg: float = 1.0,
    sampler: str = "euler",
    scheduler: str = "simple",
    denoise: float = 1.0,
    seed: int = SEED,
) -> Run:
    def run(inputs: Inputs) -> Link:
        return node(
            "KSampler",
            model=inputs.model,
            seed=seed,
            steps=steps,
            cfg=cfg,
            sampler_name=sampler,
            scheduler=scheduler,
            positive=inputs.positive,
            negative=inputs.negative,
            latent_image=inputs.latent,
            denoise=denoise,
        )

    return run


def ksampler_advanced(
    steps: int, start: int, end: int, cfg: float = 1.0, noise: str = "enable", leftover: str = "enable"
) -> Run:
    def run(inputs: Inputs) -> Link:
        return node(
            "KSamplerAdvanced",
            model=inputs.model,
            add_noise=noise,
            noise_seed=SEED,
            steps=steps,
            cfg=cfg,
            sampler_name="euler",
            scheduler="simple",
            positive=inputs.positive,
            negative=inputs.negative,
            latent_image=inputs.latent,
            start_at_step=start,
            end_at_step=end,
            return_with_leftover_noise=leftover,
        )

    return run


def _sigmas(model: Link, steps: int) -> Link:
    return node("BasicScheduler", model=model, scheduler="beta", steps=steps, denoise=1.0)


def sampler_custom(steps: int = 4, cfg: float = 3.0, sampler: str = "dpmpp_2m") -> Run:
    def run(inputs: Inputs) -> Link:
        return node(
            "SamplerCustom",
            model=inputs.model,
            add_noise=True,
            noise_seed=SEED,
            cfg=cfg,
            positive=inputs.positive,
            negative=inputs.negative,
            sampler=node("KSamplerSelect", sampler_name=sampler),
            sigmas=_sigmas(inputs.model, steps),
            latent_image=inputs.latent,
        )

    return run


def guided(guider: Callable[[Inputs], Link], steps: int = 4) -> Run:
    """SamplerCustomAdvanced with a guider."""

    def run(inputs: Inputs) -> Link:
        return node(
            "SamplerCustomAdvanced",
            noise=node("RandomNoise", noise_seed=SEED),
            guider=guider(inputs),
            sampler=node("KSamplerSelect", sampler_name="euler"),
            sigmas=_sigmas(inputs.model, steps),
            latent_image=inputs.latent,
        )

    return run


def basic_guider(inputs: Inputs) -> Link:
    return node("BasicGuider", model=inputs.model, conditioning=inputs.positive)


def cfg_guider(cfg: float = 4.0) -> Callable[[Inputs], Link]:
    def guider(inputs: Inputs) -> Link:
        return node(
            "CFGGuider", model=inputs.model, positive=inputs.positive, negative=inputs.negative, cfg=cfg
        )

    return guider


def dual_cfg_guider(second: Link, style: str = "regular") -> Callable[[Inputs], Link]:
    def guider(inputs: Inputs) -> Link:
        return node(
            "DualCFGGuider",
            model=inputs.model,
            cond1=inputs.positive,
            cond2=second,
            negative=inputs.negative,
            cfg_conds=3.0,
            cfg_cond2_negative=2.0,
            style=style,
        )

    return guider


# ---- conditionings


def combined(first: Link, second: Link) -> Link:
    return node("ConditioningCombine", conditioning_1=first, conditioning_2=second)


def in_area(conditioning: Link, height: int, width: int, y: int, x: int) -> Link:
    """In latent pixels."""
    return node(
        "ConditioningSetArea",
        conditioning=conditioning,
        height=height * 8,
        width=width * 8,
        y=y * 8,
        x=x * 8,
        strength=1.0,
    )


def in_mask(conditioning: Link, mask: Link) -> Link:
    return node(
        "ConditioningSetMask", conditioning=conditioning, mask=mask, strength=0.8, set_cond_area="default"
    )


def in_time(conditioning: Link, start: float, end: float) -> Link:
    return node("ConditioningSetTimestepRange", conditioning=conditioning, start=start, end=end)


def referring(conditioning: Link, *latents: Link) -> Link:
    """With reference pictures."""
    for latent in latents:
        conditioning = node("ReferenceLatent", conditioning=conditioning, latent=latent)
    return conditioning


# ---- random inputs (see nodes.py)


def empty_latent(*shape: int) -> Link:
    return node("ParityLatent", shape=list(shape), random=False, seed=0)


def latent(*shape: int, seed: int = 60) -> Link:
    return node("ParityLatent", shape=list(shape), random=True, seed=seed)


def image(height: int, width: int, frames: int = 1, seed: int = 70) -> Link:
    """In pixels."""
    return node("ParityImage", frames=frames, height=height, width=width, seed=seed)


def mask(height: int, width: int, kind: str = "half") -> Link:
    """`kind`: "half" (ones on the left), or "ramp" (from one to zero)."""
    return node("ParityMask", height=height, width=width, kind=kind)


def vae(kind: str = "image", channels: int = 16, factor: int = 8) -> Link:
    return node("ParityVAE", kind=kind, channels=channels, factor=factor, seed=80)


def masked(samples: Link, noise_mask: Link) -> Link:
    return node("SetLatentNoiseMask", samples=samples, mask=noise_mask)
