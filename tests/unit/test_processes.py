"""The harness must not lose sight of a process, or the tests that say "nothing is left behind" prove nothing."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.support import processes
from tests.support.processes import MARK, alive, descendants, kill, listening, marked, wait_gone, wait_until

SLEEP = "import time; time.sleep(60)"
# Starts a sleeper in a session of its own and ends: the sleeper then belongs to init.
ORPHANING = (
    f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {SLEEP!r}], start_new_session=True)"
)


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-c", SLEEP])
    yield process
    process.kill()
    process.wait()


def test_a_child_is_found_until_it_ends(sleeper: subprocess.Popen[bytes]) -> None:
    (found,) = [one for one in descendants(os.getpid()) if one.pid == sleeper.pid]
    assert alive(found)
    sleeper.kill()  # not reaped yet: a zombie counts as ended
    assert wait_gone([found], 5) == []


def test_what_does_not_end_is_returned(sleeper: subprocess.Popen[bytes]) -> None:
    mine = [one for one in descendants(os.getpid()) if one.pid == sleeper.pid]
    assert wait_gone(mine, 0.1) == mine


def test_an_orphan_is_found_by_its_mark() -> None:
    environment = {**os.environ, MARK: "a-token-of-this-test"}
    subprocess.run([sys.executable, "-c", ORPHANING], env=environment, check=True)
    found = marked("a-token-of-this-test")
    kill(found)
    assert len(found) == 1
    assert wait_gone(found, 5) == []


def test_a_listening_socket_is_seen() -> None:
    program = "import socket, time\ns = socket.socket()\ns.bind(('127.0.0.1', 0))\ns.listen()\ntime.sleep(60)"
    process = subprocess.Popen([sys.executable, "-c", program])
    try:
        wait_until(lambda: listening([process.pid]), 10, "the socket")
        (found,) = listening([process.pid])
        assert found.startswith(f"{process.pid} 127.0.0.1:")
    finally:
        process.kill()
        process.wait()


def test_waiting_says_what_it_waited_for() -> None:
    with pytest.raises(TimeoutError, match="waited 0.1 s for godot"):
        processes.wait_until(lambda: False, 0.1, "godot")
