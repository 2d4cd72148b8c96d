"""Examines this machine: runs a group of its own on the devices that are free, times its exchanges, compares pictures.

The group is in no registry: it closes none and none is disturbed. Devices that a group or another ComfyUI's ranks hold
are left out. What fails is written down, and the next thing is tried.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from .. import environment, planner
from ..devices import choose_devices
from ..group import GROUPS, IsCancelled, Report, WorkerGroup
from ..launch import PACK
from ..spec import (
    EXCHANGES,
    Decode,
    Device,
    Encode,
    Load,
    Measure,
    Measured,
    ModelSpec,
    ParallelSpec,
    Progress,
    RankError,
    Refusal,
    Sample,
    in_gigabytes,
)
from .facts import Machine, describe_machine, remembered
from .findings import WIRE_BYTES, Comparison, Findings, message_size

DEMO = PACK / "demo_model" / "shapes-flux"
LEAST_FREE = 2 << 30  # bytes on a card: a context, the libraries' buffers, the largest message
CARD_SIZES, CPU_SIZES = (4 << 10, 1 << 20, 64 << 20), (4 << 10, 1 << 20, 8 << 20)
SIDE, STEPS, SEED, PROMPT = 96, 8, 7, "a red circle on blue"
SLOT = "doctor"

Say = Callable[[str], None]


def examine(
    wanted: str = "auto",
    comfyui: str = "",
    *,
    say: Say = lambda line: None,
    report: Report | None = None,
    cancelled: IsCancelled | None = None,
) -> Findings:
    """Everything that can be found out on the devices `wanted`, within about a minute.

    `say` hears in a line what is begun. Raises Refusal for devices that do not exist, Cancelled, and what `report`
    raises; what goes wrong in the ranks is in the findings.
    """
    machine = describe_machine(comfyui)
    devices = choose_devices(wanted, [card.device for card in machine.cards])
    used, left_out = _free(devices, machine)
    if problem := environment.unsupported_platform():
        used, left_out = (), (problem.rstrip("."),)
    examination = _Examination(used, say, report, cancelled)
    if used:
        try:
            examination.run()
        finally:
            examination.close()
    found = examination.found
    return Findings(
        machine=machine, used=used, left_out=left_out, remembered=remembered(machine.cards), **found
    )


def _free(devices: Sequence[Device], machine: Machine) -> tuple[tuple[Device, ...], tuple[str, ...]]:
    """Those that a group may start on, and why not the others. Of the CPU's, two."""
    ours = {device.key for group in GROUPS.groups() if group.alive for device in group.devices}
    cards = {card.device.key: card for card in machine.cards}
    used, left_out = [], []
    for device in devices:
        if device.key in ours:
            left_out.append(f"{device.label} is in use by a group")
        elif device.key in cards and cards[device.key].foreign_ranks:
            left_out.append(f"{device.label} is in use by a group of another program")
        elif device.total_bytes and device.free_bytes < LEAST_FREE:
            left_out.append(
                f"{device.label} has {in_gigabytes(device.free_bytes)} free of the "
                f"{LEAST_FREE / 2**30:.0f} GB that a rank may take"
            )
        else:
            used.append(device)
    if devices[0].kind == "cpu":
        return tuple(used[:2]), ()
    return tuple(used), tuple(left_out)


