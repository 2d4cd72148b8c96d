"""The only module that reads the environment: what a rank is told by torchrun, and what the host passes on."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from .spec import Device


class RankEnvironment(NamedTuple):
    """A rank's place, as torchrun sets it."""

    rank: int
    local_rank: int
    world_size: int


def rank_environment() -> RankEnvironment:
    """Raises KeyError outside torchrun."""
    return RankEnvironment(*(int(os.environ[name]) for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE")))


def runtime_directories() -> list[Path]:
    """Where a private directory may be made, best first. Unix socket paths are limited to 107 bytes."""
    names = [os.environ.get("XDG_RUNTIME_DIR", ""), os.environ.get("TMPDIR", ""), "/tmp"]
    return [Path(name) for name in names if name and os.access(name, os.W_OK) and len(name) < 60]


def visible_cuda_devices() -> str | None:
    """ComfyUI's own CUDA_VISIBLE_DEVICES, for messages only: cards are found by UUID whatever it says."""
    return os.environ.get("CUDA_VISIBLE_DEVICES")


def cache_directory() -> Path | None:
    """Where this user's programs keep what they can find out again, None if he has no home. It need not exist."""
    if named := os.environ.get("XDG_CACHE_HOME", ""):
        return Path(named)
    try:
        return Path.home() / ".cache"
    except RuntimeError:
        return None


def group_environment(
    devices: tuple[Device, ...], variables: Mapping[str, str] | None = None
) -> dict[str, str]:
    """The environment of torchrun and its ranks: the host's own, with the differences named here, and `variables`.

    Hub and offline settings (HF_HOME, HF_HUB_OFFLINE, proxies) stay as the user has them.
    """
    environment = {
        name: value
        for name, value in os.environ.items()
        # A ComfyUI that itself runs under torchrun must not lend its rank to ours; with safe-path set, `-m` would
        # not find our package in the working directory.
        # PET_* are torchrun's options as variables: PET_STANDALONE alone would open its store to the network.
        if not name.startswith(("PET_", "TORCHELASTIC_", "TORCH_NCCL_")) and name not in _NOT_INHERITED
    }
    threads = max(1, (os.cpu_count() or 1) // len(devices))
    environment |= {
        "OMP_NUM_THREADS": str(min(threads, 8)),
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONUNBUFFERED": "1",
        # Loopback only: without the first, torchrun's agent opens an unauthenticated store on all interfaces.
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "NCCL_SOCKET_IFNAME": "lo",
    }
    cards = [device.uuid for device in devices if device.kind == "cuda"]
    if cards:
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(cards)
        environment["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
    else:
        environment["CUDA_VISIBLE_DEVICES"] = ""
    return environment | dict(variables or {})


_NOT_INHERITED = {
    *("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "ROLE_NAME"),
    *("WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
    "PYTHONSAFEPATH",
    # A model attends as its layout says, and kernels are never downloaded.
    *("DIFFUSERS_ATTN_BACKEND", "DIFFUSERS_TRUST_REMOTE_KERNELS"),
}


def library_settings() -> dict[str, str]:
    """What is set for torch, NCCL and CUDA, for reports: values that are more than numbers only as "set"."""
    exact = ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "CUDA_LAUNCH_BLOCKING", "NVIDIA_TF32_OVERRIDE")
    return {
        name: value if value.replace(",", "").isdecimal() else "set"
        for name, value in sorted(os.environ.items())
        if name in exact or name.startswith(("NCCL_", "GLOO_", "TORCH_", "PYTORCH_", "OMP_"))
    }


def unsupported_platform() -> str | None:
    """Why groups cannot run on this platform, or None."""
    if sys.platform.startswith("linux"):
        return None
    names = {"win32": "Windows", "darwin": "macOS"}
    return f"Groups of ranks run on Linux only today; this is {names.get(sys.platform, sys.platform)}."
