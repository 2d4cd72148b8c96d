"""However a host ends, nothing of its groups is left after five seconds, and nobody else's is touched."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from runtime import environment, leftovers
from tests.support.processes import alive, descendants, kill, wait_until
from tools import ROOT

SECONDS = 5.0


class Host:
    """A host process and what it says of its group."""

    def __init__(self, ranks: int):
        self.before = directories()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.bare_host", str(ranks)],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.family: list[psutil.Process] = []
        self.child: psutil.Process | None = None

    def hear(self) -> dict[str, Any]:
        """The next line it prints. Remembers every process of its group."""
        assert self.process.stdout is not None
        line = json.loads(self.process.stdout.readline())
        self.look()
        return line

    def say(self, command: str) -> dict[str, Any]:
        assert self.process.stdin is not None
        print(command, file=self.process.stdin, flush=True)
        return self.hear()

    def look(self) -> list[psutil.Process]:
        """Its descendants so far, whoever their parent will be."""
        known = set(self.family)
        self.family += [one for one in descendants(self.process.pid) if one not in known]
        return self.family

    def left(self) -> list[str]:
        """What is left of its groups."""
        family = [str(one) for one in self.look() if alive(one) and one != self.child]
        return family + [str(path) for path in directories() - self.before]

    def kill(self) -> None:
        self.look()
        self.process.kill()
        self.process.wait()


def directories() -> set[Path]:
    return {path for parent in environment.runtime_directories() for path in parent.glob("comfyui-sharded-*")}


@pytest.fixture
def host() -> Iterator[Callable[[int], Host]]:
    """Starts hosts; what they leave behind is ended after the test."""
    hosts: list[Host] = []

    def one(ranks: int) -> Host:
        hosts.append(Host(ranks))
        return hosts[-1]

    yield one
    for each in hosts:
        each.kill()
        kill(each.family)
        for stream in (each.process.stdin, each.process.stdout):
            with contextlib.suppress(BrokenPipeError):
                stream.close()


def nothing_is_left(host: Host) -> None:
    wait_until(lambda: not host.left(), SECONDS, "everything of the group to be gone")


def has_an_agent(host: Host) -> bool:
    return any(leftovers.AGENT in one.cmdline() for one in descendants(host.process.pid))


def has_ranks(host: Host) -> bool:
    return sum("--module" not in one.cmdline() for one in host.look()) >= 2


@pytest.mark.parametrize(
    "moment",
    [
        pytest.param(has_an_agent, id="agent", marks=pytest.mark.slow),
        pytest.param(has_ranks, id="ranks", marks=pytest.mark.slow),
        pytest.param(None, id="ready"),
    ],
)
def test_a_killed_host_leaves_nothing(host: Callable[[int], Host], moment: Callable[[Host], bool]) -> None:
    """Also in the seconds in which no rank has dialled yet, and nothing but the agent can notice."""
    one = host(2)
    if moment is None:
        one.hear()
    else:
        wait_until(lambda: moment(one), 60, "the group to start", interval=0.005)
    one.kill()
    nothing_is_left(one)


@pytest.mark.parametrize("who", ["ranks", pytest.param("agent", marks=pytest.mark.slow)])
def test_a_killed_host_leaves_nothing_though_some_are_stopped(host: Callable[[int], Host], who: str) -> None:
    one = host(2)
    said = one.hear()
    for pid in said["ranks"] if who == "ranks" else [said["agent"]]:
        os.kill(pid, signal.SIGSTOP)
    one.kill()
    nothing_is_left(one)


def test_what_cannot_end_itself_is_ended_by_the_next_start_and_others_stay(
    host: Callable[[int], Host],
) -> None:
    first, second = host(2), host(1)
    said, others = first.hear(), second.hear()
    for pid in (said["agent"], *said["ranks"]):
        os.kill(pid, signal.SIGSTOP)
    first.kill()
    third = host(1)
    new = third.hear()
    wait_until(lambda: not any(alive(one) for one in first.family), SECONDS, "the stopped ones to be gone")
    assert not Path(said["directory"]).exists()
    assert second.say("ping")["ranks"] == others["ranks"]
    assert third.say("ping")["ranks"] == new["ranks"]


@pytest.mark.slow
def test_a_host_that_becomes_another_program_leaves_nothing(host: Callable[[int], Host]) -> None:
    """As ComfyUI does when the Manager restarts it: the same process, no exit handler runs."""
    one = host(2)
    before = one.hear()
    after = one.say("exec")
    assert after == {"pid": before["pid"]}
    nothing_is_left(one)
    open_files = [os.readlink(link) for link in Path(f"/proc/{before['pid']}/fd").iterdir()]
    assert not [
        name for name in open_files if name.startswith(("socket:", "/memfd:", "/tmp/comfyui-sharded-"))
    ]
    one.say("start")
    states = [child.status() for child in psutil.Process(before["pid"]).children()]
    assert states and psutil.STATUS_ZOMBIE not in states


def test_a_child_that_outlives_the_host_keeps_nothing(host: Callable[[int], Host]) -> None:
    """It has copies of everything that was open in the host."""
    one = host(2)
    one.hear()
    one.child = psutil.Process(one.say("fork")["child"])
    one.kill()
    nothing_is_left(one)
    assert alive(one.child)


@pytest.mark.slow
def test_a_child_of_the_host_that_ends_does_no_harm(host: Callable[[int], Host]) -> None:
    one = host(2)
    said = one.hear()
    one.say("fork exit")
    assert one.say("ping")["answer"] == [255, 254, 253]
    assert one.say("ping")["ranks"] == said["ranks"]


@pytest.mark.parametrize(
    "busy", [pytest.param(False, id="idle", marks=pytest.mark.slow), pytest.param(True, id="busy")]
)
def test_a_host_that_ends_by_itself_leaves_nothing(host: Callable[[int], Host], busy: bool) -> None:
    """Also while a call runs, for whose end it must not wait: Ctrl-C in the middle of a video."""
    one = host(2)
    one.hear()
    if busy:
        one.say("busy")
    one.process.stdin.close()
    assert one.process.wait(SECONDS) == 0
    assert not one.left()
