"""The group behind one MODEL: its slot, the calls that go to it, and what they are refused for."""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from ...runtime import planner
from ...runtime.group import Slot, Work, WorkerGroup, again_if_gone
from ...runtime.spec import (
    DenoiserCall,
    Forward,
    Forwarded,
    Layout,
    RankError,
    Refusal,
    SlotInfo,
    TensorRef,
    Verified,
    Verify,
    readable_bytes,
)
from .. import comfy_host
from ..moving import Moving
from .families.family import Call, NativeFamily, Sent
from .replicas import Turns, rows_for

log = logging.getLogger("comfyui-sharded")
Asked = tuple[Call, Mapping[str, tuple[str, ...]]]  # a call, and the blocks to skip
_ERRORS_ALLOWED = 4  # of rounding alone, before a difference is called one


class Remote(Moving):
    """What a MODEL's denoiser calls instead of computing. `wanted` is what the loader was asked for.

    Words are on the loader, which is `node_id`: it is a node of the pack, and the sampler has its bar and preview.
    """

    def __init__(
        self,
        slot: Slot,
        family: NativeFamily,
        wanted: planner.Wanted | None = None,
        *,
        verify: bool = False,
        node_id: str | None = None,
    ):
        super().__init__(slot, wanted)
        self.family, self._node_id = family, node_id
        self.moved()
        self.spans: dict[int, tuple[tuple[int, float, float], ...]] = {}  # of the last call, by rank
        self.step: tuple[int, int] | None = None  # of the call that comes: see `steps`
        self._verify = verify
        self._turns: Turns | None = None
        self._noted = ""

    # ---- residency

    def moved(self) -> None:
        """What the ranks hold on the devices that ComfyUI uses itself: `parts`, as (device, bytes)."""
        self.parts: list[tuple[torch.device, int]] = []
        if self.wanted is None:
            return
        layout = self.slot.layout
        devices = [comfy_host.torch_device_of(device) for device in layout.devices]
        sizes = planner.shard_bytes(self.wanted.facts, self.wanted.dtype, layout)
        self.parts = [
            (device, size) for device, size in zip(devices, sizes, strict=True) if device is not None
        ]

    def bytes_on(self, device: torch.device) -> int:
        return sum(size for one, size in self.parts if one == device)

    def load(self) -> None:
        """Make the model resident; the executing node shows how far it is."""
        if self.slot.doubtful:
            return  # the first call loads, if it is not the one that failed
        progress = self._progress()
        was_loaded = self.slot.loaded

        def run() -> SlotInfo:
            if not self.slot.loaded:
                self._make_room(lambda nbytes: nbytes)  # who computes has reserved the rest
            return self.slot.ensure(progress.report, comfy_host.interrupted)

        info = self.with_room(run)
        if not was_loaded:
            self.say_held(info, f"loaded in {info.seconds:.1f} s")

    def say(self, *lines: str) -> None:
        comfy_host.say(self._node_id or comfy_host.executing_node(), *lines)

    def _progress(self) -> comfy_host.NodeProgress:
        """The bar of loading on the node that waits for it, its words on the loader."""
        return comfy_host.NodeProgress(comfy_host.executing_node(), tell=self.say)

    def _make_room(self, need: Callable[[int], float]) -> None:
        """Ask ComfyUI for what the ranks will take, on each of its devices; `need` of the bytes of their weights."""
        needs = [(device, need(nbytes)) for device, nbytes in self.parts if device != comfy_host.CPU]
        comfy_host.make_room(needs, self._is_ours)

    def _is_ours(self, patcher: Any) -> bool:
        remote = getattr(getattr(patcher, "model", None), "sharded", None)
        return remote is not None and remote.slot is self.slot

    def _move(self, layout: Layout) -> None:
        super()._move(layout)
        comfy_host.free_unused(
            [device for device, _ in self.parts if device != comfy_host.CPU], self._is_ours
        )

    # ---- calls

    def answer(self, call: Call, skipped: Mapping[str, tuple[str, ...]]) -> torch.Tensor:
        """The output of the transformer for `call`, on the CPU. Raises ComfyUI's interrupt and its out-of-memory."""
        planner.check_sequences(self.slot.layout.spec, call.lengths)
        if self._turns is not None:
            return self._turns.answer((call, skipped))
        return self._serve_with_room([(call, skipped)])[0]

    @contextlib.contextmanager
    def turns(self) -> Iterator[Turns]:
        """While it is open, calls are made by jobs of these turns and served together."""
        self._turns = Turns(self._serve_with_room)
        try:
            yield self._turns
        finally:
            self._turns = None

    def note_calls(self, calls: int, batch: int) -> None:
        """Say once on the executing node, and in the log, if copies of the model have nothing to do."""
        words = planner.idle_replicas(self.slot.layout.spec, calls, batch)
        if words and words != self._noted:
            log.warning("%s", words)
            self.say(words)
        self._noted = words

    def _serve_with_room(self, calls: list[Asked]) -> list[torch.Tensor]:
        return self.with_room(lambda: again_if_gone(lambda: self._serve(calls)))

    def _serve(self, calls: list[Asked]) -> list[torch.Tensor]:
        """One request for all calls; the answers in their order."""
        loading = None
        if not self.slot.loaded:  # evicted between two steps, or the ranks have died since
            # A bar only for what may have to start and load again; usually this is one step of many.
            loading = self._progress().report
            self._make_room(comfy_host.room_for)
        replicas = self.slot.layout.spec.replica
        rows = rows_for([_batch(call) for call, _ in calls], replicas)
        with self.slot.held(loading, comfy_host.interrupted, self._work(calls)) as (info, group):
            if loading is not None:
                self.say_held(info, f"loaded in {info.seconds:.1f} s")
            frame = _Frame(self.slot, info)
            wired = tuple(
                frame.call(call, skipped, part) for (call, skipped), part in zip(calls, rows, strict=True)
            )
            request = Forward(
                slot=self.slot.name,
                calls=wired,
                anew=frame.anew,
                keep=tuple(frame.new),
                drop=frame.dropped(),
            )
            replies = group.call(request, frame.tensors, cancelled=comfy_host.interrupted)
            self.spans = {r: m.body.spans for r, m in replies.items() if isinstance(m.body, Forwarded)}
            comfy_host.raise_if_interrupted()
            per_replica = self.slot.layout.spec.world_size // replicas
            outputs = []
            for place, part in enumerate(rows):
                pieces = [
                    replies[replica * per_replica].tensors[str(place)]
                    for replica, (start, stop) in enumerate(part)
                    if stop > start
                ]
                # One piece stays where it is: the rank has let go of it, and its memory goes back when it dies.
                outputs.append(torch.cat(pieces) if len(pieces) > 1 else pieces[0])
            if self._verify:
                self._verify_first(group, wired[0], frame, outputs[0])
        return outputs

    def _work(self, calls: list[Asked]) -> Work:
        """One step of a run, by what decides how much memory it takes: pictures and tokens, not the text."""
        sizes = tuple(
            (_batch(call), *(tokens for name, tokens in call.lengths.items() if name != "text"))
            for call, _ in calls
        )
        step, steps = self.step or (None, None)
        run = comfy_host.executing_run()
        return Work(slot=self.slot.name, doing="sampling", sizes=sizes, run=run, step=step, steps=steps)

    # ---- verify

    def _verify_first(
        self, group: WorkerGroup, call: DenoiserCall, frame: _Frame, output: torch.Tensor
    ) -> None:
        """Compare with the whole model on one device, where that fits; stop if more than rounding lies between."""
        reply = group.call(
            Verify(slot=self.slot.name, call=call), frame.tensors, cancelled=comfy_host.interrupted
        )[0]
        comfy_host.raise_if_interrupted()
        assert isinstance(reply.body, Verified)
        self._verify = False
        if reply.body.missing_bytes:
            size = readable_bytes(reply.body.missing_bytes)
            device = self.slot.layout.devices[0].label
            self.say(f"Not verified: the whole model needs {size} on {device} beside its part")
            return
        reference = reply.tensors["reference"]
        difference = float((output.float() - reference).abs().max() / reference.abs().max())
        if not difference <= _ERRORS_ALLOWED * reply.body.own_error:  # also refuses what is no number
            self._verify = True
            raise RankError(
                f"The first step differs from one device by {difference:.1e} of the largest value.\n"
                f"Rounding alone moves it by {reply.body.own_error:.1e}, so {self.slot.layout.spec.describe()} is "
                "wrong for this model here.\n"
                "Use another layout, and please report this with the model's name and the log."
            )
        self.say(f"Verified: {difference:.1e} from one device, rounding alone {reply.body.own_error:.1e}")


