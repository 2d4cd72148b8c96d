"""Both ends of the wire in one process, and what a test can see of its buffers and descriptors from outside."""

from __future__ import annotations

import contextlib
import fcntl
import gc
import os
import socket
import struct
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from runtime import wire

if TYPE_CHECKING:
    import torch

T = TypeVar("T")
PATIENCE = 10.0  # seconds until a thread counts as stuck; none waits this long unless a test fails


def background(task: Callable[[], T]) -> Future[T]:
    """Run `task` in a thread that cannot keep the tests from ending."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(task())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


class Link:
    """A connected pair, each end with a pool of its own."""

    def __init__(self, left: wire.Connection, right: wire.Connection):
        self.left, self.right = left, right

    @classmethod
    def over_a_unix_socket(cls, shared: bool = True) -> Link:
        left, right = socket.socketpair()
        return cls(
            wire.Connection(left, wire.BufferPool(shared)), wire.Connection(right, wire.BufferPool(shared))
        )

    @classmethod
    def over_tcp(cls) -> Link:
        """What the two sides make on a system without Unix sockets: `Connection` chooses its pools itself."""
        with socket.create_server(("127.0.0.1", 0)) as listener:
            left = socket.create_connection(listener.getsockname())
            right, _ = listener.accept()
        return cls(wire.Connection(left), wire.Connection(right))

    def carry(self, tensors: Mapping[str, torch.Tensor], call: int = 1) -> wire.Message:
        """Send from left to right; a thread sends, since a frame may be longer than the socket's buffer."""

        def send() -> None:
            try:
                self.left.send(call, None, tensors)
            except BaseException:
                self.left.close()  # or the receiver would wait for ever
                raise

        sending = background(send)
        try:
            message = self.right.receive()
        except wire.ConnectionLost:
            sending.result(PATIENCE)
            raise
        sending.result(PATIENCE)
        return message

    def tell_releases(self) -> None:
        """Let the left end hear which of the right end's views have died so far."""
        self.right.send(0, None)
        self.left.receive()

    def close(self) -> None:
        for end in (self.left, self.right):
            end.close()
            end.pool.close()


# ---- what can be seen from outside


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def mapped_buffers() -> int:
    """How many mappings of shared buffers this process has; each end that looks at a buffer has one."""
    return Path("/proc/self/maps").read_text().count("memfd:sharded-")


@contextlib.contextmanager
def no_descriptor_left() -> Iterator[None]:
    before = _descriptors()
    yield
    if _descriptors() - before:
        gc.collect()  # an exception may hold the frames it came through
    assert not _descriptors() - before


def _descriptors() -> set[str]:
    """Every open descriptor with what it stands for; listing them opens one more, which is gone afterwards."""
    found = set()
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            found.add(f"{number} {os.readlink(f'/proc/self/fd/{number}')}")
    return found


# ---- frames written by hand


def frame(
    header: Mapping[str, Any] | bytes, payload: bytes = b"", lengths: tuple[int, int] | None = None
) -> bytes:
    """A frame as bytes; `lengths` of header and payload are the true ones unless given."""
    packed = header if isinstance(header, bytes) else msgspec.msgpack.encode(header)
    return struct.pack("<IQ", *(lengths or (len(packed), len(payload)))) + packed + payload


def tensor_header(
    dtype: str = "uint8", shape: Sequence[int] = (4,), buffer: int = -1, name: str = "x"
) -> dict[str, Any]:
    return {"name": name, "dtype": dtype, "shape": list(shape), "buffer": buffer}


def header(*tensors: Mapping[str, Any], **fields: Any) -> dict[str, Any]:
    return {"call": 1, "body": None, "tensors": list(tensors), **fields}


@contextlib.contextmanager
def memory_file(content: bytes) -> Iterator[int]:
    """The descriptor of an anonymous file, such as a shared buffer is."""
    descriptor = os.memfd_create("test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.write(descriptor, content)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        yield descriptor
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def raw_peer(timeout: float = PATIENCE) -> Iterator[tuple[socket.socket, wire.Connection]]:
    """A bare socket whose other end is a Connection."""
    bare, other = socket.socketpair()
    other.settimeout(timeout)
    connection = wire.Connection(other)
    with bare:
        yield bare, connection
    connection.close()
    connection.pool.close()
