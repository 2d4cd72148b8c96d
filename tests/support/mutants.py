"""Frames of the wire, damaged in ways that follow from a seed: bits, lengths, the header's fields, and descriptors.

A mutant begins as a frame that one side might send to the other. Most damage leaves the rest of the frame whole, so
that it reaches the decoder's last checks instead of failing at the first.
"""

from __future__ import annotations

import contextlib
import os
import random
import socket
import struct
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import msgspec

from runtime import spec, wire
from tests.support.wires import frame

PAGE = 4096
FRAME_BYTES = 128 << 10  # no mutant is longer: it fits into a socket's buffer, and no sender waits
NUMBERS = (
    0,
    1,
    -1,
    2,
    7,
    127,
    255,
    2**15,
    2**31 - 1,
    2**31,
    2**32,
    2**40,
    2**62,
    2**63 - 1,
    -(2**63),
    2**64 - 1,
)
ODD: tuple[Any, ...] = (None, True, 0.5, float("nan"), float("inf"), b"\xff", [], {}, [[]], {"type": "Load"})
WORDS = (
    "",
    "a",
    "x",
    "\x00",
    "../../etc/passwd",
    "é" * 300,
    "Load",
    "float32",
    "load",
    "nn",
    "__class__",
    "0",
)


@dataclass(frozen=True)
class Mutant:
    """Bytes to send, with descriptors of these kinds (keys of DESCRIPTORS); `kind` names what was done to the frame."""

    kind: str
    data: bytes
    descriptors: tuple[str, ...] = ()


@dataclass
class Frame:
    """A frame in parts: the header as plain data, the payload, and the kinds of its descriptors."""

    header: Any
    payload: bytes = b""
    descriptors: list[str] = field(default_factory=list)

    def bytes(self) -> bytes:
        return frame(self.header, self.payload)


# ---- what a frame may carry besides bytes


def _memory(size: int, sealed: bool) -> int:
    import fcntl

    descriptor = os.memfd_create("mutant", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, size)
    if sealed:
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    return descriptor


def _shrinking() -> int:
    """Memory that its owner makes smaller as soon as it is mapped: whoever then reads it is killed by SIGBUS."""
    return _memory(64 * PAGE, sealed=False)


DESCRIPTORS: dict[str, Callable[[], int]] = {
    "shared": lambda: _memory(64 * PAGE, sealed=True),
    "small": lambda: _memory(PAGE, sealed=True),
    "empty": lambda: _memory(0, sealed=True),
    "unsealed": lambda: _memory(64 * PAGE, sealed=False),
    "shrinking": _shrinking,
    "null": lambda: os.open(os.devnull, os.O_RDWR),
    "folder": lambda: os.open("/", os.O_RDONLY),
    "read only": lambda: os.open("/proc/self/exe", os.O_RDONLY),
    "socket": lambda: socket.socket(socket.AF_UNIX).detach(),
}


def deliver(mutant: Mutant, sock: socket.socket) -> None:
    """Send a mutant as far as its receiver lets us."""
    opened = [DESCRIPTORS[kind]() for kind in mutant.descriptors]
    try:
        with contextlib.suppress(OSError):
            if opened and mutant.data:
                socket.send_fds(sock, [mutant.data], opened)
            else:
                sock.sendall(mutant.data)
        for kind, descriptor in zip(mutant.descriptors, opened, strict=True):
            if kind == "shrinking":
                os.ftruncate(descriptor, 0)
    finally:
        for descriptor in opened:
            os.close(descriptor)


# ---- whole frames to begin with


def _frames(bodies: Iterator[spec.Body | None]) -> list[Frame]:
    found = []
    for body in bodies:
        encoded = msgspec.msgpack.encode(wire.FrameHeader(1, body, released=[3], closed=[4]))
        plain = msgspec.msgpack.decode(encoded)
        found.append(Frame(plain))
        inline = {"name": "0", "dtype": "float32", "shape": [2, 3], "buffer": -1}
        found.append(Frame({**plain, "tensors": [inline]}, bytes(24)))
        large = {"name": "0", "dtype": "uint8", "shape": [PAGE, 60], "buffer": 9}
        opened = {"tensors": [large, {**inline, "name": "1"}], "opened": [[9, 64 * PAGE]]}
        found.append(Frame({**plain, **opened}, bytes(24), ["shared"]))
    return found


