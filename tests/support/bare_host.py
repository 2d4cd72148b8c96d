"""A host in a process of its own, without a model: starts a group of CPU ranks, and ends as it is told to.

Run as `python -m tests.support.bare_host <ranks>`. Prints a JSON line once the ranks are ready (at once for 0 ranks),
and one after each command on its standard input:
start       starts two ranks                   ping        asks the ranks for an answer
busy        holds the group, as a call that runs for a minute does
exec        becomes another program: itself, with 0 ranks
fork        forks a child that goes on         fork exit   forks a child that ends as programs do
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from typing import Any

import torch

from runtime.devices import cpu_devices
from runtime.group import GROUPS


def start(ranks: int) -> None:
    if ranks:
        GROUPS.group(cpu_devices(ranks)).start()


def tell(**more: Any) -> None:
    line: dict[str, Any] = {"pid": os.getpid(), **more}
    for group in GROUPS.groups():
        snapshot = group.snapshot()
        assert group._session is not None
        line |= {
            "agent": snapshot["agent_pid"],
            "ranks": [rank["pid"] for rank in snapshot["ranks"]],
            "directory": str(group._session.directory),
        }
    print(json.dumps(line), flush=True)


held = threading.Event()


def hold() -> None:
    (group,) = GROUPS.groups()
    with group._lock:
        held.set()
        time.sleep(60)


def fork(*, ends: bool) -> int:
    child = os.fork()
    if child:
        return child
    if not ends:
        time.sleep(60)
        os._exit(0)
    sys.exit(0)  # its exit handlers run


def obey(command: str) -> None:
    if command == "start":
        start(2)
        tell()
    elif command == "ping":
        sent = torch.arange(3, dtype=torch.uint8)
        (group,) = GROUPS.groups()
        tell(answer=group.ping({"x": sent})["x"].tolist())
    elif command == "busy":
        threading.Thread(target=hold, daemon=True).start()
        held.wait()
        tell()
    elif command == "exec":
        os.execv(sys.executable, [sys.executable, "-m", "tests.support.bare_host", "0"])
    elif command == "fork":
        tell(child=fork(ends=False))
    elif command == "fork exit":
        child = fork(ends=True)
        os.waitpid(child, 0)
        tell(child=child)


def main() -> None:
    start(int(sys.argv[1]))
    tell()
    for line in sys.stdin:
        obey(line.strip())


if __name__ == "__main__":
    main()
