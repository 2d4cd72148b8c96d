"""What the doctor has found, as plain data, and what it means: one sentence and a status."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from ..spec import Device, Measured
from .facts import Machine

# max_rel, in float32. Rounding in another order moves a picture's latents by 1e-6 to 1e-5.
EQUAL, CLOSE = 1e-4, 1e-3
WIRE_BYTES = 16 << 20  # of what is sent to the ranks and back
WORKS, WRONG, NOT_EXAMINED = 0, 1, 2  # exit statuses


def message_size(nbytes: int) -> str:
    """The size of a message in words: 4 KB, 64 MB. Units are powers of 1024."""
    return f"{nbytes / 2**20:.0f} MB" if nbytes >= 1 << 20 else f"{nbytes / 2**10:.0f} KB"


def short(device: Device) -> str:
    """A device without its product name."""
    return f"{'GPU' if device.kind == 'cuda' else 'CPU'} {device.index}"


@dataclass(frozen=True)
class Rate:
    """A kind of collective with messages of `nbytes`, as the slowest rank saw it."""

    kind: str
    nbytes: int
    seconds: float
    wrong_ranks: tuple[int, ...]  # on which something else arrived than was sent
    ranks: int

    @property
    def bytes_per_second(self) -> float:
        """What goes over each rank's link ("bus bandwidth"), by the factors of nccl-tests' PERFORMANCE.md."""
        others = (self.ranks - 1) / self.ranks
        factor = {"all_reduce": 2 * others, "all_gather": others, "all_to_all": others}.get(self.kind, 1.0)
        return self.nbytes * factor / self.seconds if self.seconds else 0.0


def rates(measured: dict[int, Measured]) -> tuple[Rate, ...]:
    """The rows of all ranks together."""
    rows = zip(*(measured[rank].exchanges for rank in sorted(measured)), strict=True)
    return tuple(
        Rate(
            kind=row[0].kind,
            nbytes=row[0].nbytes,
            seconds=max(one.seconds for one in row),
            wrong_ranks=tuple(rank for rank, one in enumerate(row) if not one.right),
            ranks=len(measured),
        )
        for row in rows
    )


@dataclass(frozen=True)
class Comparison:
    """A picture of the demo model in one layout, beside that of one rank."""

    layout: str
    ranks: int
    max_rel: float
    seconds: float

    @property
    def verdict(self) -> str:
        if self.max_rel <= EQUAL:
            return "equal"
        return "close" if self.max_rel <= CLOSE else "WRONG"  # not a number is wrong, too


@dataclass(frozen=True)
class Findings:
    """Everything in the report. `problems` are what went wrong, in the order in which it did, as errors say it."""

    machine: Machine
    used: tuple[Device, ...] = ()
    left_out: tuple[str, ...] = ()
    start_seconds: float | None = None
    wire_seconds: float | None = None
    measured: dict[int, Measured] = field(default_factory=dict)
    reference_seconds: float | None = None
    comparisons: tuple[Comparison, ...] = ()
    problems: tuple[str, ...] = ()
    remembered: str = ""  # what the cards need, by earlier starts or this one

    @property
    def rates(self) -> tuple[Rate, ...]:
        return rates(self.measured)

    @property
    def faults(self) -> tuple[str, ...]:
        """What is wrong, worst first: wrong numbers, then what did not run at all."""
        return (*self._wrong_devices(), *self._wrong_exchanges(), *self._wrong_layouts(), *self.problems)

    def _wrong_devices(self) -> Iterable[str]:
        for rank, one in self.measured.items():
            if not one.arithmetic <= EQUAL:
                yield f"{short(self.used[rank])} computes wrong (max_rel {one.arithmetic:.0e} against the CPU)"

    def _wrong_exchanges(self) -> Iterable[str]:
        for kind in dict.fromkeys(rate.kind for rate in self.rates if rate.wrong_ranks):
            ranks = {rank for rate in self.rates if rate.kind == kind for rank in rate.wrong_ranks}
            names = ", ".join(short(self.used[rank]) for rank in sorted(ranks))
            yield f"{kind} brings wrong data to {names}"

    def _wrong_layouts(self) -> Iterable[str]:
        for one in self.comparisons:
            if one.verdict == "WRONG":
                yield f"{one.layout} gives another picture than one rank (max_rel {one.max_rel:.0e})"

    @property
    def status(self) -> int:
        """0 works, 1 something is wrong, 2 nothing could be examined."""
        if self.faults:
            return WRONG
        return WORKS if self.reference_seconds is not None else NOT_EXAMINED

    @property
    def verdict(self) -> str:
        """The whole report in one sentence."""
        if self.faults:
            more = f", and {len(self.faults) - 1} more" if len(self.faults) > 1 else ""
            return f"Something is wrong: {self.faults[0].splitlines()[0].rstrip('.')}{more}."
        if self.status == NOT_EXAMINED:
            return f"Not examined: {'; '.join(self.left_out) or 'there is no device to run on'}."
        if len(self.used) == 1:
            return f"A rank works on {short(self.used[0])}; with one device there is nothing to divide."
        where = f"{len(self.used)} {'cards' if self.used[0].kind == 'cuda' else 'CPU ranks'}"
        layouts = f"{len(self.comparisons)} layouts give the picture that one rank gives"
        return f"Everything that was tried works: {where} exchange data correctly, and {layouts}."
