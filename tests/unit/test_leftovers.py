"""What a dead host left behind is found and removed; what is in doubt, or another host's, stays."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from runtime import leftovers
from runtime.leftovers import Host, Owner, claim, is_left_behind, process_state, this_host
from tests.support.processes import wait_until
from tools import ROOT

HERE = leftovers._machine()
SLEEP = "import sys, time; time.sleep(60)"
CLAIMS = (
    "import sys, time; from pathlib import Path; from runtime import leftovers\n"
    "claimed = leftovers.claim(Path(sys.argv[1])); print(claimed is not None, flush=True); time.sleep(60)"
)


def earlier() -> Host:
    """A process that had this one's pid before it."""
    return Host(os.getpid(), this_host().started - 1)


@pytest.fixture
def private(tmp_path: Path) -> Path:
    """An unclaimed private directory."""
    directory = tmp_path / f"{leftovers.PREFIX}abcd"
    directory.mkdir(mode=0o700)
    return directory


def owned_by(directory: Path, host: Host, machine: str = HERE, locked: bool = False) -> Path:
    (directory / leftovers.OWNER_FILE).write_bytes(msgspec.json.encode(Owner(host, machine, locked)))
    return directory


@pytest.fixture
def start() -> Iterator:
    """Starts processes that end with the test."""
    started: list[subprocess.Popen] = []

    def one(*command: str, **options) -> subprocess.Popen:
        started.append(subprocess.Popen(command, cwd=ROOT, stdin=subprocess.DEVNULL, **options))
        return started[-1]

    yield one
    for process in started:
        process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


# ---- which process lives


def test_this_process_lives_and_one_that_had_its_pid_before_does_not() -> None:
    assert this_host().lives
    assert not earlier().lives


def test_a_process_that_has_ended_does_not_live_even_if_nobody_has_reaped_it(start) -> None:
    child = start("sleep", "60")
    found = process_state(child.pid)
    assert found is not None
    host = Host(child.pid, found.started)
    assert host.lives and found.runs
    child.kill()
    wait_until(lambda: (state := process_state(child.pid)) and state.state == "Z", 5, "the zombie")
    assert not host.lives and not found.runs
    child.wait()
    assert process_state(child.pid) is None and not host.lives


def test_a_process_may_have_any_name(start, tmp_path: Path) -> None:
    strange = tmp_path / ") Z 1 (("
    strange.symlink_to("/bin/sleep")
    child = start(str(strange), "60")
    wait_until(lambda: process_state(child.pid).name == ") Z 1 ((", 5, "the program to start")
    assert process_state(child.pid).parent == os.getpid()
    assert process_state(child.pid).runs


def test_a_mark_says_whose_a_process_is() -> None:
    assert Host.of_mark(this_host().mark) == this_host()


@pytest.mark.parametrize("argument", ["", "--owner=", "--owner=1", "--owner=x:2", "--owner=-1:2", "1:2"])
def test_other_arguments_are_no_mark(argument: str) -> None:
    assert Host.of_mark(argument) is None


def test_descendants_are_found_in_other_sessions_too(start) -> None:
    child = start("sh", "-c", "setsid sleep 60 & sleep 60")
    wait_until(lambda: len(leftovers.descendants(child.pid)) == 2, 5, "two processes below the shell")
    assert set(leftovers.descendants(child.pid)) < set(leftovers.descendants(os.getpid()))
    for pid in leftovers.descendants(child.pid):
        leftovers.end(process_state(pid))


def test_only_the_very_process_is_ended(start) -> None:
    child = start("sleep", "60")
    found = process_state(child.pid)
    leftovers.end(msgspec.structs.replace(found, started=found.started - 1))
    assert child.poll() is None and found.runs
    leftovers.end(found)
    assert child.wait(5) == -signal.SIGKILL
    leftovers.end(found)


# ---- directories


def test_the_directory_of_a_living_host_stays_and_that_of_a_killed_one_is_removed(
    private: Path, start
) -> None:
    """A real host in a process of its own; this one is another host of the same user."""
    host = start(sys.executable, "-c", CLAIMS, str(private), stdout=subprocess.PIPE, text=True)
    assert host.stdout.readline() == "True\n"
    leftovers.remove([private.parent])
    assert private.exists()
    host.kill()
    host.wait()
    assert is_left_behind(private)
    leftovers.remove([private.parent])
    assert not private.exists()


def test_a_host_never_takes_its_own_directory_for_left_behind(private: Path) -> None:
    descriptor = claim(private)
    assert descriptor is not None
    assert not is_left_behind(private)
    os.close(descriptor)
    assert not is_left_behind(private)


def test_a_lock_that_a_child_of_the_host_still_holds_keeps_the_directory(private: Path, start) -> None:
    descriptor = claim(private)
    owned_by(private, earlier(), locked=True)
    child = start("sleep", "60", pass_fds=[descriptor])
    os.close(descriptor)
    assert not is_left_behind(private)
    child.kill()
    child.wait()
    assert is_left_behind(private)


