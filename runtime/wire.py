"""Frames and tensors on the private socket between the host and one rank.

A frame is a fixed prefix (header length, payload length), a msgpack header, and the bytes of small tensors. Large
tensors travel in anonymous shared memory (memfd), whose descriptor is passed with the first frame that uses it; a
container's 64 MB /dev/shm does not matter to it. Nothing on the wire can execute: the header decodes only into the
plain structs of `spec`, and a peer that has not sent the group's token is not read at all.

    sender                                         receiver
    pool.stage(t): copy t into buffer 7   -- frame, descriptor of 7 -->   maps 7, hands out a view
    buffer 7 is lent                                                      view dies
    buffer 7 may be used again            <-- release [7] --------------

Torch is imported only when a tensor is touched, so that a rank is connected before it starts its long imports.
"""

from __future__ import annotations

import contextlib
import hmac
import math
import mmap
import os
import socket
import struct
import threading
import time
import weakref
from array import array
from collections import deque
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import msgspec

from .spec import Body

if TYPE_CHECKING:
    import torch

_PREFIX = struct.Struct("<IQ")  # header bytes, payload bytes
_HELLO = struct.Struct("<8s32sI")  # magic, token, rank
_MAGIC = b"SHARDED1"
_MAX_HEADER = 16 << 20
_MAX_DIMS = 64  # of a tensor, as in torch's own iterators
_MAX_DESCRIPTORS = 128  # per frame; Linux allows 253 in one message
SHARE_FROM = 64 << 10  # bytes; smaller tensors are cheaper inside the frame
_ITEM_BYTES = {
    **dict.fromkeys(("bool", "uint8", "int8", "float8_e4m3fn", "float8_e5m2"), 1),
    **dict.fromkeys(("int16", "uint16", "float16", "bfloat16"), 2),
    **dict.fromkeys(("int32", "uint32", "float32"), 4),
    **dict.fromkeys(("int64", "uint64", "float64", "complex64"), 8),
    "complex128": 16,
}
Filled = TypeVar("Filled", bytearray, memoryview)
_KEEP_IDLE = 2 << 30  # bytes of unused buffers one pool keeps for the next call


class ConnectionLost(ConnectionError):
    """The peer closed the socket, or died."""


