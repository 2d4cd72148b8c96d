"""Nodes for the tests alone: random inputs, the MODEL under test, and a sink. What lies between is ComfyUI's own.

Imported after ComfyUI. Numbers are drawn in fp32 on the CPU from the seed of each node.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import comfy.clip_vision
import comfy.controlnet
import comfy.latent_formats
import comfy.model_management
import comfy.ops
import torch
from comfy.ldm.flux.controlnet import ControlNetFlux
from comfy.ldm.qwen_image.controlnet import QwenImageControlNetModel

from tests.support.models import randomise

_INT = ("INT", {})
_STRING = ("STRING", {})


def _normal(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator("cpu").manual_seed(seed))


def _required(**inputs: Any) -> dict[str, Any]:
    return {"required": inputs}


class Text:
    """Embeddings of a prompt that nobody wrote: CONDITIONING of [1, length, width]; `pooled` is a width, 0 for none."""

    INPUT_TYPES = staticmethod(lambda: _required(length=_INT, width=_INT, pooled=_INT, seed=_INT))
    RETURN_TYPES = ("CONDITIONING",)
    FUNCTION = "make"

    def make(self, length: int, width: int, pooled: int, seed: int) -> tuple[Any]:
        pooled_output = _normal(seed + 1, 1, pooled) if pooled else None
        return ([[_normal(seed, 1, length, width), {"pooled_output": pooled_output}]],)


class Latent:
    INPUT_TYPES = staticmethod(lambda: _required(shape=("LIST", {}), random=("BOOLEAN", {}), seed=_INT))
    RETURN_TYPES = ("LATENT",)
    FUNCTION = "make"

    def make(self, shape: list[int], random: bool, seed: int) -> tuple[Any]:
        return ({"samples": _normal(seed, *shape) if random else torch.zeros(shape)},)


class Image:
    INPUT_TYPES = staticmethod(lambda: _required(frames=_INT, height=_INT, width=_INT, seed=_INT))
    RETURN_TYPES = ("IMAGE",)
    FUNCTION = "make"

    def make(self, frames: int, height: int, width: int, seed: int) -> tuple[Any]:
        generator = torch.Generator("cpu").manual_seed(seed)
        # Coarse, so that the stand-in for a VAE does not average it to grey.
        coarse = torch.rand(frames, 3, height // 8, width // 8, generator=generator)
        return (torch.nn.functional.interpolate(coarse, size=(height, width)).movedim(1, -1),)


class Mask:
    INPUT_TYPES = staticmethod(lambda: _required(height=_INT, width=_INT, kind=_STRING))
    RETURN_TYPES = ("MASK",)
    FUNCTION = "make"

    def make(self, height: int, width: int, kind: str) -> tuple[Any]:
        ramp = torch.linspace(1, 0, width)
        row = ramp if kind == "ramp" else (ramp > 0.5).float()
        return (row.expand(1, height, width).clone(),)


class StandInVAE:
    """Turns pixels into latents of the right shape by a fixed random linear map of each square's mean colour.

    `kind`: "image" gives [B, C, h, w], "frame" [B, C, 1, h, w] (Qwen-Image), "video" [1, C, frames, h, w] (Wan).
    """

    def __init__(self, kind: str, channels: int, factor: int, seed: int):
        self.kind, self.factor, self.latent_channels = kind, factor, channels
        self.colours = _normal(seed, channels, 3)

    def spacial_compression_encode(self) -> int:
        return self.factor

    def encode(self, pixels: torch.Tensor) -> torch.Tensor:
        """[frames or B, H, W, 3] -> latents."""
        squares = torch.nn.functional.avg_pool2d(pixels[..., :3].movedim(-1, 1), self.factor)
        latents = torch.einsum("bkhw,ck->bchw", squares * 2 - 1, self.colours)
        if self.kind == "frame":
            return latents.unsqueeze(2)
        return latents[::4].movedim(0, 1).unsqueeze(0) if self.kind == "video" else latents


class VAE:
    INPUT_TYPES = staticmethod(lambda: _required(kind=_STRING, channels=_INT, factor=_INT, seed=_INT))
    RETURN_TYPES = ("VAE",)
    FUNCTION = "make"

    def make(self, kind: str, channels: int, factor: int, seed: int) -> tuple[Any]:
        return (StandInVAE(kind, channels, factor, seed),)


class StandInStyleModel:
    """Gives Redux's tokens [1, tokens, width], whatever it is shown."""

    def __init__(self, tokens: torch.Tensor):
        self.tokens = tokens

    def get_cond(self, _: Any) -> torch.Tensor:
        return self.tokens.clone()


class StyleModel:
    INPUT_TYPES = staticmethod(lambda: _required(tokens=_INT, width=_INT, seed=_INT))
    RETURN_TYPES = ("STYLE_MODEL",)
    FUNCTION = "make"

    def make(self, tokens: int, width: int, seed: int) -> tuple[Any]:
        return (StandInStyleModel(_normal(seed, 1, tokens, width)),)


