"""Which processes belong to a server: its descendants, and those that lost their parent but carry its mark.

Processes are psutil objects, which compare by id and start time: a reused id is never mistaken for an old process.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable

import psutil

MARK = "COMFYUI_SHARDED_HARNESS"


def alive(process: psutil.Process) -> bool:
    """Running or stopped; a zombie has ended, whoever fails to reap it."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def command_line(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
        return ""


def descendants(pid: int) -> list[psutil.Process]:
    """The living descendants of `pid`, without itself; empty where `pid` has ended."""
    try:
        return [child for child in psutil.Process(pid).children(recursive=True) if alive(child)]
    except psutil.NoSuchProcess:
        return []


def marked(token: str) -> list[psutil.Process]:
    """Living processes whose environment or command line carries `token`, this one excepted.

    Catches what left the process tree: a child whose parent ended belongs to init.
    """
    found = []
    for process in psutil.process_iter():
        if process.pid == os.getpid() or not alive(process):
            continue
        try:
            carries = process.environ().get(MARK) == token
        except (psutil.Error, OSError):
            continue
        if carries or token in command_line(process):
            found.append(process)
    return found


def wait_gone(processes: Iterable[psutil.Process], seconds: float) -> list[psutil.Process]:
    """Wait until all have ended; return those that have not."""
    deadline = time.monotonic() + seconds
    left = [process for process in processes if alive(process)]
    while left and time.monotonic() < deadline:
        time.sleep(0.05)
        left = [process for process in left if alive(process)]
    return left


def kill(processes: Iterable[psutil.Process]) -> None:
    """SIGKILL each by its own id."""
    for process in processes:
        try:
            process.kill()
        except psutil.NoSuchProcess:
            continue


def wait_until(condition: Callable[[], object], seconds: float, what: str, interval: float = 0.05) -> object:
    """Poll until `condition` returns something true and return that; TimeoutError names `what` was waited for."""
    deadline = time.monotonic() + seconds
    while True:
        result = condition()
        if result:
            return result
        if time.monotonic() >= deadline:
            raise TimeoutError(f"waited {seconds:g} s for {what}")
        time.sleep(interval)