class TensorHeader(msgspec.Struct, frozen=True):
    """One tensor of a frame. `buffer` is -1 when its bytes are in the frame's payload."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    buffer: int


class FrameHeader(msgspec.Struct, frozen=True):
    """`opened` announces (buffer, size) pairs in the order of the descriptors that travel with the frame."""

    call: int
    body: Body | None
    tensors: list[TensorHeader] = []
    opened: list[tuple[int, int]] = []
    closed: list[int] = []
    released: list[int] = []


class Message(NamedTuple):
    """A received frame. Its tensors may be shared with other receivers: read them, never write into them."""

    call: int
    body: Body | None
    tensors: dict[str, torch.Tensor]


# --------------------------------------------------------------------------------------------------------------
# Shared buffers


class Buffer:
    """A piece of anonymous shared memory that its owner may lend to several receivers at once."""

    def __init__(self, number: int, size: int):
        import fcntl  # not on Windows, where no buffer is ever made

        self.number, self.size, self.users = number, size, 0
        self.descriptor = os.memfd_create(f"sharded-{number}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self.descriptor, size)
            # The receiver maps the whole size: a buffer that could shrink could kill it with SIGBUS.
            fcntl.fcntl(self.descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
            self.memory = mmap.mmap(self.descriptor, size)
        except BaseException:
            os.close(self.descriptor)
            raise

    def close(self) -> None:
        os.close(self.descriptor)
        # A view that still looks at the memory keeps the mapping alive; it goes with the view.
        with contextlib.suppress(BufferError):
            self.memory.close()


class BufferPool:
    """Buffers of one owner, used again when nobody looks at them any more. Thread-safe."""

    def __init__(self, shared: bool | None = None) -> None:
        # Finalizers may release a buffer at any allocation, also while this thread holds the lock.
        self._lock = threading.RLock()
        self.shared = shared_memory_available() if shared is None else shared
        self._buffers: dict[int, Buffer] = {}
        self._made: dict[int, Buffer] = {}  # data pointer of a tensor from `empty` -> its buffer
        self._next = 0

    def _acquire(self, nbytes: int) -> Buffer | None:
        """A buffer of at least `nbytes` with one user, or None where the bytes must go through the socket.

        Reused buffers have their pages already: touching fresh ones costs more than the copy itself.
        """
        if not self.shared or nbytes < SHARE_FROM:
            return None
        with self._lock:
            fitting = [
                b
                for b in self._buffers.values()
                if not b.users and nbytes <= b.size <= 2 * nbytes + (1 << 20)
            ]
            if fitting:
                buffer = min(fitting, key=lambda b: b.size)
            else:
                self._next += 1
                try:
                    buffer = Buffer(self._next, -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE)
                except OSError:  # no descriptors or no memory left for shared pages: the socket still works
                    return None
                self._buffers[buffer.number] = buffer
            buffer.users += 1
            return buffer

    def lend(self, number: int) -> None:
        with self._lock:
            self._buffers[number].users += 1

    def release(self, number: int) -> None:
        """One user fewer. Unknown numbers are ignored: the buffer was dropped with its connection."""
        with self._lock:
            if (buffer := self._buffers.get(number)) is not None:
                buffer.users -= 1

    def _forget_made(self, pointer: int, number: int) -> None:
        self._made.pop(pointer, None)
        self.release(number)

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """An uninitialised CPU tensor that can be sent without another copy; its memory returns when it dies."""
        import torch

        nbytes = math.prod(shape) * dtype.itemsize
        buffer = self._acquire(nbytes)
        if buffer is None:
            return torch.empty(shape, dtype=dtype)
        view, array = _view(buffer.memory, nbytes)
        self._made[view.data_ptr()] = buffer
        weakref.finalize(array, self._forget_made, view.data_ptr(), buffer.number)
        return view.view(dtype).reshape(shape)

    def stage(self, tensors: Mapping[str, torch.Tensor]) -> Staged:
        """Put `tensors` where the peers can read them: one copy for all receivers. Use as a context manager."""
        headers: list[TensorHeader] = []
        payload: list[memoryview] = []
        buffers: dict[int, Buffer] = {}
        staged = Staged(self, headers, payload, buffers)
        try:
            for name, tensor in tensors.items():
                tensor = tensor.detach().resolve_conj().resolve_neg()  # their bytes, not a view's promise
                dtype, shape = str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)
                buffer = self._filled(tensor)
                if buffer is None:
                    raw = tensor.cpu().contiguous().reshape(-1)
                    payload.append(memoryview(raw.view(_uint8()).numpy()) if raw.numel() else memoryview(b""))
                    headers.append(TensorHeader(name, dtype, shape, -1))
                else:
                    buffers[buffer.number] = buffer
                    headers.append(TensorHeader(name, dtype, shape, buffer.number))
        except BaseException:
            staged.__exit__()
            raise
        return staged

    def _filled(self, tensor: torch.Tensor) -> Buffer | None:
        """A buffer that holds the bytes of `tensor`, with one more user; no copy if it was made by `empty`."""
        made = self._made.get(tensor.data_ptr())
        if made is not None and tensor.is_contiguous():
            self.lend(made.number)
            return made
        buffer = self._acquire(tensor.nbytes)
        if buffer is not None:
            view, _ = _view(buffer.memory, tensor.nbytes)
            try:
                view.view(tensor.dtype).reshape(tensor.shape).copy_(tensor)
            except BaseException:
                self.release(buffer.number)
                raise
        return buffer

    def trim(self, keep: int = _KEEP_IDLE) -> None:
        """Close unused buffers beyond `keep` bytes, largest first; the next frame tells each peer to unmap them."""
        with self._lock:
            idle = sorted((b for b in self._buffers.values() if not b.users), key=lambda b: -b.size)
            excess = sum(b.size for b in idle) - keep
            for buffer in idle:
                if excess <= 0:
                    break
                excess -= buffer.size
                del self._buffers[buffer.number]
                buffer.close()

    def gone(self, numbers: set[int]) -> set[int]:
        """Those of `numbers` whose buffers are closed."""
        with self._lock:
            return numbers - self._buffers.keys()

    def close(self) -> None:
        """Close every descriptor. Views that receivers or callers still hold stay valid."""
        with self._lock:
            for buffer in self._buffers.values():
                buffer.close()
            self._buffers.clear()

    def idle_bytes(self) -> int:
        with self._lock:
            return sum(b.size for b in self._buffers.values() if not b.users)


class Staged:
    """Tensors ready to be sent to any number of peers; holds its buffers until it is closed."""

    def __init__(
        self,
        pool: BufferPool,
        headers: list[TensorHeader],
        payload: list[memoryview],
        buffers: dict[int, Buffer],
    ):
        self.pool, self.headers, self.payload, self.buffers = pool, headers, payload, buffers

    def __enter__(self) -> Staged:
        return self

    def __exit__(self, *exc: object) -> None:
        for header in self.headers:
            if header.buffer >= 0:
                self.pool.release(header.buffer)
        self.headers = []


def shared_memory_available() -> bool:
    """Whether this system has anonymous shared memory whose descriptor can be passed on."""
    return hasattr(os, "memfd_create") and hasattr(socket, "send_fds")


def _uint8() -> torch.dtype:
    import torch

    return torch.uint8


def _view(memory: mmap.mmap, nbytes: int) -> tuple[torch.Tensor, Any]:
    """A uint8 tensor over `memory`, and the array whose life is the life of the tensor's storage."""
    import numpy
    import torch

    array = numpy.frombuffer(memory, dtype=numpy.uint8, count=nbytes)
    return torch.from_numpy(array), array