class _Frame:
    """The tensors of one request, and how its calls refer to them."""

    def __init__(self, slot: Slot, info: object):
        self._kept = slot.kept
        self._kept.belong_to(info)
        self.anew = self._kept.is_empty
        self.tensors: dict[str, torch.Tensor] = {}
        self.new: list[int] = []
        self._used: set[int] = set()
        self._once: dict[int, int] = {}  # id of a tensor that crosses once -> its number

    def call(
        self, call: Call, skipped: Mapping[str, tuple[str, ...]], rows: tuple[tuple[int, int], ...]
    ) -> DenoiserCall:
        return DenoiserCall(
            arguments=dict(self._flat("", call.arguments)),
            inputs={path: self._ref(sent) for path, sent in call.inputs.items()},
            outputs={
                path: tuple(map(self._ref, one if isinstance(one, tuple) else (one,)))
                for path, one in call.outputs.items()
            },
            skipped=dict(skipped),
            rows=rows,
        )

    def dropped(self) -> tuple[int, ...]:
        return self._kept.dropped(self._used)

    def _flat(self, path: str, value: Any) -> Iterator[tuple[str, Any]]:
        """Entries of dicts and lists under dotted names."""
        if isinstance(value, Sent):
            yield path, self._ref(value)
        elif isinstance(value, Mapping | list | tuple):
            pairs = value.items() if isinstance(value, Mapping) else enumerate(value)
            for name, one in pairs:
                yield from self._flat(f"{path}.{name}" if path else str(name), one)
        else:
            yield path, value

    def _ref(self, sent: Sent) -> TensorRef:
        numbers = tuple(self._number(tensor, stays) for tensor, stays in sent.parts)
        return TensorRef(numbers, dim=sent.dim, batched=sent.batched, tokens=sent.tokens)

    def _number(self, tensor: torch.Tensor, stays: bool) -> int:
        if not stays:
            # ControlNets give several blocks the same residual. An id is its own as long as `tensors` holds it.
            if id(tensor) not in self._once:
                self._once[id(tensor)] = self._kept.passing()
                self.tensors[str(self._once[id(tensor)])] = tensor
            return self._once[id(tensor)]
        number, is_new = self._kept.number(tensor)
        self._used.add(number)
        if is_new:
            self.tensors[str(number)] = tensor
            self.new.append(number)
        return number


