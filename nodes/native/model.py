"""Builds the stock MODEL of a slot: ComfyUI's own model without weights, whose inner forward calls the group.

Everything around the denoiser (noise schedule, conditioning, latent format, patches of the picture) is ComfyUI's own
code, chosen by its own detection from the names and shapes of the checkpoint. The model lies on the meta device: no
weight is allocated. Its class is swapped for a subclass that has one method replaced; assigning a function to the
instance instead would make a reference cycle, and ComfyUI would report a leak.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import torch

from ...runtime import planner
from ...runtime.group import GROUPS
from ...runtime.spec import Layout, ParallelConfig, Refusal
from .. import comfy_host
from .families.family import NativeFamily
from .families.table import FAMILIES, working
from .patcher import SAVING, ShardedPatcher, needs_weights, patcher_for
from .remote import Remote, refuse_patches
from .steps import step_of

_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def sharded_model(
    path: Path,
    config: ParallelConfig,
    dtype: str = "auto",
    *,
    verify: bool = False,
    node_id: str | None = None,
) -> tuple[ShardedPatcher, Layout]:
    """A MODEL for the transformer in `path`, and the layout it has. Nothing is loaded. Raises Refusal.

    `node_id` is the loader, which shows what becomes of the model; without it, the node that uses it does.
    """
    file = planner.check_transformer(path, config, working())
    family = FAMILIES.get(file.facts.transformer_class)
    if family is None:
        raise Refusal(
            f"'{path.name}' is a {file.family or file.facts.transformer_class} model.",
            "How ComfyUI calls that family's denoiser is not built into this pack yet.",
            f"Works here: {working()}; for others the stock Load Diffusion Model.",
        )
    layout = planner.plan(file.facts, config, dtype=dtype)
    comfy_host.refuse_unnamed_gpus(config, layout)
    spec = planner.model_spec(file.facts, dtype, layout)
    blocks = tuple(f"{blocks.path}.*" for blocks in family.blocks.values())
    spec = msgspec.structs.replace(spec, replaced=(*family.replaced, *blocks))
    model = empty_model(path, family, file.shapes, file.config, _DTYPES[spec.dtype])
    wanted = planner.Wanted(facts=file.facts, config=config, dtype=dtype)
    remote = Remote(GROUPS.slot(layout, spec), family, wanted, verify=verify, node_id=node_id)
    _swap_classes(model, remote)
    return patcher_for(model, remote), layout


def empty_model(
    path: Path,
    family: NativeFamily,
    shapes: Mapping[str, tuple[int, ...]],
    config: Mapping[str, Any],
    dtype: torch.dtype,
    device: torch.device = comfy_host.META,
) -> Any:
    """ComfyUI's own model for a checkpoint of these names and shapes. Refuses what it takes for another class."""
    shapes = family.original_shapes(shapes)
    names = {name: torch.empty(shape, dtype=dtype, device=comfy_host.META) for name, shape in shapes.items()}
    found = comfy_host.detect(names)
    if found is None:
        raise Refusal(
            f"This ComfyUI does not know the model in '{path.name}'.",
            f"It is a {family.name} model, but not one of those this release of ComfyUI can describe.",
            "Works instead: a newer ComfyUI, or the model as its authors published it.",
        )
    found.unet_config.update(family.detection(config))
    found.set_inference_dtype(dtype, None)
    model = found.get_model(names, "", device=device)
    if type(model.diffusion_model) is not family.comfy_class():
        raise Refusal(
            f"'{path.name}' is a {type(model).__name__} model.",
            f"The ranks would run it as {family.name}, which is another model.",
            "Works instead: the stock Load Diffusion Model for this file.",
        )
    return model


# --------------------------------------------------------------------------------------------------------------
# The classes of a model whose weights are elsewhere


class _WithoutWeights:
    """Of the denoiser: moving or casting it does nothing."""

    def _apply(self, _function: Callable[..., Any], _recurse: bool = True) -> Any:
        return self


class _OnGroup:
    """Of ComfyUI's model around it."""

    def memory_required(self, input_shape: list[int], *more: Any, **others: Any) -> float:
        """What one rank needs for computing: ComfyUI decides by it whether to run conditionings in one batch."""
        spec = self.sharded.slot.layout.spec  # type: ignore[attr-defined]
        parts = spec.ulysses * spec.ring * min(spec.replica, max(1, input_shape[0]))
        return super().memory_required(input_shape, *more, **others) / parts  # type: ignore[misc]

    def state_dict_for_saving(self, *_more: Any, **_others: Any) -> dict[str, Any]:
        raise needs_weights(*SAVING)


def _swap_classes(model: Any, remote: Remote) -> None:
    denoiser = model.diffusion_model
    denoiser_class: Any = type(denoiser)
    denoiser.__class__ = _remote_denoiser(denoiser_class, remote.family)
    denoiser.sharded = remote
    model_class: Any = type(model)
    model.__class__ = _remote_model(model_class)
    model.sharded = remote
    model.device = comfy_host.CPU


@cache
def _remote_model(base: type) -> type:
    # Under its own name: nodes that ask for a model's class by name find what they know.
    return type(base.__name__, (_OnGroup, base), {"__module__": base.__module__})


@cache
def _remote_denoiser(base: type, family: NativeFamily) -> type:
    signature = inspect.signature(getattr(base, family.method))

    def forward(self: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        arguments = _by_name(signature, self, args, kwargs)
        options = arguments.get("transformer_options") or {}
        skipped = refuse_patches(family, options)
        call = family.call(self, arguments)
        given = next(value for value in arguments.values() if isinstance(value, torch.Tensor))
        self.sharded.step = step_of(options)
        output = self.sharded.answer(call, skipped).to(given.device, given.dtype)
        return family.result(self, arguments, output)

    methods = {
        "__module__": base.__module__,
        # Tracing a call to another process makes no sense; a compiled wrapper around it just calls it.
        family.method: torch.compiler.disable(forward),
    }
    return type(base.__name__, (_WithoutWeights, base), methods)


def _by_name(
    signature: inspect.Signature, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> dict[str, Any]:
    """The arguments of a call by name, whatever the release has added; those without a name of their own as well."""
    bound = signature.bind(model, *args, **kwargs)
    bound.apply_defaults()
    arguments: dict[str, Any] = {}
    for name, value in bound.arguments.items():
        kind = signature.parameters[name].kind
        if kind is inspect.Parameter.VAR_KEYWORD:
            arguments.update(value)
        elif value is not model:
            arguments[name] = value
    return arguments