def requests() -> list[Frame]:
    """Frames as the host sends them."""
    model = spec.ModelSpec(path="/nowhere", pipeline_class="", dtype="float32", replaced=("blocks.0",))
    call = spec.DenoiserCall(
        arguments={"hidden_states": spec.TensorRef((0,)), "extra.0": 1.5, "text": None, "on": True},
        inputs={"blocks.0": spec.TensorRef((0, 0), dim=1)},
        rows=((0, 2),),
    )
    sample = spec.Sample(
        slot="a", seed=1, steps=2, guidance=3.5, width=64, height=64, batch_size=1, denoise=1.0, preview=True
    )
    bodies: list[spec.Body | None] = [
        None,
        spec.Load(slot="a", model=model, parallel=spec.ParallelSpec()),
        spec.Encode(slot="a", prompt="a red circle"),
        sample,
        spec.Decode(slot="a"),
        spec.Forward(slot="a", calls=(call,), keep=(0,), drop=(5,)),
        spec.Verify(slot="a", call=call),
        spec.Park(slot="a"),
        spec.Unload(slot="b"),
        spec.Stats(),
        spec.Ping(),
        spec.Cancel(),
    ]
    return _frames(iter(bodies))


def replies() -> list[Frame]:
    """Frames as a rank sends them."""
    bodies: list[spec.Body | None] = [
        None,
        spec.Memory(host=1 << 30),
        spec.Ready(pid=1, device="CPU", versions={"torch": "2.14"}),
        spec.SlotInfo(weight_bytes=5, seconds=0.5),
        spec.Forwarded(spans=((0, 1.0, 2.0),)),
        spec.Verified(),
        spec.Parked(in_host_memory=True),
        spec.Progress(phase="loading", done=3, total=10),
        spec.Done(),
        *(
            spec.Failure(kind=kind, message="no")
            for kind in ("failed", "refused", "memory", "empty", "cancelled")
        ),
    ]
    return _frames(iter(bodies))


# ---- damage


