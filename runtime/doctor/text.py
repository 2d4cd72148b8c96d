"""The doctor's report as text: for the person at the machine, and to be pasted into a bug report as it is."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import msgspec

from ..spec import in_gigabytes
from .facts import LEVELS_IN_WORDS, Card, Machine
from .findings import EQUAL, WIRE_BYTES, Findings, Rate, message_size, short
from .privacy import anonymous

_WIDTH = 110
_LINES_OF_A_PROBLEM = 40
_COLUMN = 14


def report(findings: Findings) -> str:
    """The whole report, ending with the verdict in one sentence. Holds no private data."""
    sections = [
        ("ComfyUI-Sharded doctor", [*_wrapped(_PREFACE)]),
        ("This machine", _machine(findings)),
        ("Cards", _cards(findings.machine)),
        ("How the cards reach each other", _links(findings.machine)),
        ("The group", _group(findings)),
        ("Exchanges between the ranks", _exchanges(findings)),
        ("The demo model", _pictures(findings)),
        ("What to know", _notes(findings)),
        ("What went wrong", _problems(findings)),
    ]
    blocks = ["\n".join([title, "-" * len(title), *lines]) for title, lines in sections if lines]
    return anonymous("\n\n".join([*blocks, "\n".join(_wrapped(f"Verdict: {findings.verdict}"))])) + "\n"


def as_plain_data(findings: Findings) -> dict[str, Any]:
    """The findings for a program, every text of them without private data."""
    found = {
        **msgspec.to_builtins(findings, str_keys=True),
        "verdict": findings.verdict,
        "status": findings.status,
    }
    return _anonymous_texts(found)


def _anonymous_texts(value: Any) -> Any:
    if isinstance(value, str):
        return anonymous(value)
    if isinstance(value, dict):
        return {name: _anonymous_texts(one) for name, one in value.items() if name != "uuid"}
    return [_anonymous_texts(one) for one in value] if isinstance(value, list | tuple) else value


_PREFACE = (
    "Names of people, machines, folders and networks are left out: this text can be pasted as it is. "
    "GB, MB and KB are powers of 1024 bytes, except in rates (GB/s are 10^9 bytes)."
)


def _row(name: str, value: str) -> list[str]:
    """A name and its value, which may run over several lines."""
    indent = " " * _COLUMN
    return textwrap.wrap(
        f"{name:{_COLUMN}}{value}",
        _WIDTH,
        subsequent_indent=indent,
        break_long_words=False,
        drop_whitespace=True,
    )


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, _WIDTH, break_long_words=False)


def _of(room: tuple[int, int]) -> str:
    return f"{in_gigabytes(room[0])}, {in_gigabytes(room[1])} free"


# ---- the machine


def _machine(findings: Findings) -> list[str]:
    machine = findings.machine
    libraries = next((one.libraries for one in findings.measured.values()), {})
    versions = {**machine.versions, **libraries}
    limit = f", the container may take {in_gigabytes(machine.ram_limit)}" if machine.ram_limit else ""
    rows = {
        "system": machine.system,
        "Python": machine.python,
        "versions": ", ".join(f"{name} {version}" for name, version in versions.items()),
        "driver": machine.driver or "no NVIDIA driver was found",
        "host RAM": _of(machine.ram) + limit,
        "/dev/shm": _of(machine.shared_memory) if machine.shared_memory else "none",
        "temporary": f"{in_gigabytes(machine.temporary_free)} free"
        if machine.temporary_free
        else "cannot be written",
        "settings": ", ".join(f"{name}={value}" for name, value in machine.settings.items()) or "none",
        "remembered": findings.remembered or "nothing",
    }
    return [line for name, value in rows.items() for line in _row(name, value)]


def _cards(machine: Machine) -> list[str]:
    return [line for card in machine.cards for line in _row(f"GPU {card.device.index}", _card(card))]


def _card(card: Card) -> str:
    device = card.device
    parts = [
        device.name,
        _of((device.total_bytes, device.free_bytes)) if device.total_bytes else "shares the host's memory",
        f"compute capability {card.compute}" if card.compute else "",
        card.pcie + (" (the card has more lanes)" if card.narrow else ""),
        "drives a display" if card.display else "",
        _programs(card.other_programs),
    ]
    return ", ".join(part for part in parts if part)


def _programs(count: int | None) -> str:
    if not count:
        return ""
    return "another program computes on it" if count == 1 else f"{count} other programs compute on it"


def _links(machine: Machine) -> list[str]:
    """A matrix, as `nvidia-smi topo -m` shows it, and what its words mean."""
    if not machine.links:
        return []
    indices = [card.device.index for card in machine.cards]
    cells = {link.cards: _cell(link.way, link.peers) for link in machine.links}
    width = max(len(cell) for cell in cells.values()) + 3
    lines = [" " * _COLUMN + "".join(f"{f'GPU {index}':{width}}" for index in indices).rstrip()]
    for one in indices:
        row = (cells.get((min(one, other), max(one, other)), "-") for other in indices)
        lines.append((f"{f'GPU {one}':{_COLUMN}}" + "".join(f"{cell:{width}}" for cell in row)).rstrip())
    ways = dict.fromkeys(link.way.partition(" x")[0] for link in machine.links)
    meanings = [f"{way}: {LEVELS_IN_WORDS[way]}" for way in ways if way in LEVELS_IN_WORDS]
    meanings.append("peer: they read each other's memory; no peer: what they exchange goes through host RAM")
    return [*lines, *_wrapped(f"({'; '.join(meanings)})")]


def _cell(way: str, peers: bool | None) -> str:
    return way + {True: ", peer", False: ", no peer", None: ""}[peers]


# ---- what ran


def _group(findings: Findings) -> list[str]:
    lines = [line for reason in findings.left_out for line in _row("left out", reason)]
    if findings.used:
        lines = [*_row("devices", ", ".join(device.label for device in findings.used)), *lines]
    if findings.start_seconds is not None:
        lines += _row("start", f"{findings.start_seconds:.1f} s")
    if findings.wire_seconds is not None:
        lines += _row(
            "socket",
            f"{message_size(WIRE_BYTES)} to the ranks and back in {findings.wire_seconds * 1e3:.1f} ms",
        )
    if findings.measured:
        apart = max(one.arithmetic for one in findings.measured.values())
        word = "right" if apart <= EQUAL else "WRONG"
        lines += _row(
            "arithmetic", f"max_rel {apart:.1e} against double precision on the CPU, the worst device: {word}"
        )
    return lines


def _exchanges(findings: Findings) -> list[str]:
    if not findings.rates:
        return []
    sizes = list(dict.fromkeys(rate.nbytes for rate in findings.rates))
    table = {(rate.kind, rate.nbytes): rate for rate in findings.rates}
    cells = {key: _rate(rate) for key, rate in table.items()}
    width = max(map(len, cells.values())) + 3
    lines = [" " * _COLUMN + "".join(f"{message_size(size):{width}}" for size in sizes).rstrip()]
    for kind in dict.fromkeys(rate.kind for rate in findings.rates):
        lines.append(
            (f"{kind:{_COLUMN}}" + "".join(f"{cells[kind, size]:{width}}" for size in sizes)).rstrip()
        )
    wrong = any(rate.wrong_ranks for rate in findings.rates)
    arrived = "SOMETHING ELSE ARRIVED THAN WAS SENT" if wrong else "everything arrived as it was sent"
    explained = (
        "time of one, and what goes over each rank's link meanwhile: the larger messages show the links"
    )
    return [*lines, *_wrapped(f"({explained}; {arrived})")]


def _rate(rate: Rate) -> str:
    time = f"{rate.seconds * 1e6:.0f} us" if rate.seconds < 1e-3 else f"{rate.seconds * 1e3:.1f} ms"
    wrong = " WRONG" if rate.wrong_ranks else ""
    return f"{time}, {rate.bytes_per_second / 1e9:.2f} GB/s{wrong}"


def _pictures(findings: Findings) -> list[str]:
    if findings.reference_seconds is None:
        return []
    rows = [("one rank", f"{findings.reference_seconds:.2f} s", "the reference")]
    rows += [
        (one.layout, f"{one.seconds:.2f} s", f"max_rel {one.max_rel:.1e}: {one.verdict}")
        for one in findings.comparisons
    ]
    width = max(len(layout) for layout, _, _ in rows) + 3
    explained = (
        "latents of one picture in float32 after 8 steps; equal is up to 1e-4, which is rounding; the model is too "
        "small to be faster on several ranks"
    )
    return [
        *(f"{layout:{width}}{seconds:10}{verdict}" for layout, seconds, verdict in rows),
        *_wrapped(f"({explained})"),
    ]


# ---- what it means


def _notes(findings: Findings) -> list[str]:
    notes = _all_notes(findings)
    return [line for note in notes for line in textwrap.wrap(f"- {note}", _WIDTH, subsequent_indent="  ")]


def _all_notes(findings: Findings) -> Iterator[str]:
    cards = findings.machine.cards
    if findings.used and findings.used[0].kind == "cpu":
        yield (
            "The ranks ran on the CPU. That shows that groups work here, not how fast or how right a card is."
            + ("" if cards else " No NVIDIA card was found.")
        )
    if any(link.peers is False for link in findings.machine.links):
        yield (
            "Some cards exchange data through host RAM only. Layouts that divide the weights (tensor) exchange most; "
            "where the model fits a card, prefer context."
        )
    if narrow := _names(card for card in cards if card.narrow):
        yield f"{narrow}: fewer PCIe lanes than the card has. Another slot or the BIOS may give all of them."
    if display := _names(card for card in cards if card.display):
        yield f"{display}: the display's programs take memory there, too. Name the other cards to keep it free."
    totals = {round(card.device.total_bytes / 2**30) for card in cards}
    if len(totals) > 1:
        yield "The cards have unequal memory: weights are divided in shares where equal ones have no room."
    if close := [one.layout for one in findings.comparisons if one.verdict == "close"]:
        yield f"{', '.join(close)}: more apart than rounding mostly is, yet the same picture."


def _names(cards: Iterable[Card]) -> str:
    return ", ".join(short(card.device) for card in cards)


def _problems(findings: Findings) -> list[str]:
    faults: Sequence[str] = findings.faults
    lines: list[str] = []
    for number, fault in enumerate(faults, 1):
        text = fault.splitlines()
        lines += [f"{number}. {text[0]}", *(f"   {line}".rstrip() for line in text[1:_LINES_OF_A_PROBLEM])]
        if len(text) > _LINES_OF_A_PROBLEM:
            lines.append("   ...")
    return lines
