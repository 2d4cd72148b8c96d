"""Everything that differs between CUDA with NCCL and the CPU with gloo, in one place.

The rest of the engine asks the backend and never the device. Collectives of tensors go through the mesh's groups;
the ranks' own agreements (has anyone been cancelled?) always run on gloo in host memory, so that they neither wait
for the GPU nor need a device tensor.
"""

from __future__ import annotations

import contextlib
import datetime
import gc
from collections.abc import Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ..environment import RankEnvironment
from ..host_memory import host_memory
from ..spec import Device, Memory
from .pulse import Pulse

PACKAGES = ("torch", "diffusers", "transformers", "safetensors")
HOST_RESERVE = 4 << 30  # bytes of host RAM that parked weights leave alone
HOST_CHUNK = 256 << 20  # bytes of page-locked memory taken at once
COLLECTIVE_TIMEOUT = datetime.timedelta(minutes=30)  # a backstop: the host ends a stuck group long before

# torch 2.14 renamed the call: of equal parts into one tensor, along its first dim.
all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class Backend:
    """One rank's device and process group."""

    def __init__(self, device: torch.device, place: RankEnvironment, pulse: Pulse | None = None):
        self.device, self.rank, self.world_size = device, place.rank, place.world_size
        self.pulse = pulse or Pulse()

    @classmethod
    def join(cls, device: Device, place: RankEnvironment, store: Path, pulse: Pulse | None = None) -> Backend:
        """Join the process group of all ranks, which meet through a file in the group's private directory."""
        torch.set_grad_enabled(False)
        if device.kind == "cuda":
            # CUDA_VISIBLE_DEVICES holds this group's cards by UUID, in rank order.
            here = torch.device("cuda", place.local_rank)
            torch.cuda.set_device(here)
            process_group = "cpu:gloo,cuda:nccl"
        else:
            here = torch.device("cpu")
            # With a device prefix: plain "gloo" makes diffusers look for an accelerator.
            process_group = "cpu:gloo"
        if pulse is not None:
            # From here on ranks wait for each other: the one that holds up the start has not come this far.
            pulse.begin("joining")
        dist.init_process_group(
            process_group,
            store=dist.FileStore(str(store), place.world_size),
            rank=place.rank,
            world_size=place.world_size,
            timeout=COLLECTIVE_TIMEOUT,
        )
        backend = cls(here, place, pulse)
        if backend.is_cuda:
            backend.pulse.count_on_device()
        return backend

    # ---- agreement

    def any_rank(self, flag: bool) -> bool:
        """Whether `flag` holds on any rank. A collective: every rank calls it at the same point."""
        if self.world_size == 1:
            return flag
        value = torch.tensor([int(flag)], dtype=torch.int32)
        self.pulse.agreed()
        dist.all_reduce(value, op=dist.ReduceOp.MAX)
        return bool(value.item())

    # ---- memory

    @property
    def is_cuda(self) -> bool:
        return self.device.type == "cuda"

    def memory(self) -> Memory:
        """What this rank uses now. On CUDA `device_used` is the driver's figure and includes other processes."""
        host = _anonymous_memory()
        if not self.is_cuda:
            return Memory(host=host)
        free, total = torch.cuda.mem_get_info(self.device)
        return Memory(
            weights=torch.cuda.memory_allocated(self.device),
            reserved=torch.cuda.memory_reserved(self.device),
            device_used=total - free,
            device_total=total,
            host=host,
        )

    def has_room(self, nbytes: int) -> bool:
        """Whether `nbytes` more fit on the device, with a tenth to spare."""
        if not self.is_cuda:
            return True
        free, _ = torch.cuda.mem_get_info(self.device)
        cached = torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(self.device)
        return free + cached > nbytes * 1.1

    def host_has_room(self, nbytes: int) -> bool:
        """Whether `nbytes` more fit into host RAM, with room left for everything else on the machine.

        On the CPU parked weights stay where they are and take nothing.
        """
        return not self.is_cuda or host_memory().room.available > nbytes * 1.1 + HOST_RESERVE

    def to_host(self, module: torch.nn.Module) -> None:
        """Move a module's weights to host RAM, page-locked, so that they come back at the full speed of the bus."""
        if self.is_cuda:
            pack([t for t in (*module.parameters(), *module.buffers()) if t.is_cuda], pin=True)

    def wait(self, tensor: torch.Tensor) -> None:
        """Return when `tensor` is computed: where nobody reads a result, the call would otherwise end early."""
        if self.is_cuda:
            torch.cuda.current_stream(self.device).synchronize()

    def release_memory(self) -> None:
        """Drop what nothing refers to any more, and give it back: to the device, and page-locked memory to the host."""
        gc.collect()
        self.return_cache()
        if self.is_cuda:
            # Public only in the newest torch; without it page-locked memory would stay with this process.
            empty: Any = getattr(torch.accelerator, "empty_host_cache", None)
            empty = empty or getattr(torch._C, "_host_emptyCache", None)
            if empty is not None:
                empty()

    def return_cache(self) -> None:
        """Give cached blocks back to the device, where ComfyUI measures what is free."""
        if self.is_cuda:
            torch.cuda.empty_cache()

    @contextlib.contextmanager
    def staged(self, module: torch.nn.Module, nbytes: int, on_host: bool = False) -> Iterator[torch.device]:
        """Hold `module` on the device for one stage if it fits there, else leave it in host RAM and compute there.

        `on_host` leaves it there in any case.
        """
        if on_host or not self.is_cuda or not self.has_room(nbytes):
            yield torch.device("cpu")
            return
        try:
            module.to(self.device)  # which may end in the middle
            yield self.device
        finally:
            module.to("cpu")
            self.release_memory()

    # ---- what a person may want to know

    def device_name(self) -> str:
        return torch.cuda.get_device_name(self.device) if self.is_cuda else "CPU"

    @staticmethod
    def versions() -> dict[str, str]:
        found = {}
        for name in PACKAGES:
            with contextlib.suppress(PackageNotFoundError):
                found[name] = version(name)
        return found