class Mutator:
    """An endless row of mutants of `frames`: the same row for the same seed."""

    def __init__(self, frames: list[Frame], seed: int):
        self._frames, self._random = frames, random.Random(seed)

    def __iter__(self) -> Iterator[Mutant]:
        while True:
            (kind,) = self._random.choices(list(_DAMAGE), _WEIGHTS)
            mutant = _DAMAGE[kind](self, deepcopy(self._random.choice(self._frames)))
            yield Mutant(kind, mutant.data[:FRAME_BYTES], mutant.descriptors)

    def bits(self, one: Frame) -> Mutant:
        data = bytearray(one.bytes())
        for _ in range(self._random.choice((1, 1, 2, 8))):
            data[self._random.randrange(len(data))] ^= 1 << self._random.randrange(8)
        return _whole(one, bytes(data))

    def pieces(self, one: Frame) -> Mutant:
        """Bytes put in, taken out, doubled, or those of another frame from some place on."""
        data, random_ = one.bytes(), self._random
        start = random_.randrange(len(data))
        end = min(len(data), start + random_.choice((1, 2, 4, 16, 64)))
        other = random_.choice(self._frames).bytes()
        changed = {
            "in": lambda: data[:start] + random_.randbytes(end - start) + data[start:],
            "out": lambda: data[:start] + data[end:],
            "double": lambda: data[:end] + data[start:],
            "splice": lambda: data[:start] + other[random_.randrange(len(other)) :],
        }
        return _whole(one, random_.choice(list(changed.values()))())

    def cut(self, one: Frame) -> Mutant:
        data = one.bytes()
        return _whole(one, data[: self._random.randrange(len(data))])

    def lengths(self, one: Frame) -> Mutant:
        """A prefix that promises another header or payload than follows."""
        header = msgspec.msgpack.encode(one.header)
        promised = [len(header), len(one.payload)]
        which = self._random.randrange(2)
        near = promised[which] + self._random.choice((-12, -1, 1, 12, 1000))
        wanted = self._random.choice((near, near, *NUMBERS, wire._MAX_HEADER, wire._MAX_HEADER + 1, 1 << 33))
        promised[which] = wanted % (1 << (64 if which else 32))
        return _whole(one, struct.pack("<IQ", *promised) + header + one.payload)

    def fields(self, one: Frame) -> Mutant:
        """One or a few fields of the header with other values, and the lengths right again."""
        for _ in range(self._random.choice((1, 1, 2, 5))):
            one.header = self._changed(one.header, self._random.choice(list(_paths(one.header)) or [()]))
        with contextlib.suppress(OverflowError):  # beyond what msgpack can say
            return _whole(one, one.bytes())
        return self.bits(Frame({"call": 1, "body": None}))

    def values(self, one: Frame) -> Mutant:
        """Other values of the same types, in the body above all: they decode, and whoever asked has to cope."""
        body = one.header["body"]
        for _ in range(self._random.choice((1, 2, 4))):
            paths = list(_paths(body)) or [("released",)]
            target = body if isinstance(body, dict) else one.header
            path = self._random.choice(paths)
            if path[-1] != "type":
                _set(target, path, self._similar(_get(target, path)))
        one.header["call"] = self._random.choice((1, 1, 0, 2**62))
        return _whole(one, one.bytes())

    def promises(self, one: Frame) -> Mutant:
        """Tensors that cost much to look at: of many dims, of huge or contradictory sizes, thousands of them."""
        random_ = self._random
        dtype = random_.choice((*wire._ITEM_BYTES, "float31", ""))
        shape = random_.choice(
            (
                [random_.choice(NUMBERS[:13]) for _ in range(random_.randrange(6))],
                [2**62] * random_.randrange(1, 10_000),
                [1] * random_.randrange(1, 10_000),
                [0, 2**62],
                [1 << random_.randrange(34)],
            )
        )
        tensor: dict[str, Any] = {
            "name": "0",
            "dtype": dtype,
            "shape": shape,
            "buffer": random_.choice((-1, 9, 3, 2**31)),
        }
        one.header = {"call": 1, "body": None, **(one.header if isinstance(one.header, dict) else {})}
        one.header["tensors"] = [tensor] * (random_.choice((1, 1, 2, 500)) if len(shape) < 10 else 1)
        header = msgspec.msgpack.encode(one.header)
        size = wire._ITEM_BYTES.get(dtype, 1)
        for length in shape[:64]:
            size *= abs(length)
        promised = size if tensor["buffer"] < 0 else 0
        return _whole(one, struct.pack("<IQ", len(header), promised % (1 << 64)) + header + one.payload)

    def nesting(self, one: Frame) -> Mutant:
        """A header that is nested very deep, or very long."""
        count = self._random.randrange(1, FRAME_BYTES - 100)
        inner = self._random.choice(
            (b"\x91", b"\x81\xa1x", b"\xc1", b"\x00", b"\xdd\xff\xff\xff\xff", b"\xc6\x7f")
        )
        header = (b"\x82\xa4call\x01\xa4body" + inner * count)[: FRAME_BYTES - 100]
        return Mutant("", frame(header))

    def descriptors(self, one: Frame) -> Mutant:
        """Descriptors of other kinds or another number than announced, or sizes that are not theirs."""
        kinds = [
            self._random.choice(list(DESCRIPTORS)) for _ in range(self._random.choice((0, 1, 1, 1, 2, 5)))
        ]
        sizes = (64 * PAGE, PAGE, 1, 0, -1, 65 * PAGE, 1 << 40, 2**63 - 1)
        opened = [
            [self._random.choice((9, 9, 3, -1, 2**31)), self._random.choice(sizes)]
            for _ in range(self._random.choice((len(kinds), len(kinds), 1, 0)))
        ]
        if isinstance(one.header, dict):
            one.header["opened"] = opened
        return Mutant("", one.bytes(), tuple(kinds))

    def junk(self, _one: Frame) -> Mutant:
        return Mutant("", self._random.randbytes(self._random.choice((1, 11, 12, 13, 100, 5000))))

    def _changed(self, value: Any, path: tuple[Any, ...]) -> Any:
        if not path:
            return self._another(value)
        step, *rest = path
        value[step] = self._changed(value[step], tuple(rest))
        if not rest and isinstance(value, dict) and self._random.random() < 0.15:
            del value[step]
        return value

    def _similar(self, value: Any) -> Any:
        random_ = self._random
        change = {
            bool: lambda: not value,
            int: lambda: random_.choice((value + 1, value - 1, *NUMBERS[:-1])),
            float: lambda: random_.choice((-value, 1e300, float("nan"), float("inf"))),
            str: lambda: random_.choice((value + random_.choice(WORDS), *WORDS)),
            list: lambda: value * random_.choice((0, 2, 50)),
        }.get(type(value), lambda: value)
        return change()

    def _another(self, value: Any) -> Any:
        random_ = self._random
        kinds: list[Callable[[], Any]] = [
            lambda: self._similar(value),
            lambda: random_.choice(NUMBERS),
            lambda: random_.choice(WORDS),
            lambda: random_.choice(ODD),
        ]
        return random_.choice(kinds)()


def _whole(one: Frame, data: bytes) -> Mutant:
    return Mutant("", data, tuple(one.descriptors))


_DAMAGE: dict[str, Callable[[Mutator, Frame], Mutant]] = {
    "bits": Mutator.bits,
    "pieces": Mutator.pieces,
    "cut": Mutator.cut,
    "lengths": Mutator.lengths,
    "fields": Mutator.fields,
    "values": Mutator.values,
    "promises": Mutator.promises,
    "nesting": Mutator.nesting,
    "descriptors": Mutator.descriptors,
    "junk": Mutator.junk,
}

_WEIGHTS = [2, 1, 1, 1, 2, 4, 1, 1, 1, 1]


def _get(value: Any, path: tuple[Any, ...]) -> Any:
    for step in path:
        value = value[step]
    return value


def _set(value: Any, path: tuple[Any, ...], new: Any) -> None:
    _get(value, path[:-1])[path[-1]] = new


def _paths(value: Any, here: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where something stands in a header, the header itself excepted."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield (*here, key)
        yield from _paths(inner, (*here, key))
