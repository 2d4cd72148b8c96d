"""The self-test of the collectives, on one rank of two whose messages are made up: what it notices and what it says."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch

from runtime.engine import selftest
from runtime.engine.selftest import BrokenCollectives, check
from runtime.spec import EXCHANGES


class MockBackend:
    """Rank 0 of two on the CPU. `other_failed` is what the second rank says when all are asked."""

    rank, world_size, device = 0, 2, torch.device("cpu")

    def __init__(self, other_failed: bool = False):
        self.other_failed = other_failed

    def wait(self, tensor: torch.Tensor) -> None:
        pass

    def any_rank(self, flag: bool) -> bool:
        return flag or self.other_failed


Exchange = Callable[[torch.Tensor], object]


def exchanges(monkeypatch: pytest.MonkeyPatch, exchange: Exchange) -> list[tuple[str, int]]:
    """Let every kind of collective do `exchange` with the tensor it receives into; the calls, by kind and bytes."""
    calls: list[tuple[str, int]] = []

    def prepared(kind: str) -> Callable:
        def one(rank: int, ranks: int, pattern: torch.Tensor) -> tuple:
            received = pattern.clone()

            def call() -> None:
                calls.append((kind, pattern.nbytes))
                exchange(received)

            return received, call, pattern

        return one

    monkeypatch.setattr(selftest, "PREPARED", {kind: prepared(kind) for kind in EXCHANGES})
    return calls


def never(what: str) -> None:
    raise AssertionError(f"called late with {what}")


def test_every_kind_is_tried_small_and_large(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = exchanges(monkeypatch, lambda received: None)
    check(MockBackend(), never)
    assert calls == [(kind, nbytes) for kind in EXCHANGES for nbytes in selftest.SIZES]
    assert min(selftest.SIZES) < 8192 and max(selftest.SIZES) == 1 << 20


def test_a_rank_alone_has_nobody_to_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = exchanges(monkeypatch, lambda received: None)
    monkeypatch.setattr(MockBackend, "world_size", 1)
    check(MockBackend(), never)
    assert not calls


def test_one_wrong_number_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    exchanges(monkeypatch, lambda received: received[-1].add_(1) if received.nbytes >= 1 << 20 else None)
    with pytest.raises(BrokenCollectives, match="all_reduce of 1048576 bytes brought wrong numbers"):
        check(MockBackend(), never)


def test_a_rank_to_which_all_came_right_stops_with_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    exchanges(monkeypatch, lambda received: None)
    with pytest.raises(BrokenCollectives, match="all_reduce of 4096 bytes"):
        check(MockBackend(other_failed=True), never)


def test_an_error_of_the_library_is_a_broken_link(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(received: torch.Tensor) -> None:
        raise RuntimeError("NCCL error: unhandled cuda error")

    exchanges(monkeypatch, fail)
    with pytest.raises(BrokenCollectives, match="all_reduce of 4096 bytes failed: RuntimeError: NCCL error"):
        check(MockBackend(), never)


def test_too_little_memory_is_no_broken_link(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another setting would not mend it, and must not be remembered because of it."""

    def fail(received: torch.Tensor) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB")

    exchanges(monkeypatch, fail)
    with pytest.raises(torch.OutOfMemoryError):
        check(MockBackend(), never)


def test_a_collective_that_does_not_end_is_told_from_another_thread(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    told: list[str] = []
    late = threading.Event()

    def on_late(what: str) -> None:
        told.append(what)
        late.set()

    monkeypatch.setattr(selftest, "LIMIT_SECONDS", 0.1)
    monkeypatch.setattr(selftest.sys, "stderr", selftest.sys.__stderr__)
    exchanges(monkeypatch, lambda received: late.wait(10))
    check(MockBackend(), on_late)
    assert told == ["all_reduce of 4096 bytes did not end within 0 s"]
    assert "test_selftest.py" in capfd.readouterr().err, "the stacks are missing"
