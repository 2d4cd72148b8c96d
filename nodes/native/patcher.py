"""How ComfyUI's memory manager sees a group: a model patcher on every device that the group uses.

One is the MODEL itself, on ComfyUI's own device; the others stand for the parts on further cards, so that ComfyUI
makes room there too and can ask for it back. A model with a hole is useless: evicting any part evicts the group.

    load_models_gpu([MODEL]) ── model_patches_models ──> MODEL and its parts, room is made on each device
    free_memory(device) ──> partially_unload or detach of whichever lies there ──> the whole slot is parked

Subclasses of the plain ModelPatcher; all state is on what they patch, which clones share.
"""

from __future__ import annotations

from typing import Any

import torch
from comfy.model_patcher import ModelPatcher
from comfy.patcher_extension import CallbacksMP, WrappersMP

from ...runtime.group import Slot
from ...runtime.spec import Refusal
from .. import comfy_host
from .remote import Remote
from .replicas import calc_cond_batch

_KEY = "sharded"
SAVING = ("Saving", "copy the model's file")


class SlotPatcher(ModelPatcher):
    """A part of a slot on one device: `model.sharded` is the group, which says what it holds there."""

    @property
    def _remote(self) -> Remote:
        return self.model.sharded

    @property
    def slot(self) -> Slot:
        return self._remote.slot

    def is_dynamic(self) -> bool:
        return False

    def model_size(self) -> int:
        return self._remote.bytes_on(self.load_device)

    def loaded_size(self) -> int:
        return self.model_size() if self.slot.loaded else 0

    def get_ram_usage(self) -> int:
        return 0

    def lowvram_patch_counter(self) -> int:
        return 0

    def load(self, device_to: Any = None, *_more: Any, **_others: Any) -> None:
        self._make_resident(device_to)

    def _make_resident(self, device_to: Any) -> None:
        self._remote.load()
        self.model.device = device_to or self.load_device  # patch_model() of some custom nodes names none

    def _evict(self) -> None:
        """Give the devices back: for good if ComfyUI unloads everything, else so that the next use is quick.

        ComfyUI asks everybody on a device: one who holds nothing there keeps the rest.
        """
        if comfy_host.unloading_everything():
            self.slot.unload(by="comfyui")
        elif self.model_size():
            self.slot.park(by="comfyui")

    def partially_load(self, device_to: Any, extra_memory: int = 0, force_patch_weights: bool = False) -> int:
        before = self.loaded_size()
        self.load(device_to)
        return self.loaded_size() - before

    def unpatch_model(self, device_to: Any = None, unpatch_weights: bool = True) -> None:
        if unpatch_weights:
            self._evict()

    def partially_unload(self, device_to: Any, memory_to_free: int = 0, *_more: Any, **_others: Any) -> int:
        freed = self.loaded_size()
        self._evict()
        return freed

    def partially_unload_ram(self, _ram_to_unload: int) -> None: ...


class PartPatcher(SlotPatcher):
    """The group's part on a further device."""


class Part(torch.nn.Module):
    """What a PartPatcher patches: nothing but the way to the group."""

    def __init__(self, remote: Remote):
        super().__init__()
        self.sharded, self.device = remote, comfy_host.CPU


