"""The life of a group: start, cancel, death of ranks and hosts, strangers on the socket, and what listens."""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
import torch

from runtime import launch, supervision
from runtime.devices import cpu_devices
from runtime.group import GROUPS, Slot, WorkerGroup
from runtime.spec import Cancelled, Decode, Device, Progress, RankError, Sample, Unload
from runtime.state import GroupState
from tests.support.groups import layout_of, make_slot, sample, sampling
from tests.support.looping_rank import LOOP
from tests.support.models import make_flux
from tests.support.processes import listening, wait_until
from tests.support.reference import Run

ROOT = Path(__file__).resolve().parents[2]
RUN = Run(width=64, height=64, steps=4)
LONG = Run(width=64, height=64, steps=2000, seed=1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_flux(tmp_path_factory.mktemp("life") / "flux", seed=31)


@pytest.fixture(scope="module")
def slot(folder: Path) -> Iterator[Slot]:
    slot = make_slot(folder, layout_of(tensor=2))
    slot.ensure()
    yield slot
    GROUPS.close_all()


def pids() -> list[int]:
    return [rank["pid"] for rank in GROUPS.snapshot()[0]["ranks"]]


def agent() -> int:
    return GROUPS.snapshot()[0]["agent_pid"]


def directory() -> Path:
    session = GROUPS.groups()[0]._session
    assert session is not None
    return session.directory


# ---- start


def test_a_group_that_cannot_start_says_why_in_the_ranks_own_words() -> None:
    """A card that does not exist: CUDA refuses it on the rank, and the host shows that traceback, not a timeout."""
    group = WorkerGroup((Device(kind="cuda", index=0, uuid="GPU-00000000-0000-0000-0000-000000000000"),))
    start = time.monotonic()
    with pytest.raises(RankError) as caught:
        group.start()
    assert time.monotonic() - start < 60
    assert caught.value.kind == "start"
    assert "set_device" in caught.value.detail
    assert "Traceback" in caught.value.detail
    assert group.snapshot()["phase"] == "stopped"


def test_starting_can_be_cancelled_and_leaves_nothing() -> None:
    group = WorkerGroup(cpu_devices(2))
    asked: list[float] = []

    def cancelled() -> bool:
        asked.append(time.monotonic())
        return asked[-1] - asked[0] > 0.5

    before = {p.pid for p in psutil.process_iter()}
    start = time.monotonic()
    with pytest.raises(Cancelled):
        group.start(cancelled=cancelled)
    assert time.monotonic() - start < 5
    wait_until(lambda: not _workers(before), 5, "the ranks to end")


def _workers(before: set[int]) -> list[psutil.Process]:
    """New processes that belong to a group."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        command = process.info["cmdline"] or []
        if (
            process.pid not in before
            and "runtime.worker" in command
            and process.status() != psutil.STATUS_ZOMBIE
        ):
            found.append(process)
    return found


def test_the_folder_of_the_pack_may_have_any_name(folder: Path, tmp_path: Path) -> None:
    home = tmp_path / "Some Pack-main@1.0"
    shutil.copytree(ROOT / "runtime", home / "runtime", ignore=shutil.ignore_patterns("__pycache__"))
    code = (
        "from runtime.group import WorkerGroup; from runtime.devices import cpu_devices; import torch\n"
        "group = WorkerGroup(cpu_devices(1)); group.start()\n"
        "print(group.ping({'x': torch.arange(3, dtype=torch.uint8)})['x'].tolist()); group.close()"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=home, capture_output=True, text=True, timeout=90)
    assert done.stdout.strip() == "[255, 254, 253]", done.stderr


def test_the_private_directory_is_for_this_user_only(slot: Slot) -> None:
    slot.ensure()
    assert stat.S_IMODE(directory().stat().st_mode) == 0o700
    for name in (launch.GROUP_FILE, "host", "rank-0.log", "rank-1.log"):
        assert stat.S_IMODE((directory() / name).stat().st_mode) & 0o077 == 0, name


# ---- what listens


def test_nothing_listens_beyond_loopback(slot: Slot) -> None:
    """Host, torchrun and ranks, while they are idle and after a collective has run."""
    sample(slot, RUN)
    found = listening([os.getpid(), agent(), *pids()])
    print("listening:", found)
    outside = [one for one in found if " 127." not in one and " ::1:" not in one]
    assert not outside


def test_strangers_on_the_socket_are_dropped_and_the_group_is_unharmed(
    slot: Slot, caplog: pytest.LogCaptureFixture
) -> None:
    expected = sample(slot, RUN)
    before = pids()
    address = str(directory() / "host")
    silent = socket.socket(socket.AF_UNIX)
    silent.connect(address)  # says nothing, and must hold up nobody
    for hello in (
        b"GET / HTTP/1.1\r\n\r\n" + bytes(64),
        b"SHARDED1" + os.urandom(36),
        b"SHARDED1" + bytes(36),
    ):
        with socket.socket(socket.AF_UNIX) as stranger:
            stranger.connect(address)
            stranger.sendall(hello)
            stranger.settimeout(5)
            with contextlib.suppress(ConnectionResetError):  # closed with our bytes unread
                assert stranger.recv(1) == b""
    assert torch.equal(sample(slot, RUN), expected)
    silent.close()
    assert pids() == before
    assert "Dropped a client" in caplog.text


# ---- cancel


def test_cancel_stops_all_ranks_at_a_step_and_keeps_them_warm(slot: Slot) -> None:
    """Ten times at a random moment; afterwards the same pids make the same picture, bit for bit."""
    expected = sample(slot, RUN)
    before = pids()
    random_moment = random.Random(1)
    request, tensors = sampling(slot, LONG)
    for _ in range(10):
        until = time.monotonic() + random_moment.uniform(0.0, 0.4)
        with pytest.raises(Cancelled):
            slot.call(request, tensors, cancelled=lambda until=until: time.monotonic() > until)
        assert time.monotonic() - until < 3
    assert pids() == before
    assert torch.equal(sample(slot, RUN), expected)


def test_what_a_progress_callback_raises_comes_out_and_the_ranks_stay_in_step(slot: Slot) -> None:
    class Interrupt(BaseException):
        pass

    def report(*_: object) -> None:
        raise Interrupt

    before = pids()
    request, tensors = sampling(slot, LONG)
    with pytest.raises(Interrupt):
        slot.call(request, tensors, report=report)
    sample(slot, RUN)
    assert pids() == before


def test_decoding_stops_inside_a_picture_and_the_group_stays_warm(slot: Slot) -> None:
    """Rank 0 decodes alone; one large picture takes some seconds on one thread."""
    slot.ensure()
    before = pids()
    latent = torch.zeros(1, 4, 256, 256)
    start = time.monotonic()
    with pytest.raises(Cancelled):
        slot.call(
            Decode(slot=slot.name), {"samples": latent}, cancelled=lambda: time.monotonic() - start > 0.3
        )
    assert time.monotonic() - start < 1.3
    sample(slot, RUN)
    assert pids() == before


def test_loading_can_be_cancelled_and_tried_again(slot: Slot, tmp_path: Path) -> None:
    other = make_slot(make_flux(tmp_path / "big", seed=8), layout_of(tensor=2))
    before = pids()
    with pytest.raises(Cancelled):
        other.ensure(cancelled=lambda: True)
    assert not other.loaded
    other.ensure()
    assert other.loaded
    assert pids() == before


# ---- failures


def test_an_error_on_the_ranks_is_told_and_the_group_goes_on(slot: Slot) -> None:
    before = pids()
    request, tensors = sampling(slot, LONG)
    group = GROUPS.groups()[0]
    with pytest.raises(RankError, match="Rank 0 .*failed while sampling.*slot 'nothing' is empty"):
        group.call(Sample(**{**_fields(request), "slot": "nothing"}), tensors)
    sample(slot, RUN)
    assert pids() == before


@pytest.mark.slow
def test_an_error_on_one_rank_alone_ends_the_call_and_heals(slot: Slot) -> None:
    """Rank 1 has lost the slot, so rank 0 would wait in a collective for ever."""
    slot.ensure()
    group = GROUPS.groups()[0]
    session = group._session
    assert session is not None
    before = pids()
    request, tensors = sampling(slot, LONG)
    session.connections[1].send(0, Unload(slot=slot.name))
    start = time.monotonic()
    with pytest.raises(RankError, match="Rank 1"):
        slot.call(request, tensors)
    assert time.monotonic() - start < 10
    sample(slot, RUN)
    assert pids() != before


def _fields(request: Sample) -> dict[str, object]:
    return {name: getattr(request, name) for name in request.__struct_fields__}


@pytest.mark.slow
def test_a_killed_rank_is_named_within_seconds_and_the_next_call_works(slot: Slot) -> None:
    expected = sample(slot, RUN)
    request, tensors = sampling(slot, LONG)
    killed: list[float] = []

    def kill_rank_one() -> None:
        time.sleep(0.5)
        os.kill(pids()[1], signal.SIGKILL)
        killed.append(time.monotonic())

    threading.Thread(target=kill_rank_one).start()
    with pytest.raises(RankError, match=r"Rank 1 \(CPU 1, pid \d+\) died while sampling") as caught:
        slot.call(request, tensors)
    print(f"noticed after {time.monotonic() - killed[0]:.2f} s")
    assert time.monotonic() - killed[0] < 3
    assert caught.value.rank == 1
    assert torch.equal(sample(slot, RUN), expected)


def test_a_rank_killed_while_idle_is_seen_and_does_not_fail_the_next_call(slot: Slot) -> None:
    expected = sample(slot, RUN)
    group = GROUPS.groups()[0]
    heard: list[GroupState] = []
    group.state.listen(heard.append)
    before, place = pids(), directory()
    os.kill(before[0], signal.SIGKILL)
    start = time.monotonic()
    wait_until(lambda: bool(heard), 2, "the death to be seen")
    assert time.monotonic() - start < 1
    assert heard[0].phase == "broken"
    assert "Rank 0 (CPU 0" in heard[0].reason and "died while the group was idle" in heard[0].reason
    wait_until(lambda: not psutil.pid_exists(before[1]), 5, "the other rank to be ended")
    wait_until(lambda: not place.exists(), 5, "what it left on disk to be removed")
    assert torch.equal(sample(slot, RUN), expected)
    assert group.state.current.phase == "ready"


@pytest.mark.parametrize("number", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.slow)])
def test_a_call_right_after_a_rank_was_killed_or_stopped_does_not_fail(
    slot: Slot, number: signal.Signals
) -> None:
    expected = sample(slot, RUN)
    before = pids()
    time.sleep(0.3)
    os.kill(before[1], number)
    if number == signal.SIGSTOP:  # a killed process is known at once, one that stops has to come to it
        wait_until(lambda: psutil.Process(before[1]).status() == psutil.STATUS_STOPPED, 5, "it to stop")
    assert torch.equal(sample(slot, RUN), expected)
    assert pids() != before


# ---- silent and stuck ranks


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> float:
    """The host waits for some seconds only, in the place of ten."""
    for name in ("SILENT_SECONDS", "STUCK_SECONDS"):
        monkeypatch.setattr(supervision, name, 4.0)
    return 4.0


def after_some_steps(call: Callable[[], object]) -> tuple[threading.Thread, Callable[..., None]]:
    """A thread that makes a call once three steps are done, and the report that tells it of them."""
    done = threading.Event()

    def wait_and_call() -> None:
        assert done.wait(60)
        call()

    def report(progress: Progress, _: object) -> None:
        if progress.done >= 3:
            done.set()

    return threading.Thread(target=wait_and_call), report


def test_a_stopped_rank_is_named_with_what_it_was_doing_and_the_next_call_works(
    slot: Slot, impatient: float
) -> None:
    expected = sample(slot, RUN)
    request, tensors = sampling(slot, LONG)
    before, when = pids(), []

    def stop() -> None:
        os.kill(before[1], signal.SIGSTOP)
        when.append(time.monotonic())

    thread, report = after_some_steps(stop)
    thread.start()
    with pytest.raises(RankError, match=r"Rank 1 \(CPU 1, pid \d+\) was silent while sampling") as caught:
        slot.call(request, tensors, report=report)
    assert time.monotonic() - when[0] < impatient + 3
    assert (caught.value.rank, caught.value.kind) == (1, "silent")
    text = caught.value.whole
    assert "its process is stopped (SIGSTOP)" in text
    assert "Rank 0 (CPU 0, pid" in text and "GB of host RAM" in text  # the memory of each device
    wait_until(lambda: not any(map(psutil.pid_exists, before)), 2, "the ranks to be reaped")
    assert torch.equal(sample(slot, RUN), expected)


@pytest.mark.slow
def test_a_rank_that_loops_is_named_and_its_stack_is_told(
    folder: Path, impatient: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    GROUPS.close_all()
    with monkeypatch.context() as patch:
        patch.setattr(launch, "WORKER", "tests.support.looping_rank")
        slot = make_slot(folder, layout_of(tensor=2))
        sample(slot, RUN)
        when: list[float] = []

        def loop() -> None:
            (directory() / LOOP).touch()
            when.append(time.monotonic())

        thread, report = after_some_steps(loop)
        thread.start()
        request, tensors = sampling(slot, LONG)
        with pytest.raises(RankError, match=r"Rank 1 \(CPU 1, pid \d+\) was stuck while sampling") as caught:
            slot.call(request, tensors, report=report)
    assert time.monotonic() - when[0] < impatient + 4
    assert (caught.value.rank, caught.value.kind) == (1, "stuck")
    assert "no progress" in str(caught.value) and "the others wait for it" in str(caught.value)
    assert "looping_rank.py" in caught.value.detail and "in block_finished" in caught.value.detail
    sample(slot, RUN)


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["sampling", "starting"])
def test_no_rank_outlives_a_killed_host(folder: Path, moment: str) -> None:
    before = {p.pid for p in psutil.process_iter()}
    host = subprocess.Popen(
        [sys.executable, "-m", "tests.support.host", str(folder), "2"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert host.stdout is not None
        if moment == "sampling":
            facts = json.loads(host.stdout.readline())
        else:
            wait_until(lambda: len(_workers(before)) >= 3, 60, "torchrun and two ranks")
            facts = {}
        host.kill()
        host.wait()
        start = time.monotonic()
        wait_until(lambda: not _workers(before), 5, "torchrun and its ranks to end")
        print(f"gone after {time.monotonic() - start:.2f} s")
        if facts:
            wait_until(
                lambda: not Path(facts["directory"]).exists(), 5, "the private directory to be removed"
            )
    finally:
        host.kill()
        host.wait()
        host.stdout.close()


@pytest.mark.slow
def test_closing_leaves_no_process_and_no_directory(folder: Path) -> None:
    GROUPS.close_all()
    slot = make_slot(folder, layout_of(tensor=2))
    slot.ensure()
    place, processes = directory(), [*pids(), agent()]
    GROUPS.close_all()
    wait_until(lambda: not any(psutil.pid_exists(pid) for pid in processes), 5, "the processes to end")
    assert not place.exists()


@pytest.mark.slow
def test_another_layout_takes_the_devices_over(folder: Path) -> None:
    two = make_slot(folder, layout_of(tensor=2))
    two.ensure()
    four = make_slot(folder, layout_of(tensor=4))
    four.ensure()
    assert not two.loaded
    assert [len(group["ranks"]) for group in GROUPS.snapshot()] == [4]
    GROUPS.close_all()
