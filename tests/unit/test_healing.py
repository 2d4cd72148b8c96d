"""Failures in a row are counted and stopped with a diagnosis; an out-of-memory names who holds the device.

The clock is a fake, and so is NVIDIA's library; torch's own errors are real where a CPU can raise them.
"""

from __future__ import annotations

import os
import sys
import traceback

import pytest
import torch

from runtime import healing
from runtime.devices import cpu_devices
from runtime.healing import PAUSE_SECONDS, Retries, Work, innermost, out_of_memory, tried_bytes, work_of
from runtime.holders import card_memory
from runtime.spec import Decode, Encode, Failure, Memory, RankError, RankOutOfMemory, Sample
from tests.support.mocks import GIB, MockNVML, mock_cards

CARDS = mock_cards(24, 24, 24)
WORK = Work(slot="flux", doing="sampling", sizes=((1, 64, 64),))


class FakeClock:
    """A monotonic clock that stands still until it is moved."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def retries(clock: FakeClock) -> Retries:
    return Retries(clock)


def fail(retries: Retries, work: Work = WORK, kind: str = "died", rank: int = 1) -> RankError:
    """One attempt that fails; what comes out."""
    error = RankError(f"Rank {rank} {kind} while {work.doing}.\nDetails.", rank=rank, kind=kind)
    with pytest.raises(RankError) as caught, retries.attempt(work, CARDS):
        raise error
    return caught.value


def succeed(retries: Retries, work: Work = WORK) -> None:
    with retries.attempt(work, CARDS):
        pass


# ---- failures in a row


def test_the_third_failure_in_a_row_tells_what_failed_and_the_fourth_try_is_not_made(
    retries: Retries, clock: FakeClock
) -> None:
    assert "in a row" not in str(fail(retries))
    clock.now += 30
    assert "in a row" not in str(fail(retries))
    clock.now += 30
    error = fail(retries)
    assert "60 s ago" in error.detail and "30 s ago" in error.detail and "0 s ago" in error.detail
    assert "Details." in error.detail, "what stood in its place before"
    what, why, third = str(error).splitlines()
    assert what == "Rank 1 died while sampling." and "failure 3 in a row" in why
    assert "rank 1 (GPU 1 Mock) each time: devices 0,2 on the Parallel Config" in third
    assert "dmesg" in third and "Host RAM now" in third
    tried = []
    with pytest.raises(RankError, match=r"^Sampling \(1x64x64\) with flux has failed 3 times") as caught:  # noqa: SIM117
        with retries.attempt(WORK, CARDS):
            tried.append("the ranks")
    assert caught.value.kind == "given up" and len(str(caught.value).splitlines()) == 3
    assert "0 s ago: Rank 1 died while sampling." in caught.value.detail
    assert not tried


def test_being_stopped_is_no_failure_and_ends_after_a_while(retries: Retries, clock: FakeClock) -> None:
    for _ in range(3):
        fail(retries)
    for _ in range(5):
        with pytest.raises(RankError, match="failed 3 times"):
            retries.check(WORK, CARDS)
    clock.now += PAUSE_SECONDS + 1
    assert "failure 4 in a row" in str(fail(retries))
    with pytest.raises(RankError, match="failed 4 times"):
        retries.check(WORK, CARDS)
    clock.now += PAUSE_SECONDS + 1
    succeed(retries)
    assert "in a row" not in str(fail(retries))


def test_a_slot_is_doubtful_while_something_of_it_is_not_tried(retries: Retries, clock: FakeClock) -> None:
    for failures in range(3):
        assert not retries.doubts("flux"), f"after {failures}"
        fail(retries)
    assert retries.doubts("flux")
    assert not retries.doubts("another")
    clock.now += PAUSE_SECONDS + 1
    assert not retries.doubts("flux")


@pytest.mark.parametrize(
    "other",
    [
        Work(slot="flux", doing="sampling", sizes=((1, 32, 32),)),
        Work(slot="flux", doing="loading"),
        Work(slot="flux-in-another-layout", doing="sampling", sizes=WORK.sizes),
    ],
)
def test_another_size_kind_or_layout_is_tried(retries: Retries, other: Work) -> None:
    for _ in range(3):
        fail(retries)
    succeed(retries, other)


def test_another_size_begins_anew(retries: Retries) -> None:
    fail(retries)
    fail(retries)
    fail(retries, Work(slot="flux", doing="sampling", sizes=((2, 64, 64),)))
    assert "in a row" not in str(fail(retries))


def test_a_success_begins_anew(retries: Retries) -> None:
    for _ in range(4):
        fail(retries)
        fail(retries)
        succeed(retries)


def test_a_load_that_works_does_not_hide_that_sampling_fails(retries: Retries) -> None:
    """The loop that costs minutes: restart, reload, and the ranks die at the same place again."""
    for _ in range(3):
        succeed(retries, Work(slot="flux", doing="loading"))
        last = fail(retries)
    assert "failure 3 in a row" in str(last)


def step(run: int) -> Work:
    return Work(slot="flux", doing="sampling", sizes=WORK.sizes, run=f"prompt {run}")


def test_steps_before_the_one_that_fails_are_no_success(retries: Retries) -> None:
    """Each prompt makes six steps and dies at the seventh."""
    for run in range(3):
        for _ in range(6):
            succeed(retries, step(run))
        last = fail(retries, step(run))
    assert "failure 3 in a row" in str(last)


def test_a_run_that_comes_to_its_end_is_a_success(retries: Retries) -> None:
    for run in range(0, 9, 3):
        fail(retries, step(run))
        fail(retries, step(run + 1))
        for _ in range(8):
            succeed(retries, step(run + 2))
    assert "in a row" not in str(fail(retries, step(9)))


@pytest.mark.parametrize("kind", ["refused", "cancelled", "gone", "stopped"])
def test_what_is_no_failure_of_the_ranks_is_not_counted(retries: Retries, kind: str) -> None:
    for _ in range(5):
        assert "in a row" not in str(fail(retries, kind=kind))
    succeed(retries)


def test_other_errors_pass_uncounted(retries: Retries) -> None:
    for _ in range(5):
        with pytest.raises(KeyboardInterrupt), retries.attempt(WORK, CARDS):
            raise KeyboardInterrupt
    succeed(retries)


def test_who_stops_the_group_may_try_again_at_once(retries: Retries) -> None:
    for _ in range(3):
        fail(retries)
    retries.forget("another slot")
    with pytest.raises(RankError):
        retries.check(WORK, CARDS)
    retries.forget("flux")
    fail(retries)
    retries.forget()
    succeed(retries)
    assert not retries._records


def test_what_failed_once_is_not_remembered_for_ever(retries: Retries) -> None:
    for number in range(1000):
        fail(retries, Work(slot=f"slot {number}", doing="loading"))
    assert len(retries._records) == healing._RECORDS


def test_different_ranks_leave_no_card_out(retries: Retries) -> None:
    for rank in (0, 1, 2):
        last = fail(retries, rank=rank, kind="stuck")
    assert "leaves that card out" not in str(last)
    assert "Doctor (Sharded)" in str(last)


def test_the_seed_and_the_text_do_not_make_another_request() -> None:
    def sample(seed: int, width: int) -> Work:
        request = Sample(
            slot="a",
            seed=seed,
            steps=seed,
            guidance=1.0,
            width=width,
            height=32,
            batch_size=1,
            denoise=1.0,
            preview=False,
        )
        return work_of(request, {"prompt_embeds": torch.zeros(1, seed, 4)}, "a")

    assert sample(1, 64) == sample(2, 64) != sample(1, 128)
    assert work_of(Encode(slot="a", prompt="one"), None, "a") == work_of(
        Encode(slot="a", prompt="two"), {}, "a"
    )
    small, large = ({"samples": torch.zeros(1, 4, n, n)} for n in (8, 16))
    assert work_of(Decode(slot="a"), small, "a") != work_of(Decode(slot="a"), large, "a")


# ---- out of memory

CUDA = (
    "OutOfMemoryError: CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of 23.52 GiB of "
    "which 1.19 GiB is free. Process 123 has 2.00 GiB memory in use. Including non-PyTorch memory, this process has "
    "20.32 GiB memory in use. Of the allocated memory 19.75 GiB is allocated by PyTorch, and 96.50 MiB is reserved by "
    "PyTorch but unallocated."
)
UUIDS = tuple((card.uuid, card.name) for card in CARDS)
RANKS = {0: 4001, 1: 4002}


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> dict[int, int | None]:
    """A card with both ranks' memory, ComfyUI's own, and that of two strangers: bytes by pid."""
    computing: dict[int, int | None] = {4002: 20 * GIB, os.getpid(): GIB, 99: 3 * GIB}
    nvml = MockNVML(
        UUIDS,
        computing=computing,
        drawing={99: GIB, 98: 512 << 20},
        names={99: b"/usr/bin/firefox\0", 98: "Xorg"},
    )
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    return computing


def ran_out(message: str = CUDA, device: int = 1, memory: Memory | None = None) -> RankOutOfMemory:
    return out_of_memory(
        1,
        "rank 1 (GPU 1 Mock, pid 4002)",
        CARDS[device],
        "sampling",
        Failure(kind="memory", message=message),
        memory or Memory(),
        RANKS,
        "\n\nOn the rank: a traceback",
    )


def test_an_out_of_memory_names_rank_device_what_it_wanted_and_who_holds_the_card(
    driver: dict[int, int | None],
) -> None:
    error = ran_out()
    first, holders, *_ = str(error).splitlines()
    assert first == "Rank 1 (GPU 1 Mock, pid 4002) ran out of memory while sampling: it wanted 2.5 GB more."
    told = (
        "rank 1 of this group (pid 4002) 20.0 GB, firefox (pid 99) 3.0 GB, "
        f"ComfyUI itself (pid {os.getpid()}) 1.0 GB, Xorg (pid 98) 512.0 MB"
    )
    assert told in holders
    assert (error.rank, error.kind) == (1, "memory")
    assert (error.tried, error.allocated) == (int(2.5 * GIB), int(19.75 * GIB))


def test_advice_stands_in_the_third_line_and_what_was_said_before_stays(
    driver: dict[int, int | None],
) -> None:
    error = ran_out()
    holders = error.why
    error.advise("Do that.")
    error.explain("It failed again.", "Or change the size.")
    error.advise("Do this.")
    assert str(error).splitlines()[1:] == ["It failed again.", "Do this. Or change the size."]
    assert error.detail == f"{holders}\nDo that.\n\nOn the rank: a traceback"
    assert error.whole == f"{error}\n\n{error.detail}"


def test_pids_of_another_namespace_are_not_looked_up(driver: dict[int, int | None]) -> None:
    """In a container the driver counts processes as the machine outside does; pid 1 there is not pid 1 here."""
    driver.clear()
    driver.update({1: 20 * GIB, os.getppid(): GIB})
    text = str(ran_out())
    assert "another process (pid 1) 20.0 GB" in text
    assert f"another process (pid {os.getppid()})" in text


def test_a_name_that_the_driver_does_not_know_is_the_systems(driver: dict[int, int | None]) -> None:
    driver[os.getppid()] = 2 * GIB
    text = str(ran_out())
    assert f"(pid {os.getppid()}) 2.0 GB" in text
    assert f"another process (pid {os.getppid()})" not in text


def test_sizes_that_the_driver_keeps_to_itself_are_called_unknown(driver: dict[int, int | None]) -> None:
    driver[4002] = None
    assert "rank 1 of this group (pid 4002) of unknown size" in str(ran_out())


@pytest.mark.parametrize(
    "failing",
    [
        {"nvmlInit": (None,)},
        {"nvmlDeviceGetMemoryInfo": (1,)},
        {"nvmlDeviceGetComputeRunningProcesses": (1,), "nvmlDeviceGetGraphicsRunningProcesses": (1,)},
    ],
)
def test_without_the_driver_the_ranks_own_figures_are_told(
    monkeypatch: pytest.MonkeyPatch, failing: dict[str, tuple[int | None, ...]]
) -> None:
    nvml = MockNVML(UUIDS, failing=failing)
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    memory = Memory(reserved=GIB // 2, device_used=GIB, device_total=2 * GIB)
    assert "1.0 GB of 2.0 GB in use, 512.0 MB of it by others than this rank" in str(ran_out(memory=memory))
    assert nvml.open == 0


def test_without_any_figures_that_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert "the driver does not tell who holds its memory" in str(ran_out())
    assert card_memory(cpu_devices(1)[0], {}) is None


def test_the_library_is_closed_again(driver: dict[int, int | None]) -> None:
    ran_out()
    assert sys.modules["pynvml"].open == 0


def allocate() -> Exception:
    """torch's own error for more than any machine has."""
    try:
        torch.empty(1 << 50, dtype=torch.uint8)
    except RuntimeError as error:
        return error
    raise AssertionError("this machine has a PiB of memory")


