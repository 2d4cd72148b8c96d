"""A transformer in a slot: called once for each denoiser step of the host, with the arguments the host has prepared.

The ranks know no families: how ComfyUI's call becomes diffusers' call is decided on the host (`nodes/native`), and
arrives as data. Tensors that stay the same over a run are kept here until the host drops them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch

from ..spec import DenoiserCall, Forward, ModelSpec, ParallelSpec, SlotInfo, TensorRef, Verify
from .backend import Backend
from .checkpoints.folder import open_folder
from .checkpoints.single_file import open_single_file
from .checkpoints.source import Checkpoint
from .context import divide_sequence
from .copies import Copies
from .kernels import set_attention
from .mesh import build_mesh
from .rounding import rounding_noise
from .slots import ByteCounter, HeldSlot, IsCancelled, Report, parameter_bytes
from .substitution import Substitutions
from .transformer import Planned, load_transformer, plan_transformer

Allocate = Callable[[tuple[int, ...], torch.dtype], torch.Tensor]
Tensors = Mapping[str, torch.Tensor]


class DenoiserSlot(HeldSlot):
    """One transformer held by this rank under one layout."""

    def __init__(self, model: ModelSpec, parallel: ParallelSpec, backend: Backend):
        super().__init__(model, parallel, backend)
        self.dtype: torch.dtype = getattr(torch, model.dtype)
        self.substitutions = Substitutions()
        self.kept: dict[int, torch.Tensor] = {}
        per_replica = parallel.world_size // parallel.replica
        self.replica = backend.rank // per_replica
        self.is_first_of_replica = backend.rank % per_replica == 0

    # ---- load and park

    def _load(self, report: Report, cancelled: IsCancelled) -> None:
        mesh = build_mesh(self.parallel, self.backend.device.type)
        planned = plan_transformer(self._open(), self.parallel, mesh)
        set_attention(planned.model, self.parallel.attention)
        counter = ByteCounter(report, planned.bytes_to_read)
        model = load_transformer(planned, self.backend, self.dtype, on_bytes=counter.add, cancelled=cancelled)
        self.substitutions.install(model, self.model.replaced)
        self.backend.pulse.watch(model)
        self.copies = Copies(self.parallel, mesh)
        self.context_rank = (
            divide_sequence(model, mesh, self.backend.pulse.entered).rank if self.parallel.context > 1 else 0
        )
        self.transformer = model

    def _open(self) -> Checkpoint:
        path = Path(self.model.path)
        return open_folder(path) if path.is_dir() else open_single_file(path)

    def _forget(self) -> None:
        self.__dict__.pop("transformer", None)
        self.kept.clear()

    def info(self) -> SlotInfo:
        return SlotInfo(weight_bytes=parameter_bytes(self.transformer), seconds=self.seconds)

    def park(self) -> None:
        self.kept.clear()
        super().park()

    # ---- run

    def forward(
        self, request: Forward, tensors: Tensors, allocate: Allocate
    ) -> tuple[tuple[tuple[int, float, float], ...], dict[str, torch.Tensor]]:
        """Run the calls in which this replica has rows: when each began and ended, and its answer by its place."""
        try:
            return self._forward(request, tensors, allocate)
        except Exception:
            self.kept.clear()  # as the host does, which cannot know how far this came
            raise

    def _forward(
        self, request: Forward, tensors: Tensors, allocate: Allocate
    ) -> tuple[tuple[tuple[int, float, float], ...], dict[str, torch.Tensor]]:
        if request.anew:
            self.kept.clear()
        for number in request.drop:
            self.kept.pop(number, None)
        for number in request.keep:
            # A copy: the frame's memory belongs to the host.
            self.kept[number] = tensors[str(number)].to(self.backend.device, copy=True)
        spans, outputs = [], {}
        for place, call in enumerate(request.calls):
            if call.rows[self.replica][0] == call.rows[self.replica][1]:
                continue
            began = time.monotonic()
            output = self._run(self.transformer, self.substitutions, call, tensors, call.rows[self.replica])
            if self.is_first_of_replica:
                answer = allocate(tuple(output.shape), output.dtype)
                outputs[str(place)] = answer.copy_(output)
            else:
                self.backend.wait(output)
            spans.append((place, began, time.monotonic()))
        return tuple(spans), outputs

    def _run(
        self,
        model: Any,
        substitutions: Substitutions,
        call: DenoiserCall,
        tensors: Tensors,
        rows: tuple[int, int],
        *,
        alone: bool = False,
    ) -> torch.Tensor:
        batch = max(stop for _, stop in call.rows)

        @cache  # several blocks may be given the same residual
        def tensor(ref: TensorRef) -> torch.Tensor:
            return self._assemble(ref, tensors, batch, rows, alone)

        arguments: dict[str, Any] = {}
        for path, value in call.arguments.items():
            _enter(arguments, path, tensor(value) if isinstance(value, TensorRef) else value)
        substitutions.inputs = {path: tensor(ref) for path, ref in call.inputs.items()}
        substitutions.outputs = {
            path: tensor(refs[0]) if len(refs) == 1 else tuple(map(tensor, refs))
            for path, refs in call.outputs.items()
        }
        substitutions.skipped = call.skipped
        try:
            substitutions.check()
            output = model(**_lists(arguments), return_dict=False)[0]
        finally:
            substitutions.clear()
        # The gather of a context axis hands out a tensor that is not waited for; reading it early gives garbage.
        return output.wait() if hasattr(output, "wait") else output

    def _assemble(
        self, ref: TensorRef, tensors: Tensors, batch: int, rows: tuple[int, int], alone: bool
    ) -> torch.Tensor:
        """The tensor of `ref` on this rank's device: its parts joined, this replica's rows, this rank's tokens."""
        parts = []
        for number in ref.numbers:
            part = self.kept[number] if number in self.kept else tensors[str(number)]
            if ref.batched and batch > 1 and part.shape[0] % batch == 0:
                each = part.shape[0] // batch  # Wan's first-last-frame models take two rows a sample
                part = part[rows[0] * each : rows[1] * each]
            if ref.tokens and self.parallel.context > 1 and not alone:
                part = part.tensor_split(self.parallel.context, dim=1)[self.context_rank]
            parts.append(part.to(self.backend.device))
        return torch.cat(parts, dim=ref.dim) if len(parts) > 1 else parts[0]

    # ---- verify

    def verify(self, request: Verify, tensors: Tensors) -> tuple[int, float, torch.Tensor | None]:
        """Run a call on the whole model, alone: missing bytes, the error of rounding alone as max_rel, the answer.

        The model is read for it and forgotten. How far rounding moves the answer is measured: a second run, with a
        rounding error of its dtype added to what every block hands on.
        """
        planned = plan_transformer(self._open(), ParallelSpec())
        set_attention(planned.model, self.parallel.attention)  # what is verified is the layout
        needed = sum(p.numel() for p in planned.model.parameters()) * self.dtype.itemsize
        if not self.backend.has_room(needed):
            return needed, 0.0, None
        try:
            reference, own_error = self._run_whole(planned, request.call, tensors)
        finally:
            del planned
            self.backend.release_memory()
        return 0, own_error, reference

    def _run_whole(
        self, planned: Planned, call: DenoiserCall, tensors: Tensors
    ) -> tuple[torch.Tensor, float]:
        model = load_transformer(
            planned, self.backend, self.dtype, on_bytes=lambda _: None, cancelled=lambda: False
        )
        substitutions = Substitutions()
        substitutions.install(model, self.model.replaced)
        rows = (0, max(stop for _, stop in call.rows))

        def run() -> torch.Tensor:
            return self._run(model, substitutions, call, tensors, rows, alone=True).float()

        reference = run()
        with rounding_noise(model, self.dtype):
            noisy = run()
        error = (noisy - reference).abs().max() / reference.abs().max()
        return reference.cpu(), float(error)


def _enter(arguments: dict[str, Any], path: str, value: Any) -> None:
    """Put `value` at a dotted path; numbers become keys of their own, made lists by `_lists`."""
    *outer, last = path.split(".")
    for name in outer:
        arguments = arguments.setdefault(name, {})
    arguments[last] = value


def _lists(value: Any) -> Any:
    """Dicts whose keys are numbers as lists, at any depth."""
    if not isinstance(value, dict):
        return value
    inside = {key: _lists(one) for key, one in value.items()}
    if inside and all(key.isdecimal() for key in inside):
        return [inside[key] for key in sorted(inside, key=int)]
    return inside
