"""The wire carries every tensor as it is, never reuses a buffer that someone looks at, and trusts no peer."""

from __future__ import annotations

import gc
import os
import select
import socket
import stat
import struct
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
import torch

from runtime import spec, wire
from tests.support.processes import wait_until
from tests.support.threads import one_torch_thread
from tests.support.wires import (
    PATIENCE,
    Link,
    background,
    frame,
    header,
    mapped_buffers,
    memory_file,
    no_descriptor_left,
    open_descriptors,
    raw_peer,
    tensor_header,
)

LARGE = wire.SHARE_FROM + 12_345  # elements: in shared memory whatever the dtype
TOKEN = "5a" * 32
LINKS: dict[str, Callable[[], Link]] = {
    "shared": Link.over_a_unix_socket,
    "socket only": lambda: Link.over_a_unix_socket(shared=False),
    "tcp": Link.over_tcp,
}
DTYPES = (
    torch.bool,
    torch.uint8,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.complex64,
)


def numbered(value: int, count: int = LARGE) -> torch.Tensor:
    """A tensor that is told from any other by its value."""
    return torch.full((count,), value, dtype=torch.int64)


def mixed(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """Values of all kinds that `dtype` has, the same in every run."""
    numbers = torch.randn(shape, generator=torch.Generator().manual_seed(3)) * 50
    return torch.complex(numbers, numbers.flip(0)) if dtype.is_complex else numbers.to(dtype)


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.dtype == other.dtype and one.shape == other.shape and torch.equal(one, other)


@pytest.fixture(scope="module", autouse=True)
def polite() -> Iterator[None]:
    with one_torch_thread():
        yield


@pytest.fixture(params=LINKS)
def any_link(request: pytest.FixtureRequest) -> Iterator[Link]:
    link = LINKS[request.param]()
    yield link
    link.close()


@pytest.fixture
def link() -> Iterator[Link]:
    link = Link.over_a_unix_socket()
    yield link
    link.close()


# ---- every tensor arrives as it is


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(7, 3), (3, LARGE)], ids=["inline", "shared"])
def test_every_dtype_arrives(any_link: Link, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    sent = mixed(dtype, *shape)
    assert same(any_link.carry({"x": sent}).tensors["x"], sent)


LAYOUTS: dict[str, Callable[[], torch.Tensor]] = {
    "0-d": lambda: torch.tensor(2.5),
    "empty": lambda: torch.empty(0),
    "empty with dims": lambda: torch.empty((3, 0, 2), dtype=torch.bfloat16),
    "transposed": lambda: mixed(torch.float32, 5, 9).T,
    "transposed, large": lambda: mixed(torch.float32, 300, 400).T,
    "every third": lambda: mixed(torch.float16, 30)[::3],
    "every third, large": lambda: mixed(torch.float16, 3 * LARGE)[::3],
    "expanded": lambda: mixed(torch.float32, 1, 8).expand(6, 8),
    "expanded, large": lambda: mixed(torch.float32, 1, LARGE).expand(3, LARGE),
    "channels last": lambda: mixed(torch.float32, 2, 8, 64, 64).to(memory_format=torch.channels_last),
    "a parameter": lambda: torch.nn.Parameter(mixed(torch.float32, LARGE)),
    "conjugated": lambda: mixed(torch.complex64, 40).conj(),
    "conjugated, large": lambda: mixed(torch.complex64, LARGE).conj(),
    "negated by a bit": lambda: mixed(torch.complex64, 40).conj().imag,
    "one byte below the threshold": lambda: mixed(torch.uint8, wire.SHARE_FROM - 1),
    "at the threshold": lambda: mixed(torch.uint8, wire.SHARE_FROM),
    "one byte above the threshold": lambda: mixed(torch.uint8, wire.SHARE_FROM + 1),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_arrives(any_link: Link, layout: str) -> None:
    sent = LAYOUTS[layout]()
    assert same(any_link.carry({"x": sent}).tensors["x"], sent.detach())


def test_only_large_tensors_use_shared_memory(link: Link) -> None:
    before = mapped_buffers()
    small = link.carry({"x": mixed(torch.uint8, wire.SHARE_FROM - 1)})
    assert mapped_buffers() == before
    large = link.carry({"x": mixed(torch.uint8, wire.SHARE_FROM)})
    assert mapped_buffers() == before + 2  # one at each end
    assert small.tensors and large.tensors


def test_many_tensors_of_all_sizes_share_a_frame_in_their_order(any_link: Link) -> None:
    sent = {f"{size}": numbered(size, size) for size in (0, 1, LARGE, 5, 2 * LARGE, 300)}
    received = any_link.carry(sent).tensors
    assert list(received) == list(sent)
    assert all(same(received[name], sent[name]) for name in sent)


BODIES: list[spec.Body | None] = [
    None,
    spec.Ping(),
    spec.Encode(slot="a", prompt="Füchse 🦊"),
    spec.Load(
        slot="a",
        model=spec.ModelSpec(path="/m", pipeline_class="FluxPipeline", dtype="bfloat16"),
        parallel=spec.ParallelSpec(tensor=4),
    ),
    spec.Done(),
    spec.Memory(weights=1 << 40),
    spec.Failure(kind="memory", message="no room"),
]


@pytest.mark.parametrize("body", BODIES, ids=lambda body: type(body).__name__)
def test_every_body_arrives_with_its_call(any_link: Link, body: spec.Body | None) -> None:
    any_link.left.send(41, body)
    message = any_link.right.receive()
    assert (message.call, message.body, message.tensors) == (41, body, {})


def test_a_header_longer_than_the_sockets_buffer_arrives() -> None:
    left, right = socket.socketpair()
    left.settimeout(PATIENCE)  # with a time limit a send may take only a part
    link = Link(wire.Connection(left), wire.Connection(right))
    body = spec.Encode(slot="a", prompt="very long " * 200_000)
    sending = background(lambda: link.left.send(1, body, {"x": numbered(1)}))
    wait_until(lambda: not _writable(link.left), PATIENCE, "the socket to be full")
    message = link.right.receive()
    sending.result(PATIENCE)
    assert message.body == body
    assert same(message.tensors["x"], numbered(1))
    link.close()


# ---- a buffer is used again only when nobody looks at it any more


def test_a_buffer_is_used_again_once_its_release_came_back(link: Link) -> None:
    message = link.carry({"x": numbered(1)})
    in_use = mapped_buffers()
    del message
    link.right.flush_releases()
    link.left.receive()
    for value in range(2, 20):
        message = link.carry({"x": numbered(value)})
        assert same(message.tensors["x"], numbered(value))
        del message
        link.tell_releases()
    assert mapped_buffers() == in_use


def test_a_buffer_is_not_used_again_before_its_release_came_back(link: Link) -> None:
    link.carry({"x": numbered(1)})
    in_use = mapped_buffers()
    gc.collect()  # the view is dead, but the sender does not know
    message = link.carry({"x": numbered(2)})
    assert mapped_buffers() == in_use + 2
    assert same(message.tensors["x"], numbered(2))


KEPT: dict[str, Callable[[torch.Tensor], object]] = {
    "the tensor": lambda tensor: tensor,
    "a slice": lambda tensor: tensor[10:20],
    "one element": lambda tensor: tensor[7],
    "the bytes": lambda tensor: tensor.view(torch.uint8),
    "a reshaped slice": lambda tensor: tensor[:64].reshape(8, 8).T,
    "a detached alias": lambda tensor: tensor.detach(),
    "a numpy array": lambda tensor: tensor[3:9].numpy(),
}


@pytest.mark.parametrize("kept", KEPT)
def test_a_buffer_is_never_used_again_while_a_view_of_it_lives(link: Link, kept: str) -> None:
    message = link.carry({"x": numbered(1)})
    view = KEPT[kept](message.tensors["x"])
    expected = torch.as_tensor(view).clone()
    del message
    for value in range(2, 6):
        link.tell_releases()
        link.carry({"x": numbered(value)})
    assert torch.equal(torch.as_tensor(view), expected)


def test_a_release_counts_once(link: Link) -> None:
    first = link.carry({"x": numbered(1)})
    del first
    link.tell_releases()
    second = link.carry({"x": numbered(2)})  # the same buffer, lent anew
    link.tell_releases()
    assert link.left.pool.idle_bytes() == 0
    link.carry({"x": numbered(3)})
    assert same(second.tensors["x"], numbered(2))


def test_a_buffer_sent_twice_is_mapped_once_and_free_only_after_both_views_died(link: Link) -> None:
    before = mapped_buffers()
    with link.left.pool.stage({"x": numbered(1)}) as staged:
        link.left.send(1, None, staged)
        link.left.send(2, None, staged)
    first, second = link.right.receive(), link.right.receive()
    assert mapped_buffers() == before + 2
    del first
    link.tell_releases()
    assert link.left.pool.idle_bytes() == 0
    link.carry({"x": numbered(2)})
    assert same(second.tensors["x"], numbered(1))
    del second
    link.tell_releases()
    assert link.left.pool.idle_bytes() >= 2 * numbered(1).nbytes


def test_a_view_that_dies_in_another_thread_is_released(link: Link) -> None:
    held = [link.carry({"x": numbered(1)})]
    background(held.clear).result(PATIENCE)
    link.tell_releases()
    assert link.left.pool.idle_bytes() >= numbered(1).nbytes


def test_no_frame_is_sent_when_nothing_was_released(link: Link) -> None:
    message = link.carry({"x": numbered(1)})
    link.right.flush_releases()
    readable, _, _ = select.select([link.left], [], [], 0)
    assert not readable
    del message
    link.right.flush_releases()
    readable, _, _ = select.select([link.left], [], [], 0)
    assert readable


def test_one_staged_tensor_is_one_buffer_for_all_receivers() -> None:
    pool = wire.BufferPool(shared=True)
    pairs = [socket.socketpair() for _ in range(3)]
    senders = [wire.Connection(near, pool) for near, _ in pairs]
    receivers = [wire.Connection(far) for _, far in pairs]
    before = mapped_buffers()
    with pool.stage({"x": numbered(1)}) as staged:
        for sender in senders:
            sender.send(1, None, staged)
    messages = [receiver.receive() for receiver in receivers]
    assert mapped_buffers() == before + 1 + len(receivers)
    messages[0].tensors["x"][0] = 99  # forbidden to users; here it shows that all look at the same memory
    assert [int(message.tensors["x"][0]) for message in messages] == [99, 99, 99]

    # Free only when the last receiver has let go.
    del messages[:2]
    for sender, receiver in zip(senders, receivers, strict=True):
        receiver.send(0, None)
        sender.receive()
    assert pool.idle_bytes() == 0
    messages.clear()
    receivers[2].flush_releases()
    senders[2].receive()
    assert pool.idle_bytes() > 0
    for connection in (*senders, *receivers):
        connection.close()
        connection.pool.close()


# ---- tensors made in the pool


def test_a_tensor_made_in_the_pool_is_sent_without_a_copy(link: Link) -> None:
    before = mapped_buffers()
    made = link.left.pool.empty((LARGE,), torch.int64)
    made.copy_(numbered(1))
    message = link.carry({"x": made})
    assert mapped_buffers() == before + 2
    assert same(message.tensors["x"], numbered(1))
    made[5] = 77  # the same memory: the receiver sees what its owner writes
    assert int(message.tensors["x"][5]) == 77


MADE_VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "its bytes": lambda made: made.view(torch.uint8),
    "another shape": lambda made: made.reshape(2, -1),
    "its beginning": lambda made: made[:100],
    "nothing of it": lambda made: made[:0],
    "its end": lambda made: made[100:],
    "every second": lambda made: made[::2],
    "transposed": lambda made: made.reshape(2, -1).T,
    "conjugated": lambda made: made.view(torch.complex64).conj(),
}


@pytest.mark.parametrize("view", MADE_VIEWS)
def test_a_view_of_a_tensor_made_in_the_pool_arrives_as_it_is(link: Link, view: str) -> None:
    made = link.left.pool.empty((2 * LARGE,), torch.float32)
    made.copy_(mixed(torch.float32, 2 * LARGE))
    sent = MADE_VIEWS[view](made)
    assert same(link.carry({"x": sent, "again": sent}).tensors["again"], sent.clone())


def test_memory_of_a_made_tensor_returns_when_its_last_view_dies() -> None:
    pool = wire.BufferPool(shared=True)
    made = pool.empty((LARGE,), torch.float32)
    part = made[10:12]
    del made
    assert pool.idle_bytes() == 0
    del part
    assert pool.idle_bytes() >= 4 * LARGE
    pool.close()


def test_memory_of_a_made_tensor_is_not_given_away_while_the_receiver_looks(link: Link) -> None:
    made = link.left.pool.empty((LARGE,), torch.int64)
    made.copy_(numbered(1))
    message = link.carry({"x": made})
    del made
    assert link.left.pool.idle_bytes() == 0
    other = link.left.pool.empty((LARGE,), torch.int64)
    other.fill_(2)
    assert same(message.tensors["x"], numbered(1))


def test_a_small_tensor_made_in_the_pool_is_an_ordinary_one(link: Link) -> None:
    before = mapped_buffers()
    assert link.left.pool.empty((3, 4), torch.float16).shape == (3, 4)
    assert mapped_buffers() == before


# ---- buffers are given back to the system


def test_trimming_tells_every_peer_to_unmap() -> None:
    pool = wire.BufferPool(shared=True)
    pairs = [socket.socketpair() for _ in range(2)]
    senders = [wire.Connection(near, pool) for near, _ in pairs]
    receivers = [wire.Connection(far) for _, far in pairs]
    before, descriptors = mapped_buffers(), open_descriptors()
    with pool.stage({"x": numbered(1)}) as staged:
        for sender, receiver in zip(senders, receivers, strict=True):
            sender.send(1, None, staged)
            receiver.receive()
            receiver.flush_releases()
            sender.receive()
    assert mapped_buffers() == before + 3
    pool.trim(keep=0)
    assert pool.idle_bytes() == 0
    for sender, receiver in zip(senders, receivers, strict=True):
        sender.send(2, None)
        receiver.receive()
    assert mapped_buffers() == before
    assert open_descriptors() == descriptors
    for connection in (*senders, *receivers):
        connection.close()
        connection.pool.close()


def test_trimming_keeps_as_much_as_asked_and_drops_the_largest_first() -> None:
    pool = wire.BufferPool(shared=True)
    made = [pool.empty((megabytes << 20,), torch.uint8) for megabytes in (1, 4, 2)]
    pool.trim(keep=0)  # all are in use
    assert [tensor.fill_(7)[-1].item() for tensor in made] == [7, 7, 7]
    made.clear()
    pool.trim(keep=3 << 20)
    assert pool.idle_bytes() == 3 << 20
    pool.close()


def test_a_new_buffer_after_a_trim_is_not_mistaken_for_the_old(link: Link) -> None:
    for value in range(5):
        message = link.carry({"x": numbered(value)})
        assert same(message.tensors["x"], numbered(value))
        del message
        link.tell_releases()
        link.left.pool.trim(keep=0)


def test_closing_a_connection_returns_what_the_peer_held(link: Link) -> None:
    message = link.carry({"x": numbered(1), "y": numbered(2, 2 * LARGE)})
    assert link.left.pool.idle_bytes() == 0
    link.left.close()
    assert link.left.pool.idle_bytes() >= 3 * numbered(1).nbytes
    assert message.tensors


def test_views_outlive_connections_and_pools() -> None:
    link = Link.over_a_unix_socket()
    made = link.left.pool.empty((LARGE,), torch.int64)
    made.copy_(numbered(1))
    received = link.carry({"x": made, "y": numbered(2)}).tensors
    link.close()
    del link
    gc.collect()
    assert same(made, numbered(1))
    assert same(received["x"], numbered(1))
    assert same(received["y"], numbered(2))


def test_descriptors_do_not_leak() -> None:
    with no_descriptor_left():
        link = Link.over_a_unix_socket()
        link.carry({"x": numbered(0)})
        link.tell_releases()
        after_the_first = open_descriptors()
        for number in range(100):
            link.carry({"x": numbered(number)})
            link.tell_releases()
        assert open_descriptors() == after_the_first
        for number in range(30):
            link.carry({"x": numbered(number, LARGE * (1 + number % 5))})
        link.close()
        del link


# ---- without shared memory


def test_without_shared_memory_no_buffer_is_made() -> None:
    link = Link.over_a_unix_socket(shared=False)
    before = mapped_buffers()
    message = link.carry({"x": link.left.pool.empty((LARGE,), torch.int64).fill_(3), "y": numbered(4)})
    assert same(message.tensors["x"], numbered(3))
    assert mapped_buffers() == before
    link.close()


def test_only_the_sender_may_lack_shared_memory() -> None:
    left, right = socket.socketpair()
    link = Link(wire.Connection(left, wire.BufferPool(shared=False)), wire.Connection(right))
    assert same(link.carry({"x": numbered(4)}).tensors["x"], numbered(4))
    link.close()


@pytest.mark.parametrize("call", ["memfd_create", "ftruncate"])
def test_when_the_system_has_no_more_shared_memory_the_socket_carries_all(
    link: Link, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    def mock_that_fails(*_arguments: object) -> int:
        raise OSError(24, "Too many open files")

    before = open_descriptors()
    monkeypatch.setattr(os, call, mock_that_fails)
    received = link.carry(
        {"x": numbered(1), "y": link.left.pool.empty((LARGE,), torch.int64).fill_(2)}
    ).tensors
    assert same(received["x"], numbered(1))
    assert same(received["y"], numbered(2))
    assert open_descriptors() == before
    monkeypatch.undo()
    assert same(link.carry({"x": numbered(3)}).tensors["x"], numbered(3))
    assert open_descriptors() > before  # shared again


# ---- a send that fails leaves nothing behind


def test_more_large_tensors_than_one_frame_takes_are_announced_before_it(link: Link) -> None:
    count = 2 * wire._MAX_DESCRIPTORS + 1
    sent = {str(n): numbered(n, wire.SHARE_FROM // 8) for n in range(count)}
    sending = background(lambda: link.left.send(1, spec.Ping(), sent))
    frames = [link.right.receive() for _ in range(3)]
    sending.result(PATIENCE)
    assert [frame.body for frame in frames] == [None, None, spec.Ping()]
    assert all(same(frames[2].tensors[name], sent[name]) for name in sent)


def test_a_tensor_that_cannot_be_sent_costs_no_buffer(link: Link) -> None:
    sparse = torch.eye(3).to_sparse()
    with pytest.raises(Exception):  # noqa: B017 - torch's own, whatever it is
        link.left.send(1, None, {"good": numbered(1), "bad": sparse})
    assert link.left.pool.idle_bytes() >= numbered(1).nbytes
    assert same(link.carry({"x": numbered(2)}).tensors["x"], numbered(2))


# ---- peers that come and go


def test_a_closed_peer_is_heard_at_once_by_reader_and_sender(link: Link) -> None:
    reading = background(link.left.receive)
    link.right.close()
    with pytest.raises(wire.ConnectionLost):
        reading.result(PATIENCE)
    with pytest.raises(wire.ConnectionLost):
        link.left.send(1, spec.Ping(), {"x": numbered(1)})


def test_closing_ends_ones_own_reader_and_sender(link: Link) -> None:
    many = {str(n): torch.zeros(wire.SHARE_FROM - 1, dtype=torch.uint8) for n in range(32)}
    reading = background(link.left.receive)
    sending = background(lambda: link.left.send(1, None, many))
    wait_until(lambda: not _writable(link.left), PATIENCE, "the socket to be full")
    link.left.close()
    for thread in (reading, sending):
        with pytest.raises(wire.ConnectionLost):
            thread.result(PATIENCE)


def test_closing_twice_is_harmless(link: Link) -> None:
    link.carry({"x": numbered(1)})
    for _ in range(2):
        link.left.close()
        link.left.pool.close()


def _writable(connection: wire.Connection) -> bool:
    return bool(select.select([], [connection], [], 0)[1])


# ---- many threads


def test_frames_of_many_senders_do_not_interleave(any_link: Link) -> None:
    threads, frames = 6, 8

    def send_all(thread: int) -> None:
        for number in range(frames):
            call = thread * 100 + number
            tensors = {"small": numbered(call, 7000), "large": numbered(call), "tiny": numbered(call, 1)}
            any_link.left.send(call, spec.Progress(phase="sampling", done=number, total=frames), tensors)

    senders = [background(lambda thread=thread: send_all(thread)) for thread in range(threads)]
    calls = []
    for _ in range(threads * frames):
        message = any_link.right.receive()
        calls.append(message.call)
        assert isinstance(message.body, spec.Progress)
        assert message.body.done == message.call % 100
        assert all(bool((tensor == message.call).all()) for tensor in message.tensors.values())
    for sender in senders:
        sender.result(PATIENCE)
    assert sorted(calls) == sorted(thread * 100 + n for thread in range(threads) for n in range(frames))
    # Frames of one thread come in its order.
    for thread in range(threads):
        own = [call for call in calls if call // 100 == thread]
        assert own == sorted(own)


def test_peers_that_release_and_send_much_at_once_do_not_wait_for_each_other(link: Link) -> None:
    """Each reader hears a release while its own sender waits for the other reader to read on."""
    many = {str(n): torch.zeros(wire.SHARE_FROM - 1, dtype=torch.uint8) for n in range(32)}
    link.left.send(1, None, {"x": numbered(1)})
    link.right.send(1, None, {"x": numbered(1)})
    link.left.receive()  # the views die at once
    link.right.receive()
    link.left.send(2, None)  # carries the release
    link.right.send(2, None)
    senders = [background(lambda end=end: end.send(3, None, many)) for end in (link.left, link.right)]
    for end in (link.left, link.right):
        wait_until(lambda end=end: not _writable(end), PATIENCE, "the socket to be full")
    readers = [
        background(lambda end=end: [end.receive().call, end.receive().call])
        for end in (link.left, link.right)
    ]
    for reader in readers:
        assert reader.result(5.0) == [2, 3]
    for sender in senders:
        sender.result(PATIENCE)


# ---- frames in pieces, and frames that are none


def _bytes_of_a_frame(tensors: dict[str, torch.Tensor]) -> bytes:
    left, right = socket.socketpair()
    connection = wire.Connection(left, wire.BufferPool(shared=False))
    connection.send(7, spec.Encode(slot="a", prompt="in pieces"), tensors)
    connection.close()
    with right, right.makefile("rb") as file:
        return file.read()


def test_a_frame_that_comes_byte_by_byte_is_read() -> None:
    sent = {"x": mixed(torch.float32, 11, 5), "none": torch.empty(0)}
    written = _bytes_of_a_frame(sent)

    def drip(bare: socket.socket) -> None:
        for index in range(2 * len(written)):
            bare.send(written[index % len(written)].to_bytes(1, "little"))

    with raw_peer() as (bare, connection):
        dripping = background(lambda: drip(bare))
        for _ in range(2):
            message = connection.receive()
            assert message.body == spec.Encode(slot="a", prompt="in pieces")
            assert all(same(message.tensors[name], sent[name]) for name in sent)
        dripping.result(PATIENCE)


def test_a_descriptor_that_comes_with_the_first_byte_is_kept() -> None:
    content = bytes(range(200)) * 400
    written = frame(
        header(
            tensor_header(shape=(len(content),), buffer=3), opened=[(3, len(content))], closed=[], released=[]
        )
    )
    with raw_peer() as (bare, connection), memory_file(content) as descriptor:
        socket.send_fds(bare, [written[:1]], [descriptor])
        for byte in written[1:]:
            bare.send(byte.to_bytes(1, "little"))
        assert bytes(connection.receive().tensors["x"].numpy()) == content


_HUGE = header(tensor_header(shape=(2**62,)))
GARBAGE: dict[str, bytes] = {
    "bytes that are no msgpack": frame(b"\xc1\xff\x00 no header"),
    "an empty header": frame(b""),
    "a header cut short": frame(msgspec.msgpack.encode(header())[:-3]),
    "bytes after the header": frame(msgspec.msgpack.encode(header()) + b"\x00"),
    "a header longer than allowed": frame(b"", lengths=(wire._MAX_HEADER + 1, 0)),
    "the longest header": frame(b"", lengths=(2**32 - 1, 0)),
    "the longest payload": frame(header(), lengths=(len(msgspec.msgpack.encode(header())), 2**64 - 1)),
    "a list for a header": frame(msgspec.msgpack.encode([1, 2])),
    "a header without a call": frame({"body": None}),
    "a call that is text": frame({"call": "1", "body": None}),
    "a body of an unknown kind": frame(header(body={"type": "Execute", "code": "1"})),
    "a body without a kind": frame(header(body={"slot": "a"})),
    "a body that lacks a field": frame(header(body={"type": "Decode"})),
    "a body with a field of another kind": frame(header(body={"type": "Decode", "slot": 3})),
    "nested without end": frame(b"\x81\xa1x" + b"\x91" * 100_000 + b"\xc0"),
    "a tensor of an unknown dtype": frame(header(tensor_header("float31")), b"1234"),
    "a tensor whose dtype is a function": frame(header(tensor_header("load")), b"1234"),
    "a tensor whose dtype is a module": frame(header(tensor_header("nn")), b"1234"),
    "a negative shape": frame(header(tensor_header(shape=(-4,))), b"1234"),
    "two negative dims": frame(header(tensor_header(shape=(-2, -2))), b"1234"),
    "more bytes than there are": frame(header(tensor_header(shape=(2**62,))), b"1234"),
    "more bytes than can be counted": frame(header(tensor_header(shape=(2**62, 2**62))), b"1234"),
    "more bytes than there is memory": frame(
        msgspec.msgpack.encode(_HUGE), lengths=(len(msgspec.msgpack.encode(_HUGE)), 2**62)
    ),
    "a tensor longer than the payload": frame(header(tensor_header(shape=(5,))), b"1234"),
    "a payload longer than its tensors": frame(header(tensor_header(shape=(3,))), b"1234"),
    "a buffer that was never opened": frame(header(tensor_header(buffer=5))),
    "a buffer without its descriptor": frame(header(opened=[(1, 4096)])),
    "a prefix cut short": frame(header())[:7],
    "a frame cut short": frame(header(tensor_header()), b"1234")[:-2],
    "nothing at all": b"",
}


@pytest.mark.parametrize("garbage", GARBAGE)
def test_a_frame_that_is_none_ends_the_connection_and_nothing_else(garbage: str) -> None:
    with no_descriptor_left(), raw_peer() as (bare, connection):
        bare.sendall(GARBAGE[garbage])
        bare.shutdown(socket.SHUT_WR)
        with pytest.raises(wire.ConnectionLost):
            connection.receive()


OPENED: dict[str, tuple[list[tuple[int, int]], int]] = {
    "a descriptor nobody announced": ([], 1),
    "one descriptor too many": ([(1, 4096)], 2),
    "one descriptor too few": ([(1, 4096), (2, 4096)], 1),
    "a size beyond the file": ([(1, 1 << 40)], 1),
    "a negative size": ([(1, -4096)], 1),
    "a size beyond all numbers": ([(1, 2**63 - 1)], 1),
    "the same buffer twice": ([(1, 4096), (1, 4096)], 2),
}


@pytest.mark.parametrize("opened", OPENED)
def test_descriptors_that_do_not_fit_their_frame_end_the_connection(opened: str) -> None:
    pairs, count = OPENED[opened]
    with no_descriptor_left(), raw_peer() as (bare, connection), memory_file(b"x" * 4096) as descriptor:
        # Every case names a buffer too small for its tensor at the end, so that none can pass.
        written = frame(header(tensor_header(shape=(4097,), buffer=1), opened=pairs))
        socket.send_fds(bare, [written], [descriptor] * count)
        bare.shutdown(socket.SHUT_WR)
        with pytest.raises(wire.ConnectionLost):
            connection.receive()


def test_a_descriptor_that_is_no_memory_ends_the_connection() -> None:
    with no_descriptor_left(), raw_peer() as (bare, connection):
        socket.send_fds(bare, [frame(header(opened=[(1, 4096)]))], [bare.fileno()])
        with pytest.raises(wire.ConnectionLost):
            connection.receive()


def test_a_peer_that_dies_inside_a_prefix_leaves_no_descriptor() -> None:
    with no_descriptor_left(), raw_peer() as (bare, connection), memory_file(b"x" * 4096) as descriptor:
        socket.send_fds(bare, [frame(header())[:5]], [descriptor])
        bare.shutdown(socket.SHUT_WR)
        with pytest.raises(wire.ConnectionLost):
            connection.receive()


def test_a_release_of_what_is_not_lent_is_ignored() -> None:
    every_number = frame(header(released=[*range(-3, 10), 10**9], closed=[4]))
    with raw_peer() as (bare, connection):
        pool = connection.pool
        bare.sendall(every_number)
        connection.receive()
        connection.send(1, None, {"x": numbered(1)})
        assert pool.idle_bytes() == 0
        bare.sendall(every_number)
        connection.receive()
        assert pool.idle_bytes() > 0  # this one was due
        made = pool.empty((LARGE,), torch.int64)
        bare.sendall(every_number)
        connection.receive()
        assert pool.idle_bytes() == 0
        assert len(made) == LARGE


# ---- meeting: a private socket, a token


@pytest.fixture
def meeting(tmp_path: Path) -> Iterator[tuple[socket.socket, str]]:
    listener, address = wire.listen(tmp_path)
    with listener:
        yield listener, address


def _hello(magic: bytes = b"SHARDED1", token: str = TOKEN, rank: int = 0) -> bytes:
    return struct.pack("<8s32sI", magic, bytes.fromhex(token), rank)


def test_only_the_user_can_reach_the_socket(meeting: tuple[socket.socket, str]) -> None:
    kind, _, place = meeting[1].partition(":")
    assert kind == "unix"
    assert stat.S_IMODE(os.stat(place).st_mode) == 0o600


def test_a_rank_that_knows_the_token_is_admitted_and_both_talk(meeting: tuple[socket.socket, str]) -> None:
    listener, address = meeting
    rank = wire.dial(address, TOKEN, 3)
    rank.send(
        1, spec.Ping(), {"x": numbered(1)}
    )  # before it is admitted: nothing beyond the hello may be read
    newcomer, _ = listener.accept()
    assert wire.admit(newcomer, TOKEN) == 3
    link = Link(rank, wire.Connection(newcomer))
    assert same(link.right.receive().tensors["x"], numbered(1))
    link.right.send(2, None, {"y": numbered(2)})
    assert same(link.left.receive().tensors["y"], numbered(2))
    assert newcomer.gettimeout() is None
    link.close()


def test_without_unix_sockets_both_meet_on_loopback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A mock of such a system: no AF_UNIX, no descriptors to pass."""
    monkeypatch.delattr(socket, "AF_UNIX")
    monkeypatch.setattr(wire, "shared_memory_available", lambda: False)
    listener, address = wire.listen(tmp_path)
    assert address.startswith("tcp:")
    assert listener.getsockname()[0] == "127.0.0.1"
    with listener:
        rank = wire.dial(address, TOKEN, 1)
        newcomer, _ = listener.accept()
    assert wire.admit(newcomer, TOKEN) == 1
    link = Link(rank, wire.Connection(newcomer))
    assert same(link.carry({"x": numbered(1)}).tensors["x"], numbered(1))
    link.close()


STRANGERS: dict[str, bytes] = {
    "another token": _hello(token="5b" * 32),
    "a token that differs in the last bit": _hello(token="5a" * 31 + "5b"),
    "no token": _hello(token="00" * 32),
    "another magic": _hello(magic=b"SHARDED2"),
    "a web browser": b"GET / HTTP/1.1\r\nHost: localhost\r\nAccept: */*\r\n\r\n",
    "a hello cut short": _hello()[:-1],
    "nothing": b"",
}


@pytest.mark.parametrize("stranger", STRANGERS)
def test_a_stranger_is_not_admitted(stranger: str) -> None:
    client, host = socket.socketpair()
    with client, host:
        client.sendall(STRANGERS[stranger])
        client.shutdown(socket.SHUT_WR)
        assert wire.admit(host, TOKEN) is None


@pytest.mark.parametrize("said", [b"", _hello()[:20]], ids=["silent", "falls silent"])
def test_a_client_that_says_no_more_is_dropped_in_time(said: bytes) -> None:
    client, host = socket.socketpair()
    with client, host:
        client.sendall(said)
        start = time.monotonic()
        assert wire.admit(host, TOKEN, timeout=0.1) is None
        assert time.monotonic() - start < 2.0


def test_a_client_that_drips_its_hello_is_dropped_in_time() -> None:
    client, host = socket.socketpair()
    enough = threading.Event()

    def drip() -> None:
        for byte in _hello():
            if enough.wait(0.05):
                return
            client.send(byte.to_bytes(1, "little"))

    with client, host:
        dripping = background(drip)
        start = time.monotonic()
        admitted = wire.admit(host, TOKEN, timeout=0.3)
        took = time.monotonic() - start
        enough.set()
        dripping.result(PATIENCE)
    assert admitted is None
    assert took < 1.5


def test_dialling_a_host_that_is_gone_fails_at_once(tmp_path: Path) -> None:
    listener, address = wire.listen(tmp_path)
    listener.close()
    with no_descriptor_left(), pytest.raises(OSError):
        wire.dial(address, TOKEN, 0)