def test_what_torch_wanted_on_the_cpu_is_understood_and_where() -> None:
    error = allocate()
    assert tried_bytes(f"{type(error).__name__}: {error}") == 1 << 50
    place = innermost("".join(traceback.format_exception(error)))
    assert place.startswith("`torch.empty(1 << 50, dtype=torch.uint8)` (test_healing.py, line ")
    told = out_of_memory(
        0,
        "rank 0 (CPU 0, pid 1)",
        cpu_devices(1)[0],
        "loading",
        Failure(kind="memory", message=str(error), traceback="".join(traceback.format_exception(error))),
        Memory(),
        {0: 1},
    )
    assert "wanted 1048576.0 GB more" in str(told)
    assert f"It was at {place}." in told.detail and len(str(told).splitlines()) == 2
    assert "Host RAM now" in str(told)


def test_the_place_is_the_models_own_line_not_torchs() -> None:
    try:
        torch.nn.Sequential(torch.nn.Linear(4, 3))(torch.zeros(1, 2))
    except RuntimeError as error:
        place = innermost("".join(traceback.format_exception(error)))
    assert "torch.nn.Sequential(torch.nn.Linear(4, 3))" in place
    assert innermost("") == ""


def test_a_message_without_a_size_is_told_as_it_is() -> None:
    assert tried_bytes("MemoryError: ") == 0
    assert "while sampling: MemoryError: no room for it." in str(
        ran_out("MemoryError: no room for it", device=0)
    )
