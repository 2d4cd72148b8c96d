"""The agent's watch over its host, without torchrun: however the host goes, what the agent started goes with it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from runtime import leftovers
from runtime.leftovers import Host, process_state, this_host
from tests.support.processes import wait_until
from tools import ROOT

# An agent with one rank, which is stopped and in a session of its own: it sees and hears nothing.
CODE = """
import os, signal, subprocess, sys, threading
from pathlib import Path
from runtime import agent, leftovers
rank = subprocess.Popen(["sleep", "60"], start_new_session=True)
os.kill(rank.pid, signal.SIGSTOP)
print(rank.pid, flush=True)
agent._watch(leftovers.Host.of_mark(sys.argv[2]), Path(sys.argv[1]), threading.Event())
"""


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen]:
    """A process that may stand for a host."""
    with subprocess.Popen(["sleep", "60"]) as process:
        yield process
        process.kill()


def agent_of(host: Host, directory: Path, stdin: int) -> tuple[subprocess.Popen, leftovers.ProcessState]:
    """An agent, and its rank once it runs."""
    agent = subprocess.Popen(
        [sys.executable, "-c", CODE, str(directory), host.mark],
        cwd=ROOT,
        stdin=stdin,
        stdout=subprocess.PIPE,
        text=True,
    )
    rank = process_state(int(agent.stdout.readline()))
    agent.stdout.close()
    return agent, rank


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    (tmp_path / "private").mkdir()
    (tmp_path / "private" / "rank-0.log").write_text("lines")
    return tmp_path / "private"


def test_it_goes_when_the_hosts_end_of_the_pipe_closes(directory: Path) -> None:
    agent, rank = agent_of(this_host(), directory, subprocess.PIPE)
    assert rank.runs and directory.exists()
    agent.stdin.close()
    assert agent.wait(5) == 1
    assert not rank.runs and not directory.exists()


def test_it_goes_when_the_host_has_ended_though_a_child_of_it_keeps_the_pipe_open(
    directory: Path, sleeper: subprocess.Popen
) -> None:
    host = Host(sleeper.pid, process_state(sleeper.pid).started)
    read, write = os.pipe()
    agent, rank = agent_of(host, directory, read)
    with pytest.raises(subprocess.TimeoutExpired):
        agent.wait(1.5)
    assert rank.runs
    sleeper.kill()  # and stays a zombie, as under a parent that reaps nobody
    assert agent.wait(5) == 1
    assert not rank.runs and not directory.exists()
    os.close(read)
    os.close(write)


def test_a_successor_of_the_host_knows_it_by_its_name(directory: Path) -> None:
    agent, _ = agent_of(this_host(), directory, subprocess.PIPE)
    agent.stdin.close()
    wait_until(lambda: process_state(agent.pid).ended, 5, "the agent to end")
    assert process_state(agent.pid).name == leftovers.AGENT_NAME
    agent.wait()