def layouts(count: int, heads: int) -> tuple[ParallelSpec, ...]:
    """Layouts of the demo model that use each axis on `count` devices, or on as many as that axis can take."""
    if count < 2:
        return ()
    axes = max(n for n in range(1, min(count, heads) + 1) if count % n == 0)
    ring = count // axes
    if axes == 1:  # 5 or 7 devices
        axes, ring = min(count, heads), 1
    found = [
        ParallelSpec(tensor=axes, ring=ring),
        ParallelSpec(ulysses=axes, ring=ring),
        ParallelSpec(ring=count),
    ]
    if count % 4 == 0:
        found.append(ParallelSpec(tensor=2, ulysses=2, ring=count // 4))
    return tuple(dict.fromkeys(found))


class _Examination:
    """One run over the devices. `found` are the fields of Findings, as far as it has come."""

    def __init__(
        self, devices: tuple[Device, ...], say: Say, report: Report | None, cancelled: IsCancelled | None
    ):
        self.devices, self.say, self.report, self.cancelled = devices, say, report, cancelled
        self.found: dict[str, Any] = {}
        self._group = WorkerGroup(devices)
        self._row = 0  # of the measurement that is being made

    def run(self) -> None:
        with self._attempt("The group"):
            self._start()
        if "start_seconds" not in self.found:
            self._compare(together=False)
            return
        with self._attempt("The exchange of data"):
            self._measure()
        with self._attempt("The connection to the ranks"):
            self._time_wire()
        self._compare(together=True)

    def close(self) -> None:
        self._group.close("The doctor is done.")

    @contextlib.contextmanager
    def _attempt(self, what: str) -> Iterator[None]:
        try:
            yield
        except (RankError, Refusal) as error:
            self.found["problems"] = (*self.found.get("problems", ()), f"{what}: {_told(error)}")

    def _call(self, request: Any, tensors: Mapping[str, Any] | None = None) -> dict[int, Any]:
        return self._group.call(request, tensors, report=self._reported, cancelled=self.cancelled)

    def _reported(self, progress: Progress, tensors: Mapping[str, Any]) -> None:
        if progress.phase == "measuring":
            self._row = progress.done
        if self.report is not None:
            self.report(progress, tensors)

    # ---- the group

    def _start(self) -> None:
        self.say(f"starting {_ranks(len(self.devices))}")
        start = time.monotonic()
        self._group.start(self._reported, self.cancelled)
        self.found["start_seconds"] = time.monotonic() - start

    def _measure(self) -> None:
        self.say("timing the exchanges between the ranks")
        sizes = CPU_SIZES if self.devices[0].kind == "cpu" else CARD_SIZES
        rows = [(kind, nbytes) for kind in EXCHANGES for nbytes in sizes]
        try:
            replies = self._call(Measure(sizes=sizes))
        except RankError as error:
            kind, nbytes = rows[min(self._row, len(rows) - 1)]
            raise RankError(
                f"{kind} of {message_size(nbytes)} did not work. {error}", detail=error.detail
            ) from None
        self.found["measured"] = {
            rank: message.body
            for rank, message in sorted(replies.items())
            if isinstance(message.body, Measured)
        }

    def _time_wire(self) -> None:
        import torch

        sent = {"bytes": torch.zeros(WIRE_BYTES, dtype=torch.uint8)}
        self._group.ping(sent)  # the first one makes the buffers
        start = time.monotonic()
        answer = self._group.ping(sent)["bytes"]
        seconds = time.monotonic() - start
        if not bool((answer == 255).all()):
            raise RankError("What came back is not what was sent.")
        self.found["wire_seconds"] = seconds

    # ---- the demo model

    def _compare(self, *, together: bool) -> None:
        """One rank's picture, and if ranks work together, that of each layout beside it."""
        with self._attempt("The demo model"):
            facts = planner.check_pipeline(DEMO)
            latents: dict[ParallelSpec, tuple[Any, float]] = {}
            wanted = layouts(len(self.devices), facts.units) if together else ()
            for spec in sorted((*wanted, ParallelSpec()), key=lambda one: -one.world_size):
                with self._attempt(f"The demo model in the layout {spec.describe()}"):
                    latents[spec] = self._picture(spec, facts)
            self._set_beside(latents)

    def _set_beside(self, latents: dict[ParallelSpec, tuple[Any, float]]) -> None:
        reference, seconds = latents.pop(ParallelSpec(), (None, None))
        if reference is None:
            return
        self.found["reference_seconds"] = seconds
        self.found["comparisons"] = tuple(
            Comparison(
                layout=spec.describe(),
                ranks=spec.world_size,
                max_rel=_max_rel(samples, reference),
                seconds=seconds,
            )
            for spec, (samples, seconds) in latents.items()
        )

    def _picture(self, spec: ParallelSpec, facts: Any) -> tuple[Any, float]:
        """Latents [1, C, h, w] of the demo picture, and the seconds of sampling. One rank on its own also decodes."""
        self.say(f"making a picture with {spec.describe()}")
        self._on(self.devices[: spec.world_size])
        model = ModelSpec(
            path=facts.path, pipeline_class=facts.pipeline_class, dtype="float32", version=facts.version
        )
        self._call(Load(slot=SLOT, model=model, parallel=spec))
        text = dict(self._call(Encode(slot=SLOT, prompt=PROMPT))[0].tensors)
        request = Sample(
            slot=SLOT,
            seed=SEED,
            steps=STEPS,
            guidance=3.5,
            width=SIDE,
            height=SIDE,
            batch_size=1,
            denoise=1.0,
            preview=False,
        )
        start = time.monotonic()
        samples = self._call(request, text)[0].tensors["samples"].clone()
        seconds = time.monotonic() - start
        if spec.world_size == 1:
            images = self._call(Decode(slot=SLOT), {"samples": samples})[0].tensors["images"]
            if not 0.01 < float(images.std()) < 1:  # one colour, or not a number
                raise RankError("What was decoded is no picture.")
        return samples, seconds

    def _on(self, devices: tuple[Device, ...]) -> None:
        """Have the group run on exactly these."""
        if self._group.devices != devices:
            self._group.close()
            self._group = WorkerGroup(devices)


def _told(error: RankError | Refusal) -> str:
    return error.whole if isinstance(error, RankError) else str(error)


def _ranks(count: int) -> str:
    return f"{count} ranks" if count > 1 else "one rank"


def _max_rel(samples: Any, reference: Any) -> float:
    difference = (samples.double() - reference.double()).abs().max() / reference.double().abs().max()
    return float(difference)