# --------------------------------------------------------------------------------------------------------------
# Connections


class Connection:
    """One end of the socket: any thread may send, one thread receives."""

    def __init__(self, sock: socket.socket, pool: BufferPool | None = None):
        self._socket = sock
        self.pool = pool or BufferPool(shared_memory_available() and sock.family == socket.AF_UNIX)
        self._send_lock = threading.Lock()
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(FrameHeader)
        self._sent_descriptors: set[int] = set()
        # Of its own: a reader that waited for the send lock could leave both peers blocked in full sockets.
        self._lent_lock = threading.RLock()
        self._lent: dict[int, int] = {}  # buffer -> how often the peer holds it
        self._mapped: dict[int, mmap.mmap] = {}
        self._dead_views: deque[int] = deque()  # filled by finalizers in any thread, emptied by `send`

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(
        self, call: int, body: Body | None, tensors: Mapping[str, torch.Tensor] | Staged | None = None
    ) -> None:
        """Send one frame. Raises ConnectionLost."""
        if tensors is None or isinstance(tensors, Staged):
            self._send(call, body, tensors)
        else:
            with self.pool.stage(tensors) as staged:
                self._send(call, body, staged)

    def _send(self, call: int, body: Body | None, staged: Staged | None) -> None:
        with self._send_lock:
            self._send_locked(call, body, staged)

    def _send_locked(self, call: int, body: Body | None, staged: Staged | None) -> None:
        headers = staged.headers if staged else []
        buffers = (
            [staged.buffers[header.buffer] for header in headers if header.buffer >= 0] if staged else []
        )
        fresh = list({b.number: b for b in buffers if b.number not in self._sent_descriptors}.values())
        self._sent_descriptors |= {buffer.number for buffer in fresh}
        with self._lent_lock:
            for buffer in buffers:
                self.pool.lend(buffer.number)
                self._lent[buffer.number] = self._lent.get(buffer.number, 0) + 1
        self.pool.trim()
        closed = self.pool.gone(self._sent_descriptors)
        self._sent_descriptors -= closed
        while len(fresh) > _MAX_DESCRIPTORS:  # frames of their own announce what does not fit in one
            self._announce(fresh[:_MAX_DESCRIPTORS])
            fresh = fresh[_MAX_DESCRIPTORS:]
        opened = [(buffer.number, buffer.size) for buffer in fresh]
        header_bytes = self._encoder.encode(
            FrameHeader(call, body, headers, opened, sorted(closed), list(_drain(self._dead_views)))
        )
        self._send_frame(header_bytes, staged.payload if staged else [], fresh)

    def _announce(self, buffers: list[Buffer]) -> None:
        opened = [(buffer.number, buffer.size) for buffer in buffers]
        self._send_frame(self._encoder.encode(FrameHeader(0, None, opened=opened)), [], buffers)

    def _send_frame(self, header: bytes, payload: list[memoryview], opened: list[Buffer]) -> None:
        length = sum(len(part) for part in payload)
        prefix = _PREFIX.pack(len(header), length)
        if length < SHARE_FROM:  # one message is worth a small copy: each wakes the peer's reader
            header, payload = b"".join((header, *payload)), []
        try:
            self._send_bytes([prefix, header, *payload], [buffer.descriptor for buffer in opened])
        except OSError as error:
            raise ConnectionLost(str(error)) from error

    def _send_bytes(self, parts: list[Any], descriptors: list[int]) -> None:
        # One message for prefix and header: its descriptors arrive with the first byte of the frame.
        first = parts[0] + parts[1]
        sent = (
            socket.send_fds(self._socket, [first], descriptors) if descriptors else self._socket.send(first)
        )
        if sent < len(first):
            self._socket.sendall(first[sent:])
        for part in parts[2:]:
            self._socket.sendall(part)

    def flush_releases(self) -> None:
        """Tell the peer about views that died since the last frame; no frame if there are none.

        For the reader: it never waits for a sender, or both peers could wait for each other's readers. What is not
        told now goes with the next frame.
        """
        if self._dead_views and self._send_lock.acquire(blocking=False):
            try:
                self._send_locked(0, None, None)
            finally:
                self._send_lock.release()

    def receive(self) -> Message:
        """Wait for one frame. Raises ConnectionLost."""
        prefix, descriptors = self._receive_prefix()
        try:
            header_length, payload_length = _PREFIX.unpack(prefix)
            if header_length > _MAX_HEADER:
                raise ConnectionLost(f"a frame header of {header_length} bytes")
            header = self._decoder.decode(self._read(bytearray(header_length)))
            for (number, size), descriptor in zip(header.opened, descriptors, strict=True):
                self._mapped[number] = _mapped(descriptor, size)
            if sum(_inline_bytes(tensor) for tensor in header.tensors) != payload_length:
                raise ConnectionLost("a frame whose payload has another length than its tensors")
            tensors = {tensor.name: self._tensor(tensor) for tensor in header.tensors}
        except ConnectionLost:
            raise
        except Exception as error:
            # Whatever it is: a reader thread that died of a frame would not be missed, and its calls would hang.
            raise ConnectionLost(f"a frame that does not decode: {error}") from error
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
        for number in header.closed:
            self._mapped.pop(number, None)
        for number in header.released:
            self._taken_back(number)
        return Message(header.call, header.body, tensors)

    def _receive_prefix(self) -> tuple[bytes, list[int]]:
        """The prefix and the descriptors that came with its first byte."""
        try:
            if self.pool.shared:
                data, descriptors = _receive_descriptors(self._socket, _PREFIX.size)
            else:
                data, descriptors = self._socket.recv(_PREFIX.size), []
        except OSError as error:
            raise ConnectionLost(str(error)) from error
        if not data:
            raise ConnectionLost("closed")
        try:
            rest = bytes(self._read(bytearray(_PREFIX.size - len(data))))
        except ConnectionLost:
            for descriptor in descriptors:
                os.close(descriptor)
            raise
        return data + rest, list(descriptors)

    def _read(self, into: Filled) -> Filled:
        view = memoryview(into)
        while view:
            try:
                count = self._socket.recv_into(view)
            except OSError as error:
                raise ConnectionLost(str(error)) from error
            if not count:
                raise ConnectionLost("closed inside a frame")
            view = view[count:]
        return into

    def _tensor(self, header: TensorHeader) -> torch.Tensor:
        import torch

        dtype = getattr(torch, header.dtype)
        nbytes = _tensor_bytes(header)
        if header.buffer < 0:
            # Its pages become real as they are filled: a frame that only promises gigabytes costs none.
            flat = torch.empty(nbytes, dtype=torch.uint8)
            self._read(memoryview(flat.numpy()))
        else:
            memory = self._mapped.get(header.buffer)
            if memory is None or nbytes > len(memory):
                raise ConnectionLost(f"a tensor outside of buffer {header.buffer}")
            flat, array = _view(memory, nbytes)
            weakref.finalize(array, self._dead_views.append, header.buffer)
        return flat.view(dtype).reshape(header.shape)

    def _taken_back(self, number: int) -> None:
        """The peer released a buffer of ours."""
        with self._lent_lock:
            held = self._lent.get(number, 0)
            if held:
                self._lent[number] = held - 1
                self.pool.release(number)

    def abandon(self) -> None:
        """In a forked process: close its copy of the socket. The peer does not notice."""
        self._socket.close()

    def close(self) -> None:
        """Close the socket; everything the peer still held of this pool counts as released."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        with self._lent_lock:
            for number, held in self._lent.items():
                for _ in range(held):
                    self.pool.release(number)
            self._lent.clear()
        self._mapped.clear()  # views that are still held keep theirs


def _receive_descriptors(sock: socket.socket, size: int) -> tuple[bytes, list[int]]:
    """As socket.recv_fds, which passes no flags on: a program that replaces this one must not inherit them."""
    space = socket.CMSG_LEN(_MAX_DESCRIPTORS * array("i").itemsize)
    data, ancillary, _, _ = sock.recvmsg(size, space, socket.MSG_CMSG_CLOEXEC)
    descriptors = array("i")
    for level, kind, content in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            descriptors.frombytes(content[: len(content) - len(content) % descriptors.itemsize])
    return data, list(descriptors)


def _mapped(descriptor: int, size: int) -> mmap.mmap:
    """Map a buffer of the peer. Raises ConnectionLost if the peer could still make it smaller (see Buffer)."""
    import fcntl

    if not fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
        raise ConnectionLost("a buffer that its owner can make smaller")
    return mmap.mmap(descriptor, size)


def _tensor_bytes(header: TensorHeader) -> int:
    """Bytes of a tensor as its header has it. Raises ConnectionLost for a dtype or shape that is none."""
    size = _ITEM_BYTES.get(header.dtype)
    # Multiplying millions of lengths would take hours, and no tensor has so many.
    if size is None or len(header.shape) > _MAX_DIMS or any(length < 0 for length in header.shape):
        raise ConnectionLost(f"a tensor of {header.dtype[:20]} {header.shape[:8]}")
    return math.prod(header.shape) * size


def _inline_bytes(header: TensorHeader) -> int:
    return _tensor_bytes(header) if header.buffer < 0 else 0


def _drain(queue: deque[int]) -> Iterator[int]:
    while queue:
        try:
            yield queue.popleft()
        except IndexError:
            return


# --------------------------------------------------------------------------------------------------------------
# Meeting: the host listens in its private directory, every rank dials


def listen(directory: Path) -> tuple[socket.socket, str]:
    """A listening socket and its address: a Unix socket in `directory`, loopback TCP where those are missing."""
    if hasattr(socket, "AF_UNIX"):
        path = directory / "host"
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind(str(path))
        path.chmod(0o600)
        address = f"unix:{path}"
    else:
        listener = socket.create_server(("127.0.0.1", 0))
        address = f"tcp:{listener.getsockname()[1]}"
    listener.listen(64)
    return listener, address


def dial(address: str, token: str, rank: int) -> Connection:
    """A rank's way to the host. Raises OSError when the host is gone."""
    kind, _, place = address.partition(":")
    if kind == "unix":
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.connect(place)
    else:
        sock = socket.create_connection(("127.0.0.1", int(place)))
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.sendall(_HELLO.pack(_MAGIC, bytes.fromhex(token), rank))
    return Connection(sock)


def admit(sock: socket.socket, token: str, timeout: float = 5.0) -> int | None:
    """Read a newcomer's hello; its rank, or None if it does not know the token. Nothing else is read before."""
    deadline = time.monotonic() + timeout
    hello = b""
    try:
        while len(hello) < _HELLO.size:
            sock.settimeout(max(0.001, deadline - time.monotonic()))
            part = sock.recv(_HELLO.size - len(hello))
            if not part:
                return None
            hello += part
    except OSError:
        return None
    magic, offered, rank = _HELLO.unpack(hello)
    if magic != _MAGIC or not hmac.compare_digest(offered, bytes.fromhex(token)):
        return None
    sock.settimeout(None)
    return rank
