"""The only module that touches ComfyUI's progress, cancel, previews, server, folders and memory manager.

Everything is bound by name when it is used, so that one place adapts when ComfyUI moves.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import comfy.latent_formats
import comfy.model_detection
import comfy.model_management
import comfy.utils
import comfy_execution.utils
import comfyui_version
import folder_paths
import latent_preview
import torch
from server import PromptServer

from ..runtime.group import GROUPS, IdleTimes, IdleWatch, Slot
from ..runtime.spec import (
    Cancelled,
    Device,
    Layout,
    ParallelConfig,
    Progress,
    RankError,
    RankOutOfMemory,
    Refusal,
)
from . import events, routes

log = logging.getLogger("comfyui-sharded")
CPU, META = torch.device("cpu"), torch.device("meta")
_EVERYTHING = 1e30  # bytes, as ComfyUI itself writes it
_SAID_CHARACTERS = 240  # of a line: the planner's longest reason
_UNSAFE = str.maketrans({"<": "(", ">": ")", "&": "+", "*": "x", "_": "-", "#": "", "[": "(", "]": ")"})


def start() -> None:
    """Called once, when ComfyUI loads the pack."""
    routes.add_to(PromptServer.instance.routes, workflow_runs, is_listed, version())
    events.start(_send, _later)
    GROUPS.current_run = executing_prompt
    IdleWatch(GROUPS, idle_times).start()


def _send(event: str, data: dict[str, Any]) -> None:
    """An event to all pages, from any thread. Once the server's loop is closed nobody hears it."""
    with contextlib.suppress(RuntimeError):
        PromptServer.instance.send_sync(event, data)


def _later(seconds: float, function: Callable[[], None]) -> None:
    """Call `function` on the server's loop after so many seconds."""
    loop = PromptServer.instance.loop
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(loop.call_later, seconds, function)


def version() -> str:
    """ComfyUI's own word on its version."""
    return comfyui_version.__version__


def workflow_runs() -> bool:
    """Whether ComfyUI is executing a workflow. Safe from any thread."""
    return bool(PromptServer.instance.prompt_queue.currently_running)


# --------------------------------------------------------------------------------------------------------------
# Settings of ComfyUI's dialog (web/sharded.js declares them)


def idle_times() -> IdleTimes:
    """After how long a group parks and stops, as the settings of all users say now (--multi-user)."""
    users = getattr(getattr(PromptServer.instance, "user_manager", None), "users", ("default",))
    settings = [_settings_of(user) for user in list(users)]
    park, stop = (
        [one.get(f"Sharded.Group.{name}") for one in settings] for name in ("ParkAfter", "StopAfter")
    )
    return IdleTimes.of_settings(park, stop)


