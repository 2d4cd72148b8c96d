"""What is tried again after a failure, for how long, and what the user is told when it is not.

The next prompt works after any failure: the group starts again and the slot reloads. A request that fails each time
would so cost minutes for every prompt in the queue; after three failures in a row it is stopped for a while, with a
diagnosis. Out of memory is told with the bytes that were wanted, the place in the model, and who else holds the device.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from .holders import Card, card_memory
from .host_memory import host_memory
from .spec import (
    Decode,
    Device,
    Encode,
    Failure,
    Memory,
    RankError,
    RankOutOfMemory,
    Request,
    Sample,
    model_name,
    readable_bytes,
)

FAILURES_ALLOWED = 3  # in a row, of one request
PAUSE_SECONDS = 120.0  # after them: a queue of the same request ends at once meanwhile
_RECORDS = 64  # of requests that have failed, the newest
BRIEF = 200  # characters of a library's own words in the first line of an error
# Of a request: "gone" is before it was asked, and it is asked again; "stopped" was by a person.
_UNCOUNTED = ("refused", "cancelled", "given up", "gone", "stopped")


# --------------------------------------------------------------------------------------------------------------
# Failures in a row


class Work(msgspec.Struct, frozen=True, kw_only=True):
    """A request as far as it decides whether it fails again: not its seed, nor its text.

    `run` names the run that this is one step of, so that only the end of the run counts as a success; "" where the
    request is all of it. `step` of `steps`, from 0, is where in the run it is, as far as the sampler tells.
    """

    slot: str
    doing: str  # as people read it: "loading", "sampling"
    sizes: tuple[tuple[int, ...], ...] = ()
    run: str = ""
    step: int | None = None
    steps: int | None = None


def work_of(request: Request, tensors: Mapping[str, Any] | None, slot: str) -> Work:
    """What counts of a request of the pipeline nodes."""
    sizes: tuple[tuple[int, ...], ...] = ()
    if isinstance(request, Sample):
        sizes = ((request.batch_size, request.height, request.width),)
    elif isinstance(request, Decode):
        sizes = tuple(tuple(tensor.shape) for tensor in (tensors or {}).values())
    return Work(slot=slot, doing=_DOING.get(type(request), type(request).__name__.lower()), sizes=sizes)


_DOING = {Encode: "encoding", Sample: "sampling", Decode: "decoding"}


class Failed(msgspec.Struct, frozen=True, kw_only=True):
    """One failure; `when` by a monotonic clock in seconds."""

    when: float
    rank: int
    kind: str
    line: str


class _Record(msgspec.Struct):
    """What has failed since the last success of one kind of request to one slot."""

    sizes: tuple[tuple[int, ...], ...]
    run: str
    failures: list[Failed] = []
    went_well: bool = False  # the newest call

    def pause_left(self, now: float) -> float:
        """Seconds for which this is not tried."""
        if len(self.failures) < FAILURES_ALLOWED:
            return 0.0
        return self.failures[-1].when + PAUSE_SECONDS - now


class Retries:
    """Failures in a row of each slot and kind of request. Other sizes, or a success, begin anew."""

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self._records: dict[tuple[str, str], _Record] = {}

    def check(self, work: Work, devices: Sequence[Device]) -> None:
        """Raise RankError (kind "given up") if `work` has failed too often in a row to be tried now."""
        record = self._records.get((work.slot, work.doing))
        if record is None or self._starts_anew(record, work):
            return
        now = self._clock()
        left = record.pause_left(now)
        if left > 0:
            raise RankError(
                f"{_begin(work)} has failed {len(record.failures)} times in a row and is not tried again for now.\n"
                f"The last time: {record.failures[-1].line}\n"
                f"{' '.join(_remedies(record.failures[-FAILURES_ALLOWED:], devices))} {_when_again(left)}",
                detail=history(record.failures, now),
                rank=record.failures[-1].rank,
                kind="given up",
            )

    def doubts(self, slot: str) -> bool:
        """Whether something that this slot may be asked for next is not tried now: then it loads only when asked."""
        now = self._clock()
        return any(key[0] == slot and one.pause_left(now) > 0 for key, one in list(self._records.items()))

    @contextlib.contextmanager
    def attempt(self, work: Work, devices: Sequence[Device]) -> Iterator[None]:
        """Count how the work in it ends. Raises as `check`; the last failure that is allowed tells the diagnosis."""
        self.check(work, devices)
        try:
            yield
        except RankError as error:
            if error.kind not in _UNCOUNTED:
                self._note_failure(work, error, devices)
            raise
        self._note_success(work)

    def forget(self, slot: str | None = None) -> None:
        """Begin anew with a slot, or with everything: something was done about it."""
        for key in [key for key in list(self._records) if slot is None or key[0] == slot]:
            self._records.pop(key, None)  # another thread may note one meanwhile

    def _note_failure(self, work: Work, error: RankError, devices: Sequence[Device]) -> None:
        key = work.slot, work.doing
        record = self._records.pop(key, None)
        if record is None or self._starts_anew(record, work):
            record = _Record(sizes=work.sizes, run=work.run)
        record.run, record.went_well = work.run, False
        now = self._clock()
        record.failures.append(Failed(when=now, rank=error.rank, kind=error.kind, line=error.what))
        self._records[key] = record  # as the newest
        while len(self._records) > _RECORDS:
            del self._records[next(iter(self._records))]
        if len(record.failures) >= FAILURES_ALLOWED:
            error.explain(
                f"This was failure {len(record.failures)} in a row of the same request.",
                f"{' '.join(_remedies(record.failures[-FAILURES_ALLOWED:], devices))} {_when_again(PAUSE_SECONDS)}",
            )
            error.detail = f"{history(record.failures, now)}\n\n{error.detail}"

    def _note_success(self, work: Work) -> None:
        key = work.slot, work.doing
        record = self._records.get(key)
        if record is None:
            return
        if not work.run or self._starts_anew(record, work):
            del self._records[key]
        else:
            record.run, record.went_well = work.run, True

    @staticmethod
    def _starts_anew(record: _Record, work: Work) -> bool:
        """Other sizes; or another run, and the last one had no failure at its end."""
        return record.sizes != work.sizes or (record.went_well and record.run != work.run)


def _begin(work: Work) -> str:
    sizes = " and ".join("x".join(map(str, size)) for size in work.sizes)
    return f"{work.doing.capitalize()}{f' ({sizes})' if sizes else ''} with {model_name(work.slot)}"


def _when_again(seconds: float) -> str:
    minutes = max(1, round(seconds / 60))
    return (
        f"It can be queued again in {minutes} minute{'s' * (minutes > 1)}; at once after Stop Group (Sharded), or with "
        "another size or layout."
    )


def history(failures: Sequence[Failed], now: float) -> str:
    """What has failed, and how long ago, a line each."""
    return "\n".join(f"{now - one.when:.0f} s ago: {one.line}" for one in failures[-FAILURES_ALLOWED:])


def _remedies(failures: Sequence[Failed], devices: Sequence[Device]) -> Iterator[str]:
    ranks = {one.rank for one in failures}
    on_cards = devices[0].kind == "cuda"
    if len(ranks) == 1 and (rank := ranks.pop()) >= 0 and len(devices) > 1:
        others = ",".join(str(device.index) for device in devices if device is not devices[rank])
        yield f"It was rank {rank} ({devices[rank].label}) each time" + (
            f": devices {others} on the Parallel Config leaves that card out." if on_cards else "."
        )
    kind = Counter(one.kind for one in failures).most_common(1)[0][0]
    yield _REMEDIES.get(kind, _REMEDIES["failed"])
    if kind == "died":
        yield host_memory_now()


_REMEDIES = {
    "memory": "What needs less memory: more tensor, a smaller picture or batch, or other programs closed.",
    "died": "A process that ends without a word was stopped by the system for want of host RAM (the kernel's log says "
    "so: dmesg), by the driver (there: Xid), or by hand.",
    "start": "The ranks do not come up: the log lines above say what they waited for, and Doctor (Sharded) tests the "
    "devices and their links.",
    "collectives": "The ranks do not reach each other: Doctor (Sharded) tests the links between the devices.",
    "stuck": "The ranks wait for each other: Doctor (Sharded) tests the links between the devices.",
    "silent": "The rank's process stands still: stopped by hand, or the machine is out of memory and swaps.",
    "failed": "Another layout or dtype may do. If not, please report it with the lines above.",
}


def host_memory_now() -> str:
    total, available = host_memory().room
    return f"Host RAM now: {readable_bytes(available)} of {readable_bytes(total)} can be taken."


# --------------------------------------------------------------------------------------------------------------
# Out of memory


def out_of_memory(
    rank: int,
    name: str,
    device: Device,
    doing: str,
    failure: Failure,
    memory: Memory,
    pids: Mapping[int, int],
    detail: str = "",
) -> RankOutOfMemory:
    """The error for a rank that had no room for what it wanted.

    `name` is the rank with its device; `memory` what it last said of itself, `pids` those of the group by rank.
    """
    own = {os.getpid(): "ComfyUI itself", **{pid: f"rank {one} of this group" for one, pid in pids.items()}}
    tried = tried_bytes(failure.message)
    wanted = f": it wanted {_size(tried)} more" if tried else f": {brief(failure.message)}"
    place = innermost(failure.traceback)
    return RankOutOfMemory(
        f"{name[0].upper()}{name[1:]} ran out of memory while {doing}{wanted}.\n"
        f"{who_holds(device, memory, card_memory(device, own))}",
        detail="\n\n".join(filter(None, (f"It was at {place}." if place else "", detail.strip("\n")))),
        rank=rank,
        tried=tried,
        allocated=allocated_bytes(failure.message),
        traceback=failure.traceback,
    )


def brief(message: str) -> str:
    """What a library has said as one line of a message; the whole of it is in the traceback."""
    text = " ".join(message.split())
    return text if len(text) <= BRIEF else f"{text[: BRIEF - 4]} ..."


_UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


def tried_bytes(message: str) -> int:
    """What an allocation wanted, from the words of torch's allocators; 0 if they do not say."""
    found = re.search(r"[Tt]ried to allocate ([\d.]+) ?(bytes|KiB|MiB|GiB)", message)
    return int(float(found[1]) * _UNITS[found[2]]) if found else 0


