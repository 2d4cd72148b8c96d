"""Safetensors files opened for lazy reading: one stored tensor per key, in the order in which they lie on disk.

Opening maps the files and reads their headers only. What a read returns is a view of the mapping, so the pages of
other tensors, or of other ranks' rows, are never touched.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from ...safetensors_header import BITS, printable, read_headers
from ...spec import Refusal
from .source import Index


@dataclass(frozen=True, eq=False)
class StoredTensor:
    """A tensor exactly as a file holds it: a weight source without any change of value or dtype."""

    key: str
    file: Path
    dtype: str  # as safetensors names it, such as "BF16" or "F8_E4M3"
    shape: tuple[int, ...]
    _slice: Any = field(repr=False)  # safetensors' PySafeSlice; keeps the file mapped

    @property
    def item_bytes(self) -> int:
        return (BITS[self.dtype] + 7) // 8

    @property
    def where(self) -> str:
        return f"'{printable(self.key)}' in '{printable(self.file.name)}'"

    def read(self, index: Index) -> torch.Tensor:
        """A view of the mapped file."""
        return self._slice[index]


@dataclass(frozen=True)
class Stored:
    """The tensors of one or more opened files by key, and the files' own notes (the header's `__metadata__`)."""

    tensors: Mapping[str, StoredTensor]
    metadata: Mapping[str, str]


def open_files(files: Sequence[Path]) -> Stored:
    """Map `files`, read their headers, and nothing else. Raises Refusal for a damaged file or a key in two files."""
    header = read_headers(files)
    opened = {file: _mapped(file) for file in files}
    tensors = {
        entry.key: StoredTensor(
            entry.key, entry.file, entry.dtype, entry.shape, opened[entry.file].get_slice(entry.key)
        )
        for entry in header.entries
    }
    return Stored(tensors, header.metadata)


def _mapped(file: Path) -> Any:
    try:
        return safe_open(file, framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        raise Refusal(
            f"'{printable(file.name)}' cannot be read.",
            f"safetensors says: {printable(error)}.",
            "Download that file again.",
        ) from error