def _settings_of(user: str) -> dict[str, Any]:
    folder = folder_paths.get_public_user_directory(user)
    try:
        settings = json.loads(Path(folder or "", "comfy.settings.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):  # never saved, or just being written
        return {}
    return settings if isinstance(settings, dict) else {}


# --------------------------------------------------------------------------------------------------------------
# Model folders


def pipeline_folders() -> list[str]:
    """Names of the diffusers pipelines in ComfyUI's `diffusers` model folders."""
    return sorted(_pipelines())


def pipeline_path(name: str) -> Path | None:
    """The folder of a name from `pipeline_folders`; nothing else resolves, so no path can be smuggled in."""
    return _pipelines().get(name)


def _pipelines() -> dict[str, Path]:
    found: dict[str, Path] = {}
    for parent in folder_paths.get_folder_paths("diffusers"):
        for root, folders, files in os.walk(parent, followlinks=True):
            if "model_index.json" in files:
                folders.clear()  # a pipeline holds no other pipeline
                found.setdefault(Path(root).relative_to(parent).as_posix(), Path(root))
    return found


def denoisers() -> list[str]:
    """Names of the diffusion models: files of ComfyUI's `diffusion_models`, and transformers of diffusers folders."""
    return [*folder_paths.get_filename_list("diffusion_models"), *sorted(_transformers())]


def denoiser_path(name: str) -> Path | None:
    """The file or folder of a name from `denoisers`; nothing else resolves."""
    if name in (transformers := _transformers()):
        return transformers[name]
    if name not in folder_paths.get_filename_list("diffusion_models"):
        return None
    path = folder_paths.get_full_path("diffusion_models", name)
    return Path(path) if path else None


def _transformers() -> dict[str, Path]:
    return {
        f"{name}/{part}": path / part
        for name, path in _pipelines().items()
        for part in ("transformer", "transformer_2")
        if (path / part / "config.json").is_file()
    }


def refuse_unnamed_gpus(config: ParallelConfig, layout: Layout) -> None:
    """Refuse to run on the CPU only because the cards of a machine with GPUs could not be identified."""
    on_cpu = layout.devices[0].kind == "cpu"
    if config.devices != "cpu" and on_cpu and main_device().type != "cpu":
        raise Refusal(
            "The GPUs of this machine could not be identified.",
            "Ranks own NVIDIA cards by UUID, which the driver tells through the package nvidia-ml-py.",
            "Works instead: pip install nvidia-ml-py, or devices cpu.",
        )


def detect(names: dict[str, torch.Tensor]) -> Any:
    """ComfyUI's description of the model with these names and shapes, None if it knows no such model."""
    detection = comfy.model_detection
    found = detection.model_config_from_unet(names, "")
    if found is None and (converted := detection.convert_diffusers_mmdit(names, "")) is not None:
        names.clear()
        names.update(converted)
        found = detection.model_config_from_unet(names, "")
    return found


# --------------------------------------------------------------------------------------------------------------
# Progress, text, previews and cancel


def executing_node() -> str | None:
    """The node that is executing on this thread."""
    context = comfy_execution.utils.get_executing_context()
    return context.node_id if context else None


def executing_prompt() -> str:
    """The prompt that is executing on this thread; "" outside of one."""
    context = comfy_execution.utils.get_executing_context()
    return str(context.prompt_id) if context else ""


def executing_run() -> str:
    """What tells one execution of a node from another: the prompt and the node; "" outside of both."""
    context = comfy_execution.utils.get_executing_context()
    return f"{context.prompt_id} {context.node_id}" if context else ""


def raise_if_interrupted() -> None:
    """Raise ComfyUI's interrupt if the user pressed Cancel. Only on the thread of the node: it clears the flag."""
    comfy.model_management.throw_exception_if_processing_interrupted()


def interrupted() -> bool:
    """Whether the user pressed Cancel. Only looks: the flag is cleared by whoever raises."""
    return comfy.model_management.processing_interrupted()


@contextlib.contextmanager
def comfy_errors() -> Iterator[None]:
    """Turn the group's errors into ComfyUI's own where it has one: its interrupt, and its out-of-memory.

    The node shows the three lines of an error. What else is known goes to the log here, and to the panel.
    """
    try:
        yield
    except Cancelled:
        comfy.model_management.throw_exception_if_processing_interrupted()
        raise comfy.model_management.InterruptProcessingException from None
    except RankError as error:
        if not error.is_logged:  # by a use of this inside
            log.error("%s", error.whole)
            error.is_logged = True
        GROUPS.journal.publish(error)
        if isinstance(error, RankOutOfMemory):
            raise comfy.model_management.OOM_EXCEPTION(str(error)) from error
        raise


def say(node_id: str | None, *lines: str) -> None:
    """A line or two of text on a node, in the client that queued the prompt."""
    if node_id is None:
        return
    server = PromptServer.instance
    text = "\n".join(line.translate(_UNSAFE)[:_SAID_CHARACTERS] for line in lines)
    with contextlib.suppress(AttributeError):  # a server without the method still runs the workflow
        server.send_progress_text(text, node_id, server.client_id)


class NodeProgress:
    """The bar, the preview and the text of one node while the group works for it; `tell` puts the text elsewhere."""

    def __init__(
        self, node_id: str | None, latent_format: Any = None, tell: Callable[[str], None] | None = None
    ):
        self._tell = tell or (lambda text: say(node_id, text))
        self._bar = comfy.utils.ProgressBar(1, node_id=node_id)
        self._phase = ""
        self._previewer = None
        self._channels = getattr(latent_format, "latent_channels", 0)
        if latent_format is not None:
            device = comfy.model_management.get_torch_device()
            self._previewer = latent_preview.get_previewer(device, latent_format)

    @property
    def wants_preview(self) -> bool:
        return self._previewer is not None

    def enter(self, phase: str, total: int = 0) -> None:
        """Say that a phase has begun, once."""
        if phase != self._phase:
            self._phase = phase
            words = _PHASES_OF_ONE if total == 1 else _PHASES
            self._tell(words.get(phase, _PHASES.get(phase, phase)).format(total=total))

    def warm_up(self) -> None:
        """Say that the first step takes longer, unless it is over: ranks tell it once a second, and so too late."""
        if self._phase != "sampling":
            self.enter("warming")

    def report(self, progress: Progress, tensors: Mapping[str, torch.Tensor]) -> None:
        """Show how far a call has come. Raises ComfyUI's interrupt when the user pressed Cancel."""
        self.enter(progress.phase, progress.total)
        preview = None
        latent = tensors.get("preview")
        # A model with other latents than the format's runs without previews rather than not at all.
        if self._previewer is not None and latent is not None and latent.shape[1] == self._channels:
            preview = self._previewer.decode_latent_to_preview_image("JPEG", latent.clone())
        self._bar.update_absolute(progress.done, progress.total, preview)


_PHASES = {
    "starting": "Starting {total} ranks",
    "loading": "Reading weights",
    "restoring": "Restoring from RAM",
    "encoding": "Encoding",
    "warming": "First step: warming up",
    "sampling": "Sampling",
    "decoding": "Decoding",
    "measuring": "Timing the exchanges between the ranks",
}
_PHASES_OF_ONE = {"starting": "Starting one rank"}


def flux_latent_format() -> Any:
    return comfy.latent_formats.Flux()


def fix_empty_latent(samples: torch.Tensor, channels: int) -> torch.Tensor:
    """`samples`, with the right channel count if it is an empty picture as stock Empty Latent nodes make it."""
    if samples.ndim != 4 or samples.shape[1] == channels or torch.count_nonzero(samples):
        return samples
    return torch.zeros((samples.shape[0], channels, *samples.shape[2:]), dtype=samples.dtype)


# --------------------------------------------------------------------------------------------------------------
# Memory: ComfyUI stays in charge


def make_room(needs: Sequence[tuple[torch.device, float]], is_ours: Callable[[Any], bool]) -> None:
    """Ask ComfyUI for so many bytes on each of these devices; loaded patchers that `is_ours` says yes to stay.

    Models that the running sampler has loaded with ours, such as a ControlNet, go only where there is no room without.
    """
    management = comfy.model_management
    ours = [loaded for loaded in management.current_loaded_models if is_ours(loaded.model)]
    used = _in_use()
    for device, nbytes in needs:
        management.free_memory(nbytes, device, keep_loaded=[*ours, *used])
        if management.get_free_memory(device) < nbytes:
            management.free_memory(nbytes, device, keep_loaded=ours)
    if needs:
        management.soft_empty_cache()  # cached blocks are invisible to the ranks


def free_unused(devices: Sequence[torch.device], is_ours: Callable[[Any], bool]) -> None:
    """Ask ComfyUI for everything on these devices that is neither ours nor in use by the running sampler."""
    management = comfy.model_management
    keep = [*_in_use(), *(loaded for loaded in management.current_loaded_models if is_ours(loaded.model))]
    for device in devices:
        management.free_memory(_EVERYTHING, device, keep_loaded=keep)


def _in_use() -> list[Any]:
    """What was loaded last, together: the models of a running sampler. ComfyUI's ControlNets go by the same mark."""
    return [one for one in comfy.model_management.current_loaded_models if one.currently_used]


def room_for(nbytes: int) -> float:
    """What `nbytes` of weights need on a device, with what ComfyUI reserves for computing."""
    return nbytes * 1.1 + comfy.model_management.minimum_inference_memory()


def main_device() -> torch.device:
    """The device on which ComfyUI itself computes."""
    return comfy.model_management.get_torch_device()


def unloading_everything() -> bool:
    """Whether ComfyUI is emptying its devices (/free, out of memory), not just making room for another model.

    Its memory manager calls the same methods for both, so the callers are asked: `unload_all_models` is public.
    """
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code is comfy.model_management.unload_all_models.__code__:
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


def is_listed(slot_name: str) -> bool:
    """Whether the slot of that name is in ComfyUI's list of loaded models, so that ComfyUI would evict it."""
    listed = [loaded.model for loaded in list(comfy.model_management.current_loaded_models)]
    return any(getattr(getattr(patcher, "slot", None), "name", None) == slot_name for patcher in listed)


def torch_device_of(device: Device) -> torch.device | None:
    """The torch device of this process that is a rank's device; None if ComfyUI does not use that one."""
    if device.kind == "cpu":
        return main_device() if main_device().type == "cpu" else None
    wanted = device.uuid.removeprefix("GPU-")
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        if str(torch.cuda.get_device_properties(index).uuid).removeprefix("GPU-") == wanted:
            return torch.device("cuda", index)
    return None


def _torch_devices(slot: Slot) -> list[torch.device]:
    """The GPUs of a slot that ComfyUI uses."""
    found = [torch_device_of(device) for device in slot.layout.devices if device.kind == "cuda"]
    return [device for device in found if device is not None]


class ManagedSlot:
    """A loaded slot in ComfyUI's list of loaded models, so that its free, evict and unload reach the group.

    Answers the calls that ComfyUI's memory manager makes on a model patcher. It never loads by itself: a node makes
    the slot resident and then notes it here; evicting gives all of the slot's memory back on every device.
    """

    parent = None
    clone_base_uuid = None  # newer releases look for copies of a model by it; a slot is nobody's copy

    class ShardedWeights:
        """What ComfyUI's bookkeeping holds a weak reference to, and names in its log."""

    def __init__(self, slot: Slot):
        self.slot, self.model = slot, self.ShardedWeights()
        self.load_device = comfy.model_management.get_torch_device()
        self.offload_device = torch.device("cpu")
        self._size = 0

    def make_room(self, nbytes: int) -> None:
        """Ask for `nbytes` of weights, and what ComfyUI reserves for computing, on every card that it uses itself."""
        make_room(
            [(device, room_for(nbytes)) for device in _torch_devices(self.slot)], lambda one: one is self
        )

    def note_loaded(self, weight_bytes: int) -> None:
        """Enter the slot in the list; idempotent."""
        on_this_device = self.load_device in _torch_devices(self.slot)
        self._size = weight_bytes if on_this_device else 0
        comfy.model_management.load_models_gpu([self])

    def model_size(self) -> int:
        return self._size

    def loaded_size(self) -> int:
        return self._size if self.slot.loaded else 0

    def current_loaded_device(self) -> torch.device:
        return self.load_device if self.slot.loaded else self.offload_device

    def model_dtype(self) -> torch.dtype:
        return torch.float32

    def model_patches_to(self, _device_or_dtype: object) -> None: ...

    def model_patches_models(self) -> list[Any]:
        return []

    def is_clone(self, other: object) -> bool:
        return other is self

    def is_dynamic(self) -> bool:
        return False

    def lowvram_patch_counter(self) -> int:
        return 0

    def partially_load(
        self, _device: object, _extra_memory: int = 0, force_patch_weights: bool = False
    ) -> int:
        return 0

    def partially_unload(self, _device: object, _memory_to_free: int = 0, *_more: object) -> int:
        """A slot with a hole is useless: all of it goes, or nothing."""
        freed = self.loaded_size()
        self._evict()
        return freed

    def partially_unload_ram(self, _ram_to_unload: int) -> None: ...

    def detach(self, unpatch_all: bool = True) -> object:
        """`unpatch_all` False only prepares the next use."""
        if unpatch_all:
            self._evict()
        return self.model

    def _evict(self) -> None:
        """Give the devices back: for good if ComfyUI unloads everything, else so that the next use is quick."""
        if unloading_everything():
            self.slot.unload(by="comfyui")
        else:
            self.slot.park(by="comfyui")
