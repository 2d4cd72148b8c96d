"""Processes and sockets as a test looks at them; what the tools need too lives in tools/processes.py."""

from __future__ import annotations

from collections.abc import Iterable

import psutil

from tools.processes import MARK, alive, command_line, descendants, kill, marked, wait_gone, wait_until

__all__ = [
    "MARK",
    "alive",
    "command_line",
    "descendants",
    "kill",
    "listening",
    "marked",
    "wait_gone",
    "wait_until",
]


def listening(pids: Iterable[int]) -> list[str]:
    """Where the processes accept internet connections, as "pid address:port"; Unix sockets are not among them."""
    found = []
    for pid in pids:
        try:
            connections = psutil.Process(pid).net_connections(kind="inet")
        except psutil.NoSuchProcess:
            continue
        found += [
            f"{pid} {one.laddr.ip}:{one.laddr.port}"
            for one in connections
            if one.status == psutil.CONN_LISTEN
        ]
    return found