def attention_with_lse(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """PyTorch's attention and the log-sum-exp of its rows: [B, H, S, D] and [B, H, S], which its public function keeps.

    The operators below are those that `scaled_dot_product_attention` itself chooses from. `mask` is additive.
    """
    ops = torch.ops.aten
    if mask is not None:
        mask = mask.to(query.dtype)
    if query.device.type == "cpu":
        out, lse = ops._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, attn_mask=mask, scale=scale
        )
        return out, lse
    cuda = torch.backends.cuda
    flash = cuda.can_use_flash_attention(cuda.SDPAParams(query, key, value, mask, 0.0, False, False))
    if flash and query.shape[-1] % 8 == 0:
        out, lse, *_ = ops._scaled_dot_product_flash_attention(query, key, value, scale=scale)
        return out, lse
    if mask is not None:
        # The kernel wants the whole shape, and rows that begin at multiples of 16 bytes.
        keys = key.shape[2]
        padded = -(-keys // 8) * 8
        mask = torch.nn.functional.pad(mask, (0, padded - keys))[..., :keys]
        mask = mask.expand(query.shape[0], query.shape[1], query.shape[2], keys)
    out, lse, *_ = ops._scaled_dot_product_efficient_attention(
        query, key, value, mask, compute_log_sumexp=True, scale=scale
    )
    return out, lse[..., : query.shape[2]]  # the kernel pads its rows


def pack(tensors: Sequence[torch.Tensor], *, pin: bool, chunk: int = HOST_CHUNK) -> None:
    """Move the data of `tensors` into host RAM, side by side in a few chunks.

    torch rounds every page-locked allocation up to a power of two (pytorch issue 150517): one for each tensor would
    take up to twice the room that was checked.
    """
    chunk = min(chunk, _power_of_two(sum(tensor.nbytes for tensor in tensors)))
    chunks: list[tuple[torch.Tensor, int]] = []  # and how much of it is in use
    for tensor in sorted(tensors, key=lambda t: -t.nbytes):
        place = next(
            (n for n, (memory, used) in enumerate(chunks) if used + tensor.nbytes <= len(memory)), None
        )
        if place is None:
            place = len(chunks)
            size = max(chunk, _power_of_two(tensor.nbytes))
            chunks.append((torch.empty(size, dtype=torch.uint8, pin_memory=pin), 0))
        memory, used = chunks[place]
        chunks[place] = memory, used + -(-tensor.nbytes // 64) * 64  # every dtype may begin there
        host = memory[used : used + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        tensor.data = host.copy_(tensor)


def _power_of_two(nbytes: int) -> int:
    """The next one, from 1 on."""
    return 1 << max(0, nbytes - 1).bit_length()


def _anonymous_memory() -> int | None:
    """This process's own memory in bytes: without file pages, which all ranks share."""
    with contextlib.suppress(OSError), open("/proc/self/status") as status:
        for line in status:
            if line.startswith("RssAnon:"):
                return int(line.split()[1]) * 1024
    return None
