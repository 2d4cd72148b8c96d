"""What this machine's cards need to reach each other, found by the self-test at start, and remembered.

    as it is  ──fails or hangs──>  without peer access  ──>  also without shared memory  ──>  an error with all three

Boards and virtual machines exist on which the driver promises peer access and the bytes do not arrive, or never.
NCCL's variables are those of its manual (NCCL_P2P_DISABLE, NCCL_SHM_DISABLE). What was found is kept in the user's
cache directory, for these very cards with this driver and this torch; without such a directory it is found anew.
"""

from __future__ import annotations

import contextlib
import logging
import os
import tempfile
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TypeVar

import msgspec

from . import environment
from .devices import driver_version
from .spec import Device, RankError, describe_devices

log = logging.getLogger("comfyui-sharded")

BROKEN = "collectives"  # the kind of a RankError that says the ranks do not reach each other
_MOST = 32  # sets of cards that are remembered
_LARGEST = 1 << 20  # bytes of the file; more was not written here

T = TypeVar("T")


class Setting(msgspec.Struct, frozen=True, kw_only=True):
    """A way for the cards to exchange data: NCCL's variables, and what they do in words."""

    name: str
    words: str
    variables: tuple[tuple[str, str], ...] = ()

    @property
    def assignments(self) -> str:
        return " ".join(f"{name}={value}" for name, value in self.variables)


_NO_PEERS, _NO_SHARED = ("NCCL_P2P_DISABLE", "1"), ("NCCL_SHM_DISABLE", "1")
AS_IT_IS = Setting(name="as it is", words="as the driver has it")
SETTINGS = (
    AS_IT_IS,
    Setting(name="no peer access", words="without peer access", variables=(_NO_PEERS,)),
    Setting(
        name="no peer access, no shared memory",
        words="without peer access and without shared memory",
        variables=(_NO_PEERS, _NO_SHARED),
    ),
)


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """What was found for some cards: the setting's name, for people beside the versions it was found with."""

    cards: tuple[str, ...]
    driver: str
    torch: str
    setting: str


class Notes(msgspec.Struct, frozen=True, kw_only=True):
    """All that is remembered, oldest first."""

    entries: tuple[Entry, ...] = ()


def settings(devices: Sequence[Device]) -> tuple[Setting, ...]:
    """The settings to try, from the remembered one on. Ranks on the CPU, or one alone, have no choice."""
    if len(devices) < 2 or any(device.kind != "cuda" for device in devices):
        return (AS_IT_IS,)
    names = [setting.name for setting in SETTINGS]
    entry = _find(recall(), _entry(devices, ""))
    return SETTINGS[names.index(entry.setting) if entry and entry.setting in names else 0 :]


def first_that_works(devices: Sequence[Device], attempt: Callable[[Setting], T]) -> T:
    """What `attempt` returns with the first setting under which the ranks reach each other; that one is remembered.

    An attempt says by a RankError of kind BROKEN that they do not; whatever else it raises ends the search. Raises
    that RankError with a line for each attempt if none works.
    """
    failed: list[tuple[Setting, RankError]] = []
    for setting in (tried := settings(devices)):
        try:
            result = attempt(setting)
        except RankError as error:
            if error.kind != BROKEN:
                raise
            failed.append((setting, error))
            if setting is not tried[-1]:
                log.warning("%s Trying again with other settings.", error.what)
            continue
        if failed:
            log.warning(
                "The cards reach each other %s (%s). This is remembered for this driver and this torch.",
                setting.words,
                setting.assignments,
            )
            remember(devices, setting)
        elif setting.variables:
            log.info("The cards work %s (%s), as found earlier.", setting.words, setting.assignments)
        return result
    raise _all_failed(devices, failed)


def _all_failed(devices: Sequence[Device], failed: Sequence[tuple[Setting, RankError]]) -> RankError:
    last = failed[-1][1]
    if len(failed) == 1:
        return last
    lines = "\n".join(f"- {setting.words}: {error.what}" for setting, error in failed)
    return RankError(
        f"{describe_devices(devices)} do not reach each other in any of {len(failed)} ways.\n"
        f"The last time: {last.what}\n"
        "Doctor (Sharded) tests the links between the cards; works instead: one of them, by its number in devices.",
        detail=f"{lines}\n\n{last.whole}",
        rank=last.rank,
        kind=BROKEN,
        traceback=last.traceback,
    )


# ---- what is remembered


def notes_file() -> Path | None:
    """Where it is kept, None for a user without a home."""
    parent = environment.cache_directory()
    return parent / "comfyui-sharded" / "machine.json" if parent else None


def recall() -> Notes:
    """What was remembered; nothing if the file is not there or not ours to read."""
    path = notes_file()
    try:
        if path is None or path.stat().st_size > _LARGEST:
            return Notes()
        return msgspec.json.decode(path.read_bytes(), type=Notes)
    except (OSError, ValueError, RecursionError):  # a file that does not decode is written anew
        return Notes()


def remember(devices: Sequence[Device], setting: Setting) -> None:
    """Keep what was found. Where it cannot be kept, it is found anew at the next start: no error."""
    path = notes_file()
    if path is None:
        return
    entry = _entry(devices, setting.name)
    others = [one for one in recall().entries if not _same(one, entry)]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _replace(path, msgspec.json.encode(Notes(entries=(*others[1 - _MOST :], entry))))
    except OSError as error:
        log.warning("What these cards need is not remembered: %s", error)


def _replace(path: Path, data: bytes) -> None:
    """Write a whole file or nothing: another ComfyUI may read it, or write it too."""
    descriptor, name = tempfile.mkstemp(prefix=path.name, dir=path.parent)
    try:
        with open(descriptor, "wb") as file:
            file.write(data)
        os.replace(name, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise


def _entry(devices: Sequence[Device], setting: str) -> Entry:
    torch = ""
    with contextlib.suppress(PackageNotFoundError):
        torch = version("torch")
    cards = tuple(sorted(device.uuid for device in devices))
    return Entry(cards=cards, driver=driver_version(), torch=torch, setting=setting)


def _find(notes: Notes, wanted: Entry) -> Entry | None:
    return next((one for one in notes.entries if _same(one, wanted)), None)


def _same(one: Entry, other: Entry) -> bool:
    """Whether they are about the same cards, driver and torch."""
    return msgspec.structs.replace(one, setting="") == msgspec.structs.replace(other, setting="")