def allocated_bytes(message: str) -> int:
    """What the rank held in tensors then, from the words of torch's CUDA allocator; 0 if it does not say."""
    found = re.search(r"([\d.]+) ?(bytes|KiB|MiB|GiB) is allocated by PyTorch", message)
    return int(float(found[1]) * _UNITS[found[2]]) if found else 0


def innermost(traceback: str) -> str:
    """The last line of a traceback that is not torch's own, as "`code` (file, line 12)"; "" without one."""
    frames = re.findall(r'^  File "([^"]+)", line (\d+), in \S+\n    (.+)$', traceback, re.MULTILINE)
    own = [frame for frame in frames if "/torch/" not in frame[0]] or frames
    if not own:
        return ""
    path, line, code = own[-1]
    return f"`{code.strip()}` ({path.rpartition('/')[2]}, line {line})"


def who_holds(device: Device, memory: Memory, card: Card | None) -> str:
    """Where a device's memory is, in a sentence or two."""
    if device.kind != "cuda":
        return host_memory_now()
    if card is None or not card.holders:
        return f"{device.label}: {_without_list(memory, card)}"
    told = [f"{one.name or 'another process'} (pid {one.pid}) {_size(one.nbytes)}" for one in card.holders]
    rest = card.total_bytes - card.free_bytes - sum(one.nbytes or 0 for one in card.holders)
    if rest > card.total_bytes // 50 and all(one.nbytes is not None for one in card.holders):
        told.append(f"others that the driver does not name {_size(rest)}")
    return (
        f"{device.label} has {_size(card.total_bytes)}, {_size(card.free_bytes)} of it free now. "
        f"It is held by {', '.join(told)}."
    )


def _without_list(memory: Memory, card: Card | None) -> str:
    total = card.total_bytes if card else memory.device_total
    used = card.total_bytes - card.free_bytes if card else memory.device_used
    if total is None or used is None:
        return "the driver does not tell who holds its memory."
    ours = memory.reserved
    others = f", {_size(max(0, used - ours))} of it by others than this rank" if ours is not None else ""
    return f"{_size(used)} of {_size(total)} in use{others}. The driver does not tell by whom."


def _size(nbytes: int | None) -> str:
    return "of unknown size" if nbytes is None else readable_bytes(nbytes)
