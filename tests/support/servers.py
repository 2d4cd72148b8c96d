"""A ComfyUI server for as long as a fixture wants it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from tools.base_directory import BaseDirectory
from tools.comfy import Server


@contextmanager
def serving(base: BaseDirectory, arguments: Sequence[str] = ()) -> Iterator[Server]:
    """A server that has started. It fails at its end if a process outlives it."""
    with Server(base, arguments=arguments) as server:
        yield server
    assert not server.left_behind, "processes outlived the server:\n" + "\n".join(server.left_behind)
