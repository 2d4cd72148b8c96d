"""The header of a safetensors file, checked against the file and against itself, without torch.

Layout: 8 bytes little-endian header length, the header as JSON, then the tensors' bytes. The header comes from a
download, so everything that a read would trust is checked first and named with its key and file.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .spec import Refusal

_MOST_HEADER_BYTES = 100 << 20  # the format's own limit
# Bits per element of every dtype of the format (safetensors 0.8), whether or not it can be loaded here.
BITS = {
    "BOOL": 8,
    **dict.fromkeys(("U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 16),
    **dict.fromkeys(("U32", "I32", "F32"), 32),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 64),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    "F4": 4,
}


@dataclass(frozen=True)
class Entry:
    """One tensor as the header describes it; `first` and `last` bound its bytes, counted from the header's end."""

    key: str
    file: Path
    dtype: str
    shape: tuple[int, ...]
    first: int
    last: int

    @property
    def nbytes(self) -> int:
        return self.last - self.first

    @property
    def where(self) -> str:
        """Where it lies, for messages."""
        return f"'{printable(self.key)}' in '{printable(self.file.name)}'"


@dataclass(frozen=True)
class Header:
    """The tensors in the order in which they lie in the files, and the files' own notes."""

    entries: tuple[Entry, ...]
    metadata: dict[str, str]

    @property
    def nbytes(self) -> int:
        """Of all tensors."""
        return sum(entry.nbytes for entry in self.entries)


def read_header(file: Path) -> Header:
    """The checked header of `file`. Raises Refusal if it is no safetensors file, is damaged, or lies."""
    raw, data_bytes = _json_header(file)
    metadata = raw.pop("__metadata__", None) or {}
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise _damaged(file, "Its '__metadata__' is not a table of texts")
    entries = sorted(
        (_entry(file, key, value) for key, value in raw.items()), key=lambda entry: (entry.first, entry.last)
    )
    _check_places(file, entries, data_bytes)
    return Header(tuple(entries), metadata)


def read_headers(files: Iterable[Path]) -> Header:
    """The headers of one model's files as one. Raises Refusal as `read_header` does, and for a key in two files."""
    entries: dict[str, Entry] = {}
    metadata: dict[str, str] = {}
    for file in files:
        header = read_header(file)
        metadata |= header.metadata
        for entry in header.entries:
            if entry.key in entries:
                raise Refusal(
                    f"'{printable(entry.key)}' is in '{printable(entries[entry.key].file.name)}' and in "
                    f"'{printable(file.name)}'.",
                    "A tensor that two files hold has no one value.",
                    "Keep the files of one download only.",
                )
            entries[entry.key] = entry
    return Header(tuple(entries.values()), metadata)


def read_bytes(entry: Entry) -> bytes:
    """A tensor's bytes, for the few that are notes and no weights. Raises OSError."""
    with entry.file.open("rb") as opened:
        (length,) = struct.unpack("<Q", opened.read(8))
        opened.seek(8 + length + entry.first)
        return opened.read(entry.nbytes)


def printable(value: object) -> str:
    """A name from a file as part of one line of a message."""
    return "".join(char if char.isprintable() else " " for char in str(value)[:200])


def _name(file: Path) -> str:
    """A file as people find it: with its folder."""
    return f"{printable(file.parent.name)}/{printable(file.name)}"


def _json_header(file: Path) -> tuple[dict[str, Any], int]:
    """The header's JSON object, and how many bytes of tensors follow it."""
    try:
        size = file.stat().st_size
        with file.open("rb") as opened:
            start = opened.read(8)
            length = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
            if not 2 <= length <= min(size - 8, _MOST_HEADER_BYTES):
                raise _not_safetensors(file)
            header = json.loads(opened.read(length))
    except OSError as error:
        raise Refusal(
            f"{_name(file)} cannot be read.",
            f"The system says: {printable(error)}.",
            "Make the file readable for ComfyUI, or download it again.",
        ) from error
    except (ValueError, RecursionError) as error:
        raise _not_safetensors(file) from error
    if not isinstance(header, dict):
        raise _not_safetensors(file)
    return header, size - 8 - length


def _entry(file: Path, key: str, value: object) -> Entry:
    match value:
        case {"dtype": str(dtype), "shape": list(shape), "data_offsets": [int(first), int(last)]}:
            if not all(type(size) is int and 0 <= size < 1 << 48 for size in shape) or not 0 <= first <= last:
                raise _damaged(file, f"The shape or place it gives for '{printable(key)}' is impossible")
        case _:
            raise _damaged(file, f"Its entry for '{printable(key)}' is not a dtype, a shape and a place")
    if dtype not in BITS:
        raise Refusal(
            f"'{printable(key)}' in {_name(file)} is stored as {printable(dtype)}.",
            "That is no dtype of the safetensors format known here.",
            "Use the model in bf16, fp16, fp32 or fp8.",
        )
    expected = math.prod(shape) * BITS[dtype]
    if expected != (last - first) * 8:
        raise _damaged(
            file,
            f"'{printable(key)}', {dtype} {shape}, needs {expected / 8:,.0f} bytes and is given {last - first:,}",
        )
    return Entry(key, file, dtype, tuple(shape), first, last)


def _check_places(file: Path, entries: list[Entry], data_bytes: int) -> None:
    """Refuse tensors that share bytes, bytes of no tensor, and a file that ends early or late."""
    end, before = 0, ""
    for entry in entries:
        if entry.first < end:
            raise _damaged(file, f"'{printable(entry.key)}' overlaps '{printable(before)}'")
        if entry.first > end:
            raise _damaged(file, f"The bytes before '{printable(entry.key)}' belong to no tensor")
        end, before = entry.last, entry.key
    if end != data_bytes:
        start = file.stat().st_size - data_bytes
        wrong, reason = (
            ("cut short", "a download that did not finish")
            if data_bytes < end
            else ("too long", "a damaged download")
        )
        raise Refusal(
            f"{_name(file)} is {wrong}.",
            f"It should have {start + end:,} bytes and has {start + data_bytes:,}: {reason}.",
            "Download that file again.",
        )


def _damaged(file: Path, reason: str) -> Refusal:
    return Refusal(f"{_name(file)} is damaged.", f"{reason}.", "Download that file again.")


def _not_safetensors(file: Path) -> Refusal:
    return Refusal(
        f"{_name(file)} is not a safetensors file.",
        "Its first bytes are not a safetensors header, whatever its name says.",
        "Download the safetensors file of the model; other formats can run code and are not read.",
    )
