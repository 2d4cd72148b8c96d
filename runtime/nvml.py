"""NVIDIA's management library, opened for a moment: what it tells, it tells without touching a card."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def opened() -> Iterator[Any]:
    """The module pynvml, ready to be asked; None without the library, or without a driver."""
    try:
        import pynvml
    except ImportError:
        yield None
        return
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        yield None
        return
    try:
        yield pynvml
    finally:
        with contextlib.suppress(pynvml.NVMLError):
            pynvml.nvmlShutdown()


def text(answer: str | bytes) -> str:
    """Old versions of the library answer in bytes."""
    return answer.decode(errors="replace") if isinstance(answer, bytes) else answer