def test_without_locks_the_process_alone_tells(private: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leftovers, "_lock", lambda descriptor: False)
    assert claim(private) is None
    assert not is_left_behind(private)
    assert is_left_behind(owned_by(private, earlier()))


@pytest.mark.parametrize("locked", [False, True])
def test_in_another_container_or_on_another_machine_only_the_lock_tells(private: Path, locked: bool) -> None:
    """Its pids are other processes here: a pid that is not there says nothing."""
    owned_by(private, earlier(), machine="another boot", locked=locked)
    assert is_left_behind(private) == locked


def test_what_is_not_provably_ours_stays(
    private: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bare = tmp_path / f"{leftovers.PREFIX}bare"
    bare.mkdir(mode=0o700)
    junk = tmp_path / f"{leftovers.PREFIX}junk"
    junk.mkdir(mode=0o700)
    (junk / leftovers.OWNER_FILE).write_text('{"host": 1}')
    link = tmp_path / f"{leftovers.PREFIX}link"
    link.symlink_to(owned_by(private, earlier()))
    file = tmp_path / f"{leftovers.PREFIX}file"
    file.touch(mode=0o600)
    open_to_all = tmp_path / f"{leftovers.PREFIX}open"
    open_to_all.mkdir()
    open_to_all.chmod(0o755)
    owned_by(open_to_all, earlier())
    other_name = tmp_path / "comfyui-something"
    other_name.mkdir(mode=0o700)
    owned_by(other_name, earlier())
    with monkeypatch.context() as other_user:
        other_user.setattr(os, "geteuid", lambda: os.getuid() + 1)
        leftovers.remove([tmp_path])
    assert private.exists()
    leftovers.remove([tmp_path, tmp_path, Path("/does/not/exist")])
    assert not private.exists()
    assert sorted(tmp_path.iterdir()) == sorted([bare, junk, link, file, open_to_all, other_name])


# ---- processes


def rank_of(start, directory: str, host: Host) -> subprocess.Popen:
    """A process with the command line of a rank."""
    return start(sys.executable, "-c", SLEEP, "-m", "runtime.worker", directory, host.mark)


def left() -> set[int]:
    return {one.pid for one in leftovers.left_processes()}


def test_ranks_of_a_dead_host_are_ended_also_stopped_ones(start) -> None:
    dead = rank_of(start, f"/tmp/{leftovers.PREFIX}abcd", earlier())
    living = rank_of(start, f"/tmp/{leftovers.PREFIX}efgh", this_host())
    wait_until(lambda: dead.pid in left(), 5, "the rank to be seen")
    os.kill(dead.pid, signal.SIGSTOP)
    assert leftovers.of_group(Path(f"/tmp/{leftovers.PREFIX}abcd"), earlier()) == [dead.pid]
    assert leftovers.of_group(Path(f"/tmp/{leftovers.PREFIX}abcd"), this_host()) == []
    leftovers.remove([])
    assert dead.wait(5) == -signal.SIGKILL
    assert living.poll() is None


def test_processes_that_only_look_alike_stay(start, monkeypatch: pytest.MonkeyPatch) -> None:
    ours = f"/tmp/{leftovers.PREFIX}abcd"
    stranger = rank_of(start, "/tmp/anything", earlier())
    editor = start(sys.executable, "-c", SLEEP, ours)
    unmarked = start(sys.executable, "-c", SLEEP, "-m", "runtime.worker", ours, "--owner=me")
    time.sleep(0.3)
    assert not left() & {stranger.pid, editor.pid, unmarked.pid}
    rank = rank_of(start, ours, earlier())
    wait_until(lambda: rank.pid in left(), 5, "the rank to be seen")
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    assert not left()


def test_a_zombie_agent_is_reaped_only_by_the_program_after_the_one_that_started_it(
    start, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent = start("sh", "-c", f"printf {leftovers.AGENT_NAME} > /proc/$$/comm")
    other = start("sh", "-c", "exit")
    for child in (agent, other):
        wait_until(lambda child=child: process_state(child.pid).ended, 5, "the zombie")
    leftovers.remove([])
    assert process_state(agent.pid) is not None
    monkeypatch.setattr(leftovers, "_LOADED", leftovers._ticks_since_boot() + 1)
    leftovers.remove([])
    assert process_state(agent.pid) is None
    assert process_state(other.pid) is not None


# ---- removing


def test_a_directory_goes_also_while_somebody_writes_into_it(tmp_path: Path) -> None:
    """torchrun does, until it ends: removing file after file would find a new one at the end."""
    place = tmp_path / "comfyui-sharded-x"
    done = threading.Event()

    def write() -> None:
        while not done.is_set():
            with contextlib.suppress(OSError):
                (place / "rendezvous").write_text("x")

    writer = threading.Thread(target=write)
    writer.start()
    try:
        for _ in range(50):
            place.mkdir()
            for number in range(20):
                (place / str(number)).touch()
            leftovers.remove_directory(place)
            assert not list(tmp_path.iterdir())
    finally:
        done.set()
        writer.join()