class ShardedPatcher(SlotPatcher):
    """A MODEL whose denoiser runs on a group. What needs the weights themselves is refused."""

    def model_patches_models(self) -> list[Any]:
        # For everybody who loads it: the sampler, and custom nodes that call load_models_gpu([model]).
        add_parts(self.model, self.load_device)
        return [*super().model_patches_models(), *self.model.parts]

    # ---- load and unload

    def load(
        self,
        device_to: Any = None,
        lowvram_model_memory: int = 0,
        force_patch_weights: bool = False,
        full_load: bool = False,
        **_others: Any,
    ) -> None:
        with self.use_ejected():
            self._make_resident(device_to)
            self.model.model_lowvram = False
            self.model.model_loaded_weight_memory = self.model_size()
            self.model.current_weight_patches_uuid = self.patches_uuid
            for callback in self.get_all_callbacks(CallbacksMP.ON_LOAD):
                callback(self, device_to, lowvram_model_memory, force_patch_weights, full_load)
            self.apply_hooks(self.forced_hooks, force_apply=True)

    def partially_load(self, device_to: Any, extra_memory: int = 0, force_patch_weights: bool = False) -> int:
        with self.use_ejected(skip_and_inject_on_exit_only=True):
            before = self.loaded_size()
            self.unpatch_model(self.offload_device, unpatch_weights=False)
            self.patch_model(load_weights=False)
            self.load(device_to)
            return self.loaded_size() - before

    def unpatch_model(self, device_to: Any = None, unpatch_weights: bool = True) -> None:
        ModelPatcher.unpatch_model(self, device_to=None, unpatch_weights=False)
        if unpatch_weights:
            self._evict()
            self.model.model_lowvram = False
            self.model.model_loaded_weight_memory = 0
            self.model.current_weight_patches_uuid = None

    # ---- what would need the weights

    def add_patches(self, patches: dict[str, Any], *_more: Any, **_others: Any) -> list[str]:
        if patches:
            raise needs_weights(_kind_of(patches), "merge it into the model's file")
        return []

    def add_hook_patches(self, hook: Any, patches: dict[str, Any], *_more: Any, **_others: Any) -> list[str]:
        if patches:
            raise needs_weights(f"{_kind_of(patches)} on a conditioning", "leave the hook away")
        return []

    def patch_hooks(self, hooks: Any) -> None:
        """Hooks of weights are refused when they are added; all others need nothing here."""
        self.current_hooks = hooks

    def unpatch_hooks(self, whitelist_keys_set: set[str] | None = None) -> None:
        self.current_hooks = None

    def add_weight_wrapper(self, name: str, function: Any) -> None:
        raise needs_weights("A weight wrapper", "leave the node away that sets it")

    def set_model_compute_dtype(self, dtype: Any) -> None:
        if dtype is None:  # ComfyUI's "default"
            return
        raise needs_weights("Another compute dtype", "set the dtype on Load Diffusion Model (Sharded)")

    def add_object_patch(self, name: str, obj: Any) -> None:
        if name.split(".")[0] in ("diffusion_model", "manual_cast_dtype"):
            raise needs_weights(f"A patch of {name}", "leave the node away that sets it")
        super().add_object_patch(name, obj)

    def get_key_patches(self, filter_prefix: str | None = None) -> dict[str, Any]:
        raise needs_weights("Merging or extracting", "merge the files, and load the result")

    def state_dict_for_saving(self, *_more: Any, **_others: Any) -> dict[str, Any]:
        raise needs_weights(*SAVING)


def _kind_of(patches: dict[str, Any]) -> str:
    """In words, what kind of weight patches these are: LoRA adapters, or weights of another model."""
    first = next(iter(patches.values()))
    if hasattr(first, "weights") or (isinstance(first, tuple) and first and hasattr(first[0], "weights")):
        return "A LoRA"
    return "A LoRA or a merge"


def needs_weights(what: str, instead: str) -> Refusal:
    return Refusal(
        f"{what} cannot be used with a sharded MODEL yet.",
        "The weights lie in parts on the ranks, and ComfyUI has none of them.",
        f"Works instead: {instead}, or the stock Load Diffusion Model.",
    )


def add_parts(model: Any, here: torch.device) -> None:
    """A part for every further device that the group uses: another layout may use others than the first."""
    there = [here, *(part.load_device for part in model.parts)]
    model.parts += [
        PartPatcher(Part(model.sharded), load_device=device, offload_device=comfy_host.CPU)
        for device, _ in model.sharded.parts
        if device not in there
    ]


def patcher_for(model: Any, remote: Remote) -> ShardedPatcher:
    """The MODEL for a class-swapped `model`."""
    here = comfy_host.main_device()
    model.sharded, model.parts = remote, []
    add_parts(model, here)
    patcher = ShardedPatcher(model, load_device=here, offload_device=comfy_host.CPU)
    if patcher.slot.layout.spec.replica > 1:
        patcher.add_wrapper_with_key(WrappersMP.CALC_COND_BATCH, _KEY, calc_cond_batch)
    return patcher