def _batch(call: Call) -> int:
    """How many pictures a call is for: dim 0 of what is batched."""
    for value in call.arguments.values():
        if isinstance(value, Sent) and value.batched:
            return int(value.parts[0][0].shape[0])
    raise ValueError("a call without a batch")


def refuse_patches(family: NativeFamily, options: Mapping[str, Any]) -> dict[str, tuple[str, ...]]:
    """Refuse what cannot reach into the ranks; the blocks to skip, of what can (SkipLayerGuidance)."""
    if options.get("optimized_attention_override") is not None:
        raise _cannot("An attention override", "optimized_attention_override")
    for name, patches in options.get("patches", {}).items():
        if patches:
            raise _cannot("A block patch", name)
    skipped = {}
    for group, replacements in options.get("patches_replace", {}).items():
        for key, replacement in replacements.items():
            kind, number = (*key, None)[:2] if isinstance(key, tuple) else (key, None)
            if group != "dit" or kind not in family.blocks or not _hands_back(replacement):
                raise _cannot("A block replacement", f"{group} {kind} {number}")
            blocks = family.blocks[kind]
            skipped[f"{blocks.path}.{number}"] = blocks.returns
    return skipped


def _hands_back(replacement: Any) -> bool:
    """Whether it is the replacement of ComfyUI's SkipLayerGuidance nodes, which leaves a block out."""
    # ComfyUI names the modules of its nodes after their path.
    module = getattr(replacement, "__module__", "") or ""
    return (
        re.search(r"(^|\W)nodes_slg$", module) is not None and getattr(replacement, "__name__", "") == "skip"
    )


def _cannot(feature: str, name: str) -> Refusal:
    return Refusal(
        f"{feature} ({name}) cannot be used with a sharded MODEL.",
        "It is a function that runs inside the blocks, and the blocks run in other processes.",
        "Works instead: the workflow without the node that sets it, or the stock Load Diffusion Model.",
    )