class Vision:
    """What CLIP sees: CLIP_VISION_OUTPUT of [1, tokens, 1280]."""

    INPUT_TYPES = staticmethod(lambda: _required(tokens=_INT, seed=_INT))
    RETURN_TYPES = ("CLIP_VISION_OUTPUT",)
    FUNCTION = "make"

    def make(self, tokens: int, seed: int) -> tuple[Any]:
        output = comfy.clip_vision.Output()
        output.penultimate_hidden_states = _normal(seed, 1, tokens, 1280)
        return (output,)


def _without(residuals: Any, missing: int) -> list[Any]:
    """Every `missing`th residual is left out, as some ControlNets do; 0 keeps all."""
    return [None if missing and number % missing == 0 else one for number, one in enumerate(residuals)]


class SparseFluxControl(ControlNetFlux):
    """InstantX's ControlNet of FLUX.1 with one residual for each block of the model, some of them left out."""

    missing = 0

    def forward(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        out = super().forward(*args, **kwargs)
        return {kind: _without(residuals, self.missing) for kind, residuals in out.items()}


class SparseQwenControl(QwenImageControlNetModel):
    missing = 0

    def forward(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        out = super().forward(*args, **kwargs)
        return {kind: _without(residuals, self.missing) for kind, residuals in out.items()}


class ControlNet:
    """A small random ControlNet for the model that `source` names, built as ComfyUI's loader builds one.

    `blocks` of each kind of its own; `lists` are the lengths of the residual lists it gives (ComfyUI's own are those
    of the full-size model); `union` is its number of control types.
    """

    def __init__(self, config_of: Callable[[str], Mapping[str, Any]]):
        self.config_of = config_of

    def make(self, source: str, lists: list[int], missing: int, union: int, seed: int) -> tuple[Any]:
        config = {name: value for name, value in self.config_of(source).items() if name != "dtype"}
        common = {"operations": comfy.ops.disable_weight_init, "device": "cpu", "dtype": torch.float32}
        torch.manual_seed(seed)
        control: Any
        if config["image_model"] == "flux":
            config |= {"depth": 2, "depth_single_blocks": 1}
            control = SparseFluxControl(
                latent_input=True, control_latent_channels=16, num_union_modes=union, **common, **config
            )
            control.main_model_double, control.main_model_single = lists
            latent_format, extra = comfy.latent_formats.Flux(), ["y", "guidance"]
        else:
            control = SparseQwenControl(**common, **config | {"num_layers": 2})
            (control.main_model_double,) = lists
            latent_format, extra = comfy.latent_formats.Wan21(), []
        control.missing = missing
        randomise(control)
        return (
            comfy.controlnet.ControlNet(
                control.eval(),
                compression_ratio=1,
                latent_format=latent_format,
                load_device=comfy.model_management.get_torch_device(),
                extra_conds=extra,
            ),
        )


class Model:
    """The MODEL under test; which one, `source` says."""

    def __init__(self, load: Callable[[str], Any]):
        self.load = load

    def make(self, source: str) -> tuple[Any]:
        return (self.load(source),)


class Result:
    """The sink: hands the LATENT's tensor out of the graph. `key` makes every run of it a new one."""

    def __init__(self, keep: Callable[[str, torch.Tensor], None]):
        self.keep = keep

    def make(self, samples: dict[str, Any], key: str) -> dict[str, Any]:
        self.keep(key, samples["samples"])
        return {}


def _node(made_by: Any, inputs: Mapping[str, Any], returns: tuple[str, ...], **more: Any) -> type:
    """A node class around an object that the test holds; ComfyUI makes its instances itself, without arguments."""
    fields = {
        "INPUT_TYPES": staticmethod(lambda: {"required": dict(inputs)}),
        "RETURN_TYPES": returns,
        "FUNCTION": "make",
        "make": lambda _self, **given: made_by.make(**given),
        **more,
    }
    return type(f"Parity{type(made_by).__name__}", (), fields)


def node_classes(
    load: Callable[[str], Any],
    config_of: Callable[[str], Mapping[str, Any]],
    keep: Callable[[str, torch.Tensor], None],
) -> dict[str, type]:
    """Every node by its name in graphs.

    `load` gives the MODEL of a source, `config_of` the unet_config that ComfyUI detects for it, and `keep` takes a
    result with its key.
    """
    return {
        "ParityText": Text,
        "ParityLatent": Latent,
        "ParityImage": Image,
        "ParityMask": Mask,
        "ParityVAE": VAE,
        "ParityStyleModel": StyleModel,
        "ParityVision": Vision,
        "ParityControlNet": _node(
            ControlNet(config_of),
            {"source": _STRING, "lists": ("LIST", {}), "missing": _INT, "union": _INT, "seed": _INT},
            ("CONTROL_NET",),
        ),
        "ParityModel": _node(Model(load), {"source": _STRING}, ("MODEL",)),
        "ParityResult": _node(
            Result(keep), {"samples": ("LATENT", {}), "key": _STRING}, (), OUTPUT_NODE=True
        ),
    }
