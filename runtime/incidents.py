"""What has gone wrong with a group, as the panel tells it: a title, a sentence, and the details with the rank's log.

The words are English; `kind` and `params` say the same in parts, for a page in another language.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from .doctor.privacy import anonymous
from .spec import readable_bytes

Kind = Literal["died", "silent", "stuck", "memory", "failed", "start", "layout", "restarted", "action"]
DETAIL_CHARACTERS = 1500
_LINE = 300
_HEAD = 400  # of these, how many from the beginning; the rest is the end, where a log says what was last


class Params(msgspec.Struct, frozen=True, kw_only=True):
    """The parts of an incident's sentence. None and "" are unknown; bytes and seconds.

    `step` is the one that was being made, counted from 1.
    """

    doing: str = ""
    step: int | None = None
    steps: int | None = None
    wanted: int | None = None
    seconds: float | None = None
    before: str = ""
    after: str = ""
    slot: str = ""


UNKNOWN = Params()


class Incident(msgspec.Struct, frozen=True, kw_only=True):
    """One incident. `when` is a reading of the monotonic clock; `id` and `when` are the journal's."""

    group: str
    kind: Kind
    title: str
    text: str
    rank: int | None = None
    device: str | None = None
    detail: str = ""
    params: Params = UNKNOWN
    id: str = ""
    when: float = 0.0


def lost(
    group: str, kind: Kind, rank: int, device: str, params: Params = UNKNOWN, detail: str = ""
) -> Incident:
    """A rank is gone: it "died", was "silent" or "stuck" for `params.seconds`, or ran out of "memory"."""
    while_doing = f" while {params.doing}" if params.doing else " while the group was idle"
    if params.step is not None:
        while_doing += f", at step {params.step}"
    title, said = f"Rank {rank} stopped", "died"
    if kind == "silent":
        said = f"gave no sign of life for {params.seconds:.0f} s" if params.seconds else "stood still"
    elif kind == "stuck":
        said = f"made no progress for {params.seconds or 0:.0f} s"
    elif kind == "memory":
        title = f"Rank {rank} ran out of memory"
        said = f"wanted {readable_bytes(params.wanted)} more" if params.wanted else "had no room left"
    return Incident(
        group=group,
        kind=kind,
        title=title,
        text=f"{device} {said}{while_doing}.",
        rank=rank,
        device=device,
        detail=short(detail),
        params=params,
    )


def failed(
    group: str,
    kind: Literal["failed", "start"],
    line: str,
    detail: str,
    rank: int | None = None,
    device: str | None = None,
    params: Params = UNKNOWN,
) -> Incident:
    """A rank has reported an error, or the ranks did not come up; `line` is the first of the error."""
    title = "The group did not start" if kind == "start" else f"Rank {rank} failed"
    return Incident(
        group=group,
        kind=kind,
        title=title,
        text=one_line(line),
        rank=rank,
        device=device,
        detail=short(detail),
        params=params,
    )


def restarted(group: str, rank: int, device: str) -> Incident:
    """The next run has found a rank dead, and the group starts again."""
    return Incident(
        group=group,
        kind="restarted",
        title="The group was started again",
        text=f"Rank {rank} had stopped.",
        rank=rank,
        device=device,
    )


def smaller(group: str, slot: str, before: str, after: str) -> Incident:
    """A run has ended well in a smaller layout, after it ran out of memory in the one that was wanted."""
    return Incident(
        group=group,
        kind="layout",
        title=f"Ran with {after} instead",
        text=f"{before} did not fit.",
        params=Params(before=before, after=after, slot=slot),
    )


def not_done(group: str, action: str, reason: str) -> Incident:
    """What somebody asked for has failed after it had begun: `action` is "park" or "restore"."""
    return Incident(
        group=group,
        kind="action",
        title=f"{action.capitalize()} failed",
        text=one_line(reason),
        params=Params(doing=action),
    )


def not_kept(group: str, slots: tuple[str, ...]) -> Incident:
    """Models that were to be parked had no room in host RAM."""
    names = ", ".join(slots)
    return Incident(
        group=group,
        kind="action",
        title="Not kept in RAM",
        text=f"Host RAM has no room for {names}: the next use reads it from disk again.",
        params=Params(doing="park", slot=names),
    )


def one_line(text: str) -> str:
    """The first line of an error, without private data."""
    line = anonymous(text.partition("\n")[0][:DETAIL_CHARACTERS])
    return line if len(line) <= _LINE else f"{line[: _LINE - 1]}…"


def short(detail: str) -> str:
    """`detail` without private data, in DETAIL_CHARACTERS at most: its beginning and its end."""
    text = detail.strip()
    if len(text) > 3 * DETAIL_CHARACTERS:  # most of a long log is not worth reading through
        head, tail = text[:DETAIL_CHARACTERS], text[-2 * DETAIL_CHARACTERS :]
        # In whole lines: nobody knows half a path or half a name for what it is.
        text = head[: head.rfind("\n") + 1] + tail[tail.find("\n") + 1 :]
    text = anonymous(text)
    if len(text) <= DETAIL_CHARACTERS:
        return text
    return f"{text[:_HEAD]}\n…\n{text[_HEAD + 3 - DETAIL_CHARACTERS :]}"
